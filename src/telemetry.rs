//! What the gateway tells about itself: metric names, each with its meaning, and the log.
//!
//! No tenant, key or id ever becomes a label; secrets and bodies never reach the log.

use std::error::Error;
use std::fmt;
use std::io::IsTerminal;
use std::time::Duration;

use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use tokio_util::sync::CancellationToken;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::config::{LogConfig, LogFormat};

/// How often [`upkeep`] runs. Until it does, every observation of a histogram is kept one by one.
const UPKEEP_INTERVAL: Duration = Duration::from_secs(5);

/// Upper bounds of the histograms in seconds: from a cached look-up to a patient upstream.
const SECONDS_BUCKETS: [f64; 17] = [
    0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0,
    60.0, 120.0,
];

/// The log or the metrics could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// The filter is none, which the configuration refuses before.
    #[error("the log filter can't be read")]
    Filter(#[from] tracing_subscriber::filter::ParseError),
    /// Something in this process already takes the log.
    #[error("the log is already set up in this process")]
    Log(#[from] tracing_subscriber::util::TryInitError),
    /// Something in this process already takes the metrics, or the buckets are none.
    #[error("the metrics can't be set up in this process")]
    Metrics(#[from] metrics_exporter_prometheus::BuildError),
}

/// An error with all its causes, one behind the other: how errors are logged. As a field of its
/// own kind an error would lose its causes in the JSON form.
#[derive(Clone, Copy, Debug)]
pub struct Chain<'a>(pub &'a dyn Error);

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)?;
        let mut cause = self.0.source();
        while let Some(error) = cause {
            write!(f, ": {error}")?;
            cause = error.source();
        }
        Ok(())
    }
}

/// Starts the log on standard error, coloured on a terminal only. Panics go to it too.
///
/// # Errors
/// When the filter is none, or the process already has a log.
pub fn start_log(log: &LogConfig) -> Result<(), TelemetryError> {
    let filter = EnvFilter::builder().parse(&log.filter)?;
    let colour = std::io::stderr().is_terminal();
    let registry = tracing_subscriber::registry().with(filter);
    match log.format {
        LogFormat::Text => registry
            .with(text_layer(std::io::stderr, colour))
            .try_init(),
        LogFormat::Json => registry.with(json_layer(std::io::stderr)).try_init(),
    }?;
    log_panics();
    Ok(())
}

/// Starts the metrics, for the whole process. [`upkeep`] must run as long as they do.
///
/// # Errors
/// When the process already has metrics.
pub fn start_metrics() -> Result<PrometheusHandle, TelemetryError> {
    let handle = builder()?.install_recorder()?;
    metric::describe();
    metrics::gauge!(metric::BUILD_INFO, "version" => env!("CARGO_PKG_VERSION")).set(1.0);
    Ok(handle)
}

/// Drains what histograms gathered, until the process stops. Without it their memory grows with
/// every observation for as long as nobody scrapes.
pub async fn upkeep(metrics: PrometheusHandle, stop: CancellationToken) {
    let mut interval = tokio::time::interval(UPKEEP_INTERVAL);
    while stop.run_until_cancelled(interval.tick()).await.is_some() {
        metrics.run_upkeep();
    }
}

fn builder() -> Result<PrometheusBuilder, TelemetryError> {
    let seconds = Matcher::Suffix("_seconds".to_owned());
    Ok(PrometheusBuilder::new().set_buckets_for_metric(seconds, &SECONDS_BUCKETS)?)
}

fn text_layer<S, W>(writer: W, colour: bool) -> impl tracing_subscriber::Layer<S>
where
    S: tracing::Subscriber + for<'span> tracing_subscriber::registry::LookupSpan<'span>,
    W: for<'writer> MakeWriter<'writer> + 'static,
{
    tracing_subscriber::fmt::layer()
        .with_writer(writer)
        .with_ansi(colour)
}

/// One object a line, with the fields beside the message.
fn json_layer<S, W>(writer: W) -> impl tracing_subscriber::Layer<S>
where
    S: tracing::Subscriber + for<'span> tracing_subscriber::registry::LookupSpan<'span>,
    W: for<'writer> MakeWriter<'writer> + 'static,
{
    tracing_subscriber::fmt::layer()
        .with_writer(writer)
        .json()
        .flatten_event(true)
}

/// A panic in a task ends only that task, so the log must tell it. The message is told when it is
/// a literal; one that was put together can hold values that belong in no log.
fn log_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let place = panic.location().map(ToString::to_string);
        let message = panic.payload().downcast_ref::<&'static str>();
        tracing::error!(
            place,
            message_literal = message,
            "a task panicked; please report this as a bug"
        );
    }));
}

pub mod metric {
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
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Lines {
        fn text(&self) -> String {
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
        }
    }

    #[test]
    fn a_json_line_is_one_object_with_its_fields_on_top() {
        let lines = Lines::default();
        let writer = lines.clone();
        let subscriber = tracing_subscriber::registry().with(json_layer(move || writer.clone()));
        tracing::subscriber::with_default(subscriber, || {
            tracing::info!(pool = "payments", "line one\nline two");
        });
        let line: serde_json::Value = serde_json::from_str(&lines.text()).unwrap();
        assert_eq!(line["pool"], "payments");
        assert_eq!(line["message"], "line one\nline two");
        assert_eq!(line["level"], "INFO");
    }

    #[test]
    fn an_error_is_told_with_all_its_causes() {
        let error = TelemetryError::Filter("a=b=c".parse::<EnvFilter>().unwrap_err());
        let cause = error.source().unwrap().to_string();
        let told = Chain(&error).to_string();
        assert!(told.starts_with("the log filter can't be read: "), "{told}");
        assert!(told.contains(&cause), "{told}");
    }

    #[test]
    fn a_text_line_has_no_escape_codes_off_a_terminal() {
        let lines = Lines::default();
        let writer = lines.clone();
        let subscriber =
            tracing_subscriber::registry().with(text_layer(move || writer.clone(), false));
        tracing::subscriber::with_default(subscriber, || tracing::warn!(pool = "p", "hello"));
        assert!(
            lines.text().contains("hello pool=\"p\""),
            "{}",
            lines.text()
        );
        assert!(!lines.text().contains('\u{1b}'));
    }

    #[test]
    fn times_are_histograms_with_buckets_and_not_summaries() {
        let recorder = builder().unwrap().build_recorder();
        let handle = recorder.handle();
        metrics::with_local_recorder(&recorder, || {
            metric::describe();
            metrics::histogram!(metric::STORE_SECONDS, "operation" => "reserve").record(0.003);
        });
        let page = handle.render();
        let bucket = |le: &str, count: u32| {
            format!("oncegate_store_seconds_bucket{{operation=\"reserve\",le=\"{le}\"}} {count}")
        };
        assert!(
            page.contains("# TYPE oncegate_store_seconds histogram"),
            "{page}"
        );
        assert!(page.contains(&bucket("0.0025", 0)), "{page}");
        assert!(page.contains(&bucket("0.005", 1)), "{page}");
        assert!(!page.contains("quantile"), "{page}");
    }

    #[tokio::test(start_paused = true)]
    async fn upkeep_ends_when_the_process_stops() {
        let stop = CancellationToken::new();
        let handle = builder().unwrap().build_recorder().handle();
        let upkeep = upkeep(handle, stop.clone());
        stop.cancel();
        upkeep.await;
    }
}
