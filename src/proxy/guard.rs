//! The guarded request, phase by phase: key, tenant, body, fingerprint, gate, then either an
//! answer or the ownership of the call.
//!
//! From the gate on everything runs in a task of its own that a client's disconnect can't cancel;
//! the connection only listens for the answer. Nothing of an upstream's answer leaves before its
//! decision is committed, unless the store is gone.

mod acceptor;
mod owner;

use std::sync::Arc;
use std::time::Duration;

use http::request::Parts;
use http::uri::Authority;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, Uri};
use hyper::body::Incoming;
use tokio::sync::oneshot;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::Body;
use super::answer::{Answer, Asker, Status};
use super::capture::{self, BodyBudget, Captured};
use super::forward::{self, Forwarding};
use super::listener::Peer;
use super::matching;
use super::passthrough::Passthrough;
use super::prefer;
use super::tenant::{Scopes, Tenants};
use super::watch::Watch;
use crate::domain::fingerprint::{self, RequestDigest, RequestParts};
use crate::domain::key::{IdempotencyKey, KeyError};
use crate::domain::millis;
use crate::domain::policy::{KeySource, Mode, Policy};
use crate::domain::scope::{RecordKey, TenantScope};
use crate::ids;
use crate::problem::{Kind, Problem};
use crate::routing::gate::{Admission, Ask, Denial, Gate};
use crate::routing::settle::Outcome;
use crate::store::Store;
use crate::telemetry::metric;
use crate::upstream::Upstreams;

/// How often a permit whose lease ended before anything was sent is exchanged for a new one.
const PERMITS_MAX: usize = 3;

/// Guards requests; cheap to clone.
#[derive(Clone)]
pub struct Guard(Arc<GuardParts>);

/// Everything that guarding needs.
pub struct GuardParts {
    /// Decides.
    pub gate: Gate,
    /// Calls.
    pub upstreams: Upstreams,
    /// Changes headers between the hops.
    pub forwarding: Arc<Forwarding>,
    /// Forwards what opts out.
    pub passthrough: Passthrough,
    /// Tells whose a request is.
    pub tenants: Arc<Tenants>,
    /// Shows the runs of accepted requests.
    pub store: Arc<dyn Store>,
    /// Waits for them.
    pub watch: Watch,
    /// Room for request bodies.
    pub budget: BodyBudget,
    /// How long a client may take to send a body.
    pub body_timeout: Duration,
    /// Waits for tasks at shutdown.
    pub tracker: TaskTracker,
    /// Cancelled when a shutdown's time is nearly over: owners must settle now.
    pub cutoff: CancellationToken,
}

/// A guarded request, whole and ready to be sent.
struct Guarded {
    ask: Ask,
    parts: Parts,
    authority: Option<Authority>,
    body: Captured,
    peer: Peer,
    asker: Asker,
    /// The key was made here, since the request came without one.
    key_is_made: bool,
    /// How long the client wants to be waited for, if it says so.
    run_wait: Option<Duration>,
}

impl Guarded {
    /// Whether the key stands in this header of the request, as its client wrote it.
    fn sent_as_is(&self, name: &HeaderName) -> bool {
        let source = &self.ask.policy.key_source;
        !self.key_is_made && matches!(source, KeySource::Header(header) if header == name)
    }

    fn denied(&self, denial: Denial) -> Answer {
        Answer::denied(denial, &self.ask.key, self.ask.policy.lease)
    }
}

impl Guard {
    /// Puts it together.
    #[must_use]
    pub fn new(parts: GuardParts) -> Self {
        Self(Arc::new(parts))
    }

    /// Answers a request that a route guards.
    pub async fn handle(
        &self,
        policy: &Arc<Policy>,
        request: Request<Incoming>,
        peer: Peer,
    ) -> Response<Body> {
        let asker = Asker::of(request.headers());
        let mut line = LogLine::new(policy, &request);
        let gone = CancellationToken::new();
        // Dropped when the client goes away.
        let _present = gone.clone().drop_guard();
        let answer = match self.prepare(policy, request, peer, &asker, gone).await {
            Ok(Prepared::Guarded(guarded)) => {
                line.key = Some(guarded.ask.key.clone());
                self.detach(*guarded, line).await
            }
            Ok(Prepared::OptedOut(response)) => return response,
            Err(refused) => {
                line.write(&refused);
                refused
            }
        };
        answer.finish(&asker)
    }

    /// A problem that stands before any route or record, for a request that carries a key.
    #[must_use]
    pub fn refuse(problem: Problem, headers: &HeaderMap) -> Response<Body> {
        refused(problem).finish(&Asker::of(headers))
    }

    /// Everything before the record is looked up: key, tenant, size, fingerprint, in this order.
    async fn prepare(
        &self,
        policy: &Arc<Policy>,
        request: Request<Incoming>,
        peer: Peer,
        asker: &Asker,
        gone: CancellationToken,
    ) -> Result<Prepared, Answer> {
        let mut key = match &policy.key_source {
            KeySource::Header(name) => {
                let lines = request.headers().get_all(name).iter();
                let lines = lines.map(HeaderValue::as_bytes);
                let key = IdempotencyKey::from_header_lines(lines).map_err(key_invalid)?;
                if key.is_none() && (policy.required || policy.mode == Mode::Proxy) {
                    return self.opted_out(policy, request, peer).await;
                }
                key
            }
            KeySource::Body(_) => None,
        };
        let key_header = match &policy.key_source {
            KeySource::Header(name) => Some(name),
            KeySource::Body(_) => None,
        };
        let depended_on = [key_header, self.0.tenants.header()];
        if let Some(name) = forward::nominates_protected(request.headers(), depended_on) {
            return Err(request_invalid(format!(
                "Connection names {name}, which must reach the service. Send it without."
            )));
        }
        if self.0.forwarding.is_loop(request.headers()) {
            return Err(refused(forward::loop_problem()));
        }
        let scopes = self.0.tenants.scopes(request.headers());
        let scopes = scopes.ok_or_else(tenant_missing)?;
        let (parts, body) = request.into_parts();
        let authority = matching::authority(parts.version, &parts.uri, &parts.headers)
            .map_err(|error| refused(error.into()))?;
        let limit = policy.body_bytes_max;
        let body = capture::capture(body, limit, &self.0.budget, self.0.body_timeout)
            .await
            .map_err(|error| refused(error.problem()))?;
        if let KeySource::Body(pointer) = &policy.key_source {
            key = body_key(&body, pointer)?;
            if key.is_none() && policy.required {
                return Err(key_missing());
            }
        }
        let key_is_made = key.is_none() && policy.mode == Mode::Accept;
        let Some(key) = key.or_else(|| key_is_made.then(made_key).flatten()) else {
            let request = Request::from_parts(parts, body.bytes().clone());
            let response = self
                .0
                .passthrough
                .answer_whole(request, &peer, policy)
                .await;
            return Ok(Prepared::OptedOut(response));
        };
        let run_wait = prefer::wait(&parts.headers, policy.wait);
        let ask = ask(policy, &scopes, &key, &parts, &body, gone);
        Ok(Prepared::Guarded(Box::new(Guarded {
            ask,
            parts,
            authority,
            body,
            peer,
            asker: asker.clone(),
            key_is_made,
            run_wait,
        })))
    }

    /// No key: as fresh, unless the route requires one.
    async fn opted_out(
        &self,
        policy: &Arc<Policy>,
        request: Request<Incoming>,
        peer: Peer,
    ) -> Result<Prepared, Answer> {
        if policy.required {
            return Err(key_missing());
        }
        let response = self.0.passthrough.answer(request, peer, policy).await;
        Ok(Prepared::OptedOut(response))
    }

    /// Runs the rest in a task of its own and waits for the answer.
    async fn detach(&self, guarded: Guarded, line: LogLine) -> Answer {
        let (key, lease) = (guarded.ask.key.clone(), guarded.ask.policy.lease);
        let (sender, answer) = oneshot::channel();
        let reply = Reply { sender, line };
        let guard = self.clone();
        self.0.tracker.spawn(Box::pin(guard.run(guarded, reply)));
        // The task always replies, unless the process is being torn down.
        let torn_down = |_| Answer::denied(Denial::InProgress(lease), &key, lease);
        answer.await.unwrap_or_else(torn_down)
    }

    async fn run(self, guarded: Guarded, reply: Reply) {
        let mode = guarded.ask.policy.mode;
        for attempt in 0..PERMITS_MAX {
            let answer = match self.0.gate.admit(&guarded.ask).await {
                Admission::Execute(permit) if permit.may_send() => {
                    return match mode {
                        Mode::Proxy => self.own(*permit, guarded, reply).await,
                        Mode::Accept => self.accept(*permit, guarded, reply).await,
                    };
                }
                // The claim took longer than its lease: give it back and claim again.
                Admission::Execute(permit) => {
                    self.0.gate.settle(*permit, Outcome::NotSent).await;
                    continue;
                }
                Admission::Replay { decided, waited } => {
                    let accepted = guarded.into_accepted();
                    let answer = self.replayed(&accepted, &decided, waited).await;
                    return reply.send(answer);
                }
                Admission::Refuse(denial) => guarded.denied(denial),
                // Only for a key of which nothing is known: not one that was owned here just now.
                Admission::Bypass if attempt > 0 || mode == Mode::Accept => {
                    guarded.denied(Denial::StoreUnavailable)
                }
                Admission::Bypass => self.bypass(&guarded).await,
            };
            return reply.send(answer);
        }
        reply.send(guarded.denied(Denial::Contended));
    }

    /// The store is down and the route says `pass`.
    async fn bypass(&self, guarded: &Guarded) -> Answer {
        let request = Request::from_parts(guarded.parts.clone(), guarded.body.bytes().clone());
        let policy = &guarded.ask.policy;
        let passthrough = &self.0.passthrough;
        let response = passthrough
            .answer_whole(request, &guarded.peer, policy)
            .await;
        let (parts, body) = response.into_parts();
        Answer::executed(parts, body, Status::Bypassed, None)
    }
}

/// The way back to the client, and the one log line about what it was told.
struct Reply {
    sender: oneshot::Sender<Answer>,
    line: LogLine,
}

impl Reply {
    /// Sends the answer. The client may be gone; what its answer was is told all the same.
    fn send(self, answer: Answer) {
        self.line.write(&answer);
        let _ = self.sender.send(answer);
    }
}

enum Prepared {
    Guarded(Box<Guarded>),
    OptedOut(Response<Body>),
}

fn ask(
    policy: &Arc<Policy>,
    scopes: &Scopes,
    key: &IdempotencyKey,
    parts: &Parts,
    body: &Captured,
    gone: CancellationToken,
) -> Ask {
    let record = |tenant: &TenantScope| RecordKey {
        tenant: tenant.clone(),
        pool: policy.pool.clone(),
        key: key.clone(),
    };
    let header = |name| parts.headers.get(name).map(HeaderValue::as_bytes);
    let request = RequestParts {
        method: parts.method.as_str(),
        path: parts.uri.path(),
        query: parts.uri.query(),
        content_type: header(http::header::CONTENT_TYPE),
        content_encoding: header(http::header::CONTENT_ENCODING),
        body: body.bytes(),
    };
    Ask {
        key: record(&scopes.current),
        older: scopes.older.iter().map(record).collect(),
        digest: Some(RequestDigest::of(&request, &policy.fingerprint)),
        request_id: None,
        policy: Arc::clone(policy),
        wait_until: Instant::now()
            + prefer::wait(&parts.headers, policy.wait).unwrap_or(policy.wait),
        gone,
    }
}

/// For a request that is accepted without a key: its run needs one all the same.
fn made_key() -> Option<IdempotencyKey> {
    // A UUID's text is visible ASCII and short.
    IdempotencyKey::from_text(&ids::generated_key().to_string())
        .ok()
        .flatten()
}

/// The key that stands in a JSON body. A body that is not JSON has none. A number must be an integer
/// of 64 bits: others are rounded, and two of them could become one key.
#[expect(clippy::result_large_err, reason = "built once, and passed on at once")]
fn body_key(body: &Captured, pointer: &str) -> Result<Option<IdempotencyKey>, Answer> {
    if fingerprint::has_too_many_values(body.bytes()) {
        return Err(request_invalid(format!(
            "Nothing was sent: the key is looked for in the body, and that has more than {} \
             values.",
            fingerprint::JSON_VALUES_MAX
        )));
    }
    let Ok(document) = serde_json::from_slice::<serde_json::Value>(body.bytes()) else {
        return Ok(None);
    };
    let key = match document.pointer(pointer) {
        None | Some(serde_json::Value::Null) => Ok(None),
        Some(serde_json::Value::String(text)) => IdempotencyKey::from_text(text),
        // Others are rounded, so that two keys could become one.
        Some(serde_json::Value::Number(number)) if !number.is_f64() => {
            IdempotencyKey::from_text(&number.to_string())
        }
        Some(_) => Err(KeyError::Malformed),
    };
    key.map_err(key_invalid)
}

fn key_invalid(error: KeyError) -> Answer {
    refused(Problem::new(
        Kind::KeyInvalid,
        format!("Nothing was sent: {error}."),
    ))
}

fn key_missing() -> Answer {
    refused(Problem::new(
        Kind::KeyMissing,
        "This route requires a key. Send Idempotency-Key with a value that is new for each \
         operation and the same for its retries.",
    ))
}

fn tenant_missing() -> Answer {
    refused(Problem::new(
        Kind::TenantMissing,
        "The request does not say whose it is, exactly once and in a valid form. Send the \
         credential or header that this gateway takes the tenant from.",
    ))
}

fn request_invalid(detail: String) -> Answer {
    refused(Problem::new(Kind::RequestInvalid, detail))
}

fn refused(problem: Problem) -> Answer {
    Answer::problem(problem, Status::Refused)
}

/// What the one log line of a guarded request tells. Its parts are shared, not copied.
struct LogLine {
    policy: Arc<Policy>,
    method: Method,
    uri: Uri,
    /// `None`: refused before it was known.
    key: Option<RecordKey>,
    began: Instant,
}

impl LogLine {
    fn new<B>(policy: &Arc<Policy>, request: &Request<B>) -> Self {
        Self {
            policy: Arc::clone(policy),
            method: request.method().clone(),
            uri: request.uri().clone(),
            key: None,
            began: Instant::now(),
        }
    }

    fn write(&self, answer: &Answer) {
        let (pool, status) = (&self.policy.pool, answer.status.word());
        let label = pool.as_str().to_owned();
        metrics::counter!(metric::GUARDED_REQUESTS, "pool" => label, "status" => status)
            .increment(1);
        let decision = answer
            .committed
            .map(|committed| committed.decision_id.to_string());
        tracing::info!(
            %pool,
            tenant = self.key.as_ref().map(|record| record.tenant.as_str()),
            // As strings, which text logs quote: a key may hold spaces and look like more fields.
            key = self.key.as_ref().map(|record| record.key.as_str()),
            method = self.method.as_str(),
            path = self.uri.path(),
            status = answer.response.status().as_u16(),
            idempotency = status,
            decision,
            problem = answer.problem.map(Kind::slug),
            elapsed_ms = millis(self.began.elapsed()),
            "guarded request"
        );
    }
}
