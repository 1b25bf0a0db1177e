//! Owners that are slow, frozen or late, seen from a second gateway on the same PostgreSQL.

use crate::support::clock::{eventually, let_pass};
use crate::support::gateway::{Bench, LEASE};
use crate::support::upstream::{Gate, Reply};

on_postgres!(
    a_slow_owner_keeps_its_lease_by_heartbeats,
    a_frozen_owners_request_is_not_run_again,
    a_frozen_owner_may_still_complete_what_nobody_took_over,
    a_late_owner_writes_nothing_over_its_successor,
    a_late_owner_disturbs_no_successor_at_work,
    a_killed_owners_waiters_elsewhere_are_told,
    a_killed_owners_waiter_elsewhere_sends_again_where_the_route_says_so,
);

async fn a_slow_owner_keeps_its_lease_by_heartbeats(bench: Bench) {
    let gate = Gate::closed();
    bench
        .upstream
        .on_post("/pay")
        .reply(Reply::new(201).hold(&gate));
    let redrive = || bench.gateway().route("on_unknown = \"redrive\"");
    let (one, other) = (redrive().start().await, redrive().start().await);
    let first = one.post("/pay").key("k").begin();
    bench
        .upstream
        .until(|state| state.executions("k") == 1)
        .await;
    let duplicate = other.post("/pay").key("k").begin();
    // Several leases long, and many sweeps by both.
    let_pass(3 * LEASE).await;
    assert_eq!(bench.database.status("k").await, "pending");
    assert!(!duplicate.is_over());
    gate.open();
    first.answer().await.assert_is(201, "executed");
    duplicate.answer().await.assert_is(201, "waited");
}

async fn a_frozen_owners_request_is_not_run_again(bench: Bench) {
    bench
        .upstream
        .on_post("/pay")
        .reply(Reply::new(201).hold(&Gate::closed()));
    let mut one = bench.gateway().start().await;
    let other = bench.gateway().start().await;
    let _owner = one.post("/pay").key("k").start().await;
    bench
        .upstream
        .until(|state| state.executions("k") == 1)
        .await;
    one.sigstop();
    // Parked until the lease is over, then told.
    let duplicate = other.post("/pay").key("k").send().await;
    duplicate.assert_problem(409, "outcome-unknown", "unknown");
    assert_eq!(bench.database.status("k").await, "outcome_unknown");
    one.sigkill();
}

/// The row still bears the token: the answer that came late is the decision.
async fn a_frozen_owner_may_still_complete_what_nobody_took_over(bench: Bench) {
    let gate = Gate::closed();
    bench
        .upstream
        .on_post("/pay")
        .reply(Reply::new(201).hold(&gate));
    let mut one = bench.gateway().start().await;
    let other = bench.gateway().start().await;
    let first = one.post("/pay").key("k").begin();
    bench
        .upstream
        .until(|state| state.executions("k") == 1)
        .await;
    one.sigstop();
    let duplicate = other.post("/pay").key("k").send().await;
    duplicate.assert_problem(409, "outcome-unknown", "unknown");
    gate.open();
    one.sigcont();
    let first = first.answer().await;
    first.assert_is(201, "executed");
    let again = other.post("/pay").key("k").send().await;
    again.assert_is(201, "replayed");
    assert_eq!(again.kept(), first.kept());
}

async fn a_late_owner_writes_nothing_over_its_successor(bench: Bench) {
    bench.allow_reruns();
    let gate = Gate::closed();
    bench
        .upstream
        .on_post("/pay")
        .once()
        .reply(Reply::new(201).body("A").hold(&gate));
    bench.upstream.on_post("/pay").answer(201, "B");
    let redrive = || bench.gateway().route("on_unknown = \"redrive\"");
    let mut one = redrive().start().await;
    let other = redrive().start().await;
    let first = one.post("/pay").key("k").begin();
    bench
        .upstream
        .until(|state| state.executions("k") == 1)
        .await;
    one.sigstop();
    let successor = other.post("/pay").key("k").send().await;
    successor.assert_is(201, "executed");
    assert_eq!(successor.text(), "B");

    gate.open();
    one.sigcont();
    let late = first.answer().await;
    let told = match late.status {
        201 => late.text() == "B" && late.decision() == successor.decision(),
        409 => matches!(&*late.problem(), "attempt-stale" | "in-progress"),
        _ => false,
    };
    assert!(told, "{late:?}");
    for gateway in [&one, &other] {
        let again = gateway.post("/pay").key("k").send().await;
        again.assert_is(201, "replayed");
        assert_eq!(again.kept(), successor.kept());
    }
    assert_eq!(bench.database.count("eec_routing_decision").await, 1);
    one.until_metric("oncegate_stale_owner_total", &[], 1.0)
        .await;
    assert_eq!(bench.upstream.executions("k"), 2);
}

/// The successor is still at work when the late owner comes with an answer to keep, or with one
/// that would open the key again.
async fn a_late_owner_disturbs_no_successor_at_work(bench: Bench) {
    bench.allow_reruns();
    let redrive = || bench.gateway().route("on_unknown = \"redrive\"");
    let mut one = redrive().start().await;
    let other = redrive().start().await;
    for (key, status) in [("completes", 201), ("releases", 429)] {
        let (early, late) = (Gate::closed(), Gate::closed());
        let path = format!("/{key}");
        let first = Reply::new(status).body("A").hold(&early);
        bench.upstream.on_post(&path).once().reply(first);
        let second = Reply::new(201).body("B").hold(&late);
        bench.upstream.on_post(&path).reply(second);
        let first = one.post(&path).key(key).begin();
        bench
            .upstream
            .until(|state| state.executions(key) == 1)
            .await;
        one.sigstop();
        let successor = other.post(&path).key(key).begin();
        bench
            .upstream
            .until(|state| state.executions(key) == 2)
            .await;
        let owned = bench.database.record(key).await.expect("a record");

        early.open();
        one.sigcont();
        let first = first.answer().await;
        if status == 201 {
            assert_eq!(first.status, 409, "{first:?}");
        }
        let after = bench.database.record(key).await.expect("a record");
        assert_eq!(
            (&*after.status, after.attempt_token),
            ("pending", owned.attempt_token)
        );
        let duplicate = one.post(&path).key(key).begin();
        late.open();
        let successor = successor.answer().await;
        successor.assert_is(201, "executed");
        assert_eq!(successor.text(), "B");
        let duplicate = duplicate.answer().await;
        assert_eq!(duplicate.kept(), successor.kept());
        assert_eq!(bench.upstream.executions(key), 2);
    }
    assert_eq!(bench.database.count("eec_routing_decision").await, 2);
    one.until_metric("oncegate_stale_owner_total", &[], 2.0)
        .await;
}

async fn a_killed_owners_waiters_elsewhere_are_told(bench: Bench) {
    bench
        .upstream
        .on_post("/pay")
        .reply(Reply::new(201).hold(&Gate::closed()));
    let mut one = bench.gateway().start().await;
    let other = bench.gateway().start().await;
    let _owner = one.post("/pay").key("k").start().await;
    bench
        .upstream
        .until(|state| state.executions("k") == 1)
        .await;
    let waiters: Vec<_> = (0..5)
        .map(|_| other.post("/pay").key("k").begin())
        .collect();
    // One of them looks at the store for all.
    other.until_parked_at_least(4).await;
    one.sigkill();
    for waiter in waiters {
        let answer = waiter.answer().await;
        answer.assert_problem(409, "outcome-unknown", "unknown");
    }
    other
        .until_metric("oncegate_swept_total", &[("to", "outcome_unknown")], 1.0)
        .await;
    other
        .until_metric("oncegate_unknown_records", &[], 1.0)
        .await;
}

async fn a_killed_owners_waiter_elsewhere_sends_again_where_the_route_says_so(bench: Bench) {
    bench.allow_reruns();
    bench
        .upstream
        .on_post("/pay")
        .once()
        .reply(Reply::new(201).hold(&Gate::closed()));
    bench.upstream.on_post("/pay").answer(201, "again");
    let redrive = || bench.gateway().route("on_unknown = \"redrive\"");
    let mut one = redrive().start().await;
    let other = redrive().start().await;
    let _owner = one.post("/pay").key("k").start().await;
    bench
        .upstream
        .until(|state| state.executions("k") == 1)
        .await;
    let waiters: Vec<_> = (0..5)
        .map(|_| other.post("/pay").key("k").begin())
        .collect();
    // One of them looks at the store for all.
    other.until_parked_at_least(4).await;
    one.sigkill();
    let mut answers = Vec::new();
    for waiter in waiters {
        answers.push(waiter.answer().await);
    }
    super::duplicates::assert_one_executed(&answers);
    assert_eq!(bench.upstream.executions("k"), 2);
    eventually("the record is completed", async || {
        (bench.database.status("k").await == "completed").then_some(())
    })
    .await;
}
