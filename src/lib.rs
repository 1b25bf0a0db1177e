//! Oncegate stands in front of HTTP services that can't tell a retry from a new request. Clients
//! send `Idempotency-Key`; the first request runs, every retry gets the first answer.
//!
//! The map, in reading order:
//!
//! - [`cli`]: from arguments to an exit code.
//! - [`config`]: what may be written, and what it means once validated.
//! - [`app`]: the composition root; the only file that names everything.
//! - [`lifecycle`]: how the process stops: softly, then hard.
//! - [`proxy`]: HTTP in: from clients to the services behind the gateway.
//! - [`api`]: the admin listener: metrics, health, and the API of services, workers and operators.
//! - [`outbox`]: HTTP and NATS out: intents on their way to their destinations.
//! - [`upkeep`]: what the gateway does by itself: sweeping, forgetting, counting.
//! - [`upstream`]: calls to the pools, and the knowledge whether a service can have seen one.
//! - [`routing`]: the brain for records: who may call, who waits, who gets which answer.
//! - [`coordinator`]: the brain for runs: what follows from a decision, step by step.
//! - [`store`]: all SQL, all transactions, and the clock that judges leases and validity.
//! - [`domain`]: the pure core: what a key, a record, a decision, a run and an intent are.
//! - [`problem`]: every error that a client can see.
//! - [`driver`]: runs a duty again and again.
//! - [`telemetry`]: the log and the names of the metrics.
//! - [`head`]: what the edges share of heads: preferences, segments of paths.
//! - [`address`]: which addresses are of the public internet.
//! - [`body`]: HTTP bodies as they pass through.
//! - [`ids`]: where ids and jitter are drawn.
//!
//! Imports point down only; `tests/it/tidy.rs` checks it.

pub mod address;
pub mod api;
pub mod app;
pub mod body;
pub mod cli;
pub mod config;
pub mod coordinator;
pub mod domain;
pub mod driver;
pub mod head;
pub mod ids;
pub mod lifecycle;
pub mod outbox;
pub mod problem;
pub mod proxy;
pub mod routing;
pub mod store;
pub mod telemetry;
pub mod upkeep;
pub mod upstream;
