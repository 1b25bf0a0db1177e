//! The effect intent: something to do outside the database, with its bytes and its key frozen.
//!
//! An intent is `pending` until it is delivered, given up (`dead`), found to kill its processes
//! (`quarantined`) or not wanted any more (`discarded`). As for records, time is judged by the
//! store: it enters and leaves as durations.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::message::Recorded;
use super::run::RunId;
use super::scope::TenantScope;
use super::workflow::{HttpSend, Retry};

/// The longest text that is kept about a try, in bytes.
pub const DIAGNOSTIC_BYTES_MAX: usize = 2048;
/// An intent is quarantined when this many claims in a row ended without a word.
pub const DEATHS_MAX: u32 = 3;

/// Names an intent of any run; made from the run's id and the intent's place in it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct IntentId(pub Uuid);

/// An intent and whose it is.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct IntentKey {
    /// Whose.
    pub tenant: TenantScope,
    /// Which.
    pub id: IntentId,
}

/// Stamped at every claim of an intent and never reused: the token of the claim and the stamp of
/// its attempt.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Stamp(pub Uuid);

impl fmt::Display for IntentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for Stamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What shares a cap, a rate, a breaker and a fate: a configured destination by its id, else
/// `pool:ID`, `url:SCHEME://HOST:PORT` or `task:QUEUE`.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct Destination(pub String);

impl Destination {
    /// The lane of a pool.
    pub fn pool(id: &str) -> Self {
        Self(format!("pool:{id}"))
    }

    /// The lane of a queue of tasks.
    pub fn task(queue: &str) -> Self {
        Self(format!("task:{queue}"))
    }

    /// The queue, if step workers pull from this lane.
    #[must_use]
    pub fn queue(&self) -> Option<&str> {
        self.0.strip_prefix("task:")
    }

    /// The metrics' word for it: a configured id, or the class of the others.
    #[must_use]
    pub fn class(&self) -> &str {
        self.0.split_once(':').map_or(&*self.0, |(class, _)| class)
    }
}

/// How an intent stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IntentStatus {
    /// To be delivered.
    Pending,
    /// Delivered.
    Completed,
    /// Given up; an operator can redrive it.
    Dead,
    /// Its claims end without a word; an operator can redrive it.
    Quarantined,
    /// Not wanted any more.
    Discarded,
}

impl IntentStatus {
    /// Every status.
    pub const ALL: [Self; 5] = [
        Self::Pending,
        Self::Completed,
        Self::Dead,
        Self::Quarantined,
        Self::Discarded,
    ];

    /// The word that the store, the API and the metrics use.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Completed => "completed",
            Self::Dead => "dead",
            Self::Quarantined => "quarantined",
            Self::Discarded => "discarded",
        }
    }

    /// Reads the word back.
    #[must_use]
    pub fn from_word(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|status| status.word() == word)
    }
}

/// How an intent is sent: frozen with it, told in the row's `sending` as JSON. The bytes stand in
/// [`NewIntent::body`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sending {
    /// Where to and how, every template rendered.
    pub how: How,
    /// When to try again.
    pub retry: Retry,
    /// How long one try may take, in milliseconds.
    pub timeout_ms: u64,
}

/// How an intent is sent, every template rendered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum How {
    /// An HTTP request, all of whose texts are plain. Its `headers` hold the content type, never
    /// the key.
    Http(HttpSend),
    /// A message to a NATS `JetStream` subject.
    Publish {
        /// The subject.
        subject: String,
        /// Of the payload.
        content_type: Option<String>,
    },
    /// A task for a step worker.
    Task {
        /// Which step it is.
        step: String,
        /// Of the payload.
        content_type: Option<String>,
    },
}

/// An intent to insert, with everything frozen.
#[derive(Clone, Debug)]
pub struct NewIntent {
    /// Made from the run's id and `seq`.
    pub id: IntentId,
    /// Its place within the run, from 1.
    pub seq: i64,
    /// The step that it belongs to.
    pub step: String,
    /// Its lane.
    pub destination: Destination,
    /// Passed to the receiver, the same at every try; empty: none is.
    pub idempotency_key: String,
    /// How.
    pub sending: Sending,
    /// What.
    pub body: Bytes,
    /// Whether it is its turn at once.
    pub armed: bool,
}

/// A change of an intent that a tick makes. Taken whole or not at all with the tick.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IntentChange {
    /// Which, by its place.
    pub seq: i64,
    /// The status that the tick saw: if it still is, the run knows it now, and `changed` ends.
    pub seen: Option<IntentStatus>,
    /// What else.
    pub order: Order,
}

/// What a tick orders for an intent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Nothing.
    None,
    /// It is its turn: due at once, if `pending` and never due before.
    Arm,
    /// Not wanted any more: `discarded` at once if it is `pending` and unclaimed, `dead` or
    /// `quarantined`; a claimed one when its claim ends without success.
    Withdraw,
    /// Once more, with the same key and bytes and new budgets: `dead` or `quarantined` to
    /// `pending`, due at once. Refused by the tick when its bytes are gone.
    Redrive,
}

/// What a tick sees of an intent.
#[derive(Clone, Debug)]
pub struct IntentSeen {
    /// Its place within the run.
    pub seq: i64,
    /// Its status.
    pub status: IntentStatus,
    /// Whether its run does not know that status yet.
    pub changed: bool,
    /// Claims that were not given back: zero means that nothing was sent.
    pub tries: u32,
    /// Whether its bytes are still there.
    pub has_body: bool,
    /// The word for the newest try's outcome.
    pub outcome: Option<String>,
    /// What came of the newest try, for people.
    pub diagnostic: Option<String>,
    /// The answer that was kept, of a completed one.
    pub answer: Option<Recorded>,
}

/// A wish to work on an intent.
#[derive(Clone, Debug)]
pub struct ClaimWish {
    /// Which.
    pub key: IntentKey,
    /// The stamp that the attempt gets if this claim wins.
    pub stamp: Stamp,
    /// How long the worker may be silent.
    pub lease: Duration,
    /// Who it is, for people.
    pub worker: String,
}

/// What became of a claim.
#[derive(Clone, Debug)]
pub enum IntentClaimed {
    /// To be sent.
    Won(Box<ClaimedIntent>),
    /// Somebody else was faster, or it is not due.
    Lost,
    /// Too many claims ended without a word; it is not tried again.
    Quarantined,
}

/// An intent in the hands of a worker.
#[derive(Clone, Debug)]
pub struct ClaimedIntent {
    /// Which.
    pub key: IntentKey,
    /// Of this run.
    pub run_id: RunId,
    /// Its place within the run.
    pub seq: i64,
    /// Its step.
    pub step: String,
    /// Its lane.
    pub destination: Destination,
    /// For the receiver; empty: it sees none.
    pub idempotency_key: String,
    /// The claim's stamp.
    pub stamp: Stamp,
    /// Which try this is, from 1.
    pub tries: u32,
    /// Tries before the newest redrive: the budget of those that follow is a new one.
    pub tries_before: u32,
    /// Tries that failed for a fault of the item.
    pub faults: u32,
    /// How long ago its first try was, since the newest redrive: however long it waited before, the
    /// horizon counts from here.
    pub age: Duration,
    /// How.
    pub sending: Sending,
    /// What.
    pub body: Bytes,
}

/// How a try ended.
#[derive(Clone, Debug)]
pub struct Finish {
    /// Which intent.
    pub key: IntentKey,
    /// Of which claim.
    pub stamp: Stamp,
    /// How.
    pub end: End,
    /// For people and metrics.
    pub note: Note,
}

/// The end of a try.
#[derive(Clone, Debug)]
pub enum End {
    /// Delivered. Taken while the intent is `pending`, whoever has it now: it is true; unless
    /// `fenced`, then only from the present claim.
    Delivered {
        /// Whether a stale stamp is refused: results of step workers.
        fenced: bool,
        /// What to keep of the answer.
        answer: Option<Recorded>,
    },
    /// To be tried again. Fenced.
    Again {
        /// After this.
        after: Duration,
        /// Whether it was the item's fault.
        item_fault: bool,
    },
    /// Given up. Fenced.
    Dead {
        /// Whether it was the item's fault.
        item_fault: bool,
    },
    /// Given back without having been tried, which costs nothing. Fenced.
    GivenBack {
        /// Due again after this.
        after: Duration,
    },
}

/// What is told of a try.
#[derive(Clone, Debug, Default)]
pub struct Note {
    /// One word.
    pub outcome: String,
    /// The status of the answer, if one came.
    pub answer_status: Option<u16>,
    /// What happened, without NUL, at most [`DIAGNOSTIC_BYTES_MAX`].
    pub diagnostic: Option<String>,
}

/// What became of the end of a try.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finished {
    /// Written; also when it had been written before and only the reply was lost.
    Taken,
    /// Another claim has it, or it is final; nothing was written.
    Stale,
}

/// What came of one try, in kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The destination's: counted by time.
    Destination,
    /// The item's: counted by tries.
    Item,
}

/// What follows a try that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Another, after this.
    Again(Duration),
    /// None: the budget is used up.
    GiveUp,
}

impl Retry {
    /// What follows a try that failed. `tries`: with this one, from 1; `faults`: of the item,
    /// with this one; `age`: since the first try; all since the newest redrive; `retry_after`: what the destination asked
    /// for; `jitter`: from 0 to 1.
    ///
    /// The pause is exponential, between half and one and a half times its nominal length. What
    /// the destination asks for counts between the nominal pause and the longest. Neither reaches
    /// beyond the horizon: there is a last try at its end, but none sooner than after the shortest
    /// pause.
    #[must_use]
    pub fn after(
        &self,
        fault: Fault,
        tries: u32,
        faults: u32,
        age: Duration,
        retry_after: Option<Duration>,
        jitter: f64,
    ) -> Next {
        let max = Duration::from_millis(self.max_ms);
        let doublings = tries.saturating_sub(1).min(32);
        let nominal = Duration::from_millis(self.first_ms)
            .saturating_mul(1_u32.checked_shl(doublings).unwrap_or(u32::MAX))
            .min(max);
        let asked = retry_after.map_or(nominal, |asked| asked.clamp(nominal, max.max(nominal)));
        let pause = asked.mul_f64(0.5 + jitter.clamp(0.0, 1.0));
        let pause = retry_after.map_or(pause, |_| pause.max(asked));
        let left = Duration::from_millis(self.horizon_ms).saturating_sub(age);
        let (over, pause) = match fault {
            Fault::Item => (faults >= self.faults_max, pause),
            Fault::Destination => {
                let shortest = Duration::from_millis(self.first_ms).min(max) / 2;
                (left.is_zero(), pause.min(left.max(shortest)))
            }
        };
        if over {
            Next::GiveUp
        } else {
            Next::Again(pause)
        }
    }
}

/// Makes a text fit to be kept about a try: without NUL and other control characters, bounded.
#[must_use]
pub fn diagnostic(text: &str) -> String {
    let mut kept = String::new();
    for character in text.chars() {
        if kept.len() + character.len_utf8() > DIAGNOSTIC_BYTES_MAX {
            break;
        }
        kept.push(if character.is_control() {
            ' '
        } else {
            character
        });
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(tries: u32, faults: u32, age_s: u64, asked_s: Option<u64>, jitter: f64) -> Next {
        let fault = if faults > 0 {
            Fault::Item
        } else {
            Fault::Destination
        };
        let (age, asked) = (Duration::from_secs(age_s), asked_s.map(Duration::from_secs));
        Retry::DEFAULT.after(fault, tries, faults, age, asked, jitter)
    }

    #[test]
    fn pauses_double_up_to_the_longest_and_are_spread() {
        let seconds = |s| Next::Again(Duration::from_secs(s));
        assert_eq!(after(1, 0, 0, None, 0.0), seconds(5));
        assert_eq!(after(1, 0, 0, None, 1.0), seconds(15));
        assert_eq!(after(3, 0, 0, None, 0.5), seconds(40));
        assert_eq!(after(40, 0, 0, None, 0.5), seconds(3600));
    }

    #[test]
    fn at_most_four_tries_fall_into_the_first_minute() {
        let mut elapsed = Duration::ZERO;
        let mut tries = 1;
        while let Next::Again(pause) = after(tries, 0, 0, None, 0.0) {
            elapsed += pause;
            if elapsed >= Duration::from_mins(1) {
                break;
            }
            tries += 1;
        }
        assert!(tries <= 4, "{tries}");
    }

    #[test]
    fn the_destination_may_ask_for_more_time_but_not_for_ever() {
        let asked = |s, jitter| after(1, 0, 0, Some(s), jitter);
        assert_eq!(asked(60, 0.0), Next::Again(Duration::from_mins(1)));
        assert_eq!(asked(1, 0.5), Next::Again(Duration::from_secs(10)));
        assert_eq!(asked(1_000_000, 0.0), Next::Again(Duration::from_hours(1)));
    }

    #[test]
    fn faults_of_the_destination_are_suffered_for_a_time_and_those_of_the_item_for_a_count() {
        let days = |n: u64| n * 24 * 3600;
        assert!(matches!(after(500, 0, days(2), None, 0.5), Next::Again(_)));
        assert_eq!(after(2, 0, days(3), None, 0.5), Next::GiveUp);
        assert!(matches!(after(4, 4, days(9), None, 0.5), Next::Again(_)));
        assert_eq!(after(5, 5, 0, None, 0.5), Next::GiveUp);
    }

    #[test]
    fn no_pause_reaches_beyond_the_horizon_and_nothing_is_given_up_before_its_end() {
        let left = |left_s: u64, asked_s| after(9, 0, 3 * 24 * 3600 - left_s, asked_s, 0.5);
        assert_eq!(left(1800, Some(3600)), Next::Again(Duration::from_mins(30)));
        assert_eq!(left(600, None), Next::Again(Duration::from_mins(10)));
        // A last try, but not right after the one before.
        assert_eq!(left(1, None), Next::Again(Duration::from_secs(5)));
        assert_eq!(left(0, None), Next::GiveUp);
    }

    #[test]
    fn a_diagnostic_holds_no_control_character_and_is_bounded() {
        assert_eq!(diagnostic("a\0b\nc"), "a b c");
        assert!(diagnostic(&"é".repeat(5000)).len() <= DIAGNOSTIC_BYTES_MAX);
    }
}
