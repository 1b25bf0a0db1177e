//! Runs, ticks and intents made by hand: what the store is given, without the coordinator.

use std::time::Duration;

use bytes::Bytes;
use oncegate::domain::intent::{
    Destination, How, IntentChange, IntentStatus, NewIntent, Order, Sending, Stamp,
};
use oncegate::domain::record::{Claim, Completion};
use oncegate::domain::run::{
    LoadedRun, NewRun, NewTransition, RunId, RunKey, RunStatus, Tick, TickCommit, TickCommitted,
    Timer,
};
use oncegate::domain::workflow::Retry;
use oncegate::ids;
use oncegate::store::runs::DuePlace;

use super::fixture::{Fixture, claim, completion};

/// Every table that a run's writes may touch.
pub const TABLES: [&str; 8] = [
    "eec_routing_idempotency",
    "eec_routing_decision",
    "eec_run",
    "eec_run_transition",
    "eec_run_attempt",
    "eec_effect_intent",
    "eec_effect_body",
    "eec_operator_audit",
];

/// A line of history.
pub fn transition(kind: &'static str) -> NewTransition {
    NewTransition {
        kind,
        step: Some("receipt".into()),
        detail: Some(serde_json::json!({ "told": "\0" })),
        stamp: None,
    }
}

/// A tick with one line of history that changes nothing else.
pub fn tick(status: RunStatus) -> Tick {
    Tick {
        status,
        progress: Bytes::from_static(b"{\"at\":1}"),
        reason: None,
        timer: Timer::Keep,
        transitions: vec![transition("moved")],
        intents: Vec::new(),
        changes: Vec::new(),
    }
}

/// The intent at that place of a run.
pub fn intent(run: RunId, seq: i64, armed: bool) -> NewIntent {
    NewIntent {
        id: run.intent(seq),
        seq,
        step: "receipt".into(),
        destination: Destination::task("receipts"),
        idempotency_key: format!("key-{seq}"),
        sending: Sending {
            how: How::Task {
                step: "receipt".into(),
                content_type: None,
            },
            retry: Retry::DEFAULT,
            timeout_ms: 1000,
        },
        body: Bytes::from(format!("body {seq}")),
        armed,
    }
}

/// A run with so many intents, of which the first is armed, and two lines of history.
pub fn new_run(run: RunId, intents: i64) -> NewRun {
    let mut first = tick(RunStatus::Running);
    first.transitions.insert(0, transition("begun"));
    first.intents = (1..=intents)
        .map(|seq| intent(run, seq, seq == 1))
        .collect();
    NewRun {
        workflow: "effects".into(),
        holds_record: false,
        definition: Bytes::from_static(b"{\"steps\":[]}"),
        input: Bytes::from_static(b"null"),
        first,
        tick_id: ids::stamp(),
    }
}

/// A decision by the owner of `claim` that starts a run with so many intents.
pub fn starting(claim: &Claim, intents: i64) -> Completion {
    let mut completion = completion(claim);
    let run = new_run(completion.decision_id.into(), intents);
    completion.run = Some(Box::new(run));
    completion
}

/// The run that a decision starts.
pub fn run_of(completion: &Completion) -> RunKey {
    RunKey {
        tenant: completion.key.tenant.clone(),
        id: completion.decision_id.into(),
    }
}

/// A commit of `tick` on what was loaded.
pub fn on_loaded(loaded: &LoadedRun, tick: Tick) -> TickCommit {
    TickCommit {
        key: loaded.run.key.clone(),
        seen_version: loaded.run.record_version,
        seen_seq: loaded.run.last_transition_seq,
        tick_id: ids::stamp(),
        tick,
    }
}

/// A tick that changes one intent.
pub fn changing(seq: i64, seen: Option<IntentStatus>, order: Order) -> Tick {
    Tick {
        changes: vec![IntentChange { seq, seen, order }],
        ..tick(RunStatus::Running)
    }
}

/// A tick that an input caused.
pub fn caused_by(stamp: Stamp) -> Tick {
    let mut tick = tick(RunStatus::Running);
    tick.transitions[0].stamp = Some(stamp);
    tick
}

impl Fixture {
    /// A run that a decision for the key `name` started, with so many intents.
    pub async fn begun(&self, name: &str, intents: i64) -> RunKey {
        let claim = claim(name);
        self.win(&claim).await;
        let completion = starting(&claim, intents);
        assert!(self.complete(&completion).await.is_some());
        run_of(&completion)
    }

    /// The run, which must be there.
    pub async fn load(&self, key: &RunKey) -> LoadedRun {
        let loaded = self.store.load_runs(std::slice::from_ref(key)).await;
        loaded.unwrap().pop().unwrap().expect("no run")
    }

    /// Commits one tick on the run as it is.
    pub async fn tick(&self, key: &RunKey, tick: Tick) {
        let commit = on_loaded(&self.load(key).await, tick);
        assert_eq!(self.commit(&commit).await, TickCommitted::Committed);
    }

    /// Commits one tick.
    pub async fn commit(&self, commit: &TickCommit) -> TickCommitted {
        let done = self.store.commit_ticks(std::slice::from_ref(commit)).await;
        done.unwrap().pop().unwrap()
    }

    /// Every row that a run's writes may touch.
    pub async fn every_row(&self) -> Vec<String> {
        let mut rows = Vec::new();
        for table in TABLES {
            rows.push(table.to_owned());
            rows.extend(self.raw.rows(table).await);
        }
        rows
    }

    /// How many rows a table has.
    pub async fn count(&self, table: &str) -> usize {
        self.raw.rows(table).await.len()
    }

    /// Runs that are due, in their order by name.
    pub async fn due(&self, limit: u32) -> Vec<RunKey> {
        let due = self.store.runs_due(&DuePlace::default(), limit).await;
        let mut keys = due.unwrap().keys;
        keys.sort();
        keys
    }
}

/// A timer that is over after that long.
pub fn timer(after: Duration) -> Tick {
    Tick {
        timer: Timer::In(after),
        ..tick(RunStatus::Waiting)
    }
}
