//! Statements, run one at a time. Not for the commit itself: an error here says that nothing
//! happened.

use sqlx::sqlite::{SqliteArguments, SqliteRow};
use sqlx::{Sqlite, SqliteConnection};

use super::failure;
use crate::store::StoreError;

/// A statement with its parameters.
pub type Query<'q> = sqlx::query::Query<'q, Sqlite, SqliteArguments>;

/// Runs a statement that gives no rows. Tells how many it wrote.
pub async fn run(connection: &mut SqliteConnection, query: Query<'_>) -> Result<u64, StoreError> {
    let done = query.execute(connection).await.map_err(failure::before)?;
    Ok(done.rows_affected())
}

/// Reads all rows.
pub async fn rows(
    connection: &mut SqliteConnection,
    query: Query<'_>,
) -> Result<Vec<SqliteRow>, StoreError> {
    query.fetch_all(connection).await.map_err(failure::before)
}

/// Reads one row, if there is one.
pub async fn row(
    connection: &mut SqliteConnection,
    query: Query<'_>,
) -> Result<Option<SqliteRow>, StoreError> {
    let row = query.fetch_optional(connection).await;
    row.map_err(failure::before)
}
