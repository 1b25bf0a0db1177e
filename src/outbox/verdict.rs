//! What came of one try, and what follows from it.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, StatusCode};

use super::breaker::Word;
use crate::domain::intent::{ClaimedIntent, End, Fault, Next, Note, diagnostic};
use crate::domain::message::{HeaderBlock, Recorded};
use crate::domain::workflow::Success;

/// Headers of an answer that are kept for later steps, in bytes; longer ones are not kept at all.
const ANSWER_HEADERS_MAX: usize = 64 * 1024;
/// How soon a try that was cut off here is tried again, at the longest.
const CUT_SPREAD: Duration = Duration::from_secs(5);

/// What came of one try.
#[derive(Debug)]
pub struct Tried {
    /// In kind.
    pub verdict: Verdict,
    /// One word; a metric label.
    pub outcome: &'static str,
    /// The status of the answer, if one came.
    pub status: Option<StatusCode>,
    /// What happened, for people.
    pub diagnostic: Option<String>,
    /// What it says about its destination.
    pub word: Word,
}

/// What came of one try, in kind.
#[derive(Debug)]
pub enum Verdict {
    /// The receiver took it.
    Delivered(Option<Recorded>),
    /// It did not, or nobody knows.
    Failed(Fault, Option<Duration>),
    /// Cut off by the end of the process after it may have been sent: nobody's fault.
    Cut,
    /// Nothing was sent and nothing will be; due again after this.
    Unsent(Duration),
}

impl Tried {
    /// The receiver took it, and this is its answer.
    #[must_use]
    pub fn delivered(answer: Option<Recorded>) -> Self {
        let status = answer.as_ref().map(|answer| answer.status);
        Self {
            verdict: Verdict::Delivered(answer),
            outcome: "delivered",
            status: status.and_then(|status| StatusCode::from_u16(status).ok()),
            diagnostic: None,
            word: Word::Works,
        }
    }

    /// A fault. `why` holds no secret and no body.
    #[must_use]
    pub fn failed(fault: Fault, outcome: &'static str, why: &str) -> Self {
        Self {
            verdict: Verdict::Failed(fault, None),
            outcome,
            status: None,
            diagnostic: Some(diagnostic(why)),
            word: match fault {
                Fault::Destination => Word::Fails,
                Fault::Item => Word::Nothing,
            },
        }
    }

    /// The same, but it says this about its destination.
    #[must_use]
    pub fn saying(self, word: Word) -> Self {
        Self { word, ..self }
    }

    /// The item can't be sent as it is.
    #[must_use]
    pub fn unsendable(why: &str) -> Self {
        Self::failed(Fault::Item, "unsendable", why)
    }

    /// The whole try took too long; the receiver may have taken it. `usual`: how long tries of its
    /// destination may take. A shorter limit is the item's own, and says nothing about the others.
    #[must_use]
    pub fn timed_out(limit: Duration, usual: Duration) -> Self {
        let why = format!(
            "no whole answer within {}",
            humantime::format_duration(limit)
        );
        let tried = Self::failed(Fault::Destination, "timeout", &why);
        if limit < usual {
            tried.saying(Word::Nothing)
        } else {
            tried
        }
    }

    /// Nothing was sent; due again after this.
    #[must_use]
    pub fn unsent(outcome: &'static str, after: Duration) -> Self {
        Self {
            verdict: Verdict::Unsent(after),
            outcome,
            status: None,
            diagnostic: None,
            word: Word::Nothing,
        }
    }

    /// The end of the process cut it off after it may have been sent.
    #[must_use]
    pub fn cut() -> Self {
        Self {
            verdict: Verdict::Cut,
            outcome: "cut",
            status: None,
            diagnostic: Some("the gateway stopped before an answer came".to_owned()),
            word: Word::Nothing,
        }
    }

    /// An answer broke off; the receiver may have taken it.
    #[must_use]
    pub fn broken(status: StatusCode, why: &str) -> Self {
        Self {
            status: Some(status),
            ..Self::failed(Fault::Destination, "broken", why)
        }
    }

    /// An answer came. `headers`: the end-to-end ones; `body`: `None` if it is not kept.
    #[must_use]
    pub fn answered(
        success: &Success,
        status: StatusCode,
        headers: &HeaderMap,
        body: Option<Bytes>,
        retry_after: Option<Duration>,
    ) -> Self {
        if is_success(success, status) {
            let mut answer = Recorded::new(status.as_u16(), headers, body, None, false);
            if answer.headers.len() > ANSWER_HEADERS_MAX {
                answer.headers = HeaderBlock::default();
            }
            return Self::delivered(Some(answer));
        }
        let (fault, outcome) = fault_of(status);
        Self {
            verdict: Verdict::Failed(fault, retry_after),
            outcome,
            status: Some(status),
            diagnostic: Some(format!("answered {}", status.as_u16())),
            // Even a refusal shows that somebody is there.
            word: match fault {
                Fault::Destination => Word::Fails,
                Fault::Item => Word::Works,
            },
        }
    }

    /// What is written about it. `took`: since the claim; `jitter`: from 0 to 1.
    #[must_use]
    pub fn end(self, intent: &ClaimedIntent, took: Duration, jitter: f64) -> (End, Note) {
        let note = Note {
            outcome: self.outcome.to_owned(),
            answer_status: self.status.map(|status| status.as_u16()),
            diagnostic: self.diagnostic,
        };
        let end = match self.verdict {
            Verdict::Delivered(answer) => End::Delivered {
                fenced: false,
                answer,
            },
            Verdict::Failed(fault, retry_after) => {
                failure(intent, fault, intent.age + took, retry_after, jitter)
            }
            Verdict::Cut => End::Again {
                after: CUT_SPREAD.mul_f64(jitter.clamp(0.0, 1.0)),
                item_fault: false,
            },
            Verdict::Unsent(after) => End::GivenBack { after },
        };
        (end, note)
    }
}

fn failure(
    intent: &ClaimedIntent,
    fault: Fault,
    age: Duration,
    retry_after: Option<Duration>,
    jitter: f64,
) -> End {
    let item_fault = fault == Fault::Item;
    let faults = intent.faults.saturating_add(u32::from(item_fault));
    let retry = &intent.sending.retry;
    let tries = intent.tries.saturating_sub(intent.tries_before);
    match retry.after(fault, tries, faults, age, retry_after, jitter) {
        Next::Again(after) => End::Again { after, item_fault },
        Next::GiveUp => End::Dead { item_fault },
    }
}

fn is_success(success: &Success, status: StatusCode) -> bool {
    match success {
        Success::Ok => status.is_success(),
        Success::Answered { released } => {
            status.as_u16() < 500 && !released.contains(&status.as_u16())
        }
    }
}

/// What an answer that is no success is a fault of.
fn fault_of(status: StatusCode) -> (Fault, &'static str) {
    match status.as_u16() {
        408 | 425 | 429 => (Fault::Destination, "throttled"),
        500.. => (Fault::Destination, "server_error"),
        300..400 => (Fault::Item, "redirect"),
        _ => (Fault::Item, "client_error"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(success: &Success, status: u16) -> Option<Fault> {
        let status = StatusCode::from_u16(status).unwrap();
        let tried = Tried::answered(success, status, &HeaderMap::new(), None, None);
        match tried.verdict {
            Verdict::Failed(fault, _) => Some(fault),
            _ => None,
        }
    }

    #[test]
    fn the_classes_of_answers() {
        let of = |status| fault(&Success::Ok, status);
        for status in [200, 201, 202, 204, 226, 299] {
            assert_eq!(of(status), None, "{status}");
        }
        for status in [408, 425, 429, 500, 502, 503, 504, 599] {
            assert_eq!(of(status), Some(Fault::Destination), "{status}");
        }
        for status in [
            300, 301, 302, 307, 308, 400, 401, 403, 404, 409, 410, 422, 451,
        ] {
            assert_eq!(of(status), Some(Fault::Item), "{status}");
        }
    }

    #[test]
    fn where_any_answer_is_wanted_only_the_released_and_5xx_are_faults() {
        let released = vec![401, 429];
        let of = |status| {
            fault(
                &Success::Answered {
                    released: released.clone(),
                },
                status,
            )
        };
        for status in [200, 302, 404, 422] {
            assert_eq!(of(status), None, "{status}");
        }
        assert_eq!(of(401), Some(Fault::Item));
        assert_eq!(of(429), Some(Fault::Destination));
        assert_eq!(of(500), Some(Fault::Destination));
    }
}
