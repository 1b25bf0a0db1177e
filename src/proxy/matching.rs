//! Which route a request belongs to, and whether it is guarded. Pure.
//!
//! The upstream sees the path byte for byte as the client sent it; matching must not be fooled by
//! what the upstream may make of it. So paths are compared after two foldings that no sane service
//! tells apart: percent-encoded unreserved characters are decoded (RFC 3986 section 6.2.2.2) and
//! empty segments left out. A path with dot segments, however they are encoded, is refused:
//! honest clients resolve them (RFC 3986 section 5.2.4), and whether `/v1/../admin` is below
//! `/v1/` is a matter on which a gateway and a service behind it must never disagree.

use std::borrow::Cow;

use http::header::{HOST, UPGRADE};
use http::request::Parts;
use http::uri::Authority;
use http::{HeaderMap, Method, Uri, Version};

use crate::config::{PathPattern, Route};
use crate::domain::message;
use crate::domain::policy::NEVER_GUARDED;
use crate::problem::{Kind, Problem};

/// What a request is, given the routes.
#[derive(Clone, Copy, Debug)]
pub struct Matched<'a> {
    /// The first route that matches.
    pub route: &'a Route,
    /// Whether a key in the request counts. Upgrades never are guarded, nor are the methods that
    /// change nothing.
    pub guarded: bool,
}

/// Why a request's authority is in doubt (RFC 9112 section 3.2, RFC 9113 section 8.3.1). The text
/// goes to the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuthorityError {
    /// None where one is required.
    #[error("Send a Host header.")]
    Missing,
    /// Several, or two that differ.
    #[error("The request names more than one host. Send one.")]
    Ambiguous,
    /// Not a host with an optional port.
    #[error("The host is malformed. Send a name or an address, and a port if need be.")]
    Malformed,
}

impl From<AuthorityError> for Problem {
    fn from(error: AuthorityError) -> Self {
        Self::new(Kind::RequestInvalid, error.to_string())
    }
}

/// The first route that matches.
///
/// # Errors
/// The problem to answer with: no route, a path with dot segments, or a host in doubt.
pub fn find<'a>(routes: &'a [Route], head: &Parts) -> Result<Matched<'a>, Problem> {
    let authority = authority(head.version, &head.uri, &head.headers)?;
    let path = folded(head.uri.path());
    if has_dot_segment(&path) {
        return Err(Problem::new(
            Kind::RequestInvalid,
            "Send the path without dot segments.",
        ));
    }
    let host = authority.as_ref().map(bare_host);
    let route = routes
        .iter()
        .find(|route| matches_host(route, host) && matches_path(&route.path, &path))
        .ok_or_else(|| {
            Problem::new(
                Kind::NoRoute,
                "No route of this gateway takes this host and path.",
            )
        })?;
    let guarded = names_method(route, &head.method)
        && !NEVER_GUARDED.contains(&head.method)
        && !wants_upgrade(head.version, &head.headers);
    Ok(Matched { route, guarded })
}

/// What host and port the request is for. `None`: it says that there is none, or is HTTP/1.0.
///
/// A request target in absolute form wins over `Host` (RFC 9112 section 3.2.2).
///
/// # Errors
/// When there is more than one answer, none where one is required, or a malformed one.
pub fn authority(
    version: Version,
    uri: &Uri,
    headers: &HeaderMap,
) -> Result<Option<Authority>, AuthorityError> {
    let mut hosts = headers.get_all(HOST).iter();
    let host = hosts.next();
    if hosts.next().is_some() {
        return Err(AuthorityError::Ambiguous);
    }
    let host = match host.map(http::HeaderValue::as_bytes) {
        None if version == Version::HTTP_11 => return Err(AuthorityError::Missing),
        None | Some(b"") => None,
        Some(host) => Some(Authority::try_from(host).map_err(|_| AuthorityError::Malformed)?),
    };
    let authority = match (uri.authority(), host) {
        (Some(target), Some(host)) if version >= Version::HTTP_2 && *target != host => {
            return Err(AuthorityError::Ambiguous);
        }
        (Some(target), _) => target.clone(),
        (None, Some(host)) => host,
        (None, None) if version >= Version::HTTP_2 => return Err(AuthorityError::Missing),
        (None, None) => return Ok(None),
    };
    if is_host_and_port(&authority) {
        Ok(Some(authority))
    } else {
        Err(AuthorityError::Malformed)
    }
}

/// Whether the client asks to leave HTTP (RFC 9110 section 7.8). An offer to speak HTTP/2 is none:
/// it is for one hop, may be ignored, and some clients make it with every request.
pub fn wants_upgrade(version: Version, headers: &HeaderMap) -> bool {
    version == Version::HTTP_11
        && message::nominated(headers).any(|name| name == UPGRADE)
        && headers.get_all(UPGRADE).iter().any(|value| {
            let mut protocols = value.as_bytes().split(|byte| *byte == b',');
            protocols.any(|protocol| {
                let protocol = protocol.trim_ascii();
                !protocol.is_empty() && !protocol.eq_ignore_ascii_case(b"h2c")
            })
        })
}

/// In any case: methods are case-sensitive (RFC 9110 section 9.1), but there are services to which
/// `post` is a POST, and a route that requires a key must not be passed by like that.
fn names_method(route: &Route, method: &Method) -> bool {
    let method = method.as_str();
    let mut named = route.methods.iter();
    named.any(|named| named.as_str().eq_ignore_ascii_case(method))
}

/// No user information, a host of letters, digits, `-`, `_` and `.` or an IP address, and a port
/// in digits only. More is allowed by the grammar (RFC 3986 section 3.2), but names no host.
fn is_host_and_port(authority: &Authority) -> bool {
    let host = authority.host();
    let named = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    let address = |byte: u8| byte.is_ascii_hexdigit() || matches!(byte, b':' | b'.');
    let bracketed = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'));
    let sound = match bracketed {
        Some(ip) => ip.bytes().all(address),
        None => host.bytes().all(named),
    };
    let rest = authority.as_str().strip_prefix(host);
    let port = rest.map(|rest| rest.strip_prefix(':').unwrap_or(rest));
    !host.is_empty()
        && sound
        && port.is_some_and(|port| port.bytes().all(|byte| byte.is_ascii_digit()))
}

/// The host without the dot that may end a full domain name.
fn bare_host(authority: &Authority) -> &str {
    let host = authority.host();
    host.strip_suffix('.').unwrap_or(host)
}

fn matches_host(route: &Route, host: Option<&str>) -> bool {
    match (&route.host, host) {
        (None, _) => true,
        (Some(wanted), Some(host)) => wanted.eq_ignore_ascii_case(host),
        (Some(_), None) => false,
    }
}

fn matches_path(pattern: &PathPattern, path: &str) -> bool {
    match pattern {
        PathPattern::Exact(wanted) => path == wanted,
        PathPattern::Prefix(prefix) => path.starts_with(prefix.as_str()),
    }
}

/// The path with encoded unreserved characters decoded and empty segments left out. The slash at
/// its end stays.
pub fn folded(path: &str) -> Cow<'_, str> {
    if !path.contains('%') && !path.contains("//") {
        return Cow::Borrowed(path);
    }
    let mut folded = String::with_capacity(path.len());
    let mut rest = path;
    while let Some(next) = rest.chars().next() {
        let (shown, used) = match unreserved(rest.as_bytes()) {
            Some(decoded) => (char::from(decoded), 3),
            None => (next, next.len_utf8()),
        };
        if !(shown == '/' && folded.ends_with('/')) {
            folded.push(shown);
        }
        rest = &rest[used..];
    }
    Cow::Owned(folded)
}

/// The unreserved character (RFC 3986 section 2.3) that these bytes begin with in encoded form.
fn unreserved(bytes: &[u8]) -> Option<u8> {
    let [b'%', high, low, ..] = bytes else {
        return None;
    };
    let digit = |byte: &u8| char::from(*byte).to_digit(16);
    let byte = u8::try_from(digit(high)? * 16 + digit(low)?).ok()?;
    let unreserved = byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~');
    unreserved.then_some(byte)
}

/// Whether a segment means "here" or "up" to some server: also when slashes are encoded or written
/// as backslashes, and when parameters follow the dots.
fn has_dot_segment(folded: &str) -> bool {
    if !folded.contains('.') {
        return false;
    }
    let lower = folded.to_ascii_lowercase();
    lower
        .replace("%2f", "/")
        .replace("%5c", "/")
        .replace('\\', "/")
        .split('/')
        .map(|segment| segment.split(';').next().unwrap_or(segment))
        .any(|segment| segment == "." || segment == "..")
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use http::{Method, Request, StatusCode};
    use proptest::prelude::*;

    use super::*;
    use crate::domain::fingerprint::FingerprintRules;
    use crate::domain::policy::{
        Duplicates, ForwardKey, KeySource, OnStoreDown, OnUnknown, Policy,
    };
    use crate::domain::scope::PoolId;

    fn route(host: Option<&str>, path: &str, pool: &str) -> Route {
        let path = match path.strip_suffix('*') {
            Some(prefix) => PathPattern::Prefix(prefix.to_owned()),
            None => PathPattern::Exact(path.to_owned()),
        };
        Route {
            host: host.map(str::to_owned),
            path,
            methods: vec![Method::POST, Method::PATCH, Method::GET],
            policy: Arc::new(policy(pool)),
        }
    }

    fn policy(pool: &str) -> Policy {
        Policy {
            mode: crate::domain::policy::Mode::Proxy,
            follow_up: None,
            pool: PoolId::new(pool).unwrap(),
            key_source: KeySource::Header(http::HeaderName::from_static("idempotency-key")),
            required: false,
            duplicates: Duplicates::Wait,
            forward_key: ForwardKey::Verbatim,
            wait: Duration::ZERO,
            lease: Duration::ZERO,
            timeout: Duration::ZERO,
            linger: Duration::ZERO,
            valid_for: Duration::ZERO,
            tombstone_for: Duration::ZERO,
            on_unknown: OnUnknown::Hold,
            store_5xx: true,
            release_statuses: Vec::new(),
            store_set_cookie: false,
            on_store_down: OnStoreDown::Refuse,
            body_bytes_max: 0,
            store_body_bytes_max: 0,
            fingerprint: FingerprintRules::default(),
            retry: crate::domain::workflow::Retry::DEFAULT,
        }
    }

    fn head(line: &str, fields: &[(&str, &str)]) -> Parts {
        let (method, uri) = line.split_once(' ').unwrap();
        let mut request = Request::builder().method(method).uri(uri);
        for (name, value) in fields {
            request = request.header(*name, *value);
        }
        request.body(()).unwrap().into_parts().0
    }

    /// The pool of the route and whether the request is guarded, or the problem's status.
    fn matched(routes: &[Route], head: &Parts) -> Result<(String, bool), StatusCode> {
        match find(routes, head) {
            Ok(found) => Ok((found.route.policy.pool.to_string(), found.guarded)),
            Err(problem) => Err(problem.kind().status()),
        }
    }

    fn pool(routes: &[Route], target: &str) -> Result<String, StatusCode> {
        let head = head(&format!("POST {target}"), &[("host", "a")]);
        matched(routes, &head).map(|(pool, _)| pool)
    }

    #[test]
    fn the_first_route_that_matches_wins() {
        let routes = [
            route(Some("b.example"), "/*", "host"),
            route(None, "/v1/pay", "exact"),
            route(None, "/v1/*", "prefix"),
        ];
        assert_eq!(pool(&routes, "/v1/pay").as_deref(), Ok("exact"));
        assert_eq!(pool(&routes, "/v1/pay?x=/../").as_deref(), Ok("exact"));
        assert_eq!(pool(&routes, "/v1/pay/").as_deref(), Ok("prefix"));
        assert_eq!(pool(&routes, "/v1/").as_deref(), Ok("prefix"));
        assert_eq!(pool(&routes, "/v1"), Err(StatusCode::NOT_FOUND));
        assert_eq!(pool(&routes, "/V1/pay"), Err(StatusCode::NOT_FOUND));
        let star = head("OPTIONS *", &[("host", "a")]);
        assert_eq!(matched(&routes, &star), Err(StatusCode::NOT_FOUND));
    }

    #[test]
    fn a_host_is_the_same_in_any_case_with_any_port_and_in_any_form() {
        let routes = [
            route(Some("api.example"), "/*", "named"),
            route(Some("[::1]"), "/*", "ipv6"),
            route(None, "/*", "any"),
        ];
        for (target, host, expected) in [
            ("/", "api.example", "named"),
            ("/", "API.Example:8080", "named"),
            ("/", "api.example.", "named"),
            ("http://api.example/", "other.example", "named"),
            ("/", "api.example.evil", "any"),
            ("/", "[::1]:80", "ipv6"),
            ("/", "", "any"),
        ] {
            let head = head(&format!("GET {target}"), &[("host", host)]);
            let found = matched(&routes, &head).map(|(pool, _)| pool);
            assert_eq!(found.as_deref(), Ok(expected), "{target} {host}");
        }
        let mut http2 = head("GET https://api.example/", &[]);
        http2.version = Version::HTTP_2;
        assert_eq!(matched(&routes, &http2), Ok(("named".into(), false)));
    }

    #[test]
    fn a_host_in_doubt_is_refused() {
        let ask = |version, target: &str, hosts: &[&str]| {
            let hosts: Vec<_> = hosts.iter().map(|host| ("host", *host)).collect();
            let head = head(&format!("GET {target}"), &hosts);
            authority(version, &head.uri, &head.headers)
        };
        let (h1, h2) = (Version::HTTP_11, Version::HTTP_2);
        assert_eq!(ask(h1, "/", &[]), Err(AuthorityError::Missing));
        assert_eq!(ask(h2, "/", &[]), Err(AuthorityError::Missing));
        assert_eq!(ask(Version::HTTP_10, "/", &[]), Ok(None));
        assert_eq!(ask(h1, "/", &["a", "a"]), Err(AuthorityError::Ambiguous));
        assert_eq!(ask(h2, "http://a/", &["b"]), Err(AuthorityError::Ambiguous));
        assert!(ask(h2, "http://a/", &["A"]).is_ok());
        for host in [
            "a b", "a/b", "a,b", "user@a", "a:b", "::1", "a:80:80", "a?b", "@", "a\"", "a'b",
            "a%2eb",
        ] {
            assert_eq!(
                ask(h1, "/", &[host]),
                Err(AuthorityError::Malformed),
                "{host}"
            );
        }
        let with_user = ask(h1, "http://user:pass@a/", &["a"]);
        assert_eq!(with_user, Err(AuthorityError::Malformed));
    }

    #[test]
    fn a_path_can_not_be_written_so_that_it_slips_past_its_route() {
        let routes = [route(None, "/v1/*", "guarded"), route(None, "/*", "rest")];
        for target in [
            "/v1/x",
            "//v1/x",
            "/v1//x",
            "/%761/x",
            "/%76%31/%78",
            "///v1///",
        ] {
            assert_eq!(pool(&routes, target).as_deref(), Ok("guarded"), "{target}");
        }
        for target in [
            "/v1%2Fx",
            "/v1;a/x",
            "/v1%2",
            "/v1%",
            "/%C3%A9",
            "/v1.x/.a/..b/c..",
        ] {
            assert_eq!(pool(&routes, target).as_deref(), Ok("rest"), "{target}");
        }
    }

    #[test]
    fn a_path_with_dot_segments_is_refused_however_they_are_written() {
        let routes = [route(None, "/*", "any")];
        for target in [
            "/v1/../admin",
            "/v1/..",
            "/./v1",
            "/v1/.",
            "/v1/%2e%2e/admin",
            "/v1/.%2E/admin",
            "/v1/..%2fadmin",
            "/v1%2F..%2Fadmin",
            "/v1/..%5cadmin",
            "/v1/..;/admin",
            "/v1/..;a=b/admin",
            "/v1/%2e%2e;/admin",
            "//..//admin",
            "http://a/v1/../admin",
        ] {
            assert_eq!(
                pool(&routes, target),
                Err(StatusCode::BAD_REQUEST),
                "{target}"
            );
        }
        assert_eq!(pool(&routes, "/v1/x?next=/../y").as_deref(), Ok("any"));
    }

    #[test]
    fn upgrades_and_methods_that_change_nothing_are_never_guarded() {
        let routes = [route(None, "/*", "any")];
        let guarded = |line: &str, fields: &[(&str, &str)]| {
            let fields = [&[("host", "a")], fields].concat();
            matched(&routes, &head(line, &fields)).unwrap().1
        };
        assert!(guarded("POST /", &[]));
        assert!(guarded("post /", &[]), "it is a POST to some services");
        assert!(!guarded("PUT /", &[]), "the route does not name it");
        for method in ["GET", "HEAD", "OPTIONS", "TRACE"] {
            assert!(!guarded(&format!("{method} /"), &[]), "{method}");
        }
        let upgrade = ("connection", "keep-alive, Upgrade");
        assert!(!guarded("POST /", &[upgrade, ("upgrade", "websocket")]));
        assert!(!guarded(
            "POST /",
            &[upgrade, ("upgrade", "h2c, websocket")]
        ));
        assert!(
            guarded("POST /", &[("upgrade", "websocket")]),
            "not asked of this hop"
        );
        assert!(
            guarded("POST /", &[upgrade, ("upgrade", "h2c")]),
            "an offer, no wish"
        );
        assert!(guarded("POST /", &[upgrade]));
    }

    proptest! {
        #[test]
        fn folding_leaves_no_empty_segment_and_adds_nothing(path in "/[a-z/%0-9A-F.é]{0,30}") {
            let once = folded(&path);
            prop_assert!(!once.contains("//"));
            prop_assert!(once.len() <= path.len());
        }

        #[test]
        fn folding_a_well_formed_path_twice_is_folding_it_once(
            path in "/([a-z/.é]|%[0-9A-Fa-f]{2}){0,30}",
        ) {
            let once = folded(&path);
            prop_assert_eq!(folded(&once), once.clone());
        }
    }
}
