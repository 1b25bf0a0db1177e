//! Retention of runs: found without locks, deleted by a statement that checks everything again.

use std::time::Duration;

use sqlx::postgres::PgRow;
use uuid::Uuid;

use crate::config::Keep;
use crate::store::StoreError;
use crate::store::postgres::rows::{Cells, to_ms};
use crate::store::postgres::run::{Repeat, Runner, fixed};
use crate::store::runs::RunsPurged;

/// Runs of one statement have about this many transitions in all, or it is one run.
const TRANSITIONS_MAX: i64 = 2_000;

/// What a run `r` is past when retention may take it: its own time and, in milliseconds before now
/// as `$2`, that of its dead intents. A run that holds its record is what the record's duplicates
/// are told of.
macro_rules! purgeable {
    () => {
        "r.ended_at <= now() - $1::bigint * interval '1 ms' \
         and r.status in ('completed', 'failed', 'compensated', 'cancelled') \
         and not exists (select 1 from eec_effect_intent i \
            where i.tenant_scope = r.tenant_scope and i.run_id = r.run_id \
                and (i.status = 'pending' or (i.status in ('dead', 'quarantined') \
                    and i.ended_at > now() - $2::bigint * interval '1 ms'))) \
         and not (r.holds_record and exists (select 1 from eec_routing_idempotency k \
            where k.tenant_scope = r.tenant_scope and k.pool_id = r.pool_id \
                and k.idempotency_key = r.idempotency_key and k.decision_id = r.run_id \
                and r.ended_at + k.valid_for_ms * interval '1 ms' > now()))"
    };
}

const PAST: &str = concat!(
    "select r.tenant_scope, r.run_id, r.last_transition_seq from eec_run r where ",
    purgeable!(),
    " order by r.ended_at limit $3"
);

const PURGE: &str = concat!(
    "with gone as ( \
        delete from eec_run r using unnest($3::text[], $4::uuid[]) as b(tenant_scope, run_id) \
        where r.tenant_scope = b.tenant_scope and r.run_id = b.run_id and ",
    purgeable!(),
    " returning r.tenant_scope, r.run_id \
    ), transitions as ( \
        delete from eec_run_transition t using gone \
        where t.tenant_scope = gone.tenant_scope and t.run_id = gone.run_id \
    ), attempts as ( \
        delete from eec_run_attempt a using gone \
        where a.tenant_scope = gone.tenant_scope and a.run_id = gone.run_id \
    ), intents as ( \
        delete from eec_effect_intent i using gone \
        where i.tenant_scope = gone.tenant_scope and i.run_id = gone.run_id \
        returning i.tenant_scope, i.intent_id \
    ), bodies as ( \
        delete from eec_effect_body b using intents i \
        where b.tenant_scope = i.tenant_scope and b.intent_id = i.intent_id \
            and b.part in ('message', 'answer') \
    ) \
    select (select count(*) from gone) as runs, (select count(*) from intents) as intents"
);

/// An intent `i` that is dead for longer than this, in milliseconds.
macro_rules! long_dead {
    () => {
        "i.has_body and i.status in ('dead', 'quarantined') \
         and i.ended_at <= now() - $1::bigint * interval '1 ms'"
    };
}

const LONG_DEAD: &str = concat!(
    "select i.tenant_scope, i.intent_id from eec_effect_intent i where ",
    long_dead!(),
    " order by i.ended_at limit $2"
);

const PURGE_BODIES: &str = concat!(
    "with bare as ( \
        update eec_effect_intent i set has_body = false \
        from unnest($2::text[], $3::uuid[]) as b(tenant_scope, intent_id) \
        where i.tenant_scope = b.tenant_scope and i.intent_id = b.intent_id and ",
    long_dead!(),
    " returning i.tenant_scope, i.intent_id \
    ), gone as ( \
        delete from eec_effect_body m using bare \
        where m.tenant_scope = bare.tenant_scope and m.intent_id = bare.intent_id \
            and m.part = 'message' \
    ) \
    select 1 from bare"
);

const PAST_CLAIMS: &str = "\
    select tenant_scope, request_id from eec_routing_claim \
    where keep_until <= now() order by keep_until limit $1";

const PURGE_CLAIMS: &str = "\
    delete from eec_routing_claim c using unnest($1::text[], $2::uuid[]) as b(tenant_scope, id) \
    where c.tenant_scope = b.tenant_scope and c.request_id = b.id and c.keep_until <= now()";

impl Runner {
    pub(in crate::store::postgres) async fn purge_runs(
        &self,
        keep: Keep,
        limit: u32,
    ) -> Result<RunsPurged, StoreError> {
        let mut purged = RunsPurged::default();
        let (keep_runs, keep_dead) = (to_ms(keep.runs), to_ms(keep.dead));
        let past = self.rows(Repeat::Safe, || {
            fixed(PAST)
                .bind(keep_runs)
                .bind(keep_dead)
                .bind(i64::from(limit))
        });
        for page in pages(&past.await?)? {
            let (tenants, ids): (Vec<String>, Vec<Uuid>) = page.into_iter().unzip();
            let rows = self.rows(Repeat::Safe, || {
                fixed(PURGE)
                    .bind(keep_runs)
                    .bind(keep_dead)
                    .bind(&tenants[..])
                    .bind(&ids[..])
            });
            for row in &rows.await? {
                let cells = Cells::new(row, "eec_run");
                purged.runs += cells.get::<i64>("runs")?.unsigned_abs();
                purged.intents += cells.get::<i64>("intents")?.unsigned_abs();
            }
        }
        purged.bodies = self.purge_bodies(keep.dead, limit).await?;
        self.purge_claims(limit).await?;
        Ok(purged)
    }

    async fn purge_bodies(&self, keep: Duration, limit: u32) -> Result<u64, StoreError> {
        let keep = to_ms(keep);
        let found = self.rows(Repeat::Safe, || {
            fixed(LONG_DEAD).bind(keep).bind(i64::from(limit))
        });
        let (tenants, ids) = ids(&found.await?, "eec_effect_intent", "intent_id")?;
        if ids.is_empty() {
            return Ok(0);
        }
        let bare = self.rows(Repeat::Safe, || {
            fixed(PURGE_BODIES)
                .bind(keep)
                .bind(&tenants[..])
                .bind(&ids[..])
        });
        Ok(bare.await?.len() as u64)
    }

    async fn purge_claims(&self, limit: u32) -> Result<(), StoreError> {
        let found = self.rows(Repeat::Safe, || fixed(PAST_CLAIMS).bind(i64::from(limit)));
        let (tenants, ids) = ids(&found.await?, "eec_routing_claim", "request_id")?;
        if !ids.is_empty() {
            let purge = || fixed(PURGE_CLAIMS).bind(&tenants[..]).bind(&ids[..]);
            self.rows(Repeat::Safe, purge).await?;
        }
        Ok(())
    }
}

fn ids(
    rows: &[PgRow],
    table: &'static str,
    column: &'static str,
) -> Result<(Vec<String>, Vec<Uuid>), StoreError> {
    let mut all = (
        Vec::with_capacity(rows.len()),
        Vec::with_capacity(rows.len()),
    );
    for row in rows {
        let cells = Cells::new(row, table);
        all.0.push(cells.get("tenant_scope")?);
        all.1.push(cells.get(column)?);
    }
    Ok(all)
}

/// Runs that are deleted by one statement each.
fn pages(rows: &[PgRow]) -> Result<Vec<Vec<(String, Uuid)>>, StoreError> {
    let mut pages: Vec<Vec<(String, Uuid)>> = Vec::new();
    let mut room = 0;
    for row in rows {
        let cells = Cells::new(row, "eec_run");
        let run = (cells.get("tenant_scope")?, cells.get("run_id")?);
        let transitions: i64 = cells.get("last_transition_seq")?;
        match pages.last_mut() {
            Some(page) if transitions <= room => page.push(run),
            _ => {
                room = TRANSITIONS_MAX;
                pages.push(vec![run]);
            }
        }
        room -= transitions;
    }
    Ok(pages)
}
