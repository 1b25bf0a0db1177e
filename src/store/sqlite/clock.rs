//! The clock of one SQLite file: it never runs backwards, also not over a restart.
//!
//! The wall clock is read once, at the start; from there on a monotonic clock counts. A wall clock
//! that jumps while the gateway runs moves no lease. What was seen last is kept in the file, so a
//! wall clock that is behind at the next start can't bring a lease or a validity back.

use std::time::{Duration, Instant, SystemTime};

/// How far the instants that were committed may be ahead of the one that the file remembers,
/// in milliseconds: writing it along with every commit would cost a page each.
pub const SEEN_EVERY_MS: i64 = 100;

/// Milliseconds of Unix time, forwards only.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    started: Instant,
    started_ms: i64,
}

impl Clock {
    /// Starts from the wall clock, or from what the file has seen if that is later. Also tells by
    /// how much the wall clock is behind the file.
    #[must_use]
    pub fn start(seen_ms: i64) -> (Self, Duration) {
        Self::start_at(wall_ms(), seen_ms)
    }

    fn start_at(wall_ms: i64, seen_ms: i64) -> (Self, Duration) {
        let behind = u64::try_from(seen_ms.saturating_sub(wall_ms)).unwrap_or_default();
        let clock = Self {
            started: Instant::now(),
            started_ms: wall_ms.max(seen_ms.saturating_add(SEEN_EVERY_MS)),
        };
        (clock, Duration::from_millis(behind))
    }

    /// The present.
    #[must_use]
    pub fn now_ms(&self) -> i64 {
        let since = i64::try_from(self.started.elapsed().as_millis()).unwrap_or(i64::MAX);
        self.started_ms.saturating_add(since)
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "the one reading of the wall clock, at the start"
)]
fn wall_ms() -> i64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let since = since.unwrap_or_default().as_millis();
    i64::try_from(since).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_starts_from_the_wall_or_from_what_was_seen_whichever_is_later() {
        let (clock, behind) = Clock::start_at(1_000_000, 0);
        assert_eq!(behind, Duration::ZERO);
        assert!((1_000_000..1_010_000).contains(&clock.now_ms()));

        let (clock, behind) = Clock::start_at(1_000_000, 1_600_000);
        assert_eq!(behind, Duration::from_mins(10));
        assert!((1_600_000 + SEEN_EVERY_MS..1_610_000).contains(&clock.now_ms()));
    }

    #[test]
    fn what_was_committed_after_the_last_note_is_not_in_the_future() {
        let committed = 1_000_000 + SEEN_EVERY_MS;
        let (clock, _) = Clock::start_at(1_000_000, 1_000_000);
        assert!(clock.now_ms() >= committed);
    }
}
