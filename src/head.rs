//! What more than one edge reads and writes in the head of a message. Pure.

use std::time::Duration;

use http::{HeaderMap, HeaderName};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

const PREFER: HeaderName = HeaderName::from_static("prefer");
/// Everything but the unreserved characters (RFC 3986 section 2.3).
const RESERVED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~');

/// How long the client wants to be waited for (`Prefer: wait=N`, RFC 7240 section 4.3), each time
/// that it says so; `None`: no number.
pub fn preferred_waits(headers: &HeaderMap) -> impl Iterator<Item = Option<Duration>> {
    let lines = headers.get_all(PREFER).into_iter();
    let texts = lines.filter_map(|line| line.to_str().ok());
    texts
        .flat_map(|text| text.split([',', ';']))
        .filter_map(|preference| preference.split_once('='))
        .filter(|(name, _)| name.trim().eq_ignore_ascii_case("wait"))
        .map(|(_, seconds)| whole_seconds(seconds.trim().trim_matches('"')))
}

/// More than can be counted is as good as for ever.
fn whole_seconds(text: &str) -> Option<Duration> {
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| Duration::from_secs(text.parse().unwrap_or(u64::MAX)))
}

/// Text as one segment of a path, or as a value in a query.
pub fn path_segment(text: &str) -> String {
    utf8_percent_encode(text, RESERVED).to_string()
}
