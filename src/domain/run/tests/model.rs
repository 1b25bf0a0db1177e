//! A store in memory that keeps one run, with the outbox that works on it and a clock that tests
//! turn. It is strict: whatever a tick does that no store may allow is a panic.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use serde_json::Value;
use uuid::Uuid;

use super::super::{
    Beginning, Event, Input, LoadedRun, NewRun, NewTransition, Refused, RequestSeen, Run, RunId,
    RunKey, RunStatus, TickCommit, TickCommitted, Timer, begin, history, tick,
};
use crate::domain::intent::{IntentChange, IntentSeen, IntentStatus, NewIntent, Order, Stamp};
use crate::domain::key::IdempotencyKey;
use crate::domain::message::{HeaderBlock, Recorded};
use crate::domain::scope::{PoolId, RecordKey, TenantScope};
use crate::domain::workflow::{
    Action, Effect, HttpSend, OnFailure, Payload, Retry, Send, Step, Success, Target, Text,
    Workflow,
};

/// An intent as the store keeps it.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a column")]
pub(crate) struct Row {
    pub intent: NewIntent,
    pub status: IntentStatus,
    pub armed: bool,
    pub claimed: bool,
    pub withdrawn: bool,
    pub changed: bool,
    pub tries: u32,
    pub has_body: bool,
    pub diagnostic: Option<String>,
    pub answer: Option<Recorded>,
}

/// How a try ends.
#[derive(Clone, Debug)]
pub(crate) enum End {
    Delivered(u16, &'static str),
    Again,
    Dead,
    Quarantined,
}

/// The store.
#[derive(Clone)]
pub(crate) struct Model {
    pub run: Run,
    pub rows: BTreeMap<i64, Row>,
    pub history: Vec<NewTransition>,
    pub ticks: BTreeSet<Uuid>,
    pub stamps: BTreeSet<Uuid>,
    /// Whether a timer is set.
    pub timer: bool,
    pub timer_over: bool,
    /// The seqs of deliveries, in their order.
    pub delivered: Vec<i64>,
    drawn: u128,
}

pub(crate) fn record() -> RecordKey {
    RecordKey {
        tenant: TenantScope::named(b"acme").unwrap(),
        pool: PoolId::new("orders").unwrap(),
        key: IdempotencyKey::from_text("k-1").unwrap().unwrap(),
    }
}

pub(crate) fn run_key(id: u128) -> RunKey {
    RunKey {
        tenant: record().tenant,
        id: RunId(Uuid::from_u128(id)),
    }
}

/// A decision of the service.
pub(crate) fn decision() -> Recorded {
    let mut headers = http::HeaderMap::new();
    headers.insert("content-type", "application/json".parse().unwrap());
    headers.append("x-a", "1".parse().unwrap());
    headers.append("x-a", "2".parse().unwrap());
    let body = Bytes::from_static(br#"{"order":17}"#);
    Recorded::new(201, &headers, Some(body), None, false)
}

pub(crate) fn new_run(id: u128, workflow: &Workflow, first_key: Option<&str>) -> NewRun {
    begin(&Beginning {
        workflow,
        run_id: run_key(id).id,
        record: &record(),
        key_seed: Uuid::from_u128(99),
        first_key: first_key.map(str::to_owned),
        tick_id: Stamp(Uuid::from_u128(1)),
        holds_record: false,
        request: Some(RequestSeen {
            method: "POST".to_owned(),
            path: "/orders".to_owned(),
            query: None,
            content_type: Some("text/plain".to_owned()),
            body: Bytes::from_static(b"\xff\x00raw"),
        }),
        decision: Some(&decision()),
        input: serde_json::json!({ "name": "Ada" }),
    })
}

impl Model {
    pub fn start(workflow: &Workflow) -> Self {
        Self::with_id(1, workflow)
    }

    pub fn with_id(id: u128, workflow: &Workflow) -> Self {
        Self::of(id, new_run(id, workflow, None))
    }

    pub fn of(id: u128, new: NewRun) -> Self {
        let key = run_key(id);
        let mut model = Self {
            run: Run {
                key,
                record_version: 0,
                last_transition_seq: 0,
                status: RunStatus::Running,
                workflow: new.workflow,
                record: record(),
                holds_record: new.holds_record,
                definition: new.definition,
                input: new.input,
                progress: Bytes::new(),
                reason: None,
            },
            rows: BTreeMap::new(),
            history: Vec::new(),
            ticks: BTreeSet::new(),
            stamps: BTreeSet::new(),
            timer: false,
            timer_over: false,
            delivered: Vec::new(),
            drawn: 1000,
        };
        let first = model.commit_of(new.first, new.tick_id);
        assert_eq!(model.commit(&first), TickCommitted::Committed);
        model
    }

    pub fn draw(&mut self) -> Stamp {
        self.drawn += 1;
        Stamp(Uuid::from_u128(self.drawn))
    }

    pub fn load(&self) -> LoadedRun {
        let shown = self.rows.values().filter(|row| {
            row.changed
                || matches!(
                    row.status,
                    IntentStatus::Pending | IntentStatus::Dead | IntentStatus::Quarantined
                )
        });
        LoadedRun {
            run: self.run.clone(),
            intents: shown.map(Row::seen).collect(),
            timer_over: self.timer && self.timer_over,
        }
    }

    pub fn is_due(&self) -> bool {
        (self.timer && self.timer_over) || self.rows.values().any(|row| row.changed)
    }

    pub fn commit_of(&self, tick: super::super::Tick, tick_id: Stamp) -> TickCommit {
        TickCommit {
            key: self.run.key.clone(),
            seen_version: self.run.record_version,
            seen_seq: self.run.last_transition_seq,
            tick_id,
            tick,
        }
    }

    pub fn commit(&mut self, commit: &TickCommit) -> TickCommitted {
        if self.ticks.contains(&commit.tick_id.0) {
            return TickCommitted::Committed;
        }
        let tick = &commit.tick;
        let stamps: Vec<_> = tick
            .transitions
            .iter()
            .filter_map(|told| told.stamp)
            .collect();
        let applied = stamps.iter().any(|stamp| self.stamps.contains(&stamp.0));
        if commit.seen_version != self.run.record_version || applied {
            return TickCommitted::Conflict;
        }
        assert_eq!(commit.seen_seq, self.run.last_transition_seq);
        assert!(!tick.transitions.is_empty(), "a tick without a transition");
        assert!(!self.run.status.is_final() || tick.status == self.run.status);
        self.ticks.insert(commit.tick_id.0);
        self.stamps.extend(stamps.iter().map(|stamp| stamp.0));
        self.run.record_version += 1;
        self.run.last_transition_seq += i64::try_from(tick.transitions.len()).unwrap();
        self.run.status = tick.status;
        self.run.progress = tick.progress.clone();
        self.run.reason.clone_from(&tick.reason);
        match tick.timer {
            Timer::Keep => {}
            Timer::Clear => self.timer = false,
            Timer::In(_) => (self.timer, self.timer_over) = (true, false),
        }
        for told in &tick.transitions {
            assert!(history::KINDS.iter().any(|(kind, _)| *kind == told.kind));
            self.history.push(told.clone());
        }
        for change in &tick.changes {
            self.change(*change);
        }
        for intent in &tick.intents {
            self.insert(intent);
        }
        TickCommitted::Committed
    }

    fn insert(&mut self, intent: &NewIntent) {
        assert_eq!(intent.id, self.run.key.id.intent(intent.seq));
        let row = Row {
            intent: intent.clone(),
            status: IntentStatus::Pending,
            armed: intent.armed,
            claimed: false,
            withdrawn: false,
            changed: false,
            tries: 0,
            has_body: true,
            diagnostic: None,
            answer: None,
        };
        let before = self.rows.insert(intent.seq, row);
        assert!(before.is_none(), "intent {} is inserted twice", intent.seq);
    }

    fn change(&mut self, change: IntentChange) {
        let row = self.rows.get_mut(&change.seq).expect("an intent to change");
        if change.seen == Some(row.status) {
            row.changed = false;
        }
        match change.order {
            Order::None => {}
            Order::Arm => row.armed |= row.status == IntentStatus::Pending,
            Order::Withdraw => {
                row.withdrawn = true;
                let at_once = match row.status {
                    IntentStatus::Pending => !row.claimed,
                    status => matches!(status, IntentStatus::Dead | IntentStatus::Quarantined),
                };
                if at_once {
                    row.end(IntentStatus::Discarded);
                }
            }
            Order::Redrive => {
                assert!(
                    row.has_body
                        && matches!(row.status, IntentStatus::Dead | IntentStatus::Quarantined)
                );
                row.status = IntentStatus::Pending;
                row.armed = true;
            }
        }
    }

    /// Claims what is due: at most one, since a run sends one intent after another.
    pub fn claim(&mut self) -> Option<i64> {
        let free = |row: &&mut Row| {
            row.status == IntentStatus::Pending && row.armed && !row.claimed && !row.withdrawn
        };
        let mut due: Vec<_> = self.rows.values_mut().filter(free).collect();
        assert!(
            due.len() <= 1,
            "intents of a run are dispatched one after another"
        );
        let row = due.pop()?;
        row.claimed = true;
        row.tries += 1;
        Some(row.intent.seq)
    }

    pub fn finish(&mut self, seq: i64, end: &End) {
        let row = self.rows.get_mut(&seq).expect("an intent to finish");
        assert!(row.claimed);
        row.claimed = false;
        match end {
            End::Delivered(status, body) => {
                row.answer = Some(Recorded {
                    status: *status,
                    headers: HeaderBlock::default(),
                    cors: None,
                    body: Some(Bytes::from_static(body.as_bytes())),
                });
                row.end(IntentStatus::Completed);
                self.delivered.push(seq);
            }
            _ if row.withdrawn => row.end(IntentStatus::Discarded),
            End::Again => {}
            End::Dead => {
                row.diagnostic = Some("refused by the peer".to_owned());
                row.end(IntentStatus::Dead);
            }
            End::Quarantined => row.end(IntentStatus::Quarantined),
        }
    }

    /// Claims what is due and ends its try so; ticks.
    pub fn ends(&mut self, end: &End) -> i64 {
        let seq = self.claim().expect("something is due");
        self.finish(seq, end);
        self.settle();
        seq
    }

    pub fn delivers(&mut self) -> i64 {
        self.ends(&End::Delivered(200, r#"{"ok":true}"#))
    }

    /// An operator gives an intent up.
    pub fn discard(&mut self, seq: i64) {
        let row = self.rows.get_mut(&seq).expect("an intent to discard");
        assert!(!row.claimed && row.status != IntentStatus::Completed);
        row.end(IntentStatus::Discarded);
    }

    pub fn time_passes(&mut self) {
        assert!(self.timer, "a timer is set");
        self.timer_over = true;
        self.settle();
    }

    /// Ticks until there is nothing to take in.
    pub fn settle(&mut self) {
        for _ in 0..1000 {
            let Some(tick) = tick(&self.load(), None).unwrap() else {
                assert!(!self.is_due(), "due, and nothing to do");
                return;
            };
            let tick_id = self.draw();
            let commit = self.commit_of(tick, tick_id);
            assert_eq!(self.commit(&commit), TickCommitted::Committed);
        }
        panic!("it never settles");
    }

    pub fn input(&mut self, event: Event) -> Result<(), Refused> {
        let stamp = self.draw();
        self.input_stamped(stamp, event)
    }

    pub fn input_stamped(&mut self, stamp: Stamp, event: Event) -> Result<(), Refused> {
        let by = "ops".to_owned();
        let input = Input { stamp, by, event };
        let tick = tick(&self.load(), Some(&input))?.expect("an input is never nothing");
        let tick_id = self.draw();
        let commit = self.commit_of(tick, tick_id);
        assert_eq!(self.commit(&commit), TickCommitted::Committed);
        self.settle();
        Ok(())
    }

    pub fn kinds(&self) -> Vec<&'static str> {
        self.history.iter().map(|told| told.kind).collect()
    }

    pub fn body(&self, seq: i64) -> &str {
        std::str::from_utf8(&self.rows[&seq].intent.body).unwrap()
    }

    pub fn statuses(&self) -> Vec<IntentStatus> {
        self.rows.values().map(|row| row.status).collect()
    }
}

impl Row {
    fn end(&mut self, status: IntentStatus) {
        self.status = status;
        self.changed = true;
        self.claimed = false;
    }

    fn seen(&self) -> IntentSeen {
        IntentSeen {
            seq: self.intent.seq,
            status: self.status,
            changed: self.changed,
            tries: self.tries,
            has_body: self.has_body,
            outcome: self.diagnostic.as_ref().map(|_| "item_fault".to_owned()),
            diagnostic: self.diagnostic.clone(),
            answer: self.answer.clone(),
        }
    }
}

pub(crate) fn effect(template: &str) -> Effect {
    Effect {
        send: Send::Http(HttpSend {
            to: Target::Destination("mail".to_owned()),
            method: "POST".to_owned(),
            path: None,
            headers: Vec::new(),
            success: Success::Ok,
            answer_bytes_max: 1024,
        }),
        payload: Payload::Template {
            template: template.to_owned(),
            content_type: "text/plain".to_owned(),
        },
        retry: Retry::DEFAULT,
        timeout_ms: 1000,
    }
}

pub(crate) fn http(effect: &mut Effect) -> &mut HttpSend {
    match &mut effect.send {
        Send::Http(http) => http,
        other => panic!("{other:?}"),
    }
}

pub(crate) fn step(name: &str, action: Action) -> Step {
    Step {
        name: name.to_owned(),
        action,
        on_failure: OnFailure::Stop,
        compensation: None,
    }
}

/// A step that sends these texts.
pub(crate) fn sends(name: &str, texts: &[&str]) -> Step {
    let effects = texts.iter().map(|text| effect(text)).collect();
    step(name, Action::Effects(effects))
}

pub(crate) fn waits(name: &str) -> Step {
    step(name, Action::Wait { for_ms: 60_000 })
}

pub(crate) fn awaits(name: &str, signal: &str) -> Step {
    let signal = signal.to_owned();
    let timeout_ms = Some(60_000);
    step(name, Action::Signal { signal, timeout_ms })
}

pub(crate) fn on_failure(on_failure: OnFailure, step: Step) -> Step {
    Step { on_failure, ..step }
}

pub(crate) fn undone_by(text: &str, step: Step) -> Step {
    let compensation = Some(effect(text));
    Step {
        compensation,
        ..step
    }
}

pub(crate) fn workflow(steps: Vec<Step>) -> Workflow {
    let name = "order".to_owned();
    Workflow { name, steps }
}

pub(crate) fn cancel() -> Event {
    Event::Cancel {
        reason: "a mistake".to_owned(),
    }
}

pub(crate) fn retry(seq: Option<i64>) -> Event {
    let reason = "fixed".to_owned();
    Event::Retry { seq, reason }
}

pub(crate) fn resume(result: Value) -> Event {
    let reason = "by hand".to_owned();
    Event::Resume { result, reason }
}

pub(crate) fn signal(name: &str, payload: Value) -> Event {
    let name = name.to_owned();
    Event::Signal { name, payload }
}

pub(crate) fn plain(text: &str) -> Text {
    Text::Plain(text.to_owned())
}

pub(crate) fn template(text: &str) -> Text {
    Text::Template(text.to_owned())
}
