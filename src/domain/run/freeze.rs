//! Effects become intents: rendered once, with their bytes and their keys frozen.

use std::cell::OnceCell;

use bytes::Bytes;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use http::uri::Uri;
use http::{HeaderName, Method};
use serde_json::{Map, Value};

use super::progress::Progress;
use super::render::{RENDERED_BYTES_MAX, Renderer};
use super::subject::Subject;
use super::{Definition, RunId};
use crate::domain::derived_uuid;
use crate::domain::intent::{Destination, How, NewIntent, Sending};
use crate::domain::scope::RecordKey;
use crate::domain::workflow::{Effect, GATEWAY_HEADERS, HttpSend, Payload, Send, Target, Text};

/// What the intents of one step may weigh together, in bytes.
pub const STEP_BYTES_MAX: usize = 64 * 1024 * 1024;

/// The longest path, subject or value of a header that a template may render to, in bytes.
pub const TEXT_BYTES_MAX: usize = 8 * 1024;

const JSON: &str = "application/json";

/// What effects are rendered over.
pub(super) struct Freezer<'a> {
    pub run_id: RunId,
    pub record: &'a RecordKey,
    pub definition: &'a Definition,
    pub progress: &'a Progress,
    subject: Subject,
    renderer: OnceCell<Renderer>,
}

/// What is sent.
struct Message {
    body: Bytes,
    content_type: Option<String>,
    content_encoding: Option<String>,
}

impl<'a> Freezer<'a> {
    /// # Errors
    /// When the run's subject can't be read.
    pub fn new(
        run_id: RunId,
        record: &'a RecordKey,
        definition: &'a Definition,
        progress: &'a Progress,
        subject: &[u8],
    ) -> Result<Self, String> {
        let subject = serde_json::from_slice(subject)
            .map_err(|_| "what the run is about can't be read".to_owned())?;
        Ok(Self {
            run_id,
            record,
            definition,
            progress,
            subject,
            renderer: OnceCell::new(),
        })
    }

    /// The intents of a step, from this place on; the first is armed.
    ///
    /// # Errors
    /// Why one of them can't be made; then none is.
    pub fn step(
        &self,
        step: &str,
        effects: &[Effect],
        first: i64,
    ) -> Result<Vec<NewIntent>, String> {
        let mut intents = Vec::with_capacity(effects.len());
        let mut bytes = 0;
        for (seq, effect) in (first..).zip(effects) {
            let intent = self.intent(step, effect, seq, seq == first);
            let intent = intent
                .map_err(|why| format!("step `{step}`, effect {}: {why}", seq - first + 1))?;
            bytes += weight(&intent);
            if bytes > STEP_BYTES_MAX {
                return Err(format!(
                    "step `{step}` sends more than {STEP_BYTES_MAX} bytes"
                ));
            }
            intents.push(intent);
        }
        Ok(intents)
    }

    fn intent(
        &self,
        step: &str,
        effect: &Effect,
        seq: i64,
        armed: bool,
    ) -> Result<NewIntent, String> {
        let message = self.message(&effect.payload)?;
        let (destination, how) = match &effect.send {
            Send::Http(http) => {
                let lane = lane(&http.to)?;
                (lane, How::Http(self.http(http, &message)?))
            }
            Send::Publish {
                destination,
                subject,
            } => {
                let subject = self
                    .text(subject)
                    .map_err(|why| format!("the subject: {why}"))?;
                check_subject(&subject)?;
                let content_type = message.content_type;
                (
                    Destination(destination.clone()),
                    How::Publish {
                        subject,
                        content_type,
                    },
                )
            }
            Send::Task { queue } => {
                let (step, content_type) = (step.to_owned(), message.content_type);
                (Destination::task(queue), How::Task { step, content_type })
            }
        };
        Ok(NewIntent {
            id: self.run_id.intent(seq),
            seq,
            step: step.to_owned(),
            destination,
            idempotency_key: self.definition.key(seq),
            sending: Sending {
                how,
                retry: effect.retry,
                timeout_ms: effect.timeout_ms,
            },
            body: message.body,
            armed,
        })
    }

    fn message(&self, payload: &Payload) -> Result<Message, String> {
        let mut message = Message {
            body: Bytes::new(),
            content_type: None,
            content_encoding: None,
        };
        match payload {
            Payload::Empty => {}
            Payload::Json(value) => {
                message.body = super::json(value);
                message.content_type = Some(JSON.to_owned());
            }
            Payload::Template {
                template,
                content_type,
            } => {
                let body = self
                    .render(template, RENDERED_BYTES_MAX)
                    .map_err(|why| format!("the payload: {why}"))?;
                message.body = body.into();
                message.content_type = Some(content_type.clone());
            }
            Payload::Request => {
                let request = self.subject.request.as_ref();
                let request =
                    request.ok_or("the payload: this decision was told without a request")?;
                message.body = request.body.bytes();
                message.content_type.clone_from(&request.content_type);
            }
            Payload::Decision => {
                let decision = self.subject.decision.as_ref();
                let with_body =
                    decision.and_then(|decision| Some((decision, decision.body.as_ref()?)));
                if let Some((decision, body)) = with_body {
                    let header =
                        |name: HeaderName| decision.header(name.as_str()).map(str::to_owned);
                    message.body = body.bytes();
                    message.content_type = header(CONTENT_TYPE);
                    message.content_encoding = header(CONTENT_ENCODING);
                }
            }
        }
        Ok(message)
    }

    fn http(&self, http: &HttpSend, message: &Message) -> Result<HttpSend, String> {
        // Plain texts were checked when they were written, or are an accepted request's own.
        let path = http.path.as_ref().map(|text| -> Result<_, String> {
            let path = self.text(text).map_err(|why| format!("the path: {why}"))?;
            if text.is_template() {
                check_path(&path)?;
            }
            Ok(Text::Plain(path))
        });
        let mut headers = Vec::with_capacity(http.headers.len() + 2);
        for (name, text) in &http.headers {
            let value = self
                .text(text)
                .map_err(|why| format!("header `{name}`: {why}"))?;
            if text.is_template() {
                check_header_value(name, &value)?;
            }
            headers.push((name.clone(), Text::Plain(value)));
        }
        let own = [
            (CONTENT_TYPE, &message.content_type),
            (CONTENT_ENCODING, &message.content_encoding),
        ];
        for (name, value) in own {
            let given = headers
                .iter()
                .any(|(own, _)| own.eq_ignore_ascii_case(name.as_str()));
            if let Some(value) = value.as_ref().filter(|_| !given) {
                check_header_value(name.as_str(), value)?;
                headers.push((name.as_str().to_owned(), Text::Plain(value.clone())));
            }
        }
        Ok(HttpSend {
            path: path.transpose()?,
            headers,
            ..http.clone()
        })
    }

    fn text(&self, text: &Text) -> Result<String, String> {
        match text {
            Text::Plain(text) => Ok(text.clone()),
            Text::Template(template) => self.render(template, TEXT_BYTES_MAX),
        }
    }

    fn render(&self, template: &str, bytes_max: usize) -> Result<String, String> {
        let renderer = self.renderer.get_or_init(|| Renderer::new(&self.context()));
        renderer.render(template, bytes_max)
    }

    fn context(&self) -> Map<String, Value> {
        let mut context = self.subject.context();
        let own = [
            ("steps", Value::Object(self.progress.results.clone())),
            ("signals", Value::Object(self.progress.heard.clone())),
            ("tenant", Value::from(self.record.tenant.as_str())),
            ("pool", Value::from(self.record.pool.as_str())),
            ("key", Value::from(self.record.key.as_str())),
            ("run_id", Value::from(self.run_id.to_string())),
        ];
        context.extend(own.map(|(name, value)| (name.to_owned(), value)));
        context
    }
}

impl Definition {
    /// The key of the intent at this place: always the same, and of no other.
    fn key(&self, seq: i64) -> String {
        if let Some(key) = self.first_key.as_ref().filter(|_| seq == 1) {
            return key.clone();
        }
        let mut hasher = blake3::Hasher::new_derive_key("oncegate 2026 effect key");
        hasher.update(self.key_seed.as_bytes());
        hasher.update(&seq.to_le_bytes());
        derived_uuid(&hasher).to_string()
    }
}

/// How many bytes of an intent its effect may have chosen.
fn weight(intent: &NewIntent) -> usize {
    let rendered = match &intent.sending.how {
        How::Http(http) => {
            let values = http.headers.iter().map(|(_, value)| value);
            let texts = http.path.iter().chain(values);
            texts.map(|text| text.as_str().len()).sum()
        }
        How::Publish { subject, .. } => subject.len(),
        How::Task { .. } => 0,
    };
    intent.body.len() + rendered
}

fn lane(to: &Target) -> Result<Destination, String> {
    match to {
        Target::Destination(id) => Ok(Destination(id.clone())),
        Target::Pool(id) => Ok(Destination::pool(id)),
        Target::Url(url) => origin(url).map(|origin| Destination(format!("url:{origin}"))),
    }
}

/// `scheme://host:port` of an absolute URL that an effect may name.
///
/// # Errors
/// A sentence about what is wrong with it.
pub(in crate::domain) fn origin(url: &str) -> Result<String, String> {
    let wrong = || {
        "write an absolute URL such as \"https://example.com/hook\", without a user and without \"#\"".to_owned()
    };
    let uri: Uri = url.parse().map_err(|_| wrong())?;
    let (Some(scheme), Some(authority)) = (uri.scheme_str(), uri.authority()) else {
        return Err(wrong());
    };
    let default_port = match scheme {
        "http" => 80,
        "https" => 443,
        _ => return Err(wrong()),
    };
    if authority.host().is_empty() || authority.as_str().contains('@') || url.contains('#') {
        return Err(wrong());
    }
    let host = authority.host().to_ascii_lowercase();
    let port = authority.port_u16().unwrap_or(default_port);
    Ok(format!("{scheme}://{host}:{port}"))
}

/// # Errors
/// A sentence about what is wrong with it; it repeats nothing of it.
pub(crate) fn check_path(path: &str) -> Result<(), String> {
    let one_slash = path.starts_with('/') && !path.starts_with("//");
    if one_slash
        && path
            .bytes()
            .all(|byte| matches!(byte, b'!'..=b'~') && byte != b'#')
    {
        return Ok(());
    }
    Err("the path must begin with one \"/\" and hold visible ASCII without \"#\" only; pass values through the filter `urlencode`".to_owned())
}

/// # Errors
/// A sentence about what is wrong with it; it repeats nothing of it.
pub(in crate::domain) fn check_header_value(name: &str, value: &str) -> Result<(), String> {
    let fits = |character: char| {
        character == '\t' || (!character.is_control() && u32::from(character) <= 0xff)
    };
    if value.chars().all(fits) {
        return Ok(());
    }
    Err(format!(
        "the value of header `{name}` must hold no control characters and only characters of ISO 8859-1"
    ))
}

/// # Errors
/// A sentence about what is wrong with it; it repeats nothing of it.
pub(crate) fn check_subject(subject: &str) -> Result<(), String> {
    let plain = |token: &str| {
        !token.is_empty()
            && token.bytes().all(|byte| matches!(byte, b'!'..=b'~'))
            && !token.contains(['*', '>'])
    };
    if subject.len() <= 255 && subject.split('.').all(plain) {
        return Ok(());
    }
    Err("the subject must be at most 255 bytes of visible ASCII: tokens with dots between them, without `*` and `>`".to_owned())
}

/// Headers that are made when a request is sent, and that no effect may set.
pub(in crate::domain) fn is_reserved_header(name: &HeaderName) -> bool {
    let name = name.as_str();
    GATEWAY_HEADERS.contains(&name)
        || matches!(name, "trailer" | "proxy-connection")
        || name.starts_with("webhook-")
}

/// Whether an effect may use this method.
pub(crate) fn is_method(method: &str) -> bool {
    let is_lower = method.bytes().any(|byte| byte.is_ascii_lowercase());
    let parsed = Method::from_bytes(method.as_bytes());
    let fits = |method| method != Method::CONNECT && method != Method::TRACE;
    !is_lower && parsed.is_ok_and(fits)
}
