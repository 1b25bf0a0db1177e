//! Clients that see every byte: HTTP/1.1 written by hand, and HTTP/2 frame by frame.
//!
//! Nothing here retries, follows, decodes or reorders anything. One call is one request.

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_util::task::TaskTracker;

use super::clock::PATIENCE;

/// An answer as it stood on the wire.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The status code.
    pub status: u16,
    /// Header lines in order, names in lower case.
    pub headers: Vec<(String, Vec<u8>)>,
    /// The body without its framing.
    pub body: Bytes,
}

impl Answer {
    /// The first line with this name, as text.
    pub fn header(&self, name: &str) -> Option<String> {
        self.header_lines(name).into_iter().next()
    }

    /// Every line with this name, in order.
    pub fn header_lines(&self, name: &str) -> Vec<String> {
        let lines = self.headers.iter().filter(|(have, _)| have == name);
        lines
            .map(|(_, value)| String::from_utf8_lossy(value).into_owned())
            .collect()
    }

    /// `Idempotency-Status`; empty when there is none.
    pub fn idempotency(&self) -> String {
        let lines = self.header_lines("idempotency-status");
        assert!(lines.len() <= 1, "one status: {self:?}");
        lines.into_iter().next().unwrap_or_default()
    }

    /// Whether it says that it was stored before.
    pub fn replayed(&self) -> bool {
        self.header_lines("idempotent-replayed") == ["true"]
    }

    /// `Idempotency-Decision`.
    pub fn decision(&self) -> Option<String> {
        self.header("idempotency-decision")
    }

    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// `Retry-After` in seconds.
    pub fn retry_after(&self) -> Option<u64> {
        let value = self.header("retry-after")?;
        Some(value.parse().expect("Retry-After is a number of seconds"))
    }

    /// The end of the problem's `type`; empty when this is no problem document.
    pub fn problem(&self) -> String {
        let kind = self.header("content-type").unwrap_or_default();
        if kind != "application/problem+json" {
            return String::new();
        }
        let document: Value = serde_json::from_slice(&self.body).expect("a problem is JSON");
        assert_eq!(document["status"], self.status, "{document}");
        let kind = document["type"].as_str().expect("a problem has a type");
        kind.rsplit('/').next().unwrap_or_default().to_owned()
    }

    /// Asserts that it is this problem, and what `Idempotency-Status` says.
    #[track_caller]
    pub fn assert_problem(&self, status: u16, slug: &str, idempotency: &str) {
        let seen = (self.status, self.problem(), self.idempotency());
        let right = (status, slug.to_owned(), idempotency.to_owned());
        assert_eq!(seen, right, "{self:?}\n{}", self.text());
    }

    /// Asserts status and what `Idempotency-Status` says.
    #[track_caller]
    pub fn assert_is(&self, status: u16, idempotency: &str) {
        let seen = (self.status, self.idempotency());
        assert_eq!(
            seen,
            (status, idempotency.to_owned()),
            "{self:?}\n{}",
            self.text()
        );
    }

    /// What a replay must give again: status, headers that are not this hop's or this answer's
    /// own, body.
    pub fn kept(&self) -> (u16, Vec<(String, Vec<u8>)>, Bytes) {
        let own = [
            "date",
            "content-length",
            "transfer-encoding",
            "connection",
            "idempotency-status",
            "idempotent-replayed",
        ];
        let mut headers = self.headers.clone();
        headers.retain(|(name, _)| !own.contains(&name.as_str()));
        (self.status, headers, self.body.clone())
    }
}

/// One request, to be sent once.
#[derive(Clone, Debug)]
pub struct Call {
    to: SocketAddr,
    method: String,
    target: String,
    headers: Vec<(String, Vec<u8>)>,
    body: Vec<u8>,
    chunked: bool,
}

impl Call {
    /// A request with an empty body.
    pub fn new(to: SocketAddr, method: &str, target: &str) -> Self {
        Self {
            to,
            method: method.to_owned(),
            target: target.to_owned(),
            headers: vec![("Host".to_owned(), b"gateway.test".to_vec())],
            body: Vec::new(),
            chunked: false,
        }
    }

    /// Adds a header line.
    #[must_use]
    pub fn header(mut self, name: &str, value: impl AsRef<[u8]>) -> Self {
        let value = value.as_ref().to_vec();
        self.headers.push((name.to_owned(), value));
        self
    }

    /// Takes every line with this name away.
    #[must_use]
    pub fn without(mut self, name: &str) -> Self {
        self.headers
            .retain(|(have, _)| !have.eq_ignore_ascii_case(name));
        self
    }

    /// Adds `Idempotency-Key`, bare.
    #[must_use]
    pub fn key(self, key: impl AsRef<[u8]>) -> Self {
        self.header("Idempotency-Key", key)
    }

    /// Sets a body and its type.
    #[must_use]
    pub fn body(self, kind: &str, body: impl AsRef<[u8]>) -> Self {
        let mut call = self.without("content-type").header("Content-Type", kind);
        call.body = body.as_ref().to_vec();
        call
    }

    /// Sets a JSON body.
    #[must_use]
    pub fn json(self, body: impl AsRef<[u8]>) -> Self {
        self.body("application/json", body)
    }

    /// Sends the body in one chunk, its length untold.
    #[must_use]
    pub fn chunked(mut self) -> Self {
        self.chunked = true;
        self
    }

    /// Head and body as they go over the wire.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = format!("{} {} HTTP/1.1\r\n", self.method, self.target).into_bytes();
        for (name, value) in &self.headers {
            bytes.extend_from_slice(name.as_bytes());
            bytes.extend_from_slice(b": ");
            bytes.extend_from_slice(value);
            bytes.extend_from_slice(b"\r\n");
        }
        let length = self.body.len();
        if self.chunked {
            let framing = format!("Transfer-Encoding: chunked\r\n\r\n{length:x}\r\n");
            bytes.extend_from_slice(framing.as_bytes());
            bytes.extend_from_slice(&self.body);
            bytes.extend_from_slice(b"\r\n0\r\n\r\n");
        } else if length > 0 || matches!(&*self.method, "POST" | "PATCH" | "PUT") {
            bytes.extend_from_slice(format!("Content-Length: {length}\r\n\r\n").as_bytes());
            bytes.extend_from_slice(&self.body);
        } else {
            bytes.extend_from_slice(b"\r\n");
        }
        bytes
    }

    /// Sends it on a connection of its own and reads the answer whole.
    pub async fn send(self) -> Answer {
        let call = format!("{} {}", self.method, self.target);
        self.try_send()
            .await
            .unwrap_or_else(|error| panic!("{call} got no whole answer: {error}"))
    }

    /// The same, where the answer may break off.
    pub async fn try_send(self) -> io::Result<Answer> {
        let mut connection = Connection::to(self.to).await?;
        // A refusal may come while a body is still being written: the answer is read all the same.
        let sent = connection.write(&self.to_bytes()).await;
        let answer = connection.answer_to(&self.method).await;
        match (sent, answer) {
            (_, Ok(answer)) => Ok(answer),
            (Err(error), _) | (_, Err(error)) => Err(error),
        }
    }

    /// Begins to send it; the answer is asked for later.
    pub fn begin(self) -> Begun {
        Begun(TaskTracker::new().spawn(self.send()))
    }

    /// Sends the request and gives the connection, before any answer.
    pub async fn start(&self) -> Connection {
        let mut connection = Connection::to(self.to).await.expect("the gateway listens");
        let bytes = self.to_bytes();
        connection.write(&bytes).await.expect("the gateway reads");
        connection
    }
}

/// A request that is on its way.
pub struct Begun(tokio::task::JoinHandle<Answer>);

impl Begun {
    /// Its answer.
    pub async fn answer(self) -> Answer {
        match self.0.await {
            Ok(answer) => answer,
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        }
    }

    /// Whether the answer is there.
    pub fn is_over(&self) -> bool {
        self.0.is_finished()
    }
}

/// Sends many calls at once; the answers stand in the calls' order.
pub async fn send_all(calls: impl IntoIterator<Item = Call>) -> Vec<Answer> {
    let begun: Vec<_> = calls.into_iter().map(Call::begin).collect();
    let mut answers = Vec::new();
    for call in begun {
        answers.push(call.answer().await);
    }
    answers
}

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

/// An HTTP/2 connection.
pub struct Http2 {
    sender: h2::client::SendRequest<Bytes>,
    driver: tokio::task::JoinHandle<()>,
}

/// An HTTP/2 request that waits for its answer.
pub struct Stream {
    answer: h2::client::ResponseFuture,
    sending: h2::SendStream<Bytes>,
}

impl Http2 {
    /// Connects with prior knowledge.
    pub async fn to(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).await.expect("it listens");
        let (sender, connection) = h2::client::handshake(stream)
            .await
            .expect("it speaks HTTP/2");
        let driver = TaskTracker::new().spawn(async move {
            let _ended = connection.await;
        });
        Self { sender, driver }
    }

    /// Sends a request whole.
    pub async fn start(&self, call: &Call) -> Stream {
        let uri = format!("http://gateway.test{}", call.target);
        let mut request = http::Request::builder()
            .method(call.method.as_str())
            .uri(uri)
            .version(http::Version::HTTP_2);
        for (name, value) in call.headers.iter().filter(|(name, _)| name != "Host") {
            request = request.header(name.to_ascii_lowercase(), value.as_slice());
        }
        let request = request.body(()).expect("a request");
        let mut sender = self.sender.clone().ready().await.expect("it takes streams");
        let (answer, mut sending) = sender.send_request(request, false).expect("it is sent");
        let body = Bytes::from(call.body.clone());
        sending.send_data(body, true).expect("it is sent");
        Stream { answer, sending }
    }

    /// Sends a request and reads its answer.
    pub async fn send(&self, call: &Call) -> Answer {
        self.start(call).await.answer().await
    }

    /// Closes the whole connection at once.
    pub fn cut(self) {
        self.driver.abort();
    }
}

impl Stream {
    /// Its answer, whole.
    pub async fn answer(self) -> Answer {
        let answer = tokio::time::timeout(PATIENCE, self.answer);
        let answer = answer.await.expect("in time").expect("an answer");
        let (head, mut incoming) = answer.into_parts();
        let mut body = BytesMut::new();
        while let Some(data) = incoming.data().await {
            let data = data.expect("the answer is whole");
            let _released = incoming.flow_control().release_capacity(data.remaining());
            body.extend_from_slice(&data);
        }
        let headers = head.headers.iter();
        let headers = headers.map(|(name, value)| (name.to_string(), value.as_bytes().to_vec()));
        Answer {
            status: head.status.as_u16(),
            headers: headers.collect(),
            body: body.freeze(),
        }
    }

    /// Takes the request back (`RST_STREAM`, CANCEL).
    pub fn cancel(mut self) {
        self.sending.send_reset(h2::Reason::CANCEL);
    }
}
