//! The store on one SQLite file, for one gateway.
//!
//! One connection writes (`writer`), a few read, and one copies the log (`checkpoint`).
//! The file is in WAL mode with `synchronous = full`, so an acknowledged commit survives a loss of
//! power. A second process is kept off by [`FileLock`].
//!
//! Every operation runs to its end in a task of its own: a caller that goes away cancels nothing,
//! and no connection is left in the middle of a transaction.
//!
//! There is no other gateway that could wait for a record, so nothing is marked as awaited and no
//! hint is sent; waiters of this process are woken without the store's help.

mod batches;
mod checkpoint;
mod clock;
mod doctor;
mod failure;
mod lock;
mod operators;
mod outbox;
mod place;
mod records;
mod remembered;
mod rows;
mod runs;
mod secrets;
mod statement;
#[cfg(test)]
mod tests;
mod upkeep;
mod writer;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::FutureExt as _;
use sqlx::ConnectOptions as _;
use sqlx::sqlite::{
    SqliteConnectOptions, SqliteConnection, SqliteJournalMode, SqlitePool, SqlitePoolOptions,
    SqliteSynchronous,
};
use time::OffsetDateTime;
use tokio::sync::{Semaphore, broadcast};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use uuid::Uuid;

pub use self::failure::of_file as unopened;
pub use self::lock::FileLock;

use self::clock::Clock;
use self::writer::{Work, Writer};
use super::doctor::Finding;
use super::open::OpenError;
use super::{
    Audit, Census, Purged, Resolved, Search, Store, StoreError, Swept, Verdict, Wakeup, migrate,
};
use crate::domain::record::{
    AttemptToken, Claim, Claimed, Committed, Completion, DecisionId, Found, Heartbeat, Record,
    Release, Released, Remembered, Reserved, StoredDecision,
};
use crate::domain::scope::{RecordKey, TenantScope};
use crate::domain::secret::Secret;

/// Connections that read.
const READERS: u32 = 4;
/// Operations that may be under way or in line; more are refused as unreachable.
const OPERATIONS_MAX: usize = 4096;
/// How long a statement waits for another process that has locked the file, such as a shell.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a read waits for a connection.
const READER_TIMEOUT: Duration = Duration::from_secs(5);
/// The writer itself copies a log of this many pages (64 MiB), should the checkpoints fail to.
const LOG_PAGES_MAX: &str = "16384";
/// The log file is cut to this many bytes when it starts anew.
const LOG_BYTES_KEPT: &str = "67108864";

/// One SQLite file, open.
pub struct SqliteStore {
    writer: Arc<Writer>,
    readers: SqlitePool,
    clock: Clock,
    warnings: Vec<String>,
    tasks: TaskTracker,
    places: Arc<Semaphore>,
    closing: CancellationToken,
    wakeups: broadcast::Sender<Wakeup>,
}

impl SqliteStore {
    /// Opens the file at `path` and makes it when it is not there. With `migrate` missing
    /// migrations are applied.
    ///
    /// # Errors
    /// When the file or its directory can't be used, another process has it, its schema is newer
    /// than this program, or older and `migrate` is off.
    pub async fn open(path: &Path, migrate: bool) -> Result<Self, OpenError> {
        let lock = FileLock::take(path)?;
        lock.make_database()?;
        let options = options(lock.database());
        let writing = options
            .clone()
            .create_if_missing(true)
            .pragma("wal_autocheckpoint", LOG_PAGES_MAX)
            .pragma("journal_size_limit", LOG_BYTES_KEPT);
        let connection = writing.connect().await;
        let mut connection = connection.map_err(|error| unopened(error, lock.database()))?;
        let missing = migrate::sqlite(&mut connection, lock.database(), migrate).await?;
        if !migrate && !missing.is_empty() {
            return Err(OpenError::Behind(missing.len()));
        }
        let (clock, behind) = Clock::start(seen_ms(&mut connection).await?);
        let behind = (!behind.is_zero()).then(|| behind_warning(behind));
        let warnings = behind.into_iter().chain(place::warning(lock.database()));
        let warnings = warnings.collect();
        let writer = Arc::new(Writer::new(connection, writing, clock, lock));
        let readers = SqlitePoolOptions::new()
            .max_connections(READERS)
            .acquire_timeout(READER_TIMEOUT)
            .test_before_acquire(false)
            .connect_lazy_with(options.clone().pragma("query_only", "on"));
        let closing = CancellationToken::new();
        let tasks = TaskTracker::new();
        tasks.spawn(checkpoint::run(
            Arc::clone(&writer),
            options,
            closing.clone(),
        ));
        Ok(Self {
            writer,
            readers,
            clock,
            warnings,
            tasks,
            places: Arc::new(Semaphore::new(OPERATIONS_MAX)),
            closing,
            wakeups: broadcast::Sender::new(1),
        })
    }

    /// Runs one transaction, whatever becomes of the caller.
    async fn write<T, W>(&self, work: W) -> Result<T, StoreError>
    where
        T: Send + 'static,
        W: for<'c> FnOnce(&'c mut SqliteConnection, i64) -> Work<'c, T> + Send + 'static,
    {
        let writer = Arc::clone(&self.writer);
        self.finish(async move { writer.transaction(work).await })
            .await
    }

    /// Runs reads, likewise: one that is dropped half-way would hold up the checkpoints.
    async fn read<T, W>(&self, work: W) -> Result<T, StoreError>
    where
        T: Send + 'static,
        W: for<'c> FnOnce(&'c mut SqliteConnection, i64) -> Work<'c, T> + Send + 'static,
    {
        let (readers, clock) = (self.readers.clone(), self.clock);
        let read = async move {
            let mut connection = readers.acquire().await.map_err(failure::before)?;
            work(&mut connection, clock.now_ms()).await
        };
        self.finish(read).await
    }

    async fn finish<T: Send + 'static>(
        &self,
        operation: impl Future<Output = Result<T, StoreError>> + Send + 'static,
    ) -> Result<T, StoreError> {
        if self.tasks.is_closed() {
            return Err(StoreError::Closed);
        }
        let place = Arc::clone(&self.places).try_acquire_owned();
        let place = place.map_err(|_| StoreError::Unavailable(sqlx::Error::PoolTimedOut))?;
        let operation = self.tasks.spawn(async move {
            let result = operation.await;
            drop(place);
            result
        });
        let ended = operation.await;
        ended.unwrap_or_else(|_| Err(StoreError::Ambiguous(sqlx::Error::WorkerCrashed)))
    }
}

#[async_trait]
impl Store for SqliteStore {
    async fn remembered(
        &self,
        tenant: &TenantScope,
        request_id: Uuid,
    ) -> Result<Option<Remembered>, StoreError> {
        let tenant = tenant.clone();
        self.read(move |connection, now_ms| {
            async move { remembered::find(connection, now_ms, &tenant, request_id).await }.boxed()
        })
        .await
    }

    async fn reserve(&self, claims: &[Claim]) -> Result<Vec<Reserved>, StoreError> {
        let claims = claims.to_vec();
        self.write(|connection, now_ms| {
            async move { batches::reserve(connection, now_ms, &claims).await }.boxed()
        })
        .await
    }

    async fn reclaim(
        &self,
        claim: &Claim,
        seen: AttemptToken,
    ) -> Result<Option<Claimed>, StoreError> {
        let claim = claim.clone();
        self.write(move |connection, now_ms| {
            async move { records::reclaim(connection, now_ms, &claim, seen).await }.boxed()
        })
        .await
    }

    async fn heartbeat(&self, beats: &[Heartbeat]) -> Result<Vec<bool>, StoreError> {
        let beats = beats.to_vec();
        self.write(|connection, now_ms| {
            async move { batches::heartbeat(connection, now_ms, &beats).await }.boxed()
        })
        .await
    }

    async fn complete(
        &self,
        completions: &[Completion],
    ) -> Result<Vec<Option<Committed>>, StoreError> {
        let completions = completions.to_vec();
        self.write(|connection, now_ms| {
            async move { batches::complete(connection, now_ms, &completions).await }.boxed()
        })
        .await
    }

    async fn release(&self, releases: &[Release]) -> Result<Vec<Option<Released>>, StoreError> {
        let releases = releases.to_vec();
        self.write(|connection, now_ms| {
            async move { records::release(connection, now_ms, &releases).await }.boxed()
        })
        .await
    }

    async fn look_up(&self, keys: &[RecordKey]) -> Result<Vec<Option<Record>>, StoreError> {
        let keys = keys.to_vec();
        self.read(|connection, now_ms| {
            async move { batches::look_up(connection, now_ms, &keys).await }.boxed()
        })
        .await
    }

    async fn decision(
        &self,
        tenant: &TenantScope,
        decision_id: DecisionId,
    ) -> Result<Option<StoredDecision>, StoreError> {
        let tenant = tenant.clone();
        self.read(move |connection, now_ms| {
            async move { records::decision(connection, now_ms, &tenant, decision_id).await }.boxed()
        })
        .await
    }

    async fn mark_awaited(&self, _: &RecordKey) -> Result<(), StoreError> {
        Ok(())
    }

    async fn notify(&self, _: &[u64]) -> Result<(), StoreError> {
        Ok(())
    }

    fn wakeups(&self) -> broadcast::Receiver<Wakeup> {
        self.wakeups.subscribe()
    }

    async fn sweep_one(&self, key: &RecordKey, token: AttemptToken) -> Result<bool, StoreError> {
        let key = key.clone();
        self.write(move |connection, now_ms| {
            async move { upkeep::sweep_one(connection, now_ms, &key, token).await }.boxed()
        })
        .await
    }

    async fn sweep(&self, limit: u32) -> Result<Swept, StoreError> {
        if !self
            .read(|connection, now_ms| upkeep::any_lease_over(connection, now_ms).boxed())
            .await?
        {
            return Ok(Swept::default());
        }
        self.write(move |connection, now_ms| upkeep::sweep(connection, now_ms, limit).boxed())
            .await
    }

    async fn purge(&self, limit: u32) -> Result<Purged, StoreError> {
        if !self
            .read(|connection, now_ms| upkeep::any_past_its_time(connection, now_ms).boxed())
            .await?
        {
            return Ok(Purged::default());
        }
        self.write(move |connection, now_ms| upkeep::purge(connection, now_ms, limit).boxed())
            .await
    }

    async fn census(&self) -> Result<Census, StoreError> {
        self.read(|connection, now_ms| upkeep::census(connection, now_ms).boxed())
            .await
    }

    async fn find(&self, search: &Search) -> Result<Vec<Found>, StoreError> {
        let search = search.clone();
        self.read(|connection, now_ms| {
            async move { operators::find(connection, now_ms, &search).await }.boxed()
        })
        .await
    }

    async fn resolve(
        &self,
        key: &RecordKey,
        verdict: &Verdict,
        owner_time_max: Duration,
        audit: &Audit,
    ) -> Result<Resolved, StoreError> {
        let (key, verdict, audit) = (key.clone(), verdict.clone(), audit.clone());
        self.write(move |connection, now_ms| {
            async move {
                let max = owner_time_max;
                operators::resolve(connection, now_ms, &key, &verdict, max, &audit).await
            }
            .boxed()
        })
        .await
    }

    async fn purge_one(&self, key: &RecordKey, audit: &Audit) -> Result<Resolved, StoreError> {
        let (key, audit) = (key.clone(), audit.clone());
        self.write(|connection, now_ms| {
            async move { operators::purge_one(connection, now_ms, &key, &audit).await }.boxed()
        })
        .await
    }

    async fn secrets(&self, fresh: [u8; 32]) -> Result<Vec<Secret>, StoreError> {
        self.write(move |connection, now_ms| secrets::all(connection, now_ms, fresh).boxed())
            .await
    }

    async fn ping(&self) -> Result<OffsetDateTime, StoreError> {
        self.read(|connection, now_ms| {
            async move {
                statement::run(connection, sqlx::query("select 1")).await?;
                rows::instant(now_ms, "eec_clock", "seen_at")
            }
            .boxed()
        })
        .await
    }

    async fn warnings(&self) -> Result<Vec<String>, StoreError> {
        Ok(self.warnings.clone())
    }

    async fn doctor(&self) -> Result<Vec<Finding>, StoreError> {
        self.read(|connection, _| doctor::doctor(connection).boxed())
            .await
    }

    async fn close(&self) {
        self.tasks.close();
        self.closing.cancel();
        self.tasks.wait().await;
        self.readers.close().await;
        self.writer.close().await;
    }
}

impl Drop for SqliteStore {
    fn drop(&mut self) {
        self.closing.cancel();
    }
}

/// What every connection has in common.
fn options(path: &Path) -> SqliteConnectOptions {
    SqliteConnectOptions::new()
        .filename(path)
        .journal_mode(SqliteJournalMode::Wal)
        .synchronous(SqliteSynchronous::Full)
        .foreign_keys(false)
        .busy_timeout(BUSY_TIMEOUT)
        .disable_statement_logging()
}

/// The newest instant that the file has seen.
async fn seen_ms(connection: &mut SqliteConnection) -> Result<i64, StoreError> {
    sqlx::query_scalar("select coalesce(max(seen_at), 0) from eec_clock")
        .fetch_one(connection)
        .await
        .map_err(failure::before)
}

fn behind_warning(behind: Duration) -> String {
    format!(
        "the wall clock is {} behind what the SQLite file has seen; time goes on from there, so \
         leases and validities are safe, but times that people read are ahead until it catches up",
        humantime::format_duration(behind)
    )
}
