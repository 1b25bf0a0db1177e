//! HTTP itself: what could be read in two ways, breaks off, or asks for a tunnel.

use crate::support::client::Connection;
use crate::support::upstream::Reply;

/// RFC 9112 section 6.3: what could be read in two ways is not read at all.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ambiguous_framing_is_refused_and_the_connection_closed() {
    let bench = super::on_sqlite().await;
    let gateway = bench.gateway().start().await;
    let framings = [
        "Content-Length: 5\r\nContent-Length: 6",
        "Content-Length: 5, 6",
        "Content-Length: +5",
        "Content-Length: 0x5",
        "Transfer-Encoding: chunked\r\nContent-Length: 5",
        "Content-Length: 5\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: gzip",
        "Transfer-Encoding: chunked, gzip",
        "Transfer-Encoding: chunked, identity",
    ];
    for framing in framings {
        let mut connection = Connection::to(gateway.listen()).await.expect("it listens");
        let request = format!(
            "POST /pay HTTP/1.1\r\nHost: a\r\nIdempotency-Key: k\r\n{framing}\r\n\r\n\
             5\r\nhello\r\n0\r\n\r\n"
        );
        connection
            .write(request.as_bytes())
            .await
            .expect("it reads");
        let answer = connection.answer().await.expect("an answer");
        assert_eq!(answer.status, 400, "{framing}");
        assert!(connection.is_closed().await, "{framing}");
    }
    assert_eq!(bench.upstream.requests().len(), 0);
    assert_eq!(bench.database.records().await, []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_that_breaks_off_reaches_nobody() {
    let bench = super::on_sqlite().await;
    let gateway = bench.gateway().start().await;
    let call = gateway.post("/pay").key("k").json([b'x'; 100]);
    let whole = call.to_bytes();
    let unended = call.chunked().to_bytes();
    for request in [&whole[..whole.len() - 50], &unended[..unended.len() - 5]] {
        let mut connection = Connection::to(gateway.listen()).await.expect("it listens");
        connection.write(request).await.expect("it reads");
        connection.finish_writing().await;
        let answer = connection.rest().await.unwrap_or_default();
        let refused = answer.is_empty() || answer.starts_with(b"HTTP/1.1 4");
        assert!(refused, "{answer:?}");
    }
    assert_eq!(bench.upstream.requests().len(), 0);
    assert_eq!(bench.database.records().await, []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upgrade_passes_through_unguarded() {
    let bench = super::on_sqlite().await;
    bench.upstream.on_get("/ws").reply(Reply::switch("echo"));
    bench.upstream.on_post("/ws").reply(Reply::switch("echo"));
    let gateway = bench.gateway().start().await;
    for method in ["GET", "POST"] {
        let call = gateway
            .call(method, "/ws")
            .key("k")
            .header("Connection", "Upgrade")
            .header("Upgrade", "echo");
        let mut connection = call.start().await;
        let answer = connection.answer_head().await.expect("an answer");
        answer.assert_is(101, "");
        connection.write(b"hello").await.expect("a tunnel");
        assert_eq!(connection.exactly(5).await.expect("a tunnel"), "hello");
    }
    assert_eq!(bench.database.records().await, []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connect_makes_no_tunnel_and_no_record() {
    let bench = super::on_sqlite().await;
    let gateway = bench.gateway().start().await;
    let mut connection = Connection::to(gateway.listen()).await.expect("it listens");
    let request = b"CONNECT inside.test:443 HTTP/1.1\r\nHost: inside.test:443\r\n\
        Idempotency-Key: k\r\n\r\n";
    connection.write(request).await.expect("it reads");
    let answer = connection.answer_head().await.expect("an answer");
    assert!(answer.status >= 400, "{answer:?}");
    assert_eq!(bench.database.records().await, []);
}

/// RFC 9110 section 7.6.1: what `Connection` names is for this hop. A key that is named so would
/// be lost on the way.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_that_connection_names_is_refused() {
    let bench = super::on_sqlite().await;
    let gateway = bench.gateway().start().await;
    let call = gateway.post("/pay").key("k");
    let hop = call.clone().header("Connection", "close, Idempotency-Key");
    hop.send().await.assert_is(400, "refused");
    assert_eq!(bench.upstream.requests().len(), 0);
    assert_eq!(bench.database.records().await, []);

    let hop = call.header("Connection", "X-Foo").header("X-Foo", "1");
    hop.header("X-Bar", "2")
        .send()
        .await
        .assert_is(200, "executed");
    let seen = &bench.upstream.requests()[0];
    assert!(seen.header("x-foo").is_empty());
    assert_eq!(seen.header("x-bar"), ["2"]);
    assert_eq!(seen.header("idempotency-key"), ["k"]);
}

/// A client that ends its writing side after its request still waits for the answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_half_closed_client_gets_its_answer() {
    let bench = super::on_sqlite().await;
    let gateway = bench.gateway().start().await;
    let mut connection = gateway.post("/pay").key("k").start().await;
    connection.finish_writing().await;
    let answer = connection.answer().await.expect("an answer");
    answer.assert_is(200, "executed");
}
