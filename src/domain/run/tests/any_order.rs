//! Any sequence of inputs, duplicates, reorderings and crashes gives what the plain order gives.

use std::collections::BTreeMap;

use proptest::collection::vec;
use proptest::prelude::*;
use serde_json::json;

use super::super::{Event, Input, RunStatus, TickCommit, TickCommitted, tick};
use super::model::{
    End, Model, awaits, cancel, on_failure, resume, retry, sends, signal, undone_by, waits,
    workflow,
};
use crate::domain::intent::{IntentStatus, Stamp};
use crate::domain::workflow::{OnFailure, Step, Workflow};

/// Something that happens in the world.
#[derive(Clone, Debug)]
enum Happens {
    Ends(End),
    TimePasses,
    Discards(i64),
    Told(Event),
}

/// What goes wrong before it is taken in.
#[derive(Clone, Copy, Debug)]
enum Trouble {
    /// Nobody ticks before the next thing happens.
    Late,
    /// A tick is computed, and the process ends.
    Lost,
    /// A commit's reply is lost, and it is tried again.
    ReplyLost,
    /// Somebody else commits the same first.
    Beaten,
    /// Whatever was told before is told again.
    Repeated,
}

fn a_step() -> impl Strategy<Value = Step> {
    let action = prop_oneof![
        4 => (1..4_usize).prop_map(|count| sends("s", &["x", "y {{ run_id }}", "z"][..count])),
        1 => Just(sends("s", &["{{ nothing }}"])),
        1 => Just(waits("s")),
        1 => Just(awaits("s", "go")),
    ];
    let rule = prop_oneof![
        Just(OnFailure::Stop),
        Just(OnFailure::Compensate),
        Just(OnFailure::Continue)
    ];
    (action, rule, any::<bool>()).prop_map(|(step, rule, undo)| {
        let step = on_failure(rule, step);
        if undo { undone_by("undo", step) } else { step }
    })
}

fn a_workflow() -> impl Strategy<Value = Workflow> {
    vec(a_step(), 1..5).prop_map(|mut steps| {
        for (number, step) in steps.iter_mut().enumerate() {
            step.name = format!("s{number}");
        }
        workflow(steps)
    })
}

fn happens() -> impl Strategy<Value = Happens> {
    let end = prop_oneof![
        6 => Just(End::Delivered(200, r#"{"ok":1}"#)),
        1 => Just(End::Again),
        2 => Just(End::Dead),
        1 => Just(End::Quarantined),
    ];
    let told = prop_oneof![
        3 => Just(signal("go", json!(1))),
        1 => Just(cancel()),
        2 => Just(retry(None)),
        1 => (1..8_i64).prop_map(|seq| retry(Some(seq))),
        1 => Just(resume(json!({ "by": "hand" }))),
    ];
    prop_oneof![
        6 => end.prop_map(Happens::Ends),
        2 => Just(Happens::TimePasses),
        1 => (1..8_i64).prop_map(Happens::Discards),
        3 => told.prop_map(Happens::Told),
    ]
}

fn trouble() -> impl Strategy<Value = Vec<Trouble>> {
    let one = prop_oneof![
        Just(Trouble::Late),
        Just(Trouble::Lost),
        Just(Trouble::ReplyLost),
        Just(Trouble::Beaten),
        Just(Trouble::Repeated),
    ];
    vec(one, 0..3)
}

/// A world around a run.
struct World {
    run: Model,
    inputs: Vec<Input>,
    commits: Vec<TickCommit>,
    frozen: BTreeMap<i64, (bytes::Bytes, String)>,
}

impl World {
    fn new(workflow: &Workflow) -> Self {
        Self {
            run: Model::start(workflow),
            inputs: Vec::new(),
            commits: Vec::new(),
            frozen: BTreeMap::new(),
        }
    }

    /// Computes a tick and commits it, with whatever goes wrong on the way.
    fn step(&mut self, input: Option<&Input>, troubles: &[Trouble]) -> bool {
        let repeated = input.is_some_and(|input| self.run.stamps.contains(&input.stamp.0));
        if repeated {
            return false;
        }
        let Ok(Some(computed)) = tick(&self.run.load(), input) else {
            return false;
        };
        let tick_id = self.run.draw();
        let mut commit = self.run.commit_of(computed, tick_id);
        for trouble in troubles {
            match trouble {
                Trouble::Beaten => {
                    let mine = std::mem::replace(&mut commit.tick_id, self.run.draw());
                    assert_eq!(self.run.commit(&commit), TickCommitted::Committed);
                    commit.tick_id = mine;
                    assert_eq!(self.run.commit(&commit), TickCommitted::Conflict);
                    return true;
                }
                Trouble::Lost => {
                    commit.tick = tick(&self.run.load(), input).unwrap().unwrap();
                    commit.tick_id = self.run.draw();
                }
                _ => {}
            }
        }
        assert_eq!(self.run.commit(&commit), TickCommitted::Committed);
        if troubles
            .iter()
            .any(|trouble| matches!(trouble, Trouble::ReplyLost))
        {
            assert_eq!(self.run.commit(&commit), TickCommitted::Committed);
        }
        self.commits.push(commit);
        true
    }

    fn settle(&mut self, troubles: &[Trouble]) {
        while self.step(None, troubles) {}
        assert!(!self.run.is_due());
    }

    fn happens(&mut self, happens: &Happens, troubles: &[Trouble]) {
        // What is to be claimed shows only once what was before is taken in; inputs need not wait.
        if !matches!(happens, Happens::Told(_)) {
            self.settle(&[]);
        }
        match happens {
            Happens::Ends(end) => {
                if let Some(seq) = self.run.claim() {
                    self.run.finish(seq, end);
                }
            }
            Happens::TimePasses if self.run.timer => self.run.timer_over = true,
            Happens::TimePasses => {}
            Happens::Discards(seq) => {
                let status = self.run.rows.get(seq).map(|row| row.status);
                let open = [
                    IntentStatus::Pending,
                    IntentStatus::Dead,
                    IntentStatus::Quarantined,
                ];
                if status.is_some_and(|status| open.contains(&status)) {
                    self.run.discard(*seq);
                }
            }
            Happens::Told(event) => {
                let number = self.inputs.len() as u128;
                let stamp = Stamp(uuid::Uuid::from_u128(1_000_000 + number));
                let (by, event) = ("ops".to_owned(), event.clone());
                let input = Input { stamp, by, event };
                self.step(Some(&input), troubles);
                self.inputs.push(input);
            }
        }
        for trouble in troubles {
            if matches!(trouble, Trouble::Repeated) {
                self.repeat_all();
            }
        }
        if !troubles
            .iter()
            .any(|trouble| matches!(trouble, Trouble::Late))
        {
            self.settle(troubles);
        }
        self.check();
    }

    /// Everything that was ever told or committed comes again, and changes nothing.
    fn repeat_all(&mut self) {
        let (version, seq) = (
            self.run.run.record_version,
            self.run.run.last_transition_seq,
        );
        for input in self.inputs.clone() {
            if self.run.stamps.contains(&input.stamp.0) {
                assert!(!self.step(Some(&input), &[]));
                let computed = tick(&self.run.load(), Some(&input));
                if let Ok(Some(computed)) = computed {
                    let tick_id = self.run.draw();
                    let commit = self.run.commit_of(computed, tick_id);
                    assert_eq!(self.run.commit(&commit), TickCommitted::Conflict);
                }
            }
        }
        for commit in self.commits.clone() {
            assert_eq!(self.run.commit(&commit), TickCommitted::Committed);
        }
        let now = (
            self.run.run.record_version,
            self.run.run.last_transition_seq,
        );
        assert_eq!(now, (version, seq));
    }

    fn check(&mut self) {
        let run = &self.run.run;
        assert_eq!(
            run.record_version,
            i64::try_from(self.run.ticks.len()).unwrap()
        );
        let told = i64::try_from(self.run.history.len()).unwrap();
        assert_eq!(run.last_transition_seq, told);
        assert_eq!(run.reason.is_some(), self.needs_reason());
        for (seq, row) in &self.run.rows {
            let now = (row.intent.body.clone(), row.intent.idempotency_key.clone());
            let frozen = self.frozen.entry(*seq).or_insert_with(|| now.clone());
            assert_eq!(*frozen, now);
        }
        let keys = self
            .run
            .rows
            .values()
            .map(|row| &row.intent.idempotency_key);
        let distinct: std::collections::BTreeSet<_> = keys.collect();
        assert_eq!(distinct.len(), self.run.rows.len());
    }

    fn needs_reason(&self) -> bool {
        let turned = |told: &super::super::NewTransition| told.kind == "undoing";
        self.run.run.status == RunStatus::Stuck || self.run.history.iter().any(turned)
    }

    /// Everything that can go on by itself or by an operator's word does.
    fn end(&mut self) {
        for _ in 0..200 {
            self.settle(&[]);
            match self.run.run.status {
                RunStatus::Running => {
                    let seq = self
                        .run
                        .claim()
                        .expect("a running run has something to send");
                    self.run.finish(seq, &End::Delivered(200, "{}"));
                }
                RunStatus::Waiting => self.run.timer_over = true,
                RunStatus::Stuck => {
                    let event = resume(json!(null));
                    self.happens(&Happens::Told(event), &[]);
                }
                _ => {
                    let open = |row: &&super::model::Row| row.status == IntentStatus::Pending;
                    assert_eq!(
                        self.run.rows.values().find(open).map(|row| row.intent.seq),
                        None
                    );
                    return;
                }
            }
        }
        panic!("it never ends");
    }

    /// What must not depend on when ticks came.
    fn outcome(&self) -> (RunStatus, Option<String>, Vec<(String, bytes::Bytes)>) {
        let delivered = self.run.delivered.iter().map(|seq| {
            let intent = &self.run.rows[seq].intent;
            (intent.step.clone(), intent.body.clone())
        });
        let run = &self.run.run;
        (run.status, run.reason.clone(), delivered.collect())
    }
}

proptest! {
    #[test]
    fn troubled_runs_end_as_plain_ones(
        workflow in a_workflow(),
        story in vec((happens(), trouble()), 0..14),
    ) {
        let mut plain = World::new(&workflow);
        let mut troubled = World::new(&workflow);
        for (happens, troubles) in &story {
            plain.happens(happens, &[]);
            troubled.happens(happens, troubles);
        }
        plain.end();
        troubled.end();
        prop_assert_eq!(plain.outcome(), troubled.outcome());
    }

    #[test]
    fn whatever_happens_in_between_a_run_can_be_brought_to_an_end(
        workflow in a_workflow(),
        story in vec((happens(), any::<bool>()), 0..20),
    ) {
        let mut world = World::new(&workflow);
        let mut claimed = None;
        for (happens, late) in &story {
            // An intent that ends between the tick's reading and its commit.
            if let Some(seq) = claimed.take() {
                let read = tick(&world.run.load(), None).unwrap();
                world.run.finish(seq, &End::Delivered(200, "{}"));
                if let Some(read) = read {
                    let tick_id = world.run.draw();
                    let commit = world.run.commit_of(read, tick_id);
                    assert_eq!(world.run.commit(&commit), TickCommitted::Committed);
                }
            } else if *late {
                claimed = world.run.claim();
            }
            if claimed.is_none() || matches!(happens, Happens::Told(_)) {
                world.happens(happens, &[]);
            }
        }
        if let Some(seq) = claimed {
            world.run.finish(seq, &End::Again);
        }
        world.end();
        world.check();
    }
}
