//! Rows of intents to values.

use sqlx::sqlite::SqliteRow;

use crate::domain::intent::{Destination, IntentId, IntentKey, IntentStatus, Sending};
use crate::domain::run::RunId;
use crate::domain::scope::TenantScope;
use crate::store::StoreError;
use crate::store::outbox::IntentLine;
use crate::store::sqlite::rows::{Cells, between};

/// The table of intents.
pub const INTENTS: &str = "eec_effect_intent";

/// How an intent is sent.
pub fn sending(cells: &Cells<'_>) -> Result<Sending, StoreError> {
    // Not what it says: it may hold what is secret.
    let bytes: Vec<u8> = cells.get("sending")?;
    let read = serde_json::from_slice(&bytes);
    read.map_err(|_| cells.inconsistent("sending", "no way of sending"))
}

/// How an intent stands.
pub fn status(cells: &Cells<'_>) -> Result<IntentStatus, StoreError> {
    let word: String = cells.get("status")?;
    let status = IntentStatus::from_word(&word);
    status.ok_or_else(|| cells.inconsistent("status", format!("{word} is no status")))
}

/// An intent for people.
pub fn line(row: &SqliteRow, now_ms: i64) -> Result<IntentLine, StoreError> {
    let cells = Cells::new(row, INTENTS);
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
        claimed: held && cells.id_if_any("claim_token")?.is_some(),
        due_at: cells.instant_if_any("due_at")?,
        tries: cells.count("tries")?,
        tries_before: cells.count("tries_before")?,
        faults: cells.count("faults")?,
        deaths: cells.count("deaths")?,
        redrives: cells.count("redrives")?,
        outcome: cells.find("outcome")?,
        answer_status: answer_status.and_then(|status| u16::try_from(status).ok()),
        diagnostic: cells.find("diagnostic")?,
        body_bytes: body_bytes.and_then(|bytes| u64::try_from(bytes).ok()),
        created_at: cells.instant("created_at")?,
        ended_at: cells.instant_if_any("ended_at")?,
    })
}
