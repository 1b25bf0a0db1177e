//! Health, and how the listener treats connections and what it doesn't know.

use std::time::Duration;

use axum::body::Body;
use http::header::{ALLOW, AUTHORIZATION, CACHE_CONTROL, CONTENT_TYPE, X_CONTENT_TYPE_OPTIONS};
use http::{Method, Request};
use oncegate::api::health::Readiness;
use oncegate::api::{HEADER_TIMEOUT, REQUEST_TIMEOUT};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::Instant;
use tower::ServiceExt as _;

use super::{Admin, READER, key_of, path_of};

/// Far longer than anything here takes.
const DEADLINE: Duration = Duration::from_secs(20);

#[tokio::test]
async fn readiness_follows_the_gateway_and_health_does_not() {
    let admin = Admin::start().await;
    for (readiness, status, reason) in [
        (Readiness::Starting, 503, "starting"),
        (Readiness::Ready, 200, ""),
        (Readiness::StoreUnreachable, 503, "store-unreachable"),
        (Readiness::Draining, 503, "draining"),
    ] {
        *admin.readiness.lock().unwrap() = readiness;
        let reply = admin.call(Method::GET, None, "/readyz", None).await;
        assert_eq!(reply.status, status);
        if status == 503 {
            assert_eq!(
                (reply.slug().as_str(), &reply.json()["reason"]),
                ("not-ready", &reason.into())
            );
        }
        let reply = admin.call(Method::GET, None, "/healthz", None).await;
        assert_eq!(reply.status, 200);
    }
    admin.stop().await;
}

#[tokio::test]
async fn a_scraper_gets_the_figures_as_it_expects_them() {
    let admin = Admin::start().await;
    let reply = admin.call(Method::GET, None, "/metrics", None).await;
    assert_eq!(reply.status, 200);
    assert_eq!(
        reply.headers[CONTENT_TYPE],
        "text/plain; version=0.0.4; charset=utf-8"
    );
    admin.stop().await;
}

#[tokio::test]
async fn no_answer_is_kept_or_sniffed() {
    let admin = Admin::start().await;
    let key = key_of("acme", "p", "k");
    admin.pending(key.clone()).await;
    for path in [
        "/healthz",
        "/nothing",
        "/v1/records",
        "/v1/nothing",
        &path_of(&key, ""),
    ] {
        let reply = admin.get(READER, path).await;
        assert_eq!(reply.headers[CACHE_CONTROL], "no-store", "{path}");
        assert_eq!(reply.headers[X_CONTENT_TYPE_OPTIONS], "nosniff", "{path}");
    }
    admin.stop().await;
}

#[tokio::test]
async fn what_does_not_exist_is_a_problem_too() {
    let admin = Admin::start().await;
    for path in [
        "/",
        "/metrics/",
        "/v1",
        "/v1/records/",
        "/v1/records/a/b",
        "/V1/records",
    ] {
        let reply = admin.get(READER, path).await;
        assert_eq!(
            (reply.status, reply.slug().as_str()),
            (404, "not-found"),
            "{path}"
        );
    }
    let record = path_of(&key_of("acme", "p", "k"), "/release");
    for (method, path, allowed) in [
        (Method::POST, "/healthz", "GET,HEAD"),
        (Method::DELETE, "/v1/records", "GET,HEAD"),
        (Method::GET, record.as_str(), "POST"),
    ] {
        let reply = admin.call(method, Some(READER), path, None).await;
        assert_eq!(
            (reply.status, reply.slug().as_str()),
            (405, "method-not-allowed"),
            "{path}"
        );
        assert_eq!(reply.headers[ALLOW], allowed);
    }
    admin.stop().await;
}

#[tokio::test]
async fn the_shutdown_ends_idle_connections_and_lets_answers_end() {
    let admin = Admin::start().await;
    let mut idle = TcpStream::connect(admin.address).await.unwrap();
    idle.write_all(b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n")
        .await
        .unwrap();
    let mut first = [0; 15];
    idle.read_exact(&mut first).await.unwrap();
    assert_eq!(&first, b"HTTP/1.1 200 OK");
    let (begun, go_on) = admin.store.hold_next();
    let mut busy = TcpStream::connect(admin.address).await.unwrap();
    let request =
        format!("GET /v1/records HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {READER}\r\n\r\n");
    busy.write_all(request.as_bytes()).await.unwrap();
    begun.await.unwrap();
    admin.shutdown.cancel();
    // The idle connection ends while the other one is still at its request.
    let mut rest = Vec::new();
    tokio::time::timeout(DEADLINE, idle.read_to_end(&mut rest))
        .await
        .unwrap()
        .unwrap();
    assert!(rest.ends_with(b"alive\n"));
    go_on.send(()).unwrap();
    let mut answer = String::new();
    tokio::time::timeout(DEADLINE, busy.read_to_string(&mut answer))
        .await
        .unwrap()
        .unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK") && answer.ends_with("\"next\":null}"));
    let refused = TcpStream::connect(admin.address).await;
    assert!(refused.is_err());
    admin.stop().await;
}

#[tokio::test]
async fn a_request_that_is_no_http_ends_its_connection_only() {
    let admin = Admin::start().await;
    let mut odd = TcpStream::connect(admin.address).await.unwrap();
    odd.write_all(b"\x16\x03\x01\x02\x00\x01\r\n\r\n")
        .await
        .unwrap();
    let mut answer = Vec::new();
    tokio::time::timeout(DEADLINE, odd.read_to_end(&mut answer))
        .await
        .unwrap()
        .unwrap();
    assert!(answer.is_empty() || answer.starts_with(b"HTTP/1.1 400"));
    assert_eq!(
        admin.call(Method::GET, None, "/healthz", None).await.status,
        200
    );
    admin.stop().await;
}

#[tokio::test]
async fn a_store_that_hangs_does_not_keep_the_asker_waiting() {
    let admin = Admin::start().await;
    let (_begun, _go_on) = admin.store.hold_next();
    let request = Request::get("/v1/records")
        .header(AUTHORIZATION, format!("Bearer {READER}"))
        .body(Body::empty())
        .unwrap();
    tokio::time::pause();
    let asked = Instant::now();
    let reply = admin.router.clone().oneshot(request).await.unwrap();
    assert_eq!(reply.status(), 503);
    assert!(asked.elapsed() < REQUEST_TIMEOUT + Duration::from_secs(1));
    tokio::time::resume();
    admin.stop().await;
}

#[tokio::test]
async fn a_connection_that_asks_nothing_is_closed() {
    let admin = Admin::start().await;
    let mut silent = TcpStream::connect(admin.address).await.unwrap();
    let mut slow = TcpStream::connect(admin.address).await.unwrap();
    slow.write_all(b"GET /healthz HTTP/1.1\r\nhost:")
        .await
        .unwrap();
    let mut idle = TcpStream::connect(admin.address).await.unwrap();
    idle.write_all(b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n")
        .await
        .unwrap();
    let mut first = [0; 15];
    idle.read_exact(&mut first).await.unwrap();
    tokio::time::pause();
    let asked = Instant::now();
    for connection in [&mut silent, &mut slow, &mut idle] {
        let mut rest = Vec::new();
        let _ = connection.read_to_end(&mut rest).await;
        assert!(asked.elapsed() <= HEADER_TIMEOUT * 2);
    }
    tokio::time::resume();
    admin.stop().await;
}
