//! What operators look for and do with intents and destinations, and the figures for the gauges.

use sqlx::postgres::PgRow;

use super::rows::{INTENTS, line};
use crate::domain::intent::{Destination, IntentId, IntentKey, IntentStatus};
use crate::domain::run::RunStatus;
use crate::ids;
use crate::store::outbox::{
    COUNT_MAX, DISCARDED_INTENT, IntentLine, IntentSearch, OutboxCensus, PAUSED_DESTINATION, Pause,
    RESUMED_DESTINATION,
};
use crate::store::postgres::rows::{Cells, from_us, to_text, us_from_now};
use crate::store::postgres::run::{Repeat, Runner, Statement, fixed};
use crate::store::{Audit, Resolved, StoreError};

/// What [`line()`] reads of an intent `i` with its message `m`.
macro_rules! line_columns {
    () => {
        concat!(
            "i.tenant_scope, i.intent_id, i.run_id, i.seq, i.step, i.status, i.destination, \
             i.idempotency_key, i.sending, i.due_at, i.tries, i.tries_before, i.faults, i.deaths, i.redrives, \
             i.outcome, i.answer_status, i.diagnostic, i.created_at, i.ended_at, \
             i.claim_token is not null and i.due_at > now() as claimed, \
             octet_length(m.body) as body_bytes, ",
            us_from_now!("i.first_due_at"),
            " as first_due_us "
        )
    };
}

/// The bytes of `i`. Their length is read without them.
macro_rules! with_message {
    () => {
        " left join eec_effect_body m on m.tenant_scope = i.tenant_scope \
            and m.intent_id = i.intent_id and m.part = 'message' "
    };
}

const FIND_ONE: &str = concat!(
    "select ",
    line_columns!(),
    "from eec_effect_intent i",
    with_message!(),
    "where i.intent_id = $1"
);

/// A search in `$intents`, as for records.
macro_rules! find_in {
    ($intents:literal) => {
        concat!(
            "select ",
            line_columns!(),
            "from (select * from ",
            $intents,
            " where ($1::text is null or (tenant_scope >= $1 and tenant_scope < $1 || '!' \
                and (tenant_scope = $1 or starts_with(tenant_scope, $1 || ' ')))) \
            and ($2::text is null or status = $2) \
            and ($3::text is null or destination = $3) \
            and ($4::uuid is null or run_id = $4) \
            and ($5::text is null or (tenant_scope, intent_id) > ($5, $6)) \
            order by tenant_scope, intent_id limit $7) i",
            with_message!(),
            "order by i.tenant_scope, i.intent_id"
        )
    };
}

const FIND: &str = find_in!("eec_effect_intent");

/// What operators look for most, and what is rare.
const FIND_UNDELIVERED: &str = find_in!(
    "(select * from eec_effect_intent where status in ('dead', 'quarantined') offset 0) few"
);

const FIND_OF_RUN: &str = find_in!(
    "(select i.* from eec_run r join eec_effect_intent i on i.tenant_scope = r.tenant_scope \
        and i.run_id = r.run_id where r.run_id = $4 offset 0) few"
);

const DISCARD: &str = "\
    with done as ( \
        update eec_effect_intent i \
        set status = 'discarded', changed = true, due_at = null, claim_token = null, \
            ended_at = now() \
        from eec_effect_intent o \
        where i.tenant_scope = $1 and i.intent_id = $2 \
            and o.tenant_scope = $1 and o.intent_id = $2 \
            and i.claim_token is not distinct from o.claim_token \
            and (i.status in ('dead', 'quarantined') or (i.status = 'pending' \
                and (i.claim_token is null or i.due_at <= now()))) \
        returning i.tenant_scope, i.run_id, o.claim_token as held \
    ), lost as ( \
        update eec_run_attempt a set status = 'lost', ended_at = now() from done \
        where a.tenant_scope = done.tenant_scope and a.run_id = done.run_id \
            and a.stamp = done.held and a.status = 'open' \
    ), audited as ( \
        insert into eec_operator_audit \
            (tenant_scope, audit_id, operator, action, pool_id, idempotency_key, reason) \
        select done.tenant_scope, $3, $4, $5, coalesce(r.pool_id, ''), \
            coalesce(r.idempotency_key, ''), $6 \
        from done left join eec_run r on r.tenant_scope = done.tenant_scope \
            and r.run_id = done.run_id \
    ) \
    select 1 from done";

const IS_THERE: &str = "select 1 from eec_effect_intent where tenant_scope = $1 and intent_id = $2";

/// The line in the audit log for a destination, which is no tenant's.
macro_rules! audited {
    () => {
        "audited as ( \
            insert into eec_operator_audit \
                (tenant_scope, audit_id, operator, action, pool_id, idempotency_key, reason) \
            select '', $2, $3, $4, '', '', destination || ': ' || $5 from done \
        ) \
        select 1 from done"
    };
}

const PAUSE: &str = concat!(
    "with done as ( \
        insert into eec_destination_pause (destination, operator, reason) values ($1, $3, $5) \
        on conflict (destination) do nothing returning destination \
    ), ",
    audited!()
);

const RESUME: &str = concat!(
    "with done as ( \
        delete from eec_destination_pause where destination = $1 returning destination \
    ), ",
    audited!()
);

const PAUSED: &str = "\
    select destination, paused_at, operator, reason from eec_destination_pause \
    order by destination";

/// Each count reads no more than it tells, by an index that holds nothing else.
const CENSUS: &str = concat!(
    "select 'intent' as what, 'pending' as status, count(*) as rows, ",
    us_from_now!("min(first_due_at)"),
    " as oldest_us from (select first_due_at from eec_effect_intent \
        where status = 'pending' and first_due_at is not null \
        order by first_due_at limit $1) i \
    union all \
    select 'intent', status, count(*), null from (select status from eec_effect_intent \
        where status in ('dead', 'quarantined') limit 2 * $1) i group by status \
    union all \
    select 'run', s.status, r.rows, null from unnest(array['running', 'waiting', 'stuck']) \
        as s(status) cross join lateral (select count(*) as rows from (select 1 from eec_run \
            where status in ('running', 'waiting', 'stuck') and status = s.status limit $1) c) r"
);

impl Runner {
    pub(super) async fn find_intent(&self, id: IntentId) -> Result<Option<IntentLine>, StoreError> {
        let rows = self.rows(Repeat::Safe, || fixed(FIND_ONE).bind(id.0));
        rows.await?.first().map(line).transpose()
    }

    pub(super) async fn find_intents(
        &self,
        search: &IntentSearch,
    ) -> Result<Vec<IntentLine>, StoreError> {
        let rows = self.rows(Repeat::Safe, || searching(search));
        rows.await?.iter().map(line).collect()
    }

    pub(super) async fn discard(
        &self,
        key: &IntentKey,
        audit: &Audit,
    ) -> Result<Resolved, StoreError> {
        let audit_id = ids::audit_id();
        let reason = to_text(&format!("{}: {}", key.id, audit.reason));
        // Not tried again when in doubt: the second try would tell of the wrong state.
        let done = self.rows(Repeat::UnlessInDoubt, || {
            of_intent(DISCARD, key)
                .bind(audit_id)
                .bind(to_text(&audit.operator))
                .bind(DISCARDED_INTENT)
                .bind(reason.clone())
        });
        if !done.await?.is_empty() {
            return Ok(Resolved::Done);
        }
        let there = self.rows(Repeat::Safe, || of_intent(IS_THERE, key)).await?;
        Ok(if there.is_empty() {
            Resolved::NoRecord
        } else {
            Resolved::WrongState
        })
    }

    /// Told again it changes nothing, and is not audited again.
    pub(super) async fn set_paused(
        &self,
        destination: &Destination,
        paused: bool,
        audit: &Audit,
    ) -> Result<(), StoreError> {
        let audit_id = ids::audit_id();
        let (sql, action) = if paused {
            (PAUSE, PAUSED_DESTINATION)
        } else {
            (RESUME, RESUMED_DESTINATION)
        };
        let done = self.rows(Repeat::Safe, || {
            fixed(sql)
                .bind(to_text(&destination.0))
                .bind(audit_id)
                .bind(to_text(&audit.operator))
                .bind(action)
                .bind(to_text(&audit.reason))
        });
        done.await.map(|_| ())
    }

    pub(super) async fn paused(&self) -> Result<Vec<Pause>, StoreError> {
        let pause = |row: &PgRow| {
            let cells = Cells::new(row, "eec_destination_pause");
            Ok(Pause {
                destination: Destination(cells.get("destination")?),
                paused_at: cells.get("paused_at")?,
                operator: cells.get("operator")?,
                reason: cells.get("reason")?,
            })
        };
        let rows = self.rows(Repeat::Safe, || fixed(PAUSED)).await?;
        rows.iter().map(pause).collect()
    }

    pub(super) async fn outbox_census(&self) -> Result<OutboxCensus, StoreError> {
        let rows = self.rows(Repeat::Safe, || fixed(CENSUS).bind(i64::from(COUNT_MAX)));
        let open = [
            IntentStatus::Pending,
            IntentStatus::Dead,
            IntentStatus::Quarantined,
        ];
        let mut census = OutboxCensus {
            intents: open.into_iter().map(|status| (status, 0)).collect(),
            ..OutboxCensus::default()
        };
        for row in &rows.await? {
            let cells = Cells::new(row, INTENTS);
            let word: &str = cells.get("status")?;
            let count = u64::try_from(cells.get::<i64>("rows")?).unwrap_or_default();
            let count = count.min(u64::from(COUNT_MAX));
            if cells.get::<&str>("what")? == "run" {
                let status = RunStatus::from_word(word);
                census.runs.extend(status.map(|status| (status, count)));
                continue;
            }
            let intents = census.intents.iter_mut();
            for (_, counted) in intents.filter(|(status, _)| status.word() == word) {
                *counted = count;
            }
            if let Some(us) = cells.get::<Option<i64>>("oldest_us")? {
                census.oldest_pending = Some(from_us(-us));
            }
        }
        Ok(census)
    }
}

fn of_intent(sql: &'static str, key: &IntentKey) -> Statement {
    fixed(sql).bind(key.tenant.as_str()).bind(key.id.0)
}

fn searching(search: &IntentSearch) -> Statement {
    let after = search.after.as_ref();
    let undelivered = matches!(
        search.status,
        Some(IntentStatus::Dead | IntentStatus::Quarantined)
    );
    let sql = if search.run_id.is_some() {
        FIND_OF_RUN
    } else if undelivered {
        FIND_UNDELIVERED
    } else {
        FIND
    };
    fixed(sql)
        .bind(search.tenant.as_deref())
        .bind(search.status.map(IntentStatus::word))
        .bind(search.destination.as_ref().map(|to| to.0.as_str()))
        .bind(search.run_id.map(|id| id.0))
        .bind(after.map(|key| key.tenant.as_str()))
        .bind(after.map(|key| key.id.0))
        .bind(i64::from(search.limit))
}
