//! Step workers over the API.

use std::time::{Duration, Instant};

use http::Method;
use http::header::HeaderMap;
use oncegate::domain::run::RunKey;
use oncegate::domain::workflow::Payload;
use oncegate::ids;
use serde_json::{Value, json};

use super::started::{path, sends, task};
use super::{ACME_WORKER, Admin, OPERATOR, READER, SERVICE, WORKER, key_of};
use crate::store_conformance::fixture;

async fn queued(admin: &Admin, tenant: &str, name: &str) -> RunKey {
    let steps = vec![sends("check", task("checks"))];
    admin
        .started(key_of(tenant, "payments", name), "checking", steps)
        .await
}

async fn claimed(admin: &Admin, token: &str, more: Value) -> Vec<Value> {
    let mut body = json!({ "queue": "checks", "worker": "worker-1", "lease": "10s" });
    body.as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    let reply = admin.post(token, "/v1/tasks/claim", body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply.json()["tasks"].as_array().unwrap().clone()
}

/// What a worker tells of this task.
fn about(task: &Value, more: &Value) -> Value {
    let mut body = json!({
        "tenant": task["tenant"],
        "intent_id": task["intent_id"],
        "stamp": task["stamp"],
    });
    let parts = more.as_object().unwrap().clone();
    body.as_object_mut().unwrap().extend(parts);
    body
}

#[tokio::test]
async fn a_task_is_claimed_kept_and_done_and_its_run_goes_on() {
    let admin = Admin::start().await;
    let run = queued(&admin, "acme", "k").await;
    let tasks = claimed(&admin, WORKER, json!({ "limit": 5 })).await;
    let [task] = &tasks[..] else {
        panic!("{tasks:?}")
    };
    assert_eq!(task["run_id"], run.id.to_string());
    assert_eq!((&task["step"], &task["try"]), (&json!("check"), &json!(1)));
    assert_eq!(task["body"], r#"{"order":42}"#);
    assert_eq!(task["content_type"], "application/json");
    assert_eq!(task["lease_ms"], 10_000);
    // It is taken.
    assert!(claimed(&admin, WORKER, json!({})).await.is_empty());
    let beat = about(task, &json!({ "lease": "1m" }));
    let reply = admin.post(WORKER, "/v1/tasks/heartbeat", beat).await;
    assert_eq!(reply.json(), json!({ "lease_ms": 60_000 }));
    let result = about(task, &json!({ "result": { "ok": true } }));
    let reply = admin.post(WORKER, "/v1/tasks/result", result).await;
    assert_eq!(reply.json(), json!({ "status": "taken" }));
    admin.advance().await;
    let shown = admin.shown(&run).await;
    assert_eq!(shown["status"], "completed");
    assert_eq!(shown["attempts"][0]["worker"], "worker-1");
    admin.stop().await;
}

#[tokio::test]
async fn the_same_result_told_again_gets_the_same_answer_and_changes_nothing() {
    let admin = Admin::start().await;
    let run = queued(&admin, "acme", "k").await;
    let task = claimed(&admin, WORKER, json!({})).await.remove(0);
    let result = about(&task, &json!({ "result": null }));
    for _ in 0..5 {
        let reply = admin.post(WORKER, "/v1/tasks/result", result.clone()).await;
        assert_eq!(
            (reply.status, reply.json()),
            (200, json!({ "status": "taken" }))
        );
    }
    admin.advance().await;
    let before = admin.shown(&run).await;
    for _ in 0..5 {
        let reply = admin.post(WORKER, "/v1/tasks/result", result.clone()).await;
        assert_eq!(reply.status, 200);
        admin.advance().await;
    }
    assert_eq!(admin.shown(&run).await, before);
    admin.stop().await;
}

#[tokio::test]
async fn a_late_or_foreign_stamp_is_refused_and_writes_nothing() {
    let admin = Admin::start().await;
    let run = queued(&admin, "acme", "k").await;
    // Its lease is over at once.
    let late = admin.claim(&run, 1, Duration::ZERO).await;
    let task = claimed(&admin, WORKER, json!({})).await.remove(0);
    let before = admin.shown(&run).await;
    let mut stale = task.clone();
    for stamp in [late.stamp.to_string(), ids::stamp().to_string()] {
        stale["stamp"] = json!(stamp);
        for (path, more) in [
            ("/v1/tasks/heartbeat", json!({})),
            ("/v1/tasks/result", json!({ "result": 1 })),
            (
                "/v1/tasks/result",
                json!({ "error": "e", "retryable": false }),
            ),
        ] {
            let reply = admin.post(WORKER, path, about(&stale, &more)).await;
            assert_eq!(
                (reply.status, &*reply.slug()),
                (409, "attempt-stale"),
                "{path}"
            );
        }
    }
    let after = admin.shown(&run).await;
    assert_eq!(after, before);
    let result = about(&task, &json!({ "result": 1 }));
    assert_eq!(
        admin.post(WORKER, "/v1/tasks/result", result).await.status,
        200
    );
    admin.stop().await;
}

#[tokio::test]
async fn a_failure_is_tried_again_or_not_as_the_worker_says() {
    let admin = Admin::start().await;
    for (retryable, status) in [(true, "pending"), (false, "dead")] {
        let run = queued(&admin, "acme", if retryable { "k1" } else { "k2" }).await;
        let task = claimed(&admin, WORKER, json!({})).await.remove(0);
        let failed = json!({ "error": "no\u{0}such order", "retryable": retryable });
        let reply = admin
            .post(WORKER, "/v1/tasks/result", about(&task, &failed))
            .await;
        assert_eq!(reply.status, 200);
        admin.advance().await;
        let shown = admin.shown(&run).await;
        let intent = &shown["intents"][0];
        assert_eq!(
            (&intent["status"], &intent["diagnostic"]),
            (&json!(status), &json!("no such order"))
        );
        assert_eq!(shown["status"], if retryable { "running" } else { "stuck" });
    }
    admin.stop().await;
}

#[tokio::test]
async fn a_worker_of_one_tenant_gets_its_tasks_and_speaks_of_no_others() {
    let admin = Admin::start().await;
    queued(&admin, "acme", "k1").await;
    queued(&admin, "acme p1-00ff", "k2").await;
    queued(&admin, "other", "k3").await;
    let tasks = claimed(&admin, ACME_WORKER, json!({ "limit": 10 })).await;
    let tenants: Vec<&str> = tasks
        .iter()
        .map(|task| task["tenant"].as_str().unwrap())
        .collect();
    assert_eq!(tasks.len(), 2);
    assert!(
        tenants.iter().all(|tenant| tenant.starts_with("acme")),
        "{tenants:?}"
    );
    let none = claimed(&admin, ACME_WORKER, json!({ "tenant": "other" })).await;
    assert!(none.is_empty());
    let foreign = claimed(&admin, WORKER, json!({ "tenant": "other" }))
        .await
        .remove(0);
    for (path, more) in [
        ("/v1/tasks/heartbeat", json!({})),
        ("/v1/tasks/result", json!({ "result": 1 })),
    ] {
        let reply = admin.post(ACME_WORKER, path, about(&foreign, &more)).await;
        assert_eq!(reply.status, 404);
        for token in [READER, OPERATOR, SERVICE] {
            let reply = admin.post(token, path, about(&foreign, &more)).await;
            assert_eq!(reply.status, 403, "{token}");
        }
    }
    admin.stop().await;
}

#[tokio::test]
async fn bytes_that_are_no_text_reach_the_worker_in_base64() {
    let admin = Admin::start().await;
    let mut effect = task("checks");
    effect.payload = Payload::Template {
        template: "plain \u{1F980}".into(),
        content_type: "text/plain".into(),
    };
    let mut raw = task("checks");
    raw.payload = Payload::Decision;
    let steps = vec![sends("text", effect), sends("raw", raw)];
    let key = key_of("acme", "payments", "k");
    let run = admin.decided(key, "w", steps, &[0, 159, 146, 150]).await;
    let text = claimed(&admin, WORKER, json!({})).await.remove(0);
    assert_eq!(text["body"], "plain \u{1F980}");
    let result = about(&text, &json!({ "result": 1 }));
    admin.post(WORKER, "/v1/tasks/result", result).await;
    admin.advance().await;
    let raw = claimed(&admin, WORKER, json!({})).await.remove(0);
    assert_eq!(
        (&raw["body"], &raw["body_base64"]),
        (&Value::Null, &json!("AJ+Slg=="))
    );
    assert_eq!(admin.shown(&run).await["intents"][1]["status"], "pending");
    admin.stop().await;
}

#[tokio::test]
async fn a_claim_waits_for_a_task_as_long_as_it_wants_and_no_longer() {
    let admin = Admin::start().await;
    let wait = |seconds: &'static str| {
        let mut headers = HeaderMap::new();
        headers.insert("prefer", format!("wait={seconds}").parse().unwrap());
        let body = json!({ "queue": "checks", "worker": "w" });
        let admin = &admin;
        async move {
            let begun = Instant::now();
            let reply = admin
                .call_with(
                    Method::POST,
                    Some(WORKER),
                    "/v1/tasks/claim",
                    Some(body),
                    headers,
                )
                .await;
            (
                reply.json()["tasks"].as_array().unwrap().len(),
                begun.elapsed(),
            )
        }
    };
    let (none, took) = wait("1").await;
    assert!(none == 0 && took >= Duration::from_secs(1), "{took:?}");
    let (waiting, ()) = tokio::join!(wait("20"), async {
        // While it waits.
        while admin.waits.available_permits() == oncegate::api::WAITS_MAX {
            tokio::task::yield_now().await;
        }
        queued(&admin, "acme", "k").await;
    });
    assert!(
        waiting.0 == 1 && waiting.1 < Duration::from_secs(15),
        "{waiting:?}"
    );
    // Nobody gets new work from a gateway that stops, nor is kept waiting.
    queued(&admin, "acme", "k2").await;
    admin.closing.cancel();
    let (none, took) = wait("20").await;
    assert!(none == 0 && took < Duration::from_secs(15), "{took:?}");
    admin.stop().await;
}

#[tokio::test]
async fn a_malformed_word_of_a_worker_is_refused() {
    let admin = Admin::start().await;
    let run = queued(&admin, "acme", "k").await;
    let claimed = admin.claim(&run, 1, fixture::LONG).await;
    let task = json!({
        "tenant": "acme",
        "intent_id": claimed.key.id.to_string(),
        "stamp": claimed.stamp.to_string(),
    });
    for (path, body) in [
        ("claim", json!({ "queue": "checks" })),
        ("claim", json!({ "queue": "", "worker": "w" })),
        ("claim", json!({ "queue": "checks", "worker": "" })),
        (
            "claim",
            json!({ "queue": "checks", "worker": "w", "limit": 33 }),
        ),
        (
            "claim",
            json!({ "queue": "checks", "worker": "w", "lease": "2h" }),
        ),
        (
            "claim",
            json!({ "queue": "checks", "worker": "w", "tenant": "a b c" }),
        ),
        ("heartbeat", about(&task, &json!({ "stamp": "7" }))),
        ("heartbeat", about(&task, &json!({ "more": 7 }))),
        ("result", about(&task, &json!({}))),
        (
            "result",
            about(
                &task,
                &json!({ "result": 1, "error": "e", "retryable": true }),
            ),
        ),
        ("result", about(&task, &json!({ "error": "e" }))),
    ] {
        let reply = admin
            .post(WORKER, &format!("/v1/tasks/{path}"), body.clone())
            .await;
        assert_eq!(
            (reply.status, &*reply.slug()),
            (400, "request-invalid"),
            "{path} {body}"
        );
    }
    let big = about(&task, &json!({ "result": "x".repeat(1024 * 1024) }));
    let reply = admin.post(WORKER, "/v1/tasks/result", big).await;
    assert_eq!(reply.status, 413);
    assert_eq!(
        admin.get(READER, &path(&run, "")).await.json()["status"],
        "running"
    );
    admin.stop().await;
}

#[tokio::test]
async fn another_result_of_the_same_claim_is_refused() {
    let admin = Admin::start().await;
    let tell = |task: &Value, more: Value| {
        let (admin, body) = (&admin, about(task, &more));
        async move { admin.post(WORKER, "/v1/tasks/result", body).await.status }
    };
    let run = queued(&admin, "acme", "k1").await;
    let task = claimed(&admin, WORKER, json!({})).await.remove(0);
    let done = json!({ "result": { "paid": 1 } });
    assert_eq!(tell(&task, done.clone()).await, 200);
    assert_eq!(tell(&task, json!({ "result": { "paid": 2 } })).await, 409);
    assert_eq!(tell(&task, json!({ "result": null })).await, 409);
    assert_eq!(tell(&task, done.clone()).await, 200);
    // Also when its run has gone on.
    admin.advance().await;
    assert_eq!(admin.shown(&run).await["status"], "completed");
    assert_eq!(tell(&task, json!({ "result": { "paid": 2 } })).await, 409);
    assert_eq!(tell(&task, done).await, 200);
    queued(&admin, "acme", "k2").await;
    let task = claimed(&admin, WORKER, json!({})).await.remove(0);
    let failed = |retryable: bool| json!({ "error": "e", "retryable": retryable });
    assert_eq!(tell(&task, failed(true)).await, 200);
    assert_eq!(tell(&task, failed(false)).await, 409);
    assert_eq!(tell(&task, failed(true)).await, 200);
    admin.stop().await;
}

#[tokio::test]
async fn a_result_that_can_not_be_kept_whole_is_refused() {
    let admin = Admin::start().await;
    queued(&admin, "acme", "k").await;
    let task = claimed(&admin, WORKER, json!({})).await.remove(0);
    for (result, status, says) in [
        (json!("x".repeat(64 * 1024)), 413, "65536"),
        (fixture::nested(65), 400, "64 levels"),
        (fixture::nested(64), 200, "taken"),
    ] {
        let result = about(&task, &json!({ "result": result }));
        let reply = admin.post(WORKER, "/v1/tasks/result", result).await;
        assert_eq!(reply.status, status, "{}", reply.text());
        assert!(reply.text().contains(says), "{}", reply.text());
    }
    admin.stop().await;
}
