//! `[outbox]` and `[keep]`: how intents are sent, and how long what is over is kept.

use std::time::Duration;

use super::parse::{DURATION_MAX, DURATION_MIN};
use super::report::Report;
use super::section::Section;
use super::value::Read;
use super::{Keep, OutboxConfig};

/// The shortest claim: it is extended at a third of it, and each time is a round trip to the store.
pub const CLAIM_LEASE_MIN: Duration = Duration::from_millis(1500);
/// The longest claim: so long does an intent wait whose worker died.
pub const CLAIM_LEASE_MAX: Duration = Duration::from_hours(1);
/// The longest interval between two looks at the store.
const POLL_INTERVAL_MAX: Duration = Duration::from_mins(10);

/// Values of the outbox that others must agree with.
pub(super) struct OutboxCompared {
    pub(super) claim_lease: Read<Duration>,
    pub(super) in_flight_max: Read<usize>,
    pub(super) in_flight_per_tenant_max: Read<usize>,
}

/// Times after which what is over goes.
pub(super) struct KeepCompared {
    pub(super) runs: Read<Duration>,
    pub(super) dead: Read<Duration>,
}

pub(super) fn read_outbox(
    mut section: Section<'_>,
    report: &mut Report,
) -> (OutboxConfig, OutboxCompared) {
    let polls = DURATION_MIN..=POLL_INTERVAL_MAX;
    let poll_interval = section.duration("poll_interval", "500ms", polls).value;
    let leases = CLAIM_LEASE_MIN..=CLAIM_LEASE_MAX;
    let compared = OutboxCompared {
        claim_lease: section.duration("claim_lease", "15s", leases),
        in_flight_max: section.count("in_flight_max", "256", 1..=100_000),
        in_flight_per_tenant_max: section.count("in_flight_per_tenant_max", "64", 1..=100_000),
    };
    let outbox = OutboxConfig {
        poll_interval,
        claim_lease: compared.claim_lease.value,
        in_flight_max: compared.in_flight_max.value,
        in_flight_per_tenant_max: compared.in_flight_per_tenant_max.value,
        concurrency_max: section.count("concurrency_max", "16", 1..=100_000).value,
        allow_urls: section.switch("allow_urls", "false").value,
        breaker_faults: section.count("breaker_faults", "5", 1..=1000).value,
        breaker_open: section
            .duration("breaker_open", "30s", DURATION_MIN..=POLL_INTERVAL_MAX)
            .value,
    };
    report.merge(section.finish());
    (outbox, compared)
}

pub(super) fn read_keep(mut section: Section<'_>, report: &mut Report) -> (Keep, KeepCompared) {
    let times = DURATION_MIN..=DURATION_MAX;
    let compared = KeepCompared {
        runs: section.duration("runs", "30d", times.clone()),
        dead: section.duration("dead", "30d", times),
    };
    report.merge(section.finish());
    let keep = Keep {
        runs: compared.runs.value,
        dead: compared.dead.value,
    };
    (keep, compared)
}
