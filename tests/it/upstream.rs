//! Calls to upstreams over real sockets: what is told of each way in which they end.

use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, HOST};
use http::{Method, Request, Response};
use http_body_util::BodyExt;
use oncegate::config::PoolConfig;
use oncegate::domain::scope::PoolId;
use oncegate::proxy::{Body, BoxError};
use oncegate::upstream::{
    CloseDelimited, OutBody, SendError, SendErrorKind, SendProgress, Sent, Upstreams,
};
use tokio_util::task::TaskTracker;

use crate::support::upstream::{Cut, Reply, Upstream};

mod connections;
mod http2;
mod races;
mod requests;
mod tls;

/// No test comes near it unless something hangs.
const LONG: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(100);

/// A pool under test.
struct Pool {
    upstreams: Upstreams,
    tracker: TaskTracker,
}

fn pool_id() -> PoolId {
    PoolId::new("pool").unwrap()
}

fn config(targets: &[String]) -> PoolConfig {
    PoolConfig {
        id: pool_id(),
        targets: targets
            .iter()
            .map(|target| target.parse().unwrap())
            .collect(),
        connect_timeout: LONG,
        connections_max: 100,
        queue_timeout: LONG,
        idle_timeout: LONG,
        connection_age_max: LONG,
        http2: false,
        ca: None,
        preserve_host: false,
    }
}

impl Pool {
    fn to(upstreams: &[&Upstream]) -> Self {
        Self::with(upstreams, |_| {})
    }

    fn with(upstreams: &[&Upstream], change: impl FnOnce(&mut PoolConfig)) -> Self {
        let targets: Vec<String> = upstreams.iter().map(|upstream| upstream.url()).collect();
        let mut config = config(&targets);
        change(&mut config);
        Self::configured(&config)
    }

    fn configured(config: &PoolConfig) -> Self {
        let tracker = TaskTracker::new();
        let upstreams = Upstreams::new(std::slice::from_ref(config), tracker.clone()).unwrap();
        Self { upstreams, tracker }
    }

    async fn send(&self, request: Request<OutBody>) -> Result<Response<Body>, SendError> {
        let (id, progress) = (pool_id(), SendProgress::new());
        let sent = self.upstreams.send(&id, request, &progress);
        tokio::time::timeout(LONG, sent).await.expect("it hangs")
    }

    async fn post(&self, path: &str) -> Result<Response<Body>, SendError> {
        self.send(post(path)).await
    }

    /// Sends and reads the whole answer.
    async fn answer(&self, path: &str) -> String {
        text(self.post(path).await.unwrap()).await
    }

    /// Sends what must fail.
    async fn fails(&self, path: &str) -> (Sent, SendErrorKind) {
        let error = self.post(path).await.expect_err("it was answered");
        (error.sent, error.kind)
    }

    /// Ends it; no task may be left.
    async fn end(self) {
        drop(self.upstreams);
        self.tracker.close();
        let ended = tokio::time::timeout(LONG, self.tracker.wait()).await;
        ended.expect("tasks are left");
    }
}

fn post(path: &str) -> Request<OutBody> {
    let body = OutBody::Full(Bytes::from_static(b"abc"));
    Request::post(path)
        .header("idempotency-key", "k")
        .body(body)
        .unwrap()
}

async fn read(response: Response<Body>) -> Result<Bytes, BoxError> {
    let collected = tokio::time::timeout(LONG, response.into_body().collect()).await;
    Ok(collected.expect("the body hangs")?.to_bytes())
}

async fn text(response: Response<Body>) -> String {
    String::from_utf8(read(response).await.unwrap().to_vec()).unwrap()
}

#[tokio::test]
async fn a_target_that_refuses_was_sent_nothing_and_is_used_again_at_once() {
    let upstream = Upstream::start().await;
    let pool = Pool::to(&[&upstream]);
    upstream.refuse().await;
    assert_eq!(pool.fails("/p").await, (Sent::No, SendErrorKind::Connect));
    upstream.accept_again().await;
    assert_eq!(pool.answer("/p").await, "{\"execution\":1}");
    pool.end().await;
}

#[tokio::test]
async fn a_target_that_takes_no_connection_in_time_was_sent_nothing() {
    let (listener, address) = full_listener();
    let mut config = config(&[format!("http://{address}")]);
    config.connect_timeout = SHORT;
    let pool = Pool::configured(&config);
    let told = pool.fails("/p").await;
    assert_eq!(told, (Sent::No, SendErrorKind::ConnectTimeout));
    drop(listener);
    pool.end().await;
}

/// A listener whose queue is full: it answers no further SYN.
fn full_listener() -> (Vec<socket2::Socket>, std::net::SocketAddr) {
    use socket2::{Domain, Socket, Type};
    let socket = || Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    let listener = socket();
    let any: std::net::SocketAddr = "127.0.0.1:0".parse().unwrap();
    listener.bind(&any.into()).unwrap();
    listener.listen(0).unwrap();
    let address = listener.local_addr().unwrap();
    let mut sockets = vec![listener];
    for _ in 0..4 {
        let filler = socket();
        filler.set_nonblocking(true).unwrap();
        let _ = filler.connect(&address);
        sockets.push(filler);
    }
    (sockets, address.as_socket().unwrap())
}

#[tokio::test]
async fn a_name_without_address_was_sent_nothing() {
    let pool = Pool::configured(&config(&["http://nowhere.invalid:1".to_owned()]));
    assert_eq!(pool.fails("/p").await, (Sent::No, SendErrorKind::Dns));
    pool.end().await;
}

#[tokio::test]
async fn an_unknown_pool_was_sent_nothing() {
    let upstream = Upstream::start().await;
    let pool = Pool::to(&[&upstream]);
    let other = PoolId::new("other").unwrap();
    let progress = SendProgress::new();
    let error = pool
        .upstreams
        .send(&other, post("/p"), &progress)
        .await
        .err()
        .unwrap();
    assert_eq!(
        (error.sent, error.kind),
        (Sent::No, SendErrorKind::NoTarget)
    );
    pool.end().await;
}

#[tokio::test]
async fn the_next_target_is_tried_when_one_refuses() {
    let (down, up) = (Upstream::start().await, Upstream::start().await);
    let pool = Pool::to(&[&down, &up]);
    down.refuse().await;
    for execution in 1..=6 {
        let answer = pool.answer("/p").await;
        assert_eq!(answer, format!("{{\"execution\":{execution}}}"));
    }
    assert_eq!(up.executions("k"), 6);
    pool.end().await;
}

#[tokio::test]
async fn targets_take_turns() {
    let (one, two) = (Upstream::start().await, Upstream::start().await);
    let pool = Pool::to(&[&one, &two]);
    for _ in 0..6 {
        pool.answer("/p").await;
    }
    assert_eq!((one.executions("k"), two.executions("k")), (3, 3));
    pool.end().await;
}

#[tokio::test]
async fn a_connection_that_ends_after_a_byte_leaves_the_outcome_unknown_and_nothing_is_tried_again()
{
    for cut in [Cut::Fin, Cut::Rst] {
        for reused in [false, true] {
            let (one, two) = (Upstream::start().await, Upstream::start().await);
            let pool = Pool::to(&[&one, &two]);
            if reused {
                pool.answer("/warm").await;
                pool.answer("/warm").await;
            }
            for upstream in [&one, &two] {
                // Once before the request was read, once after it ran, once amid the answer.
                upstream.break_next_request(1, cut);
                upstream
                    .on_post("/p")
                    .once()
                    .reply(Reply::new(201).cut_after(0, cut));
                upstream
                    .on_post("/p")
                    .once()
                    .reply(Reply::new(201).cut_after(20, cut));
            }
            for _ in 0..6 {
                let (sent, kind) = pool.fails("/p").await;
                assert_eq!(sent, Sent::Maybe, "{cut:?} {reused} {kind:?}");
                assert!(matches!(kind, SendErrorKind::Closed | SendErrorKind::Reset));
            }
            for upstream in [&one, &two] {
                let state = upstream.until(|state| state.broken == 1).await;
                assert_eq!(state.executions("k"), 2 + usize::from(reused));
            }
            pool.end().await;
        }
    }
}

#[tokio::test]
async fn an_idle_connection_that_the_upstream_closed_is_not_seen_by_anyone() {
    let upstream = Upstream::start().await;
    let pool = Pool::to(&[&upstream]);
    for round in 1..=10 {
        let cut = if round % 2 == 0 { Cut::Fin } else { Cut::Rst };
        pool.answer("/p").await;
        upstream.cut_idle(cut).await;
        let answer = pool.answer("/p").await;
        assert_eq!(answer, format!("{{\"execution\":{}}}", 2 * round));
    }
    pool.end().await;
}

#[tokio::test]
async fn an_answer_that_is_not_http_leaves_the_outcome_unknown() {
    let upstream = Upstream::start().await;
    let pool = Pool::to(&[&upstream]);
    let many = "X: y\r\n".repeat(200);
    let long = format!("X: {}\r\n", "y".repeat(100_000));
    for raw in [
        "garbage\r\n\r\n".to_owned(),
        "HTTP/9.9 200 OK\r\n\r\n".to_owned(),
        "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab".to_owned(),
        "HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n".to_owned(),
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n".to_owned(),
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: identity\r\n\r\n".to_owned(),
        "HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n".to_owned(),
        format!("HTTP/1.1 200 OK\r\n{many}Content-Length: 0\r\n\r\n"),
        format!("HTTP/1.1 200 OK\r\n{long}Content-Length: 0\r\n\r\n"),
        format!("HTTP/1.1 200 OK\r\n{long}"),
    ] {
        let start: String = raw.chars().take(60).collect();
        upstream.on_post("/p").once().reply(Reply::raw(raw));
        let told = pool.fails("/p").await;
        assert_eq!(told, (Sent::Maybe, SendErrorKind::BadResponse), "{start}");
    }
    assert_eq!(pool.answer("/p").await, "{\"execution\":11}");
    pool.end().await;
}

#[tokio::test]
async fn no_bytes_that_an_upstream_sends_stop_the_next_call() {
    let upstream = Upstream::start().await;
    let pool = Pool::to(&[&upstream]);
    let sound = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX: y\r\n\r\n2\r\nab\r\n0\r\n\r\n";
    for at in 0..sound.len() {
        for byte in [b'\0', b'\n', b' ', b'9', b':', 0xff] {
            let mut bytes = sound.as_bytes().to_vec();
            bytes[at] = byte;
            let reply = Reply::raw(bytes).cut_after(usize::MAX, Cut::Fin);
            upstream.on_post("/p").once().reply(reply);
            match pool.post("/p").await {
                // Whether the body then comes to its end is not the point.
                Ok(response) => drop(read(response).await),
                Err(error) => assert_eq!(error.sent, Sent::Maybe, "{at} {byte} {error:?}"),
            }
        }
    }
    pool.answer("/q").await;
    pool.end().await;
}

#[tokio::test]
async fn a_body_that_ends_early_ends_in_an_error() {
    let upstream = Upstream::start().await;
    let pool = Pool::to(&[&upstream]);
    let bad_chunk = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\nzz\r\n";
    for reply in [
        Reply::new(200).claim_length(9).body("short"),
        Reply::new(200).body("short").chunked_without_end(),
        Reply::new(200).body("short").cut_after(46, Cut::Rst),
        Reply::raw(bad_chunk),
    ] {
        upstream.on_post("/p").once().reply(reply);
        let response = pool.post("/p").await.unwrap();
        assert_eq!(response.status(), 200);
        assert!(response.extensions().get::<CloseDelimited>().is_none());
        read(response).await.unwrap_err();
    }
    assert_eq!(upstream.connections(), 4);
    pool.end().await;
}

#[tokio::test]
async fn a_body_that_ends_with_the_connection_is_told_to_be_such() {
    let upstream = Upstream::start().await;
    let pool = Pool::to(&[&upstream]);
    upstream
        .on_post("/p")
        .reply(Reply::new(200).until_close().body("to the end"));
    for _ in 0..2 {
        let response = pool.post("/p").await.unwrap();
        assert!(response.extensions().get::<CloseDelimited>().is_some());
        assert_eq!(text(response).await, "to the end");
    }
    assert_eq!(upstream.connections(), 2);
    let response = pool.post("/q").await.unwrap();
    assert!(response.extensions().get::<CloseDelimited>().is_none());
    text(response).await;
    pool.end().await;
}

#[tokio::test]
async fn a_doubtful_length_is_made_plain() {
    let upstream = Upstream::start().await;
    let pool = Pool::to(&[&upstream]);
    let twice = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nab";
    upstream.on_post("/p").once().reply(Reply::raw(twice));
    let response = pool.post("/p").await.unwrap();
    let lengths: Vec<_> = response.headers().get_all(CONTENT_LENGTH).iter().collect();
    assert_eq!(lengths, ["2"]);
    assert_eq!(text(response).await, "ab");

    let both = "HTTP/1.1 200 OK\r\nContent-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n\
        2\r\nab\r\n0\r\n\r\n";
    upstream.on_post("/p").once().reply(Reply::raw(both));
    let response = pool.post("/p").await.unwrap();
    assert!(!response.headers().contains_key(CONTENT_LENGTH));
    assert_eq!(text(response).await, "ab");
    pool.answer("/p").await;
    assert_eq!(
        upstream.connections(),
        2,
        "it went on after a doubtful answer"
    );
    pool.end().await;
}

#[tokio::test]
async fn interim_answers_are_swallowed() {
    let upstream = Upstream::start().await;
    let pool = Pool::to(&[&upstream]);
    let reply = Reply::new(201).interim(100).interim(103).header("x-a", "1");
    upstream.on_post("/p").reply(reply);
    let response = pool.post("/p").await.unwrap();
    assert_eq!(response.status(), 201);
    assert!(!response.headers().contains_key("x-interim"));
    assert_eq!(text(response).await, "{\"execution\":1}");
    pool.end().await;
}

#[tokio::test]
async fn errors_name_the_target_and_what_to_do_and_keep_their_source() {
    let upstream = Upstream::start().await;
    let pool = Pool::to(&[&upstream]);
    upstream.refuse().await;
    let error = pool.post("/p").await.err().unwrap();
    let told = error.to_string();
    assert!(
        told.contains(&upstream.url()) && told.contains("check that it runs"),
        "{told}"
    );
    assert!(std::error::Error::source(&error).is_some());
    pool.end().await;
}
