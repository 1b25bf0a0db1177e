//! The edge that clients and upstreams see: connections in, calls out, and what is between.
//!
//! Reading order: [`listener`] accepts and frames, [`matching`] finds the route, [`capture`] takes
//! a guarded body in whole, [`forward`] does the headers between the two hops, [`passthrough`]
//! streams what is not guarded. Nothing here knows SQL, and no record is judged here.

pub mod capture;
pub mod forward;
mod framing;
pub mod listener;
pub mod matching;
// pub mod passthrough;

/// Why a body broke off; goes to the log, never to a client.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A message body that streams, in either direction.
pub type Body = http_body_util::combinators::UnsyncBoxBody<bytes::Bytes, BoxError>;
