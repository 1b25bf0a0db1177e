//! HTTP destinations: configured ones and URLs that items name.
//!
//! Every try is one request on one connection: redirects are not followed, nothing is sent again
//! by the client itself, no proxy of the environment is used. Of an answer no more is read than is
//! kept. The time limit is the caller's: it drops the future.

pub mod address;
pub mod claimed;
pub mod request;
pub mod sign;

use std::error::Error as _;
use std::path::Path;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use reqwest::{Body, Client, Request, Response, Url, redirect, retry};

use self::address::{PrivateAddress, PublicOnly};
use self::claimed::ClaimedBody;
use self::request::Unsendable;
use self::sign::SigningKey;
use super::verdict::{Tried, Verdict};
use super::wall_clock;
use crate::address::{is_public, literal};
use crate::body::BoxError;
use crate::domain::intent::{ClaimedIntent, Fault};
use crate::domain::message;
use crate::domain::workflow::HttpSend;
use crate::telemetry::Chain;
use crate::upstream::SendProgress;
use crate::upstream::tls::{self, Roots};

/// How long connecting may take, name and TLS included.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a connection is kept without use: less than most servers keep it.
const IDLE_TIMEOUT: Duration = Duration::from_secs(15);
/// Unused connections to one host that are kept.
const IDLE_MAX: usize = 8;
/// The same for each of the many hosts that items name.
const IDLE_MAX_OF_URL: usize = 1;

/// A configured HTTP server.
pub struct HttpDestination {
    client: Client,
    url: Url,
    keys: Vec<SigningKey>,
    headers: HeaderMap,
    allow_private: bool,
}

/// Whatever URLs items name; never one of a private network.
pub struct AnyUrl(Client);

impl HttpDestination {
    /// Reads the certificates; connects to nothing yet.
    ///
    /// # Errors
    /// When something of it can't be used, with why.
    pub fn new(
        url: &http::Uri,
        secrets: &[&str],
        headers: &[(HeaderName, &str)],
        allow_private: bool,
        ca: Option<&Path>,
        roots: &mut Roots,
    ) -> Result<Self, BoxError> {
        let keys: Result<_, _> = secrets
            .iter()
            .map(|secret| SigningKey::parse(secret))
            .collect();
        let mut parsed = HeaderMap::new();
        for (name, value) in headers {
            let value = HeaderValue::from_str(value);
            let mut value = value.map_err(|_| format!("header {name} has no sendable value"))?;
            value.set_sensitive(true);
            parsed.append(name, value);
        }
        Ok(Self {
            client: client(ca, allow_private, IDLE_MAX, roots)?,
            url: Url::parse(&url.to_string())?,
            keys: keys?,
            headers: parsed,
            allow_private,
        })
    }

    /// Makes one try.
    pub async fn send(
        &self,
        intent: &ClaimedIntent,
        http: &HttpSend,
        progress: &SendProgress,
    ) -> Tried {
        let request = match self.request(intent, http, progress) {
            Ok(request) => request,
            Err(error) => return Tried::unsendable(&error.to_string()),
        };
        if !self.allow_private && has_private_host(request.url()) {
            // Whoever configured it can allow it; until then its intents wait.
            return private(Fault::Destination);
        }
        exchange(&self.client, request, http, progress, Fault::Destination).await
    }

    fn request(
        &self,
        intent: &ClaimedIntent,
        http: &HttpSend,
        progress: &SendProgress,
    ) -> Result<Request, Unsendable> {
        let url = request::resolve(&self.url, http.path.as_ref())?;
        let mut headers = request::headers(intent, http)?;
        // Replaces by name and keeps repeats, so that no item stands in for the configuration.
        headers.extend(self.headers.clone());
        let (key, body) = (&*intent.idempotency_key, &intent.body);
        sign::sign(
            &mut headers,
            &self.keys,
            key,
            wall_clock::unix_seconds(),
            body,
        )
        .map_err(|_| Unsendable::Header(sign::WEBHOOK_ID.to_string()))?;
        build(&self.client, intent, http, url, headers, progress)
    }
}

impl AnyUrl {
    /// Trusts the system's certificates.
    ///
    /// # Errors
    /// When the system gives no client.
    pub fn new(roots: &mut Roots) -> Result<Self, BoxError> {
        Ok(Self(client(None, false, IDLE_MAX_OF_URL, roots)?))
    }

    /// Makes one try.
    pub async fn send(
        &self,
        intent: &ClaimedIntent,
        http: &HttpSend,
        url: &str,
        progress: &SendProgress,
    ) -> Tried {
        let request = || {
            let url = request::resolve(&request::absolute(url)?, http.path.as_ref())?;
            let headers = request::headers(intent, http)?;
            build(&self.0, intent, http, url, headers, progress)
        };
        match request() {
            Ok(request) if has_private_host(request.url()) => private(Fault::Item),
            Ok(request) => exchange(&self.0, request, http, progress, Fault::Item).await,
            Err(error) => Tried::unsendable(&error.to_string()),
        }
    }
}

fn client(
    ca: Option<&Path>,
    allow_private: bool,
    idle_max: usize,
    roots: &mut Roots,
) -> Result<Client, BoxError> {
    let alpn = [tls::H2, tls::HTTP1];
    let builder = Client::builder()
        .tls_backend_preconfigured(tls::client_config(roots.with(ca)?, &alpn))
        .redirect(redirect::Policy::none())
        .retry(retry::never())
        .referer(false)
        .no_proxy()
        .connect_timeout(CONNECT_TIMEOUT)
        .pool_idle_timeout(IDLE_TIMEOUT)
        .pool_max_idle_per_host(idle_max);
    let builder = if allow_private {
        builder
    } else {
        builder.dns_resolver(PublicOnly)
    };
    Ok(builder.build()?)
}

fn build(
    client: &Client,
    intent: &ClaimedIntent,
    http: &HttpSend,
    url: Url,
    headers: HeaderMap,
    progress: &SendProgress,
) -> Result<Request, Unsendable> {
    // The builder moves a user and password of the configured URL to `Authorization`.
    let request = client.request(request::method(http)?, url).headers(headers);
    let request = if intent.body.is_empty() {
        request
    } else {
        let body = ClaimedBody::new(intent.body.clone(), progress.clone());
        request.body(Body::wrap(body))
    };
    request.build().map_err(|_| Unsendable::Url)
}

/// One request and its answer. `private_fault`: whose fault a private address is.
async fn exchange(
    client: &Client,
    request: Request,
    http: &HttpSend,
    progress: &SendProgress,
    private_fault: Fault,
) -> Tried {
    let lost = || Tried::unsent("lost", Duration::ZERO);
    // A body asks for the claim itself, once there is a connection. Without one this is the last
    // moment at which it can be asked for.
    if request.body().is_none() && !progress.claim() {
        return lost();
    }
    let response = match client.execute(request).await {
        Ok(response) => response,
        Err(_) if progress.is_abandoned() => return lost(),
        Err(error) => return no_answer(error, private_fault),
    };
    let status = response.status();
    let retry_after = wall_clock::retry_after(response.headers());
    let headers = message::end_to_end(response.headers().clone());
    let answered = |body| Tried::answered(&http.success, status, &headers, body, retry_after);
    let tried = answered(None);
    if !matches!(tried.verdict, Verdict::Delivered(_)) {
        // The status says it all; a body that drips must not turn it into a time-out.
        return tried;
    }
    match kept_body(response, http.answer_bytes_max).await {
        Ok(body) => answered(body),
        Err(error) => Tried::broken(status, &told(error)),
    }
}

/// The body, unless it is longer than this or a stream; then no more is read, and dropping the
/// answer ends its connection.
async fn kept_body(
    mut response: Response,
    bytes_max: u64,
) -> Result<Option<Bytes>, reqwest::Error> {
    let too_long = response
        .content_length()
        .is_some_and(|length| length > bytes_max);
    if too_long || is_event_stream(response.headers()) {
        return Ok(None);
    }
    let mut body = BytesMut::new();
    while let Some(chunk) = response.chunk().await? {
        if (body.len() + chunk.len()) as u64 > bytes_max {
            return Ok(None);
        }
        body.extend_from_slice(&chunk);
    }
    Ok(Some(body.freeze()))
}

fn is_event_stream(headers: &HeaderMap) -> bool {
    let content_type = headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes);
    content_type.is_some_and(|value| {
        let essence = value.split(|byte| *byte == b';').next().unwrap_or_default();
        essence
            .trim_ascii()
            .eq_ignore_ascii_case(b"text/event-stream")
    })
}

fn no_answer(error: reqwest::Error, private_fault: Fault) -> Tried {
    if is_private(&error) {
        return private(private_fault);
    }
    let outcome = if error.is_connect() {
        "unreachable"
    } else if error.is_timeout() {
        "timeout"
    } else {
        "broken"
    };
    let fault = if error.is_builder() {
        Fault::Item
    } else {
        Fault::Destination
    };
    Tried::failed(fault, outcome, &told(error))
}

fn private(fault: Fault) -> Tried {
    Tried::failed(fault, "private_address", &PrivateAddress.to_string())
}

fn has_private_host(url: &Url) -> bool {
    let address = url.host_str().and_then(literal);
    address.is_some_and(|address| !is_public(address))
}

fn is_private(error: &reqwest::Error) -> bool {
    let mut cause = error.source();
    while let Some(error) = cause {
        if error.is::<PrivateAddress>() {
            return true;
        }
        cause = error.source();
    }
    false
}

/// URLs can hold secrets.
fn told(error: reqwest::Error) -> String {
    Chain(&error.without_url()).to_string()
}
