//! The admin listener: metrics, health, and the API for operators under `/v1`.
//!
//! It is for operators, scrapers and orchestrators, on an address of its own, and never sees
//! clients' requests. It knows the store and what it is handed in [`AdminState`], nothing of the
//! proxy.
//!
//! Invariants:
//! - [`AREAS`] is the only list of what exists; the router, the roles and the test of
//!   `openapi.yaml` are made from it.
//! - Everything under `/v1` needs a token, also what does not exist there.
//! - An act on a record is finished even if who asked for it is gone.
//! - Every error is a problem document (RFC 9457).

pub(crate) mod doctor;
pub mod health;
mod outbox;
pub mod records;
mod request;
mod routing;
mod runs;
mod tasks;
mod token;
pub(crate) mod workflow;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, Method, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::MethodRouter;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use metrics_exporter_prometheus::PrometheusHandle;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::{Role, TokenConfig};
use crate::coordinator::Coordinator;
use crate::domain::intent::Destination;
use crate::domain::scope::RecordKey;
use crate::lifecycle::Bells;
use crate::outbox::tasks::Tasks;
use crate::problem::{Kind, Problem};
use crate::routing::gate::Gate;
use crate::store::Store;
use crate::telemetry::Chain;

/// Connections that are served at one time; more wait in the listener's queue.
pub const CONNECTIONS_MAX: usize = 512;
/// How long a connection may take to send a request's headers, or stay idle.
pub const HEADER_TIMEOUT: Duration = Duration::from_secs(30);
/// Buffer for a request's headers, in bytes.
pub const HEADER_BYTES_MAX: usize = 64 * 1024;
/// How long an answer may take to begin; a stream goes on for [`runs::stream::TIME_MAX`].
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// A connection takes no more requests after this long, and is cut soon after.
pub const CONNECTION_AGE_MAX: Duration = Duration::from_mins(2);
/// Requests that may be waiting at one time: streams, and claims of tasks that wait for one. Fewer
/// than connections, so that others still come in.
pub const WAITS_MAX: usize = 128;
/// After the shutdown: how long requests that are at work may take to end.
pub const GRACE: Duration = Duration::from_secs(5);
/// How long accepting rests after an error such as "too many open files".
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);

/// What the admin listener works with.
#[derive(Clone)]
pub struct AdminState {
    /// The records.
    pub store: Arc<dyn Store>,
    /// Who may come in.
    pub tokens: Arc<[TokenConfig]>,
    /// What `/metrics` tells.
    pub metrics: PrometheusHandle,
    /// What `/readyz` tells; asked at each request.
    pub readiness: Arc<dyn Fn() -> health::Readiness + Send + Sync>,
    /// When an owner is certainly gone.
    pub owner_times: Arc<records::OwnerTimes>,
    /// Called after an act changed a record: drops the cached decision and wakes local waiters.
    pub changed: Arc<dyn Fn(&RecordKey) + Send + Sync>,
    /// The gate, for callers that play the upstream.
    pub gate: Gate,
    /// What effects and runs may refer to.
    pub catalog: Arc<workflow::Catalog>,
    /// Places and bytes for services' calls.
    pub room: Arc<routing::Room>,
    /// Where acts run, so that neither a lost connection nor the shutdown cuts one in two.
    pub acts: TaskTracker,
    /// The only way in which runs change.
    pub coordinator: Coordinator,
    /// Tasks, for step workers.
    pub tasks: Tasks,
    /// Rung when a run begins, and after an act changed an intent or a destination.
    pub bells: Bells,
    /// The configured destinations.
    pub destinations: Arc<[Destination]>,
    /// The shortest lease of any owner or claim.
    pub lease_min: Duration,
    /// A place for each request that may wait; [`WAITS_MAX`] of them.
    pub waits: Arc<Semaphore>,
    /// Cancelled when the gateway begins to stop: whatever waits ends then.
    pub closing: CancellationToken,
}

/// One line of the route table.
pub struct Route {
    /// The method; `GET` answers `HEAD` too.
    pub method: Method,
    /// The path; `{…}` stands for one percent-encoded segment.
    pub path: &'static str,
    /// A token must have one of these; none: open to everyone who reaches the listener.
    pub roles: &'static [Role],
    pub(crate) handler: fn() -> MethodRouter<AdminState>,
}

/// Who may look.
pub(crate) const READERS: &[Role] = &[Role::Reader, Role::Operator];
/// Who may look at one record: also those who claim records.
pub(crate) const RECORD_READERS: &[Role] = &[Role::Reader, Role::Operator, Role::Service];

/// Everything that exists on the admin listener, area by area.
pub const AREAS: [&[Route]; 7] = [
    &health::ROUTES,
    &doctor::ROUTES,
    &records::ROUTES,
    &routing::ROUTES,
    &runs::ROUTES,
    &outbox::ROUTES,
    &tasks::ROUTES,
];

/// Every route of every area.
pub fn routes() -> impl Iterator<Item = &'static Route> {
    AREAS.into_iter().flatten()
}

/// The router that [`AREAS`] describe.
pub fn router(state: AdminState) -> Router {
    let mut router = Router::new();
    for route in routes() {
        let mut handler = (route.handler)();
        if !route.roles.is_empty() {
            let gate = middleware::from_fn_with_state((state.clone(), route.roles), token::require);
            handler = handler.route_layer(gate);
        }
        router = router.route(route.path, handler);
    }
    router
        .fallback(nothing_here)
        .method_not_allowed_fallback(not_with_this_method)
        .layer(middleware::from_fn(in_time))
        .layer(middleware::map_response(unkept))
        .with_state(state)
}

/// Serves `router` until `shutdown`; then takes no more connections and ends the open ones after
/// the request that each is at, [`GRACE`] later at the latest. Cancel `shutdown` after the drain,
/// not before: `/readyz` and `/metrics` tell how it goes.
pub async fn serve(listener: TcpListener, router: Router, shutdown: CancellationToken) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            () = shutdown.cancelled() => break,
            Some(ended) = connections.join_next() => {
                if let Err(error) = ended {
                    tracing::error!(%error, "an admin connection broke off");
                }
            }
            accepted = listener.accept(), if connections.len() < CONNECTIONS_MAX => match accepted {
                Ok((stream, _)) => {
                    connections.spawn(connection(stream, router.clone(), shutdown.clone()));
                }
                Err(error) => {
                    tracing::warn!(%error, "the admin listener can't accept a connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
        }
    }
    drop(listener);
    let ended = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(GRACE, ended).await.is_err() {
        tracing::warn!("admin connections were cut off at the shutdown");
    }
}

async fn connection(stream: TcpStream, router: Router, shutdown: CancellationToken) {
    let served = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .max_buf_size(HEADER_BYTES_MAX)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    let mut served = std::pin::pin!(served);
    // Whoever doesn't read its answers would hold a place for ever: every connection ends.
    tokio::select! {
        result = served.as_mut() => return tell(result),
        () = shutdown.cancelled() => {}
        () = tokio::time::sleep(CONNECTION_AGE_MAX) => {}
    }
    served.as_mut().graceful_shutdown();
    let longest = REQUEST_TIMEOUT.max(runs::stream::TIME_MAX);
    if let Ok(result) = tokio::time::timeout(longest + GRACE, served).await {
        tell(result);
    }
}

fn tell(result: Result<(), hyper::Error>) {
    if let Err(error) = result {
        tracing::debug!(error = %Chain(&error), "an admin connection broke");
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        Problem::into_response(self).map(Into::into)
    }
}

/// An answer within [`REQUEST_TIMEOUT`], whatever the store does.
async fn in_time(request: Request, next: Next) -> Result<Response, Problem> {
    let answer = tokio::time::timeout(REQUEST_TIMEOUT, next.run(request)).await;
    answer.map_err(|_| {
        Problem::new(
            Kind::StoreUnavailable,
            "The store did not answer in time. Look at the record before you repeat an act: it may \
             have happened.",
        )
    })
}

/// Answers are for this moment and for no script that sniffs.
async fn unkept(mut response: Response) -> Response {
    let headers = response.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(
        header::X_CONTENT_TYPE_OPTIONS,
        HeaderValue::from_static("nosniff"),
    );
    response
}

async fn nothing_here(State(state): State<AdminState>, request: Request) -> Problem {
    behind_token(&state, &request).unwrap_or_else(|| {
        Problem::new(
            Kind::NotFound,
            "There is no such path; openapi.yaml lists those that exist.",
        )
    })
}

async fn not_with_this_method(State(state): State<AdminState>, request: Request) -> Problem {
    behind_token(&state, &request).unwrap_or_else(|| {
        Problem::new(
            Kind::MethodNotAllowed,
            "Use a method that the Allow header names.",
        )
    })
}

/// What a request gets that comes without a token to a path under `/v1` that does not exist.
fn behind_token(state: &AdminState, request: &Request) -> Option<Problem> {
    let path = request.uri().path();
    let api = path == "/v1" || path.starts_with("/v1/");
    let known = token::known(&state.tokens, request.headers());
    (api && known.is_none()).then(token::unauthorized)
}
