//! The cache of completed decisions: what makes a known key cost memory only.
//!
//! Only committed, valid decisions are ever in it. An entry is trusted for `cache_trust` after the
//! store last confirmed it and never beyond the validity that the store reported, so that a
//! release or purge anywhere holds everywhere within that time. An entry that is no longer trusted
//! still saves reading the body again, and still tells that the key is known.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use moka::policy::EvictionPolicy;
use moka::sync::Cache;
use tokio::time::Instant;

use crate::domain::fingerprint::Fingerprint;
use crate::domain::message::Recorded;
use crate::domain::record::{Committed, DecisionId};
use crate::domain::scope::RecordKey;
use crate::store::wake_hash;
use crate::telemetry::metric;

/// What an entry costs besides its bytes: key, times, tables.
const ENTRY_BYTES: usize = 512;

/// A committed decision, ready to be told again.
#[derive(Clone, Debug)]
pub struct Decided {
    /// Id and times, equal on every replay.
    pub committed: Committed,
    /// The answer.
    pub recorded: Recorded,
    /// The request that it answers.
    pub fingerprint: Option<Fingerprint>,
}

/// Decisions by key, bounded in bytes. Keys are found by the hash that hints name them with.
#[derive(Clone)]
pub struct ReplayCache {
    entries: Cache<u64, Entry>,
    trust: Duration,
    /// Entries of an earlier epoch are no longer trusted.
    epoch: Arc<AtomicU64>,
}

#[derive(Clone)]
struct Entry {
    key: RecordKey,
    decided: Arc<Decided>,
    epoch: u64,
    /// Since when the store has confirmed it, at the latest.
    confirmed_at: Instant,
    /// When its validity ends, at the latest.
    valid_until: Instant,
}

impl ReplayCache {
    /// An empty cache that holds at most `bytes_max` bytes and trusts an entry for `trust`.
    #[must_use]
    pub fn new(bytes_max: u64, trust: Duration) -> Self {
        let weight = |_: &u64, entry: &Entry| {
            let key = entry.key.tenant.as_str().len() + entry.key.key.as_str().len();
            let bytes = ENTRY_BYTES + key + entry.decided.recorded.held_bytes();
            u32::try_from(bytes).unwrap_or(u32::MAX)
        };
        let entries = Cache::builder()
            .max_capacity(bytes_max)
            .weigher(weight)
            .eviction_policy(EvictionPolicy::lru())
            .build();
        let epoch = Arc::default();
        Self {
            entries,
            trust,
            epoch,
        }
    }

    /// The decision, while it may be told without asking the store.
    #[must_use]
    pub fn trusted(&self, key: &RecordKey) -> Option<Arc<Decided>> {
        let now = Instant::now();
        let epoch = self.epoch.load(Ordering::Acquire);
        let found = self.get(key).filter(|entry| {
            entry.epoch == epoch && now < entry.valid_until && now < entry.confirmed_at + self.trust
        });
        let result = if found.is_some() { "hit" } else { "miss" };
        metrics::counter!(metric::CACHE_LOOKUPS, "result" => result).increment(1);
        found.map(|entry| entry.decided)
    }

    /// Whether this gateway has seen a decision for the key, trusted or not.
    #[must_use]
    pub fn knows(&self, key: &RecordKey) -> bool {
        self.get(key).is_some()
    }

    /// The decision that the store has just named, if it is here: its body needs no reading.
    /// `asked_at` is from before the store was asked; `valid_for` is the store's word.
    #[must_use]
    pub fn confirm(
        &self,
        key: &RecordKey,
        decision_id: DecisionId,
        asked_at: Instant,
        valid_for: Duration,
    ) -> Option<Arc<Decided>> {
        let entry = self.get(key)?;
        if entry.decided.committed.decision_id != decision_id {
            return None;
        }
        let decided = Arc::clone(&entry.decided);
        self.keep(key, entry.decided, asked_at, valid_for);
        Some(decided)
    }

    /// Keeps a decision that the store confirmed when asked at `asked_at`.
    pub fn keep(
        &self,
        key: &RecordKey,
        decided: Arc<Decided>,
        asked_at: Instant,
        valid_for: Duration,
    ) {
        let entry = Entry {
            key: key.clone(),
            decided,
            epoch: self.epoch.load(Ordering::Acquire),
            confirmed_at: asked_at,
            valid_until: asked_at + valid_for,
        };
        self.entries.insert(wake_hash(key), entry);
        metrics::gauge!(metric::CACHE_BYTES).set(self.bytes());
    }

    /// Forgets a key that changed.
    pub fn forget(&self, key: &RecordKey) {
        self.entries.invalidate(&wake_hash(key));
    }

    /// Forgets keys that another gateway says have changed, by [`wake_hash`].
    pub fn forget_hashed(&self, records: &[u64]) {
        for record in records {
            self.entries.invalidate(record);
        }
    }

    /// Trusts nothing that is here until the store has confirmed it again: hints were lost.
    pub fn distrust(&self) {
        self.epoch.fetch_add(1, Ordering::AcqRel);
    }

    /// Two keys may have one hash; only the one that is here is found.
    fn get(&self, key: &RecordKey) -> Option<Entry> {
        let entry = self.entries.get(&wake_hash(key));
        entry.filter(|entry| entry.key == *key)
    }

    /// Memory held, in bytes, about.
    #[expect(clippy::cast_precision_loss, reason = "a gauge is a float")]
    fn bytes(&self) -> f64 {
        self.entries.weighted_size() as f64
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use time::OffsetDateTime;
    use uuid::Uuid;

    use super::*;
    use crate::domain::key::IdempotencyKey;
    use crate::domain::message::HeaderBlock;
    use crate::domain::scope::{PoolId, TenantScope};

    fn key() -> RecordKey {
        RecordKey {
            tenant: TenantScope::stored("t"),
            pool: PoolId::stored("p"),
            key: IdempotencyKey::from_text("k").unwrap().unwrap(),
        }
    }

    fn decided(id: u128) -> Arc<Decided> {
        Arc::new(Decided {
            committed: Committed {
                decision_id: DecisionId(Uuid::from_u128(id)),
                created_at: OffsetDateTime::UNIX_EPOCH,
                valid_until: OffsetDateTime::UNIX_EPOCH,
                awaited: false,
            },
            recorded: Recorded {
                status: 201,
                headers: HeaderBlock::default(),
                cors: None,
                body: Some(Bytes::from_static(b"body")),
            },
            fingerprint: None,
        })
    }

    const TRUST: Duration = Duration::from_secs(30);
    const DAY: Duration = Duration::from_hours(24);

    #[tokio::test(start_paused = true)]
    async fn an_entry_is_trusted_for_a_while_and_known_for_longer() {
        let cache = ReplayCache::new(1 << 20, TRUST);
        cache.keep(&key(), decided(1), Instant::now(), DAY);
        tokio::time::advance(TRUST / 2).await;
        assert!(cache.trusted(&key()).is_some());
        tokio::time::advance(TRUST).await;
        assert!(cache.trusted(&key()).is_none());
        assert!(cache.knows(&key()));
        let id = DecisionId(Uuid::from_u128(1));
        assert!(cache.confirm(&key(), id, Instant::now(), DAY).is_some());
        assert!(cache.trusted(&key()).is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn trust_never_outlives_validity() {
        let cache = ReplayCache::new(1 << 20, TRUST);
        cache.keep(&key(), decided(1), Instant::now(), Duration::from_secs(2));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(cache.trusted(&key()).is_some());
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(cache.trusted(&key()).is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn another_decision_under_the_key_is_not_confirmed() {
        let cache = ReplayCache::new(1 << 20, TRUST);
        cache.keep(&key(), decided(1), Instant::now(), DAY);
        let other = DecisionId(Uuid::from_u128(2));
        assert!(cache.confirm(&key(), other, Instant::now(), DAY).is_none());
        cache.forget(&key());
        assert!(!cache.knows(&key()));
    }

    #[tokio::test(start_paused = true)]
    async fn lost_hints_end_all_trust_until_the_store_confirms_again() {
        let cache = ReplayCache::new(1 << 20, TRUST);
        cache.keep(&key(), decided(1), Instant::now(), DAY);
        cache.distrust();
        assert!(cache.trusted(&key()).is_none());
        let id = DecisionId(Uuid::from_u128(1));
        assert!(cache.confirm(&key(), id, Instant::now(), DAY).is_some());
        assert!(cache.trusted(&key()).is_some());
        cache.forget_hashed(&[wake_hash(&key())]);
        assert!(!cache.knows(&key()));
    }
}
