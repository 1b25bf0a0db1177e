//! Runs a duty again and again: period, jitter, wake-up, deadline.
//!
//! Invariants:
//! - Whatever a round does (fail, hang, panic), the next one comes.
//! - A round that found a full batch is followed by another at once, any other by a pause.
//! - After the shutdown was asked for, no round begins; the one at work ends, by its deadline at
//!   the latest.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::ids;
use crate::store::StoreError;
use crate::telemetry::{Chain, metric};

/// How far a pause may be from its period, as a part of it.
const JITTER: f64 = 0.25;

/// A duty.
pub trait Worker: Send + Sync + 'static {
    /// The duty's name, for the log and as a metric label.
    fn name(&self) -> &'static str;

    /// Does one bounded piece of the duty. It does not retry by itself: the next round does.
    /// It may be dropped at any point where it waits.
    fn run_once(&self) -> impl Future<Output = Result<Report, StoreError>> + Send;
}

/// What a round did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Rows that it moved, deleted or counted.
    pub rows: u64,
    /// Whether it stopped because its batch was full: there may be more to do.
    pub full: bool,
}

/// When rounds come.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// From the end of a round to the next, give or take a quarter.
    pub period: Duration,
    /// How long a round may take before it is cut off. Longer than the store's own time-out, so
    /// that it only meets rounds that hang.
    pub deadline: Duration,
}

/// A duty that is being driven: when the newest round that succeeded ended.
pub struct Handle(watch::Receiver<Option<Instant>>);

/// Why a round failed.
#[derive(Debug)]
enum Failure {
    /// The store gave an error; with its causes.
    Store(#[expect(dead_code, reason = "for the log")] String),
    /// The round hung and was cut off at its deadline.
    Deadline,
    /// The round panicked: a bug.
    Panic,
}

/// Drives `worker` on a task of `tracker` until `shutdown`. The first round comes at once.
pub fn start(
    worker: impl Worker,
    timing: Timing,
    tracker: &TaskTracker,
    shutdown: &CancellationToken,
) -> Handle {
    start_with(worker, timing, tracker, shutdown, Arc::default())
}

/// As [`start`]; `wake` ends the pause. During a round: another one follows it at once.
pub fn start_with(
    worker: impl Worker,
    timing: Timing,
    tracker: &TaskTracker,
    shutdown: &CancellationToken,
    wake: Arc<Notify>,
) -> Handle {
    let (succeeded, seen) = watch::channel(None);
    let driver = Driver {
        worker,
        timing,
        wake,
        succeeded,
    };
    let shutdown = shutdown.clone();
    tracker.spawn(async move { driver.run(&shutdown).await });
    Handle(seen)
}

impl Handle {
    /// Whether a round succeeded within this time: then the store was reachable.
    #[must_use]
    pub fn succeeded_within(&self, time: Duration) -> bool {
        self.0.borrow().is_some_and(|ended| ended.elapsed() <= time)
    }
}

struct Driver<W> {
    worker: W,
    timing: Timing,
    wake: Arc<Notify>,
    succeeded: watch::Sender<Option<Instant>>,
}

impl<W: Worker> Driver<W> {
    async fn run(&self, shutdown: &CancellationToken) {
        let mut failures_in_a_row = 0;
        while !shutdown.is_cancelled() {
            let outcome = self.round().await;
            self.tell(&outcome, failures_in_a_row);
            match outcome {
                Ok(report) => {
                    failures_in_a_row = 0;
                    self.succeeded.send_replace(Some(Instant::now()));
                    if report.full {
                        tokio::task::yield_now().await;
                        continue;
                    }
                }
                Err(_) => failures_in_a_row += 1,
            }
            tokio::select! {
                () = shutdown.cancelled() => {}
                () = self.wake.notified() => {}
                () = tokio::time::sleep(jittered(self.timing.period, ids::jitter())) => {}
            }
        }
    }

    async fn round(&self) -> Result<Report, Failure> {
        // What a cut or panicked round leaves behind is only in the store, where every operation
        // happens whole or not at all.
        let round = AssertUnwindSafe(self.worker.run_once()).catch_unwind();
        match tokio::time::timeout(self.timing.deadline, round).await {
            Ok(Ok(Ok(report))) => Ok(report),
            Ok(Ok(Err(error))) => Err(Failure::Store(Chain(&error).to_string())),
            Ok(Err(_)) => Err(Failure::Panic),
            Err(_) => Err(Failure::Deadline),
        }
    }

    /// Counts the round. The log gets the first failure in a row and the recovery, not every
    /// round of an outage.
    fn tell(&self, outcome: &Result<Report, Failure>, failures: u64) {
        let worker = self.worker.name();
        let result = match outcome {
            Ok(_) => "ok",
            Err(Failure::Store(_)) => "failed",
            Err(Failure::Deadline) => "deadline",
            Err(Failure::Panic) => "panic",
        };
        metrics::counter!(metric::WORKER_ROUNDS, "worker" => worker, "result" => result)
            .increment(1);
        match outcome {
            Ok(report) if failures > 0 => {
                tracing::info!(worker, failures, rows = report.rows, "a duty works again");
            }
            Ok(report) => tracing::debug!(worker, rows = report.rows, "a duty's round"),
            Err(failure) if failures == 0 => {
                tracing::warn!(worker, ?failure, "a duty's round failed; it is tried again");
            }
            Err(failure) => tracing::debug!(worker, ?failure, failures, "a duty fails on"),
        }
    }
}

/// `drawn` is from 0 to 1.
fn jittered(period: Duration, drawn: f64) -> Duration {
    period.mul_f64(1.0 - JITTER + 2.0 * JITTER * drawn)
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use metrics_exporter_prometheus::PrometheusBuilder;
    use tokio::sync::mpsc;

    use super::*;

    const TIMING: Timing = Timing {
        period: Duration::from_secs(10),
        deadline: Duration::from_secs(3),
    };
    /// The longest pause.
    const PAUSE_MAX: Duration = Duration::from_millis(12_600);

    /// What each round does, in order; after that every round succeeds with nothing to do.
    struct Script {
        steps: Mutex<Vec<Step>>,
        begun: mpsc::Sender<Duration>,
        start: Instant,
    }

    #[derive(Clone, Copy)]
    enum Step {
        Rest,
        Full,
        Fail,
        Hang,
        Panic,
    }

    impl Worker for Script {
        fn name(&self) -> &'static str {
            "script"
        }

        async fn run_once(&self) -> Result<Report, StoreError> {
            self.begun.try_send(self.start.elapsed()).unwrap();
            let step = {
                let mut steps = self.steps.lock().unwrap();
                (!steps.is_empty()).then(|| steps.remove(0))
            };
            match step.unwrap_or(Step::Rest) {
                Step::Rest => Ok(Report::default()),
                Step::Full => Ok(Report {
                    rows: 7,
                    full: true,
                }),
                Step::Fail => Err(StoreError::Unavailable(sqlx::Error::PoolTimedOut)),
                Step::Hang => std::future::pending().await,
                Step::Panic => panic!("as the script says"),
            }
        }
    }

    struct Driven {
        handle: Handle,
        wake: Arc<Notify>,
        /// When rounds began, since the start.
        begun: mpsc::Receiver<Duration>,
        tracker: TaskTracker,
        shutdown: CancellationToken,
    }

    fn drive(steps: &[Step]) -> Driven {
        let (tracker, shutdown) = (TaskTracker::new(), CancellationToken::new());
        let (told, begun) = mpsc::channel(10);
        let wake = Arc::<Notify>::default();
        let script = Script {
            steps: Mutex::new(steps.to_vec()),
            begun: told,
            start: Instant::now(),
        };
        let handle = start_with(script, TIMING, &tracker, &shutdown, Arc::clone(&wake));
        tracker.close();
        Driven {
            handle,
            wake,
            begun,
            tracker,
            shutdown,
        }
    }

    impl Driven {
        async fn round(&mut self) -> Duration {
            self.begun.recv().await.unwrap()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn rounds_come_a_jittered_period_apart() {
        let mut driven = drive(&[]);
        assert_eq!(driven.round().await, Duration::ZERO, "the first at once");
        let pause = driven.round().await;
        assert!(pause >= TIMING.period.mul_f64(0.75) && pause <= PAUSE_MAX);
    }

    #[tokio::test(start_paused = true)]
    async fn a_full_batch_is_followed_by_another_at_once() {
        let mut driven = drive(&[Step::Full, Step::Full]);
        for _ in 0..3 {
            assert_eq!(driven.round().await, Duration::ZERO);
        }
        assert!(driven.round().await > Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn a_wake_up_ends_the_pause() {
        let mut driven = drive(&[]);
        driven.round().await;
        driven.wake.notify_one();
        assert_eq!(driven.round().await, Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn a_hung_round_is_cut_at_its_deadline_and_the_next_comes() {
        let mut driven = drive(&[Step::Hang, Step::Hang]);
        driven.round().await;
        let next = driven.round().await;
        assert!(next > TIMING.deadline && next <= TIMING.deadline + PAUSE_MAX);
        assert!(!driven.handle.succeeded_within(Duration::from_hours(1)));
        driven.round().await;
        assert!(driven.handle.succeeded_within(Duration::ZERO));
    }

    #[tokio::test(start_paused = true)]
    async fn neither_an_error_nor_a_panic_ends_the_duty() {
        let recorder = PrometheusBuilder::new().build_recorder();
        let _counting = metrics::set_default_local_recorder(&recorder);
        let mut driven = drive(&[Step::Fail, Step::Panic, Step::Hang]);
        for _ in 0..4 {
            driven.round().await;
        }
        let counted = recorder.handle().render();
        for result in ["failed", "panic", "deadline", "ok"] {
            let line =
                format!("oncegate_worker_rounds_total{{worker=\"script\",result=\"{result}\"}} 1");
            assert!(counted.contains(&line), "{counted}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_shutdown_lets_the_round_end_and_begins_no_other() {
        let mut driven = drive(&[Step::Hang]);
        let begun = Instant::now();
        driven.round().await;
        driven.shutdown.cancel();
        driven.tracker.wait().await;
        assert_eq!(begun.elapsed(), TIMING.deadline);
        assert_eq!(driven.begun.recv().await, None);
    }
}
