//! A route's rules: which requests are guarded, and how.

use std::sync::Arc;
use std::time::Duration;

use http::{HeaderName, Method};

use super::fingerprint::FingerprintRules;
use super::record::Terms;
use super::scope::PoolId;
use super::workflow::{Retry, Workflow};

/// Methods that no route guards: they are safe, or no requests for a resource (RFC 9110 section 9).
pub const NEVER_GUARDED: [Method; 5] = [
    Method::GET,
    Method::HEAD,
    Method::OPTIONS,
    Method::TRACE,
    Method::CONNECT,
];

/// What happens to a request whose route matched.
#[derive(Clone, Debug)]
pub struct Policy {
    /// Where requests go, and half of what a key counts in.
    pub pool: PoolId,
    /// Whether the upstream is called before the answer or after it.
    pub mode: Mode,
    /// What is done when a decision of this route commits with a 2xx, or after the call of an
    /// accepted request.
    pub follow_up: Option<Arc<Workflow>>,
    /// Where the key is found.
    pub key_source: KeySource,
    /// A guarded request without a key is refused.
    pub required: bool,
    /// What a duplicate gets while the first request runs.
    pub duplicates: Duplicates,
    /// What the upstream sees as `Idempotency-Key`.
    pub forward_key: ForwardKey,
    /// How long a duplicate is parked.
    pub wait: Duration,
    /// How long an owner may be silent.
    pub lease: Duration,
    /// The whole upstream call; for streams, up to the headers.
    pub timeout: Duration,
    /// How long the owner still listens after `timeout`.
    pub linger: Duration,
    /// How long a decision is replayed, from its commit.
    pub valid_for: Duration,
    /// How long a key is refused after that, instead of executed anew.
    pub tombstone_for: Duration,
    /// Where a record goes when nobody knows whether the upstream ran.
    pub on_unknown: OnUnknown,
    /// Whether 5xx answers are decisions.
    pub store_5xx: bool,
    /// Answers that are passed on and not kept: the key may be tried again.
    pub release_statuses: Vec<u16>,
    /// Whether `Set-Cookie` is kept for replays.
    pub store_set_cookie: bool,
    /// What happens when the store can't be asked.
    pub on_store_down: OnStoreDown,
    /// The longest request body, in bytes.
    pub body_bytes_max: usize,
    /// The longest answer body that is kept, in bytes.
    pub store_body_bytes_max: usize,
    /// What counts as the same request.
    pub fingerprint: FingerprintRules,
    /// When the call of an accepted request is tried again.
    pub retry: Retry,
}

/// When the upstream is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// While the client waits; its answer is the decision.
    Proxy,
    /// By a run, durably; the decision is a 202.
    Accept,
}

/// Where a request's key is found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeySource {
    /// In this header.
    Header(HeaderName),
    /// In the JSON body, at this pointer (RFC 6901).
    Body(String),
}

/// What a duplicate gets while the first request runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Duplicates {
    /// Parked until the first is done.
    Wait,
    /// Refused at once.
    Reject,
    /// Told at once where to follow the first.
    Follow,
}

/// What the upstream sees as `Idempotency-Key`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ForwardKey {
    /// What the client sent.
    Verbatim,
    /// A UUID that only this tenant, pool, key and generation give.
    Derived,
    /// Nothing.
    None,
}

/// Where a record goes when nobody knows whether the upstream ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnUnknown {
    /// To `outcome_unknown`: never sent again by itself.
    Hold,
    /// To `failed_before_commit`: sent again, for upstreams that honour the forwarded key.
    Redrive,
}

/// What happens when the store can't be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnStoreDown {
    /// Nothing is sent.
    Refuse,
    /// Sent without protection, unless this gateway knows anything of the key.
    Pass,
}

impl OnUnknown {
    /// The word on the row and in the configuration.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Hold => "hold",
            Self::Redrive => "redrive",
        }
    }

    /// Reads the word back. Anything unknown holds: that never runs twice.
    #[must_use]
    pub fn from_word(word: &str) -> Self {
        if word == "redrive" {
            Self::Redrive
        } else {
            Self::Hold
        }
    }
}

impl Policy {
    /// The rules of a claim over the API, which no route describes: its caller plays the upstream
    /// and says which answers are decisions.
    #[must_use]
    pub fn of_caller(pool: PoolId, terms: Terms, duplicates: Duplicates) -> Self {
        Self {
            pool,
            mode: Mode::Proxy,
            follow_up: None,
            key_source: KeySource::Body(String::new()),
            required: false,
            duplicates,
            forward_key: ForwardKey::Derived,
            wait: Duration::ZERO,
            lease: terms.lease,
            timeout: Duration::ZERO,
            linger: Duration::ZERO,
            valid_for: terms.valid_for,
            tombstone_for: terms.tombstone_for,
            on_unknown: terms.on_unknown,
            store_5xx: true,
            release_statuses: Vec::new(),
            store_set_cookie: true,
            on_store_down: OnStoreDown::Refuse,
            body_bytes_max: 0,
            store_body_bytes_max: 0,
            fingerprint: FingerprintRules::default(),
            retry: Retry::DEFAULT,
        }
    }

    /// Whether an answer with this status is passed on without being kept.
    #[must_use]
    pub fn releases(&self, status: u16) -> bool {
        self.release_statuses.contains(&status) || (!self.store_5xx && status >= 500)
    }

    /// The longest time from an owner's claim to its last write, a commit budget aside: when an
    /// operator may be sure that it is over.
    #[must_use]
    pub fn owner_time_max(&self) -> Duration {
        self.timeout + self.linger
    }
}
