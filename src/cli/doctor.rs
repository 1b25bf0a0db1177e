//! `oncegate doctor`: how the store and the gateway are, and what a person should look at.
//!
//! It opens the store itself and changes nothing in it. A SQLite file that a gateway has is not
//! opened a second time: the gateway is asked what it sees.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio_util::task::TaskTracker;

use super::flags::StoreFlags;
use super::gateway::{Failure, Gateway};
use super::paint::Paint;
use super::ready;
use super::table::{self, plain};
use crate::api::doctor::{lease_min, wall};
use crate::config::input::{Environment, Given, Overrides};
use crate::config::{self, StoreConfig};
use crate::store::doctor::{Finding, Health, examine};
use crate::store::open::{OpenError, Target, open};
use crate::store::{Store, migrate};
use crate::telemetry::Chain;

const EXAMPLES: &str = "\
It opens the store that the configuration names and writes nothing. Then it asks the gateway at
`admin` whether it is ready and, with a token, what it sees. A SQLite file belongs to one process:
while a gateway runs on it, that gateway tells what doctor would have seen, and a token is needed.

Examples:
  oncegate doctor --config oncegate.toml
  oncegate doctor --store postgres://oncegate@db/oncegate --json
  ONCEGATE_TOKEN=\"$(cat reader.token)\" oncegate doctor --config oncegate.toml

Exit code 0 means that nothing is bad, 1 that something is, 78 that the configuration is wrong.
`warn` is for a person to look at and changes nothing about the exit code.";

/// The lease when no configuration tells one: the default of routes.
const LEASE_DEFAULT: Duration = Duration::from_secs(5);

/// Tell how the store and the gateway are.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    flags: StoreFlags,
    /// Where the gateway's admin listener is [default: `admin` of the configuration]
    #[arg(long, value_name = "URL")]
    admin: Option<String>,
    /// A file that holds a token with the role `reader`; without it `ONCEGATE_TOKEN` does.
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

/// Where to look.
#[derive(Debug)]
pub struct Patient {
    /// The store.
    pub store: StoreConfig,
    /// The gateway's admin listener.
    pub admin: String,
    /// Shown to it.
    pub token_file: Option<PathBuf>,
    /// The shortest lease.
    pub lease_min: Duration,
}

/// What a gateway tells.
#[derive(Deserialize)]
struct Told {
    findings: Vec<ToldFinding>,
}

#[derive(Deserialize)]
struct ToldFinding {
    check: String,
    health: String,
    says: String,
}

/// One line of what is told.
#[derive(Clone, Debug)]
pub struct Line {
    /// What was looked at.
    pub check: String,
    /// How it is: `good`, `warn` or `bad`.
    pub health: String,
    /// More about it.
    pub says: String,
}

impl From<Finding> for Line {
    fn from(finding: Finding) -> Self {
        Self {
            check: finding.check.to_owned(),
            health: finding.health.word().to_owned(),
            says: finding.says,
        }
    }
}

pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let environment = Environment::of_process();
    let overrides = Overrides {
        // `--admin` names a gateway to ask, by a URL; the variable is where one listens.
        admin: Given::pick(None, "--admin", "ONCEGATE_ADMIN", &environment),
        ..args.flags.overrides(&environment)
    };
    let store = config::load_store(&overrides, &environment)?;
    for warning in &store.report.warnings {
        eprintln!("warning: {warning}");
    }
    // The store alone is enough to look at it; the rest tells how long its leases are.
    let whole = match config::load(&overrides, &environment) {
        Ok(loaded) => Some(loaded.config),
        // A gateway may have been started with flags alone.
        Err(_) if overrides.config.is_none() => None,
        Err(rejected) => {
            let errors = rejected.0.errors.len();
            eprintln!(
                "warning: the configuration has {errors} errors, which `oncegate check` tells; \
                 the store is looked at all the same"
            );
            None
        }
    };
    let own = store.admin.map(|admin| ready::reachable(admin).to_string());
    let admin = args.admin.clone().or(own);
    let patient = Patient {
        store: store.store,
        admin: admin.context("write where the gateway is: --admin HOST:PORT")?,
        token_file: args.token_file.clone(),
        lease_min: whole.map_or(LEASE_DEFAULT, |config| {
            lease_min(&config.routes, &config.outbox)
        }),
    };
    let mut out = std::io::stdout();
    let paint = Paint::for_terminal(&out);
    let lines = super::block_on(async { Ok(look(&patient).await) })?;
    tell(&mut out, &lines, args.json, paint)?;
    let bad = lines.iter().any(|line| line.health == Health::Bad.word());
    Ok(if bad {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

/// Looks at everything.
pub async fn look(patient: &Patient) -> Vec<Line> {
    let mut lines = Vec::new();
    let in_use = match look_at_store(patient).await {
        Ok(findings) => {
            lines.extend(findings.into_iter().map(Line::from));
            false
        }
        Err(path) => {
            let says = format!(
                "{} is in use by a gateway, which tells what it sees",
                path.display()
            );
            lines.push(Finding::new("store", Health::Good, says).into());
            true
        }
    };
    lines.extend(look_at_gateway(patient, in_use).await);
    lines
}

/// What the store itself shows. `Err`: a gateway has the file.
async fn look_at_store(patient: &Patient) -> Result<Vec<Finding>, PathBuf> {
    let url = &patient.store.url;
    if let Ok(Target::Sqlite(path)) = Target::parse(url)
        && !path.exists()
    {
        let says = format!("{} is not there; `oncegate serve` makes it", path.display());
        return Ok(vec![Finding::new("store", Health::Bad, says)]);
    }
    let missing = match migrate::pending(url).await {
        Ok(missing) => missing,
        Err(error) => return Ok(vec![not_opened(&error)]),
    };
    if !missing.is_empty() {
        let behind = OpenError::Behind(missing.len());
        return Ok(vec![not_opened(&behind)]);
    }
    let schema = Finding::new(
        "schema",
        Health::Good,
        "every table is as this program has it",
    );
    let tracker = TaskTracker::new();
    let config = StoreConfig {
        migrate: false,
        ..patient.store.clone()
    };
    let store: Arc<dyn Store> = match open(&config, &tracker).await {
        Ok(store) => store,
        Err(OpenError::InUse { path }) => return Err(path),
        Err(error) => return Ok(vec![schema, not_opened(&error)]),
    };
    let reached = Finding::new("store", Health::Good, reached(url));
    let mut findings = vec![reached, schema];
    findings.extend(examine(&*store, wall, patient.lease_min).await);
    store.close().await;
    tracker.close();
    tracker.wait().await;
    Ok(findings)
}

/// Never the URL: it may hold a password.
fn reached(url: &str) -> String {
    match Target::parse(url) {
        Ok(Target::Sqlite(path)) => format!("{} can be opened", Path::display(&path)),
        _ => "the database can be reached".to_owned(),
    }
}

fn not_opened(error: &OpenError) -> Finding {
    let check = match error {
        OpenError::Behind(_) | OpenError::NewerSchema { .. } | OpenError::OtherSchema(_) => {
            "schema"
        }
        _ => "store",
    };
    Finding::new(check, Health::Bad, Chain(error).to_string())
}

/// What the gateway says of itself and, where doctor could not look, of the store.
async fn look_at_gateway(patient: &Patient, in_use: bool) -> Vec<Line> {
    let needed = if in_use { Health::Bad } else { Health::Warn };
    let (health, says) = match ready::ask(&patient.admin).await {
        Ok(()) => (Health::Good, format!("{} is ready", patient.admin)),
        Err(failure @ Failure::Refused { .. }) => (Health::Bad, failure.to_string()),
        Err(failure) => (needed, failure.to_string()),
    };
    let mut lines = vec![Line::from(Finding::new("gateway", health, says))];
    let gateway = Gateway::at(&patient.admin, patient.token_file.as_deref());
    let told = async { gateway.client()?.get("/v1/doctor").await };
    match told.await.and_then(|answer| table::read::<Told>(&answer)) {
        Ok(told) => lines.extend(told.findings.into_iter().filter_map(|finding| {
            // The rest doctor saw by itself; whether the gateway listens only the gateway knows.
            let wanted = in_use || finding.check == "listener";
            wanted.then_some(Line {
                check: if in_use {
                    finding.check
                } else {
                    format!("gateway's {}", finding.check)
                },
                health: finding.health,
                says: finding.says,
            })
        })),
        // Without a token there is nothing to ask with, which is no fault where it isn't needed.
        Err(_) if !in_use => {}
        Err(failure) => {
            let says = format!("the gateway did not tell how the store is: {failure}");
            lines.push(Finding::new("store", Health::Bad, says).into());
        }
    }
    lines
}

/// Prints what was found.
///
/// # Errors
/// When the output can't be written.
pub fn tell(
    out: &mut (dyn Write + Send),
    lines: &[Line],
    as_json: bool,
    paint: Paint,
) -> Result<(), Failure> {
    if as_json {
        let findings: Vec<Value> = lines
            .iter()
            .map(|line| json!({ "check": line.check, "health": line.health, "says": line.says }))
            .collect();
        let bad = lines.iter().any(|line| line.health == Health::Bad.word());
        writeln!(out, "{:#}", json!({ "bad": bad, "findings": findings }))?;
        return Ok(());
    }
    let row = |line: &Line| [&line.health, &line.check, &line.says].map(|cell| plain(cell));
    let rows: Vec<_> = lines.iter().map(row).collect();
    table::columns(out, ["HEALTH", "CHECK", "MORE"], &rows, paint)
}
