//! Settings of the server, the session and the network between.

use std::time::Duration;

use oncegate::domain::record::{Lease, Reserved, State, Validity};
use oncegate::store::Store as _;
use sqlx::AssertSqlSafe;

use super::{Gateway, count, reserve};
use crate::store_conformance::fixture::{claim, completion, key};
use crate::support::chaos_proxy::{ChaosProxy, Mode};
use crate::support::postgres::{self, Database};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_sessions_time_zone_changes_nothing() {
    // Far enough that every zone with summer time changes to it or back meanwhile.
    const HALF_A_YEAR: Duration = Duration::from_hours(24 * 183);
    for zone in ["Pacific/Auckland", "America/Los_Angeles"] {
        let database = postgres::database().await;
        alter(&database, &format!("timezone = '{zone}'")).await;
        let url = format!("{}?options[timezone]={zone}", database.url);
        let gateway = Gateway::open(&postgres::config(&url)).await;
        let mut claim = claim("k");
        claim.terms.lease = HALF_A_YEAR;
        claim.terms.valid_for = HALF_A_YEAR;
        assert!(matches!(
            reserve(&gateway.store, &claim).await,
            Reserved::Won(_)
        ));
        let lease = state(&gateway).await;
        assert!(
            matches!(lease, State::Pending(Lease::Held(left)) if near(left, HALF_A_YEAR)),
            "{lease:?}"
        );
        let committed = gateway.store.complete(&[completion(&claim)]).await.unwrap();
        let committed = committed[0].unwrap();
        assert_eq!(committed.valid_until - committed.created_at, HALF_A_YEAR);
        let validity = state(&gateway).await;
        assert!(
            matches!(validity, State::Completed(_, Validity::Valid(left)) if near(left, HALF_A_YEAR)),
            "{validity:?}"
        );
        gateway.close().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settings_that_weaken_the_promise_are_told() {
    let database = postgres::database().await;
    alter(&database, "synchronous_commit = off").await;
    let gateway = Gateway::open(&postgres::config(&database.url)).await;
    let warnings = gateway.store.warnings().await.unwrap();
    // Servers of tests run without fsync.
    for setting in ["synchronous_commit = off", "fsync = off"] {
        assert!(
            warnings.iter().any(|warning| warning.contains(setting)),
            "{warnings:?}"
        );
    }
    gateway.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn behind_a_pooler_that_refuses_settings_the_store_works_without_them() {
    let database = postgres::database().await;
    let proxy = ChaosProxy::start(database.address()).await;
    // What PgBouncer answers.
    proxy.set(Mode::Answer(
        b"\0options\0",
        b"E\0\0\0\x3bSFATAL\0C08P01\0Munsupported startup parameter: options\0\0",
    ));
    let gateway = Gateway::open(&postgres::config(&database.url_through(proxy.address()))).await;
    let store = &gateway.store;
    for number in 0..3 {
        let claim = claim(&format!("k{number}"));
        assert!(matches!(reserve(store, &claim).await, Reserved::Won(_)));
        assert!(store.complete(&[completion(&claim)]).await.unwrap()[0].is_some());
    }
    let mut conn = database.connect().await;
    let listening = "select count(*) from pg_stat_activity \
                     where datname = current_database() and query like 'LISTEN%'";
    assert_eq!(count(&mut conn, listening).await, 0);
    let warnings = store.warnings().await.unwrap();
    assert!(
        warnings.iter().any(|warning| warning.contains("pooler")),
        "{warnings:?}"
    );
    gateway.close().await;
}

async fn alter(database: &Database, setting: &str) {
    let mut conn = database.connect().await;
    let name: String = sqlx::query_scalar("select current_database()")
        .fetch_one(&mut conn)
        .await
        .unwrap();
    let sql = AssertSqlSafe(format!("alter database {name} set {setting}"));
    sqlx::raw_sql(sql).execute(&mut conn).await.unwrap();
}

async fn state(gateway: &Gateway) -> State {
    let found = gateway.store.look_up(&[key("k")]).await.unwrap();
    found[0].as_ref().unwrap().state
}

fn near(left: Duration, whole: Duration) -> bool {
    left <= whole && left + Duration::from_mins(1) > whole
}
