//! How long a client wants to be waited for: `Prefer: wait=N` (RFC 7240 section 4.3). Pure.

use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue};

use crate::head;

const PREFERENCE_APPLIED: HeaderName = HeaderName::from_static("preference-applied");

/// What the client asks for, but at most this. `None`: it asks for nothing.
pub fn wait(headers: &HeaderMap, most: Duration) -> Option<Duration> {
    let preferred = head::preferred_waits(headers).flatten().next();
    preferred.map(|wait| wait.min(most))
}

/// Says that the client was waited for, and how long at most (section 3).
pub fn applied(headers: &mut HeaderMap, wait: Duration) {
    if let Ok(value) = HeaderValue::from_str(&format!("wait={}", wait.as_secs())) {
        headers.append(PREFERENCE_APPLIED, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_found_among_other_preferences_and_bounded() {
        let asked = |lines: &[&str]| {
            let mut headers = HeaderMap::new();
            for line in lines {
                headers.append("prefer", line.parse().unwrap());
            }
            wait(&headers, Duration::from_secs(25)).map(|wait| wait.as_secs())
        };
        assert_eq!(asked(&[]), None);
        assert_eq!(asked(&["respond-async"]), None);
        assert_eq!(asked(&["wait=0"]), Some(0));
        assert_eq!(asked(&["respond-async, WAIT = \"7\""]), Some(7));
        assert_eq!(asked(&["return=minimal", "wait=7", "wait=9"]), Some(7));
        assert_eq!(asked(&["wait=100"]), Some(25));
        assert_eq!(asked(&["wait=99999999999999999999999"]), Some(25));
        for no_number in ["wait=soon", "wait=", "wait=+7", "wait=-7"] {
            assert_eq!(asked(&[no_number]), None, "{no_number}");
        }
    }
}
