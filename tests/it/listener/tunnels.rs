//! Upgraded connections are joined end to end.

use std::time::Duration;

use tokio::io::AsyncWriteExt;

use super::client::Raw;
use super::server::{Gateway, limits, pool};
use crate::support::upstream::{Reply, Upstream};

const ASK: &str = "GET /chat HTTP/1.1\r\nHost: a\r\nConnection: keep-alive, Upgrade\r\n\
    Upgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nIdempotency-Key: k\r\n\r\n";

async fn upgraded(gateway: &Gateway) -> Raw {
    let mut client = gateway.connect().await;
    client.send(ASK).await;
    let answer = client.answer().await;
    assert_eq!(answer.status, 101);
    assert_eq!(answer.header("connection"), ["upgrade"]);
    assert_eq!(answer.header("upgrade"), ["websocket"]);
    client
}

async fn chat() -> Upstream {
    let upstream = Upstream::start().await;
    let reply = Reply::switch("websocket").header("Sec-WebSocket-Accept", "x");
    upstream.on_get("/chat").reply(reply.clone());
    upstream.on_post("/chat").reply(reply);
    upstream
}

#[tokio::test]
async fn bytes_pass_both_ways_as_they_are() {
    let upstream = chat().await;
    let gateway = Gateway::to(&upstream.url()).await;
    let mut client = upgraded(&gateway).await;
    let seen = upstream.requests().pop().unwrap();
    assert_eq!(seen.header("upgrade"), ["websocket"]);
    assert_eq!(
        seen.header("sec-websocket-key"),
        ["dGhlIHNhbXBsZSBub25jZQ=="]
    );
    assert_eq!(seen.header("idempotency-key"), ["k"]);
    // Bytes that would be refused as a request.
    let noise = b"\n\nPOST / HTTP/1.1\nContent-Length: 1\r\nTransfer-Encoding: x\r\n\r\n\x00\xff";
    client.send(noise).await;
    assert_eq!(client.exactly(noise.len()).await.unwrap(), noise);
    for round in 0..50u8 {
        let message = vec![round; 1000 * usize::from(round) + 1];
        client.send(&message).await;
        assert_eq!(client.exactly(message.len()).await.unwrap(), message);
    }
    assert_eq!(gateway.tunnels.len(), 1);
    client.stream.shutdown().await.unwrap();
    assert!(client.rest().await.is_empty());
    gateway.tunnels.close();
    gateway.tunnels.wait().await;
}

#[tokio::test]
async fn a_guarded_method_that_asks_for_an_upgrade_is_passed_through() {
    let upstream = chat().await;
    let gateway = Gateway::to(&upstream.url()).await;
    let mut client = gateway.connect().await;
    client.send(ASK.replace("GET", "POST")).await;
    assert_eq!(client.answer().await.status, 101);
    client.send("hello").await;
    assert_eq!(client.exactly(5).await.unwrap(), b"hello");
}

#[tokio::test]
async fn an_upstream_that_declines_answers_as_usual() {
    let upstream = Upstream::start().await;
    upstream.on_get("/chat").answer(426, "no");
    let gateway = Gateway::to(&upstream.url()).await;
    let mut client = gateway.connect().await;
    for _ in 0..2 {
        client.send(ASK).await;
        let answer = client.answer().await;
        assert_eq!((answer.status, answer.text().as_str()), (426, "no"));
    }
    // The connection is an ordinary one still, and looked at.
    client.send("GET / HTTP/1.1\nHost: a\r\n\r\n").await;
    assert_eq!(client.answer().await.status, 400);
}

#[tokio::test]
async fn a_tunnel_keeps_its_connection_slot() {
    let upstream = chat().await;
    let mut limits = limits();
    limits.connections_max = 1;
    let gateway = Gateway::with(pool(&upstream.url()), limits, Duration::from_secs(10)).await;
    let mut client = upgraded(&gateway).await;
    client.send("x").await;
    assert!(client.exactly(1).await.is_some());
    let mut other = gateway.connect().await;
    other.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
    let early = tokio::time::timeout(Duration::from_millis(200), other.answer()).await;
    assert!(early.is_err(), "there was no slot: {early:?}");
    drop(client);
    assert_eq!(other.answer().await.status, 200);
}

#[tokio::test]
async fn a_hard_shutdown_cuts_tunnels_and_a_soft_one_does_not() {
    let upstream = chat().await;
    let mut gateway = Gateway::to(&upstream.url()).await;
    let mut client = upgraded(&gateway).await;
    gateway.server.shutdown.soft.cancel();
    gateway.server.ended().await;
    client.send("still").await;
    assert_eq!(client.exactly(5).await.unwrap(), b"still");
    gateway.server.shutdown.hard.cancel();
    assert!(client.rest().await.is_empty());
    gateway.tunnels.close();
    gateway.tunnels.wait().await;
}
