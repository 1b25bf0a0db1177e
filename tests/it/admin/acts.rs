//! What operators do to records.

use std::time::Duration;

use axum::body::Body;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::header::{AUTHORIZATION, RETRY_AFTER};
use http::{Method, Request};
use oncegate::domain::record::State;
use oncegate::domain::scope::RecordKey;
use oncegate::store::{Store as _, wake_hash};
use serde_json::json;
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{ConnectOptions as _, Row as _};
use tempfile::TempDir;
use tower::ServiceExt as _;

use super::faulty::Fault;
use super::{Admin, OPERATOR, READER, key_of, path_of};

/// The lines of the audit log: operator, action, key, reason.
pub async fn audit_log(directory: &TempDir) -> Vec<[String; 4]> {
    let options = SqliteConnectOptions::new().filename(directory.path().join("store.db"));
    let mut connection = options.connect().await.unwrap();
    let sql =
        "select operator, action, idempotency_key, reason from eec_operator_audit order by at";
    let rows = sqlx::query(sql).fetch_all(&mut connection).await.unwrap();
    let line = |row: &sqlx::sqlite::SqliteRow| [0, 1, 2, 3].map(|column| row.get(column));
    rows.iter().map(line).collect()
}

fn key() -> RecordKey {
    key_of("acme", "payments", "order/42")
}

#[tokio::test]
async fn what_never_happened_may_run_again_and_everyone_is_told() {
    let admin = Admin::start().await;
    admin.unknown(key()).await;
    let body = json!({ "reason": "  the bank has none " });
    let acted = admin
        .post(OPERATOR, &path_of(&key(), "/release"), body)
        .await;
    assert_eq!(
        acted.json(),
        json!({ "act": "release", "status": "failed_before_commit" })
    );
    assert_eq!(admin.state(&key()).await, Some("failed_before_commit"));
    assert_eq!(admin.told(), [key()]);
    assert_eq!(admin.store.notified(), [wake_hash(&key())]);
    let log = audit_log(&admin.stop().await).await;
    let [operator, _, key, reason] = &log[0];
    assert_eq!((log.len(), operator.as_str()), (1, "operator"));
    assert_eq!(
        (key.as_str(), reason.as_str()),
        ("order/42", "the bank has none")
    );
}

#[tokio::test]
async fn it_never_happened_is_refused_while_an_owner_may_be_at_work() {
    let admin = Admin::start_with_margin(Duration::from_secs(100)).await;
    admin.unknown(key()).await;
    let body = json!({ "reason": "r" });
    let reply = admin
        .post(OPERATOR, &path_of(&key(), "/release"), body)
        .await;
    assert_eq!(
        (reply.status, reply.slug().as_str()),
        (409, "state-conflict")
    );
    let wait: u64 = reply.headers[RETRY_AFTER]
        .to_str()
        .unwrap()
        .parse()
        .unwrap();
    assert!((90..=100).contains(&wait), "{wait}");
    assert_eq!(admin.state(&key()).await, Some("outcome_unknown"));
    assert!(admin.told().is_empty());
    let log = audit_log(&admin.stop().await).await;
    assert!(log.is_empty(), "{log:?}");
}

#[tokio::test]
async fn an_operators_answer_is_what_retries_get() {
    let admin = Admin::start().await;
    admin.unknown(key()).await;
    let body = json!({
        "reason": "seen in the bank",
        "status": 201,
        "headers": [
            { "name": "Content-Type", "value": "application/pdf" },
            { "name": "Link", "value": "<a>" },
            { "name": "Link", "value": "<b>" },
            { "name": "Content-Length", "value": "7" },
            { "name": "Transfer-Encoding", "value": "chunked" },
        ],
        "body_base64": STANDARD.encode([0, 255, 10]),
    });
    let acted = admin
        .post(OPERATOR, &path_of(&key(), "/resolve"), body)
        .await;
    assert_eq!(
        acted.json(),
        json!({ "act": "resolve", "status": "completed" })
    );
    assert_eq!(admin.told(), [key()]);
    let record = admin
        .store
        .look_up(&[key()])
        .await
        .unwrap()
        .remove(0)
        .unwrap();
    let State::Completed(id, _) = record.state else {
        panic!("{record:?}");
    };
    let decision = admin
        .store
        .decision(&key().tenant, id)
        .await
        .unwrap()
        .unwrap();
    assert_eq!(decision.decided_by, "operator:operator");
    assert_eq!(decision.recorded.status, 201);
    assert_eq!(decision.recorded.body.as_deref(), Some(&[0, 255, 10][..]));
    let lines: Vec<String> = decision
        .recorded
        .headers
        .lines()
        .map(|(name, value)| format!("{name}: {}", value.to_str().unwrap()))
        .collect();
    assert_eq!(
        lines,
        ["content-type: application/pdf", "link: <a>", "link: <b>"]
    );
    let log = audit_log(&admin.stop().await).await;
    assert_eq!((log.len(), log[0][3].as_str()), (1, "seen in the bank"));
}

#[tokio::test]
async fn a_purged_record_is_gone_with_its_decision() {
    let admin = Admin::start().await;
    admin.completed(key()).await;
    let body = json!({ "reason": "asked for by the tenant" });
    let acted = admin
        .post(OPERATOR, &path_of(&key(), "/purge"), body.clone())
        .await;
    assert_eq!(acted.json(), json!({ "act": "purge", "status": null }));
    assert_eq!(admin.state(&key()).await, None);
    assert_eq!(admin.told(), [key()]);
    let again = admin.post(OPERATOR, &path_of(&key(), "/purge"), body).await;
    assert_eq!(again.status, 404);
    assert!(admin.told().is_empty());
    let log = audit_log(&admin.stop().await).await;
    assert_eq!(log.len(), 1);
}

#[tokio::test]
async fn an_act_that_the_state_does_not_allow_changes_nothing() {
    let admin = Admin::start().await;
    let pending = key_of("acme", "payments", "pending");
    let completed = key_of("acme", "payments", "completed");
    let unknown = key_of("acme", "payments", "unknown");
    admin.pending(pending.clone()).await;
    admin.completed(completed.clone()).await;
    admin.unknown(unknown.clone()).await;
    for (key, act) in [
        (&pending, "/release"),
        (&pending, "/resolve"),
        (&pending, "/purge"),
        (&completed, "/release"),
        (&completed, "/resolve"),
        (&unknown, "/purge"),
    ] {
        let mut body = json!({ "reason": "r" });
        if act == "/resolve" {
            body["status"] = json!(200);
        }
        let reply = admin.post(OPERATOR, &path_of(key, act), body).await;
        assert_eq!(
            (reply.status, reply.slug().as_str()),
            (409, "state-conflict"),
            "{act}"
        );
        assert!(!reply.headers.contains_key(RETRY_AFTER));
    }
    assert_eq!(admin.state(&pending).await, Some("pending"));
    assert_eq!(admin.state(&completed).await, Some("completed"));
    assert_eq!(admin.state(&unknown).await, Some("outcome_unknown"));
    assert!(admin.told().is_empty());
    let log = audit_log(&admin.stop().await).await;
    assert!(log.is_empty(), "{log:?}");
}

#[tokio::test]
async fn an_act_that_makes_no_sense_is_refused_with_the_reason() {
    let admin = Admin::start().await;
    admin.unknown(key()).await;
    let release = path_of(&key(), "/release");
    let resolve = path_of(&key(), "/resolve");
    let long = "r".repeat(501);
    for (path, body, named) in [
        (&release, json!({}), "reason"),
        (&release, json!({ "reason": " " }), "reason"),
        (&release, json!({ "reason": "a\nb" }), "reason"),
        (&release, json!({ "reason": long }), "reason"),
        (&release, json!({ "reason": "r", "force": true }), "force"),
        (&release, json!("r"), "JSON"),
        (&resolve, json!({ "reason": "r" }), "status"),
        (&resolve, json!({ "reason": "r", "status": 101 }), "status"),
        (&resolve, json!({ "reason": " ", "status": 200 }), "reason"),
        (
            &resolve,
            json!({ "reason": "r", "status": 204, "body": "x" }),
            "204",
        ),
        (
            &resolve,
            json!({ "reason": "r", "status": 200, "body_base64": "?" }),
            "body_base64",
        ),
    ] {
        let reply = admin.post(OPERATOR, path, body.clone()).await;
        assert_eq!(
            (reply.status, reply.slug().as_str()),
            (400, "request-invalid"),
            "{body}"
        );
        let detail = reply.json()["detail"].to_string();
        assert!(detail.contains(named), "{body}: {detail}");
    }
    let nothing = admin
        .call(Method::POST, Some(OPERATOR), &release, None)
        .await;
    assert_eq!(nothing.status, 400);
    let huge = json!({ "reason": "r", "status": 200, "body": "x".repeat(2 * 1024 * 1024) });
    let reply = admin.post(OPERATOR, &resolve, huge).await;
    assert_eq!(
        (reply.status, reply.slug().as_str()),
        (413, "body-too-large")
    );
    assert_eq!(admin.state(&key()).await, Some("outcome_unknown"));
    admin.stop().await;
}

#[tokio::test]
async fn an_act_whose_acknowledgement_was_lost_says_so_and_is_told_to_everyone() {
    let admin = Admin::start().await;
    admin.unknown(key()).await;
    admin.store.next(Fault::LoseReply);
    let body = json!({ "reason": "r" });
    let reply = admin
        .post(OPERATOR, &path_of(&key(), "/release"), body)
        .await;
    assert_eq!(
        (reply.status, reply.slug().as_str()),
        (503, "store-unavailable")
    );
    assert!(
        reply.json()["detail"]
            .as_str()
            .unwrap()
            .contains("may have happened")
    );
    assert_eq!(admin.state(&key()).await, Some("failed_before_commit"));
    assert_eq!(admin.told(), [key()]);
    admin.stop().await;
}

#[tokio::test]
async fn an_act_that_certainly_did_not_happen_is_not_told_to_anyone() {
    let admin = Admin::start().await;
    admin.unknown(key()).await;
    admin.store.next(Fault::Unreachable);
    let body = json!({ "reason": "r" });
    let reply = admin
        .post(OPERATOR, &path_of(&key(), "/release"), body)
        .await;
    assert_eq!(reply.status, 503);
    assert!(reply.headers.contains_key(RETRY_AFTER));
    assert!(
        reply.json()["detail"]
            .as_str()
            .unwrap()
            .contains("nothing was changed")
    );
    assert!(admin.told().is_empty());
    for path in ["/v1/records".to_owned(), path_of(&key(), "")] {
        admin.store.next(Fault::Unreachable);
        assert_eq!(admin.get(READER, &path).await.status, 503);
    }
    admin.stop().await;
}

#[tokio::test]
async fn an_act_is_finished_though_who_asked_for_it_is_gone() {
    let admin = Admin::start().await;
    admin.unknown(key()).await;
    let (begun, go_on) = admin.store.hold_next();
    let request = Request::post(path_of(&key(), "/release"))
        .header(AUTHORIZATION, format!("Bearer {OPERATOR}"))
        .body(Body::from(r#"{"reason":"r"}"#))
        .unwrap();
    let asked = admin.router.clone().oneshot(request);
    // The future that is dropped here is what a lost connection drops.
    tokio::select! {
        reply = asked => panic!("answered {:?}", reply.map(|reply| reply.status())),
        begun = begun => begun.unwrap(),
    }
    go_on.send(()).unwrap();
    admin.acts.close();
    admin.acts.wait().await;
    assert_eq!(admin.state(&key()).await, Some("failed_before_commit"));
    assert_eq!(admin.told(), [key()]);
    admin.stop().await;
}

#[tokio::test]
async fn an_operators_answer_is_found_by_a_search() {
    let admin = Admin::start().await;
    admin.unknown(key()).await;
    let body = json!({ "reason": "r", "status": 404 });
    admin
        .post(OPERATOR, &path_of(&key(), "/resolve"), body)
        .await;
    let page = admin
        .get(READER, "/v1/records?status=completed")
        .await
        .json();
    assert_eq!(page["records"][0]["answer_status"], 404);
    admin.stop().await;
}
