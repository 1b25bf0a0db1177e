//! Rows of runs to values.

use bytes::Bytes;
use sqlx::sqlite::SqliteRow;
use uuid::Uuid;

use crate::domain::intent::{IntentId, IntentSeen, IntentStatus, Stamp};
use crate::domain::key::IdempotencyKey;
use crate::domain::message::{HeaderBlock, Recorded};
use crate::domain::run::{Run, RunId, RunKey, RunStatus};
use crate::domain::scope::{PoolId, RecordKey, TenantScope};
use crate::store::StoreError;
use crate::store::runs::{Attempt, RunLine, Transition};
use crate::store::sqlite::rows::{self, Cells};

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
            key: record_key
                .ok_or_else(|| bad(RUNS, "idempotency_key", "no key that a client can send"))?,
        },
        key,
        holds_record: cells.get::<i64>("holds_record")? != 0,
        definition: bytes(&cells, "definition")?.unwrap_or_default(),
        input: bytes(&cells, "input")?.unwrap_or_default(),
        progress: bytes(&cells, "progress")?.unwrap_or_default(),
        reason: cells.find("reason")?,
    })
}

/// Its status.
pub fn run_status(row: &SqliteRow) -> Result<RunStatus, StoreError> {
    let word: String = Cells::new(row, RUNS).get("status")?;
    RunStatus::from_word(&word).ok_or_else(|| bad(RUNS, "status", "no status of a run"))
}

/// A run with its times.
pub fn line(row: &SqliteRow) -> Result<RunLine, StoreError> {
    let cells = Cells::new(row, RUNS);
    let instant = |column| {
        let ms: Option<i64> = cells.find(column)?;
        ms.map(|ms| rows::instant(ms, RUNS, column)).transpose()
    };
    Ok(RunLine {
        run: run(row)?,
        created_at: cells.instant("created_at")?,
        updated_at: cells.instant("updated_at")?,
        due_at: instant("due_at")?,
        ended_at: instant("ended_at")?,
    })
}

/// What a tick sees of an intent.
pub fn seen(row: &SqliteRow) -> Result<IntentSeen, StoreError> {
    let cells = Cells::new(row, INTENTS);
    let word: String = cells.get("status")?;
    let status = IntentStatus::from_word(&word);
    Ok(IntentSeen {
        seq: cells.get("seq")?,
        status: status.ok_or_else(|| bad(INTENTS, "status", "no status of an intent"))?,
        changed: cells.get::<i64>("changed")? != 0,
        tries: count(&cells, INTENTS, "tries")?,
        has_body: cells.get::<i64>("has_body")? != 0,
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
    let headers = bytes(&cells, "answer_headers")?.unwrap_or_default();
    Ok(Some(Recorded {
        status: cells.status("answer_status")?,
        headers: HeaderBlock::stored(headers)
            .ok_or_else(|| bad(BODIES, "headers", "not a block of header lines"))?,
        cors: None,
        body: bytes(&cells, "answer_body")?,
    }))
}

/// A line of a run's history.
pub fn transition(row: &SqliteRow) -> Result<Transition, StoreError> {
    let cells = Cells::new(row, TRANSITIONS);
    let stamp: Option<Vec<u8>> = cells.find("stamp")?;
    let stamp = stamp
        .map(|bytes| cells.exactly("stamp", bytes))
        .transpose()?;
    Ok(Transition {
        seq: cells.get("seq")?,
        record_version: cells.get("record_version")?,
        at: cells.instant("at")?,
        kind: cells.get("kind")?,
        step: cells.find("step")?,
        detail: bytes(&cells, "detail")?,
        stamp: stamp.map(|bytes| Stamp(Uuid::from_bytes(bytes))),
    })
}

/// A claim of an intent.
pub fn attempt(row: &SqliteRow) -> Result<Attempt, StoreError> {
    let cells = Cells::new(row, ATTEMPTS);
    let ended_ms: Option<i64> = cells.find("ended_at")?;
    let ended_at = ended_ms.map(|ms| rows::instant(ms, ATTEMPTS, "ended_at"));
    let answer_status: Option<i64> = cells.find("answer_status")?;
    Ok(Attempt {
        intent_id: IntentId(cells.id("intent_id")?),
        stamp: Stamp(cells.id("stamp")?),
        try_no: count(&cells, ATTEMPTS, "try")?,
        status: cells.get("status")?,
        worker: cells.get("worker")?,
        started_at: cells.instant("started_at")?,
        ended_at: ended_at.transpose()?,
        outcome: cells.find("outcome")?,
        answer_status: answer_status.and_then(|status| u16::try_from(status).ok()),
        diagnostic: cells.find("diagnostic")?,
    })
}

fn bytes(cells: &Cells<'_>, column: &'static str) -> Result<Option<Bytes>, StoreError> {
    Ok(cells.find::<Vec<u8>>(column)?.map(Bytes::from))
}

fn count(cells: &Cells<'_>, table: &'static str, column: &'static str) -> Result<u32, StoreError> {
    let count: i64 = cells.get(column)?;
    u32::try_from(count).map_err(|_| bad(table, column, "no count"))
}

fn bad(table: &'static str, column: &'static str, what: &str) -> StoreError {
    StoreError::Inconsistent {
        table,
        column,
        what: what.to_owned(),
    }
}
