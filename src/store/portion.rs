//! How many rows with bodies are asked for in one statement.
//!
//! Bodies have no bound but the configuration's, so a statement for many of them can take too long
//! where each alone would not. Whatever fails is asked for in halves from then on, down to one at a
//! time; whatever succeeds doubles the portion again.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::StoreError;

/// See the module.
pub struct Portion {
    max: usize,
    size: AtomicUsize,
}

impl Portion {
    /// At most `max` at once, which it begins with.
    pub fn new(max: usize) -> Self {
        let size = AtomicUsize::new(max);
        Self { max, size }
    }

    /// The next one of `rest`, and what is left of it then.
    pub fn split<'a, T>(&self, rest: &'a [T]) -> (&'a [T], &'a [T]) {
        let size = self.size.load(Ordering::Relaxed);
        rest.split_at(size.min(rest.len()))
    }

    /// Takes in how a portion ended. `true`: it may have been too much at once, and others may
    /// not be.
    pub fn hear<T>(&self, ended: &Result<T, StoreError>) -> bool {
        let size = self.size.load(Ordering::Relaxed);
        let (next, too_much) = match ended {
            Ok(_) => (size.saturating_mul(2).min(self.max), false),
            Err(StoreError::Ambiguous(_) | StoreError::Unavailable(_)) => ((size / 2).max(1), true),
            Err(_) => (size, false),
        };
        self.size.store(next, Ordering::Relaxed);
        too_much
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fails_halves_it_down_to_one_and_what_succeeds_doubles_it_again() {
        let portion = Portion::new(4);
        let sizes: Vec<usize> = [false, false, false, true, true, true]
            .map(|succeeds| {
                let ended = succeeds.then_some(());
                let ended = ended.ok_or_else(|| StoreError::Ambiguous(sqlx::Error::WorkerCrashed));
                assert_eq!(portion.hear(&ended), !succeeds);
                portion.split(&[0; 9]).0.len()
            })
            .to_vec();
        assert_eq!(sizes, [2, 1, 1, 2, 4, 4]);
    }
}
