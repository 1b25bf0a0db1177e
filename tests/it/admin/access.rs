//! Who gets in, and what exists for them.

use http::Method;
use http::header::WWW_AUTHENTICATE;
use oncegate::api::routes;
use oncegate::config::Role;
use serde_json::json;

use super::{ACME, Admin, OPERATOR, READER, key_of, path_of};

#[tokio::test]
async fn everything_under_v1_needs_a_token() {
    let admin = Admin::start().await;
    let existing = routes().filter(|route| !route.roles.is_empty());
    let existing = existing.map(|route| (route.method.clone(), route.path.replace(['{', '}'], "")));
    let absent = [
        (Method::GET, "/v1".to_owned()),
        (Method::GET, "/v1/nothing".to_owned()),
        (Method::DELETE, "/v1/records".to_owned()),
    ];
    for (method, path) in existing.chain(absent) {
        for token in [None, Some(""), Some("reader-toke"), Some("reader-token2")] {
            let reply = admin.call(method.clone(), token, &path, None).await;
            assert_eq!(reply.status, 401, "{method} {path}");
            assert_eq!(reply.slug(), "unauthorized");
            assert_eq!(reply.headers[WWW_AUTHENTICATE], "Bearer");
        }
    }
    admin.stop().await;
}

#[tokio::test]
async fn a_reader_looks_and_does_not_act() {
    let admin = Admin::start().await;
    let key = key_of("acme", "payments", "k");
    admin.unknown(key.clone()).await;
    assert_eq!(admin.get(READER, "/v1/records").await.status, 200);
    assert_eq!(admin.get(READER, &path_of(&key, "")).await.status, 200);
    let acts = routes()
        .filter(|route| route.roles == [Role::Operator] && route.path.starts_with("/v1/records"));
    for act in acts.map(|route| route.path.rsplit_once('/').unwrap().1) {
        let path = path_of(&key, &format!("/{act}"));
        let body = json!({ "reason": "r", "status": 200 });
        let reply = admin.post(READER, &path, body).await;
        assert_eq!((reply.status, reply.slug().as_str()), (403, "forbidden"));
    }
    assert_eq!(admin.state(&key).await, Some("outcome_unknown"));
    assert!(admin.told().is_empty());
    admin.stop().await;
}

#[tokio::test]
async fn for_a_tenants_token_only_that_tenant_and_its_principals_exist() {
    let admin = Admin::start().await;
    let own = [
        key_of("acme", "payments", "k1"),
        key_of("acme p1-00ff", "payments", "k2"),
    ];
    let foreign = [
        key_of("acme2", "payments", "k3"),
        key_of("acme2 p1-00ff", "payments", "k4"),
        key_of("acm", "payments", "k5"),
    ];
    for key in own.iter().chain(&foreign) {
        admin.unknown(key.clone()).await;
    }
    for (query, count) in [
        ("", 2),
        ("?tenant=acme", 2),
        ("?tenant=acme%20p1-00ff", 1),
        ("?tenant=acme2", 0),
        ("?tenant=acm", 0),
    ] {
        let page = admin.get(ACME, &format!("/v1/records{query}")).await.json();
        assert_eq!(page["records"].as_array().unwrap().len(), count, "{query}");
    }
    for key in &own {
        assert_eq!(admin.get(ACME, &path_of(key, "")).await.status, 200);
    }
    let absent = key_of("nobody", "payments", "k");
    let told = admin.get(ACME, &path_of(&absent, "")).await;
    for key in &foreign {
        let reply = admin.get(ACME, &path_of(key, "")).await;
        assert_eq!((reply.status, &reply.body), (404, &told.body));
        for act in ["/release", "/resolve", "/purge"] {
            let body = json!({ "reason": "r", "status": 200 });
            let reply = admin.post(ACME, &path_of(key, act), body).await;
            assert_eq!(reply.status, 404, "{act}");
        }
        assert_eq!(admin.state(key).await, Some("outcome_unknown"));
    }
    let acted = admin
        .post(
            ACME,
            &path_of(&own[1], "/release"),
            json!({ "reason": "r" }),
        )
        .await;
    assert_eq!(acted.status, 200);
    admin.stop().await;
}

#[tokio::test]
async fn a_page_of_another_tenant_can_not_be_asked_for_by_cursor() {
    let admin = Admin::start().await;
    for tenant in ["aaa", "acme", "zzz"] {
        for key in ["k1", "k2"] {
            admin.pending(key_of(tenant, "payments", key)).await;
        }
    }
    let first = admin.get(OPERATOR, "/v1/records?limit=1").await.json();
    let cursor = first["next"].as_str().unwrap();
    let page = admin
        .get(ACME, &format!("/v1/records?cursor={cursor}"))
        .await;
    let records = page.json()["records"].as_array().unwrap().clone();
    assert!(records.iter().all(|record| record["tenant"] == "acme"));
    assert_eq!(records.len(), 2);
    admin.stop().await;
}
