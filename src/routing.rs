//! The brain for records: who may call the upstream, who waits, who gets which answer.
//!
//! It knows no SQL and no HTTP framework. A record changes only through [`gate`].

pub mod callers;
pub mod gate;
mod lead;
pub mod permit;
pub mod replay;
pub mod settle;
pub mod waiters;
