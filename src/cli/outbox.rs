//! `oncegate outbox`: look at what is on its way, send again what was given up, pause
//! destinations, through the admin API of a running gateway.

mod table;

use std::io::Write;

use serde_json::{Map, Value, json};

pub use super::gateway::Failure;
pub use super::paint::Paint;

use super::client::{self, Client};
use super::gateway::{self, Gateway};
use crate::head::path_segment;

const EXAMPLES: &str = "\
Examples:
  oncegate outbox list --status dead --destination mail
  oncegate outbox show 7d1f…
  oncegate outbox redrive --destination mail --reason 'the mail service is back'
  oncegate outbox redrive --intent 7d1f… --reason 'it was our fault'
  oncegate outbox discard --intent 7d1f… --reason 'sent by hand'
  oncegate outbox pause mail --reason 'they have an outage until 14:00'
  oncegate outbox resume mail --reason 'it is over'
  oncegate outbox destinations

A redrive sends the same bytes with the same key. Where a run was undone or went on without the
intent, it is refused and told. Pausing loses nothing and counts no try.

The token and the gateway: see `oncegate records --help`.

Exit codes:
  0  done
  1  the gateway can't be reached, or something else failed
  2  wrong usage
  4  there is no such intent, or the token may not see it
  5  it was not done to the intent, or not to all of them
  6  no token, or one that may not do this
  7  not confirmed";

/// Look at what is on its way, send again what was given up, pause destinations.
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
    /// List intents, in the order of tenant and id.
    List(List),
    /// Show one intent and every try, without the body.
    Show(Show),
    /// Send again what was given up, with the same key and bytes.
    Redrive(Act),
    /// Give intents up for good.
    Discard(Act),
    /// Send nothing to a destination for now.
    Pause(Pause),
    /// Send to a destination again.
    Resume(Pause),
    /// The configured destinations, and those that are paused.
    Destinations,
}

#[derive(Debug, clap::Args)]
struct Filter {
    /// Of this tenant and its principals.
    #[arg(long)]
    tenant: Option<String>,
    /// In this status.
    #[arg(long, value_parser = ["pending", "completed", "dead", "quarantined", "discarded"])]
    status: Option<String>,
    /// For this destination.
    #[arg(long)]
    destination: Option<String>,
    /// Of this run.
    #[arg(long, value_name = "RUN")]
    run: Option<String>,
}

#[derive(Debug, clap::Args)]
struct List {
    #[command(flatten)]
    filter: Filter,
    /// At most this many.
    #[arg(long, default_value_t = 50)]
    limit: u32,
    /// Go on where the page before ended.
    #[arg(long)]
    cursor: Option<String>,
}

#[derive(Debug, clap::Args)]
struct Show {
    /// The intent's id.
    intent_id: String,
}

#[derive(Debug, clap::Args)]
struct Act {
    /// This intent only.
    #[arg(long, value_name = "INTENT", conflicts_with_all = ["tenant", "status", "destination", "run", "all", "limit"])]
    intent: Option<String>,
    #[command(flatten)]
    filter: Filter,
    /// Every dead intent, if nothing else says which.
    #[arg(long)]
    all: bool,
    /// At most this many; without it all that match, page by page.
    #[arg(long)]
    limit: Option<u32>,
    /// Why, for the run's history or the audit log.
    #[arg(long)]
    reason: String,
    /// Don't ask. Without a terminal nobody is asked.
    #[arg(long, short)]
    yes: bool,
}

#[derive(Debug, clap::Args)]
struct Pause {
    /// The destination, as `list` shows it.
    destination: String,
    /// Why, for the audit log.
    #[arg(long)]
    reason: String,
    /// Don't ask. Without a terminal nobody is asked.
    #[arg(long, short)]
    yes: bool,
}

/// Runs the command and writes what it found to `out`.
///
/// # Errors
/// When it was not done, or not to all that was meant; then `out` tells to what it was.
pub async fn execute(
    args: &Args,
    out: &mut (dyn Write + Send),
    paint: Paint,
) -> Result<(), Failure> {
    let client = args.gateway.client()?;
    let answer = match &args.command {
        Command::List(list) => client.get(&list.path()).await?,
        Command::Show(show) => client.get(&one(&show.intent_id)).await?,
        Command::Destinations => client.get("/v1/outbox/destinations").await?,
        Command::Redrive(act) => {
            let warning = "They are sent again, with the same keys and the same bytes.";
            act.perform(&client, "redrive", warning).await?
        }
        Command::Discard(act) => {
            let warning = "They are never sent, and their runs are told.";
            act.perform(&client, "discard", warning).await?
        }
        Command::Pause(pause) => {
            let warning = "No gateway sends to it, for any tenant, until somebody resumes it.";
            pause.perform(&client, "pause", warning).await?
        }
        Command::Resume(pause) => {
            let warning = "Everything that waited for it is sent now.";
            pause.perform(&client, "resume", warning).await?
        }
    };
    if args.gateway.json {
        writeln!(out, "{answer:#}")?;
    } else {
        match &args.command {
            Command::List(_) => table::page(out, &answer, paint)?,
            Command::Show(_) => table::intent(out, &answer, paint)?,
            Command::Destinations => table::destinations(out, &answer, paint)?,
            Command::Redrive(_) | Command::Discard(_) => table::acted(out, &answer)?,
            Command::Pause(_) | Command::Resume(_) => table::paused(out, &answer)?,
        }
    }
    let refused = answer["refused"].as_array().map_or(0, Vec::len);
    if refused > 0 {
        return Err(Failure::NotAll { refused });
    }
    Ok(())
}

impl List {
    fn path(&self) -> String {
        let limit = self.limit.to_string();
        let page = [
            ("limit", Some(limit.as_str())),
            ("cursor", self.cursor.as_deref()),
        ];
        client::path("/v1/outbox", &[&self.filter.parts()[..], &page].concat())
    }
}

impl Filter {
    fn parts(&self) -> [(&'static str, Option<&str>); 4] {
        [
            ("tenant", self.tenant.as_deref()),
            ("status", self.status.as_deref()),
            ("destination", self.destination.as_deref()),
            ("run_id", self.run.as_deref()),
        ]
    }
}

impl Act {
    /// Does it page by page, so that no request takes long, and adds up what the pages told.
    async fn perform(&self, client: &Client, act: &str, warning: &str) -> Result<Value, Failure> {
        let mut body = Map::new();
        body.insert("reason".into(), json!(self.reason));
        match &self.intent {
            Some(id) => body.insert("intent_id".into(), json!(id)),
            None => body.insert("filter".into(), Value::Object(self.filter()?)),
        };
        self.confirm(client, warning).await?;
        let path = format!("/v1/outbox/{act}");
        let (mut done, mut refused) = (0, Vec::new());
        loop {
            if self.intent.is_none() {
                let looked_at = done + refused.len() as u64;
                let left = self
                    .limit
                    .map(|limit| u64::from(limit).saturating_sub(looked_at));
                body.insert("limit".into(), json!(left.unwrap_or(PAGE).min(PAGE)));
            }
            let answer = client.post(&path, &Value::Object(body.clone())).await;
            if answer.is_err() && done > 0 {
                eprintln!("{done} were done before this failed; run it again for the rest");
            }
            let mut answer = answer?;
            done += answer["done"].as_u64().unwrap_or_default();
            if let Value::Array(more) = answer["refused"].take() {
                refused.extend(more);
            }
            let next = answer["next"].take();
            let limit = self.limit.map_or(u64::MAX, u64::from);
            let over = next.is_null() || done + refused.len() as u64 >= limit;
            if over {
                return Ok(json!({ "act": act, "done": done, "refused": refused, "next": next }));
            }
            body.insert("cursor".into(), next);
        }
    }

    fn filter(&self) -> Result<Map<String, Value>, Failure> {
        let given = self.filter.parts().into_iter();
        let filter: Map<_, _> = given
            .filter_map(|(name, value)| Some((name.to_owned(), json!(value?))))
            .collect();
        if filter.is_empty() && !self.all {
            return Err(Failure::Usage(
                "say which: --intent, --destination, --tenant, --run, --status, or --all",
            ));
        }
        Ok(filter)
    }

    async fn confirm(&self, client: &Client, warning: &str) -> Result<(), Failure> {
        gateway::confirm(self.yes, warning, async |out, paint| {
            if let Some(id) = &self.intent {
                return table::intent(out, &client.get(&one(id)).await?, paint);
            }
            // Without a status the gateway takes those that are dead.
            let meant = self
                .filter
                .parts()
                .map(|(name, value)| match (name, value) {
                    ("status", None) => (name, Some("dead")),
                    given => given,
                });
            let parameters = [&meant[..], &[("limit", Some("20"))]].concat();
            let path = client::path("/v1/outbox", &parameters);
            table::page(out, &client.get(&path).await?, paint)
        })
        .await
    }
}

/// Intents that one request is for.
const PAGE: u64 = 200;

impl Pause {
    async fn perform(&self, client: &Client, act: &str, warning: &str) -> Result<Value, Failure> {
        gateway::confirm(self.yes, warning, async |out, paint| {
            let all = client.get("/v1/outbox/destinations").await?;
            table::destinations(out, &all, paint)
        })
        .await?;
        let destination = path_segment(&self.destination);
        let path = format!("/v1/outbox/destinations/{destination}/{act}");
        client.post(&path, &json!({ "reason": self.reason })).await
    }
}

fn one(intent_id: &str) -> String {
    format!("/v1/outbox/{}", path_segment(intent_id))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::tests::parse;

    #[test]
    fn nothing_is_redriven_that_nobody_named() {
        let act = |words: &[&str]| match parse::<Args>(words).unwrap().command {
            Command::Redrive(act) => act.filter().is_ok(),
            other => panic!("{other:?}"),
        };
        assert!(!act(&["redrive", "--reason", "r"]));
        assert!(act(&["redrive", "--reason", "r", "--all"]));
        assert!(act(&["redrive", "--reason", "r", "--destination", "mail"]));
        let both = ["redrive", "--reason", "r", "--intent", "i", "--all"];
        assert!(parse::<Args>(&both).is_err());
    }
}
