//! The written forms of single values. Each takes text and gives a type that can't be wrong, or a
//! sentence that says what to write instead. No sentence repeats the text: it may be secret.

use std::fmt::Display;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use http::{HeaderName, Method, Uri};

use super::{LogFormat, PathPattern, PrincipalSource, Role, TenantSource};
use crate::domain::message::CREDENTIAL_HEADERS;
use crate::domain::policy::{
    Duplicates, ForwardKey, KeySource, Mode, NEVER_GUARDED, OnStoreDown, OnUnknown,
};
use crate::domain::scope::{PoolId, TenantScope};

/// Longer times are mistakes, and would not fit into a database's interval.
pub(super) const DURATION_MAX: Duration = Duration::from_hours(10 * 365 * 24);
/// Shorter times can't be meant.
pub(super) const DURATION_MIN: Duration = Duration::from_millis(1);

/// A duration with its unit, such as `25s`, `500ms` or `1h 30m`, within bounds.
pub(super) fn duration(
    bounds: RangeInclusive<Duration>,
) -> impl Fn(&str) -> Result<Duration, String> {
    move |text| {
        let duration = humantime::parse_duration(text).map_err(|_| {
            "is no duration; write a number with its unit, such as \"25s\", \"500ms\" or \"1h 30m\""
                .to_owned()
        })?;
        within(duration, &bounds, written_duration)
    }
}

/// A size in bytes, such as `10MiB`, `500KB` or `4096`, within bounds.
pub(super) fn size(bounds: RangeInclusive<u64>) -> impl Fn(&str) -> Result<u64, String> {
    move |text| {
        let bytes = parse_size::parse_size(text).map_err(|_| {
            "is no size; write bytes, or a number with its unit, such as \"10MiB\" or \"500KB\""
                .to_owned()
        })?;
        within(bytes, &bounds, written_size)
    }
}

/// A whole number within bounds.
pub(super) fn count(bounds: RangeInclusive<u64>) -> impl Fn(&str) -> Result<u64, String> {
    move |text| {
        let count = text
            .parse()
            .map_err(|_| "is no whole number of zero or more".to_owned())?;
        within(count, &bounds, |bound| bound)
    }
}

fn within<T: PartialOrd + Copy, D: Display>(
    value: T,
    bounds: &RangeInclusive<T>,
    show: impl Fn(T) -> D,
) -> Result<T, String> {
    if value < *bounds.start() {
        Err(format!("is too small; at least {}", show(*bounds.start())))
    } else if value > *bounds.end() {
        Err(format!("is too large; at most {}", show(*bounds.end())))
    } else {
        Ok(value)
    }
}

/// A size as a person would write it, without loss.
pub(super) fn written_size(bytes: u64) -> String {
    let units = [(30, "GiB"), (20, "MiB"), (10, "KiB")];
    let whole = |&&(shift, _): &&(u32, &str)| bytes > 0 && bytes.is_multiple_of(1 << shift);
    units.iter().find(whole).map_or_else(
        || format!("{bytes}B"),
        |(shift, unit)| format!("{}{unit}", bytes >> shift),
    )
}

/// A duration as a person would write it; the configuration knows none below a millisecond.
pub(super) fn written_duration(duration: Duration) -> String {
    let units = [
        (86_400_000, "d"),
        (3_600_000, "h"),
        (60_000, "m"),
        (1000, "s"),
    ];
    let ms = duration.as_millis();
    let whole = |&&(unit_ms, _): &&(u128, &str)| ms > 0 && ms.is_multiple_of(unit_ms);
    units.iter().find(whole).map_or_else(
        || format!("{ms}ms"),
        |(unit_ms, unit)| format!("{}{unit}", ms / unit_ms),
    )
}

/// Finds a word; `later` are words of the documentation that this version does not know yet.
fn word<T: Copy>(text: &str, words: &[(&str, T)], later: &[&str]) -> Result<T, String> {
    if let Some((_, value)) = words.iter().find(|(word, _)| *word == text) {
        return Ok(*value);
    }
    let known: Vec<String> = words
        .iter()
        .map(|(word, _)| format!("\"{word}\""))
        .collect();
    let known = known.join(" or ");
    if later.contains(&text) {
        Err(format!("is not in this version; write {known}"))
    } else {
        Err(format!("is no known word; write {known}"))
    }
}

pub(super) fn switch(text: &str) -> Result<bool, String> {
    word(text, &[("true", true), ("false", false)], &[])
}

pub(super) fn mode(text: &str) -> Result<Mode, String> {
    word(
        text,
        &[("proxy", Mode::Proxy), ("accept", Mode::Accept)],
        &[],
    )
}

pub(super) fn duplicates(text: &str) -> Result<Duplicates, String> {
    let words = [
        ("wait", Duplicates::Wait),
        ("reject", Duplicates::Reject),
        ("follow", Duplicates::Follow),
    ];
    word(text, &words, &[])
}

pub(super) fn forward_key(text: &str) -> Result<ForwardKey, String> {
    let words = [
        ("verbatim", ForwardKey::Verbatim),
        ("derived", ForwardKey::Derived),
        ("none", ForwardKey::None),
    ];
    word(text, &words, &[])
}

pub(super) fn on_unknown(text: &str) -> Result<OnUnknown, String> {
    let words = [OnUnknown::Hold, OnUnknown::Redrive].map(|word| (word.word(), word));
    word(text, &words, &[])
}

pub(super) fn on_store_down(text: &str) -> Result<OnStoreDown, String> {
    let words = [("refuse", OnStoreDown::Refuse), ("pass", OnStoreDown::Pass)];
    word(text, &words, &[])
}

pub(super) fn role(text: &str) -> Result<Role, String> {
    let words = [
        ("reader", Role::Reader),
        ("operator", Role::Operator),
        ("service", Role::Service),
        ("worker", Role::Worker),
    ];
    word(text, &words, &[])
}

pub(super) fn log_format(text: &str) -> Result<LogFormat, String> {
    let words = [("text", LogFormat::Text), ("json", LogFormat::Json)];
    word(text, &words, &[])
}

pub(super) fn log_filter(text: &str) -> Result<String, String> {
    tracing_subscriber::EnvFilter::builder()
        .parse(text)
        .map(|_| text.to_owned())
        .map_err(|_| {
            "is no log filter; write a level such as \"info\", or \"info,oncegate=debug\""
                .to_owned()
        })
}

pub(super) fn address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| {
        "is no address; write IP:PORT, such as 127.0.0.1:8080, 0.0.0.0:8080 or [::]:8080".to_owned()
    })
}

pub(super) fn tenant_source(text: &str) -> Result<TenantSource, String> {
    match text.split_once(':') {
        Some(("fixed", name)) => Ok(TenantSource::Fixed(tenant(name)?)),
        Some(("header", name)) => {
            let header = header(name)?;
            if CREDENTIAL_HEADERS.contains(&header.as_str()) {
                return Err(
                    "would keep credentials in clear; write \"credential\" for a keyed hash"
                        .to_owned(),
                );
            }
            Ok(TenantSource::Header(header))
        }
        None if text == "credential" => Ok(TenantSource::Credential),
        None if text == "jwt" => {
            Err("is not in this version; write fixed:NAME, header:NAME or credential".to_owned())
        }
        _ => Err("is no tenant source; write fixed:NAME, header:NAME or credential".to_owned()),
    }
}

pub(super) fn principal(text: &str) -> Result<PrincipalSource, String> {
    match text.split_once(':') {
        Some(("header", name)) => Ok(PrincipalSource::Header(header(name)?)),
        None if text == "credential" => Ok(PrincipalSource::Credential),
        _ => Err("is no principal source; write header:NAME or credential".to_owned()),
    }
}

pub(super) fn tenant(text: &str) -> Result<TenantScope, String> {
    TenantScope::named(text.as_bytes()).map_err(|error| format!("is no tenant name; {error}"))
}

pub(super) fn key_source(text: &str) -> Result<KeySource, String> {
    match text.split_once(':') {
        Some(("header", name)) => Ok(KeySource::Header(header(name)?)),
        Some(("body", pointer)) => {
            json_pointer(pointer)?;
            Ok(KeySource::Body(pointer.to_owned()))
        }
        _ => Err("is no key source; write header:NAME or body:/POINTER".to_owned()),
    }
}

/// A JSON pointer (RFC 6901) to something inside a document.
pub(super) fn json_pointer(text: &str) -> Result<String, String> {
    let escapes_sound = text
        .split('~')
        .skip(1)
        .all(|after| after.starts_with(['0', '1']));
    if text.starts_with('/') && escapes_sound {
        Ok(text.to_owned())
    } else {
        Err(
            "is no JSON pointer; write it as in RFC 6901, such as /id or /meta/request_id"
                .to_owned(),
        )
    }
}

fn header(name: &str) -> Result<HeaderName, String> {
    HeaderName::from_bytes(name.as_bytes())
        .map_err(|_| "names no header; write letters, digits and dashes".to_owned())
}

pub(super) fn pool_id(text: &str) -> Result<PoolId, String> {
    PoolId::new(text).map_err(|error| format!("is no pool id; {error}"))
}

/// `http://host:port` or `https://host:port`; a slash at the end is taken for none.
pub(super) fn target(text: &str) -> Result<Uri, String> {
    let uri: Uri = text.parse().map_err(|_| target_form())?;
    let scheme = uri.scheme_str();
    if !matches!(scheme, Some("http" | "https")) {
        return Err(format!("has no scheme that is known; {}", target_form()));
    }
    let authority = uri.authority().ok_or_else(target_form)?;
    if authority.host().is_empty() || authority.as_str().contains('@') {
        return Err(format!("must name a host and no user; {}", target_form()));
    }
    let after_host = authority.as_str().strip_prefix(authority.host());
    if after_host != Some("") && authority.port_u16().is_none_or(|port| port == 0) {
        return Err(format!(
            "must name a port from 1 to 65535; {}",
            target_form()
        ));
    }
    if !matches!(uri.path(), "" | "/") || uri.query().is_some() || text.contains('#') {
        return Err("must not hold a path or query; the request's own are used".to_owned());
    }
    Ok(uri)
}

fn target_form() -> String {
    "write a target as http://HOST:PORT or https://HOST:PORT".to_owned()
}

/// `/v1/charges` (this path) or `/v1/*` (every path that begins with `/v1/`).
pub(super) fn path_pattern(text: &str) -> Result<PathPattern, String> {
    let (prefix, starred) = text
        .strip_suffix('*')
        .map_or((text, false), |prefix| (prefix, true));
    let allowed = |byte: u8| matches!(byte, b'!'..=b'~') && !matches!(byte, b'*' | b'?' | b'#');
    if !text.starts_with('/') || !prefix.bytes().all(allowed) {
        return Err(
            "is no path; write one that begins with / and, for all below it, ends in /*".to_owned(),
        );
    }
    match (starred, prefix.ends_with('/')) {
        (false, _) => Ok(PathPattern::Exact(prefix.to_owned())),
        (true, true) => Ok(PathPattern::Prefix(prefix.to_owned())),
        (true, false) => Err("has its * in the middle of a name; end it in /*".to_owned()),
    }
}

/// A host, in lower case; ports don't count.
pub(super) fn host(text: &str) -> Result<String, String> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
    let bracketed = text.starts_with('[') && text.ends_with(']');
    let sound = if bracketed {
        text[1..text.len() - 1]
            .parse::<std::net::Ipv6Addr>()
            .is_ok()
    } else {
        !text.is_empty() && text.bytes().all(allowed)
    };
    if sound {
        Ok(text.to_ascii_lowercase())
    } else {
        Err("is no host; write a name or an IP address without scheme and port".to_owned())
    }
}

/// A method that may be guarded.
pub(super) fn method(text: &str) -> Result<Method, String> {
    let is_it = |method: &Method| method.as_str().eq_ignore_ascii_case(text);
    if NEVER_GUARDED.iter().any(is_it) {
        return Err("is never guarded; leave it out, its requests pass through".to_owned());
    }
    if text.bytes().any(|byte| byte.is_ascii_lowercase()) {
        return Err(
            "is in lower case; methods are written as they are sent, such as POST".to_owned(),
        );
    }
    Method::from_bytes(text.as_bytes())
        .map_err(|_| "is no method; write one such as POST, PUT or PATCH".to_owned())
}

pub(super) fn release_status(status: u64) -> Result<u16, String> {
    u16::try_from(status)
        .ok()
        .filter(|status| (200..=599).contains(status))
        .ok_or_else(|| "is no status of an answer; write one from 200 to 599".to_owned())
}

/// A name for the audit log.
pub(super) fn token_name(text: &str) -> Result<String, String> {
    if (1..=64).contains(&text.len()) && text.bytes().all(|byte| matches!(byte, b'!'..=b'~')) {
        Ok(text.to_owned())
    } else {
        Err("is no name; write 1 to 64 visible ASCII characters".to_owned())
    }
}

/// The SHA-256 of a token, in hex.
pub(super) fn sha256(text: &str) -> Result<[u8; 32], String> {
    let digits: Option<Vec<u8>> = text
        .chars()
        .map(|digit| u8::try_from(digit.to_digit(16)?).ok())
        .collect();
    let digits = digits.unwrap_or_default();
    match digits.as_chunks() {
        (pairs, []) if pairs.len() == 32 => Ok(std::array::from_fn(|at| {
            let [high, low] = pairs[at];
            high << 4 | low
        })),
        _ => Err(
            "is no SHA-256 in hex; write the 64 digits that `printf %s TOKEN | sha256sum` gives"
                .to_owned(),
        ),
    }
}

/// A file that this process may read.
pub(super) fn readable_file(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    match std::fs::File::open(&path).and_then(|file| file.metadata()) {
        Ok(metadata) if metadata.is_dir() => Err("is a directory; name a PEM file".to_owned()),
        Ok(_) => Ok(path),
        Err(error) => Err(format!("can't be read: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused<T>(parse: impl Fn(&str) -> Result<T, String>, texts: &[&str]) {
        for text in texts {
            assert!(parse(text).is_err(), "{text:?} was taken");
        }
    }

    #[test]
    fn a_target_is_a_scheme_and_a_place_and_nothing_else() {
        for text in [
            "http://a",
            "https://a:1/",
            "http://[::1]:9000",
            "http://10.0.0.1",
        ] {
            assert!(target(text).is_ok(), "{text}");
        }
        let wrong = [
            "",
            "/",
            "a",
            "a:80",
            "//a",
            "ftp://a",
            "http://",
            "http://a/b",
            "http://a?b",
            "http://a#b",
            "http://user:secret@a",
            "http://a:0",
            "http://a:",
            "http://a:99999",
            "http://a b",
        ];
        refused(target, &wrong);
    }

    #[test]
    fn a_path_is_exact_or_ends_in_a_slash_and_a_star() {
        assert_eq!(path_pattern("/*"), Ok(PathPattern::Prefix("/".to_owned())));
        assert_eq!(path_pattern("/a"), Ok(PathPattern::Exact("/a".to_owned())));
        refused(
            path_pattern,
            &[
                "", "*", "a", "/a*", "/*/a", "/a**", "/a?b", "/a#b", "/\u{e4}", "/a b",
            ],
        );
    }

    #[test]
    fn a_tenant_that_would_keep_a_credential_in_clear_is_refused() {
        refused(
            tenant_source,
            &[
                "header:Authorization",
                "header:cookie",
                "header:",
                "fixed:",
                "fixed:a b",
                "jwt",
                "",
            ],
        );
        assert!(
            principal("header:Authorization").is_ok(),
            "kept as a keyed hash"
        );
    }

    #[test]
    fn methods_that_are_never_guarded_and_mistyped_ones_are_refused() {
        assert_eq!(method("PUT"), Ok(Method::PUT));
        refused(
            method,
            &[
                "GET", "get", "HEAD", "OPTIONS", "TRACE", "CONNECT", "post", "", "A B",
            ],
        );
    }

    #[test]
    fn a_hash_has_64_hex_digits() {
        assert_eq!(sha256(&"0F".repeat(32)), Ok([15; 32]));
        let (short, long) = ("0f".repeat(31), "0f".repeat(33));
        let signed = "+f".repeat(32);
        refused(sha256, &["", &short, &long, &signed, "abc"]);
    }

    #[test]
    fn hosts_are_names_or_addresses_without_a_port() {
        assert_eq!(host("API.Example"), Ok("api.example".to_owned()));
        assert_eq!(host("[::1]"), Ok("[::1]".to_owned()));
        refused(host, &["", "a:80", "http://a", "a/b", "[::1", "[a]"]);
    }

    #[test]
    fn durations_and_sizes_are_told_as_people_write_them() {
        let told = [0, 250, 1000, 90_000, 600_000, 3_600_000, 86_400_000]
            .map(Duration::from_millis)
            .map(written_duration);
        assert_eq!(told, ["0ms", "250ms", "1s", "90s", "10m", "1h", "1d"]);
        let told = [0, 1000, 1024, 10 << 20, 1 << 40].map(written_size);
        assert_eq!(told, ["0B", "1000B", "1KiB", "10MiB", "1024GiB"]);
    }
}
