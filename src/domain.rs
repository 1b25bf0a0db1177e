//! The pure core: what a key, a record and a decision are, and what follows from what.
//!
//! Nothing here awaits, reads a clock, draws a random number or knows a database or a framework.
//! Time arrives as durations that the store judged with its own clock; ids arrive from outside.
//! Transport types and rows are converted at the border, in `proxy`, `api` and `store`.

pub mod decide;
pub mod fingerprint;
pub mod key;
pub mod message;
pub mod policy;
pub mod record;
pub mod scope;
pub mod secret;
