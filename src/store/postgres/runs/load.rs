//! What ticks are made from: which runs something happened to, and how they stand.

use sqlx::postgres::PgRow;

use super::commit::bind_runs;
use super::rows::{answer, run, run_columns, run_key, run_status, seen};
use crate::domain::intent::Stamp;
use crate::domain::message::Recorded;
use crate::domain::run::{LoadedRun, RunKey, RunStatus};
use crate::store::StoreError;
use crate::store::postgres::routing::nth;
use crate::store::postgres::rows::Cells;
use crate::store::postgres::run::{Repeat, Runner, fixed};
use crate::store::runs::due::{self, Found};
use crate::store::runs::{DuePlace, RunsDue};

/// Three looks at what is due, each with an end: timers; changed intents, of each tenant its share;
/// and changed intents of all in the order of their index. The first and the last begin where the
/// look before ended. An intent is told by its run, so some repeat.
const DUE: &str = "\
    with recursive tenants as ( \
        (select tenant_scope from eec_effect_intent where changed order by tenant_scope limit 1) \
        union all \
        select (select i.tenant_scope from eec_effect_intent i \
            where i.changed and i.tenant_scope > t.tenant_scope \
            order by i.tenant_scope limit 1) \
        from tenants t where t.tenant_scope is not null \
    ), chosen as ( \
        select tenant_scope from tenants where tenant_scope is not null limit $1 \
    ), timers as ( \
        select tenant_scope, run_id, due_at from eec_run \
        where due_at <= now() and (due_at, tenant_scope, run_id) > ($2, $3, $4) \
        order by due_at, tenant_scope, run_id limit $1 \
    ), shares as ( \
        select s.tenant_scope, i.run_id from chosen s cross join lateral ( \
            select run_id from eec_effect_intent \
            where changed and tenant_scope = s.tenant_scope \
            order by tenant_scope, run_id \
            limit greatest(1, $1 / (select count(*) from chosen)) \
        ) i \
    ), rest as ( \
        select tenant_scope, run_id from eec_effect_intent \
        where changed and (tenant_scope, run_id) > ($5, $6) \
        order by tenant_scope, run_id limit $7 \
    ) \
    select 0 as source, tenant_scope, run_id, due_at from timers \
    union all select 1, tenant_scope, run_id, null from shares \
    union all select 2, tenant_scope, run_id, null from rest \
    order by source, due_at, tenant_scope, run_id";

/// A row for each run and one for each of its intents, all of one moment.
const LOAD: &str = concat!(
    "select b.n, null::bigint as seq, ",
    run_columns!(),
    ", coalesce(r.due_at <= now(), false) as timer_over, null::text as intent_status, \
        null::bool as changed, null::int as tries, null::bool as has_body, null::text as outcome, \
        null::text as diagnostic, null::smallint as answer_status, null::bytea as answer_headers, \
        null::bytea as answer_body \
    from unnest($1::text[], $2::uuid[]) with ordinality as b(tenant_scope, run_id, n) \
    join eec_run r on r.tenant_scope = b.tenant_scope and r.run_id = b.run_id \
    union all \
    select b.n, i.seq, null, null, null, null, null, null, null, null, null, null, null, null, \
        null, null, i.status, i.changed, i.tries, i.has_body, i.outcome, i.diagnostic, a.status, \
        a.headers, a.body \
    from unnest($1::text[], $2::uuid[]) with ordinality as b(tenant_scope, run_id, n) \
    join eec_effect_intent i on i.tenant_scope = b.tenant_scope and i.run_id = b.run_id \
        and (i.changed or i.status in ('pending', 'dead', 'quarantined')) \
    left join eec_effect_body a on a.tenant_scope = i.tenant_scope \
        and a.intent_id = i.intent_id and a.part = 'answer' \
        and i.changed and i.status = 'completed' \
    order by 1, 2 nulls first"
);

const APPLIED: &str = "\
    select 1 from eec_run_transition where tenant_scope = $1 and run_id = $2 and stamp = $3";

const ANSWER: &str = "\
    select r.status, a.status as answer_status, a.headers as answer_headers, \
        a.body as answer_body \
    from eec_run r left join eec_effect_body a on a.tenant_scope = r.tenant_scope \
        and a.intent_id = $3 and a.part = 'answer' \
    where r.tenant_scope = $1 and r.run_id = $2";

impl Runner {
    pub(in crate::store::postgres) async fn runs_due(
        &self,
        from: &DuePlace,
        limit: u32,
    ) -> Result<RunsDue, StoreError> {
        let rows = self.rows(Repeat::Safe, || {
            let (due, timer_tenant, timer_run) = from.timer_columns();
            let (tenant, run_id) = from.changed_columns();
            fixed(DUE)
                .bind(i64::from(limit))
                .bind(due)
                .bind(timer_tenant.to_owned())
                .bind(timer_run)
                .bind(tenant.to_owned())
                .bind(run_id)
                .bind(i64::from(due::changes_max(limit)))
        });
        let mut found = Found {
            timers: Vec::new(),
            shares: Vec::new(),
            changes: Vec::new(),
        };
        for row in &rows.await? {
            let cells = Cells::new(row, "eec_run");
            match cells.get::<i32>("source")? {
                0 => found.timers.push((cells.get("due_at")?, run_key(row)?)),
                1 => found.shares.push(run_key(row)?),
                _ => found.changes.push(run_key(row)?),
            }
        }
        Ok(due::in_turn(found, from, limit))
    }

    pub(in crate::store::postgres) async fn load_runs(
        &self,
        keys: &[RunKey],
    ) -> Result<Vec<Option<LoadedRun>>, StoreError> {
        let mut loaded: Vec<Option<LoadedRun>> = vec![None; keys.len()];
        if keys.is_empty() {
            return Ok(loaded);
        }
        let rows = self.rows(Repeat::Safe, || bind_runs(fixed(LOAD), keys.iter()));
        for row in &rows.await? {
            let place = &mut loaded[nth(row)?];
            match place {
                Some(run) => run.intents.push(seen(row)?),
                None => *place = first_row(row)?,
            }
        }
        Ok(loaded)
    }

    pub(in crate::store::postgres) async fn is_applied(
        &self,
        key: &RunKey,
        stamp: Stamp,
    ) -> Result<bool, StoreError> {
        let rows = self.rows(Repeat::Safe, || {
            fixed(APPLIED)
                .bind(key.tenant.as_str())
                .bind(key.id.0)
                .bind(stamp.0)
        });
        Ok(!rows.await?.is_empty())
    }

    pub(in crate::store::postgres) async fn run_answer(
        &self,
        key: &RunKey,
    ) -> Result<Option<(RunStatus, Option<Recorded>)>, StoreError> {
        let rows = self.rows(Repeat::Safe, || {
            fixed(ANSWER)
                .bind(key.tenant.as_str())
                .bind(key.id.0)
                .bind(key.id.intent(1).0)
        });
        let rows = rows.await?;
        let Some(row) = rows.first() else {
            return Ok(None);
        };
        Ok(Some((run_status(row)?, answer(row)?)))
    }
}

/// The run itself comes first; intents without one belong to nothing.
fn first_row(row: &PgRow) -> Result<Option<LoadedRun>, StoreError> {
    if Cells::new(row, "eec_effect_intent")
        .get::<Option<i64>>("seq")?
        .is_some()
    {
        return Ok(None);
    }
    Ok(Some(LoadedRun {
        run: run(row)?,
        intents: Vec::new(),
        timer_over: Cells::new(row, "eec_run").get("timer_over")?,
    }))
}
