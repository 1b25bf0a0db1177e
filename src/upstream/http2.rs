//! One request and its answer on a stream of an HTTP/2 connection (RFC 9113).

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures_util::FutureExt;
use h2::client::{Builder, SendRequest};
use h2::{Ping, Reason, RecvStream, SendStream};
use http::header::CONTENT_LENGTH;
use http::{Method, Response};
use http_body::{Frame, SizeHint};
use http_body_util::BodyExt;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::connect::Io;
use super::socket::Meter;
use super::target::{Call, Flight, Target, Verdict};
use super::{
    ANSWER_HEADER_BYTES_MAX, ANSWER_HEADERS_MAX, Failure, OutBody, SendError, SendErrorKind, Sent,
};
use crate::body::{Body, BoxError};
use crate::telemetry::Chain;

/// Streams at a time on one connection, if the upstream allows more.
const STREAMS_MAX: usize = 256;
/// Bytes of one answer that the upstream may send ahead.
const STREAM_WINDOW: u32 = 1024 * 1024;
/// Bytes of all answers of a connection that the upstream may send ahead.
const CONNECTION_WINDOW: u32 = 4 * 1024 * 1024;

/// A connection, shared by its streams. Dropping the last holder closes it.
pub(super) struct Http2 {
    sender: SendRequest<Bytes>,
    meter: Arc<Meter>,
    opened: Instant,
    usage: Mutex<Usage>,
    /// A call was given up during which nothing at all came, for longer than connecting may
    /// take: the other side may be gone.
    silent: AtomicBool,
    task: AbortOnDropHandle<()>,
}

struct Usage {
    streams: usize,
    since: Instant,
}

/// A place for one stream.
pub(super) struct StreamLease {
    connection: Arc<Http2>,
    target: Arc<Target>,
    since: Instant,
    read_before: u64,
    answered: bool,
}

impl Http2 {
    /// Returns once the upstream has shown that it speaks HTTP/2 and told its settings.
    pub(super) async fn new<T: Io>(
        io: T,
        meter: Arc<Meter>,
        target: &Target,
    ) -> Result<Self, SendError> {
        let failed = |error: h2::Error| SendError::unsent(SendErrorKind::Connect).because(error);
        let mut builder = Builder::new();
        builder
            .enable_push(false)
            .initial_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_header_list_size(u32::try_from(ANSWER_HEADER_BYTES_MAX).unwrap_or(u32::MAX));
        let (sender, mut connection) = builder.handshake(io).await.map_err(failed)?;
        let ping = connection.ping_pong();
        let task = target.tracker.spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(error = %Chain(&error), "an upstream connection broke");
            }
        });
        let task = AbortOnDropHandle::new(task);
        if let Some(mut ping) = ping {
            ping.ping(Ping::opaque()).await.map_err(failed)?;
        }
        let now = Instant::now();
        let usage = Usage {
            streams: 0,
            since: now,
        };
        Ok(Self {
            sender,
            meter,
            opened: now,
            usage: Mutex::new(usage),
            silent: AtomicBool::new(false),
            task,
        })
    }

    /// Whether it takes streams: after GOAWAY, for one, it does not.
    pub(super) fn is_open(&self) -> bool {
        let refuses = || matches!(self.sender.clone().ready().now_or_never(), Some(Err(_)));
        !self.silent.load(Ordering::Relaxed) && !self.task.is_finished() && !refuses()
    }

    pub(super) fn opened(&self) -> Instant {
        self.opened
    }

    /// Since when it has had no stream.
    pub(super) fn idle_since(&self) -> Option<Instant> {
        let usage = self.usage();
        (usage.streams == 0).then_some(usage.since)
    }

    /// A place for a stream, if the upstream allows one more.
    pub(super) fn lease(self: &Arc<Self>, target: &Arc<Target>) -> Option<StreamLease> {
        let allowed = self.sender.current_max_send_streams().min(STREAMS_MAX);
        let mut usage = self.usage();
        if usage.streams >= allowed {
            return None;
        }
        usage.streams += 1;
        Some(StreamLease {
            connection: self.clone(),
            target: target.clone(),
            since: Instant::now(),
            read_before: self.meter.read(),
            answered: false,
        })
    }

    fn usage(&self) -> MutexGuard<'_, Usage> {
        self.usage.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl StreamLease {
    pub(super) fn connection(&self) -> &Arc<Http2> {
        &self.connection
    }
}

impl Drop for StreamLease {
    fn drop(&mut self) {
        let connection = &self.connection;
        let long = self.since.elapsed() >= self.target.config.connect_timeout;
        if long && !self.answered && connection.meter.read() == self.read_before {
            connection.silent.store(true, Ordering::Relaxed);
        }
        let mut usage = connection.usage();
        usage.streams -= 1;
        usage.since = Instant::now();
        drop(usage);
        self.target.stream_ended();
    }
}

pub(super) async fn exchange(
    call: Call<'_>,
    lease: StreamLease,
) -> Result<Response<Body>, Failure> {
    let target = call.flight.target();
    let (authority, keep) = (&target.authority, target.config.preserve_host);
    let request = call
        .head
        .http2(target.scheme.clone(), authority, keep, &call.body);
    let Some(request) = request else {
        return Err(unsent(SendError::unsent(SendErrorKind::Unsendable), None));
    };
    let head_request = request.method() == Method::HEAD;
    let connection = lease.connection.clone();
    let written_before = connection.meter.written();
    let opened = match connection.sender.clone().ready().await {
        // From here on it can't be told whether a byte is of this stream or of another one.
        Ok(mut sender) if call.progress.claim() => {
            sender.send_request(request, call.body.is_empty())
        }
        Ok(_) => {
            return Err(unsent(SendError::unsent(SendErrorKind::Abandoned), None));
        }
        Err(error) => Err(error),
    };
    let (response, stream) = match opened {
        Ok(opened) => opened,
        Err(error) => {
            // The stream was not created.
            call.progress.take_back();
            let error = SendError::unsent(kind(&error)).because(error);
            return Err(unsent(error, Some(call.body)));
        }
    };
    let spare = call.body.spare();
    let upload = upload(stream, call.body, target);
    match response.await {
        Ok(response) => answer(response, head_request, lease, upload, call.flight),
        Err(error) => {
            let untouched = is_unprocessed(&error)
                || (error.is_io() && connection.meter.seal() == written_before);
            let mut told = SendError::unsent(kind(&error)).because(error);
            if untouched {
                call.progress.take_back();
                return Err(unsent(told, spare));
            }
            told.sent = Sent::Maybe;
            Err(unsent(told, None))
        }
    }
}

fn unsent(error: SendError, body: Option<OutBody>) -> Failure {
    Failure {
        error,
        body,
        verdict: Verdict::Tried,
    }
}

/// Whether the upstream says that it has not processed the stream (RFC 9113 section 8.7). An
/// answer ends in a remote GOAWAY only for streams above the last one that it names.
fn is_unprocessed(error: &h2::Error) -> bool {
    error.is_remote() && (error.is_go_away() || error.reason() == Some(Reason::REFUSED_STREAM))
}

fn kind(error: &h2::Error) -> SendErrorKind {
    if error.is_io() || error.is_go_away() && error.is_remote() {
        return SendErrorKind::Closed;
    }
    if error.is_library() {
        return SendErrorKind::BadResponse;
    }
    match error.is_reset() {
        true if error.is_remote() => SendErrorKind::Reset,
        // Reset by our own upload.
        true => SendErrorKind::RequestBody,
        false => SendErrorKind::Unsendable,
    }
}

/// Sends the body, beside the wait for the answer. A whole one is left to the connection.
fn upload(
    mut stream: SendStream<Bytes>,
    body: OutBody,
    target: &Target,
) -> Option<AbortOnDropHandle<()>> {
    match body {
        OutBody::Full(bytes) => {
            if !bytes.is_empty() {
                // If this fails the answer fails too, and tells why.
                let _ = stream.send_data(bytes, true);
            }
            None
        }
        OutBody::Stream(body) if http_body::Body::is_end_stream(&body) => None,
        OutBody::Stream(body) => {
            let task = target.tracker.spawn(async move {
                if pump(&mut stream, body).await.is_none() {
                    stream.send_reset(Reason::CANCEL);
                }
            });
            Some(AbortOnDropHandle::new(task))
        }
    }
}

/// `None`: the body broke off, or nobody wants the rest.
async fn pump(stream: &mut SendStream<Bytes>, mut body: Body) -> Option<()> {
    while let Some(frame) = body.frame().await {
        match frame.ok()?.into_data() {
            Ok(mut data) => {
                while !data.is_empty() {
                    stream.reserve_capacity(data.len());
                    let capacity = std::future::poll_fn(|context| stream.poll_capacity(context));
                    let capacity = capacity.await?.ok()?;
                    let piece = data.split_to(capacity.min(data.len()));
                    stream.send_data(piece, false).ok()?;
                }
            }
            Err(frame) => {
                let trailers = frame.into_trailers().unwrap_or_default();
                return stream.send_trailers(trailers).ok();
            }
        }
    }
    stream.send_data(Bytes::new(), true).ok()
}

fn answer(
    response: Response<RecvStream>,
    head_request: bool,
    mut lease: StreamLease,
    upload: Option<AbortOnDropHandle<()>>,
    flight: Flight,
) -> Result<Response<Body>, Failure> {
    lease.answered = true;
    let (parts, stream) = response.into_parts();
    if parts.headers.len() > ANSWER_HEADERS_MAX {
        let mut error = SendError::unsent(SendErrorKind::BadResponse);
        error.sent = Sent::Maybe;
        return Err(unsent(
            error.because("its answer has too many headers"),
            None,
        ));
    }
    // The `h2` crate has checked it, and checks that the body is as long.
    let length = parts.headers.get(CONTENT_LENGTH);
    let length = length.and_then(|length| length.to_str().ok()?.parse().ok());
    let body = Http2Body {
        stream,
        remaining: length.filter(|_| !head_request),
        data_ended: false,
        _upload: upload,
        _lease: lease,
        _flight: flight,
    };
    Ok(Response::from_parts(parts, body.boxed_unsync()))
}

/// An answer's body. Dropping it early resets the stream.
struct Http2Body {
    stream: RecvStream,
    /// Bytes still to come, if that is known.
    remaining: Option<u64>,
    data_ended: bool,
    _upload: Option<AbortOnDropHandle<()>>,
    _lease: StreamLease,
    _flight: Flight,
}

impl http_body::Body for Http2Body {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if !self.data_ended {
            match ready!(self.stream.poll_data(context)) {
                Some(Ok(data)) => {
                    let length = data.len();
                    self.remaining = self
                        .remaining
                        .map(|left| left.saturating_sub(length as u64));
                    self.stream.flow_control().release_capacity(length)?;
                    return Poll::Ready(Some(Ok(Frame::data(data))));
                }
                Some(Err(error)) => return Poll::Ready(Some(Err(error.into()))),
                None => self.data_ended = true,
            }
        }
        let trailers = ready!(self.stream.poll_trailers(context))?;
        Poll::Ready(trailers.map(|trailers| Ok(Frame::trailers(trailers))))
    }

    fn is_end_stream(&self) -> bool {
        self.stream.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        match self.remaining {
            _ if self.is_end_stream() => SizeHint::with_exact(0),
            Some(remaining) => SizeHint::with_exact(remaining),
            None => SizeHint::default(),
        }
    }
}
