//! The right to call the upstream, as a value.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::waiters::Leader;
use crate::domain::fingerprint::Fingerprint;
use crate::domain::policy::OnUnknown;
use crate::domain::record::{AttemptToken, GenerationId};
use crate::domain::scope::RecordKey;
use crate::telemetry::metric;

/// The right to call the upstream for one attempt. Not cloneable; `Gate::settle` consumes it.
/// One that is dropped unsettled is counted, and leaves its lease to end.
pub struct Permit {
    pub(super) won: Won,
    clock: Arc<LeaseClock>,
    settled: bool,
    #[expect(
        dead_code,
        reason = "held for its drop: followers wait for as long as it lives"
    )]
    leader: Leader,
}

/// How a lease stands, counted on this process's monotonic clock from before the claim or the
/// heartbeat was sent: if it holds here, it certainly holds in the store.
pub struct LeaseClock {
    held_since: Mutex<Instant>,
    lease: Duration,
    stale: AtomicBool,
}

/// The claim that a permit stands for.
pub(super) struct Won {
    pub key: RecordKey,
    pub token: AttemptToken,
    pub generation_id: GenerationId,
    pub fingerprint: Option<Fingerprint>,
    pub on_unknown: OnUnknown,
    pub lease: Duration,
    pub valid_for: Duration,
    pub claimed_at: Instant,
}

impl Permit {
    pub(super) fn new(won: Won, leader: Leader) -> Self {
        leader.hold(won.fingerprint);
        metrics::gauge!(metric::OWNERS).increment(1);
        Self {
            clock: Arc::new(LeaseClock {
                held_since: Mutex::new(won.claimed_at),
                lease: won.lease,
                stale: AtomicBool::new(false),
            }),
            won,
            settled: false,
            leader,
        }
    }

    /// Tells, also without the permit, whether the lease still holds.
    #[must_use]
    pub fn lease_clock(&self) -> Arc<LeaseClock> {
        Arc::clone(&self.clock)
    }

    /// Whether anything may be sent to the upstream.
    #[must_use]
    pub fn may_send(&self) -> bool {
        self.clock.holds()
    }

    /// Which record.
    #[must_use]
    pub fn key(&self) -> &RecordKey {
        &self.won.key
    }

    /// Which life of the key; a derived key for the upstream is made from it.
    #[must_use]
    pub fn generation_id(&self) -> GenerationId {
        self.won.generation_id
    }

    /// The claim, for an owner outside this process: it keeps its lease alive by itself, and
    /// duplicates here wait as for another gateway's owner.
    pub(super) fn hand_over(mut self) -> (AttemptToken, GenerationId) {
        self.settled = true;
        (self.won.token, self.won.generation_id)
    }

    pub(super) fn renewed(&self, at: Instant) {
        *self.clock.held_since() = at;
    }

    pub(super) fn lost(&self) {
        self.clock.stale.store(true, Ordering::Relaxed);
    }

    pub(super) fn mark_settled(&mut self) {
        self.settled = true;
    }
}

impl LeaseClock {
    /// Whether the lease certainly still holds. Once it does not, nothing may be sent to the
    /// upstream any more.
    #[must_use]
    pub fn holds(&self) -> bool {
        !self.stale.load(Ordering::Relaxed) && self.held_since().elapsed() < self.lease
    }

    fn held_since(&self) -> MutexGuard<'_, Instant> {
        self.held_since
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        metrics::gauge!(metric::OWNERS).decrement(1);
        if !self.settled {
            metrics::counter!(metric::DANGLING_OWNER).increment(1);
            tracing::error!(
                pool = %self.won.key.pool,
                "an owner ended without settling; its record waits for the sweep"
            );
        }
    }
}
