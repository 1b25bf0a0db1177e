//! One request and its answer on an HTTP/1.1 connection.

use std::error::Error;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, TRANSFER_ENCODING};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};
use http_body::{Body as _, Frame, SizeHint};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::client::conn::TrySendError;
use hyper::client::conn::http1::{Builder, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::time::{Instant, timeout};
use tokio_util::task::AbortOnDropHandle;

use super::connect::Io;
use super::socket::Meter;
use super::target::{Call, Flight, Target, Verdict};
use super::{
    ANSWER_HEADER_BYTES_MAX, ANSWER_HEADERS_MAX, CloseDelimited, Failure, OutBody, SendError,
    SendErrorKind, Sent,
};
use crate::body::{Body, BoxError};
use crate::telemetry::Chain;

/// How long a connection may take to be ready once its answer was read. It is as good as at once,
/// unless the upstream answered without reading the whole request.
const READY_TIMEOUT: Duration = Duration::from_millis(50);

/// A connection. Dropping it closes it.
pub(super) struct Http1 {
    sender: SendRequest<Body>,
    meter: Arc<Meter>,
    opened: Instant,
    task: AbortOnDropHandle<()>,
}

impl Http1 {
    pub(super) async fn new<T: Io>(
        io: T,
        meter: Arc<Meter>,
        target: &Target,
    ) -> Result<Self, SendError> {
        let mut builder = Builder::new();
        builder
            .max_headers(ANSWER_HEADERS_MAX)
            .max_header_size(ANSWER_HEADER_BYTES_MAX)
            .max_buf_size(ANSWER_HEADER_BYTES_MAX);
        let made = builder.handshake(TokioIo::new(io)).await;
        let (sender, connection) =
            made.map_err(|error| SendError::unsent(SendErrorKind::Connect).because(error))?;
        let task = target.tracker.spawn(async move {
            if let Err(error) = connection.with_upgrades().await {
                tracing::debug!(error = %Chain(&error), "an upstream connection broke");
            }
        });
        Ok(Self {
            sender,
            meter,
            opened: Instant::now(),
            task: AbortOnDropHandle::new(task),
        })
    }

    pub(super) fn is_open(&self) -> bool {
        !self.sender.is_closed()
    }

    pub(super) fn opened(&self) -> Instant {
        self.opened
    }

    /// Waits until it takes a request. `None`: it won't.
    pub(super) async fn ready(mut self) -> Option<Self> {
        let ready = timeout(READY_TIMEOUT, self.sender.ready()).await;
        matches!(ready, Ok(Ok(()))).then_some(self)
    }

    /// Sends a request. The connection comes back with the answer unless it has ended.
    async fn send(
        mut self,
        request: Request<Body>,
    ) -> Result<Answered, TrySendError<Request<Body>>> {
        let mut answered = pin!(self.sender.try_send_request(request));
        tokio::select! {
            biased;
            response = &mut answered => return Ok((response?, Some(self))),
            _ = &mut self.task => {}
        }
        // A request that is handed over at the moment in which the connection ends lies in their
        // channel, and comes back only once nobody can send on it any more.
        drop(self.sender);
        Ok((answered.await?, None))
    }
}

type Answered = (Response<Incoming>, Option<Http1>);

pub(super) async fn exchange(call: Call<'_>, connection: Http1) -> Result<Response<Body>, Failure> {
    let target = call.flight.target();
    let (authority, keep) = (&target.authority, target.config.preserve_host);
    let spare = call.body.spare();
    let request = call.head.http1(authority, keep, call.body);
    let method = request.method().clone();
    let meter = connection.meter.clone();
    meter.begin(call.progress);
    match connection.send(request).await {
        Ok((response, connection)) => answer(
            response,
            &method,
            call.head.is_upgrade(),
            connection,
            call.flight,
        ),
        Err(mut error) => {
            // Given back, it was never serialized; else what counts is what was written.
            let returned = error.take_message().map(Request::into_body);
            let untouched = returned.is_some() || meter.seal() == 0;
            let error = error.into_error();
            let kind = kind(&error);
            if !untouched {
                return Err(unknown(kind, error));
            }
            call.progress.take_back();
            let abandoned = call.progress.is_abandoned();
            let kind = if abandoned {
                SendErrorKind::Abandoned
            } else {
                kind
            };
            let by_us = abandoned || kind == SendErrorKind::RequestBody;
            let verdict = if call.new && !by_us {
                Verdict::Unreachable
            } else {
                Verdict::Tried
            };
            Err(Failure {
                error: SendError::unsent(kind).because(error),
                body: spare.or(returned.map(OutBody::Stream)),
                verdict,
            })
        }
    }
}

fn unknown(kind: SendErrorKind, source: impl Into<BoxError>) -> Failure {
    let mut error = SendError::unsent(kind).because(source);
    error.sent = Sent::Maybe;
    Failure {
        error,
        body: None,
        verdict: Verdict::Tried,
    }
}

fn kind(error: &hyper::Error) -> SendErrorKind {
    if error.is_user() {
        return SendErrorKind::RequestBody;
    }
    if error.is_parse() {
        return SendErrorKind::BadResponse;
    }
    let mut source = error.source();
    while let Some(cause) = source {
        if cause.is::<io::Error>() {
            return SendErrorKind::Reset;
        }
        source = cause.source();
    }
    SendErrorKind::Closed
}

fn answer(
    response: Response<Incoming>,
    method: &Method,
    upgrade: bool,
    connection: Option<Http1>,
    flight: Flight,
) -> Result<Response<Body>, Failure> {
    let (mut parts, incoming) = response.into_parts();
    if parts.status == StatusCode::SWITCHING_PROTOCOLS {
        if !upgrade {
            let reason = "it switches protocols without being asked to";
            return Err(unknown(SendErrorKind::BadResponse, reason));
        }
        // The connection now belongs to whoever takes the upgrade.
        if let Some(connection) = connection {
            connection.task.detach();
        }
        let body = incoming.map_err(BoxError::from).boxed_unsync();
        return Ok(Response::from_parts(parts, body));
    }
    let framing = framing(&mut parts.headers, parts.status, method);
    let framing = framing.map_err(|reason| unknown(SendErrorKind::BadResponse, reason))?;
    if framing == Framing::UntilClose {
        parts.extensions.insert(CloseDelimited);
    }
    let mut body = Http1Body {
        incoming,
        connection,
        reusable: framing == Framing::Marked,
        flight,
    };
    if body.incoming.is_end_stream() {
        body.ended();
    }
    Ok(Response::from_parts(parts, body.boxed_unsync()))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Framing {
    /// The body's end is marked.
    Marked,
    /// It is, but by two rules at once: the connection is not to be trusted any further.
    Doubtful,
    /// The body ends with the connection.
    UntilClose,
}

/// How an answer's body ends (RFC 9112 section 6.3), by the rules that hyper reads it by, and
/// stricter where two readers could differ.
fn framing(
    headers: &mut HeaderMap,
    status: StatusCode,
    method: &Method,
) -> Result<Framing, &'static str> {
    let codings = headers.get_all(TRANSFER_ENCODING).iter().count();
    let coding = headers.get(TRANSFER_ENCODING).map(HeaderValue::as_bytes);
    let coded = coding.map(|coding| coding.trim_ascii().eq_ignore_ascii_case(b"chunked"));
    if coded == Some(false) || codings > 1 {
        return Err("it uses a transfer coding that was not offered");
    }
    let length = headers.get_all(CONTENT_LENGTH).iter().count();
    let no_body = method == Method::HEAD
        || status == StatusCode::NO_CONTENT
        || status == StatusCode::NOT_MODIFIED;
    match (coded.is_some(), length) {
        (true, 1..) => {
            headers.remove(CONTENT_LENGTH);
            Ok(Framing::Doubtful)
        }
        (true, 0) => Ok(Framing::Marked),
        (false, 0) if no_body => Ok(Framing::Marked),
        (false, 0) => Ok(Framing::UntilClose),
        (false, _) => {
            single_length(headers);
            Ok(Framing::Marked)
        }
    }
}

/// Makes equal lengths one; hyper has refused different ones, save where there is no body.
fn single_length(headers: &mut HeaderMap) {
    let lines = headers.get_all(CONTENT_LENGTH).iter();
    let told: Vec<&[u8]> = lines
        .flat_map(|line| line.as_bytes().split(|byte| *byte == b','))
        .map(<[u8]>::trim_ascii)
        .collect();
    let first = told.first().copied().unwrap_or_default();
    let sound = !first.is_empty() && first.iter().all(u8::is_ascii_digit);
    let length = HeaderValue::from_bytes(first).ok();
    match length.filter(|_| sound && told.iter().all(|length| *length == first)) {
        Some(length) => drop(headers.insert(CONTENT_LENGTH, length)),
        None => drop(headers.remove(CONTENT_LENGTH)),
    }
}

/// An answer's body, which gives the connection back at its clean end.
struct Http1Body {
    incoming: Incoming,
    connection: Option<Http1>,
    reusable: bool,
    flight: Flight,
}

impl Http1Body {
    fn ended(&mut self) {
        let connection = self.connection.take().filter(|_| self.reusable);
        if let Some(connection) = connection {
            self.flight.target().put_back(connection);
        }
    }
}

impl http_body::Body for Http1Body {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let frame = ready!(Pin::new(&mut self.incoming).poll_frame(context));
        match &frame {
            Some(Err(_)) => self.connection = None,
            // Whoever knows the length may not ask again after the last piece.
            Some(Ok(_)) if !self.incoming.is_end_stream() => {}
            Some(Ok(_)) | None => self.ended(),
        }
        Poll::Ready(frame.map(|frame| frame.map_err(BoxError::from)))
    }

    fn is_end_stream(&self) -> bool {
        self.incoming.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.incoming.size_hint()
    }
}
