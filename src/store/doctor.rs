//! What can be told of a store's health: for `oncegate doctor` and the admin API.
//!
//! It changes nothing. `bad` is what keeps the gateway from keeping its promise; `warn` is what a
//! person should look at.

use std::time::Duration;

use time::OffsetDateTime;
use tokio::time::Instant;

use super::{Store, StoreError};
use crate::domain::intent::IntentStatus;
use crate::domain::run::RunStatus;
use crate::telemetry::Chain;

/// From when on something that waits is worth a look, and from when on nobody works on it.
const WAITING: [Duration; 2] = [Duration::from_mins(5), Duration::from_hours(1)];

/// How something is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Health {
    /// As it should be.
    Good,
    /// A person should look at it.
    Warn,
    /// It keeps the gateway from keeping its promise.
    Bad,
}

impl Health {
    /// The word for it.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Good => "good",
            Self::Warn => "warn",
            Self::Bad => "bad",
        }
    }
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What.
    pub check: &'static str,
    /// How it is.
    pub health: Health,
    /// More about it, and what to do.
    pub says: String,
}

impl Finding {
    /// A finding.
    pub fn new(check: &'static str, health: Health, says: impl Into<String>) -> Self {
        let says = says.into();
        Self {
            check,
            health,
            says,
        }
    }
}

/// Looks at a store that is open. `wall` is this machine's clock, `lease_min` the shortest lease
/// of any owner or claim. What can't be asked is a finding too.
pub async fn examine(
    store: &dyn Store,
    wall: fn() -> OffsetDateTime,
    lease_min: Duration,
) -> Vec<Finding> {
    let mut findings = vec![clock(store, wall, lease_min).await];
    if findings[0].check == "store" {
        // Nothing else would get an answer.
        return findings;
    }
    let own = store.doctor().await;
    findings.extend(own.unwrap_or_else(|error| vec![unanswered("server", &error)]));
    match store.warnings().await {
        Ok(warnings) if warnings.is_empty() => {
            findings.push(Finding::new(
                "settings",
                Health::Good,
                "nothing weakens the promise",
            ));
        }
        Ok(warnings) => findings.extend(
            warnings
                .into_iter()
                .map(|warning| Finding::new("settings", Health::Warn, warning)),
        ),
        Err(error) => findings.push(unanswered("settings", &error)),
    }
    findings.extend(records(store).await);
    findings.extend(outbox(store).await);
    findings.push(pauses(store).await);
    findings
}

async fn clock(store: &dyn Store, wall: fn() -> OffsetDateTime, lease_min: Duration) -> Finding {
    let begun = Instant::now();
    let before = wall();
    match store.ping().await {
        Ok(theirs) => judge_clock(before, theirs, begun.elapsed(), lease_min),
        Err(error) => unanswered("store", &error),
    }
}

/// The store's present was read somewhere within `took` after `before`.
fn judge_clock(
    before: OffsetDateTime,
    theirs: OffsetDateTime,
    took: Duration,
    lease_min: Duration,
) -> Finding {
    let apart = (theirs - (before + took / 2)).unsigned_abs();
    // As exact as the round trip lets it be.
    let surely = apart.saturating_sub(took / 2);
    let apart_ms = apart.as_millis();
    let says = format!(
        "the store's clock and this machine's differ by {apart_ms} ms, give or take {} ms; only the \
         store's counts, and with several database servers theirs must differ by less than a third \
         of the shortest lease ({})",
        (took / 2).as_millis(),
        humantime::format_duration(lease_min)
    );
    let health = if surely * 3 >= lease_min {
        Health::Warn
    } else {
        Health::Good
    };
    Finding::new("clock", health, says)
}

async fn records(store: &dyn Store) -> Vec<Finding> {
    let census = match store.census().await {
        Ok(census) => census,
        Err(error) => return vec![unanswered("records", &error)],
    };
    let pending = waiting(
        "pending",
        census.oldest_pending,
        "record whose owner is at work",
        "is a gateway running that sweeps?",
    );
    let unknown = count(
        "unknown",
        census.unknown,
        "records have an unknown outcome",
        "oncegate records find --status outcome_unknown",
    );
    vec![pending, unknown]
}

async fn outbox(store: &dyn Store) -> Vec<Finding> {
    let census = match store.outbox_census().await {
        Ok(census) => census,
        Err(error) => return vec![unanswered("outbox", &error)],
    };
    let intents = |wanted: IntentStatus| {
        let found = census.intents.iter().find(|(status, _)| *status == wanted);
        found.map_or(0, |(_, count)| *count)
    };
    let stuck = census
        .runs
        .iter()
        .find(|(status, _)| *status == RunStatus::Stuck);
    vec![
        waiting(
            "unsent",
            census.oldest_pending,
            "intent that is not delivered",
            "is a gateway running, is its destination up, or is it paused? oncegate outbox \
             destinations",
        ),
        count(
            "dead",
            intents(IntentStatus::Dead),
            "intents were given up",
            "oncegate outbox list --status dead",
        ),
        count(
            "quarantined",
            intents(IntentStatus::Quarantined),
            "intents are kept back because their claims end without a word",
            "oncegate outbox list --status quarantined",
        ),
        count(
            "stuck",
            stuck.map_or(0, |(_, count)| *count),
            "runs are stuck",
            "oncegate runs list --status stuck",
        ),
    ]
}

/// How many, and no names: a host or a queue may be a tenant's secret.
async fn pauses(store: &dyn Store) -> Finding {
    match store.paused().await {
        Ok(paused) => count(
            "paused",
            paused.len() as u64,
            "destinations are paused",
            "oncegate outbox destinations",
        ),
        Err(error) => unanswered("paused", &error),
    }
}

fn waiting(check: &'static str, age: Option<Duration>, what: &str, ask: &str) -> Finding {
    let Some(age) = age else {
        return Finding::new(check, Health::Good, format!("there is no {what}"));
    };
    let whole = humantime::format_duration(Duration::from_secs(age.as_secs()));
    let says = format!("the oldest {what} waits for {whole}");
    let [late, lost] = WAITING;
    match age {
        age if age >= lost => Finding::new(check, Health::Bad, format!("{says}; {ask}")),
        age if age >= late => Finding::new(check, Health::Warn, format!("{says}; {ask}")),
        _ => Finding::new(check, Health::Good, says),
    }
}

fn count(check: &'static str, count: u64, what: &str, look: &str) -> Finding {
    if count == 0 {
        Finding::new(check, Health::Good, format!("no {what}"))
    } else {
        Finding::new(check, Health::Warn, format!("{count} {what}: {look}"))
    }
}

/// What the store did not tell.
pub(super) fn unanswered(check: &'static str, error: &StoreError) -> Finding {
    Finding::new(check, Health::Bad, Chain(error).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_is_surely_off_by_a_third_of_the_lease_is_told() {
        let at = OffsetDateTime::UNIX_EPOCH;
        let judge = |apart_ms: u64, took_ms: u64| {
            let theirs = at + Duration::from_millis(apart_ms);
            let took = Duration::from_millis(took_ms);
            judge_clock(at, theirs, took, Duration::from_secs(3)).health
        };
        assert_eq!(judge(0, 0), Health::Good);
        assert_eq!(judge(999, 0), Health::Good);
        assert_eq!(judge(1000, 0), Health::Warn);
        // A slow round trip proves nothing.
        assert_eq!(judge(1000, 2000), Health::Good);
        assert_eq!(judge(9000, 2000), Health::Warn);
    }

    #[test]
    fn what_waits_for_long_is_told_and_for_too_long_is_bad() {
        let minutes = |minutes| waiting("c", Some(Duration::from_mins(minutes)), "w", "a").health;
        assert_eq!(waiting("c", None, "w", "a").health, Health::Good);
        assert_eq!(minutes(4), Health::Good);
        assert_eq!(minutes(5), Health::Warn);
        assert_eq!(minutes(60), Health::Bad);
    }
}
