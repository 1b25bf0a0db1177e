//! What is told of intents and destinations, and what is done to them.

use oncegate::domain::run::RunKey;
use oncegate::domain::workflow::OnFailure;
use oncegate::ids;
use oncegate::store::outbox::OutboxStore;
use serde_json::{Value, json};

use super::started::{intent, mail, path, sends, signal, task};
use super::{ACME, Admin, OPERATOR, READER, SERVICE, key_of};

fn id(run: &RunKey, seq: i64) -> String {
    run.id.intent(seq).to_string()
}

fn ids_of(page: &Value) -> Vec<String> {
    let intents = page["intents"].as_array().unwrap();
    let id = |intent: &Value| intent["intent_id"].as_str().unwrap().to_owned();
    intents.iter().map(id).collect()
}

async fn status_of(admin: &Admin, run: &RunKey, seq: i64) -> &'static str {
    let line = admin.store.find_intent(run.id.intent(seq)).await.unwrap();
    line.unwrap().status.word()
}

#[tokio::test]
async fn intents_are_found_by_what_is_known_of_them_and_paged() {
    let admin = Admin::start().await;
    let dead = admin.stuck("k1").await;
    let steps = vec![sends("check", task("checks"))];
    let queued = admin
        .started(key_of("other", "payments", "k2"), "w", steps)
        .await;
    for (query, found) in [
        (String::new(), vec![id(&dead, 1), id(&queued, 1)]),
        ("?status=dead".into(), vec![id(&dead, 1)]),
        ("?destination=task:checks".into(), vec![id(&queued, 1)]),
        (format!("?run_id={}", dead.id), vec![id(&dead, 1)]),
        ("?tenant=other".into(), vec![id(&queued, 1)]),
        ("?tenant=other&status=dead".into(), vec![]),
    ] {
        let page = admin
            .get(SERVICE, &format!("/v1/outbox{query}"))
            .await
            .json();
        assert_eq!(ids_of(&page), found, "{query}");
        assert!(page["next"].is_null());
    }
    let first = admin.get(READER, "/v1/outbox?limit=1").await.json();
    let next = first["next"].as_str().unwrap();
    let second = format!("/v1/outbox?limit=1&cursor={next}");
    let second = admin.get(READER, &second).await.json();
    assert_eq!(ids_of(&second), [id(&queued, 1)]);
    assert!(second["next"].is_null());
    let own = admin.get(ACME, "/v1/outbox").await.json();
    assert_eq!(ids_of(&own), [id(&dead, 1)]);
    for wrong in [
        "status=lost",
        "limit=0",
        "cursor=x",
        "run_id=7",
        "destination=a%20b",
        "x=1",
    ] {
        let reply = admin.get(READER, &format!("/v1/outbox?{wrong}")).await;
        assert_eq!(reply.status, 400, "{wrong}");
    }
    admin.stop().await;
}

#[tokio::test]
async fn an_intent_shows_its_tries_and_how_it_is_sent_and_never_its_body() {
    let admin = Admin::start().await;
    let run = admin.stuck("k").await;
    let reply = admin
        .get(READER, &format!("/v1/outbox/{}", id(&run, 1)))
        .await;
    let shown = reply.json();
    assert_eq!(shown["run_id"], run.id.to_string());
    assert_eq!(shown["sending"]["kind"], "http");
    assert_eq!(shown["attempts"][0]["answer_status"], 422);
    assert_eq!(shown["body_bytes"], r#"{"order":42}"#.len());
    assert!(!reply.text().contains("\"order\""), "{}", reply.text());
    for absent in [run.id.to_string(), "x".into(), "destinations2".into()] {
        let reply = admin.get(READER, &format!("/v1/outbox/{absent}")).await;
        assert_eq!(
            (reply.status, &*reply.slug()),
            (404, "not-found"),
            "{absent}"
        );
    }
    admin.stop().await;
}

#[tokio::test]
async fn a_redrive_by_filter_sends_everything_again_once_with_the_same_keys() {
    let admin = Admin::start().await;
    let mut runs = Vec::new();
    for name in ["k1", "k2", "k3"] {
        runs.push(admin.stuck(name).await);
    }
    let before = admin.get(READER, "/v1/outbox").await.json();
    let filter = json!({ "destination": "mail" });
    let body = json!({ "reason": "it is back", "filter": filter, "limit": 2 });
    let acted = admin
        .post(OPERATOR, "/v1/outbox/redrive", body)
        .await
        .json();
    assert_eq!((&acted["done"], &acted["refused"]), (&json!(2), &json!([])));
    let body = json!({ "reason": "it is back", "filter": filter, "cursor": acted["next"] });
    let acted = admin
        .post(OPERATOR, "/v1/outbox/redrive", body)
        .await
        .json();
    assert_eq!((&acted["done"], &acted["next"]), (&json!(1), &Value::Null));
    // Nothing is left to do.
    let body = json!({ "reason": "it is back", "filter": filter });
    let acted = admin
        .post(OPERATOR, "/v1/outbox/redrive", body)
        .await
        .json();
    assert_eq!(acted["done"], 0);
    let after = admin.get(READER, "/v1/outbox").await.json();
    for (before, after) in before["intents"]
        .as_array()
        .unwrap()
        .iter()
        .zip(after["intents"].as_array().unwrap())
    {
        assert_eq!(before["status"], "dead");
        assert_eq!(
            (&after["status"], &after["redrives"]),
            (&json!("pending"), &json!(1))
        );
        assert_eq!(before["idempotency_key"], after["idempotency_key"]);
    }
    for run in &runs {
        admin.deliver(run, 1).await;
        assert_eq!(admin.shown(run).await["status"], "completed");
    }
    admin.stop().await;
}

#[tokio::test]
async fn what_can_not_be_redriven_is_told_and_keeps_nothing_else_from_it() {
    let admin = Admin::start().await;
    // This run went on without its dead intent.
    let mut steps = vec![sends("receipt", mail()), signal("s")];
    steps[0].on_failure = OnFailure::Continue;
    let gone_on = admin
        .started(key_of("acme", "payments", "k0"), "w", steps)
        .await;
    admin.give_up(&gone_on, 1).await;
    admin.advance().await;
    let stuck = admin.stuck("k1").await;
    let body = json!({ "reason": "r", "filter": {} });
    let acted = admin
        .post(OPERATOR, "/v1/outbox/redrive", body)
        .await
        .json();
    assert_eq!(acted["done"], 1);
    let refused = json!([{ "intent_id": id(&gone_on, 1), "why": "gone" }]);
    assert_eq!(acted["refused"], refused);
    assert_eq!(status_of(&admin, &stuck, 1).await, "pending");
    assert_eq!(status_of(&admin, &gone_on, 1).await, "dead");
    // Alone it is a problem.
    let body = json!({ "reason": "r", "intent_id": id(&gone_on, 1) });
    let reply = admin.post(OPERATOR, "/v1/outbox/redrive", body).await;
    assert_eq!((reply.status, &reply.json()["why"]), (409, &json!("gone")));
    let body = json!({ "reason": "r", "intent_id": gone_on.id.to_string() });
    let reply = admin.post(OPERATOR, "/v1/outbox/redrive", body).await;
    assert_eq!(reply.status, 404);
    admin.stop().await;
}

#[tokio::test]
async fn a_redrive_that_is_told_again_is_done_once() {
    let admin = Admin::start().await;
    let run = admin.stuck("k").await;
    let body = json!({
        "reason": "r",
        "intent_id": id(&run, 1),
        "request_id": ids::stamp().to_string(),
    });
    for round in 0..3 {
        let reply = admin
            .post(OPERATOR, "/v1/outbox/redrive", body.clone())
            .await;
        let (told, repeated) = (reply.json(), round > 0);
        let counted = (&told["done"], &told["repeated"]);
        let expected = (&json!(u32::from(!repeated)), &json!(u32::from(repeated)));
        assert_eq!((reply.status, counted), (200, expected));
    }
    assert_eq!(admin.shown(&run).await["intents"][0]["redrives"], 1);
    admin.stop().await;
}

#[tokio::test]
async fn a_redrive_that_is_told_again_after_the_intent_died_again_is_not_counted_as_done() {
    let admin = Admin::start().await;
    let (run, other) = (admin.stuck("k1").await, admin.stuck("k2").await);
    let filter = json!({ "run_id": run.id.to_string() });
    let request_id = ids::stamp().to_string();
    let body = json!({ "reason": "r", "filter": filter, "request_id": request_id });
    let redrive = "/v1/outbox/redrive";
    let acted = admin.post(OPERATOR, redrive, body).await.json();
    assert_eq!((&acted["done"], &acted["repeated"]), (&json!(1), &json!(0)));
    admin.give_up(&run, 1).await;
    admin.advance().await;
    let body = json!({ "reason": "r", "filter": {}, "request_id": request_id });
    let acted = admin.post(OPERATOR, redrive, body).await.json();
    assert_eq!((&acted["done"], &acted["repeated"]), (&json!(1), &json!(1)));
    assert_eq!(acted["refused"], json!([]));
    assert_eq!(status_of(&admin, &run, 1).await, "dead");
    assert_eq!(status_of(&admin, &other, 1).await, "pending");
    admin.stop().await;
}

#[tokio::test]
async fn what_is_discarded_is_never_sent_and_its_run_is_told() {
    let admin = Admin::start().await;
    let run = admin.stuck("k").await;
    let body = json!({ "reason": "sent by hand", "intent_id": id(&run, 1) });
    let acted = admin
        .post(OPERATOR, "/v1/outbox/discard", body.clone())
        .await
        .json();
    assert_eq!(
        (&acted["act"], &acted["done"]),
        (&json!("discard"), &json!(1))
    );
    assert_eq!(status_of(&admin, &run, 1).await, "discarded");
    admin.advance().await;
    let again = admin.post(OPERATOR, "/v1/outbox/discard", body).await;
    assert_eq!(
        (again.status, &again.json()["why"]),
        (409, &json!("wrong_state"))
    );
    let body = json!({ "reason": "r", "intent_id": id(&run, 1) });
    let redriven = admin.post(OPERATOR, "/v1/outbox/redrive", body).await;
    assert_eq!(redriven.status, 409);
    admin.stop().await;
}

#[tokio::test]
async fn an_act_is_for_what_its_token_sees() {
    let admin = Admin::start().await;
    let own = admin.stuck("k1").await;
    let steps = vec![sends("receipt", mail())];
    let foreign = admin
        .started(key_of("other", "payments", "k2"), "w", steps)
        .await;
    admin.give_up(&foreign, 1).await;
    admin.advance().await;
    let body = json!({ "reason": "r", "filter": { "tenant": "other" } });
    let acted = admin.post(ACME, "/v1/outbox/redrive", body).await.json();
    assert_eq!(acted["done"], 0);
    let body = json!({ "reason": "r", "intent_id": id(&foreign, 1) });
    for act in ["redrive", "discard"] {
        let reply = admin
            .post(ACME, &format!("/v1/outbox/{act}"), body.clone())
            .await;
        assert_eq!(reply.status, 404);
    }
    let body = json!({ "reason": "r", "filter": {} });
    let acted = admin
        .post(ACME, "/v1/outbox/redrive", body.clone())
        .await
        .json();
    assert_eq!(acted["done"], 1);
    assert_eq!(status_of(&admin, &own, 1).await, "pending");
    assert_eq!(status_of(&admin, &foreign, 1).await, "dead");
    for act in ["redrive", "discard"] {
        let reply = admin
            .post(SERVICE, &format!("/v1/outbox/{act}"), body.clone())
            .await;
        assert_eq!(reply.status, 403);
    }
    admin.stop().await;
}

#[tokio::test]
async fn a_destination_is_paused_and_resumed_for_everybody() {
    let admin = Admin::start().await;
    let run = admin
        .started(
            key_of("acme", "payments", "k"),
            "w",
            vec![sends("receipt", mail())],
        )
        .await;
    let destinations = || async { admin.get(READER, "/v1/outbox/destinations").await.json() };
    let before = destinations().await;
    assert_eq!(
        before["destinations"],
        json!([{ "destination": "mail", "configured": true, "paused": null }])
    );
    let at = "/v1/outbox/destinations/mail";
    let body = json!({ "reason": "they have an outage" });
    let paused = admin
        .post(OPERATOR, &format!("{at}/pause"), body.clone())
        .await
        .json();
    assert_eq!(paused, json!({ "destination": "mail", "paused": true }));
    assert!(admin.store.lanes(None, 10).await.unwrap().is_empty());
    let during = &destinations().await["destinations"][0]["paused"];
    assert_eq!(
        (&during["operator"], &during["reason"]),
        (&json!("operator"), &json!("they have an outage"))
    );
    // One that is not configured stays known while it is paused.
    let url = "/v1/outbox/destinations/url%3Ahttps%3A%2F%2Fa.example%3A443/pause";
    assert_eq!(admin.post(OPERATOR, url, body.clone()).await.status, 200);
    assert_eq!(
        destinations().await["destinations"][1]["destination"],
        "url:https://a.example:443"
    );
    // What no configuration names may be another tenant's host or queue.
    let seen = admin.get(ACME, "/v1/outbox/destinations").await.json();
    assert_eq!(seen["destinations"].as_array().unwrap().len(), 1, "{seen}");
    assert_eq!(seen["destinations"][0]["destination"], "mail");
    // It is every tenant's.
    let reply = admin
        .post(ACME, &format!("{at}/resume"), body.clone())
        .await;
    assert_eq!((reply.status, &*reply.slug()), (403, "forbidden"));
    let resumed = admin
        .post(OPERATOR, &format!("{at}/resume"), body)
        .await
        .json();
    assert_eq!(resumed["paused"], false);
    assert_eq!(admin.store.lanes(None, 10).await.unwrap().len(), 1);
    admin.deliver(&run, 1).await;
    for (body, status) in [(json!({}), 400), (json!({ "reason": "" }), 400)] {
        let reply = admin.post(OPERATOR, &format!("{at}/pause"), body).await;
        assert_eq!(reply.status, status);
    }
    admin.stop().await;
}

#[tokio::test]
async fn a_destination_that_nobody_knows_is_neither_paused_nor_resumed() {
    let admin = Admin::start().await;
    let act = |name: &'static str, act: &'static str| {
        let path = format!("/v1/outbox/destinations/{name}/{act}");
        let admin = &admin;
        async move { admin.post(OPERATOR, &path, json!({ "reason": "r" })).await }
    };
    for (name, hint) in [
        ("mial", "did you mean \\\"mail\\\"?"),
        ("elsewhere", "no such destination"),
    ] {
        for word in ["pause", "resume"] {
            let refused = act(name, word).await;
            assert_eq!(
                (refused.status, &*refused.slug()),
                (404, "not-found"),
                "{name}"
            );
            assert!(refused.text().contains(hint), "{}", refused.text());
        }
    }
    assert!(admin.store.paused().await.unwrap().is_empty());
    // Another gateway, whose configuration has it, paused it.
    let audit = oncegate::store::Audit {
        operator: "ann".into(),
        reason: "r".into(),
    };
    let elsewhere = oncegate::domain::intent::Destination("elsewhere".into());
    admin
        .store
        .set_paused(&elsewhere, true, &audit)
        .await
        .unwrap();
    assert_eq!(act("elsewhere", "resume").await.json()["paused"], false);
    // Resuming what is not paused changes nothing, and is no mistake.
    assert_eq!(act("mail", "resume").await.status, 200);
    assert_eq!(act("task:checks", "pause").await.status, 200);
    admin.stop().await;
}

#[tokio::test]
async fn who_discards_or_pauses_is_in_the_audit_log() {
    let admin = Admin::start().await;
    let run = admin.stuck("k").await;
    let body = json!({ "reason": "by hand", "intent_id": intent(&run, 1).id.to_string() });
    assert_eq!(
        admin
            .post(OPERATOR, "/v1/outbox/discard", body)
            .await
            .status,
        200
    );
    let body = json!({ "reason": "an outage" });
    let pause = "/v1/outbox/destinations/mail/pause";
    assert_eq!(admin.post(OPERATOR, pause, body).await.status, 200);
    let shown = admin.get(READER, &path(&run, "")).await;
    assert_eq!(shown.status, 200);
    let directory = admin.stop().await;
    let log = super::acts::audit_log(&directory).await;
    let told = |reason: &str| {
        log.iter()
            .any(|line| line.iter().any(|cell| cell.ends_with(reason)))
    };
    assert!(told("by hand") && told("an outage"), "{log:?}");
}
