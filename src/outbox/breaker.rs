//! The breaker of a destination: faults in a row open it, a pause later one probe decides.
//!
//! It knows no clock and no randomness: both come in. While it is open nothing is sent, and what
//! meets it costs no attempt.

use std::time::Duration;

use tokio::time::Instant;

/// The longest that a breaker stays open, before jitter.
pub const OPEN_MAX: Duration = Duration::from_mins(10);
/// How far the time that it stays open is from its nominal length, as a part of it.
const JITTER: f64 = 0.25;

/// When a breaker opens, and for how long.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Faults in a row that open it.
    pub faults: u32,
    /// How long it stays open at first; it doubles up to [`OPEN_MAX`].
    pub open: Duration,
}

/// A destination's breaker.
#[derive(Clone, Copy, Debug)]
pub struct Breaker {
    rules: Rules,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    /// Everything passes.
    Closed { faults: u32 },
    /// Nothing passes until then; then one probe.
    Open { until: Instant, openings: u32 },
    /// One probe is on its way, and nothing else passes.
    Probing { openings: u32 },
}

/// How much may pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Passage {
    /// As much as there is.
    Free,
    /// One, to find out.
    Probe,
    /// Nothing; ask again after this.
    Shut(Duration),
}

/// What a try says about its destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// It answered.
    Works,
    /// It did not, or said that it can't.
    Fails,
    /// Nothing: nothing was sent, or it was cut off here.
    Nothing,
}

impl Breaker {
    /// A closed one.
    #[must_use]
    pub fn new(rules: Rules) -> Self {
        let state = State::Closed { faults: 0 };
        Self { rules, state }
    }

    /// How much may pass now.
    #[must_use]
    pub fn passage(&self, now: Instant) -> Passage {
        match self.state {
            State::Closed { .. } => Passage::Free,
            State::Open { until, .. } if until <= now => Passage::Probe,
            State::Open { until, .. } => Passage::Shut(until - now),
            // The probe's own end tells; this only bounds how soon somebody asks again.
            State::Probing { .. } => Passage::Shut(self.rules.open),
        }
    }

    /// Lets one try pass, if one may. `Some(true)`: it is the probe.
    pub fn pass(&mut self, now: Instant) -> Option<bool> {
        match (self.passage(now), self.state) {
            (Passage::Free, _) => Some(false),
            (Passage::Probe, State::Open { openings, .. }) => {
                self.state = State::Probing { openings };
                Some(true)
            }
            _ => None,
        }
    }

    /// Takes in what a try that had passed says. `jitter`: from 0 to 1.
    pub fn hear(&mut self, word: Word, probe: bool, now: Instant, jitter: f64) {
        self.state = match (word, self.state) {
            // Also from a try that began before it opened: the destination answers now.
            (Word::Works, _) => State::Closed { faults: 0 },
            (Word::Fails, State::Closed { faults }) if faults + 1 < self.rules.faults => {
                State::Closed { faults: faults + 1 }
            }
            (Word::Fails, State::Closed { .. }) => self.open(0, now, jitter),
            (Word::Fails, State::Probing { openings }) if probe => self.open(openings, now, jitter),
            (Word::Nothing, State::Probing { openings }) if probe => State::Open {
                until: now,
                openings,
            },
            (_, state) => state,
        };
    }

    /// The gauge's value: closed 0, probing 0.5, open 1.
    #[must_use]
    pub fn gauge(&self) -> f64 {
        match self.state {
            State::Closed { .. } => 0.0,
            State::Probing { .. } => 0.5,
            State::Open { .. } => 1.0,
        }
    }

    /// `openings`: how often in a row it opened before.
    fn open(&self, openings: u32, now: Instant, jitter: f64) -> State {
        let doubled = 1_u32.checked_shl(openings).unwrap_or(u32::MAX);
        let nominal = self.rules.open.saturating_mul(doubled).min(OPEN_MAX);
        let spread = 1.0 - JITTER + 2.0 * JITTER * jitter.clamp(0.0, 1.0);
        State::Open {
            until: now + nominal.mul_f64(spread),
            openings: openings.saturating_add(1).min(31),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULES: Rules = Rules {
        faults: 3,
        open: Duration::from_secs(10),
    };

    fn opened(now: Instant) -> Breaker {
        let mut breaker = Breaker::new(RULES);
        for _ in 0..3 {
            assert_eq!(breaker.pass(now), Some(false));
            breaker.hear(Word::Fails, false, now, 0.5);
        }
        breaker
    }

    #[tokio::test(start_paused = true)]
    async fn only_faults_in_a_row_open_it() {
        let now = Instant::now();
        let mut breaker = Breaker::new(RULES);
        for word in [
            Word::Fails,
            Word::Fails,
            Word::Works,
            Word::Fails,
            Word::Fails,
        ] {
            breaker.hear(word, false, now, 0.5);
        }
        assert_eq!(breaker.passage(now), Passage::Free);
        breaker.hear(Word::Nothing, false, now, 0.5);
        assert_eq!(breaker.passage(now), Passage::Free);
        breaker.hear(Word::Fails, false, now, 0.5);
        assert_eq!(breaker.passage(now), Passage::Shut(RULES.open));
        assert_eq!(breaker.pass(now), None);
    }

    #[tokio::test(start_paused = true)]
    async fn after_the_pause_exactly_one_probe_passes_and_its_success_closes() {
        let mut breaker = opened(Instant::now());
        let later = Instant::now() + RULES.open;
        assert_eq!(breaker.passage(later), Passage::Probe);
        assert_eq!(breaker.pass(later), Some(true));
        assert_eq!(breaker.pass(later), None, "one probe at a time");
        breaker.hear(Word::Fails, false, later, 0.5);
        assert_eq!(
            breaker.pass(later),
            None,
            "an old try says nothing about it"
        );
        breaker.hear(Word::Works, true, later, 0.5);
        assert_eq!(breaker.pass(later), Some(false));
        assert_eq!(breaker.state, State::Closed { faults: 0 });
    }

    #[tokio::test(start_paused = true)]
    async fn failed_probes_double_the_pause_up_to_ten_minutes() {
        let mut now = Instant::now();
        let mut breaker = opened(now);
        for nominal_s in [10, 20, 40, 80, 160, 320, 600, 600] {
            let nominal = Duration::from_secs(nominal_s);
            assert_eq!(breaker.passage(now), Passage::Shut(nominal));
            now += nominal;
            assert_eq!(breaker.pass(now), Some(true));
            breaker.hear(Word::Fails, true, now, 0.5);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_probe_that_was_given_back_leaves_room_for_another() {
        let mut breaker = opened(Instant::now());
        let later = Instant::now() + RULES.open;
        assert_eq!(breaker.pass(later), Some(true));
        breaker.hear(Word::Nothing, true, later, 0.5);
        assert_eq!(breaker.passage(later), Passage::Probe);
    }

    #[tokio::test(start_paused = true)]
    async fn breakers_of_many_gateways_do_not_probe_at_one_moment() {
        let now = Instant::now();
        let shut = |jitter| {
            let mut breaker = Breaker::new(Rules { faults: 1, ..RULES });
            breaker.hear(Word::Fails, false, now, jitter);
            breaker.passage(now)
        };
        assert_eq!(shut(0.0), Passage::Shut(Duration::from_millis(7_500)));
        assert_eq!(shut(1.0), Passage::Shut(Duration::from_millis(12_500)));
    }
}
