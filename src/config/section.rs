//! One table of the file, read key by key.
//!
//! Every read says which key it is, what its values look like and what the default is. What is
//! wrong is noted with its place and the default stands in, so that reading goes on and every
//! error is told at once. [`Section::finish`] tells the keys that nobody asked for.

pub(super) mod free;

use std::ops::RangeInclusive;
use std::time::Duration;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::input::{Context, Given, follow};
use super::parse;
use super::report::{Origin, Report, Setting};
use super::value::{Kind, Read, Shown, Written, decimal, fitting, nearest};

/// One table, or the absence of one.
pub(super) struct Section<'a> {
    context: Context<'a>,
    /// Such as `route[0]`; empty for the top.
    name: String,
    table: Option<&'a DeTable<'a>>,
    /// Where it begins.
    pub(super) origin: Origin,
    asked: Vec<&'static str>,
    pub(super) report: Report,
}

impl<'a> Section<'a> {
    pub(super) fn top(context: Context<'a>, table: Option<&'a DeTable<'a>>) -> Self {
        Self::new(context, String::new(), table, Origin::Default)
    }

    fn new(
        context: Context<'a>,
        name: String,
        table: Option<&'a DeTable<'a>>,
        origin: Origin,
    ) -> Self {
        Self {
            context,
            name,
            table,
            origin,
            asked: Vec::new(),
            report: Report::default(),
        }
    }

    /// The table of this name; an empty one when it is absent.
    pub(super) fn table(&mut self, key: &'static str) -> Section<'a> {
        let name = self.full_name(key);
        let absent = Section::new(self.context, name.clone(), None, self.origin.clone());
        let Some((_, value)) = self.look(key) else {
            return absent;
        };
        let origin = self.place(value.span().start);
        if let DeValue::Table(table) = value.get_ref() {
            return Section::new(self.context, name, Some(table), origin);
        }
        self.wrong_type(&origin, key, value.get_ref(), &format!("a table [{key}]"));
        absent
    }

    /// A table that is not in the file: what is asked of it is given or defaulted.
    pub(super) fn implied(&self, name: String, origin: Origin) -> Section<'a> {
        Section::new(self.context, name, None, origin)
    }

    /// The array of tables of this name.
    pub(super) fn tables(&mut self, key: &'static str) -> Vec<Section<'a>> {
        let Some((_, value)) = self.look(key) else {
            return Vec::new();
        };
        let wanted = format!("tables, each under its own [[{key}]]");
        let DeValue::Array(array) = value.get_ref() else {
            let origin = self.place(value.span().start);
            self.wrong_type(&origin, key, value.get_ref(), &wanted);
            return Vec::new();
        };
        let mut sections = Vec::new();
        for (index, element) in array.iter().enumerate() {
            let origin = self.place(element.span().start);
            let DeValue::Table(table) = element.get_ref() else {
                self.wrong_type(&origin, key, element.get_ref(), &wanted);
                continue;
            };
            let name = format!("{}[{index}]", self.full_name(key));
            sections.push(Section::new(self.context, name, Some(table), origin));
        }
        sections
    }

    /// A text that is parsed, with a default in the same form.
    pub(super) fn text<T>(
        &mut self,
        key: &'static str,
        default: &str,
        parse: impl Fn(&str) -> Result<T, String>,
    ) -> Read<T> {
        let written = self.written(key, Kind::Text);
        self.defaulted(key, written, default, Shown::Whole, parse)
    }

    /// As [`Self::text`], unless a flag or variable gives it.
    pub(super) fn text_or_given<T>(
        &mut self,
        key: &'static str,
        given: Option<&Given>,
        default: &str,
        parse: impl Fn(&str) -> Result<T, String>,
    ) -> Read<T> {
        let written = self.given(key, given);
        self.defaulted(key, written, default, Shown::Whole, parse)
    }

    /// A text without a default.
    pub(super) fn text_if_any<T>(
        &mut self,
        key: &'static str,
        given: Option<&Given>,
        parse: impl Fn(&str) -> Result<T, String>,
    ) -> Option<Read<T>> {
        let written = self.given(key, given)?;
        self.parsed(key, written, Shown::Whole, parse)
    }

    /// A text that must be there.
    pub(super) fn text_required<T>(
        &mut self,
        key: &'static str,
        given: Option<&Given>,
        form: &str,
        parse: impl Fn(&str) -> Result<T, String>,
    ) -> Option<Read<T>> {
        if given.is_none() && !self.has(key) {
            self.ask(&[key]);
            self.missing(key, form);
            return None;
        }
        self.text_if_any(key, given, parse)
    }

    /// A secret, which must be a reference; `None` when it is absent or unfit.
    pub(super) fn secret(&mut self, key: &'static str) -> Option<Read<String>> {
        let written = self.written(key, Kind::Text)?;
        let plain = follow(&written.text, self.context.environment)
            .is_ok_and(|followed| !followed.referred);
        if plain {
            let name = self.full_name(key);
            self.report.error(
                &written.origin,
                format!("{name} holds a secret in plain text; write a reference, such as \"${{env:NAME}}\" or \"${{file:PATH}}\""),
            );
            return None;
        }
        self.parsed(key, written, Shown::Never, |text| {
            if text.is_empty() {
                Err("is empty".to_owned())
            } else {
                Ok(text.to_owned())
            }
        })
    }

    /// A text that is told nowhere, since it gives a hint of a secret.
    pub(super) fn text_hidden<T>(
        &mut self,
        key: &'static str,
        parse: impl Fn(&str) -> Result<T, String>,
    ) -> Option<Read<T>> {
        let written = self.written(key, Kind::Text)?;
        self.parsed(key, written, Shown::Never, parse)
    }

    pub(super) fn duration(
        &mut self,
        key: &'static str,
        default: &str,
        bounds: RangeInclusive<Duration>,
    ) -> Read<Duration> {
        let written = self.written(key, Kind::Duration);
        self.defaulted(key, written, default, Shown::Whole, parse::duration(bounds))
    }

    pub(super) fn size<T: TryFrom<u64>>(
        &mut self,
        key: &'static str,
        default: &str,
        bounds: RangeInclusive<u64>,
    ) -> Read<T> {
        let written = self.written(key, Kind::Size);
        let parse = parse::size(bounds);
        self.defaulted(key, written, default, Shown::Whole, |text| {
            fitting(parse(text)?)
        })
    }

    pub(super) fn count<T: TryFrom<u64>>(
        &mut self,
        key: &'static str,
        default: &str,
        bounds: RangeInclusive<u64>,
    ) -> Read<T> {
        let written = self.written(key, Kind::Count);
        let parse = parse::count(bounds);
        self.defaulted(key, written, default, Shown::Whole, |text| {
            fitting(parse(text)?)
        })
    }

    pub(super) fn switch(&mut self, key: &'static str, default: &str) -> Read<bool> {
        let written = self.written(key, Kind::Switch);
        self.defaulted(key, written, default, Shown::Whole, parse::switch)
    }

    /// A list of texts.
    pub(super) fn texts<T>(
        &mut self,
        key: &'static str,
        default: &[&str],
        parse: impl Fn(&str) -> Result<T, String>,
    ) -> Read<Vec<T>> {
        self.list(key, default, Kind::Text, parse)
    }

    /// A list of numbers.
    pub(super) fn counts<T>(
        &mut self,
        key: &'static str,
        default: &[&str],
        parse: impl Fn(u64) -> Result<T, String>,
    ) -> Read<Vec<T>> {
        let count = parse::count(0..=u64::MAX);
        self.list(key, default, Kind::Count, |text| parse(count(text)?))
    }

    /// Whether the key is in the table.
    pub(super) fn has(&self, key: &str) -> bool {
        self.table.is_some_and(|table| table.contains_key(key))
    }

    /// Whether the key is in the table and this text, without noting anything.
    pub(super) fn says(&self, key: &str, text: &str) -> bool {
        self.table
            .and_then(|table| table.get(key))
            .is_some_and(|value| value.get_ref().as_str() == Some(text))
    }

    /// Notes that a key is absent which has no default.
    pub(super) fn missing(&mut self, key: &str, form: &str) {
        if self.context.complete {
            let name = self.full_name(key);
            let origin = self.origin.clone();
            self.report
                .error(&origin, format!("{name} is missing; write {form}"));
        }
    }

    /// Tells a value in the settings; one that was decided later replaces an earlier one.
    pub(super) fn note(&mut self, key: &str, value: &str, origin: &Origin) {
        let name = self.full_name(key);
        self.report.settings.retain(|setting| setting.name != name);
        self.report.settings.push(Setting {
            name,
            value: value.to_owned(),
            origin: origin.clone(),
        });
    }

    /// The key with the section's name before it.
    pub(super) fn full_name(&self, key: &str) -> String {
        if self.name.is_empty() {
            key.to_owned()
        } else {
            format!("{}.{key}", self.name)
        }
    }

    /// Tells the keys that nobody asked for, and gives what was found.
    pub(super) fn finish(mut self) -> Report {
        let unasked: Vec<_> = self
            .table
            .into_iter()
            .flat_map(|table| table.keys())
            .filter(|key| !self.asked.contains(&key.get_ref().as_ref()))
            .collect();
        for key in unasked {
            let name = key.get_ref().as_ref();
            let full_name = self.full_name(name);
            let origin = self.place(key.span().start);
            let hint = nearest(name, self.asked.iter().copied()).map_or_else(
                || format!("known here: {}", self.asked.join(", ")),
                |near| format!("did you mean `{near}`?"),
            );
            self.report
                .error(&origin, format!("unknown key `{full_name}`; {hint}"));
        }
        self.report
    }

    fn defaulted<T>(
        &mut self,
        key: &'static str,
        written: Option<Written>,
        default: &str,
        shown: Shown,
        parse: impl Fn(&str) -> Result<T, String>,
    ) -> Read<T> {
        let attempted = written.is_some();
        let read = written.and_then(|written| self.parsed(key, written, shown, &parse));
        read.unwrap_or_else(|| {
            let standing_in = Written {
                text: default.to_owned(),
                origin: Origin::Default,
            };
            let mut read = self
                .parsed(key, standing_in, shown, &parse)
                .unwrap_or_else(|| unreachable!("the default of {key} has its form"));
            read.sound = !attempted && !self.has(key);
            read
        })
    }

    fn parsed<T>(
        &mut self,
        key: &'static str,
        written: Written,
        shown: Shown,
        parse: impl Fn(&str) -> Result<T, String>,
    ) -> Option<Read<T>> {
        let Written { text, origin } = written;
        let told = shown.told(&text);
        let parsed = follow(&text, self.context.environment)
            .and_then(|followed| Ok((parse(&followed.text)?, followed.referred)));
        match parsed {
            Ok((value, has_reference)) => {
                self.note(key, &told, &origin);
                Some(Read {
                    name: self.full_name(key),
                    value,
                    written: told,
                    origin,
                    has_reference,
                    sound: true,
                })
            }
            Err(problem) => {
                let name = self.full_name(key);
                self.report
                    .error(&origin, format!("{name} = {told:?} {problem}"));
                None
            }
        }
    }

    fn list<T>(
        &mut self,
        key: &'static str,
        default: &[&str],
        kind: Kind,
        parse: impl Fn(&str) -> Result<T, String>,
    ) -> Read<Vec<T>> {
        let (mut elements, origin, mut sound) = self.elements(key, kind);
        if !origin.is_written() {
            elements = default
                .iter()
                .map(|text| Written {
                    text: (*text).to_owned(),
                    origin: Origin::Default,
                })
                .collect();
        }
        let texts = elements
            .iter()
            .map(|element| Shown::Whole.told(&element.text));
        let texts: Vec<String> = texts.collect();
        let written = format!("[{}]", texts.join(", "));
        self.note(key, &written, &origin);
        let mut values = Vec::new();
        for element in elements {
            let parsed = follow(&element.text, self.context.environment)
                .and_then(|followed| parse(&followed.text));
            match parsed {
                Ok(value) => values.push(value),
                Err(problem) => {
                    sound = false;
                    let name = self.full_name(key);
                    let told = Shown::Whole.told(&element.text);
                    self.report
                        .error(&element.origin, format!("{name}: {told:?} {problem}"));
                }
            }
        }
        Read {
            name: self.full_name(key),
            value: values,
            written,
            origin,
            has_reference: false,
            sound,
        }
    }

    /// The elements of a list that are of the right kind; whether all are.
    fn elements(&mut self, key: &'static str, kind: Kind) -> (Vec<Written>, Origin, bool) {
        let Some((_, value)) = self.look(key) else {
            return (Vec::new(), Origin::Default, true);
        };
        let origin = self.place(value.span().start);
        let DeValue::Array(array) = value.get_ref() else {
            self.wrong_type(&origin, key, value.get_ref(), "a list in [ ]");
            return (Vec::new(), origin, false);
        };
        let elements: Vec<Written> = array
            .iter()
            .filter_map(|element| self.scalar(key, element, kind))
            .collect();
        let sound = elements.len() == array.len();
        (elements, origin, sound)
    }

    fn given(&mut self, key: &'static str, given: Option<&Given>) -> Option<Written> {
        let Some(given) = given else {
            return self.written(key, Kind::Text);
        };
        self.ask(&[key]);
        let text = given.text.to_str().map(str::to_owned);
        if text.is_none() {
            self.report.error(&given.origin, "is not UTF-8");
        }
        Some(Written {
            text: text?,
            origin: given.origin.clone(),
        })
    }

    fn written(&mut self, key: &'static str, kind: Kind) -> Option<Written> {
        let (_, value) = self.look(key)?;
        self.scalar(key, value, kind)
    }

    fn scalar(
        &mut self,
        key: &'static str,
        value: &Spanned<DeValue<'a>>,
        kind: Kind,
    ) -> Option<Written> {
        let origin = self.place(value.span().start);
        let text = match (value.get_ref(), kind) {
            (DeValue::String(text), Kind::Text | Kind::Duration | Kind::Size | Kind::Rate) => {
                text.to_string()
            }
            (DeValue::Integer(number), Kind::Count | Kind::Size | Kind::Rate) => decimal(number),
            (DeValue::Boolean(value), Kind::Switch) => value.to_string(),
            (DeValue::Float(number), Kind::Rate) => number.as_str().to_owned(),
            (other, _) => {
                self.wrong_type(&origin, key, other, kind.wanted());
                return None;
            }
        };
        Some(Written { text, origin })
    }

    fn look(
        &mut self,
        key: &'static str,
    ) -> Option<(
        &'a Spanned<toml::de::DeString<'a>>,
        &'a Spanned<DeValue<'a>>,
    )> {
        self.ask(&[key]);
        self.table.and_then(|table| table.get_key_value(key))
    }

    fn wrong_type(&mut self, origin: &Origin, key: &str, value: &DeValue<'_>, wanted: &str) {
        let name = self.full_name(key);
        let found = value.type_str();
        self.report
            .error(origin, format!("{name} is of type {found}; write {wanted}"));
    }

    fn place(&self, offset: usize) -> Origin {
        self.context
            .source
            .map_or(Origin::Default, |source| source.at(offset))
    }
}
