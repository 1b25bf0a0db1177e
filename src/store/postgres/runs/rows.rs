//! Between rows of runs and the domain's types.

use bytes::Bytes;
use sqlx::Row as _;
use sqlx::postgres::PgRow;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::domain::intent::{IntentId, IntentSeen, IntentStatus, Stamp};
use crate::domain::key::IdempotencyKey;
use crate::domain::message::{HeaderBlock, Recorded};
use crate::domain::run::{Run, RunId, RunKey, RunStatus};
use crate::domain::scope::{PoolId, RecordKey, TenantScope};
use crate::store::StoreError;
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
    Ok(RunKey {
        tenant: TenantScope::stored(cell(row, RUNS, "tenant_scope")?),
        id: RunId(cell(row, RUNS, "run_id")?),
    })
}

/// The run that `run_columns!` gave.
pub(super) fn run(row: &PgRow) -> Result<Run, StoreError> {
    let key = run_key(row)?;
    let record_key = IdempotencyKey::from_text(cell(row, RUNS, "idempotency_key")?);
    let record_key = record_key.ok().flatten();
    Ok(Run {
        record_version: cell(row, RUNS, "record_version")?,
        last_transition_seq: cell(row, RUNS, "last_transition_seq")?,
        status: run_status(row)?,
        workflow: cell(row, RUNS, "workflow")?,
        record: RecordKey {
            tenant: key.tenant.clone(),
            pool: PoolId::stored(cell(row, RUNS, "pool_id")?),
            key: record_key
                .ok_or_else(|| bad(RUNS, "idempotency_key", "no key that a client can send"))?,
        },
        key,
        holds_record: cell(row, RUNS, "holds_record")?,
        definition: bytes(row, RUNS, "definition")?,
        input: bytes(row, RUNS, "input")?,
        progress: bytes(row, RUNS, "progress")?,
        reason: cell(row, RUNS, "reason")?,
    })
}

/// Its status.
pub(super) fn run_status(row: &PgRow) -> Result<RunStatus, StoreError> {
    let word: &str = cell(row, RUNS, "status")?;
    RunStatus::from_word(word).ok_or_else(|| bad(RUNS, "status", "no status of a run"))
}

/// The run with its times.
pub(super) fn line(row: &PgRow) -> Result<RunLine, StoreError> {
    Ok(RunLine {
        run: run(row)?,
        created_at: cell(row, RUNS, "created_at")?,
        updated_at: cell(row, RUNS, "updated_at")?,
        due_at: cell(row, RUNS, "due_at")?,
        ended_at: cell(row, RUNS, "ended_at")?,
    })
}

/// What a tick sees of an intent, from columns that begin with `intent_` where a run has them too.
pub(super) fn seen(row: &PgRow) -> Result<IntentSeen, StoreError> {
    let word: &str = cell(row, INTENTS, "intent_status")?;
    let status = IntentStatus::from_word(word);
    Ok(IntentSeen {
        seq: cell(row, INTENTS, "seq")?,
        status: status.ok_or_else(|| bad(INTENTS, "status", "no status of an intent"))?,
        changed: cell(row, INTENTS, "changed")?,
        tries: count(row, INTENTS, "tries")?,
        has_body: cell(row, INTENTS, "has_body")?,
        outcome: cell(row, INTENTS, "outcome")?,
        diagnostic: cell(row, INTENTS, "diagnostic")?,
        answer: answer(row)?,
    })
}

/// The answer in `answer_status`, `answer_headers` and `answer_body`, if the row holds one.
pub(super) fn answer(row: &PgRow) -> Result<Option<Recorded>, StoreError> {
    let Some(status) = cell::<Option<i16>>(row, BODIES, "answer_status")? else {
        return Ok(None);
    };
    let status = u16::try_from(status)
        .ok()
        .filter(|s| (100..=999).contains(s));
    let headers = bytes_if_any(row, BODIES, "answer_headers")?.unwrap_or_default();
    Ok(Some(Recorded {
        status: status.ok_or_else(|| bad(BODIES, "status", "no status of an answer"))?,
        headers: HeaderBlock::stored(headers)
            .ok_or_else(|| bad(BODIES, "headers", "not a block of header lines"))?,
        cors: None,
        body: bytes_if_any(row, BODIES, "answer_body")?,
    }))
}

/// A line of a run's history.
pub(super) fn transition(row: &PgRow) -> Result<Transition, StoreError> {
    Ok(Transition {
        seq: cell(row, TRANSITIONS, "seq")?,
        record_version: cell(row, TRANSITIONS, "record_version")?,
        at: cell(row, TRANSITIONS, "at")?,
        kind: cell(row, TRANSITIONS, "kind")?,
        step: cell(row, TRANSITIONS, "step")?,
        detail: bytes_if_any(row, TRANSITIONS, "detail")?,
        stamp: cell::<Option<Uuid>>(row, TRANSITIONS, "stamp")?.map(Stamp),
    })
}

/// A claim of an intent.
pub(super) fn attempt(row: &PgRow) -> Result<Attempt, StoreError> {
    let answer_status: Option<i32> = cell(row, ATTEMPTS, "answer_status")?;
    Ok(Attempt {
        intent_id: IntentId(cell(row, ATTEMPTS, "intent_id")?),
        stamp: Stamp(cell(row, ATTEMPTS, "stamp")?),
        try_no: count(row, ATTEMPTS, "try")?,
        status: cell(row, ATTEMPTS, "status")?,
        worker: cell(row, ATTEMPTS, "worker")?,
        started_at: cell(row, ATTEMPTS, "started_at")?,
        ended_at: cell::<Option<OffsetDateTime>>(row, ATTEMPTS, "ended_at")?,
        outcome: cell(row, ATTEMPTS, "outcome")?,
        answer_status: answer_status.and_then(|status| u16::try_from(status).ok()),
        diagnostic: cell(row, ATTEMPTS, "diagnostic")?,
    })
}

/// A value of a row, or the report of a row that no version of this program wrote.
pub(super) fn cell<'r, T>(
    row: &'r PgRow,
    table: &'static str,
    column: &'static str,
) -> Result<T, StoreError>
where
    T: sqlx::Decode<'r, sqlx::Postgres> + sqlx::Type<sqlx::Postgres>,
{
    let cell = row.try_get(column);
    cell.map_err(|error| bad(table, column, &error.to_string()))
}

fn count(row: &PgRow, table: &'static str, column: &'static str) -> Result<u32, StoreError> {
    let count: i32 = cell(row, table, column)?;
    u32::try_from(count).map_err(|_| bad(table, column, "below zero"))
}

fn bytes(row: &PgRow, table: &'static str, column: &'static str) -> Result<Bytes, StoreError> {
    cell::<&[u8]>(row, table, column).map(Bytes::copy_from_slice)
}

fn bytes_if_any(
    row: &PgRow,
    table: &'static str,
    column: &'static str,
) -> Result<Option<Bytes>, StoreError> {
    let bytes: Option<&[u8]> = cell(row, table, column)?;
    Ok(bytes.map(Bytes::copy_from_slice))
}

fn bad(table: &'static str, column: &'static str, what: &str) -> StoreError {
    StoreError::Inconsistent {
        table,
        column,
        what: what.to_owned(),
    }
}
