//! A scripted destination of effects: a real socket that remembers every request as it came, with
//! its order and time, and answers or misbehaves as a test tells it.
//!
//! Each request is on a connection of its own: an answer ends with it.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

use super::clock::eventually;

/// One request, read whole.
#[derive(Clone, Debug)]
pub struct Received {
    /// As in the request line.
    pub method: String,
    /// As in the request line.
    pub target: String,
    /// In order, names in lower case.
    pub headers: Vec<(String, Vec<u8>)>,
    /// The body.
    pub body: Vec<u8>,
    /// SHA-256 of `body`, in hex.
    pub sha256: String,
    /// When it was read whole.
    pub at: Instant,
}

impl Received {
    /// A header that comes once at most.
    pub fn header(&self, name: &str) -> Option<String> {
        let mut lines = self.headers.iter().filter(|(line, _)| line == name);
        let (_, value) = lines.next()?;
        assert!(lines.next().is_none(), "{name} came twice");
        Some(String::from_utf8_lossy(value).into_owned())
    }

    /// Its `Idempotency-Key`.
    pub fn key(&self) -> String {
        self.header("idempotency-key").unwrap_or_default()
    }
}

/// What a request gets.
#[derive(Clone, Debug)]
pub enum Act {
    /// This status and body.
    Answer(u16, Vec<u8>),
    /// This status, these headers, no body.
    Headers(u16, Vec<(&'static str, String)>),
    /// The same after a while.
    After(Duration, Box<Act>),
    /// The headers of a 200 at once, then one byte of the body in this time, for ever.
    Drip(Duration),
    /// A reset, the request read and nothing answered.
    Reset,
    /// Nothing, until the caller goes away.
    Hang,
    /// A 200 with this many bytes in chunks.
    Chunked(u64),
    /// Exactly these bytes.
    Raw(&'static [u8]),
}

type Script = Arc<Mutex<Box<dyn FnMut(&Received) -> Act + Send>>>;

/// A destination on a loopback port of its own; ends when dropped.
pub struct Destination {
    address: SocketAddr,
    received: watch::Sender<Vec<Received>>,
    open: watch::Sender<usize>,
    script: Script,
    _stop: DropGuard,
}

#[derive(Clone)]
struct Server {
    received: watch::Sender<Vec<Received>>,
    open: watch::Sender<usize>,
    script: Script,
    stop: CancellationToken,
    tracker: TaskTracker,
}

impl Destination {
    /// Answers 200 and nothing else, until told otherwise.
    pub async fn start() -> Self {
        Self::start_on("127.0.0.1:0").await
    }

    /// The same on this address.
    pub async fn start_on(address: &str) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let script: Box<dyn FnMut(&Received) -> Act + Send> =
            Box::new(|_| Act::Answer(200, Vec::new()));
        let server = Server {
            received: watch::Sender::default(),
            open: watch::Sender::default(),
            script: Arc::new(Mutex::new(script)),
            stop: CancellationToken::new(),
            tracker: TaskTracker::new(),
        };
        let destination = Self {
            address: listener.local_addr().unwrap(),
            received: server.received.clone(),
            open: server.open.clone(),
            script: Arc::clone(&server.script),
            _stop: server.stop.clone().drop_guard(),
        };
        server.tracker.clone().spawn(server.accept(listener));
        destination
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// A URL on it.
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// From now on, by request.
    pub fn script(&self, act: impl FnMut(&Received) -> Act + Send + 'static) {
        *self.script.lock().unwrap_or_else(PoisonError::into_inner) = Box::new(act);
    }

    /// Every request gets this.
    pub fn always(&self, act: Act) {
        self.script(move |_| act.clone());
    }

    /// Requests so far, in the order in which they were read whole.
    pub fn received(&self) -> Vec<Received> {
        self.received.borrow().clone()
    }

    /// Waits until there are at least this many; gives all.
    pub async fn until(&self, count: usize) -> Vec<Received> {
        let what = format!("{count} requests");
        eventually(&what, async || {
            Some(self.received()).filter(|all| all.len() >= count)
        })
        .await
    }

    /// Connections that are open now.
    pub fn open(&self) -> usize {
        *self.open.borrow()
    }
}

impl Server {
    async fn accept(self, listener: TcpListener) {
        while let Some(Ok((stream, _))) = self.stop.run_until_cancelled(listener.accept()).await {
            let server = self.clone();
            self.tracker.spawn(async move {
                server.open.send_modify(|open| *open += 1);
                let serving = server.serve(stream);
                let _ = server.stop.run_until_cancelled(serving).await;
                server.open.send_modify(|open| *open -= 1);
            });
        }
    }

    /// One request. `None`: the connection ended early.
    async fn serve(&self, mut stream: TcpStream) -> Option<()> {
        let received = read(&mut stream).await?;
        let act = {
            let mut script = self.script.lock().unwrap_or_else(PoisonError::into_inner);
            script(&received)
        };
        self.received.send_modify(|all| all.push(received));
        perform(&mut stream, act).await
    }
}

async fn read(stream: &mut TcpStream) -> Option<Received> {
    let mut bytes = Vec::new();
    let head = loop {
        if let Some(at) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            break at;
        }
        fill(stream, &mut bytes).await?;
    };
    let text: Vec<u8> = bytes[..head].to_vec();
    let mut lines = text.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii);
    let line = String::from_utf8_lossy(lines.next()?).into_owned();
    let mut words = line.split(' ').map(str::to_owned);
    let headers: Vec<(String, Vec<u8>)> = lines
        .filter_map(|line| {
            let colon = line.iter().position(|byte| *byte == b':')?;
            let name = String::from_utf8_lossy(&line[..colon]).to_ascii_lowercase();
            Some((name, line[colon + 1..].trim_ascii().to_vec()))
        })
        .collect();
    let length = headers.iter().find(|(name, _)| name == "content-length");
    let length = length.map_or(Some(0), |(_, value)| {
        String::from_utf8_lossy(value).parse::<usize>().ok()
    })?;
    while bytes.len() < head + 4 + length {
        fill(stream, &mut bytes).await?;
    }
    let body = bytes[head + 4..head + 4 + length].to_vec();
    let digest = Sha256::digest(&body);
    let sha256 = digest
        .iter()
        .fold(String::new(), |hex, byte| hex + &format!("{byte:02x}"));
    Some(Received {
        method: words.next()?,
        target: words.next()?,
        headers,
        sha256,
        body,
        at: Instant::now(),
    })
}

async fn fill(stream: &mut TcpStream, bytes: &mut Vec<u8>) -> Option<()> {
    match stream.read_buf(bytes).await {
        Ok(1..) => Some(()),
        _ => None,
    }
}

async fn perform(stream: &mut TcpStream, act: Act) -> Option<()> {
    match act {
        Act::After(delay, act) => {
            tokio::time::sleep(delay).await;
            return Box::pin(perform(stream, *act)).await;
        }
        Act::Answer(status, body) => answer(stream, status, &[], &body).await?,
        Act::Headers(status, headers) => answer(stream, status, &headers, b"").await?,
        Act::Raw(bytes) => stream.write_all(bytes).await.ok()?,
        Act::Drip(pause) => {
            let head = b"HTTP/1.1 200 OK\r\nContent-Length: 60000\r\n\r\n";
            stream.write_all(head).await.ok()?;
            loop {
                tokio::time::sleep(pause).await;
                stream.write_all(b".").await.ok()?;
            }
        }
        Act::Reset => {
            let socket = socket2::SockRef::from(&*stream);
            socket.set_linger(Some(Duration::ZERO)).ok()?;
            return Some(());
        }
        Act::Hang => {
            let mut byte = [0];
            let _ = stream.read(&mut byte).await;
            return Some(());
        }
        Act::Chunked(total) => {
            let head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
            stream.write_all(head).await.ok()?;
            let chunk = [&b"10000\r\n"[..], &vec![b'x'; 0x10000], b"\r\n"].concat();
            for _ in 0..total / 0x10000 {
                stream.write_all(&chunk).await.ok()?;
            }
            stream.write_all(b"0\r\n\r\n").await.ok()?;
        }
    }
    stream.shutdown().await.ok()
}

async fn answer(
    stream: &mut TcpStream,
    status: u16,
    headers: &[(&'static str, String)],
    body: &[u8],
) -> Option<()> {
    let mut head = format!("HTTP/1.1 {status} Scripted\r\nConnection: close\r\n");
    for (name, value) in headers {
        head = head + name + ": " + value + "\r\n";
    }
    let head = format!("{head}Content-Length: {}\r\n\r\n", body.len());
    stream.write_all(head.as_bytes()).await.ok()?;
    stream.write_all(body).await.ok()
}
