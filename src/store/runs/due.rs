//! In which order runs that something happened to are told, and where the next look begins.

use std::collections::{HashMap, HashSet};

use time::OffsetDateTime;
use uuid::Uuid;

use super::{DuePlace, RunsDue};
use crate::domain::run::RunKey;

/// What was found, each in the order of its index.
pub(in crate::store) struct Found {
    /// Timers that are over, from the place on; at most as many as the limit.
    pub timers: Vec<(OffsetDateTime, RunKey)>,
    /// Of each tenant its first changed runs, tenant by tenant.
    pub shares: Vec<RunKey>,
    /// Changed runs of all tenants from the place on; at most [`changes_max`], some of them repeat.
    pub changes: Vec<RunKey>,
}

/// How many changed intents are looked at from the place on: a run has several.
pub(in crate::store) fn changes_max(limit: u32) -> u32 {
    limit.saturating_mul(2)
}

impl DuePlace {
    /// The columns of the timer's place.
    pub(in crate::store) fn timer_columns(&self) -> (OffsetDateTime, &str, Uuid) {
        let first = (OffsetDateTime::UNIX_EPOCH, "", Uuid::nil());
        let timer = self.timer.as_ref();
        timer.map_or(first, |(due, key)| (*due, key.tenant.as_str(), key.id.0))
    }

    /// The columns of the changes' place.
    pub(in crate::store) fn changed_columns(&self) -> (&str, Uuid) {
        let changed = self.changed.as_ref();
        changed.map_or(("", Uuid::nil()), |key| (key.tenant.as_str(), key.id.0))
    }
}

/// Each run once, at most `limit`: the three take turns, so that none keeps another waiting, and
/// so do the tenants of the shares.
pub(in crate::store) fn in_turn(found: Found, from: &DuePlace, limit: u32) -> RunsDue {
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let changes_max = limit.saturating_mul(2);
    let Found {
        timers, changes, ..
    } = found;
    let shares = tenants_in_turn(found.shares);
    let (mut keys, mut told) = (Vec::new(), HashSet::new());
    let mut tell = |key: Option<&RunKey>| {
        let Some(key) = key else { return false };
        if told.len() < limit && told.insert(key.clone()) {
            keys.push(key.clone());
        }
        told.contains(key)
    };
    let (mut timers_told, mut changes_told) = (0, 0);
    let longest = timers.len().max(shares.len()).max(changes.len());
    for nth in 0..longest {
        // What is told of each has no gap: the first that finds no room is the last of all.
        let timer = timers.get(nth).map(|(_, key)| key);
        timers_told += usize::from(timers_told == nth && tell(timer));
        tell(shares.get(nth));
        changes_told += usize::from(changes_told == nth && tell(changes.get(nth)));
    }
    // Up to the end: the next look begins at the beginning.
    let timers_ended = timers_told == timers.len() && timers.len() < limit;
    let changes_ended = changes_told == changes.len() && changes.len() < changes_max;
    let timer = timers[..timers_told].last().or(from.timer.as_ref());
    let changed = changes[..changes_told].last().or(from.changed.as_ref());
    let next = DuePlace {
        timer: timer.filter(|_| !timers_ended).cloned(),
        changed: changed.filter(|_| !changes_ended).cloned(),
    };
    RunsDue { keys, next }
}

/// The first of each tenant, then the second of each, and so on.
fn tenants_in_turn(shares: Vec<RunKey>) -> Vec<RunKey> {
    let mut counts = HashMap::new();
    let turn = |key: RunKey| {
        let count: &mut usize = counts.entry(key.tenant.clone()).or_default();
        *count += 1;
        (*count, key)
    };
    let mut turns: Vec<_> = shares.into_iter().map(turn).collect();
    turns.sort_by_key(|(turn, _)| *turn);
    turns.into_iter().map(|(_, key)| key).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::run::RunId;
    use crate::domain::scope::TenantScope;

    fn key(id: u128) -> RunKey {
        RunKey {
            tenant: TenantScope::stored(if id < 100 { "t" } else { "u" }),
            id: RunId(Uuid::from_u128(id)),
        }
    }

    fn keys(ids: &[u128]) -> Vec<RunKey> {
        ids.iter().copied().map(key).collect()
    }

    fn found(timers: &[u128], shares: &[u128], changes: &[u128]) -> Found {
        let timer = |id| (OffsetDateTime::UNIX_EPOCH, key(id));
        Found {
            timers: timers.iter().copied().map(timer).collect(),
            shares: keys(shares),
            changes: keys(changes),
        }
    }

    #[test]
    fn the_looks_take_turns_and_each_run_is_told_once() {
        let told = |limit| {
            let found = found(&[1, 2, 3], &[4, 1], &[1, 4, 5]);
            in_turn(found, &DuePlace::default(), limit).keys
        };
        assert_eq!(told(9), keys(&[1, 4, 2, 3, 5]));
        assert_eq!(told(3), keys(&[1, 4, 2]));
    }

    #[test]
    fn tenants_take_turns() {
        let found = found(&[], &[1, 2, 3, 101, 102], &[]);
        let told = in_turn(found, &DuePlace::default(), 9).keys;
        assert_eq!(told, keys(&[1, 101, 2, 102, 3]));
    }

    #[test]
    fn the_next_look_begins_behind_what_was_told_and_behind_the_end_at_the_beginning() {
        let from = DuePlace {
            timer: None,
            changed: Some(key(9)),
        };
        let next = |limit| {
            let due = in_turn(found(&[1, 2, 3, 4], &[], &[11, 11, 12]), &from, limit);
            (due.next.timer.map(|(_, key)| key), due.next.changed)
        };
        assert_eq!(next(1), (Some(key(1)), Some(key(9))));
        assert_eq!(next(4), (Some(key(3)), Some(key(11))));
        assert_eq!(next(9), (None, None));
    }
}
