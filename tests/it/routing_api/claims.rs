//! Who owns a key, and what the others get.

use serde_json::json;

use super::{Api, SERVICE, complete, fresh_id, reserve, reserve_with, rows, setup};
use crate::support::client::Call;
use crate::support::clock::{AT_ONCE, eventually};
use crate::support::gateway::Bench;

each_store!(
    one_of_many_concurrent_reserves_wins_and_the_others_get_its_decision,
    a_waiter_owns_the_key_when_its_owner_gives_it_up,
    who_would_not_wait_is_told_at_once,
    an_empty_key_is_fresh_and_nothing_is_stored,
    a_key_belongs_to_one_fingerprint,
    a_decision_is_replayed_byte_for_byte_here_and_through_the_proxy,
    a_key_past_its_validity_is_claimed_anew_or_refused,
);

async fn one_of_many_concurrent_reserves_wins_and_the_others_get_its_decision(bench: Bench) {
    let mut apis = vec![Api::start(&bench).await];
    if matches!(bench.database, crate::support::rows::Database::Postgres(_)) {
        apis.push(Api::start(&bench).await);
    }
    let bodies: Vec<_> = (0..40).map(|_| reserve("k")).collect();
    let calls = bodies
        .iter()
        .enumerate()
        .map(|(n, body)| apis[n % apis.len()].request(SERVICE, "/v1/routing/reserve", body));
    let begun: Vec<_> = calls.map(Call::begin).collect();
    let owner = eventually("one owns it", async || {
        let position = begun
            .iter()
            .position(crate::support::client::Begun::is_over);
        let record = bench.database.record("k").await;
        record.and(position)
    })
    .await;
    eventually("the others are parked", async || {
        let mut parked = 0.0;
        for api in &apis {
            let metrics = api.gateway.metrics().await;
            parked += metrics.sum("oncegate_waiters", &[]);
        }
        (parked > 37.5).then_some(())
    })
    .await;
    assert_eq!(begun.iter().filter(|call| call.is_over()).count(), 1);
    let token = {
        let repeated = apis[0].post("reserve", bodies[owner].clone()).await;
        repeated.token()
    };
    let committed = apis[0].complete("k", &token).await;
    let id = committed.json["decision"]["id"]
        .as_str()
        .unwrap()
        .to_owned();
    let (mut owners, mut waited) = (0, 0);
    for (n, call) in begun.into_iter().enumerate() {
        let path = "/v1/routing/reserve";
        let reply = apis[n % apis.len()].checked(
            http::Method::POST,
            path,
            Some(&bodies[n]),
            call.answer().await,
        );
        if reply.json["outcome"] == "reserved" {
            assert_eq!(reply.token(), token);
            owners += 1;
        } else {
            assert_eq!(reply.replayed(), id);
            assert_eq!(reply.json["decision"]["body"], "done");
            waited += u32::from(reply.json["waited"] == true);
        }
    }
    assert_eq!((owners, waited), (1, 39));
    assert_eq!(bench.database.count("eec_routing_claim").await, 1);
}

async fn a_waiter_owns_the_key_when_its_owner_gives_it_up(bench: Bench) {
    let api = Api::start(&bench).await;
    let first = api.reserve("k").await.token();
    let body = reserve("k");
    let waiting = api.request(SERVICE, "/v1/routing/reserve", &body).begin();
    api.gateway.until_parked(1).await;
    let released = super::release("k", &first, "not_sent");
    assert_eq!(api.post("release", released).await.status, 200);
    let reply = tokio::time::timeout(AT_ONCE, waiting.answer()).await;
    let answer = reply.expect("it is woken at once");
    let reply = api.checked(
        http::Method::POST,
        "/v1/routing/reserve",
        Some(&body),
        answer,
    );
    assert_ne!(reply.token(), first);
    assert_eq!(reply.json["repeated"], false);
}

async fn who_would_not_wait_is_told_at_once(bench: Bench) {
    let api = Api::start(&bench).await;
    api.reserve("k").await.token();
    let rejected = reserve_with("k", json!({ "duplicates": "reject" }));
    let rejected = api.post("reserve", rejected).await;
    rejected.is_problem(409, "in-progress");
    assert!(rejected.answer.retry_after().is_some());
    let unwilling = reserve_with("k", json!({ "wait": "0s" }));
    let unwilling = api.post("reserve", unwilling).await;
    unwilling.is_problem(409, "in-progress");
    let body = reserve("k");
    let call = api.request(SERVICE, "/v1/routing/reserve", &body);
    let preferring = call.header("prefer", "respond-async, wait=0").send().await;
    assert_eq!(preferring.problem(), "in-progress");
    let followed = reserve_with("k", json!({ "duplicates": "follow" }));
    let followed = api.post("reserve", followed).await;
    assert_eq!(followed.status, 202);
    let location = followed.answer.header("location").unwrap();
    assert_eq!(followed.json["location"], location.as_str());
    let record = api.get(SERVICE, &location).await;
    assert_eq!(
        (record.status, &record.json["status"]),
        (200, &json!("pending"))
    );
}

async fn an_empty_key_is_fresh_and_nothing_is_stored(bench: Bench) {
    let api = Api::start(&bench).await;
    let reply = api.reserve("").await;
    assert_eq!(
        (reply.status, reply.json),
        (200, json!({ "outcome": "fresh" }))
    );
    assert!(
        rows(&bench.database)
            .await
            .iter()
            .all(|(_, count)| *count == 0)
    );
    let completed = api.complete("", &fresh_id()).await;
    completed.is_problem(400, "key-invalid");
}

async fn a_key_belongs_to_one_fingerprint(bench: Bench) {
    let api = Api::start(&bench).await;
    let ask = |key: &str, fingerprint: &str| {
        reserve_with(key, json!({ "fingerprint": fingerprint, "wait": "0s" }))
    };
    let token = api.post("reserve", ask("k", "one")).await.token();
    api.post("reserve", ask("k", "two"))
        .await
        .is_problem(422, "key-reused");
    api.post("reserve", ask("k", "one"))
        .await
        .is_problem(409, "in-progress");
    api.complete("k", &token).await;
    api.post("reserve", ask("k", "two"))
        .await
        .is_problem(422, "key-reused");
    api.post("reserve", ask("k", "one")).await.replayed();
    // Without one it is the same as everything.
    api.reserve("k").await.replayed();
    let unsaid = api.reserve("l").await.token();
    api.complete("l", &unsaid).await;
    api.post("reserve", ask("l", "any")).await.replayed();
    let dump = String::from_utf8_lossy(&bench.database.dump().await).into_owned();
    assert!(!dump.contains("fingerprint-") && !dump.contains("\tone\t"));
}

async fn a_decision_is_replayed_byte_for_byte_here_and_through_the_proxy(bench: Bench) {
    let api = Api::start(&bench).await;
    let token = api.reserve("k").await.token();
    let committed = api.complete("k", &token).await;
    let replayed = api.reserve("k").await;
    let decision = &replayed.json["decision"];
    for member in ["id", "created", "expires"] {
        assert_eq!(
            decision[member], committed.json["decision"][member],
            "{member}"
        );
    }
    assert_eq!(decision["status"], 201);
    let headers = json!([["content-type", "text/plain"], ["x-a", "1"], ["x-a", "2"]]);
    assert_eq!(
        (&decision["headers"], &decision["body"]),
        (&headers, &json!("done"))
    );
    let answer = api.gateway.post("/orders").key("k").send().await;
    answer.assert_is(201, "replayed");
    assert_eq!(answer.text(), "done");
    assert_eq!(answer.header_lines("x-a"), ["1", "2"]);
    assert_eq!(bench.upstream.executions("k"), 0);
    let bytes = json!({ "status": 200, "body_base64": "AP8=" });
    let token = api.reserve("bytes").await.token();
    let body = super::with(complete("bytes", &token), json!({ "decision": bytes }));
    assert_eq!(api.post("complete", body).await.status, 200);
    let replayed = api.reserve("bytes").await;
    assert_eq!(replayed.json["decision"]["body_base64"], "AP8=");
}

async fn a_key_past_its_validity_is_claimed_anew_or_refused(bench: Bench) {
    let api = Api::with(setup(&bench).section("store", "purge_interval = \"1h\"")).await;
    for (key, tombstone) in [("k", "0s"), ("refused", "1h")] {
        let short = json!({ "valid_for": "1ms", "tombstone": tombstone });
        let token = api.post("reserve", reserve_with(key, short)).await.token();
        assert_eq!(api.complete(key, &token).await.status, 200);
    }
    let generation = bench.database.record("k").await.unwrap().generation_id;
    eventually("it is past its validity", async || {
        let ms = bench.database.record("k").await?.valid_ms;
        (ms < 0).then_some(())
    })
    .await;
    let anew = api.reserve("k").await;
    anew.token();
    let now = anew.text("generation_id").replace('-', "");
    assert_ne!(now, generation);
    api.reserve("refused").await.is_problem(409, "key-expired");
}
