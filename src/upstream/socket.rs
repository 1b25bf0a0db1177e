//! A socket that knows what was written to it, and for which request.
//!
//! Invariant: before the first byte of a request is given to the kernel its [`SendProgress`] says
//! so, and once a meter is sealed or its progress abandoned nothing is given any more. All three
//! happen under one lock or one atomic step, so whoever asks afterwards gets a final answer.

use std::io::{self, ErrorKind, IoSlice};
use std::pin::Pin;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use super::Sent;
use super::target::Permit;

const NOTHING: u8 = 0;
const HANDED: u8 = 1;
const ABANDONED: u8 = 2;

/// How far one call has come; shared between the caller and the connections that are tried.
#[derive(Clone, Default)]
pub struct SendProgress(Arc<Progress>);

#[derive(Default)]
struct Progress {
    step: AtomicU8,
    /// Asked once, right before the first byte.
    may_send: Option<Box<dyn Fn() -> bool + Send + Sync>>,
}

impl SendProgress {
    /// Of a call that has not begun.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Of a call that may be sent only if `may_send` says so right before its first byte. A call
    /// that may not counts as abandoned.
    #[must_use]
    pub fn only_if(may_send: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Self(Arc::new(Progress {
            step: AtomicU8::new(NOTHING),
            may_send: Some(Box::new(may_send)),
        }))
    }

    /// Ends the call, for a caller that dropped or will drop its future. [`Sent::No`]: nothing of
    /// the request was handed to a socket, and nothing will be.
    #[must_use]
    pub fn abandon(&self) -> Sent {
        match self.step(NOTHING, ABANDONED) {
            Ok(_) | Err(ABANDONED) => Sent::No,
            Err(_) => Sent::Maybe,
        }
    }

    /// Whether nothing of the request was handed over, and nothing will be.
    #[must_use]
    pub fn is_abandoned(&self) -> bool {
        self.0.step.load(Ordering::SeqCst) == ABANDONED
    }

    /// The request is about to be handed over. False: it must not be.
    pub fn claim(&self) -> bool {
        let forbidden = || self.0.may_send.as_ref().is_some_and(|may_send| !may_send());
        if self.0.step.load(Ordering::SeqCst) == NOTHING && forbidden() {
            let _ = self.step(NOTHING, ABANDONED);
        }
        !matches!(self.step(NOTHING, HANDED), Err(ABANDONED))
    }

    /// What was about to be handed over certainly was not.
    pub(super) fn take_back(&self) {
        let _ = self.step(HANDED, NOTHING);
    }

    fn step(&self, from: u8, to: u8) -> Result<u8, u8> {
        let (success, failure) = (Ordering::SeqCst, Ordering::SeqCst);
        self.0.step.compare_exchange(from, to, success, failure)
    }
}

/// Counts what one connection wrote and read. Below TLS, so that it counts what truly left.
#[derive(Default)]
pub(super) struct Meter(Mutex<Count>);

#[derive(Default)]
struct Count {
    written: u64,
    read: u64,
    sealed: bool,
    progress: Option<SendProgress>,
}

impl Meter {
    /// From now on writes are this request's (HTTP/1.1, where one runs at a time), and counted
    /// anew.
    pub(super) fn begin(&self, progress: &SendProgress) {
        let mut count = self.count();
        count.written = 0;
        count.progress = Some(progress.clone());
    }

    /// Bytes written so far, or since a request began.
    pub(super) fn written(&self) -> u64 {
        self.count().written
    }

    /// Bytes read so far.
    pub(super) fn read(&self) -> u64 {
        self.count().read
    }

    /// Lets nothing be written any more, and tells how many bytes were.
    pub(super) fn seal(&self) -> u64 {
        let mut count = self.count();
        count.sealed = true;
        count.written
    }

    fn count(&self) -> MutexGuard<'_, Count> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Count {
    fn may_write(&self) -> io::Result<()> {
        let claimed = self.progress.as_ref().is_none_or(SendProgress::claim);
        if self.sealed || !claimed {
            return Err(io::Error::new(
                ErrorKind::ConnectionAborted,
                "the call was given up",
            ));
        }
        Ok(())
    }
}

/// A TCP connection, its meter, and its place among the target's connections.
pub(super) struct Socket {
    // Dropped first, so that the place becomes free only once the connection is closed.
    tcp: TcpStream,
    meter: Arc<Meter>,
    _permit: Permit,
}

impl Socket {
    pub(super) fn new(tcp: TcpStream, mut permit: Permit) -> Self {
        permit.connected();
        Self {
            tcp,
            meter: Arc::default(),
            _permit: permit,
        }
    }

    pub(super) fn meter(&self) -> Arc<Meter> {
        self.meter.clone()
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let polled = Pin::new(&mut self.tcp).poll_read(context, buffer);
        self.meter.count().read += (buffer.filled().len() - before) as u64;
        polled
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(context, &[IoSlice::new(buffer)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let mut count = this.meter.count();
        count.may_write()?;
        let written = ready!(Pin::new(&mut this.tcp).poll_write_vectored(context, buffers))?;
        count.written += written as u64;
        Poll::Ready(Ok(written))
    }

    fn is_write_vectored(&self) -> bool {
        self.tcp.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_shutdown(context)
    }
}
