//! Where clients connect: accepts, frames, and hands each request to a handler.
//!
//! HTTP/1.1 and HTTP/2, each in the clear (HTTP/2 by prior knowledge) and over TLS (by ALPN). A
//! handler sees only requests whose framing and authority are beyond doubt (RFC 9112 sections 3.2
//! and 6); all others are answered here. It knows no route, no key and no upstream.
//!
//! Every connection has a slot, and there are only so many; whoever carries a connection on after
//! an upgrade holds its [`Peer`] and thereby the slot. A client that closes its sending side still
//! gets its answer, so the end of its bytes never counts as its leaving: over HTTP/1 it is noticed
//! that a client is gone only when an answer can't be written to it.

mod connection;
mod io;
mod tls;

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http::{Request, Response};
use hyper::body::Incoming;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use self::tls::{Tls, TlsError};
use super::Body;
use crate::config::Limits;
use crate::telemetry::metric;

/// After an accept failed for want of file descriptors or memory: time for some to be freed.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A client without traffic is asked after this long whether it is still there.
const KEEPALIVE: Duration = Duration::from_mins(1);

/// How a shutdown is told.
#[derive(Clone, Debug, Default)]
pub struct Shutdown {
    /// Accept nothing more, finish what runs.
    pub soft: CancellationToken,
    /// Drop what still runs.
    pub hard: CancellationToken,
}

/// Who a request came from. Whoever holds a copy keeps the connection's slot taken.
#[derive(Clone, Debug)]
pub struct Peer {
    /// The other end of the socket.
    pub addr: SocketAddr,
    /// Whether the connection is encrypted.
    pub tls: bool,
    slot: Option<Arc<Slot>>,
}

/// One of the connections that there may be at a time.
#[derive(Debug)]
struct Slot {
    _permit: OwnedSemaphorePermit,
}

impl Peer {
    /// A peer that takes no slot, for requests that came over no connection of this listener.
    pub fn new(addr: SocketAddr, tls: bool) -> Self {
        Self {
            addr,
            tls,
            slot: None,
        }
    }

    /// How many copies there are, over a connection of this listener: one for each request that
    /// somebody is still at work for, and one for the connection itself.
    fn copies(&self) -> usize {
        self.slot.as_ref().map_or(0, Arc::strong_count)
    }
}

impl Slot {
    fn new(permit: OwnedSemaphorePermit) -> Arc<Self> {
        metrics::gauge!(metric::CLIENT_CONNECTIONS).increment(1.0);
        Arc::new(Self { _permit: permit })
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        metrics::gauge!(metric::CLIENT_CONNECTIONS).decrement(1.0);
    }
}

/// Serves a bound socket until a shutdown, and returns once the last connection is done.
///
/// `handler` is called once for each sound request. Over HTTP/1 its future is dropped when the
/// connection breaks, over HTTP/2 when the stream is reset as well; work that must not end with its
/// client belongs in a task of its own.
pub async fn run<H, F>(
    socket: TcpListener,
    tls: Option<Tls>,
    limits: &Limits,
    handler: H,
    shutdown: Shutdown,
) where
    H: Fn(Request<Incoming>, Peer) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Response<Body>> + Send + 'static,
{
    let tasks = TaskTracker::new();
    let slots = Arc::new(Semaphore::new(limits.connections_max));
    let http = Arc::new(connection::Http::new(
        limits,
        handler,
        shutdown.clone(),
        tasks.clone(),
    ));
    let accepting = async {
        loop {
            // A slot first: beyond the limit clients wait in the kernel's queue, none is reset.
            let Ok(permit) = Arc::clone(&slots).acquire_owned().await else {
                return;
            };
            let (stream, addr) = accept(&socket).await;
            let peer = Peer {
                addr,
                tls: tls.is_some(),
                slot: Some(Slot::new(permit)),
            };
            let serving = serve(stream, peer, tls.clone(), Arc::clone(&http));
            tasks.spawn(shutdown.hard.clone().run_until_cancelled_owned(serving));
        }
    };
    shutdown.soft.run_until_cancelled(accepting).await;
    drop(socket);
    tasks.close();
    tasks.wait().await;
}

/// The next connection, however long the machine is short of means to take it.
async fn accept(socket: &TcpListener) -> (TcpStream, SocketAddr) {
    loop {
        match socket.accept().await {
            Ok(accepted) => return accepted,
            Err(error) if is_of_one_connection(error.kind()) => {}
            Err(error) => {
                tracing::warn!(%error, "can't accept a connection; raise the limit of open files");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Whether the error is about the connection that was to be accepted, not about the socket.
fn is_of_one_connection(kind: ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::ConnectionAborted | ErrorKind::ConnectionRefused | ErrorKind::ConnectionReset
    )
}

async fn serve<H, F>(
    stream: TcpStream,
    peer: Peer,
    tls: Option<Tls>,
    http: Arc<connection::Http<H>>,
) where
    H: Fn(Request<Incoming>, Peer) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Response<Body>> + Send + 'static,
{
    if let Err(error) = tune(&stream) {
        tracing::debug!(%error, "can't tune a client's socket");
    }
    let Some(tls) = tls else {
        return http.serve(stream, peer).await;
    };
    match tokio::time::timeout(http.header_timeout(), tls.accept(stream)).await {
        Ok(Ok(stream)) => http.serve(stream, peer).await,
        Ok(Err(error)) => tracing::debug!(%error, peer = %peer.addr, "TLS handshake failed"),
        Err(_) => tracing::debug!(peer = %peer.addr, "TLS handshake took too long"),
    }
}

/// Small answers leave at once, and a client whose machine is gone is noticed although nothing is
/// written to it: it would hold its slot for ever behind a silent stream or tunnel.
fn tune(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let keepalive = TcpKeepalive::new()
        .with_time(KEEPALIVE)
        .with_interval(KEEPALIVE / 3);
    SockRef::from(stream).set_tcp_keepalive(&keepalive)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_client_whose_machine_is_gone_does_not_hold_itsslot_for_ever() {
        let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let _client = TcpStream::connect(socket.local_addr().unwrap())
            .await
            .unwrap();
        let (stream, _) = accept(&socket).await;
        tune(&stream).unwrap();
        let tuned = SockRef::from(&stream);
        assert!(tuned.keepalive().unwrap());
        assert_eq!(tuned.tcp_keepalive_time().unwrap(), KEEPALIVE);
    }

    #[test]
    fn only_errors_of_the_socket_itself_pause_accepting() {
        assert!(is_of_one_connection(ErrorKind::ConnectionAborted));
        for code in [23, 24, 12, 105] {
            let error = std::io::Error::from_raw_os_error(code);
            assert!(!is_of_one_connection(error.kind()), "{error}");
        }
    }
}
