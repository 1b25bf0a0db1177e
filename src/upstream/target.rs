//! One target of a pool: its connections, who waits for one, and whether it can be reached.
//!
//! Invariant: a [`Permit`] lives exactly as long as its socket, so that there are never more than
//! `connections_max` sockets, idle and closing ones included.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use http::uri::{Authority, Scheme};
use http::{Response, Uri};
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::connect::Connected;
use super::health::Health;
use super::http1::Http1;
use super::http2::{Http2, StreamLease};
use super::outgoing::Head;
use super::tls::{Roots, Tls};
use super::{
    Failure, OutBody, SendError, SendErrorKind, SendProgress, UpstreamError, http1, http2,
};
use crate::body::Body;
use crate::config::PoolConfig;
use crate::telemetry::metric::UPSTREAM_CONNECTIONS;

/// What a call knows of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Nothing yet.
    Untried,
    /// A connection failed; another one may not.
    Tried,
    /// It can't be connected to.
    Unreachable,
}

/// See the module.
pub(super) struct Target {
    pub(super) config: Arc<PoolConfig>,
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) scheme: Scheme,
    pub(super) authority: Authority,
    pub(super) tls: Option<Tls>,
    pub(super) tracker: TaskTracker,
    name: Arc<str>,
    closed: CancellationToken,
    slots: Mutex<Slots>,
    /// Held by the one who waits for room first, so that waiters are served in their order.
    line: tokio::sync::Mutex<()>,
    room: Notify,
    in_flight: AtomicUsize,
    pub(super) health: Health,
}

#[derive(Default)]
struct Slots {
    /// The last one used is at the back.
    idle: VecDeque<Idle>,
    shared: Vec<Arc<Http2>>,
    /// Sockets, and those about to be.
    open: usize,
    /// Those about to be.
    opening: usize,
    /// What the last connection spoke; `None`: not known yet.
    http2: Option<bool>,
}

struct Idle {
    connection: Http1,
    since: Instant,
}

/// One attempt at one target.
pub(super) struct Call<'a> {
    pub(super) head: &'a Head,
    pub(super) body: OutBody,
    pub(super) progress: &'a SendProgress,
    pub(super) flight: Flight,
    /// Whether the connection was made for this call.
    pub(super) new: bool,
}

enum Taken {
    Idle(Http1),
    Shared(StreamLease),
    Open(Permit, Opening),
}

/// What is to be dropped outside the lock, which a dropped connection takes itself.
#[derive(Default)]
struct Retired {
    idle: VecDeque<Idle>,
    shared: Vec<Arc<Http2>>,
}

impl Target {
    /// All targets of a pool.
    pub(super) fn all(
        config: &PoolConfig,
        roots: &mut Roots,
        tracker: &TaskTracker,
        closed: &CancellationToken,
    ) -> Result<Vec<Arc<Self>>, UpstreamError> {
        let secure = |uri: &Uri| uri.scheme() == Some(&Scheme::HTTPS);
        let any_secure = config.targets.iter().any(secure);
        let tls = any_secure.then(|| Tls::new(config, roots)).transpose()?;
        let config = Arc::new(config.clone());
        let target = |uri: &Uri| {
            let (scheme, port) = match uri.scheme_str() {
                Some("http") => (Scheme::HTTP, 80),
                Some("https") => (Scheme::HTTPS, 443),
                _ => return None,
            };
            let authority = uri
                .authority()
                .filter(|name| !name.as_str().contains('@'))?;
            let host = authority.host();
            let bare = host
                .strip_prefix('[')
                .and_then(|host| host.strip_suffix(']'));
            Some(Arc::new(Self {
                host: bare.unwrap_or(host).to_owned(),
                port: authority.port_u16().unwrap_or(port),
                name: format!("{scheme}://{authority}").into(),
                authority: authority.clone(),
                tls: tls.clone().filter(|_| secure(uri)),
                tracker: tracker.clone(),
                closed: closed.clone(),
                slots: Mutex::new(Slots {
                    http2: (!secure(uri)).then_some(config.http2),
                    ..Slots::default()
                }),
                line: tokio::sync::Mutex::default(),
                room: Notify::new(),
                in_flight: AtomicUsize::new(0),
                health: Health::default(),
                config: config.clone(),
                scheme,
            }))
        };
        let targets = config.targets.iter().map(|uri| {
            target(uri).ok_or_else(|| UpstreamError::Target {
                pool: config.id.clone(),
                target: uri.clone(),
            })
        });
        targets.collect()
    }

    pub(super) fn name(&self) -> Arc<str> {
        self.name.clone()
    }

    /// Calls that have not ended, bodies included.
    pub(super) fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Sends a request on one connection. `fresh`: not on one that was idle.
    pub(super) async fn attempt(
        self: &Arc<Self>,
        head: &Head,
        body: OutBody,
        fresh: bool,
        progress: &SendProgress,
    ) -> Result<Response<Body>, Failure> {
        let flight = Flight::new(self.clone());
        let leased = self.lease(head.is_upgrade(), fresh).await;
        let call = |new| Call {
            head,
            body,
            progress,
            flight,
            new,
        };
        match leased {
            Ok((Connected::Http1(connection), new)) => http1::exchange(call(new), connection).await,
            Ok((Connected::Http2(lease), new)) => http2::exchange(call(new), lease).await,
            Err(error) => {
                // Others would have been picked first if they had room, so that is not tried.
                let (body, verdict) = match error.kind {
                    SendErrorKind::NoRoom | SendErrorKind::Unsendable => (None, Verdict::Tried),
                    _ => (Some(call(false).body), Verdict::Unreachable),
                };
                Err(Failure {
                    error,
                    body,
                    verdict,
                })
            }
        }
    }

    /// A connection, and whether it is new.
    async fn lease(
        self: &Arc<Self>,
        upgrade: bool,
        fresh: bool,
    ) -> Result<(Connected, bool), SendError> {
        if upgrade && self.tls.is_none() && self.config.http2 {
            return Err(SendError::unsent(SendErrorKind::Unsendable));
        }
        let deadline = Instant::now() + self.config.queue_timeout;
        loop {
            let taken = timeout_at(deadline, self.wait(upgrade, fresh)).await;
            match taken.map_err(|_| SendError::unsent(SendErrorKind::NoRoom))? {
                Taken::Idle(connection) => {
                    if let Some(connection) = connection.ready().await {
                        return Ok((Connected::Http1(connection), false));
                    }
                }
                Taken::Shared(lease) => return Ok((Connected::Http2(lease), false)),
                Taken::Open(permit, opening) => {
                    // Boxed, since TLS is large and few calls come here.
                    let connected = Box::pin(self.connect(permit, upgrade)).await?;
                    self.opened(&connected, upgrade);
                    drop(opening);
                    return Ok((connected, true));
                }
            }
        }
    }

    /// Waits for room, after those who came before.
    async fn wait(self: &Arc<Self>, upgrade: bool, fresh: bool) -> Taken {
        let _first = self.line.lock().await;
        loop {
            let mut retired = Retired::default();
            let taken = self.take(&mut self.slots(), &mut retired, upgrade, fresh);
            drop(retired);
            match taken {
                Some(taken) => return taken,
                None => self.room.notified().await,
            }
        }
    }

    fn take(
        self: &Arc<Self>,
        slots: &mut Slots,
        retired: &mut Retired,
        upgrade: bool,
        fresh: bool,
    ) -> Option<Taken> {
        let now = Instant::now();
        if fresh {
            // The upstream closed one idle connection, so it may close the others.
            retired.idle.append(&mut slots.idle);
        }
        while let Some(idle) = slots.idle.pop_back() {
            if self.is_fit(&idle, now) {
                return Some(Taken::Idle(idle.connection));
            }
            retired.idle.push_back(idle);
        }
        if !upgrade {
            retired.shared = self.retire_shared(slots, now);
            let lease = slots.shared.iter().find_map(|shared| shared.lease(self));
            if let Some(lease) = lease {
                return Some(Taken::Shared(lease));
            }
        }
        // One connection may serve them all, so the first tells what is spoken.
        let one_by_one = slots.http2 != Some(false) && !upgrade;
        if slots.open >= self.config.connections_max || one_by_one && slots.opening > 0 {
            return None;
        }
        slots.open += 1;
        slots.opening += 1;
        let permit = Permit::new(self.clone());
        Some(Taken::Open(permit, Opening(self.clone())))
    }

    fn opened(&self, connected: &Connected, upgrade: bool) {
        if upgrade {
            return;
        }
        let mut slots = self.slots();
        match connected {
            Connected::Http1(_) => slots.http2 = Some(false),
            Connected::Http2(lease) => {
                slots.http2 = Some(true);
                slots.shared.push(lease.connection().clone());
            }
        }
    }

    /// Takes a connection back whose answer was read to its clean end.
    pub(super) fn put_back(&self, connection: Http1) {
        let idle = Idle {
            connection,
            since: Instant::now(),
        };
        if self.is_fit(&idle, idle.since) {
            self.slots().idle.push_back(idle);
        }
        self.room.notify_one();
    }

    /// A stream has ended.
    pub(super) fn stream_ended(&self) {
        if self.closed.is_cancelled() {
            self.sweep();
        }
        self.room.notify_one();
    }

    /// Closes connections past their time.
    pub(super) fn sweep(&self) {
        let now = Instant::now();
        let mut slots = self.slots();
        let shared = self.retire_shared(&mut slots, now);
        let connections = slots.idle.drain(..);
        let (fit, idle) = connections.partition(|idle| self.is_fit(idle, now));
        slots.idle = fit;
        drop(slots);
        drop(Retired { idle, shared });
    }

    fn is_fit(&self, idle: &Idle, now: Instant) -> bool {
        !self.closed.is_cancelled()
            && idle.connection.is_open()
            && now < idle.since + self.config.idle_timeout
            && now < idle.connection.opened() + self.config.connection_age_max
    }

    /// Takes no more streams on connections past their time; those in progress go on.
    fn retire_shared(&self, slots: &mut Slots, now: Instant) -> Vec<Arc<Http2>> {
        let unfit = |shared: &mut Arc<Http2>| {
            !shared.is_open()
                || now >= shared.opened() + self.config.connection_age_max
                || shared.idle_since().is_some_and(|since| {
                    self.closed.is_cancelled() || now >= since + self.config.idle_timeout
                })
        };
        slots.shared.extract_if(.., unfit).collect()
    }

    fn gauge(&self) -> metrics::Gauge {
        metrics::gauge!(UPSTREAM_CONNECTIONS, "pool" => self.config.id.to_string())
    }

    fn slots(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A place among a target's connections.
pub(super) struct Permit {
    target: Arc<Target>,
    connected: bool,
}

impl Permit {
    fn new(target: Arc<Target>) -> Self {
        let connected = false;
        Self { target, connected }
    }

    /// There is a socket now.
    pub(super) fn connected(&mut self) {
        self.connected = true;
        self.target.gauge().increment(1.0);
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if self.connected {
            self.target.gauge().decrement(1.0);
        }
        self.target.slots().open -= 1;
        self.target.room.notify_one();
    }
}

/// A connection that is being made.
struct Opening(Arc<Target>);

impl Drop for Opening {
    fn drop(&mut self) {
        self.0.slots().opening -= 1;
        self.0.room.notify_one();
    }
}

/// A call in progress, until its answer's body has ended.
pub(super) struct Flight(Arc<Target>);

impl Flight {
    fn new(target: Arc<Target>) -> Self {
        target.in_flight.fetch_add(1, Ordering::Relaxed);
        Self(target)
    }

    pub(super) fn target(&self) -> &Arc<Target> {
        &self.0
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}
