//! Clients that wait for what others do: for the end of a run, or for an owner anywhere.
//!
//! They are parked in memory, count as waiters, and hold no connection: what they wait for is
//! looked at again and again, and at once when this gateway moves the run on. It ends with what is seen then, however it is, when the time is over,
//! the client is gone or the gateway drains.

use std::time::Duration;

use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::coordinator::Coordinator;
use crate::domain::run::RunKey;
use crate::routing::gate::Gate;
use crate::store::StoreError;

/// Looks for those who wait; cheap to clone.
#[derive(Clone)]
pub struct Watch {
    /// Has the places.
    pub gate: Gate,
    /// Tells of runs that this gateway moves on.
    pub coordinator: Coordinator,
    /// How often one looks.
    pub poll_interval: Duration,
    /// Cancelled when nobody may be waited for any more.
    pub draining: CancellationToken,
}

/// How long one waits.
#[derive(Clone, Debug)]
pub struct Patience {
    /// Until then at most.
    pub until: Instant,
    /// Cancelled when the client has gone away.
    pub gone: CancellationToken,
}

impl Watch {
    /// Looks until what is seen is settled or the patience is over; tells what was seen last, and
    /// whether it had to be waited for. Who finds no place is told at once how things are. `runs`:
    /// which it is about, if it is about runs.
    ///
    /// # Errors
    /// The last look's: an unreachable store is no reason to give up before the wait is over.
    pub async fn until_settled<T, F>(
        &self,
        runs: &[RunKey],
        patience: &Patience,
        mut look: impl FnMut() -> F,
        is_settled: impl Fn(&T) -> bool,
    ) -> (Result<T, StoreError>, bool)
    where
        F: Future<Output = Result<T, StoreError>>,
    {
        // Before the first look, so that nothing falls between it and the wait.
        let mut ticks = self.coordinator.watch();
        let mut seen = look().await;
        let over = |seen: &Result<T, StoreError>| seen.as_ref().is_ok_and(&is_settled);
        if over(&seen) || Instant::now() >= patience.until {
            return (seen, false);
        }
        let Some(_place) = self.gate.place() else {
            return (seen, false);
        };
        loop {
            tokio::select! {
                () = tokio::time::sleep(self.poll_interval) => {}
                () = moved(&mut ticks, runs) => {}
                () = tokio::time::sleep_until(patience.until) => return (look().await, true),
                () = self.draining.cancelled() => return (seen, true),
                () = patience.gone.cancelled() => return (seen, true),
            }
            seen = look().await;
            if over(&seen) || Instant::now() >= patience.until {
                return (seen, true);
            }
        }
    }
}

/// Ends when one of these runs was moved on here, or may have been.
async fn moved(ticks: &mut broadcast::Receiver<RunKey>, runs: &[RunKey]) {
    loop {
        match ticks.recv().await {
            Ok(run) if !runs.contains(&run) => {}
            Ok(_) | Err(RecvError::Lagged(_)) => return,
            Err(RecvError::Closed) => return std::future::pending().await,
        }
    }
}
