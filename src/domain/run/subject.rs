//! What a run is about: the request, the decision and what the caller gave, as they are kept with
//! it. What no template and no payload of the workflow can ask for is not kept.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::begin::{Beginning, RequestSeen};
use super::progress::parsed;
use crate::domain::message::Recorded;
use crate::domain::workflow::{Payload, Workflow};

/// What a run is about.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Subject {
    pub request: Option<Request>,
    pub decision: Option<Decision>,
    pub input: Value,
}

/// The request that was decided.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Request {
    method: String,
    path: String,
    query: Option<String>,
    pub content_type: Option<String>,
    pub body: Blob,
}

/// The answer that was decided.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Decision {
    status: u16,
    /// Names in lower case; each character of a value is one byte of it.
    headers: Vec<(String, String)>,
    /// `None`: it was not kept.
    pub body: Option<Blob>,
}

/// Bytes within JSON.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Blob {
    Text(String),
    Base64(String),
}

impl Blob {
    fn new(bytes: &[u8]) -> Self {
        match std::str::from_utf8(bytes) {
            Ok(text) => Self::Text(text.to_owned()),
            Err(_) => Self::Base64(STANDARD.encode(bytes)),
        }
    }

    pub fn bytes(&self) -> Bytes {
        match self {
            Self::Text(text) => Bytes::copy_from_slice(text.as_bytes()),
            Self::Base64(text) => STANDARD.decode(text).unwrap_or_default().into(),
        }
    }
}

impl Subject {
    pub fn of(beginning: &Beginning<'_>) -> Self {
        let wanted = Wanted::by(beginning.workflow);
        let request = beginning.request.as_ref().filter(|_| wanted.request);
        let decision = beginning.decision.filter(|_| wanted.decision);
        Self {
            request: request.map(Request::new),
            decision: decision.map(Decision::new),
            input: beginning.input.clone(),
        }
    }

    /// What templates see as `decision`, `request` and `input`.
    pub fn context(&self) -> Map<String, Value> {
        let mut context = Map::new();
        context.insert("input".into(), self.input.clone());
        if let Some(request) = &self.request {
            let value = json!({
                "method": request.method,
                "path": request.path,
                "query": request.query,
                "body": parsed(&request.body.bytes()),
            });
            context.insert("request".into(), value);
        }
        if let Some(decision) = &self.decision {
            context.insert("decision".into(), decision.context());
        }
        context
    }
}

impl Request {
    fn new(seen: &RequestSeen) -> Self {
        Self {
            method: seen.method.clone(),
            path: seen.path.clone(),
            query: seen.query.clone(),
            content_type: seen.content_type.clone(),
            body: Blob::new(&seen.body),
        }
    }
}

impl Decision {
    fn new(recorded: &Recorded) -> Self {
        let latin_1 = |value: &[u8]| value.iter().copied().map(char::from).collect();
        let lines = recorded.headers.lines();
        Self {
            status: recorded.status,
            headers: lines
                .map(|(name, value)| (name.as_str().to_owned(), latin_1(value.as_bytes())))
                .collect(),
            body: recorded.body.as_deref().map(Blob::new),
        }
    }

    /// The first header of this name, in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(own, _)| own == name);
        found.map(|(_, value)| &**value)
    }

    /// A coded body is not what its content type says, so that templates don't see it.
    fn context(&self) -> Value {
        let mut headers = Map::new();
        for (name, value) in &self.headers {
            // RFC 9110 section 5.3: lines of one name mean the same as one line with commas.
            let joined = match headers.get(name).and_then(Value::as_str) {
                Some(before) => format!("{before}, {value}"),
                None => value.clone(),
            };
            headers.insert(name.clone(), Value::String(joined));
        }
        let plain = self.header("content-encoding").is_none();
        let body = self.body.as_ref().filter(|_| plain);
        let body = body.map_or(Value::Null, |body| parsed(&body.bytes()));
        json!({ "status": self.status, "headers": headers, "body": body })
    }
}

/// What a workflow may ask for.
struct Wanted {
    request: bool,
    decision: bool,
}

impl Wanted {
    fn by(workflow: &Workflow) -> Self {
        let sends = |payload: &Payload| workflow.effects().any(|effect| effect.payload == *payload);
        Self {
            request: sends(&Payload::Request) || workflow.mentions("request"),
            decision: sends(&Payload::Decision) || workflow.mentions("decision"),
        }
    }
}
