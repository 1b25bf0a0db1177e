//! Intents: found and claimed ([`claims`]), ended ([`ends`]), looked at ([`operators`]).

pub mod claims;
pub mod ends;
pub mod operators;
mod rows;

use async_trait::async_trait;
use futures_util::future::FutureExt as _;

use super::SqliteStore;
use crate::domain::intent::{
    ClaimWish, Destination, Finish, Finished, IntentClaimed, IntentId, IntentKey,
};
use crate::store::outbox::{
    ClaimBeat, IntentLine, IntentSearch, Lane, LaneWish, OutboxCensus, OutboxStore, Pause,
};
use crate::store::{Audit, Resolved, StoreError};

#[async_trait]
impl OutboxStore for SqliteStore {
    async fn lanes(&self, after: Option<&Lane>, limit: u32) -> Result<Vec<Lane>, StoreError> {
        let after = after.cloned();
        self.read(move |connection, now_ms| claims::lanes(connection, now_ms, after, limit).boxed())
            .await
    }

    async fn due(&self, wishes: &[LaneWish]) -> Result<Vec<IntentKey>, StoreError> {
        let wishes = wishes.to_vec();
        self.read(|connection, now_ms| {
            async move { claims::due(connection, now_ms, &wishes).await }.boxed()
        })
        .await
    }

    async fn claim(&self, wishes: &[ClaimWish]) -> Result<Vec<IntentClaimed>, StoreError> {
        let wishes = wishes.to_vec();
        self.write(|connection, now_ms| {
            async move { claims::claim(connection, now_ms, &wishes).await }.boxed()
        })
        .await
    }

    async fn extend(&self, beats: &[ClaimBeat]) -> Result<Vec<bool>, StoreError> {
        let beats = beats.to_vec();
        self.write(|connection, now_ms| {
            async move { claims::extend(connection, now_ms, &beats).await }.boxed()
        })
        .await
    }

    async fn finish(&self, ends: &[Finish]) -> Result<Vec<Finished>, StoreError> {
        let told = ends.to_vec();
        self.write(|connection, now_ms| {
            async move { ends::finish(connection, now_ms, &told).await }.boxed()
        })
        .await
    }

    async fn find_intent(&self, id: IntentId) -> Result<Option<IntentLine>, StoreError> {
        self.read(move |connection, now_ms| operators::find_intent(connection, now_ms, id).boxed())
            .await
    }

    async fn find_intents(&self, search: &IntentSearch) -> Result<Vec<IntentLine>, StoreError> {
        let search = search.clone();
        self.read(|connection, now_ms| {
            async move { operators::find_intents(connection, now_ms, &search).await }.boxed()
        })
        .await
    }

    async fn discard(&self, key: &IntentKey, audit: &Audit) -> Result<Resolved, StoreError> {
        let (key, audit) = (key.clone(), audit.clone());
        self.write(|connection, now_ms| {
            async move { operators::discard(connection, now_ms, &key, &audit).await }.boxed()
        })
        .await
    }

    async fn set_paused(
        &self,
        destination: &Destination,
        paused: bool,
        audit: &Audit,
    ) -> Result<(), StoreError> {
        let (destination, audit) = (destination.clone(), audit.clone());
        self.write(move |connection, now_ms| {
            async move { operators::set_paused(connection, now_ms, &destination, paused, &audit).await }
                .boxed()
        })
        .await
    }

    async fn paused(&self) -> Result<Vec<Pause>, StoreError> {
        self.read(|connection, _| operators::paused(connection).boxed())
            .await
    }

    async fn outbox_census(&self) -> Result<OutboxCensus, StoreError> {
        self.read(|connection, now_ms| operators::outbox_census(connection, now_ms).boxed())
            .await
    }
}
