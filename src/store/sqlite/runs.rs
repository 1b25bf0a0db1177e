//! Runs: begun with their decision, moved on by a conditional update, told to operators.
//!
//! Reading order: [`parts`] inserts what belongs to a run, [`load`] reads what a tick is made from,
//! [`commit`] writes it; [`search`] is for people, [`purge`] for retention.

pub mod commit;
pub mod load;
pub mod parts;
pub mod purge;
mod rows;
pub mod search;

use async_trait::async_trait;
use futures_util::future::FutureExt as _;
use sqlx::Connection as _;

use super::SqliteStore;
use super::failure;
use crate::config::Keep;
use crate::domain::intent::Stamp;
use crate::domain::message::Recorded;
use crate::domain::run::{LoadedRun, RunId, RunKey, RunStatus, TickCommit, TickCommitted};
use crate::store::StoreError;
use crate::store::runs::{
    Attempt, DuePlace, RunLine, RunSearch, RunStore, RunsDue, RunsPurged, Transition,
};

#[async_trait]
impl RunStore for SqliteStore {
    async fn runs_due(&self, from: &DuePlace, limit: u32) -> Result<RunsDue, StoreError> {
        let from = from.clone();
        self.read(move |connection, now_ms| {
            async move { load::runs_due(connection, now_ms, &from, limit).await }.boxed()
        })
        .await
    }

    async fn load_runs(&self, keys: &[RunKey]) -> Result<Vec<Option<LoadedRun>>, StoreError> {
        let keys = keys.to_vec();
        self.read(|connection, now_ms| {
            async move {
                // One snapshot: a run and its intents are of one moment.
                let mut snapshot = connection.begin().await.map_err(failure::before)?;
                let loaded = load::load_runs(&mut snapshot, now_ms, &keys).await;
                snapshot.rollback().await.map_err(failure::before)?;
                loaded
            }
            .boxed()
        })
        .await
    }

    async fn is_applied(&self, key: &RunKey, stamp: Stamp) -> Result<bool, StoreError> {
        let key = key.clone();
        self.read(move |connection, _| {
            async move { commit::is_applied(connection, &key, stamp).await }.boxed()
        })
        .await
    }

    async fn commit_ticks(&self, ticks: &[TickCommit]) -> Result<Vec<TickCommitted>, StoreError> {
        let ticks = ticks.to_vec();
        self.write(|connection, now_ms| {
            async move { commit::commit_ticks(connection, now_ms, &ticks).await }.boxed()
        })
        .await
    }

    async fn find_run(&self, id: RunId) -> Result<Option<RunKey>, StoreError> {
        self.read(move |connection, _| search::find_run(connection, id).boxed())
            .await
    }

    async fn show_run(&self, key: &RunKey) -> Result<Option<RunLine>, StoreError> {
        let key = key.clone();
        self.read(|connection, _| async move { search::show_run(connection, &key).await }.boxed())
            .await
    }

    async fn run_answer(
        &self,
        key: &RunKey,
    ) -> Result<Option<(RunStatus, Option<Recorded>)>, StoreError> {
        let key = key.clone();
        self.read(|connection, _| async move { load::run_answer(connection, &key).await }.boxed())
            .await
    }

    async fn find_runs(&self, search: &RunSearch) -> Result<Vec<RunLine>, StoreError> {
        let search = search.clone();
        self.read(|connection, _| {
            async move { search::find_runs(connection, &search).await }.boxed()
        })
        .await
    }

    async fn transitions(
        &self,
        key: &RunKey,
        after: i64,
        limit: u32,
    ) -> Result<Vec<Transition>, StoreError> {
        let key = key.clone();
        self.read(move |connection, _| {
            async move { search::transitions(connection, &key, after, limit).await }.boxed()
        })
        .await
    }

    async fn attempts(&self, key: &RunKey, limit: u32) -> Result<Vec<Attempt>, StoreError> {
        let key = key.clone();
        self.read(move |connection, _| {
            async move { search::attempts(connection, &key, limit).await }.boxed()
        })
        .await
    }

    async fn purge_runs(&self, keep: Keep, limit: u32) -> Result<RunsPurged, StoreError> {
        let past = self
            .read(move |connection, now_ms| purge::find(connection, now_ms, keep, limit).boxed());
        let mut purged = RunsPurged::default();
        if past.await?.is_empty() {
            return Ok(purged);
        }
        loop {
            let left = limit.saturating_sub(u32::try_from(purged.runs).unwrap_or(limit));
            let page = self.write(move |connection, now_ms| {
                purge::purge(connection, now_ms, keep, left).boxed()
            });
            let (page, more) = page.await?;
            purged.runs += page.runs;
            purged.intents += page.intents;
            purged.bodies += page.bodies;
            if !more {
                return Ok(purged);
            }
        }
    }
}
