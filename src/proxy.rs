//! HTTP in, HTTP out: what stands between clients and the services behind the gateway.
//!
//! Reading order: [`listener`] accepts and frames, [`matching`] finds the route, [`passthrough`]
//! streams what is not guarded, and [`guard`] walks what is: [`capture`] the body, find the
//! [`tenant`], ask the gate, make the [`exchange`] with an [`upstream`], settle, [`answer`].
//! Headers change between the two hops in [`forward`] only. No record is judged here.

pub mod answer;
pub mod capture;
mod coding;
mod exchange;
pub mod forward;
mod framing;
pub mod guard;
pub mod listener;
pub mod matching;
pub mod passthrough;
pub mod tenant;
pub mod upstream;

use bytes::Bytes;
use http::Response;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};

use crate::problem::Problem;

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

/// A problem as an answer.
pub fn problem_response(problem: Problem) -> Response<Body> {
    problem.into_response().map(full)
}
