//! Claims in the hands of this process, and the heartbeats that keep them.
//!
//! A claim is counted by the monotonic clock from before it was asked for, so it ends here before
//! it ends in the store. One heartbeat for all goes out every third of the lease, in batches; an
//! unanswered one changes nothing.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::domain::intent::{IntentKey, Stamp};
use crate::store::outbox::{ClaimBeat, OutboxStore};
use crate::telemetry::Chain;

/// Heartbeats in one batch.
const BATCH_MAX: usize = 256;

/// How often the end of the last claims is looked for while stopping; also the shortest time
/// between heartbeats.
const LINGER: Duration = Duration::from_millis(50);

/// Every claim of this process. Clones are the same.
#[derive(Clone)]
pub struct Claims {
    lease: Duration,
    held: Arc<Mutex<HashMap<Stamp, Arc<Claim>>>>,
}

/// A claim, as far as this process knows.
pub struct Claim {
    key: IntentKey,
    stamp: Stamp,
    /// `None`: somebody else has it.
    until: Mutex<Option<Instant>>,
    /// Its end is on its way to the store, which may have let it go already.
    ending: AtomicBool,
}

/// A claim that is kept alive until this is dropped.
pub struct Held {
    claims: Claims,
    claim: Arc<Claim>,
}

impl Claims {
    /// With this lease.
    #[must_use]
    pub fn new(lease: Duration) -> Self {
        Self {
            lease,
            held: Arc::default(),
        }
    }

    /// How long a claim may be silent.
    #[must_use]
    pub fn lease(&self) -> Duration {
        self.lease
    }

    /// Keeps a claim that was won. `asked`: before it was asked for.
    #[must_use]
    pub fn hold(&self, key: IntentKey, stamp: Stamp, asked: Instant) -> Held {
        let claim = Arc::new(self.unkept(key, stamp, asked));
        self.held().insert(stamp, Arc::clone(&claim));
        Held {
            claims: self.clone(),
            claim,
        }
    }

    /// A claim that nothing keeps alive.
    #[must_use]
    pub fn unkept(&self, key: IntentKey, stamp: Stamp, asked: Instant) -> Claim {
        Claim {
            key,
            stamp,
            until: Mutex::new(Some(asked + self.lease)),
            ending: AtomicBool::new(false),
        }
    }

    /// Beats until the shutdown was asked for and nothing is held any more.
    pub async fn beat(self, store: Arc<dyn OutboxStore>, soft: CancellationToken) {
        let third = (self.lease / 3).max(LINGER);
        let mut interval = tokio::time::interval(third);
        interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        // What is still held then is settled soon: look often enough not to keep the process.
        while soft.run_until_cancelled(interval.tick()).await.is_some() {
            self.beat_once(&*store).await;
        }
        let mut last = Instant::now();
        while !self.held().is_empty() {
            tokio::time::sleep(LINGER).await;
            if last.elapsed() >= third {
                last = Instant::now();
                self.beat_once(&*store).await;
            }
        }
    }

    /// One heartbeat for each claim that still holds.
    pub async fn beat_once(&self, store: &dyn OutboxStore) {
        let claims: Vec<_> = self.held().values().cloned().collect();
        for batch in claims.chunks(BATCH_MAX) {
            let batch: Vec<_> = batch.iter().filter(|claim| claim.holds()).collect();
            let beats: Vec<_> = batch.iter().map(|claim| claim.beat(self.lease)).collect();
            if beats.is_empty() {
                continue;
            }
            let asked = Instant::now();
            match store.extend(&beats).await {
                Ok(extended) => {
                    for (claim, extended) in batch.iter().zip(extended) {
                        claim.note(extended.then(|| asked + self.lease));
                    }
                }
                Err(error) => {
                    tracing::debug!(error = %Chain(&error), "heartbeats of claims got no answer");
                }
            }
        }
    }

    fn held(&self) -> MutexGuard<'_, HashMap<Stamp, Arc<Claim>>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Claim {
    /// Whether it certainly is still ours.
    #[must_use]
    pub fn holds(&self) -> bool {
        self.until().is_some_and(|until| Instant::now() < until)
    }

    /// Says that its end is on its way to the store.
    pub fn end(&self) {
        self.ending.store(true, Ordering::Release);
    }

    fn beat(&self, lease: Duration) -> ClaimBeat {
        ClaimBeat {
            key: self.key.clone(),
            stamp: self.stamp,
            lease,
        }
    }

    /// What the store said; a claim that was lost never comes back.
    fn note(&self, extended: Option<Instant>) {
        let mut until = self.until();
        if extended.is_none() && until.is_some() && !self.ending.load(Ordering::Acquire) {
            tracing::warn!(
                intent = %self.key.id,
                "another worker has an intent that is being sent here; its receiver may see it twice, with the same key"
            );
        }
        *until = until.and(extended);
    }

    fn until(&self) -> MutexGuard<'_, Option<Instant>> {
        self.until.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Held {
    /// The claim.
    #[must_use]
    pub fn claim(&self) -> &Arc<Claim> {
        &self.claim
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.claims.held().remove(&self.claim.stamp);
    }
}
