//! A soft shutdown finishes what runs; a hard one drops it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

use super::client::{Http2, to};
use super::server::{Server, answer, limits};

const ASK: &str = "GET / HTTP/1.1\r\nHost: a\r\n\r\n";

/// Holds every request at the gate, and counts those that were dropped there.
async fn held() -> (Server, CancellationToken, Arc<AtomicUsize>) {
    let gate = CancellationToken::new();
    let dropped = Arc::new(AtomicUsize::new(0));
    let (held, counted) = (gate.clone(), Arc::clone(&dropped));
    let server = Server::with(limits(), None, move |_, _| {
        let (gate, dropped) = (held.clone(), Dropped(Arc::clone(&counted)));
        async move {
            gate.cancelled().await;
            std::mem::forget(dropped);
            answer(200, "finished")
        }
    })
    .await;
    (server, gate, dropped)
}

struct Dropped(Arc<AtomicUsize>);

impl Drop for Dropped {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

async fn calls(server: &Server, count: usize) {
    while server.calls() < count {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_soft_shutdown_finishes_what_runs_and_takes_nothing_more() {
    let (mut server, gate, dropped) = held().await;
    let mut client = server.connect().await;
    client.send(ASK).await;
    let http2 = Http2::connect(server.addr).await;
    let asked = http2.ask(to("GET", "/"), b"");
    let mut asked = std::pin::pin!(asked);
    tokio::select! {
        () = calls(&server, 2) => {}
        early = &mut asked => panic!("it is held: {early:?}"),
    }
    let mut idle = server.connect().await;
    server.shutdown.soft.cancel();
    assert_eq!(
        idle.rest().await,
        b"",
        "a connection without request is closed"
    );
    gate.cancel();
    let answer = client.answer().await;
    assert_eq!(answer.text(), "finished");
    assert_eq!(answer.header("connection"), ["close"]);
    assert_eq!(client.rest().await, b"");
    assert_eq!(asked.await.body(), b"finished");
    server.ended().await;
    assert_eq!(dropped.load(Ordering::SeqCst), 0);
    assert!(TcpStream::connect(server.addr).await.is_err());
}

#[tokio::test]
async fn an_idle_connection_does_not_hold_a_soft_shutdown_up() {
    let (mut server, gate, _) = held().await;
    gate.cancel();
    let mut client = server.connect().await;
    client.send(ASK).await;
    assert_eq!(client.answer().await.text(), "finished");
    let mut http2 = Http2::connect(server.addr).await;
    assert_eq!(http2.ask(to("GET", "/"), b"").await.body(), b"finished");
    server.shutdown.soft.cancel();
    assert_eq!(client.rest().await, b"");
    http2.ended().await.unwrap();
    server.ended().await;
}

#[tokio::test]
async fn a_hard_shutdown_drops_what_runs() {
    let (mut server, _gate, dropped) = held().await;
    let mut client = server.connect().await;
    client.send(ASK).await;
    let http2 = Http2::connect(server.addr).await;
    let mut sender = http2.sender.clone().ready().await.unwrap();
    let (response, _) = sender.send_request(to("GET", "/"), true).unwrap();
    calls(&server, 2).await;
    server.shutdown.soft.cancel();
    server.shutdown.hard.cancel();
    server.ended().await;
    assert_eq!(dropped.load(Ordering::SeqCst), 2);
    assert_eq!(client.rest().await, b"");
    assert!(response.await.is_err());
}
