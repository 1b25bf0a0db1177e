//! What an orchestrator and a scraper ask: is the process alive, may traffic come, what are the
//! figures. Open to everyone who reaches the listener; tells nothing about anybody's requests.

use axum::http::Method;
use axum::routing::get;

use super::Route;
use axum::extract::State;
use axum::http::header;
use axum::response::IntoResponse;

use super::AdminState;
use crate::problem::{Kind, Problem};

/// Metrics and health.
pub const ROUTES: [Route; 3] = [
    Route {
        method: Method::GET,
        path: "/metrics",
        roles: &[],
        handler: || get(metrics),
    },
    Route {
        method: Method::GET,
        path: "/healthz",
        roles: &[],
        handler: || get(alive),
    },
    Route {
        method: Method::GET,
        path: "/readyz",
        roles: &[],
        handler: || get(ready),
    },
];

/// The text format of Prometheus, as its scrapers negotiate it.
const METRICS_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Whether traffic may come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// It may.
    Ready,
    /// The public listener is not bound yet.
    Starting,
    /// The store gave no sign of life lately: guarded requests would be refused.
    StoreUnreachable,
    /// The gateway is shutting down.
    Draining,
}

/// `GET /metrics`
pub(super) async fn metrics(State(state): State<AdminState>) -> impl IntoResponse {
    (
        [(header::CONTENT_TYPE, METRICS_TYPE)],
        state.metrics.render(),
    )
}

/// `GET /healthz`: the process answers, whatever the store does; a restart would not help it.
pub(super) async fn alive() -> &'static str {
    "alive\n"
}

/// `GET /readyz`
pub(super) async fn ready(State(state): State<AdminState>) -> Result<&'static str, Problem> {
    let (reason, detail) = match (state.readiness)() {
        Readiness::Ready => return Ok("ready\n"),
        Readiness::Starting => ("starting", "The gateway is starting; ask again."),
        Readiness::StoreUnreachable => (
            "store-unreachable",
            "The gateway can't reach its store; its log says why.",
        ),
        Readiness::Draining => (
            "draining",
            "The gateway is shutting down; send traffic to another one.",
        ),
    };
    Err(Problem::new(Kind::NotReady, detail).member("reason", reason))
}
