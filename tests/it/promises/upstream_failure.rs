//! What became of the upstream call decides: not sent, answered, or unknown.

use crate::support::blackhole::Blackhole;
use crate::support::client::{Answer, Call};
use crate::support::clock::eventually;
use crate::support::gateway::{Bench, LEASE};
use crate::support::upstream::{Cut, Gate, Reply};

each_store!(
    a_refused_connection_leaves_the_key_open,
    a_connection_that_hangs_is_not_sent,
    a_waiter_takes_over_when_nothing_was_sent,
    a_broken_connection_is_unknown_and_never_sent_again,
    an_answer_that_comes_too_late_is_unknown,
    an_answer_that_comes_while_the_owner_lingers_is_kept,
    a_released_answer_that_its_client_never_saw_opens_the_key_to_the_same_request_only,
    an_answer_that_breaks_off_is_never_a_clean_one,
    an_answer_that_ends_with_its_connection_is_kept_and_the_log_says_what_that_means,
    a_route_may_send_again_with_the_same_key,
);

#[track_caller]
pub fn assert_not_sent(answer: &Answer, status: u16, slug: &str) {
    answer.assert_problem(status, slug, "refused");
    assert!(answer.retry_after().is_some(), "{answer:?}");
}

/// Asserts that a retry is told that nobody knows, and that nothing is sent.
pub async fn assert_unknown(bench: &Bench, call: Call, key: &str) {
    assert_eq!(bench.database.status(key).await, "outcome_unknown");
    let requests = bench.upstream.requests().len();
    for _ in 0..2 {
        let retry = call.clone().send().await;
        retry.assert_problem(409, "outcome-unknown", "unknown");
        assert_eq!(retry.retry_after(), None);
        assert!(retry.decision().is_none());
    }
    assert_eq!(bench.upstream.requests().len(), requests);
}

async fn a_refused_connection_leaves_the_key_open(bench: Bench) {
    let gateway = bench.gateway().start().await;
    bench.upstream.refuse().await;
    for _ in 0..2 {
        let answer = gateway.post("/pay").key("k").send().await;
        assert_not_sent(&answer, 502, "upstream-unreachable");
        assert_eq!(bench.database.status("k").await, "failed_before_commit");
    }
    bench.upstream.accept_again().await;
    let retry = gateway.post("/pay").key("k").send().await;
    retry.assert_is(200, "executed");
    let again = gateway.post("/pay").key("k").send().await;
    again.assert_is(200, "replayed");
    let not_sent = [("pool", "main"), ("outcome", "not_sent")];
    let metrics = gateway.metrics().await;
    assert!(metrics.sum("oncegate_upstream_calls_total", &not_sent) > 1.5);
}

async fn a_connection_that_hangs_is_not_sent(bench: Bench) {
    let mut hole = Blackhole::new().await;
    let pool = format!("targets = [{:?}]\nconnect_timeout = \"300ms\"", hole.url());
    let gateway = bench.gateway().pool(&pool).start().await;
    let answer = gateway.post("/pay").key("k").send().await;
    assert_not_sent(&answer, 504, "upstream-timeout");
    assert_eq!(bench.database.status("k").await, "failed_before_commit");
    hole.open(bench.upstream.address());
    let retry = gateway.post("/pay").key("k").send().await;
    retry.assert_is(200, "executed");
}

async fn a_waiter_takes_over_when_nothing_was_sent(bench: Bench) {
    let mut hole = Blackhole::new().await;
    let pool = format!("targets = [{:?}]\nconnect_timeout = \"1s\"", hole.url());
    let gateway = bench.gateway().pool(&pool).start().await;
    let first = gateway.post("/pay").key("k").begin();
    gateway.until_metric("oncegate_owners", &[], 1.0).await;
    let others: Vec<_> = (0..4)
        .map(|_| gateway.post("/pay").key("k").begin())
        .collect();
    gateway.until_parked(4).await;
    let first = first.answer().await;
    assert_not_sent(&first, 504, "upstream-timeout");
    hole.open(bench.upstream.address());
    let mut executed = 0;
    for other in others {
        let answer = other.answer().await;
        match &*answer.idempotency() {
            "executed" => executed += 1,
            "waited" => {}
            // Who took over before the way was open saw the same as the first.
            _ => assert_not_sent(&answer, 504, "upstream-timeout"),
        }
    }
    assert_eq!((executed, bench.upstream.executions("k")), (1, 1));
}

async fn a_broken_connection_is_unknown_and_never_sent_again(bench: Bench) {
    let gateway = bench.gateway().start().await;
    let ways = [
        ("reset", Reply::new(201).cut_after(0, Cut::Rst)),
        ("fin", Reply::new(201).cut_after(0, Cut::Fin)),
        ("reset-in-head", Reply::new(201).cut_after(10, Cut::Rst)),
        ("fin-in-head", Reply::new(201).cut_after(10, Cut::Fin)),
        ("garbage", Reply::raw("SSH-2.0-x\r\n\r\n")),
        (
            "two-lengths",
            Reply::raw("HTTP/1.1 201 C\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab"),
        ),
    ];
    for (way, reply) in ways {
        let path = format!("/{way}");
        bench.upstream.on_post(&path).reply(reply);
        let call = gateway.post(&path).key(way);
        let first = call.clone().send().await;
        first.assert_problem(502, "outcome-unknown", "unknown");
        assert!(first.decision().is_none());
        assert_unknown(&bench, call, way).await;
        assert_eq!(bench.upstream.executions(way), 1, "{way}");
    }
    // A reused connection makes no difference once a byte was written.
    gateway
        .post("/free")
        .key("warm")
        .send()
        .await
        .assert_is(200, "executed");
    bench
        .upstream
        .on_post("/reused")
        .reply(Reply::new(201).cut_after(0, Cut::Rst));
    let call = gateway.post("/reused").key("reused");
    let first = call.clone().send().await;
    first.assert_problem(502, "outcome-unknown", "unknown");
    assert_unknown(&bench, call, "reused").await;
    gateway
        .until_metric("oncegate_unknown_records", &[], 7.0)
        .await;
}

async fn an_answer_that_comes_too_late_is_unknown(bench: Bench) {
    let gate = Gate::closed();
    bench
        .upstream
        .on_post("/pay")
        .reply(Reply::new(201).hold(&gate));
    let gateway = bench.gateway().route("timeout = \"700ms\"").start().await;
    let call = gateway.post("/pay").key("k");
    let duplicate = {
        let first = call.clone().begin();
        bench
            .upstream
            .until(|state| state.executions("k") == 1)
            .await;
        let duplicate = call.clone().begin();
        let first = first.answer().await;
        first.assert_problem(504, "outcome-unknown", "unknown");
        duplicate
    };
    let waited = duplicate.answer().await;
    waited.assert_problem(409, "outcome-unknown", "unknown");
    assert_unknown(&bench, call.clone(), "k").await;
    gate.open();
    assert_unknown(&bench, call, "k").await;
}

async fn an_answer_that_comes_while_the_owner_lingers_is_kept(bench: Bench) {
    let gate = Gate::closed();
    let reply = Reply::new(201).header("Content-Type", "text/csv; charset=iso-8859-1");
    bench
        .upstream
        .on_post("/pay")
        .reply(reply.body(&b"caf\xe9"[..]).hold(&gate));
    let route = "timeout = \"500ms\"\nlinger = \"20s\"";
    let gateway = bench.gateway().route(route).start().await;
    let call = gateway.post("/pay").key("k");
    let first = call.clone().send().await;
    assert_eq!((first.status, &*first.problem()), (504, "outcome-unknown"));
    // Longer than the lease: it is heartbeated on.
    crate::support::clock::let_pass(LEASE + LEASE / 2).await;
    assert_eq!(bench.database.status("k").await, "pending");
    let waiting = call.clone().begin();
    gate.open();
    let late = waiting.answer().await;
    assert!(late.status == 201 && late.replayed(), "{late:?}");
    assert_eq!(
        late.header("content-type").as_deref(),
        Some("text/csv; charset=iso-8859-1")
    );
    assert_eq!(late.body, &b"caf\xe9"[..]);
    call.send().await.assert_is(201, "replayed");
}

/// Its client was told that nobody knows, so another body is no first attempt.
async fn a_released_answer_that_its_client_never_saw_opens_the_key_to_the_same_request_only(
    bench: Bench,
) {
    bench.allow_reruns();
    let gate = Gate::closed();
    let busy = Reply::new(429).hold(&gate);
    bench.upstream.on_post("/pay").once().reply(busy);
    bench.upstream.on_post("/pay").answer(201, "done");
    let route = "timeout = \"500ms\"\nlinger = \"20s\"";
    let gateway = bench.gateway().route(route).start().await;
    let call = gateway.post("/pay").key("k");
    let first = call.clone().send().await;
    assert_eq!((first.status, &*first.problem()), (504, "outcome-unknown"));
    gate.open();
    eventually("the key is open", async || {
        (bench.database.status("k").await == "failed_before_commit").then_some(())
    })
    .await;
    let other = gateway.post("/pay").key("k").json("{}").send().await;
    other.assert_problem(422, "key-reused", "mismatch");
    call.send().await.assert_is(201, "executed");
}

async fn an_answer_that_breaks_off_is_never_a_clean_one(bench: Bench) {
    let gateway = bench.gateway().start().await;
    let ways = [
        ("short", Reply::new(200).body("abc").claim_length(10)),
        ("unended", Reply::new(200).body("abc").chunked_without_end()),
        (
            "reset",
            Reply::new(200)
                .body([b'x'; 2000].to_vec())
                .cut_after(1000, Cut::Rst),
        ),
        (
            "reset-with-an-open-end",
            Reply::raw("HTTP/1.1 200 OK\r\n\r\nabc").cut_after(22, Cut::Rst),
        ),
    ];
    for (way, reply) in ways {
        let path = format!("/{way}");
        bench.upstream.on_post(&path).reply(reply);
        let call = gateway.post(&path).key(way);
        if let Ok(first) = call.clone().try_send().await {
            first.assert_problem(502, "outcome-unknown", "unknown");
        }
        eventually("the record is settled", async || {
            (bench.database.status(way).await != "pending").then_some(())
        })
        .await;
        assert_unknown(&bench, call, way).await;
    }
}

/// RFC 9112 section 8: it counts as complete.
async fn an_answer_that_ends_with_its_connection_is_kept_and_the_log_says_what_that_means(
    bench: Bench,
) {
    let gateway = bench.gateway().start().await;
    let warning = "can't be told from a whole one";
    bench.upstream.on_post("/whole").answer(200, "framed");
    let framed = gateway.post("/whole").key("framed").send().await;
    framed.assert_is(200, "executed");
    assert!(!gateway.log_holds(warning));
    let reply = Reply::new(200).until_close().body("to the end");
    bench.upstream.on_post("/open").reply(reply);
    let call = gateway.post("/open").key("open");
    call.clone().send().await.assert_is(200, "executed");
    let again = call.send().await;
    again.assert_is(200, "replayed");
    assert_eq!(again.text(), "to the end");
    assert!(gateway.log_holds(warning));
}

async fn a_route_may_send_again_with_the_same_key(bench: Bench) {
    bench.allow_reruns();
    let route = "on_unknown = \"redrive\"\nforward_key = \"derived\"\ntimeout = \"700ms\"";
    let gateway = bench.gateway().route(route).start().await;
    for (path, reply) in [
        ("/reset", Reply::new(201).cut_after(0, Cut::Rst)),
        ("/late", Reply::new(201).hold(&Gate::closed())),
    ] {
        bench.upstream.on_post(path).once().reply(reply);
        let call = gateway.post(path).key(path);
        let first = call.clone().send().await;
        assert_eq!(first.problem(), "outcome-unknown");
        assert_eq!(bench.database.status(path).await, "failed_before_commit");
        call.clone().send().await.assert_is(200, "executed");
        call.send().await.assert_is(200, "replayed");
        let mut requests = bench.upstream.requests();
        requests.retain(|seen| seen.path() == path);
        let keys: Vec<_> = requests
            .iter()
            .map(|seen| seen.header("idempotency-key"))
            .collect();
        assert!(
            keys.len() == 2 && keys[0] == keys[1] && !keys[0].is_empty(),
            "{keys:?}"
        );
        assert_eq!(requests[0].sha256, requests[1].sha256);
    }
}
