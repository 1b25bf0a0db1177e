//! Batches as arrays: their order, their repeats and their keys.

use super::run::Statement;
use crate::domain::record::AttemptToken;
use crate::domain::scope::RecordKey;
use crate::store::StoreError;

/// The token in an identity where none counts.
pub(super) const ANY_TOKEN: AttemptToken = AttemptToken(uuid::Uuid::nil());

/// The indices of a batch in rounds. No round names anything twice, a repeat comes in a later
/// round than what it repeats, and each round is in the order of keys: two batches that lock the
/// same rows do it in the same order and can't wait for each other.
pub(super) fn rounds<'a, T>(
    items: &'a [T],
    identity: impl Fn(&'a T) -> (&'a RecordKey, AttemptToken),
) -> Vec<Vec<usize>> {
    in_rounds(items.len(), |index| {
        let (key, token) = identity(&items[index]);
        (key, token.0)
    })
}

/// The same for items with another identity, by their indices.
pub(super) fn in_rounds<K: Ord>(count: usize, identity: impl Fn(usize) -> K) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..count).collect();
    // Stable: repeats stay in the order of the batch.
    order.sort_by_key(|index| identity(*index));
    let mut rounds: Vec<Vec<usize>> = Vec::new();
    let mut round = 0;
    for (place, index) in order.iter().enumerate() {
        let repeats = place > 0 && identity(order[place - 1]) == identity(*index);
        round = if repeats { round + 1 } else { 0 };
        if rounds.len() == round {
            rounds.push(Vec::new());
        }
        rounds[round].push(*index);
    }
    rounds
}

/// One column of a batch, for an array parameter.
pub(super) fn column<T, V>(items: impl Iterator<Item = T>, of: impl Fn(T) -> V) -> Vec<V> {
    items.map(of).collect()
}

/// Binds the three columns of keys, as the next three array parameters.
pub(super) fn bind_keys<'a>(
    statement: Statement,
    keys: &(impl Iterator<Item = &'a RecordKey> + Clone),
) -> Statement {
    statement
        .bind(column(keys.clone(), |key| key.tenant.as_str()))
        .bind(column(keys.clone(), |key| key.pool.as_str()))
        .bind(column(keys.clone(), |key| key.key.as_str()))
}

/// Binds the three columns of one key, as the next three parameters.
pub(super) fn bind_key(statement: Statement, key: &RecordKey) -> Statement {
    statement
        .bind(key.tenant.as_str())
        .bind(key.pool.as_str())
        .bind(key.key.as_str())
}

/// An error after a part of the operation was written: whatever it says itself, the operation may
/// have happened.
pub(super) fn in_doubt(error: StoreError) -> StoreError {
    match error {
        StoreError::Unavailable(error) | StoreError::Refused(error) => StoreError::Ambiguous(error),
        StoreError::Closed => StoreError::Ambiguous(sqlx::Error::PoolClosed),
        doubtful => doubtful,
    }
}

/// From the second statement of a batch on, the first has happened.
pub(super) fn doubt_after(nth_round: usize) -> fn(StoreError) -> StoreError {
    if nth_round > 0 {
        in_doubt
    } else {
        |error| error
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use uuid::Uuid;

    use super::*;
    use crate::domain::key::IdempotencyKey;
    use crate::domain::scope::{PoolId, TenantScope};

    fn key(text: &str) -> RecordKey {
        RecordKey {
            tenant: TenantScope::stored("t"),
            pool: PoolId::stored("p"),
            key: IdempotencyKey::from_text(text).unwrap().unwrap(),
        }
    }

    proptest! {
        #[test]
        fn rounds_hold_everything_once_in_order_and_repeats_later(
            picks in proptest::collection::vec((0u8..6, 0u128..3), 0..40),
        ) {
            let items: Vec<(RecordKey, AttemptToken)> = picks.iter()
                .map(|(k, t)| (key(&format!("k{k}")), AttemptToken(Uuid::from_u128(*t))))
                .collect();
            let rounds = rounds(&items, |(key, token)| (key, *token));
            let mut seen: Vec<usize> = Vec::new();
            for round in &rounds {
                for pair in round.windows(2) {
                    let (a, b) = (&items[pair[0]], &items[pair[1]]);
                    prop_assert!((&a.0, a.1.0) < (&b.0, b.1.0));
                }
                for index in round {
                    let repeats = |earlier: &usize| items[*earlier] == items[*index];
                    prop_assert!(seen.iter().filter(|e| repeats(e)).all(|e| e < index));
                    seen.push(*index);
                }
            }
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..items.len()).collect::<Vec<_>>());
        }
    }
}
