//! What the gateway does by itself: sweeping dead owners, forgetting old records, counting.
//!
//! Each duty is a [`driver::Worker`](crate::driver::Worker) of its own;
//! [`driver::start`](crate::driver::start) gives it a period and a deadline. No duty elects a leader: every one is idempotent and guarded in the store, so all
//! gateways of a store run all of them, spread by jitter.

pub mod census;
pub mod retention;
pub mod run_retention;
pub mod sweeper;
pub mod ticker;
