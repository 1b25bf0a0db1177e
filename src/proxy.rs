//! The data path: HTTP in, HTTP out.
//!
//! `listener` accepts, `matching` finds the route, `passthrough` streams what is not guarded and
//! `guard` walks what is: `capture` the body, find the tenant, ask the gate, call `upstream`,
//! settle, `answer`. Headers change between hops in `forward` only.

pub mod answer;
pub mod coding;
pub mod exchange;
pub mod guard;
pub mod tenant;
pub mod upstream;

use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;

/// Any error that a body can end with.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A body of whatever kind, on its way through.
pub type Body = UnsyncBoxBody<Bytes, BoxError>;
pub mod capture {
    use super::*;
    use std::time::Duration;
    #[derive(Clone)]
    pub struct BodyBudget;
    pub enum CaptureError {
        TooLarge,
        NoRoom,
        TimedOut,
        Truncated(hyper::Error),
    }
    pub struct Captured(Bytes);
    impl Captured {
        pub fn bytes(&self) -> &Bytes {
            &self.0
        }
    }
    pub async fn body(
        _: hyper::body::Incoming,
        _: usize,
        _: &BodyBudget,
        _: Duration,
    ) -> Result<Captured, CaptureError> {
        loop {}
    }
}
pub mod forward {
    use super::*;
    pub fn request(_: &mut http::request::Parts, _: &listener::Peer) {}
    pub fn answer(_: &mut http::response::Parts) {}
    pub fn nominates_protected(
        _: &http::HeaderMap,
        _: &[http::HeaderName],
    ) -> Option<http::HeaderName> {
        None
    }
}
pub mod listener {
    #[derive(Clone)]
    pub struct Peer;
}
pub mod passthrough {
    use super::*;
    use crate::domain::policy::Policy;
    pub struct Passthrough;
    impl Passthrough {
        pub async fn forward(
            &self,
            _: &Policy,
            _: http::Request<hyper::body::Incoming>,
            _: &listener::Peer,
        ) -> http::Response<Body> {
            loop {}
        }
        pub async fn forward_captured(
            &self,
            _: &Policy,
            _: http::Request<Bytes>,
            _: &listener::Peer,
        ) -> http::Response<Body> {
            loop {}
        }
    }
}
