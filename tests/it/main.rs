//! All integration tests, as one binary.

mod promises;
mod support;
mod tidy;
