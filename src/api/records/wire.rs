//! What goes over the wire about records: JSON that is told, JSON and queries that are taken.
//!
//! Parsed here into what can't be wrong; every refusal is the end of a sentence that begins with
//! what to mend.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

use crate::api::request;
use crate::domain::millis;
use crate::domain::policy::OnUnknown;
use crate::domain::record::{self, Found, Record, State, StoredDecision, Validity};
use crate::domain::scope::{PoolId, RecordKey, TenantScope};
use crate::store::Search;

/// The longest age that can be searched for: it must be subtractable from every present.
pub const AGE_MAX: Duration = Duration::from_hours(24 * 3653);
/// What may stand in the query of a search.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SearchQuery {
    tenant: Option<String>,
    pool: Option<String>,
    key_prefix: Option<String>,
    status: Option<String>,
    older_than: Option<String>,
    limit: Option<u32>,
    cursor: Option<String>,
}

impl SearchQuery {
    /// The search that it asks for.
    pub fn into_search(self) -> Result<Search, String> {
        let tenant = self.tenant.as_deref().map(TenantScope::parse).transpose();
        tenant.map_err(|error| format!("tenant: {error}"))?;
        let pool = self.pool.as_deref().map(PoolId::new).transpose();
        pool.map_err(|error| format!("pool: {error}"))?;
        let printable = |text: &String| text.bytes().all(|byte| matches!(byte, b' '..=b'~'));
        if !self.key_prefix.as_ref().is_none_or(printable) {
            return Err("key_prefix: a key is printable ASCII".into());
        }
        let known = |word: &String| WORDS.contains(&word.as_str());
        if !self.status.as_ref().is_none_or(known) {
            return Err(format!("status: one of {}", WORDS.join(", ")));
        }
        let older_than = self.older_than.as_deref().map(humantime::parse_duration);
        let older_than = older_than.transpose();
        let older_than = older_than.map_err(|error| format!("older_than: {error}"))?;
        if older_than.is_some_and(|age| age > AGE_MAX) {
            return Err("older_than: at most ten years".into());
        }
        let limit = request::limit(self.limit)?;
        let after = self.cursor.as_deref().map(|cursor| {
            read_cursor(cursor).ok_or("cursor: take `next` of the page before, unchanged")
        });
        Ok(Search {
            tenant: self.tenant,
            pool: self.pool,
            key_prefix: self.key_prefix,
            status: self.status,
            older_than,
            after: after.transpose()?,
            limit,
        })
    }
}

const WORDS: [&str; 4] = [
    "pending",
    "completed",
    "failed_before_commit",
    "outcome_unknown",
];

/// One page of a search.
#[derive(Debug, Default, Serialize)]
pub struct Page {
    records: Vec<Line>,
    /// The `cursor` of the next page; `null`: this is the last.
    next: Option<String>,
}

impl Page {
    /// The first `limit` of what was found.
    #[must_use]
    pub fn new(found: &[Found], limit: u32) -> Self {
        let (shown, last) = request::page(found, limit);
        Self {
            records: shown.iter().map(Line::new).collect(),
            next: last.map(|last| write_cursor(&last.record.key)),
        }
    }
}

#[derive(Debug, Serialize)]
struct Line {
    #[serde(flatten)]
    record: RecordOut,
    answer_status: Option<u16>,
}

impl Line {
    fn new(found: &Found) -> Self {
        Self {
            record: RecordOut::new(&found.record),
            answer_status: found.answer_status,
        }
    }
}

/// One record, with its decision.
#[derive(Debug, Serialize)]
pub struct Shown {
    #[serde(flatten)]
    record: RecordOut,
    /// `null`: there is none, or it is past its validity and forgotten.
    decision: Option<Decision>,
}

impl Shown {
    /// Of this record, whose decision is this.
    #[must_use]
    pub fn new(record: &Record, decision: Option<&StoredDecision>) -> Self {
        Self {
            record: RecordOut::new(record),
            decision: decision.map(Decision::new),
        }
    }
}

#[derive(Debug, Serialize)]
struct RecordOut {
    tenant: String,
    pool: String,
    key: String,
    status: &'static str,
    /// Of a `pending` record.
    #[serde(skip_serializing_if = "Option::is_none")]
    lease: Option<Lease>,
    /// Of a `failed_before_commit` record.
    #[serde(skip_serializing_if = "Option::is_none")]
    maybe_sent: Option<bool>,
    /// Of a `completed` record.
    #[serde(skip_serializing_if = "Option::is_none")]
    decision_id: Option<String>,
    /// Of a `completed` record.
    #[serde(skip_serializing_if = "Option::is_none")]
    validity: Option<&'static str>,
    generation: i64,
    generation_id: String,
    #[serde(with = "time::serde::rfc3339")]
    created_at: OffsetDateTime,
    #[serde(with = "time::serde::rfc3339")]
    reserved_at: OffsetDateTime,
    reserved_ago_ms: u64,
    on_unknown: &'static str,
}

#[derive(Debug, Serialize)]
struct Lease {
    state: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    remaining_ms: Option<u64>,
}

impl RecordOut {
    fn new(record: &Record) -> Self {
        let (mut lease, mut maybe_sent, mut decision) = (None, None, None);
        match record.state {
            State::Pending(held) => lease = Some(Lease::new(held)),
            State::Completed(id, validity) => decision = Some((id, validity)),
            State::FailedBeforeCommit { maybe_sent: sent } => maybe_sent = Some(sent),
            State::OutcomeUnknown => {}
        }
        Self {
            tenant: record.key.tenant.to_string(),
            pool: record.key.pool.to_string(),
            key: record.key.key.to_string(),
            status: record.state.word(),
            lease,
            maybe_sent,
            decision_id: decision.map(|(id, _)| id.to_string()),
            validity: decision.map(|(_, validity)| validity_word(validity)),
            generation: record.generation,
            generation_id: record.generation_id.0.to_string(),
            created_at: record.created_at,
            reserved_at: record.reserved_at,
            reserved_ago_ms: millis(record.reserved_ago),
            on_unknown: OnUnknown::word(record.terms.on_unknown),
        }
    }
}

impl Lease {
    fn new(lease: record::Lease) -> Self {
        let (state, remaining) = match lease {
            record::Lease::Held(remaining) => ("held", Some(remaining)),
            record::Lease::Over => ("over", None),
            record::Lease::Unbounded => ("unbounded", None),
        };
        Self {
            state,
            remaining_ms: remaining.map(millis),
        }
    }
}

#[derive(Debug, Serialize)]
struct Decision {
    decided_by: String,
    #[serde(with = "time::serde::rfc3339")]
    created_at: OffsetDateTime,
    #[serde(with = "time::serde::rfc3339")]
    expires_at: OffsetDateTime,
    answer_status: u16,
    header_names: Vec<String>,
    /// `null`: the body was not kept.
    body_bytes: Option<usize>,
    replayable: bool,
}

impl Decision {
    fn new(stored: &StoredDecision) -> Self {
        let recorded = &stored.recorded;
        let names = recorded.headers.lines().map(|(name, _)| name.to_string());
        Self {
            decided_by: stored.decided_by.clone(),
            created_at: stored.committed.created_at,
            expires_at: stored.committed.valid_until,
            answer_status: recorded.status,
            header_names: names.collect(),
            body_bytes: recorded.body.as_ref().map(Bytes::len),
            replayable: recorded.body.is_some() && stored.valid_for.is_some(),
        }
    }
}

/// What an act did.
#[derive(Debug, Serialize)]
pub struct Acted {
    /// Which act.
    pub act: &'static str,
    /// The record's state now; `null`: it is gone.
    pub status: Option<&'static str>,
}

fn validity_word(validity: Validity) -> &'static str {
    match validity {
        Validity::Valid(_) => "valid",
        Validity::Tombstone => "tombstone",
        Validity::Expired => "expired",
    }
}

/// No part of a record's key holds a line break.
fn write_cursor(key: &RecordKey) -> String {
    URL_SAFE_NO_PAD.encode(format!("{}\n{}\n{}", key.tenant, key.pool, key.key))
}

fn read_cursor(cursor: &str) -> Option<RecordKey> {
    let text = String::from_utf8(URL_SAFE_NO_PAD.decode(cursor).ok()?).ok()?;
    let mut parts = text.split('\n');
    let key = super::parse_key(parts.next()?, parts.next()?, parts.next()?)?;
    parts.next().is_none().then_some(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_survives_every_key() {
        let key = super::super::parse_key("acme p1-00ff", "pay", "a/b %2F \"c\"").unwrap();
        assert_eq!(read_cursor(&write_cursor(&key)), Some(key));
        for cursor in ["", "!", "YQ", "YQpiCmMKZA"] {
            assert_eq!(read_cursor(cursor), None, "{cursor}");
        }
    }
}
