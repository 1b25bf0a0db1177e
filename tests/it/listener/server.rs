//! A listener in front of a handler of the test's, and one in front of routes and upstreams.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use oncegate::config::{Limits, PathPattern, PoolConfig, Route};
use oncegate::domain::fingerprint::FingerprintRules;
use oncegate::domain::policy::{Duplicates, ForwardKey, KeySource, OnStoreDown, OnUnknown, Policy};
use oncegate::domain::scope::PoolId;
use oncegate::proxy::forward::Forwarding;
use oncegate::proxy::listener::{self, Peer, Shutdown, Tls};
use oncegate::proxy::passthrough::Passthrough;
use oncegate::proxy::{Body, BoxError, matching};
use oncegate::upstream::Upstreams;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_util::task::TaskTracker;

use super::client::{DEADLINE, Raw};

/// A running listener. Dropping it aborts it.
pub struct Server {
    pub addr: SocketAddr,
    pub shutdown: Shutdown,
    calls: Arc<AtomicUsize>,
    running: JoinSet<()>,
}

impl Server {
    /// Answers each request by what it was: method, target and the length of its body.
    pub async fn start() -> Self {
        Self::with(limits(), None, |request, _| describe(request)).await
    }

    pub async fn with<H, F>(limits: Limits, tls: Option<Tls>, handler: H) -> Self
    where
        H: Fn(Request<Incoming>, Peer) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = Response<Body>> + Send + 'static,
    {
        Self::until(Shutdown::default(), limits, tls, handler).await
    }

    async fn until<H, F>(shutdown: Shutdown, limits: Limits, tls: Option<Tls>, handler: H) -> Self
    where
        H: Fn(Request<Incoming>, Peer) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = Response<Body>> + Send + 'static,
    {
        let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = socket.local_addr().unwrap();
        let calls = Arc::new(AtomicUsize::new(0));
        let counting = {
            let calls = Arc::clone(&calls);
            move |request, peer| {
                calls.fetch_add(1, Ordering::SeqCst);
                handler(request, peer)
            }
        };
        let mut running = JoinSet::new();
        let run = shutdown.clone();
        running.spawn(async move { listener::run(socket, tls, &limits, counting, run).await });
        Self {
            addr,
            shutdown,
            calls,
            running,
        }
    }

    /// Requests that reached the handler.
    pub fn calls(&self) -> usize {
        self.calls.load(Ordering::SeqCst)
    }

    pub async fn connect(&self) -> Raw {
        Raw::connect(self.addr).await
    }

    /// Waits until the listener is done.
    pub async fn ended(&mut self) {
        let ended = tokio::time::timeout(DEADLINE, self.running.join_next()).await;
        ended.expect("the listener ends").unwrap().unwrap();
    }
}

pub fn limits() -> Limits {
    Limits {
        connections_max: 100,
        header_bytes_max: 16 << 10,
        header_timeout: Duration::from_secs(10),
        body_timeout: Duration::from_secs(10),
        waiters_per_key_max: 1,
        waiters_max: 1,
        body_bytes_total_max: 1,
        record_retry_bytes_max: 1,
        record_retry: Duration::ZERO,
        cache_bytes_max: 1,
        cache_trust: Duration::ZERO,
        grace: Duration::ZERO,
    }
}

async fn describe(request: Request<Incoming>) -> Response<Body> {
    let (head, body) = request.into_parts();
    match body.collect().await {
        Ok(body) => {
            let length = body.to_bytes().len();
            answer(200, format!("{} {} {length}", head.method, head.uri))
        }
        Err(error) => answer(400, format!("{error}")),
    }
}

pub fn answer(status: u16, body: impl Into<Bytes>) -> Response<Body> {
    let body = Full::new(body.into())
        .map_err(BoxError::from)
        .boxed_unsync();
    Response::builder().status(status).body(body).unwrap()
}

/// A gateway that guards nothing.
pub struct Gateway {
    pub server: Server,
    pub tunnels: TaskTracker,
}

impl Gateway {
    /// Every path goes to this target.
    pub async fn to(target: &str) -> Self {
        Self::with(pool(target), limits(), Duration::from_secs(10)).await
    }

    pub async fn with(pool: PoolConfig, limits: Limits, timeout: Duration) -> Self {
        let upstreams = Upstreams::new(&[pool], TaskTracker::new()).unwrap();
        let (shutdown, tunnels) = (Shutdown::default(), TaskTracker::new());
        let passthrough = Passthrough::new(
            upstreams,
            Arc::new(Forwarding::new("a1", false)),
            tunnels.clone(),
            shutdown.hard.clone(),
        );
        let routes = Arc::new([route(timeout)]);
        let handler = move |request: Request<Incoming>, peer| {
            let (routes, passthrough) = (Arc::clone(&routes), passthrough.clone());
            async move {
                let (head, body) = request.into_parts();
                match matching::find(&routes[..], &head) {
                    Ok(found) => {
                        let request = Request::from_parts(head, body);
                        let policy = &found.route.policy;
                        passthrough.answer(request, peer, policy).await
                    }
                    Err(problem) => {
                        let body = |bytes| Full::new(bytes).map_err(BoxError::from);
                        problem
                            .into_response()
                            .map(|bytes| body(bytes).boxed_unsync())
                    }
                }
            }
        };
        let server = Server::until(shutdown, limits, None, handler).await;
        Self { server, tunnels }
    }

    pub async fn connect(&self) -> Raw {
        self.server.connect().await
    }
}

pub fn pool(target: &str) -> PoolConfig {
    PoolConfig {
        id: PoolId::new("p").unwrap(),
        targets: vec![target.parse().unwrap()],
        connect_timeout: Duration::from_secs(5),
        connections_max: 50,
        queue_timeout: Duration::from_secs(5),
        idle_timeout: Duration::from_mins(1),
        connection_age_max: Duration::from_mins(1),
        http2: false,
        ca: None,
        preserve_host: true,
    }
}

fn route(timeout: Duration) -> Route {
    Route {
        host: None,
        path: PathPattern::Prefix("/".into()),
        methods: vec![Method::POST],
        policy: Arc::new(Policy {
            mode: oncegate::domain::policy::Mode::Proxy,
            follow_up: None,
            pool: PoolId::new("p").unwrap(),
            key_source: KeySource::Header(http::HeaderName::from_static("idempotency-key")),
            required: false,
            duplicates: Duplicates::Wait,
            forward_key: ForwardKey::Verbatim,
            wait: Duration::ZERO,
            lease: Duration::ZERO,
            timeout,
            linger: Duration::ZERO,
            valid_for: Duration::ZERO,
            tombstone_for: Duration::ZERO,
            on_unknown: OnUnknown::Hold,
            store_5xx: true,
            release_statuses: Vec::new(),
            store_set_cookie: false,
            on_store_down: OnStoreDown::Refuse,
            body_bytes_max: 0,
            store_body_bytes_max: 0,
            fingerprint: FingerprintRules::default(),
            retry: oncegate::domain::workflow::Retry::DEFAULT,
        }),
    }
}
