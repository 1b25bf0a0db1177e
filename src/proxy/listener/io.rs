//! A client's socket as hyper sees it: every byte passes unchanged, but is looked at by the
//! framing scanner, and neither end may stall for ever.
//!
//! - A head that has begun must end within the header time-out.
//! - A write must make progress within [`WRITE_TIMEOUT`].
//! - Closing lingers: a socket that is closed with bytes unread answers the client with a reset,
//!   which can destroy the last answer on its way (RFC 9112 section 9.6). So what still comes is
//!   read and thrown away until the client closes too, for [`LINGER`] at most.

use std::io::{self, ErrorKind, IoSlice};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

use crate::proxy::framing::Scanner;

/// How long a client may leave the socket full.
const WRITE_TIMEOUT: Duration = Duration::from_mins(1);
/// How long closing waits for the client to close too.
const LINGER: Duration = Duration::from_secs(2);

/// The scanner, shared with the service that asks it for its verdict.
#[derive(Clone, Debug)]
pub(super) struct Watch(Arc<Mutex<Scanner>>);

impl Watch {
    pub(super) fn new() -> Self {
        Self(Arc::new(Mutex::new(Scanner::new())))
    }

    pub(super) fn scanner(&self) -> MutexGuard<'_, Scanner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A client's socket.
#[derive(Debug)]
pub(super) struct ClientIo<S> {
    inner: S,
    watch: Watch,
    head_timeout: Duration,
    head: Deadline,
    /// Which head `head` is for.
    head_number: u64,
    write: Deadline,
    /// Whether all that the client sent was read and was whole messages.
    drained: bool,
    closing: Closing,
}

#[derive(Debug)]
enum Closing {
    No,
    Lingering(Deadline),
    Done,
}

impl<S> ClientIo<S> {
    pub(super) fn new(inner: S, watch: Watch, head_timeout: Duration) -> Self {
        Self {
            inner,
            watch,
            head_timeout,
            head: Deadline::default(),
            head_number: 0,
            write: Deadline::default(),
            drained: true,
            closing: Closing::No,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for ClientIo<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let before = buf.filled().len();
        let polled = Pin::new(&mut this.inner).poll_read(cx, buf)?;
        let mut scanner = this.watch.scanner();
        if polled.is_ready() {
            scanner
                .scan(&buf.filled()[before..])
                .map_err(|fault| io::Error::new(ErrorKind::InvalidData, fault))?;
        }
        this.drained = polled.is_pending() && scanner.is_between_messages();
        if !scanner.in_head() || scanner.heads() != this.head_number {
            this.head_number = scanner.heads();
            this.head.clear();
        }
        if polled.is_pending() && scanner.in_head() {
            this.head.check(this.head_timeout, cx)?;
        }
        polled.map(Ok)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for ClientIo<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.inner).poll_write(cx, buf);
        self.progress(cx, polled)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.inner).poll_write_vectored(cx, bufs);
        self.progress(cx, polled)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.inner).poll_flush(cx);
        self.progress(cx, polled)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        loop {
            match &mut this.closing {
                Closing::No => {
                    let polled = Pin::new(&mut this.inner).poll_shutdown(cx);
                    ready!(this.progress(cx, polled))?;
                    // What comes through a tunnel is not the gateway's to throw away.
                    this.closing = if this.drained || this.watch.scanner().is_tunnel() {
                        Closing::Done
                    } else {
                        Closing::Lingering(Deadline::default())
                    };
                }
                Closing::Lingering(deadline) => {
                    if deadline.check(LINGER, cx).is_ok() {
                        ready!(discard(&mut this.inner, cx));
                    }
                    this.closing = Closing::Done;
                }
                Closing::Done => return Poll::Ready(Ok(())),
            }
        }
    }
}

impl<S> ClientIo<S> {
    /// Passes on how a write went, unless there was no progress for too long.
    fn progress<T>(
        &mut self,
        cx: &mut Context<'_>,
        polled: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if polled.is_ready() {
            self.write.clear();
        } else {
            self.write.check(WRITE_TIMEOUT, cx)?;
        }
        polled
    }
}

/// Reads until the client closes or the connection breaks.
fn discard<S: AsyncRead + Unpin>(stream: &mut S, cx: &mut Context<'_>) -> Poll<()> {
    let mut scrap = [0; 4096];
    loop {
        let mut buf = ReadBuf::new(&mut scrap);
        match ready!(Pin::new(&mut *stream).poll_read(cx, &mut buf)) {
            Ok(()) if !buf.filled().is_empty() => {}
            _ => return Poll::Ready(()),
        }
    }
}

/// A time-out that runs only while it is being checked: most reads and writes never start it.
#[derive(Debug, Default)]
struct Deadline(Option<Pin<Box<Sleep>>>);

impl Deadline {
    /// Starts the time-out unless it runs already, and fails once it is over.
    fn check(&mut self, after: Duration, cx: &mut Context<'_>) -> io::Result<()> {
        let sleep = self
            .0
            .get_or_insert_with(|| Box::pin(tokio::time::sleep(after)));
        match sleep.as_mut().poll(cx) {
            Poll::Ready(()) => Err(ErrorKind::TimedOut.into()),
            Poll::Pending => Ok(()),
        }
    }

    fn clear(&mut self) {
        self.0 = None;
    }
}

#[cfg(test)]
mod tests;
