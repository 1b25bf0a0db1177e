//! The suite on SQLite: each case has a file of its own.

use std::sync::Arc;

use async_trait::async_trait;
use oncegate::store::sqlite::SqliteStore;
use sqlx::sqlite::{SqliteConnectOptions, SqliteConnection};
use sqlx::{AssertSqlSafe, ConnectOptions as _, Executor as _, Row as _};
use tokio::sync::Mutex;

use super::conformance;
use super::fixture::{Fixture, Raw};
use crate::support::rows::Kind;

conformance!(suite, super::fresh);

/// A store on a file of its own.
async fn fresh() -> Fixture {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store.db");
    let store = SqliteStore::open(&path, true).await.unwrap();
    let options = SqliteConnectOptions::new().filename(&path);
    let connection = options.connect().await.unwrap();
    Fixture {
        store: Arc::new(store),
        raw: Arc::new(RawSqlite(Mutex::new(connection))),
        _keep: Box::new(directory),
    }
}

struct RawSqlite(Mutex<SqliteConnection>);

#[async_trait]
impl Raw for RawSqlite {
    fn kind(&self) -> Kind {
        Kind::Sqlite
    }

    async fn run(&self, sql: String) {
        let mut connection = self.0.lock().await;
        connection.execute(AssertSqlSafe(sql)).await.unwrap();
    }

    async fn number(&self, sql: String) -> i64 {
        let mut connection = self.0.lock().await;
        let row = connection.fetch_one(AssertSqlSafe(sql)).await;
        row.unwrap().get(0)
    }

    async fn execute(&self, sql: &'static str) {
        let mut connection = self.0.lock().await;
        sqlx::query(sql).execute(&mut *connection).await.unwrap();
    }

    async fn rows(&self, table: &str) -> Vec<String> {
        let mut connection = self.0.lock().await;
        let columns = "select 'quote(' || name || ')' from pragma_table_info(?1) order by cid";
        let columns: Vec<String> = sqlx::query_scalar(columns)
            .bind(table)
            .fetch_all(&mut *connection)
            .await
            .unwrap();
        let all = columns.join(" || ', ' || ");
        let sql = AssertSqlSafe(format!("select {all} from {table} order by 1"));
        let rows = sqlx::query(sql).fetch_all(&mut *connection).await.unwrap();
        rows.iter().map(|row| row.get(0)).collect()
    }
}
