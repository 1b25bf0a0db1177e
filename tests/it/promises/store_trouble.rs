//! Stores that are crowded, demoted, restarted or locked: refused while it lasts, used again after.

use std::time::{Duration, Instant};

use sqlx::Executor as _;

use super::store_outage::assert_unavailable;
use crate::support::client::{Call, send_all};
use crate::support::clock::{eventually, let_pass};
use crate::support::gateway::Bench;
use crate::support::rows::{Database, sqlite};
use crate::support::upstream::Reply;

on_postgres!(
    a_small_pool_queues_and_never_fails,
    a_read_only_store_is_refused_and_used_again_when_it_is_writable,
    terminated_connections_are_replaced,
    a_crash_of_the_server_under_load_runs_nothing_twice,
);

/// What was released or purged anywhere is so everywhere, within the time of trust.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_purged_decision_is_forgotten_within_the_time_of_trust() {
    let bench = super::on_postgres().await;
    bench.allow_reruns();
    let setup = bench.gateway().section("limits", "cache_trust = \"1s\"");
    let gateway = setup.start().await;
    gateway
        .post("/pay")
        .key("k")
        .send()
        .await
        .assert_is(200, "executed");
    gateway
        .post("/pay")
        .key("k")
        .send()
        .await
        .assert_is(200, "replayed");
    bench
        .database
        .execute("delete from eec_routing_decision")
        .await;
    bench
        .database
        .execute("delete from eec_routing_idempotency")
        .await;
    let start = Instant::now();
    eventually("it is executed anew", async || {
        let answer = gateway.post("/pay").key("k").send().await;
        (answer.idempotency() == "executed").then_some(())
    })
    .await;
    assert!(
        start.elapsed() < Duration::from_secs(4),
        "{:?}",
        start.elapsed()
    );
}

async fn a_small_pool_queues_and_never_fails(bench: Bench) {
    let store = "connections_max = 2\nacquire_timeout = \"5s\"";
    let setup = bench.gateway().section("store", store);
    let gateway = setup.route("lease = \"10s\"").start().await;
    let calls = (0..400).map(|n| gateway.post("/pay").key(format!("k{}", n / 2)));
    for answer in send_all(calls).await {
        let overloaded = answer.status == 503 && answer.retry_after().is_some();
        assert!(answer.status == 200 || overloaded, "{answer:?}");
    }
}

/// A primary that was demoted, and comes back: no restart is needed.
async fn a_read_only_store_is_refused_and_used_again_when_it_is_writable(bench: Bench) {
    let gateway = bench.gateway().start().await;
    gateway
        .post("/pay")
        .key("before")
        .send()
        .await
        .assert_is(200, "executed");
    run(&bench, &[&read_only("on")]).await;
    let mut tries = 0;
    let (key, answer) = eventually("a reserve is refused", async || {
        tries += 1;
        let key = format!("k{tries}");
        let answer = gateway.post("/pay").key(&key).send().await;
        (answer.status != 200).then_some((key, answer))
    })
    .await;
    assert_unavailable(&answer);
    assert_eq!(bench.upstream.executions(&key), 0);
    // The operator's own session must be allowed to write.
    let writable = "set session characteristics as transaction read write";
    run(&bench, &[writable, &read_only("off")]).await;
    eventually("it works again by itself", async || {
        let answer = gateway.post("/pay").key(&key).send().await;
        (answer.status == 200).then_some(())
    })
    .await;
}

/// Runs statements on one connection.
/// Runs statements on one connection.
pub async fn run(bench: &Bench, statements: &[&str]) {
    let Database::Postgres(database) = &bench.database else {
        panic!("on PostgreSQL");
    };
    let mut connection = database.connect().await;
    for sql in statements {
        let sql = sqlx::raw_sql(sqlx::AssertSqlSafe((*sql).to_owned()));
        let ran = sql.execute(&mut connection).await;
        ran.expect("the statement runs");
    }
}

async fn terminated_connections_are_replaced(bench: Bench) {
    let gateway = bench.gateway().start().await;
    for n in 0..5 {
        let terminate = "select pg_terminate_backend(pid) from pg_stat_activity
            where datname = current_database() and pid <> pg_backend_pid()";
        run(&bench, &[terminate]).await;
        let answer = eventually("it works again", async || {
            let answer = gateway.post("/pay").key(format!("k{n}")).send().await;
            if answer.status != 200 {
                assert_unavailable(&answer);
            }
            (answer.status == 200).then_some(answer)
        })
        .await;
        let again = gateway.post("/pay").key(format!("k{n}")).send().await;
        again.assert_is(200, "replayed");
        assert_eq!(again.kept(), answer.kept());
    }
}

async fn a_crash_of_the_server_under_load_runs_nothing_twice(bench: Bench) {
    let server = crate::support::postgres::private().await;
    let database = server.database().await;
    let setup = bench.gateway().store_url(&database.url);
    let gateway = setup
        .section("store", "acquire_timeout = \"500ms\"")
        .start()
        .await;
    bench
        .upstream
        .on_post("/pay")
        .reply(Reply::new(200).delay(Duration::from_millis(20)));
    let calls = (0..200).map(|n| gateway.post("/pay").key(format!("k{n}")));
    let begun: Vec<_> = calls.map(Call::begin).collect();
    bench
        .upstream
        .until(|state| state.requests.len() > 20)
        .await;
    tokio::task::block_in_place(|| server.crash());
    let_pass(Duration::from_millis(300)).await;
    tokio::task::block_in_place(|| server.start_again());
    for (n, call) in begun.into_iter().enumerate() {
        let first = call.answer().await;
        let typed = first.status == 200 || !first.problem().is_empty();
        assert!(typed, "{first:?}");
        let last = eventually("the key comes to an end", async || {
            let answer = gateway.post("/pay").key(format!("k{n}")).send().await;
            let ended = answer.status == 200 || answer.problem() == "outcome-unknown";
            ended.then_some(answer)
        })
        .await;
        if first.status == 200 {
            assert_eq!((last.status, last.text()), (200, first.text()));
        }
    }
}

/// SQLite's outage: another process holds the file's write lock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_locked_file_is_no_store() {
    let bench = super::on_sqlite().await;
    let times = "operation_timeout = \"1s\"\nacquire_timeout = \"500ms\"";
    let gateway = bench.gateway().section("store", times).start().await;
    gateway
        .post("/pay")
        .key("before")
        .send()
        .await
        .assert_is(200, "executed");
    let Database::Sqlite(path) = &bench.database else {
        panic!("on SQLite");
    };
    let mut other = sqlite(path).await;
    other.execute("begin immediate").await.expect("the lock");
    let asked = Instant::now();
    let answer = gateway.post("/pay").key("k").send().await;
    assert_unavailable(&answer);
    assert!(
        asked.elapsed() < Duration::from_secs(8),
        "{:?}",
        asked.elapsed()
    );
    gateway.post("/pay").send().await.assert_is(200, "");
    other.execute("rollback").await.expect("the lock is let go");
    eventually("it works again by itself", async || {
        let answer = gateway.post("/pay").key("k").send().await;
        (answer.status == 200).then_some(())
    })
    .await;
    assert_eq!(bench.upstream.executions("k"), 1);
}

/// What makes the database read-only (`on`) or writable again (`off`), and ends its sessions.
pub fn read_only(value: &str) -> String {
    format!(
        "do $$ begin execute format('alter database %I set default_transaction_read_only = {value}',
             current_database()); end $$;
         select pg_terminate_backend(pid) from pg_stat_activity
         where datname = current_database() and pid <> pg_backend_pid()"
    )
}
