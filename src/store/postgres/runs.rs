//! Runs: begun with their decision, moved on by a conditional update, told to operators.
//!
//! Reading order: [`parts`] inserts what belongs to a run, [`load`] reads what a tick is made from,
//! [`commit`] writes it; [`search`] is for people, [`purge`] for retention.

mod commit;
mod load;
pub(super) mod parts;
mod purge;
mod rows;
mod search;

use async_trait::async_trait;

use super::PostgresStore;
use crate::config::Keep;
use crate::domain::intent::Stamp;
use crate::domain::message::Recorded;
use crate::domain::run::{LoadedRun, RunId, RunKey, RunStatus, TickCommit, TickCommitted};
use crate::store::StoreError;
use crate::store::runs::{
    Attempt, DuePlace, RunLine, RunSearch, RunStore, RunsDue, RunsPurged, Transition,
};

#[async_trait]
impl RunStore for PostgresStore {
    async fn runs_due(&self, from: &DuePlace, limit: u32) -> Result<RunsDue, StoreError> {
        self.runner.runs_due(from, limit).await
    }

    async fn load_runs(&self, keys: &[RunKey]) -> Result<Vec<Option<LoadedRun>>, StoreError> {
        self.runner.load_runs(keys).await
    }

    async fn is_applied(&self, key: &RunKey, stamp: Stamp) -> Result<bool, StoreError> {
        self.runner.is_applied(key, stamp).await
    }

    async fn commit_ticks(&self, ticks: &[TickCommit]) -> Result<Vec<TickCommitted>, StoreError> {
        self.runner.commit_ticks(ticks).await
    }

    async fn find_run(&self, id: RunId) -> Result<Option<RunKey>, StoreError> {
        self.runner.find_run(id).await
    }

    async fn show_run(&self, key: &RunKey) -> Result<Option<RunLine>, StoreError> {
        self.runner.show_run(key).await
    }

    async fn run_answer(
        &self,
        key: &RunKey,
    ) -> Result<Option<(RunStatus, Option<Recorded>)>, StoreError> {
        self.runner.run_answer(key).await
    }

    async fn find_runs(&self, search: &RunSearch) -> Result<Vec<RunLine>, StoreError> {
        self.runner.find_runs(search).await
    }

    async fn transitions(
        &self,
        key: &RunKey,
        after: i64,
        limit: u32,
    ) -> Result<Vec<Transition>, StoreError> {
        self.runner.transitions(key, after, limit).await
    }

    async fn attempts(&self, key: &RunKey, limit: u32) -> Result<Vec<Attempt>, StoreError> {
        self.runner.attempts(key, limit).await
    }

    async fn purge_runs(&self, keep: Keep, limit: u32) -> Result<RunsPurged, StoreError> {
        self.runner.purge_runs(keep, limit).await
    }
}
