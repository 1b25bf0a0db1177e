//! The census: the figures that only the store knows, as gauges.
//!
//! All gateways of one store tell the same figures; a dashboard takes their maximum. After a
//! failed round the gauges keep their last value: the counter of failed rounds tells.

use std::sync::Arc;

use crate::driver::{Report, Worker};
use crate::store::{Store, StoreError};
use crate::telemetry::metric;

/// The duty, in this store.
pub struct Census(pub Arc<dyn Store>);

impl Worker for Census {
    fn name(&self) -> &'static str {
        "census"
    }

    #[expect(
        clippy::cast_precision_loss,
        reason = "a gauge is a float; counts stay far below 2^52"
    )]
    async fn run_once(&self) -> Result<Report, StoreError> {
        let census = self.0.census().await?;
        let oldest = census.oldest_pending.unwrap_or_default();
        metrics::gauge!(metric::UNKNOWN_RECORDS).set(census.unknown as f64);
        metrics::gauge!(metric::OLDEST_PENDING_SECONDS).set(oldest.as_secs_f64());
        let outbox = self.0.outbox_census().await?;
        for (status, count) in &outbox.intents {
            metrics::gauge!(metric::OUTBOX_INTENTS, "status" => status.word()).set(*count as f64);
        }
        for (status, count) in &outbox.runs {
            metrics::gauge!(metric::RUNS, "status" => status.word()).set(*count as f64);
        }
        let oldest = outbox.oldest_pending.unwrap_or_default();
        metrics::gauge!(metric::OUTBOX_OLDEST_SECONDS).set(oldest.as_secs_f64());
        Ok(Report {
            rows: census.unknown,
            full: false,
        })
    }
}
