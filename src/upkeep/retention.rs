//! Retention: decisions and records past their time are forgotten, a page at a time.
//!
//! The store decides what is past its time, by its own clock; `pending` and `outcome_unknown` are
//! never forgotten. Pages are small, so that a backlog never keeps the request path waiting for
//! the writer for long.

use std::sync::Arc;

use crate::driver::{Report, Worker};
use crate::store::{Store, StoreError};
use crate::telemetry::metric;

/// Rows of each table that one round deletes at most.
pub const PURGE_ROWS_MAX: u32 = 500;

/// The duty, in this store.
pub struct Retention(pub Arc<dyn Store>);

impl Worker for Retention {
    fn name(&self) -> &'static str {
        "retention"
    }

    async fn run_once(&self) -> Result<Report, StoreError> {
        let purged = self.0.purge(PURGE_ROWS_MAX).await?;
        for (table, rows) in [
            ("eec_routing_idempotency", purged.records),
            ("eec_routing_decision", purged.decisions),
        ] {
            metrics::counter!(metric::PURGED, "table" => table).increment(rows);
        }
        let limit = u64::from(PURGE_ROWS_MAX);
        Ok(Report {
            rows: purged.records + purged.decisions,
            full: purged.records >= limit || purged.decisions >= limit,
        })
    }
}
