//! How an upstream is connected to, and what that tells about a request that was not answered.

use std::time::{Duration, Instant};

use super::upstream_failure::{assert_not_sent, assert_unknown};
use crate::support::blackhole::Blackhole;
use crate::support::gateway::Bench;
use crate::support::rows::Kind;
use crate::support::upstream::{Authority, Cut, Gate, GoAway, Reply, Upstream};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_name_that_does_not_resolve_is_not_sent() {
    let bench = super::on_sqlite().await;
    let pool = "targets = [\"http://no-such-host.invalid:80\"]";
    let gateway = bench.gateway().pool(pool).start().await;
    let answer = gateway.post("/pay").key("k").send().await;
    assert_not_sent(&answer, 502, "upstream-unreachable");
    assert_eq!(bench.database.status("k").await, "failed_before_commit");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_certificate_that_is_not_trusted_is_not_sent() {
    let (trusted, other) = (Authority::new(), Authority::new());
    let upstream = Upstream::start_tls(&other, &["http/1.1"]).await;
    let bench = Bench::with(Kind::Sqlite, upstream).await;
    let pem = bench.path("ca.pem");
    trusted.write_pem(&pem);
    let gateway = bench.gateway().pool(&format!("ca = {pem:?}")).start().await;
    let answer = gateway.post("/pay").key("k").send().await;
    assert_not_sent(&answer, 502, "upstream-unreachable");
    assert_eq!(bench.database.status("k").await, "failed_before_commit");
    assert_eq!(bench.upstream.requests().len(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tls_upstream_is_spoken_to_in_either_version() {
    for alpn in [&["http/1.1"][..], &["h2", "http/1.1"][..]] {
        let authority = Authority::new();
        let upstream = Upstream::start_tls(&authority, alpn).await;
        let bench = Bench::with(Kind::Sqlite, upstream).await;
        let pem = bench.path("ca.pem");
        authority.write_pem(&pem);
        let gateway = bench.gateway().pool(&format!("ca = {pem:?}")).start().await;
        let call = gateway.post("/pay").key("k");
        call.clone().send().await.assert_is(200, "executed");
        call.send().await.assert_is(200, "replayed");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_targets_are_tried_before_giving_up() {
    let bench = super::on_sqlite().await;
    let dead = Upstream::start().await;
    dead.refuse().await;
    let hole = Blackhole::new().await;
    let targets = [dead.url(), hole.url(), bench.upstream.url()];
    let pool = format!("targets = {targets:?}\nconnect_timeout = \"300ms\"");
    let gateway = bench.gateway().pool(&pool).start().await;
    for key in ["a", "b", "c", "d"] {
        let answer = gateway.post("/pay").key(key).send().await;
        answer.assert_is(200, "executed");
    }
}

/// Nothing was written yet: closing an idle connection loses nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_closed_while_idle_loses_nothing() {
    let bench = super::on_sqlite().await;
    let gateway = bench.gateway().start().await;
    gateway
        .post("/pay")
        .key("first")
        .send()
        .await
        .assert_is(200, "executed");
    for (key, cut) in [("fin", Cut::Fin), ("rst", Cut::Rst)] {
        bench.upstream.cut_idle(cut).await;
        let answer = gateway.post("/pay").key(key).send().await;
        answer.assert_is(200, "executed");
    }
    assert_eq!(bench.upstream.connections(), 3);
}

/// The upstream closes just as the request comes: it may have read some of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_closes_into_a_request_is_sent_at_most_once() {
    let bench = super::on_sqlite().await;
    let gateway = bench.gateway().start().await;
    let mut unknown = 0;
    for (n, cut) in [Cut::Fin, Cut::Rst]
        .into_iter()
        .cycle()
        .take(10)
        .enumerate()
    {
        let key = format!("k{n}");
        gateway
            .post("/pay")
            .key(format!("warm{n}"))
            .send()
            .await
            .assert_is(200, "executed");
        bench
            .upstream
            .break_next_request(if n < 4 { 0 } else { 60 }, cut);
        let answer = gateway
            .post("/pay")
            .key(&key)
            .json([b'x'; 500])
            .send()
            .await;
        answer.assert_problem(502, "outcome-unknown", "unknown");
        unknown += 1;
        assert_eq!(bench.upstream.executions(&key), 0);
    }
    gateway
        .until_metric("oncegate_unknown_records", &[], f64::from(unknown))
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn http2_tells_what_was_not_processed() {
    let bench = Bench::with(Kind::Sqlite, Upstream::start_http2().await).await;
    let gateway = bench.gateway().pool("http2 = true").start().await;

    bench
        .upstream
        .on_post("/refused")
        .once()
        .reply(Reply::refuse_stream());
    let refused = gateway.post("/refused").key("refused").send().await;
    if refused.idempotency() != "executed" {
        assert_eq!(refused.idempotency(), "refused", "{refused:?}");
        assert_eq!(
            bench.database.status("refused").await,
            "failed_before_commit"
        );
    }
    let retry = gateway.post("/refused").key("refused").send().await;
    assert_eq!(retry.status, 200);
    assert_eq!(bench.upstream.executions("refused"), 1);

    let reset = Reply::reset_stream(h2::Reason::INTERNAL_ERROR);
    bench.upstream.on_post("/reset").reply(reset);
    let call = gateway.post("/reset").key("reset");
    let first = call.clone().send().await;
    first.assert_problem(502, "outcome-unknown", "unknown");
    assert_unknown(&bench, call, "reset").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_goaway_is_unknown_only_when_it_covers_the_stream() {
    for (goaway, key) in [(GoAway::Below, "below"), (GoAway::Covering, "covering")] {
        let bench = Bench::with(Kind::Sqlite, Upstream::start_http2().await).await;
        let gateway = bench.gateway().pool("http2 = true").start().await;
        bench.upstream.goaway_next(goaway);
        let call = gateway.post("/pay").key(key);
        let answer = call.clone().send().await;
        if goaway == GoAway::Covering {
            answer.assert_problem(502, "outcome-unknown", "unknown");
            assert_unknown(&bench, call, key).await;
            continue;
        }
        if answer.idempotency() != "executed" {
            assert_eq!(answer.idempotency(), "refused", "{answer:?}");
        }
        assert_eq!(call.send().await.status, 200);
        assert_eq!(bench.upstream.executions(key), 1);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_finds_no_room_is_not_sent() {
    let bench = super::on_sqlite().await;
    let gate = Gate::closed();
    bench
        .upstream
        .on_post("/slow")
        .reply(Reply::new(201).hold(&gate));
    let pool = "connections_max = 1\nqueue_timeout = \"200ms\"";
    let gateway = bench.gateway().pool(pool).start().await;
    let first = gateway.post("/slow").key("a").begin();
    bench
        .upstream
        .until(|state| state.executions("a") == 1)
        .await;
    let full = gateway.post("/pay").key("b").send().await;
    assert_not_sent(&full, 503, "upstream-unreachable");
    assert_eq!(bench.database.status("b").await, "failed_before_commit");
    gate.open();
    first.answer().await.assert_is(201, "executed");
    gateway
        .post("/pay")
        .key("b")
        .send()
        .await
        .assert_is(200, "executed");
}

/// Headers in time and a body drop by drop: the time-out covers the whole call.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dripping_answer_ends_at_the_timeout() {
    let bench = super::on_sqlite().await;
    let (reply, drip) = Reply::pieces();
    bench.upstream.on_post("/pay").reply(reply);
    let gateway = bench.gateway().route("timeout = \"1s\"").start().await;
    let start = Instant::now();
    let call = gateway.post("/pay").key("k");
    let first = call.clone().begin();
    while !first.is_over() && start.elapsed() < Duration::from_secs(5) {
        drip.send("x").await;
        crate::support::clock::let_pass(Duration::from_millis(50)).await;
    }
    assert!(
        start.elapsed() < Duration::from_secs(4),
        "{:?}",
        start.elapsed()
    );
    let first = first.answer().await;
    first.assert_problem(504, "outcome-unknown", "unknown");
    assert_unknown(&bench, call, "k").await;
}
