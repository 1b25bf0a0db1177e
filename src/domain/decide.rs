//! The one table of the product: what a claim that found a record may do.
//!
//! Checks come in a written order: mismatch, committed, unknown, live, reclaimable. The snapshot
//! of every combination at the end of this file's tests is what a reviewer, an operator and the
//! docs read.

use super::policy::Duplicates;
use super::record::{DecisionId, Lease, State, Validity};

/// What a claim that lost its insert may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Claim the row by a guarded update, and own it.
    TakeOver,
    /// Give the stored answer.
    Replay(DecisionId),
    /// Wait for the owner.
    Park,
    /// The lease is over: make the sweep's transition, then decide again.
    Sweep,
    /// Say no.
    Refuse(Refusal),
}

/// Why a claim was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The key belongs to another request.
    Mismatch,
    /// The upstream may have run; nobody knows.
    OutcomeUnknown,
    /// The first request still runs.
    InProgress,
    /// The first request still runs, and can be followed.
    Follow,
    /// The key's decision is past its validity, and the route refuses such keys.
    KeyExpired,
}

/// Decides for a claim whose insert found a record in `state`. `same_request`: the record's
/// fingerprint is this request's, or there is nothing to compare.
#[must_use]
pub fn decide(state: State, same_request: bool, duplicates: Duplicates) -> Decision {
    match state {
        State::Completed(_, Validity::Expired)
        | State::FailedBeforeCommit { maybe_sent: false } => Decision::TakeOver,
        State::Completed(_, Validity::Tombstone) => Decision::Refuse(Refusal::KeyExpired),
        _ if !same_request => Decision::Refuse(Refusal::Mismatch),
        State::Completed(decision_id, Validity::Valid(_)) => Decision::Replay(decision_id),
        State::OutcomeUnknown => Decision::Refuse(Refusal::OutcomeUnknown),
        State::Pending(Lease::Over) => Decision::Sweep,
        State::Pending(Lease::Held(_) | Lease::Unbounded) => match duplicates {
            Duplicates::Wait => Decision::Park,
            Duplicates::Reject => Decision::Refuse(Refusal::InProgress),
            Duplicates::Follow => Decision::Refuse(Refusal::Follow),
        },
        State::FailedBeforeCommit { maybe_sent: true } => Decision::TakeOver,
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;
    use std::time::Duration;

    use uuid::Uuid;

    use super::*;

    #[test]
    fn the_table() {
        let id = DecisionId(Uuid::nil());
        let second = Duration::from_secs(1);
        let states = [
            (
                "completed, valid",
                State::Completed(id, Validity::Valid(second)),
            ),
            (
                "completed, tombstone",
                State::Completed(id, Validity::Tombstone),
            ),
            (
                "completed, expired",
                State::Completed(id, Validity::Expired),
            ),
            ("outcome_unknown", State::OutcomeUnknown),
            ("pending, lease held", State::Pending(Lease::Held(second))),
            ("pending, no lease", State::Pending(Lease::Unbounded)),
            ("pending, lease over", State::Pending(Lease::Over)),
            (
                "failed, nothing sent",
                State::FailedBeforeCommit { maybe_sent: false },
            ),
            (
                "failed, maybe sent",
                State::FailedBeforeCommit { maybe_sent: true },
            ),
        ];
        let mut table = String::new();
        for (name, state) in states {
            for same_request in [true, false] {
                for duplicates in [Duplicates::Wait, Duplicates::Reject, Duplicates::Follow] {
                    let request = if same_request { "same" } else { "other" };
                    let decision = match decide(state, same_request, duplicates) {
                        Decision::Replay(_) => "Replay".to_owned(),
                        other => format!("{other:?}"),
                    };
                    writeln!(
                        table,
                        "{name:<22}{request:<7}{:<8}{decision}",
                        format!("{duplicates:?}")
                    )
                    .unwrap();
                }
            }
        }
        insta::assert_snapshot!(table);
    }
}
