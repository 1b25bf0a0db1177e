//! `oncegate runs`: look at runs and move them on, through the admin API of a running gateway.
//!
//! It never opens the store: the coordinator of a gateway is the only one that changes a run.

pub(super) mod table;

use std::io::Write;

use serde_json::{Map, Value, json};

pub use super::gateway::Failure;
pub use super::paint::Paint;

use super::client::{self, Client};
use super::gateway::{self, Gateway};
use crate::head::path_segment;

const EXAMPLES: &str = "\
Examples:
  oncegate runs list --status stuck
  oncegate runs show 0190b2c4-…                 # why was this sent twice?
  oncegate runs retry 0190b2c4-… --reason 'the mail service is back'
  oncegate runs resume 0190b2c4-… --reason 'booked by hand' --result '{\"booking\":7}'
  oncegate runs cancel 0190b2c4-… --reason 'the customer called'
  oncegate runs signal 0190b2c4-… approved --payload '{\"by\":\"ann\"}'

A run bears the id of the decision that started it: `Idempotency-Decision` of every answer to its
request.

In scripts, draw a UUID once and pass it as --request-id: repeated after a lost answer, the act is
done once.

The token and the gateway: see `oncegate records --help`.

Exit codes:
  0  done
  1  the gateway can't be reached, or something else failed
  2  wrong usage
  4  there is no such run, or the token may not see it
  5  the run does not take it as it stands
  6  no token, or one that may not do this
  7  not confirmed";

/// Look at runs of a running gateway, and move those that are stuck.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    gateway: Gateway,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// List runs, in the order of tenant and id.
    List(List),
    /// Show one run: its steps' intents, every try, and its history.
    Show(Show),
    /// Let a stuck run try again what failed, with the same keys and bytes.
    Retry(Act),
    /// Stop a run, and undo what it did.
    Cancel(Act),
    /// Let a stuck run go on without the step that failed.
    Resume(Resume),
    /// Tell a run what it waits for, or will wait for.
    Signal(Signal),
}

#[derive(Debug, clap::Args)]
struct List {
    /// Of this tenant and its principals.
    #[arg(long)]
    tenant: Option<String>,
    /// In this status.
    #[arg(long, value_parser = ["running", "waiting", "stuck", "completed", "failed", "compensated", "cancelled"])]
    status: Option<String>,
    /// Of this workflow.
    #[arg(long)]
    workflow: Option<String>,
    /// Of this pool.
    #[arg(long)]
    pool: Option<String>,
    /// At most this many.
    #[arg(long, default_value_t = 50)]
    limit: u32,
    /// Go on where the page before ended.
    #[arg(long)]
    cursor: Option<String>,
}

#[derive(Debug, clap::Args)]
struct Show {
    /// The run's id.
    run_id: String,
}

#[derive(Debug, clap::Args)]
struct Act {
    /// The run's id.
    run_id: String,
    /// Why, for the run's history.
    #[arg(long)]
    reason: String,
    #[command(flatten)]
    sure: Sure,
}

#[derive(Debug, clap::Args)]
struct Sure {
    /// Don't ask. Without a terminal nobody is asked.
    #[arg(long, short)]
    yes: bool,
    /// A UUID that makes a repeat known.
    #[arg(long, value_name = "UUID")]
    request_id: Option<String>,
}

#[derive(Debug, clap::Args)]
struct Resume {
    #[command(flatten)]
    act: Act,
    /// What later steps see as `steps.NAME.body`.
    #[arg(long, value_name = "JSON", value_parser = json_value)]
    result: Option<Value>,
}

#[derive(Debug, clap::Args)]
struct Signal {
    /// The run's id.
    run_id: String,
    /// The signal's name.
    name: String,
    /// What it brings.
    #[arg(long, value_name = "JSON", value_parser = json_value)]
    payload: Option<Value>,
    #[command(flatten)]
    sure: Sure,
}

/// Runs the command and writes what it found to `out`.
///
/// # Errors
/// When it was not done; then nothing is on `out`.
pub async fn execute(
    args: &Args,
    out: &mut (dyn Write + Send),
    paint: Paint,
) -> Result<(), Failure> {
    let client = args.gateway.client()?;
    let json = args.gateway.json;
    let answer = match &args.command {
        Command::List(list) => client.get(&list.path()).await?,
        Command::Show(show) if json => {
            let mut run = client.get(&path(&show.run_id, "")).await?;
            let mut history = client
                .get(&path(&show.run_id, "/transitions?limit=200"))
                .await?;
            run["transitions"] = history["transitions"].take();
            run
        }
        Command::Show(show) => {
            let run = client.get(&path(&show.run_id, "")).await?;
            let history = client
                .get(&path(&show.run_id, "/transitions?limit=200"))
                .await?;
            return table::run(out, &run, &history, paint);
        }
        Command::Retry(act) => {
            let warning = "What failed is sent again, with the same key and the same bytes.";
            act.perform(&client, "/retry", warning, None).await?
        }
        Command::Cancel(act) => {
            let warning = "The run stops, and what its steps did is undone by their \
                           compensations, where they have any.";
            act.perform(&client, "/cancel", warning, None).await?
        }
        Command::Resume(Resume { act, result }) => {
            let warning = "The run goes on without the step that failed, and later steps see the \
                           result that you give.";
            let result = result.clone().unwrap_or_default();
            act.perform(&client, "/resume", warning, Some(result))
                .await?
        }
        Command::Signal(signal) => signal.perform(&client).await?,
    };
    if json {
        writeln!(out, "{answer:#}")?;
        return Ok(());
    }
    match &args.command {
        Command::List(_) => table::page(out, &answer, paint),
        Command::Show(_)
        | Command::Retry(_)
        | Command::Cancel(_)
        | Command::Resume(_)
        | Command::Signal(_) => table::acted(out, &answer, paint),
    }
}

impl Act {
    async fn perform(
        &self,
        client: &Client,
        act: &str,
        warning: &str,
        result: Option<Value>,
    ) -> Result<Value, Failure> {
        let mut body = Map::new();
        body.insert("reason".into(), json!(self.reason));
        body.extend(result.map(|result| ("result".into(), result)));
        self.sure
            .perform(client, &self.run_id, warning, act, body)
            .await
    }
}

impl Signal {
    async fn perform(&self, client: &Client) -> Result<Value, Failure> {
        let warning =
            "The run takes the signal now or when it comes to the step that waits for it.";
        let mut body = Map::new();
        body.insert("payload".into(), self.payload.clone().unwrap_or_default());
        let act = format!("/signals/{}", path_segment(&self.name));
        self.sure
            .perform(client, &self.run_id, warning, &act, body)
            .await
    }
}

impl Sure {
    /// Does what can't be taken back. First it shows the run and asks, if there is somebody to ask.
    async fn perform(
        &self,
        client: &Client,
        run_id: &str,
        warning: &str,
        act: &str,
        mut body: Map<String, Value>,
    ) -> Result<Value, Failure> {
        gateway::confirm(self.yes, warning, async |out, paint| {
            let run = client.get(&path(run_id, "")).await?;
            table::head(out, &run, paint)
        })
        .await?;
        let request_id = self.request_id.as_ref();
        body.extend(request_id.map(|id| ("request_id".into(), json!(id))));
        client.post(&path(run_id, act), &Value::Object(body)).await
    }
}

impl List {
    fn path(&self) -> String {
        let limit = self.limit.to_string();
        let parameters = [
            ("tenant", self.tenant.as_deref()),
            ("status", self.status.as_deref()),
            ("workflow", self.workflow.as_deref()),
            ("pool", self.pool.as_deref()),
            ("limit", Some(limit.as_str())),
            ("cursor", self.cursor.as_deref()),
        ];
        client::path("/v1/runs", &parameters)
    }
}

fn path(run_id: &str, act: &str) -> String {
    format!("/v1/runs/{}{act}", path_segment(run_id))
}

fn json_value(text: &str) -> Result<Value, String> {
    serde_json::from_str(text).map_err(|error| format!("not JSON: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::tests::parse;

    #[test]
    fn an_act_needs_a_reason_and_a_signal_none() {
        for act in ["retry", "cancel", "resume"] {
            assert!(parse::<Args>(&[act, "r"]).is_err(), "{act}");
            assert!(
                parse::<Args>(&[act, "r", "--reason", "why"]).is_ok(),
                "{act}"
            );
        }
        assert!(parse::<Args>(&["signal", "r", "approved"]).is_ok());
    }

    #[test]
    fn what_is_no_json_is_refused_before_anything_is_sent() {
        assert!(parse::<Args>(&["signal", "r", "n", "--payload", "{"]).is_err());
        assert!(parse::<Args>(&["signal", "r", "n", "--payload", "{}"]).is_ok());
    }
}
