//! The gate: the only way in which a record changes.
//!
//! [`Gate::admit`] answers a claim: execute, replay, refuse. [`Gate::settle`] ends what an owner
//! began. In between the owner holds a [`Permit`] and keeps its lease alive with
//! [`Gate::keep_alive`]. The gate must be called from tasks that run to their end: a client that
//! goes away is told by `gone`, never by dropping the future.

use std::collections::HashSet;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::broadcast::error::RecvError;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use super::permit::Permit;
use super::replay::{Decided, ReplayCache};
use super::waiters::{Flights, Follower, Joined, Parked, Phase};
use crate::domain::decide::Refusal;
use crate::domain::fingerprint::{Fingerprint, RequestDigest};
use crate::domain::policy::{Duplicates, Policy};
use crate::domain::scope::RecordKey;
use crate::domain::secret::Secrets;
use crate::lifecycle::Bells;
use crate::store::group::Group;
use crate::store::{Store, Wakeup, wake_hash};
use crate::telemetry::metric;

/// The gate; cheap to clone.
#[derive(Clone)]
pub struct Gate(pub(super) Arc<Inner>);

pub(super) struct Inner {
    pub store: Arc<dyn Store>,
    pub group: Group,
    pub flights: Flights,
    pub replay: ReplayCache,
    pub secrets: Secrets,
    pub settings: Settings,
    /// Keys whose claim may or may not have been made, while that is being undone.
    pub ambiguous: Mutex<HashSet<RecordKey>>,
    /// Rung when a decision was committed that something follows from.
    pub bells: Bells,
    /// Bytes of answers, and of what follows from them, whose commit is still being tried.
    pub retrying_bytes: AtomicUsize,
    pub tracker: TaskTracker,
    pub draining: CancellationToken,
}

/// What of the configuration concerns the gate.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Waiters on one key.
    pub waiters_per_key_max: usize,
    /// Waiters in all.
    pub waiters_max: usize,
    /// How often a request that waits for another gateway looks at the store.
    pub poll_interval: Duration,
    /// Memory of the cache of decisions, in bytes.
    pub cache_bytes_max: u64,
    /// How long a cached decision is served after the store last confirmed it.
    pub cache_trust: Duration,
    /// For how long a commit is retried after its answer was given unrecorded.
    pub record_retry: Duration,
    /// Answers whose commit is retried, in bytes.
    pub record_retry_bytes_max: usize,
}

/// A request that wants to know what to do.
#[derive(Clone)]
pub struct Ask {
    /// Which record.
    pub key: RecordKey,
    /// The same key under older secrets, when tenants are keyed hashes.
    pub older: Vec<RecordKey>,
    /// What the request is; `None` compares equal to everything.
    pub digest: Option<RequestDigest>,
    /// Of a caller of the API: what its claim is remembered under.
    pub request_id: Option<Uuid>,
    /// The route's rules.
    pub policy: Arc<Policy>,
    /// Until when it may be parked.
    pub wait_until: Instant,
    /// Cancelled when the client has gone away.
    pub gone: CancellationToken,
}

/// What a request may do.
pub enum Admission {
    /// Call the upstream, then settle.
    Execute(Box<Permit>),
    /// Give this answer.
    Replay {
        /// The decision.
        decided: Arc<Decided>,
        /// Whether the request was parked before.
        waited: bool,
    },
    /// Say no.
    Refuse(Denial),
    /// Call the upstream without protection: the store is down and the route says `pass`.
    Bypass,
}

/// Why not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Denial {
    /// The table says so.
    Refused(Refusal),
    /// The first request still runs; try again after this.
    InProgress(Duration),
    /// The same, and the route says that it is to be followed.
    Follow(Duration),
    /// The key has as many waiters as it may have.
    KeyFull(Duration),
    /// The gateway has as many waiters as it may have.
    Full,
    /// The store can't be asked; nothing was sent.
    StoreUnavailable,
    /// The record kept changing hands; nothing was sent.
    Contended,
    /// The owner's token is stale and there is no decision to give instead.
    Stale,
    /// The client has gone away.
    Gone,
}

/// How often a claim that keeps losing races begins anew.
pub(super) const ROUNDS_MAX: usize = 16;

impl Gate {
    /// A gate on a store; `group` commits its hot operations.
    #[must_use]
    pub fn new(
        store: Arc<dyn Store>,
        group: Group,
        secrets: Secrets,
        settings: Settings,
        bells: Bells,
        tracker: TaskTracker,
        draining: CancellationToken,
    ) -> Self {
        Self(Arc::new(Inner {
            flights: Flights::new(settings.waiters_per_key_max, settings.waiters_max),
            replay: ReplayCache::new(settings.cache_bytes_max, settings.cache_trust),
            ambiguous: Mutex::default(),
            retrying_bytes: AtomicUsize::new(0),
            store,
            group,
            secrets,
            settings,
            bells,
            tracker,
            draining,
        }))
    }

    /// Decides what a request may do; parks it as long as it may wait.
    pub async fn admit(&self, ask: &Ask) -> Admission {
        let mut waited = false;
        loop {
            if let Some(decided) = self.0.replay.trusted(&ask.key) {
                return self.replay(ask, decided, waited);
            }
            let denial = match self.0.flights.join(&ask.key) {
                Joined::Leader(leader) => return self.lead(ask, leader, waited).await,
                Joined::Follower(follower) => match self.follow(ask, follower).await {
                    None => {
                        waited = true;
                        continue;
                    }
                    Some(denial) => denial,
                },
                // Who would not wait anyway needs no place to be told.
                Joined::KeyFull(phase) => self
                    .denial_in(ask, phase)
                    .unwrap_or(Denial::KeyFull(ask.policy.lease)),
                Joined::Full(phase) => self.denial_in(ask, phase).unwrap_or(Denial::Full),
            };
            return Admission::Refuse(denial);
        }
    }

    /// Forgets what is cached of a record that was changed past this process's own owners, and
    /// lets its duplicates here look at it again.
    pub fn changed(&self, key: &RecordKey) {
        self.0.replay.forget(key);
        self.0.flights.look_again(key);
    }

    /// Forgets what other gateways say has changed, until the shutdown. A hint that is lost costs
    /// at most the trust that a cached decision has.
    pub async fn forget_what_others_change(self) {
        let mut hints = self.store().wakeups();
        loop {
            let hint = tokio::select! {
                hint = hints.recv() => hint,
                () = self.0.draining.cancelled() => return,
            };
            match hint {
                Ok(Wakeup::Records(records)) => self.0.replay.forget_hashed(&records),
                Ok(Wakeup::Everything) | Err(RecvError::Lagged(_)) => self.0.replay.distrust(),
                // A store that never hints: nobody else can change anything.
                Err(RecvError::Closed) => return,
            }
        }
    }

    /// A place among the waiters for a client that waits for a run or follows a record. `None`:
    /// there are as many as there may be.
    #[must_use]
    pub fn place(&self) -> Option<Parked> {
        self.0.flights.park()
    }

    /// The secrets that this gate compares with.
    #[must_use]
    pub fn secrets(&self) -> &Secrets {
        &self.0.secrets
    }

    /// Waits behind this process's own leader. `None`: decide again.
    async fn follow(&self, ask: &Ask, mut follower: Follower) -> Option<Denial> {
        loop {
            let phase = follower.phase();
            if let Some(denial) = self.denial_in(ask, phase) {
                return Some(denial);
            }
            match phase {
                Phase::Closed => return None,
                Phase::Held(_) | Phase::StoreDown => {}
                // A matter of one look at the store: even who may not wait, waits for that.
                Phase::Opening => {
                    tokio::select! {
                        () = follower.changed() => continue,
                        () = ask.gone.cancelled() => return Some(Denial::Gone),
                    }
                }
            }
            tokio::select! {
                () = follower.changed() => {}
                denial = self.patience(ask, ask.policy.lease) => return Some(denial),
            }
        }
    }

    /// Why a follower of a flight in this phase would not wait.
    fn denial_in(&self, ask: &Ask, phase: Phase) -> Option<Denial> {
        match phase {
            Phase::Held(fingerprint) if !self.is_same(ask, fingerprint.as_ref()) => {
                Some(Denial::Refused(Refusal::Mismatch))
            }
            Phase::Held(_) => match ask.policy.duplicates {
                Duplicates::Wait => None,
                Duplicates::Reject => Some(Denial::InProgress(ask.policy.lease)),
                Duplicates::Follow => Some(Denial::Follow(ask.policy.lease)),
            },
            Phase::StoreDown => Some(Denial::StoreUnavailable),
            Phase::Opening | Phase::Closed => None,
        }
    }

    /// Ends when a request may wait no longer.
    pub(super) async fn patience(&self, ask: &Ask, retry_after: Duration) -> Denial {
        tokio::select! {
            () = tokio::time::sleep_until(ask.wait_until) => Denial::InProgress(retry_after),
            () = self.0.draining.cancelled() => Denial::InProgress(retry_after),
            () = ask.gone.cancelled() => Denial::Gone,
        }
    }

    pub(super) fn replay(&self, ask: &Ask, decided: Arc<Decided>, waited: bool) -> Admission {
        if self.is_same(ask, decided.fingerprint.as_ref()) {
            Admission::Replay { decided, waited }
        } else {
            Admission::Refuse(Denial::Refused(Refusal::Mismatch))
        }
    }

    pub(super) fn is_same(&self, ask: &Ask, stored: Option<&Fingerprint>) -> bool {
        ask.digest
            .is_none_or(|digest| self.0.secrets.matches(stored, &digest))
    }

    pub(super) fn store(&self) -> &Arc<dyn Store> {
        &self.0.store
    }

    pub(super) fn ambiguous(&self) -> MutexGuard<'_, HashSet<RecordKey>> {
        // The critical sections can't panic half-way through a change.
        self.0
            .ambiguous
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells other gateways that a record changed; only a hint, so a failure is only counted.
    pub(super) fn wake_others(&self, key: &RecordKey) {
        let store = Arc::clone(self.store());
        let record = wake_hash(key);
        self.0.tracker.spawn(async move {
            let result = match store.notify(&[record]).await {
                Ok(()) => "sent",
                Err(_) => "failed",
            };
            metrics::counter!(metric::WAKEUPS, "kind" => result).increment(1);
        });
    }
}

/// Whether a hint from another gateway concerns this record.
pub(super) fn concerns(hint: &Result<Wakeup, RecvError>, record: u64) -> bool {
    match hint {
        Ok(Wakeup::Records(records)) => records.contains(&record),
        Ok(Wakeup::Everything) | Err(_) => true,
    }
}
