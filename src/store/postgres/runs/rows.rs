//! Between rows of runs and the domain's types.

use sqlx::postgres::PgRow;
use uuid::Uuid;

use crate::domain::intent::{IntentId, IntentSeen, IntentStatus, Stamp};
use crate::domain::key::IdempotencyKey;
use crate::domain::message::{HeaderBlock, Recorded};
use crate::domain::run::{Run, RunId, RunKey, RunStatus};
use crate::domain::scope::{PoolId, RecordKey, TenantScope};
use crate::store::StoreError;
use crate::store::postgres::rows::Cells;
use crate::store::runs::{Attempt, RunLine, Transition};

const RUNS: &str = "eec_run";
const TRANSITIONS: &str = "eec_run_transition";
const ATTEMPTS: &str = "eec_run_attempt";
const INTENTS: &str = "eec_effect_intent";
const BODIES: &str = "eec_effect_body";

/// The columns of a run `r` that [`run`] reads.
macro_rules! run_columns {
    () => {
        "r.tenant_scope, r.run_id, r.record_version, r.last_transition_seq, r.status, r.workflow, \
         r.pool_id, r.idempotency_key, r.holds_record, r.definition, r.input, r.progress, r.reason"
    };
}

/// Those that [`line()`] reads too.
macro_rules! line_columns {
    () => {
        ", r.created_at, r.updated_at, r.due_at, r.ended_at"
    };
}

pub(super) use {line_columns, run_columns};

/// The key of a row that holds its two columns.
pub(super) fn run_key(row: &PgRow) -> Result<RunKey, StoreError> {
    let cells = Cells::new(row, RUNS);
    Ok(RunKey {
        tenant: TenantScope::stored(cells.get("tenant_scope")?),
        id: RunId(cells.get("run_id")?),
    })
}

/// The run that `run_columns!` gave.
pub(super) fn run(row: &PgRow) -> Result<Run, StoreError> {
    let cells = Cells::new(row, RUNS);
    let key = run_key(row)?;
    let record_key = IdempotencyKey::from_text(cells.get("idempotency_key")?);
    let record_key = record_key.ok().flatten();
    Ok(Run {
        record_version: cells.get("record_version")?,
        last_transition_seq: cells.get("last_transition_seq")?,
        status: run_status(row)?,
        workflow: cells.get("workflow")?,
        record: RecordKey {
            tenant: key.tenant.clone(),
            pool: PoolId::stored(cells.get("pool_id")?),
            key: record_key.ok_or_else(|| {
                cells.inconsistent("idempotency_key", "no key that a client can send")
            })?,
        },
        key,
        holds_record: cells.get("holds_record")?,
        definition: cells.bytes("definition")?,
        input: cells.bytes("input")?,
        progress: cells.bytes("progress")?,
        reason: cells.get("reason")?,
    })
}

/// Its status.
pub(super) fn run_status(row: &PgRow) -> Result<RunStatus, StoreError> {
    let cells = Cells::new(row, RUNS);
    let status = RunStatus::from_word(cells.get("status")?);
    status.ok_or_else(|| cells.inconsistent("status", "no status of a run"))
}

/// The run with its times.
pub(super) fn line(row: &PgRow) -> Result<RunLine, StoreError> {
    let cells = Cells::new(row, RUNS);
    Ok(RunLine {
        run: run(row)?,
        created_at: cells.get("created_at")?,
        updated_at: cells.get("updated_at")?,
        due_at: cells.get("due_at")?,
        ended_at: cells.get("ended_at")?,
    })
}

/// What a tick sees of an intent, from columns that begin with `intent_` where a run has them too.
pub(super) fn seen(row: &PgRow) -> Result<IntentSeen, StoreError> {
    let cells = Cells::new(row, INTENTS);
    let status = IntentStatus::from_word(cells.get("intent_status")?);
    Ok(IntentSeen {
        seq: cells.get("seq")?,
        status: status.ok_or_else(|| cells.inconsistent("status", "no status of an intent"))?,
        changed: cells.get("changed")?,
        tries: cells.count("tries")?,
        has_body: cells.get("has_body")?,
        outcome: cells.get("outcome")?,
        diagnostic: cells.get("diagnostic")?,
        answer: answer(row)?,
    })
}

/// The answer in `answer_status`, `answer_headers` and `answer_body`, if the row holds one.
pub(super) fn answer(row: &PgRow) -> Result<Option<Recorded>, StoreError> {
    let cells = Cells::new(row, BODIES);
    if cells.get::<Option<i16>>("answer_status")?.is_none() {
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
pub(super) fn transition(row: &PgRow) -> Result<Transition, StoreError> {
    let cells = Cells::new(row, TRANSITIONS);
    Ok(Transition {
        seq: cells.get("seq")?,
        record_version: cells.get("record_version")?,
        at: cells.get("at")?,
        kind: cells.get("kind")?,
        step: cells.get("step")?,
        detail: cells.bytes_if_any("detail")?,
        stamp: cells.get::<Option<Uuid>>("stamp")?.map(Stamp),
    })
}

/// A claim of an intent.
pub(super) fn attempt(row: &PgRow) -> Result<Attempt, StoreError> {
    let cells = Cells::new(row, ATTEMPTS);
    let answer_status: Option<i32> = cells.get("answer_status")?;
    Ok(Attempt {
        intent_id: IntentId(cells.get("intent_id")?),
        stamp: Stamp(cells.get("stamp")?),
        try_no: cells.count("try")?,
        status: cells.get("status")?,
        worker: cells.get("worker")?,
        started_at: cells.get("started_at")?,
        ended_at: cells.get("ended_at")?,
        outcome: cells.get("outcome")?,
        answer_status: answer_status.and_then(|status| u16::try_from(status).ok()),
        diagnostic: cells.get("diagnostic")?,
    })
}
