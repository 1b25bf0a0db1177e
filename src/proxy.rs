//! HTTP in, HTTP out: what stands between clients and the services behind the gateway.
//!
//! Reading order: [`listener`] accepts and frames, [`matching`] finds the route, [`capture`] takes
//! a guarded body in whole, [`forward`] does the headers between the two hops, [`upstream`] calls
//! a service, [`passthrough`] streams what is not guarded. No record is judged here.

use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;

pub mod capture;
pub mod forward;
mod framing;
pub mod listener;
pub mod matching;
pub mod passthrough;
pub mod upstream;

/// Why a body broke off; goes to the log, never to a client.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A body of either direction, read piece by piece.
pub type Body = UnsyncBoxBody<Bytes, BoxError>;
