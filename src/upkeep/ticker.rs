//! The ticker: runs that something happened to move on.
//!
//! It is woken by whoever ended an intent, and finds everything by its polls alone: ended timers,
//! and what other gateways or a lost wake-up left.

use crate::coordinator::Coordinator;
use crate::driver::{Report, Worker};
use crate::store::StoreError;

/// Runs that one round moves on at most.
pub const TICK_RUNS_MAX: u32 = 500;

/// The duty, on what this coordinator finds.
pub struct Ticker(pub Coordinator);

impl Worker for Ticker {
    fn name(&self) -> &'static str {
        "ticker"
    }

    async fn run_once(&self) -> Result<Report, StoreError> {
        let rows = self.0.advance(TICK_RUNS_MAX).await?;
        Ok(Report {
            rows,
            full: rows >= u64::from(TICK_RUNS_MAX),
        })
    }
}
