//! Metric names. [`describe`] gives Prometheus their help texts.

use metrics::Unit;

/// Guarded requests with a key, by `pool` and the `status` that `Idempotency-Status` told.
pub const GUARDED_REQUESTS: &str = "oncegate_guarded_requests_total";
/// Calls of guarded requests to upstreams, by `pool` and `outcome`.
pub const UPSTREAM_CALLS: &str = "oncegate_upstream_calls_total";
/// From the first byte sent to the last received of a guarded call, by `pool`.
pub const UPSTREAM_SECONDS: &str = "oncegate_upstream_seconds";
/// From the claim to the committed decision, by `pool`.
pub const OWNER_SECONDS: &str = "oncegate_owner_seconds";
/// Duplicates that are parked now.
pub const WAITERS: &str = "oncegate_waiters";
/// Owners that are at work now.
pub const OWNERS: &str = "oncegate_owners";
/// Owners that found their token stale.
pub const STALE_OWNER: &str = "oncegate_stale_owner_total";
/// Owners that were dropped without settling.
pub const DANGLING_OWNER: &str = "oncegate_dangling_owner_total";
/// Answers that reached their client before their commit, by `result` of the later commit.
pub const UNRECORDED: &str = "oncegate_unrecorded_total";
/// Records that the sweep moved, by state `to`.
pub const SWEPT: &str = "oncegate_swept_total";
/// Rows that retention deleted, by `table`.
pub const PURGED: &str = "oncegate_purged_total";
/// Records whose outcome is unknown.
pub const UNKNOWN_RECORDS: &str = "oncegate_unknown_records";
/// Age of the oldest record whose owner is at work, in seconds.
pub const OLDEST_PENDING_SECONDS: &str = "oncegate_oldest_pending_seconds";
/// Store operations, by `operation`.
pub const STORE_SECONDS: &str = "oncegate_store_seconds";
/// Store operations that gave no result, by `operation` and `kind`.
pub const STORE_ERRORS: &str = "oncegate_store_errors_total";
/// Look-ups in the cache of decisions, by `result`.
pub const CACHE_LOOKUPS: &str = "oncegate_cache_lookups_total";
/// Memory that the cache of decisions holds, in bytes.
pub const CACHE_BYTES: &str = "oncegate_cache_bytes";
/// Memory that request bodies of owners and waiters hold, in bytes.
pub const BODY_BYTES: &str = "oncegate_body_bytes";
/// Wake-ups from other gateways, by `kind`.
pub const WAKEUPS: &str = "oncegate_wakeups_total";
/// Connections of clients that are open now.
pub const CLIENT_CONNECTIONS: &str = "oncegate_client_connections";
/// Connections to upstreams that are open now, by `pool`.
pub const UPSTREAM_CONNECTIONS: &str = "oncegate_upstream_connections";
/// Connections to the store, by `state`.
pub const STORE_CONNECTIONS: &str = "oncegate_store_connections";
/// Rounds of background workers, by `worker` and `result`.
pub const WORKER_ROUNDS: &str = "oncegate_worker_rounds_total";

/// Ticks of runs, by `result`: `committed`, `conflict`, `unchanged`, `refused`, `failed`.
pub const RUN_TICKS: &str = "oncegate_run_ticks_total";
/// Results whose stamp was late or foreign.
pub const STALE_STAMPS: &str = "oncegate_stale_stamps_total";
/// Runs that are not final, by `status`.
pub const RUNS: &str = "oncegate_runs";
/// Intents, by `status`; each counted up to 100,000.
pub const OUTBOX_INTENTS: &str = "oncegate_outbox_intents";
/// Since when the turn of the oldest unsent intent has come, in seconds.
pub const OUTBOX_OLDEST_SECONDS: &str = "oncegate_outbox_oldest_seconds";
/// Tries of intents, by `destination` (a configured id, else `pool`, `url` or `task`) and
/// `outcome`.
pub const OUTBOX_ATTEMPTS: &str = "oncegate_outbox_attempts_total";
/// How long tries of intents took, by `destination`.
pub const OUTBOX_SECONDS: &str = "oncegate_outbox_seconds";
/// Intents that are being sent now.
pub const OUTBOX_IN_FLIGHT: &str = "oncegate_outbox_in_flight";
/// Intents that were given up, by `status` that they went to.
pub const OUTBOX_GIVEN_UP: &str = "oncegate_outbox_given_up_total";
/// Whether a destination's breaker is open (1), on probation (0.5) or closed (0), by
/// `destination`.
pub const BREAKER_OPEN: &str = "oncegate_breaker_open";

/// Always 1; its label `version` is the program's.
pub const BUILD_INFO: &str = "oncegate_build_info";

use Instrument::{Counter, Gauge, Histogram};

enum Instrument {
    Counter,
    Gauge,
    Histogram,
}

const HELP: [(Instrument, &str, Unit, &str); 34] = [
    (
        Counter,
        GUARDED_REQUESTS,
        Unit::Count,
        "Guarded requests with a key, by pool and the status that Idempotency-Status told.",
    ),
    (
        Counter,
        UPSTREAM_CALLS,
        Unit::Count,
        "Calls of guarded requests to upstreams, by pool and outcome.",
    ),
    (
        Histogram,
        UPSTREAM_SECONDS,
        Unit::Seconds,
        "From the first byte sent to the last received of a guarded call, by pool.",
    ),
    (
        Histogram,
        OWNER_SECONDS,
        Unit::Seconds,
        "From the claim to the committed decision, by pool.",
    ),
    (
        Gauge,
        WAITERS,
        Unit::Count,
        "Duplicates that are parked now.",
    ),
    (Gauge, OWNERS, Unit::Count, "Owners that are at work now."),
    (
        Counter,
        STALE_OWNER,
        Unit::Count,
        "Owners that found their token stale.",
    ),
    (
        Counter,
        DANGLING_OWNER,
        Unit::Count,
        "Owners that were dropped without settling.",
    ),
    (
        Counter,
        UNRECORDED,
        Unit::Count,
        "Answers that reached their client before their commit, by result of the later commit.",
    ),
    (
        Counter,
        SWEPT,
        Unit::Count,
        "Records that the sweep moved, by state to.",
    ),
    (
        Counter,
        PURGED,
        Unit::Count,
        "Rows that retention deleted, by table.",
    ),
    (
        Gauge,
        UNKNOWN_RECORDS,
        Unit::Count,
        "Records whose outcome is unknown.",
    ),
    (
        Gauge,
        OLDEST_PENDING_SECONDS,
        Unit::Seconds,
        "Age of the oldest record whose owner is at work, in seconds.",
    ),
    (
        Histogram,
        STORE_SECONDS,
        Unit::Seconds,
        "Store operations, by operation.",
    ),
    (
        Counter,
        STORE_ERRORS,
        Unit::Count,
        "Store operations that gave no result, by operation and kind.",
    ),
    (
        Counter,
        CACHE_LOOKUPS,
        Unit::Count,
        "Look-ups in the cache of decisions, by result.",
    ),
    (
        Gauge,
        CACHE_BYTES,
        Unit::Bytes,
        "Memory that the cache of decisions holds, in bytes.",
    ),
    (
        Gauge,
        BODY_BYTES,
        Unit::Bytes,
        "Memory that request bodies of owners and waiters hold, in bytes.",
    ),
    (
        Counter,
        WAKEUPS,
        Unit::Count,
        "Wake-ups from other gateways, by kind.",
    ),
    (
        Gauge,
        CLIENT_CONNECTIONS,
        Unit::Count,
        "Connections of clients that are open now.",
    ),
    (
        Gauge,
        UPSTREAM_CONNECTIONS,
        Unit::Count,
        "Connections to upstreams that are open now, by pool.",
    ),
    (
        Gauge,
        STORE_CONNECTIONS,
        Unit::Count,
        "Connections to the store, by state.",
    ),
    (
        Counter,
        WORKER_ROUNDS,
        Unit::Count,
        "Rounds of background workers, by worker and result.",
    ),
    (Counter, RUN_TICKS, Unit::Count, "Ticks of runs, by result."),
    (
        Counter,
        STALE_STAMPS,
        Unit::Count,
        "Results whose stamp was late or foreign.",
    ),
    (
        Gauge,
        RUNS,
        Unit::Count,
        "Runs that are not final, by status.",
    ),
    (
        Gauge,
        OUTBOX_INTENTS,
        Unit::Count,
        "Intents, by status; each counted up to 100,000.",
    ),
    (
        Gauge,
        OUTBOX_OLDEST_SECONDS,
        Unit::Seconds,
        "Since when the turn of the oldest unsent intent has come.",
    ),
    (
        Counter,
        OUTBOX_ATTEMPTS,
        Unit::Count,
        "Tries of intents, by destination and outcome.",
    ),
    (
        Histogram,
        OUTBOX_SECONDS,
        Unit::Seconds,
        "How long tries of intents took, by destination.",
    ),
    (
        Gauge,
        OUTBOX_IN_FLIGHT,
        Unit::Count,
        "Intents that are being sent now.",
    ),
    (
        Counter,
        OUTBOX_GIVEN_UP,
        Unit::Count,
        "Intents that were given up, by the status that they went to.",
    ),
    (
        Gauge,
        BREAKER_OPEN,
        Unit::Count,
        "Whether a destination's breaker is open (1), on probation (0.5) or closed (0).",
    ),
    (
        Gauge,
        BUILD_INFO,
        Unit::Count,
        "Always 1; its label version is the program's.",
    ),
];

/// Registers every help text.
pub fn describe() {
    for (instrument, name, unit, help) in HELP {
        match instrument {
            Counter => metrics::describe_counter!(name, unit, help),
            Gauge => metrics::describe_gauge!(name, unit, help),
            Histogram => metrics::describe_histogram!(name, unit, help),
        }
    }
    // Rare ones begin at zero, so that their first increase is seen.
    for name in [STALE_OWNER, DANGLING_OWNER] {
        metrics::counter!(name).absolute(0);
    }
    for to in ["failed_before_commit", "outcome_unknown"] {
        metrics::counter!(SWEPT, "to" => to).absolute(0);
    }
    for result in ["committed", "stale", "lost", "no_room"] {
        metrics::counter!(UNRECORDED, "result" => result).absolute(0);
    }
}
