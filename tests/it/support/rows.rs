//! The database of a test, looked at by SQL: its tables and columns are part of the contract.

use std::path::{Path, PathBuf};

use sqlx::postgres::PgRow;
use sqlx::sqlite::{SqliteConnectOptions, SqliteConnection, SqliteRow};
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, Row as _};

use super::postgres;

/// Which of the two stores a test runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A file.
    Sqlite,
    /// A database of the test run's own server.
    Postgres,
}

/// A database of one test.
pub enum Database {
    /// The file.
    Sqlite(PathBuf),
    /// The database.
    Postgres(postgres::Database),
}

/// A row of `eec_routing_idempotency`. Ids are hex without dashes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordRow {
    /// Whose.
    pub tenant: String,
    /// For which pool.
    pub pool: String,
    /// The key.
    pub key: String,
    /// One of the four words.
    pub status: String,
    /// The present attempt.
    pub attempt_token: String,
    /// Counts the lives of the key.
    pub generation: i64,
    /// The id of this life.
    pub generation_id: String,
    /// The decision; empty before one.
    pub decision_id: String,
    /// How long the decision is valid from now by the database's clock; 0 without one.
    pub valid_ms: i64,
}

const RECORDS_POSTGRES: &str = "select tenant_scope, pool_id, idempotency_key, status,
    replace(attempt_token::text, '-', ''), generation, replace(generation_id::text, '-', ''),
    coalesce(replace(decision_id::text, '-', ''), ''),
    coalesce(extract(epoch from valid_until - clock_timestamp()) * 1000, 0)::bigint
    from eec_routing_idempotency order by 1, 2, 3";

const RECORDS_SQLITE: &str = "select tenant_scope, pool_id, idempotency_key, status,
    lower(hex(attempt_token)), generation, lower(hex(generation_id)),
    coalesce(lower(hex(decision_id)), ''),
    coalesce(valid_until - cast(unixepoch('subsec') * 1000 as integer), 0)
    from eec_routing_idempotency order by 1, 2, 3";

impl Database {
    /// A fresh one.
    pub async fn fresh(kind: Kind, directory: &Path) -> Self {
        match kind {
            Kind::Sqlite => Self::Sqlite(directory.join("oncegate.db")),
            Kind::Postgres => Self::Postgres(postgres::database().await),
        }
    }

    /// What an operator has who backs it up and restores the copy elsewhere.
    pub async fn restored(&self) -> Self {
        match self {
            Self::Sqlite(path) => {
                let copy = path.with_extension("restored.db");
                self.execute(&format!("vacuum into '{}'", copy.display()))
                    .await;
                Self::Sqlite(copy)
            }
            Self::Postgres(database) => Self::Postgres(database.restored().await),
        }
    }

    /// What a gateway's `store.url` says.
    pub fn url(&self) -> String {
        match self {
            Self::Sqlite(path) => format!("sqlite:{}", path.display()),
            Self::Postgres(database) => database.url.clone(),
        }
    }

    /// Every record, in the order of tenant, pool and key.
    pub async fn records(&self) -> Vec<RecordRow> {
        match self {
            Self::Sqlite(path) => {
                let mut connection = sqlite(path).await;
                let rows = connection.fetch_all(RECORDS_SQLITE).await;
                rows.expect("the table is there")
                    .iter()
                    .map(from_sqlite)
                    .collect()
            }
            Self::Postgres(database) => {
                let mut connection = database.connect().await;
                let rows = connection.fetch_all(RECORDS_POSTGRES).await;
                rows.expect("the table is there")
                    .iter()
                    .map(from_postgres)
                    .collect()
            }
        }
    }

    /// The one record of this key.
    pub async fn record(&self, key: &str) -> Option<RecordRow> {
        let mut records = self.records().await;
        records.retain(|record| record.key == key);
        assert!(records.len() <= 1, "one record a key: {records:?}");
        records.pop()
    }

    /// The status of this key's record; `absent` without one.
    pub async fn status(&self, key: &str) -> String {
        let record = self.record(key).await;
        record.map_or_else(|| "absent".to_owned(), |record| record.status)
    }

    /// How many rows a table has.
    pub async fn count(&self, table: &str) -> i64 {
        self.number(&format!("select count(*) from {table}")).await
    }

    /// One number that a query gives.
    pub async fn number(&self, sql: &str) -> i64 {
        let sql = AssertSqlSafe(sql.to_owned());
        match self {
            Self::Sqlite(path) => {
                let row = sqlite(path).await.fetch_one(sql).await;
                row.expect("a row").get(0)
            }
            Self::Postgres(database) => {
                let row = database.connect().await.fetch_one(sql).await;
                row.expect("a row").get(0)
            }
        }
    }

    /// The rows of a query, each column as a text.
    pub async fn texts(&self, sql: &str, columns: usize) -> Vec<Vec<String>> {
        let outer: Vec<String> = (0..columns)
            .map(|n| format!("cast(c{n} as text)"))
            .collect();
        let names: Vec<String> = (0..columns).map(|n| format!("c{n}")).collect();
        let sql = AssertSqlSafe(format!(
            "with q({}) as ({sql}) select {} from q",
            names.join(", "),
            outer.join(", ")
        ));
        match self {
            Self::Sqlite(path) => {
                let rows = sqlite(path).await.fetch_all(sql).await.expect("rows");
                let text = |row: &SqliteRow| (0..columns).map(|n| row.get(n)).collect();
                rows.iter().map(text).collect()
            }
            Self::Postgres(database) => {
                let rows = database.connect().await.fetch_all(sql).await.expect("rows");
                let text = |row: &PgRow| (0..columns).map(|n| row.get(n)).collect();
                rows.iter().map(text).collect()
            }
        }
    }

    /// An id's column as hex without dashes.
    pub fn hex(&self, column: &str) -> String {
        match self {
            Self::Sqlite(_) => format!("lower(hex({column}))"),
            Self::Postgres(_) => format!("replace({column}::text, '-', '')"),
        }
    }

    /// Runs a statement.
    pub async fn execute(&self, sql: &str) {
        let sql = AssertSqlSafe(sql.to_owned());
        let outcome = match self {
            Self::Sqlite(path) => sqlite(path).await.execute(sql).await.map(drop),
            Self::Postgres(database) => database.connect().await.execute(sql).await.map(drop),
        };
        outcome.expect("the statement runs");
    }

    /// Every byte of every row of every table of the product, for looking for what must not be
    /// there.
    pub async fn dump(&self) -> Vec<u8> {
        match self {
            Self::Sqlite(path) => {
                let mut connection = sqlite(path).await;
                let checkpoint = connection.execute("pragma wal_checkpoint(truncate)").await;
                checkpoint.expect("a checkpoint");
                std::fs::read(path).expect("the file is there")
            }
            Self::Postgres(database) => {
                let mut connection = database.connect().await;
                let tables = "select tablename::text from pg_tables where tablename like 'eec\\_%'";
                let tables = connection.fetch_all(tables).await.expect("tables");
                let mut dump = Vec::new();
                for table in tables {
                    let table: String = table.get(0);
                    let all = format!("select convert_to(t::text, 'utf8') from {table} t");
                    let rows = connection.fetch_all(AssertSqlSafe(all)).await;
                    for row in rows.expect("rows") {
                        dump.extend(row.get::<Vec<u8>, _>(0));
                        dump.push(b'\n');
                    }
                }
                dump
            }
        }
    }
}

/// A connection of the test's own to its file.
pub async fn sqlite(path: &Path) -> SqliteConnection {
    let options = SqliteConnectOptions::new().filename(path);
    let connection = SqliteConnection::connect_with(&options).await;
    connection.expect("the file can be opened beside the gateway")
}

fn from_sqlite(row: &SqliteRow) -> RecordRow {
    RecordRow {
        tenant: row.get(0),
        pool: row.get(1),
        key: row.get(2),
        status: row.get(3),
        attempt_token: row.get(4),
        generation: row.get(5),
        generation_id: row.get(6),
        decision_id: row.get(7),
        valid_ms: row.get(8),
    }
}

fn from_postgres(row: &PgRow) -> RecordRow {
    RecordRow {
        tenant: row.get(0),
        pool: row.get(1),
        key: row.get(2),
        status: row.get(3),
        attempt_token: row.get(4),
        generation: row.get(5),
        generation_id: row.get(6),
        decision_id: row.get(7),
        valid_ms: row.get(8),
    }
}
