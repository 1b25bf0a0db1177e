//! How far a run is: all that its next tick needs to know besides what happened since.
//!
//! Every part is bounded: results and signals by [`RESULT_BYTES_MAX`] each, in number by the
//! workflow's steps and by [`SIGNALS_HELD_MAX`].

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::domain::message::Recorded;
use crate::domain::workflow::is_shallow;

/// The longest result of a step, or payload of a signal, that is kept for later templates, in
/// bytes. What is longer is cut out and marked.
pub const RESULT_BYTES_MAX: usize = 64 * 1024;
/// Signals that a run holds before it awaits them.
pub const SIGNALS_HELD_MAX: usize = 64;

/// How far a run is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Progress {
    /// What it is at.
    pub at: At,
    /// The place of the newest intent that was ever made.
    pub last_seq: i64,
    /// What templates see as `steps`, by the steps' names.
    pub results: Map<String, Value>,
    /// What templates see as `signals`, by the signals' names.
    pub heard: Map<String, Value>,
    /// Signals that came before they were awaited, oldest first.
    pub signals: Vec<Held>,
    /// Steps that did something and have a compensation, in the order in which they were done.
    pub to_undo: Vec<usize>,
}

/// What a run is at. Whether it is stuck there is its status.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum At {
    /// A step.
    Step { index: usize, doing: Doing },
    /// Waits until the intents of a step that are not wanted any more are out of the way.
    Withdrawing {
        index: usize,
        span: Span,
        ending: Ending,
    },
    /// The compensation of a step. Without `seq` it could not be rendered.
    Undoing {
        index: usize,
        seq: Option<i64>,
        ending: Ending,
    },
    /// Nothing any more.
    Over,
}

/// What a step is at.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Doing {
    /// Sends its effects.
    Sending(Span),
    /// They could not be rendered; none exists.
    Unrendered,
    /// Waits for its time to be over.
    Timer,
    /// Waits for its signal.
    Signal,
}

/// The intents of a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Span {
    /// The place of the first.
    pub first: i64,
    /// The place of the one whose turn it is.
    pub head: i64,
    /// The place of the last.
    pub last: i64,
    /// Places after `head` of those that an operator gave up before their turn.
    pub gone: Vec<i64>,
    /// Whether one may have had an effect.
    pub ran: bool,
}

/// How a run ends once everything is undone.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Ending {
    /// Whether somebody asked for it.
    pub cancelled: bool,
    /// Why.
    pub reason: String,
    /// Whether there was something to undo.
    pub undone: bool,
}

/// A signal that came before it was awaited.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Held {
    pub name: String,
    pub payload: Value,
}

impl Progress {
    /// Before the first step.
    pub fn start() -> Self {
        Self {
            at: At::Over,
            last_seq: 0,
            results: Map::new(),
            heard: Map::new(),
            signals: Vec::new(),
            to_undo: Vec::new(),
        }
    }

    /// `None`: another version wrote it.
    pub fn read(bytes: &[u8]) -> Option<Self> {
        serde_json::from_slice(bytes).ok()
    }

    pub fn write(&self) -> Bytes {
        super::json(self)
    }
}

impl Span {
    /// Places whose intents are not done.
    pub fn open(&self) -> std::ops::RangeInclusive<i64> {
        self.head..=self.last
    }
}

/// What later templates see of an answer.
pub(super) fn result(answer: Option<&Recorded>) -> Value {
    let status = answer.map(|answer| answer.status);
    let body = answer.and_then(|answer| answer.body.as_ref());
    match body {
        Some(body) if body.len() > RESULT_BYTES_MAX => {
            json!({ "status": status, "body": null, "cut": true })
        }
        Some(body) => json!({ "status": status, "body": parsed(body) }),
        // An answer's body is not kept when it is too long.
        None if status.is_some() => json!({ "status": status, "body": null, "cut": true }),
        None => json!({ "status": null, "body": null }),
    }
}

/// A body as templates see it: JSON if it is JSON of no great depth, else text.
pub(super) fn parsed(body: &[u8]) -> Value {
    let json = serde_json::from_slice(body).ok().filter(is_shallow);
    json.unwrap_or_else(|| Value::String(String::from_utf8_lossy(body).into_owned()))
}

/// A value that somebody gave, and whether it had to be cut out for its length or its depth.
pub(super) fn bounded(value: &Value) -> (Value, bool) {
    if !is_shallow(value) || super::json(value).len() > RESULT_BYTES_MAX {
        (Value::Null, true)
    } else {
        (value.clone(), false)
    }
}
