//! The request that a frozen intent becomes: the same bytes at every try.

use http::header::{CONTENT_LENGTH, EXPECT, HOST, USER_AGENT};
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use reqwest::Url;

use crate::domain::intent::ClaimedIntent;
use crate::domain::message::{self, IDEMPOTENCY_KEY};
use crate::domain::workflow::{HttpSend, Text};

/// What this gateway calls itself.
pub const AGENT: &str = concat!("oncegate/", env!("CARGO_PKG_VERSION"));

/// Why an intent can't be sent as it is. Holds nothing that the item holds but names.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unsendable {
    /// Not a method.
    #[error("its method is none")]
    Method,
    /// Not a header.
    #[error("its header {0} can't be sent")]
    Header(String),
    /// Not a path, or one that leads elsewhere.
    #[error("its path is none, or leads to another host")]
    Path,
    /// Not an HTTP URL, or one with a password.
    #[error("its URL is none of http or https, or holds a user or a password")]
    Url,
    /// A text that was to be rendered.
    #[error("a text of it was not rendered")]
    Template,
}

/// The method.
///
/// # Errors
/// When it is none.
pub fn method(http: &HttpSend) -> Result<Method, Unsendable> {
    Method::from_bytes(http.method.as_bytes()).map_err(|_| Unsendable::Method)
}

/// The intent's own headers, without what is for one hop, and the key.
///
/// # Errors
/// When a name or value is none.
pub fn headers(intent: &ClaimedIntent, http: &HttpSend) -> Result<HeaderMap, Unsendable> {
    let mut headers = HeaderMap::new();
    headers.insert(USER_AGENT, HeaderValue::from_static(AGENT));
    let mut given = HeaderMap::new();
    for (name, value) in &http.headers {
        let unsendable = || Unsendable::Header(name.clone());
        let parsed = HeaderName::from_bytes(name.as_bytes()).map_err(|_| unsendable())?;
        let value = latin1(plain(value)?).ok_or_else(unsendable)?;
        given.append(parsed, value);
    }
    for framing in [HOST, CONTENT_LENGTH, EXPECT] {
        given.remove(framing);
    }
    // Replaces by name and keeps repeats.
    headers.extend(message::end_to_end(given));
    if !intent.idempotency_key.is_empty() {
        let key = HeaderValue::from_str(&intent.idempotency_key);
        let key = key.map_err(|_| Unsendable::Header(IDEMPOTENCY_KEY.to_string()))?;
        headers.insert(IDEMPOTENCY_KEY, key);
    }
    Ok(headers)
}

/// The host that an accepted request was for: a pool may keep it.
#[must_use]
pub fn host(http: &HttpSend) -> Option<HeaderValue> {
    let mut hosts = http.headers.iter().filter(|(name, _)| **name == HOST);
    hosts.find_map(|(_, value)| latin1(plain(value).ok()?))
}

/// An absolute URL that an item names: `http` or `https`, without user and password.
///
/// # Errors
/// When it is none.
pub fn absolute(url: &str) -> Result<Url, Unsendable> {
    let url = Url::parse(url).map_err(|_| Unsendable::Url)?;
    let plain = url.username().is_empty() && url.password().is_none();
    if plain && matches!(url.scheme(), "http" | "https") {
        Ok(url)
    } else {
        Err(Unsendable::Url)
    }
}

/// The path resolved against the URL (RFC 3986 section 5); it can't lead to another scheme, host,
/// port or user.
///
/// # Errors
/// When it would, or is no path.
pub fn resolve(base: &Url, path: Option<&Text>) -> Result<Url, Unsendable> {
    let Some(path) = path else {
        return Ok(base.clone());
    };
    let path = plain(path)?;
    let url = base.join(path).map_err(|_| Unsendable::Path)?;
    let place = |url: &Url| {
        (
            url.scheme().to_owned(),
            url.host_str().map(str::to_owned),
            url.port_or_known_default(),
        )
    };
    let user = |url: &Url| (url.username().to_owned(), url.password().map(str::to_owned));
    let elsewhere = ["//", "/\\", "\\"]
        .iter()
        .any(|trick| path.starts_with(trick));
    if elsewhere || place(&url) != place(base) || user(&url) != user(base) {
        return Err(Unsendable::Path);
    }
    Ok(url)
}

/// The path for a pool, whose target is its own.
///
/// # Errors
/// When it is none.
pub fn pool_path(path: Option<&Text>) -> Result<PathAndQuery, Unsendable> {
    let path = path.map_or(Ok("/"), plain)?;
    if !path.starts_with('/') {
        return Err(Unsendable::Path);
    }
    PathAndQuery::try_from(path).map_err(|_| Unsendable::Path)
}

fn plain(text: &Text) -> Result<&str, Unsendable> {
    match text {
        Text::Plain(text) => Ok(text),
        Text::Template(_) => Err(Unsendable::Template),
    }
}

/// Each character is one byte (ISO 8859-1).
fn latin1(text: &str) -> Option<HeaderValue> {
    let bytes: Option<Vec<u8>> = text.chars().map(|c| u8::try_from(c).ok()).collect();
    HeaderValue::from_bytes(&bytes?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolved(base: &str, path: &str) -> Option<String> {
        let base = Url::parse(base).unwrap();
        let url = resolve(&base, Some(&Text::Plain(path.to_owned())));
        url.ok().map(String::from)
    }

    #[test]
    fn a_path_is_resolved_and_never_leads_elsewhere() {
        let base = "https://a.example/hooks/in?x=1";
        assert_eq!(resolved(base, "/b?y=2").unwrap(), "https://a.example/b?y=2");
        assert_eq!(
            resolved(base, "out").unwrap(),
            "https://a.example/hooks/out"
        );
        assert_eq!(resolved(base, "../../../b").unwrap(), "https://a.example/b");
        for trick in [
            "//b.example/x",
            "/\\b.example/x",
            "\\\\b.example/x",
            "\t//b.example/x",
            "/\t/b.example/x",
            "https://b.example/",
            "http://a.example/",
            "https://a.example:444/",
            "https://me@a.example/",
            "https:b",
            "javascript:alert(1)",
            "data:,x",
        ] {
            let url = resolved(base, trick);
            let stays = url
                .as_deref()
                .is_none_or(|url| url.starts_with("https://a.example/"));
            assert!(stays, "{trick}: {url:?}");
        }
        assert_eq!(resolved(base, "//a.example/x"), None);
    }

    #[test]
    fn a_pool_takes_any_path_that_is_one() {
        let path = |text: &str| pool_path(Some(&Text::Plain(text.to_owned())));
        assert_eq!(path("//x/y?z").unwrap(), "//x/y?z");
        for wrong in ["", "x", "http://a/", "/a b", "/\n"] {
            assert_eq!(path(wrong), Err(Unsendable::Path), "{wrong:?}");
        }
        assert_eq!(pool_path(None).unwrap(), "/");
    }

    #[test]
    fn header_texts_are_bytes_again() {
        assert_eq!(latin1("caf\u{e9}").unwrap().as_bytes(), b"caf\xe9");
        assert_eq!(latin1("\u{20ac}"), None);
        assert_eq!(latin1("a\r\nb: c"), None);
    }

    #[test]
    fn an_item_names_plain_http_urls_only() {
        assert!(absolute("https://a.example/x").is_ok());
        for wrong in [
            "ftp://a/",
            "https://me:pw@a/",
            "https://me@a/",
            "/x",
            "",
            "http://",
        ] {
            assert_eq!(absolute(wrong), Err(Unsendable::Url), "{wrong}");
        }
    }
}
