//! The outbox on PostgreSQL: what its statements cost, and what happens when replies are lost.

use std::slice::from_ref;
use std::time::Duration;

use oncegate::domain::intent::{
    ClaimWish, Destination, Finished, IntentClaimed, IntentId, IntentKey, IntentStatus,
};
use oncegate::domain::scope::TenantScope;
use oncegate::store::Store as _;
use oncegate::store::outbox::{ClaimBeat, Lane, LaneWish, OutboxStore as _};
use sqlx::{Connection as _, PgConnection};
use tokio::time::Instant;
use uuid::Uuid;

use super::{Gateway, PATIENCE, count};
use crate::store_conformance::fixture::{LONG, claim};
use crate::store_conformance::intents::{
    again, dead, delivered, doomed, given_back, sending, told, wish,
};
use crate::support::chaos_proxy::{ChaosProxy, Mode};
use crate::support::postgres;

/// Each line of what there is is more than all statements together may read.
const LOAD: [&str; 6] = [
    // Of a loud tenant.
    "insert into eec_effect_intent (tenant_scope, intent_id, run_id, seq, step, destination, \
     idempotency_key, sending, horizon_ms, due_at, first_due_at) \
     select 'loud', gen_random_uuid(), gen_random_uuid(), 1, 's', 'mail', 'k' || n, $1, 1000, \
     now() - n * interval '1 ms', now() - interval '1 hour' from generate_series(1, 20000) n",
    // Scheduled for tomorrow.
    "insert into eec_effect_intent (tenant_scope, intent_id, run_id, seq, step, destination, \
     idempotency_key, sending, horizon_ms, due_at, first_due_at) \
     select t, gen_random_uuid(), gen_random_uuid(), 1, 's', d, 'k' || n, $1, 1000, \
     now() + interval '1 day', now() from generate_series(1, 15000) n, \
     unnest(array['loud', 'quiet']) t, unnest(array['mail', 'sms']) d",
    "insert into eec_effect_intent (tenant_scope, intent_id, run_id, seq, step, destination, \
     idempotency_key, sending, horizon_ms, status, ended_at) \
     select 'loud', gen_random_uuid(), gen_random_uuid(), 1, 's', 'mail', 'k' || n, $1, 1000, \
     s, now() from generate_series(1, 10000) n, unnest(array['dead', 'completed']) s",
    // Of a quiet one.
    "insert into eec_effect_intent (tenant_scope, intent_id, run_id, seq, step, destination, \
     idempotency_key, sending, horizon_ms, due_at, first_due_at) \
     select 'quiet', gen_random_uuid(), gen_random_uuid(), 1, 's', 'mail', 'k' || n, $1, 1000, \
     now(), now() from generate_series(1, 5) n",
    "insert into eec_effect_body (tenant_scope, intent_id, part, body) \
     select tenant_scope, intent_id, 'message', $1 from eec_effect_intent where due_at <= now()",
    "insert into eec_run_attempt (tenant_scope, run_id, intent_id, stamp, try, worker, status, \
     diagnostic) \
     select tenant_scope, run_id, intent_id, gen_random_uuid(), 1, 'w', 'lost', left($1::text, 1) \
     from eec_effect_intent where due_at <= now()",
];

const READ: &str = "\
    select ((select sum(seq_tup_read) from pg_stat_user_tables \
        where relname in ('eec_effect_intent', 'eec_run_attempt', 'eec_effect_body')) \
        + (select sum(idx_tup_read) from pg_stat_user_indexes \
        where relname in ('eec_effect_intent', 'eec_run_attempt', 'eec_effect_body')))::bigint";

const TABLES: &str = "eec_effect_intent, eec_run_attempt, eec_effect_body";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_backlog_makes_the_outbox_read_more() {
    const ROUNDS: usize = 5;
    let database = postgres::database().await;
    let mut conn = database.connect().await;
    let gateway = Gateway::open(&postgres::config(&database.url)).await;
    // Plans made and statistics taken while there is nothing.
    let empty = format!("truncate {TABLES}; analyze {TABLES}");
    sqlx::raw_sql(sqlx::AssertSqlSafe(empty))
        .execute(&mut conn)
        .await
        .unwrap();
    for _ in 0..8 {
        assert_eq!(every_statement(&gateway).await, 0);
    }
    let sending = serde_json::to_vec(&sending()).unwrap();
    let mut loader = database.connect().await;
    for sql in LOAD {
        let inserted = sqlx::query(sql).bind(&sending).execute(&mut loader).await;
        inserted.unwrap();
    }
    let pid = "select pg_backend_pid()::bigint";
    let loader_pid = count(&mut loader, pid).await;
    loader.close().await.unwrap();
    until_gone(&mut conn, |pid| pid == loader_pid).await;
    let before = count(&mut conn, READ).await;
    let mut claimed = 0;
    for _ in 0..ROUNDS {
        claimed += every_statement(&gateway).await;
    }
    gateway.close().await;
    assert!(claimed >= 10 * ROUNDS, "{claimed}");
    let own_pid = count(&mut conn, pid).await;
    until_gone(&mut conn, |pid| pid != own_pid).await;
    let read = count(&mut conn, READ).await - before;
    assert!(read > 100, "{read}: the statistics were not told");
    assert!(read < 5000, "{read} rows were read");
}

/// Finds, claims, extends and ends up to ten of each lane; tells how many were claimed.
async fn every_statement(gateway: &Gateway) -> usize {
    let store = &gateway.store;
    let lanes = store.lanes(None, 100).await.unwrap();
    let names: Vec<&str> = lanes.iter().map(|lane| lane.tenant.as_str()).collect();
    assert!(
        names.is_empty() || names == ["loud", "quiet"] || names == ["loud"],
        "{names:?}"
    );
    let lane = |tenant| LaneWish {
        lane: Lane {
            tenant: TenantScope::stored(tenant),
            destination: Destination("mail".into()),
        },
        limit: 10,
    };
    let due = store.due(&[lane("loud"), lane("quiet")]).await.unwrap();
    let absent = IntentKey {
        tenant: TenantScope::stored("loud"),
        id: IntentId(Uuid::nil()),
    };
    let keys = due.iter().chain([&absent]);
    let wishes: Vec<ClaimWish> = keys.map(wish).collect();
    let claimed = store.claim(&wishes).await.unwrap();
    let won = claimed
        .iter()
        .filter(|one| matches!(one, IntentClaimed::Won(_)));
    let won = won.count();
    assert_eq!(won, due.len());
    store.claim(&wishes).await.unwrap();
    let beats: Vec<_> = wishes.iter().map(beat).collect();
    store.extend(&beats).await.unwrap();
    let ends = [delivered(), dead(), given_back(), again()];
    let ends: Vec<_> = wishes
        .iter()
        .zip(ends.iter().cycle())
        .map(|(wish, end)| told(wish, end.clone()))
        .collect();
    for _ in 0..2 {
        let finished = store.finish(&ends).await.unwrap();
        let taken = finished.iter().filter(|one| **one == Finished::Taken);
        assert_eq!(taken.count(), won);
    }
    store.find_intent(wishes[0].key.id).await.unwrap();
    won
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_and_the_end_of_a_try_whose_replies_were_lost_are_recognised() {
    let database = postgres::database().await;
    let proxy = ChaosProxy::start(database.address()).await;
    let mut config = postgres::config(&database.url_through(proxy.address()));
    config.connections_max = 1;
    config.notify = false;
    let gateway = Gateway::open(&config).await;
    let store = &gateway.store;
    let mut conn = database.connect().await;
    // Every statement prepared.
    let key = sow(&mut conn).await;
    let warm = wish(&key);
    store.claim(from_ref(&warm)).await.unwrap();
    store.claim(from_ref(&warm)).await.unwrap();
    for _ in 0..2 {
        store.finish(&[told(&warm, delivered())]).await.unwrap();
    }
    let key = sow(&mut conn).await;
    let next = wish(&key);
    proxy.set(Mode::Swallow(b""));
    let claimed = store.claim(from_ref(&next)).await.unwrap();
    assert_eq!(proxy.swallowed(), 1);
    let [IntentClaimed::Won(claimed)] = &claimed[..] else {
        panic!("its own claim was taken for another's: {claimed:?}");
    };
    assert_eq!(claimed.tries, 1);
    assert_eq!(claimed.body, b"hello"[..]);
    let open = "select count(*) from eec_run_attempt where status = 'open'";
    assert_eq!(count(&mut conn, open).await, 1);
    // The connection is another one.
    let third = sow(&mut conn).await;
    let third = wish(&third);
    for _ in 0..2 {
        store.claim(from_ref(&third)).await.unwrap();
        store.finish(&[told(&third, again())]).await.unwrap();
    }
    proxy.set(Mode::Swallow(b""));
    let finished = store.finish(&[told(&next, delivered())]).await.unwrap();
    assert_eq!(proxy.swallowed(), 2);
    assert_eq!(finished, [Finished::Taken]);
    let line = store.find_intent(key.id).await.unwrap().unwrap();
    assert_eq!(line.status, IntentStatus::Completed);
    let answers = "select count(*) from eec_effect_body where part = 'answer'";
    assert_eq!(count(&mut conn, answers).await, 2);
    gateway.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_remembered_claim_whose_reply_was_lost_is_won() {
    let database = postgres::database().await;
    let proxy = ChaosProxy::start(database.address()).await;
    let mut config = postgres::config(&database.url_through(proxy.address()));
    config.connections_max = 1;
    config.notify = false;
    let gateway = Gateway::open(&config).await;
    let asked = |name| {
        let mut asked = claim(name);
        asked.request_id = Some(oncegate::ids::audit_id());
        asked
    };
    let warm = asked("warm");
    for _ in 0..2 {
        gateway.store.reserve(from_ref(&warm)).await.unwrap();
    }
    let asked = asked("k");
    proxy.set(Mode::Swallow(b""));
    let reserved = gateway.store.reserve(from_ref(&asked)).await.unwrap();
    assert_eq!(proxy.swallowed(), 1);
    assert!(matches!(
        reserved[..],
        [oncegate::domain::record::Reserved::Won(_)]
    ));
    let id = asked.request_id.unwrap();
    let remembered = gateway.store.remembered(&asked.key.tenant, id).await;
    assert_eq!(remembered.unwrap().unwrap().token, asked.token);
    gateway.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_database_cant_keep_of_a_note_fails_no_end() {
    let database = postgres::database().await;
    let mut conn = database.connect().await;
    // As a database in another encoding would refuse it.
    let ascii = "alter table eec_run_attempt \
        add check (coalesce(diagnostic, '') || worker ~ '^[ -~]*$')";
    sqlx::raw_sql(ascii).execute(&mut conn).await.unwrap();
    let gateway = Gateway::open(&postgres::config(&database.url)).await;
    let key = sow(&mut conn).await;
    let mut wish = wish(&key);
    wish.worker = "für".into();
    let claimed = gateway.store.claim(from_ref(&wish)).await.unwrap();
    assert!(matches!(claimed[..], [IntentClaimed::Won(_)]));
    let mut end = told(&wish, dead());
    end.note.diagnostic = Some("schön".into());
    for _ in 0..2 {
        let finished = gateway.store.finish(from_ref(&end)).await.unwrap();
        assert_eq!(finished, [Finished::Taken]);
    }
    let line = gateway.store.find_intent(key.id).await.unwrap().unwrap();
    assert_eq!(line.diagnostic.as_deref(), Some("sch?n"));
    gateway.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_goes_away_leaves_no_transaction_open() {
    let database = postgres::database().await;
    let mut conn = database.connect().await;
    let gateway = Gateway::open(&postgres::config(&database.url)).await;
    let idle = "select count(*) from pg_stat_activity \
        where datname = current_database() and state like 'idle in transaction%'";
    let mut dropped = 0;
    for _ in 0..20 {
        let key = sow(&mut conn).await;
        let wish = doomed(&key);
        // Asked once, so that it is on its way, and then dropped.
        let wishes = [wish.clone()];
        let mut asking = Box::pin(gateway.store.claim(&wishes));
        dropped += u32::from(futures_util::poll!(&mut asking).is_pending());
        drop(asking);
        let ends = [told(&wish, again())];
        let mut telling = Box::pin(gateway.store.finish(&ends));
        dropped += u32::from(futures_util::poll!(&mut telling).is_pending());
        drop(telling);
        assert_eq!(count(&mut conn, idle).await, 0);
    }
    assert!(dropped > 0);
    gateway.close().await;
    assert_eq!(count(&mut conn, idle).await, 0);
}

fn beat(wish: &ClaimWish) -> ClaimBeat {
    ClaimBeat {
        key: wish.key.clone(),
        stamp: wish.stamp,
        lease: LONG,
    }
}

/// An intent that is due.
async fn sow(conn: &mut PgConnection) -> IntentKey {
    let sending = serde_json::to_vec(&sending()).unwrap();
    let sow = "with i as (insert into eec_effect_intent (tenant_scope, intent_id, run_id, seq, \
        step, destination, idempotency_key, sending, horizon_ms, due_at, first_due_at) \
        values ('acme', gen_random_uuid(), gen_random_uuid(), 1, 's', 'mail', 'k', $1, 1000, \
        now(), now()) returning tenant_scope, intent_id), \
        m as (insert into eec_effect_body (tenant_scope, intent_id, part, body) \
        select tenant_scope, intent_id, 'message', 'hello' from i) select intent_id from i";
    let id = sqlx::query_scalar(sow).bind(sending).fetch_one(conn).await;
    IntentKey {
        tenant: TenantScope::stored("acme"),
        id: IntentId(id.unwrap()),
    }
}

/// Waits until such sessions have ended: then the server knows all that they did.
async fn until_gone(conn: &mut PgConnection, such: impl Fn(i64) -> bool) {
    let pids = "select pid::bigint from pg_stat_activity \
        where datname = current_database() and backend_type = 'client backend'";
    let deadline = Instant::now() + PATIENCE;
    loop {
        let pids: Vec<i64> = sqlx::query_scalar(pids)
            .fetch_all(&mut *conn)
            .await
            .unwrap();
        if !pids.into_iter().any(&such) {
            return;
        }
        assert!(Instant::now() < deadline, "sessions are left");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
