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
    /// Answers a request that contains the first bytes with the second ones, and closes its
    /// connection; the request goes no further.
    Answer(&'static [u8], &'static [u8]),
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

/// How a connection ends.
enum End {
    Close,
    Reset,
    Answer(&'static [u8]),
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
        let end = tokio::select! {
            () = self.stop.cancelled() => End::Reset,
            _ = mode.wait_for(|mode| *mode == Mode::Reset) => End::Reset,
            end = self.pump(&mut from_client, &mut to_server, Self::request) => end,
            end = self.pump(&mut from_server, &mut to_client, Self::reply) => end,
        };
        match end {
            End::Close => {}
            End::Reset => {
                reset(&client);
                reset(&server);
            }
            End::Answer(answer) => {
                let _ = client.write_all(answer).await;
            }
        }
    }

    /// Copies one direction until its end, or until a chunk ends the connection.
    async fn pump(
        &self,
        from: &mut (impl AsyncRead + Unpin),
        to: &mut (impl AsyncWrite + Unpin),
        ends: fn(&Self, &[u8]) -> Option<End>,
    ) -> End {
        let mut mode = self.mode.subscribe();
        let mut buffer = vec![0; 64 * 1024];
        loop {
            let Ok(read @ 1..) = from.read(&mut buffer).await else {
                return End::Close;
            };
            let _ = mode.wait_for(|mode| *mode != Mode::Silent).await;
            let chunk = &buffer[..read];
            if let Some(end) = ends(self, chunk) {
                return end;
            }
            if to.write_all(chunk).await.is_err() {
                return End::Close;
            }
        }
    }

    fn request(&self, chunk: &[u8]) -> Option<End> {
        match *self.mode.borrow() {
            Mode::Answer(request, answer) if contains(chunk, request) => Some(End::Answer(answer)),
            _ => None,
        }
    }

    fn reply(&self, chunk: &[u8]) -> Option<End> {
        // Only one ever is swallowed.
        let swallowed = self.mode.send_if_modified(|mode| match *mode {
            Mode::Swallow(bytes) if contains(chunk, bytes) => {
                *mode = Mode::Pass;
                true
            }
            _ => false,
        });
        swallowed.then(|| {
            self.swallowed.fetch_add(1, Ordering::SeqCst);
            End::Reset
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
