//! What goes over the wire about intents and destinations.
//!
//! Bodies, header values and whole URLs are never told: what a template rendered may be secret.

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::api::request::{self, present};
use crate::api::runs::wire::AttemptOut;
use crate::domain::intent::{Destination, How, IntentId, IntentKey, IntentStatus, Stamp};
use crate::domain::run::RunId;
use crate::domain::scope::TenantScope;
use crate::domain::workflow::{Target, Text};
use crate::domain::{derived_uuid, millis};
use crate::store::outbox::{IntentLine, IntentSearch, Pause};
use crate::store::runs::Attempt;

/// Intents that one act looks at, at most.
pub const ACT_MAX: u32 = 1000;
/// Intents that one act looks at, if the request doesn't say.
pub const ACT_DEFAULT: u32 = 100;
/// The longest name of a lane, in bytes: a host's name, and what stands around it.
pub const LANE_BYTES_MAX: usize = 300;

/// What may stand in the query of a search.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IntentsQuery {
    tenant: Option<String>,
    status: Option<String>,
    destination: Option<String>,
    run_id: Option<String>,
    limit: Option<u32>,
    cursor: Option<String>,
}

impl IntentsQuery {
    /// The search that it asks for.
    pub fn into_search(self) -> Result<IntentSearch, String> {
        let filter = Filter {
            tenant: self.tenant,
            status: self.status,
            destination: self.destination,
            run_id: self.run_id,
        };
        Ok(IntentSearch {
            after: self.cursor.as_deref().map(intent_cursor).transpose()?,
            limit: request::limit(self.limit)?,
            ..filter.into_search()?
        })
    }
}

fn intent_cursor(cursor: &str) -> Result<IntentKey, String> {
    let (tenant, id) = request::read_cursor(cursor)?;
    Ok(IntentKey {
        tenant,
        id: IntentId(id),
    })
}

/// Which intents; all given conditions must hold.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Filter {
    #[serde(default, deserialize_with = "present")]
    tenant: Option<String>,
    #[serde(default, deserialize_with = "present")]
    status: Option<String>,
    #[serde(default, deserialize_with = "present")]
    destination: Option<String>,
    #[serde(default, deserialize_with = "present")]
    run_id: Option<String>,
}

impl Filter {
    fn into_search(self) -> Result<IntentSearch, String> {
        let tenant = self.tenant.as_deref().map(TenantScope::parse).transpose();
        tenant.map_err(|error| format!("tenant: {error}"))?;
        let run_id = self.run_id.map(|text| request::uuid("run_id", &text));
        Ok(IntentSearch {
            tenant: self.tenant,
            status: self.status.as_deref().map(status).transpose()?,
            destination: self.destination.map(destination).transpose()?,
            run_id: run_id.transpose()?.map(RunId),
            ..IntentSearch::default()
        })
    }
}

fn status(word: &str) -> Result<IntentStatus, String> {
    let words = IntentStatus::ALL.map(IntentStatus::word).join(", ");
    IntentStatus::from_word(word).ok_or_else(|| format!("status: one of {words}"))
}

/// A lane's name.
pub fn destination(given: String) -> Result<Destination, String> {
    let visible = given.bytes().all(|byte| matches!(byte, b'!'..=b'~'));
    if visible && (1..=LANE_BYTES_MAX).contains(&given.len()) {
        Ok(Destination(given))
    } else {
        Err(format!(
            "destination: 1 to {LANE_BYTES_MAX} visible ASCII characters"
        ))
    }
}

/// The body of an act on one intent or on those that a filter finds.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Act {
    reason: String,
    #[serde(default, deserialize_with = "present")]
    request_id: Option<String>,
    #[serde(default, deserialize_with = "present")]
    intent_id: Option<String>,
    #[serde(default, deserialize_with = "present")]
    filter: Option<Filter>,
    #[serde(default, deserialize_with = "present")]
    limit: Option<u32>,
    #[serde(default, deserialize_with = "present")]
    cursor: Option<String>,
}

/// Which intents an act is for.
#[derive(Debug)]
pub enum Which {
    /// This.
    One(IntentId),
    /// Those that this finds.
    Found(IntentSearch),
}

/// An act, checked.
#[derive(Debug)]
pub struct Order {
    /// Which.
    pub which: Which,
    /// Why.
    pub reason: String,
    /// What makes a repeat known.
    pub request_id: Option<Uuid>,
}

impl Act {
    /// What it asks for.
    pub fn into_order(self) -> Result<Order, String> {
        let limit = self.limit.unwrap_or(ACT_DEFAULT);
        if !(1..=ACT_MAX).contains(&limit) {
            return Err(format!("limit: 1 to {ACT_MAX}"));
        }
        let after = self.cursor.as_deref().map(intent_cursor).transpose()?;
        let which = match (self.intent_id, self.filter) {
            (Some(id), None) => Which::One(IntentId(request::uuid("intent_id", &id)?)),
            (None, Some(filter)) => Which::Found(IntentSearch {
                after,
                limit,
                ..filter.into_search()?
            }),
            _ => return Err("give `intent_id` or `filter`, and not both".into()),
        };
        let request_id = self.request_id.as_deref();
        let request_id = request_id.map(|text| request::uuid("request_id", text));
        Ok(Order {
            which,
            reason: request::reason(&self.reason)?,
            request_id: request_id.transpose()?,
        })
    }
}

impl Order {
    /// The stamp of this act on this intent, the same at a repeat. `None`: a repeat is not known.
    #[must_use]
    pub fn stamp(&self, intent: &IntentKey) -> Option<Stamp> {
        let request_id = self.request_id?;
        let mut hasher = blake3::Hasher::new_derive_key("oncegate 2026 redrive stamp");
        hasher.update(request_id.as_bytes());
        hasher.update(intent.id.0.as_bytes());
        Some(Stamp(derived_uuid(&hasher)))
    }
}

/// One page of a search.
#[derive(Debug, Default, Serialize)]
pub struct Page {
    intents: Vec<IntentOut>,
    /// The `cursor` of the next page; `null`: this is the last.
    next: Option<String>,
}

impl Page {
    /// The first `limit` of what was found.
    #[must_use]
    pub fn new(found: &[IntentLine], limit: u32) -> Self {
        let (shown, last) = request::page(found, limit);
        Self {
            intents: shown.iter().map(IntentOut::new).collect(),
            next: last.map(|last| cursor(&last.key)),
        }
    }
}

/// Where a page that ends with this intent ended.
#[must_use]
pub fn cursor(key: &IntentKey) -> String {
    request::write_cursor(&key.tenant, key.id.0)
}

/// One intent.
#[derive(Debug, Serialize)]
pub struct IntentOut {
    tenant: String,
    intent_id: String,
    run_id: String,
    seq: i64,
    step: String,
    status: &'static str,
    destination: String,
    idempotency_key: String,
    sending: SendingOut,
    claimed: bool,
    age_ms: Option<u64>,
    #[serde(with = "time::serde::rfc3339::option")]
    due_at: Option<OffsetDateTime>,
    tries: u32,
    faults: u32,
    deaths: u32,
    redrives: u32,
    outcome: Option<String>,
    answer_status: Option<u16>,
    diagnostic: Option<String>,
    body_bytes: Option<u64>,
    #[serde(with = "time::serde::rfc3339")]
    created_at: OffsetDateTime,
    #[serde(with = "time::serde::rfc3339::option")]
    ended_at: Option<OffsetDateTime>,
}

#[derive(Debug, Serialize)]
struct SendingOut {
    kind: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    method: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    path: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    subject: Option<String>,
    timeout_ms: u64,
    retry_first_ms: u64,
    retry_max_ms: u64,
    retry_horizon_ms: u64,
    retry_faults_max: u32,
}

impl IntentOut {
    /// Of this intent.
    #[must_use]
    pub fn new(line: &IntentLine) -> Self {
        Self {
            tenant: line.key.tenant.to_string(),
            intent_id: line.key.id.to_string(),
            run_id: line.run_id.to_string(),
            seq: line.seq,
            step: line.step.clone(),
            status: line.status.word(),
            destination: line.destination.0.clone(),
            idempotency_key: line.idempotency_key.clone(),
            sending: SendingOut::new(line),
            claimed: line.claimed,
            age_ms: line.age.map(millis),
            due_at: line.due_at,
            tries: line.tries,
            faults: line.faults,
            deaths: line.deaths,
            redrives: line.redrives,
            outcome: line.outcome.clone(),
            answer_status: line.answer_status,
            diagnostic: line.diagnostic.clone(),
            body_bytes: line.body_bytes,
            created_at: line.created_at,
            ended_at: line.ended_at,
        }
    }
}

impl SendingOut {
    fn new(line: &IntentLine) -> Self {
        let (mut method, mut path, mut subject) = (None, None, None);
        let kind = match &line.sending.how {
            How::Http(send) => {
                method = Some(send.method.clone());
                let telling = !matches!(send.to, Target::Url(_));
                let text = send.path.as_ref().filter(|_| telling);
                path = text.map(without_query);
                "http"
            }
            How::Publish { subject: text, .. } => {
                subject = Some(text.clone());
                "publish"
            }
            How::Task { .. } => "task",
        };
        let retry = line.sending.retry;
        Self {
            kind,
            method,
            path,
            subject,
            timeout_ms: line.sending.timeout_ms,
            retry_first_ms: retry.first_ms,
            retry_max_ms: retry.max_ms,
            retry_horizon_ms: retry.horizon_ms,
            retry_faults_max: retry.faults_max,
        }
    }
}

fn without_query(path: &Text) -> String {
    let (Text::Plain(path) | Text::Template(path)) = path;
    path.split('?').next().unwrap_or_default().to_owned()
}

/// One intent with its attempts.
#[derive(Debug, Serialize)]
pub struct Shown {
    #[serde(flatten)]
    intent: IntentOut,
    /// Newest first.
    attempts: Vec<AttemptOut>,
}

impl Shown {
    /// Of this intent; `attempts` are its run's.
    #[must_use]
    pub fn new(line: &IntentLine, attempts: &[Attempt]) -> Self {
        let own = attempts
            .iter()
            .filter(|attempt| attempt.intent_id == line.key.id);
        Self {
            intent: IntentOut::new(line),
            attempts: own.map(AttemptOut::new).collect(),
        }
    }
}

/// What an act did.
#[derive(Debug, Serialize)]
pub struct Acted {
    /// Which act.
    pub act: &'static str,
    /// To how many it was done.
    pub done: u32,
    /// To how many it had been done before, by the same `request_id`; nothing was done to them now.
    pub repeated: u32,
    /// To which it was not, and why.
    pub refused: Vec<RefusedOut>,
    /// The `cursor` to go on with; `null`: every intent that was meant was looked at.
    pub next: Option<String>,
}

/// An intent that an act was not done to.
#[derive(Debug, Serialize)]
pub struct RefusedOut {
    /// Which.
    pub intent_id: String,
    /// Why, in a word.
    pub why: &'static str,
}

/// Destinations that are known to this gateway.
#[derive(Debug, Serialize)]
pub struct Destinations {
    destinations: Vec<DestinationOut>,
}

#[derive(Debug, Serialize)]
struct DestinationOut {
    destination: String,
    /// Whether it is configured; others come from pools, URLs, queues and pauses.
    configured: bool,
    paused: Option<PauseOut>,
}

#[derive(Debug, Serialize)]
struct PauseOut {
    #[serde(with = "time::serde::rfc3339")]
    at: OffsetDateTime,
    operator: String,
    reason: String,
}

impl Destinations {
    /// The configured ones, and those that are paused.
    #[must_use]
    pub fn new(configured: &[Destination], paused: &[Pause]) -> Self {
        let mut all: Vec<&Destination> = configured.iter().collect();
        all.extend(paused.iter().map(|pause| &pause.destination));
        all.sort();
        all.dedup();
        let told = all.into_iter().map(|destination| DestinationOut {
            destination: destination.0.clone(),
            configured: configured.contains(destination),
            paused: paused
                .iter()
                .find(|pause| pause.destination == *destination)
                .map(PauseOut::new),
        });
        Self {
            destinations: told.collect(),
        }
    }
}

impl PauseOut {
    fn new(pause: &Pause) -> Self {
        Self {
            at: pause.paused_at,
            operator: pause.operator.clone(),
            reason: pause.reason.clone(),
        }
    }
}

/// What became of a destination.
#[derive(Debug, Serialize)]
pub struct Paused {
    /// Which.
    pub destination: String,
    /// Whether nothing is sent to it now.
    pub paused: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(json: &str) -> Result<Order, String> {
        serde_json::from_str::<Act>(json).unwrap().into_order()
    }

    #[test]
    fn a_repeat_has_the_same_stamp_for_each_intent_and_another_for_another() {
        let id = "018f4e9c-0000-7000-8000-000000000001";
        let order = order(&format!(
            r#"{{"reason":"r","filter":{{}},"request_id":"{id}"}}"#
        ))
        .unwrap();
        let key = |id| IntentKey {
            tenant: TenantScope::parse("acme").unwrap(),
            id: IntentId(Uuid::from_u128(id)),
        };
        assert_eq!(order.stamp(&key(1)), order.stamp(&key(1)));
        assert_ne!(order.stamp(&key(1)), order.stamp(&key(2)));
    }

    #[test]
    fn an_act_is_for_one_intent_or_for_a_filter() {
        for (json, what) in [
            (r#"{"reason":"r"}"#, "give `intent_id` or `filter`"),
            (
                r#"{"reason":"r","filter":{},"intent_id":"x"}"#,
                "give `intent_id` or `filter`",
            ),
            (r#"{"reason":"r","intent_id":"x"}"#, "intent_id: "),
            (r#"{"reason":"","filter":{}}"#, "reason: "),
            (
                r#"{"reason":"r","filter":{"status":"lost"}}"#,
                "status: one of pending, ",
            ),
            (
                r#"{"reason":"r","filter":{"destination":"a b"}}"#,
                "destination: ",
            ),
            (r#"{"reason":"r","filter":{},"limit":1001}"#, "limit: "),
        ] {
            let refused = order(json).unwrap_err();
            assert!(refused.starts_with(what), "{json}: {refused}");
        }
    }
}
