//! The wall clock, for what receivers compare with theirs: timestamps of signatures, dates in
//! `Retry-After`. Nothing is decided by it.

use std::time::{Duration, SystemTime};

/// Now.
#[expect(clippy::disallowed_methods, reason = "this is the place")]
pub fn now() -> SystemTime {
    SystemTime::now()
}

/// Seconds since 1970.
pub fn unix_seconds() -> u64 {
    let since = now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

/// What `Retry-After` asks for (RFC 9110 section 10.2.3); `None`: nothing that can be read. A date
/// counts from the answer's own `Date`, if it has one, so that a wrong clock here changes nothing.
pub fn retry_after(headers: &http::HeaderMap) -> Option<Duration> {
    let text = |name| headers.get(name)?.to_str().ok().map(str::trim);
    let asked = text(http::header::RETRY_AFTER)?;
    if let Ok(seconds) = asked.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let date = httpdate::parse_http_date(asked).ok()?;
    let sent = text(http::header::DATE).and_then(|date| httpdate::parse_http_date(date).ok());
    let wait = date.duration_since(sent.unwrap_or_else(now));
    Some(wait.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use http::header::{DATE, HeaderMap, HeaderValue, RETRY_AFTER};

    use super::*;

    fn asked(value: &'static str) -> Option<Duration> {
        let mut headers = HeaderMap::new();
        headers.insert(RETRY_AFTER, HeaderValue::from_static(value));
        headers.insert(
            DATE,
            HeaderValue::from_static("Wed, 21 Oct 2015 07:28:00 GMT"),
        );
        retry_after(&headers)
    }

    #[test]
    fn retry_after_is_read_in_both_forms() {
        assert_eq!(asked("120"), Some(Duration::from_mins(2)));
        assert_eq!(
            asked("Wed, 21 Oct 2015 07:30:00 GMT"),
            Some(Duration::from_mins(2))
        );
        assert_eq!(asked("Wed, 21 Oct 2015 07:00:00 GMT"), Some(Duration::ZERO));
        for wrong in ["", "-1", "soon", "1.5", "99999999999999999999999"] {
            assert_eq!(asked(wrong), None, "{wrong}");
        }
    }
}
