//! All integration tests, as one binary.

mod support;
mod upstream;
