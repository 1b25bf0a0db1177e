//! Records for people, in columns that line up.

use std::io::Write;

use serde::Deserialize;
use serde_json::Value;

use super::Failure;
use crate::cli::paint::Paint;
use crate::cli::table::{self, ago, plain, read};

#[derive(Deserialize)]
struct Page {
    records: Vec<Record>,
    next: Option<String>,
}

#[derive(Deserialize)]
struct Record {
    tenant: String,
    pool: String,
    key: String,
    status: String,
    lease: Option<Lease>,
    maybe_sent: Option<bool>,
    decision_id: Option<String>,
    validity: Option<String>,
    generation: i64,
    created_at: String,
    reserved_at: String,
    reserved_ago_ms: u64,
    on_unknown: String,
    answer_status: Option<u16>,
    decision: Option<Decision>,
}

#[derive(Deserialize)]
struct Lease {
    state: String,
    remaining_ms: Option<u64>,
}

#[derive(Deserialize)]
struct Decision {
    decided_by: String,
    created_at: String,
    expires_at: String,
    answer_status: u16,
    header_names: Vec<String>,
    body_bytes: Option<u64>,
    replayable: bool,
}

#[derive(Deserialize)]
struct Acted {
    act: String,
    status: Option<String>,
}

/// A page of records, one a line.
pub(super) fn page(out: &mut dyn Write, answer: &Value, paint: Paint) -> Result<(), Failure> {
    let page: Page = read(answer)?;
    if page.records.is_empty() {
        writeln!(out, "No record matches.")?;
        return Ok(());
    }
    let names = ["STATUS", "TENANT", "POOL", "KEY", "CLAIMED", "MORE"];
    let rows: Vec<_> = page.records.iter().map(row).collect();
    table::columns(out, names, &rows, paint)?;
    table::more(out, page.next.as_deref(), paint)
}

/// One record, one fact a line.
pub(super) fn record(out: &mut dyn Write, answer: &Value, paint: Paint) -> Result<(), Failure> {
    let record: Record = read(answer)?;
    let mut status = paint.state(&record.status, &plain(&record.status));
    let more = more(&record);
    if !more.is_empty() {
        status = format!("{status} ({more})");
    }
    let mut facts = vec![
        ("tenant", plain(&record.tenant)),
        ("pool", plain(&record.pool)),
        ("key", plain(&record.key)),
        ("status", status),
        ("generation", record.generation.to_string()),
        ("created", record.created_at.clone()),
        (
            "claimed",
            format!("{} ({})", record.reserved_at, ago(record.reserved_ago_ms)),
        ),
        ("on unknown", record.on_unknown.clone()),
    ];
    if let Some(id) = &record.decision_id {
        facts.push(("decision", id.clone()));
    }
    if let Some(decision) = &record.decision {
        let body = decision.body_bytes.map(|bytes| format!("{bytes} bytes"));
        let replay = if decision.replayable { "yes" } else { "no" };
        facts.extend([
            ("decided by", plain(&decision.decided_by)),
            ("committed", decision.created_at.clone()),
            ("expires", decision.expires_at.clone()),
            ("answer", decision.answer_status.to_string()),
            ("headers", plain(&decision.header_names.join(", "))),
            ("body", body.unwrap_or_else(|| "not kept".into())),
            ("replayable", replay.into()),
        ]);
    }
    table::facts(out, &facts, paint)
}

/// What an act did.
pub(super) fn acted(out: &mut dyn Write, answer: &Value, paint: Paint) -> Result<(), Failure> {
    let acted: Acted = read(answer)?;
    let act = plain(&acted.act);
    match acted.status {
        Some(status) => {
            let status = paint.state(&status, &plain(&status));
            writeln!(out, "Done ({act}): the record is {status} now.")?;
        }
        None => writeln!(out, "Done ({act}): the record is gone.")?,
    }
    Ok(())
}

fn row(record: &Record) -> [String; 6] {
    [
        plain(&record.status),
        plain(&record.tenant),
        plain(&record.pool),
        plain(&record.key),
        ago(record.reserved_ago_ms),
        more(record),
    ]
}

/// What a state's word leaves open.
fn more(record: &Record) -> String {
    let mut parts = Vec::new();
    if let Some(lease) = &record.lease {
        parts.push(match lease.remaining_ms {
            Some(remaining) => format!("owner at work, lease {remaining} ms"),
            None => format!("lease {}", plain(&lease.state)),
        });
    }
    if record.maybe_sent == Some(true) {
        parts.push("may have been sent".into());
    }
    if let Some(status) = record.answer_status {
        parts.push(format!("answered {status}"));
    }
    if let Some(validity) = &record.validity {
        parts.push(plain(validity));
    }
    parts.join(", ")
}
