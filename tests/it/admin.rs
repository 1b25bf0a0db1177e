//! The admin listener and its client, over real sockets and a real SQLite file. Every exchange is
//! held against `openapi.yaml`.

mod access;
mod acts;
mod commands;
mod doctor;
mod faulty;
mod listener;
mod outbox;
mod records;
mod run_commands;
mod runs;
mod started;
mod stream;
mod tasks;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE};
use http::{HeaderMap, Method, Request, Uri};
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use metrics_exporter_prometheus::PrometheusBuilder;
use oncegate::api::health::Readiness;
use oncegate::api::records::OwnerTimes;
use oncegate::api::{self, AdminState, WAITS_MAX};
use oncegate::config::{Role, TokenConfig};
use oncegate::coordinator::Coordinator;
use oncegate::domain::intent::Destination;
use oncegate::domain::record::{Claim, GiveUp, Reserved};
use oncegate::domain::scope::{PoolId, RecordKey, TenantScope};
use oncegate::domain::secret::Secrets;
use oncegate::lifecycle::Bells;
use oncegate::outbox::tasks::Tasks;
use oncegate::routing::gate::{Gate, Settings};
use oncegate::store::Store;
use oncegate::store::group::{Group, GroupOptions};
use oncegate::store::sqlite::SqliteStore;
use serde_json::Value;
use sha2::{Digest, Sha256};
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::openapi::{Exchange, Spec};
use crate::store_conformance::fixture;
use faulty::Faulty;

/// Looks at everything.
const READER: &str = "reader-token";
/// Does everything.
const OPERATOR: &str = "operator-token";
/// Does everything with the tenant `acme`.
const ACME: &str = "acme-token";
/// Commits decisions, looks at runs and signals them.
const SERVICE: &str = "service-token";
/// Works on tasks of every tenant.
const WORKER: &str = "worker-token";
/// Works on tasks of the tenant `acme`.
const ACME_WORKER: &str = "acme-worker-token";

/// A running admin listener and what it works with.
struct Admin {
    address: SocketAddr,
    store: Arc<Faulty>,
    /// Records that the gateway was told to look at again.
    changed: Arc<Mutex<Vec<RecordKey>>>,
    readiness: Arc<Mutex<Readiness>>,
    acts: TaskTracker,
    /// Moves runs on; nothing does by itself here.
    coordinator: Coordinator,
    group: Group,
    /// Begins to stop the gateway.
    closing: CancellationToken,
    /// Places of requests that wait.
    waits: Arc<Semaphore>,
    shutdown: CancellationToken,
    serving: TaskTracker,
    router: Router,
    http: legacy::Client<HttpConnector, Full<Bytes>>,
    spec: Spec,
    directory: TempDir,
}

struct Reply {
    status: u16,
    headers: HeaderMap,
    body: Bytes,
}

impl Reply {
    fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    /// The end of the problem's `type`.
    fn slug(&self) -> String {
        let document = self.json();
        let kind = document["type"].as_str().unwrap();
        kind.rsplit('/').next().unwrap().to_owned()
    }
}

impl Admin {
    /// An owner is certainly gone at once.
    async fn start() -> Self {
        Self::start_with_margin(Duration::ZERO).await
    }

    /// An owner is certainly gone after `margin`.
    async fn start_with_margin(margin: Duration) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store.db");
        let store = SqliteStore::open(&path, true).await.unwrap();
        let store = Arc::new(Faulty::new(store));
        let (changed, acts) = (Arc::new(Mutex::new(Vec::new())), TaskTracker::new());
        let readiness = Arc::new(Mutex::new(Readiness::Ready));
        let (told, state_now) = (Arc::clone(&changed), Arc::clone(&readiness));
        let shared: Arc<dyn Store> = store.clone();
        let options = GroupOptions {
            concurrency: 1,
            patience: Duration::from_secs(10),
        };
        let (group, bells) = (Group::new(&shared, options), Bells::default());
        let coordinator = Coordinator::new(shared, group.clone(), bells.clone());
        let (closing, waits) = (
            CancellationToken::new(),
            Arc::new(Semaphore::new(WAITS_MAX)),
        );
        let state = AdminState {
            store: store.clone(),
            tokens: tokens(),
            metrics: PrometheusBuilder::new().build_recorder().handle(),
            readiness: Arc::new(move || *state_now.lock().unwrap()),
            owner_times: Arc::new(OwnerTimes::new(&[], margin)),
            changed: Arc::new(move |key| told.lock().unwrap().push(key.clone())),
            gate: gate(store.clone(), acts.clone()).await,
            catalog: Arc::default(),
            room: Arc::default(),
            acts: acts.clone(),
            coordinator: coordinator.clone(),
            tasks: Tasks::new(store.clone(), group.clone(), bells.clone()),
            bells,
            destinations: Arc::new([Destination("mail".into())]),
            lease_min: Duration::from_secs(5),
            waits: Arc::clone(&waits),
            closing: closing.clone(),
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (shutdown, serving) = (CancellationToken::new(), TaskTracker::new());
        let router = api::router(state);
        serving.spawn(api::serve(listener, router.clone(), shutdown.clone()));
        serving.close();
        Self {
            address,
            store,
            changed,
            readiness,
            acts,
            coordinator,
            group,
            closing,
            waits,
            shutdown,
            serving,
            router,
            http: legacy::Client::builder(TokioExecutor::new()).build_http(),
            spec: Spec::load(),
            directory,
        }
    }

    async fn get(&self, token: &str, path: &str) -> Reply {
        self.call(Method::GET, Some(token), path, None).await
    }

    async fn post(&self, token: &str, path: &str, body: Value) -> Reply {
        self.call(Method::POST, Some(token), path, Some(body)).await
    }

    /// One exchange, held against the document.
    async fn call(
        &self,
        method: Method,
        token: Option<&str>,
        target: &str,
        sent: Option<Value>,
    ) -> Reply {
        self.call_with(method, token, target, sent, HeaderMap::new())
            .await
    }

    /// The same, with more headers.
    async fn call_with(
        &self,
        method: Method,
        token: Option<&str>,
        target: &str,
        sent: Option<Value>,
        headers: HeaderMap,
    ) -> Reply {
        let uri: Uri = format!("http://{}{target}", self.address).parse().unwrap();
        let body = sent.as_ref().map(Value::to_string).unwrap_or_default();
        let mut request = Request::builder().method(&method).uri(uri);
        if let Some(token) = token {
            request = request.header(AUTHORIZATION, format!("Bearer {token}"));
        }
        let mut request = request.body(Full::from(body)).unwrap();
        request.headers_mut().extend(headers);
        let response = self.http.request(request).await.unwrap();
        let (head, body) = response.into_parts();
        let reply = Reply {
            status: head.status.as_u16(),
            headers: head.headers,
            body: body.collect().await.unwrap().to_bytes(),
        };
        let path = target.split('?').next().unwrap();
        self.spec.check(&Exchange {
            method: &method,
            path,
            sent: sent.as_ref(),
            status: reply.status,
            content_type: reply.headers[CONTENT_TYPE].to_str().unwrap(),
            body: &reply.body,
        });
        reply
    }

    async fn reserve(&self, claim: &Claim) {
        let reserved = self.store.reserve(std::slice::from_ref(claim)).await;
        assert!(matches!(reserved.unwrap()[..], [Reserved::Won(_)]));
    }

    /// A record whose outcome nobody knows.
    async fn unknown(&self, key: RecordKey) {
        let claim = fixture::claim_of(key);
        self.reserve(&claim).await;
        let release = fixture::release(&claim, GiveUp::Hold);
        let released = self.store.release(&[release]).await.unwrap();
        assert!(released[0].is_some());
    }

    /// A record with a committed answer.
    async fn completed(&self, key: RecordKey) {
        let claim = fixture::claim_of(key);
        self.reserve(&claim).await;
        let completion = fixture::completion(&claim);
        let committed = self.store.complete(&[completion]).await.unwrap();
        assert!(committed[0].is_some());
    }

    /// A record whose owner is at work.
    async fn pending(&self, key: RecordKey) {
        let claim = fixture::claim_of(key);
        self.reserve(&claim).await;
    }

    /// The record's state, by its word.
    async fn state(&self, key: &RecordKey) -> Option<&'static str> {
        let found = self.store.look_up(std::slice::from_ref(key)).await.unwrap();
        found[0].as_ref().map(|record| record.state.word())
    }

    fn told(&self) -> Vec<RecordKey> {
        std::mem::take(&mut self.changed.lock().unwrap())
    }

    /// Ends everything; what is still at work after that is a fault.
    async fn stop(self) -> TempDir {
        self.closing.cancel();
        self.shutdown.cancel();
        self.serving.wait().await;
        self.acts.close();
        self.acts.wait().await;
        assert_eq!(self.waits.available_permits(), WAITS_MAX, "nobody waits");
        self.group.close().await;
        self.store.close().await;
        self.directory
    }
}

/// A gate on the same store, for the calls of services.
async fn gate(store: Arc<dyn Store>, tracker: TaskTracker) -> Gate {
    let options = GroupOptions {
        concurrency: 1,
        patience: Duration::from_secs(5),
    };
    let group = Group::new(&store, options);
    let settings = Settings {
        waiters_per_key_max: 100,
        waiters_max: 100,
        poll_interval: Duration::from_millis(100),
        cache_bytes_max: 1 << 20,
        cache_trust: Duration::from_secs(30),
        record_retry: Duration::from_secs(1),
        record_retry_bytes_max: 1 << 20,
    };
    let secrets = Secrets::new(store.secrets([7; 32]).await.unwrap()).unwrap();
    let draining = CancellationToken::new();
    let bells = oncegate::lifecycle::Bells::default();
    Gate::new(store, group, secrets, settings, bells, tracker, draining)
}

fn tokens() -> Arc<[TokenConfig]> {
    let token = |secret: &str, role, tenant: Option<&str>| TokenConfig {
        name: secret.replace("-token", ""),
        role,
        sha256: Sha256::digest(secret).into(),
        tenant: tenant.map(|name| TenantScope::named(name.as_bytes()).unwrap()),
    };
    Arc::new([
        token(READER, Role::Reader, None),
        token(OPERATOR, Role::Operator, None),
        token(ACME, Role::Operator, Some("acme")),
        token(SERVICE, Role::Service, None),
        token(WORKER, Role::Worker, None),
        token(ACME_WORKER, Role::Worker, Some("acme")),
    ])
}

/// A record of any scope, as the store names it.
fn key_of(tenant: &str, pool: &str, key: &str) -> RecordKey {
    RecordKey {
        tenant: TenantScope::parse(tenant).unwrap(),
        pool: PoolId::new(pool).unwrap(),
        ..fixture::key(key)
    }
}

/// A record's path; `act` is empty or begins with a slash.
fn path_of(key: &RecordKey, act: &str) -> String {
    let encoded = [key.tenant.as_str(), key.pool.as_str(), key.key.as_str()].map(|part| {
        let bytes = part.bytes().map(|byte| match byte {
            b'a'..=b'z' | b'0'..=b'9' | b'.' | b'-' => char::from(byte).to_string(),
            byte => format!("%{byte:02X}"),
        });
        bytes.collect::<String>()
    });
    format!("/v1/records/{}{act}", encoded.join("/"))
}
