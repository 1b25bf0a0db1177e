//! What an error of SQLite says about the operation, decided here alone.

use crate::store::StoreError;

/// How far the operation had come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Nothing was committed: a read, or a transaction that is undone.
    Before,
    /// The commit itself.
    Commit,
}

/// SQLite's primary result codes (<https://sqlite.org/rescode.html>).
mod code {
    pub const BUSY: u32 = 5;
    pub const LOCKED: u32 = 6;
    pub const READONLY: u32 = 8;
    pub const INTERRUPT: u32 = 9;
    pub const FULL: u32 = 13;
}

/// The same for a result.
pub fn sort<T>(result: Result<T, sqlx::Error>, stage: Stage) -> Result<T, StoreError> {
    result.map_err(|error| of(error, stage))
}

/// What `error` says.
pub fn of(error: sqlx::Error, stage: Stage) -> StoreError {
    match primary_code(&error) {
        // Another process has the file; SQLite gave up waiting for it before it did anything.
        Some(code::BUSY | code::LOCKED | code::INTERRUPT) => StoreError::Unavailable(error),
        // The frame that would have made it count was not written.
        Some(code::FULL | code::READONLY) => StoreError::Refused(error),
        // A commit that failed on input or output may yet be found whole after a crash.
        _ if stage == Stage::Commit => StoreError::Ambiguous(error),
        Some(_) => StoreError::Refused(error),
        None if matches!(error, sqlx::Error::PoolClosed) => StoreError::Closed,
        None => StoreError::Unavailable(error),
    }
}

/// Extended codes keep the primary one in their lowest byte.
fn primary_code(error: &sqlx::Error) -> Option<u32> {
    let code: u32 = error.as_database_error()?.code()?.parse().ok()?;
    Some(code & 0xff)
}
