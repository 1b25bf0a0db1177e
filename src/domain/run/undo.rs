//! What was done is undone: first whatever is still on its way is withdrawn, then the
//! compensations run in reverse order, one after another.

use std::time::Duration;

use serde_json::json;

use super::history;
use super::progress::{At, Doing, Ending, Span};
use super::tick::{Machine, is_dead};
use super::{RunStatus, Timer};
use crate::domain::intent::{IntentStatus, Order};

/// How often intents that are to be withdrawn are looked at while a worker has them.
const WITHDRAW_AGAIN: Duration = Duration::from_mins(1);

impl Machine<'_> {
    /// Turns around. `span`: the intents of the step at `index`, if it has any.
    pub(super) fn begin_undo(&mut self, index: usize, span: Option<Span>, ending: Ending) {
        self.tell(history::UNDOING, None, None);
        self.status = RunStatus::Running;
        self.reason = Some(ending.reason.clone());
        if matches!(
            self.progress.at,
            At::Step {
                doing: Doing::Timer | Doing::Signal,
                ..
            }
        ) {
            self.timer = Timer::Clear;
        }
        let Some(mut span) = span else {
            return self.undo_next(ending);
        };
        // What this very tick would have begun does not begin.
        self.intents
            .retain(|intent| !span.open().contains(&intent.seq));
        let mut pending = false;
        for seq in span.open() {
            let Some(intent) = self.seen.get(&seq).copied() else {
                continue;
            };
            if intent.status == IntentStatus::Pending {
                self.order(seq, intent.status, Order::Withdraw);
                pending = true;
            } else {
                span.ran |= intent.tries > 0;
                // An operator's word settles it; what failed by itself stays to be seen.
                if is_dead(intent.status) && ending.cancelled {
                    self.order(seq, intent.status, Order::Withdraw);
                }
            }
        }
        if pending {
            self.timer = Timer::In(WITHDRAW_AGAIN);
            self.progress.at = At::Withdrawing {
                index,
                span,
                ending,
            };
        } else {
            self.leave(index, span.ran);
            self.undo_next(ending);
        }
    }

    /// Goes on once nothing of the step is on its way any more.
    pub(super) fn withdraw_on(&mut self, index: usize, span: &Span, ending: Ending) {
        let is_pending = |seq| {
            let intent = self.seen.get(&seq);
            intent.is_some_and(|intent| intent.status == IntentStatus::Pending)
        };
        let pending: Vec<i64> = span.open().filter(|seq| is_pending(*seq)).collect();
        if pending.is_empty() {
            self.timer = Timer::Clear;
            self.leave(index, span.ran);
            self.undo_next(ending);
        } else if self.timer == Timer::Clear {
            // Whoever had it may be gone, and nobody claim it any more.
            for seq in pending {
                self.order(seq, IntentStatus::Pending, Order::Withdraw);
            }
            self.timer = Timer::In(WITHDRAW_AGAIN);
        }
    }

    /// Takes in what became of a compensation.
    pub(super) fn undo_on(&mut self, index: usize, seq: i64, ending: Ending) {
        let Some(intent) = self.seen.get(&seq).copied() else {
            return;
        };
        let kind = match intent.status {
            IntentStatus::Pending => return,
            IntentStatus::Completed => history::UNDONE,
            IntentStatus::Discarded => history::SKIPPED,
            IntentStatus::Dead | IntentStatus::Quarantined => {
                if self.status != RunStatus::Stuck {
                    let reason = format!("undoing {}", self.why_dead(index, intent));
                    self.stuck(self.step(index), reason, Some(intent));
                }
                return;
            }
        };
        self.tell(kind, self.step(index), Some(json!({ "seq": seq })));
        self.undo_next(ending);
    }

    /// Begins the next compensation, or ends the run.
    pub(super) fn undo_next(&mut self, ending: Ending) {
        if let Some(index) = self.progress.to_undo.pop() {
            return self.undo_step(index, ending);
        }
        self.status = match (ending.cancelled, ending.undone) {
            (true, _) => RunStatus::Cancelled,
            (false, true) => RunStatus::Compensated,
            (false, false) => RunStatus::Failed,
        };
        let kind = match self.status {
            RunStatus::Cancelled => history::CANCELLED,
            RunStatus::Compensated => history::COMPENSATED,
            _ => history::FAILED,
        };
        self.reason = Some(ending.reason);
        self.progress.at = At::Over;
        self.progress.signals.clear();
        self.tell(kind, None, None);
    }

    /// Begins the compensation of a step, or tries again to render it.
    pub(super) fn undo_step(&mut self, index: usize, mut ending: Ending) {
        ending.undone = true;
        self.status = RunStatus::Running;
        self.reason = Some(ending.reason.clone());
        let Some(step) = self.step(index) else {
            return self.undo_next(ending);
        };
        let effects = step.compensation.as_slice();
        let seq = self.progress.last_seq + 1;
        let frozen = self
            .freezer()
            .and_then(|freezer| freezer.step(&step.name, effects, seq));
        match frozen {
            Ok(intents) => {
                self.tell(
                    history::UNDO_STARTED,
                    Some(step),
                    Some(json!({ "seq": seq })),
                );
                self.progress.last_seq = seq;
                self.intents.extend(intents);
                let seq = Some(seq);
                self.progress.at = At::Undoing { index, seq, ending };
            }
            Err(reason) => {
                let seq = None;
                self.progress.at = At::Undoing { index, seq, ending };
                self.stuck(Some(step), format!("undoing {reason}"), None);
            }
        }
    }
}
