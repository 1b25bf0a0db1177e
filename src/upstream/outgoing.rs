//! A request in the form that a target reads: its URI, `Host` and framing. Nothing else of a
//! request is touched.

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, HOST, TRANSFER_ENCODING, UPGRADE};
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{HeaderMap, HeaderValue, Method, Request, Uri};
use http_body::Body as _;

use super::OutBody;
use crate::body::{Body, full};

/// All of a request but its body, so that it can be sent again.
pub(super) struct Head {
    method: Method,
    path: PathAndQuery,
    /// The host that the client named.
    host: Option<HeaderValue>,
    headers: HeaderMap,
}

impl OutBody {
    /// The body again, if it is all here.
    pub(super) fn spare(&self) -> Option<Self> {
        match self {
            Self::Full(bytes) => Some(Self::Full(bytes.clone())),
            Self::Stream(_) => None,
        }
    }

    /// Its length in bytes, if that is known.
    fn length(&self) -> Option<u64> {
        match self {
            Self::Full(bytes) => Some(bytes.len() as u64),
            Self::Stream(body) => body.size_hint().exact(),
        }
    }

    /// Whether there is nothing to send.
    pub(super) fn is_empty(&self) -> bool {
        match self {
            Self::Full(bytes) => bytes.is_empty(),
            Self::Stream(body) => body.is_end_stream(),
        }
    }

    fn boxed(self) -> Body {
        match self {
            Self::Full(bytes) => full(bytes),
            Self::Stream(body) => body,
        }
    }
}

impl Head {
    pub(super) fn new(request: Request<OutBody>) -> (Self, OutBody) {
        let (mut parts, body) = request.into_parts();
        let named = parts.headers.remove(HOST);
        // HTTP/2 and the absolute form name it in the URI, which then is the one that counts
        // (RFC 9112 section 3.2.2).
        let authority = parts.uri.authority().map(Authority::as_str);
        let authority = authority.and_then(|name| HeaderValue::from_str(name).ok());
        let path = parts.uri.path_and_query().cloned();
        let head = Self {
            method: parts.method,
            path: path.unwrap_or_else(|| PathAndQuery::from_static("/")),
            host: authority.or(named),
            headers: parts.headers,
        };
        (head, body)
    }

    /// Whether the client asks for another protocol.
    pub(super) fn is_upgrade(&self) -> bool {
        self.headers.contains_key(UPGRADE)
    }

    /// For HTTP/1.1, in origin form.
    pub(super) fn http1(&self, authority: &Authority, keep: bool, body: OutBody) -> Request<Body> {
        let mut headers = HeaderMap::with_capacity(self.headers.len() + 2);
        headers.insert(HOST, self.host(authority, keep));
        headers.extend(self.headers.clone());
        self.frame(&mut headers, &body);
        let chunked = body.length().is_none() && !body.is_empty();
        if chunked {
            // Said outright, since hyper would send no body at all with a GET.
            headers.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
        }
        let mut request = Request::new(body.boxed());
        *request.method_mut() = self.method.clone();
        *request.uri_mut() = Uri::from(self.path.clone());
        *request.headers_mut() = headers;
        request
    }

    /// For HTTP/2. `None`: it has no such form.
    pub(super) fn http2(
        &self,
        scheme: Scheme,
        authority: &Authority,
        keep: bool,
        body: &OutBody,
    ) -> Option<Request<()>> {
        let host = self.host(authority, keep);
        let uri = Uri::builder()
            .scheme(scheme)
            .authority(host.as_bytes())
            .path_and_query(self.path.clone())
            .build()
            .ok()?;
        let mut headers = self.headers.clone();
        self.frame(&mut headers, body);
        let mut request = Request::new(());
        *request.method_mut() = self.method.clone();
        *request.uri_mut() = uri;
        *request.version_mut() = http::Version::HTTP_2;
        *request.headers_mut() = headers;
        Some(request)
    }

    fn host(&self, authority: &Authority, keep: bool) -> HeaderValue {
        let kept = self.host.as_ref().filter(|_| keep);
        kept.cloned().unwrap_or_else(|| {
            HeaderValue::from_maybe_shared(Bytes::copy_from_slice(authority.as_str().as_bytes()))
                .expect("an authority is visible ASCII")
        })
    }

    /// `Content-Length` if the length is known, and 0 only where a body is expected (RFC 9110
    /// section 8.6).
    fn frame(&self, headers: &mut HeaderMap, body: &OutBody) {
        headers.remove(TRANSFER_ENCODING);
        headers.remove(CONTENT_LENGTH);
        let expected = matches!(self.method, Method::POST | Method::PUT | Method::PATCH);
        if let Some(length) = body.length()
            && (length > 0 || expected)
        {
            headers.insert(CONTENT_LENGTH, HeaderValue::from(length));
        }
    }
}
