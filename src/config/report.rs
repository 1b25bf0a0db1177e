//! What reading the configuration brought to light: where each value is from, what is wrong, and
//! what is allowed and yet doubtful.

use std::fmt;
use std::sync::Arc;

/// Where a value stands.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Origin {
    /// In the configuration file.
    File {
        /// The file, as it was named.
        path: Arc<str>,
        /// From 1.
        line: usize,
        /// From 1, in characters.
        column: usize,
    },
    /// In this flag, such as `--listen`.
    Flag(&'static str),
    /// In this environment variable.
    Variable(Arc<str>),
    /// Nowhere: it is the default.
    Default,
}

/// Something to tell about the configuration.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    /// Where; [`Origin::Default`] when it is about something that was written nowhere.
    pub origin: Origin,
    /// What, and what to do. Never holds a secret.
    pub message: String,
}

/// One value, for `check`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// Its name, such as `route[0].lease`.
    pub name: String,
    /// As it was written; secrets are hidden and references stay references.
    pub value: String,
    /// Where it stands.
    pub origin: Origin,
}

/// Everything that was found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// With any of these there is no configuration.
    pub errors: Vec<Finding>,
    /// Worth a look.
    pub warnings: Vec<Finding>,
    /// Every value that was read or defaulted.
    pub settings: Vec<Setting>,
}

/// A configuration that can't be used. Displays every error and warning, one a line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Rejected(pub Report);

impl Origin {
    /// Whether someone wrote the value.
    #[must_use]
    pub fn is_written(&self) -> bool {
        *self != Self::Default
    }
}

impl Report {
    pub(super) fn error(&mut self, origin: &Origin, message: impl Into<String>) {
        self.errors.push(Finding::new(origin, message));
    }

    pub(super) fn warn(&mut self, origin: &Origin, message: impl Into<String>) {
        self.warnings.push(Finding::new(origin, message));
    }

    pub(super) fn merge(&mut self, other: Self) {
        self.errors.extend(other.errors);
        self.warnings.extend(other.warnings);
        self.settings.extend(other.settings);
    }

    /// In the order of the file, then of what stands elsewhere.
    pub(super) fn sort(&mut self) {
        self.errors.sort();
        self.errors.dedup();
        self.warnings.sort();
        self.warnings.dedup();
    }
}

impl Finding {
    fn new(origin: &Origin, message: impl Into<String>) -> Self {
        Self {
            origin: origin.clone(),
            message: message.into(),
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { path, line, column } => write!(f, "{path}:{line}:{column}"),
            Self::Flag(name) => f.write_str(name),
            Self::Variable(name) => f.write_str(name),
            Self::Default => f.write_str("default"),
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.origin.is_written() {
            write!(f, "{}: ", self.origin)?;
        }
        f.write_str(&self.message)
    }
}

impl fmt::Display for Rejected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for error in &self.0.errors {
            writeln!(f, "error: {error}")?;
        }
        for warning in &self.0.warnings {
            writeln!(f, "warning: {warning}")?;
        }
        let (count, plural) = match self.0.errors.len() {
            1 => (1, ""),
            count => (count, "s"),
        };
        write!(f, "{count} error{plural} in the configuration")
    }
}
