//! Rows of intents to values.

use sqlx::sqlite::SqliteRow;
use uuid::Uuid;

use crate::domain::intent::{Destination, IntentId, IntentKey, IntentStatus, Sending};
use crate::domain::run::RunId;
use crate::domain::scope::TenantScope;
use crate::store::StoreError;
use crate::store::outbox::IntentLine;
use crate::store::sqlite::rows::{Cells, between};

/// The table of intents.
pub const INTENTS: &str = "eec_effect_intent";

/// A count, which is never below zero.
pub fn count(cells: &Cells<'_>, column: &'static str) -> Result<u32, StoreError> {
    let count: i64 = cells.get(column)?;
    u32::try_from(count).map_err(|_| cells.inconsistent(column, format!("{count} is no count")))
}

/// How an intent is sent.
pub fn sending(cells: &Cells<'_>) -> Result<Sending, StoreError> {
    // Not what it says: it may hold what is secret.
    let bytes: Vec<u8> = cells.get("sending")?;
    let read = serde_json::from_slice(&bytes);
    read.map_err(|_| cells.inconsistent("sending", "no way of sending".to_owned()))
}

/// How an intent stands.
pub fn status(cells: &Cells<'_>) -> Result<IntentStatus, StoreError> {
    let word: String = cells.get("status")?;
    let status = IntentStatus::from_word(&word);
    status.ok_or_else(|| cells.inconsistent("status", format!("{word} is no status")))
}

/// An id of 16 bytes that may be null.
pub fn id(cells: &Cells<'_>, column: &'static str) -> Result<Option<Uuid>, StoreError> {
    match cells.find::<Vec<u8>>(column)? {
        None => Ok(None),
        Some(bytes) => cells
            .exactly(column, bytes)
            .map(|id| Some(Uuid::from_bytes(id))),
    }
}

/// An intent for people.
pub fn line(row: &SqliteRow, now_ms: i64) -> Result<IntentLine, StoreError> {
    let cells = Cells::new(row, INTENTS);
    let instant = |column| match cells.find::<i64>(column)? {
        None => Ok(None),
        Some(_) => cells.instant(column).map(Some),
    };
    let first_due_ms: Option<i64> = cells.find("first_due_at")?;
    let due_ms: Option<i64> = cells.find("due_at")?;
    let held = due_ms.is_some_and(|due_ms| due_ms > now_ms);
    let answer_status: Option<i64> = cells.find("answer_status")?;
    let body_bytes: Option<i64> = cells.find("body_bytes")?;
    Ok(IntentLine {
        key: IntentKey {
            tenant: TenantScope::stored(&cells.get::<String>("tenant_scope")?),
            id: IntentId(cells.id("intent_id")?),
        },
        run_id: RunId(cells.id("run_id")?),
        seq: cells.get("seq")?,
        step: cells.get("step")?,
        status: status(&cells)?,
        destination: Destination(cells.get("destination")?),
        idempotency_key: cells.get("idempotency_key")?,
        sending: sending(&cells)?,
        age: first_due_ms.map(|ms| between(ms, now_ms)),
        claimed: held && id(&cells, "claim_token")?.is_some(),
        due_at: instant("due_at")?,
        tries: count(&cells, "tries")?,
        faults: count(&cells, "faults")?,
        deaths: count(&cells, "deaths")?,
        redrives: count(&cells, "redrives")?,
        outcome: cells.find("outcome")?,
        answer_status: answer_status.and_then(|status| u16::try_from(status).ok()),
        diagnostic: cells.find("diagnostic")?,
        body_bytes: body_bytes.and_then(|bytes| u64::try_from(bytes).ok()),
        created_at: cells.instant("created_at")?,
        ended_at: instant("ended_at")?,
    })
}
