//! Who may call, and how a malformed call is refused.

use serde_json::{Value, json};

use super::{
    ACME, Api, OPERATOR, READER, SERVICE, WORKER, complete, release, reserve, reserve_with, rows,
};
use crate::support::gateway::Bench;

each_store!(
    only_services_call_and_only_for_their_tenant,
    a_malformed_call_is_refused_and_says_what_to_mend,
    a_null_or_a_uuid_in_another_form_is_refused,
    a_pool_that_is_not_configured_is_refused,
);

async fn only_services_call_and_only_for_their_tenant(bench: Bench) {
    let api = Api::start(&bench).await;
    for token in [READER, OPERATOR, WORKER] {
        for (call, body) in [
            ("reserve", reserve("k")),
            ("heartbeat", super::of_claim("k", &super::fresh_id())),
            ("complete", complete("k", &super::fresh_id())),
            ("release", release("k", &super::fresh_id(), "not_sent")),
        ] {
            api.call(token, call, body)
                .await
                .is_problem(403, "forbidden");
        }
    }
    let mut unsaid = reserve("k");
    unsaid.as_object_mut().unwrap().remove("tenant");
    let said = api.post("reserve", unsaid.clone()).await;
    said.is_problem(400, "request-invalid");
    let token = api.call(ACME, "reserve", unsaid).await.token();
    assert_eq!(bench.database.record("k").await.unwrap().tenant, "acme");
    let principal = reserve_with("p", json!({ "tenant": "acme p1-00ff" }));
    api.call(ACME, "reserve", principal).await.token();
    let foreign = reserve_with("f", json!({ "tenant": "acme2" }));
    api.call(ACME, "reserve", foreign.clone())
        .await
        .is_problem(403, "forbidden");
    let theirs = api.post("reserve", foreign).await.token();
    let foreign = super::with(complete("f", &theirs), json!({ "tenant": "acme2" }));
    api.call(ACME, "complete", foreign)
        .await
        .is_problem(403, "forbidden");
    // A request id counts within its tenant.
    let record = api.get(ACME, "/v1/records/acme2/main/f").await;
    record.is_problem(404, "not-found");
    assert_eq!(api.get(ACME, "/v1/records/acme/main/k").await.status, 200);
    api.get(WORKER, "/v1/records/acme/main/k")
        .await
        .is_problem(403, "forbidden");
    assert_eq!(
        api.call(ACME, "complete", complete("k", &token))
            .await
            .status,
        200
    );
}

#[expect(clippy::too_many_lines, reason = "a table")]
async fn a_malformed_call_is_refused_and_says_what_to_mend(bench: Bench) {
    let api = Api::start(&bench).await;
    for (more, slug, what) in [
        (json!({ "request_id": "x" }), "request-invalid", "UUID"),
        (
            json!({ "pool": "a b" }),
            "request-invalid",
            "pool: a pool id",
        ),
        (
            json!({ "tenant": "a\nb" }),
            "request-invalid",
            "tenant: a tenant",
        ),
        (
            json!({ "key": "k".repeat(256) }),
            "key-invalid",
            "longer than 255",
        ),
        (json!({ "key": "caf\u{e9}" }), "key-invalid", "malformed"),
        (
            json!({ "key": null }),
            "request-invalid",
            "invalid type: null",
        ),
        (
            json!({ "lease": "5" }),
            "request-invalid",
            "lease: a duration",
        ),
        (
            json!({ "lease": "10ms" }),
            "request-invalid",
            "lease: a duration",
        ),
        (json!({ "lease": 5 }), "request-invalid", "invalid type"),
        (
            json!({ "valid_for": "0s" }),
            "request-invalid",
            "valid_for: a duration",
        ),
        (
            json!({ "wait": "1h" }),
            "request-invalid",
            "wait: a duration",
        ),
        (
            json!({ "fingerprint": "f".repeat(257) }),
            "request-invalid",
            "fingerprint: at most",
        ),
        (
            json!({ "on_unknown": "keep" }),
            "request-invalid",
            "unknown variant `keep`",
        ),
        (
            json!({ "duplicates": "drop" }),
            "request-invalid",
            "unknown variant `drop`",
        ),
        (
            json!({ "leese": "5s" }),
            "request-invalid",
            "unknown field `leese`",
        ),
    ] {
        let refused = api.post("reserve", reserve_with("k", more.clone())).await;
        refused.is_problem(400, slug);
        assert!(
            refused.text("detail").contains(what),
            "{more}: {}",
            refused.json
        );
    }
    for body in [Value::Null, json!([]), json!({}), json!("x")] {
        for call in ["reserve", "heartbeat", "complete", "release"] {
            api.post(call, body.clone())
                .await
                .is_problem(400, "request-invalid");
        }
    }
    let path = "/v1/routing/reserve";
    let call = api.request(SERVICE, path, &Value::Null).json("{\"pool\":");
    assert_eq!(call.send().await.problem(), "request-invalid");
    let long = json!({ "x": "x".repeat(17 * 1024) });
    let long = api.post("reserve", long).await;
    long.is_problem(413, "body-too-large");
    assert!(
        rows(&bench.database)
            .await
            .iter()
            .all(|(_, count)| *count == 0)
    );
}

async fn a_null_or_a_uuid_in_another_form_is_refused(bench: Bench) {
    let api = Api::start(&bench).await;
    let refused = async |call: &str, body: Value| {
        let path = format!("/v1/routing/{call}");
        let answer = api.request(SERVICE, &path, &body).send().await;
        assert_eq!(answer.problem(), "request-invalid", "{call} {body}");
        assert_eq!(answer.status, 400);
    };
    for member in [
        "tenant",
        "fingerprint",
        "lease",
        "valid_for",
        "tombstone",
        "on_unknown",
        "duplicates",
        "wait",
    ] {
        let mut body = reserve("k");
        body[member] = Value::Null;
        let call = api.request(ACME, "/v1/routing/reserve", &body);
        assert_eq!(call.send().await.status, 400, "{member}");
    }
    let id = super::fresh_id();
    let forms = [
        id.replace('-', ""),
        format!("{{{id}}}"),
        format!("urn:uuid:{id}"),
    ];
    for form in &forms {
        refused("reserve", reserve_with("k", json!({ "request_id": form }))).await;
    }
    let token = api.reserve("k").await.token();
    for form in [token.replace('-', ""), format!("{{{token}}}")] {
        refused("heartbeat", super::of_claim("k", &form)).await;
        refused("release", release("k", &form, "not_sent")).await;
        refused("complete", complete("k", &form)).await;
    }
    let mut beat = super::of_claim("k", &token);
    beat["lease"] = Value::Null;
    refused("heartbeat", beat).await;
    assert_eq!(bench.database.status("k").await, "pending");
    let upper = super::of_claim("k", &token.to_uppercase());
    assert_eq!(api.post("heartbeat", upper).await.status, 200);
}

async fn a_pool_that_is_not_configured_is_refused(bench: Bench) {
    let other = "id = \"orders\"\ntargets = [\"http://127.0.0.1:9\"]";
    let mut api = Api::with(super::setup(&bench).other_pool(other)).await;
    let typo = reserve_with("k", json!({ "pool": "ordres" }));
    let refused = api.post("reserve", typo).await;
    refused.is_problem(400, "request-invalid");
    let detail = refused.text("detail");
    assert!(detail.contains("did you mean \"orders\"?"), "{detail}");
    assert_eq!(bench.database.count("eec_routing_claim").await, 0);
    // A claim that was made is told, and may end, also after its pool left the configuration.
    let body = reserve_with("k", json!({ "pool": "orders" }));
    let token = api.post("reserve", body.clone()).await.token();
    api.gateway.sigterm();
    assert_eq!(api.gateway.end().await.code(), Some(0));
    let api = Api::start(&bench).await;
    assert_eq!(api.post("reserve", body).await.token(), token);
    let done = super::with(complete("k", &token), json!({ "pool": "orders" }));
    assert_eq!(api.post("complete", done).await.status, 200);
}
