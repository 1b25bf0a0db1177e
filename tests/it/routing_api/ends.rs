//! How claims are kept and how they end.

use serde_json::json;

use super::{Api, OPERATOR, SHORT, SHORT_LEASE, complete, of_claim, release, reserve_with, with};
use crate::support::clock::{eventually, let_pass};
use crate::support::gateway::Bench;

each_store!(
    heartbeats_keep_a_claim_and_silence_ends_it,
    a_silent_claim_goes_where_it_said,
    a_released_claim_is_made_by_the_next,
    a_decision_may_be_text_bytes_or_json,
    a_decision_is_kept_without_its_cookies,
    an_unfit_decision_is_refused_and_the_claim_stays,
    a_token_of_another_record_is_stale,
);

async fn heartbeats_keep_a_claim_and_silence_ends_it(bench: Bench) {
    let api = Api::start(&bench).await;
    let body = reserve_with("k", json!({ "lease": SHORT_LEASE }));
    let token = api.post("reserve", body).await.token();
    // As long as the claim asked for, unless it says otherwise.
    let beat = api.post("heartbeat", of_claim("k", &token)).await;
    assert_eq!((beat.status, beat.json), (200, json!({ "lease_ms": 500 })));
    let longer = with(of_claim("k", &token), json!({ "lease": "3s" }));
    let beat = api.post("heartbeat", longer.clone()).await;
    assert_eq!((beat.status, beat.json), (200, json!({ "lease_ms": 3000 })));
    let_pass(SHORT).await;
    assert_eq!(bench.database.status("k").await, "pending");
    assert_eq!(api.post("heartbeat", longer).await.status, 200);
    eventually("it is swept", async || {
        (bench.database.status("k").await == "outcome_unknown").then_some(())
    })
    .await;
    let beat = api.post("heartbeat", of_claim("k", &token)).await;
    beat.is_problem(409, "attempt-stale");
}

async fn a_silent_claim_goes_where_it_said(bench: Bench) {
    let api = Api::start(&bench).await;
    for (on_unknown, status) in [
        ("hold", "outcome_unknown"),
        ("redrive", "failed_before_commit"),
    ] {
        let terms = json!({ "lease": SHORT_LEASE, "on_unknown": on_unknown });
        let token = api
            .post("reserve", reserve_with(on_unknown, terms))
            .await
            .token();
        eventually("it is swept", async || {
            (bench.database.status(on_unknown).await == status).then_some(())
        })
        .await;
        // A late decision is taken as long as nobody else claimed the key.
        assert_eq!(api.complete(on_unknown, &token).await.status, 200);
        api.reserve(on_unknown).await.replayed();
    }
}

async fn a_released_claim_is_made_by_the_next(bench: Bench) {
    let api = Api::start(&bench).await;
    let first = api.reserve("k").await;
    let token = first.token();
    api.post("release", release("k", &token, "answered")).await;
    let second = api.reserve("k").await;
    assert_ne!(second.token(), token);
    for member in ["generation_id", "derived_key"] {
        assert_eq!(second.json[member], first.json[member], "{member}");
    }
    // To be known by its client it may be released although it is unknown.
    api.post("release", release("k", &second.token(), "unknown"))
        .await;
    api.reserve("k").await.is_problem(409, "outcome-unknown");
    let certain = release("k", &second.token(), "not_sent");
    assert_eq!(api.post("release", certain).await.status, 200);
    api.reserve("k").await.token();
}

async fn a_decision_may_be_text_bytes_or_json(bench: Bench) {
    let api = Api::start(&bench).await;
    for (key, decision, told) in [
        (
            "text",
            json!({ "status": 200, "body": "ä" }),
            json!({ "headers": [], "body": "ä" }),
        ),
        (
            "none",
            json!({ "status": 204 }),
            json!({ "headers": [], "body": "" }),
        ),
        (
            "json",
            json!({ "status": 200, "json": { "b": 1, "a": null } }),
            json!({
                "headers": [["content-type", "application/json"]],
                "body": "{\"b\":1,\"a\":null}",
            }),
        ),
        (
            "null",
            json!({ "status": 200, "json": null, "headers": { "Content-Type": "a/b", "x": "é" } }),
            json!({ "headers": [["content-type", "a/b"], ["x", "é"]], "body": "null" }),
        ),
        (
            "framing",
            json!({ "status": 200, "headers": { "content-length": "9", "date": "x" } }),
            json!({ "headers": [], "body": "" }),
        ),
    ] {
        let token = api.reserve(key).await.token();
        let body = with(of_claim(key, &token), json!({ "decision": decision }));
        assert_eq!(api.post("complete", body).await.status, 200, "{key}");
        let replayed = api.reserve(key).await;
        replayed.replayed();
        for (member, value) in told.as_object().unwrap() {
            assert_eq!(&replayed.json["decision"][member], value, "{key}");
        }
    }
}

async fn a_decision_is_kept_without_its_cookies(bench: Bench) {
    let api = Api::start(&bench).await;
    let headers = json!([["Set-Cookie", "session=s3cret"], ["x-a", "1"]]);
    let decision = json!({ "decision": { "status": 200, "headers": headers } });
    let token = api.reserve("k").await.token();
    let body = with(of_claim("k", &token), decision);
    assert_eq!(api.post("complete", body).await.status, 200);
    let replayed = api.reserve("k").await;
    assert_eq!(replayed.json["decision"]["headers"], json!([["x-a", "1"]]));
    let token = api.reserve("r").await.token();
    api.post("release", release("r", &token, "unknown")).await;
    let headers = json!([{ "name": "Set-Cookie", "value": "session=s3cret" }]);
    let body = json!({ "reason": "a test", "status": 200, "headers": headers });
    let path = "/v1/records/acme/main/r/resolve";
    let answer = api.request(OPERATOR, path, &body).send().await;
    assert_eq!(answer.status, 200);
    let replayed = api.reserve("r").await;
    assert_eq!(replayed.json["decision"]["headers"], json!([]));
}

#[expect(clippy::too_many_lines, reason = "a table")]
async fn an_unfit_decision_is_refused_and_the_claim_stays(bench: Bench) {
    let api = Api::start(&bench).await;
    let token = api.reserve("k").await.token();
    for (more, what) in [
        (
            json!({ "decision": { "status": 199 } }),
            "decision.status: 200 to 599",
        ),
        (
            json!({ "decision": { "status": 204, "body": "x" } }),
            "status 204 has no body",
        ),
        (
            json!({ "decision": { "status": 200, "body": "x", "json": 1 } }),
            "only one of `body`",
        ),
        (
            json!({ "decision": { "status": 200, "body_base64": "*" } }),
            "decision.body_base64: ",
        ),
        (
            json!({ "decision": { "status": 200, "headers": { "a b": "c" } } }),
            "decision.headers: ",
        ),
        (
            json!({ "decision": { "status": 200, "headers": [["a"]] } }),
            "decision.headers: ",
        ),
        (
            json!({ "decision": { "status": 200, "headers": { "a": "\u{100}" } } }),
            "can't stand",
        ),
        (
            json!({ "decision": { "status": 200, "x": 1 } }),
            "unknown field `x`",
        ),
        (
            json!({ "decison": { "status": 200 } }),
            "unknown field `decison`",
        ),
        (json!({ "attempt_token": "no uuid" }), "UUID"),
        (
            json!({ "effects": [{ "task": "" }] }),
            "effects[0].task: a name is",
        ),
        (
            json!({ "effects": [{ "http": "nowhere" }] }),
            "no such destination",
        ),
        (
            json!({ "effects": [{ "pool": "nowhere", "path": "/" }] }),
            "no such pool",
        ),
        (json!({ "effects": {} }), "effects: write a list"),
        (
            json!({ "run": { "workflow": "nothing" } }),
            "no such workflow",
        ),
    ] {
        let body = with(complete("k", &token), more);
        let refused = api.post("complete", body.clone()).await;
        refused.is_problem(400, "request-invalid");
        assert!(
            refused.text("detail").contains(what),
            "{body}: {}",
            refused.json
        );
    }
    assert_eq!(bench.database.status("k").await, "pending");
    assert_eq!(api.complete("k", &token).await.status, 200);
}

async fn a_token_of_another_record_is_stale(bench: Bench) {
    let api = Api::start(&bench).await;
    let token = api.reserve("k").await.token();
    let other = api.reserve("l").await.token();
    api.complete("k", &other)
        .await
        .is_problem(409, "attempt-stale");
    let absent = api.complete("m", &token).await;
    absent.is_problem(409, "attempt-stale");
    assert_eq!(absent.json["state"], serde_json::Value::Null);
    assert_eq!(bench.database.count("eec_routing_decision").await, 0);
    api.gateway
        .until_metric("oncegate_stale_owner_total", &[], 2.0)
        .await;
}
