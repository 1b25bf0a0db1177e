//! What the gateway tells about itself: metric names, each with its meaning, and the log.
//!
//! No tenant, key or id ever becomes a label; secrets and bodies never reach the log.

pub mod metric;

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
