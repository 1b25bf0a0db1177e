//! Retention of runs: those that are over are forgotten with everything that belongs to them, and
//! so are the bytes of intents that nobody redrove, a page at a time.
//!
//! The store decides what is past its time, by its own clock; what is not final is never forgotten.

use std::sync::Arc;

use crate::config::Keep;
use crate::driver::{Report, Worker};
use crate::store::{Store, StoreError};
use crate::telemetry::metric;

/// Runs that one round deletes at most; each may have many intents.
pub const PURGE_RUNS_MAX: u32 = 100;

/// The duty.
pub struct RunRetention {
    /// Where runs are forgotten.
    pub store: Arc<dyn Store>,
    /// For how long they are kept.
    pub keep: Keep,
}

impl Worker for RunRetention {
    fn name(&self) -> &'static str {
        "run_retention"
    }

    async fn run_once(&self) -> Result<Report, StoreError> {
        let purged = self.store.purge_runs(self.keep, PURGE_RUNS_MAX).await?;
        for (table, rows) in [
            ("eec_run", purged.runs),
            ("eec_effect_intent", purged.intents),
            ("eec_effect_body", purged.bodies),
        ] {
            metrics::counter!(metric::PURGED, "table" => table).increment(rows);
        }
        let limit = u64::from(PURGE_RUNS_MAX);
        Ok(Report {
            rows: purged.runs + purged.intents + purged.bodies,
            full: purged.runs >= limit || purged.bodies >= limit,
        })
    }
}
