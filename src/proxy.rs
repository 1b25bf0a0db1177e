//! HTTP in, HTTP out: what stands between clients and the services behind the gateway.

use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;

pub mod upstream;

/// Why a body broke off.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A body of either direction, read piece by piece.
pub type Body = UnsyncBoxBody<Bytes, BoxError>;
