//! A bench for one test: a store, a scripted upstream, and gateways as processes of their own.
//!
//! What every test promises without saying so is checked when the bench is dropped: no key was
//! executed twice, no gateway panicked, lost an owner, or ended other than asked.

mod runs;

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::ExitStatus;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::process::{Pid, Signal};
use serde_json::Value;
use tempfile::TempDir;
use toml::Table;

use super::client::Call;
use super::clock::{PATIENCE, eventually};
use super::metrics::Metrics;
use super::process::{Process, scratch};
use super::rows::{Database, Kind};
use super::upstream::Upstream;

/// The lease of the route `/*`.
pub const LEASE: Duration = Duration::from_secs(2);

/// How much of a log is printed when a test fails.
const LOG_LINES_MAX: usize = 100;

/// How long a gateway may take to end after `SIGTERM`, its own grace included.
const END: Duration = Duration::from_secs(15);

/// A store, an upstream, and room for gateways.
pub struct Bench {
    /// The database that all gateways of this bench share.
    pub database: Database,
    /// The upstream of the pool `main`.
    pub upstream: Upstream,
    directory: TempDir,
    reruns_allowed: AtomicBool,
}

impl Bench {
    /// A fresh database of this kind and an HTTP/1.1 upstream.
    pub async fn new(kind: Kind) -> Self {
        Self::with(kind, Upstream::start().await).await
    }

    /// A fresh database of this kind and this upstream.
    pub async fn with(kind: Kind, upstream: Upstream) -> Self {
        let directory = scratch();
        Self {
            database: Database::fresh(kind, directory.path()).await,
            upstream,
            directory,
            reruns_allowed: AtomicBool::new(false),
        }
    }

    /// A gateway to be set up: short times, tenant `acme`, one pool `main`, one route `/*`.
    pub fn gateway(&self) -> Setup {
        let defaults = format!(
            r#"
            listen = "127.0.0.1:0"
            admin = "127.0.0.1:0"

            [store]
            url = "{url}"
            poll_interval = "100ms"
            sweep_interval = "200ms"
            purge_interval = "200ms"

            [tenant]
            source = "fixed:acme"

            [limits]
            grace = "5s"

            [[pool]]
            id = "main"
            targets = ["{upstream}"]

            [[route]]
            path = "/*"
            pool = "main"
            lease = "2s"
            wait = "10s"
            timeout = "10s"
            "#,
            url = self.database.url(),
            upstream = self.upstream.url(),
        );
        Setup {
            config: parse(&defaults),
            directory: self.directory.path().to_owned(),
            environment: Vec::new(),
        }
    }

    /// Where a file of this test goes.
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// This test makes an upstream run twice for one key, on purpose.
    pub fn allow_reruns(&self) {
        self.reruns_allowed.store(true, Ordering::Relaxed);
    }

    fn assert_each_key_ran_at_most_once(&self) {
        let mut runs: BTreeMap<_, u32> = BTreeMap::new();
        let requests = self.upstream.requests();
        for seen in requests.iter().filter(|seen| seen.complete) {
            let key = seen.header("idempotency-key").concat();
            let key = key.trim_matches('"').to_owned();
            let tenant = seen.header("x-tenant").concat();
            let guarded = matches!(seen.method.as_str(), "POST" | "PATCH");
            if guarded && !key.is_empty() {
                *runs.entry((tenant, key)).or_default() += 1;
            }
        }
        runs.retain(|_, count| *count > 1);
        assert!(runs.is_empty(), "keys that ran more than once: {runs:?}");
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        if !std::thread::panicking() && !self.reruns_allowed.load(Ordering::Relaxed) {
            self.assert_each_key_ran_at_most_once();
        }
    }
}

fn parse(text: &str) -> Table {
    text.parse().unwrap_or_else(|error| panic!("{error}"))
}

/// A gateway that is not started yet. Fragments are TOML lines; a line replaces the default.
#[derive(Clone)]
pub struct Setup {
    config: Table,
    directory: PathBuf,
    environment: Vec<(String, String)>,
}

impl Setup {
    /// Lines for the route `/*`.
    #[must_use]
    pub fn route(self, lines: &str) -> Self {
        self.in_last("route", lines)
    }

    /// A route that is tried before the others.
    #[must_use]
    pub fn other_route(self, lines: &str) -> Self {
        self.first("route", lines)
    }

    /// Lines for the pool `main`.
    #[must_use]
    pub fn pool(self, lines: &str) -> Self {
        self.in_last("pool", lines)
    }

    /// Another pool.
    #[must_use]
    pub fn other_pool(self, lines: &str) -> Self {
        self.first("pool", lines)
    }

    /// A token of the admin API.
    #[must_use]
    pub fn token(mut self, lines: &str) -> Self {
        let tokens = self.config.entry("token");
        let tokens = tokens.or_insert_with(|| toml::Value::Array(Vec::new()));
        tokens
            .as_array_mut()
            .expect("a list")
            .push(parse(lines).into());
        self
    }

    /// Lines for a section such as `limits`.
    #[must_use]
    pub fn section(mut self, name: &str, lines: &str) -> Self {
        let section = self
            .config
            .entry(name)
            .or_insert_with(|| Table::new().into());
        let section = section.as_table_mut().expect("a section");
        section.extend(parse(lines));
        self
    }

    /// One more table of this list, such as `destination` or `workflow`.
    #[must_use]
    pub fn more(mut self, name: &str, lines: &str) -> Self {
        let list = self
            .config
            .entry(name)
            .or_insert_with(|| toml::Value::Array(Vec::new()));
        list.as_array_mut()
            .expect("a list")
            .push(parse(lines).into());
        self
    }

    /// Goes to the store by this URL, such as a proxy's.
    #[must_use]
    pub fn store_url(self, url: &str) -> Self {
        self.section("store", &format!("url = {url:?}"))
    }

    /// Variables for the process.
    #[must_use]
    pub fn environment(mut self, variables: Vec<(String, String)>) -> Self {
        self.environment.extend(variables);
        self
    }

    /// Writes the configuration and gives the arguments that use it.
    pub fn arguments(&self) -> Vec<String> {
        let file = tempfile::Builder::new()
            .prefix("gateway-")
            .suffix(".toml")
            .tempfile_in(&self.directory)
            .and_then(|file| file.keep().map_err(Into::into))
            .expect("the directory takes files")
            .1;
        std::fs::write(&file, self.config.to_string()).expect("the directory takes files");
        let file = file.to_str().expect("a plain path").to_owned();
        ["serve", "--log-format", "json", "--config", &file]
            .map(str::to_owned)
            .to_vec()
    }

    /// Starts it and waits until it is ready.
    pub async fn start(self) -> TestGateway {
        let gateway = self.start_unready().await;
        gateway.ready().await;
        gateway
    }

    /// Starts it and waits until it listens.
    pub async fn start_unready(self) -> TestGateway {
        let mut process = Process::start(&self.arguments(), &self.environment);
        let (listen, admin) = process.tells("where it listens", listening).await;
        TestGateway {
            setup: self,
            process,
            listen,
            admin,
            end_expected: true,
            finished: false,
        }
    }

    fn in_last(mut self, name: &str, lines: &str) -> Self {
        let list = self.config[name].as_array_mut().expect("a list");
        let default = list.last_mut().and_then(toml::Value::as_table_mut);
        default.expect("a default").extend(parse(lines));
        self
    }

    fn first(mut self, name: &str, lines: &str) -> Self {
        let list = self.config[name].as_array_mut().expect("a list");
        list.insert(0, parse(lines).into());
        self
    }
}

/// Reads the two addresses from a line of the start-up log.
fn listening(line: &str) -> Option<(SocketAddr, SocketAddr)> {
    let line: Value = serde_json::from_str(line).ok()?;
    let fields = line.get("fields").unwrap_or(&line);
    if fields.get("message")? != "listening" {
        return None;
    }
    let address = |name| fields.get(name)?.as_str()?.parse().ok();
    Some((address("listen")?, address("admin")?))
}

/// A gateway in a process of its own.
pub struct TestGateway {
    setup: Setup,
    process: Process,
    listen: SocketAddr,
    admin: SocketAddr,
    end_expected: bool,
    finished: bool,
}

impl TestGateway {
    /// Where clients connect.
    pub fn listen(&self) -> SocketAddr {
        self.listen
    }

    /// Where operators connect.
    pub fn admin_address(&self) -> SocketAddr {
        self.admin
    }

    /// Any request.
    pub fn call(&self, method: &str, target: &str) -> Call {
        Call::new(self.listen, method, target)
    }

    /// A POST with a small JSON body.
    pub fn post(&self, target: &str) -> Call {
        self.call("POST", target).json(r#"{"amount":1}"#)
    }

    /// A request to the admin listener.
    pub fn admin_call(&self, method: &str, target: &str) -> Call {
        Call::new(self.admin, method, target)
    }

    /// Waits until traffic may come.
    pub async fn ready(&self) {
        eventually("the gateway is ready", async || {
            self.is_ready().await.then_some(())
        })
        .await;
    }

    /// What `/readyz` says.
    pub async fn is_ready(&self) -> bool {
        let answer = self.admin_call("GET", "/readyz").try_send().await;
        answer.is_ok_and(|answer| answer.status == 200)
    }

    /// Every figure of `/metrics`.
    pub async fn metrics(&self) -> Metrics {
        let answer = self.admin_call("GET", "/metrics").send().await;
        assert_eq!(answer.status, 200);
        Metrics::read(&answer.text())
    }

    /// Waits until a figure, summed over its labels, is `value`.
    pub async fn until_metric(&self, name: &str, labels: &[(&str, &str)], value: f64) {
        eventually(&format!("{name}{labels:?} is {value}"), async || {
            let now = self.metrics().await.sum(name, labels);
            ((now - value).abs() < 0.5).then_some(())
        })
        .await;
    }

    /// Waits until this many duplicates are parked.
    pub async fn until_parked(&self, waiters: u32) {
        self.until_metric("oncegate_waiters", &[], waiters.into())
            .await;
    }

    /// Waits until at least this many duplicates are parked.
    pub async fn until_parked_at_least(&self, waiters: u32) {
        eventually(&format!("{waiters} are parked"), async || {
            let now = self.metrics().await.sum("oncegate_waiters", &[]);
            (now > f64::from(waiters) - 0.5).then_some(())
        })
        .await;
    }

    /// Whether the log holds `text`.
    pub fn log_holds(&self, text: &str) -> bool {
        self.process.log().holds(text)
    }

    /// `SIGKILL`: gone at once.
    pub fn sigkill(&mut self) {
        self.end_expected = false;
        self.process.kill();
    }

    /// `SIGSTOP`: frozen.
    pub fn sigstop(&mut self) {
        self.process.signal(Signal::STOP);
    }

    /// `SIGCONT`: goes on.
    pub fn sigcont(&mut self) {
        self.process.signal(Signal::CONT);
    }

    /// `SIGTERM`: asked to drain.
    pub fn sigterm(&mut self) {
        self.end_expected = false;
        self.process.signal(Signal::TERM);
    }

    /// The process, for who kills it at a moment of their own.
    pub fn process_id(&self) -> Pid {
        self.process.id()
    }

    /// The most memory that the process ever had at a time, in bytes.
    pub fn memory_peak(&self) -> u64 {
        let path = format!("/proc/{}/status", self.process_id().as_raw_pid());
        let status = std::fs::read_to_string(path).expect("the process is there");
        let line = status.lines().find(|line| line.starts_with("VmHWM:"));
        let kib = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
        kib.expect("a number") * 1024
    }

    /// Whether the process is there.
    pub fn is_running(&mut self) -> bool {
        self.process.ended().is_none()
    }

    /// Waits for the end of a gateway that was asked to drain.
    pub async fn end(&mut self) -> ExitStatus {
        self.process.end().await
    }

    /// Starts a new process on the same configuration and data. The old one, if it still runs,
    /// must end by `SIGTERM` first. Addresses change.
    pub async fn restart(&mut self) {
        self.finish();
        *self = self.setup.clone().start().await;
    }

    fn finish(&mut self) {
        if std::mem::replace(&mut self.finished, true) {
            return;
        }
        if self.end_expected && self.process.ended().is_none() {
            self.process.signal(Signal::CONT);
            let dangling = self.dangling_owners();
            self.process.signal(Signal::TERM);
            let status = self.process.end_within(END);
            assert!(
                status.is_some_and(|status| status.code() == Some(0)),
                "it must end by itself with code 0: {status:?}"
            );
            assert!(
                dangling < 0.5,
                "{dangling} owners were dropped without settling"
            );
        } else {
            let status = self.process.ended();
            assert!(
                !self.end_expected,
                "the gateway ended by itself: {status:?}"
            );
            self.process.kill();
        }
        assert!(!self.log_holds("panicked"), "the gateway panicked");
    }

    fn print_log(&self) {
        let lines = self.process.log().lines();
        let left_out = lines.len().saturating_sub(LOG_LINES_MAX);
        let last = lines[left_out..].join("\n");
        let listen = self.listen;
        eprintln!("--- log of the gateway on {listen}, {left_out} lines left out ---\n{last}");
    }

    fn dangling_owners(&self) -> f64 {
        let text = scrape(self.admin).unwrap_or_else(|error| panic!("no metrics: {error}"));
        Metrics::read(&text).sum("oncegate_dangling_owner_total", &[])
    }
}

impl Drop for TestGateway {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.print_log();
            return;
        }
        let finish = std::panic::AssertUnwindSafe(|| self.finish());
        if let Err(panic) = std::panic::catch_unwind(finish) {
            self.print_log();
            std::panic::resume_unwind(panic);
        }
    }
}

/// Reads `/metrics` without a runtime, for use in `drop`.
fn scrape(admin: SocketAddr) -> std::io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&admin, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text)
}

#[test]
fn the_log_line_is_read() {
    let line = r#"{"level":"INFO","fields":{"message":"listening","listen":"127.0.0.1:1","admin":"127.0.0.1:2"}}"#;
    let (listen, admin) = listening(line).unwrap();
    assert_eq!((listen.port(), admin.port()), (1, 2));
    assert_eq!(listening("listening"), None);
}
