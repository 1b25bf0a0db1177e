//! The `oncegate` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    oncegate::cli::run()
}
