//! Where ids and jitter are drawn: the only source of randomness besides the secret's first bytes.

use uuid::Uuid;

use crate::domain::intent::Stamp;
use crate::domain::record::{AttemptToken, DecisionId, GenerationId};

/// A UUIDv7: ordered by time, never drawn twice.
#[expect(clippy::disallowed_methods, reason = "this is the place")]
fn fresh() -> Uuid {
    Uuid::now_v7()
}

/// A token that no attempt ever had.
pub fn attempt_token() -> AttemptToken {
    AttemptToken(fresh())
}

/// An id that no generation ever had.
pub fn generation_id() -> GenerationId {
    GenerationId(fresh())
}

/// An id that no decision ever had.
pub fn decision_id() -> DecisionId {
    DecisionId(fresh())
}

/// A stamp that no claim of an intent, no tick and no input ever had.
pub fn stamp() -> Stamp {
    Stamp(fresh())
}

/// A key for a request that came without one.
pub fn generated_key() -> Uuid {
    fresh()
}

/// An id that no line of the audit log ever had.
pub fn audit_id() -> Uuid {
    fresh()
}

/// A number from 0 to 1, drawn evenly, to spread what many gateways would do at one moment.
/// Without randomness it is the middle.
pub fn jitter() -> f64 {
    getrandom::u32().map_or(0.5, |drawn| f64::from(drawn) / f64::from(u32::MAX))
}

/// What tells this process from all others that ever run.
pub fn instance() -> String {
    fresh().simple().to_string()
}
