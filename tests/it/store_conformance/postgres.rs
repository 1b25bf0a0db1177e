//! The suite on PostgreSQL: each case has a database of its own.

use std::sync::Arc;

use async_trait::async_trait;
use oncegate::store::postgres::PostgresStore;
use sqlx::postgres::PgConnection;
use sqlx::{AssertSqlSafe, Executor as _, Row as _};
use tokio::sync::Mutex;
use tokio_util::task::TaskTracker;

use super::conformance;
use super::fixture::{Fixture, Raw};
use crate::support::postgres;
use crate::support::rows::Kind;

conformance!(suite, super::fresh);

/// A store on a database of its own.
async fn fresh() -> Fixture {
    let database = postgres::database().await;
    let config = postgres::config(&database.url);
    let store = PostgresStore::open(&config, &TaskTracker::new()).await;
    Fixture {
        store: Arc::new(store.unwrap()),
        raw: Arc::new(RawPostgres(Mutex::new(database.connect().await))),
        _keep: Box::new(database),
    }
}

struct RawPostgres(Mutex<PgConnection>);

#[async_trait]
impl Raw for RawPostgres {
    fn kind(&self) -> Kind {
        Kind::Postgres
    }

    async fn run(&self, sql: String) {
        let sql = AssertSqlSafe(sql);
        self.0.lock().await.execute(sql).await.unwrap();
    }

    async fn number(&self, sql: String) -> i64 {
        let row = self.0.lock().await.fetch_one(AssertSqlSafe(sql)).await;
        row.unwrap().get(0)
    }

    async fn execute(&self, sql: &'static str) {
        self.0.lock().await.execute(sql).await.unwrap();
    }

    async fn rows(&self, table: &str) -> Vec<String> {
        let sql = AssertSqlSafe(format!("select t::text from {table} t order by 1"));
        let rows = sqlx::query(sql).fetch_all(&mut *self.0.lock().await).await;
        rows.unwrap().iter().map(|row| row.get(0)).collect()
    }
}
