//! Calls that are sent again after a lost reply.

use serde_json::json;

use super::{
    Api, OPERATOR, SERVICE, SHORT_LEASE, complete, fresh_id, of_claim, release, reserve,
    reserve_with, rows, with,
};
use crate::support::client::Call;
use crate::support::clock::eventually;
use crate::support::gateway::Bench;
use crate::support::rows::Database;

each_store!(
    a_request_id_is_always_the_same_claim,
    one_request_id_sent_many_times_at_once_is_one_claim,
    a_reply_that_was_lost_is_told_again,
    a_request_id_claims_nothing_after_its_claim_was_released,
    a_request_id_claims_nothing_after_its_claim_was_superseded,
    a_request_id_claims_nothing_after_its_record_was_purged,
    a_request_id_whose_owner_fell_silent_still_has_its_token,
    a_request_id_belongs_to_one_record,
    a_completion_sent_again_is_the_same_whatever_it_says,
    a_completion_sent_again_is_the_same_though_its_workflow_is_gone,
    a_release_sent_again_gets_the_same_answer,
);

async fn a_request_id_is_always_the_same_claim(bench: Bench) {
    let api = Api::start(&bench).await;
    let body = reserve("k");
    let first = api.post("reserve", body.clone()).await;
    let token = first.token();
    let counted = rows(&bench.database).await;
    for _ in 0..3 {
        let again = api.post("reserve", body.clone()).await;
        assert_eq!(again.token(), token);
        assert_eq!(again.json["repeated"], true);
        for member in ["generation_id", "derived_key"] {
            assert_eq!(again.json[member], first.json[member]);
        }
    }
    assert_eq!(rows(&bench.database).await, counted);
    let id = api.complete("k", &token).await.json["decision"]["id"].clone();
    let decided = api.post("reserve", body).await;
    assert_eq!(decided.replayed(), id.as_str().unwrap());
    assert_eq!(decided.text("attempt_token"), token);
}

async fn one_request_id_sent_many_times_at_once_is_one_claim(bench: Bench) {
    let mut apis = vec![Api::start(&bench).await];
    if matches!(bench.database, Database::Postgres(_)) {
        apis.push(Api::start(&bench).await);
    }
    let body = reserve("k");
    let calls =
        (0..20).map(|n| apis[n % apis.len()].request(SERVICE, "/v1/routing/reserve", &body));
    let begun: Vec<_> = calls.map(Call::begin).collect();
    let mut tokens = Vec::new();
    for call in begun {
        let path = "/v1/routing/reserve";
        let answer = call.answer().await;
        let reply = apis[0].checked(http::Method::POST, path, Some(&body), answer);
        tokens.push(reply.token());
    }
    tokens.dedup();
    assert_eq!(tokens.len(), 1);
    assert_eq!(bench.database.count("eec_routing_claim").await, 1);
    assert_eq!(bench.database.status("k").await, "pending");
}

async fn a_reply_that_was_lost_is_told_again(bench: Bench) {
    let api = Api::start(&bench).await;
    let body = reserve("k");
    let unread = api.request(SERVICE, "/v1/routing/reserve", &body);
    let unread = unread.start().await;
    eventually("it is claimed", async || bench.database.record("k").await).await;
    drop(unread);
    let token = api.post("reserve", body).await.token();
    let body = complete("k", &token);
    let unread = api.request(SERVICE, "/v1/routing/complete", &body);
    let unread = unread.start().await;
    eventually("it is committed", async || {
        (bench.database.status("k").await == "completed").then_some(())
    })
    .await;
    drop(unread);
    let counted = rows(&bench.database).await;
    let told = api.post("complete", body).await;
    assert_eq!(told.status, 200);
    let id = told.json["decision"]["id"].as_str().unwrap();
    assert_eq!(api.reserve("k").await.replayed(), id);
    assert_eq!(rows(&bench.database).await, counted);
}

async fn a_request_id_claims_nothing_after_its_claim_was_released(bench: Bench) {
    let api = Api::start(&bench).await;
    let body = reserve("k");
    let token = api.post("reserve", body.clone()).await.token();
    api.post("release", release("k", &token, "not_sent")).await;
    let again = api.post("reserve", body.clone()).await;
    assert_eq!(
        (again.status, &again.json["outcome"]),
        (200, &json!("released"))
    );
    assert_eq!(again.text("attempt_token"), token);
    assert_eq!(bench.database.status("k").await, "failed_before_commit");
    // A new id does claim, and the old one is told so.
    let other = api.reserve("k").await.token();
    assert_ne!(other, token);
    let superseded = api.post("reserve", body.clone()).await;
    superseded.is_problem(409, "attempt-stale");
    assert_eq!(superseded.json["state"], "pending");
    let id = api.complete("k", &other).await.json["decision"]["id"].clone();
    let superseded = api.post("reserve", body).await;
    superseded.is_problem(409, "attempt-stale");
    assert_eq!(superseded.json["decision"]["id"], id);
}

async fn a_request_id_claims_nothing_after_its_claim_was_superseded(bench: Bench) {
    let api = Api::start(&bench).await;
    let terms = json!({ "lease": SHORT_LEASE, "on_unknown": "redrive" });
    let body = reserve_with("k", terms);
    let token = api.post("reserve", body.clone()).await.token();
    let other = api.reserve("k").await.token();
    assert_ne!(other, token);
    api.post("reserve", body.clone())
        .await
        .is_problem(409, "attempt-stale");
    for (call, body) in [
        ("heartbeat", of_claim("k", &token)),
        ("complete", complete("k", &token)),
        ("release", release("k", &token, "not_sent")),
        ("release", release("k", &token, "unknown")),
    ] {
        let counted = rows(&bench.database).await;
        let stale = api.post(call, body).await;
        stale.is_problem(409, "attempt-stale");
        assert_eq!(stale.json["state"], "pending", "{call}");
        assert_eq!(rows(&bench.database).await, counted, "{call}");
    }
    api.complete("k", &other).await;
    let late = api.complete("k", &token).await;
    late.is_problem(409, "attempt-stale");
    assert_eq!(late.json["decision"]["body"], "done");
}

async fn a_request_id_claims_nothing_after_its_record_was_purged(bench: Bench) {
    let api = Api::start(&bench).await;
    let body = reserve("k");
    let token = api.post("reserve", body.clone()).await.token();
    api.complete("k", &token).await;
    let path = "/v1/records/acme/main/k/purge";
    let purge = json!({ "reason": "a test" });
    assert_eq!(api.request(OPERATOR, path, &purge).send().await.status, 200);
    let gone = api.post("reserve", body).await;
    gone.is_problem(409, "attempt-stale");
    assert_eq!(gone.json["state"], serde_json::Value::Null);
    assert_eq!(bench.database.status("k").await, "absent");
    api.complete("k", &token)
        .await
        .is_problem(409, "attempt-stale");
    assert_eq!(bench.database.count("eec_routing_decision").await, 0);
    api.reserve("k").await.token();
}

async fn a_request_id_whose_owner_fell_silent_still_has_its_token(bench: Bench) {
    let api = Api::start(&bench).await;
    let body = reserve_with("k", json!({ "lease": SHORT_LEASE }));
    let token = api.post("reserve", body.clone()).await.token();
    eventually("the lease is over", async || {
        (bench.database.status("k").await == "outcome_unknown").then_some(())
    })
    .await;
    let again = api.post("reserve", body).await;
    again.is_problem(409, "outcome-unknown");
    assert_eq!(again.text("attempt_token"), token);
    let others = api.reserve("k").await;
    others.is_problem(409, "outcome-unknown");
    assert!(others.json.get("attempt_token").is_none());
    let beat = api.post("heartbeat", of_claim("k", &token)).await;
    beat.is_problem(409, "attempt-stale");
    assert_eq!(beat.json["state"], "outcome_unknown");
    assert_eq!(api.complete("k", &token).await.status, 200);
    api.reserve("k").await.replayed();
}

async fn a_request_id_belongs_to_one_record(bench: Bench) {
    let api = Api::start(&bench).await;
    let id = fresh_id();
    let ask = |key: &str| reserve_with(key, json!({ "request_id": id }));
    api.post("reserve", ask("k")).await.token();
    let other = api.post("reserve", ask("l")).await;
    other.is_problem(400, "request-invalid");
    assert!(other.text("detail").contains("request_id"));
    assert_eq!(bench.database.status("l").await, "absent");
}

async fn a_completion_sent_again_is_the_same_whatever_it_says(bench: Bench) {
    let api = Api::start(&bench).await;
    let token = api.reserve("k").await.token();
    let first = api.complete("k", &token).await;
    assert_eq!(first.status, 200);
    let counted = rows(&bench.database).await;
    let other = json!({ "decision": { "status": 500, "json": { "a": [1, null] } } });
    for body in [complete("k", &token), with(complete("k", &token), other)] {
        let again = api.post("complete", body).await;
        assert_eq!((again.status, &again.json), (200, &first.json));
    }
    assert_eq!(rows(&bench.database).await, counted);
    let replayed = api.reserve("k").await;
    assert_eq!(replayed.json["decision"]["status"], 201);
    let late = api.post("release", release("k", &token, "not_sent")).await;
    late.is_problem(409, "attempt-stale");
    assert_eq!(late.json["decision"]["id"], first.json["decision"]["id"]);
}

async fn a_completion_sent_again_is_the_same_though_its_workflow_is_gone(bench: Bench) {
    let workflow = "name = \"approval\"\nstep = [{ name = \"wait\", signal = \"go\" }]";
    let mut api = Api::with(super::setup(&bench).more("workflow", workflow)).await;
    let run = json!({ "run": { "workflow": "approval" } });
    let (done, open) = (
        api.reserve("done").await.token(),
        api.reserve("open").await.token(),
    );
    let body = with(complete("done", &done), run.clone());
    let first = api.post("complete", body.clone()).await;
    assert_eq!(first.status, 200, "{}", first.json);
    api.gateway.sigterm();
    assert_eq!(api.gateway.end().await.code(), Some(0));
    let api = Api::start(&bench).await;
    let counted = rows(&bench.database).await;
    let again = api.post("complete", body).await;
    assert_eq!((again.status, &again.json), (200, &first.json));
    // Who is not decided yet, or holds no such token, must mend the call.
    for (key, token) in [("open", &open), ("done", &open)] {
        let refused = api.post("complete", with(complete(key, token), run.clone()));
        refused.await.is_problem(400, "request-invalid");
    }
    assert_eq!(rows(&bench.database).await, counted);
}

async fn a_release_sent_again_gets_the_same_answer(bench: Bench) {
    let api = Api::start(&bench).await;
    for (outcome, on_unknown, status) in [
        ("not_sent", "hold", "failed_before_commit"),
        ("answered", "hold", "failed_before_commit"),
        ("unknown", "hold", "outcome_unknown"),
        ("unknown", "redrive", "failed_before_commit"),
    ] {
        let key = format!("{outcome}-{on_unknown}");
        let body = reserve_with(&key, json!({ "on_unknown": on_unknown }));
        let token = api.post("reserve", body).await.token();
        for _ in 0..2 {
            let released = api.post("release", release(&key, &token, outcome)).await;
            assert_eq!(
                (released.status, released.json),
                (200, json!({ "status": status }))
            );
        }
        assert_eq!(bench.database.status(&key).await, status);
    }
}
