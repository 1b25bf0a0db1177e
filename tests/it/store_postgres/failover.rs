//! A server that goes away, comes back, or takes no writes.

use std::time::Duration;

use oncegate::domain::record::Reserved;
use oncegate::store::{Store as _, StoreError, Wakeup};
use tokio::time::{Instant, timeout};

use super::{Gateway, PATIENCE, insist, reserve};
use crate::store_conformance::fixture::{claim, completion};
use crate::support::postgres;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_crashed_and_came_back_is_used_again() {
    let server = postgres::private().await;
    let database = server.database().await;
    let mut config = postgres::config(&database.url);
    config.acquire_timeout = Duration::from_millis(300);
    let gateway = Gateway::open(&config).await;
    let store = &gateway.store;
    let mut hints = store.wakeups();
    let owned = claim("owned");
    store.reserve(std::slice::from_ref(&owned)).await.unwrap();

    server.crash();
    let began = Instant::now();
    let error = store.reserve(&[claim("k")]).await.unwrap_err();
    // The first may have met a connection that broke under it; then there is none to be had.
    let again = store.reserve(&[claim("k")]).await.unwrap_err();
    assert!(
        matches!(again, StoreError::Unavailable(_)),
        "{error:?}, then {again:?}"
    );
    assert!(
        began.elapsed() < Duration::from_secs(5),
        "{:?}",
        began.elapsed()
    );

    server.start_again();
    let wanted = [completion(&owned)];
    assert!(insist(|| store.complete(&wanted)).await[0].is_some());
    assert!(matches!(
        reserve(store, &claim("new")).await,
        Reserved::Won(_)
    ));
    // The listener is back too, and says that it may have missed something.
    let hint = timeout(PATIENCE, async {
        loop {
            if let Ok(Wakeup::Everything) = hints.recv().await {
                return;
            }
        }
    });
    hint.await.unwrap();
    gateway.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_takes_no_writes_is_left_and_tried_anew() {
    let server = postgres::private().await;
    let database = server.database().await;
    let mut config = postgres::config(&database.url);
    config.acquire_timeout = Duration::from_millis(300);
    let gateway = Gateway::open(&config).await;
    let store = &gateway.store;
    assert!(matches!(
        reserve(store, &claim("before")).await,
        Reserved::Won(_)
    ));

    server.read_only(true).await;
    let deadline = Instant::now() + PATIENCE;
    let error = loop {
        // Sessions take the new setting over when they get to it.
        match store.reserve(&[claim("during")]).await {
            Err(error) => break error,
            Ok(_) => assert!(Instant::now() < deadline),
        }
    };
    assert!(!error.may_have_happened(), "{error:?}");
    let source = std::error::Error::source(&error).unwrap().to_string();
    assert!(
        source.contains("writes") || source.contains("read-only"),
        "{source}"
    );

    server.read_only(false).await;
    assert!(matches!(
        reserve(store, &claim("after")).await,
        Reserved::Won(_)
    ));
    gateway.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_several_hosts_the_one_that_answers_is_used() {
    let database = postgres::database().await;
    // Port 1 on loopback refuses.
    let hosts = format!("127.0.0.1:1,{}", database.address());
    let url = database.url.replace(&database.address(), &hosts);
    let gateway = Gateway::open(&postgres::config(&url)).await;
    assert!(gateway.store.ping().await.is_ok());
    gateway.close().await;
}
