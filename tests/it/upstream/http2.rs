//! HTTP/2 by prior knowledge.

use h2::Reason;

use super::*;
use crate::support::upstream::{Gate, GoAway};

fn pool(upstream: &Upstream) -> Pool {
    Pool::with(&[upstream], |config| config.http2 = true)
}

#[tokio::test]
async fn a_request_and_its_answer_pass() {
    let upstream = Upstream::start_http2().await;
    let pool = pool(&upstream);
    let reply = Reply::new(201)
        .header("x-b", "1")
        .header("x-b", "2")
        .body("hello");
    upstream.on_post("/p").reply(reply.trailer("x-t", "3"));
    let response = pool.post("/p?q=1").await.unwrap();
    assert_eq!(response.status(), 201);
    let values: Vec<_> = response.headers().get_all("x-b").iter().collect();
    assert_eq!(values, ["1", "2"]);
    let body = response.into_body().collect().await.unwrap();
    assert_eq!(body.trailers().unwrap()["x-t"], "3");
    assert_eq!(body.to_bytes(), "hello");
    let seen = upstream.requests().pop().unwrap();
    assert_eq!(seen.header(":authority"), [upstream.address().to_string()]);
    assert_eq!(seen.target, "/p?q=1");
    assert_eq!(
        (seen.header("content-length"), &*seen.body),
        (vec!["3".to_owned()], &b"abc"[..])
    );
    assert!(seen.header("host").is_empty());
    pool.end().await;
}

#[tokio::test]
async fn one_connection_carries_many_calls_at_a_time() {
    let upstream = Upstream::start_http2().await;
    let pool = pool(&upstream);
    let gate = Gate::closed();
    upstream.on_post("/held").reply(Reply::new(200).hold(&gate));
    let calls = futures_util::future::join_all((0..20).map(|_| pool.answer("/held")));
    let opens = async {
        upstream.until(|state| state.executions("k") == 20).await;
        gate.open();
    };
    tokio::join!(calls, opens);
    assert_eq!(upstream.connections(), 1);
    pool.end().await;
}

#[tokio::test]
async fn no_more_streams_are_opened_than_the_upstream_allows() {
    let upstream = Upstream::start_http2_with_streams(2).await;
    let pool = Pool::with(&[&upstream], |config| {
        config.http2 = true;
        config.connections_max = 2;
        config.queue_timeout = SHORT;
    });
    let gate = Gate::closed();
    upstream.on_post("/held").reply(Reply::new(200).hold(&gate));
    let calls = futures_util::future::join_all((0..4).map(|_| pool.answer("/held")));
    let opens = async {
        upstream.until(|state| state.executions("k") == 4).await;
        assert_eq!(pool.fails("/p").await, (Sent::No, SendErrorKind::NoRoom));
        gate.open();
    };
    tokio::join!(calls, opens);
    assert_eq!((upstream.connections(), upstream.executions("k")), (2, 4));
    pool.end().await;
}

#[tokio::test]
async fn a_refused_stream_is_sent_again_and_was_not_sent_if_it_is_refused_again() {
    let upstream = Upstream::start_http2().await;
    let pool = pool(&upstream);
    upstream.on_post("/p").once().reply(Reply::refuse_stream());
    assert_eq!(pool.answer("/p").await, "{\"execution\":1}");
    upstream.on_post("/p").reply(Reply::refuse_stream());
    assert_eq!(pool.fails("/p").await, (Sent::No, SendErrorKind::Reset));
    assert_eq!(upstream.executions("k"), 1);
    pool.end().await;
}

#[tokio::test]
async fn a_refused_call_that_times_out_afterwards_was_not_sent() {
    let upstream = Upstream::start_http2().await;
    let pool = pool(&upstream);
    upstream.on_post("/p").reply(Reply::refuse_stream());
    let progress = SendProgress::new();
    let error = pool.upstreams.send(&pool_id(), post("/p"), &progress).await;
    assert_eq!(error.err().unwrap().sent, Sent::No);
    assert_eq!(progress.abandon(), Sent::No);
    pool.end().await;
}

#[tokio::test]
async fn goaway_below_the_stream_means_not_sent_and_a_new_connection_is_tried() {
    let upstream = Upstream::start_http2().await;
    let pool = pool(&upstream);
    upstream.goaway_next(GoAway::Below);
    assert_eq!(pool.answer("/p").await, "{\"execution\":1}");
    assert_eq!(upstream.connections(), 2);
    pool.end().await;
}

#[tokio::test]
async fn goaway_that_covers_the_stream_leaves_the_outcome_unknown() {
    let upstream = Upstream::start_http2().await;
    let pool = pool(&upstream);
    upstream.goaway_next(GoAway::Covering);
    assert_eq!(pool.fails("/p").await, (Sent::Maybe, SendErrorKind::Closed));
    assert_eq!(upstream.connections(), 1);
    pool.end().await;
}

#[tokio::test]
async fn a_stream_reset_for_any_other_reason_leaves_the_outcome_unknown() {
    let upstream = Upstream::start_http2().await;
    let pool = pool(&upstream);
    for reason in [Reason::CANCEL, Reason::NO_ERROR, Reason::INTERNAL_ERROR] {
        upstream
            .on_post("/p")
            .once()
            .reply(Reply::reset_stream(reason));
        assert_eq!(pool.fails("/p").await, (Sent::Maybe, SendErrorKind::Reset));
    }
    // The connection is as good as before.
    pool.answer("/p").await;
    assert_eq!((upstream.connections(), upstream.executions("k")), (1, 4));
    pool.end().await;
}

#[tokio::test]
async fn a_body_that_is_reset_ends_in_an_error_whatever_the_reason() {
    let upstream = Upstream::start_http2().await;
    let pool = pool(&upstream);
    for reason in [Reason::CANCEL, Reason::NO_ERROR, Reason::INTERNAL_ERROR] {
        let (reply, events) = Reply::events();
        upstream.on_post("/p").once().reply(reply);
        let mut response = pool.post("/p").await.unwrap();
        events.send("data: 1\n\n").await;
        let frame = response.body_mut().frame().await.unwrap().unwrap();
        assert_eq!(frame.into_data().unwrap(), "data: 1\n\n");
        events.reset(reason).await;
        read(response).await.unwrap_err();
    }
    pool.end().await;
}

#[tokio::test]
async fn a_call_that_is_given_up_resets_its_stream_only() {
    let upstream = Upstream::start_http2().await;
    let pool = pool(&upstream);
    let (reply, events) = Reply::events();
    upstream.on_post("/events").reply(reply);
    drop(pool.post("/events").await.unwrap());
    events.closed().await;
    pool.answer("/p").await;
    assert_eq!(upstream.connections(), 1);
    pool.end().await;
}

#[tokio::test]
async fn a_connection_on_which_nothing_came_during_a_call_takes_no_more() {
    let upstream = Upstream::start_http2().await;
    let pool = Pool::with(&[&upstream], |config| {
        config.http2 = true;
        config.connect_timeout = SHORT;
    });
    upstream
        .on_post("/held")
        .reply(Reply::new(200).hold(&Gate::closed()));
    let (id, progress) = (pool_id(), SendProgress::new());
    let held = pool.upstreams.send(&id, post("/held"), &progress);
    let waited = tokio::time::timeout(2 * SHORT, held).await;
    assert!(waited.is_err());
    assert_eq!(progress.abandon(), Sent::Maybe);
    pool.answer("/p").await;
    let state = upstream.until(|state| state.open == 1).await;
    assert_eq!(state.connections, 2);
    pool.end().await;
}

#[tokio::test]
async fn a_large_body_passes_in_both_directions() {
    let upstream = Upstream::start_http2().await;
    let pool = pool(&upstream);
    let large = Bytes::from(vec![7; 3_000_000]);
    upstream.on_post("/p").answer(200, large.clone());
    for streamed in [false, true] {
        let body = if streamed {
            let body = http_body_util::Full::new(large.clone());
            OutBody::Stream(body.map_err(|never| match never {}).boxed_unsync())
        } else {
            OutBody::Full(large.clone())
        };
        let request = Request::post("/p").body(body).unwrap();
        let answer = read(pool.send(request).await.unwrap()).await.unwrap();
        assert!(answer == large, "{} bytes", answer.len());
        assert!(upstream.requests().pop().unwrap().body == large);
    }
    pool.end().await;
}

#[tokio::test]
async fn an_upstream_that_does_not_speak_it_was_sent_nothing() {
    let upstream = Upstream::start().await;
    let pool = Pool::with(&[&upstream], |config| {
        config.http2 = true;
        config.connect_timeout = SHORT;
    });
    let (sent, kind) = pool.fails("/p").await;
    let kinds = [SendErrorKind::Connect, SendErrorKind::ConnectTimeout];
    assert!(sent == Sent::No && kinds.contains(&kind), "{kind:?}");
    pool.end().await;
}

#[tokio::test]
async fn an_upgrade_is_not_sent_where_only_http2_is_spoken() {
    let upstream = Upstream::start_http2().await;
    let pool = pool(&upstream);
    let mut upgrade = post("/p");
    upgrade
        .headers_mut()
        .insert("upgrade", "websocket".parse().unwrap());
    let error = pool.send(upgrade).await.err().unwrap();
    assert_eq!(
        (error.sent, error.kind),
        (Sent::No, SendErrorKind::Unsendable)
    );
    pool.end().await;
}

#[tokio::test]
async fn headers_beyond_the_limits_leave_the_outcome_unknown() {
    let upstream = Upstream::start_http2().await;
    let pool = pool(&upstream);
    let mut many = Reply::new(200);
    for _ in 0..200 {
        many = many.header("x", "y");
    }
    upstream.on_post("/p").once().reply(many);
    assert_eq!(
        pool.fails("/p").await,
        (Sent::Maybe, SendErrorKind::BadResponse)
    );
    upstream
        .on_post("/p")
        .once()
        .reply(Reply::new(200).header("x", "y".repeat(100_000)));
    assert_eq!(
        pool.fails("/p").await,
        (Sent::Maybe, SendErrorKind::BadResponse)
    );
    assert_eq!(pool.answer("/p").await, "{\"execution\":3}");
    pool.end().await;
}
