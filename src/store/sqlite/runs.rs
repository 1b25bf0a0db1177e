//! Runs: loaded, moved on by a conditional update, told to operators.

use async_trait::async_trait;

use super::SqliteStore;
use crate::config::Keep;
use crate::domain::intent::Stamp;
use crate::domain::message::Recorded;
use crate::domain::run::{LoadedRun, RunId, RunKey, RunStatus, TickCommit, TickCommitted};
use crate::store::StoreError;
use crate::store::runs::{Attempt, RunLine, RunSearch, RunStore, RunsPurged, Transition};

#[async_trait]
impl RunStore for SqliteStore {
    async fn runs_due(&self, _limit: u32) -> Result<Vec<RunKey>, StoreError> {
        Err(StoreError::Closed)
    }

    async fn load_runs(&self, _keys: &[RunKey]) -> Result<Vec<Option<LoadedRun>>, StoreError> {
        Err(StoreError::Closed)
    }

    async fn is_applied(&self, _key: &RunKey, _stamp: Stamp) -> Result<bool, StoreError> {
        Err(StoreError::Closed)
    }

    async fn commit_ticks(&self, _ticks: &[TickCommit]) -> Result<Vec<TickCommitted>, StoreError> {
        Err(StoreError::Closed)
    }

    async fn find_run(&self, _id: RunId) -> Result<Option<RunKey>, StoreError> {
        Err(StoreError::Closed)
    }

    async fn show_run(&self, _key: &RunKey) -> Result<Option<RunLine>, StoreError> {
        Err(StoreError::Closed)
    }

    async fn run_answer(
        &self,
        _key: &RunKey,
    ) -> Result<Option<(RunStatus, Option<Recorded>)>, StoreError> {
        Err(StoreError::Closed)
    }

    async fn find_runs(&self, _search: &RunSearch) -> Result<Vec<RunLine>, StoreError> {
        Err(StoreError::Closed)
    }

    async fn transitions(
        &self,
        _key: &RunKey,
        _after: i64,
        _limit: u32,
    ) -> Result<Vec<Transition>, StoreError> {
        Err(StoreError::Closed)
    }

    async fn attempts(&self, _key: &RunKey, _limit: u32) -> Result<Vec<Attempt>, StoreError> {
        Err(StoreError::Closed)
    }

    async fn purge_runs(&self, _keep: Keep, _limit: u32) -> Result<RunsPurged, StoreError> {
        Err(StoreError::Closed)
    }
}
