//! What a leader does: claim the record, or find out for everybody why not.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::gate::{Admission, Ask, Denial, Gate, ROUNDS_MAX, concerns};
use super::permit::{Permit, Won};
use super::replay::Decided;
use super::waiters::Leader;
use crate::domain::decide::{Decision, Refusal, decide};
use crate::domain::policy::{OnStoreDown, OnUnknown};
use crate::domain::record::{
    AttemptToken, Claim, DecisionId, GenerationId, GiveUp, Lease, Record, Release, Reserved, State,
    Terms, Validity,
};
use crate::domain::scope::RecordKey;
use crate::ids;
use crate::store::{StoreError, wake_hash};
use crate::telemetry::{Chain, metric};

/// Pauses between tries of undoing a claim.
const UNDO_PAUSE_MIN: Duration = Duration::from_millis(20);
const UNDO_PAUSE_MAX: Duration = Duration::from_secs(1);
/// For how long a claim that was given up may still land in the store.
const UNDO_WATCH: Duration = Duration::from_secs(30);

/// How a round of claiming ended.
enum Round {
    Done(Admission),
    /// Something changed under the claim: begin anew.
    Again(Leader),
    /// The leader waited for another gateway's owner, and something changed.
    Waited(Leader),
}

impl Gate {
    /// Claims the record, or learns its state and answers by it. The leader's place is kept all
    /// the while, so that duplicates wait in memory.
    pub(super) async fn lead(&self, ask: &Ask, mut leader: Leader, mut waited: bool) -> Admission {
        let key = match self.present_key(ask).await {
            Ok(key) => key,
            Err(error) => return self.store_down(ask, &leader, waited, &error),
        };
        // Only rounds in which nobody made progress count: a wait is progress.
        let mut races = 0;
        while races < ROUNDS_MAX {
            let seen = waited || races > 0;
            leader = match self.round(ask, &key, leader, waited, seen).await {
                Round::Done(admission) => return admission,
                Round::Waited(leader) => {
                    waited = true;
                    leader
                }
                Round::Again(leader) => {
                    races += 1;
                    leader
                }
            };
        }
        Admission::Refuse(Denial::Contended)
    }

    /// The key to claim. When tenants are keyed hashes and the secret was changed, a record that
    /// lives under an older version still counts; so does a generation in which something may have
    /// been sent, since the service may know it by its key.
    async fn present_key(&self, ask: &Ask) -> Result<RecordKey, Arc<StoreError>> {
        for older in &ask.older {
            let record = self.0.group.look_up.ask(older.clone()).await?;
            let lives = record.is_some_and(|record| {
                let same = self.is_same(ask, record.fingerprint.as_ref());
                decide(record.state, same, ask.policy.duplicates) != Decision::TakeOver
                    || record.state == State::FailedBeforeCommit { maybe_sent: true }
            });
            if lives {
                return Ok(older.clone());
            }
        }
        Ok(ask.key.clone())
    }

    /// `seen`: a record was there before, or an owner here.
    async fn round(
        &self,
        ask: &Ask,
        key: &RecordKey,
        leader: Leader,
        waited: bool,
        seen: bool,
    ) -> Round {
        let claim = self.claim(ask, key);
        let asked_at = Instant::now();
        match self.0.group.reserve.ask(claim.clone()).await {
            Ok(Reserved::Won(claimed)) => execute(claim, claimed.generation_id, asked_at, leader),
            Ok(Reserved::Vanished) => Round::Again(leader),
            Ok(Reserved::Lost(record)) => {
                self.met(ask, claim, &record, asked_at, leader, waited)
                    .await
            }
            Err(error) => self.claim_failed(ask, &claim, leader, seen, &error),
        }
    }

    fn claim(&self, ask: &Ask, key: &RecordKey) -> Claim {
        let policy = &ask.policy;
        Claim {
            request_id: ask.request_id,
            key: key.clone(),
            token: ids::attempt_token(),
            generation_id: ids::generation_id(),
            fingerprint: ask.digest.map(|digest| self.0.secrets.fingerprint(&digest)),
            terms: Terms {
                lease: policy.lease,
                valid_for: policy.valid_for,
                tombstone_for: policy.tombstone_for,
                on_unknown: policy.on_unknown,
            },
        }
    }

    /// The record is someone's: the table decides.
    async fn met(
        &self,
        ask: &Ask,
        claim: Claim,
        record: &Record,
        asked_at: Instant,
        leader: Leader,
        waited: bool,
    ) -> Round {
        let same = self.is_same(ask, record.fingerprint.as_ref());
        match decide(record.state, same, ask.policy.duplicates) {
            Decision::TakeOver => self.take_over(ask, claim, record.token, leader).await,
            Decision::Replay(id) => self.found(ask, record, id, asked_at, leader, waited).await,
            Decision::Sweep => self.sweep(record, leader).await,
            Decision::Park => self.park(ask, record, leader).await,
            Decision::Refuse(Refusal::InProgress) => {
                Round::Done(Admission::Refuse(Denial::InProgress(lease_left(record))))
            }
            Decision::Refuse(Refusal::Follow) => {
                Round::Done(Admission::Refuse(Denial::Follow(lease_left(record))))
            }
            Decision::Refuse(refusal) => Round::Done(Admission::Refuse(Denial::Refused(refusal))),
        }
    }

    /// Whoever meets a row whose lease is over first makes the sweep's transition.
    async fn sweep(&self, record: &Record, leader: Leader) -> Round {
        match self.swept(record).await {
            Ok(()) => Round::Again(leader),
            Err(error) => Round::Done(refuse_store_down(&error)),
        }
    }

    pub(super) async fn swept(&self, record: &Record) -> Result<(), StoreError> {
        let swept = self.store().sweep_one(&record.key, record.token).await?;
        if swept {
            let to = match record.terms.on_unknown {
                OnUnknown::Hold => State::OutcomeUnknown,
                OnUnknown::Redrive => State::FailedBeforeCommit { maybe_sent: true },
            };
            metrics::counter!(metric::SWEPT, "to" => to.word()).increment(1);
        }
        Ok(())
    }

    async fn take_over(
        &self,
        ask: &Ask,
        claim: Claim,
        seen: AttemptToken,
        leader: Leader,
    ) -> Round {
        let asked_at = Instant::now();
        match self.store().reclaim(&claim, seen).await {
            Ok(Some(claimed)) => execute(claim, claimed.generation_id, asked_at, leader),
            Ok(None) => Round::Again(leader),
            Err(error) => self.claim_failed(ask, &claim, leader, true, &error),
        }
    }

    /// A valid decision stands in the store: read it, unless it is in memory.
    async fn found(
        &self,
        ask: &Ask,
        record: &Record,
        decision_id: DecisionId,
        asked_at: Instant,
        leader: Leader,
        waited: bool,
    ) -> Round {
        if let State::Completed(_, Validity::Valid(left)) = record.state
            && let Some(decided) = self.0.replay.confirm(&ask.key, decision_id, asked_at, left)
        {
            return Round::Done(self.replay(ask, decided, waited));
        }
        let asked_at = Instant::now();
        match self.store().decision(&record.key.tenant, decision_id).await {
            Ok(Some(stored)) => {
                let decided = Arc::new(Decided {
                    committed: stored.committed,
                    recorded: stored.recorded,
                    fingerprint: record.fingerprint,
                });
                if let Some(left) = stored.valid_for {
                    let kept = Arc::clone(&decided);
                    self.0.replay.keep(&ask.key, kept, asked_at, left);
                }
                // Closes the flight after the cache knows: whoever wakes finds the answer there.
                drop(leader);
                Round::Done(self.replay(ask, decided, waited))
            }
            Ok(None) => Round::Again(leader),
            Err(error) => Round::Done(refuse_store_down(&error)),
        }
    }

    /// Another gateway's owner is at work: subscribe, then look, then wait. Hints make it quick,
    /// polling makes it certain.
    async fn park(&self, ask: &Ask, record: &Record, leader: Leader) -> Round {
        let Some(_place) = leader.wait() else {
            return Round::Done(Admission::Refuse(Denial::Full));
        };
        leader.hold(record.fingerprint);
        let mut hints = self.store().wakeups();
        let wake = wake_hash(&record.key);
        // The mark only saves waiting for the poll; without it the poll finds out.
        let _ = self.store().mark_awaited(&record.key).await;
        let mut left = lease_left(record);
        loop {
            match self.0.group.look_up.ask(record.key.clone()).await {
                Ok(Some(seen)) if still_theirs(&seen, record.token) => left = lease_left(&seen),
                // Gone, settled, or its lease over: decide again. An unreachable store is no
                // reason to give up before the wait is over.
                Ok(_) => return Round::Waited(leader),
                Err(_) => {}
            }
            let poll = tokio::time::sleep(self.0.settings.poll_interval);
            tokio::pin!(poll);
            loop {
                tokio::select! {
                    () = &mut poll => break,
                    hint = hints.recv() => if concerns(&hint, wake) { break },
                    () = leader.rung() => break,
                    denial = self.patience(ask, left) => {
                        return Round::Done(Admission::Refuse(denial));
                    }
                }
            }
        }
    }

    /// A claim gave no result: nothing is sent. If it may have been made it is undone, since a
    /// row that nobody works on would keep the key from its client. Not so a claim that is
    /// remembered under an id: its caller asks for it again, and must not lose it by then.
    fn claim_failed(
        &self,
        ask: &Ask,
        claim: &Claim,
        leader: Leader,
        seen: bool,
        error: &StoreError,
    ) -> Round {
        if error.may_have_happened() && ask.request_id.is_none() {
            self.undo(ask, claim, leader);
            return Round::Done(refuse_store_down(error));
        }
        Round::Done(self.store_down(ask, &leader, seen, error))
    }

    /// Goes on trying to release a claim that may have been made. Until the store has answered
    /// once, the key counts as known here and its duplicates wait. A statement that was given up
    /// may still land after that answer, so the release is repeated for a while.
    fn undo(&self, ask: &Ask, claim: &Claim, leader: Leader) {
        let gate = self.clone();
        let release = Release {
            key: claim.key.clone(),
            token: claim.token,
            give_up: GiveUp::NotSent,
        };
        let asked = ask.key.clone();
        leader.store_down();
        self.ambiguous().insert(asked.clone());
        self.0.tracker.spawn(async move {
            gate.release_until_answered(&release).await;
            gate.ambiguous().remove(&asked);
            drop(leader);
            let until = Instant::now() + UNDO_WATCH;
            while Instant::now() < until && !gate.0.draining.is_cancelled() {
                tokio::time::sleep(UNDO_PAUSE_MAX).await;
                if let Ok(Some(_)) = gate.0.group.release.ask(release.clone()).await {
                    break;
                }
            }
        });
    }

    /// Tries until the store says yes or no, for at most `record_retry`.
    pub(super) async fn release_until_answered(&self, release: &Release) {
        let until = Instant::now() + self.0.settings.record_retry;
        let mut pause = UNDO_PAUSE_MIN;
        while self.0.group.release.ask(release.clone()).await.is_err() && Instant::now() < until {
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(UNDO_PAUSE_MAX);
        }
    }

    /// The store can't be asked and nothing was claimed. A route that says `pass` is forwarded
    /// only while this gateway knows nothing at all of the key; a request that waited, or saw a
    /// record, knows that there was another.
    fn store_down(&self, ask: &Ask, leader: &Leader, seen: bool, error: &StoreError) -> Admission {
        let unknown_here = !seen
            && !self.0.replay.knows(&ask.key)
            && !leader.has_followers()
            && !self.ambiguous().contains(&ask.key);
        if ask.policy.on_store_down == OnStoreDown::Pass
            && matches!(error, StoreError::Unavailable(_))
            && unknown_here
        {
            return Admission::Bypass;
        }
        refuse_store_down(error)
    }
}

fn refuse_store_down(error: &StoreError) -> Admission {
    tracing::warn!(error = %Chain(error), "the store gave no answer");
    Admission::Refuse(Denial::StoreUnavailable)
}

fn execute(
    claim: Claim,
    generation_id: GenerationId,
    claimed_at: Instant,
    leader: Leader,
) -> Round {
    let won = Won {
        key: claim.key,
        token: claim.token,
        generation_id,
        fingerprint: claim.fingerprint,
        on_unknown: claim.terms.on_unknown,
        lease: claim.terms.lease,
        valid_for: claim.terms.valid_for,
        claimed_at,
    };
    Round::Done(Admission::Execute(Box::new(Permit::new(won, leader))))
}

/// How much longer the owner's lease holds, as far as the store could tell.
fn lease_left(record: &Record) -> Duration {
    match record.state {
        State::Pending(Lease::Held(left)) => left,
        _ => record.terms.lease,
    }
}

fn still_theirs(record: &Record, token: AttemptToken) -> bool {
    let pending = matches!(
        record.state,
        State::Pending(Lease::Held(_) | Lease::Unbounded)
    );
    pending && record.token == token
}
