//! Intents that are due: found and claimed. Nobody else writes, so what a transaction has read
//! stays so until it ends.

use sqlx::SqliteConnection;
use sqlx::sqlite::SqliteRow;
use uuid::Uuid;

use super::rows::{INTENTS, sending, status};
use crate::domain::intent::{
    ClaimWish, ClaimedIntent, DEATHS_MAX, Destination, IntentClaimed, IntentId, IntentKey,
    IntentStatus, Stamp, diagnostic,
};
use crate::domain::run::RunId;
use crate::domain::scope::TenantScope;
use crate::store::StoreError;
use crate::store::outbox::{ClaimBeat, Lane, LaneWish};
use crate::store::sqlite::failure;
use crate::store::sqlite::rows::{Cells, between, span_ms};
use crate::store::sqlite::statement::{self, Query};

/// From lane to lane by look-ups in the index, however long their backlogs are: to the tenant's
/// next destination, or to the next tenant. One comparison of both columns with those of another
/// row would use the first alone, and go through a tenant's whole backlog.
pub const LANES: &str = "\
    with recursive lane(id) as ( \
        select (select rowid from eec_effect_intent \
                where due_at is not null and (tenant_scope, destination) > (?1, ?2) \
                order by tenant_scope, destination limit 1) \
        union all \
        select coalesce( \
            (select n.rowid from eec_effect_intent l cross join eec_effect_intent n \
             where l.rowid = lane.id and n.due_at is not null \
               and n.tenant_scope = l.tenant_scope and n.destination > l.destination \
             order by n.destination limit 1), \
            (select n.rowid from eec_effect_intent l cross join eec_effect_intent n \
             where l.rowid = lane.id and n.due_at is not null \
               and n.tenant_scope > l.tenant_scope \
             order by n.tenant_scope, n.destination limit 1)) \
        from lane where lane.id is not null \
    ) \
    select i.tenant_scope, i.destination \
    from lane cross join eec_effect_intent i on i.rowid = lane.id \
    where exists (select 1 from eec_effect_intent d where d.tenant_scope = i.tenant_scope \
                  and d.destination = i.destination and d.due_at <= ?3) \
      and not exists (select 1 from eec_destination_pause p \
                      where p.destination = i.destination) \
    limit ?4";

pub const DUE: &str = "\
    select intent_id from eec_effect_intent \
    where tenant_scope = ?1 and destination = ?2 and due_at <= ?3 order by due_at limit ?4";

/// With whether the stamp has been given to an attempt before.
const SEE: &str = "\
    select i.run_id, i.status, i.claim_token, i.due_at, i.deaths, i.withdrawn, \
           exists (select 1 from eec_destination_pause p \
                   where p.destination = i.destination) as paused, \
           exists (select 1 from eec_run_attempt a where a.tenant_scope = i.tenant_scope \
                   and a.run_id = i.run_id and a.stamp = ?3) as used \
    from eec_effect_intent i where i.tenant_scope = ?1 and i.intent_id = ?2";

const TAKE: &str = "\
    update eec_effect_intent \
    set claim_token = ?3, due_at = ?4 + ?5, tries = tries + 1, \
        first_due_at = iif(tries = tries_before, ?4, coalesce(first_due_at, ?4)) \
    where tenant_scope = ?1 and intent_id = ?2";

const OPEN: &str = "\
    insert into eec_run_attempt \
        (tenant_scope, run_id, intent_id, stamp, try, worker, started_at) \
    select tenant_scope, run_id, intent_id, ?3, tries, ?4, ?5 from eec_effect_intent \
    where tenant_scope = ?1 and intent_id = ?2";

const END: &str = "\
    update eec_effect_intent \
    set status = ?3, claim_token = null, due_at = null, ended_at = ?4, changed = 1 \
    where tenant_scope = ?1 and intent_id = ?2";

const COUNT_DEATH: &str = "\
    update eec_effect_intent \
    set deaths = deaths + 1, outcome = 'lost', answer_status = null, diagnostic = null \
    where tenant_scope = ?1 and intent_id = ?2";

const LOSE: &str = "\
    update eec_run_attempt set status = 'lost', ended_at = ?4 \
    where tenant_scope = ?1 and run_id = ?2 and stamp = ?3 and status = 'open'";

const CLAIMED: &str = "\
    select i.run_id, i.seq, i.step, i.destination, i.idempotency_key, i.tries, i.tries_before, \
           i.faults, i.first_due_at, i.sending, m.body \
    from eec_effect_intent i left join eec_effect_body m on m.tenant_scope = i.tenant_scope \
         and m.intent_id = i.intent_id and m.part = 'message' \
    where i.tenant_scope = ?1 and i.intent_id = ?2";

const EXTEND: &str = "\
    update eec_effect_intent set due_at = ?4 \
    where tenant_scope = ?1 and intent_id = ?2 and claim_token = ?3 and status = 'pending'";

/// Every statement, for the test of their plans.
#[cfg(test)]
pub const STATEMENTS: [&str; 10] = [
    LANES,
    DUE,
    SEE,
    TAKE,
    OPEN,
    END,
    COUNT_DEATH,
    LOSE,
    CLAIMED,
    EXTEND,
];

/// Lanes in which something is due.
pub async fn lanes(
    connection: &mut SqliteConnection,
    now_ms: i64,
    after: Option<Lane>,
    limit: u32,
) -> Result<Vec<Lane>, StoreError> {
    let (tenant, destination) = after.as_ref().map_or(("", ""), |lane| {
        (lane.tenant.as_str(), &*lane.destination.0)
    });
    let rows = sqlx::query(LANES)
        .bind(tenant)
        .bind(destination)
        .bind(now_ms)
        .bind(limit);
    let lane = |row: &SqliteRow| {
        let cells = Cells::new(row, INTENTS);
        Ok(Lane {
            tenant: TenantScope::stored(&cells.get::<String>("tenant_scope")?),
            destination: Destination(cells.get("destination")?),
        })
    };
    let rows = statement::rows(connection, rows).await?;
    rows.iter().map(lane).collect()
}

/// What is due in each lane.
pub async fn due(
    connection: &mut SqliteConnection,
    now_ms: i64,
    wishes: &[LaneWish],
) -> Result<Vec<IntentKey>, StoreError> {
    let mut found = Vec::new();
    for LaneWish { lane, limit } in wishes {
        let rows = sqlx::query(DUE)
            .bind(lane.tenant.as_str())
            .bind(&*lane.destination.0)
            .bind(now_ms)
            .bind(limit);
        for row in &statement::rows(connection, rows).await? {
            found.push(IntentKey {
                tenant: lane.tenant.clone(),
                id: IntentId(Cells::new(row, INTENTS).id("intent_id")?),
            });
        }
    }
    Ok(found)
}

/// Claims intents.
pub async fn claim(
    connection: &mut SqliteConnection,
    now_ms: i64,
    wishes: &[ClaimWish],
) -> Result<Vec<IntentClaimed>, StoreError> {
    let mut outcomes = Vec::with_capacity(wishes.len());
    for wish in wishes {
        outcomes.push(match claim_one(connection, now_ms, wish).await {
            // Its batch must not suffer with it. A claim that was won is left alone, and the
            // intent is quarantined once that has happened too often.
            Err(error @ StoreError::Inconsistent { .. }) => {
                tracing::error!(%error, intent = %wish.key.id, "an intent can't be read");
                IntentClaimed::Lost
            }
            outcome => outcome?,
        });
    }
    Ok(outcomes)
}

/// Extends claims.
pub async fn extend(
    connection: &mut SqliteConnection,
    now_ms: i64,
    beats: &[ClaimBeat],
) -> Result<Vec<bool>, StoreError> {
    let mut held = Vec::with_capacity(beats.len());
    for beat in beats {
        let extended = of_claim(EXTEND, &beat.key, beat.stamp)
            .bind(now_ms.saturating_add(span_ms(beat.lease)));
        held.push(statement::run(connection, extended).await? == 1);
    }
    Ok(held)
}

/// A statement with an intent's key as its first two parameters.
pub fn of_intent<'q>(sql: &'static str, key: &'q IntentKey) -> Query<'q> {
    sqlx::query(sql).bind(key.tenant.as_str()).bind(key.id.0)
}

/// The same, with a claim's stamp as the third.
pub fn of_claim<'q>(sql: &'static str, key: &'q IntentKey, stamp: Stamp) -> Query<'q> {
    of_intent(sql, key).bind(stamp.0)
}

/// Closes the attempt of a claim that ended without a word.
pub async fn lose(
    connection: &mut SqliteConnection,
    now_ms: i64,
    key: &IntentKey,
    run_id: Uuid,
    stamp: Uuid,
) -> Result<(), StoreError> {
    let lost = sqlx::query(LOSE)
        .bind(key.tenant.as_str())
        .bind(run_id)
        .bind(stamp)
        .bind(now_ms);
    statement::run(connection, lost).await?;
    Ok(())
}

/// What a claim sees of an intent.
struct Seen {
    run_id: Uuid,
    status: IntentStatus,
    held: Option<Uuid>,
    deaths: u32,
    withdrawn: bool,
    /// Whether it is due, its destination not paused, and the stamp a new one.
    open: bool,
}

async fn see(
    connection: &mut SqliteConnection,
    now_ms: i64,
    wish: &ClaimWish,
) -> Result<Option<Seen>, StoreError> {
    let Some(row) = statement::row(connection, of_claim(SEE, &wish.key, wish.stamp)).await? else {
        return Ok(None);
    };
    let cells = Cells::new(&row, INTENTS);
    let due_ms: Option<i64> = cells.find("due_at")?;
    let due = due_ms.is_some_and(|due_ms| due_ms <= now_ms);
    let (paused, used): (bool, bool) = (cells.get("paused")?, cells.get("used")?);
    Ok(Some(Seen {
        run_id: cells.id("run_id")?,
        status: status(&cells)?,
        held: cells.id_if_any("claim_token")?,
        deaths: cells.count("deaths")?,
        withdrawn: cells.get("withdrawn")?,
        open: due && !paused && !used,
    }))
}

async fn claim_one(
    connection: &mut SqliteConnection,
    now_ms: i64,
    wish: &ClaimWish,
) -> Result<IntentClaimed, StoreError> {
    let Some(seen) = see(connection, now_ms, wish).await? else {
        return Ok(IntentClaimed::Lost);
    };
    if seen.status == IntentStatus::Quarantined {
        return Ok(IntentClaimed::Quarantined);
    }
    if seen.status == IntentStatus::Pending && seen.held == Some(wish.stamp.0) {
        return claimed(connection, now_ms, wish).await;
    }
    if seen.status != IntentStatus::Pending || !seen.open {
        return Ok(IntentClaimed::Lost);
    }
    if let Some(held) = seen.held {
        lose(connection, now_ms, &wish.key, seen.run_id, held).await?;
        statement::run(connection, of_intent(COUNT_DEATH, &wish.key)).await?;
    }
    let ended = if seen.withdrawn {
        Some((IntentStatus::Discarded, IntentClaimed::Lost))
    } else if seen.held.is_some() && seen.deaths + 1 >= DEATHS_MAX {
        Some((IntentStatus::Quarantined, IntentClaimed::Quarantined))
    } else {
        None
    };
    if let Some((status, outcome)) = ended {
        let end = of_intent(END, &wish.key).bind(status.word()).bind(now_ms);
        statement::run(connection, end).await?;
        return Ok(outcome);
    }
    let take = of_claim(TAKE, &wish.key, wish.stamp)
        .bind(now_ms)
        .bind(span_ms(wish.lease));
    statement::run(connection, take).await?;
    let open = of_claim(OPEN, &wish.key, wish.stamp)
        .bind(diagnostic(&wish.worker))
        .bind(now_ms);
    statement::run(connection, open).await?;
    claimed(connection, now_ms, wish).await
}

async fn claimed(
    connection: &mut SqliteConnection,
    now_ms: i64,
    wish: &ClaimWish,
) -> Result<IntentClaimed, StoreError> {
    let row = of_intent(CLAIMED, &wish.key)
        .fetch_one(connection)
        .await
        .map_err(failure::before)?;
    let cells = Cells::new(&row, INTENTS);
    Ok(IntentClaimed::Won(Box::new(ClaimedIntent {
        key: wish.key.clone(),
        run_id: RunId(cells.id("run_id")?),
        seq: cells.get("seq")?,
        step: cells.get("step")?,
        destination: Destination(cells.get("destination")?),
        idempotency_key: cells.get("idempotency_key")?,
        stamp: wish.stamp,
        tries: cells.count("tries")?,
        tries_before: cells.count("tries_before")?,
        faults: cells.count("faults")?,
        age: between(cells.get("first_due_at")?, now_ms),
        sending: sending(&cells)?,
        body: cells.get::<Vec<u8>>("body")?.into(),
    })))
}
