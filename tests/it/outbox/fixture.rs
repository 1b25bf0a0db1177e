//! An outbox on a fresh store, and intents to put into it.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use oncegate::config::{DestinationConfig, DestinationKind, OutboxConfig, StoreConfig};
use oncegate::domain::intent::{Destination, How, IntentId, IntentKey, IntentStatus, Sending};
use oncegate::domain::scope::TenantScope;
use oncegate::domain::workflow::{HttpSend, Retry, Success, Target, Text};
use oncegate::driver::{self, Timing};
use oncegate::ids;
use oncegate::lifecycle::Bells;
use oncegate::outbox::{Outbox, OutboxParts};
use oncegate::store::group::{Group, GroupOptions};
use oncegate::store::outbox::{IntentLine, OutboxStore};
use oncegate::store::{self, Store};
use oncegate::upstream::Upstreams;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::support::clock::{PATIENCE, eventually};
use crate::support::postgres;
use crate::support::process::scratch;
use crate::support::rows::{Database, Kind};

/// Nothing is tried again within a test unless it says so.
pub const RETRY: Retry = Retry {
    first_ms: 3_600_000,
    max_ms: 3_600_000,
    horizon_ms: 24 * 3_600_000,
    faults_max: 5,
};
/// Tried again at once.
pub const RETRY_SOON: Retry = Retry {
    first_ms: 1,
    max_ms: 10,
    ..RETRY
};

/// A store and an outbox on it. `stop` must be called at the end: it asserts that nothing is left.
pub struct Rig {
    /// The database.
    pub database: Database,
    /// The store.
    pub store: Arc<dyn Store>,
    /// Ends of tries.
    pub group: Group,
    /// Rung and heard.
    pub bells: Bells,
    /// Nothing new begins after it.
    pub soft: CancellationToken,
    /// What is begun is cut off by it.
    pub hard: CancellationToken,
    tracker: TaskTracker,
    store_tasks: TaskTracker,
    pools: Upstreams,
    pool_tasks: TaskTracker,
    _directory: tempfile::TempDir,
}

/// An intent to put into the store.
#[derive(Clone)]
pub struct Put {
    pub tenant: &'static str,
    pub destination: String,
    pub key: String,
    pub body: Vec<u8>,
    pub sending: Sending,
}

impl Rig {
    /// A store without an outbox.
    pub async fn store(kind: Kind) -> Self {
        let directory = scratch();
        let database = Database::fresh(kind, directory.path()).await;
        let config = StoreConfig {
            url: database.url(),
            ..postgres::config("")
        };
        let store_tasks = TaskTracker::new();
        let store = store::open::open(&config, &store_tasks).await.unwrap();
        let options = GroupOptions {
            concurrency: 1,
            patience: Duration::from_secs(5),
        };
        let hard = CancellationToken::new();
        let pool_tasks = TaskTracker::new();
        Self {
            group: Group::new(&store, options),
            database,
            store,
            bells: Bells::default(),
            soft: hard.child_token(),
            hard,
            tracker: TaskTracker::new(),
            store_tasks,
            pools: Upstreams::new(&[], pool_tasks.clone()).unwrap(),
            pool_tasks,
            _directory: directory,
        }
    }

    /// A store on SQLite and an outbox for these destinations.
    pub async fn start(destinations: &[DestinationConfig]) -> Self {
        let rig = Self::store(Kind::Sqlite).await;
        rig.drain(destinations, &config());
        rig
    }

    /// With these pools.
    pub fn with_pools(mut self, pools: &[oncegate::config::PoolConfig]) -> Self {
        self.pools = Upstreams::new(pools, self.pool_tasks.clone()).unwrap();
        self
    }

    /// Starts an outbox on the store.
    pub fn drain(&self, destinations: &[DestinationConfig], config: &OutboxConfig) {
        self.drain_from(self.store.clone(), destinations, config);
    }

    /// The same, on a double of the store.
    pub fn drain_from(
        &self,
        store: Arc<dyn OutboxStore>,
        destinations: &[DestinationConfig],
        config: &OutboxConfig,
    ) {
        let outbox = Outbox::new(OutboxParts {
            store,
            group: self.group.clone(),
            destinations,
            config: config.clone(),
            upstreams: self.pools.clone(),
            urls: config.allow_urls,
            bells: self.bells.clone(),
            tracker: self.tracker.clone(),
            soft: self.soft.clone(),
            hard: self.hard.clone(),
        })
        .unwrap();
        let timing = Timing {
            period: config.poll_interval,
            deadline: PATIENCE,
        };
        let bell = self.bells.outbox.clone();
        driver::start_with(outbox.drainer(), timing, &self.tracker, &self.soft, bell);
    }

    /// Inserts intents that are due, and rings.
    pub async fn put(&self, puts: &[Put]) -> Vec<IntentKey> {
        let (mut intents, mut bodies) = (String::new(), String::new());
        let mut keys = Vec::new();
        for put in puts {
            // An id is drawn by the product's own source.
            let (intent, run) = (ids::stamp().0, ids::stamp().0);
            let (intent_text, run_text) = (self.uuid(intent), self.uuid(run));
            let sending = self.bytes(&serde_json::to_vec(&put.sending).unwrap());
            let comma = if keys.is_empty() { "" } else { "," };
            let (tenant, now) = (put.tenant, self.now());
            write!(
                intents,
                "{comma}('{tenant}',{intent_text},{run_text},1,'step','{}','{}',{sending},{},{now},{now})",
                put.destination, put.key, put.sending.retry.horizon_ms
            )
            .unwrap();
            let body = self.bytes(&put.body);
            write!(bodies, "{comma}('{tenant}',{intent_text},'message',{body})").unwrap();
            keys.push(IntentKey {
                tenant: TenantScope::stored(tenant),
                id: IntentId(intent),
            });
        }
        let bodies = format!(
            "insert into eec_effect_body (tenant_scope,intent_id,part,body) values {bodies}"
        );
        self.database.execute(&bodies).await;
        let intents = format!(
            "insert into eec_effect_intent (tenant_scope,intent_id,run_id,seq,step,destination,\
             idempotency_key,sending,horizon_ms,due_at,first_due_at) values {intents}"
        );
        self.database.execute(&intents).await;
        self.bells.outbox.notify_one();
        keys
    }

    /// Inserts one.
    pub async fn put_one(&self, put: Put) -> IntentKey {
        self.put(&[put]).await.remove(0)
    }

    /// How an intent stands.
    pub async fn line(&self, key: &IntentKey) -> IntentLine {
        self.store.find_intent(key.id).await.unwrap().unwrap()
    }

    /// Waits until an intent is so.
    pub async fn until(&self, key: &IntentKey, so: impl Fn(&IntentLine) -> bool) -> IntentLine {
        eventually("the intent is so", async || {
            let line = self.line(key).await;
            so(&line).then_some(line)
        })
        .await
    }

    /// Waits until a try of it ended and nobody has it; gives its line.
    pub async fn tried(&self, key: &IntentKey) -> IntentLine {
        self.until(key, |line| line.outcome.is_some() && !line.claimed)
            .await
    }

    /// Waits until it has this status.
    pub async fn until_status(&self, key: &IntentKey, status: IntentStatus) -> IntentLine {
        self.until(key, |line| line.status == status).await
    }

    /// Attempts by status.
    pub async fn attempts(&self) -> HashMap<&'static str, i64> {
        let mut counts = HashMap::new();
        for status in ["open", "delivered", "failed", "released", "lost"] {
            let sql = format!("select count(*) from eec_run_attempt where status = '{status}'");
            counts.insert(status, self.database.number(&sql).await);
        }
        counts.retain(|_, count| *count > 0);
        counts
    }

    /// Stops softly; every task must end by itself.
    pub async fn stop(self) {
        self.soft.cancel();
        self.tracker.close();
        let ended = tokio::time::timeout(PATIENCE, self.tracker.wait()).await;
        ended.expect("every task of the outbox ends after the shutdown");
        self.pools.close();
        self.group.close().await;
        self.store.close().await;
        self.store_tasks.close();
        self.store_tasks.wait().await;
    }

    fn uuid(&self, id: uuid::Uuid) -> String {
        match self.database {
            Database::Sqlite(_) => format!("x'{}'", id.simple()),
            Database::Postgres(_) => format!("'{id}'"),
        }
    }

    fn bytes(&self, bytes: &[u8]) -> String {
        let hex = bytes
            .iter()
            .fold(String::new(), |hex, byte| hex + &format!("{byte:02x}"));
        match self.database {
            Database::Sqlite(_) => format!("x'{hex}'"),
            Database::Postgres(_) => format!("'\\x{hex}'"),
        }
    }

    fn now(&self) -> &'static str {
        match self.database {
            Database::Sqlite(_) => "cast(unixepoch('subsec') * 1000 as integer)",
            Database::Postgres(_) => "now()",
        }
    }
}

/// Looks often, so that tests are quick.
pub fn config() -> OutboxConfig {
    OutboxConfig {
        poll_interval: Duration::from_millis(100),
        claim_lease: Duration::from_secs(30),
        in_flight_max: 200,
        in_flight_per_tenant_max: 100,
        concurrency_max: 16,
        allow_urls: true,
        breaker_faults: 1000,
        breaker_open: Duration::from_secs(1),
    }
}

/// A configured HTTP destination that may be on loopback.
pub fn http(id: &str, url: &str) -> DestinationConfig {
    DestinationConfig {
        id: Destination(id.to_owned()),
        kind: DestinationKind::Http {
            url: url.parse().unwrap(),
            secrets: Vec::new(),
            headers: Vec::new(),
            allow_private: true,
            ca: None,
        },
        concurrency_max: 16,
        rate_max: None,
        timeout: Duration::from_secs(10),
        retry: RETRY,
    }
}

/// A POST to a configured destination.
pub fn put(destination: &str, key: &str) -> Put {
    put_to(
        destination,
        Target::Destination(destination.to_owned()),
        key,
    )
}

/// A POST to an absolute URL.
pub fn put_url(url: &str, key: &str) -> Put {
    put_to("url:test", Target::Url(url.to_owned()), key)
}

/// A POST in this lane.
pub fn put_to(lane: &str, to: Target, key: &str) -> Put {
    let http = HttpSend {
        to,
        method: "POST".to_owned(),
        path: None,
        headers: vec![(
            "content-type".to_owned(),
            Text::Plain("application/json".to_owned()),
        )],
        success: Success::Ok,
        answer_bytes_max: 65_536,
    };
    Put {
        tenant: "acme",
        destination: lane.to_owned(),
        key: key.to_owned(),
        body: format!("{{\"for\":\"{key}\"}}").into_bytes(),
        sending: Sending {
            how: How::Http(http),
            retry: RETRY,
            timeout_ms: 10_000,
        },
    }
}

impl Put {
    /// Of another tenant.
    pub fn of(mut self, tenant: &'static str) -> Self {
        self.tenant = tenant;
        self
    }

    /// With this limit.
    pub fn timeout(mut self, timeout_ms: u64) -> Self {
        self.sending.timeout_ms = timeout_ms;
        self
    }

    /// Tried again like this.
    pub fn retry(mut self, retry: Retry) -> Self {
        self.sending.retry = retry;
        self
    }

    /// Changed so.
    pub fn http(mut self, change: impl FnOnce(&mut HttpSend)) -> Self {
        let How::Http(http) = &mut self.sending.how else {
            panic!("no HTTP");
        };
        change(http);
        self
    }
}
