//! A token bucket: tries in a second.

use std::time::Duration;

use tokio::time::Instant;

/// Fills at its rate, up to what one second brings, and starts full.
#[derive(Clone, Copy, Debug)]
pub struct Bucket {
    per_second: f64,
    tokens: f64,
    at: Instant,
}

impl Bucket {
    /// `per_second`: above zero.
    #[must_use]
    pub fn new(per_second: f64, now: Instant) -> Self {
        Self {
            per_second,
            tokens: Self::burst(per_second),
            at: now,
        }
    }

    /// Tries that may begin now.
    #[must_use]
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "never below zero, and a cast of a float saturates"
    )]
    pub fn room(&self, now: Instant) -> usize {
        self.filled(now) as usize
    }

    /// Takes a token. False: there is none.
    pub fn take(&mut self, now: Instant) -> bool {
        let tokens = self.filled(now);
        let taken = tokens >= 1.0;
        self.tokens = if taken { tokens - 1.0 } else { tokens };
        self.at = now;
        taken
    }

    /// When there is room again; zero if there is.
    #[must_use]
    pub fn wait(&self, now: Instant) -> Duration {
        let missing = (1.0 - self.filled(now)).max(0.0);
        Duration::try_from_secs_f64(missing / self.per_second).unwrap_or(Duration::MAX)
    }

    /// At least one, so that a slow rate lets something pass.
    fn burst(per_second: f64) -> f64 {
        per_second.max(1.0)
    }

    fn filled(&self, now: Instant) -> f64 {
        let elapsed = now.saturating_duration_since(self.at).as_secs_f64();
        (self.tokens + elapsed * self.per_second).min(Self::burst(self.per_second))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_lets_pass_what_the_rate_says_and_no_more_is_saved_up() {
        let mut now = Instant::now();
        let mut bucket = Bucket::new(5.0, now);
        let mut passed = 0;
        for _ in 0..100 {
            passed += usize::from(bucket.take(now));
            now += Duration::from_millis(50);
        }
        // Five at once, then five a second for five seconds.
        assert!((29..=30).contains(&passed), "{passed}");
        now += Duration::from_hours(1);
        assert_eq!(bucket.room(now), 5);
    }

    #[test]
    fn a_rate_below_one_lets_one_pass_at_a_time() {
        let mut now = Instant::now();
        let mut bucket = Bucket::new(0.5, now);
        assert!(bucket.take(now));
        assert_eq!((bucket.room(now), bucket.take(now)), (0, false));
        assert_eq!(bucket.wait(now), Duration::from_secs(2));
        now += Duration::from_millis(2_001);
        assert!(bucket.take(now));
    }
}
