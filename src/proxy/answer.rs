//! What a guarded request's client is told: the answer, first or again, or why there is none.

use std::time::Duration;

use bytes::Bytes;
use http::header::{
    ACCEPT_ENCODING, CACHE_CONTROL, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, ETAG,
    HeaderMap, HeaderName, HeaderValue, LOCATION, ORIGIN, RETRY_AFTER as RETRY_AFTER_HEADER,
};
use http::{Response, StatusCode, response};
use serde_json::json;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use super::coding::{self, Coding};
use super::{Body, forward, full, lookups, problem_response};
use crate::domain::decide::Refusal;
use crate::domain::fingerprint::COMPARED;
use crate::domain::message::{
    IDEMPOTENCY_CREATED, IDEMPOTENCY_DECISION, IDEMPOTENCY_EXPIRES, IDEMPOTENCY_STATUS,
    IDEMPOTENT_REPLAYED, Recorded,
};
use crate::domain::record::Committed;
use crate::domain::scope::RecordKey;
use crate::problem::{self, Kind, Problem, RETRY_AFTER, whole_seconds};
use crate::routing::gate::Denial;

/// What `Idempotency-Status` tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// This request ran.
    Executed,
    /// The answer was stored before.
    Replayed,
    /// The answer was stored while this request was parked.
    Waited,
    /// The first request still runs.
    InProgress,
    /// Nobody knows whether the request ran.
    Unknown,
    /// The key belongs to another request.
    Mismatch,
    /// Nothing was sent.
    Refused,
    /// Sent without protection.
    Bypassed,
    /// This request ran, and the store does not know it yet.
    Unrecorded,
}

impl Status {
    /// The word in the header, the log and the metrics.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Executed => "executed",
            Self::Replayed => "replayed",
            Self::Waited => "waited",
            Self::InProgress => "in-progress",
            Self::Unknown => "unknown",
            Self::Mismatch => "mismatch",
            Self::Refused => "refused",
            Self::Bypassed => "bypassed",
            Self::Unrecorded => "unrecorded",
        }
    }
}

/// An answer with the word for it.
pub struct Answer {
    /// What the client gets.
    pub response: Response<Body>,
    /// What it is told about it.
    pub status: Status,
    /// The decision that it comes from.
    pub committed: Option<Committed>,
    /// The problem that it is, if the gateway says so itself.
    pub problem: Option<Kind>,
}

/// What of a request an answer depends on.
#[derive(Clone, Debug, Default)]
pub struct Asker {
    origin: Option<HeaderValue>,
    accept_encoding: Vec<HeaderValue>,
}

impl Asker {
    /// Reads it from the request's headers.
    #[must_use]
    pub fn of(headers: &HeaderMap) -> Self {
        Self {
            origin: headers.get(ORIGIN).cloned(),
            accept_encoding: headers.get_all(ACCEPT_ENCODING).iter().cloned().collect(),
        }
    }

    /// The request's `Origin`.
    #[must_use]
    pub fn origin(&self) -> Option<&HeaderValue> {
        self.origin.as_ref()
    }
}

impl Answer {
    /// The upstream's answer to this very request. Its headers are end-to-end ones already.
    #[must_use]
    pub fn executed(
        mut parts: response::Parts,
        body: Body,
        status: Status,
        committed: Option<Committed>,
    ) -> Self {
        parts.headers.remove(CONTENT_LENGTH);
        Self {
            response: Response::from_parts(parts, body),
            status,
            committed,
            problem: None,
        }
    }

    /// A stored answer: for the first time where `status` says `executed`, else again. A coding
    /// that the client can't take is undone; framing is the hop's own.
    pub async fn told(
        committed: Committed,
        recorded: &Recorded,
        status: Status,
        asker: &Asker,
    ) -> Self {
        let status = if status == Status::Waited && recorded.body.is_none() {
            Status::Replayed
        } else {
            status
        };
        let mut headers = HeaderMap::new();
        for (name, value) in recorded
            .headers
            .lines()
            .chain(recorded.cors_for(asker.origin()))
        {
            headers.append(name, value);
        }
        let body = match &recorded.body {
            Some(body) => takeable(&mut headers, body, asker).await,
            None => None,
        };
        let problem = body.is_none().then_some(Kind::ResponseNotReplayable);
        let mut response = match body {
            Some(body) => {
                let mut response = Response::new(body);
                *response.status_mut() =
                    StatusCode::from_u16(recorded.status).unwrap_or(StatusCode::BAD_GATEWAY);
                *response.headers_mut() = headers;
                response
            }
            None => not_replayable(recorded.status),
        };
        if status != Status::Executed {
            let replayed = HeaderValue::from_static("true");
            response.headers_mut().insert(IDEMPOTENT_REPLAYED, replayed);
        }
        Self {
            response,
            status,
            committed: Some(committed),
            problem,
        }
    }

    /// A problem, with the word for it.
    #[must_use]
    pub fn problem(problem: Problem, status: Status) -> Self {
        Self {
            problem: Some(problem.kind()),
            response: problem_response(problem),
            status,
            committed: None,
        }
    }

    /// Why a request for this record was not let through. `lease` bounds `Retry-After`.
    #[must_use]
    pub fn denied(denial: Denial, key: &RecordKey, lease: Duration) -> Self {
        let clamp = |wait| problem::retry_after(wait, lease);
        let problem = match denial {
            Denial::Refused(refusal) => return Self::refused(refusal, clamp(lease)),
            Denial::InProgress(wait) => in_progress(clamp(wait)),
            Denial::Follow(wait) => return Self::to_follow(key, clamp(wait)),
            Denial::KeyFull(wait) => Problem::new(
                Kind::InProgress,
                "Many requests already wait for this key. Try again later with the same key.",
            )
            .retry_after(clamp(wait)),
            Denial::Full => Problem::new(
                Kind::Overloaded,
                "The gateway has no room for another waiting request. Try again later with the \
                 same key.",
            )
            .retry_after(RETRY_AFTER),
            Denial::StoreUnavailable => Problem::new(
                Kind::StoreUnavailable,
                "Nothing was sent to the service. Try again later with the same key.",
            )
            .retry_after(RETRY_AFTER),
            Denial::Contended => Problem::new(
                Kind::Overloaded,
                "The key's record kept changing hands; nothing was sent. Try again with the same \
                 key.",
            )
            .retry_after(RETRY_AFTER),
            Denial::Stale | Denial::Gone => Problem::new(
                Kind::AttemptStale,
                "Another attempt owns this key now. Try again with the same key to get its result.",
            )
            .retry_after(RETRY_AFTER),
        };
        Self::problem(problem, status_of(denial))
    }

    /// Where the first request can be followed.
    fn to_follow(key: &RecordKey, retry_after: Duration) -> Self {
        let location = lookups::record_location(key);
        let seconds = whole_seconds(retry_after);
        let document = json!({
            "status": "pending",
            "location": location,
            "retry_after": seconds,
        });
        let mut response = Response::new(full(Bytes::from(format!("{document}\n"))));
        *response.status_mut() = StatusCode::ACCEPTED;
        let headers = response.headers_mut();
        let json = HeaderValue::from_static("application/json");
        headers.insert(CONTENT_TYPE, json);
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        headers.insert(RETRY_AFTER_HEADER, HeaderValue::from(seconds));
        set(headers, LOCATION, &location);
        Self {
            response,
            status: Status::InProgress,
            committed: None,
            problem: None,
        }
    }

    fn refused(refusal: Refusal, retry_after: Duration) -> Self {
        let problem = match refusal {
            Refusal::Mismatch => Problem::new(
                Kind::KeyReused,
                format!(
                    "This key was used for a request that differs in what is compared: {COMPARED}. \
                     Use a new key for a new request."
                ),
            )
            .member("compared", COMPARED),
            Refusal::OutcomeUnknown => Problem::new(
                Kind::OutcomeUnknown,
                "The service may have carried out this request. It will not be sent again. Find \
                 out from the service or ask the operator; a retry gets this answer until then.",
            ),
            Refusal::InProgress | Refusal::Follow => in_progress(retry_after),
            Refusal::KeyExpired => Problem::new(
                Kind::KeyExpired,
                "The answer for this key was kept for its time and is gone. Use a new key for a \
                 new request.",
            ),
        };
        Self::problem(problem, status_of(Denial::Refused(refusal)))
    }

    /// The whole response, with what every answer of a guarded request with a key tells.
    #[must_use]
    pub fn finish(self, asker: &Asker) -> Response<Body> {
        let mut response = self.response;
        let headers = response.headers_mut();
        headers.insert(
            IDEMPOTENCY_STATUS,
            HeaderValue::from_static(self.status.word()),
        );
        if let Some(committed) = self.committed {
            set(
                headers,
                IDEMPOTENCY_DECISION,
                &committed.decision_id.to_string(),
            );
            set_time(headers, IDEMPOTENCY_CREATED, committed.created_at);
            set_time(headers, IDEMPOTENCY_EXPIRES, committed.valid_until);
        }
        if asker.origin.is_some() {
            forward::expose_own_headers(headers);
        }
        response
    }
}

fn status_of(denial: Denial) -> Status {
    match denial {
        Denial::Refused(Refusal::Mismatch) => Status::Mismatch,
        Denial::Refused(Refusal::OutcomeUnknown) => Status::Unknown,
        Denial::Refused(Refusal::InProgress | Refusal::Follow)
        | Denial::InProgress(_)
        | Denial::Follow(_)
        | Denial::KeyFull(_)
        | Denial::Stale
        | Denial::Gone => Status::InProgress,
        Denial::Refused(Refusal::KeyExpired)
        | Denial::Full
        | Denial::StoreUnavailable
        | Denial::Contended => Status::Refused,
    }
}

fn in_progress(retry_after: Duration) -> Problem {
    Problem::new(
        Kind::InProgress,
        "The first request with this key is still running. Try again later with the same key.",
    )
    .retry_after(retry_after)
}

fn not_replayable(status: u16) -> Response<Body> {
    let problem = Problem::new(
        Kind::ResponseNotReplayable,
        "The request was carried out once and will not be again; its answer was too large or a \
         stream and was not kept. Its status stands in original_status.",
    );
    problem_response(problem.member("original_status", status))
}

/// The stored body in a coding that the client takes; `None` when that can't be made.
async fn takeable(headers: &mut HeaderMap, body: &Bytes, asker: &Asker) -> Option<Body> {
    let Some(coded) = headers.get(CONTENT_ENCODING) else {
        return Some(full(body.clone()));
    };
    let coding = Coding::parse(coded.as_bytes());
    if coding.is_some_and(Coding::is_identity)
        || coding::accepts(&asker.accept_encoding, coded.as_bytes())
    {
        return Some(full(body.clone()));
    }
    let (plain, length) = coding?.decode(body).await?;
    headers.insert(CONTENT_LENGTH, HeaderValue::from(length));
    headers.remove(CONTENT_ENCODING);
    // These describe the coded bytes (RFC 9110 section 8.8.3.3, RFC 9530).
    headers.remove("content-digest");
    headers.remove("content-md5");
    weaken(headers);
    Some(plain)
}

fn weaken(headers: &mut HeaderMap) {
    let Some(etag) = headers.get(ETAG) else {
        return;
    };
    if !etag.as_bytes().starts_with(b"W/") {
        let weak = [b"W/", etag.as_bytes()].concat();
        match HeaderValue::from_bytes(&weak) {
            Ok(weak) => headers.insert(ETAG, weak),
            Err(_) => headers.remove(ETAG),
        };
    }
}

fn set(headers: &mut HeaderMap, name: HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        headers.insert(name, value);
    }
}

fn set_time(headers: &mut HeaderMap, name: HeaderName, at: OffsetDateTime) {
    if let Ok(text) = at.format(&Rfc3339) {
        set(headers, name, &text);
    }
}
