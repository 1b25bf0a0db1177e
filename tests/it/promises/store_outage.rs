//! The store goes away: before anything was sent nothing is sent, and afterwards nothing is lost.

use std::time::{Duration, Instant};

use sqlx::Executor as _;

use crate::support::chaos_proxy::{ChaosProxy, Mode};
use crate::support::client::{Answer, send_all};
use crate::support::clock::{eventually, let_pass};
use crate::support::gateway::{Bench, Setup};
use crate::support::rows::{Database, sqlite};
use crate::support::upstream::{Gate, Reply};

on_postgres!(
    without_the_store_nothing_is_sent,
    a_silent_store_is_no_store,
    a_route_may_pass_without_the_store_what_this_gateway_knows_nothing_of,
    a_lost_acknowledgement_is_no_conflict,
    an_answer_that_could_not_be_recorded_is_given_and_recorded_later,
    a_waiter_is_not_given_an_unrecorded_answer,
    a_short_outage_aborts_no_call,
    a_cached_decision_is_trusted_for_a_while_only,
    a_small_pool_queues_and_never_fails,
    a_read_only_store_is_refused_and_used_again_when_it_is_writable,
    terminated_connections_are_replaced,
    a_crash_of_the_server_under_load_runs_nothing_twice,
);

fn behind(bench: &Bench, proxy: &ChaosProxy) -> Setup {
    let Database::Postgres(database) = &bench.database else {
        panic!("on PostgreSQL");
    };
    let times = "acquire_timeout = \"500ms\"\noperation_timeout = \"1s\"";
    let setup = bench.gateway().section("store", times);
    setup.store_url(&database.url_through(proxy.address()))
}

async fn proxy(bench: &Bench) -> ChaosProxy {
    let Database::Postgres(database) = &bench.database else {
        panic!("on PostgreSQL");
    };
    ChaosProxy::start(database.address()).await
}

#[track_caller]
fn assert_unavailable(answer: &Answer) {
    answer.assert_problem(503, "store-unavailable", "refused");
    assert!(answer.retry_after().is_some(), "{answer:?}");
}

async fn without_the_store_nothing_is_sent(bench: Bench) {
    let proxy = proxy(&bench).await;
    let gateway = behind(&bench, &proxy).start().await;
    gateway
        .post("/pay")
        .key("before")
        .send()
        .await
        .assert_is(200, "executed");
    proxy.set(Mode::Reset);
    for key in ["a", "b"] {
        let asked = Instant::now();
        let answer = gateway.post("/pay").key(key).send().await;
        assert_unavailable(&answer);
        assert!(
            asked.elapsed() < Duration::from_secs(3),
            "{:?}",
            asked.elapsed()
        );
        assert_eq!(bench.upstream.executions(key), 0);
    }
    gateway.post("/pay").send().await.assert_is(200, "");
    gateway
        .call("GET", "/pay")
        .key("a")
        .send()
        .await
        .assert_is(200, "");
    eventually("it says that it is not ready", async || {
        (!gateway.is_ready().await).then_some(())
    })
    .await;
    proxy.set(Mode::Pass);
    eventually("it works again by itself", async || {
        let answer = gateway.post("/pay").key("a").send().await;
        (answer.idempotency() == "executed").then_some(())
    })
    .await;
    gateway.ready().await;
}

async fn a_silent_store_is_no_store(bench: Bench) {
    let proxy = proxy(&bench).await;
    let gateway = behind(&bench, &proxy).start().await;
    gateway
        .post("/pay")
        .key("before")
        .send()
        .await
        .assert_is(200, "executed");
    proxy.set(Mode::Silent);
    let asked = Instant::now();
    let calls = (0..10).map(|n| gateway.post("/pay").key(format!("k{n}")));
    for answer in send_all(calls).await {
        assert_unavailable(&answer);
    }
    assert!(
        asked.elapsed() < Duration::from_secs(5),
        "{:?}",
        asked.elapsed()
    );
    assert_eq!(bench.upstream.requests().len(), 1);
    // What was asked meanwhile may have happened: the claims are given up, and no key is stuck.
    proxy.set(Mode::Pass);
    for n in 0..10 {
        eventually("the key is free", async || {
            let answer = gateway.post("/pay").key(format!("k{n}")).send().await;
            (answer.status == 200).then_some(())
        })
        .await;
    }
}

async fn a_route_may_pass_without_the_store_what_this_gateway_knows_nothing_of(bench: Bench) {
    bench.allow_reruns();
    let proxy = proxy(&bench).await;
    let setup = behind(&bench, &proxy).route("on_store_down = \"pass\"");
    let gateway = setup.start().await;
    let gate = Gate::closed();
    bench
        .upstream
        .on_post("/slow")
        .reply(Reply::new(201).hold(&gate));
    let known = gateway.post("/pay").key("known").send().await;
    known.assert_is(200, "executed");
    let owner = gateway.post("/slow").key("owned").begin();
    bench
        .upstream
        .until(|state| state.executions("owned") == 1)
        .await;
    proxy.set(Mode::Reset);

    let fresh = gateway.post("/pay").key("fresh").send().await;
    fresh.assert_is(200, "bypassed");
    assert!(fresh.decision().is_none());
    let again = gateway.post("/pay").key("known").send().await;
    again.assert_is(200, "replayed");
    assert_eq!(again.kept(), known.kept());
    let owned = gateway
        .post("/slow")
        .key("owned")
        .header("Prefer", "wait=1")
        .send()
        .await;
    assert_ne!(owned.idempotency(), "bypassed", "{owned:?}");
    assert_eq!(bench.upstream.executions("owned"), 1);

    proxy.set(Mode::Pass);
    gate.open();
    assert_eq!(owner.answer().await.status, 201);
}

/// The reserve's or the complete's commit happened, and its acknowledgement was lost.
async fn a_lost_acknowledgement_is_no_conflict(bench: Bench) {
    let proxy = proxy(&bench).await;
    let gate = Gate::closed();
    bench
        .upstream
        .on_post("/slow")
        .reply(Reply::new(201).hold(&gate));
    let gateway = behind(&bench, &proxy).route("lease = \"5s\"").start().await;
    gateway
        .post("/pay")
        .key("warm")
        .send()
        .await
        .assert_is(200, "executed");

    for n in 0..5 {
        proxy.set(Mode::Swallow(b""));
        let key = format!("reserve{n}");
        let answer = gateway.post("/pay").key(&key).send().await;
        answer.assert_is(200, "executed");
        assert_eq!(bench.upstream.executions(&key), 1);
        gateway
            .post("/pay")
            .key(&key)
            .send()
            .await
            .assert_is(200, "replayed");
    }

    let owner = gateway.post("/slow").key("complete").begin();
    bench
        .upstream
        .until(|state| state.executions("complete") == 1)
        .await;
    let before = proxy.swallowed();
    proxy.set(Mode::Swallow(b""));
    gate.open();
    owner.answer().await.assert_is(201, "executed");
    eventually("an acknowledgement was lost", async || {
        (proxy.swallowed() > before).then_some(())
    })
    .await;
    let again = gateway.post("/slow").key("complete").send().await;
    again.assert_is(201, "replayed");
    assert_eq!(bench.database.count("eec_routing_decision").await, 7);
}

async fn an_answer_that_could_not_be_recorded_is_given_and_recorded_later(bench: Bench) {
    let proxy = proxy(&bench).await;
    let gate = Gate::closed();
    bench
        .upstream
        .on_post("/pay")
        .reply(Reply::new(201).body("done").hold(&gate));
    let gateway = behind(&bench, &proxy).start().await;
    let first = gateway.post("/pay").key("k").begin();
    bench
        .upstream
        .until(|state| state.executions("k") == 1)
        .await;
    proxy.set(Mode::Reset);
    gate.open();
    let first = first.answer().await;
    first.assert_is(201, "unrecorded");
    assert_eq!(first.text(), "done");
    assert!(first.decision().is_none());
    // Longer than the lease: another gateway, or this one, may have swept the record meanwhile.
    let_pass(Duration::from_millis(1500)).await;
    proxy.set(Mode::Pass);
    eventually("it is recorded", async || {
        (bench.database.status("k").await == "completed").then_some(())
    })
    .await;
    let again = gateway.post("/pay").key("k").send().await;
    again.assert_is(201, "replayed");
    assert_eq!(again.text(), "done");
    let metrics = gateway.metrics().await;
    assert!(metrics.sum("oncegate_unrecorded_total", &[]) > 0.5);
}

async fn a_waiter_is_not_given_an_unrecorded_answer(bench: Bench) {
    let proxy = proxy(&bench).await;
    let gate = Gate::closed();
    bench
        .upstream
        .on_post("/pay")
        .reply(Reply::new(201).body("done").hold(&gate));
    let gateway = behind(&bench, &proxy).route("wait = \"2s\"").start().await;
    let first = gateway.post("/pay").key("k").begin();
    bench
        .upstream
        .until(|state| state.executions("k") == 1)
        .await;
    let waiter = gateway.post("/pay").key("k").begin();
    gateway.until_parked(1).await;
    proxy.set(Mode::Reset);
    gate.open();
    first.answer().await.assert_is(201, "unrecorded");
    let waiter = waiter.answer().await;
    assert!(matches!(waiter.status, 409 | 503), "{waiter:?}");
    assert!(waiter.retry_after().is_some(), "{waiter:?}");
    proxy.set(Mode::Pass);
    eventually("it is recorded", async || {
        let answer = gateway.post("/pay").key("k").send().await;
        (answer.status == 201).then_some(())
    })
    .await;
}

/// A failed heartbeat never aborts a call.
async fn a_short_outage_aborts_no_call(bench: Bench) {
    let proxy = proxy(&bench).await;
    let gate = Gate::closed();
    bench
        .upstream
        .on_post("/pay")
        .reply(Reply::new(201).hold(&gate));
    let gateway = behind(&bench, &proxy).start().await;
    let first = gateway.post("/pay").key("k").begin();
    bench
        .upstream
        .until(|state| state.executions("k") == 1)
        .await;
    proxy.set(Mode::Reset);
    let_pass(Duration::from_millis(1500)).await;
    proxy.set(Mode::Pass);
    assert!(!first.is_over());
    eventually("the store is back", async || {
        gateway.is_ready().await.then_some(())
    })
    .await;
    gate.open();
    first.answer().await.assert_is(201, "executed");
    let again = gateway.post("/pay").key("k").send().await;
    again.assert_is(201, "replayed");
}

async fn a_cached_decision_is_trusted_for_a_while_only(bench: Bench) {
    let proxy = proxy(&bench).await;
    let setup = behind(&bench, &proxy).section("limits", "cache_trust = \"2s\"");
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
    proxy.set(Mode::Reset);
    let cut = Instant::now();
    gateway
        .post("/pay")
        .key("k")
        .send()
        .await
        .assert_is(200, "replayed");
    // Trusted or not, a mismatch is seen.
    let other = gateway.post("/pay").key("k").json("{}").send().await;
    other.assert_problem(422, "key-reused", "mismatch");
    let answer = eventually("it is trusted no more", async || {
        let answer = gateway.post("/pay").key("k").send().await;
        (answer.status != 200).then_some(answer)
    })
    .await;
    assert_unavailable(&answer);
    assert!(
        cut.elapsed() < Duration::from_secs(5),
        "{:?}",
        cut.elapsed()
    );
}

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
    let gateway = bench.gateway().section("store", store).start().await;
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
    let set = |value: &str| {
        format!(
            "do $$ begin execute format('alter database %I set default_transaction_read_only = {value}',
             current_database()); end $$;
             select pg_terminate_backend(pid) from pg_stat_activity
             where datname = current_database() and pid <> pg_backend_pid()"
        )
    };
    run(&bench, &set("on")).await;
    let answer = eventually("a reserve is refused", async || {
        let answer = gateway.post("/pay").key("k").send().await;
        (answer.status != 200).then_some(answer)
    })
    .await;
    assert_unavailable(&answer);
    assert_eq!(bench.upstream.executions("k"), 0);
    // The operator's own session must be allowed to write.
    run(
        &bench,
        &format!("set default_transaction_read_only = off; {}", set("off")),
    )
    .await;
    eventually("it works again by itself", async || {
        let answer = gateway.post("/pay").key("k").send().await;
        (answer.status == 200).then_some(())
    })
    .await;
}

async fn run(bench: &Bench, sql: &str) {
    let Database::Postgres(database) = &bench.database else {
        panic!("on PostgreSQL");
    };
    let mut connection = database.connect().await;
    let sql = sqlx::raw_sql(sqlx::AssertSqlSafe(sql.to_owned()));
    sql.execute(&mut connection)
        .await
        .expect("the statements run");
}

async fn terminated_connections_are_replaced(bench: Bench) {
    let gateway = bench.gateway().start().await;
    for n in 0..5 {
        let terminate = "select pg_terminate_backend(pid) from pg_stat_activity
            where datname = current_database() and pid <> pg_backend_pid()";
        run(&bench, terminate).await;
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
    let begun: Vec<_> = calls.map(|call| call.begin()).collect();
    bench
        .upstream
        .until(|state| state.requests.len() > 20)
        .await;
    tokio::task::block_in_place(|| server.crash());
    let_pass(Duration::from_millis(300)).await;
    tokio::task::block_in_place(|| server.start_again());
    for (n, call) in begun.into_iter().enumerate() {
        let first = call.answer().await;
        let typed = matches!(first.status, 200 | 503 | 409);
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
