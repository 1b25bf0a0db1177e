//! One client connection: its protocol settings, its service, and how it ends.

use std::convert::Infallible;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONNECTION, CONTENT_LENGTH};
use http::{HeaderValue, Method, Request, Response, StatusCode, Version};
use http_body::{Frame, SizeHint};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::io::{ClientIo, Watch};
use super::{Peer, Shutdown};
use crate::config::Limits;
use crate::problem::{Kind, Problem};
use crate::proxy::{Body, BoxError, matching};

/// Requests that one HTTP/2 connection may have open at a time.
const STREAMS_MAX: u32 = 128;
/// Requests of one connection that may be worked for at a time. A guarded request goes on when its
/// stream is reset and another takes the stream's place, so the streams alone bound nothing.
const WORK_MAX: usize = 2 * STREAMS_MAX as usize;
/// Body bytes that a client may send ahead on one HTTP/2 stream.
const STREAM_WINDOW: u32 = 256 << 10;
/// Body bytes that a client may send ahead on one HTTP/2 connection.
const CONNECTION_WINDOW: u32 = 1 << 20;
/// Bytes of an answer that are held for one HTTP/2 stream whose client doesn't take them.
const SEND_BUFFER_MAX: usize = 64 << 10;
/// hyper takes no smaller read buffer for HTTP/1.
const READ_BUFFER_MIN: usize = 8 << 10;
/// How often an HTTP/2 connection is probed, and how long the reply may take.
const PING_INTERVAL: Duration = Duration::from_secs(30);
const PING_TIMEOUT: Duration = Duration::from_secs(20);
/// How long a connection may be open between two requests. Longer than the idle time of common
/// load balancers, so that these close first and no request meets a closing connection.
const IDLE_TIMEOUT: Duration = Duration::from_secs(75);
/// How long a connection that was asked to close may take for it while it has no request.
const CLOSE_TIMEOUT: Duration = Duration::from_mins(1);

/// When to try again on a connection that is worked for too much.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// What all connections share.
pub(super) struct Http<H> {
    builder: auto::Builder<Tracked>,
    header_timeout: Duration,
    handler: H,
    shutdown: Shutdown,
}

/// Runs the tasks of HTTP/2 streams where shutdown finds them.
#[derive(Clone)]
struct Tracked {
    tasks: TaskTracker,
    hard: CancellationToken,
}

impl<F> hyper::rt::Executor<F> for Tracked
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    fn execute(&self, future: F) {
        let bounded = self.hard.clone().run_until_cancelled_owned(future);
        self.tasks.spawn(bounded);
    }
}

impl<H, F> Http<H>
where
    H: Fn(Request<Incoming>, Peer) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Response<Body>> + Send + 'static,
{
    pub(super) fn new(limits: &Limits, handler: H, shutdown: Shutdown, tasks: TaskTracker) -> Self {
        let mut builder = auto::Builder::new(Tracked {
            tasks,
            hard: shutdown.hard.clone(),
        });
        builder
            .http1()
            .timer(TokioTimer::new())
            // `ClientIo` bounds the time of a head, without counting the wait for its first byte.
            .header_read_timeout(None)
            .half_close(true)
            // A head must fit the read buffer, so this is the limit of both.
            .max_buf_size(limits.header_bytes_max.max(READ_BUFFER_MIN));
        builder
            .http2()
            .timer(TokioTimer::new())
            .max_header_list_size(u32::try_from(limits.header_bytes_max).unwrap_or(u32::MAX))
            .max_concurrent_streams(STREAMS_MAX)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_send_buf_size(SEND_BUFFER_MAX)
            .keep_alive_interval(PING_INTERVAL)
            .keep_alive_timeout(PING_TIMEOUT);
        Self {
            builder,
            header_timeout: limits.header_timeout,
            handler,
            shutdown,
        }
    }

    pub(super) fn header_timeout(&self) -> Duration {
        self.header_timeout
    }

    /// Serves one connection to its end.
    pub(super) async fn serve<S>(&self, stream: S, peer: Peer)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let watch = Watch::new();
        let io = ClientIo::new(stream, watch.clone(), self.header_timeout);
        let activity = Activity::new();
        let addr = peer.addr;
        let requests = AtomicU64::new(0);
        let service = service_fn(|request: Request<Incoming>| {
            let number = requests.fetch_add(1, Ordering::Relaxed);
            let (handler, peer, watch) = (self.handler.clone(), peer.clone(), watch.clone());
            let busy = Busy::begin(&activity);
            async move {
                let response = match refusal(&request, &watch, number) {
                    Some(problem) => refused(problem, request.version()),
                    None if peer.copies() > WORK_MAX => overworked().into_response().map(whole),
                    None => handler(request, peer).await,
                };
                if response.status() == StatusCode::SWITCHING_PROTOCOLS {
                    watch.scanner().upgrade();
                }
                Ok::<_, Infallible>(response.map(|body| Answer { body, _busy: busy }))
            }
        });
        let connection = self
            .builder
            .serve_connection_with_upgrades(TokioIo::new(io), service);
        let mut connection = pin!(connection);
        let mut closing = false;
        let mut patience = pin!(tokio::time::sleep(self.header_timeout));
        loop {
            tokio::select! {
                ended = connection.as_mut() => {
                    if let Err(error) = ended {
                        tracing::debug!(%error, peer = %addr, "client connection broke");
                    }
                    return;
                }
                () = self.shutdown.soft.cancelled(), if !closing => {
                    closing = true;
                    connection.as_mut().graceful_shutdown();
                    patience.as_mut().reset(Instant::now() + CLOSE_TIMEOUT);
                }
                () = patience.as_mut() => {
                    let now = Instant::now();
                    let next = match activity.idle_until(self.header_timeout) {
                        Some(_) if closing => return,
                        Some(until) if until > now => until,
                        Some(_) => {
                            closing = true;
                            connection.as_mut().graceful_shutdown();
                            now + CLOSE_TIMEOUT
                        }
                        None => now + self.header_timeout,
                    };
                    patience.as_mut().reset(next);
                }
            }
        }
    }
}

/// Why a request can't be handed on, whatever its route.
fn refusal(request: &Request<Incoming>, watch: &Watch, number: u64) -> Option<Problem> {
    let invalid = |detail: &str| Some(Problem::new(Kind::RequestInvalid, detail));
    if request.version() < Version::HTTP_2
        && let Some(fault) = watch.scanner().fault_of(number)
    {
        return invalid(&fault.to_string());
    }
    if request.method() == Method::CONNECT {
        return invalid("this is a gateway, no forward proxy; CONNECT is not served");
    }
    if request.headers().get_all(CONTENT_LENGTH).iter().count() > 1 {
        return invalid("send one Content-Length");
    }
    matching::authority(request.version(), request.uri(), request.headers())
        .err()
        .and_then(|error| invalid(&error.to_string()))
}

/// The answer to what can't be handed on. Nothing after it on the connection can be trusted.
fn refused(problem: Problem, version: Version) -> Response<Body> {
    let mut response = problem.into_response().map(whole);
    if version < Version::HTTP_2 {
        let close = HeaderValue::from_static("close");
        response.headers_mut().insert(CONNECTION, close);
    }
    response
}

fn overworked() -> Problem {
    Problem::new(
        Kind::Overloaded,
        "Nothing was sent: requests that this connection gave up are still at work. Wait for them.",
    )
    .retry_after(RETRY_AFTER)
}

fn whole(body: Bytes) -> Body {
    Full::new(body).map_err(BoxError::from).boxed_unsync()
}

/// How many requests a connection has open, and since when none.
#[derive(Clone, Debug)]
struct Activity(Arc<Mutex<Requests>>);

#[derive(Debug)]
struct Requests {
    open: usize,
    /// When the last one ended. `None`: there was none yet.
    ended: Option<Instant>,
    accepted: Instant,
}

impl Activity {
    fn new() -> Self {
        Self(Arc::new(Mutex::new(Requests {
            open: 0,
            ended: None,
            accepted: Instant::now(),
        })))
    }

    fn requests(&self) -> MutexGuard<'_, Requests> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Until when the connection may stay without a request. `None`: it has one.
    fn idle_until(&self, first: Duration) -> Option<Instant> {
        let requests = self.requests();
        match (requests.open, requests.ended) {
            (0, None) => Some(requests.accepted + first),
            (0, Some(ended)) => Some(ended + IDLE_TIMEOUT),
            _ => None,
        }
    }
}

/// One open request, until its answer was taken or given up.
struct Busy(Activity);

impl Busy {
    fn begin(activity: &Activity) -> Self {
        activity.requests().open += 1;
        Self(activity.clone())
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let mut requests = self.0.requests();
        requests.open -= 1;
        requests.ended = Some(Instant::now());
    }
}

/// An answer's body; its end is the end of the request.
struct Answer {
    body: Body,
    _busy: Busy,
}

impl http_body::Body for Answer {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
