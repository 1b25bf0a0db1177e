//! How many connections there are, who gets one, and when they end.

use super::*;
use crate::support::upstream::Gate;

#[tokio::test]
async fn one_connection_serves_request_after_request() {
    let upstream = Upstream::start().await;
    let pool = Pool::to(&[&upstream]);
    upstream
        .on_post("/chunked")
        .reply(Reply::new(200).trailer("x-t", "1"));
    upstream.on_post("/empty").reply(Reply::new(204));
    for _ in 0..10 {
        for path in ["/length", "/chunked", "/empty"] {
            read(pool.post(path).await.unwrap()).await.unwrap();
        }
    }
    assert_eq!((upstream.connections(), upstream.executions("k")), (1, 30));
    pool.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_connection_serves_request_after_request_on_several_threads() {
    let upstream = Upstream::start().await;
    let pool = Pool::to(&[&upstream]);
    for _ in 0..200 {
        pool.answer("/p").await;
    }
    assert_eq!((upstream.connections(), upstream.executions("k")), (1, 200));
    pool.end().await;
}

#[tokio::test]
async fn a_connection_whose_answer_was_not_read_to_its_end_is_closed() {
    let upstream = Upstream::start().await;
    let pool = Pool::to(&[&upstream]);
    let (reply, events) = Reply::events();
    upstream.on_post("/events").reply(reply);
    let mut response = pool.post("/events").await.unwrap();
    events.send("data: 1\n\n").await;
    let frame = response.body_mut().frame().await.unwrap().unwrap();
    assert_eq!(frame.into_data().unwrap(), "data: 1\n\n");
    drop(response);
    events.closed().await;
    upstream.until(|state| state.open == 0).await;
    pool.answer("/p").await;
    assert_eq!(upstream.connections(), 2);
    pool.end().await;
}

#[tokio::test]
async fn a_call_that_is_given_up_closes_its_connection_and_tells_what_was_sent() {
    let upstream = Upstream::start().await;
    let pool = Pool::with(&[&upstream], |config| config.connections_max = 1);
    let gate = Gate::closed();
    upstream.on_post("/held").reply(Reply::new(200).hold(&gate));
    let id = pool_id();

    let (held, queued) = (SendProgress::new(), SendProgress::new());
    let first = pool.upstreams.send(&id, post("/held"), &held);
    let second = pool.upstreams.send(&id, post("/queued"), &queued);
    tokio::select! {
        biased;
        _ = first => unreachable!(),
        _ = second => unreachable!(),
        _ = upstream.until(|state| state.executions("k") == 1) => {}
    }
    // Both futures were dropped.
    assert_eq!((held.abandon(), queued.abandon()), (Sent::Maybe, Sent::No));
    assert_eq!((held.abandon(), queued.abandon()), (Sent::Maybe, Sent::No));
    upstream.until(|state| state.open == 0).await;
    assert_eq!(upstream.executions("k"), 1);
    pool.end().await;
}

#[tokio::test]
async fn a_call_that_was_abandoned_is_never_sent() {
    let (http1, http2) = (Upstream::start().await, Upstream::start_http2().await);
    for (upstream, prior_knowledge) in [(&http1, false), (&http2, true)] {
        let pool = Pool::with(&[upstream], |config| config.http2 = prior_knowledge);
        let progress = SendProgress::new();
        assert_eq!(progress.abandon(), Sent::No);
        let id = pool_id();
        let error = pool
            .upstreams
            .send(&id, post("/p"), &progress)
            .await
            .err()
            .unwrap();
        assert_eq!(
            (error.sent, error.kind),
            (Sent::No, SendErrorKind::Abandoned)
        );
        assert_eq!(upstream.requests().len(), 0);
        assert_eq!(pool.answer("/p").await, "{\"execution\":1}");
        pool.end().await;
    }
}

#[tokio::test]
async fn there_are_never_more_connections_than_allowed_and_those_who_wait_are_told_in_time() {
    let upstream = Upstream::start().await;
    let gate = Gate::closed();
    upstream.on_post("/held").reply(Reply::new(200).hold(&gate));
    let pool = Pool::with(&[&upstream], |config| {
        config.connections_max = 2;
        config.queue_timeout = SHORT;
    });
    let held = async { tokio::join!(pool.answer("/held"), pool.answer("/held")) };
    let waits = async {
        upstream.until(|state| state.executions("k") == 2).await;
        assert_eq!(pool.fails("/p").await, (Sent::No, SendErrorKind::NoRoom));
        gate.open();
    };
    tokio::join!(held, waits);
    assert_eq!((upstream.connections(), upstream.executions("k")), (2, 2));
    pool.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn everyone_who_waits_gets_a_turn() {
    let upstream = Upstream::start().await;
    // Some answers end the connection, so that new ones are made in between.
    upstream
        .on_post("/last")
        .reply(Reply::new(200).until_close());
    let pool = Pool::with(&[&upstream], |config| config.connections_max = 3);
    let calls = (0..300).map(|call| pool.answer(if call % 5 == 0 { "/last" } else { "/p" }));
    futures_util::future::join_all(calls).await;
    assert_eq!(upstream.executions("k"), 300);
    let state = upstream.until(|state| state.open <= 3).await;
    assert!(state.connections >= 60);
    pool.end().await;
}

#[tokio::test]
async fn a_connection_ends_when_it_was_idle_for_long() {
    let upstream = Upstream::start().await;
    let pool = Pool::with(&[&upstream], |config| config.idle_timeout = SHORT);
    pool.answer("/p").await;
    upstream.until(|state| state.open == 0).await;
    pool.end().await;
}

#[tokio::test]
async fn a_connection_that_is_old_takes_no_more_requests() {
    let upstream = Upstream::start().await;
    let pool = Pool::with(&[&upstream], |config| {
        config.connection_age_max = Duration::ZERO;
    });
    pool.answer("/p").await;
    pool.answer("/p").await;
    assert_eq!(upstream.connections(), 2);
    pool.end().await;
}

#[tokio::test]
async fn closing_ends_idle_connections_and_no_call_in_progress() {
    let upstream = Upstream::start().await;
    let pool = Pool::to(&[&upstream]);
    let gate = Gate::closed();
    upstream.on_post("/held").reply(Reply::new(200).hold(&gate));
    let held = pool.answer("/held");
    let closes = async {
        upstream.until(|state| state.executions("k") == 1).await;
        pool.answer("/p").await;
        pool.upstreams.close();
        upstream.until(|state| state.open == 1).await;
        gate.open();
    };
    tokio::join!(held, closes);
    upstream.until(|state| state.open == 0).await;
    pool.end().await;
}

#[tokio::test]
async fn calls_go_where_the_fewest_are_in_flight() {
    let (slow, quick) = (Upstream::start().await, Upstream::start().await);
    let gate = Gate::closed();
    slow.on_post("/p").reply(Reply::new(200).hold(&gate));
    let pool = Pool::to(&[&slow, &quick]);
    let held = pool.answer("/p");
    let others = async {
        slow.until(|state| state.executions("k") == 1).await;
        for _ in 0..8 {
            pool.answer("/p").await;
        }
        gate.open();
    };
    tokio::join!(held, others);
    assert_eq!((slow.executions("k"), quick.executions("k")), (1, 8));
    pool.end().await;
}

#[tokio::test]
async fn open_connections_are_counted() {
    let recorder = metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder();
    let handle = recorder.handle();
    // Everything runs on this thread.
    let _guard = metrics::set_default_local_recorder(&recorder);
    let upstream = Upstream::start().await;
    let pool = Pool::to(&[&upstream]);
    let counted = |count| {
        let line = format!("oncegate_upstream_connections{{pool=\"pool\"}} {count}");
        let rendered = handle.render();
        assert!(rendered.contains(&line), "{rendered}");
    };
    pool.answer("/p").await;
    pool.answer("/p").await;
    counted(1);
    upstream.refuse().await;
    upstream.cut_idle(Cut::Fin).await;
    pool.fails("/p").await;
    counted(0);
    pool.end().await;
}
