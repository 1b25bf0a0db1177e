//! `oncegate records`: find, look at and settle records through the admin API of a running
//! gateway.
//!
//! It never opens the store: only a gateway knows who is at work, and a change must reach its
//! cache. The token comes from a file or the environment, never as an argument that others on the
//! machine could see.

mod table;

use std::io::Write;
use std::path::PathBuf;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value, json};

pub use super::gateway::Failure;
pub use super::paint::Paint;

use super::client::{self, Client};
use super::gateway::{self, Gateway};
use crate::head::path_segment;

const EXAMPLES: &str = "\
Examples:
  oncegate records find --status outcome_unknown --older-than 10m
  oncegate records show acme payments order-42
  oncegate records release acme payments order-42 --reason 'the bank has no such payment'
  oncegate records resolve acme payments order-42 --reason 'paid, seen in the bank' \\
      --status 201 --header 'content-type: application/json' --body '{\"id\":7}'

A tenant is written as `find` shows it; one with a principal holds a space and needs quotes.

The token:
  openssl rand -hex 32 > operator.token
  printf %s \"$(cat operator.token)\" | sha256sum    # what the gateway's configuration gets
  export ONCEGATE_TOKEN=\"$(cat operator.token)\"    # or: --token-file operator.token

Exit codes:
  0  done
  1  the gateway can't be reached, or something else failed
  2  wrong usage
  4  there is no such record, or the token may not see it
  5  the record's state does not allow it, or not yet
  6  no token, or one that may not do this
  7  not confirmed";

/// Find, look at and settle records of a running gateway.
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
    /// List records, in the order of tenant, pool and key.
    Find(Find),
    /// Show one record and its decision, without the body.
    Show(Which),
    /// It never happened: the next request with this key runs again.
    Release(Act),
    /// It happened: give the answer that every retry gets from now on.
    Resolve(Resolve),
    /// Forget a settled record: the next request with this key runs again.
    Purge(Act),
}

#[derive(Debug, clap::Args)]
struct Find {
    /// Of this tenant and its principals.
    #[arg(long)]
    tenant: Option<String>,
    /// Of this pool.
    #[arg(long)]
    pool: Option<String>,
    /// Whose key begins with this.
    #[arg(long, value_name = "TEXT")]
    key_prefix: Option<String>,
    /// In this state.
    #[arg(long, value_parser = ["pending", "completed", "failed_before_commit", "outcome_unknown"])]
    status: Option<String>,
    /// Last claimed at least this long ago, such as `10m` or `2h 30m`.
    #[arg(long, value_name = "TIME")]
    older_than: Option<String>,
    /// At most this many.
    #[arg(long, default_value_t = 50)]
    limit: u32,
    /// Go on where the page before ended.
    #[arg(long)]
    cursor: Option<String>,
}

#[derive(Debug, clap::Args)]
struct Which {
    /// The tenant, as `find` shows it.
    tenant: String,
    /// The pool.
    pool: String,
    /// The idempotency key, unquoted.
    key: String,
}

#[derive(Debug, clap::Args)]
struct Act {
    #[command(flatten)]
    which: Which,
    /// Why, for the audit log.
    #[arg(long)]
    reason: String,
    /// Don't ask. Without a terminal nobody is asked.
    #[arg(long, short)]
    yes: bool,
}

#[derive(Debug, clap::Args)]
struct Resolve {
    #[command(flatten)]
    act: Act,
    /// The answer's status.
    #[arg(long, value_parser = clap::value_parser!(u16).range(200..600))]
    status: u16,
    /// A header line of the answer; may be given again.
    #[arg(long = "header", value_name = "NAME: VALUE", value_parser = header_line)]
    headers: Vec<(String, String)>,
    /// The answer's body.
    #[arg(long, value_name = "TEXT", conflicts_with = "body_file")]
    body: Option<String>,
    /// A file that holds the answer's body.
    #[arg(long, value_name = "FILE")]
    body_file: Option<PathBuf>,
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
        Command::Find(find) => client.get(&find.path()).await?,
        Command::Show(which) => client.get(&which.path("")).await?,
        Command::Release(act) => {
            let warning = "The next request with this key runs again: be sure that the service \
                           never ran it.";
            act.perform(&client, "/release", warning, Map::new())
                .await?
        }
        Command::Resolve(resolve) => {
            let warning = "Every retry gets the answer that you give, and the service is not \
                           called again.";
            let answer = resolve.answer()?;
            resolve
                .act
                .perform(&client, "/resolve", warning, answer)
                .await?
        }
        Command::Purge(act) => {
            let warning = "The record and its answer are forgotten; the next request with this \
                           key runs again.";
            act.perform(&client, "/purge", warning, Map::new()).await?
        }
    };
    if json {
        writeln!(out, "{answer:#}")?;
        return Ok(());
    }
    match &args.command {
        Command::Find(_) => table::page(out, &answer, paint)?,
        Command::Show(_) => table::record(out, &answer, paint)?,
        Command::Release(_) | Command::Resolve(_) | Command::Purge(_) => {
            table::acted(out, &answer, paint)?;
        }
    }
    Ok(())
}

impl Act {
    /// Does what can't be taken back. First it shows the record and asks, if there is somebody to
    /// ask.
    async fn perform(
        &self,
        client: &Client,
        act: &str,
        warning: &str,
        mut body: Map<String, Value>,
    ) -> Result<Value, Failure> {
        gateway::confirm(self.yes, warning, async |out, paint| {
            let record = client.get(&self.which.path("")).await?;
            table::record(out, &record, paint)
        })
        .await?;
        body.insert("reason".into(), json!(self.reason));
        client
            .post(&self.which.path(act), &Value::Object(body))
            .await
    }
}

impl Find {
    fn path(&self) -> String {
        let limit = self.limit.to_string();
        let parameters = [
            ("tenant", self.tenant.as_deref()),
            ("pool", self.pool.as_deref()),
            ("key_prefix", self.key_prefix.as_deref()),
            ("status", self.status.as_deref()),
            ("older_than", self.older_than.as_deref()),
            ("limit", Some(limit.as_str())),
            ("cursor", self.cursor.as_deref()),
        ];
        client::path("/v1/records", &parameters)
    }
}

impl Which {
    fn path(&self, act: &str) -> String {
        let parts = [&self.tenant, &self.pool, &self.key].map(|part| path_segment(part));
        format!("/v1/records/{}{act}", parts.join("/"))
    }
}

impl Resolve {
    fn answer(&self) -> Result<Map<String, Value>, Failure> {
        let headers = self.headers.iter();
        let headers: Vec<Value> = headers
            .map(|(name, value)| json!({ "name": name, "value": value }))
            .collect();
        let mut body = Map::new();
        body.insert("status".into(), json!(self.status));
        body.insert("headers".into(), json!(headers));
        if let Some(text) = &self.body {
            body.insert("body".into(), json!(text));
        } else if let Some(path) = &self.body_file {
            let bytes = gateway::read(path)?;
            body.insert("body_base64".into(), json!(STANDARD.encode(bytes)));
        }
        Ok(body)
    }
}

fn header_line(line: &str) -> Result<(String, String), String> {
    let (name, value) = line.split_once(':').ok_or("write it as `name: value`")?;
    Ok((name.trim().to_owned(), value.trim().to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::tests::parse;

    #[test]
    fn every_part_of_a_path_is_encoded() {
        let args: Args = parse(&["show", "acme p1-00ff", "pay", "a/b %?#.."]).unwrap();
        let Command::Show(which) = args.command else {
            panic!("{args:?}");
        };
        assert_eq!(
            which.path(""),
            "/v1/records/acme%20p1-00ff/pay/a%2Fb%20%25%3F%23.."
        );
    }

    #[test]
    fn an_act_needs_a_reason() {
        assert!(parse::<Args>(&["purge", "acme", "pay", "k"]).is_err());
        assert!(parse::<Args>(&["purge", "acme", "pay", "k", "--reason", "r"]).is_ok());
    }
}
