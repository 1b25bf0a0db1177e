//! The pure core: what a key, a record, a decision, a run and an intent are, and what follows from what.
//!
//! Nothing here awaits, reads a clock, draws a random number or knows a database or a framework.
//! Time arrives as durations that the store judged with its own clock; ids arrive from outside.
//! Transport types and rows are converted at the border, in `proxy`, `api` and `store`.

pub mod decide;
pub mod fingerprint;
pub mod intent;
pub mod key;
pub mod message;
pub mod policy;
pub mod record;
pub mod run;
pub mod scope;
pub mod secret;
pub mod workflow;

use std::time::Duration;

use uuid::Uuid;

/// Whole milliseconds, as they are frozen, stored and told.
#[must_use]
pub fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// The `UUIDv8` (RFC 9562) that follows from what was hashed: always the same.
#[must_use]
pub fn derived_uuid(hasher: &blake3::Hasher) -> Uuid {
    let mut bytes = [0; 16];
    hasher.finalize_xof().fill(&mut bytes);
    uuid::Builder::from_custom_bytes(bytes).into_uuid()
}
