//! The store: all SQL, all transactions, and the clock that judges leases and validity.
//!
//! [`Store`] is about records, [`runs`] and [`outbox`] hold its other two parts. It has two
//! implementations, `postgres` and `sqlite`, and one conformance suite that runs every behaviour on
//! both. Operations that are hot take batches; [`group`] fills them.
//!
//! Invariants, whichever the implementation:
//! - Every write by an owner is guarded by its attempt token, in the statement that writes.
//! - Time is the database's. It leaves the store as durations and verdicts; instants that leave it
//!   are for people.
//! - An operation either happened whole or not at all, and an error says which, if it can.
//! - Sending the same operation again after a lost reply changes nothing more and gives the same
//!   answer: claims are recognised by their token, completions by their decision id.

pub mod doctor;
pub mod group;
pub mod migrate;
pub mod open;
pub mod outbox;
pub mod portion;
pub mod postgres;
pub mod runs;
pub mod sqlite;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use time::OffsetDateTime;
use tokio::sync::broadcast;
use uuid::Uuid;

use self::outbox::OutboxStore;
use self::runs::RunStore;
use crate::domain::record::{
    AttemptToken, Claim, Claimed, Committed, Completion, DecisionId, Found, Heartbeat, Record,
    Release, Released, Remembered, Reserved, StoredDecision,
};
use crate::domain::scope::{RecordKey, TenantScope};
use crate::domain::secret::Secret;

/// Why an operation gave no result.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The store could not be asked; the operation certainly did not happen.
    #[error("the store can't be reached")]
    Unavailable(#[source] sqlx::Error),
    /// The connection broke or the time ran out; the operation may have happened.
    #[error("the store did not answer; the operation may have happened")]
    Ambiguous(#[source] sqlx::Error),
    /// The store refused: a full disk, a read-only database, a lost permission. It did not happen.
    #[error("the store refused the operation")]
    Refused(#[source] sqlx::Error),
    /// A row holds what no version of this program wrote.
    #[error("table {table}, column {column}: {what}")]
    Inconsistent {
        /// The table.
        table: &'static str,
        /// The column.
        column: &'static str,
        /// What is wrong with it.
        what: String,
    },
    /// The gateway is shutting down and the operation was not begun.
    #[error("the store is closed")]
    Closed,
}

impl StoreError {
    /// The report of a row that no version of this program wrote.
    fn inconsistent(table: &'static str, column: &'static str, what: impl Into<String>) -> Self {
        let what = what.into();
        Self::Inconsistent {
            table,
            column,
            what,
        }
    }

    /// Whether the operation may have happened although it gave no result.
    #[must_use]
    pub fn may_have_happened(&self) -> bool {
        matches!(self, Self::Ambiguous(_) | Self::Inconsistent { .. })
    }

    /// The metrics' word for it.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Unavailable(_) => "unavailable",
            Self::Ambiguous(_) => "ambiguous",
            Self::Refused(_) => "refused",
            Self::Inconsistent { .. } => "inconsistent",
            Self::Closed => "closed",
        }
    }
}

/// What a sweep did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// Pending rows that went to `failed_before_commit`.
    pub failed_before_commit: u64,
    /// Pending rows that went to `outcome_unknown`.
    pub outcome_unknown: u64,
}

/// What retention did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Purged {
    /// Records that were deleted.
    pub records: u64,
    /// Decisions that were deleted, with their bodies.
    pub decisions: u64,
}

/// Which records an operator looks for. All given conditions must hold.
#[derive(Clone, Debug, Default)]
pub struct Search {
    /// Of this tenant, and of its principals.
    pub tenant: Option<String>,
    /// Of this pool.
    pub pool: Option<String>,
    /// Whose key begins with this.
    pub key_prefix: Option<String>,
    /// In this state, by its word.
    pub status: Option<String>,
    /// Claimed at least this long ago.
    pub older_than: Option<Duration>,
    /// Continue after this record, in the order of (tenant, pool, key).
    pub after: Option<RecordKey>,
    /// At most this many.
    pub limit: u32,
}

/// An operator's word about a record that is `outcome_unknown` or whose owner is long gone.
#[derive(Clone, Debug)]
pub enum Verdict {
    /// The upstream ran, and this was its answer.
    Happened(Box<Completion>),
    /// The upstream never ran: to `failed_before_commit`, reclaimable by any request.
    NeverHappened,
}

impl Verdict {
    /// The word for it in the audit log.
    #[must_use]
    pub fn word(&self) -> &'static str {
        match self {
            Self::Happened(_) => "happened",
            Self::NeverHappened => "never_happened",
        }
    }
}

/// The audit log's word for a record that an operator deleted.
pub const PURGED: &str = "purged";

/// An operator's act, for the audit log; written in the same transaction as what it did.
#[derive(Clone, Debug)]
pub struct Audit {
    /// Who, as their token names them.
    pub operator: String,
    /// Why, in their words.
    pub reason: String,
}

/// What became of an operator's act.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resolved {
    /// Done and audited.
    Done,
    /// There is no such record.
    NoRecord,
    /// The record is not in a state that allows it; nothing was written.
    WrongState,
    /// The last claim is too young for an owner to be certainly gone; nothing was written.
    TooEarly {
        /// Ask again after this.
        wait: Duration,
    },
}

/// Figures for the gauges.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// Records in `outcome_unknown`.
    pub unknown: u64,
    /// Age of the oldest pending record.
    pub oldest_pending: Option<Duration>,
}

/// A hint from another gateway; missing one costs at most a poll interval.
#[derive(Clone, Debug)]
pub enum Wakeup {
    /// These records changed, by [`wake_hash`].
    Records(Arc<[u64]>),
    /// Hints may have been lost: look at everything again.
    Everything,
}

/// How a record is named in a hint: short, and telling nothing of the key.
#[must_use]
pub fn wake_hash(key: &RecordKey) -> u64 {
    let mut hasher = blake3::Hasher::new();
    for part in [key.tenant.as_str(), key.pool.as_str(), key.key.as_str()] {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part.as_bytes());
    }
    let hash = hasher.finalize();
    let mut first = [0; 8];
    first.copy_from_slice(&hash.as_bytes()[..8]);
    u64::from_le_bytes(first)
}

/// The durable half of the protocol. Results of batch operations stand in the order of what was
/// asked. One batch may name a record twice; the outcome is as if they had come one by one.
#[async_trait]
pub trait Store: RunStore + OutboxStore {
    // --- records, hot ---

    /// Inserts each claim where no row is, and looks at the row, in a new statement, where one is.
    /// A row that already bears the claim's token and is still `pending` was won before.
    async fn reserve(&self, claims: &[Claim]) -> Result<Vec<Reserved>, StoreError>;

    /// Claims a row that bears `seen` and is `failed_before_commit`, or `completed` past validity
    /// and tombstone. `None`: the row is no longer so. A completed row begins a new generation, a
    /// failed one keeps its own, and its `maybe_sent`.
    async fn reclaim(
        &self,
        claim: &Claim,
        seen: AttemptToken,
    ) -> Result<Option<Claimed>, StoreError>;

    /// Extends leases of `pending` rows that bear the token. `false`: not the owner any more.
    async fn heartbeat(&self, beats: &[Heartbeat]) -> Result<Vec<bool>, StoreError>;

    /// Commits decisions for rows that bear the token and are `pending`, `outcome_unknown` or
    /// `failed_before_commit`; record and decision in one transaction. A row already completed by
    /// the same `decision_id` gives the same answer again. `None`: the token is stale, and nothing
    /// was written anywhere.
    async fn complete(
        &self,
        completions: &[Completion],
    ) -> Result<Vec<Option<Committed>>, StoreError>;

    /// Gives up rows that bear the token and are `pending` (or `outcome_unknown`, where the owner
    /// [is certain](crate::domain::record::GiveUp::is_certain)). A row that bears the token and is
    /// already where the release leads gives the same answer again. `None`: stale.
    async fn release(&self, releases: &[Release]) -> Result<Vec<Option<Released>>, StoreError>;

    /// The claim that this request id won, if it won one that is still remembered.
    async fn remembered(
        &self,
        tenant: &TenantScope,
        request_id: Uuid,
    ) -> Result<Option<Remembered>, StoreError>;

    /// Looks at records.
    async fn look_up(&self, keys: &[RecordKey]) -> Result<Vec<Option<Record>>, StoreError>;

    /// Reads a decision with its answer.
    async fn decision(
        &self,
        tenant: &TenantScope,
        decision_id: DecisionId,
    ) -> Result<Option<StoredDecision>, StoreError>;

    // --- wake-ups across gateways ---

    /// Marks pending records as awaited, so that whoever settles them sends a hint.
    async fn mark_awaited(&self, key: &RecordKey) -> Result<(), StoreError>;

    /// Sends a hint that these records changed. Never part of the commit that changed them.
    async fn notify(&self, records: &[u64]) -> Result<(), StoreError>;

    /// Hints from other gateways. A receiver that lags takes it for [`Wakeup::Everything`].
    fn wakeups(&self) -> broadcast::Receiver<Wakeup>;

    // --- upkeep ---

    /// Moves one pending row whose lease is over, guarded by token and lease, to where its stamped
    /// `on_unknown` says. `false`: it was not so any more.
    async fn sweep_one(&self, key: &RecordKey, token: AttemptToken) -> Result<bool, StoreError>;

    /// Moves up to `limit` pending rows whose lease is over, likewise.
    async fn sweep(&self, limit: u32) -> Result<Swept, StoreError>;

    /// Deletes up to `limit` decisions past their validity and records past validity and
    /// tombstone. Never `pending`, never `outcome_unknown`.
    async fn purge(&self, limit: u32) -> Result<Purged, StoreError>;

    /// Counts for the gauges; bounded in cost.
    async fn census(&self) -> Result<Census, StoreError>;

    // --- operators ---

    /// Finds records.
    async fn find(&self, search: &Search) -> Result<Vec<Found>, StoreError>;

    /// Resolves a record. Allowed from `outcome_unknown`, and from `pending` once its lease is
    /// over or when it has none. `Happened` is guarded by its completion's token; `NeverHappened`
    /// is refused before `owner_time_max` has passed since the last claim.
    async fn resolve(
        &self,
        key: &RecordKey,
        verdict: &Verdict,
        owner_time_max: Duration,
        audit: &Audit,
    ) -> Result<Resolved, StoreError>;

    /// Deletes one record that is `completed` or `failed_before_commit`, with its decision; not while
    /// a run that is not final holds it.
    async fn purge_one(&self, key: &RecordKey, audit: &Audit) -> Result<Resolved, StoreError>;

    // --- the whole ---

    /// Every version of the keyed-hash secret; makes the first when there is none.
    async fn secrets(&self, fresh: [u8; 32]) -> Result<Vec<Secret>, StoreError>;

    /// One round trip; gives the store's present.
    async fn ping(&self) -> Result<OffsetDateTime, StoreError>;

    /// Things about the set-up that weaken the promise, each as a sentence for the log.
    async fn warnings(&self) -> Result<Vec<String>, StoreError>;

    /// What can be told of the store's own health, beyond [`Self::warnings`], for
    /// [`doctor::examine`]: by default nothing.
    async fn doctor(&self) -> Result<Vec<doctor::Finding>, StoreError> {
        Ok(Vec::new())
    }

    /// Finishes what was begun and closes every connection.
    async fn close(&self);
}
