//! `oncegate migrate`: brings the tables up to date, by hand instead of at the start.

use std::process::ExitCode;

use super::flags::StoreFlags;
use crate::config;
use crate::config::input::Environment;
use crate::store::migrate::{self, Step};

const EXAMPLES: &str = "\
`oncegate serve` does this by itself unless it is told not to (--no-migrate). Run it by hand when
the account that serves may not change tables. Running it twice does no harm.

Examples:
  oncegate migrate --store 'postgres://owner:${env:PGPASSWORD}@db/oncegate'
  oncegate migrate --check --config oncegate.toml

Exit code 0 means that every table is up to date, 1 that it failed or, with --check, that
something is missing, 78 that the configuration is wrong.";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    #[command(flatten)]
    flags: StoreFlags,

    /// Change nothing; tell what is missing, and exit with 1 when something is
    #[arg(long)]
    check: bool,
}

pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let environment = Environment::of_process();
    let loaded = config::load_store(&args.flags.overrides(&environment), &environment)?;
    for warning in &loaded.report.warnings {
        eprintln!("warning: {warning}");
    }
    let url = loaded.store.url;
    if args.check {
        let missing = super::block_on(async { Ok(migrate::pending(&url).await?) })?;
        return Ok(tell("missing", &missing, !missing.is_empty()));
    }
    let applied = super::block_on(async { Ok(migrate::apply(&url).await?) })?;
    Ok(tell("applied", &applied, false))
}

fn tell(what: &str, steps: &[Step], failed: bool) -> ExitCode {
    for step in steps {
        super::say(format_args!(
            "{what}: {} {}",
            step.version, step.description
        ));
    }
    if steps.is_empty() {
        super::say("nothing is missing");
    }
    if failed {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    }
}
