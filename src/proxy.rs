//! HTTP in: what stands between clients and the services behind the gateway.
//!
//! Reading order: [`listener`] accepts and frames, [`matching`] finds the route, [`passthrough`]
//! streams what is not guarded, and [`guard`] walks what is: [`capture`] the body, find the
//! [`tenant`], ask the gate, call an [`upstream`](crate::upstream), settle, [`answer`]. What a
//! route [`accept`]s is called later, by a run; clients [`watch`] it by [`lookups`].
//! Headers change between the two hops in [`forward`] only. No record is judged here.

pub mod accept;
pub mod answer;
pub mod capture;
mod coding;
pub mod forward;
mod framing;
pub mod guard;
pub mod listener;
pub mod lookups;
pub mod matching;
pub mod passthrough;
mod prefer;
pub mod tenant;
pub mod watch;

use http::Response;

pub use crate::body::{Body, BoxError, full};
use crate::problem::Problem;

/// A problem as an answer.
pub fn problem_response(problem: Problem) -> Response<Body> {
    problem.into_response().map(full)
}
