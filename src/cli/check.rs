//! `oncegate check`: what the configuration says, and everything that is wrong with it.

use std::fmt::Write as _;
use std::process::ExitCode;

use serde_json::{Value, json};

use super::EXIT_CONFIG;
use super::flags::Flags;
use super::ready;
use crate::config;
use crate::config::input::Environment;
use crate::config::report::{Finding, Report, Setting};

const EXAMPLES: &str = "\
Takes the flags, the environment and the file of `oncegate serve`, opens no store, and prints every
value with where it stands. Secrets are hidden.

Examples:
  oncegate check --config oncegate.toml
  oncegate check --config oncegate.toml --json | jq '.settings[] | select(.origin != \"default\")'

  oncegate check --config oncegate.toml --ready

Exit code 0 means that `serve` would start with it or, with --ready, that the gateway is ready; 1
that it is not; 78 that the configuration is wrong.";

/// Values longer than this don't push the column of origins further to the right.
const VALUE_COLUMN_MAX: usize = 44;

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    #[command(flatten)]
    flags: Flags,

    /// Print one JSON object instead of a table, also when the configuration is wrong
    #[arg(long)]
    json: bool,

    /// Ask the gateway that runs with this configuration whether traffic may come, as a container's
    /// health check; exit with 1 when it may not
    #[arg(long, conflicts_with = "json")]
    ready: bool,
}

pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let environment = Environment::of_process();
    let loaded = config::load(&args.flags.overrides(&environment), &environment);
    if args.json {
        let report = match &loaded {
            Ok(loaded) => &loaded.report,
            Err(rejected) => &rejected.0,
        };
        super::say(format_args!("{:#}", as_json(report)));
        return Ok(if loaded.is_ok() {
            ExitCode::SUCCESS
        } else {
            ExitCode::from(EXIT_CONFIG)
        });
    }
    let config::Loaded { config, report } = loaded?;
    if args.ready {
        let admin = ready::reachable(config.admin).to_string();
        super::block_on(async { Ok(ready::ask(&admin).await?) })?;
        super::say("ready");
        return Ok(ExitCode::SUCCESS);
    }
    super::say(as_table(&report.settings).trim_end());
    for warning in &report.warnings {
        eprintln!("warning: {warning}");
    }
    Ok(ExitCode::SUCCESS)
}

fn as_json(report: &Report) -> Value {
    let findings = |findings: &[Finding]| -> Vec<Value> {
        let one = |finding: &Finding| json!({"origin": finding.origin.to_string(), "message": finding.message});
        findings.iter().map(one).collect()
    };
    let setting = |setting: &Setting| json!({"name": setting.name, "value": setting.value, "origin": setting.origin.to_string()});
    json!({
        "valid": report.errors.is_empty(),
        "errors": findings(&report.errors),
        "warnings": findings(&report.warnings),
        "settings": report.settings.iter().map(setting).collect::<Vec<_>>(),
    })
}

fn as_table(settings: &[Setting]) -> String {
    let width = |text: &String| text.chars().count();
    let names = settings.iter().map(|setting| width(&setting.name)).max();
    let values = settings.iter().map(|setting| width(&setting.value)).max();
    let names = names.unwrap_or(0);
    let values = values.unwrap_or(0).min(VALUE_COLUMN_MAX);
    settings.iter().fold(String::new(), |mut table, setting| {
        let Setting {
            name,
            value,
            origin,
        } = setting;
        let _ = writeln!(table, "{name:names$}  {value:values$}  {origin}");
        table
    })
}
