//! What operators find and do. Whatever an operator changes is in the audit log by the same commit.

use std::slice;
use std::time::Duration;

use sqlx::{QueryBuilder, SqliteConnection};

use super::batches;
use super::failure;
use super::records::{self, of_key};
use super::rows::{self, Cells, DECISIONS, held_until, record_columns};
use super::statement;
use crate::domain::record::{Completion, DecisionId, Found, Lease, Record, State};
use crate::domain::scope::RecordKey;
use crate::ids;
use crate::store::{Audit, PURGED, Resolved, Search, StoreError, Verdict};

const FIND: &str = concat!(
    "select ",
    record_columns!(),
    ", d.answer_status, ",
    held_until!(
        "r.status = 'completed' and r.valid_until <= n.ms",
        "n.ms",
        "r.tenant_scope",
        "r.decision_id",
        "r.valid_for_ms"
    ),
    " as held_until from (select "
);

const IN_RECORDS: &str = " as ms) n cross join eec_routing_idempotency r \
       left join eec_routing_decision d \
         on d.tenant_scope = r.tenant_scope and d.decision_id = r.decision_id where true";

const IS_HELD: &str = "\
    select exists (select 1 from eec_run \
                   where tenant_scope = ?1 and run_id = ?2 and holds_record \
                     and ended_at is null)";

const NEVER_HAPPENED: &str = "\
    update eec_routing_idempotency \
    set status = 'failed_before_commit', maybe_sent = 0, lease_expires_at = null, \
    valid_until = ?4 + valid_for_ms \
    where tenant_scope = ?1 and pool_id = ?2 and idempotency_key = ?3";

const DELETE_RECORD: &str = "\
    delete from eec_routing_idempotency \
    where tenant_scope = ?1 and pool_id = ?2 and idempotency_key = ?3";

const DELETE_DECISION: &str =
    "delete from eec_routing_decision where tenant_scope = ?1 and decision_id = ?2";

const NOTE: &str = "\
    insert into eec_operator_audit \
        (tenant_scope, pool_id, idempotency_key, audit_id, at, operator, action, reason) \
    values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)";

/// Finds records.
pub async fn find(
    connection: &mut SqliteConnection,
    now_ms: i64,
    search: &Search,
) -> Result<Vec<Found>, StoreError> {
    let mut query = QueryBuilder::new(FIND);
    query.push_bind(now_ms).push(IN_RECORDS);
    rows::of_tenant(&mut query, "r.tenant_scope", search.tenant.as_deref());
    if let Some(pool) = &search.pool {
        query.push(" and r.pool_id = ").push_bind(pool);
    }
    if let Some(prefix) = &search.key_prefix {
        query.push(" and substr(r.idempotency_key, 1, length(");
        query.push_bind(prefix).push(")) = ").push_bind(prefix);
    }
    if let Some(status) = &search.status {
        query.push(" and r.status = ").push_bind(status);
    }
    if let Some(than) = search.older_than {
        let before_ms = now_ms.saturating_sub(rows::span_ms(than));
        query.push(" and r.reserved_at <= ").push_bind(before_ms);
    }
    if let Some(after) = &search.after {
        query.push(" and (r.tenant_scope, r.pool_id, r.idempotency_key) > (");
        query.push_bind(after.tenant.as_str()).push(", ");
        query.push_bind(after.pool.as_str()).push(", ");
        query.push_bind(after.key.as_str()).push(")");
    }
    query.push(" order by r.tenant_scope, r.pool_id, r.idempotency_key limit ");
    query.push_bind(search.limit);
    let found = statement::rows(connection, query.build()).await?;
    let found = found.iter().map(|row| {
        let cells = Cells::new(row, DECISIONS);
        let answered = cells.find::<i64>("answer_status")?.is_some();
        Ok(Found {
            record: rows::record(row, now_ms)?,
            answer_status: answered
                .then(|| cells.status("answer_status"))
                .transpose()?,
        })
    });
    found.collect()
}

/// Resolves a record.
pub async fn resolve(
    connection: &mut SqliteConnection,
    now_ms: i64,
    key: &RecordKey,
    verdict: &Verdict,
    owner_time_max: Duration,
    audit: &Audit,
) -> Result<Resolved, StoreError> {
    let Some(record) = records::look_up_one(connection, now_ms, key).await? else {
        return Ok(Resolved::NoRecord);
    };
    let open = matches!(
        record.state,
        State::OutcomeUnknown | State::Pending(Lease::Over | Lease::Unbounded)
    );
    match verdict {
        Verdict::Happened(completion) => {
            if is_sent_again(&record, completion) {
                return Ok(Resolved::Done);
            }
            if !open || completion.key != *key || completion.token != record.token {
                return Ok(Resolved::WrongState);
            }
            let one = slice::from_ref(&**completion);
            let committed = batches::complete(connection, now_ms, one).await?;
            if committed == [None] {
                return Ok(Resolved::WrongState);
            }
        }
        Verdict::NeverHappened => {
            if !open {
                return Ok(Resolved::WrongState);
            }
            let wait = owner_time_max.saturating_sub(record.reserved_ago);
            if !wait.is_zero() {
                return Ok(Resolved::TooEarly { wait });
            }
            let done = of_key(NEVER_HAPPENED, key).bind(now_ms);
            statement::run(connection, done).await?;
        }
    }
    note(connection, now_ms, key, verdict.word(), audit).await?;
    Ok(Resolved::Done)
}

/// Deletes one record that is not open, with its decision.
pub async fn purge_one(
    connection: &mut SqliteConnection,
    now_ms: i64,
    key: &RecordKey,
    audit: &Audit,
) -> Result<Resolved, StoreError> {
    let Some(record) = records::look_up_one(connection, now_ms, key).await? else {
        return Ok(Resolved::NoRecord);
    };
    match record.state {
        State::Pending(_) | State::OutcomeUnknown => return Ok(Resolved::WrongState),
        State::FailedBeforeCommit { .. } => {}
        State::Completed(id, _) if is_held(connection, key, id).await? => {
            return Ok(Resolved::WrongState);
        }
        State::Completed(id, _) => delete_decision(connection, key, id).await?,
    }
    statement::run(connection, of_key(DELETE_RECORD, key)).await?;
    note(connection, now_ms, key, PURGED, audit).await?;
    Ok(Resolved::Done)
}

fn is_sent_again(record: &Record, completion: &Completion) -> bool {
    matches!(record.state, State::Completed(id, _) if id == completion.decision_id)
}

/// Whether the decision's run goes on and holds its record.
async fn is_held(
    connection: &mut SqliteConnection,
    key: &RecordKey,
    id: DecisionId,
) -> Result<bool, StoreError> {
    sqlx::query_scalar(IS_HELD)
        .bind(key.tenant.as_str())
        .bind(id.0)
        .fetch_one(connection)
        .await
        .map_err(failure::before)
}

async fn delete_decision(
    connection: &mut SqliteConnection,
    key: &RecordKey,
    id: DecisionId,
) -> Result<(), StoreError> {
    let deleted = sqlx::query(DELETE_DECISION)
        .bind(key.tenant.as_str())
        .bind(id.0);
    statement::run(connection, deleted).await?;
    Ok(())
}

async fn note(
    connection: &mut SqliteConnection,
    now_ms: i64,
    key: &RecordKey,
    action: &'static str,
    audit: &Audit,
) -> Result<(), StoreError> {
    let noted = of_key(NOTE, key)
        .bind(ids::audit_id())
        .bind(now_ms)
        .bind(&audit.operator)
        .bind(action)
        .bind(&audit.reason);
    statement::run(connection, noted).await?;
    Ok(())
}
