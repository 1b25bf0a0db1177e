//! Runs, intents and tries for people, in columns that line up.

use std::io::Write;

use serde::Deserialize;
use serde_json::Value;

use super::Failure;
use crate::cli::paint::Paint;
use crate::cli::table::{self, plain, read};

#[derive(Deserialize)]
struct Page {
    runs: Vec<Run>,
    next: Option<String>,
}

#[derive(Deserialize)]
#[expect(clippy::struct_field_names, reason = "as the API names them")]
struct Run {
    tenant: String,
    run_id: String,
    status: String,
    workflow: String,
    pool: String,
    key: String,
    reason: Option<String>,
    record_version: i64,
    last_transition_seq: i64,
    created_at: String,
    updated_at: String,
    due_at: Option<String>,
    ended_at: Option<String>,
    #[serde(default)]
    intents: Vec<Intent>,
    #[serde(default)]
    attempts: Vec<Attempt>,
    #[serde(default)]
    diagnosis: Vec<String>,
}

/// An intent, as every list of them shows it.
#[derive(Deserialize)]
#[expect(clippy::struct_field_names, reason = "as the API names them")]
pub(in crate::cli) struct Intent {
    pub(in crate::cli) intent_id: String,
    seq: i64,
    step: String,
    pub(in crate::cli) status: String,
    pub(in crate::cli) destination: String,
    pub(in crate::cli) tries: u32,
    pub(in crate::cli) outcome: Option<String>,
}

/// One try of an intent.
#[derive(Deserialize)]
pub(in crate::cli) struct Attempt {
    intent_id: String,
    stamp: String,
    r#try: u32,
    status: String,
    worker: String,
    started_at: String,
    outcome: Option<String>,
    answer_status: Option<u16>,
    diagnostic: Option<String>,
}

#[derive(Deserialize)]
struct History {
    transitions: Vec<Transition>,
    next: Option<i64>,
}

#[derive(Deserialize)]
struct Transition {
    seq: i64,
    at: String,
    kind: String,
    step: Option<String>,
    detail: Value,
}

#[derive(Deserialize)]
struct Acted {
    act: String,
    repeated: bool,
    run: State,
}

#[derive(Deserialize)]
struct State {
    status: String,
    reason: Option<String>,
}

/// A page of runs, one a line.
pub(super) fn page(out: &mut dyn Write, answer: &Value, paint: Paint) -> Result<(), Failure> {
    let page: Page = read(answer)?;
    if page.runs.is_empty() {
        writeln!(out, "No run matches.")?;
        return Ok(());
    }
    let names = [
        "STATUS", "RUN", "TENANT", "WORKFLOW", "KEY", "UPDATED", "WHY",
    ];
    let row = |run: &Run| {
        [
            plain(&run.status),
            plain(&run.run_id),
            plain(&run.tenant),
            plain(&run.workflow),
            plain(&run.key),
            second(&run.updated_at),
            plain(run.reason.as_deref().unwrap_or_default()),
        ]
    };
    let rows: Vec<_> = page.runs.iter().map(row).collect();
    table::columns(out, names, &rows, paint)?;
    table::more(out, page.next.as_deref(), paint)
}

/// One run's facts.
pub(super) fn head(out: &mut dyn Write, answer: &Value, paint: Paint) -> Result<(), Failure> {
    let run: Run = read(answer)?;
    let mut facts = vec![
        ("run", plain(&run.run_id)),
        ("status", paint.state(&run.status, &plain(&run.status))),
        ("tenant", plain(&run.tenant)),
        ("workflow", plain(&run.workflow)),
        ("pool", plain(&run.pool)),
        ("key", plain(&run.key)),
        (
            "version",
            format!(
                "{}, {} transitions",
                run.record_version, run.last_transition_seq
            ),
        ),
        ("created", plain(&run.created_at)),
        ("updated", plain(&run.updated_at)),
    ];
    let more = [
        ("due", &run.due_at),
        ("ended", &run.ended_at),
        ("why", &run.reason),
    ];
    for (name, value) in more {
        facts.extend(value.as_ref().map(|value| (name, plain(value))));
    }
    table::facts(out, &facts, paint)
}

/// One run with everything about it.
pub(super) fn run(
    out: &mut dyn Write,
    answer: &Value,
    history: &Value,
    paint: Paint,
) -> Result<(), Failure> {
    head(out, answer, paint)?;
    let run: Run = read(answer)?;
    if !run.intents.is_empty() {
        writeln!(out, "\n{}", paint.bold("Intents"))?;
        let names = [
            "STATUS",
            "#",
            "STEP",
            "DESTINATION",
            "TRIES",
            "OUTCOME",
            "INTENT",
        ];
        let row = |intent: &Intent| {
            [
                plain(&intent.status),
                intent.seq.to_string(),
                plain(&intent.step),
                plain(&intent.destination),
                intent.tries.to_string(),
                plain(intent.outcome.as_deref().unwrap_or("-")),
                plain(&intent.intent_id),
            ]
        };
        let rows: Vec<_> = run.intents.iter().map(row).collect();
        table::columns(out, names, &rows, paint)?;
    }
    let place = |id: &str| {
        let found = run.intents.iter().find(|intent| intent.intent_id == id);
        found.map_or_else(|| "?".into(), |intent| intent.seq.to_string())
    };
    attempts(out, &run.attempts, place, paint)?;
    transitions(out, &read(history)?, paint)?;
    if !run.diagnosis.is_empty() {
        writeln!(out, "\n{}", paint.bold("Diagnosis"))?;
        for sentence in &run.diagnosis {
            writeln!(out, "- {}", plain(sentence))?;
        }
    }
    Ok(())
}

/// Tries, newest first; `place` is the number of an intent.
pub(in crate::cli) fn attempts(
    out: &mut dyn Write,
    attempts: &[Attempt],
    place: impl Fn(&str) -> String,
    paint: Paint,
) -> Result<(), Failure> {
    if attempts.is_empty() {
        return Ok(());
    }
    writeln!(out, "\n{}", paint.bold("Tries, newest first"))?;
    let names = [
        "STATUS", "#", "TRY", "STARTED", "WORKER", "OUTCOME", "STAMP", "MORE",
    ];
    let row = |attempt: &Attempt| {
        let answer = attempt.answer_status.map(|status| status.to_string());
        let outcome = [attempt.outcome.clone(), answer];
        let outcome: Vec<String> = outcome.into_iter().flatten().collect();
        [
            plain(&attempt.status),
            place(&attempt.intent_id),
            attempt.r#try.to_string(),
            second(&attempt.started_at),
            plain(&attempt.worker),
            plain(&outcome.join(" ")),
            plain(&attempt.stamp),
            plain(attempt.diagnostic.as_deref().unwrap_or_default()),
        ]
    };
    let rows: Vec<_> = attempts.iter().map(row).collect();
    table::columns(out, names, &rows, paint)
}

fn transitions(out: &mut dyn Write, history: &History, paint: Paint) -> Result<(), Failure> {
    writeln!(out, "\n{}", paint.bold("History"))?;
    for line in &history.transitions {
        let step = line.step.as_deref().unwrap_or_default();
        let detail = match &line.detail {
            Value::Null => String::new(),
            detail => detail.to_string(),
        };
        let text = format!(
            "{:4}  {}  {} {step} {detail}",
            line.seq,
            second(&line.at),
            line.kind
        );
        writeln!(out, "{}", plain(text.trim_end()))?;
    }
    if let Some(next) = history.next {
        let hint = format!("More than {next}: GET /v1/runs/…/transitions?after={next}");
        writeln!(out, "{}", paint.faint(hint))?;
    }
    Ok(())
}

/// What an act did.
pub(super) fn acted(out: &mut dyn Write, answer: &Value, paint: Paint) -> Result<(), Failure> {
    let acted: Acted = read(answer)?;
    let status = paint.state(&acted.run.status, &plain(&acted.run.status));
    let done = if acted.repeated {
        "Done before"
    } else {
        "Done"
    };
    let why = acted.run.reason.map(|why| format!(": {}", plain(&why)));
    let why = why.unwrap_or_else(|| ".".into());
    writeln!(
        out,
        "{done} ({}): the run is {status} now{why}",
        plain(&acted.act)
    )?;
    Ok(())
}

/// A time without its fraction.
fn second(time: &str) -> String {
    let (whole, _) = time.split_once('.').unwrap_or((time, ""));
    plain(whole.trim_end_matches('Z'))
}
