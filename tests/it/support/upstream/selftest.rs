//! The scripted upstream keeps its own promises. Each test looks at the bytes on the wire.

use std::io::ErrorKind;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::{Cut, Gate, GoAway, Reply, Upstream};

const POST: &[u8] = b"POST /p?q=1 HTTP/1.1\r\nHost: h\r\nX-A: 1\r\nIdempotency-Key: k\r\n\
    x-a: 2\r\nContent-Length: 3\r\n\r\nabc";

async fn connected(upstream: &Upstream) -> TcpStream {
    TcpStream::connect(upstream.address()).await.unwrap()
}

/// Reads until the bytes end like this.
async fn read_to(socket: &mut TcpStream, end: &str) -> String {
    let mut bytes = Vec::new();
    while !bytes.ends_with(end.as_bytes()) {
        let count = socket.read_buf(&mut bytes).await.unwrap();
        assert_ne!(count, 0, "{}", String::from_utf8_lossy(&bytes));
    }
    String::from_utf8(bytes).unwrap()
}

/// Sends a request and reads until the connection ends.
async fn whole(upstream: &Upstream, request: &[u8]) -> (String, std::io::Result<usize>) {
    let mut socket = connected(upstream).await;
    socket.write_all(request).await.unwrap();
    let mut bytes = Vec::new();
    let end = socket.read_to_end(&mut bytes).await;
    (String::from_utf8(bytes).unwrap(), end)
}

#[tokio::test]
async fn it_remembers_what_came_and_counts_what_it_executed() {
    let upstream = Upstream::start().await;
    let mut socket = connected(&upstream).await;
    for execution in 1..=2 {
        socket.write_all(POST).await.unwrap();
        let answer = read_to(&mut socket, "}").await;
        assert!(answer.ends_with(&format!("{{\"execution\":{execution}}}")));
    }
    let chunked = b"PUT /c HTTP/1.1\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n\
        2\r\nab\r\n1\r\nc\r\n0\r\nX-T: 1\r\n\r\n";
    socket.write_all(chunked).await.unwrap();
    let answer = read_to(&mut socket, "}").await;
    assert!(answer.starts_with("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 "));
    let seen = upstream.requests();
    assert_eq!(seen[0].header("X-a"), ["1", "2"]);
    assert_eq!((seen[0].path(), &*seen[0].target), ("/p", "/p?q=1"));
    assert_eq!(seen[2].body, b"abc");
    assert_eq!(seen[0].sha256, seen[2].sha256);
    assert!(seen[0].sha256.starts_with("ba7816bf"));
    assert_eq!((seen[2].connection, upstream.connections()), (1, 1));
    assert_eq!(
        (upstream.executions("k"), upstream.executions_at("/c")),
        (2, 1)
    );
}

#[tokio::test]
async fn it_answers_as_scripted() {
    let upstream = Upstream::start().await;
    upstream.on_post("/p").answer(202, "later");
    upstream.on_post("/p").once().reply(
        Reply::new(201)
            .header("X-B", b"\xff")
            .header("x-b", "2")
            .interim(103)
            .body("first")
            .trailer("X-T", "1"),
    );
    let mut socket = connected(&upstream).await;
    socket.write_all(POST).await.unwrap();
    let mut first = Vec::new();
    while !first.ends_with(b"0\r\nX-T: 1\r\n\r\n") {
        assert_ne!(socket.read_buf(&mut first).await.unwrap(), 0);
    }
    let expected = b"HTTP/1.1 103 Interim\r\nX-Interim: 1\r\n\r\nHTTP/1.1 201 Scripted\r\n\
        X-B: \xff\r\nx-b: 2\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n0\r\nX-T: 1\r\n\r\n";
    assert_eq!(first, expected);
    socket.write_all(POST).await.unwrap();
    read_to(&mut socket, "\r\n\r\nlater").await;

    upstream.on_post("/p").reply(Reply::new(204));
    socket.write_all(POST).await.unwrap();
    let answer = read_to(&mut socket, "\r\n\r\n").await;
    assert_eq!(answer, "HTTP/1.1 204 Scripted\r\n\r\n");
}

#[tokio::test]
async fn it_breaks_as_scripted() {
    let upstream = Upstream::start().await;
    let reply = |reply: Reply| upstream.on_post("/p").once().reply(reply);
    reply(Reply::new(200).claim_length(9).body("short"));
    let (bytes, end) = whole(&upstream, POST).await;
    assert!(bytes.ends_with("Content-Length: 9\r\n\r\nshort") && end.is_ok());

    reply(Reply::new(200).body("short").chunked_without_end());
    let (bytes, end) = whole(&upstream, POST).await;
    assert!(bytes.ends_with("\r\n\r\n5\r\nshort\r\n") && end.is_ok());

    reply(Reply::new(200).body("x").until_close());
    let (bytes, end) = whole(&upstream, POST).await;
    assert!(bytes.ends_with("\r\nConnection: close\r\n\r\nx") && end.is_ok());

    reply(Reply::raw("garbage").cut_after(4, Cut::Fin));
    let (bytes, end) = whole(&upstream, POST).await;
    assert!(bytes == "garb" && end.is_ok());

    reply(Reply::new(200).cut_after(0, Cut::Rst));
    let (bytes, end) = whole(&upstream, POST).await;
    assert_eq!(
        (&*bytes, end.unwrap_err().kind()),
        ("", ErrorKind::ConnectionReset)
    );
    assert_eq!(upstream.executions("k"), 5);

    upstream.break_next_request(0, Cut::Rst);
    let (_, end) = whole(&upstream, POST).await;
    assert_eq!(end.unwrap_err().kind(), ErrorKind::ConnectionReset);
    upstream.break_next_request(10, Cut::Fin);
    let (bytes, end) = whole(&upstream, POST).await;
    assert!(bytes.is_empty() && end.is_ok());
    upstream.break_next_accept(Cut::Rst);
    let mut socket = connected(&upstream).await;
    let end = socket.read(&mut [0]).await;
    assert_eq!(end.unwrap_err().kind(), ErrorKind::ConnectionReset);
    let state = upstream.until(|state| state.open == 0).await;
    assert_eq!((state.broken, state.requests.len()), (3, 5));
}

#[tokio::test]
async fn it_holds_answers_back_and_notices_who_leaves() {
    let upstream = Upstream::start().await;
    let gate = Gate::closed();
    upstream.on_post("/p").reply(Reply::new(200).hold(&gate));
    let mut stays = connected(&upstream).await;
    stays.write_all(POST).await.unwrap();
    let mut leaves = connected(&upstream).await;
    leaves.write_all(POST).await.unwrap();
    upstream.until(|state| state.executions("k") == 2).await;
    drop(leaves);
    upstream.until(|state| state.open == 1).await;
    gate.open();
    read_to(&mut stays, "}").await;
    upstream.cut_idle(Cut::Fin).await;
    assert_eq!(stays.read(&mut [0]).await.unwrap(), 0);
}

#[tokio::test]
async fn it_refuses_connections_and_takes_them_again() {
    let upstream = Upstream::start().await;
    upstream.refuse().await;
    let refused = TcpStream::connect(upstream.address()).await;
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::ConnectionRefused);
    upstream.accept_again().await;
    connected(&upstream).await;
}

#[tokio::test]
async fn it_streams_and_switches() {
    let upstream = Upstream::start().await;
    let (reply, stream) = Reply::events();
    upstream.on_get("/events").reply(reply);
    let mut socket = connected(&upstream).await;
    socket
        .write_all(b"GET /events HTTP/1.1\r\n\r\n")
        .await
        .unwrap();
    stream.send("data: 1\n\n").await;
    read_to(&mut socket, "\r\n\r\n9\r\ndata: 1\n\n\r\n").await;
    stream.end().await;
    read_to(&mut socket, "0\r\n\r\n").await;

    let (reply, stream) = Reply::events();
    let reply = reply.delay(std::time::Duration::from_millis(1));
    upstream.on_get("/broken").reply(reply);
    let mut broken = connected(&upstream).await;
    broken
        .write_all(b"GET /broken HTTP/1.1\r\n\r\n")
        .await
        .unwrap();
    stream.send("data: 1\n\n").await;
    read_to(&mut broken, "\r\n\r\n9\r\ndata: 1\n\n\r\n").await;
    stream.cut(Cut::Rst).await;
    let end = broken.read(&mut [0]).await;
    assert_eq!(end.unwrap_err().kind(), ErrorKind::ConnectionReset);

    upstream.on_get("/ws").reply(Reply::switch("websocket"));
    socket
        .write_all(b"GET /ws HTTP/1.1\r\n\r\nhello")
        .await
        .unwrap();
    let answer = read_to(&mut socket, "hello").await;
    assert!(answer.starts_with("HTTP/1.1 101 "));
    assert!(answer.contains("Upgrade: websocket\r\n"));
}

#[tokio::test]
async fn it_speaks_http2() {
    let upstream = Upstream::start_http2().await;
    let _ = rustls::crypto::ring::default_provider().install_default();
    let client = reqwest::Client::builder().http2_prior_knowledge();
    let client = client.build().unwrap();
    let url = format!("{}/p", upstream.url());
    upstream
        .on_post("/p")
        .once()
        .reply(Reply::reset_stream(h2::Reason::CANCEL));
    client.post(&url).send().await.unwrap_err();
    upstream.on_post("/p").once().reply(Reply::refuse_stream());
    // This client sends again what was refused.
    client.post(&url).send().await.unwrap();
    assert_eq!(upstream.executions_at("/p"), 2);
    upstream.goaway_next(GoAway::Covering);
    let client = reqwest::Client::builder().http2_prior_knowledge();
    client.build().unwrap().post(&url).send().await.unwrap_err();
    let state = upstream.until(|state| state.broken == 2).await;
    assert_eq!(state.executions_at("/p"), 2);
}
