//! What a proxy route does after a 2xx is committed with the decision, however late that is.

use serde_json::Value;

use super::lookups::told;
use super::store_outage::{behind, proxy};
use crate::support::chaos_proxy::Mode;
use crate::support::clock::eventually;
use crate::support::gateway::{Bench, Setup};
use crate::support::invariants::assert_all;
use crate::support::upstream::{Gate, Reply, Upstream};

each_store!(
    what_follows_is_there_once_the_answer_is_seen,
    what_follows_sees_the_request_and_the_answer,
    an_answer_that_is_released_starts_nothing,
    a_late_answer_starts_what_follows,
    an_answer_without_its_body_starts_what_follows,
    what_a_destination_answers_is_not_told_to_the_client,
);

on_postgres!(an_answer_that_is_recorded_later_starts_what_follows_then);

const QUICK: &str = "poll_interval = \"100ms\"\nclaim_lease = \"3500ms\"";

fn following(setup: Setup, hook: &Upstream, effect: &str) -> Setup {
    let setup = setup.hook(hook).section("outbox", QUICK);
    setup.route(&format!("effect = [{{ http = \"hook\", {effect} }}]"))
}

async fn what_follows_is_there_once_the_answer_is_seen(bench: Bench) {
    let hook = Upstream::start().await;
    let setup = following(bench.gateway(), &hook, "body = \"decision\"");
    let mut gateway = setup.start().await;
    for n in 0..4 {
        let mut connection = gateway.post("/pay").key(format!("k{n}")).start().await;
        let head = connection.answer_head().await.expect("an answer");
        gateway.sigkill();
        head.assert_is(200, "executed");
        assert_eq!(bench.database.count("eec_run").await, n + 1);
        gateway.restart().await;
        let look = || {
            gateway
                .call("GET", &format!("/.oncegate/records/main/k{n}"))
                .send()
        };
        let run = eventually("the run is over", async || {
            let run = told(&look().await)["run"].clone();
            (run["status"] == "completed").then_some(run)
        })
        .await;
        assert_eq!(run["run_id"], head.decision().unwrap());
    }
    // A kill during a delivery costs a second one, under the same key: assert_all knows which.
    let again = hook.requests().len().saturating_sub(4);
    assert_all(&bench.database, &hook.requests(), again).await;
}

async fn what_follows_sees_the_request_and_the_answer(bench: Bench) {
    let hook = Upstream::start().await;
    let reply = Reply::new(201)
        .header("content-type", "application/json")
        .body(r#"{"id":7}"#);
    bench.upstream.on_post("/pay").reply(reply);
    let template = "template = '{{ request.method }} {{ request.path }}?{{ request.query }} \
        {{ request.body.amount }} {{ decision.status }} {{ decision.body.id }} {{ tenant }} \
        {{ pool }} {{ key }}'";
    let setup = following(bench.gateway(), &hook, template);
    let gateway = setup.start().await;
    let first = gateway.post("/pay?x=1").key("k").send().await;
    first.assert_is(201, "executed");
    let state = hook.until(|state| state.executions_at("/") == 1).await;
    let body = String::from_utf8_lossy(&state.requests[0].body).into_owned();
    assert_eq!(body, "POST /pay?x=1 1 201 7 acme main k");
}

async fn an_answer_that_is_released_starts_nothing(bench: Bench) {
    let hook = Upstream::start().await;
    let setup = following(bench.gateway(), &hook, "body = \"none\"");
    let gateway = setup.route("release = [429]").start().await;
    bench.upstream.on_post("/pay").once().answer(429, "later");
    let first = gateway.post("/pay").key("k").send().await;
    first.assert_is(429, "executed");
    assert_eq!(bench.database.count("eec_run").await, 0);
}

/// Its client has its 504; the owner listened on.
async fn a_late_answer_starts_what_follows(bench: Bench) {
    let hook = Upstream::start().await;
    let gate = Gate::closed();
    let slow = Reply::new(201).hold(&gate);
    bench.upstream.on_post("/pay").reply(slow);
    let setup = following(bench.gateway(), &hook, "body = \"none\"");
    let setup = setup.route("timeout = \"500ms\"\nlinger = \"10s\"");
    let gateway = setup.start().await;
    let first = gateway.post("/pay").key("k").send().await;
    first.assert_problem(504, "outcome-unknown", "unknown");
    assert_eq!(bench.database.count("eec_run").await, 0);
    gate.open();
    hook.until(|state| state.executions_at("/") == 1).await;
    let again = gateway.post("/pay").key("k").send().await;
    again.assert_is(201, "replayed");
}

async fn an_answer_without_its_body_starts_what_follows(bench: Bench) {
    let hook = Upstream::start().await;
    bench.upstream.on_post("/pay").answer(200, vec![b'x'; 2000]);
    let setup = following(bench.gateway(), &hook, "body = \"request\"");
    let setup = setup.route("store_body_max = \"1KiB\"");
    let gateway = setup.start().await;
    let first = gateway.post("/pay").key("k").send().await;
    first.assert_is(200, "executed");
    let state = hook.until(|state| state.executions_at("/") == 1).await;
    assert_eq!(state.requests[0].body, br#"{"amount":1}"#);
}

async fn what_a_destination_answers_is_not_told_to_the_client(bench: Bench) {
    let hook = Upstream::start().await;
    hook.on_post("/").answer(200, "between the two of us");
    let setup = following(bench.gateway(), &hook, "body = \"none\"");
    let gateway = setup.start().await;
    let first = gateway.post("/pay").key("k").send().await;
    first.assert_is(200, "executed");
    let location = format!("/.oncegate/runs/{}", first.decision().unwrap());
    let run = eventually("the run is over", async || {
        let run = told(&gateway.call("GET", &location).send().await);
        (run["ended"] != Value::Null).then_some(run)
    })
    .await;
    assert_eq!(run["status"], "completed");
    assert_eq!(run["workflow"], "effects");
    assert_eq!(run["answer"], Value::Null);
    assert!(run["last_transition_seq"].as_i64() > Some(1), "{run}");
}

async fn an_answer_that_is_recorded_later_starts_what_follows_then(bench: Bench) {
    let hook = Upstream::start().await;
    let proxy = proxy(&bench).await;
    let gate = Gate::closed();
    let slow = Reply::new(201).hold(&gate);
    bench.upstream.on_post("/pay").reply(slow);
    let setup = following(behind(&bench, &proxy), &hook, "body = \"none\"");
    let gateway = setup.route("lease = \"30s\"").start().await;
    let first = gateway.post("/pay").key("k").begin();
    let came = |state: &crate::support::upstream::State| state.executions("k") == 1;
    bench.upstream.until(came).await;
    proxy.set(Mode::Reset);
    gate.open();
    first.answer().await.assert_is(201, "unrecorded");
    assert_eq!(bench.database.count("eec_run").await, 0);
    proxy.set(Mode::Pass);
    hook.until(|state| state.executions_at("/") == 1).await;
    let again = gateway.post("/pay").key("k").send().await;
    again.assert_is(201, "replayed");
    assert_eq!(bench.database.count("eec_run").await, 1);
}
