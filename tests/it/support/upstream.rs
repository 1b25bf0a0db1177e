//! A scripted upstream: real sockets, no HTTP library between the test and the bytes (HTTP/2 uses
//! the `h2` crate). It counts what was executed, remembers every request as it came, and answers
//! or breaks as a test tells it.
//!
//! ```ignore
//! let upstream = Upstream::start().await;
//! upstream.on_post("/charges").answer(201, r#"{"id":1}"#);
//! let gate = Gate::closed();
//! upstream.on_post("/slow").reply(Reply::new(201).hold(&gate));
//! // … a request comes …
//! upstream.until(|state| state.executions("key-1") == 1).await;
//! gate.open();
//! ```
//!
//! A request is executed once it was read whole, whatever becomes of the answer. What nobody
//! scripted is answered 200 with `{"execution":N}`, N counting all executions from 1, so that a
//! second execution never looks like a replay of the first.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use sha2::{Digest, Sha256};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};
use tokio_rustls::TlsAcceptor;

mod http1;
mod http2;
mod reply;
mod selftest;
mod tls;

pub use reply::{Gate, Reply};
pub use tls::Authority;

/// How long [`Upstream::until`] waits.
const DEADLINE: Duration = Duration::from_secs(20);

/// How a connection is ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// In order: FIN.
    Fin,
    /// At once: RST.
    Rst,
    /// FIN without TLS's own goodbye, as when the process is killed or somebody cuts the stream.
    FinBelowTls,
}

/// What a GOAWAY says about the request that it answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GoAway {
    /// Its stream was not processed: the last stream id is below it.
    Below,
    /// Its stream may have been processed: the last stream id is its own. The connection then
    /// closes without an answer.
    Covering,
}

/// One request as it came.
#[derive(Clone, Debug)]
pub struct Seen {
    /// As in the request line.
    pub method: String,
    /// As in the request line; `:path` in HTTP/2.
    pub target: String,
    /// Names as they were spelled, in order, repeats included. HTTP/2's `:authority` is first.
    pub headers: Vec<(String, Vec<u8>)>,
    /// The body without its transfer coding.
    pub body: Vec<u8>,
    /// SHA-256 of `body`, in hex.
    pub sha256: String,
    /// Which connection it came on, counted from 1.
    pub connection: usize,
    /// Whether it came to its end.
    pub complete: bool,
}

impl Seen {
    /// The values of a header, in order.
    pub fn header(&self, name: &str) -> Vec<String> {
        let lines = self.headers.iter();
        lines
            .filter(|(line, _)| line.eq_ignore_ascii_case(name))
            .map(|(_, value)| String::from_utf8_lossy(value).into_owned())
            .collect()
    }

    /// The target without its query.
    pub fn path(&self) -> &str {
        self.target.split('?').next().unwrap_or_default()
    }

    fn finish(mut self, body: Vec<u8>, complete: bool) -> Self {
        self.sha256 = Sha256::digest(&body)
            .iter()
            .fold(String::new(), |hex, byte| hex + &format!("{byte:02x}"));
        self.body = body;
        self.complete = complete;
        self
    }
}

/// What happened so far.
#[derive(Clone, Debug, Default)]
pub struct State {
    /// Every request whose headers came, also those that broke off in their body.
    pub requests: Vec<Seen>,
    /// Connections accepted so far.
    pub connections: usize,
    /// Connections open now.
    pub open: usize,
    /// Connections open now that wait for a next request (HTTP/1.1 only).
    pub idle: usize,
    /// Breaks that took place: [`Upstream::break_next_accept`], [`Upstream::break_next_request`],
    /// [`Upstream::goaway_next`] and [`Reply::refuse_stream`].
    pub broken: usize,
}

impl State {
    /// Requests that were executed.
    pub fn executed(&self) -> impl Iterator<Item = &Seen> {
        self.requests.iter().filter(|seen| seen.complete)
    }

    /// Executions with this `Idempotency-Key`, as it was spelled.
    pub fn executions(&self, key: &str) -> usize {
        self.executed()
            .filter(|seen| seen.header("idempotency-key") == [key])
            .count()
    }

    /// Executions at this path.
    pub fn executions_at(&self, path: &str) -> usize {
        self.executed().filter(|seen| seen.path() == path).count()
    }
}

/// A scripted upstream on a port of its own. Dropping it ends every connection.
pub struct Upstream {
    address: SocketAddr,
    scheme: &'static str,
    host: &'static str,
    shared: Arc<Shared>,
    listening: Mutex<Option<AbortHandle>>,
}

impl Upstream {
    /// Speaks HTTP/1.1.
    pub async fn start() -> Self {
        Self::listen(Protocol::Http1).await
    }

    /// Speaks HTTP/2 without TLS (prior knowledge).
    pub async fn start_http2() -> Self {
        Self::listen(Protocol::Http2 { streams_max: None }).await
    }

    /// Speaks HTTP/2 without TLS and allows this many streams at a time.
    pub async fn start_http2_with_streams(streams_max: u32) -> Self {
        let streams_max = Some(streams_max);
        Self::listen(Protocol::Http2 { streams_max }).await
    }

    /// Speaks TLS with a certificate for `localhost` that `authority` signed, and offers `alpn`,
    /// such as `["h2", "http/1.1"]`.
    pub async fn start_tls(authority: &Authority, alpn: &[&str]) -> Self {
        Self::listen(Protocol::Tls(authority.acceptor("localhost", alpn))).await
    }

    async fn listen(protocol: Protocol) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (scheme, host) = match protocol {
            Protocol::Tls(_) => ("https", "localhost"),
            _ => ("http", "127.0.0.1"),
        };
        let upstream = Self {
            address,
            scheme,
            host,
            shared: Arc::new(Shared {
                protocol,
                state: watch::Sender::default(),
                script: Mutex::default(),
                closing: watch::Sender::new(Cut::Fin),
                tasks: Mutex::default(),
            }),
            listening: Mutex::new(None),
        };
        upstream.accept(listener);
        upstream
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The target as a pool's configuration names it.
    pub fn url(&self) -> String {
        format!("{}://{}:{}", self.scheme, self.host, self.address.port())
    }

    /// Scripts what a method and path get. A path is matched without its query; the latest script
    /// wins; those for one request only go first, in their order.
    pub fn on<'a>(&'a self, method: &'a str, path: &'a str) -> On<'a> {
        On {
            upstream: self,
            method,
            path,
            once: false,
        }
    }

    /// Scripts what a POST gets.
    pub fn on_post<'a>(&'a self, path: &'a str) -> On<'a> {
        self.on("POST", path)
    }

    /// Scripts what a GET gets.
    pub fn on_get<'a>(&'a self, path: &'a str) -> On<'a> {
        self.on("GET", path)
    }

    /// Every request so far.
    pub fn requests(&self) -> Vec<Seen> {
        self.shared.state.borrow().requests.clone()
    }

    /// Executions with this `Idempotency-Key`, as it was spelled.
    pub fn executions(&self, key: &str) -> usize {
        self.shared.state.borrow().executions(key)
    }

    /// Executions at this path.
    pub fn executions_at(&self, path: &str) -> usize {
        self.shared.state.borrow().executions_at(path)
    }

    /// Connections accepted so far.
    pub fn connections(&self) -> usize {
        self.shared.state.borrow().connections
    }

    /// Waits until this holds and tells the state then; panics after 20 seconds.
    #[track_caller]
    pub fn until(&self, holds: impl Fn(&State) -> bool) -> impl Future<Output = State> {
        let caller = std::panic::Location::caller();
        async move {
            let mut state = self.shared.state.subscribe();
            let waited = tokio::time::timeout(DEADLINE, state.wait_for(|state| holds(state))).await;
            if let Ok(Ok(state)) = waited {
                return state.clone();
            }
            let state = self.shared.state.borrow().clone();
            panic!("the upstream never came to what {caller} waits for: {state:#?}");
        }
    }

    /// Stops listening: further connects are refused. Open connections live on.
    pub async fn refuse(&self) {
        let Some(listening) = self.listening.lock().unwrap().take() else {
            return;
        };
        listening.abort();
        while !listening.is_finished() {
            tokio::task::yield_now().await;
        }
    }

    /// Listens again, on the same port.
    pub async fn accept_again(&self) {
        self.accept(TcpListener::bind(self.address).await.unwrap());
    }

    /// Ends the connections that wait for a next request; waits for the first such, if there is
    /// none yet, and until all are ended.
    pub async fn cut_idle(&self, cut: Cut) {
        self.until(|state| state.idle > 0).await;
        self.shared.closing.send_replace(cut);
        self.until(|state| state.idle == 0).await;
    }

    /// The next connection is ended as soon as it is accepted.
    pub fn break_next_accept(&self, cut: Cut) {
        self.shared.script.lock().unwrap().accepts.push_back(cut);
    }

    /// The next request is read up to this many bytes (0: its first byte has come, and is not
    /// read) and its connection then ended. It is not executed and not among the requests.
    pub fn break_next_request(&self, after_bytes: usize, cut: Cut) {
        let mut script = self.shared.script.lock().unwrap();
        script.breaks.push_back((after_bytes, cut));
    }

    /// The first request of the next HTTP/2 connection is answered with GOAWAY. It is not
    /// executed and not among the requests.
    pub fn goaway_next(&self, goaway: GoAway) {
        self.shared.script.lock().unwrap().goaways.push_back(goaway);
    }

    fn accept(&self, listener: TcpListener) {
        let shared = self.shared.clone();
        let task = async move {
            while let Ok((socket, _)) = listener.accept().await {
                let number = shared.update(|state| {
                    state.connections += 1;
                    state.connections
                });
                let connection = connection(shared.clone(), socket, number);
                shared.tasks.lock().unwrap().spawn(connection);
            }
        };
        let handle = self.shared.tasks.lock().unwrap().spawn(task);
        *self.listening.lock().unwrap() = Some(handle);
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        // The tasks hold `shared`, so they don't end with it.
        self.shared.tasks.lock().unwrap().abort_all();
    }
}

/// What one method and path get.
#[must_use]
pub struct On<'a> {
    upstream: &'a Upstream,
    method: &'a str,
    path: &'a str,
    once: bool,
}

impl On<'_> {
    /// For one request only.
    pub fn once(mut self) -> Self {
        self.once = true;
        self
    }

    /// Answers with this status and body.
    pub fn answer(self, status: u16, body: impl Into<Bytes>) {
        self.reply(Reply::new(status).body(body));
    }

    /// Answers with this.
    pub fn reply(self, reply: Reply) {
        let rule = Rule {
            method: self.method.to_owned(),
            path: self.path.to_owned(),
            once: self.once,
            reply,
        };
        self.upstream.shared.script.lock().unwrap().rules.push(rule);
    }
}

enum Protocol {
    Http1,
    Http2 { streams_max: Option<u32> },
    Tls(TlsAcceptor),
}

#[derive(Default)]
struct Script {
    rules: Vec<Rule>,
    accepts: VecDeque<Cut>,
    breaks: VecDeque<(usize, Cut)>,
    goaways: VecDeque<GoAway>,
}

struct Rule {
    method: String,
    path: String,
    once: bool,
    reply: Reply,
}

struct Shared {
    protocol: Protocol,
    state: watch::Sender<State>,
    script: Mutex<Script>,
    closing: watch::Sender<Cut>,
    tasks: Mutex<JoinSet<()>>,
}

impl Shared {
    /// What a request gets: the first script for one request, else the latest for all.
    fn reply(&self, method: &str, path: &str) -> Reply {
        let matches = |rule: &Rule| rule.method == method && rule.path == path;
        let rules = &mut self.script.lock().unwrap().rules;
        let once = rules.iter().position(|rule| rule.once && matches(rule));
        if let Some(index) = once {
            return rules.remove(index).reply;
        }
        let rule = rules.iter().rev().find(|rule| matches(rule));
        rule.map_or_else(|| Reply::new(200), |rule| rule.reply.clone())
    }

    fn update<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let mut result = None;
        self.state.send_modify(|state| result = Some(change(state)));
        result.unwrap()
    }

    /// Remembers a request. Gives the number of executions in all.
    fn record(&self, seen: Seen) -> usize {
        self.update(|state| {
            state.requests.push(seen);
            state.executed().count()
        })
    }
}

/// Counts a connection as open, and as idle while it is, for as long as it lives.
struct Counted {
    shared: Arc<Shared>,
    idle: bool,
}

impl Counted {
    fn new(shared: Arc<Shared>) -> Self {
        shared.update(|state| state.open += 1);
        Self {
            shared,
            idle: false,
        }
    }

    fn set_idle(&mut self, idle: bool) {
        if self.idle == idle {
            return;
        }
        self.idle = idle;
        self.shared.update(|state| {
            if idle {
                state.idle += 1;
            } else {
                state.idle -= 1;
            }
        });
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.set_idle(false);
        self.shared.update(|state| state.open -= 1);
    }
}

async fn connection(shared: Arc<Shared>, socket: TcpStream, number: usize) {
    socket.set_nodelay(true).unwrap();
    let counted = Counted::new(shared.clone());
    let cut = shared.script.lock().unwrap().accepts.pop_front();
    if let Some(cut) = cut {
        http1::cut(socket, cut, counted).await;
        shared.update(|state| state.broken += 1);
        return;
    }
    match &shared.protocol {
        Protocol::Http1 => http1::serve(socket, counted, number).await,
        Protocol::Http2 { streams_max } => {
            http2::serve(socket, counted, number, *streams_max).await;
        }
        Protocol::Tls(acceptor) => {
            let Ok(socket) = acceptor.accept(socket).await else {
                return;
            };
            if socket.get_ref().1.alpn_protocol() == Some(b"h2") {
                http2::serve(socket, counted, number, None).await;
            } else {
                http1::serve(socket, counted, number).await;
            }
        }
    }
}
