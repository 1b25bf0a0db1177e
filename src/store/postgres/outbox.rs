//! Intents: found and claimed ([`claims`]), ended ([`ends`]), looked at ([`operators`]).
//!
//! An intent's row is locked before any row of its attempts, and rows of a batch in the order of
//! their keys, so two batches can't wait for each other.

mod claims;
mod ends;
mod operators;
mod rows;

use async_trait::async_trait;

use super::PostgresStore;
use crate::domain::intent::{
    ClaimWish, Destination, Finish, Finished, IntentClaimed, IntentId, IntentKey,
};
use crate::store::outbox::{
    ClaimBeat, IntentLine, IntentSearch, Lane, LaneWish, OutboxCensus, OutboxStore, Pause,
};
use crate::store::{Audit, Resolved, StoreError};

#[async_trait]
impl OutboxStore for PostgresStore {
    async fn lanes(&self, after: Option<&Lane>, limit: u32) -> Result<Vec<Lane>, StoreError> {
        self.runner.lanes(after, limit).await
    }

    async fn due(&self, wishes: &[LaneWish]) -> Result<Vec<IntentKey>, StoreError> {
        self.runner.due(wishes).await
    }

    async fn claim(&self, wishes: &[ClaimWish]) -> Result<Vec<IntentClaimed>, StoreError> {
        self.runner.claim(wishes).await
    }

    async fn extend(&self, beats: &[ClaimBeat]) -> Result<Vec<bool>, StoreError> {
        self.runner.extend(beats).await
    }

    async fn finish(&self, ends: &[Finish]) -> Result<Vec<Finished>, StoreError> {
        self.runner.finish(ends).await
    }

    async fn find_intent(&self, id: IntentId) -> Result<Option<IntentLine>, StoreError> {
        self.runner.find_intent(id).await
    }

    async fn find_intents(&self, search: &IntentSearch) -> Result<Vec<IntentLine>, StoreError> {
        self.runner.find_intents(search).await
    }

    async fn discard(&self, key: &IntentKey, audit: &Audit) -> Result<Resolved, StoreError> {
        self.runner.discard(key, audit).await
    }

    async fn set_paused(
        &self,
        destination: &Destination,
        paused: bool,
        audit: &Audit,
    ) -> Result<(), StoreError> {
        self.runner.set_paused(destination, paused, audit).await
    }

    async fn paused(&self) -> Result<Vec<Pause>, StoreError> {
        self.runner.paused().await
    }

    async fn outbox_census(&self) -> Result<OutboxCensus, StoreError> {
        self.runner.outbox_census().await
    }
}
