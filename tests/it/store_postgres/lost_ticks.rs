//! A run was begun or moved on, and the reply got lost: the store finds out by itself.

use oncegate::domain::run::{LoadedRun, RunKey, RunStatus, TickCommitted};
use oncegate::store::Store as _;
use oncegate::store::runs::RunStore as _;

use super::{Gateway, count};
use crate::store_conformance::fixture::claim;
use crate::store_conformance::run_fixture::{intent, on_loaded, run_of, starting, tick};
use crate::support::chaos_proxy::{ChaosProxy, Mode};
use crate::support::postgres::{self, Database};

/// A gateway behind a proxy, with every statement prepared.
async fn behind_proxy() -> (Database, ChaosProxy, Gateway) {
    let database = postgres::database().await;
    let proxy = ChaosProxy::start(database.address()).await;
    let mut config = postgres::config(&database.url_through(proxy.address()));
    config.connections_max = 1;
    config.notify = false;
    let gateway = Gateway::open(&config).await;
    let key = begin(&gateway, "warm").await;
    move_on(&gateway, &key).await;
    (database, proxy, gateway)
}

async fn begin(gateway: &Gateway, name: &str) -> RunKey {
    let claim = claim(name);
    let store = &gateway.store;
    store.reserve(std::slice::from_ref(&claim)).await.unwrap();
    let wanted = starting(&claim, 2);
    let committed = store.complete(std::slice::from_ref(&wanted)).await.unwrap();
    assert!(committed[0].is_some());
    run_of(&wanted)
}

async fn load(gateway: &Gateway, key: &RunKey) -> LoadedRun {
    let loaded = gateway.store.load_runs(std::slice::from_ref(key)).await;
    loaded.unwrap().pop().unwrap().unwrap()
}

async fn move_on(gateway: &Gateway, key: &RunKey) {
    let mut next = tick(RunStatus::Running);
    next.intents = vec![intent(key.id, 3, true)];
    let commit = on_loaded(&load(gateway, key).await, next);
    let done = gateway.store.commit_ticks(&[commit]).await.unwrap();
    assert_eq!(done, [TickCommitted::Committed]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_decision_whose_reply_was_lost_starts_one_run() {
    let (database, proxy, gateway) = behind_proxy().await;
    let claim = claim("k");
    let store = &gateway.store;
    store.reserve(std::slice::from_ref(&claim)).await.unwrap();
    let wanted = starting(&claim, 2);
    proxy.set(Mode::Swallow(b""));
    let committed = store.complete(std::slice::from_ref(&wanted)).await.unwrap();
    assert_eq!(proxy.swallowed(), 1);
    assert!(committed[0].is_some());
    assert_eq!(load(&gateway, &run_of(&wanted)).await.intents.len(), 2);
    let mut conn = database.connect().await;
    let runs = "select count(*) from eec_run where idempotency_key = 'k'";
    assert_eq!(count(&mut conn, runs).await, 1);
    gateway.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tick_whose_reply_was_lost_is_committed_once() {
    let (_database, proxy, gateway) = behind_proxy().await;
    let key = begin(&gateway, "k").await;
    let mut next = tick(RunStatus::Running);
    next.intents = vec![intent(key.id, 3, true)];
    let commit = on_loaded(&load(&gateway, &key).await, next);
    proxy.set(Mode::Swallow(b""));
    let done = gateway.store.commit_ticks(&[commit]).await.unwrap();
    assert_eq!(proxy.swallowed(), 1);
    assert_eq!(done, [TickCommitted::Committed]);
    let loaded = load(&gateway, &key).await;
    assert_eq!((loaded.run.record_version, loaded.intents.len()), (2, 3));
    gateway.close().await;
}
