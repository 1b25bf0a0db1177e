//! The sweeper: owners whose lease is over lose their record, by what the row itself says.
//!
//! It knows no route and no configuration: the store judges the lease by its own clock, guards
//! the move by token and lease, and goes where the row's stamped terms say. A waiter that meets
//! such a row moves it by itself; the sweeper is for the rows that nobody asks for.

use std::sync::Arc;

use crate::domain::record::State;
use crate::driver::{Report, Worker};
use crate::store::{Store, StoreError, Swept};
use crate::telemetry::metric;

/// Rows that one round moves at most, oldest claim first.
pub const SWEEP_ROWS_MAX: u32 = 500;

/// The duty, in this store. Waiters find out by themselves at their next poll.
pub struct Sweeper(pub Arc<dyn Store>);

impl Worker for Sweeper {
    fn name(&self) -> &'static str {
        "sweeper"
    }

    async fn run_once(&self) -> Result<Report, StoreError> {
        let swept = self.0.sweep(SWEEP_ROWS_MAX).await?;
        let rows = swept.failed_before_commit + swept.outcome_unknown;
        if rows > 0 {
            count(swept);
        }
        Ok(Report {
            rows,
            full: rows >= u64::from(SWEEP_ROWS_MAX),
        })
    }
}

fn count(swept: Swept) {
    let failed = State::FailedBeforeCommit { maybe_sent: true }.word();
    let unknown = State::OutcomeUnknown.word();
    metrics::counter!(metric::SWEPT, "to" => failed).increment(swept.failed_before_commit);
    metrics::counter!(metric::SWEPT, "to" => unknown).increment(swept.outcome_unknown);
    tracing::warn!(
        failed_before_commit = swept.failed_before_commit,
        outcome_unknown = swept.outcome_unknown,
        "owners went silent; their records were moved"
    );
}
