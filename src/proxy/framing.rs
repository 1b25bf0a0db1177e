//! A second, strict look at how HTTP/1 requests are framed, so that none can be smuggled.
//!
//! hyper refuses most ambiguous framing, but takes a request with both `Transfer-Encoding` and
//! `Content-Length` and hides the latter, and lets a bare LF end a line. Whatever stands in front
//! of the gateway may read such a request differently (RFC 9112 section 11.2), so it is refused.
//!
//! The scanner only watches: it changes no byte and keeps none but the beginning of one line. It
//! sees each head before hyper does, so its verdict is there when the request is handed on. Where
//! it and hyper could differ about the end of a message, it finds a fault; what hyper refuses by
//! itself it may overlook. It knows no socket, and nothing of HTTP/2.

use memchr::memchr;

/// How much of a line's beginning is kept: room for any framing field that is not a fault.
const LINE_KEPT: usize = 64;
/// The most digits of a chunk's size: 2^60 bytes are in no honest chunk.
const CHUNK_DIGITS_MAX: usize = 15;
/// The first line of HTTP/2 (RFC 9113 section 3.4).
const HTTP2_PREFACE_LINE: &[u8] = b"PRI * HTTP/2.0";

/// What is wrong with a request's framing. The text goes to the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// RFC 9112 section 6.1.
    #[error("A request must not have both Transfer-Encoding and Content-Length. Send one of them.")]
    BothLengths,
    /// RFC 9112 section 6.3, rule 5.
    #[error("Send one Content-Length, in plain digits.")]
    ContentLength,
    /// RFC 9112 section 6.1 knows more codings, but no client uses them.
    #[error("The only Transfer-Encoding taken is chunked. Name it once.")]
    TransferEncoding,
    /// RFC 9112 section 2.2.
    #[error("Every line of a request must end with CR LF.")]
    BareLf,
    /// RFC 9112 section 7.1.
    #[error("The chunked body is malformed.")]
    Chunked,
}

/// Follows the bytes of one connection as they come.
#[derive(Debug)]
pub struct Scanner {
    state: State,
    line: Line,
    head: Head,
    /// Heads that are complete.
    heads: u64,
    refused: Option<Refused>,
}

/// The first request, counted from zero, that must not be served, and why.
#[derive(Clone, Copy, Debug)]
struct Refused {
    from: u64,
    fault: Fault,
}

/// What the next byte belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    RequestLine,
    Field,
    /// A body of which this many bytes are to come, at least one.
    Body(u64),
    ChunkSize,
    /// A chunk of which this many bytes are to come, at least one.
    Chunk(u64),
    ChunkEnd,
    Trailer,
    /// Not looked at: a fault was found, or this is HTTP/2.
    Off,
    /// Not looked at: the connection was upgraded.
    Tunnel,
}

/// The beginning of the line that is being read, and how it ends so far.
#[derive(Debug)]
struct Line {
    start: [u8; LINE_KEPT],
    len: usize,
    last: u8,
}

/// The framing of the head that is being read.
#[derive(Clone, Copy, Debug, Default)]
struct Head {
    content_length: Option<u64>,
    chunked: bool,
    fault: Option<Fault>,
}

impl Scanner {
    /// For a connection of which nothing was read yet.
    pub fn new() -> Self {
        Self {
            state: State::RequestLine,
            line: Line {
                start: [0; LINE_KEPT],
                len: 0,
                last: 0,
            },
            head: Head::default(),
            heads: 0,
            refused: None,
        }
    }

    /// Looks at bytes that are about to be handed on.
    ///
    /// # Errors
    /// When a body is malformed. Its request may be running, so the connection must break and the
    /// body with it. A malformed head is no error here: [`Self::fault_of`] tells, and the request
    /// gets an answer.
    pub fn scan(&mut self, mut bytes: &[u8]) -> Result<(), Fault> {
        while !bytes.is_empty() {
            let used = match self.state {
                State::Off | State::Tunnel => return Ok(()),
                State::Body(left) => {
                    let (used, left) = skip(bytes, left);
                    self.state = left.map_or(State::RequestLine, State::Body);
                    used
                }
                State::Chunk(left) => {
                    let (used, left) = skip(bytes, left);
                    self.state = left.map_or(State::ChunkEnd, State::Chunk);
                    used
                }
                _ => self.take_line(bytes)?,
            };
            bytes = &bytes[used..];
        }
        Ok(())
    }

    /// Why the request with this number, counted from zero, must not be served.
    pub fn fault_of(&self, request: u64) -> Option<Fault> {
        let refused = self.refused?;
        (request >= refused.from).then_some(refused.fault)
    }

    /// How many heads are complete.
    pub fn heads(&self) -> u64 {
        self.heads
    }

    /// Whether a head has begun and not ended.
    pub fn in_head(&self) -> bool {
        self.state == State::Field || (self.state == State::RequestLine && self.line.len > 0)
    }

    /// Whether the last message ended and no other has begun.
    pub fn is_between_messages(&self) -> bool {
        self.state == State::RequestLine && self.line.len == 0
    }

    /// Whether the connection was upgraded.
    pub fn is_tunnel(&self) -> bool {
        self.state == State::Tunnel
    }

    /// Stops looking: the connection was upgraded and speaks something else from here on.
    pub fn upgrade(&mut self) {
        self.state = State::Tunnel;
    }

    /// Takes bytes up to the end of the present line, or all.
    fn take_line(&mut self, bytes: &[u8]) -> Result<usize, Fault> {
        let Some(end) = memchr(b'\n', bytes) else {
            self.line.push(bytes);
            return Ok(bytes.len());
        };
        self.line.push(&bytes[..end]);
        let in_head = matches!(self.state, State::RequestLine | State::Field);
        match self.end_line() {
            Ok(state) => self.state = state,
            Err(fault) => {
                self.refused = Some(Refused {
                    from: self.heads,
                    fault,
                });
                self.state = State::Off;
                if !in_head {
                    return Err(fault);
                }
            }
        }
        self.line.len = 0;
        Ok(end + 1)
    }

    /// What comes after the present line.
    fn end_line(&mut self) -> Result<State, Fault> {
        let line = self.line.content().ok_or(Fault::BareLf)?;
        match (self.state, line) {
            // Empty lines before a request are skipped (RFC 9112 section 2.2).
            (State::RequestLine | State::Trailer, []) => Ok(State::RequestLine),
            (State::RequestLine, HTTP2_PREFACE_LINE) if self.heads == 0 => Ok(State::Off),
            (State::RequestLine, _) => {
                self.head = Head::default();
                Ok(State::Field)
            }
            (State::Field, []) => {
                let state = self.head.end()?;
                self.heads += 1;
                Ok(state)
            }
            (State::Field, field) => {
                self.head.field(field, self.line.is_whole());
                Ok(State::Field)
            }
            (State::ChunkSize, size) => chunk(size),
            (State::ChunkEnd, []) => Ok(State::ChunkSize),
            (State::ChunkEnd, _) => Err(Fault::Chunked),
            (state, _) => Ok(state),
        }
    }
}

impl Line {
    fn push(&mut self, bytes: &[u8]) {
        let Some(last) = bytes.last() else { return };
        if let Some(room) = self.start.get_mut(self.len..) {
            let kept = room.len().min(bytes.len());
            room[..kept].copy_from_slice(&bytes[..kept]);
        }
        self.len = self.len.saturating_add(bytes.len());
        self.last = *last;
    }

    /// The line without its end, or its beginning if it is long. `None`: no CR before the LF.
    fn content(&self) -> Option<&[u8]> {
        let len = self.len.checked_sub(1).filter(|_| self.last == b'\r')?;
        Some(&self.start[..len.min(LINE_KEPT)])
    }

    fn is_whole(&self) -> bool {
        self.len <= LINE_KEPT
    }
}

impl Head {
    fn field(&mut self, line: &[u8], whole: bool) {
        let Some(colon) = memchr(b':', line) else {
            return;
        };
        let (name, value) = (&line[..colon], line[colon + 1..].trim_ascii());
        if name.eq_ignore_ascii_case(b"transfer-encoding") {
            if self.chunked || !whole || !value.eq_ignore_ascii_case(b"chunked") {
                self.fault = Some(Fault::TransferEncoding);
            }
            self.chunked = true;
        } else if name.eq_ignore_ascii_case(b"content-length") {
            let length = whole.then(|| number(value, 10)).flatten();
            if self.content_length.is_some() || length.is_none() {
                self.fault = Some(Fault::ContentLength);
            }
            self.content_length = length.or(Some(0));
        }
    }

    /// What comes after this head (RFC 9112 section 6.3).
    fn end(&self) -> Result<State, Fault> {
        match (self.fault, self.chunked, self.content_length) {
            (_, true, Some(_)) => Err(Fault::BothLengths),
            (Some(fault), ..) => Err(fault),
            (None, true, None) => Ok(State::ChunkSize),
            (None, false, None | Some(0)) => Ok(State::RequestLine),
            (None, false, Some(length)) => Ok(State::Body(length)),
        }
    }
}

/// What comes after a chunk's size line; extensions are ignored (RFC 9112 section 7.1.1).
fn chunk(line: &[u8]) -> Result<State, Fault> {
    let digits = line.iter().take_while(|byte| byte.is_ascii_hexdigit());
    let digits = &line[..digits.count()];
    match number(digits, 16) {
        Some(0) if digits.len() <= CHUNK_DIGITS_MAX => Ok(State::Trailer),
        Some(size) if digits.len() <= CHUNK_DIGITS_MAX => Ok(State::Chunk(size)),
        _ => Err(Fault::Chunked),
    }
}

/// A number of digits only: no sign, no space.
fn number(digits: &[u8], radix: u32) -> Option<u64> {
    let digits = std::str::from_utf8(digits).ok()?;
    if digits.starts_with('+') {
        return None;
    }
    u64::from_str_radix(digits, radix).ok()
}

/// How many bytes to skip, and how many are left to skip after them, if any.
fn skip(bytes: &[u8], left: u64) -> (usize, Option<u64>) {
    let used = usize::try_from(left).map_or(bytes.len(), |left| left.min(bytes.len()));
    let left = left - used as u64;
    (used, (left > 0).then_some(left))
}

#[cfg(test)]
mod tests;
