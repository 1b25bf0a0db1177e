//! What is told of a record and of a run, as JSON. Pure.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::HeaderName;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use serde_json::{Map, Value, json};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use super::run_location;
use crate::domain::message::{Recorded, is_json, media_type};
use crate::domain::record::{Lease, Record, State, StoredDecision};
use crate::domain::run::{Run, RunStatus};
use crate::problem::{self, RETRY_AFTER, whole_seconds};
use crate::store::runs::RunLine;

/// What is told, and when to ask again if it is not settled.
pub(super) struct Document {
    pub json: Value,
    pub retry_after: Option<Duration>,
}

/// A record with what belongs to it.
pub(super) struct RecordSeen {
    pub record: Record,
    pub decision: Option<StoredDecision>,
    pub run: Option<Run>,
}

/// A run with the answer of an accepted request's call.
pub(super) struct RunSeen {
    pub line: RunLine,
    pub answer: Option<Recorded>,
}

impl RecordSeen {
    /// One that has no decision.
    pub(super) fn new(record: Record) -> Self {
        Self {
            record,
            decision: None,
            run: None,
        }
    }
}

impl RunSeen {
    /// Whether there is nothing more to wait for: a stuck run waits for an operator.
    pub(super) fn is_settled(&self) -> bool {
        let status = self.line.run.status;
        self.answer.is_some() || status.is_final() || status == RunStatus::Stuck
    }
}

impl Document {
    pub(super) fn of_record(seen: &RecordSeen) -> Self {
        let record = &seen.record;
        let retry_after = retry_after(record);
        let json = json!({
            "pool": record.key.pool.as_str(),
            "key": record.key.key.as_str(),
            "status": record.state.word(),
            "created": instant(record.created_at),
            "decision": seen.decision.as_ref().map(|decision| json!({
                "id": decision.committed.decision_id.to_string(),
                "created": instant(decision.committed.created_at),
                "expires": instant(decision.committed.valid_until),
                "status": decision.recorded.status,
            })),
            "run": seen.run.as_ref().map(|run| json!({
                "run_id": run.key.id.to_string(),
                "status": run.status.word(),
                "location": run_location(run.key.id),
            })),
            "retry_after": retry_after.map(whole_seconds),
        });
        Self { json, retry_after }
    }

    pub(super) fn of_run(seen: &RunSeen) -> Self {
        let (line, run) = (&seen.line, &seen.line.run);
        let mut json = json!({
            "run_id": run.key.id.to_string(),
            "workflow": run.workflow,
            "status": run.status.word(),
            "created": instant(line.created_at),
            "updated": instant(line.updated_at),
            "ended": line.ended_at.map(instant),
            "last_transition_seq": run.last_transition_seq,
            "answer": seen.answer.as_ref().map(answer),
        });
        if let Some(reason) = reason(run.status) {
            json["reason"] = reason.into();
        }
        Self {
            json,
            retry_after: (!seen.is_settled()).then_some(RETRY_AFTER),
        }
    }
}

/// In general words: what stands in the row may quote an operator or a service.
fn reason(status: RunStatus) -> Option<&'static str> {
    match status {
        RunStatus::Running | RunStatus::Waiting | RunStatus::Completed => None,
        RunStatus::Stuck => Some("a step failed for good; an operator can let the run go on"),
        RunStatus::Failed => Some("a step failed for good"),
        RunStatus::Compensated => Some("a step failed for good; what was done before is undone"),
        RunStatus::Cancelled => Some("an operator or a service cancelled it"),
    }
}

fn retry_after(record: &Record) -> Option<Duration> {
    let State::Pending(lease) = record.state else {
        return None;
    };
    let left = match lease {
        Lease::Held(left) => left,
        Lease::Over => RETRY_AFTER,
        Lease::Unbounded => record.terms.lease,
    };
    Some(problem::retry_after(left, record.terms.lease))
}

/// The body as JSON if it is labelled so and is so, else in base64, coded as it is. Neither: it was
/// not kept.
fn answer(recorded: &Recorded) -> Value {
    let header = |name: HeaderName| {
        let mut lines = recorded.headers.lines();
        let value = lines.find_map(|(line, value)| (line == name).then_some(value))?;
        Some(String::from_utf8_lossy(value.as_bytes()).into_owned())
    };
    let (content_type, coding) = (header(CONTENT_TYPE), header(CONTENT_ENCODING));
    let mut told = Map::new();
    told.insert("status".into(), recorded.status.into());
    told.insert("content_type".into(), content_type.clone().into());
    if let Some(body) = &recorded.body {
        let labelled = coding.is_none()
            && content_type.is_some_and(|label| is_json(&media_type(label.as_bytes())));
        let json = labelled.then(|| serde_json::from_slice::<Value>(body).ok());
        match json.flatten() {
            Some(json) => told.insert("body".into(), json),
            None => told.insert("body_base64".into(), STANDARD.encode(body).into()),
        };
    }
    if let Some(coding) = coding {
        told.insert("content_encoding".into(), coding.into());
    }
    told.into()
}

fn instant(at: OffsetDateTime) -> Option<String> {
    at.format(&Rfc3339).ok()
}
