//! Hints between gateways, by PostgreSQL's LISTEN and NOTIFY.
//!
//! One task owns one connection outside the pool. It listens, sends, and checks with a statement
//! now and then that the other end is still there. Nothing depends on a hint: whoever waits also
//! polls. What this module owes is to say so when hints may have been lost, and to cost the
//! request path nothing: a commit with a NOTIFY in it waits for every other such commit, so hints
//! go in statements of their own, at most one each ten milliseconds.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sqlx::Row;
use sqlx::postgres::{PgListener, PgNotification, PgPoolOptions};
use tokio::sync::{Notify, broadcast, watch};
use tokio::time::{Instant, interval_at, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use super::session::{Sessions, timed_out};
use crate::ids;
use crate::store::Wakeup;
use crate::telemetry::metric;

/// Between two statements that send.
const SEND_EVERY: Duration = Duration::from_millis(10);
/// Between two checks of the connection.
const CHECK_EVERY: Duration = Duration::from_secs(10);
/// How long a check, a statement that sends, or the end of the connection may take.
const ANSWER_MAX: Duration = Duration::from_secs(5);
/// The first pause before a new connection; it doubles.
const PAUSE_FIRST: Duration = Duration::from_millis(100);
/// The longest pause before a new connection.
const PAUSE_MAX: Duration = Duration::from_secs(10);
/// A payload must stay below 8000 bytes.
const HASHES_PER_PAYLOAD: usize = 7_984 / HEX;
/// More than this are told as one "everything".
const HASHES_MAX: usize = 10_000;
/// Hints that a slow receiver may fall behind by; then it is told that it lags.
const BACKLOG_MAX: usize = 256;

/// Digits of one hash in a payload.
const HEX: usize = 16;
/// The payload that says that hints were too many to name.
const EVERYTHING: &str = "*";
/// The longest name of a channel.
const CHANNEL_BYTES_MAX: usize = 63;

/// Both directions, as the store sees them.
pub(super) struct Wakeups {
    arrived: broadcast::Sender<Wakeup>,
    outbox: Mutex<Outbox>,
    filled: Notify,
    /// Whether there is a task that empties the outbox.
    on: bool,
    /// Whether that task's connection listens now.
    listening: watch::Sender<bool>,
}

/// What is to be sent.
#[derive(Default)]
struct Outbox {
    hashes: HashSet<u64>,
    everything: bool,
}

/// A connection that listens.
struct Ear {
    listener: PgListener,
    channel: String,
    /// The server's number for this connection: what it sent itself is no hint from another.
    backend: u32,
}

impl Wakeups {
    pub(super) fn new(on: bool) -> Arc<Self> {
        Arc::new(Self {
            arrived: broadcast::channel(BACKLOG_MAX).0,
            outbox: Mutex::default(),
            filled: Notify::new(),
            on,
            listening: watch::Sender::new(false),
        })
    }

    /// Whether hints are exchanged at all.
    pub(super) fn on(&self) -> bool {
        self.on
    }

    /// Whether a connection listens, now or within this time.
    pub(super) async fn listens_within(&self, time: Duration) -> bool {
        let mut listening = self.listening.subscribe();
        timeout(time, listening.wait_for(|listening| *listening))
            .await
            .is_ok()
    }

    pub(super) fn subscribe(&self) -> broadcast::Receiver<Wakeup> {
        self.arrived.subscribe()
    }

    /// Leaves hints to be sent soon.
    pub(super) fn send(&self, hashes: &[u64]) {
        if !self.on || hashes.is_empty() {
            return;
        }
        self.outbox().add(hashes);
        self.filled.notify_one();
    }

    /// Listens and sends until it is stopped; the task's whole life.
    pub(super) async fn run(self: Arc<Self>, sessions: Arc<Sessions>, stop: CancellationToken) {
        let mut pause = PAUSE_FIRST;
        let mut interrupted = false;
        loop {
            let opened = tokio::select! {
                () = stop.cancelled() => return,
                opened = Ear::open(&sessions) => opened,
            };
            let error = match opened {
                Ok(mut ear) => {
                    pause = PAUSE_FIRST;
                    interrupted = false;
                    self.listening.send_replace(true);
                    // From here on nothing is missed; what was before may have been.
                    self.arrive(Wakeup::Everything);
                    match self.serve(&mut ear, &stop).await {
                        Ok(()) => return,
                        Err(error) => error,
                    }
                }
                Err(error) => error,
            };
            self.listening.send_replace(false);
            if !interrupted {
                interrupted = true;
                tracing::warn!(%error, "hints from other gateways are interrupted; polling goes on");
                self.arrive(Wakeup::Everything);
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = sleep(jittered(pause)) => {}
            }
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    /// Until it is stopped, or the connection fails.
    async fn serve(&self, ear: &mut Ear, stop: &CancellationToken) -> Result<(), sqlx::Error> {
        let mut check = interval_at(Instant::now() + CHECK_EVERY, CHECK_EVERY);
        let mut send_at = Instant::now();
        loop {
            tokio::select! {
                () = stop.cancelled() => {
                    return self.send_all(ear).await;
                }
                heard = ear.listener.try_recv() => {
                    let heard = heard?.ok_or_else(|| timed_out("the connection that listens broke"))?;
                    self.hear(ear.backend, &heard);
                }
                () = self.filled.notified() => {
                    sleep_until(send_at).await;
                    send_at = Instant::now() + SEND_EVERY;
                    self.send_all(ear).await?;
                }
                _ = check.tick() => ear.check().await?,
            }
        }
    }

    fn hear(&self, backend: u32, heard: &PgNotification) {
        if heard.process_id() == backend {
            return;
        }
        self.arrive(parse(heard.payload()));
    }

    fn arrive(&self, wakeup: Wakeup) {
        let kind = match wakeup {
            Wakeup::Records(_) => "records",
            Wakeup::Everything => "everything",
        };
        metrics::counter!(metric::WAKEUPS, "kind" => kind).increment(1);
        // Nobody may be listening.
        let _ = self.arrived.send(wakeup);
    }

    async fn send_all(&self, ear: &mut Ear) -> Result<(), sqlx::Error> {
        let outbox = std::mem::take(&mut *self.outbox());
        let payloads = outbox.payloads();
        if payloads.is_empty() {
            return Ok(());
        }
        let sent = ear.send(&payloads).await;
        if sent.is_err() {
            metrics::counter!(metric::STORE_ERRORS, "operation" => "notify", "kind" => "lost")
                .increment(1);
        }
        sent
    }

    fn outbox(&self) -> MutexGuard<'_, Outbox> {
        self.outbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Ear {
    async fn open(sessions: &Sessions) -> Result<Self, sqlx::Error> {
        let mut last = sqlx::Error::PoolClosed;
        for options in sessions.direct() {
            let pool = PgPoolOptions::new()
                .max_connections(1)
                .idle_timeout(None)
                .max_lifetime(None)
                .test_before_acquire(false)
                .acquire_timeout(ANSWER_MAX)
                .connect_lazy_with(options);
            let opened = timeout(ANSWER_MAX, Self::listen(PgListener::connect_with(&pool))).await;
            match opened.unwrap_or_else(|_| Err(timed_out("LISTEN was not answered in time"))) {
                Ok(ear) => return Ok(ear),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// A standby refuses to listen, so this finds the primary.
    async fn listen(
        connecting: impl Future<Output = Result<PgListener, sqlx::Error>>,
    ) -> Result<Self, sqlx::Error> {
        let mut listener = connecting.await?;
        listener.eager_reconnect(false);
        let about = "select pg_backend_pid() as backend, current_schema() as schema";
        let about = sqlx::query(about).fetch_one(&mut listener).await?;
        let backend: i32 = about.try_get("backend")?;
        let schema: Option<String> = about.try_get("schema")?;
        let channel = channel(&schema.unwrap_or_default());
        listener.listen(&channel).await?;
        Ok(Self {
            listener,
            channel,
            backend: backend.unsigned_abs(),
        })
    }

    async fn send(&mut self, payloads: &[String]) -> Result<(), sqlx::Error> {
        let sql = "select pg_notify($1, payload) from unnest($2::text[]) as b(payload)";
        let send = sqlx::query(sql).bind(&self.channel).bind(payloads);
        answered(send.execute(&mut self.listener)).await
    }

    async fn check(&mut self) -> Result<(), sqlx::Error> {
        answered(sqlx::query("select 1").execute(&mut self.listener)).await
    }
}

async fn answered<T>(
    statement: impl Future<Output = Result<T, sqlx::Error>>,
) -> Result<(), sqlx::Error> {
    match timeout(ANSWER_MAX, statement).await {
        Ok(answer) => answer.map(|_| ()),
        Err(_) => Err(timed_out("the connection that listens is silent")),
    }
}

impl Outbox {
    fn add(&mut self, hashes: &[u64]) {
        self.hashes.extend(hashes);
        if self.hashes.len() > HASHES_MAX {
            self.hashes = HashSet::new();
            self.everything = true;
        }
    }

    fn payloads(self) -> Vec<String> {
        if self.everything {
            return vec![EVERYTHING.to_owned()];
        }
        let hashes: Vec<u64> = self.hashes.into_iter().collect();
        let payload = |hashes: &[u64]| {
            hashes.iter().fold(String::new(), |mut payload, hash| {
                let _ = write!(payload, "{hash:016x}");
                payload
            })
        };
        hashes.chunks(HASHES_PER_PAYLOAD).map(payload).collect()
    }
}

/// What is not understood may mean anything.
fn parse(payload: &str) -> Wakeup {
    let digits = payload.as_bytes().chunks(HEX);
    let hash = |digits: &[u8]| {
        let digits = std::str::from_utf8(digits)
            .ok()
            .filter(|digits| digits.len() == HEX)?;
        u64::from_str_radix(digits, 16).ok()
    };
    let hashes: Option<Vec<u64>> = digits.map(hash).collect();
    match hashes {
        Some(hashes) if !hashes.is_empty() => Wakeup::Records(hashes.into()),
        _ => Wakeup::Everything,
    }
}

/// Channels belong to the database; two schemas in one database are two stores.
fn channel(schema: &str) -> String {
    let mut channel = format!("oncegate_records_{schema}");
    while channel.len() > CHANNEL_BYTES_MAX {
        channel.pop();
    }
    channel
}

/// Between a half and the whole, so that gateways don't come back all at once.
fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(0.5 + 0.5 * ids::jitter())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent(hashes: &[u64]) -> Vec<String> {
        let mut outbox = Outbox::default();
        outbox.add(hashes);
        outbox.payloads()
    }

    #[test]
    fn every_hash_arrives_and_no_payload_is_too_long() {
        let hashes: Vec<u64> = (0..2_000).map(|n| n * 0x0123_4567_89ab).collect();
        let payloads = sent(&hashes);
        assert!(payloads.iter().all(|payload| payload.len() < 8_000));
        let mut arrived = Vec::new();
        for payload in &payloads {
            match parse(payload) {
                Wakeup::Records(hashes) => arrived.extend_from_slice(&hashes),
                Wakeup::Everything => panic!("{payload}"),
            }
        }
        arrived.sort_unstable();
        assert_eq!(arrived, hashes);
    }

    #[test]
    fn too_many_hashes_become_one_short_payload() {
        let hashes: Vec<u64> = (0..=HASHES_MAX as u64).collect();
        assert_eq!(sent(&hashes), ["*"]);
    }

    #[test]
    fn what_is_not_understood_means_everything() {
        for payload in ["", "*", "0123", "zzzzzzzzzzzzzzzz", "00000000000000001"] {
            assert!(matches!(parse(payload), Wakeup::Everything), "{payload}");
        }
    }

    #[test]
    fn a_channel_name_is_never_too_long() {
        assert_eq!(channel("public"), "oncegate_records_public");
        assert!(channel(&"é".repeat(40)).len() <= 63);
    }
}
