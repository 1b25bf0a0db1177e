//! A JSON object read key by key, so that every refusal names its place and a mistyped key is told
//! with the one that it is near to.

use std::time::Duration;

use serde_json::{Map, Value};

use crate::config::nearest;
use crate::domain::millis;
use crate::domain::workflow::{NAME_BYTES_MAX, is_name};

/// What is left of an object to be read.
pub(super) struct Fields {
    left: Map<String, Value>,
    asked: Vec<&'static str>,
    pub(super) at: String,
}

impl Fields {
    pub(super) fn new(value: Value, at: &str) -> Result<Self, String> {
        match value {
            Value::Object(left) => Ok(Self {
                left,
                asked: Vec::new(),
                at: at.to_owned(),
            }),
            _ => Err(format!("{at}: write an object")),
        }
    }

    pub(super) fn place(&self, key: &str) -> String {
        format!("{}.{key}", self.at)
    }

    pub(super) fn wrong(&self, key: &str, wanted: &str) -> String {
        format!("{}.{key}: write {wanted}", self.at)
    }

    pub(super) fn has(&mut self, key: &'static str) -> bool {
        self.asked.push(key);
        self.left.contains_key(key)
    }

    pub(super) fn take(&mut self, key: &'static str) -> Option<Value> {
        self.asked.push(key);
        self.left.shift_remove(key)
    }

    /// A text; `null` is as good as absent.
    pub(super) fn text(&mut self, key: &'static str) -> Result<Option<String>, String> {
        match self.take(key) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(self.wrong(key, "a text")),
        }
    }

    pub(super) fn required(&mut self, key: &'static str) -> Result<String, String> {
        self.text(key)?.ok_or_else(|| self.wrong(key, "a text"))
    }

    /// A duration such as "10s", in milliseconds, from 1 ms on.
    pub(super) fn duration(
        &mut self,
        key: &'static str,
        most: Duration,
    ) -> Result<Option<u64>, String> {
        let Some(text) = self.text(key)? else {
            return Ok(None);
        };
        let wanted = || {
            let most = humantime::format_duration(most);
            self.wrong(key, &format!("a duration such as \"10s\", at most {most}"))
        };
        let duration = humantime::parse_duration(&text).map_err(|_| wanted())?;
        if duration > most || duration < Duration::from_millis(1) {
            return Err(wanted());
        }
        Ok(Some(millis(duration)))
    }

    pub(super) fn required_duration(
        &mut self,
        key: &'static str,
        most: Duration,
    ) -> Result<u64, String> {
        let duration = self.duration(key, most)?;
        duration.ok_or_else(|| self.wrong(key, "a duration such as \"10s\""))
    }

    /// The one key of these that is there.
    pub(super) fn one_of(&mut self, keys: &[&'static str]) -> Result<&'static str, String> {
        self.asked.extend(keys);
        let there = |key: &&&str| self.left.contains_key(**key);
        let there: Vec<&'static str> = keys.iter().filter(there).copied().collect();
        match there[..] {
            [one] => Ok(one),
            [] => {
                self.mistyped()?;
                Err(format!("{}: write one of {}", self.at, keys.join(", ")))
            }
            [one, other, ..] => Err(format!("{}: leave `{one}` or `{other}` out", self.at)),
        }
    }

    /// Nothing may be left.
    pub(super) fn finish(self) -> Result<(), String> {
        match self.left.keys().next() {
            None => Ok(()),
            Some(key) => Err(match nearest(key, self.asked.iter().copied()) {
                Some(near) => format!("{}.{key}: did you mean `{near}`?", self.at),
                None => format!("{}.{key}: there is no such key here", self.at),
            }),
        }
    }

    /// Tells of a key that is near to one that was asked for, and is not it.
    fn mistyped(&self) -> Result<(), String> {
        for key in self.left.keys() {
            let known = self.asked.iter().any(|asked| asked == key);
            if let Some(near) = nearest(key, self.asked.iter().copied()).filter(|_| !known) {
                return Err(format!("{}.{key}: did you mean `{near}`?", self.at));
            }
        }
        Ok(())
    }
}

/// The items of a list that is not empty, each with its place.
pub(super) fn items(list: Value, at: &str, most: usize) -> Result<Vec<(Value, String)>, String> {
    match list {
        Value::Array(items) if (1..=most).contains(&items.len()) => Ok(items
            .into_iter()
            .enumerate()
            .map(|(index, item)| (item, format!("{at}[{index}]")))
            .collect()),
        _ => Err(format!("{at}: write a list of 1 to {most}")),
    }
}

/// Refuses what can't be the name of a step, signal, queue, workflow or destination.
pub(super) fn checked_name(at: &str, name: &str) -> Result<(), String> {
    if is_name(name) {
        return Ok(());
    }
    Err(format!(
        "{at}: a name is 1 to {NAME_BYTES_MAX} letters, digits, dashes, underscores and dots"
    ))
}

/// What to say of a name that the configuration doesn't have.
pub(super) fn unknown<'n>(
    at: &str,
    what: &str,
    name: &str,
    known: impl Iterator<Item = &'n str>,
) -> String {
    match nearest(name, known) {
        Some(near) => format!("{at}: there is no such {what}; did you mean \"{near}\"?"),
        None => format!("{at}: the gateway's configuration has no such {what}"),
    }
}
