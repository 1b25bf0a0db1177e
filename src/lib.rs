//! Oncegate stands in front of HTTP services that can't tell a retry from a new request. Clients
//! send `Idempotency-Key`; the first request runs, every retry gets the first answer.
//!
//! The map, in reading order. Imports point down only; `tests/it/tidy.rs` checks it.

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
