//! Name, address, TCP, TLS, protocol: all that must be there before a request is handed over.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use rustls_pki_types::ServerName;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, lookup_host};
use tokio::time::{Instant, timeout};

use super::http1::Http1;
use super::http2::{Http2, StreamLease};
use super::socket::Socket;
use super::target::{Permit, Target};
use super::{SendError, SendErrorKind, tls};

/// Of a name's addresses this many are tried.
const ADDRESSES_MAX: usize = 8;
/// A connection without traffic is asked after this long whether the other side is still there.
const KEEPALIVE: Duration = Duration::from_secs(30);

/// What any connection is made of.
pub(super) trait Io: AsyncRead + AsyncWrite + Send + Unpin + 'static {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin + 'static> Io for T {}

/// A connection that a request can be sent on.
pub(super) enum Connected {
    Http1(Http1),
    Http2(StreamLease),
}

impl Target {
    /// Makes a connection within `connect_timeout`. Nothing of a request is sent.
    pub(super) async fn connect(
        self: &Arc<Self>,
        permit: Permit,
        upgrade: bool,
    ) -> Result<Connected, SendError> {
        let connecting = self.connect_untimed(permit, upgrade);
        let connected = timeout(self.config.connect_timeout, connecting).await;
        connected.map_err(|_| SendError::unsent(SendErrorKind::ConnectTimeout))?
    }

    async fn connect_untimed(
        self: &Arc<Self>,
        permit: Permit,
        upgrade: bool,
    ) -> Result<Connected, SendError> {
        let socket = Socket::new(self.tcp().await?, permit);
        let Some(tls) = &self.tls else {
            return self.speak(socket, self.config.http2, |socket| socket).await;
        };
        let failed = |error: io::Error| SendError::unsent(SendErrorKind::Tls).because(error);
        let name = ServerName::try_from(self.host.clone());
        let name = name.map_err(|error| failed(io::Error::other(error)))?;
        let connector = if upgrade { &tls.http1 } else { &tls.any };
        let stream = connector.connect(name, socket).await.map_err(failed)?;
        let http2 = stream.get_ref().1.alpn_protocol() == Some(tls::H2);
        self.speak(stream, http2, |stream| stream.get_ref().0).await
    }

    async fn speak<T: Io>(
        self: &Arc<Self>,
        io: T,
        http2: bool,
        socket: impl Fn(&T) -> &Socket,
    ) -> Result<Connected, SendError> {
        let meter = socket(&io).meter();
        if http2 {
            let connection = Http2::new(io, meter, self).await?;
            let lease = Arc::new(connection).lease(self);
            let lease = lease.ok_or_else(|| SendError::unsent(SendErrorKind::NoRoom))?;
            return Ok(Connected::Http2(lease));
        }
        Ok(Connected::Http1(Http1::new(io, meter, self).await?))
    }

    /// Resolves anew, since names move, and tries each address with an equal part of the time.
    async fn tcp(&self) -> Result<TcpStream, SendError> {
        let deadline = Instant::now() + self.config.connect_timeout;
        let unresolved = SendError::unsent(SendErrorKind::Dns);
        let addresses = match lookup_host((&*self.host, self.port)).await {
            Ok(addresses) => addresses.take(ADDRESSES_MAX).collect::<Vec<_>>(),
            Err(error) => return Err(unresolved.because(error)),
        };
        let mut failed = unresolved;
        let mut left = u32::try_from(addresses.len()).unwrap_or(u32::MAX);
        for address in addresses {
            let part = deadline.saturating_duration_since(Instant::now()) / left;
            left -= 1;
            match timeout(part, TcpStream::connect(address)).await {
                Ok(Ok(tcp)) => return tuned(tcp),
                Ok(Err(error)) => failed = SendError::unsent(SendErrorKind::Connect).because(error),
                Err(_) => failed = SendError::unsent(SendErrorKind::ConnectTimeout),
            }
        }
        Err(failed)
    }
}

fn tuned(tcp: TcpStream) -> Result<TcpStream, SendError> {
    let keepalive = TcpKeepalive::new()
        .with_time(KEEPALIVE)
        .with_interval(KEEPALIVE / 3);
    let tuned = tcp.set_nodelay(true);
    let tuned = tuned.and_then(|()| SockRef::from(&tcp).set_tcp_keepalive(&keepalive));
    tuned.map_err(|error| SendError::unsent(SendErrorKind::Connect).because(error))?;
    Ok(tcp)
}
