//! The right to call the upstream, as a value.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, Ordering};
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
    pub(super) key: RecordKey,
    pub(super) token: AttemptToken,
    pub(super) generation_id: GenerationId,
    pub(super) fingerprint: Option<Fingerprint>,
    pub(super) on_unknown: OnUnknown,
    pub(super) lease: Duration,
    pub(super) valid_for: Duration,
    pub(super) claimed_at: Instant,
    /// The lease counts from here: the moment before the last confirmed claim or heartbeat.
    held_since: Mutex<Instant>,
    stale: AtomicBool,
    settled: bool,
    #[expect(
        dead_code,
        reason = "held for its drop: followers wait for as long as it lives"
    )]
    leader: Leader,
}

/// What a permit is made from.
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
            key: won.key,
            token: won.token,
            generation_id: won.generation_id,
            fingerprint: won.fingerprint,
            on_unknown: won.on_unknown,
            lease: won.lease,
            valid_for: won.valid_for,
            claimed_at: won.claimed_at,
            held_since: Mutex::new(won.claimed_at),
            stale: AtomicBool::new(false),
            settled: false,
            leader,
        }
    }

    /// Whether the lease certainly still holds, counted on this process's monotonic clock from
    /// before the claim was sent. Once it does not, nothing may be sent to the upstream.
    #[must_use]
    pub fn may_send(&self) -> bool {
        !self.stale.load(Ordering::Relaxed) && self.held_since().elapsed() < self.lease
    }

    /// Which record.
    #[must_use]
    pub fn key(&self) -> &RecordKey {
        &self.key
    }

    /// Which life of the key; a derived key for the upstream is made from it.
    #[must_use]
    pub fn generation_id(&self) -> GenerationId {
        self.generation_id
    }

    pub(super) fn renewed(&self, at: Instant) {
        *self.lock() = at;
    }

    pub(super) fn lost(&self) {
        self.stale.store(true, Ordering::Relaxed);
    }

    pub(super) fn mark_settled(&mut self) {
        self.settled = true;
    }

    fn held_since(&self) -> Instant {
        *self.lock()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Instant> {
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
                pool = %self.key.pool,
                "an owner ended without settling; its record waits for the sweep"
            );
        }
    }
}
