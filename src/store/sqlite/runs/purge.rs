//! Retention of runs, a page at a time.

use sqlx::SqliteConnection;
use uuid::Uuid;

use crate::config::Keep;
use crate::store::StoreError;
use crate::store::runs::RunsPurged;
use crate::store::sqlite::failure;
use crate::store::sqlite::rows;
use crate::store::sqlite::statement;

/// One transaction takes runs with about this many transitions in all, or one run.
const TRANSITIONS_MAX: i64 = 2_000;

/// Runs past ?2 whose dead intents are past ?3. A run that holds its record, at ?1, is what the
/// record's duplicates are told of.
const PAST: &str = "\
    select r.tenant_scope, r.run_id, r.last_transition_seq from eec_run r \
    where r.ended_at is not null and r.ended_at <= ?2 \
      and r.status in ('completed', 'failed', 'compensated', 'cancelled') \
      and not exists (select 1 from eec_effect_intent i \
                      where i.tenant_scope = r.tenant_scope and i.run_id = r.run_id \
                        and (i.status = 'pending' \
                             or i.status in ('dead', 'quarantined') and i.ended_at > ?3)) \
      and not (r.holds_record and exists (select 1 from eec_routing_idempotency k \
                      where k.tenant_scope = r.tenant_scope and k.pool_id = r.pool_id \
                        and k.idempotency_key = r.idempotency_key and k.decision_id = r.run_id \
                        and r.ended_at + k.valid_for_ms > ?1)) \
    order by r.ended_at limit ?4";

/// What belongs to a run, in an order that finds everything by the run's key.
const OF_RUN: [&str; 5] = [
    "delete from eec_effect_body where rowid in ( \
        select b.rowid from eec_effect_intent i cross join eec_effect_body b \
        where i.tenant_scope = ?1 and i.run_id = ?2 \
          and b.tenant_scope = i.tenant_scope and b.intent_id = i.intent_id)",
    "delete from eec_run_transition where tenant_scope = ?1 and run_id = ?2",
    "delete from eec_run_attempt where tenant_scope = ?1 and run_id = ?2",
    "delete from eec_run where tenant_scope = ?1 and run_id = ?2",
    INTENTS,
];

const INTENTS: &str = "delete from eec_effect_intent where tenant_scope = ?1 and run_id = ?2";

const LONG_DEAD: &str = "\
    select tenant_scope, intent_id from eec_effect_intent \
    where has_body and status in ('dead', 'quarantined') and ended_at <= ?1 \
    order by ended_at limit ?2";

const BARE: &str = "\
    update eec_effect_intent set has_body = 0 where tenant_scope = ?1 and intent_id = ?2";

const DELETE_BODY: &str = "\
    delete from eec_effect_body \
    where tenant_scope = ?1 and intent_id = ?2 and part = 'message'";

const PURGE_CLAIMS: &str = "\
    delete from eec_routing_claim where rowid in ( \
        select rowid from eec_routing_claim where keep_until <= ?1 limit ?2)";

const ANY_CLAIM_PAST: &str = "\
    select exists (select 1 from eec_routing_claim where keep_until <= ?1)";

/// Every statement, for the test of their plans.
#[cfg(test)]
pub fn statements() -> impl Iterator<Item = &'static str> {
    let more = [
        PAST,
        LONG_DEAD,
        BARE,
        DELETE_BODY,
        PURGE_CLAIMS,
        ANY_CLAIM_PAST,
    ];
    OF_RUN.into_iter().chain(more)
}

/// What is past its time, found before anything is written.
pub struct Past {
    /// Runs, each with the number of its transitions.
    runs: Vec<(String, Uuid, i64)>,
    /// Dead intents.
    intents: Vec<(String, Uuid)>,
    /// Whether there are remembered claims.
    claims: bool,
}

impl Past {
    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty() && self.intents.is_empty() && !self.claims
    }
}

/// Finds up to `limit` of each kind. An idle purge never holds up a commit.
pub async fn find(
    connection: &mut SqliteConnection,
    now_ms: i64,
    keep: Keep,
    limit: u32,
) -> Result<Past, StoreError> {
    let dead_ms = now_ms.saturating_sub(rows::span_ms(keep.dead));
    let runs = sqlx::query_as(PAST)
        .bind(now_ms)
        .bind(now_ms.saturating_sub(rows::span_ms(keep.runs)))
        .bind(dead_ms)
        .bind(limit)
        .fetch_all(&mut *connection)
        .await
        .map_err(failure::before)?;
    let intents = sqlx::query_as(LONG_DEAD)
        .bind(dead_ms)
        .bind(limit)
        .fetch_all(&mut *connection)
        .await
        .map_err(failure::before)?;
    let claims = sqlx::query_scalar(ANY_CLAIM_PAST).bind(now_ms);
    let claims = claims.fetch_one(connection).await;
    Ok(Past {
        runs,
        intents,
        claims: claims.map_err(failure::before)?,
    })
}

/// Deletes a page of it, found anew: something may have happened since. Also tells whether there is
/// more.
pub async fn purge(
    connection: &mut SqliteConnection,
    now_ms: i64,
    keep: Keep,
    limit: u32,
) -> Result<(RunsPurged, bool), StoreError> {
    let past = find(connection, now_ms, keep, limit).await?;
    let mut purged = RunsPurged::default();
    let mut room = TRANSITIONS_MAX;
    let mut left = past.runs.iter().peekable();
    while let Some((tenant, id, transitions)) =
        left.next_if(|(.., transitions)| purged.runs == 0 || *transitions <= room)
    {
        room -= transitions;
        for sql in OF_RUN {
            let deleted = delete(connection, sql, tenant, *id).await?;
            purged.intents += if sql == INTENTS { deleted } else { 0 };
        }
        purged.runs += 1;
    }
    for (tenant, id) in &past.intents {
        purged.bodies += delete(connection, BARE, tenant, *id).await?;
        delete(connection, DELETE_BODY, tenant, *id).await?;
    }
    let claims = sqlx::query(PURGE_CLAIMS).bind(now_ms).bind(limit);
    statement::run(connection, claims).await?;
    Ok((purged, left.peek().is_some()))
}

async fn delete(
    connection: &mut SqliteConnection,
    sql: &'static str,
    tenant: &str,
    id: Uuid,
) -> Result<u64, StoreError> {
    statement::run(connection, sqlx::query(sql).bind(tenant).bind(id)).await
}
