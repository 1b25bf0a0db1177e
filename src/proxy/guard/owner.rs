//! The owner of a call: sends, listens, settles, answers, in this order, whatever the client does.

use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http::{HeaderValue, Request, response};
use http_body::Frame;
use http_body_util::{BodyExt, BodyStream, StreamBody};
use serde_json::Value;
use tokio::time::Instant;
use uuid::Uuid;

use super::super::accept;
use super::super::answer::{Answer, Status};
use super::super::forward;
use super::super::{Body, full};
use super::{Guard, Guarded, Reply};
use crate::domain::message::{IDEMPOTENCY_KEY, Recorded};
use crate::domain::policy::{ForwardKey, Policy};
use crate::domain::run::FollowUp;
use crate::ids;
use crate::problem::{Kind, Problem, RETRY_AFTER};
use crate::routing::permit::Permit;
use crate::routing::settle::{Outcome, Settled};
use crate::telemetry::{Chain, metric};
use crate::upstream::exchange::{self, Exchange};
use crate::upstream::{SendError, SendErrorKind, SendProgress, Sent};

/// What a client is told when its request was sent and no whole answer came back.
const UNKNOWN_DETAIL: &str = "The request was sent and no whole answer came back: the service may \
    have carried it out. Ask again with the same key; it will not be sent twice unless the route \
    says that this is safe.";

/// An answer on its way to its client, and what its record is to be told.
struct Conclusion {
    outcome: Outcome,
    answer: Draft,
}

/// What the client will get once the record is settled.
enum Draft {
    /// The upstream's answer.
    Upstream(Box<response::Parts>, Body),
    /// The gateway's own words.
    Problem(Problem, Status),
}

impl Guard {
    /// Calls the upstream under `permit`, settles and replies.
    pub(super) async fn own(&self, permit: Permit, guarded: Guarded, reply: Reply) {
        let policy = guarded.ask.policy.clone();
        let lease = permit.lease_clock();
        let progress = SendProgress::only_if(move || lease.holds());
        let request = self.outgoing(&permit, &guarded);
        let began = Instant::now();
        let limit = policy.store_body_bytes_max;
        let exchange = {
            let call = exchange::call(&self.0.upstreams, &policy.pool, request, &progress, limit);
            tokio::pin!(call);
            let exchange = self.listen(&permit, call.as_mut(), policy.timeout).await;
            let lingers = !policy.linger.is_zero() && !self.0.cutoff.is_cancelled();
            if exchange.is_none() && progress.abandon() == Sent::Maybe && lingers {
                reply.send(Answer::problem(timed_out(), Status::Unknown));
                let late = self.listen(&permit, call, policy.linger).await;
                return self.settle_late(permit, &guarded, late, began).await;
            }
            exchange
        };
        let exchange = exchange.unwrap_or_else(|| unanswered(&progress));
        observe(&policy, &exchange, began);
        let conclusion = conclude(&guarded, exchange);
        let answer = self.settle(permit, conclusion, &guarded).await;
        reply.send(answer);
    }

    /// Listens for the answer with heartbeats beside, for at most `limit` and not beyond the
    /// shutdown's cut-off.
    async fn listen(
        &self,
        permit: &Permit,
        call: Pin<&mut impl Future<Output = Exchange>>,
        limit: Duration,
    ) -> Option<Exchange> {
        tokio::select! {
            biased;
            exchange = call => Some(exchange),
            () = tokio::time::sleep(limit) => None,
            () = self.0.cutoff.cancelled() => None,
            never = self.0.gate.keep_alive(permit) => match never {},
        }
    }

    /// The client has its 504 already; only the record is still to be told.
    async fn settle_late(
        &self,
        permit: Permit,
        guarded: &Guarded,
        late: Option<Exchange>,
        began: Instant,
    ) {
        let exchange = late.unwrap_or_else(|| Exchange::Broken {
            cause: "no answer came while the owner lingered".into(),
            status: None,
        });
        observe(&guarded.ask.policy, &exchange, began);
        let outcome = match conclude(guarded, exchange).outcome {
            Outcome::Released => Outcome::ReleasedUnseen,
            outcome => outcome,
        };
        self.0.gate.settle(permit, outcome).await;
    }

    async fn settle(&self, permit: Permit, conclusion: Conclusion, guarded: &Guarded) -> Answer {
        let settled = self.0.gate.settle(permit, conclusion.outcome).await;
        match (settled, conclusion.answer) {
            (Settled::Superseded(decided), Draft::Upstream(..)) => {
                let (committed, asker) = (decided.committed, &guarded.asker);
                Answer::told(committed, &decided.recorded, Status::Waited, asker).await
            }
            (Settled::Refused(denial), Draft::Upstream(..)) => guarded.denied(denial),
            (settled, Draft::Upstream(parts, body)) => {
                let (status, committed) = match settled {
                    Settled::Committed(decided) => (Status::Executed, Some(decided.committed)),
                    Settled::Unrecorded => (Status::Unrecorded, None),
                    _ => (Status::Executed, None),
                };
                Answer::executed(*parts, body, status, committed)
            }
            (_, Draft::Problem(problem, status)) => Answer::problem(problem, status),
        }
    }

    /// The request as the upstream gets it.
    pub(super) fn outgoing(&self, permit: &Permit, guarded: &Guarded) -> Request<Bytes> {
        let policy = &guarded.ask.policy;
        let head = guarded.parts.clone();
        let authority = guarded.authority.as_ref();
        let mut parts = self.0.forwarding.request(head, authority, &guarded.peer);
        let headers = &mut parts.headers;
        match policy.forward_key {
            ForwardKey::None => {
                headers.remove(IDEMPOTENCY_KEY);
            }
            ForwardKey::Derived => {
                let secrets = self.0.gate.secrets();
                let id = secrets.forward_key(permit.key(), permit.generation_id());
                headers.insert(IDEMPOTENCY_KEY, uuid_value(id));
            }
            ForwardKey::Verbatim if guarded.sent_as_is(&IDEMPOTENCY_KEY) => {}
            ForwardKey::Verbatim => {
                if let Ok(value) = HeaderValue::from_str(permit.key().key.as_str()) {
                    headers.insert(IDEMPOTENCY_KEY, value);
                }
            }
        }
        Request::from_parts(parts, guarded.body.bytes().clone())
    }
}

/// The time was over before a whole answer was there.
fn unanswered(progress: &SendProgress) -> Exchange {
    match progress.abandon() {
        Sent::No => Exchange::NotSent(SendError::unsent(SendErrorKind::Abandoned)),
        Sent::Maybe => Exchange::Broken {
            cause: Box::new(TimedOut),
            status: None,
        },
    }
}

#[derive(Debug, thiserror::Error)]
#[error("no whole answer came in time")]
struct TimedOut;

fn conclude(guarded: &Guarded, exchange: Exchange) -> Conclusion {
    let policy = &guarded.ask.policy;
    match exchange {
        Exchange::NotSent(error) => Conclusion {
            outcome: Outcome::NotSent,
            answer: Draft::Problem(not_sent(&error), Status::Refused),
        },
        Exchange::Broken { cause, status } => {
            tracing::warn!(
                pool = %policy.pool,
                upstream_status = status.map(|status| status.as_u16()),
                error = %Chain(&*cause),
                "nobody knows whether the upstream ran a request"
            );
            let mut problem = if cause.is::<TimedOut>() {
                timed_out()
            } else {
                broken()
            };
            if let Some(status) = status {
                problem = problem.member("upstream_status", status.as_u16());
            }
            Conclusion {
                outcome: Outcome::Unknown,
                answer: Draft::Problem(problem, Status::Unknown),
            }
        }
        Exchange::Whole(mut parts, bytes) => {
            forward::response(&mut parts);
            let outcome = outcome(guarded, &parts, Some(&bytes));
            Conclusion {
                outcome,
                answer: Draft::Upstream(Box::new(parts), full(bytes)),
            }
        }
        Exchange::Unkept(mut parts, begun, rest) => {
            forward::response(&mut parts);
            let outcome = outcome(guarded, &parts, None);
            Conclusion {
                outcome,
                answer: Draft::Upstream(Box::new(parts), continued(begun, rest)),
            }
        }
    }
}

fn outcome(guarded: &Guarded, parts: &response::Parts, body: Option<&Bytes>) -> Outcome {
    let policy = &guarded.ask.policy;
    let status = parts.status.as_u16();
    if policy.releases(status) {
        return Outcome::Released;
    }
    Outcome::Answered {
        decision_id: ids::decision_id(),
        recorded: Recorded::new(
            status,
            &parts.headers,
            body.cloned(),
            guarded.asker.origin(),
            policy.store_set_cookie,
        ),
        follow_up: parts
            .status
            .is_success()
            .then(|| follow_up(guarded))
            .flatten(),
    }
}

/// What the route says is to be done after a 2xx.
fn follow_up(guarded: &Guarded) -> Option<Box<FollowUp>> {
    let workflow = guarded.ask.policy.follow_up.clone()?;
    let seen = accept::request_seen(&guarded.parts, guarded.body.bytes());
    Some(Box::new(FollowUp {
        workflow,
        request: Some(seen),
        input: Value::Null,
        first_key: None,
        holds_record: false,
    }))
}

/// What was read already, then the rest as it comes.
fn continued(begun: Bytes, rest: Body) -> Body {
    let begun = stream::iter((!begun.is_empty()).then(|| Ok(Frame::data(begun))));
    StreamBody::new(begun.chain(BodyStream::new(rest))).boxed_unsync()
}

fn observe(policy: &Policy, exchange: &Exchange, began: Instant) {
    let outcome = match exchange {
        Exchange::NotSent(_) => "not_sent",
        Exchange::Broken { .. } => "unknown",
        Exchange::Whole(..) | Exchange::Unkept(..) => "answered",
    };
    let pool = policy.pool.as_str().to_owned();
    metrics::counter!(metric::UPSTREAM_CALLS, "pool" => pool.clone(), "outcome" => outcome)
        .increment(1);
    metrics::histogram!(metric::UPSTREAM_SECONDS, "pool" => pool).record(began.elapsed());
}

/// Nothing reached the upstream: what kept it.
fn not_sent(error: &SendError) -> Problem {
    let kind = match error.kind {
        SendErrorKind::ConnectTimeout | SendErrorKind::Abandoned => Kind::UpstreamTimeout,
        SendErrorKind::NoRoom | SendErrorKind::NoTarget => Kind::UpstreamUnavailable,
        _ => Kind::UpstreamUnreachable,
    };
    tracing::warn!(
        error = %Chain(error),
        "nothing could be sent upstream"
    );
    Problem::new(
        kind,
        "Nothing was sent to the service. Try again later with the same key.",
    )
    .retry_after(RETRY_AFTER)
}

fn timed_out() -> Problem {
    Problem::new(Kind::OutcomeUnknownTimeout, UNKNOWN_DETAIL)
}

fn broken() -> Problem {
    Problem::new(Kind::OutcomeUnknownBroken, UNKNOWN_DETAIL)
}

fn uuid_value(id: Uuid) -> HeaderValue {
    // A UUID's text is visible ASCII.
    HeaderValue::from_str(&id.to_string()).unwrap_or(HeaderValue::from_static(""))
}
