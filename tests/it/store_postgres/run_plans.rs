//! What statements about runs cost the database, whatever its statistics say.

use std::time::Duration;

use oncegate::config::Keep;
use oncegate::domain::intent::{IntentStatus, Order};
use oncegate::domain::run::{RunKey, RunStatus, TickCommitted};
use oncegate::ids;
use oncegate::store::Store as _;
use oncegate::store::runs::{DuePlace, RunSearch, RunStore as _};
use sqlx::PgConnection;
use tokio::time::Instant;

use super::{Gateway, PATIENCE, count};
use crate::store_conformance::fixture::{LONG, claim};
use crate::store_conformance::run_fixture::{caused_by, changing, on_loaded, run_of, starting};
use crate::support::postgres;

/// Rows of each table that are there and that no statement has to read.
const ROWS: i64 = 50_000;

const LOAD: &str = "insert into eec_run (tenant_scope, run_id, status, workflow, pool_id, \
    idempotency_key, definition, input, progress, due_at, ended_at) \
    select 'acme', gen_random_uuid(), case when n % 2 = 0 then 'waiting' else 'completed' end, \
    'w', 'payments', 'row' || n, '', '', '', \
    case when n % 2 = 0 then now() + interval '1 hour' end, \
    case when n % 2 = 1 then now() end from generate_series(1, 50000) n; \
    insert into eec_run_transition (tenant_scope, run_id, seq, record_version, tick_id, kind) \
    select tenant_scope, run_id, 1, 1, run_id, 'x' from eec_run where workflow = 'w'; \
    insert into eec_effect_intent (tenant_scope, intent_id, run_id, seq, step, destination, \
    idempotency_key, sending, horizon_ms, status, due_at, ended_at) \
    select tenant_scope, gen_random_uuid(), run_id, 1, 's', 'd', 'k', '', 1, \
    case when status = 'waiting' then 'pending' else 'dead' end, due_at, ended_at from eec_run \
    where workflow = 'w'; \
    insert into eec_effect_body (tenant_scope, intent_id, part, body) \
    select tenant_scope, intent_id, 'message', '' from eec_effect_intent where destination = 'd'; \
    insert into eec_run_attempt (tenant_scope, run_id, intent_id, stamp, try, worker) \
    select tenant_scope, run_id, intent_id, intent_id, 1, 'w' from eec_effect_intent \
    where destination = 'd'";

const READ: &str = "select (sum(seq_tup_read) + sum(coalesce(idx_tup_fetch, 0)))::bigint \
    from pg_stat_user_tables where relname like 'eec_run%' or relname like 'eec_effect_%'";

const WRITTEN: &str = "select (sum(n_tup_upd))::bigint from pg_stat_user_tables \
    where relname = 'eec_run'";

const RUNS: i64 = 10;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_statement_about_runs_reads_more_than_its_rows_when_statistics_are_stale() {
    let database = postgres::database().await;
    let mut conn = database.connect().await;
    let gateway = Gateway::open(&postgres::config(&database.url)).await;
    let empty = "analyze eec_run, eec_run_transition, eec_effect_intent, eec_effect_body, \
                 eec_run_attempt";
    sqlx::raw_sql(empty).execute(&mut conn).await.unwrap();
    every_statement(&gateway, "early").await;
    sqlx::raw_sql(LOAD).execute(&mut conn).await.unwrap();
    let before = count(&mut conn, READ).await;
    let rounds = 5;
    for round in 0..rounds {
        every_statement(&gateway, &format!("late{round}")).await;
    }
    gateway.close().await;
    // Its sessions report what they did when they end.
    until(&mut conn, |written| written >= RUNS * (rounds + 1)).await;
    let read = count(&mut conn, READ).await - before;
    assert!(read < ROWS / 5, "{read} rows were read");
}

async fn every_statement(gateway: &Gateway, round: &str) {
    let store = &gateway.store;
    let claims: Vec<_> = (0..RUNS).map(|n| claim(&format!("{round}k{n}"))).collect();
    store.reserve(&claims).await.unwrap();
    let decisions: Vec<_> = claims.iter().map(|claim| starting(claim, 3)).collect();
    store.complete(&decisions).await.unwrap();
    let keys: Vec<RunKey> = decisions.iter().map(run_of).collect();
    let loaded = store.load_runs(&keys).await.unwrap();
    let mut next = caused_by(ids::stamp());
    next.changes = changing(1, Some(IntentStatus::Pending), Order::Withdraw).changes;
    let commits: Vec<_> = loaded
        .iter()
        .map(|loaded| on_loaded(loaded.as_ref().unwrap(), next.clone()))
        .collect();
    for _ in 0..2 {
        let done = store.commit_ticks(&commits).await.unwrap();
        assert!(done.iter().all(|done| *done == TickCommitted::Committed));
    }
    let due = store.runs_due(&DuePlace::default(), 100).await.unwrap();
    assert!(due.keys.contains(&keys[0]));
    assert!(!store.is_applied(&keys[0], ids::stamp()).await.unwrap());
    assert!(store.find_run(keys[0].id).await.unwrap().is_some());
    assert!(store.show_run(&keys[0]).await.unwrap().is_some());
    assert!(store.run_answer(&keys[0]).await.unwrap().is_some());
    store.transitions(&keys[0], 1, 10).await.unwrap();
    store.attempts(&keys[0], 10).await.unwrap();
    for status in [None, Some(RunStatus::Stuck)] {
        let search = RunSearch {
            tenant: Some("acme".into()),
            status,
            limit: 10,
            after: Some(keys[0].clone()),
            ..RunSearch::default()
        };
        store.find_runs(&search).await.unwrap();
    }
    let keep = Keep {
        runs: LONG,
        dead: LONG,
    };
    store.purge_runs(keep, 100).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ticks_of_two_gateways_never_wait_for_each_other_in_a_circle() {
    let database = postgres::database().await;
    let gateways = [
        Gateway::open(&postgres::config(&database.url)).await,
        Gateway::open(&postgres::config(&database.url)).await,
    ];
    let claims: Vec<_> = (0..20).map(|n| claim(&format!("k{n}"))).collect();
    gateways[0].store.reserve(&claims).await.unwrap();
    let decisions: Vec<_> = claims.iter().map(|claim| starting(claim, 5)).collect();
    gateways[0].store.complete(&decisions).await.unwrap();
    let keys: Vec<RunKey> = decisions.iter().map(run_of).collect();
    let work = async |gateway: &Gateway, reverse: bool| {
        let mut committed = 0;
        for _ in 0..20 {
            let loaded = gateway.store.load_runs(&keys).await.unwrap();
            let mut commits: Vec<_> = loaded
                .iter()
                .flatten()
                .map(|loaded| {
                    let mut next = changing(1, None, Order::Arm);
                    next.changes.extend(changing(2, None, Order::Arm).changes);
                    on_loaded(loaded, next)
                })
                .collect();
            if reverse {
                commits.reverse();
            }
            let done = gateway.store.commit_ticks(&commits).await.unwrap();
            committed += done
                .iter()
                .filter(|d| **d == TickCommitted::Committed)
                .count();
        }
        committed
    };
    let (a, b) = tokio::join!(work(&gateways[0], false), work(&gateways[1], true));
    let loaded = gateways[0].store.load_runs(&keys).await.unwrap();
    let versions: i64 = loaded
        .iter()
        .flatten()
        .map(|l| l.run.record_version - 1)
        .sum();
    assert_eq!(versions, i64::try_from(a + b).unwrap());
    let mut conn = database.connect().await;
    let deadlocks = "select deadlocks from pg_stat_database where datname = current_database()";
    assert_eq!(count(&mut conn, deadlocks).await, 0);
    for gateway in gateways {
        gateway.close().await;
    }
}

async fn until(conn: &mut PgConnection, is: impl Fn(i64) -> bool) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let found = count(conn, WRITTEN).await;
        if is(found) {
            return;
        }
        assert!(Instant::now() < deadline, "still {found}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
