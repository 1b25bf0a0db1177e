//! Random sequences of operations against a tiny model of what a record is.
//!
//! The model has no time: a lease or a validity is either an hour or nothing. A failing sequence
//! names its seed, and the seed alone makes it again.

use std::collections::BTreeMap;
use std::time::Duration;

use oncegate::domain::policy::OnUnknown;
use oncegate::domain::record::{
    AttemptToken, Claim, Claimed, DecisionId, GenerationId, GiveUp, Lease, Record, Reserved, State,
    Terms, Validity,
};
use oncegate::domain::scope::RecordKey;

use super::fixture::{Fixture, LONG, claim_of, completion, heartbeat, key, release};

const SEEDS: u64 = 24;
const STEPS: usize = 100;
const KEYS: usize = 2;

pub async fn random_sequences_do_what_the_model_does(on: &Fixture) {
    for seed in 1..=SEEDS {
        // What an earlier sequence left over is not this one's to count.
        on.store.sweep(1000).await.unwrap();
        let mut run = Run {
            on,
            random: Random(seed),
            model: Model::default(),
            claims: Vec::new(),
            keys: (0..KEYS)
                .map(|number| key(&format!("s{seed}k{number}")))
                .collect(),
        };
        for step in 0..STEPS {
            let done = run.step().await;
            run.compare(&format!("seed {seed}, step {step}: {done}"))
                .await;
        }
    }
}

/// What the model knows of one record.
#[derive(Clone, Debug)]
struct Row {
    state: Status,
    token: AttemptToken,
    generation: i64,
    generation_id: GenerationId,
    maybe_sent: bool,
    decision: Option<DecisionId>,
    terms: Terms,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Status {
    Held,
    Over,
    Completed,
    Failed,
    Unknown,
}

#[derive(Default)]
struct Model(BTreeMap<RecordKey, Row>);

impl Model {
    fn reserve(&mut self, claim: &Claim) -> bool {
        if let Some(row) = self.0.get(&claim.key) {
            return row.token == claim.token && matches!(row.state, Status::Held | Status::Over);
        }
        let row = Row {
            state: Status::Held,
            token: claim.token,
            generation: 1,
            generation_id: claim.generation_id,
            maybe_sent: false,
            decision: None,
            terms: claim.terms,
        };
        self.0.insert(claim.key.clone(), row);
        true
    }

    fn reclaim(&mut self, claim: &Claim, seen: AttemptToken) -> Option<Claimed> {
        let row = self.0.get_mut(&claim.key)?;
        let terms = row.terms;
        let expired = row.state == Status::Completed
            && terms.valid_for.is_zero()
            && terms.tombstone_for.is_zero();
        if row.token != seen || !(expired || row.state == Status::Failed) {
            return None;
        }
        if expired {
            row.generation += 1;
            row.generation_id = claim.generation_id;
            row.maybe_sent = false;
        }
        row.state = Status::Held;
        row.token = claim.token;
        row.decision = None;
        row.terms = claim.terms;
        Some(Claimed {
            generation: row.generation,
            generation_id: row.generation_id,
        })
    }

    fn heartbeat(&mut self, claim: &Claim, lease: Duration) -> bool {
        let Some(row) = self.owned(claim) else {
            return false;
        };
        let pending = matches!(row.state, Status::Held | Status::Over);
        if pending {
            row.state = if lease.is_zero() {
                Status::Over
            } else {
                Status::Held
            };
        }
        pending
    }

    fn complete(&mut self, claim: &Claim, decision: DecisionId) -> bool {
        let Some(row) = self.owned(claim) else {
            return false;
        };
        if row.state == Status::Completed {
            return row.decision == Some(decision);
        }
        row.state = Status::Completed;
        row.decision = Some(decision);
        true
    }

    fn release(&mut self, claim: &Claim, give_up: GiveUp) -> bool {
        let Some(row) = self.owned(claim) else {
            return false;
        };
        let pending = matches!(row.state, Status::Held | Status::Over);
        match give_up {
            GiveUp::Hold if pending => row.state = Status::Unknown,
            GiveUp::Hold => return row.state == Status::Unknown,
            GiveUp::NotSent | GiveUp::Answered if pending || row.state == Status::Unknown => {
                row.state = Status::Failed;
            }
            GiveUp::Redrive if pending => {
                row.state = Status::Failed;
                row.maybe_sent = true;
            }
            GiveUp::Redrive => return row.state == Status::Failed && row.maybe_sent,
            GiveUp::NotSent | GiveUp::Answered => return row.state == Status::Failed,
        }
        true
    }

    fn sweep(&mut self, key: &RecordKey, token: AttemptToken) -> bool {
        let Some(row) = self.0.get_mut(key) else {
            return false;
        };
        if row.token != token || row.state != Status::Over {
            return false;
        }
        row.state = match row.terms.on_unknown {
            OnUnknown::Hold => Status::Unknown,
            OnUnknown::Redrive => Status::Failed,
        };
        row.maybe_sent |= row.terms.on_unknown == OnUnknown::Redrive;
        true
    }

    fn purge(&mut self) {
        self.0.retain(|_, row| {
            let over = row.terms.valid_for.is_zero() && row.terms.tombstone_for.is_zero();
            !(over && matches!(row.state, Status::Completed | Status::Failed))
        });
    }

    fn owned(&mut self, claim: &Claim) -> Option<&mut Row> {
        let row = self.0.get_mut(&claim.key);
        row.filter(|row| row.token == claim.token)
    }
}

/// One sequence on one set of keys.
struct Run<'a> {
    on: &'a Fixture,
    random: Random,
    model: Model,
    claims: Vec<Claim>,
    keys: Vec<RecordKey>,
}

impl Run<'_> {
    async fn step(&mut self) -> String {
        match self.random.below(10) {
            0 | 1 => self.reserve().await,
            2 | 3 => self.reclaim().await,
            4 => self.heartbeat().await,
            5 => self.complete().await,
            6 | 7 => self.release().await,
            8 => self.sweep().await,
            _ => {
                self.model.purge();
                self.on.store.purge(1000).await.unwrap();
                "purge".to_owned()
            }
        }
    }

    async fn reserve(&mut self) -> String {
        let mut batch = Vec::new();
        for _ in 0..=self.random.below(3) {
            let fresh = self.random.below(3) > 0 || self.claims.is_empty();
            batch.push(if fresh { self.fresh() } else { self.known() });
        }
        let reserved = self.on.store.reserve(&batch).await.unwrap();
        for (claim, reserved) in batch.iter().zip(&reserved) {
            let won = self.model.reserve(claim);
            assert_eq!(
                matches!(reserved, Reserved::Won(_)),
                won,
                "{claim:?} {reserved:?}"
            );
        }
        format!("reserve {batch:?}")
    }

    async fn reclaim(&mut self) -> String {
        let claim = self.fresh();
        let seen = match self.model.0.get(&claim.key) {
            Some(row) if self.random.below(4) > 0 => row.token,
            _ => self.known().token,
        };
        let claimed = self.on.store.reclaim(&claim, seen).await.unwrap();
        assert_eq!(
            claimed,
            self.model.reclaim(&claim, seen),
            "{claim:?} {seen:?}"
        );
        format!("reclaim {claim:?} {seen:?}")
    }

    async fn heartbeat(&mut self) -> String {
        let mut batch = Vec::new();
        for _ in 0..=self.random.below(3) {
            let lease = [Duration::ZERO, LONG][self.random.below(2)];
            batch.push((self.known(), lease));
        }
        let beats: Vec<_> = batch
            .iter()
            .map(|(claim, lease)| heartbeat(claim, *lease))
            .collect();
        let extended = self.on.store.heartbeat(&beats).await.unwrap();
        for ((claim, lease), extended) in batch.iter().zip(extended) {
            assert_eq!(extended, self.model.heartbeat(claim, *lease), "{batch:?}");
        }
        format!("heartbeat {batch:?}")
    }

    async fn complete(&mut self) -> String {
        let mut batch = Vec::new();
        for _ in 0..=self.random.below(3) {
            let claim = self.known();
            let completion = completion(&claim);
            for _ in 0..=self.random.below(2) {
                batch.push((claim.clone(), completion.clone()));
            }
        }
        let completions: Vec<_> = batch
            .iter()
            .map(|(_, completion)| completion.clone())
            .collect();
        let committed = self.on.store.complete(&completions).await.unwrap();
        for ((claim, completion), committed) in batch.iter().zip(committed) {
            let taken = self.model.complete(claim, completion.decision_id);
            assert_eq!(committed.is_some(), taken, "{batch:?}");
        }
        format!("complete {batch:?}")
    }

    async fn release(&mut self) -> String {
        let give_ups = [
            GiveUp::NotSent,
            GiveUp::Answered,
            GiveUp::Redrive,
            GiveUp::Hold,
        ];
        let mut batch = Vec::new();
        for _ in 0..=self.random.below(2) {
            let give_up = give_ups[self.random.below(4)];
            batch.push((self.known(), give_up));
        }
        let all: Vec<_> = batch
            .iter()
            .map(|(claim, give_up)| release(claim, *give_up))
            .collect();
        let released = self.on.store.release(&all).await.unwrap();
        for ((claim, give_up), released) in batch.iter().zip(released) {
            assert_eq!(
                released.is_some(),
                self.model.release(claim, *give_up),
                "{batch:?}"
            );
        }
        format!("release {batch:?}")
    }

    async fn sweep(&mut self) -> String {
        if self.random.below(2) == 0 {
            let swept = self.on.store.sweep(1000).await.unwrap();
            let rows: Vec<_> = self
                .model
                .0
                .iter()
                .map(|(key, row)| (key.clone(), row.token))
                .collect();
            let moved = rows
                .iter()
                .filter(|(key, token)| self.model.sweep(key, *token))
                .count();
            assert_eq!(
                swept.failed_before_commit + swept.outcome_unknown,
                moved as u64
            );
            return "sweep".to_owned();
        }
        let claim = self.known();
        let moved = self
            .on
            .store
            .sweep_one(&claim.key, claim.token)
            .await
            .unwrap();
        assert_eq!(
            moved,
            self.model.sweep(&claim.key, claim.token),
            "{claim:?}"
        );
        format!("sweep one {claim:?}")
    }

    /// A claim that nobody sent yet.
    fn fresh(&mut self) -> Claim {
        let mut claim = claim_of(self.keys[self.random.below(KEYS)].clone());
        claim.terms = Terms {
            lease: LONG,
            valid_for: [Duration::ZERO, LONG][self.random.below(2)],
            tombstone_for: [Duration::ZERO, LONG][self.random.below(2)],
            on_unknown: [OnUnknown::Hold, OnUnknown::Redrive][self.random.below(2)],
        };
        self.claims.push(claim.clone());
        claim
    }

    /// A claim that was sent before, mostly a recent one; or a fresh one when there is none.
    fn known(&mut self) -> Claim {
        if self.claims.is_empty() {
            return self.fresh();
        }
        let back = self.random.below(self.claims.len().min(6));
        self.claims[self.claims.len() - 1 - back].clone()
    }

    async fn compare(&self, done: &str) {
        let found = self.on.store.look_up(&self.keys).await.unwrap();
        for (key, record) in self.keys.iter().zip(found) {
            let row = self.model.0.get(key);
            match (record, row) {
                (None, None) => {}
                (Some(record), Some(row)) => {
                    assert!(agree(&record, row), "{done}\n{record:?}\n{row:?}");
                }
                other => panic!("{done}\n{other:?}"),
            }
        }
    }
}

fn agree(record: &Record, row: &Row) -> bool {
    let validity = |validity: Validity| match validity {
        Validity::Valid(_) => !row.terms.valid_for.is_zero(),
        Validity::Tombstone => row.terms.valid_for.is_zero() && !row.terms.tombstone_for.is_zero(),
        Validity::Expired => row.terms.valid_for.is_zero() && row.terms.tombstone_for.is_zero(),
    };
    let state = match (record.state, row.state) {
        (State::Pending(Lease::Held(_)), Status::Held)
        | (State::Pending(Lease::Over), Status::Over)
        | (State::OutcomeUnknown, Status::Unknown) => true,
        (State::Completed(id, of), Status::Completed) => row.decision == Some(id) && validity(of),
        (State::FailedBeforeCommit { maybe_sent }, Status::Failed) => maybe_sent == row.maybe_sent,
        _ => false,
    };
    state
        && record.token == row.token
        && record.generation == row.generation
        && record.generation_id == row.generation_id
        && record.terms == row.terms
}

/// xorshift64*: enough chance for a test, and the same on every machine.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let high = self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33;
        usize::try_from(high).unwrap() % bound
    }
}
