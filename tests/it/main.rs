//! All integration tests, as one binary.

mod cli;
mod config;
