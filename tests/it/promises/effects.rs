//! What follows from a decision: each effect reaches its destination, with one key and the same
//! bytes, in order, and what can't be delivered is visible and can be tried again.

use serde_json::{Value, json};

use crate::support::client::send_all;
use crate::support::clock::eventually;
use crate::support::gateway::{Bench, Setup};
use crate::support::invariants::{Delivered, assert_all};
use crate::support::upstream::{Reply, Upstream};

each_store!(
    effects_of_a_decision_come_once_and_in_order,
    nothing_follows_an_answer_that_is_no_success,
    a_retry_of_the_client_starts_nothing_more,
    faults_of_the_destination_are_suffered_and_cost_no_dead_letter,
    a_fault_of_the_item_ends_dead_and_is_redriven_with_the_same_key,
    a_discarded_effect_lets_its_run_go_on,
    nul_bytes_and_large_bodies_pass,
    bytes_are_frozen_when_their_step_begins,
    a_payload_that_cannot_be_rendered_makes_the_run_stuck_and_loses_no_decision,
    a_paused_destination_keeps_its_backlog,
);

/// A route with these effects to the destination `hook`.
pub fn with_effects(bench: &Bench, hook: &Upstream, effects: &str) -> Setup {
    let setup = bench.gateway().hook(hook).tokens();
    let setup = setup.section("outbox", "poll_interval = \"200ms\"");
    setup.route(&format!("effect = [{effects}]"))
}

async fn effects_of_a_decision_come_once_and_in_order(bench: Bench) {
    let hook = Upstream::start().await;
    let effects = r#"{ http = "hook", path = "/a" }, { http = "hook", path = "/b" },
        { http = "hook", path = "/c", template = '{"n": {{ decision.body.execution }}}' }"#;
    let gateway = with_effects(&bench, &hook, effects).start().await;
    let calls = (0..20).map(|n| gateway.post("/pay").key(format!("k{n}")));
    for answer in send_all(calls).await {
        answer.assert_is(200, "executed");
    }
    let runs = bench.database.until_runs_are(20, "completed").await;
    assert!(runs.iter().all(|run| run.reason.is_empty()), "{runs:?}");
    assert_eq!(hook.requests().len(), 60);
    assert_all(&bench.database, &hook.requests(), 0).await;
    let rendered = hook
        .requests()
        .into_iter()
        .filter(|seen| seen.path() == "/c");
    for seen in rendered {
        let body: Value = serde_json::from_slice(&seen.body).expect("JSON");
        assert!(body["n"].is_u64(), "{body}");
    }
}

async fn nothing_follows_an_answer_that_is_no_success(bench: Bench) {
    let hook = Upstream::start().await;
    let gateway = with_effects(&bench, &hook, r#"{ http = "hook" }"#)
        .start()
        .await;
    for status in [301, 404, 422, 500] {
        bench
            .upstream
            .on_post("/pay")
            .once()
            .reply(Reply::new(status));
        let answer = gateway.post("/pay").key(format!("k{status}")).send().await;
        answer.assert_is(status, "executed");
    }
    assert_eq!(bench.database.count("eec_routing_decision").await, 4);
    assert_eq!(bench.database.count("eec_run").await, 0);
    assert_eq!(bench.database.count("eec_effect_intent").await, 0);
}

async fn a_retry_of_the_client_starts_nothing_more(bench: Bench) {
    let hook = Upstream::start().await;
    let gateway = with_effects(&bench, &hook, r#"{ http = "hook" }"#)
        .start()
        .await;
    gateway
        .post("/pay")
        .key("k")
        .send()
        .await
        .assert_is(200, "executed");
    bench.database.until_runs_are(1, "completed").await;
    let before = bench.database.row_counts().await;
    for _ in 0..5 {
        gateway
            .post("/pay")
            .key("k")
            .send()
            .await
            .assert_is(200, "replayed");
    }
    assert_eq!(bench.database.row_counts().await, before);
    assert_all(&bench.database, &hook.requests(), 0).await;
}

/// An outage is not the items' fault: nothing is given up for it, however often it was tried.
async fn faults_of_the_destination_are_suffered_and_cost_no_dead_letter(bench: Bench) {
    let hook = Upstream::start().await;
    for status in [500, 502, 503, 504, 429, 408] {
        hook.on_post("/").once().reply(Reply::new(status));
    }
    let setup = with_effects(&bench, &hook, r#"{ http = "hook" }"#);
    let setup = setup.section("outbox", "breaker_open = \"200ms\"");
    let gateway = setup.start().await;
    gateway
        .post("/pay")
        .key("k")
        .send()
        .await
        .assert_is(200, "executed");
    bench.database.until_runs_are(1, "completed").await;
    assert_eq!(hook.requests().len(), 7);
    assert_all(&bench.database, &hook.requests(), 6).await;
}

async fn a_fault_of_the_item_ends_dead_and_is_redriven_with_the_same_key(bench: Bench) {
    let hook = Upstream::start().await;
    hook.on_post("/").reply(Reply::new(422));
    let effects = r#"{ http = "hook" }, { http = "hook", path = "/second" }"#;
    let gateway = with_effects(&bench, &hook, effects).start().await;
    gateway
        .post("/pay")
        .key("k")
        .send()
        .await
        .assert_is(200, "executed");
    let runs = bench.database.until_runs_are(1, "stuck").await;
    assert!(runs[0].reason.contains("422"), "{runs:?}");
    assert_eq!(
        hook.requests().len(),
        2,
        "two faults of the item are the budget"
    );
    let dead = gateway
        .api("operator", "GET", "/v1/outbox?status=dead")
        .send()
        .await;
    assert_eq!(dead.status, 200, "{}", dead.text());
    hook.on_post("/").reply(Reply::new(200));
    let redrive = json!({ "filter": { "status": "dead" }, "reason": "the receiver is mended" });
    let call = gateway
        .api("operator", "POST", "/v1/outbox/redrive")
        .json(redrive.to_string());
    let answer = call.send().await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    bench.database.until_runs_are(1, "completed").await;
    // Two refused tries and the good one, with one key; then the second effect.
    let delivered = Delivered::read(&hook.requests());
    assert_eq!(hook.requests().len(), 4);
    assert_eq!(delivered.duplicates(), 2);
    assert_all(&bench.database, &hook.requests(), 2).await;
    let again = gateway
        .api("operator", "POST", "/v1/outbox/redrive")
        .json(redrive.to_string());
    let again: Value = serde_json::from_str(&again.send().await.text()).expect("JSON");
    assert_eq!(again["done"], 0, "{again}");
}

async fn a_discarded_effect_lets_its_run_go_on(bench: Bench) {
    let hook = Upstream::start().await;
    hook.on_post("/first").reply(Reply::new(400));
    let effects = r#"{ http = "hook", path = "/first" }, { http = "hook", path = "/second" }"#;
    let gateway = with_effects(&bench, &hook, effects).start().await;
    gateway
        .post("/pay")
        .key("k")
        .send()
        .await
        .assert_is(200, "executed");
    bench.database.until_runs_are(1, "stuck").await;
    let body = json!({ "filter": { "status": "dead" }, "reason": "nobody wants it" }).to_string();
    let answer = gateway
        .api("operator", "POST", "/v1/outbox/discard")
        .json(body)
        .send()
        .await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    bench.database.until_runs_are(1, "completed").await;
    assert_eq!(
        hook.requests()
            .iter()
            .filter(|seen| seen.path() == "/second")
            .count(),
        1
    );
    assert!(bench.database.count("eec_operator_audit").await >= 1);
    let redrive = json!({ "filter": { "destination": "hook" }, "reason": "no" });
    let call = gateway
        .api("operator", "POST", "/v1/outbox/redrive")
        .json(redrive.to_string());
    let answer: Value = serde_json::from_str(&call.send().await.text()).expect("JSON");
    assert_eq!(answer["done"], 0, "{answer}");
}

async fn nul_bytes_and_large_bodies_pass(bench: Bench) {
    let hook = Upstream::start().await;
    hook.on_post("/once")
        .once()
        .reply(Reply::new(503).body("a\0b\0"));
    hook.on_post("/once").reply(Reply::new(200).body("\0\0"));
    let effects = r#"{ http = "hook", path = "/once", body = "request" }"#;
    let gateway = with_effects(&bench, &hook, effects).start().await;
    let mut large = vec![b'x'; 5 * 1024 * 1024];
    large[17] = 0;
    let call = gateway
        .post("/pay")
        .key("large")
        .body("application/octet-stream", &large);
    call.send().await.assert_is(200, "executed");
    bench.database.until_runs_are(1, "completed").await;
    let seen = hook.requests();
    assert!(seen.len() == 2 && seen.iter().all(|seen| seen.body == large));
    assert_all(&bench.database, &seen, 1).await;
}

/// A template that is edited between two tries changes nothing.
async fn bytes_are_frozen_when_their_step_begins(bench: Bench) {
    let hook = Upstream::start().await;
    hook.on_post("/").reply(Reply::new(503));
    let effect = |text: &str| format!(r#"{{ http = "hook", template = "{text}" }}"#);
    let before = with_effects(&bench, &hook, &effect("one {{ key }}"));
    let gateway = before.start().await;
    gateway
        .post("/pay")
        .key("k")
        .send()
        .await
        .assert_is(200, "executed");
    hook.until(|state| !state.requests.is_empty()).await;
    drop(gateway);
    hook.on_post("/").reply(Reply::new(200));
    let gateway = with_effects(&bench, &hook, &effect("two {{ key }}"))
        .start()
        .await;
    bench.database.until_runs_are(1, "completed").await;
    let seen = hook.requests();
    assert!(seen.iter().all(|seen| seen.body == b"one k"), "{seen:?}");
    assert_all(&bench.database, &seen, seen.len() - 1).await;
    drop(gateway);
}

async fn a_payload_that_cannot_be_rendered_makes_the_run_stuck_and_loses_no_decision(bench: Bench) {
    let hook = Upstream::start().await;
    let effect = r#"{ http = "hook", template = "{{ decision.body.absent.deeper }}" }"#;
    let gateway = with_effects(&bench, &hook, effect).start().await;
    gateway
        .post("/pay")
        .key("k")
        .send()
        .await
        .assert_is(200, "executed");
    let runs = bench.database.until_runs_are(1, "stuck").await;
    assert!(!runs[0].reason.is_empty());
    gateway
        .post("/pay")
        .key("k")
        .send()
        .await
        .assert_is(200, "replayed");
    assert!(hook.requests().is_empty());
}

async fn a_paused_destination_keeps_its_backlog(bench: Bench) {
    let hook = Upstream::start().await;
    let gateway = with_effects(&bench, &hook, r#"{ http = "hook" }"#)
        .start()
        .await;
    let act = async |what: &str| {
        let path = format!("/v1/outbox/destinations/hook/{what}");
        let body = json!({ "reason": "maintenance" }).to_string();
        let answer = gateway
            .api("operator", "POST", &path)
            .json(body)
            .send()
            .await;
        assert_eq!(answer.status, 200, "{}", answer.text());
    };
    act("pause").await;
    let calls = (0..10).map(|n| gateway.post("/pay").key(format!("k{n}")));
    for answer in send_all(calls).await {
        answer.assert_is(200, "executed");
    }
    // The drainer went round since, and took nothing.
    let rounds = ("oncegate_worker_rounds_total", [("worker", "outbox")]);
    let then = gateway.metrics().await.sum(rounds.0, &rounds.1);
    eventually("the outbox goes round", async || {
        let now = gateway.metrics().await.sum(rounds.0, &rounds.1);
        (now > then + 2.5).then_some(())
    })
    .await;
    assert!(hook.requests().is_empty());
    let intents = bench.database.intents().await;
    assert!(
        intents
            .iter()
            .all(|intent| intent.status == "pending" && intent.tries == 0)
    );
    act("resume").await;
    bench.database.until_runs_are(10, "completed").await;
    assert_all(&bench.database, &hook.requests(), 0).await;
}
