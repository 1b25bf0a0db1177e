//! What "the same request" means, as a keyed hash.
//!
//! Two steps. [`RequestDigest`] hashes what a request is: length-prefixed method, path, query,
//! content type, content coding and the whole body, each after the route's rules. It never leaves
//! memory. [`Fingerprint`] is its keyed hash under one version of the gateway's
//! [secret](super::secret), and that is what a row holds: without the secret a stored fingerprint
//! is no oracle for a guessed body. Hashing in two steps lets a request be compared under an older
//! version without its body.

use serde_json::Value;
use subtle::ConstantTimeEq;

use crate::domain::message::{is_json, media_type};

/// The parts that are compared, as an answer may name them.
pub const COMPARED: &str = "method, path, query, content type, content coding and body";

/// The most values of a JSON body that is taken apart, counted by what begins or separates them.
/// Each takes up to some hundred bytes of memory and as little as two of the body, so that a body
/// within its limit could take a gigabyte.
pub const JSON_VALUES_MAX: usize = 100_000;

/// Raised when the way of hashing changes, so that no old row is compared with a new hash.
const ALGORITHM: &[u8] = b"oncegate fingerprint 1";

/// A keyed hash of a request, as a row holds it.
#[derive(Clone, Copy, Debug)]
pub struct Fingerprint {
    /// Which version of the secret it was made with.
    pub version: i32,
    /// The hash.
    pub hash: [u8; 32],
}

impl PartialEq for Fingerprint {
    fn eq(&self, other: &Self) -> bool {
        self.version == other.version && self.hash.ct_eq(&other.hash).into()
    }
}

impl Eq for Fingerprint {}

/// What a request is. Kept in memory only.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RequestDigest(pub(super) [u8; 32]);

/// A route's say in what is compared. The default compares bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FingerprintRules {
    /// Query parameters that don't count.
    pub ignore_query: Vec<String>,
    /// Compare JSON bodies in canonical form (RFC 8785) instead of byte for byte.
    pub canonical_json: bool,
    /// JSON pointers (RFC 6901) into the body that don't count; implies `canonical_json`.
    pub ignore_json: Vec<String>,
    /// Compare `multipart/form-data` part by part, without its boundary.
    pub multipart: bool,
}

/// The parts of a request that are compared.
#[derive(Clone, Copy, Debug)]
pub struct RequestParts<'a> {
    /// The method.
    pub method: &'a str,
    /// The path as the client sent it.
    pub path: &'a str,
    /// The raw query, without `?`.
    pub query: Option<&'a str>,
    /// The `Content-Type` value.
    pub content_type: Option<&'a [u8]>,
    /// The `Content-Encoding` value.
    pub content_encoding: Option<&'a [u8]>,
    /// The whole body.
    pub body: &'a [u8],
}

impl RequestDigest {
    /// Hashes a request after the route's rules.
    #[must_use]
    pub fn of(parts: &RequestParts<'_>, rules: &FingerprintRules) -> Self {
        let mut hasher = blake3::Hasher::new();
        let mut field = |bytes: &[u8]| {
            hasher.update(&(bytes.len() as u64).to_le_bytes());
            hasher.update(bytes);
        };
        field(ALGORITHM);
        field(parts.method.as_bytes());
        field(parts.path.as_bytes());
        field(&counted_query(parts.query, &rules.ignore_query));
        let content_type = parts.content_type.unwrap_or_default();
        field(parts.content_encoding.unwrap_or_default());
        match counted_body(content_type, parts, rules) {
            Body::Bytes => {
                field(content_type);
                field(parts.body);
            }
            Body::Json(canonical) => {
                field(content_type);
                field(b"json");
                field(&canonical);
            }
            Body::Parts(list) => {
                field(b"multipart/form-data");
                for part in &list {
                    field(part);
                }
            }
        }
        Self(*hasher.finalize().as_bytes())
    }

    /// Hashes what a caller of the API says its request is. Never equal to a request's own.
    #[must_use]
    pub fn named(text: &str) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("oncegate 2026 named fingerprint");
        hasher.update(text.as_bytes());
        Self(*hasher.finalize().as_bytes())
    }
}

/// The form in which a body is compared.
enum Body<'a> {
    Bytes,
    Json(Vec<u8>),
    Parts(Vec<&'a [u8]>),
}

fn counted_body<'a>(
    content_type: &[u8],
    parts: &RequestParts<'a>,
    rules: &FingerprintRules,
) -> Body<'a> {
    let coded = parts
        .content_encoding
        .is_some_and(|coding| coding != b"identity");
    let media_type = media_type(content_type);
    if !coded && is_json(&media_type) && (rules.canonical_json || !rules.ignore_json.is_empty()) {
        return canonical_json(parts.body, &rules.ignore_json).map_or(Body::Bytes, Body::Json);
    }
    if !coded && rules.multipart && media_type == "multipart/form-data" {
        let boundary = boundary(content_type);
        return boundary
            .and_then(|boundary| multipart(parts.body, &boundary))
            .map_or(Body::Bytes, Body::Parts);
    }
    Body::Bytes
}

fn counted_query(query: Option<&str>, ignored: &[String]) -> Vec<u8> {
    let Some(query) = query else {
        return b"-".to_vec();
    };
    let counts = |pair: &&str| {
        let name = pair.split('=').next().unwrap_or_default();
        !ignored.iter().any(|ignored| ignored == name)
    };
    let counted: Vec<&str> = query.split('&').filter(counts).collect();
    if ignored.is_empty() || !counted.is_empty() {
        format!("?{}", counted.join("&")).into_bytes()
    } else {
        b"-".to_vec()
    }
}

/// Whether a JSON body may have more than [`JSON_VALUES_MAX`] values. Text that looks like them
/// counts too.
#[must_use]
pub fn has_too_many_values(body: &[u8]) -> bool {
    memchr::memchr3_iter(b',', b'[', b'{', body)
        .nth(JSON_VALUES_MAX)
        .is_some()
}

/// RFC 8785. `None` when the body is not JSON, has too many values, or holds a number that a double
/// would round: such bodies are compared byte for byte. Of a repeated member the last one counts.
fn canonical_json(body: &[u8], ignored: &[String]) -> Option<Vec<u8>> {
    if has_too_many_values(body) {
        return None;
    }
    let mut value: Value = serde_json::from_slice(body).ok()?;
    if !is_exact(&value) {
        return None;
    }
    for pointer in ignored {
        remove(&mut value, pointer);
    }
    serde_json_canonicalizer::to_vec(&value).ok()
}

/// Whether no number in `value` is past the integers that a double holds exactly.
fn is_exact(value: &Value) -> bool {
    const EXACT_MAX: f64 = 9_007_199_254_740_991.0;
    match value {
        Value::Number(number) => number.as_f64().is_some_and(|f| f.abs() <= EXACT_MAX),
        Value::Array(items) => items.iter().all(is_exact),
        Value::Object(members) => members.values().all(is_exact),
        _ => true,
    }
}

/// Removes what an RFC 6901 pointer names, if it is there.
fn remove(value: &mut Value, pointer: &str) {
    let Some((parent, last)) = pointer.rsplit_once('/') else {
        return;
    };
    let name = last.replace("~1", "/").replace("~0", "~");
    match value.pointer_mut(parent) {
        Some(Value::Object(members)) => {
            members.shift_remove(&name);
        }
        Some(Value::Array(items)) => {
            if let Ok(index) = name.parse::<usize>()
                && index < items.len()
            {
                items[index] = Value::Null;
            }
        }
        _ => {}
    }
}

fn boundary(content_type: &[u8]) -> Option<String> {
    let content_type: mime::Mime = std::str::from_utf8(content_type).ok()?.parse().ok()?;
    Some(content_type.get_param(mime::BOUNDARY)?.as_str().to_owned())
}

/// Cuts a multipart body into its parts, each with its headers (RFC 2046, section 5.1).
/// `None` when the body is not what its boundary says: it is then compared byte for byte.
fn multipart<'a>(body: &'a [u8], boundary: &str) -> Option<Vec<&'a [u8]>> {
    let delimiter = format!("\r\n--{boundary}").into_bytes();
    let first = format!("--{boundary}").into_bytes();
    let mut rest = body.strip_prefix(&first[..])?;
    let mut list = Vec::new();
    loop {
        if rest.starts_with(b"--") {
            return Some(list);
        }
        rest = rest.strip_prefix(b"\r\n")?;
        let end = memchr::memmem::find(rest, &delimiter)?;
        list.push(&rest[..end]);
        rest = &rest[end + delimiter.len()..];
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parts(body: &[u8]) -> RequestParts<'_> {
        RequestParts {
            method: "POST",
            path: "/charges",
            query: Some("dry=1"),
            content_type: Some(b"application/json"),
            content_encoding: None,
            body,
        }
    }

    fn digest(parts: &RequestParts<'_>) -> RequestDigest {
        RequestDigest::of(parts, &FingerprintRules::default())
    }

    #[test]
    fn a_body_that_would_unfold_in_memory_is_compared_byte_for_byte() {
        let rules = FingerprintRules {
            canonical_json: true,
            ..FingerprintRules::default()
        };
        let of = |body: &str| RequestDigest::of(&parts(body.as_bytes()), &rules);
        let list = |values: usize, end: &str| format!("[{}0{end}]", "0,".repeat(values - 1));
        let most = JSON_VALUES_MAX;
        assert_eq!(of(&list(most, "")), of(&list(most, " ")));
        assert_ne!(of(&list(most + 1, "")), of(&list(most + 1, " ")));
        assert_eq!(of(&list(most + 1, "")), of(&list(most + 1, "")));
        let deep = "[".repeat(most) + &"]".repeat(most);
        assert_ne!(of(&deep), of("[]"), "and no stack overflows");
    }

    #[test]
    fn every_part_counts() {
        let base = parts(b"{}");
        let other = [
            RequestParts {
                method: "PATCH",
                ..base
            },
            RequestParts {
                path: "/refunds",
                ..base
            },
            RequestParts {
                query: Some("dry=0"),
                ..base
            },
            RequestParts {
                query: None,
                ..base
            },
            RequestParts {
                content_type: None,
                ..base
            },
            RequestParts {
                content_encoding: Some(b"gzip"),
                ..base
            },
            RequestParts {
                body: b"{ }",
                ..base
            },
        ];
        for request in &other {
            assert_ne!(digest(request), digest(&base), "{request:?}");
        }
    }

    #[test]
    fn parts_cannot_borrow_bytes_from_each_other() {
        let base = RequestParts {
            path: "/a",
            query: None,
            content_type: None,
            ..parts(b"")
        };
        let shifted = RequestParts {
            method: "POST/",
            path: "a",
            ..base
        };
        assert_ne!(digest(&base), digest(&shifted));
        let empty_query = RequestParts {
            query: Some(""),
            ..base
        };
        assert_ne!(digest(&base), digest(&empty_query));
    }

    #[test]
    fn canonical_json_ignores_order_and_space_but_not_meaning() {
        let rules = FingerprintRules {
            canonical_json: true,
            ..FingerprintRules::default()
        };
        let of = |body: &[u8]| RequestDigest::of(&parts(body), &rules);
        assert_eq!(of(br#"{"a":1,"b":2}"#), of(br#"{ "b": 2, "a": 1 }"#));
        assert_ne!(of(br#"{"a":null}"#), of(b"{}"));
        assert_ne!(of(br#"{"a":[]}"#), of(b"{}"));
        assert_ne!(of(b"9007199254740993"), of(b"9007199254740992"));
        assert_ne!(of(b"{broken"), of(b"{broken "));
        assert_ne!(
            digest(&parts(br#"{"a":1,"b":2}"#)),
            digest(&parts(br#"{"b":2,"a":1}"#))
        );
    }

    #[test]
    fn left_out_pointers_and_parameters_do_not_count() {
        let rules = FingerprintRules {
            ignore_json: vec!["/meta/sent_at".into(), "/list/0".into()],
            ignore_query: vec!["utm".into()],
            ..FingerprintRules::default()
        };
        let of = |body: &[u8], query| {
            RequestDigest::of(
                &RequestParts {
                    query,
                    ..parts(body)
                },
                &rules,
            )
        };
        let first = of(
            br#"{"n":1,"meta":{"sent_at":1},"list":[1,2]}"#,
            Some("utm=a&x=1"),
        );
        let second = of(
            br#"{"n":1,"meta":{"sent_at":2},"list":[9,2]}"#,
            Some("x=1&utm=b"),
        );
        assert_eq!(first, second);
        assert_ne!(
            first,
            of(br#"{"n":2,"meta":{"sent_at":1},"list":[1,2]}"#, Some("x=1"))
        );
        assert_eq!(of(b"{}", Some("utm=a")), of(b"{}", None));
    }

    #[test]
    fn multipart_counts_by_parts_when_the_route_says_so() {
        let rules = FingerprintRules {
            multipart: true,
            ..FingerprintRules::default()
        };
        let of = |boundary: &str, value: &str| {
            let body = format!(
                "--{boundary}\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\n{value}\r\n--{boundary}--\r\n"
            );
            let content_type = format!("multipart/form-data; boundary={boundary}");
            RequestDigest::of(
                &RequestParts {
                    content_type: Some(content_type.as_bytes()),
                    ..parts(body.as_bytes())
                },
                &rules,
            )
        };
        assert_eq!(of("x1", "value"), of("y2", "value"));
        assert_ne!(of("x1", "value"), of("x1", "other"));
    }

    proptest! {
        #[test]
        fn equal_requests_are_equal_and_a_changed_byte_is_not(
            body in proptest::collection::vec(any::<u8>(), 1..400), index in any::<prop::sample::Index>(),
            canonical in any::<bool>(), multipart in any::<bool>(),
        ) {
            let rules = FingerprintRules { canonical_json: canonical, multipart, ..FingerprintRules::default() };
            let mut raw = parts(&body);
            raw.content_type = Some(b"application/octet-stream");
            prop_assert_eq!(RequestDigest::of(&raw, &rules), RequestDigest::of(&raw, &rules));
            let mut changed = body.clone();
            changed[index.index(body.len())] ^= 1;
            let other = RequestParts { body: &changed, ..raw };
            prop_assert_ne!(RequestDigest::of(&raw, &rules), RequestDigest::of(&other, &rules));
        }
    }
}
