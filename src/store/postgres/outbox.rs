//! Intents: found, claimed, ended.

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
    async fn lanes(&self, _after: Option<&Lane>, _limit: u32) -> Result<Vec<Lane>, StoreError> {
        Err(StoreError::Closed)
    }

    async fn due(&self, _wishes: &[LaneWish]) -> Result<Vec<IntentKey>, StoreError> {
        Err(StoreError::Closed)
    }

    async fn claim(&self, _wishes: &[ClaimWish]) -> Result<Vec<IntentClaimed>, StoreError> {
        Err(StoreError::Closed)
    }

    async fn extend(&self, _beats: &[ClaimBeat]) -> Result<Vec<bool>, StoreError> {
        Err(StoreError::Closed)
    }

    async fn finish(&self, _ends: &[Finish]) -> Result<Vec<Finished>, StoreError> {
        Err(StoreError::Closed)
    }

    async fn find_intent(&self, _id: IntentId) -> Result<Option<IntentLine>, StoreError> {
        Err(StoreError::Closed)
    }

    async fn find_intents(&self, _search: &IntentSearch) -> Result<Vec<IntentLine>, StoreError> {
        Err(StoreError::Closed)
    }

    async fn discard(&self, _key: &IntentKey, _audit: &Audit) -> Result<Resolved, StoreError> {
        Err(StoreError::Closed)
    }

    async fn set_paused(
        &self,
        _destination: &Destination,
        _paused: bool,
        _audit: &Audit,
    ) -> Result<(), StoreError> {
        Err(StoreError::Closed)
    }

    async fn paused(&self) -> Result<Vec<Pause>, StoreError> {
        Err(StoreError::Closed)
    }

    async fn outbox_census(&self) -> Result<OutboxCensus, StoreError> {
        Err(StoreError::Closed)
    }
}
