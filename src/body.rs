//! HTTP bodies as they pass through, in either direction.

use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};

/// Why a body broke off; goes to the log, never to a client.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A body of either direction, read piece by piece.
pub type Body = UnsyncBoxBody<Bytes, BoxError>;

/// A body that is all there.
pub fn full(bytes: Bytes) -> Body {
    Full::new(bytes)
        .map_err(|never| match never {})
        .boxed_unsync()
}
