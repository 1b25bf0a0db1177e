//! Upkeep: owners whose lease is over, rows past their time, figures for the gauges.

use sqlx::SqliteConnection;

use super::failure;
use super::rows::{self, not_held};
use super::statement;
use crate::domain::record::AttemptToken;
use crate::domain::scope::RecordKey;
use crate::store::{Census, Purged, StoreError, Swept};

/// The census counts no further: a gauge needs no more.
const COUNT_MAX: i64 = 100_000;

/// Where a row goes whose lease is over, by what was stamped on it.
macro_rules! sweep {
    () => {
        "update eec_routing_idempotency \
         set status = iif(on_unknown = 'redrive', 'failed_before_commit', 'outcome_unknown'), \
             maybe_sent = iif(on_unknown = 'redrive', 1, maybe_sent), \
             valid_until = iif(on_unknown = 'redrive', ?1 + valid_for_ms, null), \
             lease_expires_at = null "
    };
}

const SWEEP_ONE: &str = concat!(
    sweep!(),
    "where tenant_scope = ?2 and pool_id = ?3 and idempotency_key = ?4 and attempt_token = ?5 \
       and status = 'pending' and lease_expires_at <= ?1"
);

const SWEEP: &str = concat!(
    sweep!(),
    "where rowid in (select rowid from eec_routing_idempotency \
                     where status = 'pending' and lease_expires_at <= ?1 \
                     order by reserved_at limit ?2) \
     returning status = 'outcome_unknown'"
);

const ANY_LEASE_OVER: &str = "\
    select exists (select 1 from eec_routing_idempotency \
                   where status = 'pending' and lease_expires_at <= ?1)";

/// Records that are past their time and that no run holds.
macro_rules! records_past {
    () => {
        concat!(
            "from eec_routing_idempotency r \
             where valid_until is not null and valid_until + tombstone_for_ms <= ?1 \
               and status in ('completed', 'failed_before_commit') and ",
            not_held!("?1", "r.tenant_scope", "r.decision_id", "r.valid_for_ms")
        )
    };
}

/// Decisions likewise.
macro_rules! decisions_past {
    () => {
        concat!(
            "from eec_routing_decision d where valid_until <= ?1 and ",
            not_held!(
                "?1",
                "d.tenant_scope",
                "d.decision_id",
                "(d.valid_until - d.created_at)"
            )
        )
    };
}

const PURGE_RECORDS: &str = concat!(
    "delete from eec_routing_idempotency where rowid in (select rowid ",
    records_past!(),
    " limit ?2)"
);

const PURGE_DECISIONS: &str = concat!(
    "delete from eec_routing_decision where rowid in (select rowid ",
    decisions_past!(),
    " limit ?2)"
);

const ANY_PAST_ITS_TIME: &str = concat!(
    "select exists (select 1 ",
    records_past!(),
    ") or exists (select 1 ",
    decisions_past!(),
    ")"
);

const CENSUS: &str = "\
    select (select count(*) from (select 1 from eec_routing_idempotency \
                                  where status = 'outcome_unknown' limit ?1)), \
           (select min(reserved_at) from eec_routing_idempotency where status = 'pending')";

/// Every statement, for the test of their plans.
#[cfg(test)]
pub const STATEMENTS: [&str; 7] = [
    SWEEP_ONE,
    SWEEP,
    ANY_LEASE_OVER,
    PURGE_RECORDS,
    PURGE_DECISIONS,
    ANY_PAST_ITS_TIME,
    CENSUS,
];

/// Whether a sweep would find anything; asked first, so that an idle sweep never holds up a commit.
pub async fn any_lease_over(
    connection: &mut SqliteConnection,
    now_ms: i64,
) -> Result<bool, StoreError> {
    exists(connection, ANY_LEASE_OVER, now_ms).await
}

/// Sweeps one record.
pub async fn sweep_one(
    connection: &mut SqliteConnection,
    now_ms: i64,
    key: &RecordKey,
    token: AttemptToken,
) -> Result<bool, StoreError> {
    let swept = sqlx::query(SWEEP_ONE)
        .bind(now_ms)
        .bind(key.tenant.as_str())
        .bind(key.pool.as_str())
        .bind(key.key.as_str())
        .bind(token.0);
    Ok(statement::run(connection, swept).await? == 1)
}

/// Sweeps up to `limit` records.
pub async fn sweep(
    connection: &mut SqliteConnection,
    now_ms: i64,
    limit: u32,
) -> Result<Swept, StoreError> {
    let unknown: Vec<bool> = sqlx::query_scalar(SWEEP)
        .bind(now_ms)
        .bind(limit)
        .fetch_all(connection)
        .await
        .map_err(failure::before)?;
    let mut swept = Swept::default();
    for unknown in unknown {
        if unknown {
            swept.outcome_unknown += 1;
        } else {
            swept.failed_before_commit += 1;
        }
    }
    Ok(swept)
}

/// Whether a purge would find anything.
pub async fn any_past_its_time(
    connection: &mut SqliteConnection,
    now_ms: i64,
) -> Result<bool, StoreError> {
    exists(connection, ANY_PAST_ITS_TIME, now_ms).await
}

/// Deletes up to `limit` records and up to `limit` decisions that are past their time.
pub async fn purge(
    connection: &mut SqliteConnection,
    now_ms: i64,
    limit: u32,
) -> Result<Purged, StoreError> {
    let mut deleted = [0; 2];
    for (deleted, sql) in deleted.iter_mut().zip([PURGE_RECORDS, PURGE_DECISIONS]) {
        let done = sqlx::query(sql).bind(now_ms).bind(limit);
        *deleted = statement::run(connection, done).await?;
    }
    let [records, decisions] = deleted;
    Ok(Purged { records, decisions })
}

/// Counts what is open.
pub async fn census(connection: &mut SqliteConnection, now_ms: i64) -> Result<Census, StoreError> {
    let (unknown, oldest_ms): (i64, Option<i64>) = sqlx::query_as(CENSUS)
        .bind(COUNT_MAX)
        .fetch_one(connection)
        .await
        .map_err(failure::before)?;
    Ok(Census {
        unknown: u64::try_from(unknown).unwrap_or_default(),
        oldest_pending: oldest_ms.map(|oldest_ms| rows::between(oldest_ms, now_ms)),
    })
}

async fn exists(
    connection: &mut SqliteConnection,
    sql: &'static str,
    now_ms: i64,
) -> Result<bool, StoreError> {
    sqlx::query_scalar(sql)
        .bind(now_ms)
        .fetch_one(connection)
        .await
        .map_err(failure::before)
}
