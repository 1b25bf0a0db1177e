//! The `oncegate` command.

fn main() {}
