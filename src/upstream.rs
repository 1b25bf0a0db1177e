//! Calls to upstreams, and the knowledge whether an upstream can have seen a request.
//!
//! It knows nothing of keys, records or routes. What it promises:
//!
//! - A request is handed to at most one socket. Another connection or target is tried only while
//!   not one byte of the request was written, or when HTTP/2 says that its stream was not
//!   processed (RFC 9113 section 8.7). [`SendError::sent`] tells which it was, and is
//!   [`Sent::Maybe`] wherever that is not certain.
//! - A body that ended early, by FIN, RST or a missing last chunk, ends in an error. Only the
//!   end of a [`CloseDelimited`] body can't be told from that.
//! - A connection serves another request only after an answer was read to its clean end.
//! - Everything has a limit: connections, the wait for one, the time to connect, header bytes.
//!
//! HTTP/1.1 is hyper's connection without its client pool, which has no cap and hides what was
//! written. HTTP/2 is the `h2` crate itself: hyper ends a body that was reset with `NO_ERROR` as
//! if it were whole, and mixes up the errors of a stream and of its connection.

mod connect;
pub mod exchange;
mod health;
mod http1;
mod http2;
mod outgoing;
mod socket;
mod target;
pub mod tls;

use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, Uri};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use self::socket::SendProgress;

use self::outgoing::Head;
use self::target::{Target, Verdict};
use crate::body::{Body, BoxError};
use crate::config::PoolConfig;
use crate::domain::scope::PoolId;
use crate::telemetry::Chain;

/// The most header lines of an answer.
pub const ANSWER_HEADERS_MAX: usize = 128;
/// The longest headers of an answer, in bytes; also the longest trailers.
pub const ANSWER_HEADER_BYTES_MAX: usize = 64 * 1024;
/// How often connections past their time are looked for.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);

/// The body that a request carries.
pub enum OutBody {
    /// All of it is here, so that another connection can be given it too.
    Full(Bytes),
    /// It comes piece by piece, and can be sent once.
    Stream(Body),
}

/// In an answer's extensions: its body ends with the connection (RFC 9112 section 6.3, rule 8),
/// so that a truncated one looks whole. It counts as whole all the same, unless the connection broke
/// or TLS did not say that it ended (RFC 9112 sections 8 and 9.8); the log tells once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CloseDelimited;

/// Whether an upstream can have seen a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sent {
    /// No byte of it was handed to a socket, or HTTP/2 says that it was not processed.
    No,
    /// It may have been seen, and executed.
    Maybe,
}

/// A call that brought no answer.
#[derive(Debug)]
pub struct SendError {
    /// Whether the upstream can have seen the request.
    pub sent: Sent,
    /// What happened.
    pub kind: SendErrorKind,
    target: Option<Arc<str>>,
    source: Option<BoxError>,
}

/// What happened to a call that brought no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SendErrorKind {
    /// The host's name has no address.
    #[error("its name has no address; check the pool's target and the resolver")]
    Dns,
    /// No address took the connection.
    #[error("it took no connection; check that it runs and listens there")]
    Connect,
    /// `connect_timeout` passed.
    #[error("connecting took longer than the pool's connect_timeout")]
    ConnectTimeout,
    /// No TLS connection came to be.
    #[error("TLS failed; check its certificate, and the pool's ca")]
    Tls,
    /// `connections_max` was reached and `queue_timeout` passed.
    #[error("all its connections were busy for the pool's queue_timeout")]
    NoRoom,
    /// There is no such pool, or it has no target.
    #[error("the pool has no target")]
    NoTarget,
    /// The request can't be put in the protocol that the target speaks.
    #[error("the request can't be sent in the protocol that it speaks")]
    Unsendable,
    /// The request's own body broke off.
    #[error("the request's body broke off")]
    RequestBody,
    /// The connection was closed before an answer.
    #[error("it closed the connection before it answered")]
    Closed,
    /// The connection or stream was reset before an answer.
    #[error("it reset the connection before it answered")]
    Reset,
    /// What came is no answer, or one beyond the limits.
    #[error("its answer is not valid HTTP, or its headers are too large")]
    BadResponse,
    /// The caller gave up, by [`SendProgress::abandon`].
    #[error("the call was given up before anything was sent")]
    Abandoned,
}

impl fmt::Display for SendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.target {
            Some(target) => write!(f, "upstream {target}: {}", self.kind),
            None => write!(f, "upstream: {}", self.kind),
        }
    }
}

impl std::error::Error for SendError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}

impl SendError {
    /// Of a call that certainly reached no upstream.
    pub fn unsent(kind: SendErrorKind) -> Self {
        Self {
            sent: Sent::No,
            kind,
            target: None,
            source: None,
        }
    }

    fn because(mut self, source: impl Into<BoxError>) -> Self {
        self.source = Some(source.into());
        self
    }
}

/// Why pools can't be used as configured.
#[derive(Debug, thiserror::Error)]
pub enum UpstreamError {
    /// A certificate file can't be used.
    #[error("pool {pool}: no certificates could be read from {path}", path = .path.display())]
    Ca {
        /// The pool.
        pool: PoolId,
        /// The file.
        path: PathBuf,
        /// Why.
        source: BoxError,
    },
    /// There is nothing that a certificate could be checked against.
    #[error(
        "pool {pool}: this system has no trusted certificates; install them, or set the pool's ca"
    )]
    NoRoots {
        /// The pool.
        pool: PoolId,
    },
    /// A target is not `http://host:port` or `https://host:port`.
    #[error("pool {pool}: {target} is not http://host:port or https://host:port")]
    Target {
        /// The pool.
        pool: PoolId,
        /// The target.
        target: Uri,
    },
}

/// All pools. Clones share the connections; with the last one idle connections are closed.
#[derive(Clone)]
pub struct Upstreams {
    inner: Arc<Inner>,
}

struct Inner {
    pools: HashMap<PoolId, Pool>,
    closed: CancellationToken,
}

struct Pool {
    targets: Vec<Arc<Target>>,
    turn: AtomicUsize,
    /// Whether the log was told of bodies that end with their connection.
    warned: AtomicBool,
}

/// What a target's attempt left for another one.
struct Failure {
    error: SendError,
    /// The request's body, when it can be sent again.
    body: Option<OutBody>,
    verdict: Verdict,
}

impl Upstreams {
    /// Reads the certificates; connects to nothing yet. `tracker` takes the task of each
    /// connection and one that closes those past their time; it must be called in a runtime.
    ///
    /// # Errors
    /// When a pool can't be used as configured.
    #[expect(clippy::needless_pass_by_value, reason = "a tracker is a handle")]
    pub fn new(pools: &[PoolConfig], tracker: TaskTracker) -> Result<Self, UpstreamError> {
        let closed = CancellationToken::new();
        let mut roots = tls::Roots::default();
        let mut built = HashMap::new();
        for config in pools {
            let targets = Target::all(config, &mut roots, &tracker, &closed)?;
            let turn = AtomicUsize::new(0);
            let pool = Pool {
                targets,
                turn,
                warned: AtomicBool::new(false),
            };
            built.insert(config.id.clone(), pool);
        }
        let inner = Arc::new(Inner {
            pools: built,
            closed: closed.clone(),
        });
        tracker.spawn(sweep(Arc::downgrade(&inner), closed));
        Ok(Self { inner })
    }

    /// The pools.
    pub fn ids(&self) -> impl Iterator<Item = &PoolId> {
        self.inner.pools.keys()
    }

    /// Sends the request to one target of the pool and returns once the answer's headers are
    /// there. Headers must be the end-to-end ones; `Upgrade` with its `Connection` may be left
    /// in, and 101 then comes with [`hyper::upgrade::OnUpgrade`]. Interim answers are swallowed.
    ///
    /// Dropping the future gives the call up and closes its connection or stream. Whether the
    /// upstream can have seen the request is then told by [`SendProgress::abandon`].
    ///
    /// # Errors
    /// When no answer came; see [`SendError`].
    pub async fn send(
        &self,
        id: &PoolId,
        request: Request<OutBody>,
        progress: &SendProgress,
    ) -> Result<Response<Body>, SendError> {
        let pool = self.inner.pools.get(id);
        let pool = pool.ok_or_else(|| SendError::unsent(SendErrorKind::NoTarget))?;
        let (head, mut body) = Head::new(request);
        let mut verdicts = vec![Verdict::Untried; pool.targets.len()];
        let mut last = SendError::unsent(SendErrorKind::NoTarget);
        for attempt in 0..=pool.targets.len() {
            let Some(index) = pool.pick(&verdicts) else {
                break;
            };
            let target = &pool.targets[index];
            let answered = target.attempt(&head, body, attempt > 0, progress).await;
            let failure = match answered {
                Ok(answer) => {
                    target.health.recover();
                    pool.warn_of_open_ends(id, &answer);
                    return Ok(answer);
                }
                Err(failure) => failure,
            };
            if failure.verdict == Verdict::Unreachable {
                target.health.eject();
            }
            verdicts[index] = failure.verdict;
            last = failure.error;
            last.target = Some(target.name());
            tracing::debug!(error = %Chain(&last), sent = ?last.sent, "an attempt failed");
            match failure.body {
                Some(again) if last.sent == Sent::No && !progress.is_abandoned() => body = again,
                _ => break,
            }
        }
        Err(last)
    }

    /// Closes idle connections, now and as they become idle. Calls in progress go on.
    pub fn close(&self) {
        self.inner.close();
    }
}

impl Inner {
    fn close(&self) {
        self.closed.cancel();
        for target in self.targets() {
            target.sweep();
        }
    }

    fn targets(&self) -> impl Iterator<Item = &Arc<Target>> {
        self.pools.values().flat_map(|pool| &pool.targets)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.close();
    }
}

impl Pool {
    /// The target to try next: reachable before unreachable, untried before tried, then the one
    /// with the fewest calls in flight, which spares a slow one; equals take turns. When all are
    /// ejected one is tried all the same, so that the first that recovers is found at once.
    fn pick(&self, verdicts: &[Verdict]) -> Option<usize> {
        let count = self.targets.len();
        let turn = self.turn.fetch_add(1, Ordering::Relaxed) % count.max(1);
        let candidates = self.targets.iter().enumerate();
        let (index, target) = candidates
            .filter(|(index, _)| verdicts[*index] != Verdict::Unreachable)
            .min_by_key(|(index, target)| {
                let tried = verdicts[*index] != Verdict::Untried;
                let rank = (index + count - turn) % count;
                (target.health.is_ejected(), tried, target.in_flight(), rank)
            })?;
        target.health.probe();
        Some(index)
    }

    /// A service that dies in the middle of such an answer leaves one that looks whole.
    fn warn_of_open_ends(&self, id: &PoolId, answer: &Response<Body>) {
        let open = answer.extensions().get::<CloseDelimited>().is_some();
        if open && !self.warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                pool = %id,
                "a service ends an answer's body by closing the connection, so a body that was cut \
                 off can't be told from a whole one; let it send Content-Length or use chunks"
            );
        }
    }
}

async fn sweep(upstreams: Weak<Inner>, closed: CancellationToken) {
    while tokio::time::timeout(SWEEP_INTERVAL, closed.cancelled())
        .await
        .is_err()
    {
        if let Some(upstreams) = upstreams.upgrade() {
            upstreams.targets().for_each(|target| target.sweep());
        }
    }
}
