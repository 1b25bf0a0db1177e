//! Inputs: signals, and what people want of a run.

use serde_json::{Value, json};

use super::history;
use super::progress::{At, Doing, Ending, Held, SIGNALS_HELD_MAX, Span, bounded};
use super::tick::{Machine, is_dead};
use super::{Event, Input, Refused, RunStatus, Timer};
use crate::domain::intent::{IntentStatus, Order, diagnostic};
use crate::domain::workflow::Step;

/// What a run is stuck at.
enum StuckAt {
    /// An intent that could not be delivered.
    Intent(i64),
    /// A step or a compensation that could not be rendered.
    Rendering,
    /// A signal that did not come.
    Signal,
    /// Nothing: another version could not read the run.
    Nothing,
}

impl Event {
    /// Whether a transition of this kind and detail tells of it: of the same act, whatever it brings.
    #[must_use]
    pub fn is_told_by(&self, kind: &str, detail: Option<&[u8]>) -> bool {
        match self {
            Self::Signal { name, .. } => {
                let detail = detail.and_then(|detail| serde_json::from_slice::<Value>(detail).ok());
                kind == history::SIGNAL_RECEIVED
                    && detail.is_some_and(|detail| detail["signal"] == name.as_str())
            }
            Self::Cancel { .. } => kind == history::CANCEL_REQUESTED,
            Self::Retry { .. } => kind == history::RETRIED,
            Self::Resume { .. } => kind == history::RESUMED,
        }
    }
}

impl Machine<'_> {
    /// Takes an input in. It appends at least one transition, of which one bears its stamp.
    ///
    /// # Errors
    /// When the run can't take it.
    pub(super) fn apply(&mut self, input: &Input) -> Result<(), Refused> {
        if self.status.is_final() {
            return Err(Refused::Final);
        }
        match &input.event {
            Event::Signal { name, payload } => self.signal(input, name, payload),
            Event::Cancel { reason } => self.cancel(input, reason),
            Event::Retry { seq, reason } => self.retry(input, *seq, reason),
            Event::Resume { result, reason } => self.resume(input, result, reason),
        }
    }

    fn signal(&mut self, input: &Input, name: &str, payload: &Value) -> Result<(), Refused> {
        let mut steps = self.definition.workflow.steps.iter();
        if !steps.any(|step| step.signal() == Some(name)) {
            return Err(Refused::NeverAwaited);
        }
        let awaited = match &self.progress.at {
            At::Withdrawing { .. } | At::Undoing { .. } => return Err(Refused::Undoing),
            At::Step {
                index,
                doing: Doing::Signal,
            } if self.status != RunStatus::Stuck && self.is_signal(*index, name) => Some(*index),
            _ => None,
        };
        if awaited.is_none() && self.progress.signals.len() >= SIGNALS_HELD_MAX {
            return Err(Refused::TooManySignals);
        }
        let (payload, cut) = bounded(payload);
        let detail = json!({ "signal": name, "by": diagnostic(&input.by), "cut": cut });
        self.tell_input(input, history::SIGNAL_RECEIVED, detail);
        if let Some(index) = awaited {
            self.timer = Timer::Clear;
            self.consume(index, name, payload);
        } else {
            let name = name.to_owned();
            self.progress.signals.push(Held { name, payload });
        }
        Ok(())
    }

    fn is_signal(&self, index: usize, name: &str) -> bool {
        self.step(index).and_then(Step::signal) == Some(name)
    }

    /// The signal that a step waits for is there.
    pub(super) fn consume(&mut self, index: usize, name: &str, payload: Value) {
        let step = self.step(index);
        self.tell(
            history::SIGNAL_CONSUMED,
            step,
            Some(json!({ "signal": name })),
        );
        if let Some(step) = step {
            let result = json!({ "status": null, "body": payload });
            self.progress.results.insert(step.name.clone(), result);
        }
        self.progress.heard.insert(name.to_owned(), payload);
        self.step_done(index, true);
    }

    fn cancel(&mut self, input: &Input, reason: &str) -> Result<(), Refused> {
        let (index, span) = match &self.progress.at {
            At::Withdrawing { .. } | At::Undoing { .. } => return Err(Refused::Undoing),
            At::Over => return Err(Refused::Final),
            At::Step {
                index,
                doing: Doing::Sending(span),
            } => (*index, Some(span.clone())),
            At::Step { index, .. } => (*index, None),
        };
        self.tell_input(input, history::CANCEL_REQUESTED, why(input, reason));
        let reason = diagnostic(&format!("cancelled by {}: {reason}", input.by));
        let ending = Ending {
            cancelled: true,
            reason,
            undone: false,
        };
        self.begin_undo(index, span, ending);
        Ok(())
    }

    fn retry(&mut self, input: &Input, wanted: Option<i64>, reason: &str) -> Result<(), Refused> {
        let at = match (self.stuck_at(), wanted) {
            (Some(StuckAt::Intent(seq)), Some(wanted)) if seq != wanted => None,
            (Some(StuckAt::Intent(seq)), _) => Some(StuckAt::Intent(seq)),
            (at, None) => Some(at.ok_or(Refused::NotStuck)?),
            (_, Some(_)) => None,
        };
        let at = at.ok_or(Refused::Gone)?;
        if let StuckAt::Intent(seq) = at {
            let intent = self.seen.get(&seq).ok_or(Refused::Gone)?;
            if !intent.has_body {
                return Err(Refused::Gone);
            }
            let status = intent.status;
            self.order(seq, status, Order::Redrive);
        }
        self.tell_input(input, history::RETRIED, why(input, reason));
        self.status = RunStatus::Running;
        match (at, self.progress.at.clone()) {
            (StuckAt::Rendering, At::Undoing { index, ending, .. }) => {
                self.undo_step(index, ending);
            }
            (StuckAt::Rendering | StuckAt::Signal, At::Step { index, .. })
            | (
                StuckAt::Nothing,
                At::Step {
                    index,
                    doing: Doing::Timer,
                },
            ) => self.enter(index),
            (_, At::Undoing { ending, .. } | At::Withdrawing { ending, .. }) => {
                self.reason = Some(ending.reason);
            }
            _ => self.reason = None,
        }
        Ok(())
    }

    fn resume(&mut self, input: &Input, result: &Value, reason: &str) -> Result<(), Refused> {
        self.stuck_at().ok_or(Refused::NotStuck)?;
        self.tell_input(input, history::RESUMED, why(input, reason));
        match self.progress.at.clone() {
            At::Undoing { ending, .. } => self.undo_next(ending),
            At::Step { index, doing } => {
                let ran = match doing {
                    Doing::Sending(span) => self.abandon(&span),
                    Doing::Unrendered | Doing::Timer | Doing::Signal => false,
                };
                if let Some(step) = self.step(index) {
                    let (body, cut) = bounded(result);
                    let mut result = json!({ "status": null, "body": body });
                    if cut {
                        result["cut"] = true.into();
                    }
                    self.progress.results.insert(step.name.clone(), result);
                }
                self.timer = Timer::Clear;
                self.step_done(index, ran);
            }
            At::Withdrawing { .. } | At::Over => self.status = RunStatus::Running,
        }
        Ok(())
    }

    /// The run goes on without the rest of a step. None of it was armed, so that nothing is on its
    /// way. What failed stays to be seen. Whether something may have had an effect.
    fn abandon(&mut self, span: &Span) -> bool {
        let mut ran = span.ran;
        for seq in span.open() {
            let Some(intent) = self.seen.get(&seq).copied() else {
                continue;
            };
            ran |= intent.tries > 0;
            if intent.status == IntentStatus::Pending {
                self.order(seq, intent.status, Order::Withdraw);
            }
        }
        ran
    }

    fn stuck_at(&self) -> Option<StuckAt> {
        if self.status != RunStatus::Stuck {
            return None;
        }
        let dead = |seq: i64| {
            let intent = self.seen.get(&seq);
            match intent.filter(|intent| is_dead(intent.status)) {
                Some(_) => StuckAt::Intent(seq),
                None => StuckAt::Nothing,
            }
        };
        Some(match &self.progress.at {
            At::Step { doing, .. } => match doing {
                Doing::Sending(span) => dead(span.head),
                Doing::Unrendered => StuckAt::Rendering,
                Doing::Signal => StuckAt::Signal,
                Doing::Timer => StuckAt::Nothing,
            },
            At::Undoing { seq: Some(seq), .. } => dead(*seq),
            At::Undoing { seq: None, .. } => StuckAt::Rendering,
            At::Withdrawing { .. } | At::Over => StuckAt::Nothing,
        })
    }

    fn tell_input(&mut self, input: &Input, kind: &'static str, detail: Value) {
        let step = match &self.progress.at {
            At::Step { index, .. } | At::Undoing { index, .. } => self.step(*index),
            At::Withdrawing { .. } | At::Over => None,
        };
        self.tell(kind, step, Some(detail));
        if let Some(transition) = self.transitions.last_mut() {
            transition.stamp = Some(input.stamp);
        }
    }
}

fn why(input: &Input, reason: &str) -> Value {
    json!({ "by": diagnostic(&input.by), "reason": diagnostic(reason) })
}
