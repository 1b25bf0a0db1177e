//! Intents and destinations for people, in columns that line up.

use std::io::Write;

use serde::Deserialize;
use serde_json::Value;

use super::Failure;
use crate::cli::paint::Paint;
use crate::cli::runs::table::{Attempt, attempts};
use crate::cli::table::{self, ago, plain, read};

#[derive(Deserialize)]
struct Page {
    intents: Vec<Intent>,
    next: Option<String>,
}

#[derive(Deserialize)]
#[expect(clippy::struct_field_names, reason = "as the API names them")]
struct Intent {
    tenant: String,
    intent_id: String,
    run_id: String,
    seq: i64,
    step: String,
    status: String,
    destination: String,
    idempotency_key: String,
    sending: Sending,
    claimed: bool,
    age_ms: Option<u64>,
    due_at: Option<String>,
    tries: u32,
    faults: u32,
    deaths: u32,
    redrives: u32,
    outcome: Option<String>,
    answer_status: Option<u16>,
    diagnostic: Option<String>,
    body_bytes: Option<u64>,
    created_at: String,
    ended_at: Option<String>,
    #[serde(default)]
    attempts: Vec<Attempt>,
}

#[derive(Deserialize)]
struct Sending {
    kind: String,
    method: Option<String>,
    path: Option<String>,
    subject: Option<String>,
}

#[derive(Deserialize)]
struct Acted {
    act: String,
    done: u64,
    refused: Vec<Refused>,
    next: Option<String>,
}

#[derive(Deserialize)]
struct Refused {
    intent_id: String,
    why: String,
}

#[derive(Deserialize)]
struct Destinations {
    destinations: Vec<Destination>,
}

#[derive(Deserialize)]
#[expect(clippy::struct_field_names, reason = "as the API names them")]
struct Destination {
    destination: String,
    configured: bool,
    paused: Option<Pause>,
}

#[derive(Deserialize)]
struct Pause {
    at: String,
    operator: String,
    reason: String,
}

#[derive(Deserialize)]
struct Paused {
    destination: String,
    paused: bool,
}

/// A page of intents, one a line.
pub(super) fn page(out: &mut dyn Write, answer: &Value, paint: Paint) -> Result<(), Failure> {
    let page: Page = read(answer)?;
    if page.intents.is_empty() {
        writeln!(out, "No intent matches.")?;
        return Ok(());
    }
    let names = [
        "STATUS",
        "INTENT",
        "TENANT",
        "DESTINATION",
        "STEP",
        "TRIES",
        "AGE",
        "OUTCOME",
    ];
    let row = |intent: &Intent| {
        [
            plain(&intent.status),
            plain(&intent.intent_id),
            plain(&intent.tenant),
            plain(&intent.destination),
            plain(&intent.step),
            intent.tries.to_string(),
            intent.age_ms.map_or_else(|| "-".into(), ago),
            outcome(intent),
        ]
    };
    let rows: Vec<_> = page.intents.iter().map(row).collect();
    table::columns(out, names, &rows, paint)?;
    table::more(out, page.next.as_deref(), paint)
}

fn outcome(intent: &Intent) -> String {
    let status = intent.answer_status.map(|status| status.to_string());
    let parts = [intent.outcome.clone(), status];
    let text: Vec<String> = parts.into_iter().flatten().collect();
    plain(&text.join(" "))
}

/// One intent and its tries.
pub(super) fn intent(out: &mut dyn Write, answer: &Value, paint: Paint) -> Result<(), Failure> {
    let intent: Intent = read(answer)?;
    let sending = [
        Some(&intent.sending.kind),
        intent.sending.method.as_ref(),
        intent.sending.path.as_ref(),
        intent.sending.subject.as_ref(),
    ];
    let sending: Vec<String> = sending
        .into_iter()
        .flatten()
        .map(|part| plain(part))
        .collect();
    let mut status = paint.state(&intent.status, &plain(&intent.status));
    if intent.claimed {
        status += " (somebody has it now)";
    }
    let body = intent.body_bytes.map(|bytes| format!("{bytes} bytes"));
    let mut facts = vec![
        ("intent", plain(&intent.intent_id)),
        ("status", status),
        (
            "run",
            format!(
                "{}, place {}, step {}",
                plain(&intent.run_id),
                intent.seq,
                plain(&intent.step)
            ),
        ),
        ("tenant", plain(&intent.tenant)),
        ("destination", plain(&intent.destination)),
        ("sending", sending.join(" ")),
        ("key", plain(&intent.idempotency_key)),
        ("body", body.unwrap_or_else(|| "gone".into())),
        (
            "tries",
            format!(
                "{}, of which {} failed for a fault of its own; {} ended without a word in a row; redriven {} times",
                intent.tries, intent.faults, intent.deaths, intent.redrives
            ),
        ),
        ("outcome", outcome(&intent)),
        ("created", plain(&intent.created_at)),
    ];
    let more = [
        ("due", &intent.due_at),
        ("ended", &intent.ended_at),
        ("why", &intent.diagnostic),
    ];
    for (name, value) in more {
        facts.extend(value.as_ref().map(|value| (name, plain(value))));
    }
    table::facts(out, &facts, paint)?;
    attempts(out, &intent.attempts, |_| intent.seq.to_string(), paint)
}

/// What an act did.
pub(super) fn acted(out: &mut dyn Write, answer: &Value) -> Result<(), Failure> {
    let acted: Acted = read(answer)?;
    writeln!(
        out,
        "Done ({}) to {} intents.",
        plain(&acted.act),
        acted.done
    )?;
    for refused in &acted.refused {
        writeln!(
            out,
            "Not to {}: {}",
            plain(&refused.intent_id),
            plain(&refused.why)
        )?;
    }
    if acted.next.is_some() {
        writeln!(out, "There are more.")?;
    }
    Ok(())
}

/// Destinations, one a line.
pub(super) fn destinations(
    out: &mut dyn Write,
    answer: &Value,
    paint: Paint,
) -> Result<(), Failure> {
    let all: Destinations = read(answer)?;
    if all.destinations.is_empty() {
        writeln!(out, "No destination is configured, and none is paused.")?;
        return Ok(());
    }
    let names = ["STATE", "DESTINATION", "CONFIGURED", "SINCE", "BY", "WHY"];
    let row = |one: &Destination| {
        let pause = one.paused.as_ref();
        let told = |part: fn(&Pause) -> &String| {
            pause.map_or_else(String::new, |pause| plain(part(pause)))
        };
        [
            if pause.is_some() { "paused" } else { "active" }.into(),
            plain(&one.destination),
            if one.configured { "yes" } else { "no" }.into(),
            told(|pause| &pause.at),
            told(|pause| &pause.operator),
            told(|pause| &pause.reason),
        ]
    };
    let rows: Vec<_> = all.destinations.iter().map(row).collect();
    table::columns(out, names, &rows, paint)
}

/// What became of a destination.
pub(super) fn paused(out: &mut dyn Write, answer: &Value) -> Result<(), Failure> {
    let paused: Paused = read(answer)?;
    let state = if paused.paused {
        "is paused"
    } else {
        "is sent to again"
    };
    writeln!(out, "Done: {} {state}.", plain(&paused.destination))?;
    Ok(())
}
