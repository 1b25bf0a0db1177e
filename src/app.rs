//! The composition root: the only file that names everything.
//!
//! [`serve`] opens the store, builds the gate, the proxy and the admin listener on it, binds both
//! sockets and runs until a signal has ended it all.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use http::{Request, Response};
use hyper::body::Incoming;
use metrics_exporter_prometheus::PrometheusHandle;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::api::doctor;
use crate::api::health::Readiness;
use crate::api::records::{OWNER_MARGIN, OwnerTimes};
use crate::api::workflow::Catalog;
use crate::api::{self, AdminState};
use crate::config::{Config, Limits, Route, StoreConfig};
use crate::coordinator::Coordinator;
use crate::domain::message::IDEMPOTENCY_KEY;
use crate::domain::secret::Secrets;
use crate::driver::{self, Timing};
use crate::ids;
use crate::lifecycle::{Bells, Exit, Shutdown, Signals};
use crate::outbox::tasks::Tasks;
use crate::outbox::{Outbox, OutboxParts};
use crate::proxy::capture::BodyBudget;
use crate::proxy::forward::Forwarding;
use crate::proxy::guard::{Guard, GuardParts};
use crate::proxy::listener::{self, Peer, Tls};
use crate::proxy::lookups::{self, Lookups};
use crate::proxy::passthrough::Passthrough;
use crate::proxy::tenant::Tenants;
use crate::proxy::watch::Watch;
use crate::proxy::{Body, matching, problem_response};
use crate::routing::gate::{Gate, Settings};
use crate::store::group::{Group, GroupOptions};
use crate::store::outbox::OutboxStore;
use crate::store::{self, Store};
use crate::telemetry;
use crate::upkeep::census::Census;
use crate::upkeep::retention::Retention;
use crate::upkeep::run_retention::RunRetention;
use crate::upkeep::sweeper::Sweeper;
use crate::upkeep::ticker::Ticker;
use crate::upstream::Upstreams;

/// How often the gauges that need the store are refreshed, and the store's being there is checked.
const CENSUS_PERIOD: Duration = Duration::from_secs(5);
/// How long after the last sign of life the store counts as unreachable.
const STORE_SILENCE_MAX: Duration = Duration::from_secs(15);
/// How long after the owners had to settle their clients' connections are cut.
const LAST_ANSWERS: Duration = Duration::from_millis(500);
/// How long closing the store may take after the drain.
const CLOSE_MAX: Duration = Duration::from_secs(5);
/// Batches of one operation that PostgreSQL commits at once.
const BATCHES_AT_ONCE: usize = 4;

/// A request's way: the gateway's own or which route, then guarded or not.
#[derive(Clone)]
struct Proxy {
    lookups: Lookups,
    routes: Arc<[Route]>,
    guard: Guard,
    passthrough: Passthrough,
}

/// What outlives the drain.
struct Running {
    store: Arc<dyn Store>,
    store_tasks: TaskTracker,
    group: Group,
    admin: TaskTracker,
    admin_stop: CancellationToken,
}

/// What runs are moved with.
#[derive(Clone)]
struct RunParts {
    group: Group,
    coordinator: Coordinator,
    bells: Bells,
}

/// Runs the gateway until it has stopped.
///
/// # Errors
/// When it can't start: the store, a certificate, a port. Each tells what to do.
pub async fn serve(
    config: Config,
    metrics: PrometheusHandle,
    shutdown: Shutdown,
) -> anyhow::Result<Exit> {
    let mut signals = Signals::install().context("signals can't be received")?;
    let running = tokio::select! {
        running = start(&config, metrics, &shutdown) => running?,
        () = signals.next() => return Ok(Exit::Clean),
    };
    shutdown.set_ready();
    let exit = shutdown.run(async || signals.next().await).await;
    running.close().await;
    Ok(exit)
}

impl Running {
    /// Connections are cut a little later than owners, so that what an owner had to settle at the
    /// end still reaches its client.
    fn listeners_shutdown(&self, shutdown: &Shutdown) -> listener::Shutdown {
        let (owners, connections) = (shutdown.hard().clone(), CancellationToken::new());
        let (cut, stop) = (connections.clone(), self.admin_stop.clone());
        self.admin.spawn(stop.run_until_cancelled_owned(async move {
            owners.cancelled().await;
            tokio::time::sleep(LAST_ANSWERS).await;
            cut.cancel();
        }));
        listener::Shutdown {
            soft: shutdown.soft().clone(),
            hard: connections,
        }
    }

    /// After the drain: what told about it, and what it was written to.
    async fn close(self) {
        self.admin_stop.cancel();
        self.admin.close();
        self.admin.wait().await;
        let closing = async {
            self.group.close().await;
            self.store.close().await;
            self.store_tasks.close();
            self.store_tasks.wait().await;
        };
        if tokio::time::timeout(CLOSE_MAX, closing).await.is_err() {
            tracing::warn!("the store did not close in time; what was sent to it may be done");
        }
    }
}

/// Everything up to the first request.
async fn start(
    config: &Config,
    metrics: PrometheusHandle,
    shutdown: &Shutdown,
) -> anyhow::Result<Running> {
    let tls = config.tls.as_ref().map(Tls::load).transpose()?;
    let upstreams = Upstreams::new(&config.pools, shutdown.tasks().clone())?;
    let store_tasks = TaskTracker::new();
    let store = store::open::open(&config.store, &store_tasks).await?;
    for warning in store.warnings().await? {
        tracing::warn!("{warning}");
    }
    let secrets = secrets(&*store).await?;
    let public = bind(config.listen, "listen").await?;
    let admin = bind(config.admin, "admin").await?;
    let (listen_addr, admin_addr) = (public.local_addr()?, admin.local_addr()?);

    let group = Group::new(&store, group_options(&config.store));
    let bells = Bells::default();
    let gate = gate(config, &store, &group, secrets.clone(), &bells, shutdown);
    let census = start_upkeep(config, &store, shutdown);
    let runs = RunParts {
        group: group.clone(),
        coordinator: Coordinator::new(Arc::clone(&store), group.clone(), bells.clone()),
        bells,
    };
    start_runs(config, &store, &runs, &upstreams, shutdown)?;
    let watch = Watch {
        gate: gate.clone(),
        coordinator: runs.coordinator.clone(),
        poll_interval: config.store.poll_interval,
        draining: shutdown.soft().clone(),
    };
    let state = admin_state(
        config,
        &store,
        &gate,
        runs.clone(),
        metrics.clone(),
        census,
        shutdown,
    );
    let running = Running {
        store,
        store_tasks,
        group,
        admin: TaskTracker::new(),
        admin_stop: CancellationToken::new(),
    };
    let router = api::router(state);
    let admin_stop = running.admin_stop.clone();
    running.admin.spawn(api::serve(admin, router, admin_stop));

    let tasks = shutdown.tasks();
    tasks.spawn(telemetry::upkeep(metrics, shutdown.soft().clone()));
    tasks.spawn(gate.clone().forget_what_others_change());
    let proxy = proxy(
        config,
        &running.store,
        gate,
        watch,
        upstreams,
        secrets,
        shutdown,
    );
    let (limits, tokens) = (config.limits.clone(), running.listeners_shutdown(shutdown));
    tasks.spawn(proxy.listen(public, tls, limits, tokens));
    tracing::info!(
        listen = %listen_addr,
        admin = %admin_addr,
        store = config.store.url.split(':').next(),
        version = env!("CARGO_PKG_VERSION"),
        "listening"
    );
    Ok(running)
}

impl Proxy {
    async fn listen(
        self,
        public: TcpListener,
        tls: Option<Tls>,
        limits: Limits,
        tokens: listener::Shutdown,
    ) {
        let handler = move |request, peer| self.clone().answer(request, peer);
        listener::run(public, tls, &limits, handler, tokens).await;
    }

    async fn answer(self, request: Request<Incoming>, peer: Peer) -> Response<Body> {
        let (head, body) = request.into_parts();
        if lookups::takes(head.uri.path()) {
            return self.lookups.answer(&head).await;
        }
        let (policy, guarded) = match matching::find(&self.routes, &head) {
            Ok(matched) => (Arc::clone(&matched.route.policy), matched.guarded),
            Err(problem) if head.headers.contains_key(IDEMPOTENCY_KEY) => {
                return Guard::refuse(problem, &head.headers);
            }
            Err(problem) => return problem_response(problem),
        };
        let request = Request::from_parts(head, body);
        if guarded {
            self.guard.handle(&policy, request, peer).await
        } else {
            self.passthrough.answer(request, peer, &policy).await
        }
    }
}

async fn secrets(store: &dyn Store) -> anyhow::Result<Secrets> {
    let mut fresh = [0; 32];
    getrandom::fill(&mut fresh).context("the system gives no randomness")?;
    let versions = store.secrets(fresh).await?;
    Secrets::new(versions).context("the store holds no secret; run `oncegate migrate`")
}

async fn bind(addr: std::net::SocketAddr, setting: &str) -> anyhow::Result<TcpListener> {
    TcpListener::bind(addr).await.with_context(|| {
        format!("{setting}: {addr} can't be listened on; choose another address or port")
    })
}

fn group_options(config: &StoreConfig) -> GroupOptions {
    // SQLite has one writer; PostgreSQL commits several batches at once.
    let concurrency = if config.url.starts_with("sqlite:") {
        1
    } else {
        BATCHES_AT_ONCE
    };
    GroupOptions {
        concurrency,
        patience: config.operation_timeout,
    }
}

fn gate(
    config: &Config,
    store: &Arc<dyn Store>,
    group: &Group,
    secrets: Secrets,
    bells: &Bells,
    shutdown: &Shutdown,
) -> Gate {
    let limits = &config.limits;
    let settings = Settings {
        waiters_per_key_max: limits.waiters_per_key_max,
        waiters_max: limits.waiters_max,
        poll_interval: config.store.poll_interval,
        cache_bytes_max: limits.cache_bytes_max,
        cache_trust: limits.cache_trust,
        record_retry: limits.record_retry,
        record_retry_bytes_max: limits.record_retry_bytes_max,
    };
    let (tasks, soft) = (shutdown.tasks().clone(), shutdown.soft().clone());
    let (store, group) = (Arc::clone(store), group.clone());
    let bells = bells.clone();
    Gate::new(store, group, secrets, settings, bells, tasks, soft)
}

fn proxy(
    config: &Config,
    store: &Arc<dyn Store>,
    gate: Gate,
    watch: Watch,
    upstreams: Upstreams,
    secrets: Secrets,
    shutdown: &Shutdown,
) -> Proxy {
    let instance = ids::instance();
    let forwarding = Arc::new(Forwarding::new(&instance, config.trust_forwarded));
    let (tasks, hard) = (shutdown.tasks().clone(), shutdown.hard().clone());
    let passthrough = Passthrough::new(
        upstreams.clone(),
        Arc::clone(&forwarding),
        tasks.clone(),
        hard.clone(),
    );
    let tenants = Arc::new(Tenants::new(config.tenant.clone(), secrets));
    let lookups = Lookups {
        store: Arc::clone(store),
        tenants: Arc::clone(&tenants),
        watch: watch.clone(),
        tracker: tasks.clone(),
    };
    let guard = Guard::new(GuardParts {
        gate,
        upstreams,
        forwarding,
        passthrough: passthrough.clone(),
        tenants,
        store: Arc::clone(store),
        watch,
        budget: BodyBudget::new(config.limits.body_bytes_total_max),
        body_timeout: config.limits.body_timeout,
        tracker: tasks,
        cutoff: hard,
    });
    Proxy {
        lookups,
        routes: config.routes.clone().into(),
        guard,
        passthrough,
    }
}

fn admin_state(
    config: &Config,
    store: &Arc<dyn Store>,
    gate: &Gate,
    runs: RunParts,
    metrics: PrometheusHandle,
    census: driver::Handle,
    shutdown: &Shutdown,
) -> AdminState {
    let changed = gate.clone();
    let lifecycle = shutdown.clone();
    let readiness = move || {
        if lifecycle.soft().is_cancelled() {
            Readiness::Draining
        } else if !lifecycle.is_ready() {
            Readiness::Starting
        } else if !census.succeeded_within(STORE_SILENCE_MAX) {
            Readiness::StoreUnreachable
        } else {
            Readiness::Ready
        }
    };
    AdminState {
        store: Arc::clone(store),
        tokens: config.tokens.clone().into(),
        metrics,
        readiness: Arc::new(readiness),
        owner_times: Arc::new(OwnerTimes::new(&config.routes, OWNER_MARGIN)),
        changed: Arc::new(move |key| changed.changed(key)),
        gate: gate.clone(),
        catalog: Arc::new(Catalog::new(config)),
        room: Arc::default(),
        acts: shutdown.tasks().clone(),
        coordinator: runs.coordinator,
        tasks: Tasks::new(store.clone(), runs.group, runs.bells.clone()),
        bells: runs.bells,
        destinations: config
            .destinations
            .iter()
            .map(|known| known.id.clone())
            .collect(),
        lease_min: doctor::lease_min(&config.routes, &config.outbox),
        waits: Arc::new(Semaphore::new(api::WAITS_MAX)),
        closing: shutdown.soft().clone(),
    }
}

/// Starts what sends intents and what moves runs on.
fn start_runs(
    config: &Config,
    store: &Arc<dyn Store>,
    runs: &RunParts,
    upstreams: &Upstreams,
    shutdown: &Shutdown,
) -> anyhow::Result<()> {
    let (tasks, soft) = (shutdown.tasks(), shutdown.soft());
    let outbox = Outbox::new(OutboxParts {
        store: Arc::clone(store) as Arc<dyn OutboxStore>,
        group: runs.group.clone(),
        destinations: &config.destinations,
        config: config.outbox.clone(),
        upstreams: upstreams.clone(),
        urls: config.sends_to_urls(),
        bells: runs.bells.clone(),
        tracker: tasks.clone(),
        soft: soft.clone(),
        hard: shutdown.hard().clone(),
    })?;
    let timing = Timing {
        period: config.outbox.poll_interval,
        deadline: config.store.operation_timeout * 2,
    };
    let bell = Arc::clone(&runs.bells.outbox);
    driver::start_with(outbox.drainer(), timing, tasks, soft, bell);
    let ticker = Ticker(runs.coordinator.clone());
    driver::start_with(ticker, timing, tasks, soft, Arc::clone(&runs.bells.runs));
    Ok(())
}

/// Starts the duties; returns the one whose success tells that the store is there.
fn start_upkeep(config: &Config, store: &Arc<dyn Store>, shutdown: &Shutdown) -> driver::Handle {
    let (tasks, soft) = (shutdown.tasks(), shutdown.soft());
    let (keep, config) = (config.keep, &config.store);
    let timing = |period| Timing {
        period,
        deadline: config.operation_timeout * 2,
    };
    let sweeper = Sweeper(Arc::clone(store));
    driver::start(sweeper, timing(config.sweep_interval), tasks, soft);
    let retention = Retention(Arc::clone(store));
    driver::start(retention, timing(config.purge_interval), tasks, soft);
    let run_retention = RunRetention {
        store: Arc::clone(store),
        keep,
    };
    driver::start(run_retention, timing(config.purge_interval), tasks, soft);
    let census = Census(Arc::clone(store));
    driver::start(census, timing(CENSUS_PERIOD), tasks, soft)
}
