//! What a request gets.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{mpsc, watch};

use super::Cut;

/// Holds answers back until it is opened. Clones are the same gate.
#[derive(Clone, Debug)]
pub struct Gate(watch::Sender<bool>);

impl Gate {
    /// Holds everything back.
    pub fn closed() -> Self {
        Self(watch::Sender::new(false))
    }

    /// Lets everything through, from now on.
    pub fn open(&self) {
        self.0.send_replace(true);
    }

    pub(super) async fn passed(&self) {
        // The sender is `self`, so the wait can't fail.
        let _ = self.0.subscribe().wait_for(|open| *open).await;
    }
}

/// An answer, and how it goes wrong. Without a body its body is `{"execution":N}`.
#[derive(Clone, Debug)]
pub struct Reply {
    pub(super) status: u16,
    pub(super) headers: Vec<(String, Vec<u8>)>,
    pub(super) body: Option<Bytes>,
    pub(super) framing: Framing,
    pub(super) trailers: Vec<(String, Vec<u8>)>,
    pub(super) interim: Vec<u16>,
    pub(super) delay: Duration,
    pub(super) gate: Option<Gate>,
    pub(super) cut: Option<(usize, Cut)>,
    pub(super) raw: Option<Bytes>,
    pub(super) pieces: Option<Pieces>,
    pub(super) reset: Option<Reset>,
}

type Pieces = Arc<Mutex<Option<mpsc::Receiver<Piece>>>>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Framing {
    Length,
    LengthClaimed(usize),
    Chunked,
    ChunkedUnterminated,
    UntilClose,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reset {
    Refused,
    Executed(h2::Reason),
}

#[derive(Debug)]
pub(super) enum Piece {
    Data(Bytes),
    End,
    Cut(Cut),
    Reset(h2::Reason),
}

impl Reply {
    /// An answer with this status, framed by its length.
    pub fn new(status: u16) -> Self {
        Self {
            status,
            headers: Vec::new(),
            body: None,
            framing: Framing::Length,
            trailers: Vec::new(),
            interim: Vec::new(),
            delay: Duration::ZERO,
            gate: None,
            cut: None,
            raw: None,
            pieces: None,
            reset: None,
        }
    }

    /// These bytes and nothing else, HTTP/1.1 or not.
    pub fn raw(bytes: impl Into<Bytes>) -> Self {
        let mut reply = Self::new(200);
        reply.raw = Some(bytes.into());
        reply
    }

    /// 101 to this protocol; then every byte that comes is sent back.
    pub fn switch(protocol: &str) -> Self {
        Self::new(101)
            .header("Connection", "Upgrade")
            .header("Upgrade", protocol)
    }

    /// 200 with server-sent events; the test sends them.
    pub fn events() -> (Self, Stream) {
        let (reply, stream) = Self::pieces();
        (reply.header("Content-Type", "text/event-stream"), stream)
    }

    /// 200 with a body that the test sends piece by piece.
    pub fn pieces() -> (Self, Stream) {
        let (sender, receiver) = mpsc::channel(16);
        let mut reply = Self::new(200).chunked();
        reply.pieces = Some(Arc::new(Mutex::new(Some(receiver))));
        (reply, Stream(sender))
    }

    /// Adds a header line; the same name again is a second line.
    pub fn header(mut self, name: &str, value: impl AsRef<[u8]>) -> Self {
        let value = value.as_ref().to_vec();
        self.headers.push((name.to_owned(), value));
        self
    }

    /// Sets the body.
    pub fn body(mut self, body: impl Into<Bytes>) -> Self {
        self.body = Some(body.into());
        self
    }

    /// Frames the body in chunks.
    pub fn chunked(mut self) -> Self {
        self.framing = Framing::Chunked;
        self
    }

    /// Frames the body in chunks and sends this after them.
    pub fn trailer(mut self, name: &str, value: impl AsRef<[u8]>) -> Self {
        let value = value.as_ref().to_vec();
        self.trailers.push((name.to_owned(), value));
        self.chunked()
    }

    /// Ends the body with the connection, and tells nothing of its length.
    pub fn until_close(mut self) -> Self {
        self.framing = Framing::UntilClose;
        self
    }

    /// Claims this length, whatever the body's is; a shorter body then ends with FIN.
    pub fn claim_length(mut self, length: usize) -> Self {
        self.framing = Framing::LengthClaimed(length);
        self
    }

    /// Sends the body in a chunk and then FIN, without the last chunk.
    pub fn chunked_without_end(mut self) -> Self {
        self.framing = Framing::ChunkedUnterminated;
        self
    }

    /// Sends an interim answer first.
    pub fn interim(mut self, status: u16) -> Self {
        self.interim.push(status);
        self
    }

    /// Waits this long before the answer.
    pub fn delay(mut self, delay: Duration) -> Self {
        self.delay = delay;
        self
    }

    /// Waits for the gate before the answer.
    pub fn hold(mut self, gate: &Gate) -> Self {
        self.gate = Some(gate.clone());
        self
    }

    /// Ends the connection after this many bytes of the answer, 0 included (HTTP/1.1 only).
    pub fn cut_after(mut self, bytes: usize, cut: Cut) -> Self {
        self.cut = Some((bytes, cut));
        self
    }

    /// Resets the stream with `REFUSED_STREAM`, and executes nothing (HTTP/2 only).
    pub fn refuse_stream() -> Self {
        let mut reply = Self::new(200);
        reply.reset = Some(Reset::Refused);
        reply
    }

    /// Executes, then resets the stream (HTTP/2 only).
    pub fn reset_stream(reason: h2::Reason) -> Self {
        let mut reply = Self::new(200);
        reply.reset = Some(Reset::Executed(reason));
        reply
    }

    pub(super) fn body_of(&self, execution: usize) -> Bytes {
        let body = self.body.clone();
        body.unwrap_or_else(|| format!("{{\"execution\":{execution}}}").into())
    }

    /// Waits as told.
    pub(super) async fn wait(&self) {
        if self.delay > Duration::ZERO {
            tokio::time::sleep(self.delay).await;
        }
        if let Some(gate) = &self.gate {
            gate.passed().await;
        }
    }
}

/// The body of a [`Reply::events`]; dropping it ends the body in order.
#[derive(Debug)]
pub struct Stream(mpsc::Sender<Piece>);

impl Stream {
    /// Sends a piece as it is, such as `data: 1\n\n`.
    pub async fn send(&self, piece: impl Into<Bytes>) {
        let _ = self.0.send(Piece::Data(piece.into())).await;
    }

    /// Ends the body in order.
    pub async fn end(self) {
        let _ = self.0.send(Piece::End).await;
    }

    /// Ends the connection in the middle of the body (HTTP/1.1 only).
    pub async fn cut(self, cut: Cut) {
        let _ = self.0.send(Piece::Cut(cut)).await;
    }

    /// Resets the stream in the middle of the body (HTTP/2 only).
    pub async fn reset(self, reason: h2::Reason) {
        let _ = self.0.send(Piece::Reset(reason)).await;
    }

    /// Waits until nobody listens any more.
    pub async fn closed(&self) {
        self.0.closed().await;
    }
}
