//! How the process stops: softly, then hard, and with an honest exit code.
//!
//! Two tokens. *Soft* means: begin nothing new, finish what is begun. *Hard* means: settle what is
//! not finished, at once. Soft is a child of hard, so whoever waits for soft also sees hard. Every
//! task is spawned on the tracker, and the process leaves when the tracker is empty or the grace
//! period is over, whichever is first.
//!
//! ```text
//! signal ── soft ──── every task ended ───────────────────────────► Exit::Clean
//!             └────── grace − cut, or a second signal ── hard ─────► Exit::Cut
//! ```
//!
//! It does not know what the tasks do. Whoever composes the program does it like this, so that a
//! signal is heard from the first moment and, while starting, simply ends the start:
//!
//! ```no_run
//! # async fn start() -> std::io::Result<()> { Ok(()) }
//! # async fn example() -> std::io::Result<oncegate::lifecycle::Exit> {
//! use oncegate::lifecycle::{Exit, Shutdown, Signals};
//!
//! let shutdown = Shutdown::new(std::time::Duration::from_secs(25));
//! let mut signals = Signals::install()?;
//! tokio::select! {
//!     started = start() => started?,
//!     () = signals.next() => return Ok(Exit::Clean),
//! }
//! shutdown.set_ready();
//! Ok(shutdown.run(async || signals.next().await).await)
//! # }
//! ```

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use sd_notify::NotifyState;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// How those who commit work wake those who do it. A ring that nobody hears costs at most a poll
/// interval.
#[derive(Clone, Debug, Default)]
pub struct Bells {
    /// An intent changed: its run has something to take in.
    pub runs: Arc<Notify>,
    /// An intent became due.
    pub outbox: Arc<Notify>,
}

/// Exit code after a shutdown that had to cut something off.
pub const EXIT_CUT: u8 = 3;

/// The part of the grace period that is kept for settling what was cut off.
const CUT_MAX: Duration = Duration::from_secs(2);

/// How the gateway ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// Everything that was begun was finished.
    Clean,
    /// The grace period or a second signal cut something off.
    Cut {
        /// Tasks that had not ended even when the process left.
        tasks_left: usize,
    },
}

/// A handle on the shutdown. Clones are the same.
#[derive(Clone, Debug)]
pub struct Shutdown {
    soft: CancellationToken,
    hard: CancellationToken,
    tasks: TaskTracker,
    ready: Arc<watch::Sender<bool>>,
    grace: Duration,
}

/// SIGTERM and SIGINT, from when it was installed on.
#[derive(Debug)]
pub struct Signals {
    term: Signal,
    int: Signal,
}

impl Shutdown {
    /// A shutdown that may take this long in all.
    #[must_use]
    pub fn new(grace: Duration) -> Self {
        let hard = CancellationToken::new();
        Self {
            soft: hard.child_token(),
            hard,
            tasks: TaskTracker::new(),
            ready: Arc::new(watch::Sender::new(false)),
            grace,
        }
    }

    /// Cancelled when nothing new may begin. Cancelling it begins the shutdown, as a signal does.
    #[must_use]
    pub fn soft(&self) -> &CancellationToken {
        &self.soft
    }

    /// Cancelled when what is not finished must be settled at once.
    #[must_use]
    pub fn hard(&self) -> &CancellationToken {
        &self.hard
    }

    /// Where every task is spawned. A task that lives as long as the program ends on `soft`.
    #[must_use]
    pub fn tasks(&self) -> &TaskTracker {
        &self.tasks
    }

    /// Says once that traffic may come: to `/readyz`, and to systemd if it started the process.
    pub fn set_ready(&self) {
        if !self.ready.send_replace(true) {
            notify_systemd(NotifyState::Ready);
        }
    }

    /// Whether traffic may come: started and not stopping.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        *self.ready.borrow() && !self.soft.is_cancelled()
    }

    /// Waits until [`Self::set_ready`] was called.
    pub async fn readied(&self) {
        let mut ready = self.ready.subscribe();
        // The sender lives in `self`, so this ends only with the value it waits for.
        let _ = ready.wait_for(|ready| *ready).await;
    }

    /// Runs until a signal or a cancelled `soft` begins the shutdown, and then until it is over.
    /// `signal` waits for the next signal; it must lose none when it is dropped between two.
    pub async fn run(&self, mut signal: impl AsyncFnMut()) -> Exit {
        tokio::select! {
            () = signal() => tracing::info!("stopping: a signal came; a second one cuts off what is not finished"),
            () = self.soft.cancelled() => tracing::info!("stopping"),
        }
        notify_systemd(NotifyState::Stopping);
        self.soft.cancel();
        self.tasks.close();
        let begun = tokio::time::Instant::now();
        let cut = CUT_MAX.min(self.grace / 4);
        tokio::select! {
            biased;
            () = self.tasks.wait() => return Exit::Clean,
            () = tokio::time::sleep_until(begun + self.grace.saturating_sub(cut)) => {
                tracing::warn!(tasks = self.tasks.len(), "the grace period is almost over; cutting off what is not finished");
            }
            () = signal() => {
                tracing::warn!(tasks = self.tasks.len(), "a second signal came; cutting off what is not finished");
            }
        }
        self.hard.cancel();
        // The full part for settling, also when a second signal came early.
        let _ = tokio::time::timeout(cut, self.tasks.wait()).await;
        Exit::Cut {
            tasks_left: self.tasks.len(),
        }
    }
}

impl Signals {
    /// Takes over SIGTERM and SIGINT.
    ///
    /// # Errors
    /// When the system has no handler left.
    pub fn install() -> std::io::Result<Self> {
        Ok(Self {
            term: signal(SignalKind::terminate())?,
            int: signal(SignalKind::interrupt())?,
        })
    }

    /// Waits for the next signal. Dropping the future loses none.
    pub async fn next(&mut self) {
        tokio::select! {
            _ = self.term.recv() => {}
            _ = self.int.recv() => {}
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        match exit {
            Exit::Clean => Self::SUCCESS,
            Exit::Cut { .. } => Self::from(EXIT_CUT),
        }
    }
}

/// Does nothing unless systemd asked for it with `NOTIFY_SOCKET` (`Type=notify`).
fn notify_systemd(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::warn!(%error, "systemd could not be told");
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc;
    use tokio::time::Instant;

    use super::*;

    const GRACE: Duration = Duration::from_secs(20);

    /// Runs a shutdown whose signals come when the test sends them.
    async fn run(shutdown: &Shutdown, signals: &mut mpsc::Receiver<()>) -> (Exit, Duration) {
        let begun = Instant::now();
        let exit = shutdown
            .run(async || {
                if signals.recv().await.is_none() {
                    std::future::pending::<()>().await;
                }
            })
            .await;
        (exit, begun.elapsed())
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_begun_is_finished_and_the_exit_is_clean() {
        let shutdown = Shutdown::new(GRACE);
        shutdown
            .tasks()
            .spawn(tokio::time::sleep(Duration::from_secs(10)));
        let (send, mut signals) = mpsc::channel(2);
        send.send(()).await.unwrap();
        let (exit, took) = run(&shutdown, &mut signals).await;
        assert_eq!(exit, Exit::Clean);
        assert_eq!(took, Duration::from_secs(10));
        assert!(!shutdown.hard().is_cancelled());
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_settles_on_hard_is_waited_for_within_the_grace_period() {
        let shutdown = Shutdown::new(GRACE);
        let hard = shutdown.hard().clone();
        shutdown.tasks().spawn(async move {
            hard.cancelled().await;
            tokio::time::sleep(Duration::from_secs(1)).await;
        });
        let (send, mut signals) = mpsc::channel(2);
        send.send(()).await.unwrap();
        let (exit, took) = run(&shutdown, &mut signals).await;
        assert_eq!(exit, Exit::Cut { tasks_left: 0 });
        assert_eq!(took, Duration::from_secs(19));
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_that_never_ends_can_not_outlive_the_grace_period() {
        let shutdown = Shutdown::new(GRACE);
        shutdown.tasks().spawn(std::future::pending::<()>());
        let (send, mut signals) = mpsc::channel(2);
        send.send(()).await.unwrap();
        let (exit, took) = run(&shutdown, &mut signals).await;
        assert_eq!(exit, Exit::Cut { tasks_left: 1 });
        assert_eq!(took, GRACE);
    }

    #[tokio::test(start_paused = true)]
    async fn a_second_signal_does_not_wait_for_the_grace_period() {
        let shutdown = Shutdown::new(GRACE);
        let hard = shutdown.hard().clone();
        shutdown
            .tasks()
            .spawn(async move { hard.cancelled().await });
        let (send, mut signals) = mpsc::channel(2);
        send.send(()).await.unwrap();
        send.send(()).await.unwrap();
        let (exit, took) = run(&shutdown, &mut signals).await;
        assert_eq!(exit, Exit::Cut { tasks_left: 0 });
        assert_eq!(took, Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn cancelling_soft_from_inside_begins_the_shutdown() {
        let shutdown = Shutdown::new(GRACE);
        let soft = shutdown.soft().clone();
        shutdown.tasks().spawn(async move {
            tokio::time::sleep(Duration::from_secs(3)).await;
            soft.cancel();
        });
        let (_send, mut signals) = mpsc::channel(2);
        let (exit, took) = run(&shutdown, &mut signals).await;
        assert_eq!(exit, Exit::Clean);
        assert_eq!(took, Duration::from_secs(3));
    }

    #[tokio::test(start_paused = true)]
    async fn ready_is_between_the_start_and_the_stop() {
        let shutdown = Shutdown::new(GRACE);
        assert!(!shutdown.is_ready());
        shutdown.set_ready();
        shutdown.readied().await;
        assert!(shutdown.is_ready());
        shutdown.hard().cancel();
        assert!(shutdown.soft().is_cancelled());
        assert!(!shutdown.is_ready());
    }

    #[tokio::test]
    async fn a_signal_is_heard_from_the_installation_on_even_if_nobody_waits() {
        let mut signals = Signals::install().unwrap();
        for name in ["-TERM", "-INT"] {
            let pid = std::process::id().to_string();
            let kill = std::process::Command::new("kill")
                .args([name, &pid])
                .status();
            assert!(kill.unwrap().success());
            let heard = tokio::time::timeout(Duration::from_secs(10), signals.next()).await;
            assert!(heard.is_ok(), "{name}");
        }
    }
}
