//! What a run's parts are in columns: the same on either store.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::domain::intent::{IntentChange, NewIntent, Order};
use crate::domain::run::{NewTransition, Tick, Timer};

/// A value as a row keeps it.
pub(in crate::store) fn json(value: &impl Serialize) -> Vec<u8> {
    // It fails on maps whose keys are no texts only, and nothing here has one.
    serde_json::to_vec(value).unwrap_or_default()
}

/// More about a transition, as its row keeps it.
pub(in crate::store) fn detail(transition: &NewTransition) -> Option<Vec<u8>> {
    transition.detail.as_ref().map(json)
}

/// How long faults of the destination are suffered.
pub(in crate::store) fn horizon_ms(intent: &NewIntent) -> i64 {
    i64::try_from(intent.sending.retry.horizon_ms).unwrap_or(i64::MAX)
}

/// The number of the newest transition after a tick that saw `seq`.
pub(in crate::store) fn last_seq(seq: i64, tick: &Tick) -> i64 {
    let appended = i64::try_from(tick.transitions.len()).unwrap_or(i64::MAX);
    seq.saturating_add(appended)
}

/// The timer that a tick leaves. What is final waits for nothing.
pub(in crate::store) fn timer(tick: &Tick) -> Timer {
    if tick.status.is_final() {
        Timer::Clear
    } else {
        tick.timer
    }
}

/// The changes of each intent as one, in the order of their places: it is known if one of them saw
/// it, and the last order counts.
pub(in crate::store) fn merged(changes: &[IntentChange]) -> Vec<IntentChange> {
    let mut merged: BTreeMap<i64, IntentChange> = BTreeMap::new();
    for change in changes {
        let one = merged.entry(change.seq).or_insert(*change);
        one.seen = change.seen.or(one.seen);
        if change.order != Order::None {
            one.order = change.order;
        }
    }
    merged.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::intent::IntentStatus;

    fn change(seq: i64, seen: Option<IntentStatus>, order: Order) -> IntentChange {
        IntentChange { seq, seen, order }
    }

    #[test]
    fn each_intent_is_changed_once() {
        let dead = Some(IntentStatus::Dead);
        let changes = [
            change(2, None, Order::Arm),
            change(1, dead, Order::None),
            change(1, None, Order::Redrive),
        ];
        let expected = [change(1, dead, Order::Redrive), change(2, None, Order::Arm)];
        assert_eq!(merged(&changes), expected);
    }
}
