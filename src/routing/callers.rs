//! The gate for callers of the API, who play the upstream themselves: they hold a token instead of
//! a permit, keep its lease alive by their own heartbeats, and say how it ended.
//!
//! Everything here may be sent again after a lost reply. A claim is remembered under its caller's
//! request id, in the transaction that makes it: the same id never claims twice, whatever became
//! of its claim. A decision's id is made from the token, so that it is recognised.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::gate::{Admission, Ask, Denial, Gate};
use super::permit::Permit;
use super::replay::Decided;
use super::settle::{COMMIT_WAIT, Outcome};
use crate::domain::decide::Refusal;
use crate::domain::fingerprint::RequestDigest;
use crate::domain::message::Recorded;
use crate::domain::policy::{Duplicates, OnUnknown, Policy};
use crate::domain::record::{
    AttemptToken, Committed, Completion, DecisionId, GenerationId, GiveUp, Heartbeat, Lease,
    Record, Release, Remembered, State, Terms, Validity,
};
use crate::domain::run::{FollowUp, RunId, RunKey};
use crate::domain::scope::RecordKey;
use crate::ids;
use crate::store::StoreError;
use crate::telemetry::metric;

/// How often a record is looked at whose lease is over while others move it.
const LOOKS_MAX: usize = 4;

/// A caller that wants to own a record.
#[derive(Clone)]
pub struct Wish {
    /// Which record.
    pub key: RecordKey,
    /// The same id is always the same claim.
    pub request_id: Uuid,
    /// What its request is; `None` compares equal to everything.
    pub digest: Option<RequestDigest>,
    /// Stamped on the row.
    pub terms: Terms,
    /// What it wants when another owns the record.
    pub duplicates: Duplicates,
    /// Until when it may be parked.
    pub wait_until: Instant,
    /// Cancelled when the caller has gone away.
    pub gone: CancellationToken,
}

/// A claim in the hands of a caller.
#[derive(Clone, Copy, Debug)]
pub struct Held {
    /// What every later write must match.
    pub token: AttemptToken,
    /// Which life of the key.
    pub generation_id: GenerationId,
    /// What a service behind the caller should see as the key.
    pub derived_key: Uuid,
    /// Whether the claim was made before this call.
    pub repeated: bool,
}

/// What became of a wish.
pub enum Reservation {
    /// The caller owns the record, for this long unless it beats.
    Owned(Held, Duration),
    /// There is a decision.
    Decided {
        /// The decision.
        decided: Arc<Decided>,
        /// Whether the caller was parked before.
        waited: bool,
        /// The caller's own claim, if it made the decision.
        held: Option<Held>,
    },
    /// The claim ended without a decision: its record is `failed_before_commit` or
    /// `outcome_unknown`.
    Ended(Held, State),
    /// Another claim owns the record.
    Superseded(Stale),
    /// The request id is that of a claim of another record.
    OtherRecord,
    /// No.
    Refused(Denial),
}

/// Why a token is not taken any more.
#[derive(Clone, Debug)]
pub struct Stale {
    /// The record's state; `None`: it is gone.
    pub state: Option<State>,
    /// Whether the record bears the token all the same.
    pub bears_token: bool,
    /// What was decided instead.
    pub decided: Option<Arc<Decided>>,
}

/// A decision of a caller.
pub struct Decree {
    /// For which record.
    pub key: RecordKey,
    /// Whose.
    pub token: AttemptToken,
    /// Who it is, for people.
    pub decided_by: String,
    /// The answer to keep.
    pub recorded: Recorded,
    /// What follows from it.
    pub follow_up: Option<Box<FollowUp>>,
}

/// A decision that is committed, by this call or one before.
#[derive(Clone, Copy, Debug)]
pub struct Decreed {
    /// Id and times.
    pub committed: Committed,
    /// The run that it started.
    pub run_id: Option<RunId>,
}

/// How a caller gives a claim up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// Nothing was done.
    NotSent,
    /// It was answered, and the answer is not to be kept.
    Answered,
    /// Nobody knows: to where the row says.
    Unknown,
}

/// What came of a call with a token.
pub type Told<T> = Result<Result<T, Stale>, Arc<StoreError>>;

impl Gate {
    /// Makes the claim of a request id, or tells what became of it.
    ///
    /// # Errors
    /// When the store gave no answer. The claim may have been made: the same id tells.
    pub async fn reserve(&self, wish: &Wish) -> Result<Reservation, Arc<StoreError>> {
        if let Some(known) = self.claimed_before(wish).await? {
            return Ok(known);
        }
        // Nobody is parked before it is certain that the owner is not this very request id.
        let mut admission = self.admit(&wish.ask(Duplicates::Reject)).await;
        if let Admission::Refuse(denial) = &admission {
            if let Some(known) = self.claimed_before(wish).await? {
                return Ok(known);
            }
            if wish.duplicates == Duplicates::Wait && is_in_progress(denial) {
                admission = self.admit(&wish.ask(Duplicates::Wait)).await;
            }
        }
        Ok(match admission {
            Admission::Execute(permit) => self.owned(wish, *permit).await?,
            Admission::Replay { decided, waited } => Reservation::Decided {
                decided,
                waited,
                held: None,
            },
            Admission::Refuse(denial) => match self.claimed_before(wish).await? {
                Some(known) => known,
                None if wish.duplicates == Duplicates::Follow && is_in_progress(&denial) => {
                    Reservation::Refused(Denial::Follow(wish.terms.lease))
                }
                None => Reservation::Refused(denial),
            },
            Admission::Bypass => Reservation::Refused(Denial::StoreUnavailable),
        })
    }

    /// Extends the lease of a caller; gives how long it is now, from before the call.
    ///
    /// # Errors
    /// When the store gave no answer; the lease may have been extended.
    pub async fn beat(
        &self,
        key: &RecordKey,
        token: AttemptToken,
        lease: Option<Duration>,
    ) -> Told<Duration> {
        let lease = match lease {
            Some(lease) => lease,
            // As long as the claim asked for.
            None => match self.look_up(key).await? {
                Some(record) if record.token == token => record.terms.lease,
                seen => return Ok(Err(self.stale(seen, token).await?)),
            },
        };
        let beat = Heartbeat {
            key: key.clone(),
            token,
            lease,
        };
        if self.0.group.heartbeat.ask(beat).await? {
            return Ok(Ok(lease));
        }
        let seen = self.look_up(key).await?;
        Ok(Err(self.stale(seen, token).await?))
    }

    /// Commits a caller's decision with everything that follows from it. Sent again it gives the
    /// decision that is committed, whatever it says then.
    ///
    /// # Errors
    /// When the store gave no answer; the decision may have been committed.
    pub async fn decree(&self, decree: Decree) -> Told<Decreed> {
        let Decree { key, token, .. } = &decree;
        let (key, token) = (key.clone(), *token);
        // The keys of what follows are made from the generation, which only the record knows.
        let generation_id = match self.look_up(&key).await? {
            Some(record) if record.token != token => {
                return self.refuse_late(Some(record), token).await;
            }
            Some(record) => match record.state {
                State::Completed(..) => return self.decreed_before(record).await,
                _ => record.generation_id,
            },
            None => return self.refuse_late(None, token).await,
        };
        let decision_id = decree.token.decision_id();
        let completion = self.completion(decree, decision_id, generation_id);
        let run_id = completion
            .run
            .as_ref()
            .map(|_| completion.decision_id.into());
        let committed = self
            .try_commit(&completion, Instant::now() + COMMIT_WAIT)
            .await;
        // Also when nobody knows whether it was committed.
        self.changed(&key);
        let Some(committed) = committed? else {
            let seen = self.look_up(&key).await?;
            return self.refuse_late(seen, token).await;
        };
        if committed.awaited {
            self.wake_others(&key);
        }
        Ok(Ok(Decreed { committed, run_id }))
    }

    /// Gives a caller's claim up; gives the record's state then.
    ///
    /// # Errors
    /// When the store gave no answer; the claim may have been given up.
    pub async fn relinquish(
        &self,
        key: &RecordKey,
        token: AttemptToken,
        reason: Reason,
    ) -> Told<State> {
        let give_up = match reason {
            Reason::NotSent => GiveUp::NotSent,
            Reason::Answered => GiveUp::Answered,
            Reason::Unknown => match self.look_up(key).await? {
                Some(record) if record.token == token => match record.terms.on_unknown {
                    OnUnknown::Hold => GiveUp::Hold,
                    OnUnknown::Redrive => GiveUp::Redrive,
                },
                seen => return self.refuse_late(seen, token).await,
            },
        };
        let release = Release {
            key: key.clone(),
            token,
            give_up,
        };
        let released = self.0.group.release.ask(release).await;
        self.changed(key);
        let Some(released) = released? else {
            let seen = self.look_up(key).await?;
            return self.refuse_late(seen, token).await;
        };
        if released.awaited {
            self.wake_others(key);
        }
        Ok(Ok(match give_up {
            GiveUp::Hold => State::OutcomeUnknown,
            GiveUp::Redrive => State::FailedBeforeCommit { maybe_sent: true },
            GiveUp::NotSent | GiveUp::Answered => State::FailedBeforeCommit { maybe_sent: false },
        }))
    }

    /// The completion that a decree asks for. What follows begins with it, in its transaction: the
    /// run's id, keys and bytes are fixed here, so that every try of the commit is the same.
    pub(super) fn completion(
        &self,
        decree: Decree,
        decision_id: DecisionId,
        generation_id: GenerationId,
    ) -> Completion {
        let Decree {
            key,
            token,
            decided_by,
            recorded,
            follow_up,
        } = decree;
        let run = follow_up.map(|follow_up| {
            let key_seed = self.secrets().forward_key(&key, generation_id);
            let run = follow_up.begin(&key, decision_id, &recorded, key_seed, ids::stamp());
            Box::new(run)
        });
        Completion {
            key,
            token,
            decision_id,
            decided_by,
            recorded,
            run,
        }
    }

    /// The claim was won: it leaves this process. Unless the request id had won one before, whose
    /// caller this is too: the first is the one that is remembered.
    async fn owned(&self, wish: &Wish, permit: Permit) -> Result<Reservation, Arc<StoreError>> {
        let (tenant, id) = (&wish.key.tenant, wish.request_id);
        let remembered = match self.store().remembered(tenant, id).await {
            Ok(remembered) => remembered,
            Err(error) => {
                permit.hand_over();
                return Err(error.into());
            }
        };
        if remembered.is_none_or(|first| first.token != permit.won.token) {
            self.settle(permit, Outcome::NotSent).await;
            let first = self.claimed_before(wish).await?;
            return Ok(first.unwrap_or(Reservation::Refused(Denial::Contended)));
        }
        let in_time = permit.may_send();
        let (token, generation_id) = permit.hand_over();
        let held = self.held(&wish.key, token, generation_id, false);
        if in_time {
            return Ok(Reservation::Owned(held, wish.terms.lease));
        }
        // It took longer than its lease.
        self.standing(wish, held).await
    }

    fn held(
        &self,
        key: &RecordKey,
        token: AttemptToken,
        generation_id: GenerationId,
        repeated: bool,
    ) -> Held {
        Held {
            token,
            generation_id,
            derived_key: self.secrets().forward_key(key, generation_id),
            repeated,
        }
    }

    /// What became of the claim of this request id, if it made one.
    async fn claimed_before(&self, wish: &Wish) -> Result<Option<Reservation>, Arc<StoreError>> {
        let remembered = self
            .store()
            .remembered(&wish.key.tenant, wish.request_id)
            .await?;
        let Some(Remembered {
            key,
            token,
            claimed,
            ..
        }) = remembered
        else {
            return Ok(None);
        };
        if key != wish.key {
            return Ok(Some(Reservation::OtherRecord));
        }
        let held = self.held(&key, token, claimed.generation_id, true);
        Ok(Some(self.standing(wish, held).await?))
    }

    /// How the record stands to a claim that won it.
    async fn standing(&self, wish: &Wish, held: Held) -> Result<Reservation, Arc<StoreError>> {
        for _ in 0..LOOKS_MAX {
            let record = match self.look_up(&wish.key).await? {
                Some(record) if record.token == held.token => record,
                seen => return Ok(Reservation::Superseded(self.stale(seen, held.token).await?)),
            };
            if !self.is_same(&wish.ask(Duplicates::Reject), record.fingerprint.as_ref()) {
                return Ok(Reservation::Refused(Denial::Refused(Refusal::Mismatch)));
            }
            return Ok(match record.state {
                State::Pending(Lease::Over) => {
                    self.swept(&record).await?;
                    continue;
                }
                State::Pending(Lease::Held(left)) => Reservation::Owned(held, left),
                State::Pending(Lease::Unbounded) => Reservation::Owned(held, record.terms.lease),
                State::Completed(..) => match self.decided(&record).await? {
                    Some(decided) => Reservation::Decided {
                        decided,
                        waited: false,
                        held: Some(held),
                    },
                    None => Reservation::Refused(Denial::Refused(Refusal::KeyExpired)),
                },
                state @ (State::FailedBeforeCommit { .. } | State::OutcomeUnknown) => {
                    Reservation::Ended(held, state)
                }
            });
        }
        Ok(Reservation::Refused(Denial::Contended))
    }

    /// The record is decided and bears this caller's token: by itself, or by an operator who found
    /// nobody at work.
    pub(super) async fn decreed_before(&self, record: Record) -> Told<Decreed> {
        let (token, tenant) = (record.token, record.key.tenant.clone());
        let own = token.decision_id();
        let found = match record.state {
            State::Completed(id, _) if id == own => self.store().decision(&tenant, own).await?,
            _ => None,
        };
        let Some(stored) = found else {
            return self.refuse_late(Some(record), token).await;
        };
        let id = RunId::from(own);
        let run = self.store().show_run(&RunKey { tenant, id }).await?;
        Ok(Ok(Decreed {
            committed: stored.committed,
            run_id: run.map(|_| id),
        }))
    }

    async fn refuse_late<T>(&self, seen: Option<Record>, token: AttemptToken) -> Told<T> {
        metrics::counter!(metric::STALE_OWNER).increment(1);
        Ok(Err(self.stale(seen, token).await?))
    }

    async fn stale(
        &self,
        seen: Option<Record>,
        token: AttemptToken,
    ) -> Result<Stale, Arc<StoreError>> {
        let decided = match &seen {
            Some(record) => self.decided(record).await?,
            None => None,
        };
        Ok(Stale {
            state: seen.as_ref().map(|record| record.state),
            bears_token: seen.is_some_and(|record| record.token == token),
            decided,
        })
    }

    /// The record's decision, while it is valid.
    async fn decided(&self, record: &Record) -> Result<Option<Arc<Decided>>, Arc<StoreError>> {
        let State::Completed(id, Validity::Valid(_)) = record.state else {
            return Ok(None);
        };
        let stored = self.store().decision(&record.key.tenant, id).await?;
        Ok(stored.map(|stored| {
            Arc::new(Decided {
                committed: stored.committed,
                recorded: stored.recorded,
                fingerprint: record.fingerprint,
            })
        }))
    }

    pub(super) async fn look_up(&self, key: &RecordKey) -> Result<Option<Record>, Arc<StoreError>> {
        self.0.group.look_up.ask(key.clone()).await
    }
}

impl Wish {
    fn ask(&self, duplicates: Duplicates) -> Ask {
        let policy = Policy::of_caller(self.key.pool.clone(), self.terms, duplicates);
        Ask {
            key: self.key.clone(),
            older: Vec::new(),
            digest: self.digest,
            request_id: Some(self.request_id),
            policy: Arc::new(policy),
            wait_until: self.wait_until,
            gone: self.gone.clone(),
        }
    }
}

fn is_in_progress(denial: &Denial) -> bool {
    matches!(denial, Denial::InProgress(_) | Denial::KeyFull(_))
}
