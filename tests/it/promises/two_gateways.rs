//! Two gateways on one PostgreSQL: together they keep what each promises alone.

use std::time::{Duration, Instant};

use ::time::OffsetDateTime;
use ::time::format_description::well_known::Rfc3339;
use sqlx::Executor as _;

use super::duplicates::assert_one_executed;
use crate::support::client::{Call, send_all};
use crate::support::clock::{eventually, let_pass};
use crate::support::gateway::{Bench, TestGateway};
use crate::support::rows::Database;
use crate::support::upstream::{Gate, Reply};

on_postgres!(
    two_hundred_duplicates_run_once,
    a_thousand_keys_raced_by_two_gateways_run_a_thousand_times,
    a_waiter_is_woken_by_the_other_gateways_commit,
    a_lost_notification_costs_at_most_a_poll,
    a_released_key_is_taken_over_once,
    an_expired_key_is_taken_over_once,
    generations_of_a_short_lived_key_never_overlap,
    an_uncommitted_rival_ends_as_owner_or_duplicate,
    a_slow_insert_opens_no_gap,
    a_decision_made_here_is_replayed_there,
    an_unheard_of_status_is_replayed_there_too,
    one_connection_to_the_store_is_enough,
    those_who_wait_for_another_gateways_owner_are_waiters,
);

async fn two(bench: &Bench) -> [TestGateway; 2] {
    let setup = || bench.gateway().route("lease = \"10s\"");
    [setup().start().await, setup().start().await]
}

async fn two_hundred_duplicates_run_once(bench: Bench) {
    let gate = Gate::closed();
    bench
        .upstream
        .on_post("/pay")
        .reply(Reply::new(201).hold(&gate));
    let gateways = two(&bench).await;
    let calls = (0..200).map(|n| gateways[n % 2].post("/pay").key("k"));
    let begun: Vec<_> = calls.map(Call::begin).collect();
    eventually("they are parked", async || {
        let mut parked = 0.0;
        for gateway in &gateways {
            parked += gateway.metrics().await.sum("oncegate_waiters", &[]);
        }
        (parked > 197.5).then_some(())
    })
    .await;
    gate.open();
    let mut answers = Vec::new();
    for call in begun {
        answers.push(call.answer().await);
    }
    assert_one_executed(&answers);
    assert_eq!(bench.upstream.executions("k"), 1);
    assert_eq!(bench.database.count("eec_routing_decision").await, 1);
}

async fn a_thousand_keys_raced_by_two_gateways_run_a_thousand_times(bench: Bench) {
    let gateways = two(&bench).await;
    for batch in 0..20 {
        let calls = (0..100).map(|n| {
            let key = format!("k{batch}-{}", n / 2);
            gateways[n % 2].post("/pay").key(key)
        });
        let answers = send_all(calls).await;
        for pair in answers.chunks(2) {
            assert_one_executed(pair);
        }
    }
    assert_eq!(bench.upstream.executions_at("/pay"), 1000);
    assert_eq!(bench.database.count("eec_routing_decision").await, 1000);
}

async fn waits_on_the_other(bench: &Bench, poll: &str) -> Duration {
    let gate = Gate::closed();
    bench
        .upstream
        .on_post("/pay")
        .reply(Reply::new(201).hold(&gate));
    let gateway = || {
        let setup = bench.gateway().section("store", poll);
        setup.route("lease = \"15s\"\nwait = \"20s\"\ntimeout = \"30s\"")
    };
    let (one, other) = (gateway().start().await, gateway().start().await);
    let first = one.post("/pay").key("k").begin();
    bench
        .upstream
        .until(|state| state.executions("k") == 1)
        .await;
    let duplicate = other.post("/pay").key("k").begin();
    // Whoever waits for another gateway's owner marks the record, so that a hint is sent.
    let marked = "select count(*) from eec_routing_idempotency where awaited";
    eventually("the record is marked", async || {
        (bench.database.number(marked).await == 1).then_some(())
    })
    .await;
    gate.open();
    first.answer().await.assert_is(201, "executed");
    let committed = Instant::now();
    duplicate.answer().await.assert_is(201, "waited");
    committed.elapsed()
}

async fn a_waiter_is_woken_by_the_other_gateways_commit(bench: Bench) {
    let waited = waits_on_the_other(&bench, "poll_interval = \"10s\"\nnotify = true").await;
    assert!(waited < Duration::from_secs(2), "{waited:?}");
}

async fn a_lost_notification_costs_at_most_a_poll(bench: Bench) {
    let waited = waits_on_the_other(&bench, "poll_interval = \"500ms\"\nnotify = false").await;
    assert!(waited < Duration::from_secs(2), "{waited:?}");
}

async fn a_released_key_is_taken_over_once(bench: Bench) {
    bench.allow_reruns();
    bench.upstream.on_post("/pay").once().answer(429, "later");
    bench.upstream.on_post("/pay").answer(201, "done");
    let gateways = two(&bench).await;
    let first = gateways[0].post("/pay").key("k").send().await;
    first.assert_is(429, "executed");
    let released = bench.database.record("k").await.expect("a record");
    assert_eq!(released.status, "failed_before_commit");

    let calls = (0..40).map(|n| gateways[n % 2].post("/pay").key("k"));
    assert_one_executed(&send_all(calls).await);
    assert_eq!(bench.upstream.executions("k"), 2);
    let record = bench.database.record("k").await.expect("a record");
    assert_eq!(record.generation_id, released.generation_id);
    assert_ne!(record.attempt_token, released.attempt_token);
}

async fn an_expired_key_is_taken_over_once(bench: Bench) {
    bench.allow_reruns();
    let setup = || {
        let setup = bench.gateway().section("store", "purge_interval = \"1h\"");
        setup.other_route("path = \"/short\"\npool = \"main\"\nvalid_for = \"1s\"")
    };
    let gateways = [setup().start().await, setup().start().await];
    let first = gateways[0].post("/short").key("k").send().await;
    first.assert_is(200, "executed");
    let before = bench.database.record("k").await.expect("a record");
    let_pass(Duration::from_millis(1100)).await;

    let calls = (0..2).map(|n| gateways[n % 2].post("/short").key("k"));
    let answers = send_all(calls).await;
    assert_one_executed(&answers);
    assert_ne!(answers[0].decision(), first.decision());
    assert_eq!(bench.upstream.executions("k"), 2);
    let record = bench.database.record("k").await.expect("a record");
    assert_eq!(record.generation, before.generation + 1);
    assert_ne!(record.generation_id, before.generation_id);
}

/// Around the expiry instant, with retention at work, there is never a second owner: the time of
/// validity that each execution was told begins after the one before is over.
async fn generations_of_a_short_lived_key_never_overlap(bench: Bench) {
    bench.allow_reruns();
    let setup = || {
        let setup = bench
            .gateway()
            .section("store", "purge_interval = \"50ms\"");
        setup
            .route("timeout = \"1s\"\nvalid_for = \"1s\"")
            .section("limits", "cache_trust = \"500ms\"")
    };
    let gateways = [setup().start().await, setup().start().await];
    let start = Instant::now();
    let mut executions = Vec::new();
    while start.elapsed() < Duration::from_secs(4) {
        let calls = (0..20).map(|n| gateways[n % 2].post("/pay").key("k"));
        for answer in send_all(calls).await {
            assert_eq!(answer.status, 200);
            if answer.idempotency() == "executed" {
                let instant = |name| {
                    let text = answer.header(name).expect("an instant");
                    OffsetDateTime::parse(&text, &Rfc3339).expect("RFC 3339")
                };
                let created = instant("idempotency-created");
                executions.push((created, instant("idempotency-expires")));
            }
        }
    }
    executions.sort_unstable();
    assert!(executions.len() >= 3, "{executions:?}");
    assert_eq!(executions.len(), bench.upstream.executions("k"));
    for pair in executions.windows(2) {
        assert!(pair[1].0 >= pair[0].1, "{pair:?}");
    }
}

/// A rival's insert that is not committed yet makes neither an error nor an empty result.
async fn an_uncommitted_rival_ends_as_owner_or_duplicate(bench: Bench) {
    let gateway = bench.gateway().route("wait = \"300ms\"").start().await;
    let Database::Postgres(database) = &bench.database else {
        panic!("on PostgreSQL");
    };
    for (end, status, idempotency) in [
        ("rollback", 200, "executed"),
        ("commit", 409, "in-progress"),
    ] {
        let mut rival = database.connect().await;
        let insert = format!(
            "begin; insert into eec_routing_idempotency
             (tenant_scope, pool_id, idempotency_key, lease_expires_at, attempt_token)
             values ('acme', 'main', '{end}', now() + interval '60 s', gen_random_uuid())"
        );
        let insert = sqlx::raw_sql(sqlx::AssertSqlSafe(insert));
        insert.execute(&mut rival).await.expect("the rival inserts");
        let call = gateway.post("/pay").key(end).begin();
        let blocked = "select count(*) from pg_stat_activity
            where datname = current_database() and wait_event_type = 'Lock'";
        eventually("the reserve waits for the rival", async || {
            (bench.database.number(blocked).await > 0).then_some(())
        })
        .await;
        rival.execute(end).await.expect("the rival ends");
        call.answer().await.assert_is(status, idempotency);
    }
}

/// Between looking and inserting there is nothing to be slipped through.
async fn a_slow_insert_opens_no_gap(bench: Bench) {
    let gateways = two(&bench).await;
    bench
        .database
        .execute(
            "create function slow() returns trigger language plpgsql as
             $$ begin perform pg_sleep(0.02); return new; end $$",
        )
        .await;
    bench
        .database
        .execute(
            "create trigger slow before insert on eec_routing_idempotency
             for each row execute function slow()",
        )
        .await;
    let calls = (0..60).map(|n| gateways[n % 2].post("/pay").key(format!("k{}", n / 20)));
    let answers = send_all(calls).await;
    for answers in answers.chunks(20) {
        assert_one_executed(answers);
    }
}

/// No such status is defined, and upstreams use them all the same.
async fn an_unheard_of_status_is_replayed_there_too(bench: Bench) {
    bench.upstream.on_post("/pay").answer(999, "no");
    let [one, other] = two(&bench).await;
    one.post("/pay")
        .key("k")
        .send()
        .await
        .assert_is(999, "executed");
    let again = other.post("/pay").key("k").send().await;
    again.assert_is(999, "replayed");
    assert_eq!(again.text(), "no");
}

async fn a_decision_made_here_is_replayed_there(bench: Bench) {
    let [here, there] = two(&bench).await;
    let first = here.post("/pay").key("k").send().await;
    first.assert_is(200, "executed");
    let again = there.post("/pay").key("k").send().await;
    again.assert_is(200, "replayed");
    assert_eq!(again.kept(), first.kept());
    // One secret for all: the fingerprint made there is the one made here.
    let other = there.post("/pay").key("k").json("{}").send().await;
    other.assert_problem(422, "key-reused", "mismatch");
}

async fn one_connection_to_the_store_is_enough(bench: Bench) {
    let gateway = bench
        .gateway()
        .section("store", "connections_max = 1")
        .start()
        .await;
    let calls = (0..60).map(|n| gateway.post("/pay").key(format!("k{}", n / 3)));
    for answers in send_all(calls).await.chunks(3) {
        assert_one_executed(answers);
    }
    let idle = "select count(*) from pg_stat_activity
        where datname = current_database() and state like 'idle in transaction%'";
    assert_eq!(bench.database.number(idle).await, 0);
}

/// They are counted, and bounded, like those who wait for an owner next door.
async fn those_who_wait_for_another_gateways_owner_are_waiters(bench: Bench) {
    let gate = Gate::closed();
    bench
        .upstream
        .on_post("/pay")
        .reply(Reply::new(201).hold(&gate));
    let one = bench.gateway().start().await;
    let limits = "waiters_per_key_max = 2\nwaiters_max = 2";
    let other = bench.gateway().section("limits", limits).start().await;
    let keys = ["a", "b", "c"];
    let owners = keys.map(|key| one.post("/pay").key(key).begin());
    bench
        .upstream
        .until(|state| state.requests.len() == 3)
        .await;
    let parked = ["a", "b"].map(|key| other.post("/pay").key(key).begin());
    other.until_parked(2).await;
    let extra = other.post("/pay").key("c").send().await;
    extra.assert_problem(503, "overloaded", "refused");
    gate.open();
    for owner in owners {
        owner.answer().await.assert_is(201, "executed");
    }
    for waiter in parked {
        waiter.answer().await.assert_is(201, "waited");
    }
}
