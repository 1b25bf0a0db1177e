//! Connections that are kept, and the only way to use one.
//!
//! sqlx's own pool is not used, for three reasons: a `begin` that is dropped half-way comes back to
//! it inside an open transaction; it pings every connection that comes back, which doubles the
//! round trips; and that ping has no deadline, so one silent socket holds a place for a quarter of
//! an hour.
//!
//! Invariants:
//! - A connection comes back only by [`Lent::give_back`], after a statement that ended. Dropped in
//!   any other way (a deadline, a panic, an error that leaves doubts) it is closed, and the server
//!   undoes what was open on it.
//! - Nothing here waits without a deadline.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sqlx::Connection;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout, timeout_at};

use super::session::{Session, Sessions, timed_out};
use crate::store::StoreError;
use crate::telemetry::metric;

/// A connection that was idle for longer is pinged before it is used again.
const PING_AFTER: Duration = Duration::from_secs(10);
/// How long such a ping may take.
const PING_MAX: Duration = Duration::from_secs(1);
/// A connection that was idle for longer is closed.
const IDLE_MAX: Duration = Duration::from_mins(5);
/// A connection that is older is closed, so that the set-up behind a name is seen anew.
const AGE_MAX: Duration = Duration::from_mins(30);
/// Ages are spread by up to fifteen of these, so that not all connections end at once.
const AGE_STEP: Duration = Duration::from_secs(30);

/// A bounded set of connections.
pub(super) struct Pool {
    sessions: Arc<Sessions>,
    connections_max: u32,
    permits: Arc<Semaphore>,
    /// The most recently used one is at the back, and is used first.
    idle: Mutex<VecDeque<Idle>>,
    opened: AtomicU32,
    closed: AtomicBool,
}

struct Idle {
    session: Session,
    dies: Instant,
    since: Instant,
}

/// A connection that is in use. Dropping it closes it.
pub(super) struct Lent {
    pub(super) session: Session,
    dies: Instant,
    place: Place,
}

/// The right to one of the connections.
struct Place {
    pool: Arc<Pool>,
    _permit: OwnedSemaphorePermit,
}

/// Why there is no connection.
#[derive(Debug)]
pub(super) enum AcquireError {
    /// The pool was closed.
    Closed,
    /// None could be had in time.
    Unavailable(sqlx::Error),
}

impl From<AcquireError> for StoreError {
    fn from(error: AcquireError) -> Self {
        match error {
            AcquireError::Closed => Self::Closed,
            AcquireError::Unavailable(error) => Self::Unavailable(error),
        }
    }
}

impl Pool {
    pub(super) fn new(sessions: Arc<Sessions>, connections_max: u32) -> Arc<Self> {
        Arc::new(Self {
            sessions,
            connections_max,
            permits: Arc::new(Semaphore::new(connections_max as usize)),
            idle: Mutex::default(),
            opened: AtomicU32::new(0),
            closed: AtomicBool::new(false),
        })
    }

    /// Lends a connection that is fit to use.
    pub(super) async fn acquire(self: &Arc<Self>, deadline: Instant) -> Result<Lent, AcquireError> {
        let permit = timeout_at(deadline, Arc::clone(&self.permits).acquire_owned()).await;
        let Ok(permit) = permit else {
            let what = "every connection is in use; raise [store] connections_max if this lasts";
            return Err(AcquireError::Unavailable(timed_out(what)));
        };
        let permit = permit.map_err(|_| AcquireError::Closed)?;
        if self.closed.load(Ordering::Acquire) {
            return Err(AcquireError::Closed);
        }
        let place = Place::new(Arc::clone(self), permit);
        let (session, dies) = match self.reuse(deadline).await {
            Some(idle) => (idle.session, idle.dies),
            None => self
                .open(deadline)
                .await
                .map_err(AcquireError::Unavailable)?,
        };
        Ok(Lent {
            session,
            dies,
            place,
        })
    }

    /// Drops every idle connection: one has just shown that the server behind them is gone or
    /// takes no writes.
    pub(super) fn forget_idle(&self) {
        self.change_idle(std::mem::take);
    }

    /// Waits until no connection is in use, then closes all. Nobody gets one any more.
    pub(super) async fn close(&self, deadline: Instant) {
        self.closed.store(true, Ordering::Release);
        // In vain at the deadline; then those that are in use close when they come back.
        let _ = timeout_at(deadline, self.permits.acquire_many(self.connections_max)).await;
        self.permits.close();
        for idle in self.change_idle(std::mem::take) {
            // The server notices either way; this spares it a line in its log.
            let _ = timeout(PING_MAX, idle.session.conn.close()).await;
        }
    }

    /// An idle connection that is alive.
    async fn reuse(&self, deadline: Instant) -> Option<Idle> {
        loop {
            let mut idle = self.change_idle(VecDeque::pop_back)?;
            let now = Instant::now();
            if idle.dies <= now {
                continue;
            }
            if now - idle.since <= PING_AFTER {
                return Some(idle);
            }
            let ping = timeout_at(deadline.min(now + PING_MAX), idle.session.conn.ping()).await;
            if matches!(ping, Ok(Ok(()))) {
                return Some(idle);
            }
            // The others were idle for longer still.
            self.forget_idle();
        }
    }

    async fn open(&self, deadline: Instant) -> Result<(Session, Instant), sqlx::Error> {
        let session = self.sessions.connect(deadline).await?;
        let nth = self.opened.fetch_add(1, Ordering::Relaxed);
        Ok((session, Instant::now() + AGE_MAX + AGE_STEP * (nth % 16)))
    }

    fn keep(&self, session: Session, dies: Instant) {
        let now = Instant::now();
        if self.closed.load(Ordering::Acquire) || dies <= now {
            return;
        }
        let newest = Idle {
            session,
            dies,
            since: now,
        };
        self.change_idle(|idle| {
            while idle
                .front()
                .is_some_and(|oldest| now - oldest.since > IDLE_MAX)
            {
                idle.pop_front();
            }
            idle.push_back(newest);
        });
    }

    fn change_idle<T>(&self, change: impl FnOnce(&mut VecDeque<Idle>) -> T) -> T {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let changed = change(&mut idle);
        let left = u32::try_from(idle.len()).unwrap_or(u32::MAX);
        metrics::gauge!(metric::STORE_CONNECTIONS, "state" => "idle").set(left);
        changed
    }
}

impl Lent {
    /// Makes the connection available to others. Only after a statement that ended.
    pub(super) fn give_back(self) {
        self.place.pool.keep(self.session, self.dies);
    }
}

impl Place {
    fn new(pool: Arc<Pool>, permit: OwnedSemaphorePermit) -> Self {
        metrics::gauge!(metric::STORE_CONNECTIONS, "state" => "used").increment(1);
        Self {
            pool,
            _permit: permit,
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        metrics::gauge!(metric::STORE_CONNECTIONS, "state" => "used").decrement(1);
    }
}
