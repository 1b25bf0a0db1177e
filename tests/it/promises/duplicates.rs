//! Duplicates that come while the first request runs: one execution, and an answer for all.

use std::time::{Duration, Instant};

use crate::support::client::{Answer, send_all};
use crate::support::clock::{AT_ONCE, within};
use crate::support::gateway::Bench;
use crate::support::upstream::{Gate, Reply};

each_store!(
    a_parked_duplicate_gets_the_first_answer_at_once,
    a_route_that_rejects_duplicates_says_so_at_once,
    a_duplicate_that_waited_long_enough_is_told_when_to_come_back,
    a_client_may_ask_for_less_waiting,
    one_waiter_becomes_the_owner_when_the_first_answer_is_released,
    more_waiters_than_fit_on_a_key_are_turned_away,
    more_waiters_than_fit_in_all_are_turned_away,
    who_would_not_wait_needs_no_place_to_be_told,
    more_bodies_than_fit_are_turned_away,
    a_slow_key_holds_no_other_key_up,
    a_hot_key_costs_the_store_little,
    every_key_keeps_its_own_answer_under_load,
);

/// Asserts that one answer was executed, the others waited for it, and all are equal.
#[track_caller]
pub fn assert_one_executed(answers: &[Answer]) {
    let count = |status| answers.iter().filter(|a| a.idempotency() == status).count();
    let (executed, waited, replayed) = (count("executed"), count("waited"), count("replayed"));
    assert_eq!(
        (executed, waited + replayed),
        (1, answers.len() - 1),
        "{answers:#?}"
    );
    for answer in answers {
        assert_eq!(answer.kept(), answers[0].kept());
        assert_eq!(answer.replayed(), answer.idempotency() != "executed");
    }
}

async fn a_parked_duplicate_gets_the_first_answer_at_once(bench: Bench) {
    let gate = Gate::closed();
    let slow = Reply::new(201).header("X-Trace", "1").hold(&gate);
    bench.upstream.on_post("/pay").reply(slow);
    let gateway = bench.gateway().start().await;
    let first = gateway.post("/pay").key("k").begin();
    bench
        .upstream
        .until(|state| state.executions("k") == 1)
        .await;
    let others: Vec<_> = (0..4)
        .map(|_| gateway.post("/pay").key("k").begin())
        .collect();
    gateway.until_parked(4).await;
    assert!(others.iter().all(|other| !other.is_over()));

    gate.open();
    let opened = Instant::now();
    let mut answers = vec![first.answer().await];
    for other in others {
        answers.push(other.answer().await);
    }
    assert!(opened.elapsed() < AT_ONCE, "{:?}", opened.elapsed());
    assert_one_executed(&answers);
    assert!(
        answers[1..]
            .iter()
            .all(|answer| answer.idempotency() == "waited")
    );
    gateway.until_parked(0).await;
}

async fn a_route_that_rejects_duplicates_says_so_at_once(bench: Bench) {
    let gate = Gate::closed();
    bench
        .upstream
        .on_post("/pay")
        .reply(Reply::new(201).hold(&gate));
    let reject = "duplicates = \"reject\"\nlease = \"3s\"";
    let gateway = bench.gateway().route(reject).start().await;
    let first = gateway.post("/pay").key("k").begin();
    bench
        .upstream
        .until(|state| state.executions("k") == 1)
        .await;
    let token = bench
        .database
        .record("k")
        .await
        .expect("a record")
        .attempt_token;

    let asked = Instant::now();
    let other = gateway.post("/pay").key("k").send().await;
    assert!(asked.elapsed() < AT_ONCE);
    other.assert_problem(409, "in-progress", "in-progress");
    assert!(matches!(other.retry_after(), Some(1..=3)), "{other:?}");
    let record = bench.database.record("k").await.expect("a record");
    assert_eq!((&*record.status, record.attempt_token), ("pending", token));

    gate.open();
    first.answer().await.assert_is(201, "executed");
    let again = gateway.post("/pay").key("k").send().await;
    again.assert_is(201, "replayed");
}

async fn a_duplicate_that_waited_long_enough_is_told_when_to_come_back(bench: Bench) {
    let gate = Gate::closed();
    bench
        .upstream
        .on_post("/pay")
        .reply(Reply::new(201).hold(&gate));
    let route = "wait = \"500ms\"\nlease = \"3s\"";
    let gateway = bench.gateway().route(route).start().await;
    let first = gateway.post("/pay").key("k").begin();
    bench
        .upstream
        .until(|state| state.executions("k") == 1)
        .await;
    for _ in 0..2 {
        let asked = Instant::now();
        let other = gateway.post("/pay").key("k").send().await;
        other.assert_problem(409, "in-progress", "in-progress");
        assert!(matches!(other.retry_after(), Some(1..=3)), "{other:?}");
        let waited = asked.elapsed();
        let right = Duration::from_millis(450)..AT_ONCE;
        assert!(right.contains(&waited), "{waited:?}");
    }
    gate.open();
    first.answer().await.assert_is(201, "executed");
}

async fn a_client_may_ask_for_less_waiting(bench: Bench) {
    let gate = Gate::closed();
    bench
        .upstream
        .on_post("/pay")
        .reply(Reply::new(201).hold(&gate));
    let gateway = bench.gateway().route("timeout = \"30s\"").start().await;
    let first = gateway.post("/pay").key("k").begin();
    bench
        .upstream
        .until(|state| state.executions("k") == 1)
        .await;
    let asked = Instant::now();
    let hurried = gateway.post("/pay").key("k").header("Prefer", "wait=1");
    let other = hurried.send().await;
    other.assert_problem(409, "in-progress", "in-progress");
    let waited = asked.elapsed();
    let right = Duration::from_millis(900)..Duration::from_secs(5);
    assert!(right.contains(&waited), "{waited:?}");
    gate.open();
    first.answer().await.assert_is(201, "executed");
}

/// The client of the released answer sees it; one of the parked runs the request with its own
/// copy; the others get that answer.
async fn one_waiter_becomes_the_owner_when_the_first_answer_is_released(bench: Bench) {
    bench.allow_reruns();
    let gate = Gate::closed();
    let busy = Reply::new(429).header("Retry-After", "7").hold(&gate);
    bench.upstream.on_post("/pay").once().reply(busy);
    bench.upstream.on_post("/pay").answer(201, "done");
    let gateway = bench.gateway().start().await;
    let first = gateway.post("/pay").key("k").begin();
    bench
        .upstream
        .until(|state| state.executions("k") == 1)
        .await;
    let others: Vec<_> = (0..5)
        .map(|_| gateway.post("/pay").key("k").begin())
        .collect();
    gateway.until_parked(5).await;

    gate.open();
    let first = first.answer().await;
    first.assert_is(429, "executed");
    assert_eq!(first.retry_after(), Some(7));
    assert!(first.decision().is_none());
    let mut answers = Vec::new();
    for other in others {
        answers.push(other.answer().await);
    }
    assert_one_executed(&answers);
    assert_eq!(answers[0].text(), "done");
    assert_eq!(bench.upstream.executions("k"), 2);
}

async fn more_waiters_than_fit_on_a_key_are_turned_away(bench: Bench) {
    let gate = Gate::closed();
    bench
        .upstream
        .on_post("/pay")
        .reply(Reply::new(201).hold(&gate));
    let gateway = bench
        .gateway()
        .section("limits", "waiters_per_key_max = 2")
        .start()
        .await;
    let first = gateway.post("/pay").key("k").begin();
    bench
        .upstream
        .until(|state| state.executions("k") == 1)
        .await;
    let parked = [(); 2].map(|()| gateway.post("/pay").key("k").begin());
    gateway.until_parked(2).await;

    let asked = Instant::now();
    let extra = gateway.post("/pay").key("k").send().await;
    assert!(asked.elapsed() < AT_ONCE);
    extra.assert_problem(409, "in-progress", "in-progress");
    assert!(matches!(extra.retry_after(), Some(1..=2)), "{extra:?}");

    gate.open();
    first.answer().await.assert_is(201, "executed");
    for other in parked {
        other.answer().await.assert_is(201, "waited");
    }
}

async fn more_waiters_than_fit_in_all_are_turned_away(bench: Bench) {
    let gate = Gate::closed();
    bench
        .upstream
        .on_post("/pay")
        .reply(Reply::new(201).hold(&gate));
    let gateway = bench
        .gateway()
        .section("limits", "waiters_per_key_max = 2\nwaiters_max = 2")
        .start()
        .await;
    let firsts = ["a", "b", "c"].map(|key| gateway.post("/pay").key(key).begin());
    bench
        .upstream
        .until(|state| state.executed().count() == 3)
        .await;
    let parked = ["a", "b"].map(|key| gateway.post("/pay").key(key).begin());
    gateway.until_parked(2).await;

    let extra = gateway.post("/pay").key("c").send().await;
    extra.assert_problem(503, "overloaded", "refused");
    assert!(extra.retry_after().is_some());

    gate.open();
    for other in firsts.into_iter().chain(parked) {
        assert_eq!(other.answer().await.status, 201);
    }
}

/// Another request under the key, or one whose route rejects duplicates, is told so whether or not
/// there is room for a waiter.
async fn who_would_not_wait_needs_no_place_to_be_told(bench: Bench) {
    let gate = Gate::closed();
    let slow = || Reply::new(201).hold(&gate);
    bench.upstream.on_post("/pay").reply(slow());
    bench.upstream.on_post("/reject").reply(slow());
    let reject = "path = \"/reject\"\npool = \"main\"\nduplicates = \"reject\"";
    for (limits, keys) in [
        ("waiters_per_key_max = 1", ["a", "b"]),
        ("waiters_per_key_max = 1\nwaiters_max = 1", ["c", "d"]),
    ] {
        let [pay, other] = keys;
        let setup = bench.gateway().section("limits", limits);
        let mut gateway = setup.other_route(reject).start().await;
        let firsts = [("/pay", pay), ("/reject", other)]
            .map(|(path, key)| gateway.post(path).key(key).begin());
        let begun = |key| {
            bench
                .upstream
                .until(move |state| state.executions(key) == 1)
        };
        begun(pay).await;
        begun(other).await;
        let parked = gateway.post("/pay").key(pay).begin();
        gateway.until_parked(1).await;

        let mismatch = gateway.post("/pay").key(pay).json("{}").send().await;
        mismatch.assert_problem(422, "key-reused", "mismatch");
        let rejected = gateway.post("/reject").key(other).send().await;
        rejected.assert_problem(409, "in-progress", "in-progress");
        drop((firsts, parked));
        gateway.sigkill();
    }
}

async fn more_bodies_than_fit_are_turned_away(bench: Bench) {
    let gate = Gate::closed();
    bench
        .upstream
        .on_post("/pay")
        .reply(Reply::new(201).hold(&gate));
    let limits = "body_bytes_total_max = \"100KiB\"";
    let gateway = bench
        .gateway()
        .section("limits", limits)
        .route("body_max = \"60KiB\"")
        .start()
        .await;
    let body = vec![b'x'; 40_000];
    let held = ["a", "b"].map(|key| gateway.post("/pay").key(key).json(&body).begin());
    bench
        .upstream
        .until(|state| state.executed().count() == 2)
        .await;

    let extra = gateway.post("/pay").key("c").json(&body).send().await;
    extra.assert_problem(503, "overloaded", "refused");
    assert!(extra.retry_after().is_some());
    assert_eq!(bench.database.status("c").await, "absent");
    let small = gateway.post("/free").key("d").send().await;
    small.assert_is(200, "executed");

    gate.open();
    for first in held {
        first.answer().await.assert_is(201, "executed");
    }
    let again = gateway.post("/pay").key("c").json(&body).send().await;
    again.assert_is(201, "executed");
    gateway.until_metric("oncegate_body_bytes", &[], 0.0).await;
}

async fn a_slow_key_holds_no_other_key_up(bench: Bench) {
    let gate = Gate::closed();
    bench
        .upstream
        .on_post("/slow")
        .reply(Reply::new(201).hold(&gate));
    // Fewer connections than waiters: none may be held by one who is parked.
    let store = "connections_max = 2";
    let setup = bench.gateway().section("store", store);
    let gateway = setup.route("lease = \"10s\"").start().await;
    let slow: Vec<_> = (0..60)
        .map(|_| gateway.post("/slow").key("slow").begin())
        .collect();
    gateway.until_parked(59).await;
    let others = (0..100).map(|n| gateway.post("/pay").key(format!("k{n}")));
    let asked = Instant::now();
    for answer in send_all(others).await {
        answer.assert_is(200, "executed");
    }
    assert!(asked.elapsed() < AT_ONCE, "{:?}", asked.elapsed());
    gate.open();
    let mut answers = Vec::new();
    for call in slow {
        answers.push(call.answer().await);
    }
    assert_one_executed(&answers);
}

async fn a_hot_key_costs_the_store_little(bench: Bench) {
    let gate = Gate::closed();
    bench
        .upstream
        .on_post("/pay")
        .reply(Reply::new(201).hold(&gate));
    let limits = "waiters_per_key_max = 1000\nwaiters_max = 2000";
    let gateway = bench.gateway().section("limits", limits).start().await;
    let first = gateway.post("/pay").key("k").begin();
    bench
        .upstream
        .until(|state| state.executions("k") == 1)
        .await;
    let operations = async || {
        let metrics = gateway.metrics().await;
        metrics.sum("oncegate_store_seconds_count", &[])
    };
    let (before, asked) = (operations().await, Instant::now());
    let others: Vec<_> = (0..400)
        .map(|_| gateway.post("/pay").key("k").begin())
        .collect();
    gateway.until_parked(400).await;
    gate.open();
    first.answer().await.assert_is(201, "executed");
    for other in others {
        other.answer().await.assert_is(201, "waited");
    }
    let spent = operations().await - before;
    let allowed = 60.0 + 50.0 * asked.elapsed().as_secs_f64();
    assert!(spent < allowed, "{spent} operations for 400 duplicates");
}

async fn every_key_keeps_its_own_answer_under_load(bench: Bench) {
    let setup = bench.gateway().route("lease = \"10s\"");
    // A busy machine is no store that is down.
    let patient = "acquire_timeout = \"10s\"\noperation_timeout = \"9s\"";
    let gateway = setup.section("store", patient).start().await;
    let call = |n| {
        gateway
            .post("/pay")
            .key(format!("k{}", n % 250))
            .json(format!("{}", n % 250))
    };
    let mut firsts = Vec::new();
    for round in 0..4 {
        let calls = (0..250).map(|n| call(250 * round + n));
        let started = Instant::now();
        let answers = send_all(calls).await;
        assert!(started.elapsed() < Duration::from_secs(20));
        if round == 0 {
            for answer in &answers {
                answer.assert_is(200, "executed");
            }
            firsts = answers;
            continue;
        }
        for (answer, first) in answers.iter().zip(&firsts) {
            answer.assert_is(200, "replayed");
            assert_eq!(answer.kept(), first.kept());
        }
    }
    let distinct: std::collections::BTreeSet<_> = firsts.iter().map(Answer::text).collect();
    assert_eq!(distinct.len(), 250);
    assert_eq!(bench.upstream.requests().len(), 250);
}

/// Waking is local and at once: it doesn't hang on the poll.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_local_completion_wakes_without_the_poll() {
    let bench = super::on_sqlite().await;
    let gate = Gate::closed();
    bench
        .upstream
        .on_post("/pay")
        .reply(Reply::new(201).hold(&gate));
    let gateway = bench
        .gateway()
        .section("store", "poll_interval = \"5s\"")
        .route("lease = \"10s\"")
        .start()
        .await;
    let first = gateway.post("/pay").key("k").begin();
    bench
        .upstream
        .until(|state| state.executions("k") == 1)
        .await;
    let other = gateway.post("/pay").key("k").begin();
    gateway.until_parked(1).await;
    gate.open();
    within(AT_ONCE, "the waiter is woken", async || {
        other.is_over().then_some(())
    })
    .await;
    first.answer().await.assert_is(201, "executed");
    other.answer().await.assert_is(201, "waited");
}
