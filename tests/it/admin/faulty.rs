//! A store that fails on demand: the next operation of an operator, once.

use std::sync::Mutex;
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
use tokio::sync::{broadcast, oneshot};

/// What goes wrong.
pub enum Fault {
    /// The store can't be asked.
    Unreachable,
    /// The operation happens and its reply is lost.
    LoseReply,
    /// The operation begins when it is told to; it tells when it waits for that.
    Hold(oneshot::Sender<()>, oneshot::Receiver<()>),
}

/// A real store and what goes wrong next.
pub struct Faulty {
    inner: SqliteStore,
    next: Mutex<Option<Fault>>,
    notified: Mutex<Vec<u64>>,
}

impl Faulty {
    pub fn new(inner: SqliteStore) -> Self {
        Self {
            inner,
            next: Mutex::default(),
            notified: Mutex::default(),
        }
    }

    /// The next operation of an operator meets this fault.
    pub fn next(&self, fault: Fault) {
        *self.next.lock().unwrap() = Some(fault);
    }

    /// The next operation waits: the receiver learns of it, the sender ends it.
    pub fn hold_next(&self) -> (oneshot::Receiver<()>, oneshot::Sender<()>) {
        let (begun, seen) = oneshot::channel();
        let (go_on, wait) = oneshot::channel();
        self.next(Fault::Hold(begun, wait));
        (seen, go_on)
    }

    /// Hints that were sent to other gateways since the last call.
    pub fn notified(&self) -> Vec<u64> {
        std::mem::take(&mut self.notified.lock().unwrap())
    }

    async fn with_fault<T>(
        &self,
        operation: impl Future<Output = Result<T, StoreError>> + Send,
    ) -> Result<T, StoreError> {
        let fault = self.next.lock().unwrap().take();
        match fault {
            None => operation.await,
            Some(Fault::Unreachable) => Err(StoreError::Unavailable(sqlx::Error::PoolTimedOut)),
            Some(Fault::LoseReply) => {
                operation.await?;
                Err(StoreError::Ambiguous(sqlx::Error::WorkerCrashed))
            }
            Some(Fault::Hold(begun, wait)) => {
                begun.send(()).unwrap();
                wait.await.unwrap();
                operation.await
            }
        }
    }
}

crate::support::delegate::delegate_runs_and_outbox!(Faulty, inner);

#[async_trait]
impl Store for Faulty {
    async fn remembered(
        &self,
        tenant: &TenantScope,
        request_id: uuid::Uuid,
    ) -> Result<Option<oncegate::domain::record::Remembered>, StoreError> {
        self.inner.remembered(tenant, request_id).await
    }

    async fn reserve(&self, claims: &[Claim]) -> Result<Vec<Reserved>, StoreError> {
        self.inner.reserve(claims).await
    }

    async fn reclaim(
        &self,
        claim: &Claim,
        seen: AttemptToken,
    ) -> Result<Option<Claimed>, StoreError> {
        self.inner.reclaim(claim, seen).await
    }

    async fn heartbeat(&self, beats: &[Heartbeat]) -> Result<Vec<bool>, StoreError> {
        self.inner.heartbeat(beats).await
    }

    async fn complete(
        &self,
        completions: &[Completion],
    ) -> Result<Vec<Option<Committed>>, StoreError> {
        self.inner.complete(completions).await
    }

    async fn release(&self, releases: &[Release]) -> Result<Vec<Option<Released>>, StoreError> {
        self.inner.release(releases).await
    }

    async fn look_up(&self, keys: &[RecordKey]) -> Result<Vec<Option<Record>>, StoreError> {
        self.with_fault(self.inner.look_up(keys)).await
    }

    async fn decision(
        &self,
        tenant: &TenantScope,
        decision_id: DecisionId,
    ) -> Result<Option<StoredDecision>, StoreError> {
        self.inner.decision(tenant, decision_id).await
    }

    async fn mark_awaited(&self, key: &RecordKey) -> Result<(), StoreError> {
        self.inner.mark_awaited(key).await
    }

    async fn notify(&self, records: &[u64]) -> Result<(), StoreError> {
        self.notified.lock().unwrap().extend(records);
        self.inner.notify(records).await
    }

    fn wakeups(&self) -> broadcast::Receiver<Wakeup> {
        self.inner.wakeups()
    }

    async fn sweep_one(&self, key: &RecordKey, token: AttemptToken) -> Result<bool, StoreError> {
        self.inner.sweep_one(key, token).await
    }

    async fn sweep(&self, limit: u32) -> Result<Swept, StoreError> {
        self.inner.sweep(limit).await
    }

    async fn purge(&self, limit: u32) -> Result<Purged, StoreError> {
        self.inner.purge(limit).await
    }

    async fn census(&self) -> Result<Census, StoreError> {
        self.inner.census().await
    }

    async fn find(&self, search: &Search) -> Result<Vec<Found>, StoreError> {
        self.with_fault(self.inner.find(search)).await
    }

    async fn resolve(
        &self,
        key: &RecordKey,
        verdict: &Verdict,
        owner_time_max: Duration,
        audit: &Audit,
    ) -> Result<Resolved, StoreError> {
        let resolve = self.inner.resolve(key, verdict, owner_time_max, audit);
        self.with_fault(resolve).await
    }

    async fn purge_one(&self, key: &RecordKey, audit: &Audit) -> Result<Resolved, StoreError> {
        self.with_fault(self.inner.purge_one(key, audit)).await
    }

    async fn secrets(&self, fresh: [u8; 32]) -> Result<Vec<Secret>, StoreError> {
        self.inner.secrets(fresh).await
    }

    async fn ping(&self) -> Result<OffsetDateTime, StoreError> {
        self.with_fault(self.inner.ping()).await
    }

    async fn warnings(&self) -> Result<Vec<String>, StoreError> {
        self.inner.warnings().await
    }

    async fn doctor(&self) -> Result<Vec<oncegate::store::doctor::Finding>, StoreError> {
        self.inner.doctor().await
    }

    async fn close(&self) {
        self.inner.close().await;
    }
}
