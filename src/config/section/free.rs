//! Values of a section whose names or forms are the user's own: tables of texts, lists of secrets,
//! JSON, and what is stored with runs.

use std::ops::RangeInclusive;
use std::time::Duration;

use serde_json::Value;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::super::input::follow;
use super::super::parse;
use super::super::report::Origin;
use super::super::value::{Kind, Read, Shown, Written, decimal};
use super::Section;

/// The longest value that the settings tell, in characters.
const TOLD_CHARS_MAX: usize = 60;

/// A name that the user chose, with its text.
pub(in super::super) struct Entry {
    pub(in super::super) name: String,
    pub(in super::super) text: String,
    pub(in super::super) origin: Origin,
    /// Whether the text holds references.
    pub(in super::super) has_reference: bool,
}

impl<'a> Section<'a> {
    /// A duration without a default of its own: what is inherited stands in, if there is anything.
    pub(in super::super) fn duration_or(
        &mut self,
        key: &'static str,
        inherited: Option<&Read<Duration>>,
        default: &str,
        bounds: RangeInclusive<Duration>,
    ) -> Read<Duration> {
        match inherited {
            Some(read) if !self.has(key) => self.inherit(key, read),
            _ => self.duration(key, default, bounds),
        }
    }

    /// A count, likewise.
    pub(in super::super) fn count_or<T: TryFrom<u64> + Clone>(
        &mut self,
        key: &'static str,
        inherited: Option<&Read<T>>,
        default: &str,
        bounds: RangeInclusive<u64>,
    ) -> Read<T> {
        match inherited {
            Some(read) if !self.has(key) => self.inherit(key, read),
            _ => self.count(key, default, bounds),
        }
    }

    fn inherit<T: Clone>(&mut self, key: &'static str, read: &Read<T>) -> Read<T> {
        self.ask(&[key]);
        self.note(key, &read.written, &read.origin);
        read.clone()
    }

    /// A duration that may be absent.
    pub(in super::super) fn duration_if_any(
        &mut self,
        key: &'static str,
        bounds: RangeInclusive<Duration>,
    ) -> Option<Read<Duration>> {
        let written = self.written(key, Kind::Duration)?;
        self.parsed(key, written, Shown::Whole, parse::duration(bounds))
    }

    /// A rate that may be absent: a number, or a text that holds one.
    pub(in super::super) fn rate_if_any(
        &mut self,
        key: &'static str,
        bounds: RangeInclusive<f64>,
    ) -> Option<Read<f64>> {
        let written = self.written(key, Kind::Rate)?;
        self.parsed(key, written, Shown::Whole, |text| {
            let rate = text.replace('_', "").parse().unwrap_or(f64::NAN);
            if bounds.contains(&rate) {
                Ok(rate)
            } else {
                let (least, most) = (bounds.start(), bounds.end());
                Err(format!(
                    "is no rate; write a number from {least} to {most}, per second"
                ))
            }
        })
    }

    /// A text that is stored with runs, and that receivers see. No reference is followed in it:
    /// what one gives may be secret.
    pub(in super::super) fn stored<T>(
        &mut self,
        key: &'static str,
        parse: impl Fn(&str) -> Result<T, String>,
    ) -> Option<Read<T>> {
        let Written { text, origin } = self.written(key, Kind::Text)?;
        let name = self.full_name(key);
        match without_references(&text).and_then(|()| parse(&text)) {
            Ok(value) => {
                let told = shortened(&text);
                self.note(key, &told, &origin);
                Some(Read {
                    name,
                    value,
                    written: told,
                    origin,
                    has_reference: false,
                    sound: true,
                })
            }
            Err(problem) => {
                let told = shortened(&text);
                self.report
                    .error(&origin, format!("{name} = {told:?} {problem}"));
                None
            }
        }
    }

    /// Any value, as JSON; stored likewise.
    pub(in super::super) fn json(&mut self, key: &'static str) -> Option<Value> {
        let (_, value) = self.look(key)?;
        let origin = self.place(value.span().start);
        match as_json(value.get_ref()) {
            Ok(json) => {
                self.note(key, &shortened(&json.to_string()), &origin);
                Some(json)
            }
            Err(problem) => {
                let name = self.full_name(key);
                self.report.error(&origin, format!("{name} {problem}"));
                None
            }
        }
    }

    /// The entries of a table whose names are free and whose values are texts, as they were
    /// written; the settings tell of each that it is there.
    pub(in super::super) fn entries(&mut self, key: &'static str, shown: Shown) -> Vec<Entry> {
        let Some((_, value)) = self.look(key) else {
            return Vec::new();
        };
        let DeValue::Table(table) = value.get_ref() else {
            let origin = self.place(value.span().start);
            self.wrong_type(
                &origin,
                key,
                value.get_ref(),
                "a table { name = \"value\" }",
            );
            return Vec::new();
        };
        let entry = |(name, value)| self.entry(key, name, value, shown);
        table.iter().filter_map(entry).collect()
    }

    fn entry(
        &mut self,
        key: &'static str,
        name: &Spanned<toml::de::DeString<'a>>,
        value: &Spanned<DeValue<'a>>,
        shown: Shown,
    ) -> Option<Entry> {
        let name: &str = name.get_ref();
        let key = format!("{key}.{name}");
        let origin = self.place(value.span().start);
        let DeValue::String(text) = value.get_ref() else {
            self.wrong_type(&origin, &key, value.get_ref(), Kind::Text.wanted());
            return None;
        };
        self.note(&key, &shortened(&shown.told(text)), &origin);
        Some(Entry {
            name: name.to_owned(),
            text: text.to_string(),
            has_reference: without_references(text).is_err(),
            origin,
        })
    }

    /// Follows the references of an entry's text.
    pub(in super::super) fn followed(&mut self, key: &str, entry: &Entry) -> Option<String> {
        match follow(&entry.text, self.context.environment) {
            Ok(followed) => Some(followed.text),
            Err(problem) => {
                self.wrong_entry(key, entry, &problem);
                None
            }
        }
    }

    /// Notes what is wrong with an entry, without its text.
    pub(in super::super) fn wrong_entry(&mut self, key: &str, entry: &Entry, problem: &str) {
        let name = self.full_name(key);
        self.report
            .error(&entry.origin, format!("{name}.{} {problem}", entry.name));
    }

    /// A list of secrets, each of which must be a reference.
    pub(in super::super) fn secrets<T>(
        &mut self,
        key: &'static str,
        parse: impl Fn(&str) -> Result<T, String>,
    ) -> Vec<T> {
        let (elements, origin, _) = self.elements(key, Kind::Text);
        if elements.is_empty() {
            return Vec::new();
        }
        let hidden = vec![Shown::Never.told(""); elements.len()].join(", ");
        self.note(key, &format!("[{hidden}]"), &origin);
        let mut secrets = Vec::new();
        for element in elements {
            let secret = follow(&element.text, self.context.environment).and_then(|followed| {
                if followed.referred {
                    parse(&followed.text)
                } else {
                    Err("holds a secret in plain text; write a reference, such as \"${env:NAME}\" or \"${file:PATH}\"".to_owned())
                }
            });
            match secret {
                Ok(secret) => secrets.push(secret),
                Err(problem) => {
                    let name = self.full_name(key);
                    self.report
                        .error(&element.origin, format!("{name}: one {problem}"));
                }
            }
        }
        secrets
    }

    /// Takes keys for known without reading them.
    pub(in super::super) fn ask(&mut self, keys: &[&'static str]) {
        for key in keys {
            if !self.asked.contains(key) {
                self.asked.push(key);
            }
        }
    }

    /// Notes an error about the section itself, unless broken syntax may be its cause.
    pub(in super::super) fn wrong(&mut self, problem: &str) {
        if self.context.complete {
            let (origin, name) = (self.origin.clone(), self.name.clone());
            self.report.error(&origin, format!("{name} {problem}"));
        }
    }
}

/// Refuses a reference in a text that is stored.
pub(in super::super) fn without_references(text: &str) -> Result<(), String> {
    if text.contains("${env:") || text.contains("${file:") {
        Err("holds a reference, and what it gives would be stored with every run; put it into the headers of a [[destination]]".to_owned())
    } else {
        Ok(())
    }
}

fn as_json(value: &DeValue<'_>) -> Result<Value, String> {
    Ok(match value {
        DeValue::String(text) => {
            without_references(text)?;
            Value::from(text.as_ref())
        }
        DeValue::Integer(number) => {
            let number: i64 = decimal(number)
                .parse()
                .map_err(|_| "holds an integer of more than 64 bits".to_owned())?;
            Value::from(number)
        }
        DeValue::Float(number) => {
            let number: f64 = number.as_str().parse().unwrap_or(f64::NAN);
            let number = serde_json::Number::from_f64(number);
            Value::Number(number.ok_or("holds a number that JSON does not know")?)
        }
        DeValue::Boolean(value) => Value::from(*value),
        DeValue::Datetime(time) => Value::from(time.to_string()),
        DeValue::Array(array) => {
            let elements = array.iter().map(|element| as_json(element.get_ref()));
            Value::Array(elements.collect::<Result<_, _>>()?)
        }
        DeValue::Table(table) => json_object(table)?,
    })
}

fn json_object(table: &DeTable<'_>) -> Result<Value, String> {
    let member = |(name, value): (&Spanned<toml::de::DeString<'_>>, &Spanned<DeValue<'_>>)| {
        Ok((name.get_ref().to_string(), as_json(value.get_ref())?))
    };
    let members = table.iter().map(member).collect::<Result<_, String>>()?;
    Ok(Value::Object(members))
}

/// On one line, and not too long for a table.
fn shortened(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    if line.chars().count() <= TOLD_CHARS_MAX {
        return line;
    }
    let kept: String = line.chars().take(TOLD_CHARS_MAX - 1).collect();
    format!("{kept}…")
}
