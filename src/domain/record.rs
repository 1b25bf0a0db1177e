//! The record: what one key's row says, with time already judged by the store's own clock.
//!
//! The type carries durations and verdicts ("the lease is over"), never instants to compare: only
//! the database's clock may say whether a lease or a validity has ended.

use std::fmt;
use std::time::Duration;

use time::OffsetDateTime;
use uuid::Uuid;

use super::fingerprint::Fingerprint;
use super::message::Recorded;
use super::policy::OnUnknown;
use super::run::NewRun;
use super::scope::RecordKey;

/// Stamped at every claim and never reused, also not after a purge. Every later write of the owner
/// must match it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct AttemptToken(pub Uuid);

/// Names one life of a key; never reused, also not after a purge.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct GenerationId(pub Uuid);

/// Names a committed decision.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct DecisionId(pub Uuid);

impl AttemptToken {
    /// The id of the decision that a caller of the API commits with this token: always the same,
    /// so that a completion that is sent again is recognised. A `UUIDv7` with the token's time;
    /// nobody can find the token by it.
    #[must_use]
    pub fn decision_id(self) -> DecisionId {
        let mut hasher = blake3::Hasher::new_derive_key("oncegate 2026 decision id");
        hasher.update(self.0.as_bytes());
        let mut bytes = [0; 16];
        hasher.finalize_xof().fill(&mut bytes);
        bytes[..6].copy_from_slice(&self.0.as_bytes()[..6]);
        let builder = uuid::Builder::from_bytes(bytes)
            .with_variant(uuid::Variant::RFC4122)
            .with_version(uuid::Version::SortRand);
        DecisionId(builder.into_uuid())
    }
}

impl fmt::Display for DecisionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What the sweep and retention need to know, stamped on the row at the claim, so that a route
/// edited meanwhile or another gateway's configuration changes nothing for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Terms {
    /// How long the owner may be silent.
    pub lease: Duration,
    /// How long a decision may be replayed, from its commit.
    pub valid_for: Duration,
    /// How long after its validity a key is refused instead of executed anew; zero: not at all.
    pub tombstone_for: Duration,
    /// Where the row goes when nobody knows whether the upstream ran.
    pub on_unknown: OnUnknown,
}

/// A wish to own a record. Everything random in it was drawn by the caller, so sending it twice
/// is the same wish.
#[derive(Clone, Debug)]
pub struct Claim {
    /// Which record.
    pub key: RecordKey,
    /// The token that the row gets if this claim wins.
    pub token: AttemptToken,
    /// The generation that the row gets if this claim opens one.
    pub generation_id: GenerationId,
    /// What the request is; `None` compares equal to everything.
    pub fingerprint: Option<Fingerprint>,
    /// Stamped on the row.
    pub terms: Terms,
    /// Of a caller of the API: if this claim wins, it is remembered under this id, in the same
    /// transaction, as a [`Remembered`].
    pub request_id: Option<Uuid>,
}

/// The claim that a request id of the API won.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remembered {
    /// Which record.
    pub key: RecordKey,
    /// The claim's token.
    pub token: AttemptToken,
    /// What it won.
    pub claimed: Claimed,
    /// The lease that it asked for.
    pub lease: Duration,
}

/// A claim that won.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Claimed {
    /// 1 for the first life of a key, one more for each later one that the row remembers.
    pub generation: i64,
    /// The life that this claim belongs to.
    pub generation_id: GenerationId,
}

/// What became of a claim.
#[derive(Clone, Debug)]
pub enum Reserved {
    /// This claim owns the record; also when it had won before and only the reply was lost.
    Won(Claimed),
    /// The record is someone's already; nothing was written.
    Lost(Box<Record>),
    /// The row that beat the insert was gone when it was looked at: claim again.
    Vanished,
}

/// A record as the store showed it at one moment.
#[derive(Clone, Debug)]
pub struct Record {
    /// Which record.
    pub key: RecordKey,
    /// Its state, with time judged.
    pub state: State,
    /// The token of the newest claim.
    pub token: AttemptToken,
    /// Number of the present life.
    pub generation: i64,
    /// Id of the present life.
    pub generation_id: GenerationId,
    /// What the request of this life is; `None`: nothing to compare.
    pub fingerprint: Option<Fingerprint>,
    /// As stamped at the newest claim.
    pub terms: Terms,
    /// When the row was first inserted, by the store's clock.
    pub created_at: OffsetDateTime,
    /// When it was last claimed, by the store's clock.
    pub reserved_at: OffsetDateTime,
    /// How long ago it was last claimed, by the store's clock.
    pub reserved_ago: Duration,
}

/// The four states of a record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// Somebody owns it.
    Pending(Lease),
    /// A decision was committed.
    Completed(DecisionId, Validity),
    /// Reclaimable: no decision, and the owner proved or the route accepts that it may run again.
    FailedBeforeCommit {
        /// Whether an attempt of this life may have reached the upstream and got no answer.
        maybe_sent: bool,
    },
    /// The upstream may have run; nobody knows. Never reclaimed by itself.
    OutcomeUnknown,
}

/// How an owner's lease stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lease {
    /// Held for this much longer.
    Held(Duration),
    /// Over: the sweep's transition is due.
    Over,
    /// The row has no lease; it stays as it is until an operator acts.
    Unbounded,
}

/// How a decision's validity stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Validity {
    /// To be replayed for this much longer.
    Valid(Duration),
    /// Past its validity, but the key is still refused.
    Tombstone,
    /// Past its validity: the key may be claimed again.
    Expired,
}

impl State {
    /// The word that the store, the API and the metrics use.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Pending(_) => "pending",
            Self::Completed(..) => "completed",
            Self::FailedBeforeCommit { .. } => "failed_before_commit",
            Self::OutcomeUnknown => "outcome_unknown",
        }
    }
}

/// The owner is alive: extend its lease.
#[derive(Clone, Debug)]
pub struct Heartbeat {
    /// Which record.
    pub key: RecordKey,
    /// Whose lease.
    pub token: AttemptToken,
    /// The lease counts anew from the store's present.
    pub lease: Duration,
}

/// A decision to commit.
#[derive(Clone, Debug)]
pub struct Completion {
    /// Which record.
    pub key: RecordKey,
    /// Taken only while the row still bears it.
    pub token: AttemptToken,
    /// The decision's id; sent again after a lost reply it is recognised.
    pub decision_id: DecisionId,
    /// Who decided: `gateway`, or a token's name behind `service:` or `operator:`.
    pub decided_by: String,
    /// The answer to keep.
    pub recorded: Recorded,
    /// What follows from it, inserted in the same transaction.
    pub run: Option<Box<NewRun>>,
}

/// What a commit stamped; equal on every replay.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Committed {
    /// The decision.
    pub decision_id: DecisionId,
    /// When it was committed, by the store's clock.
    pub created_at: OffsetDateTime,
    /// Until when it is replayed, by the store's clock.
    pub valid_until: OffsetDateTime,
    /// Whether another gateway asked to be woken.
    pub awaited: bool,
}

/// How an owner gives a record up without a decision.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GiveUp {
    /// Nothing reached the upstream: to `failed_before_commit`.
    NotSent,
    /// The upstream answered and the route does not keep such answers: to `failed_before_commit`.
    Answered,
    /// Nobody knows, and the row says `redrive`: to `failed_before_commit`, marked as maybe sent.
    Redrive,
    /// Nobody knows, and the row says `hold`: to `outcome_unknown`.
    Hold,
}

impl GiveUp {
    /// Whether the owner knows what came of its attempt, so that it may release a record that was
    /// taken for unknown meanwhile.
    #[must_use]
    pub fn is_certain(self) -> bool {
        matches!(self, Self::NotSent | Self::Answered)
    }
}

/// An owner's release.
#[derive(Clone, Debug)]
pub struct Release {
    /// Which record.
    pub key: RecordKey,
    /// Taken only while the row still bears it.
    pub token: AttemptToken,
    /// Where to.
    pub give_up: GiveUp,
}

/// What became of a release.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Released {
    /// Whether another gateway asked to be woken.
    pub awaited: bool,
}

/// A committed decision as the store keeps it.
#[derive(Clone, Debug)]
pub struct StoredDecision {
    /// Id, times.
    pub committed: Committed,
    /// For how much longer it is valid, by the store's clock; `None`: no longer.
    pub valid_for: Option<Duration>,
    /// Who decided.
    pub decided_by: String,
    /// The answer. A body of `None` was never stored: the answer can't be replayed.
    pub recorded: Recorded,
}

/// A row that an operator's search found.
#[derive(Clone, Debug)]
pub struct Found {
    /// The record.
    pub record: Record,
    /// The status of the stored answer, if there is one.
    pub answer_status: Option<u16>,
}
