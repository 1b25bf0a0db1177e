//! What an accepted request becomes: a decision that says 202, and a run whose first step makes the
//! call that the proxy would have made, durably. Pure.
//!
//! Head and body are frozen with the run, credentials included, and sent the same at every try;
//! only framing is made anew. The service's `Idempotency-Key` goes by `forward_key` as for a
//! proxied request.

use std::sync::Arc;

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, LOCATION};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Request, StatusCode};
use serde_json::{Value, json};

use super::lookups;
use crate::domain::message::{IDEMPOTENCY_KEY, Recorded};
use crate::domain::millis;
use crate::domain::policy::Policy;
use crate::domain::record::Committed;
use crate::domain::run::{FollowUp, RequestSeen, RunId};
use crate::domain::workflow::{
    Action, CALL, Effect, HttpSend, OnFailure, Payload, Send, Step, Success, Target, Text, Workflow,
};

/// What follows from an accepted request: `outgoing` to the route's pool, then the route's
/// follow-up.
pub fn follow_up(policy: &Policy, seen: RequestSeen, outgoing: Request<Bytes>) -> FollowUp {
    let (mut head, _) = outgoing.into_parts();
    // An empty key is none: `forward_key = "none"`.
    let key = head.headers.remove(IDEMPOTENCY_KEY);
    let first_key = key.map_or_else(String::new, |key| latin1(&key));
    let mut steps = vec![Step {
        name: CALL.to_owned(),
        action: Action::Effects(vec![call(policy, &head)]),
        on_failure: OnFailure::Stop,
        compensation: None,
    }];
    let then = policy.follow_up.as_ref();
    steps.extend(then.iter().flat_map(|then| then.steps.iter().cloned()));
    FollowUp {
        workflow: Arc::new(Workflow {
            name: then.map_or_else(|| CALL.to_owned(), |then| then.name.clone()),
            steps,
        }),
        request: Some(seen),
        input: Value::Null,
        first_key: Some(first_key),
        holds_record: true,
    }
}

/// The decision: where to follow the run. Duplicates are told the same bytes later, so that it says
/// nothing of how far the run is.
pub fn recorded(run: RunId) -> Recorded {
    let location = lookups::run_location(run);
    let document = json!({
        "run_id": run.to_string(),
        "location": location,
    });
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    if let Ok(location) = HeaderValue::from_str(&location) {
        headers.insert(LOCATION, location);
    }
    let body = Bytes::from(format!("{document}\n"));
    let status = StatusCode::ACCEPTED.as_u16();
    Recorded::new(status, &headers, Some(body), None, false)
}

/// The run that a decision points to, if it is such a decision. Told by the decision itself, so
/// that it stays so when the route's mode is changed.
pub fn run_of(committed: &Committed, recorded: &Recorded) -> Option<RunId> {
    if recorded.status != StatusCode::ACCEPTED.as_u16() {
        return None;
    }
    let run = RunId::from(committed.decision_id);
    let location = lookups::run_location(run);
    let mut lines = recorded.headers.lines();
    let points = lines.any(|(name, value)| name == LOCATION && value == location);
    points.then_some(run)
}

/// The request as templates see it. The body is shared, not copied.
pub fn request_seen(head: &Parts, body: &Bytes) -> RequestSeen {
    RequestSeen {
        method: head.method.as_str().to_owned(),
        path: head.uri.path().to_owned(),
        query: head.uri.query().map(str::to_owned),
        content_type: head.headers.get(CONTENT_TYPE).map(latin1),
        body: body.clone(),
    }
}

fn call(policy: &Policy, head: &Parts) -> Effect {
    let headers = head
        .headers
        .iter()
        .filter(|(name, _)| **name != CONTENT_LENGTH)
        .map(|(name, value)| (name.as_str().to_owned(), Text::Plain(latin1(value))));
    let path = head.uri.path_and_query();
    Effect {
        send: Send::Http(HttpSend {
            to: Target::Pool(policy.pool.as_str().to_owned()),
            method: head.method.as_str().to_owned(),
            path: path.map(|path| Text::Plain(path.as_str().to_owned())),
            headers: headers.collect(),
            success: Success::Answered {
                released: policy.release_statuses.clone(),
            },
            answer_bytes_max: policy.store_body_bytes_max as u64,
        }),
        payload: Payload::Request,
        retry: policy.retry,
        timeout_ms: millis(policy.timeout),
    }
}

/// Each byte as one character (ISO 8859-1), so that any value survives as text.
fn latin1(value: &HeaderValue) -> String {
    value.as_bytes().iter().copied().map(char::from).collect()
}
