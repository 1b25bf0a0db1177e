//! Headers between the two hops: what of a client's request the upstream sees, and what of the
//! upstream's answer the client sees (RFC 9110 section 7.6).
//!
//! Pure. It knows no route and no key: what becomes of `Idempotency-Key` is decided elsewhere.

use std::fmt::Write as _;
use std::net::IpAddr;

use http::header::{
    ACCESS_CONTROL_EXPOSE_HEADERS, AUTHORIZATION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE,
    COOKIE, EXPECT, FORWARDED, HOST, HeaderName, HeaderValue, ORIGIN, VIA,
};
use http::uri::{Authority, PathAndQuery};
use http::{HeaderMap, StatusCode, Uri, Version, request, response};

use super::listener::Peer;
use crate::domain::message::{self, IDEMPOTENCY_KEY, OWN_HEADERS};
use crate::problem::{Kind, Problem};

/// Who the gateway is in the `Via` of answers.
const PSEUDONYM: &str = "oncegate";
const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");

/// Names that a guarded request must not strip by nominating them in `Connection`.
const PROTECTED: [HeaderName; 13] = [
    AUTHORIZATION,
    CONTENT_ENCODING,
    CONTENT_LENGTH,
    CONTENT_TYPE,
    COOKIE,
    FORWARDED,
    HOST,
    IDEMPOTENCY_KEY,
    ORIGIN,
    VIA,
    X_FORWARDED_FOR,
    X_FORWARDED_HOST,
    X_FORWARDED_PROTO,
];

/// How requests are passed on.
#[derive(Clone, Debug)]
pub struct Forwarding {
    /// Who this gateway is in the `Via` of requests: the same for no other gateway.
    pseudonym: String,
    trust_forwarded: bool,
}

impl Forwarding {
    /// `instance` tells this gateway from all others, so that a request that comes back is known;
    /// letters, digits and `-` only. `trust_forwarded`: the client is a proxy of one's own, so what
    /// it says about where a request came from is kept and added to; else it is replaced.
    pub fn new(instance: &str, trust_forwarded: bool) -> Self {
        Self {
            pseudonym: format!("{PSEUDONYM}-{instance}"),
            trust_forwarded,
        }
    }

    /// Whether this gateway passed the request on before: routes lead in a circle.
    pub fn is_loop(&self, headers: &HeaderMap) -> bool {
        headers
            .get_all(VIA)
            .iter()
            .flat_map(|value| value.as_bytes().split(|byte| *byte == b','))
            .filter_map(|hop| hop.trim_ascii().split(|byte| *byte == b' ').nth(1))
            .any(|by| by.eq_ignore_ascii_case(self.pseudonym.as_bytes()))
    }

    /// The request as the upstream is to see it: target in origin form, `Host` from the authority,
    /// end-to-end headers, and where it came from. Extensions are gone.
    pub fn request(
        &self,
        head: request::Parts,
        authority: Option<&Authority>,
        peer: &Peer,
    ) -> request::Parts {
        let (mut parts, ()) = http::Request::new(()).into_parts();
        parts.method = head.method;
        parts.uri = origin_form(&head.uri);
        let mut headers = message::end_to_end(head.headers);
        // The client was told to continue, or not, by this hop.
        headers.remove(EXPECT);
        if let Some(host) = authority.and_then(|host| HeaderValue::from_str(host.as_str()).ok()) {
            headers.insert(HOST, host);
        }
        if head.version == Version::HTTP_2 {
            join_cookies(&mut headers);
        }
        self.tell_origin(&mut headers, authority, peer);
        append_via(&mut headers, head.version, &self.pseudonym);
        parts.headers = headers;
        parts
    }

    /// Where the request came from, in both ways that are in use (RFC 7239 and `X-Forwarded-*`).
    fn tell_origin(&self, headers: &mut HeaderMap, host: Option<&Authority>, peer: &Peer) {
        if !self.trust_forwarded {
            drop_origin(headers);
        }
        let ip = peer.addr.ip().to_canonical();
        let proto = if peer.tls { "https" } else { "http" };
        let mut forwarded = format!("for={};proto={proto}", node(ip));
        if let Some(host) = host {
            // A host that got this far holds neither quote nor backslash.
            let _ = write!(forwarded, ";host=\"{host}\"");
        }
        append(headers, FORWARDED, &forwarded);
        append(headers, X_FORWARDED_FOR, &ip.to_string());
        if !headers.contains_key(X_FORWARDED_PROTO) {
            append(headers, X_FORWARDED_PROTO, proto);
        }
        if let Some(host) = host
            && !headers.contains_key(X_FORWARDED_HOST)
        {
            append(headers, X_FORWARDED_HOST, host.as_str());
        }
    }
}

/// What a request is told that this gateway has passed on before.
pub fn loop_problem() -> Problem {
    Problem::new(
        Kind::RequestInvalid,
        "The gateway's routes lead back to itself. Correct a pool's targets.",
    )
}

/// The answer as the client is to see it. To be done with every answer on its way out, a replayed
/// one too, so it names the protocol of the answer but no instance of the gateway.
pub fn response(head: &mut response::Parts) {
    head.headers = message::end_to_end(std::mem::take(&mut head.headers));
    if head.status == StatusCode::NO_CONTENT {
        head.headers.remove(CONTENT_LENGTH);
    }
    append_via(&mut head.headers, head.version, PSEUDONYM);
}

/// The first header that a request's `Connection` nominates though the gateway or the upstream
/// depends on it; `extra` are those of the route, if it has any: the key's and the tenant's header.
/// Following such a nomination would strip it, so a guarded request that makes one is refused.
pub fn nominates_protected(
    headers: &HeaderMap,
    extra: [Option<&HeaderName>; 2],
) -> Option<HeaderName> {
    message::nominated(headers).find(|name| PROTECTED.contains(name) || extra.contains(&Some(name)))
}

/// Lets a script of another origin read the gateway's own headers (Fetch standard, section 3.3.3).
/// For answers to requests that have an `Origin`.
pub fn expose_own_headers(headers: &mut HeaderMap) {
    let mut names = String::new();
    for name in OWN_HEADERS
        .iter()
        .filter(|name| headers.contains_key(*name))
    {
        if !names.is_empty() {
            names.push_str(", ");
        }
        names.push_str(name.as_str());
    }
    if !names.is_empty() {
        append(headers, ACCESS_CONTROL_EXPOSE_HEADERS, &names);
    }
}

fn origin_form(uri: &Uri) -> Uri {
    let path = uri.path_and_query().cloned();
    Uri::from(path.unwrap_or(PathAndQuery::from_static("/")))
}

/// HTTP/2 lets a client send cookies one by one; HTTP/1 has one header for all
/// (RFC 9113 section 8.2.3).
fn join_cookies(headers: &mut HeaderMap) {
    let cookies: Vec<_> = headers.get_all(COOKIE).iter().collect();
    if cookies.len() < 2 {
        return;
    }
    let joined = cookies
        .iter()
        .map(|cookie| cookie.as_bytes())
        .collect::<Vec<_>>()
        .join(&b"; "[..]);
    if let Ok(joined) = HeaderValue::from_maybe_shared(bytes::Bytes::from(joined)) {
        headers.insert(COOKIE, joined);
    }
}

fn drop_origin(headers: &mut HeaderMap) {
    let told: Vec<HeaderName> = headers
        .keys()
        .filter(|name| message::tells_origin(name.as_str()))
        .cloned()
        .collect();
    for name in told {
        headers.remove(name);
    }
}

/// A node's name (RFC 7239 section 6): an IPv6 address is bracketed and quoted.
fn node(ip: IpAddr) -> String {
    match ip {
        IpAddr::V4(ip) => ip.to_string(),
        IpAddr::V6(ip) => format!("\"[{ip}]\""),
    }
}

/// Adds this hop to the end of the list (RFC 9110 section 7.6.3).
fn append_via(headers: &mut HeaderMap, version: Version, pseudonym: &str) {
    let version = match version {
        Version::HTTP_10 => "1.0",
        Version::HTTP_2 => "2",
        _ => "1.1",
    };
    append(headers, VIA, &format!("{version} {pseudonym}"));
}

/// One more line. All that is appended here is visible ASCII.
fn append(headers: &mut HeaderMap, name: HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        headers.append(name, value);
    }
}

#[cfg(test)]
mod tests {
    use http::{Method, Request, Response};

    use super::*;

    fn forwarded(
        version: Version,
        peer: &str,
        tls: bool,
        trust: bool,
        fields: &[(&str, &str)],
    ) -> request::Parts {
        let mut request = Request::builder()
            .method("POST")
            .uri("/v1/pay?a=b")
            .version(version);
        for (name, value) in fields {
            request = request.header(*name, *value);
        }
        let head = request.body(()).unwrap().into_parts().0;
        let host = Authority::from_static("api.example:8080");
        let peer = Peer::new(peer.parse().unwrap(), tls);
        Forwarding::new("a1", trust).request(head, Some(&host), &peer)
    }

    fn lines<'a>(headers: &'a HeaderMap, name: &str) -> Vec<&'a str> {
        let lines = headers.get_all(name).iter();
        lines.map(|value| value.to_str().unwrap()).collect()
    }

    fn names(headers: &HeaderMap) -> Vec<&str> {
        let mut names: Vec<_> = headers.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        names
    }

    const V4: &str = "192.0.2.7:5000";

    #[test]
    fn what_is_for_one_hop_stays_there() {
        let head = forwarded(
            Version::HTTP_11,
            V4,
            false,
            false,
            &[
                ("host", "other.example"),
                ("connection", "close, x-hop"),
                ("x-hop", "1"),
                ("te", "trailers"),
                ("expect", "100-continue"),
                ("transfer-encoding", "chunked"),
                ("upgrade", "h2c"),
                ("idempotency-status", "replayed"),
                ("idempotency_status", "replayed"),
                ("idempotency-key", "k"),
                ("x-end", "1"),
                ("x-end", "2"),
            ],
        );
        assert_eq!(
            names(&head.headers),
            [
                "forwarded",
                "host",
                "idempotency-key",
                "via",
                "x-end",
                "x-forwarded-for",
                "x-forwarded-host",
                "x-forwarded-proto"
            ]
        );
        assert_eq!(lines(&head.headers, "host"), ["api.example:8080"]);
        assert_eq!(lines(&head.headers, "x-end"), ["1", "2"]);
        assert_eq!(head.method, Method::POST);
        assert_eq!(head.uri, "/v1/pay?a=b");
    }

    #[test]
    fn a_client_can_not_forge_where_it_comes_from() {
        let forged = [
            ("forwarded", "for=10.0.0.1"),
            ("x-forwarded-for", "10.0.0.1"),
            ("x-forwarded-for", "10.0.0.2"),
            ("x-forwarded-proto", "https"),
            ("x-forwarded-host", "evil.example"),
            ("x-forwarded-port", "1"),
            ("x-forwarded-prefix", "/x"),
            ("x-real-ip", "10.0.0.1"),
            ("x_forwarded_for", "10.0.0.1"),
            ("X-Forwarded_Proto", "https"),
            ("x_real_ip", "10.0.0.1"),
        ];
        let head = forwarded(Version::HTTP_11, V4, false, false, &forged);
        let headers = &head.headers;
        let told = r#"for=192.0.2.7;proto=http;host="api.example:8080""#;
        assert_eq!(lines(headers, "forwarded"), [told]);
        assert_eq!(lines(headers, "x-forwarded-for"), ["192.0.2.7"]);
        assert_eq!(lines(headers, "x-forwarded-proto"), ["http"]);
        assert_eq!(lines(headers, "x-forwarded-host"), ["api.example:8080"]);
        let alone = ["forwarded", "x-forwarded-for", "x-forwarded-host"];
        let alone = [&alone[..], &["x-forwarded-proto"]].concat();
        let related = |name: &&str| name.contains("forwarded") || name.contains("real");
        let left: Vec<_> = names(headers).into_iter().filter(related).collect();
        assert_eq!(left, alone);

        let head = forwarded(Version::HTTP_11, V4, false, true, &forged);
        let headers = &head.headers;
        assert_eq!(lines(headers, "forwarded"), ["for=10.0.0.1", told]);
        assert_eq!(
            lines(headers, "x-forwarded-for"),
            ["10.0.0.1", "10.0.0.2", "192.0.2.7"]
        );
        assert_eq!(lines(headers, "x-forwarded-proto"), ["https"]);
        assert_eq!(lines(headers, "x-forwarded-host"), ["evil.example"]);
        assert_eq!(lines(headers, "x-real-ip"), ["10.0.0.1"]);
    }

    #[test]
    fn an_ipv6_peer_is_quoted_where_the_grammar_wants_it() {
        let head = forwarded(Version::HTTP_2, "[2001:db8::7]:5000", true, false, &[]);
        let told = r#"for="[2001:db8::7]";proto=https;host="api.example:8080""#;
        assert_eq!(lines(&head.headers, "forwarded"), [told]);
        assert_eq!(lines(&head.headers, "x-forwarded-for"), ["2001:db8::7"]);
        let mapped = forwarded(Version::HTTP_2, "[::ffff:192.0.2.7]:5000", true, false, &[]);
        assert_eq!(lines(&mapped.headers, "x-forwarded-for"), ["192.0.2.7"]);
    }

    #[test]
    fn a_request_that_comes_back_is_known_by_its_via() {
        let sent = forwarded(Version::HTTP_2, V4, false, false, &[("via", "1.0 front")]);
        assert_eq!(lines(&sent.headers, "via"), ["1.0 front", "2 oncegate-a1"]);
        assert!(Forwarding::new("a1", false).is_loop(&sent.headers));
        assert!(!Forwarding::new("b2", false).is_loop(&sent.headers));
        let merged = HeaderMap::from_iter([(
            VIA,
            HeaderValue::from_static("1.1 front (a, b), 1.1 ONCEGATE-A1 (x)"),
        )]);
        assert!(Forwarding::new("a1", false).is_loop(&merged));
    }

    #[test]
    fn cookies_that_came_one_by_one_are_joined() {
        let cookies = [("cookie", "a=1"), ("cookie", "b=2")];
        let joined = forwarded(Version::HTTP_2, V4, true, false, &cookies);
        assert_eq!(lines(&joined.headers, "cookie"), ["a=1; b=2"]);
    }

    #[test]
    fn an_answer_loses_what_is_for_one_hop_and_what_it_could_forge() {
        let mut head = Response::builder()
            .status(204)
            .header("connection", "x-hop")
            .header("x-hop", "1")
            .header("keep-alive", "timeout=5")
            .header("content-length", "0")
            .header("idempotency-status", "replayed")
            .header("date", "Tue, 15 Nov 1994 08:12:31 GMT")
            .header("set-cookie", "a=1")
            .header("set-cookie", "b=2")
            .header("via", "1.1 back")
            .body(())
            .unwrap()
            .into_parts()
            .0;
        response(&mut head);
        assert_eq!(names(&head.headers), ["date", "set-cookie", "via"]);
        assert_eq!(lines(&head.headers, "set-cookie"), ["a=1", "b=2"]);
        assert_eq!(lines(&head.headers, "via"), ["1.1 back", "1.1 oncegate"]);
    }

    #[test]
    fn a_guarded_request_can_not_strip_what_is_depended_on() {
        let of = |value: &'static str| {
            let headers =
                HeaderMap::from_iter([(http::header::CONNECTION, HeaderValue::from_static(value))]);
            nominates_protected(&headers, [None, Some(&HeaderName::from_static("x-tenant"))])
        };
        assert_eq!(of("close, Idempotency-Key"), Some(IDEMPOTENCY_KEY));
        assert_eq!(of("AUTHORIZATION"), Some(AUTHORIZATION));
        assert_eq!(
            of("x-foo,,X-Tenant ,"),
            Some(HeaderName::from_static("x-tenant"))
        );
        assert_eq!(of("close, keep-alive, X-Foo, TE, Upgrade"), None);
    }

    #[test]
    fn only_own_headers_that_are_there_are_exposed_in_a_line_of_their_own() {
        let mut headers = HeaderMap::from_iter([
            (
                ACCESS_CONTROL_EXPOSE_HEADERS,
                HeaderValue::from_static("x-upstream"),
            ),
            (
                message::IDEMPOTENCY_STATUS,
                HeaderValue::from_static("executed"),
            ),
            (message::IDEMPOTENCY_DECISION, HeaderValue::from_static("1")),
        ]);
        expose_own_headers(&mut headers);
        assert_eq!(
            lines(&headers, "access-control-expose-headers"),
            ["x-upstream", "idempotency-status, idempotency-decision"]
        );
        let mut none = HeaderMap::new();
        expose_own_headers(&mut none);
        assert!(none.is_empty());
    }
}
