//! What holds of runs and effects whatever happened, checked on the database and on the log of the
//! destination: the invariants I1 to I8, one function each where a test needs one alone.
//!
//! I1 each committed intent is delivered at least once, with one key and identical bytes · I2
//! nothing is delivered that was not committed · I3 first deliveries within a run come in order ·
//! I4 no duplicates beyond those that the faults allow · I5 what is final stays final · I6
//! `record_version` counts the committed ticks, and transitions are numbered without a gap · I7 what
//! is applied again adds no row · I8 after healing nothing is left to do.

use std::collections::BTreeMap;

use super::clock::{PATIENCE, within};
use super::rows::Database;
use super::upstream::Seen;

/// Every table whose rows tell what was decided and done.
pub const TABLES: [&str; 8] = [
    "eec_routing_idempotency",
    "eec_routing_decision",
    "eec_routing_claim",
    "eec_run",
    "eec_run_transition",
    "eec_run_attempt",
    "eec_effect_intent",
    "eec_effect_body",
];

/// A row of `eec_run`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunRow {
    /// Hex without dashes.
    pub run_id: String,
    /// One of the seven words.
    pub status: String,
    /// Committed ticks.
    pub record_version: i64,
    /// The newest transition.
    pub last_transition_seq: i64,
    /// Why it is not where it should be.
    pub reason: String,
}

/// A row of `eec_effect_intent`, with the hash of its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IntentRow {
    /// Its run, hex without dashes.
    pub run_id: String,
    /// Hex without dashes.
    pub intent_id: String,
    /// Its place.
    pub seq: i64,
    /// One of the five words.
    pub status: String,
    /// What the receiver sees.
    pub key: String,
    /// Where to.
    pub destination: String,
    /// Claims that were not given back.
    pub tries: i64,
    /// How often it was redriven.
    pub redrives: i64,
}

impl Database {
    /// Every run, oldest first.
    pub async fn runs(&self) -> Vec<RunRow> {
        let sql = format!(
            "select {}, status, record_version, last_transition_seq, coalesce(reason, '') \
             from eec_run order by run_id",
            self.hex("run_id")
        );
        let run = |row: Vec<String>| RunRow {
            run_id: row[0].clone(),
            status: row[1].clone(),
            record_version: number(&row[2]),
            last_transition_seq: number(&row[3]),
            reason: row[4].clone(),
        };
        self.texts(&sql, 5).await.into_iter().map(run).collect()
    }

    /// Every intent, in the order of runs and places.
    pub async fn intents(&self) -> Vec<IntentRow> {
        let sql = format!(
            "select {}, {}, seq, status, idempotency_key, destination, tries, redrives \
             from eec_effect_intent order by run_id, seq",
            self.hex("run_id"),
            self.hex("intent_id")
        );
        let intent = |row: Vec<String>| IntentRow {
            run_id: row[0].clone(),
            intent_id: row[1].clone(),
            seq: number(&row[2]),
            status: row[3].clone(),
            key: row[4].clone(),
            destination: row[5].clone(),
            tries: number(&row[6]),
            redrives: number(&row[7]),
        };
        self.texts(&sql, 8).await.into_iter().map(intent).collect()
    }

    /// How many rows each table has.
    pub async fn row_counts(&self) -> BTreeMap<&'static str, i64> {
        let mut counts = BTreeMap::new();
        for table in TABLES {
            counts.insert(table, self.count(table).await);
        }
        counts
    }

    /// Waits until every run has this status, and gives them.
    pub async fn until_runs_are(&self, count: usize, status: &str) -> Vec<RunRow> {
        self.until_runs(&format!("{count} runs are {status}"), |runs| {
            runs.len() == count && runs.iter().all(|run| run.status == status)
        })
        .await
    }

    /// Waits until the runs are so, and gives them.
    pub async fn until_runs(&self, what: &str, are: impl Fn(&[RunRow]) -> bool) -> Vec<RunRow> {
        within(PATIENCE * 3, what, async || {
            let runs = self.runs().await;
            are(&runs).then_some(runs)
        })
        .await
    }
}

fn number(text: &str) -> i64 {
    text.parse().expect("a number")
}

/// What is delivered to a destination, as its log tells.
pub struct Delivered {
    first: BTreeMap<String, usize>,
    times: BTreeMap<String, Vec<String>>,
}

impl Delivered {
    /// Reads requests that came whole and carry a key.
    pub fn read(requests: &[Seen]) -> Self {
        let (mut first, mut times) = (BTreeMap::new(), BTreeMap::<_, Vec<_>>::new());
        for (place, seen) in requests
            .iter()
            .enumerate()
            .filter(|(_, seen)| seen.complete)
        {
            let key = seen.header("idempotency-key").concat();
            first.entry(key.clone()).or_insert(place);
            times.entry(key).or_default().push(seen.sha256.clone());
        }
        Self { first, times }
    }

    /// How often this key came.
    pub fn times(&self, key: &str) -> usize {
        self.times.get(key).map_or(0, Vec::len)
    }

    /// Deliveries beyond the first of each key.
    pub fn duplicates(&self) -> usize {
        self.times.values().map(|times| times.len() - 1).sum()
    }
}

/// I1: each completed intent came, and always with the same bytes. Tasks are pulled by workers, and
/// no destination sees them.
pub fn every_completed_intent_came(intents: &[IntentRow], delivered: &Delivered) {
    let came = |intent: &&IntentRow| {
        intent.status == "completed" && !intent.destination.starts_with("task:")
    };
    for intent in intents.iter().filter(came) {
        assert!(
            delivered.times(&intent.key) > 0,
            "I1: never came: {intent:?}"
        );
    }
    for (key, hashes) in &delivered.times {
        let same = hashes.iter().all(|hash| *hash == hashes[0]);
        assert!(same, "I1: {key} came with different bytes");
    }
}

/// I2: nothing came whose intent is not there.
pub fn nothing_came_that_was_not_committed(intents: &[IntentRow], delivered: &Delivered) {
    for key in delivered.times.keys() {
        let known = intents.iter().any(|intent| intent.key == *key);
        assert!(known, "I2: {key} came and no intent has it");
    }
}

/// I3: of each run, what came first came in the order of its intents.
pub fn first_deliveries_came_in_order(intents: &[IntentRow], delivered: &Delivered) {
    let mut runs: BTreeMap<&str, Vec<(i64, usize)>> = BTreeMap::new();
    for intent in intents {
        if let Some(place) = delivered.first.get(&intent.key) {
            let run = runs.entry(&intent.run_id).or_default();
            run.push((intent.seq, *place));
        }
    }
    for (run, mut places) in runs {
        places.sort_unstable();
        let ordered = places.windows(2).all(|pair| pair[0].1 < pair[1].1);
        assert!(ordered, "I3: run {run} came out of order: {places:?}");
    }
}

/// I5: what was final is as it was, unless it was redriven.
pub fn what_was_final_still_is(before: &[IntentRow], after: &[IntentRow]) {
    for was in before.iter().filter(|intent| intent.status != "pending") {
        let is = after
            .iter()
            .find(|intent| intent.intent_id == was.intent_id);
        let is = is.expect("I5: an intent is gone");
        let same = is.status == was.status || is.redrives > was.redrives;
        assert!(same || was.status == "dead", "I5: {was:?} became {is:?}");
    }
}

/// I6: versions count the ticks, transitions have no gap.
pub async fn history_has_no_gap(database: &Database) {
    let versions = "select count(*) from eec_run r where r.record_version <> \
        (select count(distinct t.record_version) from eec_run_transition t \
         where t.tenant_scope = r.tenant_scope and t.run_id = r.run_id)";
    assert_eq!(database.number(versions).await, 0, "I6: record_version");
    let seqs = "select count(*) from eec_run r where r.last_transition_seq <> \
        (select count(*) from eec_run_transition t \
         where t.tenant_scope = r.tenant_scope and t.run_id = r.run_id \
           and t.seq between 1 and r.last_transition_seq) \
        or exists (select 1 from eec_run_transition t where t.tenant_scope = r.tenant_scope \
           and t.run_id = r.run_id and t.seq > r.last_transition_seq)";
    assert_eq!(database.number(seqs).await, 0, "I6: last_transition_seq");
}

/// I8: nothing is due, claimed or unknown to its run.
pub async fn nothing_is_left_to_do(database: &Database) {
    let open = "select count(*) from eec_effect_intent where due_at is not null \
        or claim_token is not null or changed";
    within(PATIENCE * 3, "I8: nothing is left", async || {
        (database.number(open).await == 0).then_some(())
    })
    .await;
}

/// All of them but I5 and I7, which need a look before. `duplicates_max`: what the faults allow.
pub async fn assert_all(database: &Database, requests: &[Seen], duplicates_max: usize) {
    let (intents, delivered) = (database.intents().await, Delivered::read(requests));
    every_completed_intent_came(&intents, &delivered);
    nothing_came_that_was_not_committed(&intents, &delivered);
    first_deliveries_came_in_order(&intents, &delivered);
    let duplicates = delivered.duplicates();
    assert!(duplicates <= duplicates_max, "I4: {duplicates} duplicates");
    history_has_no_gap(database).await;
    nothing_is_left_to_do(database).await;
}
