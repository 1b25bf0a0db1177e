//! What people look for: runs, their history, their attempts.

use sqlx::{QueryBuilder, SqliteConnection};

use super::load::of_run;
use super::rows::{attempt, line, run_columns, run_key, transition};
use crate::domain::run::{RunId, RunKey};
use crate::store::StoreError;
use crate::store::runs::{Attempt, RunLine, RunSearch, Transition};
use crate::store::sqlite::rows::of_tenant;
use crate::store::sqlite::statement;

const BY_ID: &str = "select tenant_scope, run_id from eec_run where run_id = ?1 limit 1";

const SHOW: &str = concat!(
    "select ",
    run_columns!(),
    " from eec_run r where r.tenant_scope = ?1 and r.run_id = ?2"
);

const FIND: &str = concat!("select ", run_columns!(), " from eec_run r where true");

const TRANSITIONS: &str = "\
    select seq, record_version, at, kind, step, detail, stamp from eec_run_transition \
    where tenant_scope = ?1 and run_id = ?2 and seq > ?3 order by seq limit ?4";

const ATTEMPTS: &str = "\
    select intent_id, stamp, try, status, worker, started_at, ended_at, outcome, answer_status, \
           diagnostic \
    from eec_run_attempt where tenant_scope = ?1 and run_id = ?2 \
    order by started_at desc, stamp desc limit ?3";

/// Every fixed statement, for the test of their plans.
#[cfg(test)]
pub const STATEMENTS: [&str; 4] = [BY_ID, SHOW, TRANSITIONS, ATTEMPTS];

/// Finds a run by its id alone.
pub async fn find_run(
    connection: &mut SqliteConnection,
    id: RunId,
) -> Result<Option<RunKey>, StoreError> {
    let row = statement::row(connection, sqlx::query(BY_ID).bind(id.0)).await?;
    row.as_ref().map(run_key).transpose()
}

/// Reads one run.
pub async fn show_run(
    connection: &mut SqliteConnection,
    key: &RunKey,
) -> Result<Option<RunLine>, StoreError> {
    let row = statement::row(connection, of_run(SHOW, key)).await?;
    row.as_ref().map(line).transpose()
}

/// Finds runs.
pub async fn find_runs(
    connection: &mut SqliteConnection,
    search: &RunSearch,
) -> Result<Vec<RunLine>, StoreError> {
    let mut query = QueryBuilder::new(FIND);
    of_tenant(&mut query, "r.tenant_scope", search.tenant.as_deref());
    if let Some(status) = search.status {
        // As text, so that the index of those that are stuck is found.
        query
            .push(" and r.status = '")
            .push(status.word())
            .push("'");
    }
    if let Some(workflow) = &search.workflow {
        query.push(" and r.workflow = ").push_bind(workflow);
    }
    if let Some(pool) = &search.pool {
        query.push(" and r.pool_id = ").push_bind(pool);
    }
    if let Some(after) = &search.after {
        query.push(" and (r.tenant_scope, r.run_id) > (");
        query.push_bind(after.tenant.as_str()).push(", ");
        query.push_bind(after.id.0).push(")");
    }
    query.push(" order by r.tenant_scope, r.run_id limit ");
    query.push_bind(search.limit);
    let found = statement::rows(connection, query.build()).await?;
    found.iter().map(line).collect()
}

/// The history after this number.
pub async fn transitions(
    connection: &mut SqliteConnection,
    key: &RunKey,
    after: i64,
    limit: u32,
) -> Result<Vec<Transition>, StoreError> {
    let found = of_run(TRANSITIONS, key).bind(after).bind(limit);
    let found = statement::rows(connection, found).await?;
    found.iter().map(transition).collect()
}

/// Claims of a run's intents, newest first.
pub async fn attempts(
    connection: &mut SqliteConnection,
    key: &RunKey,
    limit: u32,
) -> Result<Vec<Attempt>, StoreError> {
    let found = of_run(ATTEMPTS, key).bind(limit);
    let found = statement::rows(connection, found).await?;
    found.iter().map(attempt).collect()
}
