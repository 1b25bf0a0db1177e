//! The store goes away: before anything was sent nothing is sent, and afterwards nothing is lost.

use std::time::{Duration, Instant};

use crate::support::chaos_proxy::{ChaosProxy, Mode};
use crate::support::client::{Answer, send_all};
use crate::support::clock::{AT_ONCE, eventually, let_pass};
use crate::support::gateway::{Bench, LEASE, Setup};
use crate::support::rows::Database;
use crate::support::upstream::{Gate, Reply};

on_postgres!(
    without_the_store_nothing_is_sent,
    a_silent_store_is_no_store,
    a_route_may_pass_without_the_store_what_this_gateway_knows_nothing_of,
    a_route_never_passes_what_this_gateway_has_seen_in_the_store,
    nobody_waits_longer_than_the_route_says_while_the_store_is_gone,
    a_lost_acknowledgement_is_no_conflict,
    an_answer_that_could_not_be_recorded_is_given_and_recorded_later,
    a_drain_waits_for_what_is_not_recorded_yet,
    what_waits_to_be_recorded_is_bounded,
    a_waiter_is_not_given_an_unrecorded_answer,
    a_short_outage_aborts_no_call,
    an_owner_that_lost_its_lease_before_sending_sends_nothing,
    a_cached_decision_is_trusted_for_a_while_only,
);

pub fn behind(bench: &Bench, proxy: &ChaosProxy) -> Setup {
    let Database::Postgres(database) = &bench.database else {
        panic!("on PostgreSQL");
    };
    let times = "acquire_timeout = \"500ms\"\noperation_timeout = \"1s\"";
    let setup = bench.gateway().section("store", times);
    setup.store_url(&database.url_through(proxy.address()))
}

pub async fn proxy(bench: &Bench) -> ChaosProxy {
    let Database::Postgres(database) = &bench.database else {
        panic!("on PostgreSQL");
    };
    ChaosProxy::start(database.address()).await
}

#[track_caller]
pub fn assert_unavailable(answer: &Answer) {
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
        assert!(asked.elapsed() < AT_ONCE, "{:?}", asked.elapsed());
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
    let gateway = setup.section("store", "notify = false").start().await;
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

    // A connection that breaks under a reserve leaves it open whether it happened: such a key is
    // known. Once no connection is left, nothing is asked and nothing is known.
    let mut tries = 0;
    let fresh = eventually("a fresh key is passed", async || {
        tries += 1;
        let key = format!("fresh{tries}");
        let answer = gateway.post("/pay").key(&key).send().await;
        if answer.idempotency() != "bypassed" {
            assert_unavailable(&answer);
            assert_eq!(bench.upstream.executions(&key), 0);
            let again = gateway.post("/pay").key(&key).send().await;
            assert_ne!(again.idempotency(), "bypassed", "{again:?}");
            return None;
        }
        Some(answer)
    })
    .await;
    assert_eq!((fresh.status, fresh.decision()), (200, None));
    let again = gateway.post("/pay").key("known").send().await;
    again.assert_is(200, "replayed");
    assert_eq!(again.kept(), known.kept());
    let duplicate = gateway
        .post("/slow")
        .key("owned")
        .header("Prefer", "wait=1")
        .send()
        .await;
    assert_ne!(duplicate.idempotency(), "bypassed", "{duplicate:?}");
    assert_eq!(bench.upstream.executions("owned"), 1);

    proxy.set(Mode::Pass);
    gate.open();
    assert_eq!(owner.answer().await.status, 201);
}

/// The store refuses claims at the moment in which they follow a look at a record: what was there is
/// known, so nothing is passed.
async fn a_route_never_passes_what_this_gateway_has_seen_in_the_store(bench: Bench) {
    const REFUSAL: &[u8] = b"E\0\0\0\x23SERROR\0VERROR\0C57014\0Mrefused\0\0Z\0\0\0\x05I";
    let insert = |key: &str, status: &str| {
        format!(
            "insert into eec_routing_idempotency (tenant_scope, pool_id, idempotency_key, status)
             values ('acme', 'main', '{key}', '{status}')"
        )
    };
    let proxy = proxy(&bench).await;
    let setup = behind(&bench, &proxy).route("on_store_down = \"pass\"");
    let gateway = setup.start().await;

    // Only the statement that reclaims is refused.
    let failed = insert("failed", "failed_before_commit");
    bench.database.execute(&failed).await;
    proxy.set(Mode::Answer(b"set status = 'pending'", REFUSAL));
    assert_unavailable(&gateway.post("/pay").key("failed").send().await);
    assert_eq!(bench.upstream.executions("failed"), 0);
    proxy.set(Mode::Pass);

    // Only what carries a claim's terms is refused, so looking goes on.
    bench.database.execute(&insert("owned", "pending")).await;
    let waiter = gateway.post("/pay").key("owned").begin();
    gateway.until_parked(1).await;
    proxy.set(Mode::Answer(b"\0\0\0\x04hold", REFUSAL));
    let fresh = gateway.post("/pay").key("fresh").send().await;
    fresh.assert_is(200, "bypassed");
    let unknown = "update eec_routing_idempotency set status = 'outcome_unknown'
        where idempotency_key = 'owned'";
    bench.database.execute(unknown).await;
    assert_unavailable(&waiter.answer().await);
    assert_eq!(bench.upstream.executions("owned"), 0);
}

/// A claim that may have been made is undone in the background; its duplicates are not kept longer
/// than any other.
async fn nobody_waits_longer_than_the_route_says_while_the_store_is_gone(bench: Bench) {
    let proxy = proxy(&bench).await;
    let gateway = behind(&bench, &proxy).route("wait = \"1s\"").start().await;
    gateway
        .post("/pay")
        .key("before")
        .send()
        .await
        .assert_is(200, "executed");
    proxy.set(Mode::Silent);
    let first = gateway.post("/pay").key("k").send().await;
    assert_unavailable(&first);
    let asked = Instant::now();
    let second = gateway.post("/pay").key("k").send().await;
    assert!(asked.elapsed() < AT_ONCE + AT_ONCE, "{:?}", asked.elapsed());
    assert!(matches!(second.status, 409 | 503), "{second:?}");
    assert!(second.retry_after().is_some(), "{second:?}");
    proxy.set(Mode::Pass);
    eventually("the key is open", async || {
        let answer = gateway.post("/pay").key("k").send().await;
        (answer.status == 200).then_some(())
    })
    .await;
}

/// The reserve's or the complete's commit happened, and its acknowledgement was lost: the store is
/// there, so nobody is the worse for it.
async fn a_lost_acknowledgement_is_no_conflict(bench: Bench) {
    let proxy = proxy(&bench).await;
    let gate = Gate::closed();
    bench
        .upstream
        .on_post("/slow")
        .reply(Reply::new(201).hold(&gate));
    let gateway = behind(&bench, &proxy)
        .route("lease = \"10s\"")
        .start()
        .await;
    for n in 0..3 {
        let lost = proxy.swallowed();
        proxy.set(Mode::Swallow(b"INSERT 0 1"));
        let key = format!("reserve{n}");
        let answer = gateway.post("/pay").key(&key).send().await;
        assert_eq!(proxy.swallowed(), lost + 1);
        answer.assert_is(200, "executed");
        assert_eq!(bench.upstream.executions(&key), 1);
        let again = gateway.post("/pay").key(&key).send().await;
        again.assert_is(200, "replayed");
    }

    let owner = gateway.post("/slow").key("complete").begin();
    bench
        .upstream
        .until(|state| state.executions("complete") == 1)
        .await;
    let lost = proxy.swallowed();
    proxy.set(Mode::Swallow(b"SELECT 1"));
    gate.open();
    owner.answer().await.assert_is(201, "executed");
    eventually("an acknowledgement was lost", async || {
        (proxy.swallowed() > lost).then_some(())
    })
    .await;
    let again = gateway.post("/slow").key("complete").send().await;
    again.assert_is(201, "replayed");
    assert_eq!(bench.database.count("eec_routing_decision").await, 4);
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
    let_pass(LEASE + LEASE / 2).await;
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

async fn a_drain_waits_for_what_is_not_recorded_yet(bench: Bench) {
    let proxy = proxy(&bench).await;
    let setup = behind(&bench, &proxy).section("limits", "grace = \"20s\"");
    let mut gateway = setup.route("lease = \"10s\"").start().await;
    let gate = Gate::closed();
    bench
        .upstream
        .on_post("/pay")
        .reply(Reply::new(201).hold(&gate));
    let first = gateway.post("/pay").key("k").begin();
    bench
        .upstream
        .until(|state| state.executions("k") == 1)
        .await;
    proxy.set(Mode::Reset);
    gate.open();
    first.answer().await.assert_is(201, "unrecorded");
    gateway.sigterm();
    let_pass(LEASE / 2).await;
    assert!(gateway.is_running(), "it has something to record");
    proxy.set(Mode::Pass);
    assert_eq!(gateway.end().await.code(), Some(0));
    assert_eq!(bench.database.status("k").await, "completed");
}

/// Beyond the bound an answer is still given, and its record ends as unknown: never as free.
async fn what_waits_to_be_recorded_is_bounded(bench: Bench) {
    let proxy = proxy(&bench).await;
    let gate = Gate::closed();
    let large = Reply::new(201).body(vec![b'x'; 40_000]).hold(&gate);
    bench.upstream.on_post("/pay").reply(large);
    let gateway = behind(&bench, &proxy)
        .section("limits", "record_retry_bytes_max = \"64KiB\"")
        .route("store_body_max = \"60KiB\"")
        .start()
        .await;
    let calls = ["a", "b", "c"].map(|key| gateway.post("/pay").key(key).begin());
    bench
        .upstream
        .until(|state| state.requests.len() == 3)
        .await;
    proxy.set(Mode::Reset);
    gate.open();
    for call in calls {
        let answer = call.answer().await;
        answer.assert_is(201, "unrecorded");
        assert_eq!(answer.body.len(), 40_000);
    }
    proxy.set(Mode::Pass);
    // The sweep may come first: a late commit is taken from there too.
    eventually("one is recorded, the others are unknown", async || {
        let records = bench.database.records().await;
        let mut words: Vec<_> = records.iter().map(|row| &*row.status).collect();
        words.sort_unstable();
        (words == ["completed", "outcome_unknown", "outcome_unknown"]).then_some(())
    })
    .await;
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
    let_pass(LEASE / 2).await;
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

/// It waited for a free connection, and could not renew its lease meanwhile. Somebody else may own
/// the record by then, so it must not send; and nothing was sent, so its key stays open.
async fn an_owner_that_lost_its_lease_before_sending_sends_nothing(bench: Bench) {
    let proxy = proxy(&bench).await;
    let gate = Gate::closed();
    bench
        .upstream
        .on_post("/slow")
        .reply(Reply::new(201).hold(&gate));
    let pool = "connections_max = 1\nqueue_timeout = \"20s\"";
    let gateway = behind(&bench, &proxy).pool(pool).start().await;
    let first = gateway.post("/slow").key("first").begin();
    bench
        .upstream
        .until(|state| state.executions("first") == 1)
        .await;
    let queued = gateway.post("/pay").key("queued").begin();
    gateway.until_metric("oncegate_owners", &[], 2.0).await;
    proxy.set(Mode::Reset);
    let_pass(LEASE + LEASE / 2).await;
    gate.open();
    first.answer().await.assert_is(201, "unrecorded");
    let queued = queued.answer().await;
    assert_eq!(queued.idempotency(), "refused", "{queued:?}");
    assert_eq!(bench.upstream.executions("queued"), 0);
    proxy.set(Mode::Pass);
    eventually("the key is open", async || {
        let answer = gateway.post("/pay").key("queued").send().await;
        (answer.idempotency() == "executed").then_some(())
    })
    .await;
}

async fn a_cached_decision_is_trusted_for_a_while_only(bench: Bench) {
    let proxy = proxy(&bench).await;
    let setup = behind(&bench, &proxy).section("limits", "cache_trust = \"2s\"");
    let gateway = setup.section("store", "notify = false").start().await;
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
