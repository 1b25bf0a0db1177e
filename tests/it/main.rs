//! All integration tests, as one binary.

#![expect(clippy::unwrap_used, reason = "a test that can't go on fails there")]

mod promises;
mod support;
mod tidy;
