//! The `oncegate` command's arguments.

pub mod records;
