//! What is told of runs, and how they are moved on.

use std::time::Duration;

use oncegate::domain::intent::{End, Note};
use oncegate::domain::run::RunKey;
use oncegate::domain::workflow::OnFailure;
use oncegate::ids;
use oncegate::store::runs::RunStore;
use serde_json::{Value, json};
use sqlx::{ConnectOptions as _, Connection as _};

use super::started::{intent, mail, path, sends, signal};
use super::{ACME, Admin, OPERATOR, READER, SERVICE, WORKER, key_of};
use crate::store_conformance::fixture;

fn ids_of(page: &Value) -> Vec<String> {
    let runs = page["runs"].as_array().unwrap();
    let id = |run: &Value| run["run_id"].as_str().unwrap().to_owned();
    runs.iter().map(id).collect()
}

#[tokio::test]
async fn runs_are_found_by_what_is_known_of_them_and_paged() {
    let admin = Admin::start().await;
    let stuck = admin.stuck("k1").await;
    let steps = || vec![signal("approved")];
    let waiting = admin
        .started(key_of("acme p1-00ff", "mail", "k2"), "approvals", steps())
        .await;
    let other = admin
        .started(key_of("other", "payments", "k3"), "approvals", steps())
        .await;
    let id = |run: &RunKey| run.id.to_string();
    for (query, found) in [
        ("", vec![&stuck, &waiting, &other]),
        ("?tenant=acme", vec![&stuck, &waiting]),
        ("?tenant=acme%20p1-00ff", vec![&waiting]),
        ("?status=stuck", vec![&stuck]),
        ("?status=waiting&tenant=other", vec![&other]),
        ("?workflow=approvals", vec![&waiting, &other]),
        ("?pool=mail", vec![&waiting]),
        ("?pool=none", vec![]),
    ] {
        let page = admin.get(SERVICE, &format!("/v1/runs{query}")).await.json();
        let found: Vec<String> = found.into_iter().map(id).collect();
        assert_eq!(ids_of(&page), found, "{query}");
        assert!(page["next"].is_null());
    }
    let mut paged = Vec::new();
    let mut cursor = String::new();
    for _ in 0..3 {
        let path = format!("/v1/runs?limit=1{cursor}");
        let page = admin.get(READER, &path).await.json();
        paged.extend(ids_of(&page));
        cursor = match page["next"].as_str() {
            Some(next) => format!("&cursor={next}"),
            None => String::new(),
        };
    }
    assert_eq!(paged, [id(&stuck), id(&waiting), id(&other)]);
    assert!(cursor.is_empty(), "the last page says so");
    for wrong in [
        "status=done",
        "limit=0",
        "limit=201",
        "cursor=x",
        "pool=%2F",
        "x=1",
    ] {
        let reply = admin.get(READER, &format!("/v1/runs?{wrong}")).await;
        assert_eq!(
            (reply.status, &*reply.slug()),
            (400, "request-invalid"),
            "{wrong}"
        );
    }
    admin.stop().await;
}

#[tokio::test]
async fn a_run_tells_why_something_was_sent_twice() {
    let admin = Admin::start().await;
    let steps = vec![sends("receipt", mail())];
    let run = admin
        .started(key_of("acme", "payments", "k"), "receipts", steps)
        .await;
    // The first worker stops without a word, the second gets no answer, the third delivers.
    let lost = admin.claim(&run, 1, Duration::ZERO).await;
    let failed = admin.claim(&run, 1, fixture::LONG).await;
    let end = End::Again {
        after: Duration::ZERO,
        item_fault: false,
    };
    let note = Note {
        outcome: "timeout".into(),
        answer_status: None,
        diagnostic: Some("no answer in 10 s".into()),
    };
    admin.finish(&failed.key, failed.stamp, end, note).await;
    assert!(lost.stamp != failed.stamp && lost.idempotency_key == failed.idempotency_key);
    admin.deliver(&run, 1).await;

    let shown = admin.shown(&run).await;
    assert_eq!(shown["status"], "completed");
    assert_eq!(shown["answer"]["answer_status"], 201);
    let attempts = shown["attempts"].as_array().unwrap();
    let told: Vec<_> = attempts
        .iter()
        .map(|attempt| attempt["status"].as_str().unwrap())
        .collect();
    assert_eq!(told, ["delivered", "failed", "lost"]);
    assert_eq!(attempts[1]["stamp"], failed.stamp.to_string());
    assert_eq!(attempts[2]["stamp"], lost.stamp.to_string());
    let key = &shown["intents"][0]["idempotency_key"];
    assert_eq!(*key, lost.idempotency_key);
    let diagnosis = shown["diagnosis"][0].as_str().unwrap();
    for part in [
        "was sent 3 times",
        key.as_str().unwrap(),
        "ended without a word",
        "without an answer: the destination may have acted on it (timeout)",
        "was delivered (delivered, 201)",
    ] {
        assert!(diagnosis.contains(part), "{part}: {diagnosis}");
    }
    admin.stop().await;
}

#[tokio::test]
async fn a_stuck_run_says_why_and_is_moved_on_by_a_retry() {
    let admin = Admin::start().await;
    let run = admin.stuck("k").await;
    let shown = admin.shown(&run).await;
    assert_eq!(shown["status"], "stuck");
    let diagnosis = shown["diagnosis"].to_string();
    assert!(diagnosis.contains("The run is stuck"), "{diagnosis}");
    assert!(diagnosis.contains("no such address"), "{diagnosis}");
    let body = json!({ "reason": "the address is mended" });
    let acted = admin.post(OPERATOR, &path(&run, "/retry"), body).await;
    assert_eq!(acted.json()["run"]["status"], "running");
    admin.deliver(&run, 1).await;
    let shown = admin.shown(&run).await;
    assert_eq!(shown["status"], "completed");
    assert_eq!(shown["intents"][0]["redrives"], 1);
    // Who and why stand in the history.
    let history = admin.get(READER, &path(&run, "/transitions")).await.json();
    let kinds = history["transitions"].as_array().unwrap().iter();
    let retried = kinds
        .clone()
        .find(|line| line["kind"] == "retried")
        .unwrap();
    assert_eq!(
        retried["detail"],
        json!({ "by": "operator", "reason": "the address is mended" })
    );
    admin.stop().await;
}

#[tokio::test]
async fn an_act_with_the_same_request_id_is_done_once() {
    let admin = Admin::start().await;
    let run = admin.stuck("k").await;
    let request_id = ids::stamp().to_string();
    let body = json!({ "reason": "r", "request_id": request_id });
    let first = admin
        .post(OPERATOR, &path(&run, "/retry"), body.clone())
        .await
        .json();
    assert_eq!(first["repeated"], false);
    for _ in 0..3 {
        let again = admin
            .post(OPERATOR, &path(&run, "/retry"), body.clone())
            .await
            .json();
        assert_eq!(again["repeated"], true);
        assert_eq!(again["run"], first["run"]);
    }
    let other = json!({ "reason": "r", "request_id": ids::stamp().to_string() });
    let refused = admin.post(OPERATOR, &path(&run, "/retry"), other).await;
    assert_eq!((refused.status, &*refused.slug()), (409, "state-conflict"));
    let stamped = admin.store.transitions(&run, 0, 200).await.unwrap();
    let stamped = stamped.iter().filter(|line| line.stamp.is_some());
    assert_eq!(stamped.count(), 1);
    admin.stop().await;
}

#[tokio::test]
async fn what_a_run_does_not_take_is_refused_with_the_reason() {
    let admin = Admin::start().await;
    let run = admin
        .started(
            key_of("acme", "payments", "k"),
            "w",
            vec![signal("approved")],
        )
        .await;
    let act = |act: &'static str| {
        let (admin, path) = (&admin, path(&run, act));
        async move {
            let reply = admin.post(OPERATOR, &path, json!({ "reason": "r" })).await;
            (reply.status, reply.json()["why"].clone())
        }
    };
    assert_eq!(act("/retry").await, (409, json!("not_stuck")));
    assert_eq!(act("/resume").await, (409, json!("not_stuck")));
    assert_eq!(act("/cancel").await.0, 200);
    admin.advance().await;
    assert_eq!(admin.shown(&run).await["status"], "cancelled");
    for late in ["/retry", "/resume", "/cancel"] {
        assert_eq!(act(late).await, (409, json!("final")), "{late}");
    }
    let signal = admin
        .post(SERVICE, &path(&run, "/signals/approved"), json!({}))
        .await;
    assert_eq!(
        (signal.status, &signal.json()["why"]),
        (409, &json!("final"))
    );
    admin.stop().await;
}

#[tokio::test]
async fn a_signal_and_a_resumption_bring_what_later_steps_see() {
    let admin = Admin::start().await;
    let steps = vec![signal("approved"), sends("receipt", mail())];
    let run = admin
        .started(key_of("acme", "payments", "k"), "w", steps)
        .await;
    let mistyped = admin
        .post(SERVICE, &path(&run, "/signals/aproved"), json!({}))
        .await;
    assert_eq!(
        (mistyped.status, &mistyped.json()["why"]),
        (409, &json!("never_awaited"))
    );
    let body = json!({ "payload": { "by": "ann" } });
    let acted = admin
        .post(SERVICE, &path(&run, "/signals/approved"), body)
        .await;
    assert_eq!(acted.status, 200, "{}", acted.text());
    admin.advance().await;
    admin.give_up(&run, 1).await;
    admin.advance().await;
    assert_eq!(admin.shown(&run).await["status"], "stuck");
    let body = json!({ "reason": "sent by hand", "result": { "sent": true } });
    let acted = admin.post(OPERATOR, &path(&run, "/resume"), body).await;
    assert_eq!(acted.json()["run"]["status"], "completed");
    admin.stop().await;
}

#[tokio::test]
async fn a_malformed_act_is_refused_before_the_run_hears_of_it() {
    let admin = Admin::start().await;
    let run = admin.stuck("k").await;
    let before = admin.shown(&run).await;
    for (act, body) in [
        ("/retry", json!({})),
        ("/retry", json!({ "reason": "" })),
        ("/retry", json!({ "reason": "r", "request_id": "7" })),
        ("/retry", json!({ "reason": "r", "more": 1 })),
        ("/resume", json!({ "result": 1 })),
        ("/signals/a%20b", json!({})),
        ("/signals/a", json!({ "request_id": "7" })),
    ] {
        let reply = admin.post(OPERATOR, &path(&run, act), body).await;
        assert_eq!(
            (reply.status, &*reply.slug()),
            (400, "request-invalid"),
            "{act}"
        );
    }
    let big = json!({ "payload": "x".repeat(300 * 1024) });
    let reply = admin.post(OPERATOR, &path(&run, "/signals/a"), big).await;
    assert_eq!((reply.status, &*reply.slug()), (413, "body-too-large"));
    assert_eq!(admin.shown(&run).await, before);
    admin.stop().await;
}

#[tokio::test]
async fn a_run_of_another_tenant_does_not_exist() {
    let admin = Admin::start().await;
    let run = admin
        .started(key_of("other", "payments", "k"), "w", vec![signal("s")])
        .await;
    let told = admin
        .get(ACME, "/v1/runs/00000000-0000-7000-8000-000000000000")
        .await;
    assert_eq!(told.status, 404);
    let intent = format!("/v1/outbox/{}", intent(&run, 1).id);
    for path in [path(&run, ""), path(&run, "/transitions"), path(&run, "x")] {
        let reply = admin.get(ACME, &path).await;
        assert_eq!((reply.status, &reply.body), (404, &told.body), "{path}");
    }
    assert_eq!(admin.get(ACME, &intent).await.status, 404);
    for act in ["/retry", "/resume", "/cancel", "/signals/s"] {
        let reply = admin
            .post(ACME, &path(&run, act), json!({ "reason": "r" }))
            .await;
        assert_eq!(reply.status, 404, "{act}");
    }
    assert!(ids_of(&admin.get(ACME, "/v1/runs").await.json()).is_empty());
    let page = admin.get(ACME, "/v1/runs?tenant=other").await.json();
    assert!(ids_of(&page).is_empty());
    assert_eq!(admin.shown(&run).await["last_transition_seq"], 2);
    admin.stop().await;
}

#[tokio::test]
async fn each_role_does_what_it_is_for_and_nothing_else() {
    let admin = Admin::start().await;
    let run = admin.stuck("k").await;
    for token in [READER, OPERATOR, SERVICE] {
        for path in [
            path(&run, ""),
            path(&run, "/transitions"),
            "/v1/runs".into(),
            "/v1/outbox".into(),
        ] {
            assert_eq!(admin.get(token, &path).await.status, 200, "{token} {path}");
        }
    }
    assert_eq!(admin.get(WORKER, &path(&run, "")).await.status, 403);
    for (token, act) in [
        (READER, "/cancel"),
        (READER, "/signals/s"),
        (SERVICE, "/retry"),
        (SERVICE, "/resume"),
        (SERVICE, "/cancel"),
        (WORKER, "/signals/s"),
    ] {
        let reply = admin
            .post(token, &path(&run, act), json!({ "reason": "r" }))
            .await;
        assert_eq!(
            (reply.status, &*reply.slug()),
            (403, "forbidden"),
            "{token} {act}"
        );
    }
    assert_eq!(admin.shown(&run).await["status"], "stuck");
    admin.stop().await;
}

#[tokio::test]
async fn a_history_is_read_in_pages_without_a_gap() {
    let admin = Admin::start().await;
    let mut steps = vec![sends("first", mail()), sends("second", mail())];
    steps[0].on_failure = OnFailure::Continue;
    let run = admin
        .started(key_of("acme", "payments", "k"), "w", steps)
        .await;
    admin.give_up(&run, 1).await;
    admin.advance().await;
    admin.deliver(&run, 2).await;
    let all = admin.get(READER, &path(&run, "/transitions")).await.json();
    assert!(all["next"].is_null());
    let all = all["transitions"].as_array().unwrap().clone();
    let (mut paged, mut after) = (Vec::new(), Some(0));
    while let Some(from) = after {
        let page = path(&run, &format!("/transitions?limit=2&after={from}"));
        let page = admin.get(READER, &page).await.json();
        paged.extend(page["transitions"].as_array().unwrap().clone());
        after = page["next"].as_i64();
    }
    assert_eq!(paged, all);
    let numbers: Vec<i64> = all
        .iter()
        .map(|line| line["seq"].as_i64().unwrap())
        .collect();
    assert_eq!(
        numbers,
        (1..=i64::try_from(all.len()).unwrap()).collect::<Vec<_>>()
    );
    for wrong in ["after=-1", "limit=0", "after=x"] {
        let reply = admin
            .get(READER, &path(&run, &format!("/transitions?{wrong}")))
            .await;
        assert_eq!(reply.status, 400, "{wrong}");
    }
    admin.stop().await;
}

#[tokio::test]
async fn a_request_id_is_for_one_act() {
    let admin = Admin::start().await;
    let steps = vec![signal("go"), signal("a"), signal("b")];
    let run = admin
        .started(key_of("acme", "payments", "k"), "w", steps)
        .await;
    let request_id = ids::stamp().to_string();
    let tell = |act: &'static str| {
        let mut body = json!({ "request_id": request_id });
        if act == "/cancel" {
            body["reason"] = json!("r");
        }
        let (admin, path) = (&admin, path(&run, act));
        async move { admin.post(OPERATOR, &path, body).await }
    };
    assert_eq!(tell("/signals/a").await.json()["repeated"], false);
    for other in ["/signals/go", "/cancel"] {
        let refused = tell(other).await;
        assert_eq!(
            (refused.status, &refused.json()["why"]),
            (409, &json!("other_act")),
            "{other}"
        );
        assert!(refused.text().contains("use a new one"), "{other}");
    }
    assert_eq!(admin.shown(&run).await["status"], "waiting");
    // However much has happened since.
    for _ in 0..60 {
        admin
            .post(SERVICE, &path(&run, "/signals/b"), json!({}))
            .await;
    }
    admin
        .post(SERVICE, &path(&run, "/signals/go"), json!({}))
        .await;
    let again = tell("/signals/a").await;
    assert_eq!(
        (again.status, &again.json()["repeated"]),
        (200, &json!(true))
    );
    assert_eq!(tell("/cancel").await.json()["why"], "other_act");
    admin.stop().await;
}

#[tokio::test]
async fn a_run_that_this_version_can_not_read_says_so() {
    let admin = Admin::start().await;
    let run = admin.stuck("k").await;
    let file = admin.directory.path().join("store.db");
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(file);
    let mut connection = options.connect().await.unwrap();
    sqlx::query("update eec_run set progress = x'00'")
        .execute(&mut connection)
        .await
        .unwrap();
    connection.close().await.unwrap();
    let body = json!({ "reason": "r" });
    for act in ["/retry", "/cancel", "/resume"] {
        let refused = admin.post(OPERATOR, &path(&run, act), body.clone()).await;
        assert_eq!(
            (refused.status, &refused.json()["why"]),
            (409, &json!("unreadable")),
            "{act}"
        );
        assert!(refused.text().contains("version"), "{}", refused.text());
    }
    let body = json!({ "reason": "r", "filter": {} });
    let acted = admin.post(OPERATOR, "/v1/outbox/redrive", body).await;
    assert_eq!(acted.json()["refused"][0]["why"], "unreadable");
    admin.stop().await;
}

#[tokio::test]
async fn what_can_not_be_kept_whole_is_refused() {
    let admin = Admin::start().await;
    let steps = vec![sends("receipt", mail()), signal("a")];
    let run = admin
        .started(key_of("acme", "payments", "k"), "w", steps)
        .await;
    admin.give_up(&run, 1).await;
    admin.advance().await;
    let before = admin.shown(&run).await;
    let signal = |payload: &Value| ("/signals/a", json!({ "payload": payload }));
    let resume = |result: &Value| ("/resume", json!({ "reason": "r", "result": result }));
    let (long, deep) = (json!("x".repeat(64 * 1024)), fixture::nested(65));
    for (act, body) in [signal(&long), resume(&long)] {
        let reply = admin.post(OPERATOR, &path(&run, act), body).await;
        assert_eq!(
            (reply.status, &*reply.slug()),
            (413, "body-too-large"),
            "{act}"
        );
        assert!(reply.text().contains("65536"), "{act}: {}", reply.text());
    }
    for (act, body) in [signal(&deep), resume(&deep)] {
        let reply = admin.post(OPERATOR, &path(&run, act), body).await;
        assert_eq!(
            (reply.status, &*reply.slug()),
            (400, "request-invalid"),
            "{act}"
        );
        assert!(
            reply.text().contains("64 levels"),
            "{act}: {}",
            reply.text()
        );
    }
    assert_eq!(admin.shown(&run).await, before);
    let (long, deep) = (json!("x".repeat(64 * 1024 - 2)), fixture::nested(64));
    for (act, body) in [signal(&long), signal(&deep), resume(&deep)] {
        let reply = admin.post(OPERATOR, &path(&run, act), body).await;
        assert_eq!(reply.status, 200, "{act}: {}", reply.text());
    }
    admin.stop().await;
}
