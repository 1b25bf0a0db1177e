//! An effect, in the words of the file: where it goes, what it sends, and when it is tried again.
//!
//! Texts that are sent are stored with every run. So no reference is followed in them; what is
//! secret belongs into the headers of a `[[destination]]`.

use super::destinations::{self, Destinations, Timing, header_name, http_url, is_private};
use super::pools::Pools;
use super::report::Report;
use super::section::Section;
use super::section::free::without_references;
use super::value::{Read, Shown, nearest};
use super::{DestinationConfig, DestinationKind};
use crate::domain::message::CREDENTIAL_HEADERS;
use crate::domain::run::freeze;
use crate::domain::workflow::{
    ANSWER_BYTES_MAX, Effect, HttpSend, Payload, Send, Success, Target, Text,
};

/// The keys that say where an effect goes.
pub(super) const KINDS: [&str; 5] = ["http", "pool", "url", "publish", "task"];

/// Where effects can go.
#[derive(Clone, Copy)]
pub(super) struct Places<'p> {
    pub(super) destinations: &'p Destinations,
    pub(super) pools: &'p Pools,
}

/// An effect whose times can still be compared.
pub(super) struct EffectRead {
    /// Nothing if something is wrong with it.
    pub(super) effect: Option<Effect>,
    pub(super) timing: Timing,
}

/// The one key of these that is written. Notes an error if there is none, or more than one.
pub(super) fn one_of(section: &mut Section<'_>, keys: &[&'static str]) -> Option<&'static str> {
    section.ask(keys);
    let written: Vec<_> = keys.iter().filter(|key| section.has(key)).collect();
    match written[..] {
        [one] => Some(one),
        [] => {
            let (last, others) = keys.split_last()?;
            section.wrong(&format!(
                "does nothing; write one of {} or {last}",
                others.join(", ")
            ));
            None
        }
        [one, other, ..] => {
            section.wrong(&format!("has both {one} and {other}; leave one out"));
            None
        }
    }
}

/// Reads an effect that is all of its section.
pub(super) fn read_whole(
    mut section: Section<'_>,
    places: Places<'_>,
    report: &mut Report,
) -> EffectRead {
    let kind = one_of(&mut section, &KINDS);
    let read = read(&mut section, kind, places);
    report.merge(section.finish());
    read
}

/// Reads an effect of this kind; `None`: it is not known, and any key may be right.
pub(super) fn read(
    section: &mut Section<'_>,
    kind: Option<&'static str>,
    places: Places<'_>,
) -> EffectRead {
    let destination = match kind {
        Some(key @ ("http" | "publish")) => find_destination(section, key, places),
        _ => None,
    };
    let send = match kind {
        Some(key @ ("http" | "pool" | "url")) => {
            let to = target(section, key, destination.map(|(id, _)| id), places);
            http_send(section, key, to)
        }
        Some("publish") => {
            let form = "the subject, such as \"orders.created\"";
            let subject = required(section, "subject", form, subject);
            destination
                .zip(subject)
                .map(|((id, _), subject)| Send::Publish {
                    destination: id.to_owned(),
                    subject,
                })
        }
        Some("task") => {
            let queue = section.text_if_any("task", None, destinations::name);
            queue.map(|queue| Send::Task { queue: queue.value })
        }
        _ => {
            section.ask(&["method", "path", "headers", "subject"]);
            None
        }
    };
    let payload = payload(section);
    let timing = Timing::read(section, destination.map(|(_, timing)| timing));
    let effect = send.zip(payload).map(|(send, payload)| Effect {
        send,
        payload,
        retry: timing.retry.value(),
        timeout_ms: timing.timeout_ms(),
    });
    EffectRead { effect, timing }
}

/// The destination that an effect names: it must be there and speak what is wanted.
fn find_destination<'p>(
    section: &mut Section<'_>,
    key: &'static str,
    places: Places<'p>,
) -> Option<(&'p str, &'p Timing)> {
    let id = section.text_if_any(key, None, destinations::name)?;
    let Some(found) = places.destinations.find(&id.value) else {
        if places.destinations.complete {
            let known = places.destinations.ids();
            unknown(section, &id, "destination", &id.value, known);
        }
        return None;
    };
    let DestinationConfig {
        id: known, kind, ..
    } = &found.config;
    let problem = match (kind, key) {
        (DestinationKind::Nats { .. }, "http") => "is NATS; write publish, with a subject",
        (DestinationKind::Http { .. }, "publish") => "is an HTTP server; write http",
        _ => return Some((&known.0, &found.timing)),
    };
    section
        .report
        .error(&id.origin, format!("{id}: this destination {problem}"));
    None
}

/// Notes that a name is not known.
pub(super) fn unknown<'n, T>(
    section: &mut Section<'_>,
    read: &Read<T>,
    what: &str,
    name: &str,
    known: impl Iterator<Item = &'n str>,
) {
    let key = if what == "workflow" { "name" } else { "id" };
    let hint = nearest(name, known).map_or_else(
        || format!("add a [[{what}]] with this {key}"),
        |near| format!("did you mean \"{near}\"?"),
    );
    section.report.error(
        &read.origin,
        format!("{read}: there is no such {what}; {hint}"),
    );
}

fn target(
    section: &mut Section<'_>,
    key: &'static str,
    destination: Option<&str>,
    places: Places<'_>,
) -> Option<Target> {
    match key {
        "http" => destination.map(|id| Target::Destination(id.to_owned())),
        "url" => {
            let url = section.stored("url", http_url)?;
            let host = url.value.host().unwrap_or_default();
            if is_private(host) {
                section.report.error(
                    &url.origin,
                    format!("{url} is in a private network, which is refused; make it a [[destination]] with allow_private = true"),
                );
                return None;
            }
            Some(Target::Url(url.value.to_string()))
        }
        _ => {
            let id = section.text_if_any("pool", None, super::parse::pool_id)?;
            let pools = || places.pools.iter().map(|(_, pool)| pool.as_ref());
            let known = || pools().flatten().map(|pool| pool.id.as_str());
            if known().any(|known| known == id.value.as_str()) {
                return Some(Target::Pool(id.value.as_str().to_owned()));
            }
            if pools().all(|pool| pool.is_some()) {
                unknown(section, &id, "pool", id.value.as_str(), known());
            }
            None
        }
    }
}

fn http_send(section: &mut Section<'_>, key: &str, to: Option<Target>) -> Option<Send> {
    let method = section.text("method", "POST", method);
    // A destination's URL and a plain one say where; a pool does not.
    let path = if key == "pool" {
        let form = "the path at the pool, such as \"/v1/receipts\"";
        Some(required(section, "path", form, path)?)
    } else {
        section.stored("path", path).map(|path| path.value)
    };
    let mut headers = Vec::new();
    for entry in section.entries("headers", Shown::Whole) {
        match header(&entry.name, &entry.text) {
            Ok(header) => headers.push(header),
            Err(problem) => section.wrong_entry("headers", &entry, &problem),
        }
    }
    Some(Send::Http(HttpSend {
        to: to?,
        method: method.value,
        path,
        headers,
        success: Success::Ok,
        answer_bytes_max: ANSWER_BYTES_MAX,
    }))
}

fn required(
    section: &mut Section<'_>,
    key: &'static str,
    form: &str,
    parse: impl Fn(&str) -> Result<Text, String>,
) -> Option<Text> {
    if !section.has(key) {
        section.ask(&[key]);
        section.missing(key, form);
    }
    section.stored(key, parse).map(|text| text.value)
}

fn payload(section: &mut Section<'_>) -> Option<Payload> {
    const KEYS: [&str; 3] = ["payload", "template", "body"];
    section.ask(&KEYS);
    let written: Vec<_> = KEYS.iter().filter(|key| section.has(key)).collect();
    if let [one, other, ..] = written[..] {
        section.wrong(&format!("has both {one} and {other}; leave one out"));
        section.ask(&["content_type"]);
        return None;
    }
    if section.has("payload") {
        return section.json("payload").map(Payload::Json);
    }
    if section.has("template") {
        let template = section.stored("template", |text| Ok(text.to_owned()));
        let content_type = section.text("content_type", "application/json", content_type);
        return Some(Payload::Template {
            template: template?.value,
            content_type: content_type.value,
        });
    }
    Some(section.text("body", "decision", body).value)
}

fn body(text: &str) -> Result<Payload, String> {
    match text {
        "decision" => Ok(Payload::Decision),
        "request" => Ok(Payload::Request),
        "none" => Ok(Payload::Empty),
        _ => Err("is no known word; write \"decision\", \"request\" or \"none\", or use payload or template".to_owned()),
    }
}

fn content_type(text: &str) -> Result<String, String> {
    text.parse::<mime::Mime>()
        .map(|_| text.to_owned())
        .map_err(|_| "is no content type; write one such as application/json".to_owned())
}

fn method(text: &str) -> Result<String, String> {
    if freeze::is_method(text) {
        Ok(text.to_owned())
    } else {
        Err("is no method; write one such as POST, PUT or DELETE".to_owned())
    }
}

fn path(text: &str) -> Result<Text, String> {
    match Text::parse(text.to_owned()) {
        Text::Plain(path) if freeze::check_path(&path).is_err() => {
            Err("is no path; write one that begins with one /".to_owned())
        }
        text => Ok(text),
    }
}

fn subject(text: &str) -> Result<Text, String> {
    match Text::parse(text.to_owned()) {
        Text::Plain(subject) if freeze::check_subject(&subject).is_err() => {
            Err("is no subject; write one such as orders.created".to_owned())
        }
        text => Ok(text),
    }
}

fn header(name: &str, value: &str) -> Result<(String, Text), String> {
    let name = header_name(name)?.as_str().to_owned();
    if CREDENTIAL_HEADERS.contains(&name.as_str()) {
        return Err(
            "would be stored with every run; put it into the headers of a [[destination]]"
                .to_owned(),
        );
    }
    without_references(value)?;
    let text = Text::parse(value.to_owned());
    if matches!(&text, Text::Plain(value) if http::HeaderValue::from_str(value).is_err()) {
        return Err(
            "is no value of a header; write visible ASCII characters and spaces".to_owned(),
        );
    }
    Ok((name, text))
}
