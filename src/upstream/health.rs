//! Whether a target can be reached, judged by how connecting to it went.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// How long a target that could not be reached is passed over, at first.
const EJECTION_MIN: Duration = Duration::from_secs(1);
/// The same, after many failures in a row.
const EJECTION_MAX: Duration = Duration::from_secs(30);

/// See the module.
#[derive(Default)]
pub(super) struct Health(Mutex<State>);

#[derive(Default)]
struct State {
    failures: u32,
    ejected_until: Option<Instant>,
}

impl Health {
    /// Whether to pass it over, if there is another one.
    pub(super) fn is_ejected(&self) -> bool {
        let until = self.state().ejected_until;
        until.is_some_and(|until| Instant::now() < until)
    }

    /// It could not be reached: passes it over, twice as long with each failure in a row.
    pub(super) fn eject(&self) {
        let mut state = self.state();
        state.failures = state.failures.saturating_add(1);
        state.pause();
    }

    /// It is about to be tried. If it was ejected, others wait for what comes of that.
    pub(super) fn probe(&self) {
        let mut state = self.state();
        if state.failures > 0 {
            state.pause();
        }
    }

    /// It answered.
    pub(super) fn recover(&self) {
        *self.state() = State::default();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn pause(&mut self) {
        let doublings = self.failures.saturating_sub(1).min(16);
        let pause = (EJECTION_MIN * 2_u32.pow(doublings)).min(EJECTION_MAX);
        self.ejected_until = Some(Instant::now() + pause);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How long it is passed over from now on.
    async fn ejected_for(health: &Health) -> Duration {
        let start = Instant::now();
        while health.is_ejected() {
            tokio::time::advance(Duration::from_millis(500)).await;
        }
        start.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn each_failure_in_a_row_ejects_for_twice_as_long_up_to_a_limit() {
        let health = Health::default();
        assert!(!health.is_ejected());
        for seconds in [1, 2, 4, 8, 16, 30, 30] {
            health.eject();
            assert_eq!(ejected_for(&health).await, Duration::from_secs(seconds));
        }
        health.recover();
        health.eject();
        assert_eq!(ejected_for(&health).await, Duration::from_secs(1));
        for _ in 0..100 {
            health.eject();
        }
        assert_eq!(ejected_for(&health).await, Duration::from_secs(30));
    }

    #[tokio::test(start_paused = true)]
    async fn only_one_call_tries_a_target_whose_ejection_is_over() {
        let health = Health::default();
        health.probe();
        assert!(!health.is_ejected(), "it never failed");
        health.eject();
        tokio::time::advance(EJECTION_MIN).await;
        assert!(!health.is_ejected());
        health.probe();
        assert!(health.is_ejected());
        health.recover();
        assert!(!health.is_ejected());
    }
}
