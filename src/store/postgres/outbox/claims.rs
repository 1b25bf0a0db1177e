//! Intents that are due: found without locks, claimed by a guarded update.

use sqlx::postgres::PgRow;

use super::rows::{INTENTS, refused, sending};
use crate::domain::intent::{
    ClaimWish, ClaimedIntent, DEATHS_MAX, Destination, IntentClaimed, IntentId, IntentKey, Stamp,
    diagnostic,
};
use crate::domain::run::RunId;
use crate::domain::scope::TenantScope;
use crate::store::StoreError;
use crate::store::outbox::{ClaimBeat, Lane, LaneWish};
use crate::store::postgres::batch::{column, doubt_after, in_doubt, in_rounds};
use crate::store::postgres::routing::nth;
use crate::store::postgres::rows::{Cells, from_us, to_ms, us_from_now};
use crate::store::postgres::run::{Repeat, Runner, Statement, fixed};

/// From lane to lane by two look-ups in the index for each, however long their backlogs are.
const LANES: &str = "\
    with recursive lane as ( \
        (select tenant_scope, destination from eec_effect_intent \
         where due_at is not null and (tenant_scope, destination) > ($1, $2) \
         order by tenant_scope, destination limit 1) \
        union all \
        select n.tenant_scope, n.destination from lane l cross join lateral ( \
            select i.tenant_scope, i.destination from eec_effect_intent i \
            where i.due_at is not null \
                and (i.tenant_scope, i.destination) > (l.tenant_scope, l.destination) \
            order by i.tenant_scope, i.destination limit 1) n \
    ) \
    select l.tenant_scope, l.destination from lane l \
    where (select 1 from eec_effect_intent i where i.tenant_scope = l.tenant_scope \
            and i.destination = l.destination and i.due_at <= now() limit 1) is not null \
        and (select 1 from eec_destination_pause p where p.destination = l.destination) is null \
    limit $3";

const DUE: &str = "\
    select b.tenant_scope, d.intent_id \
    from unnest($1::text[], $2::text[], $3::bigint[]) with ordinality \
        as b(tenant_scope, destination, most, n) \
    cross join lateral ( \
        select i.intent_id, i.due_at from eec_effect_intent i \
        where i.tenant_scope = b.tenant_scope and i.destination = b.destination \
            and i.due_at <= now() \
        order by i.due_at limit b.most) d \
    order by b.n, d.due_at";

/// Whether a due intent gets another claim; else it is over. `$6`: deaths that are too many.
macro_rules! goes_on {
    () => {
        "(not i.withdrawn and (i.claim_token is null or i.deaths + 1 < $6))"
    };
}

/// What [`claimed`] reads of an intent `t` with its message `m`.
macro_rules! claimed_columns {
    () => {
        concat!(
            "t.n, t.status, t.run_id, t.seq, t.step, t.destination, t.idempotency_key, t.tries, \
             t.tries_before, t.faults, t.sending, ",
            us_from_now!("t.first_due_at"),
            " as first_due_us, m.body \
             from t left join eec_effect_body m on m.tenant_scope = t.tenant_scope \
                and m.intent_id = t.intent_id and m.part = 'message' and t.own"
        )
    };
}

/// `o` is the row as the statement found it: its claim, if there was one, is the one that was lost.
/// If another claim came between, the two differ and nothing happens.
const CLAIM: &str = concat!(
    "with t as ( \
        update eec_effect_intent i \
        set status = case when i.withdrawn then 'discarded' when ",
    goes_on!(),
    " then i.status else 'quarantined' end, \
            claim_token = case when ",
    goes_on!(),
    " then b.stamp end, \
            due_at = case when ",
    goes_on!(),
    " then now() + b.lease_ms * interval '1 ms' end, \
            ended_at = case when not ",
    goes_on!(),
    " then now() end, \
            changed = i.changed or not ",
    goes_on!(),
    ", tries = i.tries + ",
    goes_on!(),
    "::int, \
            deaths = i.deaths + (i.claim_token is not null)::int, \
            first_due_at = case when i.tries = i.tries_before then now() \
                else coalesce(i.first_due_at, now()) end, \
            outcome = case when i.claim_token is null then i.outcome else 'lost' end, \
            answer_status = case when i.claim_token is null then i.answer_status end, \
            diagnostic = case when i.claim_token is null then i.diagnostic end \
        from unnest($1::text[], $2::uuid[], $3::uuid[], $4::bigint[], $5::text[]) with ordinality \
            as b(tenant_scope, intent_id, stamp, lease_ms, worker, n) \
        join eec_effect_intent o on o.tenant_scope = b.tenant_scope \
            and o.intent_id = b.intent_id \
        where i.tenant_scope = b.tenant_scope and i.intent_id = b.intent_id \
            and i.status = 'pending' and i.due_at <= now() \
            and i.claim_token is not distinct from o.claim_token \
            and (select 1 from eec_destination_pause p where p.destination = i.destination) \
                is null \
            and (select 1 from eec_run_attempt a where a.tenant_scope = b.tenant_scope \
                    and a.run_id = i.run_id and a.stamp = b.stamp) is null \
        returning b.n, b.stamp, b.worker, o.claim_token as held, i.*, i.claim_token is not null \
            as own \
    ), lost as ( \
        update eec_run_attempt a set status = 'lost', ended_at = now() from t \
        where a.tenant_scope = t.tenant_scope and a.run_id = t.run_id and a.stamp = t.held \
            and a.status = 'open' \
    ), opened as ( \
        insert into eec_run_attempt (tenant_scope, run_id, intent_id, stamp, try, worker) \
        select tenant_scope, run_id, intent_id, stamp, tries, worker from t where own \
    ) \
    select t.own, ",
    claimed_columns!()
);

const CLAIMED_BEFORE: &str = concat!(
    "with t as ( \
        select b.n, i.*, i.status = 'pending' and i.claim_token = b.stamp as own \
        from unnest($1::text[], $2::uuid[], $3::uuid[]) with ordinality \
            as b(tenant_scope, intent_id, stamp, n) \
        join eec_effect_intent i on i.tenant_scope = b.tenant_scope \
            and i.intent_id = b.intent_id \
    ) \
    select coalesce(t.own, false) as own, ",
    claimed_columns!()
);

const EXTEND: &str = "\
    update eec_effect_intent i set due_at = now() + b.lease_ms * interval '1 ms' \
    from unnest($1::text[], $2::uuid[], $3::uuid[], $4::bigint[]) with ordinality \
        as b(tenant_scope, intent_id, stamp, lease_ms, n) \
    where i.tenant_scope = b.tenant_scope and i.intent_id = b.intent_id \
        and i.status = 'pending' and i.claim_token = b.stamp \
    returning b.n";

impl Runner {
    pub(super) async fn lanes(
        &self,
        after: Option<&Lane>,
        limit: u32,
    ) -> Result<Vec<Lane>, StoreError> {
        let (tenant, destination) = after.map_or(("", ""), |lane| {
            (lane.tenant.as_str(), lane.destination.0.as_str())
        });
        let rows = self.rows(Repeat::Safe, || {
            fixed(LANES)
                .bind(tenant.to_owned())
                .bind(destination.to_owned())
                .bind(i64::from(limit))
        });
        let lane = |row| {
            let cells = Cells::new(row, INTENTS);
            Ok(Lane {
                tenant: TenantScope::stored(cells.get("tenant_scope")?),
                destination: Destination(cells.get("destination")?),
            })
        };
        rows.await?.iter().map(lane).collect()
    }

    pub(super) async fn due(&self, wishes: &[LaneWish]) -> Result<Vec<IntentKey>, StoreError> {
        if wishes.is_empty() {
            return Ok(Vec::new());
        }
        let rows = self.rows(Repeat::Safe, || {
            let lanes = || wishes.iter().map(|wish| &wish.lane);
            fixed(DUE)
                .bind(column(lanes(), |lane| lane.tenant.as_str()))
                .bind(column(lanes(), |lane| &*lane.destination.0))
                .bind(column(wishes.iter(), |wish| i64::from(wish.limit)))
        });
        let key = |row| {
            let cells = Cells::new(row, INTENTS);
            Ok(IntentKey {
                tenant: TenantScope::stored(cells.get("tenant_scope")?),
                id: IntentId(cells.get("intent_id")?),
            })
        };
        rows.await?.iter().map(key).collect()
    }

    pub(super) async fn claim(
        &self,
        wishes: &[ClaimWish],
    ) -> Result<Vec<IntentClaimed>, StoreError> {
        let mut outcomes: Vec<_> = wishes.iter().map(|_| IntentClaimed::Lost).collect();
        let rounds = in_rounds(wishes.len(), |index| &wishes[index].key);
        // Of several wishes for one intent only the first can win.
        let Some(first) = rounds.first() else {
            return Ok(outcomes);
        };
        let rows = match self.claiming(wishes, first, diagnostic).await {
            Err(error) if refused(&error) => self.claiming(wishes, first, ascii).await,
            rows => rows,
        };
        let mut told = vec![false; wishes.len()];
        for row in &rows? {
            let index = first[nth(row)?];
            told[index] = true;
            outcomes[index] = outcome(row, &wishes[index]);
        }
        let missed: Vec<usize> = rounds
            .concat()
            .into_iter()
            .filter(|index| !told[*index])
            .collect();
        if !missed.is_empty() {
            let rows = self.rows(Repeat::Safe, || {
                bind_wishes(fixed(CLAIMED_BEFORE), wishes, &missed)
            });
            for row in &rows.await.map_err(in_doubt)? {
                let index = missed[nth(row)?];
                outcomes[index] = outcome(row, &wishes[index]);
            }
        }
        Ok(outcomes)
    }

    async fn claiming(
        &self,
        wishes: &[ClaimWish],
        round: &[usize],
        text: fn(&str) -> String,
    ) -> Result<Vec<PgRow>, StoreError> {
        let wishes_of = || round.iter().map(|index| &wishes[*index]);
        self.rows(Repeat::Safe, || {
            bind_wishes(fixed(CLAIM), wishes, round)
                .bind(column(wishes_of(), |wish| to_ms(wish.lease)))
                .bind(column(wishes_of(), |wish| text(&wish.worker)))
                .bind(i64::from(DEATHS_MAX))
        })
        .await
    }

    pub(super) async fn extend(&self, beats: &[ClaimBeat]) -> Result<Vec<bool>, StoreError> {
        let mut held = vec![false; beats.len()];
        let rounds = in_rounds(beats.len(), |index| (&beats[index].key, beats[index].stamp));
        for (nth_round, round) in rounds.iter().enumerate() {
            let beats = || round.iter().map(|index| &beats[*index]);
            let rows = self.rows(Repeat::Safe, || {
                bind_claims(fixed(EXTEND), &beats().map(|beat| (&beat.key, beat.stamp)))
                    .bind(column(beats(), |beat| to_ms(beat.lease)))
            });
            for row in &rows.await.map_err(doubt_after(nth_round))? {
                held[round[nth(row)?]] = true;
            }
        }
        Ok(held)
    }
}

/// Only what every database can keep, whatever its encoding.
pub(super) fn ascii(text: &str) -> String {
    diagnostic(text).replace(|c: char| !c.is_ascii(), "?")
}

/// Binds tenants, intents and stamps, as the next three array parameters.
pub(super) fn bind_claims<'a>(
    statement: Statement,
    claims: &(impl Iterator<Item = (&'a IntentKey, Stamp)> + Clone),
) -> Statement {
    let keys = || claims.clone().map(|(key, _)| key);
    statement
        .bind(column(keys(), |key| key.tenant.as_str()))
        .bind(column(keys(), |key| key.id.0))
        .bind(column(claims.clone(), |(_, stamp)| stamp.0))
}

fn bind_wishes(statement: Statement, wishes: &[ClaimWish], round: &[usize]) -> Statement {
    let claims = round
        .iter()
        .map(|index| (&wishes[*index].key, wishes[*index].stamp));
    bind_claims(statement, &claims)
}

/// A claim that can't be read must not take the others of its batch with it. It is left alone, and
/// quarantined once that has happened too often.
fn outcome(row: &PgRow, wish: &ClaimWish) -> IntentClaimed {
    match claimed(row, wish) {
        Ok(claimed) => claimed,
        Err(error) => {
            tracing::error!(%error, intent = %wish.key.id, "an intent can't be read");
            IntentClaimed::Lost
        }
    }
}

fn claimed(row: &PgRow, wish: &ClaimWish) -> Result<IntentClaimed, StoreError> {
    let cells = Cells::new(row, INTENTS);
    if !cells.get::<bool>("own")? {
        return Ok(match cells.get::<&str>("status")? {
            "quarantined" => IntentClaimed::Quarantined,
            _ => IntentClaimed::Lost,
        });
    }
    Ok(IntentClaimed::Won(Box::new(ClaimedIntent {
        key: wish.key.clone(),
        run_id: RunId(cells.get("run_id")?),
        seq: cells.get("seq")?,
        step: cells.get("step")?,
        destination: Destination(cells.get("destination")?),
        idempotency_key: cells.get("idempotency_key")?,
        stamp: wish.stamp,
        tries: cells.count("tries")?,
        tries_before: cells.count("tries_before")?,
        faults: cells.count("faults")?,
        age: from_us(-cells.get::<i64>("first_due_us")?),
        sending: sending(cells)?,
        body: cells.bytes("body")?,
    })))
}
