//! One request at a time to the admin API.
//!
//! hyper's client and no URL library: a record's key may be `..`, and a library that normalises
//! paths could not name it.

use std::net::IpAddr;
use std::time::Duration;

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE};
use http::{HeaderValue, Method, Request, Uri};
use http_body_util::{BodyExt, Full, Limited};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;

use super::gateway::Failure;
use crate::head::path_segment;

/// How long connecting may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a request may take, the answer included: longer than the gateway's own limit.
const TIMEOUT: Duration = Duration::from_secs(40);
/// The longest answer that is read, in bytes: a full page of records is far below.
const ANSWER_BYTES_MAX: usize = 4 * 1024 * 1024;

/// A path with those parameters that have a value.
pub(super) fn path(base: &str, parameters: &[(&str, Option<&str>)]) -> String {
    let given = parameters.iter().filter_map(|(name, value)| {
        let value = path_segment((*value)?);
        Some(format!("{name}={value}"))
    });
    format!("{base}?{}", given.collect::<Vec<_>>().join("&"))
}

/// A gateway's admin API, and who asks.
pub(super) struct Client {
    base: String,
    authorization: Option<HeaderValue>,
    http: legacy::Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
}

impl Client {
    /// `admin` is a URL, or an address as `serve --admin` takes it. Without a token it reaches what
    /// is open to everyone.
    pub(super) fn new(admin: &str, token: Option<&str>) -> Result<Self, Failure> {
        let base = if admin.contains("://") {
            admin.trim_end_matches('/').to_owned()
        } else {
            format!("http://{admin}")
        };
        let uri: Uri = base.parse().map_err(|_| wrong_admin(admin))?;
        let (scheme, host) = (uri.scheme_str(), uri.host());
        let secure = scheme == Some("https");
        let host = host.filter(|_| secure || scheme == Some("http"));
        let host = host.ok_or_else(|| wrong_admin(admin))?;
        if token.is_some() && !secure && !is_loopback(host) {
            eprintln!("warning: the token goes to {host} unencrypted; prefer https://");
        }
        let authorization = token.map(bearer).transpose()?;
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        tcp.set_connect_timeout(Some(CONNECT_TIMEOUT));
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config(tls(secure)?)
            .https_or_http()
            .enable_http1()
            .wrap_connector(tcp);
        Ok(Self {
            base,
            authorization,
            http: legacy::Client::builder(TokioExecutor::new()).build(connector),
        })
    }

    pub(super) async fn get(&self, path: &str) -> Result<Value, Failure> {
        self.call(Method::GET, path, Bytes::new()).await
    }

    pub(super) async fn post(&self, path: &str, body: &Value) -> Result<Value, Failure> {
        self.call(Method::POST, path, body.to_string().into()).await
    }

    /// What stands at a path that answers with text.
    pub(super) async fn text(&self, path: &str) -> Result<String, Failure> {
        let (status, body) = self.send(Method::GET, path, Bytes::new()).await?;
        if status == 200 {
            return Ok(String::from_utf8_lossy(&body).into_owned());
        }
        Err(self.failure(status, serde_json::from_slice(&body).ok()))
    }

    async fn call(&self, method: Method, path: &str, body: Bytes) -> Result<Value, Failure> {
        let (status, body) = self.send(method, path, body).await?;
        match serde_json::from_slice(&body).ok() {
            Some(answer) if status == 200 => Ok(answer),
            parsed => Err(self.failure(status, parsed)),
        }
    }

    fn failure(&self, status: u16, answer: Option<Value>) -> Failure {
        match answer {
            Some(problem) if problem["detail"].is_string() => refused(status, &problem),
            _ => Failure::NoAnswer(format!(
                "what answers at {} (status {status}) is no admin listener of a gateway; name it \
                 with --admin URL",
                self.base
            )),
        }
    }

    async fn send(&self, method: Method, path: &str, body: Bytes) -> Result<(u16, Bytes), Failure> {
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.base))
            .header(CONTENT_TYPE, "application/json")
            .body(Full::new(body))
            .map_err(|error| Failure::NoAnswer(format!("the request can't be made: {error}")))?;
        let authorization = self.authorization.clone();
        request
            .headers_mut()
            .extend(authorization.map(|value| (AUTHORIZATION, value)));
        let answer = tokio::time::timeout(TIMEOUT, self.exchange(request)).await;
        answer.map_err(|_| {
            Failure::NoAnswer(format!(
                "the gateway at {} did not answer in time",
                self.base
            ))
        })?
    }

    async fn exchange(&self, request: Request<Full<Bytes>>) -> Result<(u16, Bytes), Failure> {
        let response = self.http.request(request).await.map_err(|error| {
            let what = if error.is_connect() {
                "can't be reached"
            } else {
                "broke the connection"
            };
            let cause = innermost(&error);
            Failure::NoAnswer(format!(
                "the gateway at {} {what} ({cause}); is it running? Name another with --admin URL",
                self.base
            ))
        })?;
        let status = response.status().as_u16();
        let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX);
        let body = body.collect().await.map_err(|error| {
            Failure::NoAnswer(format!("the answer of {} broke off: {error}", self.base))
        })?;
        Ok((status, body.to_bytes()))
    }
}

fn bearer(token: &str) -> Result<HeaderValue, Failure> {
    let mut value = HeaderValue::try_from(format!("Bearer {token}"))
        .map_err(|_| Failure::NoAnswer("the token holds a character that none has".into()))?;
    value.set_sensitive(true);
    Ok(value)
}

fn refused(status: u16, problem: &Value) -> Failure {
    let text = |name: &str| problem[name].as_str().unwrap_or_default().to_owned();
    Failure::Refused {
        status,
        detail: format!("{}. {}", text("title"), text("detail")),
    }
}

fn wrong_admin(admin: &str) -> Failure {
    Failure::NoAnswer(format!(
        "--admin {admin} is no address; write http://HOST:PORT, https://HOST:PORT or HOST:PORT"
    ))
}

fn is_loopback(host: &str) -> bool {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost"
        || bare
            .parse()
            .is_ok_and(|address: IpAddr| address.is_loopback())
}

/// Trusts what the system trusts, or what `SSL_CERT_FILE` names. Without TLS it trusts nobody.
fn tls(secure: bool) -> Result<rustls::ClientConfig, Failure> {
    let mut roots = rustls::RootCertStore::empty();
    if secure {
        let found = rustls_native_certs::load_native_certs();
        roots.add_parsable_certificates(found.certs);
        if roots.is_empty() {
            let why = "no trusted certificates were found; name them with SSL_CERT_FILE=FILE";
            return Err(Failure::NoAnswer(why.into()));
        }
    }
    let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| Failure::NoAnswer(error.to_string()))?;
    Ok(config.with_root_certificates(roots).with_no_client_auth())
}

fn innermost(error: &dyn std::error::Error) -> String {
    let mut innermost = error;
    while let Some(cause) = innermost.source() {
        innermost = cause;
    }
    innermost.to_string()
}
