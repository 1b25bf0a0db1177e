//! The tick: what becomes of a run by what happened since the last one.
//!
//! First it takes in what its intents and its timer have come to, then the input, so that a tick
//! that comes late gives what two that came in time would have given.

use std::collections::BTreeMap;

use bytes::Bytes;
use serde_json::{Value, json};

use super::begin::Beginning;
use super::freeze::Freezer;
use super::history;
use super::progress::{At, Doing, Ending, Progress, Span, result};
use super::subject::Subject;
use super::{
    Definition, Input, LoadedRun, NewRun, NewTransition, Refused, Run, RunId, RunStatus, Tick,
    Timer,
};
use crate::domain::intent::{IntentChange, IntentSeen, IntentStatus, NewIntent, Order, diagnostic};
use crate::domain::scope::RecordKey;
use crate::domain::workflow::{Action, Effect, OnFailure, Send, Step, Success};

/// What becomes of a run by what it has not taken in yet and by one input, if there is one.
/// `None`: nothing; there is no commit to make. With an input there is always one.
///
/// # Errors
/// When the input can't be taken; then nothing is to be written.
pub fn tick(loaded: &LoadedRun, input: Option<&Input>) -> Result<Option<Tick>, Refused> {
    let run = &loaded.run;
    let read = Definition::read(&run.definition).zip(Progress::read(&run.progress));
    let Some((definition, progress)) = read else {
        return input.map_or(Ok(unreadable(run)), |_| Err(Refused::Unreadable));
    };
    let mut machine = Machine {
        run_id: run.key.id,
        record: &run.record,
        definition: &definition,
        subject: &run.input,
        seen: loaded
            .intents
            .iter()
            .map(|intent| (intent.seq, intent))
            .collect(),
        status: run.status,
        progress,
        reason: run.reason.clone(),
        timer: Timer::Keep,
        transitions: Vec::new(),
        intents: Vec::new(),
        changes: BTreeMap::new(),
    };
    machine.take_in(loaded.timer_over);
    if let Some(input) = input {
        machine.apply(input)?;
    }
    Ok(machine.finish())
}

/// The run with its first tick.
pub(super) fn first(beginning: &Beginning<'_>) -> NewRun {
    let definition = Definition {
        workflow: beginning.workflow.clone(),
        key_seed: beginning.key_seed,
        first_key: beginning.first_key.clone(),
    };
    let subject = super::json(&Subject::of(beginning));
    let mut machine = Machine {
        run_id: beginning.run_id,
        record: beginning.record,
        definition: &definition,
        subject: &subject,
        seen: BTreeMap::new(),
        status: RunStatus::Running,
        progress: Progress::start(),
        reason: None,
        timer: Timer::Keep,
        transitions: Vec::new(),
        intents: Vec::new(),
        changes: BTreeMap::new(),
    };
    machine.tell(history::STARTED, None, None);
    machine.enter(0);
    let first = machine.into_tick();
    NewRun {
        workflow: definition.workflow.name.clone(),
        holds_record: beginning.holds_record,
        definition: super::json(&definition),
        input: subject,
        first,
        tick_id: beginning.tick_id,
    }
}

/// Another version wrote the run. It is shown as stuck and left as it is, so that the version that
/// can read it can go on after a retry.
fn unreadable(run: &Run) -> Option<Tick> {
    if run.status == RunStatus::Stuck || run.status.is_final() {
        return None;
    }
    let reason = "this version can't read the run; retry it with the version that wrote it";
    Some(Tick {
        status: RunStatus::Stuck,
        progress: run.progress.clone(),
        reason: Some(reason.to_owned()),
        timer: Timer::Clear,
        transitions: vec![NewTransition {
            kind: history::STUCK,
            step: None,
            detail: Some(json!({ "reason": reason })),
            stamp: None,
        }],
        intents: Vec::new(),
        changes: Vec::new(),
    })
}

/// A run on its way from one version to the next.
pub(super) struct Machine<'a> {
    run_id: RunId,
    record: &'a RecordKey,
    pub(super) definition: &'a Definition,
    subject: &'a Bytes,
    pub(super) seen: BTreeMap<i64, &'a IntentSeen>,
    pub(super) status: RunStatus,
    pub(super) progress: Progress,
    pub(super) reason: Option<String>,
    pub(super) timer: Timer,
    pub(super) transitions: Vec<NewTransition>,
    pub(super) intents: Vec<NewIntent>,
    changes: BTreeMap<i64, IntentChange>,
}

impl<'a> Machine<'a> {
    fn take_in(&mut self, timer_over: bool) {
        self.notice();
        if timer_over {
            self.time_is_over();
        }
        match self.progress.at.clone() {
            At::Step {
                index,
                doing: Doing::Sending(span),
            } => self.send_on(index, span),
            At::Withdrawing {
                index,
                span,
                ending,
            } => self.withdraw_on(index, &span, ending),
            At::Undoing {
                index,
                seq: Some(seq),
                ending,
            } => self.undo_on(index, seq, ending),
            _ => {}
        }
    }

    /// Takes note of every status that the run does not know yet.
    fn notice(&mut self) {
        let (mut withdrawn, mut noted) = (0_u32, 0_u32);
        let changed: Vec<_> = self
            .seen
            .values()
            .copied()
            .filter(|intent| intent.changed)
            .collect();
        for intent in changed {
            let (seq, status) = (intent.seq, intent.status);
            self.order(seq, status, Order::None);
            let finished = !matches!(status, IntentStatus::Pending);
            let given_up = finished && !is_dead(status);
            match &mut self.progress.at {
                At::Step {
                    index,
                    doing: Doing::Sending(span),
                } if span.open().contains(&seq) => {
                    let (index, own_turn) = (*index, seq == span.head);
                    if !own_turn && given_up && !span.gone.contains(&seq) {
                        span.gone.push(seq);
                        span.ran |= intent.tries > 0;
                        self.tell_skipped(index, intent);
                    }
                }
                At::Withdrawing { span, .. } if finished && span.open().contains(&seq) => {
                    span.ran |= intent.tries > 0;
                    withdrawn += 1;
                }
                At::Undoing { seq: Some(own), .. } if *own == seq => {}
                _ => noted += 1,
            }
        }
        for (kind, count) in [(history::WITHDRAWN, withdrawn), (history::NOTED, noted)] {
            if count > 0 {
                self.tell(kind, None, Some(json!({ "count": count })));
            }
        }
    }

    fn time_is_over(&mut self) {
        self.timer = Timer::Clear;
        let (index, doing) = match &self.progress.at {
            At::Step { index, doing } if self.status != RunStatus::Stuck => (*index, doing.clone()),
            _ => return self.tell(history::TIMER_OVER, None, None),
        };
        let step = self.step(index);
        self.tell(history::TIMER_OVER, step, None);
        match doing {
            Doing::Timer => self.step_done(index, true),
            Doing::Signal => {
                let name = step.map_or("", |step| &step.name);
                let reason = format!("step `{name}`: its signal did not come in time");
                match step.map(|step| step.on_failure).unwrap_or_default() {
                    OnFailure::Stop => self.stuck(step, reason, None),
                    OnFailure::Continue => {
                        self.tell(history::SKIPPED, step, Some(json!({ "reason": reason })));
                        self.step_done(index, false);
                    }
                    OnFailure::Compensate => self.fail(index, None, reason),
                }
            }
            Doing::Sending(_) | Doing::Unrendered => {}
        }
    }

    /// Goes through the intents of a step as far as they are done, and arms the next.
    fn send_on(&mut self, index: usize, mut span: Span) {
        let mut moved = false;
        while span.head <= span.last {
            let seq = span.head;
            let seen = self.seen.get(&seq).copied();
            let on_failure = self
                .step(index)
                .map(|step| step.on_failure)
                .unwrap_or_default();
            match seen.map(|intent| (intent, intent.status)) {
                _ if span.gone.contains(&seq) => span.gone.retain(|gone| *gone != seq),
                // The one before it is not done, or nobody has told yet.
                None => break,
                Some((_, IntentStatus::Pending)) => {
                    if moved {
                        self.order(seq, IntentStatus::Pending, Order::Arm);
                    }
                    break;
                }
                Some((intent, IntentStatus::Completed)) => {
                    span.ran = true;
                    if let Some(status) = self.delivered(index, &span, intent) {
                        span.head += 1;
                        span.ran = false;
                        let reason = format!("the service answered {status}");
                        return self.fail(index, Some(span), reason);
                    }
                }
                Some((intent, status)) if is_dead(status) && on_failure != OnFailure::Continue => {
                    span.ran |= intent.tries > 0;
                    let reason = self.why_dead(index, intent);
                    if on_failure == OnFailure::Compensate {
                        span.head += 1;
                        return self.fail(index, Some(span), reason);
                    }
                    if moved || self.status != RunStatus::Stuck {
                        self.stuck(self.step(index), reason, Some(intent));
                    }
                    break;
                }
                Some((intent, _)) => {
                    span.ran |= intent.tries > 0;
                    self.tell_skipped(index, intent);
                    if self.is_call(index, &span, seq) && !is_dead(intent.status) {
                        span.head += 1;
                        let reason = "the call was given up: it was discarded".to_owned();
                        return self.fail(index, Some(span), reason);
                    }
                }
            }
            span.head += 1;
            moved = true;
            self.runs();
        }
        if span.head > span.last {
            self.step_done(index, span.ran);
        } else {
            let doing = Doing::Sending(span);
            self.progress.at = At::Step { index, doing };
        }
    }

    /// Takes an answer in. The status, if the service refused for good.
    fn delivered(&mut self, index: usize, span: &Span, intent: &IntentSeen) -> Option<u16> {
        let step = self.step(index)?;
        let status = intent.answer.as_ref().map(|answer| answer.status);
        let detail = json!({ "seq": intent.seq, "status": status });
        self.tell(history::EFFECT_DELIVERED, Some(step), Some(detail));
        let result = if self.definition.workflow.mentions("steps") {
            result(intent.answer.as_ref())
        } else {
            json!({ "status": status, "body": null })
        };
        self.progress.results.insert(step.name.clone(), result);
        let called = self.is_call(index, span, intent.seq);
        status.filter(|status| called && *status >= 400)
    }

    /// Whether this is the call of an accepted request, on whose answer everything after it hangs.
    fn is_call(&self, index: usize, span: &Span, seq: i64) -> bool {
        let Some(Action::Effects(effects)) = self.step(index).map(|step| &step.action) else {
            return false;
        };
        let place = usize::try_from(seq - span.first).ok();
        let effect = place.and_then(|place| effects.get(place));
        effect.is_some_and(|effect| {
            matches!(&effect.send, Send::Http(http) if matches!(http.success, Success::Answered { .. }))
        })
    }

    /// A step is over; the next one begins. `ran`: whether it may have had an effect.
    pub(super) fn step_done(&mut self, index: usize, ran: bool) {
        let Some(step) = self.step(index) else { return };
        let nothing = json!({ "status": null, "body": null });
        let results = &mut self.progress.results;
        results.entry(step.name.clone()).or_insert(nothing);
        self.tell(history::STEP_COMPLETED, Some(step), None);
        self.leave(index, ran);
        self.enter(index + 1);
    }

    /// Remembers what there is to undo of a step.
    pub(super) fn leave(&mut self, index: usize, ran: bool) {
        let compensation = self.step(index).and_then(|step| step.compensation.as_ref());
        if ran && compensation.is_some() {
            self.progress.to_undo.push(index);
        }
    }

    /// Begins a step; past the last one the run is completed.
    pub(super) fn enter(&mut self, index: usize) {
        self.runs();
        let Some(step) = self.step(index) else {
            self.status = RunStatus::Completed;
            self.progress.at = At::Over;
            return self.tell(history::COMPLETED, None, None);
        };
        let awaited = step.signal().map(|signal| json!({ "signal": signal }));
        self.tell(history::STEP_STARTED, Some(step), awaited);
        match &step.action {
            Action::Effects(effects) => self.send(index, step, effects),
            Action::Wait { for_ms } => {
                self.wait(index, Doing::Timer, Some(*for_ms));
            }
            Action::Signal { signal, timeout_ms } => {
                let held = &mut self.progress.signals;
                match held.iter().position(|held| held.name == *signal) {
                    Some(place) => {
                        let held = held.remove(place);
                        self.consume(index, &held.name, held.payload);
                    }
                    None => self.wait(index, Doing::Signal, *timeout_ms),
                }
            }
        }
    }

    fn send(&mut self, index: usize, step: &Step, effects: &[Effect]) {
        let first = self.progress.last_seq + 1;
        let frozen = self
            .freezer()
            .and_then(|freezer| freezer.step(&step.name, effects, first));
        match frozen {
            Ok(intents) if intents.is_empty() => self.step_done(index, false),
            Ok(intents) => {
                let last = intents.last().map_or(first, |intent| intent.seq);
                self.intents.extend(intents);
                self.progress.last_seq = last;
                let doing = Doing::Sending(Span {
                    first,
                    head: first,
                    last,
                    gone: Vec::new(),
                    ran: false,
                });
                self.progress.at = At::Step { index, doing };
            }
            Err(reason) => {
                let doing = Doing::Unrendered;
                self.progress.at = At::Step { index, doing };
                self.stuck(Some(step), reason, None);
            }
        }
    }

    pub(super) fn freezer(&self) -> Result<Freezer<'_>, String> {
        let (definition, progress) = (self.definition, &self.progress);
        Freezer::new(self.run_id, self.record, definition, progress, self.subject)
    }

    fn wait(&mut self, index: usize, doing: Doing, for_ms: Option<u64>) {
        self.status = RunStatus::Waiting;
        self.progress.at = At::Step { index, doing };
        if let Some(for_ms) = for_ms {
            self.timer = Timer::In(std::time::Duration::from_millis(for_ms));
        }
    }

    /// A step failed for good, and what was done is to be undone.
    fn fail(&mut self, index: usize, span: Option<Span>, reason: String) {
        let detail = json!({ "reason": reason });
        self.tell(history::STEP_FAILED, self.step(index), Some(detail));
        let ending = Ending {
            cancelled: false,
            reason,
            undone: false,
        };
        self.begin_undo(index, span, ending);
    }

    pub(super) fn stuck(
        &mut self,
        step: Option<&Step>,
        reason: String,
        intent: Option<&IntentSeen>,
    ) {
        let seq = intent.map(|intent| intent.seq);
        let detail = json!({ "reason": reason, "seq": seq });
        self.tell(history::STUCK, step, Some(detail));
        self.status = RunStatus::Stuck;
        self.reason = Some(reason);
    }

    /// It goes on: it is not stuck, and waits for nothing.
    pub(super) fn runs(&mut self) {
        self.status = RunStatus::Running;
        self.reason = None;
    }

    pub(super) fn why_dead(&self, index: usize, intent: &IntentSeen) -> String {
        let name = self.step(index).map_or("", |step| &step.name);
        let words = [intent.outcome.as_deref(), intent.diagnostic.as_deref()];
        let mut reason = format!("step `{name}`: {}", intent.status.word());
        for word in words.into_iter().flatten().filter(|word| !word.is_empty()) {
            reason.push_str(": ");
            reason.push_str(word);
        }
        diagnostic(&reason)
    }

    fn tell_skipped(&mut self, index: usize, intent: &IntentSeen) {
        let detail =
            json!({ "seq": intent.seq, "status": intent.status.word(), "outcome": intent.outcome });
        self.tell(history::SKIPPED, self.step(index), Some(detail));
    }

    pub(super) fn tell(&mut self, kind: &'static str, step: Option<&Step>, detail: Option<Value>) {
        self.transitions.push(NewTransition {
            kind,
            step: step.map(|step| step.name.clone()),
            detail,
            stamp: None,
        });
    }

    /// What is ordered last holds; taking note alone takes no order back.
    pub(super) fn order(&mut self, seq: i64, seen: IntentStatus, order: Order) {
        let seen = Some(seen);
        self.changes.insert(seq, IntentChange { seq, seen, order });
    }

    pub(super) fn step(&self, index: usize) -> Option<&'a Step> {
        self.definition.workflow.steps.get(index)
    }

    fn finish(mut self) -> Option<Tick> {
        if self.transitions.is_empty() {
            if self.changes.is_empty() {
                return None;
            }
            let detail = json!({ "count": self.changes.len() });
            self.tell(history::NOTED, None, Some(detail));
        }
        Some(self.into_tick())
    }

    fn into_tick(self) -> Tick {
        Tick {
            status: self.status,
            progress: self.progress.write(),
            reason: self.reason,
            timer: self.timer,
            transitions: self.transitions,
            intents: self.intents,
            changes: self.changes.into_values().collect(),
        }
    }
}

pub(super) fn is_dead(status: IntentStatus) -> bool {
    matches!(status, IntentStatus::Dead | IntentStatus::Quarantined)
}
