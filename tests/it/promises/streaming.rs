//! Answers that can't be kept: the first client gets them whole as they come, nobody runs twice.

use std::time::Duration;

use crate::support::client::Call;
use crate::support::clock::{eventually, within};
use crate::support::gateway::Bench;
use crate::support::upstream::{Cut, Reply};

each_store!(
    events_reach_the_first_client_as_they_come,
    an_answer_too_long_to_keep_is_passed_on_whole,
    a_stream_that_breaks_off_is_not_run_again,
);

/// Asserts that a retry learns that the request ran, how, and that nothing is sent.
async fn assert_not_replayable(bench: &Bench, call: Call, status: u16) {
    let requests = bench.upstream.requests().len();
    for _ in 0..2 {
        let retry = call.clone().send().await;
        retry.assert_problem(409, "response-not-replayable", "replayed");
        assert!(
            retry.text().contains(&status.to_string()),
            "{}",
            retry.text()
        );
        assert!(retry.decision().is_some());
        assert_eq!(retry.retry_after(), None);
    }
    assert_eq!(bench.upstream.requests().len(), requests);
}

async fn events_reach_the_first_client_as_they_come(bench: Bench) {
    let (reply, events) = Reply::events();
    bench.upstream.on_post("/pay").reply(reply);
    // Longer than the time-out, which ends with the headers of a stream.
    let gateway = bench.gateway().route("timeout = \"1s\"").start().await;
    let call = gateway.post("/pay").key("k");
    let mut first = call.start().await;
    let head = first
        .answer_head()
        .await
        .expect("the head, before any event");
    head.assert_is(200, "executed");
    assert!(head.decision().is_some());
    assert_eq!(bench.database.status("k").await, "completed");
    assert_not_replayable(&bench, call.clone(), 200).await;
    for event in ["data: 1\n\n", "data: 2\n\n", "data: 3\n\n"] {
        events.send(event).await;
        let mut seen = Vec::new();
        while seen.len() < event.len() {
            let chunk = first.chunk().await.expect("the event, before the next");
            seen.extend_from_slice(&chunk.expect("not the end"));
        }
        assert_eq!(seen, event.as_bytes());
        crate::support::clock::let_pass(Duration::from_millis(500)).await;
    }
    events.end().await;
    assert_eq!(first.chunk().await.expect("an end in order"), None);
    assert_not_replayable(&bench, call, 200).await;
}

async fn an_answer_too_long_to_keep_is_passed_on_whole(bench: Bench) {
    let body: Vec<u8> = (0..300_000_u32).map(|n| n.to_le_bytes()[0]).collect();
    let told = Reply::new(201).body(body.clone());
    let untold = Reply::new(201).body(body.clone()).chunked();
    bench.upstream.on_post("/told").reply(told);
    bench.upstream.on_post("/untold").reply(untold);
    let gateway = bench
        .gateway()
        .route("store_body_max = \"64KiB\"")
        .start()
        .await;
    for path in ["/told", "/untold"] {
        let call = gateway.post(path).key(path);
        let first = call.clone().send().await;
        first.assert_is(201, "executed");
        assert!(first.body == body, "{} bytes", first.body.len());
        assert_not_replayable(&bench, call, 201).await;
    }
    let kept = "select count(*) from eec_routing_decision where answer_body is not null";
    assert_eq!(bench.database.number(kept).await, 0);
}

async fn a_stream_that_breaks_off_is_not_run_again(bench: Bench) {
    let (reply, events) = Reply::events();
    bench.upstream.on_post("/pay").reply(reply);
    let gateway = bench.gateway().start().await;
    let call = gateway.post("/pay").key("k");
    let mut first = call.start().await;
    first
        .answer_head()
        .await
        .expect("the head")
        .assert_is(200, "executed");
    events.send("data: 1\n\n").await;
    assert!(first.chunk().await.expect("a chunk").is_some());
    events.cut(Cut::Rst).await;
    let end = within(
        Duration::from_secs(5),
        "the break is passed on",
        async || Some(first.chunk().await),
    )
    .await;
    assert!(end.is_err(), "a break is no end in order");
    assert_not_replayable(&bench, call, 200).await;
}

/// Once its client is gone nobody reads a stream: the gateway may close it, and stays whole.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_without_a_client_holds_nothing_up() {
    let bench = super::on_sqlite().await;
    let (reply, events) = Reply::events();
    bench.upstream.on_post("/pay").reply(reply);
    let gateway = bench.gateway().start().await;
    let call = gateway.post("/pay").key("k");
    let mut first = call.start().await;
    first
        .answer_head()
        .await
        .expect("the head")
        .assert_is(200, "executed");
    first.reset();
    let end = async {
        for _ in 0..200 {
            events.send("data: more\n\n").await;
            crate::support::clock::let_pass(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), end)
        .await
        .expect("it is read or closed");
    assert_not_replayable(&bench, call, 200).await;
    drop(events);
}

/// Without a key nothing is buffered in either direction, whatever the limits of the route.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unguarded_requests_stream_through() {
    let bench = super::on_sqlite().await;
    let route = "body_max = \"1KiB\"\nstore_body_max = \"1KiB\"";
    let gateway = bench.gateway().route(route).start().await;
    let large = vec![b'x'; 20_000_000];
    bench.upstream.on_post("/large").answer(200, large.clone());
    let answer = gateway.post("/large").json(&large).send().await;
    answer.assert_is(200, "");
    assert!(answer.body == large && bench.upstream.requests()[0].body == large);

    let (reply, pieces) = Reply::pieces();
    bench.upstream.on_get("/events").reply(reply);
    let mut connection = gateway.call("GET", "/events").start().await;
    connection
        .answer_head()
        .await
        .expect("the head")
        .assert_is(200, "");
    pieces.send("a").await;
    let chunk = connection.chunk().await.expect("a chunk before the end");
    assert_eq!(chunk.expect("a chunk"), "a");
    connection.reset();
    within(Duration::from_secs(5), "the upstream is told", async || {
        pieces.send("b").await;
        tokio::time::timeout(Duration::from_millis(100), pieces.closed())
            .await
            .ok()
    })
    .await;

    // Upload: the upstream is called before the body's end.
    let mut upload = gateway.post("/upload").json([b'x'; 1000]).to_bytes();
    let rest = upload.split_off(upload.len() - 500);
    let mut connection = crate::support::client::Connection::to(gateway.listen())
        .await
        .expect("it listens");
    let before = bench.upstream.connections();
    connection.write(&upload).await.expect("it reads");
    eventually("the upstream is called", async || {
        (bench.upstream.connections() > before).then_some(())
    })
    .await;
    connection.write(&rest).await.expect("it reads");
    connection
        .answer()
        .await
        .expect("an answer")
        .assert_is(200, "");
}
