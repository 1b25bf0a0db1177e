//! One session: which server to connect to, with which settings, and what it turns out to be.
//!
//! A session is either *direct* or *pooled*. A direct one accepted our settings at start-up. A
//! pooled one goes through a transaction pooler (PgBouncer and its like), which refuses or ignores
//! them: between two transactions it keeps no state, so nothing is prepared or listened for on it,
//! and each statement brings its settings along, in a transaction that holds the server's
//! connection from its parsing to its end. Which of the two a session is shows at the connect;
//! nothing has to be configured.
//!
//! Only a server that takes writes is good enough: a standby, or a primary that was demoted, is
//! left alone and the next host is tried, as libpq does with `target_session_attrs=read-write`.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use sqlx::error::DatabaseError;
use sqlx::postgres::{PgConnectOptions, PgDatabaseError, PgRow};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, PgConnection, Row};
use tokio::time::{Instant, sleep, timeout};

use super::run::Statement;
use crate::store::open::OpenError;

/// The first pause between two tries to connect; it doubles.
const PAUSE_FIRST: Duration = Duration::from_millis(20);
/// The longest pause between two tries to connect.
const PAUSE_MAX: Duration = Duration::from_millis(250);
/// An open transaction without a statement is ended by the server after this; we open none.
const IDLE_IN_TRANSACTION: Duration = Duration::from_secs(10);

/// The oldest server that is supported, as PostgreSQL counts versions.
const VERSION_MIN: u32 = 140_000;

/// A setting of our own, which shows whether the session has what was asked for.
const MARK: &str = "oncegate.session";

/// How the server's settings are asked for, in one round trip.
const PROBE: &str = "\
    select current_setting('transaction_read_only') as read_only, \
    coalesce(current_setting('oncegate.session', true), '') as session";

/// How to open sessions.
pub(super) struct Sessions {
    hosts: Vec<PgConnectOptions>,
    settings: Vec<(&'static str, String)>,
    /// How a transaction begins behind a pooler.
    begin: Arc<str>,
    /// Once the settings were refused they are not tried again: that would cost every connect a
    /// round trip and an error line in the pooler's log.
    pooled: AtomicBool,
    /// The host that last was good enough; it is tried first.
    good: AtomicUsize,
}

/// An open session to a server that takes writes.
pub(super) struct Session {
    pub(super) conn: PgConnection,
    /// Behind a transaction pooler: how each transaction begins.
    begin: Option<Arc<str>>,
}

impl Sessions {
    /// `hosts`: one for each server that the URL names, tried in this order.
    pub(super) fn new(hosts: Vec<PgConnectOptions>, operation_timeout: Duration) -> Arc<Self> {
        Arc::new(Self::with(hosts, settings(operation_timeout), false))
    }

    fn with(
        hosts: Vec<PgConnectOptions>,
        settings: Vec<(&'static str, String)>,
        pooled: bool,
    ) -> Self {
        let set = settings
            .iter()
            .filter(|(name, _)| *name != MARK)
            .map(|(name, value)| format!("; set local {name} = '{value}'"));
        Self {
            begin: format!("begin{}", set.collect::<String>()).into(),
            hosts,
            settings,
            pooled: AtomicBool::new(pooled),
            good: AtomicUsize::new(0),
        }
    }

    /// Whether sessions go through a transaction pooler, as far as is known.
    pub(super) fn pooled(&self) -> bool {
        self.pooled.load(Ordering::Relaxed)
    }

    /// Opens a session. A server that is starting, stopping or being replaced is tried again until
    /// the deadline; an error that will not go away by itself is given back at once.
    pub(super) async fn connect(&self, deadline: Instant) -> Result<Session, sqlx::Error> {
        let mut pause = PAUSE_FIRST;
        loop {
            let error = match self.connect_any(deadline).await {
                Ok(session) => return Ok(session),
                Err(error) => error,
            };
            if !is_passing(&error) || Instant::now() + pause >= deadline {
                return Err(error);
            }
            sleep(pause).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    /// The options of each host with the settings of a direct session, for the listener.
    pub(super) fn direct(&self) -> impl Iterator<Item = PgConnectOptions> {
        self.by_merit().map(|(_, host)| self.set(host))
    }

    async fn connect_any(&self, deadline: Instant) -> Result<Session, sqlx::Error> {
        let mut last = sqlx::Error::Configuration("the store's URL names no host".into());
        for (tried, (nth, host)) in (0..).zip(self.by_merit()) {
            // A host that is silent must leave the others their share of the time.
            let left = deadline.saturating_duration_since(Instant::now());
            let hosts_left = u32::try_from(self.hosts.len()).unwrap_or(1) - tried;
            match timeout(left / hosts_left, self.connect_host(host)).await {
                Ok(Ok(session)) => {
                    self.good.store(nth, Ordering::Relaxed);
                    return Ok(session);
                }
                Ok(Err(error)) => last = error,
                Err(_) => last = timed_out("the database did not take the connection in time"),
            }
        }
        Err(last)
    }

    /// The hosts in the order of trying, each with its place in the URL.
    fn by_merit(&self) -> impl Iterator<Item = (usize, &PgConnectOptions)> {
        let good = self.good.load(Ordering::Relaxed);
        let all = || self.hosts.iter().enumerate();
        all().skip(good).chain(all().take(good))
    }

    fn set(&self, host: &PgConnectOptions) -> PgConnectOptions {
        host.clone().options(self.settings.iter().cloned())
    }

    async fn connect_host(&self, host: &PgConnectOptions) -> Result<Session, sqlx::Error> {
        if !self.pooled() {
            match self.set(host).connect().await {
                Err(error) if refuses_settings(&error) => {
                    tracing::info!(%error, "the store refuses session settings; taking it for a transaction pooler");
                    self.pooled.store(true, Ordering::Relaxed);
                }
                connected => return self.probe(connected?).await,
            }
        }
        // Nothing that is prepared on one server connection exists on the next.
        let plain = host.clone().statement_cache_capacity(0);
        self.probe(plain.connect().await?).await
    }

    async fn probe(&self, mut conn: PgConnection) -> Result<Session, sqlx::Error> {
        let row = sqlx::raw_sql(PROBE).fetch_one(&mut conn).await?;
        if row.try_get::<String, _>("read_only")? == "on" {
            // Politeness only: the error says what matters.
            let _ = conn.close().await;
            return Err(read_only());
        }
        let pooled = row.try_get::<String, _>("session")? != "direct";
        self.pooled.store(pooled, Ordering::Relaxed);
        let begin = pooled.then(|| Arc::clone(&self.begin));
        Ok(Session { conn, begin })
    }
}

impl Session {
    /// Sends one statement, in a transaction of its own.
    pub(super) async fn rows(&mut self, statement: Statement) -> Result<Vec<PgRow>, sqlx::Error> {
        let Some(begin) = &self.begin else {
            return statement.fetch_all(&mut self.conn).await;
        };
        let begin = AssertSqlSafe(Arc::clone(begin));
        let mut transaction = self.conn.begin_with(begin).await?;
        // Without a name: on the next server connection it would not be there.
        let rows = statement
            .persistent(false)
            .fetch_all(&mut *transaction)
            .await;
        match rows {
            Ok(rows) => transaction.commit().await.map(|()| rows),
            Err(error) => {
                // If this fails too, its error is the one that closes the connection.
                transaction
                    .rollback()
                    .await
                    .map_or_else(Err, |()| Err(error))
            }
        }
    }
}

/// Opens a session without settings, for migrations, and makes sure that the server is fit.
///
/// # Errors
/// When no server that takes writes can be reached in time, or it is too old.
pub async fn connect_plain(
    hosts: &[PgConnectOptions],
    deadline: Instant,
) -> Result<PgConnection, OpenError> {
    let plain = hosts
        .iter()
        .map(|host| host.clone().statement_cache_capacity(0));
    let sessions = Sessions::with(plain.collect(), Vec::new(), true);
    let session = sessions.connect(deadline).await;
    let conn = session.map_err(OpenError::Unreachable)?.conn;
    match conn.server_version_num() {
        Some(found) if found < VERSION_MIN => Err(OpenError::TooOld {
            found: found / 10_000,
            least: VERSION_MIN / 10_000,
        }),
        _ => Ok(conn),
    }
}

/// What a direct session is set to.
fn settings(operation_timeout: Duration) -> Vec<(&'static str, String)> {
    let ms = |duration: Duration| duration.as_millis().max(1).to_string();
    vec![
        (MARK, "direct".to_owned()),
        // Ended by the server a little before we stop waiting: that is a certain "did not happen"
        // where our own deadline would leave a doubt.
        ("statement_timeout", ms(operation_timeout * 4 / 5)),
        ("lock_timeout", ms(operation_timeout / 2)),
        (
            "idle_in_transaction_session_timeout",
            ms(IDLE_IN_TRANSACTION),
        ),
        // Every statement on the request path finds its rows by primary key. A plan made once and
        // kept can be one for an empty table, and scan a full one a minute later; so plans are
        // made anew from the table's present size, and joins stay nested loops over the key,
        // which also take row locks in the order of the batch.
        ("plan_cache_mode", "force_custom_plan".to_owned()),
        ("enable_seqscan", "off".to_owned()),
        ("enable_bitmapscan", "off".to_owned()),
        ("enable_hashjoin", "off".to_owned()),
        ("enable_mergejoin", "off".to_owned()),
        ("jit", "off".to_owned()),
    ]
}

/// A connection was refused for the settings that it asked for: PgBouncer says 08P01, others call
/// it an unsupported feature or an unknown parameter.
fn refuses_settings(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(DatabaseError::code);
    matches!(code.as_deref(), Some("08P01" | "0A000" | "22023" | "42704"))
}

/// Whether another try in a moment may succeed.
fn is_passing(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Io(_) => true,
        sqlx::Error::Database(database) => {
            let code = database
                .try_downcast_ref::<PgDatabaseError>()
                .map(PgDatabaseError::code);
            // Not accepting connections yet, shutting down, too many connections, a pooler whose
            // server is away.
            matches!(
                code,
                Some("57P03" | "57P01" | "57P02" | "53300" | "08006" | "08P01")
            )
        }
        _ => false,
    }
}

/// A deadline of ours that passed.
pub(super) fn timed_out(what: &'static str) -> sqlx::Error {
    sqlx::Error::Io(io::Error::new(io::ErrorKind::TimedOut, what))
}

fn read_only() -> sqlx::Error {
    sqlx::Error::Io(io::Error::other(
        "the server takes no writes: it is a standby or read-only; name the primary in the store's URL",
    ))
}
