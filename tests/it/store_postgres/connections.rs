//! Connections that break, hang or are dropped in the middle.

use std::time::Duration;

use futures_util::future::join_all;
use oncegate::domain::record::{Reserved, State};
use oncegate::store::{Store as _, StoreError};
use tokio::time::{Instant, timeout};

use super::{Gateway, PATIENCE, Random, count, insist, reserve};
use crate::store_conformance::fixture::{claim, completion, key};
use crate::support::chaos_proxy::{ChaosProxy, Mode};
use crate::support::postgres;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_callers_leave_no_transaction_open_and_no_place_taken() {
    const FUTURES: u64 = 2_000;
    let database = postgres::database().await;
    let gateway = Gateway::open(&postgres::config(&database.url)).await;
    let store = &gateway.store;
    let mut random = Random(11);
    let mut claims = Vec::new();
    let mut dropped = 0;
    for number in 0..FUTURES / 4 {
        let claim = claim(&format!("k{number}"));
        let wanted = completion(&claim);
        let audit = oncegate::store::Audit {
            operator: "jo".into(),
            reason: "test".into(),
        };
        let mut patience = || Duration::from_micros(random.below(1_500));
        let claims_ = [claim.clone()];
        let completions = [wanted];
        let keys = [claim.key.clone()];
        dropped += u32::from(timeout(patience(), store.reserve(&claims_)).await.is_err());
        dropped += u32::from(
            timeout(patience(), store.complete(&completions))
                .await
                .is_err(),
        );
        dropped += u32::from(timeout(patience(), store.look_up(&keys)).await.is_err());
        let purge = store.purge_one(&claim.key, &audit);
        dropped += u32::from(timeout(patience(), purge).await.is_err());
        claims.push(claim);
    }
    assert!(dropped > 100, "hardly a future was dropped: {dropped}");
    // What was begun ends by itself.
    gateway.tracker.close();
    // The listener's task goes on.
    let deadline = Instant::now() + PATIENCE;
    while gateway.tracker.len() > 1 {
        assert!(Instant::now() < deadline);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let mut conn = database.connect().await;
    let open = "select count(*) from pg_stat_activity where datname = current_database() \
                and state like 'idle in transaction%'";
    assert_eq!(count(&mut conn, open).await, 0);
    // Every place is free: as many at once as there are connections.
    let all = join_all((0..4).map(|_| store.ping())).await;
    assert!(all.iter().all(Result::is_ok), "{all:?}");
    let torn = "select count(*) from eec_routing_idempotency r where status = 'completed' and not \
                exists (select 1 from eec_routing_decision d where d.tenant_scope = r.tenant_scope \
                and d.decision_id = r.decision_id)";
    assert_eq!(count(&mut conn, torn).await, 0);
    gateway.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn terminated_backends_cost_nobody_a_record() {
    const OWNERS: usize = 8;
    const KEYS: usize = 25;
    let database = postgres::database().await;
    let gateway = Gateway::open(&postgres::config(&database.url)).await;
    let store = &gateway.store;
    let mut conn = database.connect().await;
    let owners = join_all((0..OWNERS).map(|owner| async move {
        for number in 0..KEYS {
            let claim = claim(&format!("o{owner}k{number}"));
            assert!(matches!(reserve(store, &claim).await, Reserved::Won(_)));
            let wanted = [completion(&claim)];
            let committed = insist(|| store.complete(&wanted)).await;
            assert!(committed[0].is_some());
        }
    }));
    let mut broken = 0;
    let breaking = async {
        loop {
            let sql = "select count(pg_terminate_backend(pid)) from pg_stat_activity \
                       where datname = current_database() and pid <> pg_backend_pid()";
            broken += count(&mut conn, sql).await;
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::select! {
        _ = owners => {}
        () = breaking => {}
    }
    assert!(broken > 10, "hardly a connection was broken: {broken}");
    let decisions = count(&mut conn, "select count(*) from eec_routing_decision").await;
    assert_eq!(decisions, i64::try_from(OWNERS * KEYS).unwrap());
    gateway.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_connection_holds_nobody_beyond_the_deadline() {
    let database = postgres::database().await;
    let proxy = ChaosProxy::start(database.address()).await;
    let mut config = postgres::config(&database.url_through(proxy.address()));
    config.connections_max = 1;
    config.acquire_timeout = Duration::from_secs(1);
    config.operation_timeout = Duration::from_secs(1);
    let gateway = Gateway::open(&config).await;
    gateway.store.ping().await.unwrap();
    proxy.set(Mode::Silent);
    let began = Instant::now();
    let error = gateway.store.reserve(&[claim("k")]).await.unwrap_err();
    assert!(error.may_have_happened(), "{error:?}");
    // A new connection is silent from its start: certainly nothing was asked.
    let error = gateway.store.reserve(&[claim("k")]).await.unwrap_err();
    assert!(matches!(error, StoreError::Unavailable(_)), "{error:?}");
    assert!(
        began.elapsed() < Duration::from_secs(10),
        "{:?}",
        began.elapsed()
    );
    proxy.set(Mode::Pass);
    insist(|| gateway.store.ping()).await;
    gateway.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_free_connection_a_caller_is_told_soon() {
    let database = postgres::database().await;
    let mut config = postgres::config(&database.url);
    config.connections_max = 1;
    config.acquire_timeout = Duration::from_millis(500);
    let gateway = Gateway::open(&config).await;
    let store = &gateway.store;
    let claim = claim("k");
    store.reserve(std::slice::from_ref(&claim)).await.unwrap();
    // Another session locks the row, so the completion holds the only connection.
    let mut conn = database.connect().await;
    let lock = "begin; select 1 from eec_routing_idempotency for update";
    sqlx::raw_sql(lock).execute(&mut conn).await.unwrap();
    let wanted = [completion(&claim)];
    let (committed, told) = tokio::join!(store.complete(&wanted), async {
        let began = Instant::now();
        let told = store.ping().await;
        assert!(began.elapsed() < Duration::from_secs(5));
        sqlx::raw_sql("rollback").execute(&mut conn).await.unwrap();
        told
    });
    assert!(matches!(told, Err(StoreError::Unavailable(_))), "{told:?}");
    assert!(committed.unwrap()[0].is_some());
    gateway.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_that_is_never_freed_is_given_up_and_nothing_is_written() {
    let database = postgres::database().await;
    let mut config = postgres::config(&database.url);
    // The server gives up at a half of this, we at the whole.
    config.operation_timeout = Duration::from_secs(3);
    let gateway = Gateway::open(&config).await;
    let claim = claim("k");
    gateway
        .store
        .reserve(std::slice::from_ref(&claim))
        .await
        .unwrap();
    let mut conn = database.connect().await;
    let lock = "begin; select 1 from eec_routing_idempotency for update";
    sqlx::raw_sql(lock).execute(&mut conn).await.unwrap();
    let error = gateway
        .store
        .complete(&[completion(&claim)])
        .await
        .unwrap_err();
    assert!(matches!(error, StoreError::Unavailable(_)), "{error:?}");
    sqlx::raw_sql("rollback").execute(&mut conn).await.unwrap();
    let found = gateway.store.look_up(&[key("k")]).await.unwrap();
    assert!(matches!(
        found[0].as_ref().unwrap().state,
        State::Pending(_)
    ));
    gateway.close().await;
}
