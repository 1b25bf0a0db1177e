//! The idempotency key: parsed once at the border, compared byte for byte ever after.
//!
//! Two written forms mean the same key: a structured-field string (`"abc"`, RFC 9651 section 3.3.3,
//! parameters ignored) and the bare form that most clients send (`abc`). What is neither is an
//! error and never an absent key: taking it for absent would silently switch protection off.

use std::fmt;
use std::sync::Arc;

use sfv::{BareItem, Item, Parser};

/// The longest key, in bytes after unquoting.
pub const KEY_BYTES_MAX: usize = 255;

/// A client's idempotency key: 1 to [`KEY_BYTES_MAX`] bytes of printable ASCII.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct IdempotencyKey(Arc<str>);

/// Why a key was refused. Each becomes the problem `key-invalid`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// The header stands in more than one line.
    #[error("the key was sent more than once; send exactly one")]
    Repeated,
    /// More than [`KEY_BYTES_MAX`] bytes.
    #[error("the key is longer than 255 bytes; send a shorter one")]
    TooLong,
    /// Neither a structured-field string nor a bare token.
    #[error(
        "the key is malformed; send 1 to 255 visible ASCII characters without quote, comma and backslash, or a quoted string"
    )]
    Malformed,
}

impl IdempotencyKey {
    /// Parses the lines of a key header. `Ok(None)`: absent or empty, the request opts out.
    ///
    /// # Errors
    /// When the header is repeated, malformed or too long.
    pub fn from_header_lines<'a>(
        mut lines: impl Iterator<Item = &'a [u8]>,
    ) -> Result<Option<Self>, KeyError> {
        let Some(line) = lines.next() else {
            return Ok(None);
        };
        if lines.next().is_some() {
            return Err(KeyError::Repeated);
        }
        match line.trim_ascii() {
            [] => Ok(None),
            quoted @ [b'"', ..] => Self::from_structured(quoted),
            bare => Self::from_bare(bare).map(Some),
        }
    }

    /// Takes text that needs no unquoting, such as a JSON string or a stored column.
    /// `Ok(None)`: empty, the request opts out.
    ///
    /// # Errors
    /// When the text is too long or holds anything but printable ASCII.
    pub fn from_text(text: &str) -> Result<Option<Self>, KeyError> {
        if text.len() > KEY_BYTES_MAX {
            return Err(KeyError::TooLong);
        }
        if !text.bytes().all(|byte| matches!(byte, b' '..=b'~')) {
            return Err(KeyError::Malformed);
        }
        Ok((!text.is_empty()).then(|| Self(text.into())))
    }

    fn from_structured(quoted: &[u8]) -> Result<Option<Self>, KeyError> {
        let item: Item = Parser::new(quoted)
            .parse()
            .map_err(|_| KeyError::Malformed)?;
        match item.bare_item {
            BareItem::String(text) => Self::from_text(text.as_str()),
            _ => Err(KeyError::Malformed),
        }
    }

    fn from_bare(bare: &[u8]) -> Result<Self, KeyError> {
        let visible =
            |byte: &u8| matches!(byte, b'!'..=b'~') && !matches!(byte, b'"' | b',' | b'\\');
        if !bare.iter().all(visible) {
            return Err(KeyError::Malformed);
        }
        if bare.len() > KEY_BYTES_MAX {
            return Err(KeyError::TooLong);
        }
        let text = std::str::from_utf8(bare).map_err(|_| KeyError::Malformed)?;
        Ok(Self(text.into()))
    }

    /// The key itself, unquoted.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for IdempotencyKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for IdempotencyKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", &*self.0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(line: &[u8]) -> Result<Option<String>, KeyError> {
        IdempotencyKey::from_header_lines([line].into_iter())
            .map(|key| key.map(|key| key.to_string()))
    }

    #[test]
    fn quoted_and_bare_forms_mean_the_same_key() {
        for line in [
            &b"abc"[..],
            b"\"abc\"",
            b"  abc ",
            b"\"abc\";v=1",
            b"\"abc\"; a; b=?0",
        ] {
            assert_eq!(parse(line), Ok(Some("abc".into())));
        }
        assert_eq!(parse(br#""a\"b\\c d""#), Ok(Some(r#"a"b\c d"#.into())));
        assert_eq!(
            parse(b"order-42_a.b~c;x"),
            Ok(Some("order-42_a.b~c;x".into()))
        );
    }

    #[test]
    fn absent_and_empty_opt_out() {
        assert_eq!(
            IdempotencyKey::from_header_lines(std::iter::empty()),
            Ok(None)
        );
        for line in [&b""[..], b"   ", b"\"\""] {
            assert_eq!(parse(line), Ok(None));
        }
    }

    #[test]
    fn malformed_is_an_error_and_never_absent() {
        for line in [
            &b"\"abc"[..],
            br#""a\x""#,
            b"\"a\" junk",
            b"\"a\", \"b\"",
            b"a,b",
            b"a b",
            b"a\"b",
            b"a\\b",
            b"caf\xe9",
            b"\"caf\xe9\"",
            b"a\x01",
            b"\"a\x7f\"",
        ] {
            assert_eq!(parse(line), Err(KeyError::Malformed), "{line:?}");
        }
        let twice = [&b"a"[..], b"a"];
        assert_eq!(
            IdempotencyKey::from_header_lines(twice.into_iter()),
            Err(KeyError::Repeated)
        );
    }

    #[test]
    fn length_counts_after_unquoting() {
        let longest = "k".repeat(KEY_BYTES_MAX);
        assert_eq!(parse(longest.as_bytes()), Ok(Some(longest.clone())));
        assert_eq!(
            parse(format!("\"{longest}\"").as_bytes()),
            Ok(Some(longest.clone()))
        );
        assert_eq!(
            parse(format!("{longest}k").as_bytes()),
            Err(KeyError::TooLong)
        );
        assert_eq!(
            parse(format!("\"{longest}k\"").as_bytes()),
            Err(KeyError::TooLong)
        );
    }

    proptest! {
        #[test]
        fn no_header_line_panics(line in proptest::collection::vec(any::<u8>(), 0..600)) {
            let _ = parse(&line);
        }

        #[test]
        fn every_printable_key_survives_quoting(text in "[ -~]{1,255}") {
            let quoted = format!("\"{}\"", text.replace('\\', r"\\").replace('"', "\\\""));
            prop_assert_eq!(parse(quoted.as_bytes()), Ok(Some(text)));
        }

        #[test]
        fn a_parsed_key_is_within_its_limits(line in proptest::collection::vec(any::<u8>(), 1..300)) {
            if let Ok(Some(key)) = parse(&line) {
                prop_assert!((1..=KEY_BYTES_MAX).contains(&key.len()));
                prop_assert!(key.bytes().all(|byte| (b' '..=b'~').contains(&byte)));
            }
        }
    }
}
