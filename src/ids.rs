//! Where ids are drawn: the only source of randomness besides the secret's first bytes.

use uuid::Uuid;

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

/// An id that no line of the audit log ever had.
pub fn audit_id() -> Uuid {
    fresh()
}
