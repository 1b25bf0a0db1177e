//! What is not guarded: requests stream to the upstream and answers stream back, with nothing held
//! but what is on its way, and upgraded connections are joined end to end.
//!
//! It knows no keys; `Idempotency-Key` is a header like any other here. When a client is gone its
//! call is given up, and when an answer breaks off so does the client's: a cut body never looks
//! whole.

use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::header::{CONNECTION, UPGRADE};
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, request};
use http_body::{Frame, SizeHint};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::forward::{self, Forwarding};
use super::listener::Peer;
use super::{Body, BoxError, matching, problem_response};
use crate::domain::policy::Policy;
use crate::problem::{Kind, Problem, RETRY_AFTER};
use crate::telemetry::Chain;
use crate::upstream::{OutBody, SendError, SendErrorKind, SendProgress, Sent, Upstreams};

const NOT_SENT: &str = "The request was not sent. Try again later.";

/// Passes requests through.
#[derive(Clone)]
pub struct Passthrough {
    upstreams: Upstreams,
    forwarding: Arc<Forwarding>,
    tunnels: TaskTracker,
    hard: CancellationToken,
}

impl Passthrough {
    /// `tunnels` takes a task for each upgraded connection; `hard` cuts them.
    pub fn new(
        upstreams: Upstreams,
        forwarding: Arc<Forwarding>,
        tunnels: TaskTracker,
        hard: CancellationToken,
    ) -> Self {
        Self {
            upstreams,
            forwarding,
            tunnels,
            hard,
        }
    }

    /// Sends the request on and returns the answer, or the problem in its place.
    ///
    /// `policy.timeout` is how long neither side may make progress before the answer's headers
    /// are there: a long upload is not cut while it moves. Once the headers are there, no time
    /// bounds the answer.
    pub async fn answer(
        &self,
        request: Request<Incoming>,
        peer: Peer,
        policy: &Policy,
    ) -> Response<Body> {
        let sent = self.send(request, &peer, policy).await;
        let (response, client) = match sent {
            Ok(answered) => answered,
            Err(problem) => return problem_response(problem),
        };
        let (mut head, body) = response.into_parts();
        if head.status == StatusCode::SWITCHING_PROTOCOLS {
            let server = head.extensions.remove::<OnUpgrade>();
            if let (Some(client), Some(server)) = (client, server) {
                self.join(client, server, peer);
            }
            let protocol = head.headers.get(UPGRADE).cloned();
            forward::response(&mut head);
            ask_to_upgrade(&mut head.headers, protocol);
        } else {
            forward::response(&mut head);
        }
        Response::from_parts(head, body)
    }

    /// Likewise for a request whose body is here already.
    pub async fn answer_whole(
        &self,
        request: Request<Bytes>,
        peer: &Peer,
        policy: &Policy,
    ) -> Response<Body> {
        let (head, body) = request.into_parts();
        let answered = match self.outgoing(head, peer) {
            Ok(head) => {
                let request = Request::from_parts(head, OutBody::Full(body));
                self.call(request, &Pace::new(), policy).await
            }
            Err(problem) => Err(problem),
        };
        let (mut head, body) = match answered {
            Ok(response) => response.into_parts(),
            Err(problem) => return problem_response(problem),
        };
        forward::response(&mut head);
        Response::from_parts(head, body)
    }

    async fn send(
        &self,
        mut request: Request<Incoming>,
        peer: &Peer,
        policy: &Policy,
    ) -> Result<(Response<Body>, Option<OnUpgrade>), Problem> {
        let upgrade = matching::wants_upgrade(request.version(), request.headers())
            .then(|| hyper::upgrade::on(&mut request));
        let protocol = request.headers().get(UPGRADE).cloned();
        let (head, body) = request.into_parts();
        let mut head = self.outgoing(head, peer)?;
        if upgrade.is_some() {
            ask_to_upgrade(&mut head.headers, protocol);
        }
        let pace = Pace::new();
        let body = if http_body::Body::is_end_stream(&body) {
            OutBody::Full(Bytes::new())
        } else {
            let pace = pace.clone();
            OutBody::Stream(Upload { body, pace }.boxed_unsync())
        };
        let request = Request::from_parts(head, body);
        let response = self.call(request, &pace, policy).await?;
        Ok((response, upgrade))
    }

    /// The request's head as the upstream is to see it.
    fn outgoing(&self, head: request::Parts, peer: &Peer) -> Result<request::Parts, Problem> {
        if self.forwarding.is_loop(&head.headers) {
            return Err(forward::loop_problem());
        }
        let authority = matching::authority(head.version, &head.uri, &head.headers)?;
        Ok(self.forwarding.request(head, authority.as_ref(), peer))
    }

    async fn call(
        &self,
        request: Request<OutBody>,
        pace: &Pace,
        policy: &Policy,
    ) -> Result<Response<Body>, Problem> {
        let progress = SendProgress::new();
        let mut call = pin!(self.upstreams.send(&policy.pool, request, &progress));
        loop {
            let deadline = pace.last() + policy.timeout;
            match tokio::time::timeout_at(deadline, call.as_mut()).await {
                Ok(answered) => {
                    return answered.map_err(|error| {
                        tracing::warn!(error = %Chain(&error), pool = %policy.pool, "a call failed");
                        problem(&error)
                    });
                }
                Err(_) if pace.last() + policy.timeout > deadline => {}
                Err(_) => {
                    tracing::warn!(pool = %policy.pool, "a call took longer than its timeout");
                    return Err(timed_out(progress.abandon()));
                }
            }
        }
    }

    /// Copies between the two ends of an upgraded connection until both have closed, or one broke.
    fn join(&self, client: OnUpgrade, server: OnUpgrade, peer: Peer) {
        let copying = async move {
            // All of it, not its address alone: it holds the connection's slot.
            let peer = peer;
            let (client, server) = match tokio::try_join!(client, server) {
                Ok(both) => both,
                Err(error) => {
                    tracing::debug!(error = %Chain(&error), peer = %peer.addr, "an upgrade failed");
                    return;
                }
            };
            let (mut client, mut server) = (TokioIo::new(client), TokioIo::new(server));
            let copied = tokio::io::copy_bidirectional(&mut client, &mut server).await;
            if let Err(error) = copied {
                tracing::debug!(%error, peer = %peer.addr, "an upgraded connection broke");
            }
        };
        let bounded = self.hard.clone().run_until_cancelled_owned(copying);
        self.tunnels.spawn(bounded);
    }
}

/// Puts back what is for one hop and yet asked of the next one too (RFC 9110 section 7.8).
fn ask_to_upgrade(headers: &mut HeaderMap, protocol: Option<HeaderValue>) {
    if let Some(protocol) = protocol {
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(UPGRADE, protocol);
    }
}

/// What the client is told of a call that brought no answer.
fn problem(error: &SendError) -> Problem {
    use SendErrorKind as Failed;
    let kind = match (error.kind, error.sent) {
        (Failed::RequestBody, _) => {
            return Problem::new(Kind::RequestInvalid, "The body broke off. Send it whole.");
        }
        (Failed::Unsendable, _) => {
            return Problem::new(
                Kind::RequestInvalid,
                "The service behind the gateway can't be asked this.",
            );
        }
        (_, Sent::Maybe) => {
            return Problem::new(
                Kind::UpstreamBroken,
                "The service broke off before it answered; it may have acted on the request.",
            );
        }
        (Failed::ConnectTimeout, Sent::No) => Kind::UpstreamTimeout,
        (Failed::NoRoom | Failed::NoTarget, Sent::No) => Kind::UpstreamUnavailable,
        (_, Sent::No) => Kind::UpstreamUnreachable,
    };
    Problem::new(kind, NOT_SENT).retry_after(RETRY_AFTER)
}

fn timed_out(sent: Sent) -> Problem {
    match sent {
        Sent::No => Problem::new(Kind::UpstreamTimeout, NOT_SENT).retry_after(RETRY_AFTER),
        Sent::Maybe => Problem::new(
            Kind::OutcomeUnknownTimeout,
            "The service did not answer in time; it may have acted on the request.",
        ),
    }
}

/// When a request's body last moved.
#[derive(Clone)]
struct Pace(Arc<Mutex<Instant>>);

impl Pace {
    fn new() -> Self {
        Self(Arc::new(Mutex::new(Instant::now())))
    }

    fn last(&self) -> Instant {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn moved(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }
}

/// A client's body on its way to the upstream.
struct Upload {
    body: Incoming,
    pace: Pace,
}

impl http_body::Body for Upload {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        self.pace.moved();
        Poll::Ready(frame.map(|frame| frame.map_err(BoxError::from)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
