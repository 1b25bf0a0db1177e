//! Workflows and effects, written as they are read.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::{Map, Value, json};

use crate::domain::workflow::{
    Action, Effect, HttpSend, OnFailure, Payload, Retry, Send, Step, Target, Text, Workflow,
};

/// The effects of a step that has several stand in `effects`.
pub fn tell_workflow(workflow: &Workflow) -> Value {
    let steps: Vec<Value> = workflow.steps.iter().map(step).collect();
    json!({ "name": workflow.name, "steps": steps })
}

fn effect(effect: &Effect) -> Value {
    let mut told = Map::new();
    write(&mut told, effect);
    Value::Object(told)
}

fn step(step: &Step) -> Value {
    let mut told = Map::new();
    told.insert("name".into(), json!(step.name));
    match &step.action {
        Action::Effects(effects) => match &effects[..] {
            [one] => write(&mut told, one),
            several => {
                let several: Vec<Value> = several.iter().map(effect).collect();
                told.insert("effects".into(), several.into());
            }
        },
        Action::Wait { for_ms } => {
            told.insert("wait".into(), duration(*for_ms));
        }
        Action::Signal { signal, timeout_ms } => {
            told.insert("signal".into(), json!(signal));
            if let Some(timeout_ms) = timeout_ms {
                told.insert("timeout".into(), duration(*timeout_ms));
            }
        }
    }
    let on_failure = match step.on_failure {
        OnFailure::Stop => "stop",
        OnFailure::Compensate => "compensate",
        OnFailure::Continue => "continue",
    };
    told.insert("on_failure".into(), json!(on_failure));
    if let Some(compensation) = &step.compensation {
        told.insert("compensation".into(), effect(compensation));
    }
    Value::Object(told)
}

fn write(told: &mut Map<String, Value>, effect: &Effect) {
    match &effect.send {
        Send::Http(http) => write_http(told, http),
        Send::Publish {
            destination,
            subject,
        } => {
            told.insert("publish".into(), json!(destination));
            told.insert("subject".into(), text(subject));
        }
        Send::Task { queue } => {
            told.insert("task".into(), json!(queue));
        }
    }
    match &effect.payload {
        Payload::Empty => told.insert("body".into(), json!("none")),
        Payload::Decision => told.insert("body".into(), json!("decision")),
        Payload::Request => told.insert("body".into(), json!("request")),
        Payload::Json(json) => told.insert("payload".into(), json.clone()),
        Payload::Template {
            template,
            content_type,
        } => {
            told.insert("template".into(), json!(template));
            told.insert("content_type".into(), json!(content_type))
        }
    };
    told.insert("timeout".into(), duration(effect.timeout_ms));
    told.insert("retry".into(), retry(&effect.retry));
}

fn write_http(told: &mut Map<String, Value>, http: &HttpSend) {
    let (kind, to) = match &http.to {
        Target::Destination(id) => ("http", id),
        Target::Pool(id) => ("pool", id),
        Target::Url(url) => ("url", url),
    };
    told.insert(kind.into(), json!(to));
    told.insert("method".into(), json!(http.method));
    if let Some(path) = &http.path {
        told.insert("path".into(), text(path));
    }
    if !http.headers.is_empty() {
        told.insert("headers".into(), headers(&http.headers));
    }
}

/// An object, unless a name stands there more than once.
fn headers(lines: &[(String, Text)]) -> Value {
    let names: BTreeSet<&String> = lines.iter().map(|(name, _)| name).collect();
    let told = lines.iter().map(|(name, value)| (name, text(value)));
    if names.len() == lines.len() {
        return Value::Object(told.map(|(name, value)| (name.clone(), value)).collect());
    }
    told.map(|(name, value)| json!([name, value])).collect()
}

fn text(text: &Text) -> Value {
    match text {
        Text::Plain(text) | Text::Template(text) => json!(text),
    }
}

fn retry(retry: &Retry) -> Value {
    json!({
        "first": duration(retry.first_ms),
        "max": duration(retry.max_ms),
        "horizon": duration(retry.horizon_ms),
        "faults": retry.faults_max,
    })
}

fn duration(ms: u64) -> Value {
    json!(humantime::format_duration(Duration::from_millis(ms)).to_string())
}
