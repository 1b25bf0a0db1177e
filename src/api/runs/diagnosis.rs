//! Why a run stands where it stands, and why something was sent twice: in sentences, from what the
//! store holds.

use crate::domain::intent::IntentStatus;
use crate::domain::run::{Run, RunStatus};
use crate::store::outbox::IntentLine;
use crate::store::runs::Attempt;

/// Tries that one sentence lists, newest last.
const TRIES_MAX: usize = 5;

/// What is out of the ordinary. `attempts` are the run's, newest first.
pub(super) fn diagnose(run: &Run, intents: &[IntentLine], attempts: &[Attempt]) -> Vec<String> {
    let mut told: Vec<String> = of_run(run).into_iter().collect();
    for intent in intents {
        let own: Vec<&Attempt> = attempts
            .iter()
            .filter(|attempt| attempt.intent_id == intent.key.id)
            .collect();
        told.extend(of_tries(intent, &own));
        told.extend(of_status(intent, &own));
    }
    told
}

fn of_run(run: &Run) -> Option<String> {
    let reason = run.reason.as_deref().unwrap_or("no reason is known");
    match run.status {
        RunStatus::Stuck => Some(format!(
            "The run is stuck: {reason}. Retry it (the same keys and bytes), resume it (go on \
             without what failed), or cancel it (undo what was done)."
        )),
        RunStatus::Failed | RunStatus::Compensated | RunStatus::Cancelled => {
            Some(format!("The run is {}: {reason}.", run.status.word()))
        }
        RunStatus::Running | RunStatus::Waiting | RunStatus::Completed => None,
    }
}

/// Why it was sent more than once, if it was.
fn of_tries(intent: &IntentLine, attempts: &[&Attempt]) -> Option<String> {
    let sent: Vec<&&Attempt> = attempts
        .iter()
        .filter(|attempt| attempt.status != "released")
        .collect();
    if sent.len() < 2 {
        return None;
    }
    let listed = sent.iter().take(TRIES_MAX).rev();
    let tries: Vec<String> = listed.map(|attempt| of_try(attempt)).collect();
    let newest = if sent.len() > TRIES_MAX {
        ", the newest"
    } else {
        ""
    };
    Some(format!(
        "{} was sent {} times, each time with the key {} and the same bytes{newest}: {}.",
        subject(intent),
        sent.len(),
        intent.idempotency_key,
        tries.join("; ")
    ))
}

fn of_try(attempt: &Attempt) -> String {
    let mut text = format!("try {} by {}", attempt.try_no, attempt.worker);
    text += match attempt.status.as_str() {
        "open" => " is at work",
        "delivered" => " was delivered",
        "lost" => {
            " ended without a word: whoever had it stopped or lost the store, and may have sent it"
        }
        _ => " failed",
    };
    if attempt.status == "failed" {
        text += match attempt.answer_status {
            Some(_) => ", and the destination answered",
            None => ", without an answer: the destination may have acted on it",
        };
    }
    let more = [
        attempt.outcome.clone(),
        attempt.answer_status.map(|status| status.to_string()),
    ];
    let more: Vec<String> = more.into_iter().flatten().collect();
    if !more.is_empty() {
        text.push_str(" (");
        text.push_str(&more.join(", "));
        text.push(')');
    }
    text
}

fn of_status(intent: &IntentLine, attempts: &[&Attempt]) -> Option<String> {
    let subject = subject(intent);
    let diagnostic = intent.diagnostic.as_deref();
    let outcome = diagnostic.or(intent.outcome.as_deref());
    let why = outcome.unwrap_or("no reason is known");
    match intent.status {
        IntentStatus::Dead => Some(format!(
            "{subject} was given up after {} tries: {why}.",
            intent.tries
        )),
        IntentStatus::Quarantined => Some(format!(
            "{subject} is kept back: {} claims in a row ended without a word, so it may stop the \
             process that sends it.",
            intent.deaths
        )),
        IntentStatus::Discarded => Some(format!("{subject} is not wanted any more: {why}.")),
        IntentStatus::Pending if intent.claimed => {
            let worker = attempts.first().map(|attempt| &*attempt.worker);
            Some(format!(
                "{subject} is at work now, by {}.",
                worker.unwrap_or("a worker")
            ))
        }
        IntentStatus::Pending if intent.tries > 0 => Some(format!(
            "{subject} is tried again when `due_at` comes; the newest try: {why}."
        )),
        IntentStatus::Pending | IntentStatus::Completed => None,
    }
}

fn subject(intent: &IntentLine) -> String {
    format!(
        "Intent {} (step {}, to {})",
        intent.seq, intent.step, intent.destination.0
    )
}
