//! What an owner does: keep its lease alive, then settle once.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior};

use super::callers::{Decree, Decreed, Stale};
use super::gate::{Denial, Gate};
use super::permit::Permit;
use super::replay::Decided;
use crate::domain::message::Recorded;
use crate::domain::policy::OnUnknown;
use crate::domain::record::{
    AttemptToken, Committed, Completion, DecisionId, GiveUp, Heartbeat, Release, State, Validity,
};
use crate::domain::run::FollowUp;
use crate::domain::scope::RecordKey;
use crate::store::StoreError;
use crate::telemetry::{Chain, metric};

/// An owner beats this many times within a lease, so that one lost beat costs nothing.
const BEATS_PER_LEASE: u32 = 3;
/// How long an owner's client waits for the commit of its answer before it gets it unrecorded.
pub(super) const COMMIT_WAIT: Duration = Duration::from_secs(3);
/// Pauses between tries of a commit or a release.
const RETRY_PAUSE_MIN: Duration = Duration::from_millis(50);
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(2);

/// What came of an attempt: the deepest distinction in the product.
#[derive(Debug)]
pub enum Outcome {
    /// No byte reached the upstream.
    NotSent,
    /// A byte was sent and no whole answer came.
    Unknown,
    /// An answer came whole, and is to be kept.
    Answered {
        /// Drawn by the owner, since an answer may name the run that bears this id.
        decision_id: DecisionId,
        /// The answer.
        recorded: Recorded,
        /// What is to be done once the decision is committed: in its transaction or not at all.
        follow_up: Option<Box<FollowUp>>,
    },
    /// An answer came whole, and the route does not keep such answers.
    Released,
    /// The same, but its client was already told that nobody knows.
    ReleasedUnseen,
}

/// What became of the record.
pub enum Settled {
    /// The decision is committed.
    Committed(Arc<Decided>),
    /// The record may be claimed again.
    Reclaimable,
    /// The record holds the key; nobody knows the outcome.
    OutcomeUnknown,
    /// The store did not take the decision yet; it is being tried in the background.
    Unrecorded,
    /// Another attempt owns the record now, and this is its decision.
    Superseded(Arc<Decided>),
    /// Another attempt owns the record now, and there is no decision to give.
    Refused(Denial),
}

impl Gate {
    /// Keeps the lease alive until dropped. A failed beat never aborts the call: if the token is
    /// stale the beats end, and settling will tell. A beat that hangs is not waited for longer
    /// than until the next, which may go another way.
    pub async fn keep_alive(&self, permit: &Permit) -> Infallible {
        let every = permit.won.lease / BEATS_PER_LEASE;
        let mut beats = tokio::time::interval_at(Instant::now() + every, every);
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            beats.tick().await;
            let beat = Heartbeat {
                key: permit.won.key.clone(),
                token: permit.won.token,
                lease: permit.won.lease,
            };
            let asked_at = Instant::now();
            match tokio::time::timeout(every, self.0.group.heartbeat.ask(beat)).await {
                Ok(Ok(true)) => permit.renewed(asked_at),
                Ok(Ok(false)) => {
                    permit.lost();
                    return std::future::pending().await;
                }
                Err(_) => tracing::debug!("a heartbeat hangs; the next one will try again"),
                Ok(Err(error)) => tracing::debug!(
                    error = %Chain(&*error),
                    "a heartbeat failed; the next one will try again"
                ),
            }
        }
    }

    /// Ends an attempt. When the store does not take it in time the work goes on in the
    /// background, with the permit, so that duplicates keep waiting.
    pub async fn settle(&self, permit: Permit, outcome: Outcome) -> Settled {
        match outcome {
            Outcome::Answered {
                decision_id,
                recorded,
                follow_up,
            } => {
                let decree = Decree {
                    key: permit.won.key.clone(),
                    token: permit.won.token,
                    decided_by: "gateway".to_owned(),
                    recorded,
                    follow_up,
                };
                let completion = self.completion(decree, decision_id, permit.generation_id());
                self.commit(permit, completion).await
            }
            Outcome::NotSent => self.give_up(permit, GiveUp::NotSent).await,
            Outcome::Released => self.give_up(permit, GiveUp::Answered).await,
            // To its client the attempt may have run, so only the same request may follow.
            Outcome::ReleasedUnseen => self.give_up(permit, GiveUp::Redrive).await,
            Outcome::Unknown => match permit.won.on_unknown {
                OnUnknown::Hold => self.give_up(permit, GiveUp::Hold).await,
                OnUnknown::Redrive => self.give_up(permit, GiveUp::Redrive).await,
            },
        }
    }

    async fn commit(&self, permit: Permit, completion: Completion) -> Settled {
        let asked_at = Instant::now();
        let until = asked_at + COMMIT_WAIT;
        // Beats go on: a commit may take longer than what is left of the lease.
        let tried = tokio::select! {
            tried = tokio::time::timeout_at(until, self.try_commit(&completion, until)) => tried,
            never = self.keep_alive(&permit) => match never {},
        };
        if let Ok(Ok(committed)) = tried {
            return self
                .committed(permit, completion, committed, asked_at)
                .await;
        }
        self.commit_later(permit, completion, asked_at);
        Settled::Unrecorded
    }

    /// Tries until the store says yes or no. Sending a completion again is safe: it is recognised
    /// by its decision id. `Ok(None)`: the token is stale.
    pub(super) async fn try_commit(
        &self,
        completion: &Completion,
        until: Instant,
    ) -> Result<Option<Committed>, Arc<StoreError>> {
        let mut pause = RETRY_PAUSE_MIN;
        loop {
            match self.0.group.complete.ask(completion.clone()).await {
                Ok(committed) => return Ok(committed),
                Err(error) if Instant::now() + pause >= until => return Err(error),
                Err(_) => tokio::time::sleep(pause).await,
            }
            pause = (pause * 2).min(RETRY_PAUSE_MAX);
        }
    }

    async fn committed(
        &self,
        mut permit: Permit,
        completion: Completion,
        committed: Option<Committed>,
        asked_at: Instant,
    ) -> Settled {
        permit.mark_settled();
        let Some(committed) = committed else {
            return self.superseded(permit).await;
        };
        if completion.run.is_some() {
            self.0.bells.runs.notify_one();
            self.0.bells.outbox.notify_one();
        }
        let decided = Arc::new(Decided {
            committed,
            recorded: completion.recorded,
            fingerprint: permit.won.fingerprint,
        });
        // From before the commit on: trust ends too early at worst.
        self.0.replay.keep(
            &permit.won.key,
            Arc::clone(&decided),
            asked_at,
            permit.won.valid_for,
        );
        metrics::histogram!(metric::OWNER_SECONDS, "pool" => permit.won.key.pool.as_str().to_owned())
            .record(permit.won.claimed_at.elapsed());
        if committed.awaited {
            self.wake_others(&permit.won.key);
        }
        // Dropping the permit closes the flight; the cache knows by now.
        drop(permit);
        Settled::Committed(decided)
    }

    /// The token is stale: the owner was away for longer than its lease, and wrote nothing. Its
    /// client gets what was decided instead.
    async fn superseded(&self, permit: Permit) -> Settled {
        metrics::counter!(metric::STALE_OWNER).increment(1);
        tracing::warn!(pool = %permit.won.key.pool, "an owner came back too late; it wrote nothing");
        let refused = Settled::Refused(Denial::Stale);
        let Ok(Some(record)) = self.0.group.look_up.ask(permit.won.key.clone()).await else {
            return refused;
        };
        let State::Completed(decision_id, Validity::Valid(_)) = record.state else {
            return refused;
        };
        match self.store().decision(&record.key.tenant, decision_id).await {
            Ok(Some(stored)) if permit.won.fingerprint == record.fingerprint => {
                Settled::Superseded(Arc::new(Decided {
                    committed: stored.committed,
                    recorded: stored.recorded,
                    fingerprint: record.fingerprint,
                }))
            }
            _ => refused,
        }
    }

    /// The store did not take the decision in time. Its client has its answer; duplicates go on
    /// waiting until the store has it, or until `record_retry` is over. `asked_at` is from before
    /// the store was first asked: the commit may be that old, and so its validity.
    fn commit_later(&self, mut permit: Permit, completion: Completion, asked_at: Instant) {
        permit.mark_settled();
        let run = completion.run.as_ref();
        let bytes = completion.recorded.held_bytes() + run.map_or(0, |run| run.held_bytes());
        let held = self.0.retrying_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let gate = self.clone();
        let give_back = move |gate: &Self| {
            gate.0.retrying_bytes.fetch_sub(bytes, Ordering::Relaxed);
        };
        if held > self.0.settings.record_retry_bytes_max {
            give_back(self);
            metrics::counter!(metric::UNRECORDED, "result" => "no_room").increment(1);
            tracing::error!(pool = %permit.won.key.pool,
                "no room to retry the commit of an answer; its record will end as unknown");
            return;
        }
        tracing::warn!(
            pool = %permit.won.key.pool,
            "an answer was given before its commit; the commit is tried until the store takes it"
        );
        self.0.tracker.spawn(async move {
            let until = Instant::now() + gate.0.settings.record_retry;
            let result = match gate.try_commit(&completion, until).await {
                Ok(committed) => {
                    match gate
                        .committed(permit, completion, committed, asked_at)
                        .await
                    {
                        Settled::Committed(_) => {
                            tracing::info!("an answer that was given unrecorded is committed now");
                            "committed"
                        }
                        _ => "stale",
                    }
                }
                Err(error) => {
                    tracing::error!(
                        pool = %permit.won.key.pool,
                        error = %Chain(&*error),
                        "an answer could not be recorded in time; its record will end as unknown"
                    );
                    "lost"
                }
            };
            give_back(&gate);
            metrics::counter!(metric::UNRECORDED, "result" => result).increment(1);
        });
    }

    /// What became of a token's decision, if its record is decided and bears it; for a caller whose
    /// decision can't be read any more.
    ///
    /// # Errors
    /// When the store gave no answer.
    pub async fn decreed(
        &self,
        key: &RecordKey,
        token: AttemptToken,
    ) -> Result<Option<Result<Decreed, Stale>>, Arc<StoreError>> {
        match self.look_up(key).await? {
            Some(record)
                if record.token == token && matches!(record.state, State::Completed(..)) =>
            {
                self.decreed_before(record).await.map(Some)
            }
            _ => Ok(None),
        }
    }

    async fn give_up(&self, mut permit: Permit, give_up: GiveUp) -> Settled {
        permit.mark_settled();
        let release = Release {
            key: permit.won.key.clone(),
            token: permit.won.token,
            give_up,
        };
        let settled = match give_up {
            GiveUp::Hold => Settled::OutcomeUnknown,
            GiveUp::NotSent | GiveUp::Answered | GiveUp::Redrive => Settled::Reclaimable,
        };
        match self.0.group.release.ask(release.clone()).await {
            Ok(Some(released)) => {
                if released.awaited {
                    self.wake_others(&permit.won.key);
                }
                settled
            }
            // Nothing was sent, or it was answered and not kept: the client is told so, whoever
            // owns the record now.
            Ok(None) => {
                metrics::counter!(metric::STALE_OWNER).increment(1);
                settled
            }
            Err(_) => {
                self.give_up_later(permit, release);
                settled
            }
        }
    }

    /// Goes on trying to release. Without it the lease ends and the sweep takes a `hold` row for
    /// unknown: nothing runs twice, but its client would be kept out.
    fn give_up_later(&self, permit: Permit, release: Release) {
        let gate = self.clone();
        self.0.tracker.spawn(async move {
            gate.release_until_answered(&release).await;
            drop(permit);
        });
    }
}
