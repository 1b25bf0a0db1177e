//! What goes over the wire about runs.
//!
//! Every refusal is the end of a sentence that begins with what to mend.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use time::OffsetDateTime;

use super::diagnosis::diagnose;
use crate::api::outbox::wire::IntentOut;
use crate::api::request::{self, present};
use crate::coordinator::Applied;
use crate::domain::intent::Stamp;
use crate::domain::message::Recorded;
use crate::domain::run::{Refused, Run, RunId, RunKey, RunStatus};
use crate::domain::scope::{PoolId, TenantScope};
use crate::domain::workflow::{NAME_BYTES_MAX, is_name};
use crate::store::outbox::IntentLine;
use crate::store::runs::{Attempt, RunLine, RunSearch, Transition};

/// What may stand in the query of a search.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunsQuery {
    tenant: Option<String>,
    status: Option<String>,
    workflow: Option<String>,
    pool: Option<String>,
    limit: Option<u32>,
    cursor: Option<String>,
}

impl RunsQuery {
    /// The search that it asks for.
    pub fn into_search(self) -> Result<RunSearch, String> {
        let tenant = self.tenant.as_deref().map(TenantScope::parse).transpose();
        tenant.map_err(|error| format!("tenant: {error}"))?;
        let pool = self.pool.as_deref().map(PoolId::new).transpose();
        pool.map_err(|error| format!("pool: {error}"))?;
        let status = self.status.as_deref().map(status).transpose()?;
        let workflow = self.workflow.map(|given| name("workflow", given));
        let after = self.cursor.as_deref().map(request::read_cursor);
        Ok(RunSearch {
            tenant: self.tenant,
            status,
            workflow: workflow.transpose()?,
            pool: self.pool,
            after: after.transpose()?.map(|(tenant, id)| RunKey {
                tenant,
                id: RunId(id),
            }),
            limit: request::limit(self.limit)?,
        })
    }
}

fn status(word: &str) -> Result<RunStatus, String> {
    let words = RunStatus::ALL.map(RunStatus::word).join(", ");
    RunStatus::from_word(word).ok_or_else(|| format!("status: one of {words}"))
}

/// A name of a workflow, a signal or a queue.
pub fn name(what: &str, given: String) -> Result<String, String> {
    is_name(&given).then_some(given).ok_or_else(|| {
        format!("{what}: 1 to {NAME_BYTES_MAX} characters of a-z, A-Z, 0-9, `-`, `_` and `.`")
    })
}

/// What may stand in the query for a history.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HistoryQuery {
    after: Option<i64>,
    limit: Option<u32>,
}

impl HistoryQuery {
    /// After which number, and how many lines.
    pub fn into_parts(self) -> Result<(i64, u32), String> {
        let after = self.after.unwrap_or(0);
        if after < 0 {
            return Err("after: the number of a transition, or 0".into());
        }
        Ok((after, request::limit(self.limit)?))
    }
}

/// The body of a cancellation or a retry.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Act {
    reason: String,
    #[serde(default, deserialize_with = "present")]
    request_id: Option<String>,
}

impl Act {
    /// The reason, and the stamp that makes a repeat known.
    pub fn into_parts(self) -> Result<(String, Option<Stamp>), String> {
        Ok((
            request::reason(&self.reason)?,
            stamp(self.request_id.as_deref())?,
        ))
    }
}

/// The body of a resumption.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Resumption {
    /// Why.
    pub reason: String,
    /// The same at a repeat.
    #[serde(default, deserialize_with = "present")]
    pub request_id: Option<String>,
    /// What later templates see as the step's result.
    #[serde(default)]
    pub result: Value,
}

/// The body of a signal.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Signal {
    /// The same at a repeat.
    #[serde(default, deserialize_with = "present")]
    pub request_id: Option<String>,
    /// What it brings.
    #[serde(default)]
    pub payload: Value,
}

/// The stamp that a caller's `request_id` is.
pub fn stamp(request_id: Option<&str>) -> Result<Option<Stamp>, String> {
    let id = request_id.map(|text| request::uuid("request_id", text));
    Ok(id.transpose()?.map(Stamp))
}

/// One page of a search.
#[derive(Debug, Default, Serialize)]
pub struct Page {
    runs: Vec<RunOut>,
    /// The `cursor` of the next page; `null`: this is the last.
    next: Option<String>,
}

impl Page {
    /// The first `limit` of what was found.
    #[must_use]
    pub fn new(found: &[RunLine], limit: u32) -> Self {
        let (shown, last) = request::page(found, limit);
        let cursor =
            |line: &RunLine| request::write_cursor(&line.run.key.tenant, line.run.key.id.0);
        Self {
            runs: shown.iter().map(RunOut::new).collect(),
            next: last.map(cursor),
        }
    }
}

#[derive(Debug, Serialize)]
struct RunOut {
    #[serde(flatten)]
    state: RunState,
    holds_record: bool,
    #[serde(with = "time::serde::rfc3339")]
    created_at: OffsetDateTime,
    #[serde(with = "time::serde::rfc3339")]
    updated_at: OffsetDateTime,
    #[serde(with = "time::serde::rfc3339::option")]
    due_at: Option<OffsetDateTime>,
    #[serde(with = "time::serde::rfc3339::option")]
    ended_at: Option<OffsetDateTime>,
}

impl RunOut {
    fn new(line: &RunLine) -> Self {
        Self {
            state: RunState::new(&line.run),
            holds_record: line.run.holds_record,
            created_at: line.created_at,
            updated_at: line.updated_at,
            due_at: line.due_at,
            ended_at: line.ended_at,
        }
    }
}

/// How a run stands.
#[derive(Debug, Serialize)]
struct RunState {
    tenant: String,
    run_id: String,
    status: &'static str,
    workflow: String,
    pool: String,
    key: String,
    reason: Option<String>,
    record_version: i64,
    last_transition_seq: i64,
}

impl RunState {
    fn new(run: &Run) -> Self {
        Self {
            tenant: run.key.tenant.to_string(),
            run_id: run.key.id.to_string(),
            status: run.status.word(),
            workflow: run.workflow.clone(),
            pool: run.record.pool.to_string(),
            key: run.record.key.to_string(),
            reason: run.reason.clone(),
            record_version: run.record_version,
            last_transition_seq: run.last_transition_seq,
        }
    }
}

/// One run with its intents and their attempts.
#[derive(Debug, Serialize)]
pub struct Shown {
    #[serde(flatten)]
    run: RunOut,
    /// Of the first intent: for an accepted request, the answer to it.
    answer: Option<AnswerOut>,
    intents: Vec<IntentOut>,
    /// Newest first.
    attempts: Vec<AttemptOut>,
    /// What is out of the ordinary, in sentences.
    diagnosis: Vec<String>,
}

#[derive(Debug, Serialize)]
struct AnswerOut {
    answer_status: u16,
    body_bytes: Option<usize>,
}

impl Shown {
    /// Of this run.
    #[must_use]
    pub fn new(
        line: &RunLine,
        intents: &[IntentLine],
        attempts: &[Attempt],
        answer: Option<&Recorded>,
    ) -> Self {
        Self {
            run: RunOut::new(line),
            answer: answer.map(|answer| AnswerOut {
                answer_status: answer.status,
                body_bytes: answer.body.as_ref().map(bytes::Bytes::len),
            }),
            intents: intents.iter().map(IntentOut::new).collect(),
            attempts: attempts.iter().map(AttemptOut::new).collect(),
            diagnosis: diagnose(&line.run, intents, attempts),
        }
    }
}

/// One claim of an intent.
#[derive(Debug, Serialize)]
pub struct AttemptOut {
    intent_id: String,
    stamp: String,
    r#try: u32,
    status: String,
    worker: String,
    #[serde(with = "time::serde::rfc3339")]
    started_at: OffsetDateTime,
    #[serde(with = "time::serde::rfc3339::option")]
    ended_at: Option<OffsetDateTime>,
    outcome: Option<String>,
    answer_status: Option<u16>,
    diagnostic: Option<String>,
}

impl AttemptOut {
    /// Of this attempt.
    #[must_use]
    pub fn new(attempt: &Attempt) -> Self {
        Self {
            intent_id: attempt.intent_id.to_string(),
            stamp: attempt.stamp.to_string(),
            r#try: attempt.try_no,
            status: attempt.status.clone(),
            worker: attempt.worker.clone(),
            started_at: attempt.started_at,
            ended_at: attempt.ended_at,
            outcome: attempt.outcome.clone(),
            answer_status: attempt.answer_status,
            diagnostic: attempt.diagnostic.clone(),
        }
    }
}

/// A part of a run's history.
#[derive(Debug, Serialize)]
pub struct History {
    run_id: String,
    status: &'static str,
    transitions: Vec<TransitionOut>,
    /// What `after` is for the next page; `null`: this is all that has happened.
    next: Option<i64>,
}

impl History {
    /// Of this run, read before its transitions.
    #[must_use]
    pub fn new(run: &Run, found: &[Transition]) -> Self {
        let last = found.last().map(|last| last.seq);
        Self {
            run_id: run.key.id.to_string(),
            status: run.status.word(),
            transitions: found.iter().map(TransitionOut::new).collect(),
            next: last.filter(|last| *last < run.last_transition_seq),
        }
    }
}

/// One line of a history.
#[derive(Debug, Serialize)]
pub struct TransitionOut {
    seq: i64,
    record_version: i64,
    #[serde(with = "time::serde::rfc3339")]
    at: OffsetDateTime,
    kind: String,
    step: Option<String>,
    detail: Value,
    stamp: Option<String>,
}

impl TransitionOut {
    /// Of this transition.
    #[must_use]
    pub fn new(transition: &Transition) -> Self {
        let detail = transition.detail.as_deref();
        Self {
            seq: transition.seq,
            record_version: transition.record_version,
            at: transition.at,
            kind: transition.kind.clone(),
            step: transition.step.clone(),
            // What no version wrote is not worth an error here: the rest of the line is.
            detail: detail
                .and_then(|detail| serde_json::from_slice(detail).ok())
                .unwrap_or_default(),
            stamp: transition.stamp.map(|stamp| stamp.to_string()),
        }
    }

    /// As JSON.
    #[must_use]
    pub fn as_json(&self) -> Value {
        serde_json::to_value(self).unwrap_or_default()
    }
}

/// What an act did.
#[derive(Debug, Serialize)]
pub struct Acted {
    act: &'static str,
    /// Whether it had been done before, by the same `request_id`.
    repeated: bool,
    run: RunState,
}

impl Acted {
    /// This act led to this.
    #[must_use]
    pub fn new(act: &'static str, applied: &Applied) -> Self {
        Self {
            act,
            repeated: applied.repeated,
            run: RunState::new(&applied.run),
        }
    }
}

/// Why an act was refused, in a word.
#[must_use]
pub fn why(refused: Refused) -> &'static str {
    match refused {
        Refused::Final => "final",
        Refused::NotStuck => "not_stuck",
        Refused::Gone => "gone",
        Refused::Unreadable => "unreadable",
        Refused::OtherAct => "other_act",
        Refused::Undoing => "undoing",
        Refused::NeverAwaited => "never_awaited",
        Refused::TooManySignals => "too_many_signals",
    }
}

/// Why an act was refused, as a sentence.
#[must_use]
pub fn sentence(refused: Refused) -> String {
    let text = refused.to_string();
    let mut characters = text.chars();
    let first = characters.next().into_iter().flat_map(char::to_uppercase);
    format!(
        "{}. Nothing was done.",
        first.chain(characters).collect::<String>()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_a_whole_sentence() {
        assert_eq!(
            sentence(Refused::Final),
            "The run is over. Nothing was done."
        );
    }

    #[test]
    fn a_search_that_can_not_be_is_refused() {
        let refused = |query: RunsQuery| query.into_search().unwrap_err();
        let query = RunsQuery::default;
        for (query, what) in [
            (
                RunsQuery {
                    tenant: Some("a b c".into()),
                    ..query()
                },
                "tenant: ",
            ),
            (
                RunsQuery {
                    status: Some("done".into()),
                    ..query()
                },
                "status: one of running, ",
            ),
            (
                RunsQuery {
                    workflow: Some(String::new()),
                    ..query()
                },
                "workflow: ",
            ),
            (
                RunsQuery {
                    pool: Some("a/b".into()),
                    ..query()
                },
                "pool: ",
            ),
            (
                RunsQuery {
                    limit: Some(0),
                    ..query()
                },
                "limit: ",
            ),
            (
                RunsQuery {
                    cursor: Some("?".into()),
                    ..query()
                },
                "cursor: ",
            ),
        ] {
            assert!(refused(query).starts_with(what), "{what}");
        }
        assert!(RunsQuery::default().into_search().is_ok());
    }
}
