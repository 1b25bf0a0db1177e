//! What can be told of a SQLite file's health.

use sqlx::SqliteConnection;

use super::failure;
use crate::store::StoreError;
use crate::store::doctor::{Finding, Health};

/// Looks at the file's size, which bounds what a checkpoint and a backup have to copy.
pub async fn doctor(connection: &mut SqliteConnection) -> Result<Vec<Finding>, StoreError> {
    let version = sqlx::query_scalar("select sqlite_version()").fetch_one(&mut *connection);
    let version: String = version.await.map_err(failure::before)?;
    let pages = sqlx::query_as(
        "select page_count * page_size, freelist_count * page_size \
        from pragma_page_count, pragma_page_size, pragma_freelist_count",
    );
    let (bytes, free): (i64, i64) = pages.fetch_one(connection).await.map_err(failure::before)?;
    let mib = |bytes: i64| bytes / (1024 * 1024);
    let says = format!(
        "SQLite {version}, {} MiB, of which {} MiB are free for new rows",
        mib(bytes),
        mib(free)
    );
    Ok(vec![Finding::new("server", Health::Good, says)])
}
