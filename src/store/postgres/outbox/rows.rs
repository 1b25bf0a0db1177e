//! Rows of intents to values.

use sqlx::Row as _;
use sqlx::postgres::PgRow;

use crate::domain::intent::{Destination, IntentId, IntentKey, IntentStatus, Sending};
use crate::domain::run::RunId;
use crate::domain::scope::TenantScope;
use crate::store::StoreError;
use crate::store::outbox::IntentLine;
use crate::store::postgres::row::from_us;

/// A value of a row, or the report of a row that no version of this program wrote.
pub(super) fn cell<'r, T>(row: &'r PgRow, column: &'static str) -> Result<T, StoreError>
where
    T: sqlx::Decode<'r, sqlx::Postgres> + sqlx::Type<sqlx::Postgres>,
{
    row.try_get(column)
        .map_err(|error| bad(column, error.to_string()))
}

/// A count, which is never below zero.
pub(super) fn count(row: &PgRow, column: &'static str) -> Result<u32, StoreError> {
    let count: i32 = cell(row, column)?;
    u32::try_from(count).map_err(|_| bad(column, format!("{count} is no count")))
}

/// How an intent is sent.
pub(super) fn sending(row: &PgRow) -> Result<Sending, StoreError> {
    // Not what it says: it may hold what is secret.
    let read = serde_json::from_slice(cell(row, "sending")?);
    read.map_err(|_| bad("sending", "no way of sending".to_owned()))
}

/// How an intent stands.
pub(super) fn status(row: &PgRow) -> Result<IntentStatus, StoreError> {
    let word: &str = cell(row, "status")?;
    IntentStatus::from_word(word).ok_or_else(|| bad("status", format!("{word} is no status")))
}

/// An intent for people.
pub(super) fn line(row: &PgRow) -> Result<IntentLine, StoreError> {
    let first_due_us: Option<i64> = cell(row, "first_due_us")?;
    let answer_status: Option<i32> = cell(row, "answer_status")?;
    let body_bytes: Option<i32> = cell(row, "body_bytes")?;
    Ok(IntentLine {
        key: IntentKey {
            tenant: TenantScope::stored(cell(row, "tenant_scope")?),
            id: IntentId(cell(row, "intent_id")?),
        },
        run_id: RunId(cell(row, "run_id")?),
        seq: cell(row, "seq")?,
        step: cell(row, "step")?,
        status: status(row)?,
        destination: Destination(cell(row, "destination")?),
        idempotency_key: cell(row, "idempotency_key")?,
        sending: sending(row)?,
        age: first_due_us.map(|us| from_us(-us)),
        claimed: cell(row, "claimed")?,
        due_at: cell(row, "due_at")?,
        tries: count(row, "tries")?,
        faults: count(row, "faults")?,
        deaths: count(row, "deaths")?,
        redrives: count(row, "redrives")?,
        outcome: cell(row, "outcome")?,
        answer_status: answer_status.and_then(|status| u16::try_from(status).ok()),
        diagnostic: cell(row, "diagnostic")?,
        body_bytes: body_bytes.and_then(|bytes| u64::try_from(bytes).ok()),
        created_at: cell(row, "created_at")?,
        ended_at: cell(row, "ended_at")?,
    })
}

/// Whether the database would not keep what it was given: a text that its encoding can't hold is
/// one reason.
pub(super) fn refused(error: &StoreError) -> bool {
    matches!(error, StoreError::Refused(_))
}

fn bad(column: &'static str, what: String) -> StoreError {
    StoreError::Inconsistent {
        table: "eec_effect_intent",
        column,
        what,
    }
}
