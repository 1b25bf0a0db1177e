//! The durable half of the coordinator: runs, their history, their timers.

pub(super) mod change;
pub(super) mod columns;
pub(super) mod due;

use async_trait::async_trait;
use bytes::Bytes;
use time::OffsetDateTime;

use super::StoreError;
use crate::config::Keep;
use crate::domain::intent::{IntentId, Stamp};
use crate::domain::message::Recorded;
use crate::domain::run::{LoadedRun, Run, RunId, RunKey, RunStatus, TickCommit, TickCommitted};

/// Where a look for runs that something happened to begins: behind what the looks before told, so
/// that runs that can't be moved on keep no other from being told. In the beginning: at the first.
#[derive(Clone, Debug, Default)]
pub struct DuePlace {
    /// Behind the timer that was over then, of this run.
    pub timer: Option<(OffsetDateTime, RunKey)>,
    /// Behind this run, of those with changed intents.
    pub changed: Option<RunKey>,
}

/// Runs that something happened to.
#[derive(Clone, Debug)]
pub struct RunsDue {
    /// Each once.
    pub keys: Vec<RunKey>,
    /// Where the next look begins. Behind the end comes the beginning.
    pub next: DuePlace,
}

/// Which runs an operator looks for. All given conditions must hold.
#[derive(Clone, Debug, Default)]
pub struct RunSearch {
    /// Of this tenant, and of its principals.
    pub tenant: Option<String>,
    /// In this status.
    pub status: Option<RunStatus>,
    /// Of this workflow.
    pub workflow: Option<String>,
    /// Of this pool.
    pub pool: Option<String>,
    /// Continue after this run, in the order of (tenant, run id).
    pub after: Option<RunKey>,
    /// At most this many.
    pub limit: u32,
}

/// A run with its times, for people.
#[derive(Clone, Debug)]
pub struct RunLine {
    /// The run.
    pub run: Run,
    /// When its decision was committed.
    pub created_at: OffsetDateTime,
    /// When its newest tick was.
    pub updated_at: OffsetDateTime,
    /// When its timer is over.
    pub due_at: Option<OffsetDateTime>,
    /// When it became final.
    pub ended_at: Option<OffsetDateTime>,
}

/// One line of a run's history.
#[derive(Clone, Debug)]
pub struct Transition {
    /// Its number, from 1 without a gap.
    pub seq: i64,
    /// The version of the run that it belongs to.
    pub record_version: i64,
    /// When it was committed.
    pub at: OffsetDateTime,
    /// What happened, in a word.
    pub kind: String,
    /// To which step.
    pub step: Option<String>,
    /// More about it, as JSON.
    pub detail: Option<Bytes>,
    /// The stamp of the input that caused it.
    pub stamp: Option<Stamp>,
}

/// One claim of an intent.
#[derive(Clone, Debug)]
pub struct Attempt {
    /// Of which intent.
    pub intent_id: IntentId,
    /// The claim's stamp.
    pub stamp: Stamp,
    /// Which try, from 1.
    pub try_no: u32,
    /// `open`, `delivered`, `failed`, `released` or `lost`.
    pub status: String,
    /// Who had it.
    pub worker: String,
    /// When it was claimed.
    pub started_at: OffsetDateTime,
    /// When it ended.
    pub ended_at: Option<OffsetDateTime>,
    /// One word for what came of it.
    pub outcome: Option<String>,
    /// The status of the answer, if one came.
    pub answer_status: Option<u16>,
    /// What happened.
    pub diagnostic: Option<String>,
}

/// What retention did with runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunsPurged {
    /// Runs that were deleted, with everything that belongs to them.
    pub runs: u64,
    /// Intents that were deleted with them.
    pub intents: u64,
    /// Bodies of dead intents past their time.
    pub bodies: u64,
}

/// Runs, as the coordinator and operators see them.
#[async_trait]
pub trait RunStore: Send + Sync + 'static {
    /// Runs that something happened to: an intent changed, or a timer is over. Timers and changes
    /// take turns, and tenants do; of either, looks that go on where the last one ended tell every
    /// run within a number of rounds, whatever becomes of the others. Bounded in cost whatever the
    /// backlog. `limit`: at least three.
    async fn runs_due(&self, from: &DuePlace, limit: u32) -> Result<RunsDue, StoreError>;

    /// Reads runs with what a tick looks at, each at one moment.
    async fn load_runs(&self, keys: &[RunKey]) -> Result<Vec<Option<LoadedRun>>, StoreError>;

    /// Whether an input with this stamp was applied.
    async fn is_applied(&self, key: &RunKey, stamp: Stamp) -> Result<bool, StoreError>;

    /// Commits ticks, each whole or not at all: one conditional update on `record_version`, with
    /// its transitions, intents, bodies and changes of intents. Sent again after a lost reply a
    /// tick is recognised by its `tick_id`.
    async fn commit_ticks(&self, ticks: &[TickCommit]) -> Result<Vec<TickCommitted>, StoreError>;

    /// Finds a run by its id alone.
    async fn find_run(&self, id: RunId) -> Result<Option<RunKey>, StoreError>;

    /// Reads one run.
    async fn show_run(&self, key: &RunKey) -> Result<Option<RunLine>, StoreError>;

    /// How a run stands, with the answer that its first intent brought, if it is there: that of an
    /// accepted request.
    async fn run_answer(
        &self,
        key: &RunKey,
    ) -> Result<Option<(RunStatus, Option<Recorded>)>, StoreError>;

    /// Finds runs.
    async fn find_runs(&self, search: &RunSearch) -> Result<Vec<RunLine>, StoreError>;

    /// The history after this number, at most `limit` lines.
    async fn transitions(
        &self,
        key: &RunKey,
        after: i64,
        limit: u32,
    ) -> Result<Vec<Transition>, StoreError>;

    /// Claims of a run's intents, newest first, at most `limit`.
    async fn attempts(&self, key: &RunKey, limit: u32) -> Result<Vec<Attempt>, StoreError>;

    /// Deletes up to `limit` runs that are past their time, with everything that belongs to them,
    /// remembered claims past theirs, and bytes of dead intents past theirs. Never what is not
    /// final.
    async fn purge_runs(&self, keep: Keep, limit: u32) -> Result<RunsPurged, StoreError>;
}
