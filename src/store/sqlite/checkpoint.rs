//! Checkpoints: copies the write-ahead log into the database beside the writer, so that no commit
//! has to wait for it.
//!
//! A passive checkpoint never waits and never makes anyone wait, but under steady writing it never
//! reaches the end of the log either, and the log grows. So, once the log is long, what is left of it
//! is copied while the writer pauses; the next transaction then starts the log from its beginning.

use std::sync::Arc;
use std::time::Duration;

use sqlx::sqlite::{SqliteConnectOptions, SqliteConnection};
use sqlx::{ConnectOptions as _, Connection as _};
use tokio_util::sync::CancellationToken;

use super::writer::Writer;

/// Between two checkpoints.
const EVERY: Duration = Duration::from_secs(1);
/// From this many pages on the log is started anew: 8 MiB.
const LOG_PAGES: i64 = 2048;

/// Runs until `closing`. A failure is told once, and once more when it is over; what was committed
/// is safe in the log meanwhile.
pub async fn run(writer: Arc<Writer>, options: SqliteConnectOptions, closing: CancellationToken) {
    let mut connection = None;
    let mut failing = false;
    loop {
        let pause = tokio::time::sleep(EVERY);
        if closing.run_until_cancelled(pause).await.is_none() {
            break;
        }
        if !writer.wrote() && !failing {
            continue;
        }
        let done = round(&writer, &options, &mut connection).await;
        match &done {
            Ok(()) if failing => tracing::info!("checkpoints of the SQLite file work again"),
            Err(error) if !failing => tracing::warn!(
                %error,
                "a checkpoint of the SQLite file failed; its log grows until one succeeds"
            ),
            _ => {}
        }
        failing = done.is_err();
    }
    if let Some(connection) = connection {
        // It has nothing to lose.
        let _ = connection.close().await;
    }
}

/// One round, on a connection that is opened when there is none and dropped when it fails.
pub async fn round(
    writer: &Writer,
    options: &SqliteConnectOptions,
    kept: &mut Option<SqliteConnection>,
) -> Result<(), sqlx::Error> {
    let mut connection = match kept.take() {
        Some(connection) => connection,
        None => options.connect().await?,
    };
    let pages = passive(&mut connection).await?;
    if pages > LOG_PAGES {
        let pause = writer.pause().await;
        passive(&mut connection).await?;
        drop(pause);
    }
    *kept = Some(connection);
    Ok(())
}

/// Tells how many pages the log had when this began; the writer may have added more by now.
async fn passive(connection: &mut SqliteConnection) -> Result<i64, sqlx::Error> {
    let done: (i64, i64, i64) = sqlx::query_as("pragma wal_checkpoint(passive)")
        .fetch_one(connection)
        .await?;
    Ok(done.1)
}
