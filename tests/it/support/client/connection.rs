//! HTTP/1.1 byte by byte.

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::Answer;
use crate::support::clock::PATIENCE;

/// An HTTP/1.1 connection, byte by byte.
pub struct Connection {
    stream: TcpStream,
    unread: BytesMut,
}

impl Connection {
    /// Connects.
    pub async fn to(address: SocketAddr) -> io::Result<Self> {
        let stream = in_time(TcpStream::connect(address)).await?;
        stream.set_nodelay(true)?;
        Ok(Self {
            stream,
            unread: BytesMut::new(),
        })
    }

    /// Writes these bytes.
    pub async fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        in_time(self.stream.write_all(bytes)).await
    }

    /// Ends the writing side only (FIN), as `shutdown(2)` does.
    pub async fn finish_writing(&mut self) {
        self.stream.shutdown().await.expect("the socket is open");
    }

    /// Goes away politely: FIN.
    pub fn close(self) {
        drop(self);
    }

    /// Goes away at once: RST.
    pub fn reset(self) {
        let socket = socket2::SockRef::from(&self.stream);
        let at_once = Some(Duration::ZERO);
        socket.set_linger(at_once).expect("the socket is open");
    }

    /// Reads one answer, interim answers skipped.
    pub async fn answer(&mut self) -> io::Result<Answer> {
        self.answer_to("POST").await
    }

    /// Reads one answer to a request with this method.
    pub async fn answer_to(&mut self, method: &str) -> io::Result<Answer> {
        let mut answer = self.answer_head().await?;
        answer.body = self.body_of(&answer, method).await?;
        Ok(answer)
    }

    /// Reads the head of one answer, interim answers skipped.
    pub async fn answer_head(&mut self) -> io::Result<Answer> {
        loop {
            let head = self.until(b"\r\n\r\n").await?;
            let answer = parse_head(&head)?;
            if answer.status >= 200 || answer.status == 101 {
                return Ok(answer);
            }
        }
    }

    async fn body_of(&mut self, head: &Answer, method: &str) -> io::Result<Bytes> {
        let lengths = head.header_lines("content-length");
        let codings = head.header_lines("transfer-encoding");
        if lengths.len() + codings.len() > 1 {
            return Err(broken("more than one framing"));
        }
        if method == "HEAD" || matches!(head.status, 101 | 204 | 304) {
            return Ok(Bytes::new());
        }
        if let Some(length) = lengths.first() {
            let length = length.parse().map_err(|_| broken("Content-Length"))?;
            return self.exactly(length).await;
        }
        if codings.is_empty() {
            return self.rest().await;
        }
        let mut body = BytesMut::new();
        while let Some(chunk) = self.chunk().await? {
            body.extend_from_slice(&chunk);
        }
        Ok(body.freeze())
    }

    /// Reads one chunk; `None` after the last one, trailers read.
    pub async fn chunk(&mut self) -> io::Result<Option<Bytes>> {
        let line = self.until(b"\r\n").await?;
        let size = String::from_utf8_lossy(&line);
        let size = size.split(';').next().unwrap_or_default().trim();
        let size = usize::from_str_radix(size, 16).map_err(|_| broken("chunk size"))?;
        if size == 0 {
            while self.until(b"\r\n").await?.len() > 2 {}
            return Ok(None);
        }
        let chunk = self.exactly(size).await?;
        self.exactly(2).await?;
        Ok(Some(chunk))
    }

    /// Reads until the peer closes.
    pub async fn rest(&mut self) -> io::Result<Bytes> {
        while self.more().await? > 0 {}
        Ok(self.unread.split().freeze())
    }

    /// Whether the peer closes without another byte.
    pub async fn is_closed(&mut self) -> bool {
        match self.more().await {
            Ok(read) => read == 0,
            Err(error) => error.kind() != ErrorKind::TimedOut,
        }
    }

    /// Reads exactly so many bytes.
    pub async fn exactly(&mut self, length: usize) -> io::Result<Bytes> {
        while self.unread.len() < length {
            if self.more().await? == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(self.unread.split_to(length).freeze())
    }

    async fn until(&mut self, mark: &[u8]) -> io::Result<Bytes> {
        loop {
            if let Some(at) = memchr::memmem::find(&self.unread, mark) {
                return Ok(self.unread.split_to(at + mark.len()).freeze());
            }
            if self.more().await? == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
        }
    }

    async fn more(&mut self) -> io::Result<usize> {
        in_time(self.stream.read_buf(&mut self.unread)).await
    }
}

async fn in_time<T>(action: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    tokio::time::timeout(PATIENCE, action)
        .await
        .unwrap_or_else(|_| Err(ErrorKind::TimedOut.into()))
}

fn broken(what: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, what.to_owned())
}

fn parse_head(head: &[u8]) -> io::Result<Answer> {
    let mut lines = head.split(|byte| *byte == b'\n');
    let first = String::from_utf8_lossy(lines.next().unwrap_or_default()).into_owned();
    let status = first.split(' ').nth(1).and_then(|word| word.parse().ok());
    let status = status.ok_or_else(|| broken(&first))?;
    let mut headers = Vec::new();
    for line in lines {
        let line = line.trim_ascii_end();
        if line.is_empty() {
            continue;
        }
        let colon = memchr::memchr(b':', line).ok_or_else(|| broken("header line"))?;
        let name = String::from_utf8_lossy(&line[..colon]).to_ascii_lowercase();
        headers.push((name, line[colon + 1..].trim_ascii().to_vec()));
    }
    Ok(Answer {
        status,
        headers,
        body: Bytes::new(),
    })
}
