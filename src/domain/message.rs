//! An upstream's answer as it is kept, and which of its headers survive.
//!
//! Headers are kept as one block of bytes in the order in which they came, repeats included and
//! values untouched. Framing is the hop's own and never kept (RFC 9110 section 7.6.1, RFC 9112
//! section 6); neither is what would be wrong or secret when told again later.

use bytes::{Buf, Bytes, BytesMut};
use http::header::{
    AGE, CONNECTION, CONTENT_LENGTH, DATE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER,
    SET_COOKIE, TE, TRAILER, TRANSFER_ENCODING, UPGRADE, WWW_AUTHENTICATE,
};

/// The client's key, unless its route says that it stands elsewhere.
pub const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// What became of a guarded request, in a word.
pub const IDEMPOTENCY_STATUS: HeaderName = HeaderName::from_static("idempotency-status");
/// `true` on every answer that was stored before this request came.
pub const IDEMPOTENT_REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");
/// The id of the decision that the answer comes from.
pub const IDEMPOTENCY_DECISION: HeaderName = HeaderName::from_static("idempotency-decision");
/// When that decision was committed (RFC 3339).
pub const IDEMPOTENCY_CREATED: HeaderName = HeaderName::from_static("idempotency-created");
/// Until when it is replayed (RFC 3339).
pub const IDEMPOTENCY_EXPIRES: HeaderName = HeaderName::from_static("idempotency-expires");

/// The gateway's own headers: set by it alone, dropped from whatever comes in on either side.
pub const OWN_HEADERS: [HeaderName; 5] = [
    IDEMPOTENCY_STATUS,
    IDEMPOTENT_REPLAYED,
    IDEMPOTENCY_DECISION,
    IDEMPOTENCY_CREATED,
    IDEMPOTENCY_EXPIRES,
];

/// Headers that hold credentials, which must not be kept in clear.
pub const CREDENTIAL_HEADERS: [&str; 3] = ["authorization", "cookie", "proxy-authorization"];

/// Beginnings of names that tell where a request came from.
const ORIGIN_PREFIXES: [&str; 3] = ["forwarded", "x-forwarded-", "x-real-ip"];

/// Whether a header of this name, in small letters, tells where a request came from.
#[must_use]
pub fn tells_origin(name: &str) -> bool {
    // Services behind CGI, WSGI and the like can't tell the one from the other.
    let name = name.replace('_', "-");
    ORIGIN_PREFIXES
        .iter()
        .any(|prefix| name.starts_with(prefix))
}

/// Names that are for one hop whatever `Connection` says (RFC 9110 section 7.6.1).
const HOP_BY_HOP: [HeaderName; 9] = [
    CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    HeaderName::from_static("proxy-authenticate"),
    HeaderName::from_static("proxy-authentication-info"),
    TE,
    TRAILER,
    TRANSFER_ENCODING,
    UPGRADE,
];

/// Names that are passed on and not kept.
const NOT_KEPT: [HeaderName; 5] = [AGE, CONTENT_LENGTH, DATE, RETRY_AFTER, WWW_AUTHENTICATE];

/// Beginnings of names that are passed on and not kept.
const NOT_KEPT_PREFIXES: [&str; 5] = [
    "access-control-",
    "idempotency-",
    "proxy-",
    "ratelimit",
    "x-ratelimit",
];

/// An answer as a decision keeps it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recorded {
    /// Three digits, as the upstream gave it.
    pub status: u16,
    /// The end-to-end headers that are kept.
    pub headers: HeaderBlock,
    /// What the upstream allowed the first request's `Origin`, if it had one.
    pub cors: Option<Cors>,
    /// The body, as coded as `Content-Encoding` says; `None`: it was not kept.
    pub body: Option<Bytes>,
}

/// CORS headers (Fetch standard, section 3.2) and the origin that they were for. They are told
/// again to that origin only, and to all when the upstream said `*`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cors {
    /// The first request's `Origin`.
    pub origin: Bytes,
    /// The `Access-Control-*` headers of the answer to it.
    pub headers: HeaderBlock,
}

/// Header lines as one piece of memory: `name: value CR LF`, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeaderBlock(Bytes);

impl HeaderBlock {
    /// Copies lines into a block, so that it keeps no connection's buffer alive.
    pub fn new<'a>(lines: impl Iterator<Item = (&'a HeaderName, &'a HeaderValue)>) -> Self {
        let mut block = BytesMut::new();
        for (name, value) in lines {
            block.extend_from_slice(name.as_str().as_bytes());
            block.extend_from_slice(b": ");
            block.extend_from_slice(value.as_bytes());
            block.extend_from_slice(b"\r\n");
        }
        Self(block.freeze())
    }

    /// Takes back what the store holds. `None` when it is not a block of header lines.
    #[must_use]
    pub fn stored(bytes: Bytes) -> Option<Self> {
        let block = Self(bytes);
        let sound = block.parsed().all(|line| line.is_some());
        sound.then_some(block)
    }

    /// The bytes that the store holds.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The lines, in order.
    pub fn lines(&self) -> impl Iterator<Item = (HeaderName, HeaderValue)> {
        self.parsed().flatten()
    }

    /// Memory held, in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is no line.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn parsed(&self) -> impl Iterator<Item = Option<(HeaderName, HeaderValue)>> {
        let mut rest = self.0.clone();
        std::iter::from_fn(move || {
            if rest.is_empty() {
                return None;
            }
            let Some(end) = memchr::memmem::find(&rest, b"\r\n") else {
                rest = Bytes::new();
                return Some(None);
            };
            let line = rest.split_to(end);
            rest.advance(2);
            Some(parse_line(&line))
        })
    }
}

/// The value is a part of the block, not a copy: a replay copies no header.
fn parse_line(line: &Bytes) -> Option<(HeaderName, HeaderValue)> {
    let colon = memchr::memmem::find(line, b": ")?;
    let name = HeaderName::from_bytes(&line[..colon]).ok()?;
    let value = HeaderValue::from_maybe_shared(line.slice(colon + 2..)).ok()?;
    Some((name, value))
}

/// What is left of a message's headers for the next hop, in their order: without what is for one
/// hop, by the fixed names or because `Connection` names it (RFC 9110 section 7.6.1), and without
/// the gateway's own, so that neither a client nor an upstream can forge them. Trailers go with
/// their announcement.
#[must_use]
pub fn end_to_end(headers: HeaderMap) -> HeaderMap {
    let named: Vec<HeaderName> = nominated(&headers).collect();
    let stays = |name: &HeaderName| {
        !named.contains(name) && !HOP_BY_HOP.contains(name) && !reads_as_own(name)
    };
    let mut kept = HeaderMap::with_capacity(headers.len());
    let mut stayed = None;
    for (name, value) in headers {
        if let Some(name) = name {
            stayed = stays(&name).then_some(name);
        }
        if let Some(name) = &stayed {
            kept.append(name.clone(), value);
        }
    }
    kept
}

/// Whether a name is one of the gateway's own, also to services that can't tell `_` from `-`, such
/// as those behind CGI and WSGI.
fn reads_as_own(name: &HeaderName) -> bool {
    OWN_HEADERS.contains(name)
        || name.as_str().contains('_') && {
            let name = name.as_str().replace('_', "-");
            OWN_HEADERS.iter().any(|own| own.as_str() == name)
        }
}

/// The header names that `Connection` nominates.
pub fn nominated(headers: &HeaderMap) -> impl Iterator<Item = HeaderName> {
    headers
        .get_all(CONNECTION)
        .iter()
        .flat_map(|value| value.as_bytes().split(|byte| *byte == b','))
        .filter_map(|token| HeaderName::from_bytes(token.trim_ascii()).ok())
}

/// The media type that a `Content-Type` names, without parameters and in lower case.
#[must_use]
pub fn media_type(content_type: &[u8]) -> String {
    let end = content_type.iter().position(|byte| *byte == b';');
    let named = &content_type[..end.unwrap_or(content_type.len())];
    String::from_utf8_lossy(named.trim_ascii()).to_ascii_lowercase()
}

/// Whether what has this media type is JSON.
#[must_use]
pub fn is_json(media_type: &str) -> bool {
    media_type == "application/json" || media_type.ends_with("+json")
}

impl Recorded {
    /// Keeps an answer whose hop-by-hop headers are already gone. `origin` is the request's.
    #[must_use]
    pub fn new(
        status: u16,
        headers: &HeaderMap,
        body: Option<Bytes>,
        origin: Option<&HeaderValue>,
        store_set_cookie: bool,
    ) -> Self {
        let kept = headers
            .iter()
            .filter(|(name, _)| is_kept(name, store_set_cookie));
        let cors = origin.map(|origin| Cors {
            origin: Bytes::copy_from_slice(origin.as_bytes()),
            headers: HeaderBlock::new(headers.iter().filter(|(name, _)| is_cors(name))),
        });
        Self {
            status,
            headers: HeaderBlock::new(kept),
            cors: cors.filter(|cors| !cors.headers.is_empty()),
            body,
        }
    }

    /// The CORS headers that a request with this `Origin` may be told.
    pub fn cors_for(
        &self,
        origin: Option<&HeaderValue>,
    ) -> impl Iterator<Item = (HeaderName, HeaderValue)> {
        let cors = self.cors.as_ref().filter(|cors| {
            let for_all = cors.headers.lines().any(|(name, value)| {
                name == http::header::ACCESS_CONTROL_ALLOW_ORIGIN && value == "*"
            });
            origin.is_some_and(|origin| for_all || origin.as_bytes() == &cors.origin[..])
        });
        cors.into_iter().flat_map(|cors| cors.headers.lines())
    }

    /// Memory held, in bytes.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        let cors = self.cors.as_ref();
        self.headers.len()
            + self.body.as_ref().map_or(0, Bytes::len)
            + cors.map_or(0, |cors| cors.origin.len() + cors.headers.len())
    }
}

fn is_cors(name: &HeaderName) -> bool {
    name.as_str().starts_with("access-control-")
}

fn is_kept(name: &HeaderName, store_set_cookie: bool) -> bool {
    let dropped = OWN_HEADERS.contains(name)
        || HOP_BY_HOP.contains(name)
        || NOT_KEPT.contains(name)
        || NOT_KEPT_PREFIXES
            .iter()
            .any(|prefix| name.as_str().starts_with(prefix));
    !dropped && (store_set_cookie || name != SET_COOKIE)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn headers(lines: &[(&str, &[u8])]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, value) in lines {
            map.append(
                HeaderName::from_bytes(name.as_bytes()).unwrap(),
                HeaderValue::from_bytes(value).unwrap(),
            );
        }
        map
    }

    #[test]
    fn repeats_order_and_raw_bytes_survive() {
        let map = headers(&[
            ("link", b"<a>; rel=x, <b>"),
            ("x-raw", b"caf\xe9: \xff"),
            ("link", b"<c>"),
            ("x-empty", b""),
        ]);
        let recorded = Recorded::new(201, &map, None, None, false);
        let lines: Vec<_> = recorded.headers.lines().collect();
        let again = headers(&[
            ("link", b"<a>; rel=x, <b>"),
            ("link", b"<c>"),
            ("x-raw", b"caf\xe9: \xff"),
            ("x-empty", b""),
        ]);
        assert_eq!(lines.len(), 4);
        assert_eq!(lines.into_iter().collect::<HeaderMap>().len(), again.len());
        let stored = HeaderBlock::stored(Bytes::copy_from_slice(recorded.headers.as_bytes()));
        assert_eq!(stored, Some(recorded.headers));
    }

    #[test]
    fn what_is_for_one_hop_or_one_moment_is_not_kept() {
        let map = headers(&[
            ("connection", b"close, X-Secret-Hop"),
            ("x-secret-hop", b"1"),
            ("keep-alive", b"timeout=5"),
            ("te", b"trailers"),
            ("trailer", b"x"),
            ("transfer-encoding", b"chunked"),
            ("upgrade", b"h2c"),
            ("proxy-authenticate", b"Basic"),
            ("proxy-status", b"x"),
            ("content-length", b"3"),
            ("date", b"x"),
            ("age", b"3"),
            ("retry-after", b"3"),
            ("ratelimit-remaining", b"3"),
            ("x-ratelimit-remaining", b"3"),
            ("www-authenticate", b"Bearer"),
            ("set-cookie", b"a=b"),
            ("access-control-allow-origin", b"*"),
            ("idempotency-status", b"replayed"),
            ("content-type", b"text/csv"),
        ]);
        let map = end_to_end(map);
        assert!(!map.contains_key("x-secret-hop"));
        let kept = |store_set_cookie| {
            let recorded = Recorded::new(200, &map, None, None, store_set_cookie);
            let names = recorded.headers.lines().map(|(name, _)| name.to_string());
            names.collect::<Vec<_>>()
        };
        assert_eq!(kept(false), ["content-type"]);
        assert_eq!(kept(true), ["set-cookie", "content-type"]);
    }

    #[test]
    fn cors_headers_are_told_again_to_their_origin_only() {
        let origin = HeaderValue::from_static("https://a.example");
        let other = HeaderValue::from_static("https://b.example");
        let told = |allow: &[u8], asked: Option<&HeaderValue>| {
            let map = headers(&[("access-control-allow-origin", allow)]);
            let recorded = Recorded::new(200, &map, None, Some(&origin), false);
            recorded.cors_for(asked).count()
        };
        assert_eq!(told(b"https://a.example", Some(&origin)), 1);
        assert_eq!(told(b"https://a.example", Some(&other)), 0);
        assert_eq!(told(b"https://a.example", None), 0);
        assert_eq!(told(b"*", Some(&other)), 1);
    }

    #[test]
    fn a_block_that_is_not_header_lines_is_refused() {
        for bytes in [&b"no colon\r\n"[..], b"a: b", b": b\r\n", b"a\x00: b\r\n"] {
            assert_eq!(HeaderBlock::stored(Bytes::copy_from_slice(bytes)), None);
        }
    }

    proptest! {
        #[test]
        fn any_legal_header_survives_the_block(
            lines in proptest::collection::vec(
                ("[a-z][a-z0-9-]{0,20}", proptest::collection::vec(
                    prop_oneof![32u8..=126, 128u8..=255], 0..40)), 0..12),
        ) {
            let parsed: Vec<(HeaderName, HeaderValue)> = lines.iter().map(|(name, value)| (
                HeaderName::from_bytes(name.as_bytes()).unwrap(),
                HeaderValue::from_bytes(value).unwrap(),
            )).collect();
            let block = HeaderBlock::new(parsed.iter().map(|(name, value)| (name, value)));
            let stored = HeaderBlock::stored(Bytes::copy_from_slice(block.as_bytes())).unwrap();
            prop_assert_eq!(stored.lines().collect::<Vec<_>>(), parsed);
        }

        #[test]
        fn no_kept_header_is_hop_by_hop(name in "[a-z][a-z-]{0,24}", nominate in any::<bool>()) {
            let mut map = headers(&[("x-end", b"1")]);
            map.append(HeaderName::from_bytes(name.as_bytes()).unwrap(), HeaderValue::from_static("v"));
            if nominate {
                map.append(CONNECTION, HeaderValue::from_str(&name).unwrap());
            }
            let map = end_to_end(map);
            let recorded = Recorded::new(200, &map, None, None, true);
            for (kept, _) in recorded.headers.lines() {
                prop_assert!(!HOP_BY_HOP.contains(&kept));
                prop_assert!(!(nominate && kept.as_str() == name));
            }
        }
    }
}
