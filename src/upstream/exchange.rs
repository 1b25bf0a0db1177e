//! One call of an upstream whose whole answer is wanted, and what came of it.

use bytes::{Bytes, BytesMut};
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, HeaderMap};
use http::{Request, StatusCode, response};
use http_body::Body as _;
use http_body_util::BodyExt;

use super::{OutBody, SendError, SendProgress, Sent, Upstreams};
use crate::body::{Body, BoxError};
use crate::domain::message;
use crate::domain::scope::PoolId;

/// What came of a call.
pub enum Exchange {
    /// No byte reached the upstream.
    NotSent(SendError),
    /// A byte was sent and no whole answer came.
    Broken {
        /// What broke, for the log.
        cause: BoxError,
        /// The status of the answer that broke off, if it came so far.
        status: Option<StatusCode>,
    },
    /// An answer came whole, as far as its framing tells: a body that ends with its connection
    /// counts as whole when that ended cleanly (RFC 9112 section 8).
    Whole(response::Parts, Bytes),
    /// An answer began that can't be kept: a stream, or one over the limit. What is here already
    /// and what is still to come.
    Unkept(response::Parts, Bytes, Body),
}

/// Calls the pool and reads the answer, up to `body_bytes_max`. The headers of the answer are
/// end-to-end ones.
pub async fn call(
    upstreams: &Upstreams,
    pool: &PoolId,
    request: Request<Bytes>,
    progress: &SendProgress,
    body_bytes_max: usize,
) -> Exchange {
    let request = request.map(OutBody::Full);
    let response = match upstreams.send(pool, request, progress).await {
        Ok(response) => response,
        Err(error) if error.sent == Sent::No => return Exchange::NotSent(error),
        Err(error) => {
            return Exchange::Broken {
                cause: Box::new(error),
                status: None,
            };
        }
    };
    let (mut parts, body) = response.into_parts();
    let keep = may_be_kept(&parts, body_bytes_max);
    parts.headers = message::end_to_end(std::mem::take(&mut parts.headers));
    if keep {
        collect(parts, body, body_bytes_max).await
    } else {
        Exchange::Unkept(parts, Bytes::new(), body)
    }
}

/// Whether the headers let an answer be kept with its body.
fn may_be_kept(parts: &response::Parts, body_bytes_max: usize) -> bool {
    !is_event_stream(&parts.headers) && announced(&parts.headers) <= body_bytes_max as u64
}

fn is_event_stream(headers: &HeaderMap) -> bool {
    let content_type = headers.get(CONTENT_TYPE).map(http::HeaderValue::as_bytes);
    content_type.is_some_and(|value| {
        let essence = value.split(|byte| *byte == b';').next().unwrap_or_default();
        essence
            .trim_ascii()
            .eq_ignore_ascii_case(b"text/event-stream")
    })
}

/// The `Content-Length`, or zero when there is none.
fn announced(headers: &HeaderMap) -> u64 {
    let value = headers
        .get(CONTENT_LENGTH)
        .and_then(|value| value.to_str().ok());
    value.and_then(|value| value.parse().ok()).unwrap_or(0)
}

async fn collect(parts: response::Parts, mut body: Body, body_bytes_max: usize) -> Exchange {
    // Copied into memory of its own, so that a kept body holds no connection's buffer alive.
    let hint = body.size_hint().lower().min(body_bytes_max as u64);
    let mut bytes = BytesMut::with_capacity(usize::try_from(hint).unwrap_or(0));
    while let Some(frame) = body.frame().await {
        match frame {
            Ok(frame) => {
                // Trailers are dropped with their announcement (RFC 9110 section 6.5.1).
                if let Ok(data) = frame.into_data() {
                    bytes.extend_from_slice(&data);
                }
            }
            Err(cause) => {
                return Exchange::Broken {
                    cause,
                    status: Some(parts.status),
                };
            }
        }
        if bytes.len() > body_bytes_max {
            return Exchange::Unkept(parts, bytes.freeze(), body);
        }
    }
    Exchange::Whole(parts, bytes.freeze())
}
