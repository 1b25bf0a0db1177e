//! An operator's resolution, as it is taken: the answer, and what is to follow from it.

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde::Deserialize;
use serde_json::Value;

use super::invalid;
use crate::api::request::present;
use crate::api::workflow::{self, Catalog};
use crate::domain::message::Recorded;
use crate::domain::run::FollowUp;
use crate::domain::scope::RecordKey;
use crate::problem::Problem;

/// The longest body of an operator's answer, in bytes.
pub const ANSWER_BYTES_MAX: usize = 1024 * 1024;
/// The most header lines of an operator's answer.
pub const ANSWER_HEADERS_MAX: usize = 100;

/// The body of a resolution: the answer that the upstream gave, or should have given.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Resolution {
    reason: String,
    status: u16,
    #[serde(default)]
    headers: Vec<HeaderLine>,
    #[serde(default, deserialize_with = "present")]
    body: Option<String>,
    #[serde(default, deserialize_with = "present")]
    body_base64: Option<String>,
    #[serde(default, deserialize_with = "present")]
    follow_up: Option<bool>,
    #[serde(default, deserialize_with = "present")]
    effects: Option<Value>,
    #[serde(default, deserialize_with = "present")]
    run: Option<Value>,
    #[serde(default, deserialize_with = "present")]
    input: Option<Value>,
}

/// What is to follow from a resolution.
#[derive(Debug)]
pub struct Following {
    wanted: Option<bool>,
    effects: Option<Value>,
    run: Option<Value>,
    input: Option<Value>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct HeaderLine {
    name: String,
    value: String,
}

/// An operator's answer, checked.
#[derive(Debug)]
pub struct Answer {
    status: u16,
    headers: HeaderMap,
    body: Bytes,
}

impl Resolution {
    /// The reason, the answer, and what is to follow.
    pub fn into_parts(self) -> Result<(String, Answer, Following), String> {
        let body = match (self.body, self.body_base64) {
            (Some(_), Some(_)) => return Err("give `body` or `body_base64`, not both".into()),
            (Some(text), None) => Bytes::from(text),
            (None, Some(coded)) => STANDARD
                .decode(coded)
                .map_err(|error| format!("body_base64: {error}"))?
                .into(),
            (None, None) => Bytes::new(),
        };
        if body.len() > ANSWER_BYTES_MAX {
            return Err(format!(
                "an answer's body is at most {ANSWER_BYTES_MAX} bytes"
            ));
        }
        let lines = self.headers.into_iter();
        let lines = lines.map(|HeaderLine { name, value }| (name, value));
        let answer = Answer::new(self.status, lines.collect(), body)?;
        let following = Following {
            wanted: self.follow_up,
            effects: self.effects,
            run: self.run,
            input: self.input,
        };
        Ok((self.reason, answer, following))
    }
}

impl Following {
    /// What follows: what is given here, else what the routes of the pool let follow a decision
    /// with this status.
    ///
    /// # Errors
    /// What to mend, or that the routes of the pool don't agree.
    pub fn read(
        self,
        catalog: &Catalog,
        key: &RecordKey,
        status: u16,
    ) -> Result<Option<FollowUp>, Problem> {
        let input = workflow::input(self.input).map_err(|what| invalid(&what))?;
        let given = catalog.read(self.effects, self.run, &key.tenant);
        let given = given.map_err(|what| invalid(&what))?;
        let workflow = match (given, self.wanted) {
            (Some(_), Some(false)) => {
                return Err(invalid("follow_up: leave it out, or `effects` and `run`"));
            }
            (Some(given), _) => Some(given),
            (None, Some(false)) => None,
            (None, _) if !(200..300).contains(&status) => None,
            (None, _) => catalog.follow_up_of(&key.pool).map_err(several)?,
        };
        Ok(workflow.map(|workflow| FollowUp {
            workflow,
            request: None,
            input,
            first_key: None,
            holds_record: false,
        }))
    }
}

fn several(names: Vec<String>) -> Problem {
    let problem = invalid(
        "the routes of this pool let different things follow a decision; write `run`, `effects`, \
         or `follow_up: false`",
    );
    problem.member("choices", names)
}

impl Answer {
    /// An answer of these parts.
    pub fn new(status: u16, headers: Vec<(String, String)>, body: Bytes) -> Result<Self, String> {
        if !(200..=599).contains(&status) {
            return Err("status: 200 to 599".into());
        }
        // RFC 9110 sections 15.3.5, 15.3.6 and 15.4.5.
        if matches!(status, 204 | 205 | 304) && !body.is_empty() {
            return Err(format!("an answer with status {status} has no body"));
        }
        Ok(Self {
            status,
            headers: header_map(headers)?,
            body,
        })
    }

    /// Its status.
    #[must_use]
    pub fn status(&self) -> u16 {
        self.status
    }

    /// As a decision keeps it: framing, cookies and what is for one moment only is left out.
    #[must_use]
    pub fn recorded(&self) -> Recorded {
        Recorded::new(
            self.status,
            &self.headers,
            Some(self.body.clone()),
            None,
            false,
        )
    }
}

fn header_map(lines: Vec<(String, String)>) -> Result<HeaderMap, String> {
    if lines.len() > ANSWER_HEADERS_MAX {
        return Err(format!("headers: at most {ANSWER_HEADERS_MAX} lines"));
    }
    let mut headers = HeaderMap::new();
    for (name, value) in lines {
        let name = HeaderName::from_bytes(name.as_bytes())
            .map_err(|_| "headers: a name is not a header name")?;
        let value = latin1(&value)
            .and_then(|bytes| HeaderValue::from_bytes(&bytes).ok())
            .ok_or_else(|| format!("headers: the value of {name} can't stand in a header"))?;
        headers.append(name, value);
    }
    Ok(headers)
}

/// Each character is one byte of a header's value (ISO 8859-1).
fn latin1(text: &str) -> Option<Vec<u8>> {
    text.chars().map(|c| u8::try_from(c).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_that_can_not_be_is_refused() {
        let refused = |json: &str| {
            let resolution: Resolution = serde_json::from_str(json).unwrap();
            resolution.into_parts().unwrap_err()
        };
        for (json, what) in [
            (r#"{"reason":"r","status":199}"#, "status: 200 to 599"),
            (
                r#"{"reason":"r","status":204,"body":"x"}"#,
                "an answer with status 204",
            ),
            (
                r#"{"reason":"r","status":200,"body":"x","body_base64":""}"#,
                "give `body` or",
            ),
            (
                r#"{"reason":"r","status":200,"body_base64":"*"}"#,
                "body_base64: ",
            ),
            (
                r#"{"reason":"r","status":200,"headers":[{"name":"a b","value":"c"}]}"#,
                "headers: a name",
            ),
            (
                r#"{"reason":"r","status":200,"headers":[{"name":"a","value":"b\r\nc"}]}"#,
                "headers: the value of a",
            ),
        ] {
            assert!(refused(json).starts_with(what), "{json}: {}", refused(json));
        }
    }
}
