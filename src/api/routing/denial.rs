//! Why a caller doesn't get what it asked for, in the words that the proxy's clients know.

use std::time::Duration;

use serde_json::json;

use super::wire;
use crate::domain::decide::Refusal;
use crate::domain::record::State;
use crate::problem::{Kind, Problem, RETRY_AFTER, retry_after};
use crate::routing::callers::{Held, Stale};
use crate::routing::gate::Denial;
use crate::routing::replay::Decided;
use crate::store::StoreError;
use crate::telemetry::Chain;

pub(super) const SEND_AGAIN: &str = "The store did not answer, and the call may have had its effect. Send the same call again: it \
     is recognised.";

/// The store gave no answer.
pub(super) fn not_answered(error: &StoreError) -> Problem {
    let detail = match error {
        StoreError::Inconsistent { .. } => {
            "A row holds what this version can't read; the gateway's log names it."
        }
        error if error.may_have_happened() => SEND_AGAIN,
        _ => "The store can't be asked, and nothing was changed. Send the same call again later.",
    };
    tracing::warn!(error = %Chain(error), "a service's call failed");
    Problem::new(Kind::StoreUnavailable, detail).retry_after(RETRY_AFTER)
}

/// The token is not taken any more. What was decided instead stands in `decision`.
pub(super) fn stale(late: &Stale) -> Problem {
    let detail = match (&late.state, late.bears_token) {
        (None, _) => "The record is gone; nothing was written.",
        (Some(State::Completed(..)), true) => "This claim is decided already; nothing was written.",
        (Some(State::OutcomeUnknown), true) => {
            "The lease is over, and the outcome counts as unknown; nothing was written. A \
             completion or a release is taken still."
        }
        (Some(State::FailedBeforeCommit { .. }), true) => {
            "This claim was given up, or its lease is over; nothing was written. A completion is \
             taken until another claims the record."
        }
        _ => "Another attempt owns this key now; nothing was written.",
    };
    let state = late.state.map(State::word);
    let problem = Problem::new(Kind::AttemptStale, detail).member("state", state);
    match &late.decided {
        Some(decided) => problem.member("decision", wire::decided(decided)),
        None => problem,
    }
}

/// The caller's own claim ended, and nobody knows how. Whoever does can still say so.
pub(super) fn unknown(held: &Held) -> Problem {
    Problem::new(
        Kind::OutcomeUnknown,
        "This claim's lease ended without a word, so what it was for may have been done. It will \
         not be claimed again. If you know what became of it, complete or release it with this \
         token; else ask the operator.",
    )
    .member("state", State::OutcomeUnknown.word())
    .member("attempt_token", json!(held.token.0))
    .member("generation_id", json!(held.generation_id.0))
    .member("derived_key", json!(held.derived_key))
    .member("repeated", held.repeated)
}

/// There is a decision, without its body.
pub(super) fn not_replayable(decided: &Decided) -> Problem {
    Problem::new(
        Kind::ResponseNotReplayable,
        "The request was carried out once and will not be again; its answer was too large or a \
         stream and was not kept. Its status stands in original_status.",
    )
    .member("original_status", decided.recorded.status)
    .member("decision", wire::decided(decided))
}

/// Why a claim was not made. `lease` bounds `Retry-After`.
pub(super) fn denied(denial: Denial, lease: Duration) -> Problem {
    let clamp = |wait| retry_after(wait, lease);
    match denial {
        Denial::Refused(refusal) => refused(refusal, clamp(lease)),
        Denial::InProgress(wait) | Denial::Follow(wait) => in_progress(clamp(wait)),
        Denial::KeyFull(wait) => Problem::new(
            Kind::InProgress,
            "Many callers already wait for this key. Try again later with the same key.",
        )
        .retry_after(clamp(wait)),
        Denial::Full => Problem::new(
            Kind::Overloaded,
            "The gateway has no room for another waiting caller. Try again later.",
        )
        .retry_after(RETRY_AFTER),
        Denial::StoreUnavailable => {
            Problem::new(Kind::StoreUnavailable, SEND_AGAIN).retry_after(RETRY_AFTER)
        }
        Denial::Contended => Problem::new(
            Kind::Overloaded,
            "The key's record kept changing hands. Send the same call again.",
        )
        .retry_after(RETRY_AFTER),
        Denial::Stale | Denial::Gone => Problem::new(
            Kind::AttemptStale,
            "Another attempt owns this key now. Reserve it again to get its result.",
        )
        .retry_after(RETRY_AFTER),
    }
}

fn refused(refusal: Refusal, retry_after: Duration) -> Problem {
    match refusal {
        Refusal::Mismatch => Problem::new(
            Kind::KeyReused,
            "This key was used for a request with another fingerprint. Use a new key for a new \
             request.",
        )
        .member("compared", "fingerprint"),
        Refusal::OutcomeUnknown => Problem::new(
            Kind::OutcomeUnknown,
            "What this key was claimed for may have been done. It will not be claimed again. Find \
             out, or ask the operator; a retry gets this answer until then.",
        )
        .member("state", State::OutcomeUnknown.word()),
        Refusal::InProgress | Refusal::Follow => in_progress(retry_after),
        Refusal::KeyExpired => Problem::new(
            Kind::KeyExpired,
            "The answer for this key was kept for its time and is gone. Use a new key for a new \
             request.",
        ),
    }
}

fn in_progress(retry_after: Duration) -> Problem {
    Problem::new(
        Kind::InProgress,
        "The first request with this key is still running. Try again later with the same key.",
    )
    .retry_after(retry_after)
}
