//! Records and decisions: what owners and the gateway's waiters ask for.
//!
//! Every function runs inside a transaction of the writer, except those that only read.

use sqlx::SqliteConnection;
use sqlx::sqlite::SqliteRow;

use super::failure::{self, Stage};
use super::rows::{self, Cells, RECORDS, record_columns};
use crate::domain::fingerprint::Fingerprint;
use crate::domain::record::{
    AttemptToken, Claim, Claimed, Committed, Completion, DecisionId, GenerationId, GiveUp,
    Heartbeat, Record, Release, Released, Reserved, State, StoredDecision,
};
use crate::domain::scope::{RecordKey, TenantScope};
use crate::store::StoreError;

type Query<'q> = sqlx::query::Query<'q, sqlx::Sqlite, sqlx::sqlite::SqliteArguments>;

const INSERT: &str = "\
    insert into eec_routing_idempotency \
        (tenant_scope, pool_id, idempotency_key, status, attempt_token, generation_id, \
         fingerprint, fingerprint_version, lease_ms, valid_for_ms, tombstone_for_ms, on_unknown, \
         lease_expires_at, created_at, reserved_at) \
    values (?1, ?2, ?3, 'pending', ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12 + ?8, ?12, ?12) \
    on conflict (tenant_scope, pool_id, idempotency_key) do nothing";

const RECLAIM: &str = "\
    update eec_routing_idempotency \
    set status = 'pending', attempt_token = ?4, \
        generation = generation + (status = 'completed'), \
        generation_id = iif(status = 'completed', ?5, generation_id), \
        maybe_sent = iif(status = 'completed', 0, maybe_sent), \
        fingerprint = ?6, fingerprint_version = ?7, \
        lease_ms = ?8, valid_for_ms = ?9, tombstone_for_ms = ?10, on_unknown = ?11, \
        lease_expires_at = ?12 + ?8, reserved_at = ?12, \
        awaited = 0, decision_id = null, valid_until = null \
    where tenant_scope = ?1 and pool_id = ?2 and idempotency_key = ?3 and attempt_token = ?13 \
      and (status = 'failed_before_commit' \
           or status = 'completed' and decision_id is not null \
              and valid_until + tombstone_for_ms <= ?12) \
    returning generation, generation_id";

const LOOK_UP: &str = concat!(
    "select ",
    record_columns!(),
    " from eec_routing_idempotency r \
      where r.tenant_scope = ?1 and r.pool_id = ?2 and r.idempotency_key = ?3"
);

const HEARTBEAT: &str = "\
    update eec_routing_idempotency set lease_expires_at = ?5 + ?6 \
    where tenant_scope = ?1 and pool_id = ?2 and idempotency_key = ?3 and attempt_token = ?4 \
      and status = 'pending'";

const COMPLETE: &str = "\
    update eec_routing_idempotency \
    set status = 'completed', decision_id = ?5, valid_until = ?6 + valid_for_ms, \
        lease_expires_at = null \
    where tenant_scope = ?1 and pool_id = ?2 and idempotency_key = ?3 and attempt_token = ?4 \
      and status in ('pending', 'outcome_unknown', 'failed_before_commit') \
    returning generation_id, valid_until, valid_for_ms";

const COMPLETED: &str = "\
    select generation_id, valid_until, valid_for_ms from eec_routing_idempotency \
    where tenant_scope = ?1 and pool_id = ?2 and idempotency_key = ?3 \
      and status = 'completed' and decision_id = ?4";

const DECIDE: &str = "\
    insert into eec_routing_decision \
        (tenant_scope, pool_id, idempotency_key, decision_id, generation_id, decided_by, \
         created_at, valid_until, answer_status, answer_headers, cors_origin, cors_headers, \
         answer_body) \
    values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13)";

const DECISION: &str = "\
    select decision_id, created_at, valid_until, decided_by, answer_status, answer_headers, \
           cors_origin, cors_headers, answer_body \
    from eec_routing_decision where tenant_scope = ?1 and decision_id = ?2";

const FAIL: &str = "\
    update eec_routing_idempotency \
    set status = 'failed_before_commit', maybe_sent = max(maybe_sent, ?5), \
        valid_until = ?6 + valid_for_ms, lease_expires_at = null \
    where tenant_scope = ?1 and pool_id = ?2 and idempotency_key = ?3 and attempt_token = ?4 \
      and (status = 'pending' or ?7 and status = 'outcome_unknown')";

const HOLD: &str = "\
    update eec_routing_idempotency set status = 'outcome_unknown', lease_expires_at = null \
    where tenant_scope = ?1 and pool_id = ?2 and idempotency_key = ?3 and attempt_token = ?4 \
      and status = 'pending'";

/// Every statement, for the test of their plans.
#[cfg(test)]
pub const STATEMENTS: [&str; 9] = [
    INSERT, RECLAIM, LOOK_UP, HEARTBEAT, COMPLETE, COMPLETED, DECISION, FAIL, HOLD,
];

/// Inserts each claim where no row is, and looks at the row where one is. No row vanishes between
/// the two: nobody else writes.
pub async fn reserve(
    connection: &mut SqliteConnection,
    now_ms: i64,
    claims: &[Claim],
) -> Result<Vec<Reserved>, StoreError> {
    let mut reserved = Vec::with_capacity(claims.len());
    for claim in claims {
        let inserted = stamped(INSERT, claim, now_ms)
            .execute(&mut *connection)
            .await;
        reserved.push(
            if failure::sort(inserted, Stage::Before)?.rows_affected() == 1 {
                Reserved::Won(Claimed {
                    generation: 1,
                    generation_id: claim.generation_id,
                })
            } else {
                match look_up_one(connection, now_ms, &claim.key).await? {
                    None => Reserved::Vanished,
                    Some(record) => owned(&record, claim.token)
                        .map_or_else(|| Reserved::Lost(Box::new(record)), Reserved::Won),
                }
            },
        );
    }
    Ok(reserved)
}

/// Claims a row that is reclaimable and bears `seen`.
pub async fn reclaim(
    connection: &mut SqliteConnection,
    now_ms: i64,
    claim: &Claim,
    seen: AttemptToken,
) -> Result<Option<Claimed>, StoreError> {
    let reclaimed = stamped(RECLAIM, claim, now_ms)
        .bind(seen.0)
        .fetch_optional(&mut *connection)
        .await;
    if let Some(row) = failure::sort(reclaimed, Stage::Before)? {
        let cells = Cells::new(&row, RECORDS);
        return Ok(Some(Claimed {
            generation: cells.get("generation")?,
            generation_id: GenerationId(cells.id("generation_id")?),
        }));
    }
    // It may have happened already, and only the reply was lost.
    let record = look_up_one(connection, now_ms, &claim.key).await?;
    Ok(record.and_then(|record| owned(&record, claim.token)))
}

/// Extends leases.
pub async fn heartbeat(
    connection: &mut SqliteConnection,
    now_ms: i64,
    beats: &[Heartbeat],
) -> Result<Vec<bool>, StoreError> {
    let mut extended = Vec::with_capacity(beats.len());
    for beat in beats {
        let done = of_owner(HEARTBEAT, &beat.key, beat.token)
            .bind(now_ms)
            .bind(rows::span_ms(beat.lease))
            .execute(&mut *connection)
            .await;
        extended.push(failure::sort(done, Stage::Before)?.rows_affected() == 1);
    }
    Ok(extended)
}

/// Commits decisions.
pub async fn complete(
    connection: &mut SqliteConnection,
    now_ms: i64,
    completions: &[Completion],
) -> Result<Vec<Option<Committed>>, StoreError> {
    let mut committed = Vec::with_capacity(completions.len());
    for completion in completions {
        committed.push(complete_one(connection, now_ms, completion).await?);
    }
    Ok(committed)
}

/// Commits one decision. `None`: stale.
pub async fn complete_one(
    connection: &mut SqliteConnection,
    now_ms: i64,
    completion: &Completion,
) -> Result<Option<Committed>, StoreError> {
    let id = completion.decision_id;
    let updated = of_owner(COMPLETE, &completion.key, completion.token)
        .bind(id.0)
        .bind(now_ms)
        .fetch_optional(&mut *connection)
        .await;
    if let Some(row) = failure::sort(updated, Stage::Before)? {
        let committed = committed(&row, id)?;
        decide(connection, completion, &row, now_ms).await?;
        return Ok(Some(committed));
    }
    let completed = of_key(COMPLETED, &completion.key)
        .bind(id.0)
        .fetch_optional(&mut *connection)
        .await;
    let completed = failure::sort(completed, Stage::Before)?;
    completed.map(|row| committed(&row, id)).transpose()
}

/// Gives rows up.
pub async fn release(
    connection: &mut SqliteConnection,
    now_ms: i64,
    releases: &[Release],
) -> Result<Vec<Option<Released>>, StoreError> {
    let mut done = Vec::with_capacity(releases.len());
    for release in releases {
        let taken = release_one(connection, now_ms, release).await?;
        done.push(taken.then_some(Released { awaited: false }));
    }
    Ok(done)
}

/// Looks at records.
pub async fn look_up(
    connection: &mut SqliteConnection,
    now_ms: i64,
    keys: &[RecordKey],
) -> Result<Vec<Option<Record>>, StoreError> {
    let mut found = Vec::with_capacity(keys.len());
    for key in keys {
        found.push(look_up_one(connection, now_ms, key).await?);
    }
    Ok(found)
}

/// Looks at one record.
pub async fn look_up_one(
    connection: &mut SqliteConnection,
    now_ms: i64,
    key: &RecordKey,
) -> Result<Option<Record>, StoreError> {
    let row = of_key(LOOK_UP, key).fetch_optional(connection).await;
    let row = failure::sort(row, Stage::Before)?;
    row.map(|row| rows::record(&row, now_ms)).transpose()
}

/// Reads a decision.
pub async fn decision(
    connection: &mut SqliteConnection,
    now_ms: i64,
    tenant: &TenantScope,
    id: DecisionId,
) -> Result<Option<StoredDecision>, StoreError> {
    let row = sqlx::query(DECISION)
        .bind(tenant.as_str())
        .bind(id.0)
        .fetch_optional(connection)
        .await;
    let row = failure::sort(row, Stage::Before)?;
    row.map(|row| rows::decision(&row, now_ms)).transpose()
}

/// A statement with a record's key as its first three parameters.
pub fn of_key<'q>(sql: &'static str, key: &'q RecordKey) -> Query<'q> {
    sqlx::query(sql)
        .bind(key.tenant.as_str())
        .bind(key.pool.as_str())
        .bind(key.key.as_str())
}

/// The same, with its owner's token as the fourth.
fn of_owner<'q>(sql: &'static str, key: &'q RecordKey, token: AttemptToken) -> Query<'q> {
    of_key(sql, key).bind(token.0)
}

/// The same, with all that a claim stamps on its row, and the present, as twelve in all.
fn stamped<'q>(sql: &'static str, claim: &'q Claim, now_ms: i64) -> Query<'q> {
    let fingerprint = claim.fingerprint.as_ref();
    of_owner(sql, &claim.key, claim.token)
        .bind(claim.generation_id.0)
        .bind(fingerprint.map(|Fingerprint { hash, .. }| &hash[..]))
        .bind(fingerprint.map(|Fingerprint { version, .. }| version))
        .bind(rows::span_ms(claim.terms.lease))
        .bind(rows::span_ms(claim.terms.valid_for))
        .bind(rows::span_ms(claim.terms.tombstone_for))
        .bind(claim.terms.on_unknown.word())
        .bind(now_ms)
}

/// What the claim with that token has, if the record is still its own.
fn owned(record: &Record, token: AttemptToken) -> Option<Claimed> {
    let own = record.token == token && matches!(record.state, State::Pending(_));
    own.then_some(Claimed {
        generation: record.generation,
        generation_id: record.generation_id,
    })
}

/// What a completed row says of its commit. The row alone tells it, so the answer is the same after
/// the decision itself was purged.
fn committed(row: &SqliteRow, decision_id: DecisionId) -> Result<Committed, StoreError> {
    let cells = Cells::new(row, RECORDS);
    let valid_until_ms: i64 = cells.get("valid_until")?;
    let valid_for_ms: i64 = cells.get("valid_for_ms")?;
    let created_at_ms = valid_until_ms.saturating_sub(valid_for_ms);
    Ok(Committed {
        decision_id,
        created_at: rows::instant(created_at_ms, RECORDS, "valid_for_ms")?,
        valid_until: rows::instant(valid_until_ms, RECORDS, "valid_until")?,
        awaited: false,
    })
}

/// Inserts the decision of a row that was just completed.
async fn decide(
    connection: &mut SqliteConnection,
    completion: &Completion,
    completed: &SqliteRow,
    now_ms: i64,
) -> Result<(), StoreError> {
    let cells = Cells::new(completed, RECORDS);
    let recorded = &completion.recorded;
    let cors = recorded.cors.as_ref();
    let inserted = of_key(DECIDE, &completion.key)
        .bind(completion.decision_id.0)
        .bind(cells.id("generation_id")?)
        .bind(&completion.decided_by)
        .bind(now_ms)
        .bind(cells.get::<i64>("valid_until")?)
        .bind(recorded.status)
        .bind(recorded.headers.as_bytes())
        .bind(cors.map(|cors| &cors.origin[..]))
        .bind(cors.map(|cors| cors.headers.as_bytes()))
        .bind(recorded.body.as_deref())
        .execute(connection)
        .await;
    failure::sort(inserted, Stage::Before).map(|_| ())
}

/// Whether the release was taken, now or before.
async fn release_one(
    connection: &mut SqliteConnection,
    now_ms: i64,
    release: &Release,
) -> Result<bool, StoreError> {
    let maybe_sent = release.give_up == GiveUp::Redrive;
    let done = match release.give_up {
        GiveUp::Hold => of_owner(HOLD, &release.key, release.token),
        GiveUp::NotSent | GiveUp::Answered | GiveUp::Redrive => {
            of_owner(FAIL, &release.key, release.token)
                .bind(maybe_sent)
                .bind(now_ms)
                .bind(release.give_up == GiveUp::NotSent)
        }
    };
    let done = done.execute(&mut *connection).await;
    if failure::sort(done, Stage::Before)?.rows_affected() == 1 {
        return Ok(true);
    }
    let record = look_up_one(connection, now_ms, &release.key).await?;
    let record = record.filter(|record| record.token == release.token);
    Ok(record.is_some_and(|record| match record.state {
        State::OutcomeUnknown => release.give_up == GiveUp::Hold,
        State::FailedBeforeCommit { maybe_sent: marked } => {
            release.give_up != GiveUp::Hold && (marked || !maybe_sent)
        }
        State::Pending(_) | State::Completed(..) => false,
    }))
}
