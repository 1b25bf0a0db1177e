//! What an owner learns or tells late, when the store was away meanwhile.

use std::time::Duration;

use sqlx::Executor as _;

use super::store_outage::{behind, proxy};
use crate::support::chaos_proxy::Mode;
use crate::support::clock::{eventually, let_pass};
use crate::support::gateway::Bench;
use crate::support::rows::Database;
use crate::support::upstream::{Gate, Reply};

on_postgres!(
    a_commit_that_was_acknowledged_late_is_valid_from_when_it_happened,
    an_answer_that_is_released_late_opens_its_key,
);

/// The commit happened and nobody was told. When the gateway learns of it, the answer is as old as
/// the store says, and is served no longer than that.
async fn a_commit_that_was_acknowledged_late_is_valid_from_when_it_happened(bench: Bench) {
    bench.allow_reruns();
    let Database::Postgres(database) = &bench.database else {
        panic!("on PostgreSQL");
    };
    let proxy = proxy(&bench).await;
    let gate = Gate::closed();
    let slow = Reply::new(201).hold(&gate);
    bench.upstream.on_post("/pay").reply(slow);
    let times = "timeout = \"5s\"\nvalid_for = \"6s\"\nlease = \"5s\"";
    let gateway = behind(&bench, &proxy).route(times).start().await;
    let first = gateway.post("/pay").key("k").begin();
    bench
        .upstream
        .until(|state| state.executions("k") == 1)
        .await;

    // Held until the commit waits for it; then the line goes silent, and the commit goes through.
    let mut holder = database.connect().await;
    let hold = "begin; select 1 from eec_routing_idempotency for update";
    holder.execute(sqlx::raw_sql(hold)).await.expect("a lock");
    gate.open();
    let waits = "select count(*) from pg_stat_activity where datname = current_database() \
        and wait_event_type = 'Lock' and query like '%into eec_routing_decision%'";
    eventually("the commit waits", async || {
        (bench.database.number(waits).await > 0).then_some(())
    })
    .await;
    proxy.set(Mode::Silent);
    holder.execute("commit").await.expect("the lock is free");
    eventually("it is committed", async || {
        (bench.database.status("k").await == "completed").then_some(())
    })
    .await;
    first.answer().await.assert_is(201, "unrecorded");
    proxy.set(Mode::Pass);
    eventually("the gateway knows", async || {
        let metrics = gateway.metrics().await;
        (metrics.sum("oncegate_unrecorded_total", &[("result", "committed")]) > 0.5).then_some(())
    })
    .await;
    let record = bench.database.record("k").await.expect("a valid record");
    let left = Duration::from_millis(u64::try_from(record.valid_ms).expect("it is valid"));
    gateway
        .post("/pay")
        .key("k")
        .send()
        .await
        .assert_is(201, "replayed");
    let_pass(left + Duration::from_millis(100)).await;
    let again = gateway.post("/pay").key("k").send().await;
    again.assert_is(201, "executed");
}

/// The store was away for longer than the lease, and the record was taken for unknown meanwhile.
/// Its owner knows better: the upstream answered, and said to come again.
async fn an_answer_that_is_released_late_opens_its_key(bench: Bench) {
    bench.allow_reruns();
    let proxy = proxy(&bench).await;
    let gate = Gate::closed();
    let busy = Reply::new(429).hold(&gate);
    bench.upstream.on_post("/pay").once().reply(busy);
    bench.upstream.on_post("/pay").answer(201, "done");
    let gateway = behind(&bench, &proxy).start().await;
    let _sweeper = bench.gateway().start().await;
    let first = gateway.post("/pay").key("k").begin();
    bench
        .upstream
        .until(|state| state.executions("k") == 1)
        .await;
    proxy.set(Mode::Reset);
    eventually("its lease is over", async || {
        (bench.database.status("k").await == "outcome_unknown").then_some(())
    })
    .await;
    gate.open();
    first.answer().await.assert_is(429, "executed");
    proxy.set(Mode::Pass);
    let again = eventually("the key is open", async || {
        let answer = gateway.post("/pay").key("k").send().await;
        (answer.status == 201).then_some(answer)
    })
    .await;
    again.assert_is(201, "executed");
}
