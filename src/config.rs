//! The configuration: what may be written, and what it means once validated.
//!
//! [`Config`] is what the rest of the program reads; each part gets its own slice of it. It is made
//! by [`load`] from flags, environment and a TOML file, in that order of precedence, or refused
//! with every error at once, each with its place. What may be written is in
//! `oncegate.example.toml`, with every default; a test keeps the two alike.
//!
//! The way: [`input`] gathers, `section` reads one table key by key with the forms of `parse`,
//! `resolve` and [`routing`] say which keys there are, `contradictions` compares their `value`s,
//! and [`report`] holds what was found. Nothing here opens a socket or a database.

mod contradictions;
pub mod input;
mod parse;
pub mod report;
mod resolve;
pub mod routing;
mod section;
mod store_url;
mod value;

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderName, Method, Uri};

pub use self::resolve::{Loaded, LoadedStore, load, load_store};
use crate::domain::policy::Policy;
use crate::domain::scope::{PoolId, TenantScope};

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
    /// Every limit that belongs to no single route or pool.
    pub limits: Limits,
    /// Tokens of the admin API.
    pub tokens: Vec<TokenConfig>,
    /// The log.
    pub log: LogConfig,
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
