//! Time: how long a decision is valid, what comes after, and whose clock it is.

use std::time::Duration;

use ::time::OffsetDateTime;
use ::time::format_description::well_known::Rfc3339;

use crate::support::client::Answer;
use crate::support::clock::{eventually, let_pass, wall_clock_off_by};
use crate::support::gateway::{Bench, LEASE};
use crate::support::upstream::{Cut, Gate, Reply};

each_store!(
    a_decision_is_told_with_its_time,
    past_its_validity_a_key_is_a_new_one,
    a_tombstone_refuses_an_expired_key,
    retention_deletes_what_is_over_and_nothing_else,
    retry_after_is_never_longer_than_the_lease,
    a_gateways_wall_clock_decides_nothing,
);

on_postgres!(the_sessions_time_zone_decides_nothing);

fn instant(answer: &Answer, name: &str) -> OffsetDateTime {
    let text = answer
        .header(name)
        .unwrap_or_else(|| panic!("{name}: {answer:?}"));
    OffsetDateTime::parse(&text, &Rfc3339).expect("RFC 3339")
}

async fn a_decision_is_told_with_its_time(bench: Bench) {
    let gateway = bench.gateway().route("valid_for = \"1h\"").start().await;
    let first = gateway.post("/pay").key("k").send().await;
    let created = instant(&first, "idempotency-created");
    let expires = instant(&first, "idempotency-expires");
    let valid = expires - created;
    assert!((valid.whole_seconds() - 3600).abs() <= 1, "{valid}");
    let age = std::time::SystemTime::from(created).elapsed();
    assert!(
        age.is_ok_and(|age| age < Duration::from_mins(1)),
        "{created}"
    );
    let record = bench.database.record("k").await.expect("a record");
    assert!(
        (3_540_000..=3_600_000).contains(&record.valid_ms),
        "{record:?}"
    );
}

async fn past_its_validity_a_key_is_a_new_one(bench: Bench) {
    bench.allow_reruns();
    let setup = bench.gateway().section("store", "purge_interval = \"1h\"");
    let gateway = setup
        .route("timeout = \"2s\"\nvalid_for = \"2s\"")
        .start()
        .await;
    let first = gateway.post("/pay").key("k").send().await;
    first.assert_is(200, "executed");
    let again = gateway.post("/pay").key("k").send().await;
    again.assert_is(200, "replayed");
    let before = bench.database.record("k").await.expect("a record");
    let fresh = eventually("the key is a new one", async || {
        let answer = gateway.post("/pay").key("k").json("{}").send().await;
        (answer.idempotency() == "executed").then_some(answer)
    })
    .await;
    assert!(!fresh.replayed());
    assert_ne!(fresh.decision(), first.decision());
    assert!(instant(&fresh, "idempotency-created") >= instant(&first, "idempotency-expires"));
    let after = bench.database.record("k").await.expect("a record");
    assert_eq!(after.generation, before.generation + 1);
    assert_ne!(after.attempt_token, before.attempt_token);
    assert_eq!(bench.upstream.executions("k"), 2);
}

async fn a_tombstone_refuses_an_expired_key(bench: Bench) {
    let route = "timeout = \"1s\"\nvalid_for = \"1s\"\ntombstone = \"1h\"";
    let gateway = bench.gateway().route(route).start().await;
    let call = gateway.post("/pay").key("k");
    call.clone().send().await.assert_is(200, "executed");
    let expired = eventually("the key expires", async || {
        let answer = call.clone().send().await;
        (answer.idempotency() != "replayed").then_some(answer)
    })
    .await;
    assert_eq!((expired.status, &*expired.problem()), (409, "key-expired"));
    eventually("the answer is deleted, the key is not", async || {
        let decisions = bench.database.count("eec_routing_decision").await;
        (decisions == 0).then_some(())
    })
    .await;
    let expired = call.send().await;
    assert_eq!((expired.status, &*expired.problem()), (409, "key-expired"));
    assert_eq!(bench.upstream.executions("k"), 1);
}

async fn retention_deletes_what_is_over_and_nothing_else(bench: Bench) {
    bench.allow_reruns();
    let gate = Gate::closed();
    bench
        .upstream
        .on_post("/slow")
        .reply(Reply::new(201).hold(&gate));
    bench
        .upstream
        .on_post("/broken")
        .reply(Reply::new(201).cut_after(0, Cut::Rst));
    bench.upstream.on_post("/busy").reply(Reply::new(429));
    let gateway = bench
        .gateway()
        .other_route("path = \"/long\"\npool = \"main\"\nvalid_for = \"1h\"")
        .other_route("path = \"/slow\"\npool = \"main\"")
        .route("timeout = \"1s\"\nvalid_for = \"1s\"")
        .start()
        .await;
    let pending = gateway.post("/slow").key("pending").begin();
    bench
        .upstream
        .until(|state| state.executions("pending") == 1)
        .await;
    gateway
        .post("/broken")
        .key("unknown")
        .send()
        .await
        .assert_is(502, "unknown");
    gateway
        .post("/busy")
        .key("released")
        .send()
        .await
        .assert_is(429, "executed");
    gateway
        .post("/short")
        .key("short")
        .send()
        .await
        .assert_is(200, "executed");
    gateway
        .post("/long")
        .key("long")
        .send()
        .await
        .assert_is(200, "executed");
    eventually("what is over is deleted", async || {
        let records = bench.database.records().await;
        let keys: Vec<_> = records.iter().map(|record| &*record.key).collect();
        (keys == ["long", "pending", "unknown"]).then_some(())
    })
    .await;
    assert_eq!(bench.database.count("eec_routing_decision").await, 1);
    gate.open();
    pending.answer().await.assert_is(201, "executed");
    // A purged key is a new one, and its token was never used before.
    gateway
        .post("/short")
        .key("short")
        .send()
        .await
        .assert_is(200, "executed");
    gateway
        .post("/long")
        .key("long")
        .send()
        .await
        .assert_is(200, "replayed");
}

async fn retry_after_is_never_longer_than_the_lease(bench: Bench) {
    let gate = Gate::closed();
    bench
        .upstream
        .on_post("/slow")
        .reply(Reply::new(201).hold(&gate));
    let route = "lease = \"4s\"\nwait = \"100ms\"\nduplicates = \"wait\"";
    let gateway = bench.gateway().route(route).start().await;
    let first = gateway.post("/slow").key("k").begin();
    bench
        .upstream
        .until(|state| state.executions("k") == 1)
        .await;
    for _ in 0..5 {
        let answer = gateway.post("/slow").key("k").send().await;
        answer.assert_problem(409, "in-progress", "in-progress");
        assert!(matches!(answer.retry_after(), Some(1..=4)), "{answer:?}");
    }
    gate.open();
    first.answer().await.assert_is(201, "executed");
    bench.upstream.refuse().await;
    bench.upstream.cut_idle(Cut::Fin).await;
    let answer = gateway.post("/pay").key("other").send().await;
    answer.assert_problem(502, "upstream-unreachable", "refused");
    assert!(matches!(answer.retry_after(), Some(1..=4)), "{answer:?}");
}

/// Two gateways whose wall clocks are an hour off agree on leases and validity: the database's
/// clock decides. On SQLite one gateway is restarted with a clock that is behind.
async fn a_gateways_wall_clock_decides_nothing(bench: Bench) {
    bench.allow_reruns();
    let Some(behind) = wall_clock_off_by("-1h") else {
        panic!("libfaketime is missing; scripts/setup installs it");
    };
    let setup = || {
        bench
            .gateway()
            .other_route("path = \"/slow\"\npool = \"main\"\nlease = \"2s\"")
            .route("timeout = \"3s\"\nvalid_for = \"3s\"")
    };
    let right = setup().start().await;
    let first = right.post("/pay").key("k").send().await;
    first.assert_is(200, "executed");
    if bench.database.url().starts_with("sqlite") {
        drop(right);
    }
    let wrong = setup().environment(behind).start().await;
    wrong
        .post("/pay")
        .key("k")
        .send()
        .await
        .assert_is(200, "replayed");
    let_pass(Duration::from_secs(3)).await;
    wrong
        .post("/pay")
        .key("k")
        .send()
        .await
        .assert_is(200, "executed");
    // Leases are as long as ever there: a slow owner is not swept, a dead one is.
    let gate = Gate::closed();
    bench
        .upstream
        .on_post("/slow")
        .reply(Reply::new(201).hold(&gate));
    let slow = wrong.post("/slow").key("slow").begin();
    let_pass(LEASE + LEASE / 2).await;
    assert_eq!(bench.database.status("slow").await, "pending");
    gate.open();
    slow.answer().await.assert_is(201, "executed");
}

async fn the_sessions_time_zone_decides_nothing(bench: Bench) {
    bench.allow_reruns();
    for zone in ["Pacific/Auckland", "America/Los_Angeles"] {
        let set = format!(
            "do $$ begin execute format('alter database %I set timezone = ''{zone}''',
             current_database()); end $$"
        );
        bench.database.execute(&set).await;
        let gateway = bench
            .gateway()
            .route("timeout = \"2s\"\nvalid_for = \"2s\"")
            .start()
            .await;
        let first = gateway.post("/pay").key(zone).send().await;
        first.assert_is(200, "executed");
        let created = instant(&first, "idempotency-created");
        let age = std::time::SystemTime::from(created).elapsed();
        assert!(
            age.is_ok_and(|age| age < Duration::from_mins(1)),
            "{created}"
        );
        gateway
            .post("/pay")
            .key(zone)
            .send()
            .await
            .assert_is(200, "replayed");
        let_pass(Duration::from_millis(2100)).await;
        gateway
            .post("/pay")
            .key(zone)
            .send()
            .await
            .assert_is(200, "executed");
    }
}
