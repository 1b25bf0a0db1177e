//! Processes and clients that go away in the middle: what was begun ends, and nothing runs twice.

use std::time::{Duration, Instant};

use crate::support::blackhole::Blackhole;
use crate::support::client::{Call, Http2};
use crate::support::clock::{AT_ONCE, eventually, let_pass, within};
use crate::support::gateway::{Bench, LEASE, TestGateway};
use crate::support::upstream::{Gate, Reply};

each_store!(
    a_killed_owners_request_is_unknown_after_its_lease,
    a_killed_owners_request_is_sent_again_where_the_route_says_so,
    an_answer_that_was_seen_is_never_forgotten,
    a_conflict_always_ends,
    a_client_that_goes_away_changes_nothing,
    a_client_that_goes_away_as_nothing_is_sent_blocks_no_retry,
    clients_that_go_away_at_any_moment_leave_nothing_behind,
    a_record_without_a_lease_stays_for_an_operator,
    a_drain_finishes_what_was_begun,
    a_drain_that_takes_too_long_is_honest,
    a_drain_gives_back_what_was_not_sent,
    kills_under_load_run_nothing_twice,
);

/// Holds the upstream's answer to `/pay`, and sends the owner's request.
async fn begun(
    bench: &Bench,
    gateway: &TestGateway,
    gate: &Gate,
) -> crate::support::client::Connection {
    bench
        .upstream
        .on_post("/pay")
        .reply(Reply::new(201).hold(gate));
    let connection = gateway.post("/pay").key("k").start().await;
    bench
        .upstream
        .until(|state| state.executions("k") == 1)
        .await;
    connection
}

async fn a_killed_owners_request_is_unknown_after_its_lease(bench: Bench) {
    // However long a decision would have been valid, the end of the lease decides.
    let mut gateway = bench.gateway().route("valid_for = \"90d\"").start().await;
    let owner = begun(&bench, &gateway, &Gate::closed()).await;
    gateway.sigkill();
    assert_eq!(bench.database.status("k").await, "pending");
    let killed = Instant::now();
    gateway.restart().await;
    let retry = gateway.post("/pay").key("k").send().await;
    retry.assert_problem(409, "outcome-unknown", "unknown");
    assert_eq!(retry.retry_after(), None);
    assert!(killed.elapsed() < LEASE + AT_ONCE);
    assert_eq!(bench.database.status("k").await, "outcome_unknown");
    drop(owner);
}

async fn a_killed_owners_request_is_sent_again_where_the_route_says_so(bench: Bench) {
    bench.allow_reruns();
    let route = "on_unknown = \"redrive\"\nforward_key = \"derived\"";
    let mut gateway = bench.gateway().route(route).start().await;
    bench
        .upstream
        .on_post("/pay")
        .once()
        .reply(Reply::new(201).hold(&Gate::closed()));
    let owner = gateway.post("/pay").key("k").start().await;
    bench
        .upstream
        .until(|state| state.executions_at("/pay") == 1)
        .await;
    gateway.sigkill();
    gateway.restart().await;
    let retry = gateway.post("/pay").key("k").send().await;
    retry.assert_is(200, "executed");
    let requests = bench.upstream.requests();
    let keys: Vec<_> = requests
        .iter()
        .map(|seen| seen.header("idempotency-key"))
        .collect();
    assert!(keys.len() == 2 && keys[0] == keys[1], "{keys:?}");
    drop(owner);
}

/// The decision is durable before a byte of its answer leaves.
async fn an_answer_that_was_seen_is_never_forgotten(bench: Bench) {
    let mut gateway = bench.gateway().start().await;
    for n in 0..5 {
        let key = format!("k{n}");
        let mut connection = gateway.post("/pay").key(&key).start().await;
        let head = connection.answer_head().await.expect("an answer");
        gateway.sigkill();
        head.assert_is(200, "executed");
        gateway.restart().await;
        let again = gateway.post("/pay").key(&key).send().await;
        again.assert_is(200, "replayed");
        assert_eq!(again.decision(), head.decision());
    }
}

async fn a_conflict_always_ends(bench: Bench) {
    let route = "duplicates = \"reject\"";
    let mut gateway = bench.gateway().route(route).start().await;
    let owner = begun(&bench, &gateway, &Gate::closed()).await;
    gateway.sigkill();
    gateway.restart().await;
    // A lease, a sweep, and some patience for a busy machine.
    within(LEASE + AT_ONCE, "a terminal answer", async || {
        let answer = gateway.post("/pay").key("k").send().await;
        let terminal = answer.problem() == "outcome-unknown";
        if !terminal {
            answer.assert_problem(409, "in-progress", "in-progress");
            assert!(matches!(answer.retry_after(), Some(1..=2)), "{answer:?}");
        }
        terminal.then_some(())
    })
    .await;
    // Nobody needs to ask: the sweep finds it by itself, and says so.
    let gone = "outcome_unknown";
    assert_eq!(bench.database.status("k").await, gone);
    drop(owner);
}

async fn a_client_that_goes_away_changes_nothing(bench: Bench) {
    let gateway = bench.gateway().start().await;
    for way in ["fin", "rst", "cancel", "cut"] {
        let gate = Gate::closed();
        let path = format!("/{way}");
        bench
            .upstream
            .on_post(&path)
            .reply(Reply::new(201).body(way).hold(&gate));
        let call = gateway.post(&path).key(way);
        let came = |state: &crate::support::upstream::State| state.executions(way) == 1;
        if matches!(way, "fin" | "rst") {
            let connection = call.start().await;
            bench.upstream.until(came).await;
            if way == "fin" {
                connection.close();
            } else {
                connection.reset();
            }
        } else {
            let connection = Http2::to(gateway.listen()).await;
            let stream = connection.start(&call).await;
            bench.upstream.until(came).await;
            if way == "cancel" {
                stream.cancel();
            } else {
                connection.cut();
            }
        }
        gate.open();
        let retry = call.send().await;
        assert_eq!((retry.status, retry.replayed()), (201, true), "{way}");
        assert_eq!(retry.text(), way);
        assert_eq!(bench.upstream.executions(way), 1);
    }
}

async fn a_client_that_goes_away_as_nothing_is_sent_blocks_no_retry(bench: Bench) {
    let gateway = bench.gateway().start().await;
    bench.upstream.refuse().await;
    for n in 0..10 {
        gateway
            .post("/pay")
            .key(format!("k{n}"))
            .start()
            .await
            .reset();
    }
    bench.upstream.accept_again().await;
    for n in 0..10 {
        let start = Instant::now();
        let retry = gateway.post("/pay").key(format!("k{n}")).send().await;
        assert_eq!(retry.status, 200, "{retry:?}");
        assert!(start.elapsed() < AT_ONCE);
    }
}

/// Every moment of a request is hit by some client that goes away: no owner, waiter, connection or
/// transaction is left, and every key can be finished.
async fn clients_that_go_away_at_any_moment_leave_nothing_behind(bench: Bench) {
    let gateway = bench.gateway().route("lease = \"10s\"").start().await;
    let call = |n: u64| gateway.post("/pay").key(format!("k{}", n / 2));
    for batch in 0..10 {
        let leaving = (0..50).map(|n| {
            let n = 50 * batch + n;
            let call = call(n);
            async move {
                let connection = call.start().await;
                let_pass(Duration::from_micros(n * 7919 % 20_000)).await;
                if n % 2 == 0 {
                    connection.reset();
                } else {
                    connection.close();
                }
            }
        });
        futures_util::future::join_all(leaving).await;
    }
    eventually("nothing is pending", async || {
        let pending = "select count(*) from eec_routing_idempotency where status = 'pending'";
        (bench.database.number(pending).await == 0).then_some(())
    })
    .await;
    for n in (0..500).step_by(2) {
        let answer = call(n).send().await;
        assert_eq!(answer.status, 200, "{answer:?}");
    }
    gateway.until_parked(0).await;
    gateway.until_metric("oncegate_owners", &[], 0.0).await;
    gateway.until_metric("oncegate_body_bytes", &[], 0.0).await;
    if let crate::support::rows::Database::Postgres(_) = bench.database {
        let open = "select count(*) from pg_stat_activity
            where datname = current_database() and state like 'idle in transaction%'";
        assert_eq!(bench.database.number(open).await, 0);
    }
}

async fn a_record_without_a_lease_stays_for_an_operator(bench: Bench) {
    let gateway = bench.gateway().route("wait = \"1s\"").start().await;
    let insert = "insert into eec_routing_idempotency (tenant_scope, pool_id, idempotency_key)
        values ('acme', 'main', 'k')";
    bench.database.execute(insert).await;
    let_pass(LEASE + LEASE / 2).await;
    let answer = gateway.post("/pay").key("k").send().await;
    answer.assert_problem(409, "in-progress", "in-progress");
    assert_eq!(bench.database.status("k").await, "pending");
    assert_eq!(bench.upstream.requests().len(), 0);
}

async fn a_drain_finishes_what_was_begun(bench: Bench) {
    let gate = Gate::closed();
    let mut gateway = bench.gateway().start().await;
    let mut owner = begun(&bench, &gateway, &gate).await;
    let mut waiter = gateway.post("/pay").key("k").start().await;
    gateway.until_parked(1).await;
    gateway.sigterm();
    eventually("nothing new is taken", async || {
        let late = gateway.post("/late").key("late").try_send().await;
        let taken = late.is_ok_and(|answer| answer.idempotency() == "executed");
        (!taken && !gateway.is_ready().await).then_some(())
    })
    .await;
    gate.open();
    let answer = owner.answer().await.expect("the owner's answer");
    answer.assert_is(201, "executed");
    let answer = waiter.answer().await.expect("an answer for the waiter");
    let retry_later = answer.status == 409 || answer.status == 503;
    assert!(
        answer.idempotency() == "waited" || retry_later,
        "{answer:?}"
    );
    assert_eq!(gateway.end().await.code(), Some(0));
    assert_eq!(bench.database.status("k").await, "completed");
}

/// What could not be finished in time is settled as unknown, and the exit code tells.
async fn a_drain_that_takes_too_long_is_honest(bench: Bench) {
    let setup = bench.gateway().section("limits", "grace = \"3s\"");
    let mut gateway = setup.route("lease = \"30s\"").start().await;
    let mut owner = begun(&bench, &gateway, &Gate::closed()).await;
    let start = Instant::now();
    gateway.sigterm();
    // Cut off, and yet told.
    let told = owner.answer().await.unwrap();
    told.assert_problem(504, "outcome-unknown", "unknown");
    let status = gateway.end().await;
    assert!(status.code().is_some_and(|code| code != 0), "{status:?}");
    assert!(start.elapsed() < AT_ONCE + AT_ONCE);
    // Not left to the lease.
    assert_eq!(bench.database.status("k").await, "outcome_unknown");
}

/// An owner that still tries to connect has sent nothing: its key is open at once.
async fn a_drain_gives_back_what_was_not_sent(bench: Bench) {
    let hole = Blackhole::new().await;
    let pool = format!("targets = [{:?}]\nconnect_timeout = \"1m\"", hole.url());
    let setup = bench.gateway().section("limits", "grace = \"3s\"");
    let route = "lease = \"30s\"\ntimeout = \"1m\"";
    let mut gateway = setup.pool(&pool).route(route).start().await;
    let mut owner = gateway.post("/pay").key("k").start().await;
    gateway.until_metric("oncegate_owners", &[], 1.0).await;
    gateway.sigterm();
    if let Ok(answer) = owner.answer().await {
        assert_eq!(answer.idempotency(), "refused", "{answer:?}");
    }
    gateway.end().await;
    assert_eq!(bench.database.status("k").await, "failed_before_commit");
}

/// Whatever is killed when: each key ran at most once (the bench looks), each ends, and what was
/// answered stays.
async fn kills_under_load_run_nothing_twice(bench: Bench) {
    let mut gateway = bench.gateway().start().await;
    bench
        .upstream
        .on_post("/pay")
        .reply(Reply::new(200).delay(Duration::from_millis(20)));
    let mut seen = Vec::new();
    for round in 0..4 {
        let calls: Vec<_> = (0..60)
            .map(|n| {
                let key = format!("k{round}-{n}");
                (key.clone(), gateway.post("/pay").key(key))
            })
            .collect();
        let tracker = tokio_util::task::TaskTracker::new();
        let begun: Vec<_> = calls
            .into_iter()
            .map(|(key, call): (_, Call)| (key, tracker.spawn(call.try_send())))
            .collect();
        let_pass(Duration::from_millis(15 + 25 * round)).await;
        gateway.sigkill();
        for (key, answer) in begun {
            if let Ok(answer) = answer.await.expect("no panic") {
                seen.push((key, answer));
            }
        }
        gateway.restart().await;
    }
    for (key, first) in &seen {
        first.assert_is(200, "executed");
        let again = gateway.post("/pay").key(key).send().await;
        again.assert_is(200, "replayed");
        assert_eq!(again.kept(), first.kept());
    }
    for round in 0..4 {
        for n in 0..60 {
            let answer = gateway
                .post("/pay")
                .key(format!("k{round}-{n}"))
                .send()
                .await;
            let ended = answer.status == 200 || answer.problem() == "outcome-unknown";
            assert!(ended, "{answer:?}");
        }
    }
}

/// One process, one file: a second one would not see what the first keeps in memory.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_process_on_one_sqlite_file_is_refused() {
    let bench = super::on_sqlite().await;
    let gateway = bench.gateway().start().await;
    let (status, text) = crate::support::process::run(&bench.gateway().arguments()).await;
    assert!(status.code().is_some_and(|code| code != 0), "{status:?}");
    assert!(text.contains("oncegate.db"), "it says which file: {text}");
    gateway
        .post("/pay")
        .key("k")
        .send()
        .await
        .assert_is(200, "executed");
}
