//! `oncegate serve`: runs the gateway until it is told to stop.

use std::process::ExitCode;

use super::flags::Flags;
use crate::config::input::Environment;
use crate::lifecycle::Shutdown;
use crate::{app, config, telemetry};

const EXAMPLES: &str = "\
Flags beat the environment, the environment beats the file; an empty variable counts as absent.
Any value may hold references, so that no secret stands in it: ${env:NAME} and ${file:PATH}.
`oncegate check` with the same flags tells what is read from where.

Examples:
  Guard one service, with a store in a file of the working directory:
    oncegate serve --upstream http://127.0.0.1:9000 --tenant fixed:acme

  As the file says, with the store's password from a file that only this process reads:
    oncegate serve --config oncegate.toml \\
      --store 'postgres://oncegate:${file:/run/secrets/store}@db/oncegate'

SIGTERM and SIGINT drain: nothing new is begun, what is begun is finished within `limits.grace`.
A second one cuts off what is not finished. Exit code 0 means that everything was finished, 3 that
something was cut off, 78 that the configuration is wrong.";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    #[command(flatten)]
    flags: Flags,
}

pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let environment = Environment::of_process();
    let loaded = config::load(&args.flags.overrides(&environment), &environment)?;
    telemetry::start_log(&loaded.config.log)?;
    for warning in &loaded.report.warnings {
        tracing::warn!("{warning}");
    }
    let metrics = telemetry::start_metrics()?;
    let shutdown = Shutdown::new(loaded.config.limits.grace);
    super::run_gateway(app::serve(loaded.config, metrics, shutdown))
}
