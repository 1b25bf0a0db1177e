//! Runs a duty again and again: period, jitter, wake-up, deadline, status.
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

/// How a duty stands.
#[derive(Clone, Debug, Default)]
pub struct Status {
    /// When the round began that is at work now.
    pub running_since: Option<Instant>,
    /// When the next round is due; `None` while one is at work and after the shutdown.
    pub next_due: Option<Instant>,
    /// The newest round that succeeded: when it ended, and what it did.
    pub last_success: Option<(Instant, Report)>,
    /// The newest round that failed: when it ended, and why.
    pub last_failure: Option<(Instant, Failure)>,
    /// How many rounds failed since the last that succeeded.
    pub failures_in_a_row: u32,
}

/// Why a round failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The store gave an error; with its causes.
    Store(String),
    /// The round hung and was cut off at its deadline.
    Deadline,
    /// The round panicked: a bug.
    Panic,
}

/// A duty that is being driven.
#[derive(Clone)]
pub struct Handle {
    wake: Arc<Notify>,
    status: watch::Receiver<Status>,
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

/// As [`start`], woken by `wake` too.
pub fn start_with(
    worker: impl Worker,
    timing: Timing,
    tracker: &TaskTracker,
    shutdown: &CancellationToken,
    wake: Arc<Notify>,
) -> Handle {
    let (status, seen) = watch::channel(Status::default());
    let handle = Handle {
        wake: Arc::clone(&wake),
        status: seen,
    };
    let driver = Driver {
        worker,
        timing,
        wake,
        status,
    };
    let shutdown = shutdown.clone();
    tracker.spawn(async move { driver.run(&shutdown).await });
    handle
}

impl Handle {
    /// Ends the pause. During a round: another one follows it at once.
    pub fn wake(&self) {
        self.wake.notify_one();
    }

    /// How the duty stands, to look at or to wait on.
    #[must_use]
    pub fn status(&self) -> watch::Receiver<Status> {
        self.status.clone()
    }

    /// Whether a round succeeded within this time: then the store was reachable.
    #[must_use]
    pub fn succeeded_within(&self, time: Duration) -> bool {
        let last = self.status.borrow().last_success;
        last.is_some_and(|(ended, _)| ended.elapsed() <= time)
    }
}

struct Driver<W> {
    worker: W,
    timing: Timing,
    wake: Arc<Notify>,
    status: watch::Sender<Status>,
}

impl<W: Worker> Driver<W> {
    async fn run(&self, shutdown: &CancellationToken) {
        while !shutdown.is_cancelled() {
            if self.round().await {
                tokio::task::yield_now().await;
                continue;
            }
            let pause = jittered(self.timing.period, ids::jitter());
            self.status
                .send_modify(|status| status.next_due = Some(Instant::now() + pause));
            tokio::select! {
                () = shutdown.cancelled() => {}
                () = self.wake.notified() => {}
                () = tokio::time::sleep(pause) => {}
            }
        }
        self.status.send_modify(|status| status.next_due = None);
    }

    /// One round, and what it says about itself. Returns whether another should follow at once.
    async fn round(&self) -> bool {
        self.status.send_modify(|status| {
            status.running_since = Some(Instant::now());
            status.next_due = None;
        });
        // What a cut or panicked round leaves behind is only in the store, where every operation
        // happens whole or not at all.
        let round = AssertUnwindSafe(self.worker.run_once()).catch_unwind();
        let outcome = match tokio::time::timeout(self.timing.deadline, round).await {
            Ok(Ok(Ok(report))) => Ok(report),
            Ok(Ok(Err(error))) => Err(Failure::Store(Chain(&error).to_string())),
            Ok(Err(_)) => Err(Failure::Panic),
            Err(_) => Err(Failure::Deadline),
        };
        self.tell(&outcome);
        let again = outcome.as_ref().is_ok_and(|report| report.full);
        self.status.send_modify(|status| status.note(outcome));
        again
    }

    /// Counts the round. The log gets the first failure in a row and the recovery, not every
    /// round of an outage.
    fn tell(&self, outcome: &Result<Report, Failure>) {
        let worker = self.worker.name();
        let failures = self.status.borrow().failures_in_a_row;
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
                tracing::info!(worker, failures, rows = report.rows, "upkeep works again");
            }
            Ok(report) => tracing::debug!(worker, rows = report.rows, "upkeep round"),
            Err(failure) if failures == 0 => {
                tracing::warn!(
                    worker,
                    ?failure,
                    "an upkeep round failed; it is tried again"
                );
            }
            Err(failure) => tracing::debug!(worker, ?failure, failures, "upkeep fails on"),
        }
    }
}

impl Status {
    fn note(&mut self, outcome: Result<Report, Failure>) {
        let now = Instant::now();
        self.running_since = None;
        match outcome {
            Ok(report) => {
                self.last_success = Some((now, report));
                self.failures_in_a_row = 0;
            }
            Err(failure) => {
                self.last_failure = Some((now, failure));
                self.failures_in_a_row = self.failures_in_a_row.saturating_add(1);
            }
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

    use super::*;

    const TIMING: Timing = Timing {
        period: Duration::from_secs(10),
        deadline: Duration::from_secs(3),
    };

    /// What each round does, in order; after that every round succeeds with nothing to do.
    struct Script(Mutex<Vec<Step>>);

    enum Step {
        Rows(u64),
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
            let step = {
                let mut steps = self.0.lock().unwrap();
                (!steps.is_empty()).then(|| steps.remove(0))
            };
            match step.unwrap_or(Step::Rows(0)) {
                Step::Rows(rows) => Ok(Report { rows, full: false }),
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
        tracker: TaskTracker,
        shutdown: CancellationToken,
    }

    fn drive(steps: Vec<Step>) -> Driven {
        let (tracker, shutdown) = (TaskTracker::new(), CancellationToken::new());
        let handle = start(Script(Mutex::new(steps)), TIMING, &tracker, &shutdown);
        tracker.close();
        Driven {
            handle,
            tracker,
            shutdown,
        }
    }

    impl Driven {
        /// Waits for the end of the first round after now that satisfies `wanted`.
        async fn until(&self, wanted: impl FnMut(&Status) -> bool) -> Status {
            let mut status = self.handle.status();
            status.wait_for(wanted).await.unwrap().clone()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn rounds_come_a_jittered_period_apart() {
        let driven = drive(vec![Step::Rows(1), Step::Rows(2)]);
        let begun = Instant::now();
        let rows = |status: &Status| status.last_success.map(|(_, report)| report.rows);
        driven.until(|status| rows(status) == Some(1)).await;
        assert_eq!(begun.elapsed(), Duration::ZERO, "the first comes at once");
        let due = driven.until(|status| status.next_due.is_some()).await;
        driven.until(|status| rows(status) == Some(2)).await;
        assert!(Some(Instant::now()) >= due.next_due);
        let pause = begun.elapsed();
        assert!(pause >= TIMING.period.mul_f64(0.75) && pause <= TIMING.period.mul_f64(1.26));
    }

    #[tokio::test(start_paused = true)]
    async fn a_full_batch_is_followed_by_another_at_once() {
        let driven = drive(vec![Step::Full, Step::Full, Step::Rows(3)]);
        let begun = Instant::now();
        driven
            .until(|status| status.last_success.is_some_and(|(_, r)| r.rows == 3))
            .await;
        assert_eq!(begun.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn a_wake_up_ends_the_pause() {
        let driven = drive(vec![Step::Rows(1), Step::Rows(2)]);
        driven.until(|status| status.next_due.is_some()).await;
        let begun = Instant::now();
        driven.handle.wake();
        driven
            .until(|status| status.last_success.is_some_and(|(_, r)| r.rows == 2))
            .await;
        assert_eq!(begun.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn a_hung_round_is_cut_at_its_deadline_and_the_next_comes() {
        let driven = drive(vec![Step::Hang, Step::Rows(5)]);
        let begun = Instant::now();
        let status = driven.until(|status| status.last_failure.is_some()).await;
        assert_eq!(begun.elapsed(), TIMING.deadline);
        assert_eq!(status.last_failure.unwrap().1, Failure::Deadline);
        assert!(!driven.handle.succeeded_within(Duration::from_hours(1)));
        driven.until(|status| status.last_success.is_some()).await;
        assert!(driven.handle.succeeded_within(Duration::ZERO));
    }

    #[tokio::test(start_paused = true)]
    async fn neither_an_error_nor_a_panic_ends_the_duty() {
        let driven = drive(vec![Step::Fail, Step::Panic, Step::Rows(5)]);
        let status = driven.until(|status| status.failures_in_a_row == 1).await;
        let Some((_, Failure::Store(why))) = status.last_failure else {
            panic!("{status:?}");
        };
        assert!(why.starts_with("the store can't be reached: pool timed out"));
        let status = driven.until(|status| status.failures_in_a_row == 2).await;
        assert_eq!(status.last_failure.unwrap().1, Failure::Panic);
        let status = driven.until(|status| status.last_success.is_some()).await;
        assert_eq!(status.failures_in_a_row, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn the_shutdown_lets_the_round_end_and_begins_no_other() {
        let driven = drive(vec![Step::Hang, Step::Rows(5)]);
        driven.until(|status| status.running_since.is_some()).await;
        driven.shutdown.cancel();
        driven.tracker.wait().await;
        let status = driven.handle.status().borrow().clone();
        assert_eq!(status.last_failure.unwrap().1, Failure::Deadline);
        assert!(status.last_success.is_none() && status.next_due.is_none());
    }
}
