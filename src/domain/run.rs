//! The run: a durable state machine that a decision starts.
//!
//! [`begin()`] makes it, [`tick()`] moves it on: pure functions of the run, of what it has not taken
//! in yet and of the time, which the store judges (a timer is over or not). A tick is committed by
//! one conditional update on `record_version`; whoever loses reloads and computes again.
//!
//! Invariants:
//! - Each committed tick raises `record_version` by one and appends at least one transition;
//!   transitions are numbered without a gap.
//! - An input is applied once: what is told again makes no tick.
//! - The bytes and keys of intents are made when their step begins, and never again.
//! - A run that can't go on is `stuck` and says why.

mod apply;
mod begin;
pub(crate) mod freeze;
pub mod history;
mod progress;
pub(super) mod render;
mod subject;
#[cfg(test)]
pub(crate) mod tests;
mod tick;
mod undo;

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use uuid::Uuid;

pub use self::begin::{Beginning, FollowUp, RequestSeen, begin};
pub use self::progress::{RESULT_BYTES_MAX, SIGNALS_HELD_MAX};
pub use self::tick::tick;

use super::intent::{IntentChange, IntentId, IntentSeen, NewIntent, Stamp};
use super::record::DecisionId;
use super::scope::{RecordKey, TenantScope};
use super::workflow::Workflow;
use crate::domain::derived_uuid;

/// Names a run: the id of the decision that started it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct RunId(pub Uuid);

impl From<DecisionId> for RunId {
    fn from(decision: DecisionId) -> Self {
        Self(decision.0)
    }
}

impl fmt::Display for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl RunId {
    /// The id of the intent at this place: always the same.
    #[must_use]
    pub fn intent(self, seq: i64) -> IntentId {
        let mut hasher = blake3::Hasher::new_derive_key("oncegate 2026 intent id");
        hasher.update(self.0.as_bytes());
        hasher.update(&seq.to_le_bytes());
        IntentId(derived_uuid(&hasher))
    }
}

/// A run and whose it is.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct RunKey {
    /// Whose.
    pub tenant: TenantScope,
    /// Which.
    pub id: RunId,
}

/// How a run stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunStatus {
    /// Something of it is being sent.
    Running,
    /// It waits for a timer or a signal.
    Waiting,
    /// It can't go on; an operator can.
    Stuck,
    /// Every step is done.
    Completed,
    /// A step failed for good, and there was nothing to undo.
    Failed,
    /// A step failed for good, and what was done before is undone.
    Compensated,
    /// It was cancelled, and what was done before is undone.
    Cancelled,
}

impl RunStatus {
    /// Every status.
    pub const ALL: [Self; 7] = [
        Self::Running,
        Self::Waiting,
        Self::Stuck,
        Self::Completed,
        Self::Failed,
        Self::Compensated,
        Self::Cancelled,
    ];

    /// The word that the store, the API and the metrics use.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Waiting => "waiting",
            Self::Stuck => "stuck",
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Compensated => "compensated",
            Self::Cancelled => "cancelled",
        }
    }

    /// Reads the word back.
    #[must_use]
    pub fn from_word(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|status| status.word() == word)
    }

    /// Whether it never changes again.
    #[must_use]
    pub fn is_final(self) -> bool {
        matches!(
            self,
            Self::Completed | Self::Failed | Self::Compensated | Self::Cancelled
        )
    }
}

/// A run as the store showed it at one moment.
#[derive(Clone, Debug)]
pub struct Run {
    /// Which.
    pub key: RunKey,
    /// Committed ticks.
    pub record_version: i64,
    /// The number of its newest transition.
    pub last_transition_seq: i64,
    /// How it stands.
    pub status: RunStatus,
    /// The workflow's name.
    pub workflow: String,
    /// The record whose decision started it.
    pub record: RecordKey,
    /// Whether that record is not reclaimable before the run is final.
    pub holds_record: bool,
    /// The [`Workflow`] and what belongs to it, as JSON.
    pub definition: Bytes,
    /// What it is about, as JSON.
    pub input: Bytes,
    /// How far it is, as JSON.
    pub progress: Bytes,
    /// Why it is stuck, failed or cancelled.
    pub reason: Option<String>,
}

/// A run with what a tick looks at.
#[derive(Clone, Debug)]
pub struct LoadedRun {
    /// The run.
    pub run: Run,
    /// Its intents, in their order: those that changed, those that are not final, and those of
    /// status `dead` or `quarantined`.
    pub intents: Vec<IntentSeen>,
    /// Whether its timer is over.
    pub timer_over: bool,
}

/// Something that happened outside.
#[derive(Clone, Debug)]
pub struct Input {
    /// Applied once: told again with the same stamp it changes nothing.
    pub stamp: Stamp,
    /// Who told it, for people.
    pub by: String,
    /// What.
    pub event: Event,
}

/// What happened outside.
#[derive(Clone, Debug)]
pub enum Event {
    /// An awaited event, or one that will be awaited.
    Signal {
        /// Its name.
        name: String,
        /// What it brought, for later templates.
        payload: Value,
    },
    /// Stop, and undo what was done.
    Cancel {
        /// Why.
        reason: String,
    },
    /// Try what failed again, with the same keys and bytes. Only of a stuck run.
    Retry {
        /// Only the intent at this place; `None`: the one that the run is stuck at.
        seq: Option<i64>,
        /// Why.
        reason: String,
    },
    /// Go on without the step that failed. Only of a stuck run.
    Resume {
        /// What later templates see as its result.
        result: Value,
        /// Why.
        reason: String,
    },
}

/// Why an input was refused; nothing was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The run is final.
    #[error("the run is over")]
    Final,
    /// Only of a stuck run.
    #[error("the run is not stuck")]
    NotStuck,
    /// The run went on without it, or its bytes are gone.
    #[error("the run went on without this intent, or its bytes are gone")]
    Gone,
    /// The run is being cancelled or undone.
    #[error("the run is being undone")]
    Undoing,
    /// Another version wrote the run.
    #[error("this version can't read the run; tell it to the version that wrote it")]
    Unreadable,
    /// Its stamp is that of another input, which was taken in.
    #[error("this request_id was used for another act on this run; use a new one")]
    OtherAct,
    /// None of its steps awaits a signal of this name.
    #[error(
        "no step of the run awaits a signal of this name; its history names the one that it waits for"
    )]
    NeverAwaited,
    /// It holds as many signals as it may.
    #[error("the run holds too many signals that it has not awaited yet")]
    TooManySignals,
}

/// One line of a run's history.
#[derive(Clone, Debug, PartialEq)]
pub struct NewTransition {
    /// What happened, in a word.
    pub kind: &'static str,
    /// To which step.
    pub step: Option<String>,
    /// More about it.
    pub detail: Option<Value>,
    /// The stamp of the input that caused it.
    pub stamp: Option<Stamp>,
}

/// What becomes of a run's timer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timer {
    /// As it is.
    Keep,
    /// None any more.
    Clear,
    /// Over after this, from the commit.
    In(Duration),
}

/// What a tick makes of a run. The transitions are numbered from the run's `last_transition_seq`
/// on, in their order; there is at least one.
#[derive(Clone, Debug)]
pub struct Tick {
    /// How it stands then.
    pub status: RunStatus,
    /// How far it is then.
    pub progress: Bytes,
    /// Why it is stuck, failed or cancelled then.
    pub reason: Option<String>,
    /// Its timer.
    pub timer: Timer,
    /// Its history.
    pub transitions: Vec<NewTransition>,
    /// To insert.
    pub intents: Vec<NewIntent>,
    /// Of intents that are there.
    pub changes: Vec<IntentChange>,
}

/// A run to insert, with the decision that starts it.
#[derive(Clone, Debug)]
pub struct NewRun {
    /// The workflow's name.
    pub workflow: String,
    /// Whether its record is not reclaimable before it is final.
    pub holds_record: bool,
    /// The [`Workflow`] and what belongs to it, as JSON.
    pub definition: Bytes,
    /// What it is about, as JSON.
    pub input: Bytes,
    /// The first tick; `Timer::Keep` is none.
    pub first: Tick,
    /// Drawn for it.
    pub tick_id: Stamp,
}

impl NewRun {
    /// Memory held, in bytes, about.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        let bodies: usize = self
            .first
            .intents
            .iter()
            .map(|intent| intent.body.len())
            .sum();
        self.definition.len() + self.input.len() + self.first.progress.len() + bodies
    }
}

/// A tick to commit.
#[derive(Clone, Debug)]
pub struct TickCommit {
    /// Of which run.
    pub key: RunKey,
    /// Taken only while the run has this version.
    pub seen_version: i64,
    /// The number of the newest transition that was seen.
    pub seen_seq: i64,
    /// Drawn for this commit: how it is recognised after a lost reply.
    pub tick_id: Stamp,
    /// What it makes of the run.
    pub tick: Tick,
}

/// What became of a tick.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TickCommitted {
    /// Written; also when it had been written before and only the reply was lost.
    Committed,
    /// The run has another version, or one of its inputs was applied meanwhile: nothing was
    /// written.
    Conflict,
}

/// What a workflow and its effects need besides themselves, stored with the run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Definition {
    /// The steps; the first may be the decision's own effects.
    pub workflow: Workflow,
    /// The key that the effects' keys are made from: only this record and generation give it.
    pub key_seed: Uuid,
    /// The key of the first intent, if it is not to be made.
    pub first_key: Option<String>,
}

impl Definition {
    /// `None`: another version wrote it.
    pub fn read(bytes: &[u8]) -> Option<Self> {
        serde_json::from_slice(bytes).ok()
    }
}

/// What is kept of a run as JSON. None of it can fail to be written; if it did, nothing would be
/// kept, and the run would be stuck as one that can't be read.
fn json(value: &impl Serialize) -> Bytes {
    serde_json::to_vec(value).unwrap_or_default().into()
}
