//! `oncegate demo`: the gateway before a small service that counts how often it runs.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use axum::Router;
use axum::extract::State;
use axum::response::IntoResponse;
use http::{HeaderMap, StatusCode};
use tokio_util::sync::CancellationToken;

use super::paint::Paint;
use crate::config::input::{Environment, Given, Overrides};
use crate::config::report::Origin;
use crate::config::{self, Config};
use crate::lifecycle::Shutdown;
use crate::{app, telemetry};

const ABOUT: &str = "\
Starts on loopback only: a gateway (port 8080), its admin listener (9090) and a sample service
(9000), or on other ports when these are taken; and prints what to paste into another terminal.
The store is a file in a temporary directory and is deleted at the end.";

/// How long a charge takes, so that the difference of a replay can be felt.
const WORK: Duration = Duration::from_secs(1);

#[derive(Debug, clap::Args)]
#[command(after_help = ABOUT)]
pub(super) struct Args {}

/// The sample service.
#[derive(Clone)]
struct Sample {
    charges: Arc<AtomicU64>,
    paint: Paint,
}

pub(super) fn run(_args: &Args) -> anyhow::Result<ExitCode> {
    let dir = tempfile::Builder::new()
        .prefix("oncegate-demo-")
        .tempdir()
        .context("no temporary directory; set TMPDIR to one that can be written")?;
    let upstream = listen_near(9000)?;
    let store = format!("sqlite:{}", dir.path().join("demo.db").display());
    let config = gateway(&store, upstream.local_addr()?)?;
    telemetry::start_log(&config.log)?;
    let metrics = telemetry::start_metrics()?;
    let paint = Paint::for_terminal(&std::io::stdout());
    super::run_gateway(async move {
        let shutdown = Shutdown::new(config.limits.grace);
        let (tasks, soft) = (shutdown.tasks(), shutdown.soft());
        tasks.spawn(serve_sample(upstream, paint, soft.clone()));
        tasks.spawn(welcome(
            shutdown.clone(),
            paint,
            config.listen,
            config.admin,
        ));
        app::serve(config, metrics, shutdown.clone()).await
    })
}

/// A configuration as flags would make it.
fn gateway(store: &str, upstream: SocketAddr) -> anyhow::Result<Config> {
    let given = |text: String| {
        Some(Given {
            text: text.into(),
            origin: Origin::Default,
        })
    };
    let overrides = Overrides {
        listen: given(listen_near(8080)?.local_addr()?.to_string()),
        admin: given(listen_near(9090)?.local_addr()?.to_string()),
        store: given(store.to_owned()),
        upstream: given(format!("http://{upstream}")),
        tenant: given("fixed:demo".to_owned()),
        log: given("warn".to_owned()),
        ..Overrides::default()
    };
    Ok(config::load(&overrides, &Environment::default())?.config)
}

/// Listens on this port of loopback or, when it is taken, on any.
fn listen_near(port: u16) -> anyhow::Result<TcpListener> {
    let on = |port| TcpListener::bind((Ipv4Addr::LOCALHOST, port));
    on(port)
        .or_else(|_| on(0))
        .context("no port of 127.0.0.1 is free")
}

async fn serve_sample(listener: TcpListener, paint: Paint, stop: CancellationToken) {
    let sample = Sample {
        charges: Arc::default(),
        paint,
    };
    let router = Router::new().fallback(charge).with_state(sample);
    let served = async {
        listener.set_nonblocking(true)?;
        let listener = tokio::net::TcpListener::from_std(listener)?;
        axum::serve(listener, router)
            .with_graceful_shutdown(stop.cancelled_owned())
            .await
    };
    if let Err(error) = served.await {
        tracing::error!(%error, "the sample service stopped");
    }
}

/// Charges someone: exactly what must not happen twice.
async fn charge(State(sample): State<Sample>, headers: HeaderMap) -> impl IntoResponse {
    tokio::time::sleep(WORK).await;
    let number = sample.charges.fetch_add(1, Ordering::Relaxed) + 1;
    let key = headers.get("idempotency-key").map(|key| key.to_str());
    let key = key.and_then(Result::ok).unwrap_or("none");
    let line = format!("upstream executed charge #{number} (key {key})");
    super::say(sample.paint.green(&line));
    let json = [(http::header::CONTENT_TYPE, "application/json")];
    (
        StatusCode::CREATED,
        json,
        format!("{{\"charge\":{number}}}\n"),
    )
}

async fn welcome(shutdown: Shutdown, paint: Paint, gateway: SocketAddr, admin: SocketAddr) {
    let soft = shutdown.soft();
    if soft.run_until_cancelled(shutdown.readied()).await.is_some() {
        super::say(guide(paint, gateway, admin));
    }
}

fn guide(paint: Paint, gateway: SocketAddr, admin: SocketAddr) -> String {
    let post = |key: &str, amount: u32| {
        format!("curl -i http://{gateway}/charges -H 'Idempotency-Key: {key}' -d amount={amount}")
    };
    let first = paint.bold(post("order-1", 10));
    let other = paint.bold(post("order-1", 99));
    let once = post("order-2", 10).replace("curl -i", "curl -s");
    let many = paint.bold(format!("for i in 1 2 3 4 5; do {once} & done; wait"));
    let metrics = paint.bold(format!(
        "curl -s http://{admin}/metrics | grep oncegate_guarded_requests_total"
    ));
    format!(
        "\
The gateway is at http://{gateway}. Paste into another terminal:

1. A first request. It takes a second, and a line below tells that the service ran.
   {first}

2. The same line again, as a client that never saw the answer would send it. It has the same
   answer, with `Idempotent-Replayed: true`, at once; and the service does not run.
   {first}

3. The same key for another charge: refused with 422, and the service does not run.
   {other}

4. Five at once: five answers, and the service runs once.
   {many}

What the gateway counted:
   {metrics}

Ctrl-C ends it.
"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_demo_configures_a_gateway_before_its_sample() {
        let upstream = "127.0.0.1:9000".parse().unwrap();
        let config = gateway("sqlite:/tmp/demo.db", upstream).unwrap();
        assert!(config.listen.ip().is_loopback() && config.admin.ip().is_loopback());
        assert_eq!(config.pools[0].targets, ["http://127.0.0.1:9000/"]);
        assert_eq!(config.routes.len(), 1);
    }

    #[test]
    fn the_guide_is_plain_off_a_terminal() {
        let address = "127.0.0.1:1".parse().unwrap();
        let guide = guide(Paint::PLAIN, address, address);
        assert!(guide.contains("order-1") && !guide.contains('\x1b'));
    }

    #[tokio::test]
    async fn a_taken_port_is_no_obstacle() {
        let taken = listen_near(0).unwrap();
        let port = taken.local_addr().unwrap().port();
        let other = listen_near(port).unwrap();
        assert_ne!(other.local_addr().unwrap().port(), port);
    }
}
