//! The brain for runs: load, tick, commit, wake.
//!
//! [`Coordinator`] is the only way in which a run changes. It knows no SQL and no HTTP; what a run
//! is to become is decided by [`domain::run`](crate::domain::run).
//!
//! Invariants:
//! - A commit whose reply was lost is sent again as it is before anything is computed anew.
//! - A conflict costs a run nothing: it is loaded and computed again, a bounded number of times,
//!   and after that left to the next round.
//! - Each round begins where the one before ended: runs that can't be moved on starve no other.
//! - What was committed is committed whether or not somebody hears of it: bells and
//!   [`Coordinator::watch`] are hints.

#[cfg(test)]
mod double;
#[cfg(test)]
mod tests;

use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::{FutureExt, StreamExt, stream};
use tokio::sync::broadcast;

use crate::domain::intent::Order;
use crate::domain::run::{
    Input, LoadedRun, Refused, Run, RunKey, RunStatus, Tick, TickCommit, TickCommitted, tick,
};
use crate::ids;
use crate::lifecycle::Bells;
use crate::store::group::Group;
use crate::store::portion::Portion;
use crate::store::runs::{DuePlace, RunsDue};
use crate::store::{Store, StoreError};
use crate::telemetry::{Chain, metric};

/// How often a run is loaded and computed again after conflicts, and a commit is sent again whose
/// reply was lost.
pub const TRIES_MAX: u32 = 8;
/// Runs that are loaded at once, at most.
const LOAD_MAX: usize = 64;
/// Runs whose ticks are computed and committed at once.
const CONCURRENT_MAX: usize = 64;
/// Transitions that are read at once to find the one that an input made.
const HISTORY_PAGE: u32 = 50;
/// Ticks that a watcher may lag behind before it has to look again.
const WATCHED_MAX: usize = 1024;
/// The first pause after a conflict or a lost reply, at most; it doubles.
const PAUSE_MAX: Duration = Duration::from_millis(10);

/// The only way in which a run changes. Clones are the same.
#[derive(Clone)]
pub struct Coordinator(Arc<Inner>);

struct Inner {
    store: Arc<dyn Store>,
    group: Group,
    bells: Bells,
    /// Where the next round's look begins.
    place: Mutex<DuePlace>,
    portion: Portion,
    ticked: broadcast::Sender<RunKey>,
}

/// An input that was taken in.
#[derive(Clone, Debug)]
pub struct Applied {
    /// The run as it is then; at once, or after later ticks if it was told again.
    pub run: Run,
    /// Whether it had been taken in before, and nothing was written.
    pub repeated: bool,
}

/// Why an input was not taken in.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// There is no such run.
    #[error("there is no such run")]
    NoRun,
    /// The run can't take it; nothing was written.
    #[error(transparent)]
    Refused(Refused),
    /// Others changed the run again and again; nothing was written. Tell it again.
    #[error("others change the run at the same time")]
    Contended,
    /// The store gave no result. It may have been taken in; tell it again with the same stamp.
    #[error("the store gave no result")]
    Store(#[source] Arc<StoreError>),
}

impl From<StoreError> for ApplyError {
    fn from(error: StoreError) -> Self {
        Self::Store(Arc::new(error))
    }
}

/// What became of one run in a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Advanced {
    /// It has moved on.
    Committed,
    /// There was nothing to take in any more.
    Unchanged,
    /// Left to the next round.
    Left,
}

impl Coordinator {
    /// Coordinates the runs of this store, beside others that do.
    pub fn new(store: Arc<dyn Store>, group: Group, bells: Bells) -> Self {
        let (ticked, _) = broadcast::channel(WATCHED_MAX);
        Self(Arc::new(Inner {
            store,
            group,
            bells,
            place: Mutex::default(),
            portion: Portion::new(LOAD_MAX),
            ticked,
        }))
    }

    /// Tells a run something, once for each stamp, which is for one act.
    ///
    /// # Errors
    /// See [`ApplyError`].
    pub async fn apply(&self, key: &RunKey, input: Input) -> Result<Applied, ApplyError> {
        for round in 0..TRIES_MAX {
            pause(round).await;
            let repeated = self.0.store.is_applied(key, input.stamp).await?;
            let loaded = self.load(key).await?.ok_or(ApplyError::NoRun)?;
            if repeated {
                let run = loaded.run;
                if !self.is_same_act(&run, &input).await? {
                    count("refused");
                    return Err(ApplyError::Refused(Refused::OtherAct));
                }
                count("unchanged");
                return Ok(Applied { run, repeated });
            }
            let computed = match tick(&loaded, Some(&input)) {
                Ok(computed) => computed,
                // It may have been taken in between the two looks, and be refused for what it did.
                Err(_) if self.0.store.is_applied(key, input.stamp).await? => continue,
                Err(refused) => {
                    count("refused");
                    return Err(ApplyError::Refused(refused));
                }
            };
            let Some(computed) = computed else {
                // Every input that is not refused makes a tick.
                return Err(ApplyError::Refused(Refused::Gone));
            };
            let commit = commit_of(&loaded.run, computed);
            match self.commit(&commit).await.map_err(ApplyError::Store)? {
                TickCommitted::Committed => {
                    self.tell(&loaded.run, &commit.tick);
                    let run = after(loaded.run, commit.tick);
                    let repeated = false;
                    return Ok(Applied { run, repeated });
                }
                TickCommitted::Conflict => {}
            }
        }
        Err(ApplyError::Contended)
    }

    /// Whether the input of this stamp that the run took in is this act; repeats are mostly near the
    /// end of the history.
    async fn is_same_act(&self, run: &Run, input: &Input) -> Result<bool, StoreError> {
        let mut end = run.last_transition_seq;
        while end > 0 {
            let after = (end - i64::from(HISTORY_PAGE)).max(0);
            let store = &self.0.store;
            let lines = store.transitions(&run.key, after, HISTORY_PAGE).await?;
            let mut lines = lines.iter();
            if let Some(line) = lines.find(|line| line.stamp == Some(input.stamp)) {
                let detail = line.detail.as_deref();
                return Ok(input.event.is_told_by(&line.kind, detail));
            }
            end = after;
        }
        Ok(true)
    }

    /// Moves on up to `limit` runs that something happened to, and returns how many it has.
    ///
    /// # Errors
    /// When the store can't say which, or what they are. One run's trouble is logged and stops no
    /// other.
    pub async fn advance(&self, limit: u32) -> Result<u64, StoreError> {
        let from = self.place().clone();
        let RunsDue { keys: due, next } = self.0.store.runs_due(&from, limit).await?;
        // Whatever becomes of these, the next round looks at others.
        *self.place() = next;
        let (mut committed, mut failed) = (0, None);
        let mut rest = &due[..];
        while !rest.is_empty() {
            let (keys, later) = self.0.portion.split(rest);
            rest = later;
            let loaded = self.load_all(keys).await;
            let too_much = self.0.portion.hear(&loaded);
            let loaded = match loaded {
                Err(error) if too_much => {
                    failed = Some(error);
                    continue;
                }
                loaded => loaded?,
            };
            let mut ends = stream::iter(loaded)
                .map(|loaded| self.advance_one(loaded))
                .buffer_unordered(CONCURRENT_MAX);
            while let Some(advanced) = ends.next().await {
                committed += u64::from(advanced == Advanced::Committed);
            }
        }
        match failed {
            Some(error) if committed == 0 => Err(error),
            _ => Ok(committed),
        }
    }

    /// Runs that this process moved on, from now on. Whoever lags looks again at what it waits
    /// for; what other processes do is not told here.
    #[must_use]
    pub fn watch(&self) -> broadcast::Receiver<RunKey> {
        self.0.ticked.subscribe()
    }

    async fn advance_one(&self, loaded: LoadedRun) -> Advanced {
        let key = loaded.run.key.clone();
        // A tick is committed whole or not at all, so that a panic leaves nothing behind.
        let work = AssertUnwindSafe(self.advance_until_done(loaded)).catch_unwind();
        let error = match work.await {
            Ok(Ok(advanced)) => return advanced,
            Ok(Err(error)) => Chain(&*error).to_string(),
            Err(_) => "a panic: a bug".to_owned(),
        };
        count("failed");
        tracing::warn!(run = %key.id, error, "a run could not be moved on; the next round tries again");
        Advanced::Left
    }

    async fn advance_until_done(&self, mut loaded: LoadedRun) -> Result<Advanced, Arc<StoreError>> {
        let key = loaded.run.key.clone();
        for round in 1..=TRIES_MAX {
            // Without an input nothing can be refused.
            let Ok(Some(computed)) = tick(&loaded, None) else {
                count("unchanged");
                return Ok(Advanced::Unchanged);
            };
            let commit = commit_of(&loaded.run, computed);
            if self.commit(&commit).await? == TickCommitted::Committed {
                self.tell(&loaded.run, &commit.tick);
                return Ok(Advanced::Committed);
            }
            pause(round).await;
            match self.load(&key).await? {
                Some(again) => loaded = again,
                None => return Ok(Advanced::Unchanged),
            }
        }
        Ok(Advanced::Left)
    }

    /// Commits a tick. As long as nobody knows whether it happened, the very same is sent again:
    /// the store recognises it.
    async fn commit(&self, commit: &TickCommit) -> Result<TickCommitted, Arc<StoreError>> {
        let mut in_doubt = false;
        let mut round = 0;
        loop {
            let result = self.0.group.tick.ask(commit.clone()).await;
            let error = match result {
                Ok(committed) => {
                    count(match committed {
                        TickCommitted::Committed => "committed",
                        TickCommitted::Conflict => "conflict",
                    });
                    return Ok(committed);
                }
                Err(error) => error,
            };
            round += 1;
            in_doubt |= matches!(*error, StoreError::Ambiguous(_));
            if !in_doubt || round == TRIES_MAX || matches!(*error, StoreError::Closed) {
                return Err(error);
            }
            pause(round).await;
        }
    }

    async fn load(&self, key: &RunKey) -> Result<Option<LoadedRun>, StoreError> {
        let loaded = self.0.store.load_runs(std::slice::from_ref(key)).await?;
        Ok(loaded.into_iter().next().flatten())
    }

    /// Loads runs; one whose rows can't be read is logged and left out.
    async fn load_all(&self, keys: &[RunKey]) -> Result<Vec<LoadedRun>, StoreError> {
        match self.0.store.load_runs(keys).await {
            Ok(loaded) => Ok(loaded.into_iter().flatten().collect()),
            Err(StoreError::Inconsistent { .. }) => {
                let mut readable = Vec::with_capacity(keys.len());
                for key in keys {
                    match self.load(key).await {
                        Ok(loaded) => readable.extend(loaded),
                        Err(error @ StoreError::Inconsistent { .. }) => {
                            count("failed");
                            let error = Chain(&error);
                            tracing::warn!(run = %key.id, %error, "a run can't be read");
                        }
                        Err(error) => return Err(error),
                    }
                }
                Ok(readable)
            }
            Err(error) => Err(error),
        }
    }

    /// Every change is whole before anything can panic.
    fn place(&self) -> MutexGuard<'_, DuePlace> {
        self.0.place.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells everybody who waits that a tick was committed.
    fn tell(&self, before: &Run, tick: &Tick) {
        let has = |wanted: Order| tick.changes.iter().any(|change| change.order == wanted);
        let inserted = tick.intents.iter().any(|intent| intent.armed);
        if inserted || has(Order::Arm) || has(Order::Redrive) {
            self.0.bells.outbox.notify_one();
        }
        // What was withdrawn and not claimed has changed with this very commit.
        if has(Order::Withdraw) {
            self.0.bells.runs.notify_one();
        }
        // Nobody has to listen.
        let _ = self.0.ticked.send(before.key.clone());
        let worth_a_line = tick.status.is_final() || tick.status == RunStatus::Stuck;
        if tick.status != before.status && worth_a_line {
            let (from, to) = (before.status.word(), tick.status.word());
            tracing::info!(run = %before.key.id, workflow = %before.workflow, from, to, "a run changed");
        }
    }
}

fn commit_of(run: &Run, tick: Tick) -> TickCommit {
    TickCommit {
        key: run.key.clone(),
        seen_version: run.record_version,
        seen_seq: run.last_transition_seq,
        tick_id: ids::stamp(),
        tick,
    }
}

/// The run that a tick leaves.
fn after(run: Run, tick: Tick) -> Run {
    let told = i64::try_from(tick.transitions.len()).unwrap_or(i64::MAX);
    Run {
        record_version: run.record_version + 1,
        last_transition_seq: run.last_transition_seq.saturating_add(told),
        status: tick.status,
        progress: tick.progress,
        reason: tick.reason,
        ..run
    }
}

/// Between two tries: none before the first, then ever longer, spread evenly.
async fn pause(round: u32) {
    if round > 0 {
        let longest = PAUSE_MAX.saturating_mul(1 << round.min(6));
        tokio::time::sleep(longest.mul_f64(ids::jitter())).await;
    }
}

fn count(result: &'static str) {
    metrics::counter!(metric::RUN_TICKS, "result" => result).increment(1);
}
