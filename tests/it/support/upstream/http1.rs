//! HTTP/1.1, byte by byte.

use std::io::{self, ErrorKind};
use std::time::Duration;

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;

use super::reply::{Framing, Piece, Reply};
use super::{Counted, Cut, Seen};

pub(super) trait Socket: AsyncRead + AsyncWrite + Unpin + Send + 'static {
    /// Whether `tcp` has the bytes as they are; TLS may have read ahead.
    const PLAIN: bool;

    fn tcp(&self) -> &TcpStream;
}

impl Socket for TcpStream {
    const PLAIN: bool = true;

    fn tcp(&self) -> &TcpStream {
        self
    }
}

impl Socket for TlsStream<TcpStream> {
    const PLAIN: bool = false;

    fn tcp(&self) -> &TcpStream {
        self.get_ref().0
    }
}

/// Ends a connection. After a FIN it goes on reading, since closing a socket with unread bytes
/// would send RST.
pub(super) async fn cut(mut io: impl Socket, cut: Cut, mut counted: Counted) {
    match cut {
        Cut::Fin => {
            let _ = io.shutdown().await;
            counted.set_idle(false);
            let mut sink = [0; 4096];
            while matches!(io.read(&mut sink).await, Ok(1..)) {}
        }
        Cut::FinBelowTls => {
            let _ = socket2::SockRef::from(io.tcp()).shutdown(std::net::Shutdown::Write);
            let mut sink = [0; 4096];
            while matches!(io.read(&mut sink).await, Ok(1..)) {}
        }
        Cut::Rst => {
            let _ = socket2::SockRef::from(io.tcp()).set_linger(Some(Duration::ZERO));
            drop(io);
        }
    }
}

pub(super) async fn serve(io: impl Socket, counted: Counted, number: usize) {
    let mut connection = Connection {
        io,
        buffer: BytesMut::new(),
        number,
        counted,
    };
    if let Ok(how) = connection.exchanges().await {
        cut(connection.io, how, connection.counted).await;
    }
}

struct Connection<S> {
    io: S,
    buffer: BytesMut,
    number: usize,
    counted: Counted,
}

impl<S: Socket> Connection<S> {
    async fn exchanges(&mut self) -> io::Result<Cut> {
        loop {
            if let Some(cut) = self.idle().await {
                return Ok(cut);
            }
            let shared = self.counted.shared.clone();
            let broken = shared.script.lock().unwrap().breaks.pop_front();
            if let Some((bytes, cut)) = broken {
                while self.buffer.len() < bytes {
                    self.read_more(bytes - self.buffer.len()).await?;
                }
                shared.update(|state| state.broken += 1);
                return Ok(cut);
            }
            let seen = self.read_request().await?;
            let reply = shared.reply(&seen.method, seen.path());
            let execution = shared.record(seen.clone());
            if let Some(cut) = self.answer(&seen, &reply, execution).await? {
                return Ok(cut);
            }
        }
    }

    /// Waits for the first byte of a request, without reading it unless there is TLS, or until
    /// told to end.
    async fn idle(&mut self) -> Option<Cut> {
        if !self.buffer.is_empty() {
            return None;
        }
        let mut closing = self.counted.shared.closing.subscribe();
        self.counted.set_idle(true);
        let comes = async {
            if S::PLAIN {
                self.io.tcp().peek(&mut [0]).await
            } else {
                self.io.read_buf(&mut self.buffer).await
            }
        };
        tokio::select! {
            came = comes => {
                self.counted.set_idle(false);
                (!matches!(came, Ok(1..))).then_some(Cut::Fin)
            }
            _ = closing.changed() => Some(*closing.borrow()),
        }
    }

    /// Reads at most this many bytes.
    async fn read_more(&mut self, limit: usize) -> io::Result<()> {
        let mut io = (&mut self.io).take(limit as u64);
        match io.read_buf(&mut self.buffer).await? {
            0 => Err(ErrorKind::UnexpectedEof.into()),
            _ => Ok(()),
        }
    }

    async fn read_until(&mut self, end: &[u8]) -> io::Result<Vec<u8>> {
        loop {
            if let Some(at) = memchr::memmem::find(&self.buffer, end) {
                let bytes = self.buffer.split_to(at).to_vec();
                self.buffer.advance(end.len());
                return Ok(bytes);
            }
            self.read_more(64 * 1024).await?;
        }
    }

    /// Moves this many bytes of the body from the wire.
    async fn read_into(&mut self, body: &mut Vec<u8>, length: usize) -> io::Result<()> {
        let end = body.len() + length;
        while body.len() < end {
            if self.buffer.is_empty() {
                self.read_more(64 * 1024).await?;
            }
            let available = self.buffer.len().min(end - body.len());
            body.extend_from_slice(&self.buffer.split_to(available));
        }
        Ok(())
    }

    async fn read_request(&mut self) -> io::Result<Seen> {
        let head = self.read_until(b"\r\n\r\n").await?;
        let seen = parse_head(&head, self.number);
        if seen.header("expect") == ["100-continue"] {
            self.io.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").await?;
        }
        let mut body = Vec::new();
        let read = self.read_body(&seen, &mut body).await;
        let seen = seen.finish(body, read.is_ok());
        if let Err(error) = read {
            self.counted.shared.record(seen);
            return Err(error);
        }
        Ok(seen)
    }

    async fn read_body(&mut self, seen: &Seen, body: &mut Vec<u8>) -> io::Result<()> {
        if seen.header("transfer-encoding") == ["chunked"] {
            loop {
                let size = self.read_until(b"\r\n").await?;
                let size = String::from_utf8(size).unwrap();
                let size = usize::from_str_radix(size.trim(), 16).expect("a chunk size");
                self.read_into(body, size).await?;
                if size == 0 {
                    while !self.read_until(b"\r\n").await?.is_empty() {}
                    return Ok(());
                }
                self.read_until(b"\r\n").await?;
            }
        }
        let lengths = seen.header("content-length");
        assert!(lengths.len() < 2, "two lengths: {seen:?}");
        let length = lengths.first().map_or(0, |length| length.parse().unwrap());
        self.read_into(body, length).await
    }

    async fn answer(
        &mut self,
        seen: &Seen,
        reply: &Reply,
        execution: usize,
    ) -> io::Result<Option<Cut>> {
        for status in &reply.interim {
            let line = format!("HTTP/1.1 {status} Interim\r\nX-Interim: 1\r\n\r\n");
            self.io.write_all(line.as_bytes()).await?;
        }
        tokio::select! {
            () = reply.wait() => {}
            () = gone(self.io.tcp()) => return Err(ErrorKind::ConnectionReset.into()),
        }
        let bytes = match &reply.raw {
            Some(raw) => raw.to_vec(),
            None => rendered(seen, reply, execution),
        };
        if let Some((length, cut)) = reply.cut {
            self.io.write_all(&bytes[..length.min(bytes.len())]).await?;
            self.io.flush().await?;
            return Ok(Some(cut));
        }
        self.io.write_all(&bytes).await?;
        self.io.flush().await?;
        if let Some(pieces) = &reply.pieces {
            let pieces = pieces.lock().unwrap().take();
            return self.stream(pieces.expect("streamed once")).await;
        }
        if reply.status == 101 {
            return self.echo().await.map(Some);
        }
        let body_ends_with_fin = match reply.framing {
            Framing::Length | Framing::Chunked => false,
            Framing::LengthClaimed(length) => length > reply.body_of(execution).len(),
            Framing::ChunkedUnterminated | Framing::UntilClose => true,
        };
        let last = body_ends_with_fin || seen.header("connection") == ["close"];
        Ok(last.then_some(Cut::Fin))
    }

    async fn stream(
        &mut self,
        mut pieces: tokio::sync::mpsc::Receiver<Piece>,
    ) -> io::Result<Option<Cut>> {
        loop {
            let piece = tokio::select! {
                piece = pieces.recv() => piece,
                () = gone(self.io.tcp()) => return Err(ErrorKind::ConnectionReset.into()),
            };
            match piece {
                Some(Piece::Data(data)) => {
                    let mut chunk = format!("{:x}\r\n", data.len()).into_bytes();
                    chunk.extend_from_slice(&data);
                    chunk.extend_from_slice(b"\r\n");
                    self.io.write_all(&chunk).await?;
                    self.io.flush().await?;
                }
                Some(Piece::Cut(cut)) => return Ok(Some(cut)),
                Some(Piece::Reset(_)) => panic!("there are no streams to reset"),
                Some(Piece::End) | None => {
                    self.io.write_all(b"0\r\n\r\n").await?;
                    self.io.flush().await?;
                    return Ok(None);
                }
            }
        }
    }

    async fn echo(&mut self) -> io::Result<Cut> {
        loop {
            if self.buffer.is_empty() && self.io.read_buf(&mut self.buffer).await? == 0 {
                return Ok(Cut::Fin);
            }
            let bytes = self.buffer.split();
            self.io.write_all(&bytes).await?;
            self.io.flush().await?;
        }
    }
}

/// Waits until the other side has closed.
async fn gone(tcp: &TcpStream) {
    if matches!(tcp.peek(&mut [0]).await, Ok(1..)) {
        std::future::pending::<()>().await;
    }
}

fn parse_head(head: &[u8], connection: usize) -> Seen {
    let mut lines = head.split(|byte| *byte == b'\n');
    let first = String::from_utf8(lines.next().unwrap_or_default().to_vec()).unwrap();
    let mut words = first.trim_end().split(' ');
    let mut word = || words.next().unwrap_or_default().to_owned();
    let (method, target) = (word(), word());
    let headers = lines.map(|line| {
        let colon = line.iter().position(|byte| *byte == b':').expect("a colon");
        let name = String::from_utf8(line[..colon].to_vec()).unwrap();
        (name, line[colon + 1..].trim_ascii().to_vec())
    });
    Seen {
        method,
        target,
        headers: headers.collect(),
        body: Vec::new(),
        sha256: String::new(),
        connection,
        complete: false,
    }
}

fn rendered(seen: &Seen, reply: &Reply, execution: usize) -> Vec<u8> {
    let body = reply.body_of(execution);
    let mut bytes = format!("HTTP/1.1 {} Scripted\r\n", reply.status).into_bytes();
    let lines = |bytes: &mut Vec<u8>, lines: &[(String, Vec<u8>)]| {
        for (name, value) in lines {
            bytes.extend_from_slice(name.as_bytes());
            bytes.extend_from_slice(b": ");
            bytes.extend_from_slice(value);
            bytes.extend_from_slice(b"\r\n");
        }
    };
    lines(&mut bytes, &reply.headers);
    let no_length = reply.status < 200 || reply.status == 204;
    let framing = match reply.framing {
        _ if no_length => String::new(),
        Framing::Length => format!("Content-Length: {}\r\n", body.len()),
        Framing::LengthClaimed(length) => format!("Content-Length: {length}\r\n"),
        Framing::Chunked | Framing::ChunkedUnterminated => {
            "Transfer-Encoding: chunked\r\n".to_owned()
        }
        Framing::UntilClose => "Connection: close\r\n".to_owned(),
    };
    bytes.extend_from_slice(framing.as_bytes());
    bytes.extend_from_slice(b"\r\n");
    if no_length || reply.status == 304 || seen.method == "HEAD" || reply.pieces.is_some() {
        return bytes;
    }
    let chunked = matches!(
        reply.framing,
        Framing::Chunked | Framing::ChunkedUnterminated
    );
    if chunked && !body.is_empty() {
        bytes.extend_from_slice(format!("{:x}\r\n", body.len()).as_bytes());
    }
    bytes.extend_from_slice(&body);
    if chunked && !body.is_empty() {
        bytes.extend_from_slice(b"\r\n");
    }
    if reply.framing == Framing::Chunked {
        bytes.extend_from_slice(b"0\r\n");
        lines(&mut bytes, &reply.trailers);
        bytes.extend_from_slice(b"\r\n");
    }
    bytes
}
