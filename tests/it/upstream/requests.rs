//! What the upstream reads.

use futures_util::stream;
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};

use super::*;

fn streamed(pieces: Vec<Result<Frame<Bytes>, BoxError>>) -> OutBody {
    OutBody::Stream(StreamBody::new(stream::iter(pieces)).boxed_unsync())
}

fn data(bytes: &'static str) -> Frame<Bytes> {
    Frame::data(Bytes::from_static(bytes.as_bytes()))
}

fn request(method: Method, uri: &str, body: OutBody) -> Request<OutBody> {
    Request::builder()
        .method(method)
        .uri(uri)
        .body(body)
        .unwrap()
}

/// Sends a request and gives what the upstream saw: its start line, host, framing and body.
async fn seen(upstream: &Upstream, pool: &Pool, request: Request<OutBody>) -> [String; 4] {
    text(pool.send(request).await.unwrap()).await;
    let seen = upstream.requests().pop().unwrap();
    let framing = ["content-length", "transfer-encoding"].map(|name| seen.header(name).join(","));
    [
        format!("{} {}", seen.method, seen.target),
        seen.header("host").join(","),
        framing.join("/"),
        String::from_utf8(seen.body).unwrap(),
    ]
}

#[tokio::test]
async fn a_request_goes_out_in_origin_form_and_framed_anew() {
    let upstream = Upstream::start().await;
    let host = upstream.address().to_string();
    let pool = Pool::to(&[&upstream]);
    let full = |body: &'static str| OutBody::Full(Bytes::from_static(body.as_bytes()));
    for (method, uri, body, line, framing, arrives) in [
        (
            Method::POST,
            "/a?b=%20c",
            full("abc"),
            "POST /a?b=%20c",
            "3/",
            "abc",
        ),
        (
            Method::POST,
            "http://named.example/a",
            full(""),
            "POST /a",
            "0/",
            "",
        ),
        (Method::PATCH, "/", full(""), "PATCH /", "0/", ""),
        (Method::GET, "/", full(""), "GET /", "/", ""),
        (Method::DELETE, "/", full(""), "DELETE /", "/", ""),
        (Method::OPTIONS, "*", full(""), "OPTIONS *", "/", ""),
        (
            Method::GET,
            "/",
            streamed(vec![Ok(data("a")), Ok(data("b"))]),
            "GET /",
            "/chunked",
            "ab",
        ),
        (
            Method::POST,
            "/",
            streamed(vec![Ok(data("a"))]),
            "POST /",
            "/chunked",
            "a",
        ),
    ] {
        let mut request = request(method, uri, body);
        request
            .headers_mut()
            .insert(CONTENT_LENGTH, "77".parse().unwrap());
        request
            .headers_mut()
            .insert(HOST, "named.example".parse().unwrap());
        let told = seen(&upstream, &pool, request).await;
        assert_eq!(told, [line, &host, framing, arrives]);
    }
    pool.end().await;
}

#[tokio::test]
async fn headers_go_out_as_they_are_repeats_and_order_kept() {
    let upstream = Upstream::start().await;
    let pool = Pool::to(&[&upstream]);
    let request = Request::post("/p")
        .header("x-b", "2")
        .header("x-a", &b"caf\xe9"[..])
        .header("x-b", "1, 3")
        .body(OutBody::Full(Bytes::new()))
        .unwrap();
    text(pool.send(request).await.unwrap()).await;
    let seen = upstream.requests().pop().unwrap();
    let names: Vec<_> = seen.headers.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["host", "x-b", "x-b", "x-a", "content-length"]);
    assert_eq!(seen.header("x-b"), ["2", "1, 3"]);
    assert_eq!(seen.headers[3].1, b"caf\xe9");
    pool.end().await;
}

#[tokio::test]
async fn the_clients_host_is_kept_when_the_pool_says_so() {
    let upstream = Upstream::start().await;
    let address = upstream.address().to_string();
    let pool = Pool::with(&[&upstream], |config| config.preserve_host = true);
    let body = || OutBody::Full(Bytes::new());
    let mut named = request(Method::POST, "/", body());
    named
        .headers_mut()
        .insert(HOST, "named.example".parse().unwrap());
    assert_eq!(seen(&upstream, &pool, named).await[1], "named.example");
    let mut absolute = request(Method::POST, "http://absolute.example/", body());
    absolute
        .headers_mut()
        .insert(HOST, "other.example".parse().unwrap());
    assert_eq!(
        seen(&upstream, &pool, absolute).await[1],
        "absolute.example"
    );
    let unnamed = request(Method::POST, "/", body());
    assert_eq!(seen(&upstream, &pool, unnamed).await[1], address);
    pool.end().await;
}

#[tokio::test]
async fn a_request_whose_own_body_breaks_off_is_unknown_and_never_whole() {
    let (http1, http2) = (Upstream::start().await, Upstream::start_http2().await);
    for (upstream, prior_knowledge) in [(&http1, false), (&http2, true)] {
        let pool = Pool::with(&[upstream], |config| config.http2 = prior_knowledge);
        let body = streamed(vec![Ok(data("a")), Err("the client left".into())]);
        let error = pool
            .send(request(Method::POST, "/", body))
            .await
            .err()
            .unwrap();
        // Over HTTP/1.1 the head and the error may meet before anything is written.
        assert!(prior_knowledge || error.sent == Sent::No || error.sent == Sent::Maybe);
        assert_eq!(error.kind, SendErrorKind::RequestBody, "{error:?}");
        assert_eq!(upstream.executions_at("/"), 0);
        pool.end().await;
    }
}

#[tokio::test]
async fn an_upgrade_passes_both_ways() {
    let upstream = Upstream::start().await;
    let pool = Pool::with(&[&upstream], |config| config.connections_max = 1);
    upstream.on_get("/ws").reply(Reply::switch("websocket"));
    let upgrade = Request::get("/ws")
        .header("connection", "upgrade")
        .header("upgrade", "websocket")
        .body(OutBody::Full(Bytes::new()))
        .unwrap();
    let mut response = pool.send(upgrade).await.unwrap();
    assert_eq!(response.status(), 101);
    assert_eq!(response.headers()["upgrade"], "websocket");
    echoes(&mut response).await;
    // The one place is free again.
    pool.answer("/p").await;
    pool.end().await;
}

/// What is written to an upgraded connection comes back.
pub(super) async fn echoes(response: &mut Response<Body>) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let upgraded = hyper::upgrade::on(response).await.unwrap();
    let mut io = hyper_util::rt::TokioIo::new(upgraded);
    for message in [&b"hello"[..], b"again"] {
        io.write_all(message).await.unwrap();
        let mut echo = [0; 5];
        io.read_exact(&mut echo).await.unwrap();
        assert_eq!(echo, message);
    }
}
