//! What ticks are made from: which runs something happened to, and how they stand.

use sqlx::SqliteConnection;
use sqlx::sqlite::SqliteRow;
use time::OffsetDateTime;

use super::rows::{answer, run, run_columns, run_key, run_status, seen};
use crate::domain::message::Recorded;
use crate::domain::run::{LoadedRun, RunKey, RunStatus};
use crate::store::StoreError;
use crate::store::runs::due::{self, Found};
use crate::store::runs::{DuePlace, RunsDue};
use crate::store::sqlite::failure;
use crate::store::sqlite::rows::Cells;
use crate::store::sqlite::statement::{self, Query};

const TIMERS: &str = "\
    select tenant_scope, run_id, due_at from eec_run \
    where due_at is not null and due_at <= ?1 and (due_at, tenant_scope, run_id) > (?3, ?4, ?5) \
    order by due_at, tenant_scope, run_id limit ?2";

/// Tenants that have something, each found by its own look at the index.
const TENANTS: &str = "\
    with recursive tenants(tenant_scope) as ( \
        select min(tenant_scope) from eec_effect_intent where changed \
        union all \
        select (select min(i.tenant_scope) from eec_effect_intent i \
                where i.changed and i.tenant_scope > t.tenant_scope) \
        from tenants t where t.tenant_scope is not null \
        limit ?1 + 1) \
    select tenant_scope from tenants where tenant_scope is not null limit ?1";

/// An intent is told by its run, so some repeat.
const CHANGED: &str = "\
    select tenant_scope, run_id from eec_effect_intent \
    where changed and tenant_scope = ?1 order by tenant_scope, run_id limit ?2";

const CHANGED_OF_ALL: &str = "\
    select tenant_scope, run_id from eec_effect_intent \
    where changed and (tenant_scope, run_id) > (?2, ?3) \
    order by tenant_scope, run_id limit ?1";

const LOAD: &str = concat!(
    "select ",
    run_columns!(),
    ", coalesce(r.due_at <= ?3, 0) as timer_over from eec_run r \
      where r.tenant_scope = ?1 and r.run_id = ?2"
);

const INTENTS: &str = "\
    select i.seq, i.status, i.changed, i.tries, i.has_body, i.outcome, i.diagnostic, \
           a.status as answer_status, a.headers as answer_headers, a.body as answer_body \
    from eec_effect_intent i left join eec_effect_body a \
      on a.tenant_scope = i.tenant_scope and a.intent_id = i.intent_id and a.part = 'answer' \
         and i.changed and i.status = 'completed' \
    where i.tenant_scope = ?1 and i.run_id = ?2 \
      and (i.changed or i.status in ('pending', 'dead', 'quarantined')) \
    order by i.seq";

const ANSWER: &str = "\
    select r.status, a.status as answer_status, a.headers as answer_headers, \
           a.body as answer_body \
    from eec_run r left join eec_effect_body a \
      on a.tenant_scope = r.tenant_scope and a.intent_id = ?3 and a.part = 'answer' \
    where r.tenant_scope = ?1 and r.run_id = ?2";

/// Every statement, for the test of their plans.
#[cfg(test)]
pub const STATEMENTS: [&str; 7] = [
    TIMERS,
    TENANTS,
    CHANGED,
    CHANGED_OF_ALL,
    LOAD,
    INTENTS,
    ANSWER,
];

/// Runs that something happened to: timers; changed intents, of each tenant its share; and those of
/// all tenants in the order of their index.
pub async fn runs_due(
    connection: &mut SqliteConnection,
    now_ms: i64,
    from: &DuePlace,
    limit: u32,
) -> Result<RunsDue, StoreError> {
    let (due, tenant, run_id) = from.timer_columns();
    let timers = sqlx::query(TIMERS)
        .bind(now_ms)
        .bind(limit)
        .bind(instant_ms(due))
        .bind(tenant)
        .bind(run_id);
    let timers = statement::rows(connection, timers).await?;
    let timer =
        |row: &SqliteRow| Ok((Cells::new(row, "eec_run").instant("due_at")?, run_key(row)?));
    let timers: Result<_, StoreError> = timers.iter().map(timer).collect();
    let tenants = sqlx::query_scalar(TENANTS).bind(limit);
    let tenants: Vec<String> = tenants
        .fetch_all(&mut *connection)
        .await
        .map_err(failure::before)?;
    let each = limit / u32::try_from(tenants.len()).unwrap_or(limit).max(1);
    let mut shares = Vec::new();
    for tenant in &tenants {
        let share = sqlx::query(CHANGED).bind(tenant).bind(each.max(1));
        shares.extend(keys(connection, share).await?);
    }
    let (tenant, run_id) = from.changed_columns();
    let changes = sqlx::query(CHANGED_OF_ALL)
        .bind(due::changes_max(limit))
        .bind(tenant)
        .bind(run_id);
    let found = Found {
        timers: timers?,
        shares,
        changes: keys(connection, changes).await?,
    };
    Ok(due::in_turn(found, from, limit))
}

/// Reads runs. The caller holds one snapshot over all of it.
pub async fn load_runs(
    connection: &mut SqliteConnection,
    now_ms: i64,
    keys: &[RunKey],
) -> Result<Vec<Option<LoadedRun>>, StoreError> {
    let mut loaded = Vec::with_capacity(keys.len());
    for key in keys {
        let row = of_run(LOAD, key).bind(now_ms);
        let Some(row) = statement::row(connection, row).await? else {
            loaded.push(None);
            continue;
        };
        let intents = statement::rows(connection, of_run(INTENTS, key)).await?;
        loaded.push(Some(LoadedRun {
            run: run(&row)?,
            intents: intents.iter().map(seen).collect::<Result<_, _>>()?,
            timer_over: Cells::new(&row, "eec_run").get("timer_over")?,
        }));
    }
    Ok(loaded)
}

/// How a run stands, with its first intent's answer.
pub async fn run_answer(
    connection: &mut SqliteConnection,
    key: &RunKey,
) -> Result<Option<(RunStatus, Option<Recorded>)>, StoreError> {
    let row = of_run(ANSWER, key).bind(key.id.intent(1).0);
    let row = statement::row(connection, row).await?;
    row.map(|row| Ok((run_status(&row)?, answer(&row)?)))
        .transpose()
}

/// A statement with a run's key as its first two parameters.
pub fn of_run<'q>(sql: &'static str, key: &'q RunKey) -> Query<'q> {
    sqlx::query(sql).bind(key.tenant.as_str()).bind(key.id.0)
}

fn instant_ms(instant: OffsetDateTime) -> i64 {
    i64::try_from(instant.unix_timestamp_nanos() / 1_000_000).unwrap_or(i64::MAX)
}

async fn keys(
    connection: &mut SqliteConnection,
    query: Query<'_>,
) -> Result<Vec<RunKey>, StoreError> {
    let rows = statement::rows(connection, query).await?;
    rows.iter().map(run_key).collect()
}
