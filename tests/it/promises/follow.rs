//! Routes whose duplicates are told where to follow the first request.

use std::time::Instant;

use serde_json::Value;

use crate::support::client::Answer;
use crate::support::clock::AT_ONCE;
use crate::support::gateway::{Bench, Setup, TestGateway};
use crate::support::upstream::{Gate, Reply};

each_store!(
    a_duplicate_is_told_at_once_where_to_follow,
    another_request_with_the_key_is_told_so_and_not_where_to_follow,
    any_key_can_be_followed,
    what_is_settled_is_not_to_be_followed,
);

on_postgres!(another_gateways_request_can_be_followed);

fn following(bench: &Bench) -> Setup {
    bench.gateway().route("duplicates = \"follow\"")
}

/// Asserts that it tells where to follow; gives the location.
#[track_caller]
fn followed(answer: &Answer) -> String {
    answer.assert_is(202, "in-progress");
    assert!(matches!(answer.retry_after(), Some(1..=2)), "{answer:?}");
    let location = answer.header("location").expect("a location");
    let told: Value = serde_json::from_slice(&answer.body).expect("JSON");
    assert_eq!(told["status"], "pending");
    assert_eq!(told["location"], *location);
    assert_eq!(told["retry_after"], answer.retry_after().unwrap());
    assert!(!answer.replayed() && answer.decision().is_none());
    location
}

async fn status(gateway: &TestGateway, location: &str) -> String {
    let answer = gateway.call("GET", location).send().await;
    assert_eq!(answer.status, 200, "{answer:?}");
    let told: Value = serde_json::from_slice(&answer.body).expect("JSON");
    told["status"].as_str().expect("a status").to_owned()
}

async fn a_duplicate_is_told_at_once_where_to_follow(bench: Bench) {
    let gate = Gate::closed();
    let slow = Reply::new(201).hold(&gate);
    bench.upstream.on_post("/pay").reply(slow);
    let gateway = following(&bench).start().await;
    let first = gateway.post("/pay").key("k").begin();
    let came = |state: &crate::support::upstream::State| state.executions("k") == 1;
    bench.upstream.until(came).await;
    for _ in 0..3 {
        let asked = Instant::now();
        let location = followed(&gateway.post("/pay").key("k").send().await);
        assert!(asked.elapsed() < AT_ONCE);
        assert_eq!(location, "/.oncegate/records/main/k");
        assert_eq!(status(&gateway, &location).await, "pending");
    }
    gate.open();
    let first = first.answer().await;
    first.assert_is(201, "executed");
    assert_eq!(
        status(&gateway, "/.oncegate/records/main/k").await,
        "completed"
    );
    assert_eq!(bench.upstream.executions("k"), 1);
}

async fn another_request_with_the_key_is_told_so_and_not_where_to_follow(bench: Bench) {
    let gate = Gate::closed();
    let slow = Reply::new(201).hold(&gate);
    bench.upstream.on_post("/pay").reply(slow);
    let gateway = following(&bench).start().await;
    let first = gateway.post("/pay").key("k").begin();
    let came = |state: &crate::support::upstream::State| state.executions("k") == 1;
    bench.upstream.until(came).await;
    let other = gateway.post("/pay").key("k").json(r#"{"amount":2}"#);
    let other = other.send().await;
    other.assert_problem(422, "key-reused", "mismatch");
    gate.open();
    first.answer().await.assert_is(201, "executed");
}

async fn any_key_can_be_followed(bench: Bench) {
    let gate = Gate::closed();
    let slow = Reply::new(201).hold(&gate);
    bench.upstream.on_post("/pay").reply(slow);
    let gateway = following(&bench).start().await;
    for key in [
        "a/b//c",
        "50%41",
        "a?b#c",
        "\"with spaces, and commas\"",
        "...",
    ] {
        let before = bench.upstream.executions_at("/pay");
        let first = gateway.post("/pay").key(key).start().await;
        let came = |state: &crate::support::upstream::State| state.executions_at("/pay") > before;
        bench.upstream.until(came).await;
        let location = followed(&gateway.post("/pay").key(key).send().await);
        let shown = gateway.call("GET", &location).send().await;
        let told: Value = serde_json::from_slice(&shown.body).expect("JSON");
        assert_eq!(told["key"], *key.trim_matches('"'), "{shown:?}");
        drop(first);
    }
    gate.open();
}

async fn what_is_settled_is_not_to_be_followed(bench: Bench) {
    let gateway = following(&bench).start().await;
    let first = gateway.post("/pay").key("k").send().await;
    first.assert_is(200, "executed");
    let again = gateway.post("/pay").key("k").send().await;
    again.assert_is(200, "replayed");
    assert_eq!(again.kept(), first.kept());
}

async fn another_gateways_request_can_be_followed(bench: Bench) {
    let gate = Gate::closed();
    let slow = Reply::new(201).hold(&gate);
    bench.upstream.on_post("/pay").reply(slow);
    let here = following(&bench).start().await;
    let there = following(&bench).start().await;
    let first = there.post("/pay").key("k").begin();
    let came = |state: &crate::support::upstream::State| state.executions("k") == 1;
    bench.upstream.until(came).await;
    let location = followed(&here.post("/pay").key("k").send().await);
    assert_eq!(status(&here, &location).await, "pending");
    let other = here.post("/pay").key("k").json("{}").send().await;
    other.assert_problem(422, "key-reused", "mismatch");
    gate.open();
    first.answer().await.assert_is(201, "executed");
    assert_eq!(status(&here, &location).await, "completed");
}
