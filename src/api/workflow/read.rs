//! One effect, read.

use axum::http::{HeaderName, Uri};
use serde_json::Value;

use super::fields::{Fields, checked_name, unknown};
use super::{Catalog, Times};
use crate::domain::message::{CREDENTIAL_HEADERS, tells_origin};
use crate::domain::run::freeze;
use crate::domain::scope::PoolId;
use crate::domain::workflow::{
    ANSWER_BYTES_MAX, Effect, FAULTS_MAX, GATEWAY_HEADERS, HttpSend, Payload, Retry, Send, Success,
    TIMEOUT_MAX, Target, Text,
};

/// The keys that say where an effect goes.
const KINDS: [&str; 5] = ["http", "pool", "url", "publish", "task"];
/// The most header lines of an effect.
const HEADERS_MAX: usize = 100;

impl Catalog {
    /// An effect that is all of its object.
    pub(super) fn effect(&self, effect: Value, at: &str) -> Result<Effect, String> {
        let mut fields = Fields::new(effect, at)?;
        let kind = fields.one_of(&KINDS)?;
        let effect = self.effect_of(&mut fields, kind)?;
        fields.finish()?;
        Ok(effect)
    }

    /// An effect of this kind.
    pub(super) fn effect_of(&self, fields: &mut Fields, kind: &str) -> Result<Effect, String> {
        let (send, times) = match kind {
            "publish" => self.publish(fields)?,
            "task" => {
                let queue = fields.required("task")?;
                checked_name(&fields.place("task"), &queue)?;
                (Send::Task { queue }, Times::DEFAULT)
            }
            kind => self.http(fields, kind)?,
        };
        let payload = payload(fields)?;
        let timeout = fields.duration("timeout", TIMEOUT_MAX)?;
        let retry = match fields.take("retry") {
            None | Some(Value::Null) => times.retry,
            Some(retry) => self::retry(retry, &fields.place("retry"), times.retry)?,
        };
        Ok(Effect {
            send,
            payload,
            retry,
            timeout_ms: timeout.unwrap_or(times.timeout_ms),
        })
    }

    fn publish(&self, fields: &mut Fields) -> Result<(Send, Times), String> {
        let (destination, times) = self.destination(fields, "publish")?;
        let subject = Text::parse(fields.required("subject")?);
        if matches!(&subject, Text::Plain(plain) if freeze::check_subject(plain).is_err()) {
            return Err(fields.wrong("subject", "a subject such as orders.created"));
        }
        let send = Send::Publish {
            destination,
            subject,
        };
        Ok((send, times))
    }

    fn http(&self, fields: &mut Fields, kind: &str) -> Result<(Send, Times), String> {
        let (to, times) = match kind {
            "http" => {
                let (id, times) = self.destination(fields, "http")?;
                (Target::Destination(id), times)
            }
            "pool" => (self.pool(fields)?, Times::DEFAULT),
            _ => (self.url(fields)?, Times::DEFAULT),
        };
        let method = fields.text("method")?.unwrap_or_else(|| "POST".to_owned());
        if !freeze::is_method(&method) {
            return Err(fields.wrong("method", "a method such as POST, PUT or DELETE"));
        }
        let path = fields.text("path")?.map(Text::parse);
        // A destination's URL and a plain one say where; a pool does not.
        if path.is_none() && kind == "pool" {
            return Err(fields.wrong("path", "the path at the pool, such as /v1/receipts"));
        }
        if matches!(&path, Some(Text::Plain(path)) if freeze::check_path(path).is_err()) {
            return Err(fields.wrong("path", "a path that begins with one /"));
        }
        let headers = headers(fields)?;
        if matches!(to, Target::Pool(_)) {
            self.check_pool_headers(fields, &headers)?;
        }
        let http = HttpSend {
            to,
            method,
            path,
            headers,
            success: Success::Ok,
            answer_bytes_max: ANSWER_BYTES_MAX,
        };
        Ok((Send::Http(http), times))
    }

    /// The destination that an effect names: it must be there and speak what is wanted.
    fn destination(
        &self,
        fields: &mut Fields,
        key: &'static str,
    ) -> Result<(String, Times), String> {
        let id = fields.required(key)?;
        let Some(known) = self.destinations.get(&id) else {
            let wanted = self.destinations.iter();
            let wanted = wanted.filter(|(_, known)| known.is_http == (key == "http"));
            let ids = wanted.map(|(id, _)| id.as_str());
            return Err(unknown(&fields.place(key), "destination", &id, ids));
        };
        match (known.is_http, key) {
            (true, "http") | (false, "publish") => Ok((id, known.times)),
            (true, _) => Err(fields.wrong(key, "`http`: this destination is an HTTP server")),
            (false, _) => Err(fields.wrong(key, "`publish`: this destination is NATS")),
        }
    }

    /// A pool trusts these as the gateway's own: nobody else may write them.
    fn check_pool_headers(
        &self,
        fields: &Fields,
        headers: &[(String, Text)],
    ) -> Result<(), String> {
        let trusted = headers.iter().find(|(name, _)| {
            // Services behind CGI, WSGI and the like can't tell `_` from `-`.
            let is_tenants =
                |own: &HeaderName| own.as_str().replace('_', "-") == name.replace('_', "-");
            tells_origin(name) || self.tenant_header.as_ref().is_some_and(is_tenants)
        });
        match trusted {
            None => Ok(()),
            Some((name, _)) => Err(format!(
                "{}: {name} tells a pool whose a request is or where it came from, and only the \
                 gateway may; leave it out",
                fields.place("headers")
            )),
        }
    }

    fn pool(&self, fields: &mut Fields) -> Result<Target, String> {
        let id = fields.required("pool")?;
        if PoolId::new(&id).is_err() || !self.pools.contains(&id) {
            let ids = self.pools.iter().map(String::as_str);
            return Err(unknown(&fields.place("pool"), "pool", &id, ids));
        }
        Ok(Target::Pool(id))
    }

    fn url(&self, fields: &mut Fields) -> Result<Target, String> {
        let url = fields.required("url")?;
        if !self.allow_urls {
            let place = fields.place("url");
            return Err(format!(
                "{place}: this gateway takes no URLs in effects (outbox.allow_urls); name a \
                 configured destination in `http`"
            ));
        }
        let parsed: Option<Uri> = url.parse().ok();
        let sound = parsed.filter(|uri| {
            let authority = uri.authority().map_or("", |authority| authority.as_str());
            let host = uri.host().unwrap_or_default();
            let port = authority.len() == host.len() || uri.port_u16().is_some_and(|port| port > 0);
            matches!(uri.scheme_str(), Some("http" | "https"))
                && !host.is_empty()
                && !authority.contains('@')
                && !url.contains('#')
                && port
        });
        match sound {
            Some(uri) => Ok(Target::Url(uri.to_string())),
            None => Err(fields.wrong("url", "https://HOST/PATH or http://HOST/PATH")),
        }
    }
}

/// An object of names and values, or a list of pairs, in which a name may stand more than once.
fn headers(fields: &mut Fields) -> Result<Vec<(String, Text)>, String> {
    let at = fields.place("headers");
    let Some(lines) = fields.take("headers") else {
        return Ok(Vec::new());
    };
    let lines = header_lines(lines, &at, HEADERS_MAX)?;
    lines
        .into_iter()
        .map(|(name, value)| header(&at, &name, value))
        .collect()
}

fn header(at: &str, name: &str, value: String) -> Result<(String, Text), String> {
    let name = HeaderName::from_bytes(name.as_bytes())
        .map_err(|_| format!("{at}: a name is no header name"))?;
    if GATEWAY_HEADERS.contains(&name.as_str()) {
        return Err(format!("{at}: {name} is written by the gateway itself"));
    }
    if CREDENTIAL_HEADERS.contains(&name.as_str()) {
        return Err(format!(
            "{at}: {name} would be stored with every run; put it into the headers of a configured \
             destination"
        ));
    }
    let value = Text::parse(value);
    if matches!(&value, Text::Plain(value) if !is_header_value(value)) {
        return Err(format!("{at}: the value of {name} can't stand in a header"));
    }
    Ok((name.as_str().to_owned(), value))
}

/// Each character is one byte of the value (ISO 8859-1).
fn is_header_value(value: &str) -> bool {
    value
        .chars()
        .all(|c| matches!(c, '\t' | ' '..='~' | '\u{80}'..='\u{ff}'))
}

/// Header lines in either form.
pub(in crate::api) fn header_lines(
    lines: Value,
    at: &str,
    most: usize,
) -> Result<Vec<(String, String)>, String> {
    let wrong = || {
        format!("{at}: write an object of texts, or a list of [name, value]; at most {most} lines")
    };
    let line = |name: Value, value: Value| match (name, value) {
        (Value::String(name), Value::String(value)) => Ok((name, value)),
        _ => Err(wrong()),
    };
    let lines: Vec<_> = match lines {
        Value::Null => Vec::new(),
        Value::Object(lines) => lines
            .into_iter()
            .map(|(name, value)| line(Value::String(name), value))
            .collect::<Result<_, _>>()?,
        Value::Array(lines) => lines
            .into_iter()
            .map(|pair| match pair {
                Value::Array(pair) => {
                    let [name, value] = <[Value; 2]>::try_from(pair).map_err(|_| wrong())?;
                    line(name, value)
                }
                _ => Err(wrong()),
            })
            .collect::<Result<_, _>>()?,
        _ => return Err(wrong()),
    };
    if lines.len() > most {
        return Err(wrong());
    }
    Ok(lines)
}

fn payload(fields: &mut Fields) -> Result<Payload, String> {
    let (json, template) = (fields.take("payload"), fields.text("template")?);
    let (body, content_type) = (fields.text("body")?, fields.text("content_type")?);
    let at = &fields.at;
    if content_type.is_some() && template.is_none() {
        return Err(format!("{at}.content_type: it belongs to `template`"));
    }
    match (json, template, body.as_deref()) {
        (Some(json), None, None) => Ok(Payload::Json(json)),
        (None, Some(template), None) => {
            let content_type = content_type.unwrap_or_else(|| "application/json".to_owned());
            if !is_header_value(&content_type) || !content_type.contains('/') {
                return Err(fields.wrong("content_type", "one such as application/json"));
            }
            Ok(Payload::Template {
                template,
                content_type,
            })
        }
        (None, None, None | Some("decision")) => Ok(Payload::Decision),
        (None, None, Some("request")) => Ok(Payload::Request),
        (None, None, Some("none")) => Ok(Payload::Empty),
        (None, None, Some(_)) => Err(fields.wrong(
            "body",
            "decision, request or none, or use `payload` or `template`",
        )),
        _ => Err(format!(
            "{at}: write only one of `payload`, `template` and `body`"
        )),
    }
}

fn retry(retry: Value, at: &str, inherited: Retry) -> Result<Retry, String> {
    let mut fields = Fields::new(retry, at)?;
    let most = Retry::HORIZON_MAX;
    let first_ms = fields.duration("first", most)?;
    let max_ms = fields.duration("max", most)?;
    let horizon_ms = fields.duration("horizon", most)?;
    let faults_max = match fields.take("faults") {
        None | Some(Value::Null) => inherited.faults_max,
        Some(faults) => {
            let faults = faults
                .as_u64()
                .and_then(|faults| u32::try_from(faults).ok());
            let faults = faults.filter(|faults| (1..=FAULTS_MAX).contains(faults));
            faults.ok_or_else(|| fields.wrong("faults", "a number from 1 to 1000"))?
        }
    };
    let first_ms = first_ms.unwrap_or(inherited.first_ms);
    // Who asks for a longer first pause than the inherited longest means it.
    let max_ms = match max_ms {
        Some(max_ms) if max_ms < first_ms => {
            return Err(fields.wrong("max", "a duration that is not shorter than `first`"));
        }
        Some(max_ms) => max_ms,
        None => inherited.max_ms.max(first_ms),
    };
    fields.finish()?;
    Ok(Retry {
        first_ms,
        max_ms,
        horizon_ms: horizon_ms.unwrap_or(inherited.horizon_ms),
        faults_max,
    })
}
