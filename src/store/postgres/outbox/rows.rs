//! Rows of intents to values.

use sqlx::postgres::PgRow;

use crate::domain::intent::{Destination, IntentId, IntentKey, IntentStatus, Sending};
use crate::domain::run::RunId;
use crate::domain::scope::TenantScope;
use crate::store::StoreError;
use crate::store::outbox::IntentLine;
use crate::store::postgres::rows::{Cells, from_us};

/// The table of intents.
pub(super) const INTENTS: &str = "eec_effect_intent";

/// How an intent is sent.
pub(super) fn sending(cells: Cells<'_>) -> Result<Sending, StoreError> {
    // Not what it says: it may hold what is secret.
    let read = serde_json::from_slice(cells.get("sending")?);
    read.map_err(|_| cells.inconsistent("sending", "no way of sending"))
}

/// How an intent stands.
pub(super) fn status(cells: Cells<'_>) -> Result<IntentStatus, StoreError> {
    let word: &str = cells.get("status")?;
    let status = IntentStatus::from_word(word);
    status.ok_or_else(|| cells.inconsistent("status", format!("{word} is no status")))
}

/// An intent for people.
pub(super) fn line(row: &PgRow) -> Result<IntentLine, StoreError> {
    let cells = Cells::new(row, INTENTS);
    let first_due_us: Option<i64> = cells.get("first_due_us")?;
    let answer_status: Option<i32> = cells.get("answer_status")?;
    let body_bytes: Option<i32> = cells.get("body_bytes")?;
    Ok(IntentLine {
        key: IntentKey {
            tenant: TenantScope::stored(cells.get("tenant_scope")?),
            id: IntentId(cells.get("intent_id")?),
        },
        run_id: RunId(cells.get("run_id")?),
        seq: cells.get("seq")?,
        step: cells.get("step")?,
        status: status(cells)?,
        destination: Destination(cells.get("destination")?),
        idempotency_key: cells.get("idempotency_key")?,
        sending: sending(cells)?,
        age: first_due_us.map(|us| from_us(-us)),
        claimed: cells.get("claimed")?,
        due_at: cells.get("due_at")?,
        tries: cells.count("tries")?,
        tries_before: cells.count("tries_before")?,
        faults: cells.count("faults")?,
        deaths: cells.count("deaths")?,
        redrives: cells.count("redrives")?,
        outcome: cells.get("outcome")?,
        answer_status: answer_status.and_then(|status| u16::try_from(status).ok()),
        diagnostic: cells.get("diagnostic")?,
        body_bytes: body_bytes.and_then(|bytes| u64::try_from(bytes).ok()),
        created_at: cells.get("created_at")?,
        ended_at: cells.get("ended_at")?,
    })
}

/// Whether the database would not keep what it was given: a text that its encoding can't hold is
/// one reason.
pub(super) fn refused(error: &StoreError) -> bool {
    matches!(error, StoreError::Refused(_))
}
