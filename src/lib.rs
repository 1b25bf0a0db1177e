//! Oncegate stands in front of HTTP services that can't tell a retry from a new request. Clients
//! send `Idempotency-Key`; the first request runs, every retry gets the first answer.
//!
//! The map, in reading order:
//!
//! - [`cli`]: from arguments to an exit code.
//! - [`config`]: what may be written, and what it means once validated.
//! - [`app`]: the composition root; the only file that names everything.
//! - [`lifecycle`]: how the process stops: softly, then hard.
//! - [`proxy`]: HTTP in and out, between clients and the services behind the gateway.
//! - [`api`]: the admin listener: metrics, health, and the operators' API.
//! - [`upkeep`]: what the gateway does by itself: sweeping, forgetting, counting.
//! - [`routing`]: the brain: who may call the upstream, who waits, who gets which answer.
//! - [`store`]: all SQL, all transactions, and the clock that judges leases and validity.
//! - [`domain`]: the pure core: what a key, a record and a decision are.
//! - [`problem`]: every error that a client can see.
//! - [`telemetry`]: the log and the names of the metrics.
//! - [`ids`]: where ids and jitter are drawn.
//!
//! Imports point down only; `tests/it/tidy.rs` checks it.

pub mod api;
pub mod app;
pub mod cli;
pub mod config;
pub mod domain;
pub mod ids;
pub mod lifecycle;
pub mod problem;
pub mod proxy;
pub mod routing;
pub mod store;
pub mod telemetry;
pub mod upkeep;
