//! In which order runs that something happened to are told.

use std::collections::HashSet;

use crate::domain::run::RunKey;

/// Each run once, at most `limit`: timers and changes in turn, so that neither keeps the other
/// waiting, then what else there is.
pub(in crate::store) fn in_turn(
    timers: Vec<RunKey>,
    changes: Vec<RunKey>,
    rest: Vec<RunKey>,
    limit: u32,
) -> Vec<RunKey> {
    let mut told = HashSet::new();
    let mut due = Vec::new();
    let (mut timers, mut changes) = (timers.into_iter(), changes.into_iter());
    let pairs = std::iter::from_fn(|| match (timers.next(), changes.next()) {
        (None, None) => None,
        pair => Some([pair.0, pair.1]),
    });
    for key in pairs.flatten().flatten().chain(rest) {
        if due.len() == usize::try_from(limit).unwrap_or(usize::MAX) {
            break;
        }
        if told.insert(key.clone()) {
            due.push(key);
        }
    }
    due
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;
    use crate::domain::run::RunId;
    use crate::domain::scope::TenantScope;

    fn keys(ids: &[u128]) -> Vec<RunKey> {
        let key = |id: &u128| RunKey {
            tenant: TenantScope::stored("t"),
            id: RunId(Uuid::from_u128(*id)),
        };
        ids.iter().map(key).collect()
    }

    #[test]
    fn timers_and_changes_take_turns_and_each_run_is_told_once() {
        let told = |limit| in_turn(keys(&[1, 2, 3]), keys(&[4, 1]), keys(&[1, 4, 5]), limit);
        assert_eq!(told(9), keys(&[1, 4, 2, 3, 5]));
        assert_eq!(told(3), keys(&[1, 4, 2]));
    }
}
