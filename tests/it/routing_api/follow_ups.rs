//! What is committed with a decision.

use serde_json::{Value, json};

use super::{Api, OPERATOR, complete, release, reserve_with, rows, with};
use crate::support::gateway::Bench;

each_store!(
    a_decision_its_run_and_its_effects_are_committed_together,
    a_stale_token_commits_no_effects_either,
    a_refused_follow_up_writes_nothing,
    an_operators_resolution_commits_what_it_lets_follow,
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
