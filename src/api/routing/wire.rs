//! What goes over the wire about claims: JSON that is told, JSON that is taken.

use std::time::Duration;

use axum::http::HeaderValue;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use uuid::Uuid;

use crate::api::records::resolution::{ANSWER_HEADERS_MAX, Answer};
use crate::api::request::{given_uuid, present};
use crate::api::workflow::header_lines;
use crate::config::routing::{LEASE_MAX, LEASE_MIN};
use crate::domain::message::Recorded;
use crate::domain::policy::{Duplicates, OnUnknown};
use crate::domain::record::{Committed, Terms};
use crate::routing::callers::{Held, Reason};
use crate::routing::replay::Decided;

/// The lease of a claim that asks for none.
pub const LEASE: Duration = Duration::from_secs(5);
/// How long a decision is replayed if its claim doesn't say.
pub const VALID_FOR: Duration = Duration::from_hours(24);
/// The longest times that a claim may ask for.
pub const TIMES_MAX: Duration = Duration::from_hours(10 * 365 * 24);
/// How long a duplicate is parked if it doesn't say, and at most: a call ends in time.
pub const WAIT_MAX: Duration = Duration::from_secs(25);
/// The longest fingerprint, in bytes.
pub const FINGERPRINT_BYTES_MAX: usize = 256;

/// Which record, and whose.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReserveIn {
    #[serde(default, deserialize_with = "present")]
    pub tenant: Option<String>,
    pub pool: String,
    pub key: String,
    #[serde(deserialize_with = "given_uuid")]
    pub request_id: Uuid,
    #[serde(default, deserialize_with = "present")]
    fingerprint: Option<String>,
    #[serde(default, deserialize_with = "present")]
    lease: Option<String>,
    #[serde(default, deserialize_with = "present")]
    valid_for: Option<String>,
    #[serde(default, deserialize_with = "present")]
    tombstone: Option<String>,
    #[serde(default, deserialize_with = "present")]
    on_unknown: Option<OnUnknownIn>,
    #[serde(default, deserialize_with = "present")]
    duplicates: Option<DuplicatesIn>,
    #[serde(default, deserialize_with = "present")]
    wait: Option<String>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum OnUnknownIn {
    Hold,
    Redrive,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum DuplicatesIn {
    Wait,
    Reject,
    Follow,
}

/// What a reserve asks for besides the record.
#[derive(Debug)]
pub struct Asked {
    pub fingerprint: Option<String>,
    pub terms: Terms,
    pub duplicates: Duplicates,
    pub wait: Duration,
}

impl ReserveIn {
    /// Its terms.
    pub fn asked(&self) -> Result<Asked, String> {
        let fingerprint = self.fingerprint.clone();
        if fingerprint
            .as_ref()
            .is_some_and(|text| text.len() > FINGERPRINT_BYTES_MAX)
        {
            return Err(format!(
                "fingerprint: at most {FINGERPRINT_BYTES_MAX} bytes"
            ));
        }
        let lease = lease(self.lease.as_deref())?.unwrap_or(LEASE);
        let time =
            |name, text: &Option<String>, least| duration(name, text.as_deref(), least, TIMES_MAX);
        let valid_for = time("valid_for", &self.valid_for, Duration::from_millis(1))?;
        let tombstone_for = time("tombstone", &self.tombstone, Duration::ZERO)?;
        let wait = duration("wait", self.wait.as_deref(), Duration::ZERO, WAIT_MAX)?;
        Ok(Asked {
            fingerprint,
            terms: Terms {
                lease,
                valid_for: valid_for.unwrap_or(VALID_FOR),
                tombstone_for: tombstone_for.unwrap_or_default(),
                on_unknown: match self.on_unknown {
                    None | Some(OnUnknownIn::Hold) => OnUnknown::Hold,
                    Some(OnUnknownIn::Redrive) => OnUnknown::Redrive,
                },
            },
            duplicates: match self.duplicates {
                None | Some(DuplicatesIn::Wait) => Duplicates::Wait,
                Some(DuplicatesIn::Reject) => Duplicates::Reject,
                Some(DuplicatesIn::Follow) => Duplicates::Follow,
            },
            wait: wait.unwrap_or(WAIT_MAX),
        })
    }
}

/// The body of a heartbeat.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeartbeatIn {
    #[serde(default, deserialize_with = "present")]
    pub tenant: Option<String>,
    pub pool: String,
    pub key: String,
    #[serde(deserialize_with = "given_uuid")]
    pub attempt_token: Uuid,
    #[serde(default, deserialize_with = "present")]
    lease: Option<String>,
}

impl HeartbeatIn {
    /// The lease that it asks for.
    pub fn lease(&self) -> Result<Option<Duration>, String> {
        lease(self.lease.as_deref())
    }
}

/// The body of a release.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReleaseIn {
    #[serde(default, deserialize_with = "present")]
    pub tenant: Option<String>,
    pub pool: String,
    pub key: String,
    #[serde(deserialize_with = "given_uuid")]
    pub attempt_token: Uuid,
    outcome: OutcomeIn,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum OutcomeIn {
    NotSent,
    Answered,
    Unknown,
}

impl ReleaseIn {
    /// Why.
    #[must_use]
    pub fn reason(&self) -> Reason {
        match self.outcome {
            OutcomeIn::NotSent => Reason::NotSent,
            OutcomeIn::Answered => Reason::Answered,
            OutcomeIn::Unknown => Reason::Unknown,
        }
    }
}

/// The body of a completion.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CompleteIn {
    #[serde(default, deserialize_with = "present")]
    pub tenant: Option<String>,
    pub pool: String,
    pub key: String,
    #[serde(deserialize_with = "given_uuid")]
    pub attempt_token: Uuid,
    pub decision: DecisionIn,
    pub effects: Option<Value>,
    pub run: Option<Value>,
    pub input: Option<Value>,
}

/// An answer to keep.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DecisionIn {
    status: u16,
    #[serde(default)]
    headers: Value,
    body: Option<String>,
    body_base64: Option<String>,
    #[serde(default, deserialize_with = "present")]
    json: Option<Value>,
}

impl DecisionIn {
    /// The answer that it says.
    pub fn recorded(self) -> Result<Recorded, String> {
        let mut headers = header_lines(self.headers, "decision.headers", ANSWER_HEADERS_MAX)?;
        let body = match (self.body, self.body_base64, self.json) {
            (None, None, None) => Bytes::new(),
            (Some(text), None, None) => text.into(),
            (None, Some(coded), None) => {
                let decoded = STANDARD.decode(coded);
                let decoded = decoded.map_err(|error| format!("decision.body_base64: {error}"))?;
                decoded.into()
            }
            (None, None, Some(json)) => {
                let is_typed =
                    |(name, _): &(String, String)| name.eq_ignore_ascii_case("content-type");
                if !headers.iter().any(is_typed) {
                    headers.push(("content-type".into(), "application/json".into()));
                }
                json.to_string().into()
            }
            _ => {
                return Err(
                    "decision: write only one of `body`, `body_base64` and `json`".to_owned(),
                );
            }
        };
        let answer = Answer::new(self.status, headers, body);
        Ok(answer
            .map_err(|what| format!("decision.{what}"))?
            .recorded())
    }
}

fn lease(text: Option<&str>) -> Result<Option<Duration>, String> {
    duration("lease", text, LEASE_MIN, LEASE_MAX)
}

fn duration(
    name: &str,
    text: Option<&str>,
    least: Duration,
    most: Duration,
) -> Result<Option<Duration>, String> {
    let Some(text) = text else { return Ok(None) };
    let duration = humantime::parse_duration(text).ok();
    let duration = duration.filter(|duration| (least..=most).contains(duration));
    duration.map(Some).ok_or_else(|| {
        let (least, most) = (
            humantime::format_duration(least),
            humantime::format_duration(most),
        );
        format!("{name}: a duration such as \"5s\", from {least} to {most}")
    })
}

/// A claim, told to the caller that has it.
#[derive(Debug, Serialize)]
pub struct ClaimOut {
    attempt_token: Uuid,
    generation_id: Uuid,
    derived_key: Uuid,
    repeated: bool,
}

impl ClaimOut {
    /// Of this claim.
    #[must_use]
    pub fn new(held: &Held) -> Self {
        Self {
            attempt_token: held.token.0,
            generation_id: held.generation_id.0,
            derived_key: held.derived_key,
            repeated: held.repeated,
        }
    }
}

/// What a reserve answers with 200.
#[derive(Debug, Serialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub enum ReserveOut {
    /// The caller owns the record.
    Reserved {
        state: &'static str,
        lease_ms: u64,
        #[serde(flatten)]
        claim: ClaimOut,
    },
    /// Without a key nothing is stored.
    Fresh,
    /// There is a decision.
    Replayed {
        state: &'static str,
        waited: bool,
        #[serde(flatten)]
        claim: Option<ClaimOut>,
        decision: Value,
    },
    /// The claim was given up; it is not made again.
    Released {
        state: &'static str,
        #[serde(flatten)]
        claim: ClaimOut,
    },
}

/// A decision's id and times.
#[must_use]
pub fn committed(committed: &Committed) -> Value {
    json!({
        "id": committed.decision_id.to_string(),
        "created": rfc3339(committed.created_at),
        "expires": rfc3339(committed.valid_until),
    })
}

/// A decision with its answer. A body that is no text is told in base64; one that was not kept is
/// left out.
#[must_use]
pub fn decided(decided: &Decided) -> Value {
    let mut told = committed(&decided.committed);
    let recorded = &decided.recorded;
    told["status"] = json!(recorded.status);
    told["headers"] = recorded
        .headers
        .lines()
        .map(|(name, value)| json!([name.as_str(), latin1(&value)]))
        .collect();
    if let Some(body) = &recorded.body {
        match std::str::from_utf8(body) {
            Ok(text) => told["body"] = json!(text),
            Err(_) => told["body_base64"] = json!(STANDARD.encode(body)),
        }
    }
    told
}

/// Each byte is one character (ISO 8859-1).
fn latin1(value: &HeaderValue) -> String {
    value.as_bytes().iter().copied().map(char::from).collect()
}

fn rfc3339(at: OffsetDateTime) -> String {
    at.format(&Rfc3339).unwrap_or_default()
}
