//! What the store on PostgreSQL promises beyond the conformance suite: several gateways on one
//! database, and everything that can happen to a connection.

mod connections;
mod failover;
mod gateways;
mod lost_replies;
mod lost_ticks;
mod outbox;
mod plans;
mod run_plans;
mod settings;
mod wakeups;

use std::time::Duration;

use oncegate::config::StoreConfig;
use oncegate::domain::record::{Claim, Reserved};
use oncegate::store::postgres::PostgresStore;
use oncegate::store::{Store as _, StoreError};
use sqlx::PgConnection;
use tokio::time::Instant;
use tokio_util::task::TaskTracker;

/// How long a test may wait for something to happen.
const PATIENCE: Duration = Duration::from_secs(30);

/// A store and the tasks that it runs on.
struct Gateway {
    store: PostgresStore,
    tracker: TaskTracker,
}

impl Gateway {
    async fn open(config: &StoreConfig) -> Self {
        let tracker = TaskTracker::new();
        let store = PostgresStore::open(config, &tracker).await.unwrap();
        Self { store, tracker }
    }

    /// Closes the store; no task of it may be left.
    async fn close(self) {
        self.store.close().await;
        self.tracker.close();
        let ended = tokio::time::timeout(PATIENCE, self.tracker.wait()).await;
        assert!(ended.is_ok(), "{} tasks are left", self.tracker.len());
    }
}

/// Sends one claim until it gets an answer.
async fn reserve(store: &PostgresStore, claim: &Claim) -> Reserved {
    insist(|| store.reserve(std::slice::from_ref(claim)))
        .await
        .pop()
        .unwrap()
}

/// Asks until there is an answer, as the gateway does while the store is away.
async fn insist<T, F>(ask: impl Fn() -> F) -> T
where
    F: Future<Output = Result<T, StoreError>>,
{
    let deadline = Instant::now() + PATIENCE;
    loop {
        match ask().await {
            Ok(answer) => return answer,
            Err(StoreError::Unavailable(_) | StoreError::Ambiguous(_))
                if Instant::now() < deadline => {}
            Err(error) => panic!("{error:?}"),
        }
    }
}

async fn count(conn: &mut PgConnection, sql: &'static str) -> i64 {
    sqlx::query_scalar(sql).fetch_one(conn).await.unwrap()
}

/// xorshift64*: enough chance for a test, and the same on every machine.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) % bound
    }
}
