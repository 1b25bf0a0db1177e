//! What is not guarded streams both ways.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;

use super::client::{DEADLINE, Http2, Raw, to};
use super::server::{Gateway, limits, pool};
use crate::support::upstream::{Cut, Reply, Upstream};

/// An upstream that a test plays by hand.
struct ByHand {
    socket: TcpListener,
    addr: SocketAddr,
}

impl ByHand {
    async fn start() -> Self {
        let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = socket.local_addr().unwrap();
        Self { socket, addr }
    }

    fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    async fn accept(&self) -> Raw {
        let accepted = tokio::time::timeout(DEADLINE, self.socket.accept()).await;
        Raw::over(accepted.expect("a connection").unwrap().0)
    }
}

#[tokio::test]
async fn every_method_passes_with_its_target_headers_and_body() {
    let upstream = Upstream::start().await;
    let gateway = Gateway::to(&upstream.url()).await;
    let mut client = gateway.connect().await;
    for method in [
        "GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PURGE",
    ] {
        let path = "/a%2Fb//c?q=%20&q=%20";
        upstream.on(method, "/a%2Fb//c").reply(
            Reply::new(207)
                .header("X-Repeat", "1")
                .header("X-Between", b"caf\xe9")
                .header("X-Repeat", "2, 3")
                .body("answer"),
        );
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: api.example\r\nX-Repeat: a\r\nX-Raw: \u{e9}\r\n\
             X-Repeat: b, c\r\nIdempotency-Key: key-1\r\nContent-Length: 4\r\n\r\nbody"
        );
        client.send(request).await;
        let answer = client.answer().await;
        assert_eq!(
            (answer.status, answer.text().as_str()),
            (207, "answer"),
            "{method}"
        );
        assert_eq!(answer.header("x-repeat"), ["1", "2, 3"]);
        let raw = answer.headers.iter().find(|(name, _)| name == "x-between");
        assert_eq!(raw.unwrap().1, b"caf\xe9");
        assert_eq!(answer.header("via"), ["1.1 oncegate"]);

        let seen = upstream.requests().pop().unwrap();
        assert_eq!((seen.method.as_str(), seen.target.as_str()), (method, path));
        assert_eq!(seen.body, b"body");
        assert_eq!(seen.header("x-repeat"), ["a", "b, c"]);
        assert_eq!(seen.header("idempotency-key"), ["key-1"]);
        assert_eq!(seen.header("host"), ["api.example"]);
        assert_eq!(seen.header("via"), ["1.1 oncegate-a1"]);
        assert_eq!(seen.header("x-forwarded-for"), ["127.0.0.1"]);
        assert_eq!(seen.header("x-forwarded-host"), ["api.example"]);
    }
}

#[tokio::test]
async fn headers_for_one_hop_and_forged_ones_go_no_further() {
    let upstream = Upstream::start().await;
    let reply = Reply::new(200)
        .header("Connection", "X-Hop")
        .header("X-Hop", "1")
        .header("Keep-Alive", "timeout=5")
        .header("Idempotency-Status", "replayed")
        .header("Proxy-Authenticate", "Basic")
        .header("X-End", "1");
    upstream.on_get("/").reply(reply);
    let gateway = Gateway::to(&upstream.url()).await;
    let mut client = gateway.connect().await;
    client
        .send(
            "GET / HTTP/1.1\r\nHost: a\r\nConnection: X-Hop, upgrade\r\nX-Hop: 1\r\nTE: trailers\r\n\
             Upgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\nIdempotent-Replayed: true\r\n\
             X-Forwarded-For: 10.0.0.1\r\nExpect: 100-continue\r\n\r\n",
        )
        .await;
    let answer = client.answer().await;
    for gone in [
        "x-hop",
        "keep-alive",
        "idempotency-status",
        "proxy-authenticate",
    ] {
        assert!(answer.header(gone).is_empty(), "{gone}");
    }
    assert_eq!(answer.header("x-end"), ["1"]);
    let seen = upstream.requests().pop().unwrap();
    for gone in [
        "x-hop",
        "te",
        "upgrade",
        "idempotent-replayed",
        "expect",
        "connection",
    ] {
        assert!(seen.header(gone).is_empty(), "{gone}");
    }
    assert_eq!(seen.header("x-forwarded-for"), ["127.0.0.1"]);
}

#[tokio::test]
async fn answers_without_a_body_have_none_and_keep_their_length() {
    let upstream = Upstream::start().await;
    upstream
        .on("HEAD", "/")
        .reply(Reply::new(200).claim_length(1234).body(""));
    upstream.on_get("/204").reply(Reply::new(204).body(""));
    upstream
        .on_get("/304")
        .reply(Reply::new(304).header("ETag", "\"x\"").body(""));
    let gateway = Gateway::to(&upstream.url()).await;
    let mut client = gateway.connect().await;
    for (method, path, status, length) in [
        ("HEAD", "/", 200, &["1234"][..]),
        ("GET", "/204", 204, &[]),
        ("GET", "/304", 304, &[]),
        ("GET", "/other", 200, &["15"]),
    ] {
        client
            .send(format!("{method} {path} HTTP/1.1\r\nHost: a\r\n\r\n"))
            .await;
        let answer = client.answer_to(method).await;
        assert_eq!(answer.status, status, "{path}");
        assert!(answer.header("transfer-encoding").is_empty(), "{path}");
        if status == 200 {
            assert_eq!(answer.header("content-length"), length, "{path}");
        }
    }
}

#[tokio::test]
async fn the_length_of_what_a_head_request_asks_about_is_never_made_up() {
    let upstream = Upstream::start().await;
    upstream
        .on("HEAD", "/known")
        .reply(Reply::new(200).claim_length(1234).body(""));
    upstream
        .on("HEAD", "/unknown")
        .reply(Reply::raw("HTTP/1.1 200 OK\r\nETag: \"x\"\r\n\r\n"));
    let gateway = Gateway::to(&upstream.url()).await;
    let http2 = Http2::connect(gateway.server.addr).await;
    for (path, length) in [("/known", &["1234"][..]), ("/unknown", &[])] {
        let mut client = gateway.connect().await;
        client
            .send(format!("HEAD {path} HTTP/1.1\r\nHost: a\r\n\r\n"))
            .await;
        let answer = client.answer_to("HEAD").await;
        assert_eq!(answer.header("content-length"), length, "{path}");

        let answer = http2.ask(to("HEAD", path), b"").await;
        let lengths = answer.headers().get_all("content-length").iter();
        assert_eq!(lengths.collect::<Vec<_>>(), length, "{path}");
    }
}

#[tokio::test]
async fn both_protocols_reach_both_kinds_of_upstream() {
    for http2 in [false, true] {
        let upstream = if http2 {
            Upstream::start_http2().await
        } else {
            Upstream::start().await
        };
        let mut pool = pool(&upstream.url());
        pool.http2 = http2;
        let reply = Reply::new(201).header("Set-Cookie", "a=1");
        let reply = reply.header("Set-Cookie", "b=2").body("answer");
        upstream.on_post("/").reply(reply);
        let gateway = Gateway::with(pool, limits(), DEADLINE).await;

        let client = Http2::connect(gateway.server.addr).await;
        let mut request = to("POST", "/");
        request
            .headers_mut()
            .append("cookie", "x=1".parse().unwrap());
        request
            .headers_mut()
            .append("cookie", "y=2".parse().unwrap());
        let answer = client.ask(request, b"hello").await;
        assert_eq!(
            (answer.status().as_u16(), &answer.body()[..]),
            (201, &b"answer"[..])
        );
        assert_eq!(answer.headers().get_all("set-cookie").iter().count(), 2);
        assert_eq!(
            answer.headers()["via"],
            if http2 { "2 oncegate" } else { "1.1 oncegate" }
        );
        let seen = upstream.requests().pop().unwrap();
        assert_eq!(seen.body, b"hello");
        let host = if http2 { ":authority" } else { "host" };
        assert_eq!(seen.header(host), ["a.example"]);
        assert_eq!(seen.header("cookie"), ["x=1; y=2"]);
        assert_eq!(seen.header("via"), ["2 oncegate-a1"]);

        let mut client = gateway.connect().await;
        client
            .send("POST / HTTP/1.1\r\nHost: b\r\nContent-Length: 5\r\n\r\nhello")
            .await;
        let answer = client.answer().await;
        assert_eq!((answer.status, answer.text().as_str()), (201, "answer"));
        assert_eq!(answer.header("set-cookie"), ["a=1", "b=2"]);
        assert_eq!(
            upstream.requests().pop().unwrap().header("via"),
            ["1.1 oncegate-a1"]
        );
    }
}

#[tokio::test]
async fn the_upstream_sees_an_upload_and_the_client_a_download_before_their_end() {
    let upstream = ByHand::start().await;
    let gateway = Gateway::to(&upstream.url()).await;
    let mut client = gateway.connect().await;
    client
        .send("PUT / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        .await;
    let mut service = upstream.accept().await;
    service.until(b"\r\n\r\n").await.unwrap();
    for _ in 0..3 {
        client.send("5\r\nhello\r\n").await;
        assert!(service.until(b"hello").await.is_some());
    }
    client.send("0\r\n\r\n").await;
    assert!(service.until(b"0\r\n\r\n").await.is_some());
    service
        .send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        .await;
    for _ in 0..3 {
        service.send("5\r\nworld\r\n").await;
        assert!(client.until(b"world").await.is_some());
    }
    service.send("0\r\n\r\n").await;
    assert!(client.until(b"0\r\n\r\n").await.is_some());
}

#[tokio::test]
async fn a_large_upload_waits_for_a_slow_upstream_instead_of_filling_memory() {
    const SIZE: usize = 200 << 20;
    const HELD_MAX: usize = 24 << 20;
    let upstream = ByHand::start().await;
    let gateway = Gateway::to(&upstream.url()).await;
    let client = gateway.connect().await;
    let (mut incoming, mut outgoing) = client.stream.into_split();
    let head = format!("PUT / HTTP/1.1\r\nHost: a\r\nContent-Length: {SIZE}\r\n\r\n");
    outgoing.write_all(head.as_bytes()).await.unwrap();
    let mut service = upstream.accept().await;
    service.until(b"\r\n\r\n").await.unwrap();

    let piece = vec![b'x'; 1 << 20];
    let mut sent = 0;
    // What gets stuck in buffers on the way: the sockets', and little of the gateway's.
    while sent < SIZE {
        let write = outgoing.write(&piece[..piece.len().min(SIZE - sent)]);
        match tokio::time::timeout(Duration::from_millis(500), write).await {
            Ok(written) => sent += written.unwrap(),
            Err(_) => break,
        }
    }
    assert!(
        sent < HELD_MAX,
        "{sent} bytes were taken from a client whose upstream reads nothing"
    );

    let sending = async {
        while sent < SIZE {
            sent += outgoing
                .write(&piece[..piece.len().min(SIZE - sent)])
                .await
                .unwrap();
        }
    };
    let receiving = async {
        let mut received = 0;
        while received < SIZE {
            received += service
                .exactly((SIZE - received).min(64 << 10))
                .await
                .unwrap()
                .len();
        }
        service
            .send("HTTP/1.1 201 Created\r\nContent-Length: 0\r\n\r\n")
            .await;
    };
    tokio::join!(sending, receiving);
    let mut answer = [0; 12];
    tokio::io::AsyncReadExt::read_exact(&mut incoming, &mut answer)
        .await
        .unwrap();
    assert_eq!(&answer, b"HTTP/1.1 201");
}

#[tokio::test]
async fn an_upload_that_moves_outlives_the_timeout_and_silence_does_not() {
    let timeout = Duration::from_secs(2);
    let upstream = ByHand::start().await;
    let gateway = Gateway::with(pool(&upstream.url()), limits(), timeout).await;
    let mut client = gateway.connect().await;
    client
        .send("PUT / HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n")
        .await;
    let mut service = upstream.accept().await;
    service.until(b"\r\n\r\n").await.unwrap();
    for _ in 0..10 {
        tokio::time::sleep(timeout / 8).await;
        client.send("x").await;
    }
    assert_eq!(service.exactly(10).await.unwrap(), b"xxxxxxxxxx");
    let answer = client.answer().await;
    assert_eq!(
        (answer.status, answer.problem().as_str()),
        (504, "outcome-unknown")
    );
    assert!(service.rest().await.is_empty(), "the call was given up");
}

#[tokio::test]
async fn a_call_that_fails_is_told_as_what_it_was() {
    let upstream = Upstream::start().await;
    let gateway = Gateway::to(&upstream.url()).await;
    let mut client = gateway.connect().await;
    upstream
        .on_get("/cut")
        .reply(Reply::new(200).cut_after(0, Cut::Fin));
    upstream
        .on_get("/reset")
        .reply(Reply::new(200).cut_after(0, Cut::Rst));
    upstream
        .on_get("/noise")
        .reply(Reply::raw("no HTTP at all\r\n\r\n"));
    for path in ["/cut", "/reset", "/noise"] {
        client
            .send(format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n"))
            .await;
        let answer = client.answer().await;
        assert_eq!(
            (answer.status, answer.problem().as_str()),
            (502, "upstream-broken"),
            "{path}"
        );
        assert!(answer.header("retry-after").is_empty(), "{path}");
    }
    upstream.refuse().await;
    client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
    let answer = client.answer().await;
    assert_eq!(
        (answer.status, answer.problem().as_str()),
        (502, "upstream-unreachable")
    );
    assert_eq!(answer.header("retry-after"), ["1"]);
}

#[tokio::test]
async fn an_answer_that_breaks_off_never_looks_whole() {
    let upstream = Upstream::start().await;
    upstream
        .on_get("/length")
        .reply(Reply::new(200).body("half").claim_length(8));
    upstream
        .on_get("/chunked")
        .reply(Reply::new(200).body("half").chunked_without_end());
    let gateway = Gateway::to(&upstream.url()).await;
    for path in ["/length", "/chunked"] {
        let mut client = gateway.connect().await;
        client
            .send(format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n"))
            .await;
        assert!(!client.answer().await.whole, "{path}");

        let http2 = Http2::connect(gateway.server.addr).await;
        let mut sender = http2.sender.clone().ready().await.unwrap();
        let (response, _) = sender.send_request(to("GET", path), true).unwrap();
        // The break may come before hyper has sent the headers.
        if let Ok(response) = response.await {
            let mut body = response.into_body();
            let mut data = body.data().await;
            while let Some(Ok(_)) = data {
                data = body.data().await;
            }
            assert!(data.is_some(), "{path}: the end of the body is an error");
        }
    }
}

#[tokio::test]
async fn a_request_body_that_breaks_off_breaks_off_upstream_too() {
    let upstream = ByHand::start().await;
    let gateway = Gateway::to(&upstream.url()).await;
    for (framing, part) in [
        ("Content-Length: 9", "hello"),
        ("Transfer-Encoding: chunked", "5\r\nhello\r\n"),
    ] {
        let mut client = gateway.connect().await;
        client
            .send(format!(
                "PUT / HTTP/1.1\r\nHost: a\r\n{framing}\r\n\r\n{part}"
            ))
            .await;
        let mut service = upstream.accept().await;
        assert!(service.until(b"hello").await.is_some());
        client.stream.shutdown().await.unwrap();
        let rest = service.rest().await;
        assert!(
            !String::from_utf8_lossy(&rest).contains("0\r\n\r\n"),
            "{framing}: {rest:?}"
        );
    }
}

#[tokio::test]
async fn when_the_client_is_gone_its_call_is_given_up() {
    let upstream = ByHand::start().await;
    let gateway = Gateway::to(&upstream.url()).await;

    // Over HTTP/2 a client takes its request back while it waits.
    let client = Http2::connect(gateway.server.addr).await;
    let mut sender = client.sender.clone().ready().await.unwrap();
    let (response, mut stream) = sender.send_request(to("GET", "/"), true).unwrap();
    let mut service = upstream.accept().await;
    service.until(b"\r\n\r\n").await.unwrap();
    stream.send_reset(h2::Reason::CANCEL);
    assert!(service.rest().await.is_empty());
    drop(response);

    // Over HTTP/1 it is seen to be gone when its answer can't be delivered.
    let mut client = gateway.connect().await;
    client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
    let mut service = upstream.accept().await;
    service.until(b"\r\n\r\n").await.unwrap();
    service
        .send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
        .await;
    assert!(client.until(b"hello").await.is_some());
    drop(client);
    let endless = async {
        while service.stream.write_all(b"5\r\nhello\r\n").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(DEADLINE, endless)
        .await
        .expect("the connection is closed");
}

#[tokio::test]
async fn routes_that_lead_back_to_the_gateway_are_found_out() {
    let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let own = socket.local_addr().unwrap();
    let gateway = Gateway::to(&format!("http://{own}")).await;
    // A hop that only passes bytes on, from the pool's target back to the gateway.
    let mut hop = tokio::task::JoinSet::new();
    let back = gateway.server.addr;
    hop.spawn(async move {
        let (mut one, _) = socket.accept().await.unwrap();
        let mut two = tokio::net::TcpStream::connect(back).await.unwrap();
        let _ = tokio::io::copy_bidirectional(&mut one, &mut two).await;
    });
    let mut client = gateway.connect().await;
    client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
    let answer = client.answer().await;
    assert_eq!(
        (answer.status, answer.problem().as_str()),
        (400, "request-invalid")
    );
    assert_eq!(gateway.server.calls(), 2);
}
