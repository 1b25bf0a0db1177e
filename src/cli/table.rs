//! Tables and lists of facts, for people.

use std::io::Write;
use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;

use super::gateway::Failure;
use super::paint::Paint;

/// Rows in columns that line up; the first column is a state's word.
pub(super) fn columns<const N: usize>(
    out: &mut dyn Write,
    names: [&str; N],
    rows: &[[String; N]],
    paint: Paint,
) -> Result<(), Failure> {
    let head = [names.map(String::from)];
    let lines = || head.iter().chain(rows);
    let width = |column: usize| lines().map(|row| row[column].chars().count()).max();
    let widths: [usize; N] = std::array::from_fn(|column| width(column).unwrap_or(0));
    for (line, row) in lines().enumerate() {
        let mut cells = Vec::new();
        for (cell, width) in row.iter().zip(widths) {
            let padded = format!("{cell:width$}");
            cells.push(match (line, cells.len()) {
                (0, _) => paint.faint(&padded),
                (_, 0) => paint.state(cell, &padded),
                _ => padded,
            });
        }
        writeln!(out, "{}", cells.join("  ").trim_end())?;
    }
    Ok(())
}

/// How to see the next page, if there is one.
pub(super) fn more(out: &mut dyn Write, next: Option<&str>, paint: Paint) -> Result<(), Failure> {
    if let Some(next) = next {
        let hint = format!("More: repeat with --cursor {next}");
        writeln!(out, "{}", paint.faint(&hint))?;
    }
    Ok(())
}

/// One fact a line.
pub(super) fn facts(
    out: &mut dyn Write,
    facts: &[(&str, String)],
    paint: Paint,
) -> Result<(), Failure> {
    for (name, value) in facts {
        writeln!(out, "{} {value}", paint.faint(format!("{name:11}")))?;
    }
    Ok(())
}

/// The two largest units: `3h 20m ago`.
pub(super) fn ago(millis: u64) -> String {
    let whole = Duration::from_secs(millis / 1000);
    let text = humantime::format_duration(whole).to_string();
    let units: Vec<&str> = text.split(' ').take(2).collect();
    format!("{} ago", units.join(" "))
}

/// Without what could steer a terminal.
pub(super) fn plain(text: &str) -> String {
    text.replace(char::is_control, "?")
}

/// An answer as this version reads it.
pub(super) fn read<T: for<'a> Deserialize<'a>>(answer: &Value) -> Result<T, Failure> {
    T::deserialize(answer).map_err(|error| {
        Failure::NoAnswer(format!(
            "the gateway answers in a form that this version can't read: {error}"
        ))
    })
}
