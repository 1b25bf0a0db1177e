//! Every limit that a client can run into.

use std::process::Stdio;
use std::time::Duration;

use tokio::time::Instant;

use super::client::{Http2, Raw, to};
use super::server::{Server, answer, limits};

const ASK: &str = "GET / HTTP/1.1\r\nHost: a\r\n\r\n";

/// Short, since tests wait for it to pass.
const HEADER_TIMEOUT: Duration = Duration::from_secs(1);

async fn server(change: impl FnOnce(&mut oncegate::config::Limits)) -> Server {
    let mut limits = limits();
    change(&mut limits);
    Server::with(limits, None, |_, _| async { answer(200, "served") }).await
}

#[tokio::test]
async fn a_head_that_is_too_large_is_refused() {
    let server = server(|limits| limits.header_bytes_max = 16 << 10).await;
    let head = |bytes| {
        format!(
            "GET / HTTP/1.1\r\nHost: a\r\nX: {}\r\n\r\n",
            "x".repeat(bytes)
        )
    };
    let mut client = server.connect().await;
    client.send(head(15 << 10)).await;
    assert_eq!(client.answer().await.status, 200);
    client.send(head(64 << 10)).await;
    assert_eq!(client.answer().await.status, 431);
    assert_eq!(client.rest().await, b"");

    let mut client = server.connect().await;
    client
        .send(format!("GET / HTTP/1.1\r\n{}\r\n", "X: y\r\n".repeat(101)))
        .await;
    assert_eq!(client.answer().await.status, 431);

    let client = Http2::connect(server.addr).await;
    let mut request = to("GET", "/");
    let value = http::HeaderValue::from_str(&"x".repeat(20 << 10)).unwrap();
    request.headers_mut().insert("x", value);
    assert_eq!(client.ask(request, b"").await.status(), 431);
    assert_eq!(server.calls(), 1);
}

/// As an owner does whose client reset the stream: the answer is gone, the work goes on.
#[tokio::test]
async fn requests_that_were_given_up_and_are_still_worked_for_are_bounded() {
    let work = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let handler = {
        let work = std::sync::Arc::clone(&work);
        move |_, peer| {
            work.lock().unwrap().push(peer);
            async { answer(200, "served") }
        }
    };
    let server = Server::with(limits(), None, handler).await;
    let client = Http2::connect(server.addr).await;
    let mut refused = None;
    for _ in 0..1000 {
        let response = client.ask(to("POST", "/"), b"").await;
        if response.status() != 200 {
            refused = Some(response);
            break;
        }
    }
    let refused = refused.expect("some request is one too many");
    assert_eq!(refused.status(), 503);
    assert_eq!(refused.headers()["retry-after"], "1");
    assert!(
        server.calls() >= 128,
        "an honest client has as many at once"
    );
    work.lock().unwrap().clear();
    assert_eq!(client.ask(to("POST", "/"), b"").await.status(), 200);
}

#[tokio::test]
async fn a_head_that_does_not_come_to_its_end_in_time_ends_the_connection() {
    let server = server(|limits| limits.header_timeout = HEADER_TIMEOUT).await;
    for begun in [
        "GET / HT",
        "GET / HTTP/1.1\r\nHost: a\r\n",
        "PRI * HTTP/2.0\r\n",
    ] {
        let started = Instant::now();
        let mut client = server.connect().await;
        client.send(begun).await;
        assert_eq!(client.rest().await, b"", "{begun:?}");
        assert!(started.elapsed() >= HEADER_TIMEOUT, "{begun:?}");
    }
    // Every byte is progress, but the head as a whole is late.
    let mut client = server.connect().await;
    let started = Instant::now();
    for byte in b"GET / HTTP/1.1\r\nHost: a\r\nX: 0123456789".iter().cycle() {
        let sent = tokio::io::AsyncWriteExt::write_all(&mut client.stream, &[*byte]).await;
        if sent.is_err() {
            break;
        }
        tokio::time::sleep(HEADER_TIMEOUT / 50).await;
        assert!(started.elapsed() < super::client::DEADLINE, "it is cut off");
    }
    assert_eq!(server.calls(), 0);
}

#[tokio::test]
async fn a_connection_without_any_request_is_closed() {
    let server = server(|limits| limits.header_timeout = HEADER_TIMEOUT).await;
    let mut silent = server.connect().await;
    assert_eq!(silent.rest().await, b"");
    let mut http2 = Http2::connect(server.addr).await;
    let _ = http2.ended().await;
}

#[tokio::test]
async fn a_connection_may_rest_between_requests_for_longer_than_a_head_may_take() {
    let server = server(|limits| limits.header_timeout = HEADER_TIMEOUT).await;
    let mut client = server.connect().await;
    let http2 = Http2::connect(server.addr).await;
    for rest in [HEADER_TIMEOUT * 2, Duration::ZERO] {
        client.send(ASK).await;
        assert_eq!(client.answer().await.text(), "served");
        assert_eq!(http2.ask(to("GET", "/"), b"").await.status(), 200);
        tokio::time::sleep(rest).await;
    }
}

#[tokio::test]
async fn a_slow_handler_or_body_is_no_slow_head() {
    let mut limits = limits();
    limits.header_timeout = HEADER_TIMEOUT;
    let server = Server::with(limits, None, |request, _| async move {
        let body = http_body_util::BodyExt::collect(request.into_body())
            .await
            .unwrap();
        tokio::time::sleep(HEADER_TIMEOUT * 2).await;
        answer(200, body.to_bytes())
    })
    .await;
    let mut client = server.connect().await;
    client
        .send("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\no")
        .await;
    tokio::time::sleep(HEADER_TIMEOUT * 2).await;
    client.send("k").await;
    assert_eq!(client.answer().await.text(), "ok");
}

#[tokio::test]
async fn beyond_the_limit_connections_wait_for_a_slot_and_none_is_reset() {
    let server = server(|limits| limits.connections_max = 2).await;
    let mut open = [server.connect().await, server.connect().await];
    for client in &mut open {
        client.send(ASK).await;
        assert_eq!(client.answer().await.text(), "served");
    }
    let mut waiting = server.connect().await;
    waiting.send(ASK).await;
    let early = tokio::time::timeout(Duration::from_millis(200), waiting.answer()).await;
    assert!(early.is_err(), "there was no slot: {early:?}");
    assert_eq!(server.calls(), 2);
    drop(open);
    assert_eq!(waiting.answer().await.text(), "served");
}

#[tokio::test]
async fn an_http2_connection_has_so_many_requests_open_and_no_more() {
    let server = Server::with(limits(), None, |_, _| std::future::pending()).await;
    let client = Http2::connect(server.addr).await;
    let mut held = Vec::new();
    for _ in 0..128 {
        let mut sender = client.sender.clone().ready().await.unwrap();
        held.push(sender.send_request(to("GET", "/"), true).unwrap());
    }
    while server.calls() < 128 {
        tokio::task::yield_now().await;
    }
    assert_eq!(client.sender.current_max_send_streams(), 128);
}

/// Serves until its standard input ends.
#[tokio::test]
#[ignore = "run by the test below, in a process with few file descriptors"]
async fn a_server_of_its_own_process() {
    let server = server(|_| {}).await;
    println!("listening on {} ", server.addr);
    let input = || std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
    let _ = tokio::task::spawn_blocking(input).await;
}

#[tokio::test]
async fn running_out_of_file_descriptors_is_survived() {
    let this = std::env::current_exe().unwrap();
    let name = "listener::limits::a_server_of_its_own_process";
    let limited = "ulimit -n 40 && exec \"$0\" --ignored --exact --nocapture \"$1\"";
    let mut child = tokio::process::Command::new("sh")
        .args(["-c", limited])
        .args([this.as_os_str(), name.as_ref()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut output = Raw::over(tokio::io::join(
        child.stdout.take().unwrap(),
        tokio::io::sink(),
    ));
    output.until(b"listening on ").await.unwrap();
    let addr = String::from_utf8(output.until(b" ").await.unwrap()).unwrap();
    let addr = addr.trim().parse().unwrap();

    let mut clients = Vec::new();
    for _ in 0..60 {
        let mut client = Raw::connect(addr).await;
        client.send(ASK).await;
        clients.push(client);
    }
    assert_eq!(clients[0].answer().await.text(), "served");
    let last = clients.last_mut().unwrap();
    let early = tokio::time::timeout(Duration::from_millis(500), last.answer()).await;
    assert!(early.is_err(), "it was not accepted: {early:?}");
    // Those that were accepted are served on, and make room for the others.
    clients[0].send(ASK).await;
    assert_eq!(clients[0].answer().await.text(), "served");
    let mut last = clients.pop().unwrap();
    drop(clients);
    assert_eq!(last.answer().await.text(), "served");
}
