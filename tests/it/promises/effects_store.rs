//! Effects whatever becomes of the store: nothing is lost, and no gateway has to be started anew.

use std::time::Duration;

use super::effects::with_effects;
use super::store_trouble::{read_only, run};
use crate::support::chaos_proxy::{ChaosProxy, Mode};
use crate::support::client::send_all;
use crate::support::clock::eventually;
use crate::support::gateway::Bench;
use crate::support::invariants::{Delivered, assert_all};
use crate::support::pgbouncer::PgBouncer;
use crate::support::rows::Database;
use crate::support::upstream::{Gate, Reply, Upstream};

each_store!(a_store_that_is_restored_from_a_copy_goes_on_where_it_was);
on_postgres!(
    lost_replies_of_the_store_duplicate_nothing_and_lose_nothing,
    a_restart_of_the_store_loses_nothing,
    a_store_that_was_read_only_for_a_while_loses_nothing,
    behind_a_transaction_pooler_effects_flow,
);

const QUICK: &str = "poll_interval = \"200ms\"\nclaim_lease = \"3500ms\"";
const THREE: &str = r#"{ http = "hook", path = "/a" }, { http = "hook", path = "/b" },
    { http = "hook", path = "/c" }"#;

/// No state hangs on a transaction's id or a place in a file.
async fn a_store_that_is_restored_from_a_copy_goes_on_where_it_was(mut bench: Bench) {
    let hook = Upstream::start().await;
    let gate = Gate::closed();
    hook.on_post("/b").reply(Reply::new(200).hold(&gate));
    let setup = |bench: &Bench| with_effects(bench, &hook, THREE).section("outbox", QUICK);
    let mut gateway = setup(&bench).start().await;
    let calls = (0..8).map(|n| gateway.post("/pay").key(format!("k{n}")));
    for answer in send_all(calls).await {
        answer.assert_is(200, "executed");
    }
    hook.until(|state| state.executions_at("/b") == 8).await;
    // Killed, so that claims of what is under way are among what is copied.
    gateway.sigkill();
    let before = bench.database.runs().await;
    bench.database = bench.database.restored().await;
    assert_eq!(bench.database.runs().await, before);
    gate.open();
    let gateway = setup(&bench).start().await;
    let answer = gateway.post("/pay").key("k0").send().await;
    answer.assert_is(200, "replayed");
    bench.database.until_runs_are(8, "completed").await;
    assert_all(&bench.database, &hook.requests(), 8).await;
}

/// The store does what it was asked, and the reply is lost: of completions, claims, ends and ticks.
async fn lost_replies_of_the_store_duplicate_nothing_and_lose_nothing(bench: Bench) {
    let hook = Upstream::start().await;
    let Database::Postgres(database) = &bench.database else {
        panic!("on PostgreSQL");
    };
    let proxy = ChaosProxy::start(database.address()).await;
    let setup = with_effects(&bench, &hook, THREE);
    let setup = setup.store_url(&database.url_through(proxy.address()));
    let gateway = setup.start().await;
    for round in 0..12 {
        proxy.set(Mode::Swallow(b""));
        let calls = (0..3).map(|n| gateway.post("/pay").key(format!("k{round}-{n}")));
        for answer in send_all(calls).await {
            assert_eq!(answer.status, 200, "{answer:?}");
        }
        eventually("a reply was lost", async || {
            (proxy.swallowed() > round).then_some(())
        })
        .await;
        proxy.set(Mode::Pass);
    }
    bench.database.until_runs_are(36, "completed").await;
    // A claim whose reply was lost is recognised by its stamp; nothing was sent for it yet.
    assert_all(&bench.database, &hook.requests(), 0).await;
}

async fn a_restart_of_the_store_loses_nothing(bench: Bench) {
    let hook = Upstream::start().await;
    hook.on_post("/a")
        .reply(Reply::new(200).delay(Duration::from_millis(20)));
    let setup = with_effects(&bench, &hook, THREE).section("outbox", QUICK);
    let gateway = setup.start().await;
    for round in 0..4 {
        let calls = (0..10).map(|n| gateway.post("/pay").key(format!("k{round}-{n}")));
        for answer in send_all(calls).await {
            answer.assert_is(200, "executed");
        }
        // Every connection of this database ends at once, whatever it is doing.
        let end = "select count(pg_terminate_backend(pid)) from pg_stat_activity \
                   where datname = current_database() and pid <> pg_backend_pid()";
        bench.database.number(end).await;
    }
    bench.database.until_runs_are(40, "completed").await;
    assert_all(&bench.database, &hook.requests(), 40).await;
    let idle = "select count(*) from pg_stat_activity where state like 'idle in transaction%' \
                and datname = current_database()";
    assert_eq!(bench.database.number(idle).await, 0);
}

/// A primary that was demoted, and comes back.
async fn a_store_that_was_read_only_for_a_while_loses_nothing(bench: Bench) {
    let hook = Upstream::start().await;
    let gate = Gate::closed();
    hook.on_post("/a").reply(Reply::new(200).hold(&gate));
    let setup = with_effects(&bench, &hook, THREE).section("outbox", QUICK);
    let gateway = setup.start().await;
    let calls = (0..8).map(|n| gateway.post("/pay").key(format!("k{n}")));
    for answer in send_all(calls).await {
        answer.assert_is(200, "executed");
    }
    hook.until(|state| state.executions_at("/a") == 8).await;
    run(&bench, &[&read_only("on")]).await;
    // They are delivered, and nobody can write so.
    gate.open();
    eventually("ends are refused", async || {
        let failed = gateway.log_holds("read-only");
        failed.then_some(())
    })
    .await;
    let writable = "set session characteristics as transaction read write";
    run(&bench, &[writable, &read_only("off")]).await;
    bench.database.until_runs_are(8, "completed").await;
    assert_all(&bench.database, &hook.requests(), 8).await;
}

async fn behind_a_transaction_pooler_effects_flow(bench: Bench) {
    let hook = Upstream::start().await;
    let Database::Postgres(database) = &bench.database else {
        panic!("on PostgreSQL");
    };
    let pooler = PgBouncer::start(database, 3).await;
    let setup = with_effects(&bench, &hook, THREE);
    let setup = setup.store_url(&database.url_through(pooler.address()));
    let gateway = setup.section("store", "notify = false").start().await;
    let calls = (0..30).map(|n| gateway.post("/pay").key(format!("k{n}")));
    for answer in send_all(calls).await {
        answer.assert_is(200, "executed");
    }
    bench.database.until_runs_are(30, "completed").await;
    assert_eq!(Delivered::read(&hook.requests()).duplicates(), 0);
    assert_all(&bench.database, &hook.requests(), 0).await;
}
