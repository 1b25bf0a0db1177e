//! What is told of records.

use std::time::Duration;

use oncegate::domain::record::{GiveUp, Terms};
use oncegate::store::Store as _;
use serde_json::{Value, json};

use super::{Admin, OPERATOR, READER, fixture, key_of, path_of};

#[tokio::test]
async fn a_record_is_shown_without_what_is_secret() {
    let admin = Admin::start().await;
    let claim = fixture::claim_of(key_of("acme", "payments", "k"));
    admin.reserve(&claim).await;
    let mut completion = fixture::completion(&claim);
    completion.recorded.body = Some("the card's number".into());
    admin.store.complete(&[completion.clone()]).await.unwrap();
    let reply = admin.get(READER, &path_of(&claim.key, "")).await;
    let shown = reply.json();
    assert_eq!(shown["status"], "completed");
    assert_eq!(shown["validity"], "valid");
    assert_eq!(shown["generation"], 1);
    assert_eq!(shown["decision_id"], completion.decision_id.to_string());
    assert_eq!(shown["decision"]["body_bytes"], 17);
    assert_eq!(shown["decision"]["answer_status"], 201);
    assert_eq!(shown["decision"]["replayable"], true);
    assert_eq!(shown["decision"]["decided_by"], "gateway");
    let listed = admin.get(READER, "/v1/records").await;
    let token = claim.token.0.to_string();
    for text in [reply.text(), listed.text()] {
        assert!(!text.contains("card") && !text.contains(&token));
        assert!(!text.contains("fingerprint"));
    }
    admin.stop().await;
}

#[tokio::test]
async fn every_state_is_told_with_what_it_leaves_open() {
    let admin = Admin::start().await;
    let keys = ["held", "over", "failed", "unknown", "gone"].map(|key| key_of("acme", "p", key));
    let [held, over, failed, unknown, gone] = &keys;
    admin.pending(held.clone()).await;
    for key in [over, failed] {
        let mut claim = fixture::claim_of(key.clone());
        claim.terms = Terms {
            lease: Duration::ZERO,
            ..fixture::redrive()
        };
        admin.reserve(&claim).await;
        if key == failed {
            let moved = admin.store.sweep_one(key, claim.token).await.unwrap();
            assert!(moved);
        }
    }
    admin.unknown(unknown.clone()).await;
    let record = |key| {
        let path = path_of(key, "");
        let admin = &admin;
        async move { admin.get(READER, &path).await.json() }
    };
    let shown = record(held).await;
    assert_eq!(
        (&shown["status"], &shown["lease"]["state"]),
        (&json!("pending"), &json!("held"))
    );
    assert!(shown["lease"]["remaining_ms"].as_u64().unwrap() > 0);
    let shown = record(over).await;
    assert_eq!(
        (&shown["status"], &shown["lease"]["state"]),
        (&json!("pending"), &json!("over"))
    );
    let shown = record(failed).await;
    assert_eq!(shown["status"], "failed_before_commit");
    assert_eq!(shown["maybe_sent"], true);
    assert_eq!(record(unknown).await["status"], "outcome_unknown");
    assert_eq!(admin.get(READER, &path_of(gone, "")).await.status, 404);
    admin.stop().await;
}

#[tokio::test]
async fn an_answer_without_its_body_is_told_as_not_replayable() {
    let admin = Admin::start().await;
    let claim = fixture::claim_of(key_of("acme", "p", "stream"));
    admin.reserve(&claim).await;
    let mut completion = fixture::completion(&claim);
    completion.recorded.body = None;
    admin.store.complete(&[completion]).await.unwrap();
    let shown = admin.get(READER, &path_of(&claim.key, "")).await.json();
    assert_eq!(shown["decision"]["replayable"], false);
    assert_eq!(shown["decision"]["body_bytes"], Value::Null);
    admin.stop().await;
}

#[tokio::test]
async fn a_record_is_reached_whatever_characters_its_names_hold() {
    let admin = Admin::start().await;
    let printable: String = (' '..='~').collect();
    for name in [
        "a/b", "..", ".", "%2F", "%", " ", "a b", "?#&=+", "release", &printable,
    ] {
        for tenant in ["acme", "..", "a:b/c%2F", "acme p1-00ff"] {
            let key = key_of(tenant, "payments", name);
            admin.unknown(key.clone()).await;
            let shown = admin.get(READER, &path_of(&key, "")).await.json();
            assert_eq!(
                (&shown["tenant"], &shown["key"]),
                (&json!(tenant), &json!(name))
            );
            let path = path_of(&key, "/release");
            let acted = admin.post(OPERATOR, &path, json!({ "reason": "r" })).await;
            assert_eq!(acted.status, 200, "{path}");
            assert_eq!(admin.state(&key).await, Some("failed_before_commit"));
        }
    }
    admin.stop().await;
}

#[tokio::test]
async fn what_can_not_be_a_record_does_not_exist() {
    let admin = Admin::start().await;
    let long = "k".repeat(256);
    for path in [
        "a/b%00/k",
        "a/p/k%00",
        "a/p/%FF",
        "a/p%2F/k",
        "a%20/p/k",
        &format!("a/p/{long}"),
    ] {
        let reply = admin.get(READER, &format!("/v1/records/{path}")).await;
        assert_eq!(
            (reply.status, reply.slug().as_str()),
            (404, "not-found"),
            "{path}"
        );
    }
    admin.stop().await;
}

#[tokio::test]
async fn a_search_goes_through_every_record_once() {
    let admin = Admin::start().await;
    for number in 0..7 {
        let key = key_of(
            ["t1", "t2 p-1"][number % 2],
            "payments",
            &format!("k{number}"),
        );
        admin.completed(key).await;
    }
    let (mut seen, mut cursor) = (Vec::new(), String::new());
    loop {
        let page = admin
            .get(READER, &format!("/v1/records?limit=3{cursor}"))
            .await
            .json();
        let records = page["records"].as_array().unwrap();
        seen.extend(
            records
                .iter()
                .map(|record| record["key"].as_str().unwrap().to_owned()),
        );
        assert!(records.iter().all(|record| record["answer_status"] == 201));
        match page["next"].as_str() {
            Some(next) => cursor = format!("&cursor={next}"),
            None => break,
        }
    }
    assert_eq!(seen, ["k0", "k2", "k4", "k6", "k1", "k3", "k5"]);
    admin.stop().await;
}

#[tokio::test]
async fn each_condition_of_a_search_holds() {
    let admin = Admin::start().await;
    admin.pending(key_of("acme", "p1", "order-1")).await;
    admin.unknown(key_of("acme", "p2", "order-2")).await;
    admin.completed(key_of("other", "p1", "invoice/1")).await;
    for (query, keys) in [
        ("", &["order-1", "order-2", "invoice/1"][..]),
        ("tenant=acme", &["order-1", "order-2"]),
        ("pool=p1", &["order-1", "invoice/1"]),
        ("key_prefix=invoice%2F", &["invoice/1"]),
        ("status=outcome_unknown", &["order-2"]),
        ("older_than=1h", &[]),
        ("older_than=0s&pool=p2", &["order-2"]),
        ("tenant=acme&status=completed", &[]),
    ] {
        let page = admin
            .get(READER, &format!("/v1/records?{query}"))
            .await
            .json();
        let found = page["records"].as_array().unwrap().iter();
        let found: Vec<_> = found
            .map(|record| record["key"].as_str().unwrap())
            .collect();
        assert_eq!(found, keys, "{query}");
    }
    admin.stop().await;
}

#[tokio::test]
async fn a_search_that_makes_no_sense_is_refused_with_the_reason() {
    let admin = Admin::start().await;
    for (query, named) in [
        ("limit=0", "limit"),
        ("limit=201", "limit"),
        ("limit=x", "limit"),
        ("status=done", "status"),
        ("tenant=", "tenant"),
        ("tenant=a%00", "tenant"),
        ("pool=a/b", "pool"),
        ("key_prefix=%C3%A9", "key_prefix"),
        ("older_than=yesterday", "older_than"),
        ("older_than=11years", "older_than"),
        ("cursor=!", "cursor"),
        ("stauts=pending", "stauts"),
        ("limit=1&limit=2", "limit"),
    ] {
        let reply = admin.get(READER, &format!("/v1/records?{query}")).await;
        assert_eq!(
            (reply.status, reply.slug().as_str()),
            (400, "request-invalid"),
            "{query}"
        );
        let detail = reply.json()["detail"].to_string();
        assert!(detail.contains(named), "{query}: {detail}");
    }
    admin.stop().await;
}

#[tokio::test]
async fn a_released_record_that_was_never_sent_says_so() {
    let admin = Admin::start().await;
    let claim = fixture::claim_of(key_of("acme", "p", "k"));
    admin.reserve(&claim).await;
    let release = fixture::release(&claim, GiveUp::NotSent);
    admin.store.release(&[release]).await.unwrap();
    let shown = admin.get(READER, &path_of(&claim.key, "")).await.json();
    assert_eq!(shown["maybe_sent"], false);
    admin.stop().await;
}
