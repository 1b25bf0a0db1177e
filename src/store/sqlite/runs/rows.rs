//! Rows of runs, of their history and of their attempts to values.
//!
//! The status of a run or intent, a key, a count or an instant that no version of this program
//! writes is an error that names table and column, never a guess; a run's bytes that are null are
//! empty.

use sqlx::sqlite::SqliteRow;

use crate::domain::intent::{IntentId, IntentSeen, IntentStatus, Stamp};
use crate::domain::key::IdempotencyKey;
use crate::domain::message::{HeaderBlock, Recorded};
use crate::domain::run::{Run, RunId, RunKey, RunStatus};
use crate::domain::scope::{PoolId, RecordKey, TenantScope};
use crate::store::StoreError;
use crate::store::runs::{Attempt, RunLine, Transition};
use crate::store::sqlite::rows::Cells;

const RUNS: &str = "eec_run";
const TRANSITIONS: &str = "eec_run_transition";
const ATTEMPTS: &str = "eec_run_attempt";
const INTENTS: &str = "eec_effect_intent";
const BODIES: &str = "eec_effect_body";

/// What [`line()`] reads.
macro_rules! run_columns {
    () => {
        "r.tenant_scope, r.run_id, r.record_version, r.last_transition_seq, r.status, r.workflow, \
         r.pool_id, r.idempotency_key, r.holds_record, r.definition, r.input, r.progress, \
         r.reason, r.due_at, r.created_at, r.updated_at, r.ended_at"
    };
}
pub(super) use run_columns;

/// The key of a row that holds its two columns.
pub fn run_key(row: &SqliteRow) -> Result<RunKey, StoreError> {
    let cells = Cells::new(row, RUNS);
    Ok(RunKey {
        tenant: TenantScope::stored(&cells.get::<String>("tenant_scope")?),
        id: RunId(cells.id("run_id")?),
    })
}

/// A run.
pub fn run(row: &SqliteRow) -> Result<Run, StoreError> {
    let cells = Cells::new(row, RUNS);
    let key = run_key(row)?;
    let record_key = IdempotencyKey::from_text(&cells.get::<String>("idempotency_key")?);
    let record_key = record_key.ok().flatten();
    Ok(Run {
        record_version: cells.get("record_version")?,
        last_transition_seq: cells.get("last_transition_seq")?,
        status: run_status(row)?,
        workflow: cells.get("workflow")?,
        record: RecordKey {
            tenant: key.tenant.clone(),
            pool: PoolId::stored(&cells.get::<String>("pool_id")?),
            key: record_key.ok_or_else(|| {
                cells.inconsistent("idempotency_key", "no key that a client can send")
            })?,
        },
        key,
        holds_record: cells.get("holds_record")?,
        definition: cells.bytes_if_any("definition")?.unwrap_or_default(),
        input: cells.bytes_if_any("input")?.unwrap_or_default(),
        progress: cells.bytes_if_any("progress")?.unwrap_or_default(),
        reason: cells.find("reason")?,
    })
}

/// Its status.
pub fn run_status(row: &SqliteRow) -> Result<RunStatus, StoreError> {
    let cells = Cells::new(row, RUNS);
    let status = RunStatus::from_word(cells.get("status")?);
    status.ok_or_else(|| cells.inconsistent("status", "no status of a run"))
}

/// A run with its times.
pub fn line(row: &SqliteRow) -> Result<RunLine, StoreError> {
    let cells = Cells::new(row, RUNS);
    Ok(RunLine {
        run: run(row)?,
        created_at: cells.instant("created_at")?,
        updated_at: cells.instant("updated_at")?,
        due_at: cells.instant_if_any("due_at")?,
        ended_at: cells.instant_if_any("ended_at")?,
    })
}

/// What a tick sees of an intent.
pub fn seen(row: &SqliteRow) -> Result<IntentSeen, StoreError> {
    let cells = Cells::new(row, INTENTS);
    let status = IntentStatus::from_word(cells.get("status")?);
    Ok(IntentSeen {
        seq: cells.get("seq")?,
        status: status.ok_or_else(|| cells.inconsistent("status", "no status of an intent"))?,
        changed: cells.get("changed")?,
        tries: cells.count("tries")?,
        has_body: cells.get("has_body")?,
        outcome: cells.find("outcome")?,
        diagnostic: cells.find("diagnostic")?,
        answer: answer(row)?,
    })
}

/// The answer in `answer_status`, `answer_headers` and `answer_body`, if the row holds one.
pub fn answer(row: &SqliteRow) -> Result<Option<Recorded>, StoreError> {
    let cells = Cells::new(row, BODIES);
    if cells.find::<i64>("answer_status")?.is_none() {
        return Ok(None);
    }
    let headers = cells.bytes_if_any("answer_headers")?.unwrap_or_default();
    Ok(Some(Recorded {
        status: cells.status("answer_status")?,
        headers: HeaderBlock::stored(headers)
            .ok_or_else(|| cells.inconsistent("headers", "not a block of header lines"))?,
        cors: None,
        body: cells.bytes_if_any("answer_body")?,
    }))
}

/// A line of a run's history.
pub fn transition(row: &SqliteRow) -> Result<Transition, StoreError> {
    let cells = Cells::new(row, TRANSITIONS);
    Ok(Transition {
        seq: cells.get("seq")?,
        record_version: cells.get("record_version")?,
        at: cells.instant("at")?,
        kind: cells.get("kind")?,
        step: cells.find("step")?,
        detail: cells.bytes_if_any("detail")?,
        stamp: cells.id_if_any("stamp")?.map(Stamp),
    })
}

/// A claim of an intent.
pub fn attempt(row: &SqliteRow) -> Result<Attempt, StoreError> {
    let cells = Cells::new(row, ATTEMPTS);
    let answer_status: Option<i64> = cells.find("answer_status")?;
    Ok(Attempt {
        intent_id: IntentId(cells.id("intent_id")?),
        stamp: Stamp(cells.id("stamp")?),
        try_no: cells.count("try")?,
        status: cells.get("status")?,
        worker: cells.get("worker")?,
        started_at: cells.instant("started_at")?,
        ended_at: cells.instant_if_any("ended_at")?,
        outcome: cells.find("outcome")?,
        answer_status: answer_status.and_then(|status| u16::try_from(status).ok()),
        diagnostic: cells.find("diagnostic")?,
    })
}
