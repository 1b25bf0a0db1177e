//! The durable half of the outbox: intents, their claims and their ends.

use std::collections::HashMap;
use std::time::Duration;

use async_trait::async_trait;
use time::OffsetDateTime;

use super::{Audit, Resolved, StoreError};
use crate::domain::intent::{
    ClaimWish, Destination, End, Finish, Finished, IntentClaimed, IntentId, IntentKey,
    IntentStatus, Note, Sending, Stamp, diagnostic,
};
use crate::domain::run::RunId;
use crate::domain::scope::TenantScope;

/// A tenant's intents for one destination: what is fair between tenants and isolated between
/// destinations.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Lane {
    /// Whose.
    pub tenant: TenantScope,
    /// Where to.
    pub destination: Destination,
}

/// How many intents of a lane are wanted.
#[derive(Clone, Debug)]
pub struct LaneWish {
    /// Which.
    pub lane: Lane,
    /// At most this many.
    pub limit: u32,
}

/// A worker is alive: extend its claim.
#[derive(Clone, Debug)]
pub struct ClaimBeat {
    /// Of which intent.
    pub key: IntentKey,
    /// Whose claim.
    pub stamp: Stamp,
    /// The lease counts anew from the store's present.
    pub lease: Duration,
}

/// Which intents an operator looks for. All given conditions must hold.
#[derive(Clone, Debug, Default)]
pub struct IntentSearch {
    /// Of this tenant, and of its principals.
    pub tenant: Option<String>,
    /// In this status.
    pub status: Option<IntentStatus>,
    /// For this destination.
    pub destination: Option<Destination>,
    /// Of this run.
    pub run_id: Option<RunId>,
    /// Continue after this intent, in the order of (tenant, intent id).
    pub after: Option<IntentKey>,
    /// At most this many.
    pub limit: u32,
}

/// An intent, for people.
#[derive(Clone, Debug)]
pub struct IntentLine {
    /// Which.
    pub key: IntentKey,
    /// Of this run.
    pub run_id: RunId,
    /// Its place within the run.
    pub seq: i64,
    /// Its step.
    pub step: String,
    /// Its status.
    pub status: IntentStatus,
    /// Its lane.
    pub destination: Destination,
    /// What the receiver sees.
    pub idempotency_key: String,
    /// How it is sent.
    pub sending: Sending,
    /// How long ago its turn came or, once it was tried, its first try was, since the newest
    /// redrive; `None`: it is not its turn yet.
    pub age: Option<Duration>,
    /// Whether a worker has it now.
    pub claimed: bool,
    /// When it may be claimed next.
    pub due_at: Option<OffsetDateTime>,
    /// Claims that were not given back.
    pub tries: u32,
    /// Of these, before the newest redrive.
    pub tries_before: u32,
    /// Tries that failed for a fault of the item.
    pub faults: u32,
    /// Claims in a row that ended without a word.
    pub deaths: u32,
    /// How often it was redriven.
    pub redrives: u32,
    /// One word for the newest try.
    pub outcome: Option<String>,
    /// The status of the newest answer.
    pub answer_status: Option<u16>,
    /// What happened at the newest try.
    pub diagnostic: Option<String>,
    /// Length of what is sent, in bytes; `None`: it is gone.
    pub body_bytes: Option<u64>,
    /// When it was committed.
    pub created_at: OffsetDateTime,
    /// When it became final, dead or quarantined.
    pub ended_at: Option<OffsetDateTime>,
}

/// A destination that an operator paused.
#[derive(Clone, Debug)]
pub struct Pause {
    /// Which.
    pub destination: Destination,
    /// Since when.
    pub paused_at: OffsetDateTime,
    /// By whom.
    pub operator: String,
    /// Why.
    pub reason: String,
}

/// Figures for the gauges.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OutboxCensus {
    /// Intents whose turn has come and that are not over, `dead` and `quarantined` ones, each
    /// counted up to [`COUNT_MAX`]. Nobody can count the others at a bounded cost.
    pub intents: Vec<(IntentStatus, u64)>,
    /// Runs by status, of those that are not final, each counted up to [`COUNT_MAX`].
    pub runs: Vec<(crate::domain::run::RunStatus, u64)>,
    /// Since when the turn of the oldest pending intent has come.
    pub oldest_pending: Option<Duration>,
}

/// The longest outcome that is kept, in bytes.
const OUTCOME_BYTES_MAX: usize = 64;

/// The audit log's word for an intent that an operator gave up.
pub(super) const DISCARDED_INTENT: &str = "discarded_intent";
/// The audit log's word for a destination to which nothing is sent any more.
pub(super) const PAUSED_DESTINATION: &str = "paused_destination";
/// The audit log's word for a destination to which it is sent again.
pub(super) const RESUMED_DESTINATION: &str = "resumed_destination";

/// Counts of the census end here, so that their cost is bounded.
pub const COUNT_MAX: u32 = 100_000;

/// Intents, as drainers, step workers and operators see them.
#[async_trait]
pub trait OutboxStore: Send + Sync + 'static {
    /// Lanes in which something is due, in their order, after this one; cost is proportional to
    /// the lanes, not to the backlog. Lanes of paused destinations are left out.
    async fn lanes(&self, after: Option<&Lane>, limit: u32) -> Result<Vec<Lane>, StoreError>;

    /// Intents that are due, of each lane those that have been so for longest.
    async fn due(&self, wishes: &[LaneWish]) -> Result<Vec<IntentKey>, StoreError>;

    /// Claims intents that are pending and due, each at most once: the present claim must be over
    /// or none, its attempt is then `lost`. An attempt is opened for each claim. A wish whose
    /// stamp has the claim already has won.
    async fn claim(&self, wishes: &[ClaimWish]) -> Result<Vec<IntentClaimed>, StoreError>;

    /// Extends claims that bear the stamp. `false`: not the worker any more.
    async fn extend(&self, beats: &[ClaimBeat]) -> Result<Vec<bool>, StoreError>;

    /// Writes the ends of tries: the intent's state, its attempt's, and the answer's body.
    async fn finish(&self, ends: &[Finish]) -> Result<Vec<Finished>, StoreError>;

    /// Finds an intent by its id alone.
    async fn find_intent(&self, id: IntentId) -> Result<Option<IntentLine>, StoreError>;

    /// Finds intents.
    async fn find_intents(&self, search: &IntentSearch) -> Result<Vec<IntentLine>, StoreError>;

    /// An operator gives an intent up: `pending` and unclaimed, `dead` or `quarantined` to
    /// `discarded`; its run is told.
    async fn discard(&self, key: &IntentKey, audit: &Audit) -> Result<Resolved, StoreError>;

    /// Stops sending to a destination, or goes on. Audited.
    async fn set_paused(
        &self,
        destination: &Destination,
        paused: bool,
        audit: &Audit,
    ) -> Result<(), StoreError>;

    /// Destinations that are paused.
    async fn paused(&self) -> Result<Vec<Pause>, StoreError>;

    /// Counts for the gauges; bounded in cost.
    async fn outbox_census(&self) -> Result<OutboxCensus, StoreError>;
}

/// How the attempt stands that this end closes.
pub(super) fn attempt_status(end: &End) -> &'static str {
    match end {
        End::Delivered { .. } => "delivered",
        End::Again { .. } | End::Dead { .. } => "failed",
        End::GivenBack { .. } => "released",
    }
}

/// The outcome as it is kept: a word, whatever a worker calls it.
pub(super) fn outcome_word(note: &Note) -> String {
    let word = note.outcome.chars().filter(char::is_ascii_graphic);
    word.take(OUTCOME_BYTES_MAX).collect()
}

/// What is told of a try, fit to be kept.
pub(super) fn note_text(note: &Note) -> Option<String> {
    note.diagnostic.as_deref().map(diagnostic)
}

/// The body of the answer that an end brings.
fn answer_body(end: &End) -> Option<&[u8]> {
    match end {
        End::Delivered { answer, .. } => answer.as_ref()?.body.as_deref(),
        End::Again { .. } | End::Dead { .. } | End::GivenBack { .. } => None,
    }
}

/// Whether an end brings the answer whose body is kept. One that was not kept can't be compared.
pub(super) fn brings(end: &End, kept: Option<&[u8]>) -> bool {
    let told = answer_body(end);
    told.zip(kept).is_none_or(|(told, kept)| told == kept)
}

/// For each end of a batch the first one that tells the same; an end that is the first is its own.
pub(super) fn first_told(ends: &[Finish]) -> Vec<usize> {
    let mut first = HashMap::new();
    let mut places = Vec::with_capacity(ends.len());
    for (index, end) in ends.iter().enumerate() {
        let claim = (&end.key, end.stamp);
        let told = (attempt_status(&end.end), outcome_word(&end.note));
        let told = (claim, told, answer_body(&end.end));
        places.push(*first.entry(told).or_insert(index));
    }
    places
}
