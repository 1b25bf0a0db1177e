//! What is committed with a decision.

use serde_json::{Value, json};

use super::{ACME, Api, OPERATOR, complete, release, reserve_with, rows, with};
use crate::store_conformance::fixture;
use crate::support::gateway::Bench;

each_store!(
    a_decision_its_run_and_its_effects_are_committed_together,
    a_stale_token_commits_no_effects_either,
    a_refused_follow_up_writes_nothing,
    an_operators_resolution_commits_what_it_lets_follow,
    an_input_that_is_nested_too_deep_is_refused,
    an_effect_for_a_pool_speaks_for_the_tenant_of_its_run,
);

fn follow_up() -> Value {
    json!({
        "effects": [
            { "task": "emails", "payload": { "to": "a\u{0}b" } },
            { "pool": "main", "path": "/receipts/{{ key }}", "template": "{{ input.total }}" },
        ],
        "run": { "name": "ship", "steps": [
            { "name": "pause", "wait": "10m" },
            { "name": "send", "task": "parcels", "on_failure": "continue" },
        ]},
        "input": { "total": 7 },
    })
}

async fn a_decision_its_run_and_its_effects_are_committed_together(bench: Bench) {
    let api = Api::start(&bench).await;
    let token = api.reserve("k").await.token();
    let body = with(complete("k", &token), follow_up());
    let first = api.post("complete", body.clone()).await;
    assert_eq!(first.status, 200, "{}", first.json);
    let run_id = first.text("run_id");
    assert_eq!(first.json["decision"]["id"], run_id.as_str());
    let database = &bench.database;
    assert_eq!(database.count("eec_run").await, 1);
    assert_eq!(database.count("eec_effect_intent").await, 2);
    let messages = "select count(*) from eec_effect_body where part = 'message'";
    assert_eq!(database.number(messages).await, 2);
    assert!(database.count("eec_run_transition").await > 0);
    // Only the first is its turn.
    let armed = "select count(*) from eec_effect_intent where seq = 1 and due_at is not null";
    assert_eq!(database.number(armed).await, 1);
    let waiting = "select count(*) from eec_effect_intent where seq = 2 and due_at is null";
    assert_eq!(database.number(waiting).await, 1);
    let counted = rows(database).await;
    // Sent again, also without what follows, it is the same.
    for body in [body, complete("k", &token)] {
        let again = api.post("complete", body).await;
        assert_eq!((again.status, &again.json), (200, &first.json));
    }
    assert_eq!(rows(database).await, counted);
    let without = api.reserve("l").await.token();
    let without = api.complete("l", &without).await;
    assert!(without.json.get("run_id").is_none());
}

async fn a_stale_token_commits_no_effects_either(bench: Bench) {
    let api = Api::start(&bench).await;
    let token = api.reserve("k").await.token();
    api.post("release", release("k", &token, "not_sent")).await;
    let other = api.reserve("k").await.token();
    let counted = rows(&bench.database).await;
    let stale = with(complete("k", &token), follow_up());
    api.post("complete", stale)
        .await
        .is_problem(409, "attempt-stale");
    assert_eq!(rows(&bench.database).await, counted);
    let present = with(complete("k", &other), follow_up());
    let reply = api.post("complete", present).await;
    assert_eq!(reply.status, 200);
    // What was committed without effects gets none later.
    let bare = api.reserve("bare").await.token();
    api.complete("bare", &bare).await;
    let counted = rows(&bench.database).await;
    let late = api
        .post("complete", with(complete("bare", &bare), follow_up()))
        .await;
    assert_eq!(late.status, 200);
    assert!(late.json.get("run_id").is_none());
    assert_eq!(rows(&bench.database).await, counted);
}

async fn a_refused_follow_up_writes_nothing(bench: Bench) {
    let api = Api::start(&bench).await;
    let body = reserve_with("k", json!({}));
    let token = api.post("reserve", body).await.token();
    let counted = rows(&bench.database).await;
    let too_many = vec![json!({ "task": "q" }); 1001];
    for more in [
        json!({ "effects": [{ "task": "q" }, { "http": "nowhere" }] }),
        json!({ "effects": too_many }),
        json!({ "run": { "name": "n", "steps": [{ "name": "a", "task": "q" }, { "name": "a", "task": "q" }] } }),
    ] {
        let refused = api
            .post("complete", with(complete("k", &token), more))
            .await;
        refused.is_problem(400, "request-invalid");
    }
    assert_eq!(rows(&bench.database).await, counted);
    assert_eq!(bench.database.status("k").await, "pending");
}

async fn an_operators_resolution_commits_what_it_lets_follow(bench: Bench) {
    let api = Api::start(&bench).await;
    for (key, more, runs) in [
        ("nothing", json!({}), 0),
        ("effects", json!({ "effects": [{ "task": "emails" }] }), 1),
        (
            "refused",
            json!({ "effects": [{ "task": "emails" }], "follow_up": false }),
            1,
        ),
        ("declined", json!({ "follow_up": false }), 1),
    ] {
        let token = api.reserve(key).await.token();
        api.post("release", release(key, &token, "unknown")).await;
        let path = format!("/v1/records/acme/main/{key}/resolve");
        let body = with(json!({ "reason": "a test", "status": 201 }), more);
        let answer = api.request(OPERATOR, &path, &body).send().await;
        let reply = api.checked(http::Method::POST, &path, Some(&body), answer);
        if key == "refused" {
            reply.is_problem(400, "request-invalid");
            assert_eq!(bench.database.status(key).await, "outcome_unknown");
        } else {
            assert_eq!(reply.status, 200, "{key}: {}", reply.json);
            // The caller's own decision comes too late, and it is told the operator's.
            let late = api.complete(key, &token).await;
            late.is_problem(409, "attempt-stale");
            assert_eq!(late.json["decision"]["status"], 201);
        }
        assert_eq!(bench.database.count("eec_run").await, runs, "{key}");
    }
}

async fn an_input_that_is_nested_too_deep_is_refused(bench: Bench) {
    let api = Api::start(&bench).await;
    let token = api.reserve("k").await.token();
    let effects = json!({ "effects": [{ "task": "emails" }] });
    let with_input = |body: Value, levels| {
        let input = json!({ "input": fixture::nested(levels) });
        with(with(body, effects.clone()), input)
    };
    let deep = with_input(complete("k", &token), 65);
    let refused = api.post("complete", deep).await;
    refused.is_problem(400, "request-invalid");
    assert!(refused.text("detail").contains("64 levels"));
    let other = api.reserve("r").await.token();
    api.post("release", release("r", &other, "unknown")).await;
    let path = "/v1/records/acme/main/r/resolve";
    let deep = with_input(json!({ "reason": "a test", "status": 201 }), 65);
    let answer = api.request(OPERATOR, path, &deep).send().await;
    assert_eq!(
        (answer.status, answer.problem()),
        (400, "request-invalid".into())
    );
    assert_eq!(bench.database.count("eec_run").await, 0);
    let kept = with_input(complete("k", &token), 64);
    let reply = api.post("complete", kept.clone()).await;
    assert_eq!(reply.status, 200, "{}", reply.json);
}

async fn an_effect_for_a_pool_speaks_for_the_tenant_of_its_run(bench: Bench) {
    let setup = super::setup(&bench).section("tenant", "source = \"header:x-tenant\"");
    let api = Api::with(setup.section("outbox", "poll_interval = \"100ms\"")).await;
    bench.upstream.on_post("/wipe").answer(204, "");
    let reserved = json!({ "tenant": "acme p1-00ff" });
    let token = api
        .post("reserve", reserve_with("k", reserved.clone()))
        .await;
    let token = token.token();
    let complete = |more| with(with(complete("k", &token), reserved.clone()), more);
    for name in ["X-Tenant", "forwarded", "X-Forwarded-User", "x-real-ip"] {
        let effect = json!({ "pool": "main", "path": "/wipe", "headers": { name: "globex" } });
        let step = with(json!({ "name": "s" }), effect.clone());
        for more in [
            json!({ "effects": [effect] }),
            json!({ "run": { "name": "n", "steps": [step] } }),
        ] {
            let refused = api.call(ACME, "complete", complete(more)).await;
            refused.is_problem(400, "request-invalid");
            let detail = refused.text("detail");
            assert!(detail.contains(&name.to_lowercase()), "{detail}");
        }
    }
    let effect = json!({ "pool": "main", "path": "/wipe", "headers": { "x-a": "1" } });
    let undo = json!({ "name": "s", "pool": "main", "path": "/wipe", "body": "none" });
    let follow = json!({ "effects": [effect], "run": { "name": "n", "steps": [undo] } });
    let done = api.call(ACME, "complete", complete(follow)).await;
    assert_eq!(done.status, 200, "{}", done.json);
    bench.database.until_runs_are(1, "completed").await;
    let seen = bench.upstream.requests();
    assert_eq!(seen.len(), 2);
    for seen in &seen {
        assert_eq!(seen.header("x-tenant"), ["acme"]);
    }
}
