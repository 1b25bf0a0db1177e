//! A value of the configuration on its way from text to type.

use std::fmt;

use super::report::Origin;
use super::store_url;

/// A value that was read, or its default.
#[derive(Clone, Debug)]
pub(super) struct Read<T> {
    /// Such as `route[0].lease`.
    pub(super) name: String,
    pub(super) value: T,
    /// As it was written, references and all.
    pub(super) written: String,
    pub(super) origin: Origin,
    /// Whether it holds references.
    pub(super) has_reference: bool,
    /// Whether it was fit to be compared with others; if not, the default stands in.
    pub(super) sound: bool,
}

/// What a value in the file may be.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Text,
    Duration,
    Count,
    Size,
    Switch,
    Rate,
}

/// How a value is told in the settings.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Shown {
    /// As it was written, but for the password of a URL.
    Whole,
    Never,
}

/// A value as it stands somewhere.
#[derive(Clone)]
pub(super) struct Written {
    pub(super) text: String,
    pub(super) origin: Origin,
}

impl<T> fmt::Display for Read<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} = {}", self.name, self.written)
    }
}

impl Kind {
    /// What to write, for a value of another type.
    pub(super) fn wanted(self) -> &'static str {
        match self {
            Self::Text => "a text in quotes",
            Self::Duration => "a number with its unit in quotes, such as \"25s\"",
            Self::Count => "a whole number without quotes",
            Self::Size => "bytes as a whole number, or a text such as \"10MiB\"",
            Self::Rate => "a number, such as 100 or 0.5",
            Self::Switch => "true or false without quotes",
        }
    }
}

impl Shown {
    /// What may be told of a value that was written like this.
    pub(super) fn told(self, text: &str) -> String {
        match self {
            Self::Whole => store_url::without_password(text),
            Self::Never => "(hidden)".to_owned(),
        }
    }
}

/// An integer in whichever base it was written, in decimal if it is one that can be meant.
pub(super) fn decimal(number: &toml::de::DeInteger<'_>) -> String {
    i128::from_str_radix(number.as_str(), number.radix())
        .map_or_else(|_| number.to_string(), |value| value.to_string())
}

/// A number in the type that holds it.
pub(super) fn fitting<T: TryFrom<u64>>(number: u64) -> Result<T, String> {
    T::try_from(number).map_err(|_| "is too large for this machine".to_owned())
}

/// The known name that is nearest to a mistyped one, if any is near.
pub fn nearest<'n>(name: &str, known: impl Iterator<Item = &'n str>) -> Option<&'n str> {
    let distance = |other: &str| strsim::damerau_levenshtein(name, other);
    let near = known.min_by_key(|other| distance(other))?;
    (distance(near) <= (name.chars().count() / 3).max(1)).then_some(near)
}
