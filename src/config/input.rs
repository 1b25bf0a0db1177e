//! What the configuration is read from: flags, the environment, one TOML file, and whatever the
//! values of these refer to.
//!
//! A value may hold references, so that no secret has to stand in it: `${env:NAME}` is the value
//! of an environment variable, `${file:PATH}` the text of a file without the line break at its
//! end, and `$${` stands for `${`. References are not looked for in what they give.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use super::report::Origin;

/// The longest configuration file, in bytes.
pub const FILE_BYTES_MAX: u64 = 1 << 20;
/// The longest text that a `${file:…}` may give, in bytes.
pub const REFERENCE_BYTES_MAX: u64 = 64 << 10;

/// The variables that stand for flags.
pub const VARIABLES: [&str; 8] = [
    "ONCEGATE_CONFIG",
    "ONCEGATE_LISTEN",
    "ONCEGATE_ADMIN",
    "ONCEGATE_STORE",
    "ONCEGATE_UPSTREAM",
    "ONCEGATE_TENANT",
    "ONCEGATE_LOG",
    "ONCEGATE_LOG_FORMAT",
];

/// The environment, taken once, so that reading it can be tested.
#[derive(Clone, Debug, Default)]
pub struct Environment(BTreeMap<OsString, OsString>);

/// What flags say, and for what they leave open, the environment.
#[derive(Clone, Debug, Default)]
pub struct Overrides {
    /// `--config`
    pub config: Option<Given>,
    /// `--listen`
    pub listen: Option<Given>,
    /// `--admin`
    pub admin: Option<Given>,
    /// `--store`
    pub store: Option<Given>,
    /// `--upstream`
    pub upstream: Option<Given>,
    /// `--tenant`
    pub tenant: Option<Given>,
    /// `--log`
    pub log: Option<Given>,
    /// `--log-format`
    pub log_format: Option<Given>,
    /// `--no-migrate`
    pub no_migrate: bool,
}

/// A value that stands outside the file.
#[derive(Clone, Debug)]
pub struct Given {
    /// As it was written.
    pub text: OsString,
    /// In which flag or variable.
    pub origin: Origin,
}

impl Environment {
    /// This process's.
    pub fn of_process() -> Self {
        Self(std::env::vars_os().collect())
    }

    /// A variable's value. An empty one counts as absent, as an unset value in a deployment's
    /// template leaves it.
    pub fn get(&self, name: &str) -> Option<&OsString> {
        self.0
            .get(std::ffi::OsStr::new(name))
            .filter(|value| !value.is_empty())
    }

    /// The names of all variables that begin with `ONCEGATE_`.
    pub(super) fn own_names(&self) -> impl Iterator<Item = &str> {
        self.0
            .keys()
            .filter_map(|name| name.to_str())
            .filter(|name| name.starts_with("ONCEGATE_"))
    }
}

impl<K: Into<OsString>, V: Into<OsString>> FromIterator<(K, V)> for Environment {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(variables: I) -> Self {
        let owned = variables.into_iter().map(|(k, v)| (k.into(), v.into()));
        Self(owned.collect())
    }
}

impl Given {
    /// The flag's value or, without one, the variable's.
    pub fn pick(
        flag: Option<OsString>,
        flag_name: &'static str,
        variable: &str,
        environment: &Environment,
    ) -> Option<Self> {
        let from_flag = flag.map(|text| Self {
            text,
            origin: Origin::Flag(flag_name),
        });
        from_flag.or_else(|| {
            environment.get(variable).map(|text| Self {
                text: text.clone(),
                origin: Origin::Variable(variable.into()),
            })
        })
    }
}

/// The file's text, and where in it things stand.
#[derive(Debug)]
pub(super) struct Source {
    path: Arc<str>,
    pub(super) text: String,
}

impl Source {
    /// Reads the file. The error says what the file does, without its name.
    pub(super) fn read(path: &Path) -> Result<Self, String> {
        let bytes = read_limited(path, FILE_BYTES_MAX)?;
        let text = String::from_utf8(bytes).map_err(|error| {
            let offset = error.utf8_error().valid_up_to();
            format!("is not UTF-8 from byte {offset} on; save it as UTF-8")
        })?;
        Ok(Self::new(&path.to_string_lossy(), text))
    }

    pub(super) fn new(path: &str, text: String) -> Self {
        Self {
            path: path.into(),
            text,
        }
    }

    /// Where a byte of the text stands.
    pub(super) fn at(&self, offset: usize) -> Origin {
        let before = self.text.get(..offset).unwrap_or(&self.text);
        let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
        Origin::File {
            path: Arc::clone(&self.path),
            line: before.matches('\n').count() + 1,
            column: before[line_start..].chars().count() + 1,
        }
    }
}

/// What every section needs to know.
#[derive(Clone, Copy)]
pub(super) struct Context<'a> {
    pub(super) source: Option<&'a Source>,
    pub(super) environment: &'a Environment,
    /// Whether the file's syntax is sound. If not, what seems missing may be there.
    pub(super) complete: bool,
}

/// A text whose references were followed.
#[derive(Debug)]
pub(super) struct Followed {
    pub(super) text: String,
    pub(super) referred: bool,
}

/// Follows every reference in a text. The error says what the text does, and tells no value.
pub(super) fn follow(written: &str, environment: &Environment) -> Result<Followed, String> {
    let mut text = String::with_capacity(written.len());
    let mut referred = false;
    let mut rest = written;
    while let Some(start) = rest.find("${") {
        if rest[..start].ends_with('$') {
            text.push_str(&rest[..start - 1]);
            text.push_str("${");
            rest = &rest[start + 2..];
            continue;
        }
        text.push_str(&rest[..start]);
        let inner = &rest[start + 2..];
        let Some(end) = inner.find('}') else {
            return Err(
                "has a `${` without its `}`; add it, or write `$${` for the two characters"
                    .to_owned(),
            );
        };
        text.push_str(&look_up(&inner[..end], environment)?);
        referred = true;
        rest = &inner[end + 1..];
    }
    text.push_str(rest);
    Ok(Followed { text, referred })
}

fn look_up(reference: &str, environment: &Environment) -> Result<String, String> {
    match reference.split_once(':') {
        Some(("env", name)) => {
            let value = environment.get(name).ok_or_else(|| {
                format!("refers to the variable {name}, which is not set or empty; set it")
            })?;
            let text = value.to_str().map(str::to_owned);
            text.ok_or_else(|| format!("refers to the variable {name}, which is not UTF-8"))
        }
        Some(("file", path)) => {
            let bytes = read_limited(Path::new(path), REFERENCE_BYTES_MAX)
                .map_err(|problem| format!("refers to the file `{path}`, which {problem}"))?;
            let mut text = String::from_utf8(bytes)
                .map_err(|_| format!("refers to the file `{path}`, which is not UTF-8"))?;
            text.truncate(text.trim_end_matches(['\n', '\r']).len());
            Ok(text)
        }
        _ => Err(
            "holds `${` and no reference; write `${env:NAME}` or `${file:PATH}`, or `$${` for the two characters"
                .to_owned(),
        ),
    }
}

fn read_limited(path: &Path, bytes_max: u64) -> Result<Vec<u8>, String> {
    let file = std::fs::File::open(path).map_err(|error| format!("can't be opened: {error}"))?;
    let mut bytes = Vec::new();
    file.take(bytes_max + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| format!("can't be read: {error}"))?;
    if bytes.len() as u64 > bytes_max {
        return Err(format!("is longer than {bytes_max} bytes"));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn followed(written: &str) -> Result<String, String> {
        let environment: Environment = [("USER_NAME", "ann"), ("EMPTY", ""), ("DEEP", "${env:X}")]
            .into_iter()
            .collect();
        follow(written, &environment).map(|followed| followed.text)
    }

    #[test]
    fn references_are_followed_once_and_escapes_kept() {
        assert_eq!(
            followed("a-${env:USER_NAME}-${env:USER_NAME}").unwrap(),
            "a-ann-ann"
        );
        assert_eq!(followed("$${env:USER_NAME}").unwrap(), "${env:USER_NAME}");
        assert_eq!(followed("${env:DEEP}").unwrap(), "${env:X}");
        assert_eq!(followed("cost: $5 {x}").unwrap(), "cost: $5 {x}");
    }

    #[test]
    fn a_reference_to_nothing_is_an_error() {
        for written in ["${env:NOT_THERE}", "${env:EMPTY}", "${USER_NAME}", "${env:"] {
            assert!(followed(written).is_err(), "{written}");
        }
        let missing = followed("${file:/no/such/file}").unwrap_err();
        assert!(missing.contains("/no/such/file"), "{missing}");
    }

    #[test]
    fn a_file_is_taken_without_its_last_line_break() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret");
        std::fs::write(&path, "s3 cret\r\n").unwrap();
        assert_eq!(
            followed(&format!("${{file:{}}}", path.display())).unwrap(),
            "s3 cret"
        );
        std::fs::write(&path, "x".repeat(65 << 10)).unwrap();
        assert!(followed(&format!("${{file:{}}}", path.display())).is_err());
    }

    #[test]
    fn places_are_counted_in_characters_from_one() {
        let source = Source::new("f", "ä = 1\nüü = 2\n".to_owned());
        assert_eq!(source.at(0).to_string(), "f:1:1");
        let offset = source.text.find('2').unwrap();
        assert_eq!(source.at(offset).to_string(), "f:2:6");
        assert_eq!(source.at(10_000).to_string(), "f:3:1");
    }

    proptest! {
        #[test]
        fn following_any_text_ends_without_a_panic(written in ".{0,60}") {
            let _ = follow(&written, &Environment::default());
        }

        #[test]
        fn a_text_without_references_stays_as_it_is(written in "[^$]{0,60}") {
            let text = follow(&written, &Environment::default()).unwrap().text;
            prop_assert_eq!(text, written);
        }
    }
}
