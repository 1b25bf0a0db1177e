//! What statements cost the database, whatever its statistics say.

use std::time::Duration;

use oncegate::domain::record::{Claim, GiveUp};
use oncegate::store::{Search, Store as _};
use sqlx::PgConnection;
use tokio::time::Instant;

use super::{Gateway, PATIENCE, count};
use crate::store_conformance::fixture::{LONG, claim, completion, heartbeat, key, release};
use crate::support::postgres;

/// Rows that are there and that no statement has to read.
const ROWS: i64 = 50_000;

const LOAD: &str = "insert into eec_routing_idempotency \
    (tenant_scope, pool_id, idempotency_key, status, attempt_token, lease_expires_at) \
    select 'acme', 'payments', 'row' || n, 'pending', gen_random_uuid(), now() + interval '1 hour' \
    from generate_series(1, 50000) n; \
    insert into eec_routing_decision (tenant_scope, decision_id, pool_id, idempotency_key, \
    generation_id, decided_by, created_at, valid_until, answer_status, answer_headers) \
    select 'acme', gen_random_uuid(), 'payments', 'row' || n, gen_random_uuid(), 'gateway', now(), \
    now() + interval '1 hour', 200, '' from generate_series(1, 50000) n";

const READ: &str = "select (sum(seq_tup_read) + sum(coalesce(idx_tup_fetch, 0)))::bigint \
    from pg_stat_user_tables where relname like 'eec_routing_%'";

const WRITTEN: &str = "select (sum(n_tup_upd))::bigint from pg_stat_user_tables \
    where relname like 'eec_routing_%'";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_statement_reads_more_than_its_rows_when_statistics_are_stale() {
    let database = postgres::database().await;
    let mut conn = database.connect().await;
    let gateway = Gateway::open(&postgres::config(&database.url)).await;
    // Plans made and statistics taken while there is nothing.
    let empty = "truncate eec_routing_idempotency, eec_routing_decision; \
                 analyze eec_routing_idempotency, eec_routing_decision";
    sqlx::raw_sql(empty).execute(&mut conn).await.unwrap();
    for round in 0..8 {
        every_statement(&gateway, &format!("early{round}")).await;
    }
    sqlx::raw_sql(LOAD).execute(&mut conn).await.unwrap();
    let before = count(&mut conn, READ).await;
    let rounds = 5;
    for round in 0..rounds {
        every_statement(&gateway, &format!("late{round}")).await;
    }
    gateway.close().await;
    // Its sessions report what they did when they end.
    until(&mut conn, WRITTEN, |written| written >= 3 * KEYS * rounds).await;
    let read = count(&mut conn, READ).await - before;
    assert!(read < ROWS / 5, "{read} rows were read");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sweep_reads_what_is_settled_once_and_finds_what_is_not() {
    const SETTLED: i64 = 20_000;
    let database = postgres::database().await;
    let mut conn = database.connect().await;
    let settled = "insert into eec_routing_idempotency (tenant_scope, pool_id, idempotency_key, \
         status, decision_id, valid_until, reserved_at) \
         select 'acme', 'payments', 'row' || n, 'completed', gen_random_uuid(), \
         now() + interval '1 day', now() - interval '1 hour' + n * interval '1 ms' \
         from generate_series(1, 20000) n";
    sqlx::raw_sql(settled).execute(&mut conn).await.unwrap();
    let gateway = Gateway::open(&postgres::config(&database.url)).await;
    let before = count(&mut conn, READ).await;
    for round in 0..10 {
        let mut abandoned = claim(&format!("k{round}"));
        abandoned.terms.lease = Duration::ZERO;
        gateway.store.reserve(&[abandoned]).await.unwrap();
        let swept = gateway.store.sweep(100).await.unwrap();
        assert_eq!(swept.outcome_unknown, 1, "round {round}");
    }
    gateway.close().await;
    until(&mut conn, WRITTEN, |written| written >= 10).await;
    let read = count(&mut conn, READ).await - before;
    assert!(read < SETTLED + SETTLED / 2, "{read} rows were read");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_completion_touches_no_index() {
    const BATCH: i64 = 64;
    let database = postgres::database().await;
    let gateway = Gateway::open(&postgres::config(&database.url)).await;
    let total = 20 * BATCH;
    // Owners come and go: at each moment a few hundred are at work.
    let mut at_work: std::collections::VecDeque<Vec<Claim>> = std::collections::VecDeque::new();
    for batch in 0..total / BATCH {
        let claims: Vec<Claim> = (0..BATCH)
            .map(|n| claim(&format!("b{batch}k{n}")))
            .collect();
        gateway.store.reserve(&claims).await.unwrap();
        at_work.push_back(claims);
        if at_work.len() > 4 {
            let done: Vec<_> = at_work
                .pop_front()
                .unwrap()
                .iter()
                .map(completion)
                .collect();
            gateway.store.complete(&done).await.unwrap();
        }
    }
    gateway.close().await;
    let mut conn = database.connect().await;
    let updates = total - 4 * BATCH;
    until(&mut conn, WRITTEN, |written| written >= updates).await;
    let hot = "select n_tup_hot_upd from pg_stat_user_tables \
               where relname = 'eec_routing_idempotency'";
    let hot = count(&mut conn, hot).await;
    assert!(
        hot * 100 >= updates * 95,
        "{hot} of {updates} updates touched no index"
    );
}

/// Keys of one round.
const KEYS: i64 = 10;

async fn every_statement(gateway: &Gateway, round: &str) {
    let store = &gateway.store;
    let claims: Vec<Claim> = (0..KEYS).map(|n| claim(&format!("{round}k{n}"))).collect();
    store.reserve(&claims).await.unwrap();
    store.reserve(&claims).await.unwrap();
    let beats: Vec<_> = claims.iter().map(|claim| heartbeat(claim, LONG)).collect();
    store.heartbeat(&beats).await.unwrap();
    store.mark_awaited(&claims[0].key).await.unwrap();
    let releases: Vec<_> = claims.iter().map(|c| release(c, GiveUp::NotSent)).collect();
    for _ in 0..2 {
        store.release(&releases).await.unwrap();
    }
    let again = claim(&format!("{round}k0"));
    store
        .reclaim(&again, claims[0].token)
        .await
        .unwrap()
        .unwrap();
    assert!(!store.sweep_one(&again.key, again.token).await.unwrap());
    let completions: Vec<_> = claims.iter().map(completion).collect();
    for _ in 0..2 {
        let committed = store.complete(&completions).await.unwrap();
        assert!(committed[1..].iter().all(Option::is_some));
    }
    store
        .decision(&again.key.tenant, completions[1].decision_id)
        .await
        .unwrap()
        .unwrap();
    let keys: Vec<_> = claims.iter().map(|claim| claim.key.clone()).collect();
    store.look_up(&keys).await.unwrap();
    store.purge(100).await.unwrap();
    let unknown = Search {
        status: Some("outcome_unknown".into()),
        limit: 10,
        ..Search::default()
    };
    store.find(&unknown).await.unwrap();
    let page = Search {
        tenant: Some("acme".into()),
        after: Some(key("row100")),
        limit: 10,
        ..Search::default()
    };
    store.find(&page).await.unwrap();
}

async fn until(conn: &mut PgConnection, sql: &'static str, is: impl Fn(i64) -> bool) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let found = count(conn, sql).await;
        if is(found) {
            return;
        }
        assert!(Instant::now() < deadline, "still {found}: {sql}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
