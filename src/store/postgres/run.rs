//! Runs one statement: with a deadline, on a task of its own, and again where that is safe.
//!
//! Every unit of work of this store is a single statement that commits by itself, and sending one
//! again is safe: each is guarded by tokens and ids that its caller drew.
//!
//! A statement runs on a tracked task. A caller that is dropped meanwhile loses the result and
//! nothing else: the statement ends, and its connection goes back in order.

use std::sync::Arc;
use std::time::Duration;

use sqlx::Postgres;
use sqlx::postgres::{PgArguments, PgDatabaseError, PgRow, PgSeverity};
use sqlx::query::Query;
use tokio::time::{Instant, timeout_at};
use tokio_util::task::TaskTracker;

use super::pool::{AcquireError, Lent, Pool};
use super::session::timed_out;
use crate::store::StoreError;

/// How often a statement is sent in all.
const TRIES_MAX: u32 = 3;

const NO_ANSWER: &str = "the database did not answer in time";

/// A statement with its arguments, encoded.
pub(super) type Statement = Query<'static, Postgres, PgArguments>;

/// A fixed statement, still without arguments.
pub(super) fn fixed(sql: &'static str) -> Statement {
    sqlx::query(sql)
}

/// Whether a statement may be sent again after a try that may have happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Repeat {
    /// Twice and once are the same.
    Safe,
    /// Only when it certainly did not happen: the second time would give another answer.
    UnlessInDoubt,
}

/// Runs statements.
pub(super) struct Runner {
    pub(super) pool: Arc<Pool>,
    pub(super) tracker: TaskTracker,
    pub(super) acquire_timeout: Duration,
    pub(super) operation_timeout: Duration,
}

/// Why a try gave no result.
struct Fault {
    error: StoreError,
    /// Whether another try may succeed.
    again: bool,
}

/// What follows from an error of the database.
struct Verdict {
    means: fn(sqlx::Error) -> StoreError,
    again: bool,
    connection: Fate,
}

/// What becomes of a connection after an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// It is in order.
    Kept,
    /// It is closed.
    Closed,
    /// It is closed, and those that are idle with it.
    AllClosed,
}

impl Runner {
    /// The rows that a statement gives. `make` is asked once for each try.
    pub(super) async fn rows(
        &self,
        repeat: Repeat,
        make: impl Fn() -> Statement,
    ) -> Result<Vec<PgRow>, StoreError> {
        let deadline = Instant::now() + self.acquire_timeout + self.operation_timeout;
        let mut doubt = None;
        let mut tries = 1;
        loop {
            let Fault { error, again } = match self.once(make(), deadline).await {
                Ok(rows) => return Ok(rows),
                Err(fault) => fault,
            };
            let in_doubt = error.may_have_happened();
            let safe = repeat == Repeat::Safe || !in_doubt;
            if !again || !safe || tries == TRIES_MAX || Instant::now() >= deadline {
                // An earlier try that may have happened outweighs a later one that did not.
                return Err(doubt.unwrap_or(error));
            }
            if in_doubt {
                doubt.get_or_insert(error);
            }
            tries += 1;
        }
    }

    async fn once(&self, statement: Statement, deadline: Instant) -> Result<Vec<PgRow>, Fault> {
        let pool = Arc::clone(&self.pool);
        let acquire_by = deadline.min(Instant::now() + self.acquire_timeout);
        let operation_timeout = self.operation_timeout;
        let task = self.tracker.spawn(async move {
            let mut lent = pool.acquire(acquire_by).await?;
            let answer_by = deadline.min(Instant::now() + operation_timeout);
            match timeout_at(answer_by, lent.session.rows(statement)).await {
                Ok(Ok(rows)) => {
                    lent.give_back();
                    Ok(rows)
                }
                Ok(Err(error)) => Err(after(error, lent, &pool)),
                Err(_) => {
                    drop(lent);
                    Err(Fault {
                        error: StoreError::Ambiguous(timed_out(NO_ANSWER)),
                        again: false,
                    })
                }
            }
        });
        // Else the task panicked, or the runtime ended under it.
        task.await.unwrap_or_else(|_| {
            Err(Fault {
                error: StoreError::Ambiguous(sqlx::Error::WorkerCrashed),
                again: false,
            })
        })
    }
}

/// Puts the connection where it belongs after an error.
fn after(error: sqlx::Error, lent: Lent, pool: &Pool) -> Fault {
    let verdict = judge(&error);
    match verdict.connection {
        Fate::Kept => lent.give_back(),
        Fate::Closed => drop(lent),
        Fate::AllClosed => {
            drop(lent);
            pool.forget_idle();
        }
    }
    Fault {
        error: (verdict.means)(error),
        again: verdict.again,
    }
}

impl From<AcquireError> for Fault {
    fn from(error: AcquireError) -> Self {
        // Connecting was tried again already, for as long as it may take.
        Self {
            error: error.into(),
            again: false,
        }
    }
}

/// The one place where an error of a statement that was sent is understood.
fn judge(error: &sqlx::Error) -> Verdict {
    match error {
        sqlx::Error::Database(error) => {
            let error = error.try_downcast_ref::<PgDatabaseError>();
            error.map_or_else(Verdict::broken, |error| {
                judge_code(error.code(), error.severity())
            })
        }
        // These arise before anything is sent.
        sqlx::Error::Encode(_) | sqlx::Error::InvalidArgument(_) => Verdict::refused(),
        _ => Verdict::broken(),
    }
}

fn judge_code(code: &str, severity: PgSeverity) -> Verdict {
    let verdict = |means, again, connection| Verdict {
        means,
        again,
        connection,
    };
    match code {
        // Lost a race against another transaction, which undid ours.
        "40001" | "40P01" => verdict(StoreError::Unavailable, true, Fate::Kept),
        // Waited too long, for a lock or in all.
        "55P03" | "57014" => verdict(StoreError::Unavailable, false, Fate::Kept),
        // A primary that was demoted: the new one is behind another connection.
        "25006" => verdict(StoreError::Refused, true, Fate::AllClosed),
        // A prepared statement that is not there, is there already, or no longer fits.
        "26000" | "42P05" | "0A000" => verdict(StoreError::Refused, true, Fate::Closed),
        // The server, or the pooler before it, ended the session.
        "57P01" | "57P02" | "57P03" | "57P05" => Verdict::broken(),
        _ if code.starts_with("08") => Verdict::broken(),
        _ if matches!(severity, PgSeverity::Fatal | PgSeverity::Panic) => Verdict::broken(),
        _ => Verdict::refused(),
    }
}

impl Verdict {
    fn broken() -> Self {
        Self {
            means: StoreError::Ambiguous,
            again: true,
            connection: Fate::AllClosed,
        }
    }

    fn refused() -> Self {
        Self {
            means: StoreError::Refused,
            again: false,
            connection: Fate::Kept,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(code: &str) -> (bool, bool, Fate) {
        let verdict = judge_code(code, PgSeverity::Error);
        let error = (verdict.means)(sqlx::Error::WorkerCrashed);
        (error.may_have_happened(), verdict.again, verdict.connection)
    }

    #[test]
    fn an_error_tells_whether_it_happened_and_whether_to_try_again() {
        let table = [
            ("40001", (false, true, Fate::Kept)),
            ("40P01", (false, true, Fate::Kept)),
            ("57014", (false, false, Fate::Kept)),
            ("25006", (false, true, Fate::AllClosed)),
            ("26000", (false, true, Fate::Closed)),
            ("57P01", (true, true, Fate::AllClosed)),
            ("08006", (true, true, Fate::AllClosed)),
            ("53100", (false, false, Fate::Kept)),
            ("42501", (false, false, Fate::Kept)),
        ];
        for (code, expected) in table {
            assert_eq!(told(code), expected, "{code}");
        }
        let panic = judge_code("XX000", PgSeverity::Panic);
        assert_eq!(panic.connection, Fate::AllClosed);
    }
}
