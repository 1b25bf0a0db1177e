//! A proxy before PostgreSQL that reads just enough of its protocol to tell statements apart, and
//! stops a chosen one: before the server has it, or once it is done and nobody was told.
//!
//! What is stopped stays so, as does its connection; everything else passes. A test then kills the
//! process that asked, which so dies between two lines of its own.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

/// The code in place of a version by which a client asks for TLS.
const SSL_REQUEST: u32 = 80_877_103;

/// Where a statement is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The server never gets it.
    Before,
    /// The server has done it, and its reply goes nowhere.
    After,
}

/// A running proxy; it ends when dropped.
pub struct Wiretap {
    address: SocketAddr,
    tap: Tap,
    _stop: DropGuard,
}

#[derive(Clone)]
struct Tap {
    target: String,
    /// What was asked, each text once, in the order of its first use.
    asked: Arc<Mutex<Vec<String>>>,
    /// What to stop; taken by the first connection that asks it.
    wanted: Arc<Mutex<Option<(String, Side)>>>,
    stopped: watch::Sender<bool>,
    stop: CancellationToken,
    tracker: TaskTracker,
}

impl Wiretap {
    /// Forwards to `HOST:PORT` from a loopback port of its own.
    pub async fn start(target: impl Into<String>) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let tap = Tap {
            target: target.into(),
            asked: Arc::default(),
            wanted: Arc::default(),
            stopped: watch::Sender::new(false),
            stop: CancellationToken::new(),
            tracker: TaskTracker::new(),
        };
        let address = listener.local_addr().unwrap();
        tap.tracker.spawn(tap.clone().accept(listener));
        Self {
            address,
            _stop: tap.stop.clone().drop_guard(),
            tap,
        }
    }

    /// Where to connect.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Forgets what was asked so far.
    pub fn forget(&self) {
        self.tap.asked.lock().unwrap().clear();
    }

    /// What was asked, each text once, in the order of its first use.
    pub fn asked(&self) -> Vec<String> {
        self.tap.asked.lock().unwrap().clone()
    }

    /// Stops the next statement with this text.
    pub fn stop_next(&self, statement: &str, side: Side) {
        *self.tap.wanted.lock().unwrap() = Some((statement.to_owned(), side));
    }

    /// Waits until it was stopped.
    pub async fn stopped(&self) {
        let mut stopped = self.tap.stopped.subscribe();
        stopped.wait_for(|stopped| *stopped).await.unwrap();
    }
}

impl Tap {
    async fn accept(self, listener: TcpListener) {
        loop {
            tokio::select! {
                () = self.stop.cancelled() => return,
                accepted = listener.accept() => {
                    let (client, _) = accepted.unwrap();
                    self.tracker.spawn(self.clone().serve(client));
                }
            }
        }
    }

    async fn serve(self, mut client: TcpStream) {
        let Ok(mut server) = TcpStream::connect(&self.target).await else {
            return;
        };
        client.set_nodelay(true).unwrap();
        server.set_nodelay(true).unwrap();
        let (mut from_client, mut to_client) = client.split();
        let (mut from_server, mut to_server) = server.split();
        let withhold = watch::Sender::new(false);
        tokio::select! {
            () = self.stop.cancelled() => {}
            _ = self.ask(&mut from_client, &mut to_server, &withhold) => {}
            _ = self.reply(&mut from_server, &mut to_client, &withhold) => {}
        }
    }

    /// Forwards messages of the client, one by one.
    async fn ask(
        &self,
        from: &mut ReadHalf<'_>,
        to: &mut WriteHalf<'_>,
        withhold: &watch::Sender<bool>,
    ) -> std::io::Result<()> {
        let mut prepared = HashMap::new();
        loop {
            let length = from.read_u32().await?;
            let body = body(from, length).await?;
            to.write_all(&[&length.to_be_bytes()[..], &body].concat())
                .await?;
            if !body.starts_with(&SSL_REQUEST.to_be_bytes()) {
                break;
            }
        }
        loop {
            let kind = from.read_u8().await?;
            let length = from.read_u32().await?;
            let body = body(from, length).await?;
            match self.side(kind, &body, &mut prepared) {
                Some(Side::Before) => {
                    self.stopped.send_replace(true);
                    return std::future::pending().await;
                }
                Some(Side::After) => {
                    withhold.send_replace(true);
                }
                None => {}
            }
            let message = [&[kind][..], &length.to_be_bytes(), &body].concat();
            to.write_all(&message).await?;
        }
    }

    /// Whether this message runs the statement that is to be stopped.
    fn side(&self, kind: u8, body: &[u8], prepared: &mut HashMap<String, String>) -> Option<Side> {
        let mut texts = body.split(|byte| *byte == 0).map(String::from_utf8_lossy);
        let first = texts.next()?.into_owned();
        let statement = match kind {
            b'P' => {
                prepared.insert(first, texts.next()?.into_owned());
                return None;
            }
            b'B' => prepared.get(&*texts.next()?)?.clone(),
            b'Q' => first,
            _ => return None,
        };
        let mut wanted = self.wanted.lock().unwrap();
        let side = wanted.take_if(|(text, _)| *text == statement);
        let mut asked = self.asked.lock().unwrap();
        if !asked.contains(&statement) {
            asked.push(statement);
        }
        side.map(|(_, side)| side)
    }

    /// Forwards what the server says, until a reply is to be withheld; then waits for its end.
    async fn reply(
        &self,
        from: &mut ReadHalf<'_>,
        to: &mut WriteHalf<'_>,
        withhold: &watch::Sender<bool>,
    ) -> std::io::Result<()> {
        let mut buffer = vec![0; 64 * 1024];
        while !*withhold.borrow() {
            from.readable().await?;
            // Nothing is under way when a statement is sent: what comes now is its reply.
            if *withhold.borrow() {
                break;
            }
            let read = from.read(&mut buffer).await?;
            if read == 0 {
                return Ok(());
            }
            to.write_all(&buffer[..read]).await?;
        }
        // 'Z': ready for the next query, this one committed or failed.
        while {
            let kind = from.read_u8().await?;
            let length = from.read_u32().await?;
            body(from, length).await?;
            kind != b'Z'
        } {}
        self.stopped.send_replace(true);
        std::future::pending().await
    }
}

/// The rest of a message whose length, its own four bytes included, was read.
async fn body(from: &mut ReadHalf<'_>, length: u32) -> std::io::Result<Vec<u8>> {
    let mut body = vec![0; usize::try_from(length).expect("small") - 4];
    from.read_exact(&mut body).await?;
    Ok(body)
}
