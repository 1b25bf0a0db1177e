//! Ticks, one after another: one that comes too late writes nothing and leaves the others alone.

use sqlx::SqliteConnection;

use super::parts::{self, Part};
use crate::domain::intent::{IntentChange, IntentStatus, Order, Stamp};
use crate::domain::run::{RunKey, TickCommit, TickCommitted, Timer};
use crate::store::StoreError;
use crate::store::runs::change::{self, armed, change_intent, dropped, revived};
use crate::store::runs::columns;
use crate::store::sqlite::failure;
use crate::store::sqlite::statement::{self, Query};

const COMMIT: &str = "\
    update eec_run \
    set record_version = record_version + 1, last_transition_seq = ?5, status = ?6, \
        progress = ?7, reason = ?8, due_at = iif(?9, due_at, ?10), updated_at = ?11, \
        ended_at = iif(?12, coalesce(ended_at, ?11), null) \
    where tenant_scope = ?1 and run_id = ?2 and record_version = ?3 \
      and last_transition_seq = ?4";

const APPLIED: &str = "\
    select exists (select 1 from eec_run_transition \
                   where tenant_scope = ?1 and run_id = ?2 and stamp = ?3)";

const COMMITTED_BEFORE: &str = "\
    select exists (select 1 from eec_run_transition \
                   where tenant_scope = ?1 and run_id = ?2 and seq = ?3 and tick_id = ?4)";

const CHANGE: &str = concat!(
    "update eec_effect_intent as i ",
    change_intent!("?5"),
    " from (select ?3 as word, ?4 as seen) c where i.tenant_scope = ?1 and i.intent_id = ?2 \
      returning status"
);

/// An intent that is given up had no live claim; this is what is left of one.
const CLOSE: &str = "\
    update eec_run_attempt set status = 'lost', ended_at = ?4 \
    where tenant_scope = ?1 and run_id = ?2 and intent_id = ?3 and status = 'open'";

/// Every statement, for the test of their plans.
#[cfg(test)]
pub const STATEMENTS: [&str; 5] = [COMMIT, APPLIED, COMMITTED_BEFORE, CHANGE, CLOSE];

/// Commits ticks.
pub async fn commit_ticks(
    connection: &mut SqliteConnection,
    now_ms: i64,
    ticks: &[TickCommit],
) -> Result<Vec<TickCommitted>, StoreError> {
    let mut committed = Vec::with_capacity(ticks.len());
    for commit in ticks {
        committed.push(commit_one(connection, now_ms, commit).await?);
    }
    Ok(committed)
}

/// Whether an input with that stamp was applied.
pub async fn is_applied(
    connection: &mut SqliteConnection,
    key: &RunKey,
    stamp: Stamp,
) -> Result<bool, StoreError> {
    sqlx::query_scalar(APPLIED)
        .bind(key.tenant.as_str())
        .bind(key.id.0)
        .bind(stamp.0)
        .fetch_one(connection)
        .await
        .map_err(failure::before)
}

async fn commit_one(
    connection: &mut SqliteConnection,
    now_ms: i64,
    commit: &TickCommit,
) -> Result<TickCommitted, StoreError> {
    let key = &commit.key;
    if !move_on(connection, now_ms, commit).await? {
        let before = was_committed(connection, commit).await?;
        return Ok(if before {
            TickCommitted::Committed
        } else {
            TickCommitted::Conflict
        });
    }
    let part = Part {
        tenant: &key.tenant,
        run_id: key.id,
        record_version: commit.seen_version.saturating_add(1),
        seen_seq: commit.seen_seq,
        tick_id: commit.tick_id,
        tick: &commit.tick,
    };
    for change in columns::merged(&commit.tick.changes) {
        apply(connection, now_ms, key, &change).await?;
    }
    parts::add(connection, now_ms, &[part]).await?;
    Ok(TickCommitted::Committed)
}

/// Whether the run is still as the tick saw it, and none of its inputs was applied.
async fn move_on(
    connection: &mut SqliteConnection,
    now_ms: i64,
    commit: &TickCommit,
) -> Result<bool, StoreError> {
    for stamp in commit.tick.transitions.iter().filter_map(|t| t.stamp) {
        if is_applied(connection, &commit.key, stamp).await? {
            return Ok(false);
        }
    }
    Ok(statement::run(connection, update(commit, now_ms)).await? == 1)
}

/// A tick that was committed has the transition after the one that it saw.
async fn was_committed(
    connection: &mut SqliteConnection,
    commit: &TickCommit,
) -> Result<bool, StoreError> {
    sqlx::query_scalar(COMMITTED_BEFORE)
        .bind(commit.key.tenant.as_str())
        .bind(commit.key.id.0)
        .bind(commit.seen_seq.saturating_add(1))
        .bind(commit.tick_id.0)
        .fetch_one(connection)
        .await
        .map_err(failure::before)
}

fn update(commit: &TickCommit, now_ms: i64) -> Query<'_> {
    let tick = &commit.tick;
    sqlx::query(COMMIT)
        .bind(commit.key.tenant.as_str())
        .bind(commit.key.id.0)
        .bind(commit.seen_version)
        .bind(commit.seen_seq)
        .bind(columns::last_seq(commit.seen_seq, tick))
        .bind(tick.status.word())
        .bind(&tick.progress[..])
        .bind(tick.reason.as_deref())
        .bind(columns::timer(tick) == Timer::Keep)
        .bind(parts::due_ms(tick, now_ms))
        .bind(now_ms)
        .bind(tick.status.is_final())
}

async fn apply(
    connection: &mut SqliteConnection,
    now_ms: i64,
    key: &RunKey,
    change: &IntentChange,
) -> Result<(), StoreError> {
    let id = key.id.intent(change.seq).0;
    let status: Option<String> = sqlx::query_scalar(CHANGE)
        .bind(key.tenant.as_str())
        .bind(id)
        .bind(change::word(change.order))
        .bind(change.seen.map(IntentStatus::word))
        .bind(now_ms)
        .fetch_optional(&mut *connection)
        .await
        .map_err(failure::before)?;
    let is_discarded = status.as_deref() == Some(IntentStatus::Discarded.word());
    if change.order == Order::Withdraw && is_discarded {
        let closed = sqlx::query(CLOSE)
            .bind(key.tenant.as_str())
            .bind(key.id.0)
            .bind(id)
            .bind(now_ms);
        statement::run(connection, closed).await?;
    }
    Ok(())
}
