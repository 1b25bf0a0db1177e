//! The pure core: what a key, a record, a decision, a run and an intent are, and what follows from what.
//!
//! Nothing here awaits, reads a clock, draws a random number or knows a database or a framework.
//! Time arrives as durations that the store judged with its own clock; ids arrive from outside.
//! Transport types and rows are converted at the border, in `proxy`, `api` and `store`.

pub mod decide;
pub mod fingerprint;
pub mod intent;
pub mod key;
pub mod message;
pub mod policy;
pub mod record;
pub mod run;
pub mod scope;
pub mod secret;
pub mod workflow;
