//! Content codings (RFC 9110 section 8.4): who takes which, and how to undo one.

use async_compression::tokio::bufread::{BrotliDecoder, GzipDecoder, ZlibDecoder, ZstdDecoder};
use bytes::Bytes;
use http::HeaderValue;
use tokio::io::{AsyncRead, AsyncReadExt};

/// A stored body never grows beyond this when its coding is undone: a small body can be made to
/// unfold into any size.
pub const DECODED_BYTES_MAX: u64 = 16 * 1024 * 1024;

/// A coding that can be undone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coding {
    /// None at all.
    Identity,
    /// `gzip`, `x-gzip`.
    Gzip,
    /// `deflate`: zlib, RFC 1950.
    Deflate,
    /// `br`, RFC 7932.
    Brotli,
    /// `zstd`, RFC 8878.
    Zstd,
}

impl Coding {
    /// Reads a `Content-Encoding` value. `None`: unknown, or several codings on top of each other.
    #[must_use]
    pub fn parse(value: &[u8]) -> Option<Self> {
        match value.trim_ascii().to_ascii_lowercase().as_slice() {
            b"" | b"identity" => Some(Self::Identity),
            b"gzip" | b"x-gzip" => Some(Self::Gzip),
            b"deflate" => Some(Self::Deflate),
            b"br" => Some(Self::Brotli),
            b"zstd" => Some(Self::Zstd),
            _ => None,
        }
    }

    /// Whether nothing needs undoing.
    #[must_use]
    pub fn is_identity(self) -> bool {
        self == Self::Identity
    }

    /// Undoes the coding. `None`: the bytes are not in it, or unfold beyond
    /// [`DECODED_BYTES_MAX`].
    pub async fn decode(self, body: &Bytes) -> Option<Bytes> {
        let coded = &body[..];
        match self {
            Self::Identity => Some(body.clone()),
            Self::Gzip => read(GzipDecoder::new(coded)).await,
            Self::Deflate => read(ZlibDecoder::new(coded)).await,
            Self::Brotli => read(BrotliDecoder::new(coded)).await,
            Self::Zstd => read(ZstdDecoder::new(coded)).await,
        }
    }
}

async fn read(decoder: impl AsyncRead + Unpin) -> Option<Bytes> {
    let mut plain = Vec::new();
    let mut limited = decoder.take(DECODED_BYTES_MAX + 1);
    limited.read_to_end(&mut plain).await.ok()?;
    (plain.len() as u64 <= DECODED_BYTES_MAX).then(|| plain.into())
}

/// Whether a client with these `Accept-Encoding` lines takes `coding`. No line at all takes
/// everything (RFC 9110 section 12.5.3).
#[must_use]
pub fn accepts(lines: &[HeaderValue], coding: &[u8]) -> bool {
    if lines.is_empty() {
        return true;
    }
    let coding = coding.trim_ascii();
    let members = lines
        .iter()
        .flat_map(|line| line.as_bytes().split(|byte| *byte == b','))
        .map(|member| {
            let mut parts = member.split(|byte| *byte == b';');
            let name = parts.next().unwrap_or_default().trim_ascii();
            (name, parts.all(|parameter| !is_zero_weight(parameter)))
        });
    let mut any = None;
    for (name, wanted) in members {
        if same_coding(name, coding) {
            return wanted;
        }
        if name == b"*" {
            any = Some(wanted);
        }
    }
    any.unwrap_or(false)
}

fn same_coding(a: &[u8], b: &[u8]) -> bool {
    let plain = |name: &[u8]| {
        let name = name.to_ascii_lowercase();
        if name == b"x-gzip" {
            b"gzip".to_vec()
        } else {
            name
        }
    };
    plain(a) == plain(b)
}

/// Whether a parameter is `q=0`, `q=0.0` and so on.
fn is_zero_weight(parameter: &[u8]) -> bool {
    let text = String::from_utf8_lossy(parameter.trim_ascii()).to_ascii_lowercase();
    text.strip_prefix("q=")
        .is_some_and(|weight| weight.parse::<f32>().is_ok_and(|weight| weight <= 0.0))
}

#[cfg(test)]
mod tests {
    use async_compression::tokio::bufread::GzipEncoder;

    use super::*;

    fn accepted(line: &'static str, coding: &str) -> bool {
        accepts(&[HeaderValue::from_static(line)], coding.as_bytes())
    }

    #[test]
    fn who_takes_which_coding() {
        assert!(accepts(&[], b"gzip"));
        assert!(accepted("gzip, br", "gzip"));
        assert!(accepted("x-gzip", "gzip"));
        assert!(accepted("GZIP;q=0.5", "gzip"));
        assert!(accepted("*", "gzip"));
        assert!(!accepted("identity", "gzip"));
        assert!(!accepted("", "gzip"));
        assert!(!accepted("gzip;q=0", "gzip"));
        assert!(!accepted("*;q=0", "gzip"));
        assert!(accepted("*;q=0, gzip", "gzip"));
        assert!(!accepted("br", "gzip"));
    }

    #[tokio::test]
    async fn a_coding_is_undone_and_a_bomb_is_not() {
        let mut coded = Vec::new();
        let mut encoder = GzipEncoder::new(&b"hello"[..]);
        encoder.read_to_end(&mut coded).await.unwrap();
        let plain = Coding::Gzip.decode(&coded.into()).await;
        assert_eq!(plain.as_deref(), Some(&b"hello"[..]));
        assert_eq!(
            Coding::Gzip.decode(&Bytes::from_static(b"no gzip")).await,
            None
        );

        let zeros = vec![0; usize::try_from(DECODED_BYTES_MAX).unwrap() + 1];
        let mut bomb = Vec::new();
        let mut encoder = GzipEncoder::new(&zeros[..]);
        encoder.read_to_end(&mut bomb).await.unwrap();
        assert_eq!(Coding::Gzip.decode(&bomb.into()).await, None);
    }
}
