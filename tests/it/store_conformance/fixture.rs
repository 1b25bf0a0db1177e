//! A fresh store with a raw connection beside it, and the words that the cases are written in.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use http::HeaderMap;
use oncegate::domain::fingerprint::Fingerprint;
use oncegate::domain::key::IdempotencyKey;
use oncegate::domain::message::Recorded;
use oncegate::domain::policy::OnUnknown;
use oncegate::domain::record::{
    Claim, Claimed, Committed, Completion, GiveUp, Heartbeat, Record, Release, Released, Reserved,
    Terms,
};
use oncegate::domain::scope::{PoolId, RecordKey, TenantScope};
use oncegate::ids;
use oncegate::store::Store;

use crate::support::rows::Kind;

/// Long enough that nothing ends during a case.
pub const LONG: Duration = Duration::from_hours(1);
/// The tables that an owner's write may touch.
pub const TABLES: [&str; 2] = ["eec_routing_idempotency", "eec_routing_decision"];

/// A fresh store.
pub struct Fixture {
    /// The store.
    pub store: Arc<dyn Store>,
    /// Its database.
    pub raw: Arc<dyn Raw>,
    /// What must live as long: a directory, a server.
    pub _keep: Box<dyn Any + Send + Sync>,
}

/// A connection of an operator with a shell.
#[async_trait]
pub trait Raw: Send + Sync {
    /// Which store it is of.
    fn kind(&self) -> Kind;
    /// Runs a statement that means the same on every store.
    async fn execute(&self, sql: &'static str);
    /// Runs a statement that was made for this store.
    async fn run(&self, sql: String);
    /// One number that a query gives.
    async fn number(&self, sql: String) -> i64;
    /// Every row of a table, each as text with all its columns, in a fixed order.
    async fn rows(&self, table: &str) -> Vec<String>;
}

impl Fixture {
    /// Every row that an owner's write may touch.
    pub async fn everything(&self) -> Vec<String> {
        let mut rows = Vec::new();
        for table in TABLES {
            rows.extend(self.raw.rows(table).await);
        }
        rows
    }

    /// The record, which must be there.
    pub async fn record(&self, key: &RecordKey) -> Record {
        let found = self.store.look_up(std::slice::from_ref(key)).await.unwrap();
        found.into_iter().next().unwrap().expect("no record")
    }

    /// Whether there is a record.
    pub async fn is_there(&self, key: &RecordKey) -> bool {
        let found = self.store.look_up(std::slice::from_ref(key)).await.unwrap();
        found[0].is_some()
    }

    /// Sends one claim.
    pub async fn reserve(&self, claim: &Claim) -> Reserved {
        let reserved = self.store.reserve(std::slice::from_ref(claim)).await;
        reserved.unwrap().pop().unwrap()
    }

    /// Sends one claim, which must win.
    pub async fn win(&self, claim: &Claim) -> Claimed {
        match self.reserve(claim).await {
            Reserved::Won(claimed) => claimed,
            other => panic!("the claim did not win: {other:?}"),
        }
    }

    /// Sends one completion.
    pub async fn complete(&self, completion: &Completion) -> Option<Committed> {
        let committed = self.store.complete(std::slice::from_ref(completion)).await;
        committed.unwrap().pop().unwrap()
    }

    /// Sends one release.
    pub async fn release(&self, claim: &Claim, give_up: GiveUp) -> Option<Released> {
        let release = release(claim, give_up);
        self.store.release(&[release]).await.unwrap().pop().unwrap()
    }

    /// Sends one heartbeat.
    pub async fn heartbeat(&self, claim: &Claim, lease: Duration) -> bool {
        let beat = heartbeat(claim, lease);
        self.store.heartbeat(&[beat]).await.unwrap().pop().unwrap()
    }

    /// A claim with these terms that won and whose lease is over, not swept yet.
    pub async fn abandoned(&self, name: &str, terms: Terms) -> Claim {
        let mut claim = claim(name);
        claim.terms = Terms {
            lease: Duration::ZERO,
            ..terms
        };
        self.win(&claim).await;
        claim
    }

    /// A claim that won and whose record is `outcome_unknown`.
    pub async fn unknown(&self, name: &str) -> Claim {
        let claim = claim(name);
        self.win(&claim).await;
        assert!(self.release(&claim, GiveUp::Hold).await.is_some());
        claim
    }
}

/// The key `name` of one tenant and pool.
pub fn key(name: &str) -> RecordKey {
    RecordKey {
        tenant: TenantScope::named(b"acme").unwrap(),
        pool: PoolId::new("payments").unwrap(),
        key: IdempotencyKey::from_text(name).unwrap().unwrap(),
    }
}

/// Nothing ends during a case, and nobody knows means hold.
pub fn terms() -> Terms {
    Terms {
        lease: LONG,
        valid_for: LONG,
        tombstone_for: Duration::ZERO,
        on_unknown: OnUnknown::Hold,
    }
}

/// The same, but nobody knows means redrive.
pub fn redrive() -> Terms {
    Terms {
        on_unknown: OnUnknown::Redrive,
        ..terms()
    }
}

/// A new claim for `name`.
pub fn claim(name: &str) -> Claim {
    claim_of(key(name))
}

/// A new claim for `key`.
pub fn claim_of(key: RecordKey) -> Claim {
    Claim {
        request_id: None,
        key,
        token: ids::attempt_token(),
        generation_id: ids::generation_id(),
        fingerprint: Some(Fingerprint {
            version: 1,
            hash: [7; 32],
        }),
        terms: terms(),
    }
}

/// A new decision by the owner of `claim`.
pub fn completion(claim: &Claim) -> Completion {
    Completion {
        key: claim.key.clone(),
        token: claim.token,
        decision_id: ids::decision_id(),
        decided_by: "gateway".into(),
        run: None,
        recorded: answer(b"done"),
    }
}

/// A plain answer.
pub fn answer(body: &[u8]) -> Recorded {
    let body = Some(Bytes::copy_from_slice(body));
    Recorded::new(201, &HeaderMap::new(), body, None, false)
}

/// A list in a list, so many levels deep.
pub fn nested(levels: usize) -> serde_json::Value {
    (0..levels).fold(serde_json::Value::Null, |inner, _| vec![inner].into())
}

/// A heartbeat by the owner of `claim`.
pub fn heartbeat(claim: &Claim, lease: Duration) -> Heartbeat {
    Heartbeat {
        key: claim.key.clone(),
        token: claim.token,
        lease,
    }
}

/// A release by the owner of `claim`.
pub fn release(claim: &Claim, give_up: GiveUp) -> Release {
    Release {
        key: claim.key.clone(),
        token: claim.token,
        give_up,
    }
}
