//! Many intents, many tenants, many destinations: one never delays another.

use std::time::{Duration, Instant};

use super::effects::with_effects;
use crate::support::client::send_all;
use crate::support::clock::within;
use crate::support::destination::{Act, Destination};
use crate::support::gateway::Bench;
use crate::support::rows::Database;
use crate::support::upstream::{Gate, Reply, Upstream};

each_store!(
    a_dead_destination_among_fifty_delays_no_other,
    a_tenant_with_a_large_backlog_does_not_delay_a_quiet_one,
    answers_without_end_cost_no_memory_and_end_their_runs,
);

/// How much of each answer there would be.
const ENDLESS: u64 = 2 << 30;

async fn a_dead_destination_among_fifty_delays_no_other(bench: Bench) {
    let hook = Upstream::start().await;
    let gate = Gate::closed();
    hook.on_post("/d0").reply(Reply::new(200).hold(&gate));
    let mut setup = bench.gateway().tokens();
    for n in 0..50 {
        let lines = format!(
            "id = \"d{n}\"\nurl = \"{}/d{n}\"\nallow_private = true\ntimeout = \"30s\"",
            hook.url()
        );
        setup = setup.more("destination", &lines);
        let route = format!("path = \"/to{n}\"\npool = \"main\"\neffect = [{{ http = \"d{n}\" }}]");
        setup = setup.other_route(&route);
    }
    let gateway = setup
        .section("outbox", "poll_interval = \"200ms\"")
        .start()
        .await;
    // The dead one first, and more of it than it may have in flight.
    let dead = (0..100).map(|n| gateway.post("/to0").key(format!("dead{n}")));
    send_all(dead).await;
    let start = Instant::now();
    let others = (0..200).map(|n| {
        let path = format!("/to{}", 1 + n % 49);
        gateway.post(&path).key(format!("k{n}"))
    });
    send_all(others).await;
    let done = "select count(*) from eec_run where status = 'completed'";
    within(Duration::from_secs(20), "the others are done", async || {
        (bench.database.number(done).await == 200).then_some(())
    })
    .await;
    assert!(start.elapsed() < Duration::from_secs(20));
    let to_dead = hook
        .requests()
        .iter()
        .filter(|seen| seen.path() == "/d0")
        .count();
    assert!(to_dead <= 16, "its cap bounds what hangs: {to_dead}");
    gate.open();
}

async fn a_tenant_with_a_large_backlog_does_not_delay_a_quiet_one(bench: Bench) {
    let hook = Upstream::start().await;
    hook.on_post("/")
        .reply(Reply::new(200).delay(Duration::from_millis(5)));
    let setup = with_effects(&bench, &hook, r#"{ http = "hook" }"#);
    let setup = setup.section("tenant", "source = \"header:x-tenant\"");
    let mut gateway = setup.clone().start().await;
    let first = gateway
        .post("/pay")
        .header("x-tenant", "noisy")
        .key("k")
        .send()
        .await;
    first.assert_is(200, "executed");
    bench.database.until_runs_are(1, "completed").await;
    gateway.sigterm();
    gateway.end().await;
    let backlog = 200_000;
    bench
        .database
        .execute(&backlog_of("noisy", backlog, &bench.database))
        .await;
    let bodies = "insert into eec_effect_body (tenant_scope, intent_id, part, body) \
        select i.tenant_scope, i.intent_id, 'message', b.body from eec_effect_intent i \
        cross join eec_effect_body b where b.part = 'message' and i.intent_id <> b.intent_id";
    bench.database.execute(bodies).await;
    let runs = "insert into eec_run (tenant_scope, run_id, status, workflow, pool_id, \
        idempotency_key, definition, input, progress) \
        select i.tenant_scope, i.run_id, 'running', r.workflow, r.pool_id, i.idempotency_key, \
        r.definition, r.input, r.progress from eec_effect_intent i cross join eec_run r \
        where i.run_id <> r.run_id";
    bench.database.execute(runs).await;
    gateway.restart().await;
    let pending = "select count(*) from eec_effect_intent where status = 'pending'";
    let start = Instant::now();
    for n in 0..10 {
        let call = gateway
            .post("/pay")
            .header("x-tenant", "quiet")
            .key(format!("q{n}"));
        call.send().await.assert_is(200, "executed");
    }
    let done = "select count(*) from eec_run where tenant_scope = 'quiet' and status = 'completed'";
    within(
        Duration::from_secs(15),
        "the quiet tenant's are done",
        async || (bench.database.number(done).await == 10).then_some(()),
    )
    .await;
    assert!(start.elapsed() < Duration::from_secs(15));
    assert!(
        bench.database.number(pending).await > backlog / 2,
        "the backlog is still there"
    );
}

/// Both a destination of effects and the upstream of a route in mode `accept`, which is called as a
/// step of its run.
async fn answers_without_end_cost_no_memory_and_end_their_runs(bench: Bench) {
    let endless = Destination::start().await;
    endless.script(|_| Act::Chunked(ENDLESS));
    let url = format!("http://{}", endless.address());
    let hook = format!("id = \"hook\"\nurl = \"{url}\"\nallow_private = true\ntimeout = \"5s\"");
    let setup = bench.gateway().more("destination", &hook);
    let setup = setup.pool(&format!("targets = [\"{url}\"]"));
    let setup = setup.section("outbox", "poll_interval = \"200ms\"");
    let setup = setup.route("mode = \"accept\"\nrequired = true\neffect = [{ http = \"hook\" }]");
    let gateway = setup.start().await;
    let before = gateway.memory_peak();
    let calls = (0..20).map(|n| gateway.post("/pay").key(format!("k{n}")));
    for answer in send_all(calls).await {
        assert_eq!(answer.status, 202);
    }
    bench.database.until_runs_are(20, "completed").await;
    assert_eq!(endless.received().len(), 40);
    let grown = gateway.memory_peak() - before;
    assert!(grown < 48 << 20, "{} MiB more", grown >> 20);
}

/// Copies of the newest intent of a tenant, each in a run of its own that nobody knows, due now.
fn backlog_of(tenant: &str, count: i64, database: &Database) -> String {
    let (numbers, id, due) = match database {
        Database::Sqlite(_) => (
            format!(
                "(with recursive n(n) as (select 1 union all select n + 1 from n where n < {count}) \
                 select n from n) g"
            ),
            "randomblob(16), randomblob(16)",
            "created_at",
        ),
        Database::Postgres(_) => (
            format!("generate_series(1, {count}) as g(n)"),
            "gen_random_uuid(), gen_random_uuid()",
            "created_at",
        ),
    };
    format!(
        "insert into eec_effect_intent (tenant_scope, intent_id, run_id, seq, step, destination, \
         idempotency_key, sending, horizon_ms, due_at, first_due_at) \
         select tenant_scope, {id}, 1, step, destination, idempotency_key || g.n, sending, \
         horizon_ms, {due}, {due} from eec_effect_intent cross join {numbers} \
         where tenant_scope = '{tenant}'"
    )
}
