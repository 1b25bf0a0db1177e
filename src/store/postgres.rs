//! The store on PostgreSQL, for any number of gateways.
//!
//! Reading order: [`session`] connects, [`pool`] keeps connections, [`run`] sends one statement
//! with a deadline; [`routing`], [`upkeep`] and [`operators`] say what is sent; [`wakeup`] passes
//! hints between gateways.
//!
//! Invariants:
//! - Every unit of work is one statement that commits by itself, so a lost connection or a
//!   cancelled caller leaves no transaction open, and `now()` is always the present. Only behind a
//!   transaction pooler it gets a `begin` and a `commit`, which hold the server's connection.
//! - Ids and tokens come from outside; no statement holds a volatile function. Sending one again
//!   is recognised.
//! - Every predicate on the request path begins with `tenant_scope` and finds its rows by primary
//!   key, whatever the statistics say.

mod batch;
mod complete;
mod doctor;
mod hosts;
mod operators;
mod outbox;
mod pool;
mod remembered;
mod routing;
mod rows;
mod run;
mod runs;
mod session;
mod upkeep;
mod wakeup;
mod warnings;

pub use self::hosts::parse as hosts;
pub use self::session::connect_plain;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use sqlx::Connection as _;
use sqlx::postgres::PgConnectOptions;
use time::OffsetDateTime;
use tokio::sync::{Mutex, broadcast};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use self::pool::Pool;
use self::rows::Cells;
use self::run::{Repeat, Runner, fixed};
use self::session::Sessions;
use self::upkeep::Sweep;
use self::wakeup::Wakeups;
use super::doctor::Finding;
use super::open::OpenError;
use super::{
    Audit, Census, Purged, Resolved, Search, Store, StoreError, Swept, Verdict, Wakeup, migrate,
};
use crate::config::StoreConfig;
use crate::domain::record::{
    AttemptToken, Claim, Claimed, Committed, Completion, DecisionId, Found, Heartbeat, Record,
    Release, Released, Remembered, Reserved, StoredDecision,
};
use crate::domain::scope::{RecordKey, TenantScope};
use crate::domain::secret::Secret;

/// How long the first connection may take: the database may be starting with us.
const FIRST_CONNECT_MAX: Duration = Duration::from_secs(10);

const FIRST_SECRET: &str = "\
    insert into eec_secret (version, secret) select 1, $1 \
    where not exists (select 1 from eec_secret) on conflict (version) do nothing";

const SECRETS: &str = "select version, secret from eec_secret order by version";

/// A PostgreSQL database, open.
pub struct PostgresStore {
    runner: Runner,
    sessions: Arc<Sessions>,
    sweep: Mutex<Sweep>,
    /// Where retention stands among the decisions.
    purged_to: Mutex<OffsetDateTime>,
    wakeups: Arc<Wakeups>,
    stop: CancellationToken,
}

impl PostgresStore {
    /// Connects, and applies missing migrations if the configuration says so. Tasks of the store
    /// run on `tracker`, and end at [`Store::close`].
    ///
    /// # Errors
    /// When the URL is malformed, the server can't be reached or is too old, its schema is newer
    /// than this program, or older and migrations are off.
    pub async fn open(config: &StoreConfig, tracker: &TaskTracker) -> Result<Self, OpenError> {
        let hosts = hosts::parse(&config.url)?;
        let deadline = Instant::now() + FIRST_CONNECT_MAX;
        prepare(&hosts, config.migrate, deadline).await?;
        let sessions = Sessions::new(hosts, config.operation_timeout);
        let pool = Pool::new(Arc::clone(&sessions), config.connections_max);
        let first = pool.acquire(deadline).await;
        first
            .map_err(|error| OpenError::Store(error.into()))?
            .give_back();
        let wakeups = Wakeups::new(config.notify && !sessions.pooled());
        let stop = CancellationToken::new();
        if wakeups.on() {
            let run = Arc::clone(&wakeups).run(Arc::clone(&sessions), stop.clone());
            tracker.spawn(run);
        }
        Ok(Self {
            runner: Runner {
                pool,
                tracker: tracker.clone(),
                acquire_timeout: config.acquire_timeout,
                operation_timeout: config.operation_timeout,
            },
            sessions,
            sweep: Mutex::new(Sweep::new()),
            purged_to: Mutex::new(OffsetDateTime::UNIX_EPOCH),
            wakeups,
            stop,
        })
    }
}

impl Drop for PostgresStore {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// Brings the schema up to this program, or says why it is not.
async fn prepare(
    hosts: &[PgConnectOptions],
    migrate: bool,
    deadline: Instant,
) -> Result<(), OpenError> {
    let mut conn = session::connect_plain(hosts, deadline).await?;
    let missing = migrate::postgres(&mut conn, migrate).await?;
    // What it was for is done.
    let _ = conn.close().await;
    if !migrate && !missing.is_empty() {
        return Err(OpenError::Behind(missing.len()));
    }
    Ok(())
}

#[async_trait]
impl Store for PostgresStore {
    async fn remembered(
        &self,
        tenant: &TenantScope,
        request_id: Uuid,
    ) -> Result<Option<Remembered>, StoreError> {
        self.runner.remembered(tenant, request_id).await
    }

    async fn reserve(&self, claims: &[Claim]) -> Result<Vec<Reserved>, StoreError> {
        self.runner.reserve(claims).await
    }

    async fn reclaim(
        &self,
        claim: &Claim,
        seen: AttemptToken,
    ) -> Result<Option<Claimed>, StoreError> {
        self.runner.reclaim(claim, seen).await
    }

    async fn heartbeat(&self, beats: &[Heartbeat]) -> Result<Vec<bool>, StoreError> {
        self.runner.heartbeat(beats).await
    }

    async fn complete(
        &self,
        completions: &[Completion],
    ) -> Result<Vec<Option<Committed>>, StoreError> {
        self.runner.complete(completions).await
    }

    async fn release(&self, releases: &[Release]) -> Result<Vec<Option<Released>>, StoreError> {
        self.runner.release(releases).await
    }

    async fn look_up(&self, keys: &[RecordKey]) -> Result<Vec<Option<Record>>, StoreError> {
        self.runner.look_up(keys).await
    }

    async fn decision(
        &self,
        tenant: &TenantScope,
        decision_id: DecisionId,
    ) -> Result<Option<StoredDecision>, StoreError> {
        self.runner.decision(tenant, decision_id).await
    }

    async fn mark_awaited(&self, key: &RecordKey) -> Result<(), StoreError> {
        self.runner.mark_awaited(key).await
    }

    /// The hint is sent soon, by another task; that it could not be sent is only counted.
    async fn notify(&self, records: &[u64]) -> Result<(), StoreError> {
        self.wakeups.send(records);
        Ok(())
    }

    fn wakeups(&self) -> broadcast::Receiver<Wakeup> {
        self.wakeups.subscribe()
    }

    async fn sweep_one(&self, key: &RecordKey, token: AttemptToken) -> Result<bool, StoreError> {
        self.runner.sweep_one(key, token).await
    }

    async fn sweep(&self, limit: u32) -> Result<Swept, StoreError> {
        let mut sweep = self.sweep.lock().await;
        self.runner.sweep(&mut sweep, limit).await
    }

    async fn purge(&self, limit: u32) -> Result<Purged, StoreError> {
        let mut at = self.purged_to.lock().await;
        self.runner.purge(&mut at, limit).await
    }

    async fn census(&self) -> Result<Census, StoreError> {
        let floor = self.sweep.lock().await.floor();
        self.runner.census(floor).await
    }

    async fn find(&self, search: &Search) -> Result<Vec<Found>, StoreError> {
        self.runner.find(search).await
    }

    async fn resolve(
        &self,
        key: &RecordKey,
        verdict: &Verdict,
        owner_time_max: Duration,
        audit: &Audit,
    ) -> Result<Resolved, StoreError> {
        self.runner
            .resolve(key, verdict, owner_time_max, audit)
            .await
    }

    async fn purge_one(&self, key: &RecordKey, audit: &Audit) -> Result<Resolved, StoreError> {
        self.runner.purge_one(key, audit).await
    }

    async fn secrets(&self, fresh: [u8; 32]) -> Result<Vec<Secret>, StoreError> {
        let first = || fixed(FIRST_SECRET).bind(fresh.to_vec());
        self.runner.rows(Repeat::Safe, first).await?;
        let rows = self.runner.rows(Repeat::Safe, || fixed(SECRETS)).await?;
        let secret = |row| {
            let cells = Cells::new(row, "eec_secret");
            let bytes: &[u8] = cells.get("secret")?;
            let wrong = |_| {
                let what = format!("{} bytes instead of 32", bytes.len());
                cells.inconsistent("secret", what)
            };
            Ok(Secret {
                version: cells.get("version")?,
                bytes: bytes.try_into().map_err(wrong)?,
            })
        };
        rows.iter().map(secret).collect()
    }

    async fn ping(&self) -> Result<OffsetDateTime, StoreError> {
        let rows = self
            .runner
            .rows(Repeat::Safe, || fixed("select now() as present"))
            .await?;
        let row = rows
            .first()
            .ok_or(StoreError::Refused(sqlx::Error::RowNotFound))?;
        Cells::new(row, "now()").get("present")
    }

    async fn warnings(&self) -> Result<Vec<String>, StoreError> {
        self.runner.warnings(self.sessions.pooled()).await
    }

    async fn doctor(&self) -> Result<Vec<Finding>, StoreError> {
        self.runner.doctor(&self.wakeups).await
    }

    async fn close(&self) {
        self.stop.cancel();
        let runner = &self.runner;
        let deadline = Instant::now() + runner.acquire_timeout + runner.operation_timeout;
        runner.pool.close(deadline).await;
    }
}
