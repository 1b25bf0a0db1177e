//! Content codings (RFC 9110 section 8.4): who takes which, and how to undo one.

use std::io::Cursor;

use async_compression::tokio::bufread::{BrotliDecoder, GzipDecoder, ZlibDecoder, ZstdDecoder};
use bytes::{Bytes, BytesMut};
use futures_util::TryStreamExt as _;
use futures_util::stream;
use http::HeaderValue;
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use tokio::io::{AsyncRead, AsyncReadExt as _};

use super::{Body, BoxError};

/// A stored body never grows beyond this when its coding is undone: a small body can be made to
/// unfold into any size.
pub const DECODED_BYTES_MAX: u64 = 16 * 1024 * 1024;

/// How much of a body is undone at a time.
const PIECE_BYTES: usize = 16 * 1024;

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

    /// Undoes the coding: the plain body and its length in bytes. `None`: the bytes are not in it,
    /// or unfold beyond [`DECODED_BYTES_MAX`].
    ///
    /// It is done twice, first to see that it can be, then as the client takes the body: many
    /// clients that ask for what a small body unfolds into, and take it slowly, hold the small body
    /// and not what it unfolds into.
    pub async fn decode(self, body: &Bytes) -> Option<(Body, u64)> {
        let mut trial = self.reader(body.clone());
        let mut piece = BytesMut::with_capacity(PIECE_BYTES);
        let mut length = 0;
        loop {
            piece.clear();
            match trial.read_buf(&mut piece).await.ok()? {
                0 => break,
                read => length += read as u64,
            }
            if length > DECODED_BYTES_MAX {
                return None;
            }
            // Nothing here waits for anything, so others are let in now and then.
            tokio::task::consume_budget().await;
        }
        let pieces = stream::try_unfold(self.reader(body.clone()), |mut reader| async move {
            let mut piece = BytesMut::with_capacity(PIECE_BYTES);
            let read = reader.read_buf(&mut piece).await?;
            Ok::<_, std::io::Error>((read > 0).then(|| (piece.freeze(), reader)))
        });
        let frames = pieces.map_ok(Frame::data).map_err(BoxError::from);
        Some((StreamBody::new(frames).boxed_unsync(), length))
    }

    /// Gzip and zstd bodies may be several ones after another (RFC 1952 section 2.2, RFC 8878
    /// section 3).
    fn reader(self, coded: Bytes) -> Box<dyn AsyncRead + Send + Unpin> {
        let coded = Cursor::new(coded);
        match self {
            Self::Identity => Box::new(coded),
            Self::Gzip => {
                let mut decoder = GzipDecoder::new(coded);
                decoder.multiple_members(true);
                Box::new(decoder)
            }
            Self::Deflate => Box::new(ZlibDecoder::new(coded)),
            Self::Brotli => Box::new(BrotliDecoder::new(coded)),
            Self::Zstd => {
                let mut decoder = ZstdDecoder::new(coded);
                decoder.multiple_members(true);
                Box::new(decoder)
            }
        }
    }
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

    async fn gzip(plain: &[u8]) -> Vec<u8> {
        let mut coded = Vec::new();
        let mut encoder = GzipEncoder::new(plain);
        encoder.read_to_end(&mut coded).await.unwrap();
        coded
    }

    async fn plain(coded: Vec<u8>) -> Option<Bytes> {
        let (body, length) = Coding::Gzip.decode(&coded.into()).await?;
        let plain = body.collect().await.unwrap().to_bytes();
        assert_eq!(plain.len() as u64, length);
        Some(plain)
    }

    #[tokio::test]
    async fn a_coding_is_undone_and_a_bomb_is_not() {
        let hello = plain(gzip(b"hello").await).await;
        assert_eq!(hello.as_deref(), Some(&b"hello"[..]));
        assert_eq!(plain(b"no gzip".to_vec()).await, None);
        let mut cut = gzip(b"hello").await;
        cut.truncate(cut.len() - 1);
        assert_eq!(plain(cut).await, None);

        let zeros = vec![0; usize::try_from(DECODED_BYTES_MAX).unwrap() + 1];
        assert_eq!(plain(gzip(&zeros).await).await, None);
    }

    #[tokio::test]
    async fn a_body_of_several_members_is_undone_whole() {
        let coded = [gzip(b"one ").await, gzip(b"two").await].concat();
        assert_eq!(plain(coded).await.as_deref(), Some(&b"one two"[..]));
        let followed = [gzip(b"one").await, b"and more".to_vec()].concat();
        assert_eq!(plain(followed).await, None);
    }

    #[tokio::test]
    async fn what_a_small_body_unfolds_into_is_never_held_as_one() {
        let coded: Bytes = gzip(&vec![0; 1 << 20]).await.into();
        let (mut body, length) = Coding::Gzip.decode(&coded).await.unwrap();
        let mut taken = 0;
        while let Some(frame) = body.frame().await {
            let piece = frame.unwrap().into_data().unwrap();
            assert!(piece.len() <= PIECE_BYTES);
            taken += piece.len() as u64;
        }
        assert_eq!((taken, length), (1 << 20, 1 << 20));
    }
}
