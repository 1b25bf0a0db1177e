//! All integration tests, as one binary.

#![expect(clippy::unwrap_used, reason = "a test that meets an error has failed")]

mod admin;
mod cli;
mod config;
mod listener;
mod openapi;
mod outbox;
mod promises;
mod routing_api;
mod store_conformance;
mod store_group;
mod store_open;
mod store_postgres;
mod support;
mod tidy;
mod upkeep;
mod upstream;
