//! The one connection that writes.
//!
//! Transactions run one after another, each from `begin immediate` to its end: whoever calls this
//! must be a tracked task, so that nobody drops a transaction half-way. A connection that has seen
//! an error it can't roll back is thrown away; the next transaction opens another.
//!
//! Every statement of a transaction is judged at one instant, read after the write lock was taken,
//! so instants are committed in their order.

use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::future::BoxFuture;
use sqlx::sqlite::{SqliteConnectOptions, SqliteConnection};
use sqlx::{ConnectOptions as _, Connection as _};
use tokio::sync::{Mutex, MutexGuard};

use super::clock::{Clock, SEEN_EVERY_MS};
use super::failure;
use super::lock::FileLock;
use super::statement;
use crate::store::StoreError;

/// The work of one transaction, at the instant that it is judged by.
pub type Work<'c, T> = BoxFuture<'c, Result<T, StoreError>>;

/// The writing connection, and the clock that its transactions are judged by.
pub struct Writer {
    line: Mutex<Line>,
    options: SqliteConnectOptions,
    clock: Clock,
    wrote: AtomicBool,
}

/// Whoever holds this is the one who writes.
pub struct Line {
    connection: Option<SqliteConnection>,
    seen_ms: i64,
    /// Held for as long as anything may be written; gone once closed.
    lock: Option<FileLock>,
}

impl Writer {
    /// Takes over an open connection; `options` open another like it.
    pub fn new(
        connection: SqliteConnection,
        options: SqliteConnectOptions,
        clock: Clock,
        lock: FileLock,
    ) -> Self {
        let line = Line {
            connection: Some(connection),
            seen_ms: 0,
            lock: Some(lock),
        };
        Self {
            line: Mutex::new(line),
            options,
            clock,
            wrote: AtomicBool::new(false),
        }
    }

    /// Runs one transaction. An error of `work` undoes it.
    pub async fn transaction<T, W>(&self, work: W) -> Result<T, StoreError>
    where
        W: for<'c> FnOnce(&'c mut SqliteConnection, i64) -> Work<'c, T>,
    {
        let mut line = self.line.lock().await;
        if line.lock.is_none() {
            return Err(StoreError::Closed);
        }
        let mut connection = match line.connection.take() {
            Some(connection) => connection,
            None => self.options.connect().await.map_err(failure::before)?,
        };
        let (result, sound) = self.run(&mut connection, &mut line.seen_ms, work).await;
        if sound {
            line.connection = Some(connection);
        }
        result
    }

    /// Keeps every transaction waiting for as long as the guard lives.
    pub async fn pause(&self) -> MutexGuard<'_, Line> {
        self.line.lock().await
    }

    /// Whether anything was committed since this was last asked.
    pub fn wrote(&self) -> bool {
        self.wrote.swap(false, Ordering::AcqRel)
    }

    /// Closes the connection once the present transaction is done, and gives the file free. Later
    /// transactions are refused.
    pub async fn close(&self) {
        let mut line = self.line.lock().await;
        let lock = line.lock.take();
        if let Some(connection) = line.connection.take() {
            close(connection).await;
        }
        drop(lock);
    }

    /// Also tells whether the connection is fit for another transaction.
    async fn run<T, W>(
        &self,
        connection: &mut SqliteConnection,
        seen_ms: &mut i64,
        work: W,
    ) -> (Result<T, StoreError>, bool)
    where
        W: for<'c> FnOnce(&'c mut SqliteConnection, i64) -> Work<'c, T>,
    {
        let mut transaction = match connection.begin_with("begin immediate").await {
            Ok(transaction) => transaction,
            Err(error) => return (Err(failure::before(error)), false),
        };
        let now_ms = self.clock.now_ms();
        let mut result = work(&mut transaction, now_ms).await;
        let noted = now_ms - *seen_ms < SEEN_EVERY_MS;
        if result.is_ok() && !noted {
            let note = note_seen(&mut transaction, now_ms).await;
            result = result.and_then(|value| note.map(|()| value));
        }
        if let Err(error) = result {
            return (Err(error), transaction.rollback().await.is_ok());
        }
        if let Err(error) = transaction.commit().await {
            return (Err(failure::of_commit(error)), false);
        }
        *seen_ms = (*seen_ms).max(if noted { 0 } else { now_ms });
        self.wrote.store(true, Ordering::Release);
        (result, true)
    }
}

/// What the checkpoint copies is durable in the log already: a failure costs the next start some
/// time and nothing else.
async fn close(mut connection: SqliteConnection) {
    let copied = sqlx::query("pragma wal_checkpoint(truncate)")
        .execute(&mut connection)
        .await;
    if let Err(error) = copied.and(connection.close().await) {
        tracing::warn!(%error, "the last checkpoint failed; the next start makes up for it");
    }
}

async fn note_seen(connection: &mut SqliteConnection, now_ms: i64) -> Result<(), StoreError> {
    let note = "insert into eec_clock (id, seen_at) values (1, ?1) \
                on conflict (id) do update set seen_at = max(seen_at, excluded.seen_at)";
    statement::run(connection, sqlx::query(note).bind(now_ms)).await?;
    Ok(())
}
