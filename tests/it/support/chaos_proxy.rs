//! A TCP proxy that misbehaves on command.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

/// What the proxy does with connections, old and new.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Forwards.
    Pass,
    /// Accepts and forwards nothing, in either direction; what was read is kept and forwarded
    /// after the next [`Mode::Pass`].
    Silent,
    /// Resets every connection, new ones as soon as they are accepted.
    Reset,
    /// Drops the first reply that contains these bytes (none: any reply) and resets its
    /// connection; everything else passes, and what the client asked has happened.
    Swallow(&'static [u8]),
}

/// A running proxy; it ends when dropped.
pub struct ChaosProxy {
    address: SocketAddr,
    mode: watch::Sender<Mode>,
    swallowed: Arc<AtomicU64>,
    _stop: DropGuard,
}

#[derive(Clone)]
struct Proxy {
    target: String,
    mode: watch::Sender<Mode>,
    swallowed: Arc<AtomicU64>,
    stop: CancellationToken,
    tracker: TaskTracker,
}

impl ChaosProxy {
    /// Starts in [`Mode::Pass`], on a loopback port of its own. `target`: `HOST:PORT`.
    pub async fn start(target: impl Into<String>) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let proxy = Proxy {
            target: target.into(),
            mode: watch::Sender::new(Mode::Pass),
            swallowed: Arc::default(),
            stop: CancellationToken::new(),
            tracker: TaskTracker::new(),
        };
        let (mode, swallowed) = (proxy.mode.clone(), Arc::clone(&proxy.swallowed));
        let stop = proxy.stop.clone().drop_guard();
        proxy.tracker.clone().spawn(proxy.accept(listener));
        Self {
            address,
            mode,
            swallowed,
            _stop: stop,
        }
    }

    /// Where to connect.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// From now on.
    pub fn set(&self, mode: Mode) {
        self.mode.send_replace(mode);
    }

    /// Replies that were dropped.
    pub fn swallowed(&self) -> u64 {
        self.swallowed.load(Ordering::SeqCst)
    }
}

impl Proxy {
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

    /// One connection, until either side or the mode ends it.
    async fn serve(self, client: TcpStream) {
        let mut mode = self.mode.subscribe();
        if *mode.borrow() == Mode::Reset {
            reset(&client);
            return;
        }
        let Ok(server) = TcpStream::connect(&self.target).await else {
            return;
        };
        let (mut client, mut server) = (client, server);
        let (mut from_client, mut to_client) = client.split();
        let (mut from_server, mut to_server) = server.split();
        let cut = tokio::select! {
            () = self.stop.cancelled() => true,
            _ = mode.wait_for(|mode| *mode == Mode::Reset) => true,
            cut = self.pump(&mut from_client, &mut to_server, false) => cut,
            cut = self.pump(&mut from_server, &mut to_client, true) => cut,
        };
        if cut {
            reset(&client);
            reset(&server);
        }
    }

    /// Copies one direction until its end; whether that is to be a reset.
    async fn pump(
        &self,
        from: &mut (impl AsyncRead + Unpin),
        to: &mut (impl AsyncWrite + Unpin),
        replies: bool,
    ) -> bool {
        let mut mode = self.mode.subscribe();
        let mut buffer = vec![0; 64 * 1024];
        loop {
            let Ok(read @ 1..) = from.read(&mut buffer).await else {
                return false;
            };
            let _ = mode.wait_for(|mode| *mode != Mode::Silent).await;
            let chunk = &buffer[..read];
            if replies && self.swallows(chunk) {
                return true;
            }
            if to.write_all(chunk).await.is_err() {
                return false;
            }
        }
    }

    /// Whether this reply is the one to drop. Only one ever is.
    fn swallows(&self, chunk: &[u8]) -> bool {
        self.mode.send_if_modified(|mode| match *mode {
            Mode::Swallow(bytes) if contains(chunk, bytes) => {
                self.swallowed.fetch_add(1, Ordering::SeqCst);
                *mode = Mode::Pass;
                true
            }
            _ => false,
        })
    }
}

/// Makes the end of this connection a reset.
fn reset(stream: &TcpStream) {
    let socket = socket2::SockRef::from(stream);
    socket.set_linger(Some(std::time::Duration::ZERO)).unwrap();
}

fn contains(chunk: &[u8], bytes: &[u8]) -> bool {
    bytes.is_empty() || chunk.windows(bytes.len()).any(|window| window == bytes)
}
