//! Records and decisions, one at a time; what is hot is in `batches`.

use std::slice;

use sqlx::SqliteConnection;

use super::batches;
use super::remembered;
use super::rows::{self, Cells, RECORDS, held_until, not_held};
use super::statement::{self, Query};
use crate::domain::fingerprint::Fingerprint;
use crate::domain::record::{
    AttemptToken, Claim, Claimed, DecisionId, GenerationId, GiveUp, Record, Release, Released,
    State, StoredDecision,
};
use crate::domain::scope::{RecordKey, TenantScope};
use crate::store::StoreError;

const RECLAIM: &str = concat!(
    "update eec_routing_idempotency \
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
              and valid_until + tombstone_for_ms <= ?12 and ",
    not_held!("?12", "?1", "decision_id", "valid_for_ms"),
    ") returning generation, generation_id"
);

const DECISION: &str = concat!(
    "select decision_id, created_at, valid_until, decided_by, answer_status, answer_headers, \
           cors_origin, cors_headers, answer_body, ",
    held_until!(
        "valid_until <= ?3",
        "?3",
        "?1",
        "?2",
        "(valid_until - created_at)"
    ),
    " as held_until from eec_routing_decision where tenant_scope = ?1 and decision_id = ?2"
);

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
pub const STATEMENTS: [&str; 4] = [RECLAIM, DECISION, FAIL, HOLD];

/// Claims a row that is reclaimable and bears `seen`.
pub async fn reclaim(
    connection: &mut SqliteConnection,
    now_ms: i64,
    claim: &Claim,
    seen: AttemptToken,
) -> Result<Option<Claimed>, StoreError> {
    // The id may have won a claim since it was looked up: it never wins a second one.
    if let Some(request_id) = claim.request_id {
        let first = remembered::find(connection, now_ms, &claim.key.tenant, request_id).await?;
        if first.is_some_and(|first| first.token != claim.token) {
            return Ok(None);
        }
    }
    let reclaimed = stamped(RECLAIM, claim, now_ms).bind(seen.0);
    if let Some(row) = statement::row(connection, reclaimed).await? {
        let cells = Cells::new(&row, RECORDS);
        let claimed = Claimed {
            generation: cells.get("generation")?,
            generation_id: GenerationId(cells.id("generation_id")?),
        };
        remembered::keep(connection, now_ms, claim, claimed).await?;
        return Ok(Some(claimed));
    }
    // It may have happened already, and only the reply was lost.
    let record = look_up_one(connection, now_ms, &claim.key).await?;
    Ok(record.and_then(|record| batches::owned(&record, claim.token)))
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

/// Looks at one record.
pub async fn look_up_one(
    connection: &mut SqliteConnection,
    now_ms: i64,
    key: &RecordKey,
) -> Result<Option<Record>, StoreError> {
    let found = batches::look_up(connection, now_ms, slice::from_ref(key)).await?;
    Ok(found.into_iter().next().flatten())
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
        .bind(now_ms);
    let row = statement::row(connection, row).await?;
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
                .bind(release.give_up.is_certain())
        }
    };
    if statement::run(connection, done).await? == 1 {
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
