//! The end of a try on its way to the store.
//!
//! It is told until the store has heard it, because what is not told is done again: an end that is
//! fenced for as long as the claim holds, a delivery a little longer, since it is true whoever has
//! the intent. Sending it again after a lost reply changes nothing.

use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::claims::Claim;
use crate::domain::intent::{End, Finish, Finished};
use crate::ids;
use crate::lifecycle::Bells;
use crate::store::StoreError;
use crate::store::group::Group;
use crate::telemetry::{Chain, metric};

/// For how long an end is told at the longest, however well the claim holds.
const TELL_MAX: Duration = Duration::from_mins(10);
/// For how long a delivery is told after its claim ended.
const DELIVERED_MAX: Duration = Duration::from_mins(2);
/// Pauses between two tellings, before jitter.
const PAUSE_FIRST: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// Where ends are told.
#[derive(Clone)]
pub struct Finisher {
    group: Group,
    bells: Bells,
    hard: CancellationToken,
}

impl Finisher {
    /// Tells `group`, and rings when a run has something to take in.
    #[must_use]
    pub fn new(group: Group, bells: Bells, hard: CancellationToken) -> Self {
        Self { group, bells, hard }
    }

    /// Tells an end until it is heard, or is not worth it any more.
    pub async fn tell(&self, mut end: Finish, claim: &Claim) {
        claim.end();
        let begun = Instant::now();
        let mut pause = PAUSE_FIRST;
        loop {
            let Err(error) = self.tell_once(&end).await else {
                return;
            };
            let is_delivery = matches!(end.end, End::Delivered { .. });
            let worth = claim.holds() || is_delivery && begun.elapsed() < DELIVERED_MAX;
            let closed = self.hard.is_cancelled() || matches!(*error, StoreError::Closed);
            if !worth || closed || begun.elapsed() >= TELL_MAX {
                tracing::warn!(
                    intent = %end.key.id,
                    outcome = end.note.outcome,
                    error = %Chain(&*error),
                    "the end of a try was not recorded; its claim ends by itself, and it is tried again"
                );
                return;
            }
            if matches!(*error, StoreError::Refused(_)) {
                // Should this text be what the store can't take, the rest is still recorded.
                end.note.diagnostic = None;
            }
            // The hard shutdown leaves time for one more.
            let slept = tokio::time::sleep(pause.mul_f64(0.5 + ids::jitter()));
            self.hard.run_until_cancelled(slept).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    /// Tells an end once, and counts and rings what follows from it.
    ///
    /// # Errors
    /// The store's own.
    pub async fn tell_once(&self, end: &Finish) -> Result<Finished, std::sync::Arc<StoreError>> {
        let finished = self.group.finish.ask(end.clone()).await?;
        match (finished, &end.end) {
            (Finished::Stale, End::GivenBack { .. }) => {}
            (Finished::Stale, _) => metrics::counter!(metric::STALE_STAMPS).increment(1),
            (Finished::Taken, End::Delivered { .. }) => self.bells.runs.notify_one(),
            (Finished::Taken, End::Dead { .. }) => self.given_up("dead"),
            (Finished::Taken, _) => {}
        }
        Ok(finished)
    }

    /// Counts an intent that was given up, and rings for its run.
    pub fn given_up(&self, status: &'static str) {
        metrics::counter!(metric::OUTBOX_GIVEN_UP, "status" => status).increment(1);
        self.bells.runs.notify_one();
    }
}
