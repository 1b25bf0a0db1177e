//! The brain for runs: load, tick, commit, wake.
//!
//! [`Coordinator`] is the only way in which a run changes. It knows no SQL and no HTTP; what a run
//! is to become is decided by [`domain::run`](crate::domain::run).
