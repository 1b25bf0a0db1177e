//! The configuration: what may be written, and what it means once validated.
//!
//! [`Config`] is what the rest of the program reads; each part gets its own slice of it. It is made
//! by [`load`] from flags, environment and a TOML file, in that order of precedence, or refused
//! with every error at once, each with its place. What may be written is in
//! `oncegate.example.toml`, with every default; a test keeps the two alike.
//!
//! The way: [`input`] gathers, `section` reads one table key by key with the forms of `parse`,
//! `resolve`, `pools`, [`destinations`], [`effects`], [`workflows`], [`routing`] and [`outbox`] say
//! which keys there are, `contradictions` compares their `value`s, and [`report`] holds what was
//! found. Nothing here opens a socket or a database.

mod contradictions;
pub mod destinations;
pub mod effects;
pub mod input;
pub mod outbox;
mod parse;
mod pools;
pub mod report;
mod resolve;
pub mod routing;
mod section;
mod store_url;
mod value;
pub mod workflows;

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderName, Method, Uri};

pub use self::resolve::{Loaded, LoadedStore, load, load_store};
pub use self::value::nearest;
use crate::domain::intent::Destination;
use crate::domain::policy::Policy;
use crate::domain::scope::{PoolId, TenantScope};
use crate::domain::workflow::{Retry, Send, Target, Workflow};

/// A validated configuration.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where clients connect.
    pub listen: SocketAddr,
    /// Where operators and scrapers connect.
    pub admin: SocketAddr,
    /// Whether clients are proxies of one's own, whose `Forwarded` and `X-Forwarded-*` are kept
    /// and added to; else they are replaced.
    pub trust_forwarded: bool,
    /// TLS for `listen`, with ALPN for HTTP/2 and HTTP/1.1.
    pub tls: Option<ServerTls>,
    /// The store.
    pub store: StoreConfig,
    /// Who a request is from.
    pub tenant: TenantConfig,
    /// Where requests go.
    pub pools: Vec<PoolConfig>,
    /// First match wins.
    pub routes: Vec<Route>,
    /// Where effects go.
    pub destinations: Vec<DestinationConfig>,
    /// Workflows by name, for runs that callers of the API start.
    pub workflows: Vec<Arc<Workflow>>,
    /// How intents are sent.
    pub outbox: OutboxConfig,
    /// How long what is over is kept.
    pub keep: Keep,
    /// Every limit that belongs to no single route or pool.
    pub limits: Limits,
    /// Tokens of the admin API.
    pub tokens: Vec<TokenConfig>,
    /// The log.
    pub log: LogConfig,
}

impl Config {
    /// Whether effects go to URLs that are no destination: callers of the API may name them, or
    /// the configuration does.
    #[must_use]
    pub fn sends_to_urls(&self) -> bool {
        let is_url =
            |send: &Send| matches!(send, Send::Http(http) if matches!(http.to, Target::Url(_)));
        let routes = self.routes.iter();
        let follow_ups = routes.filter_map(|route| route.policy.follow_up.as_ref());
        let mut workflows = follow_ups.chain(&self.workflows);
        self.outbox.allow_urls
            || workflows.any(|workflow| workflow.effects().any(|effect| is_url(&effect.send)))
    }
}

/// Certificate chain and private key, as PEM files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerTls {
    /// The chain, leaf first.
    pub certificate: PathBuf,
    /// The key.
    pub key: PathBuf,
}

/// The store.
#[derive(Clone)]
pub struct StoreConfig {
    /// `sqlite:PATH` or `postgres://…`; may hold a password, so it is never logged whole.
    pub url: String,
    /// Whether `serve` applies missing migrations.
    pub migrate: bool,
    /// Connections to PostgreSQL for the request path.
    pub connections_max: u32,
    /// How long an operation may wait for a connection before it counts as unreachable.
    pub acquire_timeout: Duration,
    /// How long one operation may take before it counts as unanswered.
    pub operation_timeout: Duration,
    /// How often parked duplicates look at the store; a lost hint costs at most this.
    pub poll_interval: Duration,
    /// Whether PostgreSQL's LISTEN/NOTIFY is used; off behind a transaction pooler.
    pub notify: bool,
    /// How often the sweep looks for owners whose lease is over.
    pub sweep_interval: Duration,
    /// How often retention looks for records past their time.
    pub purge_interval: Duration,
}

impl fmt::Debug for StoreConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = self.url.split(':').next().unwrap_or_default();
        write!(f, "StoreConfig {{ {scheme} }}")
    }
}

/// Who a request is from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantConfig {
    /// Where the tenant is told.
    pub source: TenantSource,
    /// Where the principal is told, if users of one tenant must not share answers.
    pub principal: Option<PrincipalSource>,
}

/// Where the tenant is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TenantSource {
    /// Every request is from this one.
    Fixed(TenantScope),
    /// A header that only a trusted hop in front can set.
    Header(HeaderName),
    /// A keyed hash of `Authorization`.
    Credential,
}

/// Where the principal is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PrincipalSource {
    /// A header; its value is kept as a keyed hash only.
    Header(HeaderName),
    /// `Authorization` or, without it, `Cookie`; kept as a keyed hash only.
    Credential,
}

/// A pool of targets that serve the same thing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolConfig {
    /// Half of what a key counts in; a metric label.
    pub id: PoolId,
    /// `http://host:port` or `https://host:port`; a path is refused.
    pub targets: Vec<Uri>,
    /// How long connecting to one target may take, TLS included.
    pub connect_timeout: Duration,
    /// Connections to each target.
    pub connections_max: usize,
    /// How long a request may wait for a free connection.
    pub queue_timeout: Duration,
    /// After this long without use a connection is closed.
    pub idle_timeout: Duration,
    /// After this long a connection takes no more requests, so that DNS changes are seen.
    pub connection_age_max: Duration,
    /// Speak HTTP/2 to `http://` targets too (prior knowledge). To `https://` targets ALPN decides.
    pub http2: bool,
    /// Certificates to trust besides the system's, as a PEM file.
    pub ca: Option<PathBuf>,
    /// Whether the upstream sees the client's `Host` (true) or the target's authority.
    pub preserve_host: bool,
}

/// Which requests, and how they are treated.
#[derive(Clone, Debug)]
pub struct Route {
    /// Only requests to this host, in lower case and without port; `None`: to any.
    pub host: Option<String>,
    /// The path.
    pub path: PathPattern,
    /// The methods that are guarded; others pass through.
    pub methods: Vec<Method>,
    /// How guarded requests are treated.
    pub policy: Arc<Policy>,
}

/// A path, exact or by its beginning.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PathPattern {
    /// This path and no other.
    Exact(String),
    /// Every path that begins with this; `/v1/*` is kept as `/v1/`.
    Prefix(String),
}

/// How long what is over is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keep {
    /// Runs with all that belongs to them, from their end.
    pub runs: Duration,
    /// Bytes of dead and quarantined intents, from when they became so.
    pub dead: Duration,
}

/// Where effects go.
#[derive(Clone, Debug)]
pub struct DestinationConfig {
    /// Its lane; effects refer to it by this.
    pub id: Destination,
    /// What is there.
    pub kind: DestinationKind,
    /// Tries at one time, of each gateway.
    pub concurrency_max: usize,
    /// Tries in a second, of each gateway; `None`: no limit.
    pub rate_max: Option<f64>,
    /// How long one try may take, the answer's body included, unless the effect says otherwise.
    pub timeout: Duration,
    /// When to try again, unless the effect says otherwise.
    pub retry: Retry,
}

/// What is at a destination.
#[derive(Clone, Debug)]
pub enum DestinationKind {
    /// An HTTP server.
    Http {
        /// Where effects go that give no path of their own; others are resolved against it.
        url: Uri,
        /// Standard Webhooks secrets (`whsec_…`); every one of them signs, so that receivers can
        /// change over. Empty: unsigned.
        secrets: Vec<SecretText>,
        /// More headers; values may be secret.
        headers: Vec<(HeaderName, SecretText)>,
        /// Whether addresses of private networks, loopback and link-local ones are dialled.
        allow_private: bool,
        /// Certificates to trust besides the system's, as a PEM file.
        ca: Option<PathBuf>,
    },
    /// NATS servers with `JetStream`.
    Nats {
        /// `nats://host:port` or `tls://host:port`.
        servers: Vec<String>,
        /// A token, if the servers want one.
        token: Option<SecretText>,
        /// The path of a credentials file, if they want one.
        credentials: Option<PathBuf>,
    },
}

/// A text that is told nowhere.
#[derive(Clone, PartialEq, Eq)]
pub struct SecretText(pub String);

impl fmt::Debug for SecretText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}

/// How intents are sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutboxConfig {
    /// How often work is looked for; a lost wake-up costs at most this.
    pub poll_interval: Duration,
    /// How long a claim may be silent.
    pub claim_lease: Duration,
    /// Tries at one time, in all.
    pub in_flight_max: usize,
    /// Tries at one time for one tenant.
    pub in_flight_per_tenant_max: usize,
    /// Tries at one time for a pool or a URL that is no configured destination.
    pub concurrency_max: usize,
    /// Whether URLs in effects that callers of the API send are allowed at all.
    pub allow_urls: bool,
    /// Faults of a destination in a row that open its breaker.
    pub breaker_faults: u32,
    /// How long a breaker stays open at first; it doubles up to ten minutes.
    pub breaker_open: Duration,
}

/// Every limit that belongs to no single route or pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Connections of clients.
    pub connections_max: usize,
    /// Header bytes of one request.
    pub header_bytes_max: usize,
    /// How long a client may take to send its headers.
    pub header_timeout: Duration,
    /// How long a client may take to send a guarded body.
    pub body_timeout: Duration,
    /// Waiters on one key.
    pub waiters_per_key_max: usize,
    /// Waiters in all.
    pub waiters_max: usize,
    /// Request bodies of owners and waiters together, in bytes.
    pub body_bytes_total_max: usize,
    /// Answers whose commit is retried while the store is gone, in bytes.
    pub record_retry_bytes_max: usize,
    /// For how long such a commit is retried.
    pub record_retry: Duration,
    /// Memory of the cache of decisions, in bytes.
    pub cache_bytes_max: u64,
    /// How long a cached decision is served after the store last confirmed it.
    pub cache_trust: Duration,
    /// How long a shutdown may take before what is left is cut off.
    pub grace: Duration,
}

/// A token of the admin API.
#[derive(Clone, PartialEq, Eq)]
pub struct TokenConfig {
    /// Who it is, for the audit log.
    pub name: String,
    /// What it may do.
    pub role: Role,
    /// Its SHA-256; the token itself is nowhere in the configuration.
    pub sha256: [u8; 32],
    /// Only records of this tenant; `None`: of all.
    pub tenant: Option<TenantScope>,
}

impl fmt::Debug for TokenConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TokenConfig {{ {}, {:?} }}", self.name, self.role)
    }
}

/// What a token may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Look.
    Reader,
    /// Look and act.
    Operator,
    /// Reserve, complete and what belongs to it; start and signal runs.
    Service,
    /// Pull tasks and tell their results.
    Worker,
}

impl Role {
    /// The word for it in the configuration and in `openapi.yaml`.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Reader => "reader",
            Self::Operator => "operator",
            Self::Service => "service",
            Self::Worker => "worker",
        }
    }
}

/// The log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogConfig {
    /// `text` for people, `json` for machines.
    pub format: LogFormat,
    /// A filter such as `info` or `oncegate=debug`.
    pub filter: String,
}

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}
