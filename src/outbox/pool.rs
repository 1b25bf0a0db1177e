//! Intents for the gateway's own pools.

use std::time::Duration;

use bytes::Bytes;
use http::header::HOST;
use http::{Request, Uri, uri};

use super::http::request::{self, Unsendable};
use super::verdict::Tried;
use super::wall_clock;
use crate::domain::intent::{ClaimedIntent, Fault};
use crate::domain::scope::PoolId;
use crate::domain::workflow::HttpSend;
use crate::telemetry::Chain;
use crate::upstream::exchange::{self, Exchange};
use crate::upstream::{SendErrorKind, SendProgress, Upstreams};

/// Makes one try.
pub async fn send(
    upstreams: &Upstreams,
    intent: &ClaimedIntent,
    http: &HttpSend,
    pool: &str,
    progress: &SendProgress,
) -> Tried {
    let request = match request(intent, http) {
        Ok(request) => request,
        Err(error) => return Tried::unsendable(&error.to_string()),
    };
    let bytes_max = usize::try_from(http.answer_bytes_max).unwrap_or(usize::MAX);
    let pool = PoolId::stored(pool);
    match exchange::call(upstreams, &pool, request, progress, bytes_max).await {
        Exchange::NotSent(error) if error.kind == SendErrorKind::Abandoned => {
            Tried::unsent("lost", Duration::ZERO)
        }
        Exchange::NotSent(error) => {
            let (fault, outcome) = match error.kind {
                SendErrorKind::Unsendable => (Fault::Item, "unsendable"),
                _ => (Fault::Destination, "unreachable"),
            };
            Tried::failed(fault, outcome, &Chain(&error).to_string())
        }
        Exchange::Broken {
            cause,
            status: Some(status),
        } => Tried::broken(status, &Chain(&*cause).to_string()),
        Exchange::Broken {
            cause,
            status: None,
        } => Tried::failed(Fault::Destination, "broken", &Chain(&*cause).to_string()),
        Exchange::Whole(head, body) => answered(http, &head, Some(body)),
        // What is still to come is dropped with its connection.
        Exchange::Unkept(head, _, _) => answered(http, &head, None),
    }
}

fn answered(http: &HttpSend, head: &http::response::Parts, body: Option<Bytes>) -> Tried {
    let retry_after = wall_clock::retry_after(&head.headers);
    Tried::answered(&http.success, head.status, &head.headers, body, retry_after)
}

fn request(intent: &ClaimedIntent, http: &HttpSend) -> Result<Request<Bytes>, Unsendable> {
    let mut parts = uri::Parts::default();
    parts.path_and_query = Some(request::pool_path(http.path.as_ref())?);
    let mut request = Request::new(intent.body.clone());
    *request.method_mut() = request::method(http)?;
    *request.uri_mut() = Uri::from_parts(parts).map_err(|_| Unsendable::Path)?;
    *request.headers_mut() = request::headers(intent, http)?;
    if let Some(host) = request::host(http) {
        request.headers_mut().insert(HOST, host);
    }
    Ok(request)
}
