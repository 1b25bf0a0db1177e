//! A real store that fails as a test tells it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;
use oncegate::domain::intent::{
    ClaimWish, Destination, Finish, Finished, IntentClaimed, IntentId, IntentKey,
};
use oncegate::store::outbox::{
    ClaimBeat, IntentLine, IntentSearch, Lane, LaneWish, OutboxCensus, OutboxStore, Pause,
};
use oncegate::store::{Audit, Resolved, Store, StoreError};

/// A store whose looks for what is due and whose claims may fail.
pub struct Failing {
    /// Does everything else.
    pub inner: Arc<dyn Store>,
    /// Looks for what is due, so far.
    pub looks: AtomicUsize,
    /// The look that fails.
    pub fails_at_look: Option<usize>,
    /// Claims of this together with others take too long.
    pub heavy: Option<IntentKey>,
}

impl Failing {
    /// One that never fails.
    pub fn of(inner: Arc<dyn Store>) -> Self {
        Self {
            inner,
            looks: AtomicUsize::new(0),
            fails_at_look: None,
            heavy: None,
        }
    }
}

#[async_trait]
impl OutboxStore for Failing {
    async fn lanes(&self, after: Option<&Lane>, limit: u32) -> Result<Vec<Lane>, StoreError> {
        self.inner.lanes(after, limit).await
    }
    async fn due(&self, wishes: &[LaneWish]) -> Result<Vec<IntentKey>, StoreError> {
        if Some(self.looks.fetch_add(1, Ordering::SeqCst)) == self.fails_at_look {
            return Err(StoreError::Unavailable(sqlx::Error::PoolTimedOut));
        }
        self.inner.due(wishes).await
    }
    async fn claim(&self, wishes: &[ClaimWish]) -> Result<Vec<IntentClaimed>, StoreError> {
        let is_heavy = |wish: &ClaimWish| Some(&wish.key) == self.heavy.as_ref();
        if wishes.len() > 1 && wishes.iter().any(is_heavy) {
            let timed_out = std::io::Error::from(std::io::ErrorKind::TimedOut);
            return Err(StoreError::Ambiguous(timed_out.into()));
        }
        self.inner.claim(wishes).await
    }
    async fn extend(&self, beats: &[ClaimBeat]) -> Result<Vec<bool>, StoreError> {
        self.inner.extend(beats).await
    }
    async fn finish(&self, ends: &[Finish]) -> Result<Vec<Finished>, StoreError> {
        self.inner.finish(ends).await
    }
    async fn find_intent(&self, id: IntentId) -> Result<Option<IntentLine>, StoreError> {
        self.inner.find_intent(id).await
    }
    async fn find_intents(&self, search: &IntentSearch) -> Result<Vec<IntentLine>, StoreError> {
        self.inner.find_intents(search).await
    }
    async fn discard(&self, key: &IntentKey, audit: &Audit) -> Result<Resolved, StoreError> {
        self.inner.discard(key, audit).await
    }
    async fn set_paused(&self, at: &Destination, on: bool, by: &Audit) -> Result<(), StoreError> {
        self.inner.set_paused(at, on, by).await
    }
    async fn paused(&self) -> Result<Vec<Pause>, StoreError> {
        self.inner.paused().await
    }
    async fn outbox_census(&self) -> Result<OutboxCensus, StoreError> {
        self.inner.outbox_census().await
    }
}
