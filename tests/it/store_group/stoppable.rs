//! A store that stops and goes on when a test says so.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use oncegate::domain::record::{
    AttemptToken, Claim, Claimed, Committed, Completion, DecisionId, Found, Heartbeat, Record,
    Release, Released, Reserved, StoredDecision,
};
use oncegate::domain::scope::{RecordKey, TenantScope};
use oncegate::domain::secret::Secret;
use oncegate::store::sqlite::SqliteStore;
use oncegate::store::{
    Audit, Census, Purged, Resolved, Search, Store, StoreError, Swept, Verdict, Wakeup,
};
use time::OffsetDateTime;
use tokio::sync::{Mutex, Semaphore, broadcast, mpsc};

/// A real store behind a gate.
pub struct Stoppable {
    pub inner: SqliteStore,
    pub told: Mutex<mpsc::Sender<usize>>,
    pub gate: Semaphore,
    pub running: AtomicUsize,
}

impl Stoppable {
    /// From now on batches stand still once they have arrived.
    pub fn stop(&self) {
        let permits = self.gate.available_permits();
        self.gate.forget_permits(permits);
    }

    pub fn go_on(&self) {
        self.gate
            .add_permits(Semaphore::MAX_PERMITS - self.gate.available_permits());
    }

    async fn arrive(&self, batch: usize) {
        self.running.fetch_add(1, Ordering::SeqCst);
        self.told.lock().await.send(batch).await.unwrap();
        drop(self.gate.acquire().await.unwrap());
        self.running.fetch_sub(1, Ordering::SeqCst);
    }
}

crate::support::delegate::delegate_runs_and_outbox!(Stoppable, inner);

#[async_trait]
impl Store for Stoppable {
    async fn remembered(
        &self,
        tenant: &TenantScope,
        request_id: uuid::Uuid,
    ) -> Result<Option<oncegate::domain::record::Remembered>, StoreError> {
        self.inner.remembered(tenant, request_id).await
    }

    async fn reserve(&self, claims: &[Claim]) -> Result<Vec<Reserved>, StoreError> {
        self.arrive(claims.len()).await;
        self.inner.reserve(claims).await
    }

    async fn heartbeat(&self, beats: &[Heartbeat]) -> Result<Vec<bool>, StoreError> {
        self.arrive(beats.len()).await;
        self.inner.heartbeat(beats).await
    }

    async fn complete(&self, all: &[Completion]) -> Result<Vec<Option<Committed>>, StoreError> {
        self.arrive(all.len()).await;
        self.inner.complete(all).await
    }

    async fn release(&self, all: &[Release]) -> Result<Vec<Option<Released>>, StoreError> {
        self.arrive(all.len()).await;
        self.inner.release(all).await
    }

    async fn look_up(&self, keys: &[RecordKey]) -> Result<Vec<Option<Record>>, StoreError> {
        self.arrive(keys.len()).await;
        self.inner.look_up(keys).await
    }

    async fn reclaim(&self, _: &Claim, _: AttemptToken) -> Result<Option<Claimed>, StoreError> {
        unreachable!("not grouped")
    }

    async fn decision(
        &self,
        _: &TenantScope,
        _: DecisionId,
    ) -> Result<Option<StoredDecision>, StoreError> {
        unreachable!("not grouped")
    }

    async fn mark_awaited(&self, _: &RecordKey) -> Result<(), StoreError> {
        unreachable!("not grouped")
    }

    async fn notify(&self, _: &[u64]) -> Result<(), StoreError> {
        unreachable!("not grouped")
    }

    fn wakeups(&self) -> broadcast::Receiver<Wakeup> {
        unreachable!("not grouped")
    }

    async fn sweep_one(&self, _: &RecordKey, _: AttemptToken) -> Result<bool, StoreError> {
        unreachable!("not grouped")
    }

    async fn sweep(&self, _: u32) -> Result<Swept, StoreError> {
        unreachable!("not grouped")
    }

    async fn purge(&self, _: u32) -> Result<Purged, StoreError> {
        unreachable!("not grouped")
    }

    async fn census(&self) -> Result<Census, StoreError> {
        unreachable!("not grouped")
    }

    async fn find(&self, _: &Search) -> Result<Vec<Found>, StoreError> {
        unreachable!("not grouped")
    }

    async fn resolve(
        &self,
        _: &RecordKey,
        _: &Verdict,
        _: Duration,
        _: &Audit,
    ) -> Result<Resolved, StoreError> {
        unreachable!("not grouped")
    }

    async fn purge_one(&self, _: &RecordKey, _: &Audit) -> Result<Resolved, StoreError> {
        unreachable!("not grouped")
    }

    async fn secrets(&self, _: [u8; 32]) -> Result<Vec<Secret>, StoreError> {
        unreachable!("not grouped")
    }

    async fn ping(&self) -> Result<OffsetDateTime, StoreError> {
        unreachable!("not grouped")
    }

    async fn warnings(&self) -> Result<Vec<String>, StoreError> {
        unreachable!("not grouped")
    }

    async fn doctor(&self) -> Result<Vec<oncegate::store::doctor::Finding>, StoreError> {
        self.inner.doctor().await
    }

    async fn close(&self) {
        self.inner.close().await;
    }
}
