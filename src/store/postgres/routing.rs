//! Records on the request path. Each operation is one statement for a whole batch, and where some
//! of the batch got nothing from it, a second one that tells why.
//!
//! The second statement is never part of the first: `now()` and the snapshot of a statement are
//! its own start, and it must see what the others have committed meanwhile.

use std::collections::HashSet;

use sqlx::postgres::PgRow;
use uuid::Uuid;

use super::batch::{ANY_TOKEN, bind_key, bind_keys, column, doubt_after, in_doubt, rounds};
use super::remembered::{RECLAIM, RECLAIM_REMEMBERED, RESERVE, RESERVE_REMEMBERED};
use super::rows::{Cells, RECORDS, decision, record, record_columns, to_ms, us_from_now, valid_us};
use super::run::{Repeat, Runner, Statement, fixed};
use crate::domain::record::{
    AttemptToken, Claim, Claimed, DecisionId, GenerationId, GiveUp, Heartbeat, Record, Release,
    Released, Reserved, State, StoredDecision,
};
use crate::domain::scope::{RecordKey, TenantScope};
use crate::store::StoreError;

const LOOK_UP: &str = concat!(
    "select b.n, ",
    record_columns!(),
    " from unnest($1::text[], $2::text[], $3::text[]) with ordinality \
        as b(tenant_scope, pool_id, idempotency_key, n) \
    join eec_routing_idempotency r on r.tenant_scope = b.tenant_scope \
        and r.pool_id = b.pool_id and r.idempotency_key = b.idempotency_key"
);

const RECLAIMED_BEFORE: &str = "\
    select generation, generation_id from eec_routing_idempotency \
    where tenant_scope = $1 and pool_id = $2 and idempotency_key = $3 \
        and attempt_token = $4 and status = 'pending'";

const HEARTBEAT: &str = "\
    update eec_routing_idempotency r \
    set lease_expires_at = now() + b.lease_ms * interval '1 ms' \
    from unnest($1::text[], $2::text[], $3::text[], $4::uuid[], $5::bigint[]) with ordinality \
        as b(tenant_scope, pool_id, idempotency_key, attempt_token, lease_ms, n) \
    where r.tenant_scope = b.tenant_scope and r.pool_id = b.pool_id \
        and r.idempotency_key = b.idempotency_key and r.attempt_token = b.attempt_token \
        and r.status = 'pending' \
    returning b.n";

const RELEASE: &str = "\
    update eec_routing_idempotency r \
    set status = b.target, maybe_sent = r.maybe_sent or b.maybe_sent, \
        valid_until = now() + r.valid_for_ms * interval '1 ms' \
    from unnest($1::text[], $2::text[], $3::text[], $4::uuid[], $5::text[], $6::bool[], \
        $7::bool[]) with ordinality as b(tenant_scope, pool_id, idempotency_key, attempt_token, \
        target, maybe_sent, from_unknown, n) \
    where r.tenant_scope = b.tenant_scope and r.pool_id = b.pool_id \
        and r.idempotency_key = b.idempotency_key and r.attempt_token = b.attempt_token \
        and (r.status = 'pending' or (b.from_unknown and r.status = 'outcome_unknown')) \
    returning b.n, r.awaited";

const RELEASED_BEFORE: &str = "\
    select b.n, r.awaited \
    from unnest($1::text[], $2::text[], $3::text[], $4::uuid[], $5::text[], $6::bool[]) \
        with ordinality \
        as b(tenant_scope, pool_id, idempotency_key, attempt_token, target, maybe_sent, n) \
    join eec_routing_idempotency r on r.tenant_scope = b.tenant_scope \
        and r.pool_id = b.pool_id and r.idempotency_key = b.idempotency_key \
        and r.attempt_token = b.attempt_token and r.status = b.target \
        and (r.maybe_sent or not b.maybe_sent)";

const MARK_AWAITED: &str = "\
    update eec_routing_idempotency set awaited = true \
    where tenant_scope = $1 and pool_id = $2 and idempotency_key = $3 \
        and status = 'pending' and not awaited";

const DECISION: &str = concat!(
    "select created_at, valid_until, decided_by, answer_status, answer_headers, cors_origin, \
        cors_headers, answer_body, ",
    valid_us!(
        "d.valid_until <= now()",
        "d.valid_until",
        "d.tenant_scope",
        "d.decision_id",
        "(d.valid_until - d.created_at)"
    ),
    " as valid_us from eec_routing_decision d where tenant_scope = $1 and decision_id = $2"
);

impl Runner {
    pub(super) async fn reserve(&self, claims: &[Claim]) -> Result<Vec<Reserved>, StoreError> {
        let rounds = rounds(claims, |claim| (&claim.key, ANY_TOKEN));
        // Of several claims for one record only the first can win; the others find its row.
        let Some(first) = rounds.first() else {
            return Ok(Vec::new());
        };
        let inserted = self.rows(Repeat::Safe, || reserving(claims, first)).await?;
        let mut won = HashSet::new();
        for row in &inserted {
            won.insert(Cells::new(row, RECORDS).get::<Uuid>("attempt_token")?);
        }
        let mut lost = rounds.concat();
        // A repeat of a claim that won bears the same token, and finds its own row.
        let repeats = lost.split_off(first.len());
        lost.retain(|index| !won.contains(&claims[*index].token.0));
        lost.extend(repeats);
        let keys: Vec<&RecordKey> = lost.iter().map(|index| &claims[*index].key).collect();
        let found = self.records(&keys).await.map_err(in_doubt)?;
        let new = |claim: &Claim| {
            Reserved::Won(Claimed {
                generation: 1,
                generation_id: claim.generation_id,
            })
        };
        let mut reserved: Vec<Reserved> = claims.iter().map(new).collect();
        for (index, found) in lost.into_iter().zip(found) {
            reserved[index] = lost_to(&claims[index], found);
        }
        Ok(reserved)
    }

    pub(super) async fn look_up(
        &self,
        keys: &[RecordKey],
    ) -> Result<Vec<Option<Record>>, StoreError> {
        self.records(&keys.iter().collect::<Vec<_>>()).await
    }

    async fn records(&self, keys: &[&RecordKey]) -> Result<Vec<Option<Record>>, StoreError> {
        let mut found = vec![None; keys.len()];
        if keys.is_empty() {
            return Ok(found);
        }
        let rows = self.rows(Repeat::Safe, || {
            bind_keys(fixed(LOOK_UP), &keys.iter().copied())
        });
        for row in &rows.await? {
            let index = nth(row)?;
            found[index] = Some(record(row, keys[index].clone())?);
        }
        Ok(found)
    }

    pub(super) async fn reclaim(
        &self,
        claim: &Claim,
        seen: AttemptToken,
    ) -> Result<Option<Claimed>, StoreError> {
        let rows = self.rows(Repeat::Safe, || {
            let sql = claim.request_id.map_or(RECLAIM, |_| RECLAIM_REMEMBERED);
            let statement = bind_key(fixed(sql), &claim.key)
                .bind(seen.0)
                .bind(claim.token.0)
                .bind(claim.generation_id.0)
                .bind(
                    claim
                        .fingerprint
                        .map(|fingerprint| fingerprint.hash.to_vec()),
                )
                .bind(claim.fingerprint.map(|fingerprint| fingerprint.version))
                .bind(to_ms(claim.terms.lease))
                .bind(to_ms(claim.terms.valid_for))
                .bind(to_ms(claim.terms.tombstone_for))
                .bind(claim.terms.on_unknown.word());
            match claim.request_id {
                Some(id) => statement.bind(id),
                None => statement,
            }
        });
        let mut rows = rows.await?;
        if rows.is_empty() {
            // Won before, and only the reply was lost?
            let before = self.rows(Repeat::Safe, || {
                bind_key(fixed(RECLAIMED_BEFORE), &claim.key).bind(claim.token.0)
            });
            rows = before.await.map_err(in_doubt)?;
        }
        let Some(row) = rows.first() else {
            return Ok(None);
        };
        let cells = Cells::new(row, RECORDS);
        Ok(Some(Claimed {
            generation: cells.get("generation")?,
            generation_id: GenerationId(cells.get("generation_id")?),
        }))
    }

    pub(super) async fn heartbeat(&self, beats: &[Heartbeat]) -> Result<Vec<bool>, StoreError> {
        let mut held = vec![false; beats.len()];
        for (nth_round, round) in rounds(beats, |b| (&b.key, b.token)).iter().enumerate() {
            let beats = || round.iter().map(|index| &beats[*index]);
            let rows = self.rows(Repeat::Safe, || {
                bind_keys(fixed(HEARTBEAT), &beats().map(|beat| &beat.key))
                    .bind(column(beats(), |beat| beat.token.0))
                    .bind(column(beats(), |beat| to_ms(beat.lease)))
            });
            for row in &rows.await.map_err(doubt_after(nth_round))? {
                held[round[nth(row)?]] = true;
            }
        }
        Ok(held)
    }

    pub(super) async fn release(
        &self,
        releases: &[Release],
    ) -> Result<Vec<Option<Released>>, StoreError> {
        let mut taken = vec![None; releases.len()];
        for (nth_round, round) in rounds(releases, |r| (&r.key, r.token)).iter().enumerate() {
            let rows = self.rows(Repeat::Safe, || {
                let certain = |index: &usize| releases[*index].give_up.is_certain();
                bind_releases(fixed(RELEASE), releases, round).bind(column(round.iter(), certain))
            });
            let rows = rows.await.map_err(doubt_after(nth_round))?;
            note_released(&rows, round, &mut taken)?;
            let missed: Vec<usize> = round
                .iter()
                .copied()
                .filter(|index| taken[*index].is_none())
                .collect();
            if !missed.is_empty() {
                let rows = self.rows(Repeat::Safe, || {
                    bind_releases(fixed(RELEASED_BEFORE), releases, &missed)
                });
                note_released(&rows.await.map_err(in_doubt)?, &missed, &mut taken)?;
            }
        }
        Ok(taken)
    }

    pub(super) async fn mark_awaited(&self, key: &RecordKey) -> Result<(), StoreError> {
        self.rows(Repeat::Safe, || bind_key(fixed(MARK_AWAITED), key))
            .await?;
        Ok(())
    }

    pub(super) async fn decision(
        &self,
        tenant: &TenantScope,
        id: DecisionId,
    ) -> Result<Option<StoredDecision>, StoreError> {
        let rows = self.rows(Repeat::Safe, || {
            fixed(DECISION).bind(tenant.as_str()).bind(id.0)
        });
        rows.await?.first().map(|row| decision(row, id)).transpose()
    }
}

/// What a claim is told that inserted nothing.
fn lost_to(claim: &Claim, found: Option<Record>) -> Reserved {
    match found {
        None => Reserved::Vanished,
        Some(record)
            if record.token == claim.token && matches!(record.state, State::Pending(_)) =>
        {
            Reserved::Won(Claimed {
                generation: record.generation,
                generation_id: record.generation_id,
            })
        }
        Some(record) => Reserved::Lost(Box::new(record)),
    }
}

/// Only claims that are to be remembered pay for that.
fn reserving(claims: &[Claim], round: &[usize]) -> Statement {
    let ids = round.iter().map(|index| claims[*index].request_id);
    if ids.clone().any(|id| id.is_some()) {
        bind_claims(fixed(RESERVE_REMEMBERED), claims, round).bind(ids.collect::<Vec<_>>())
    } else {
        bind_claims(fixed(RESERVE), claims, round)
    }
}

fn bind_claims(statement: Statement, claims: &[Claim], round: &[usize]) -> Statement {
    let claims = || round.iter().map(|index| &claims[*index]);
    let fingerprint = || claims().map(|claim| claim.fingerprint.as_ref());
    let terms = || claims().map(|claim| &claim.terms);
    bind_keys(statement, &claims().map(|claim| &claim.key))
        .bind(column(claims(), |claim| claim.token.0))
        .bind(column(claims(), |claim| claim.generation_id.0))
        .bind(column(fingerprint(), |made| {
            made.map(|made| &made.hash[..])
        }))
        .bind(column(fingerprint(), |made| made.map(|made| made.version)))
        .bind(column(terms(), |terms| to_ms(terms.lease)))
        .bind(column(terms(), |terms| to_ms(terms.valid_for)))
        .bind(column(terms(), |terms| to_ms(terms.tombstone_for)))
        .bind(column(terms(), |terms| terms.on_unknown.word()))
}

fn bind_releases(statement: Statement, releases: &[Release], round: &[usize]) -> Statement {
    let releases = || round.iter().map(|index| &releases[*index]);
    let target = |give_up| match give_up {
        GiveUp::Hold => "outcome_unknown",
        GiveUp::NotSent | GiveUp::Answered | GiveUp::Redrive => "failed_before_commit",
    };
    bind_keys(statement, &releases().map(|release| &release.key))
        .bind(column(releases(), |release| release.token.0))
        .bind(column(releases(), |release| target(release.give_up)))
        .bind(column(releases(), |release| {
            release.give_up == GiveUp::Redrive
        }))
}

fn note_released(
    rows: &[PgRow],
    round: &[usize],
    released: &mut [Option<Released>],
) -> Result<(), StoreError> {
    for row in rows {
        let awaited = Cells::new(row, RECORDS).get("awaited")?;
        released[round[nth(row)?]] = Some(Released { awaited });
    }
    Ok(())
}

/// Which of the arrays' elements a row belongs to. They are counted from 1.
pub(super) fn nth(row: &PgRow) -> Result<usize, StoreError> {
    let n: i64 = Cells::new(row, "unnest").get("n")?;
    Ok(usize::try_from(n - 1).unwrap_or_default())
}
