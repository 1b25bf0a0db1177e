//! The command line: from arguments to an exit code.
//!
//! Each subcommand is a file with its `Args` and a `run`, or an `execute` that [`gateway`] runs. What a subcommand prints for people or
//! scripts goes to standard output, errors and the log to standard error.

mod check;
mod client;
mod demo;
pub mod doctor;
mod flags;
mod gateway;
mod migrate;
pub mod outbox;
mod paint;
mod ready;
pub mod records;
pub mod runs;
mod serve;
mod table;

use std::fmt::Display;
use std::io::Write as _;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::config::report::Rejected;
use crate::lifecycle::{self, Exit};

/// Exit code when the configuration is refused; `EX_CONFIG` of `sysexits.h`.
pub const EXIT_CONFIG: u8 = 78;

const EXIT_CODES: &str = "\
Exit codes:
  0   everything that was begun was finished
  1   it failed, and standard error tells why
  2   the command line is wrong
  3   a shutdown cut off what was not finished in time
  78  the configuration is wrong, and standard error tells everything that is";

/// An HTTP idempotency gateway: retries of a request get the first answer, and the service behind
/// it runs once.
#[derive(Debug, Parser)]
#[command(name = "oncegate", version, after_help = EXIT_CODES)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the gateway.
    Serve(serve::Args),
    /// Try it out: a gateway, a store that is thrown away, and a service that counts.
    Demo(demo::Args),
    /// Bring the store's tables up to date.
    Migrate(migrate::Args),
    /// Tell what the configuration says, and everything that is wrong with it.
    Check(check::Args),
    /// Find, look at and settle records of a running gateway.
    Records(records::Args),
    /// Tell how the store and the gateway are, and what a person should look at.
    Doctor(doctor::Args),
    /// Look at runs of a running gateway, and move those that are stuck.
    Runs(runs::Args),
    /// Look at what is on its way, send again what was given up, pause destinations.
    Outbox(outbox::Args),
}

/// Runs what the command line asks for.
pub fn run() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Serve(args) => serve::run(&args),
        Command::Demo(args) => demo::run(&args),
        Command::Migrate(args) => migrate::run(&args),
        Command::Check(args) => check::run(&args),
        Command::Records(args) => {
            gateway::run(async |out, paint| records::execute(&args, out, paint).await)
        }
        Command::Doctor(args) => doctor::run(&args),
        Command::Runs(args) => {
            gateway::run(async |out, paint| runs::execute(&args, out, paint).await)
        }
        Command::Outbox(args) => {
            gateway::run(async |out, paint| outbox::execute(&args, out, paint).await)
        }
    };
    done.unwrap_or_else(|error| {
        if let Some(rejected) = error.downcast_ref::<Rejected>() {
            eprintln!("{rejected}");
            return ExitCode::from(EXIT_CONFIG);
        }
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}

/// Runs a future on a runtime of its own, which leaves nothing behind that could delay the exit:
/// whatever had to be waited for was tracked.
fn block_on<T>(future: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    let done = runtime.block_on(future);
    runtime.shutdown_background();
    done
}

/// Runs a gateway until it has stopped, and tells how.
fn run_gateway(gateway: impl Future<Output = anyhow::Result<Exit>>) -> anyhow::Result<ExitCode> {
    let exit = block_on(gateway)?;
    match exit {
        Exit::Clean => tracing::info!("stopped; everything that was begun was finished"),
        Exit::Cut { tasks_left } => tracing::warn!(
            tasks_left,
            code = lifecycle::EXIT_CUT,
            "stopped; what was not finished in time was cut off"
        ),
    }
    Ok(exit.into())
}

/// Prints for people or scripts. Whoever reads may have gone, as in `oncegate check | head`.
fn say(text: impl Display) {
    let _ = writeln!(std::io::stdout(), "{text}");
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    /// What follows the name of a subcommand.
    pub(super) fn parse<T: clap::Args>(words: &[&str]) -> Result<T, clap::Error> {
        let command = T::augment_args(clap::Command::new("oncegate").no_binary_name(true));
        T::from_arg_matches(&command.try_get_matches_from(words)?)
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
