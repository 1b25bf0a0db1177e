//! Clients that see every byte: HTTP/1.1 written by hand, and HTTP/2 frame by frame.
//!
//! Nothing here retries, follows, decodes or reorders anything. One call is one request.

use std::fmt;
use std::io;
use std::net::SocketAddr;

use bytes::Bytes;
use serde_json::Value;
use tokio_util::task::TaskTracker;

mod connection;
mod http2;

pub use connection::Connection;
pub use http2::Http2;

/// An answer as it stood on the wire.
#[derive(Clone, PartialEq, Eq)]
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
        assert_eq!(seen, right, "{self:?}");
    }

    /// Asserts status and what `Idempotency-Status` says.
    #[track_caller]
    pub fn assert_is(&self, status: u16, idempotency: &str) {
        let seen = (self.status, self.idempotency());
        assert_eq!(seen, (status, idempotency.to_owned()), "{self:?}");
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

impl fmt::Debug for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.status)?;
        for (name, value) in &self.headers {
            writeln!(f, "{name}: {}", value.escape_ascii())?;
        }
        let shown = &self.body[..self.body.len().min(1000)];
        write!(f, "\n{}", shown.escape_ascii())
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

/// The client keeps its own promises, against the scripted upstream.
mod selftest {
    use super::*;
    use crate::support::upstream::{Cut, Reply, Upstream};

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn it_reads_every_framing() {
        let upstream = Upstream::start().await;
        let reply = Reply::new(201)
            .header("Link", "a")
            .header("Link", "b")
            .body("abc");
        upstream.on_post("/length").reply(reply.clone());
        upstream
            .on_post("/chunked")
            .reply(reply.clone().trailer("X-T", "1"));
        upstream.on_post("/close").reply(reply.until_close());
        for path in ["/length", "/chunked", "/close"] {
            let answer = Call::new(upstream.address(), "POST", path)
                .json("{}")
                .send()
                .await;
            assert_eq!((answer.status, answer.text()), (201, "abc".to_owned()));
            assert_eq!(answer.header_lines("link"), ["a", "b"]);
        }
        let head = Call::new(upstream.address(), "HEAD", "/head").send().await;
        assert_eq!((head.status, head.body.len()), (200, 0));
        let chunked = Call::new(upstream.address(), "POST", "/sent")
            .json("xyz")
            .chunked();
        chunked.send().await;
        let seen = upstream.requests();
        assert_eq!(seen.last().unwrap().body, b"xyz");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn it_takes_no_broken_answer_for_a_whole_one() {
        let upstream = Upstream::start().await;
        let two = "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n";
        let broken = [
            Reply::new(200).body("abc").claim_length(9),
            Reply::new(200).body("abc").chunked_without_end(),
            Reply::new(200).cut_after(5, Cut::Rst),
            Reply::raw(two),
        ];
        for reply in broken {
            upstream.on_post("/").reply(reply);
            let answer = Call::new(upstream.address(), "POST", "/").try_send().await;
            assert!(answer.is_err(), "{answer:?}");
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn it_speaks_http2() {
        let upstream = Upstream::start_http2().await;
        upstream.on_post("/").answer(201, vec![b'x'; 200_000]);
        let http2 = Http2::to(upstream.address()).await;
        let call = Call::new(upstream.address(), "POST", "/")
            .key("k")
            .json("{}");
        let answer = http2.send(&call).await;
        assert_eq!((answer.status, answer.body.len()), (201, 200_000));
        assert_eq!(upstream.executions("k"), 1);
    }
}
