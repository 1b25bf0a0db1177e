//! Every error that a client can see, as RFC 9457 problem documents.
//!
//! One variant per `type`; each has a page under `docs/problems/`. A client-visible status is
//! chosen here and nowhere else. Nothing internal is told: causes go to the log.

use std::time::Duration;

use bytes::Bytes;
use http::StatusCode as S;
use http::{HeaderValue, Response, header};
use serde_json::{Map, Value, json};

/// Where the pages of the problem types are; `type` is this followed by the slug.
pub const TYPE_BASE: &str = "https://oncegate.dev/problems/";

/// How long a client is asked to wait before it tries again, when nothing better is known.
pub const RETRY_AFTER: Duration = Duration::from_secs(1);

/// No client is asked to come back later than after this.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(30);

/// The kinds of problem. The slug is the contract; statuses and titles are fixed with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The key is malformed, doubled or too long.
    KeyInvalid,
    /// The route requires a key.
    KeyMissing,
    /// The key belongs to another request.
    KeyReused,
    /// The first request still runs.
    InProgress,
    /// The upstream may have run; nobody knows. From a record.
    OutcomeUnknown,
    /// The upstream may have run: the connection broke during this very call.
    OutcomeUnknownBroken,
    /// The upstream may have run: it did not answer in time during this very call.
    OutcomeUnknownTimeout,
    /// The first answer was not kept with its body.
    ResponseNotReplayable,
    /// The caller no longer owns the record.
    AttemptStale,
    /// The request has no tenant.
    TenantMissing,
    /// The store can't be asked.
    StoreUnavailable,
    /// No target of the pool took the request; nothing was sent.
    UpstreamUnreachable,
    /// No target of the pool is fit to try; nothing was sent.
    UpstreamUnavailable,
    /// No target could be connected to in time; nothing was sent.
    UpstreamTimeout,
    /// The upstream's answer to an unguarded request broke off or was malformed.
    UpstreamBroken,
    /// The request body is too large.
    BodyTooLarge,
    /// No room for another waiter or body.
    Overloaded,
    /// No route matches.
    NoRoute,
    /// The key's decision is past its validity.
    KeyExpired,
    /// The request is not well-formed HTTP, or can't be guarded as it is.
    RequestInvalid,
    /// The token is missing or unknown (admin API).
    Unauthorized,
    /// The token may not do this (admin API).
    Forbidden,
    /// There is no such thing, or it is not the caller's to see (API, and look-ups of clients).
    NotFound,
    /// What an act is for is not in a state that allows it (API).
    StateConflict,
    /// The path exists, but not with this method (admin API).
    MethodNotAllowed,
    /// The gateway should get no traffic now (`/readyz`).
    NotReady,
}

impl Kind {
    /// All kinds, for the docs and their test.
    pub fn all() -> impl Iterator<Item = Self> {
        TABLE.iter().map(|(kind, ..)| *kind)
    }

    /// The end of `type`: stable, and the name of the page.
    #[must_use]
    pub fn slug(self) -> &'static str {
        self.fixed().1
    }

    /// The HTTP status.
    #[must_use]
    pub fn status(self) -> S {
        self.fixed().0
    }

    fn fixed(self) -> (S, &'static str, &'static str) {
        let (_, status, slug, title) = TABLE[self as usize];
        (status, slug, title)
    }
}

const UNKNOWN_TITLE: &str = "Nobody knows whether the request ran";

/// What is fixed for each kind, in the order of [`Kind`]: status, slug, title.
const TABLE: [(Kind, S, &str, &str); 26] = [
    (
        Kind::KeyInvalid,
        S::BAD_REQUEST,
        "key-invalid",
        "The idempotency key is malformed",
    ),
    (
        Kind::KeyMissing,
        S::BAD_REQUEST,
        "key-missing",
        "An idempotency key is required",
    ),
    (
        Kind::KeyReused,
        S::UNPROCESSABLE_ENTITY,
        "key-reused",
        "The idempotency key belongs to another request",
    ),
    (
        Kind::InProgress,
        S::CONFLICT,
        "in-progress",
        "The first request is still running",
    ),
    (
        Kind::OutcomeUnknown,
        S::CONFLICT,
        "outcome-unknown",
        UNKNOWN_TITLE,
    ),
    (
        Kind::OutcomeUnknownBroken,
        S::BAD_GATEWAY,
        "outcome-unknown",
        UNKNOWN_TITLE,
    ),
    (
        Kind::OutcomeUnknownTimeout,
        S::GATEWAY_TIMEOUT,
        "outcome-unknown",
        UNKNOWN_TITLE,
    ),
    (
        Kind::ResponseNotReplayable,
        S::CONFLICT,
        "response-not-replayable",
        "The request ran, but its answer was not kept",
    ),
    (
        Kind::AttemptStale,
        S::CONFLICT,
        "attempt-stale",
        "Another attempt owns this key now",
    ),
    (
        Kind::TenantMissing,
        S::UNAUTHORIZED,
        "tenant-missing",
        "The request has no tenant",
    ),
    (
        Kind::StoreUnavailable,
        S::SERVICE_UNAVAILABLE,
        "store-unavailable",
        "The gateway can't reach its store; nothing was sent",
    ),
    (
        Kind::UpstreamUnreachable,
        S::BAD_GATEWAY,
        "upstream-unreachable",
        "The service can't be reached; nothing was sent",
    ),
    (
        Kind::UpstreamUnavailable,
        S::SERVICE_UNAVAILABLE,
        "upstream-unreachable",
        "The service has no room or no healthy target; nothing was sent",
    ),
    (
        Kind::UpstreamTimeout,
        S::GATEWAY_TIMEOUT,
        "upstream-timeout",
        "The service could not be connected to in time; nothing was sent",
    ),
    (
        Kind::UpstreamBroken,
        S::BAD_GATEWAY,
        "upstream-broken",
        "The service's answer broke off",
    ),
    (
        Kind::BodyTooLarge,
        S::PAYLOAD_TOO_LARGE,
        "body-too-large",
        "The request body is too large",
    ),
    (
        Kind::Overloaded,
        S::SERVICE_UNAVAILABLE,
        "overloaded",
        "The gateway has no room now",
    ),
    (
        Kind::NoRoute,
        S::NOT_FOUND,
        "no-route",
        "No route matches this request",
    ),
    (
        Kind::KeyExpired,
        S::CONFLICT,
        "key-expired",
        "The idempotency key has expired",
    ),
    (
        Kind::RequestInvalid,
        S::BAD_REQUEST,
        "request-invalid",
        "The request is malformed",
    ),
    (
        Kind::Unauthorized,
        S::UNAUTHORIZED,
        "unauthorized",
        "A valid bearer token is required",
    ),
    (
        Kind::Forbidden,
        S::FORBIDDEN,
        "forbidden",
        "The token may not do this",
    ),
    (
        Kind::NotFound,
        S::NOT_FOUND,
        "not-found",
        "There is no such thing here",
    ),
    (
        Kind::StateConflict,
        S::CONFLICT,
        "state-conflict",
        "Its state does not allow this",
    ),
    (
        Kind::MethodNotAllowed,
        S::METHOD_NOT_ALLOWED,
        "method-not-allowed",
        "This path does not take that method",
    ),
    (
        Kind::NotReady,
        S::SERVICE_UNAVAILABLE,
        "not-ready",
        "The gateway should get no traffic now",
    ),
];

/// A problem to answer with.
#[derive(Clone, Debug)]
pub struct Problem {
    kind: Kind,
    detail: String,
    retry_after: Option<Duration>,
    members: Map<String, Value>,
}

impl Problem {
    /// A problem; `detail` tells the client what to do, in whole sentences.
    pub fn new(kind: Kind, detail: impl Into<String>) -> Self {
        Self {
            kind,
            detail: detail.into(),
            retry_after: None,
            members: Map::new(),
        }
    }

    /// Adds `Retry-After`, in whole seconds, at least one.
    #[must_use]
    pub fn retry_after(mut self, wait: Duration) -> Self {
        self.retry_after = Some(wait);
        self
    }

    /// Adds an extension member.
    #[must_use]
    pub fn member(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.members.insert(name.to_owned(), value.into());
        self
    }

    /// Which kind it is.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The response, complete.
    #[must_use]
    pub fn into_response(self) -> Response<Bytes> {
        let (status, slug, title) = self.kind.fixed();
        let mut document = Map::new();
        document.insert("type".into(), json!(format!("{TYPE_BASE}{slug}")));
        document.insert("title".into(), json!(title));
        document.insert("status".into(), json!(status.as_u16()));
        document.insert("detail".into(), json!(self.detail));
        document.extend(self.members);
        // With a line break, so that a terminal's prompt begins a line of its own.
        let body = Bytes::from(format!("{}\n", Value::Object(document)));
        let mut response = Response::new(body);
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(
            header::CONTENT_TYPE,
            HeaderValue::from_static("application/problem+json"),
        );
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        let link = format!("<{TYPE_BASE}{slug}>; rel=\"describedby\"; type=\"text/html\"");
        if let Ok(link) = HeaderValue::from_str(&link) {
            headers.insert(header::LINK, link);
        }
        if let Some(wait) = self.retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(whole_seconds(wait)));
        }
        if self.kind == Kind::Unauthorized {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

/// When to come back for a record that others hold: after `wait`, within what a lease lets expect.
#[must_use]
pub fn retry_after(wait: Duration, lease: Duration) -> Duration {
    wait.min(lease).clamp(RETRY_AFTER, RETRY_AFTER_MAX)
}

/// Rounded up, at least one: `Retry-After` knows whole seconds only.
#[must_use]
pub fn whole_seconds(wait: Duration) -> u64 {
    wait.as_secs() + u64::from(wait.subsec_nanos() > 0 || wait.is_zero())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_document_agrees_with_the_response() {
        for (index, kind) in Kind::all().enumerate() {
            assert_eq!(kind as usize, index, "the table is in order");
            let response = Problem::new(kind, "do this")
                .retry_after(Duration::ZERO)
                .into_response();
            let document: Value = serde_json::from_slice(response.body()).unwrap();
            assert_eq!(document["status"], response.status().as_u16());
            assert_eq!(document["type"], format!("{TYPE_BASE}{}", kind.slug()));
            assert_eq!(response.headers()[header::RETRY_AFTER], "1");
            assert_eq!(
                response.headers()[header::CONTENT_TYPE],
                "application/problem+json"
            );
        }
    }

    #[test]
    fn nobody_is_sent_away_for_long() {
        let seconds = Duration::from_secs;
        for (wait, lease, told) in [(0, 60, 1), (7, 60, 7), (50, 60, 30), (50, 9, 9), (5, 0, 1)] {
            assert_eq!(retry_after(seconds(wait), seconds(lease)), seconds(told));
        }
    }

    #[test]
    fn retry_after_rounds_up() {
        assert_eq!(whole_seconds(Duration::from_millis(1)), 1);
        assert_eq!(whole_seconds(Duration::from_millis(2500)), 3);
        assert_eq!(whole_seconds(Duration::from_secs(4)), 4);
    }
}
