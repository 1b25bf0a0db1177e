//! What an error of SQLite says about the operation, decided here alone.

use std::path::Path;

use crate::store::StoreError;
use crate::store::open::OpenError;

/// SQLite's primary result codes (<https://sqlite.org/rescode.html>).
mod code {
    pub const BUSY: u32 = 5;
    pub const LOCKED: u32 = 6;
    pub const READONLY: u32 = 8;
    pub const INTERRUPT: u32 = 9;
    pub const CORRUPT: u32 = 11;
    pub const FULL: u32 = 13;
    pub const NOTADB: u32 = 26;
}

/// What an error says before the commit: of a read, or of a transaction that is then undone.
pub fn before(error: sqlx::Error) -> StoreError {
    match primary_code(&error) {
        // Another process has the file; SQLite gave up waiting for it before it did anything.
        Some(code::BUSY | code::LOCKED | code::INTERRUPT) => StoreError::Unavailable(error),
        Some(_) => StoreError::Refused(error),
        None if matches!(error, sqlx::Error::PoolClosed) => StoreError::Closed,
        None => StoreError::Unavailable(error),
    }
}

/// What an error of the commit itself says.
pub fn of_commit(error: sqlx::Error) -> StoreError {
    match primary_code(&error) {
        // It gave up waiting, or the frame that would have made it count was not written.
        Some(code::BUSY | code::LOCKED | code::INTERRUPT | code::FULL | code::READONLY) => {
            before(error)
        }
        // One that failed on input or output may yet be found whole after a crash.
        _ => StoreError::Ambiguous(error),
    }
}

/// What `error` says about a file that can't be opened.
pub fn of_file(error: sqlx::Error, path: &Path) -> OpenError {
    let advice = match primary_code(&error) {
        Some(code::BUSY | code::LOCKED) => "another process has locked it; stop that one first",
        Some(code::FULL) => "the disk is full; make room first",
        Some(code::CORRUPT) => "it is damaged; restore a backup",
        Some(code::NOTADB) => "it is not a SQLite database; name another file",
        _ => "let the gateway's user read and write it, and its directory too",
    };
    OpenError::File {
        path: path.to_owned(),
        advice,
        source: error.into(),
    }
}

/// Extended codes keep the primary one in their lowest byte.
fn primary_code(error: &sqlx::Error) -> Option<u32> {
    let code: u32 = error.as_database_error()?.code()?.parse().ok()?;
    Some(code & 0xff)
}
