//! What operators look for and do with intents and destinations, and the figures for the gauges.

use sqlx::sqlite::SqliteRow;
use sqlx::{QueryBuilder, SqliteConnection};

use super::claims::{lose, of_intent};
use super::rows::{INTENTS, line, status};
use crate::domain::intent::{Destination, IntentId, IntentKey, IntentStatus};
use crate::domain::run::RunStatus;
use crate::ids;
use crate::store::outbox::{
    COUNT_MAX, DISCARDED_INTENT, IntentLine, IntentSearch, OutboxCensus, PAUSED_DESTINATION, Pause,
    RESUMED_DESTINATION,
};
use crate::store::sqlite::failure;
use crate::store::sqlite::rows::{Cells, between, of_tenant};
use crate::store::sqlite::statement;
use crate::store::{Audit, Resolved, StoreError};

/// What [`line()`] reads, of the intents that follow.
macro_rules! lines {
    ($from:literal) => {
        concat!(
            "select i.tenant_scope, i.intent_id, i.run_id, i.seq, i.step, i.status, \
             i.destination, i.idempotency_key, i.sending, i.claim_token, i.due_at, \
             i.first_due_at, i.tries, i.tries_before, i.faults, i.deaths, i.redrives, i.outcome, \
             i.answer_status, i.diagnostic, i.created_at, i.ended_at, \
             (select length(m.body) from eec_effect_body m where m.tenant_scope = i.tenant_scope \
                 and m.intent_id = i.intent_id and m.part = 'message') as body_bytes from ",
            $from
        )
    };
}

const FIND_ONE: &str = lines!("eec_effect_intent i where i.intent_id = ?1");

const FIND: &str = lines!("eec_effect_intent i where true");

/// What operators look for most, and what is rare.
const FIND_UNDELIVERED: &str = lines!(
    "eec_effect_intent i indexed by eec_effect_intent_dead \
     where i.status in ('dead', 'quarantined')"
);

const FIND_OF_RUN: &str = lines!(
    "eec_run r cross join eec_effect_intent i on i.tenant_scope = r.tenant_scope \
     and i.run_id = r.run_id where r.run_id = "
);

const SEE: &str = "\
    select run_id, status, claim_token, coalesce(due_at > ?3, 0) as held \
    from eec_effect_intent where tenant_scope = ?1 and intent_id = ?2";

const DISCARD: &str = "\
    update eec_effect_intent \
    set status = 'discarded', changed = 1, due_at = null, claim_token = null, ended_at = ?3 \
    where tenant_scope = ?1 and intent_id = ?2";

const NOTE: &str = "\
    insert into eec_operator_audit \
        (tenant_scope, pool_id, idempotency_key, audit_id, at, operator, action, reason) \
    select i.tenant_scope, coalesce(r.pool_id, ''), coalesce(r.idempotency_key, ''), \
           ?3, ?4, ?5, ?6, ?7 \
    from eec_effect_intent i left join eec_run r on r.tenant_scope = i.tenant_scope \
         and r.run_id = i.run_id \
    where i.tenant_scope = ?1 and i.intent_id = ?2";

const PAUSE: &str = "\
    insert into eec_destination_pause (destination, paused_at, operator, reason) \
    values (?1, ?2, ?3, ?4) on conflict (destination) do nothing";

const RESUME: &str = "delete from eec_destination_pause where destination = ?1";

/// A destination is no tenant's.
const NOTE_DESTINATION: &str = "\
    insert into eec_operator_audit \
        (tenant_scope, pool_id, idempotency_key, audit_id, at, operator, action, reason) \
    values ('', '', '', ?1, ?2, ?3, ?4, ?5)";

const PAUSED: &str = "\
    select destination, paused_at, operator, reason from eec_destination_pause \
    order by destination";

const CENSUS_PENDING: &str = "\
    select count(*), min(first_due_at) from (select first_due_at from eec_effect_intent \
        where status = 'pending' and first_due_at is not null \
        order by first_due_at limit ?1)";

const CENSUS_UNDELIVERED: &str = "\
    select status, count(*) from (select status from eec_effect_intent \
        where status in ('dead', 'quarantined') limit 2 * ?1) group by status";

const CENSUS_RUNS: &str = "\
    select count(*) from (select 1 from eec_run \
        where status in ('running', 'waiting', 'stuck') and status = ?2 limit ?1)";

/// Every statement that looks for rows by an index, for the test of their plans.
#[cfg(test)]
pub const STATEMENTS: [&str; 9] = [
    FIND_ONE,
    FIND_UNDELIVERED,
    SEE,
    DISCARD,
    NOTE,
    RESUME,
    CENSUS_PENDING,
    CENSUS_UNDELIVERED,
    CENSUS_RUNS,
];

/// Finds an intent by its id alone.
pub async fn find_intent(
    connection: &mut SqliteConnection,
    now_ms: i64,
    id: IntentId,
) -> Result<Option<IntentLine>, StoreError> {
    let row = statement::row(connection, sqlx::query(FIND_ONE).bind(id.0)).await?;
    row.map(|row| line(&row, now_ms)).transpose()
}

/// Finds intents.
pub async fn find_intents(
    connection: &mut SqliteConnection,
    now_ms: i64,
    search: &IntentSearch,
) -> Result<Vec<IntentLine>, StoreError> {
    let undelivered = [IntentStatus::Dead, IntentStatus::Quarantined].map(Some);
    let mut query = if let Some(run_id) = search.run_id {
        let mut query = QueryBuilder::new(FIND_OF_RUN);
        query.push_bind(run_id.0);
        query
    } else if undelivered.contains(&search.status) {
        QueryBuilder::new(FIND_UNDELIVERED)
    } else {
        QueryBuilder::new(FIND)
    };
    of_tenant(&mut query, "i.tenant_scope", search.tenant.as_deref());
    if let Some(status) = search.status {
        query.push(" and i.status = ").push_bind(status.word());
    }
    if let Some(destination) = &search.destination {
        query
            .push(" and i.destination = ")
            .push_bind(&destination.0);
    }
    if let Some(after) = &search.after {
        query.push(" and (i.tenant_scope, i.intent_id) > (");
        query.push_bind(after.tenant.as_str()).push(", ");
        query.push_bind(after.id.0).push(")");
    }
    query.push(" order by i.tenant_scope, i.intent_id limit ");
    query.push_bind(search.limit);
    let found = statement::rows(connection, query.build()).await?;
    found.iter().map(|row| line(row, now_ms)).collect()
}

/// Gives an intent up.
pub async fn discard(
    connection: &mut SqliteConnection,
    now_ms: i64,
    key: &IntentKey,
    audit: &Audit,
) -> Result<Resolved, StoreError> {
    let row = of_intent(SEE, key).bind(now_ms);
    let Some(row) = statement::row(connection, row).await? else {
        return Ok(Resolved::NoRecord);
    };
    let cells = Cells::new(&row, INTENTS);
    let claim = cells.id_if_any("claim_token")?;
    let allowed = match status(&cells)? {
        IntentStatus::Dead | IntentStatus::Quarantined => true,
        IntentStatus::Pending => claim.is_none() || !cells.get::<bool>("held")?,
        IntentStatus::Completed | IntentStatus::Discarded => false,
    };
    if !allowed {
        return Ok(Resolved::WrongState);
    }
    if let Some(stamp) = claim {
        lose(connection, now_ms, key, cells.id("run_id")?, stamp).await?;
    }
    statement::run(connection, of_intent(DISCARD, key).bind(now_ms)).await?;
    let note = of_intent(NOTE, key)
        .bind(ids::audit_id())
        .bind(now_ms)
        .bind(&audit.operator)
        .bind(DISCARDED_INTENT)
        .bind(format!("{}: {}", key.id, audit.reason));
    statement::run(connection, note).await?;
    Ok(Resolved::Done)
}

/// Stops sending to a destination, or goes on. Told again it changes nothing, and is not audited
/// again.
pub async fn set_paused(
    connection: &mut SqliteConnection,
    now_ms: i64,
    destination: &Destination,
    paused: bool,
    audit: &Audit,
) -> Result<(), StoreError> {
    let (query, action) = if paused {
        let pause = sqlx::query(PAUSE).bind(&destination.0).bind(now_ms);
        let pause = pause.bind(&audit.operator).bind(&audit.reason);
        (pause, PAUSED_DESTINATION)
    } else {
        (
            sqlx::query(RESUME).bind(&destination.0),
            RESUMED_DESTINATION,
        )
    };
    if statement::run(connection, query).await? == 0 {
        return Ok(());
    }
    let note = sqlx::query(NOTE_DESTINATION)
        .bind(ids::audit_id())
        .bind(now_ms)
        .bind(&audit.operator)
        .bind(action)
        .bind(format!("{}: {}", destination.0, audit.reason));
    statement::run(connection, note).await?;
    Ok(())
}

/// Destinations that are paused.
pub async fn paused(connection: &mut SqliteConnection) -> Result<Vec<Pause>, StoreError> {
    let pause = |row: &SqliteRow| {
        let cells = Cells::new(row, "eec_destination_pause");
        Ok(Pause {
            destination: Destination(cells.get("destination")?),
            paused_at: cells.instant("paused_at")?,
            operator: cells.get("operator")?,
            reason: cells.get("reason")?,
        })
    };
    let rows = statement::rows(connection, sqlx::query(PAUSED)).await?;
    rows.iter().map(pause).collect()
}

/// Counts what is not over. Each count reads no more than it tells, by an index that holds nothing
/// else.
pub async fn outbox_census(
    connection: &mut SqliteConnection,
    now_ms: i64,
) -> Result<OutboxCensus, StoreError> {
    let count = |rows: i64| {
        u64::try_from(rows)
            .unwrap_or_default()
            .min(u64::from(COUNT_MAX))
    };
    let (pending, oldest_ms): (i64, Option<i64>) = sqlx::query_as(CENSUS_PENDING)
        .bind(COUNT_MAX)
        .fetch_one(&mut *connection)
        .await
        .map_err(failure::before)?;
    let undelivered: Vec<(String, i64)> = sqlx::query_as(CENSUS_UNDELIVERED)
        .bind(COUNT_MAX)
        .fetch_all(&mut *connection)
        .await
        .map_err(failure::before)?;
    let mut intents = vec![(IntentStatus::Pending, count(pending))];
    for status in [IntentStatus::Dead, IntentStatus::Quarantined] {
        let mut rows = undelivered.iter().filter(|(word, _)| word == status.word());
        intents.push((status, rows.next().map_or(0, |(_, rows)| count(*rows))));
    }
    let mut runs = Vec::new();
    for status in [RunStatus::Running, RunStatus::Waiting, RunStatus::Stuck] {
        let rows = sqlx::query_scalar(CENSUS_RUNS)
            .bind(COUNT_MAX)
            .bind(status.word())
            .fetch_one(&mut *connection)
            .await
            .map_err(failure::before)?;
        runs.push((status, count(rows)));
    }
    Ok(OutboxCensus {
        intents,
        runs,
        oldest_pending: oldest_ms.map(|oldest_ms| between(oldest_ms, now_ms)),
    })
}
