//! A store in memory for the coordinator's loop: runs only, and whatever goes wrong with commits.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use time::OffsetDateTime;
use tokio::sync::broadcast;
use uuid::Uuid;

use crate::config::Keep;
use crate::domain::intent::{
    ClaimWish, Destination, Finish, Finished, IntentClaimed, IntentId, IntentKey, Stamp,
};
use crate::domain::message::Recorded;
use crate::domain::record::{
    AttemptToken, Claim, Claimed, Committed, Completion, DecisionId, Found, Heartbeat, Record,
    Release, Released, Remembered, Reserved, StoredDecision,
};
use crate::domain::run::tests::model::Model;
use crate::domain::run::{LoadedRun, RunId, RunKey, RunStatus, TickCommit, TickCommitted};
use crate::domain::scope::{RecordKey, TenantScope};
use crate::domain::secret::Secret;
use crate::store::outbox::{
    ClaimBeat, IntentLine, IntentSearch, Lane, LaneWish, OutboxCensus, OutboxStore, Pause,
};
use crate::store::runs::{
    Attempt, DuePlace, RunLine, RunSearch, RunStore, RunsDue, RunsPurged, Transition,
};
use crate::store::{
    Audit, Census, Purged, Resolved, Search, Store, StoreError, Swept, Verdict, Wakeup,
};

/// What goes wrong with a commit.
#[derive(Clone, Copy, Debug)]
pub(super) enum Fault {
    /// It happens, and the reply is lost.
    ReplyLost,
    /// It does not happen, and nobody knows.
    RequestLost,
    /// Another gateway commits the same first.
    Beaten,
    /// It does not happen.
    Refused,
}

#[derive(Default)]
pub(super) struct Shelf {
    pub runs: BTreeMap<RunKey, Model>,
    pub faults: VecDeque<Fault>,
    pub unreadable: BTreeSet<RunKey>,
    /// Takes too long to load together with others.
    pub heavy: Option<RunKey>,
    /// Every tick that was sent, by run.
    pub sent: Vec<(RunKey, Stamp)>,
}

#[derive(Default)]
pub(super) struct Double(Mutex<Shelf>);

impl Double {
    pub fn open(&self) -> MutexGuard<'_, Shelf> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shelf {
    fn commit(&mut self, commit: &TickCommit) -> Result<TickCommitted, StoreError> {
        self.sent.push((commit.key.clone(), commit.tick_id));
        let fault = self.faults.pop_front();
        let run = self.runs.get_mut(&commit.key).ok_or(StoreError::Closed)?;
        let lost = || io::Error::new(io::ErrorKind::TimedOut, "no reply").into();
        match fault {
            None => Ok(run.commit(commit)),
            Some(Fault::ReplyLost) => {
                run.commit(commit);
                Err(StoreError::Ambiguous(lost()))
            }
            Some(Fault::RequestLost) => Err(StoreError::Ambiguous(lost())),
            Some(Fault::Refused) => Err(StoreError::Refused(lost())),
            Some(Fault::Beaten) => {
                let tick_id = run.draw();
                let theirs = TickCommit {
                    tick_id,
                    ..commit.clone()
                };
                run.commit(&theirs);
                Ok(run.commit(commit))
            }
        }
    }
}

type Answer<T> = Result<T, StoreError>;

#[async_trait]
impl RunStore for Double {
    async fn runs_due(&self, from: &DuePlace, limit: u32) -> Answer<RunsDue> {
        let held = self.open();
        let due = held.runs.iter().filter(|(_, run)| run.is_due());
        let later = due.filter(|(key, _)| Some(*key) > from.changed.as_ref());
        let keys: Vec<_> = later
            .map(|(key, _)| key.clone())
            .take(limit as usize)
            .collect();
        let full = keys.len() == limit as usize;
        let next = DuePlace {
            timer: None,
            changed: keys.last().filter(|_| full).cloned(),
        };
        Ok(RunsDue { keys, next })
    }
    async fn load_runs(&self, keys: &[RunKey]) -> Answer<Vec<Option<LoadedRun>>> {
        let held = self.open();
        if keys.iter().any(|key| held.unreadable.contains(key)) {
            return Err(StoreError::Inconsistent {
                table: "eec_run",
                column: "status",
                what: "nonsense".to_owned(),
            });
        }
        let is_heavy = |key| Some(key) == held.heavy.as_ref();
        if keys.len() > 1 && keys.iter().any(is_heavy) {
            let slow = io::Error::new(io::ErrorKind::TimedOut, "too slow");
            return Err(StoreError::Ambiguous(slow.into()));
        }
        Ok(keys
            .iter()
            .map(|key| held.runs.get(key).map(Model::load))
            .collect())
    }
    async fn is_applied(&self, key: &RunKey, stamp: Stamp) -> Answer<bool> {
        let held = self.open();
        let run = held.runs.get(key);
        Ok(run.is_some_and(|run| run.stamps.contains(&stamp.0)))
    }
    async fn commit_ticks(&self, ticks: &[TickCommit]) -> Answer<Vec<TickCommitted>> {
        let mut held = self.open();
        ticks.iter().map(|commit| held.commit(commit)).collect()
    }
    async fn find_run(&self, _: RunId) -> Answer<Option<RunKey>> {
        Err(StoreError::Closed)
    }
    async fn show_run(&self, _: &RunKey) -> Answer<Option<RunLine>> {
        Err(StoreError::Closed)
    }
    async fn run_answer(&self, _: &RunKey) -> Answer<Option<(RunStatus, Option<Recorded>)>> {
        Err(StoreError::Closed)
    }
    async fn find_runs(&self, _: &RunSearch) -> Answer<Vec<RunLine>> {
        Err(StoreError::Closed)
    }
    async fn transitions(&self, _: &RunKey, _: i64, _: u32) -> Answer<Vec<Transition>> {
        Ok(Vec::new())
    }
    async fn attempts(&self, _: &RunKey, _: u32) -> Answer<Vec<Attempt>> {
        Err(StoreError::Closed)
    }
    async fn purge_runs(&self, _: Keep, _: u32) -> Answer<RunsPurged> {
        Err(StoreError::Closed)
    }
}

#[async_trait]
impl OutboxStore for Double {
    async fn lanes(&self, _: Option<&Lane>, _: u32) -> Answer<Vec<Lane>> {
        Err(StoreError::Closed)
    }
    async fn due(&self, _: &[LaneWish]) -> Answer<Vec<IntentKey>> {
        Err(StoreError::Closed)
    }
    async fn claim(&self, _: &[ClaimWish]) -> Answer<Vec<IntentClaimed>> {
        Err(StoreError::Closed)
    }
    async fn extend(&self, _: &[ClaimBeat]) -> Answer<Vec<bool>> {
        Err(StoreError::Closed)
    }
    async fn finish(&self, _: &[Finish]) -> Answer<Vec<Finished>> {
        Err(StoreError::Closed)
    }
    async fn find_intent(&self, _: IntentId) -> Answer<Option<IntentLine>> {
        Err(StoreError::Closed)
    }
    async fn find_intents(&self, _: &IntentSearch) -> Answer<Vec<IntentLine>> {
        Err(StoreError::Closed)
    }
    async fn discard(&self, _: &IntentKey, _: &Audit) -> Answer<Resolved> {
        Err(StoreError::Closed)
    }
    async fn set_paused(&self, _: &Destination, _: bool, _: &Audit) -> Answer<()> {
        Err(StoreError::Closed)
    }
    async fn paused(&self) -> Answer<Vec<Pause>> {
        Err(StoreError::Closed)
    }
    async fn outbox_census(&self) -> Answer<OutboxCensus> {
        Err(StoreError::Closed)
    }
}

#[async_trait]
impl Store for Double {
    async fn reserve(&self, _: &[Claim]) -> Answer<Vec<Reserved>> {
        Err(StoreError::Closed)
    }
    async fn reclaim(&self, _: &Claim, _: AttemptToken) -> Answer<Option<Claimed>> {
        Err(StoreError::Closed)
    }
    async fn heartbeat(&self, _: &[Heartbeat]) -> Answer<Vec<bool>> {
        Err(StoreError::Closed)
    }
    async fn complete(&self, _: &[Completion]) -> Answer<Vec<Option<Committed>>> {
        Err(StoreError::Closed)
    }
    async fn release(&self, _: &[Release]) -> Answer<Vec<Option<Released>>> {
        Err(StoreError::Closed)
    }
    async fn remembered(&self, _: &TenantScope, _: Uuid) -> Answer<Option<Remembered>> {
        Err(StoreError::Closed)
    }
    async fn look_up(&self, _: &[RecordKey]) -> Answer<Vec<Option<Record>>> {
        Err(StoreError::Closed)
    }
    async fn decision(&self, _: &TenantScope, _: DecisionId) -> Answer<Option<StoredDecision>> {
        Err(StoreError::Closed)
    }
    async fn mark_awaited(&self, _: &RecordKey) -> Answer<()> {
        Err(StoreError::Closed)
    }
    async fn notify(&self, _: &[u64]) -> Answer<()> {
        Err(StoreError::Closed)
    }
    async fn doctor(&self) -> Answer<Vec<crate::store::doctor::Finding>> {
        Err(StoreError::Closed)
    }
    fn wakeups(&self) -> broadcast::Receiver<Wakeup> {
        broadcast::channel(1).1
    }
    async fn sweep_one(&self, _: &RecordKey, _: AttemptToken) -> Answer<bool> {
        Err(StoreError::Closed)
    }
    async fn sweep(&self, _: u32) -> Answer<Swept> {
        Err(StoreError::Closed)
    }
    async fn purge(&self, _: u32) -> Answer<Purged> {
        Err(StoreError::Closed)
    }
    async fn census(&self) -> Answer<Census> {
        Err(StoreError::Closed)
    }
    async fn find(&self, _: &Search) -> Answer<Vec<Found>> {
        Err(StoreError::Closed)
    }
    async fn resolve(
        &self,
        _: &RecordKey,
        _: &Verdict,
        _: Duration,
        _: &Audit,
    ) -> Answer<Resolved> {
        Err(StoreError::Closed)
    }
    async fn purge_one(&self, _: &RecordKey, _: &Audit) -> Answer<Resolved> {
        Err(StoreError::Closed)
    }
    async fn secrets(&self, _: [u8; 32]) -> Answer<Vec<Secret>> {
        Err(StoreError::Closed)
    }
    async fn ping(&self) -> Answer<OffsetDateTime> {
        Err(StoreError::Closed)
    }
    async fn warnings(&self) -> Answer<Vec<String>> {
        Err(StoreError::Closed)
    }
    async fn close(&self) {}
}
