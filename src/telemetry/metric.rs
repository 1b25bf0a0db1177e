//! Metric names, each with the help text that [`describe`] gives Prometheus.

use metrics::Unit;

enum Instrument {
    Counter,
    Gauge,
    Histogram,
}

/// Makes of each line a constant, whose documentation is the help text, and a row of `HELP`.
macro_rules! names {
    ($($instrument:ident $unit:ident $constant:ident = $name:literal, $help:literal;)*) => {
        $(
            #[doc = $help]
            pub const $constant: &str = $name;
        )*

        const HELP: &[(Instrument, &str, Unit, &str)] =
            &[$((Instrument::$instrument, $constant, Unit::$unit, $help)),*];
    };
}

names! {
    Counter Count GUARDED_REQUESTS = "oncegate_guarded_requests_total",
        "Guarded requests with a key, by pool and the status that Idempotency-Status told.";
    Counter Count UPSTREAM_CALLS = "oncegate_upstream_calls_total",
        "Calls of guarded requests to upstreams, by pool and outcome.";
    Histogram Seconds UPSTREAM_SECONDS = "oncegate_upstream_seconds",
        "From the first byte sent to the last received of a guarded call, by pool.";
    Histogram Seconds OWNER_SECONDS = "oncegate_owner_seconds",
        "From the claim to the committed decision, by pool.";
    Gauge Count WAITERS = "oncegate_waiters",
        "Duplicates that are parked now.";
    Gauge Count OWNERS = "oncegate_owners",
        "Owners that are at work now.";
    Counter Count STALE_OWNER = "oncegate_stale_owner_total",
        "Owners that found their token stale.";
    Counter Count DANGLING_OWNER = "oncegate_dangling_owner_total",
        "Owners that were dropped without settling.";
    Counter Count UNRECORDED = "oncegate_unrecorded_total",
        "Answers that reached their client before their commit, by result of the later commit.";
    Counter Count SWEPT = "oncegate_swept_total",
        "Records that the sweep moved, by state to.";
    Counter Count PURGED = "oncegate_purged_total",
        "Rows that retention deleted, by table.";
    Gauge Count UNKNOWN_RECORDS = "oncegate_unknown_records",
        "Records whose outcome is unknown.";
    Gauge Seconds OLDEST_PENDING_SECONDS = "oncegate_oldest_pending_seconds",
        "Age of the oldest record whose owner is at work, in seconds.";
    Histogram Seconds STORE_SECONDS = "oncegate_store_seconds",
        "Store operations, by operation.";
    Counter Count STORE_ERRORS = "oncegate_store_errors_total",
        "Store operations that gave no result, by operation and kind.";
    Counter Count CACHE_LOOKUPS = "oncegate_cache_lookups_total",
        "Look-ups in the cache of decisions, by result.";
    Gauge Bytes CACHE_BYTES = "oncegate_cache_bytes",
        "Memory that the cache of decisions holds, in bytes.";
    Gauge Bytes BODY_BYTES = "oncegate_body_bytes",
        "Memory that request bodies of owners and waiters hold, in bytes.";
    Counter Count WAKEUPS = "oncegate_wakeups_total",
        "Wake-ups from other gateways, by kind.";
    Gauge Count CLIENT_CONNECTIONS = "oncegate_client_connections",
        "Connections of clients that are open now.";
    Gauge Count UPSTREAM_CONNECTIONS = "oncegate_upstream_connections",
        "Connections to upstreams that are open now, by pool.";
    Gauge Count STORE_CONNECTIONS = "oncegate_store_connections",
        "Connections to the store, by state.";
    Counter Count WORKER_ROUNDS = "oncegate_worker_rounds_total",
        "Rounds of background workers, by worker and result.";
    Counter Count RUN_TICKS = "oncegate_run_ticks_total",
        "Ticks of runs, by result.";
    Counter Count STALE_STAMPS = "oncegate_stale_stamps_total",
        "Results whose stamp was late or foreign.";
    Gauge Count RUNS = "oncegate_runs",
        "Runs that are not final, by status.";
    Gauge Count OUTBOX_INTENTS = "oncegate_outbox_intents",
        "Intents, by status; each counted up to 100,000.";
    Gauge Seconds OUTBOX_OLDEST_SECONDS = "oncegate_outbox_oldest_seconds",
        "Since when the turn of the oldest unsent intent has come.";
    Counter Count OUTBOX_ATTEMPTS = "oncegate_outbox_attempts_total",
        "Tries of intents, by destination and outcome.";
    Histogram Seconds OUTBOX_SECONDS = "oncegate_outbox_seconds",
        "How long tries of intents took, by destination.";
    Gauge Count OUTBOX_IN_FLIGHT = "oncegate_outbox_in_flight",
        "Intents that are being sent now.";
    Counter Count OUTBOX_GIVEN_UP = "oncegate_outbox_given_up_total",
        "Intents that were given up, by the status that they went to.";
    Gauge Count BREAKER_OPEN = "oncegate_breaker_open",
        "Whether a destination's breaker is open (1), on probation (0.5) or closed (0).";
    Gauge Count BUILD_INFO = "oncegate_build_info",
        "Always 1; its label version is the program's.";
}

/// Registers every help text.
pub fn describe() {
    for (instrument, name, unit, help) in HELP {
        match instrument {
            Instrument::Counter => metrics::describe_counter!(*name, *unit, *help),
            Instrument::Gauge => metrics::describe_gauge!(*name, *unit, *help),
            Instrument::Histogram => metrics::describe_histogram!(*name, *unit, *help),
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
