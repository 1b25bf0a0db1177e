//! What operators look for and do. Each act and its line in the audit log are one statement.

use std::time::Duration;

use sqlx::postgres::PgRow;
use uuid::Uuid;

use super::batch::bind_key;
use super::complete::{HAPPENED_WITH_RUN, bind_starts};
use super::rows::{
    Cells, DECISIONS, RECORDS, record, record_columns, record_key, to_ms, to_text, us_from_now,
    valid_us,
};
use super::run::{Repeat, Runner, Statement, fixed};
use crate::domain::record::{Completion, Found, Lease, Record, State};
use crate::domain::scope::RecordKey;
use crate::ids;
use crate::store::{Audit, PURGED, Resolved, Search, StoreError, Verdict};

/// Whether an operator may have a say about `r`: nobody knows, or the owner's lease is over, or the
/// row has no lease.
macro_rules! resolvable {
    () => {
        "(r.status = 'outcome_unknown' or (r.status = 'pending' \
         and (r.lease_expires_at is null or r.lease_expires_at <= now())))"
    };
}

/// The line in the audit log for the row of `done`, by parameters 4 to 7.
macro_rules! audited {
    () => {
        "audited as ( \
            insert into eec_operator_audit \
                (tenant_scope, audit_id, operator, action, pool_id, idempotency_key, reason) \
            select tenant_scope, $4, $5, $6, pool_id, idempotency_key, $7 from done \
        )"
    };
}

const HAPPENED: &str = concat!(
    "with done as ( \
        update eec_routing_idempotency r \
        set status = 'completed', decision_id = $9, \
            valid_until = now() + r.valid_for_ms * interval '1 ms' \
        where r.tenant_scope = $1 and r.pool_id = $2 and r.idempotency_key = $3 \
            and r.attempt_token = $8 and ",
    resolvable!(),
    " returning r.tenant_scope, r.pool_id, r.idempotency_key, r.generation_id, r.valid_until \
    ), kept as ( \
        insert into eec_routing_decision (tenant_scope, decision_id, pool_id, idempotency_key, \
            generation_id, decided_by, created_at, valid_until, answer_status, answer_headers, \
            cors_origin, cors_headers, answer_body) \
        select tenant_scope, $9, pool_id, idempotency_key, generation_id, $10, now(), \
            valid_until, $11, $12, $13, $14, $15 from done \
    ), ",
    audited!(),
    " select 1 from done"
);

const NEVER_HAPPENED: &str = concat!(
    "with done as ( \
        update eec_routing_idempotency r \
        set status = 'failed_before_commit', maybe_sent = false, \
            valid_until = now() + r.valid_for_ms * interval '1 ms' \
        where r.tenant_scope = $1 and r.pool_id = $2 and r.idempotency_key = $3 \
            and r.reserved_at + $8::bigint * interval '1 ms' <= now() and ",
    resolvable!(),
    " returning r.tenant_scope, r.pool_id, r.idempotency_key \
    ), ",
    audited!(),
    " select 1 from done"
);

const PURGE_ONE: &str = concat!(
    "with done as ( \
        delete from eec_routing_idempotency r \
        where r.tenant_scope = $1 and r.pool_id = $2 and r.idempotency_key = $3 \
            and r.status in ('completed', 'failed_before_commit') \
            and not exists (select 1 from eec_run h where h.tenant_scope = r.tenant_scope \
                and h.run_id = r.decision_id and h.holds_record and h.ended_at is null) \
        returning r.tenant_scope, r.pool_id, r.idempotency_key, r.decision_id \
    ), gone as ( \
        delete from eec_routing_decision d using done \
        where d.tenant_scope = done.tenant_scope and d.decision_id = done.decision_id \
    ), ",
    audited!(),
    " select 1 from done"
);

/// A search in `$records`. Plans are made with the values in hand, so a condition that is not given
/// costs nothing. Under collation "C" no other tenant sorts between a tenant and its principals.
macro_rules! find_in {
    ($records:literal) => {
        concat!(
            "select r.tenant_scope, r.pool_id, r.idempotency_key, d.answer_status, ",
            record_columns!(),
            " from (select * from ",
            $records,
            " where ($1::text is null or (tenant_scope >= $1 and tenant_scope < $1 || '!' \
                and (tenant_scope = $1 or starts_with(tenant_scope, $1 || ' ')))) \
            and ($2::text is null or pool_id = $2) \
            and ($3::text is null or starts_with(idempotency_key, $3)) \
            and ($4::text is null or status = $4) \
            and ($5::bigint is null or reserved_at <= now() - $5 * interval '1 ms') \
            and ($6::text is null or (tenant_scope, pool_id, idempotency_key) > ($6, $7, $8)) \
            order by tenant_scope, pool_id, idempotency_key limit $9) r \
            left join eec_routing_decision d on d.tenant_scope = r.tenant_scope \
                and d.decision_id = r.decision_id \
            order by r.tenant_scope, r.pool_id, r.idempotency_key"
        )
    };
}

const FIND: &str = find_in!("eec_routing_idempotency");

/// What operators look for most, and what is rare: `offset 0` makes the planner take its index
/// first.
const FIND_UNKNOWN: &str = find_in!(
    "(select * from eec_routing_idempotency where unknown_reserved_at is not null offset 0) open"
);

impl Runner {
    pub(super) async fn find(&self, search: &Search) -> Result<Vec<Found>, StoreError> {
        let rows = self.rows(Repeat::Safe, || searching(search)).await?;
        rows.iter().map(found).collect()
    }

    pub(super) async fn resolve(
        &self,
        key: &RecordKey,
        verdict: &Verdict,
        owner_time_max: Duration,
        audit: &Audit,
    ) -> Result<Resolved, StoreError> {
        let act = Act::new(key, audit);
        let done = match verdict {
            // Another record's answer.
            Verdict::Happened(completion) if completion.key != *key => false,
            Verdict::Happened(completion) if completion.run.is_some() => {
                let one = || std::iter::once(&**completion);
                let decide = || bind_starts(fixed(HAPPENED_WITH_RUN), &one());
                self.act(|| act.note(decide(), verdict.word())).await?
            }
            Verdict::Happened(completion) => {
                self.act(|| bind_answer(act.bind(HAPPENED, verdict.word()), completion))
                    .await?
            }
            Verdict::NeverHappened => {
                let wait = to_ms(owner_time_max);
                self.act(|| act.bind(NEVER_HAPPENED, verdict.word()).bind(wait))
                    .await?
            }
        };
        if done {
            return Ok(Resolved::Done);
        }
        let found = self
            .look_up(std::slice::from_ref(key))
            .await?
            .pop()
            .flatten();
        Ok(found.map_or(Resolved::NoRecord, |record| {
            refused(&record, verdict, owner_time_max)
        }))
    }

    pub(super) async fn purge_one(
        &self,
        key: &RecordKey,
        audit: &Audit,
    ) -> Result<Resolved, StoreError> {
        let act = Act::new(key, audit);
        if self.act(|| act.bind(PURGE_ONE, PURGED)).await? {
            return Ok(Resolved::Done);
        }
        let found = self
            .look_up(std::slice::from_ref(key))
            .await?
            .pop()
            .flatten();
        Ok(found.map_or(Resolved::NoRecord, |_| Resolved::WrongState))
    }

    /// An act whose first try may have happened is not tried again: the second one would tell the
    /// operator that the record is in the wrong state.
    async fn act(&self, make: impl Fn() -> Statement) -> Result<bool, StoreError> {
        Ok(!self.rows(Repeat::UnlessInDoubt, make).await?.is_empty())
    }
}

/// An act's key and its line in the audit log.
struct Act<'a> {
    key: &'a RecordKey,
    audit: &'a Audit,
    id: Uuid,
}

impl<'a> Act<'a> {
    fn new(key: &'a RecordKey, audit: &'a Audit) -> Self {
        let id = ids::audit_id();
        Self { key, audit, id }
    }

    fn bind(&self, sql: &'static str, action: &'static str) -> Statement {
        self.note(bind_key(fixed(sql), self.key), action)
    }

    /// Binds the line in the audit log, as the next four parameters.
    fn note(&self, statement: Statement, action: &'static str) -> Statement {
        statement
            .bind(self.id)
            .bind(to_text(&self.audit.operator))
            .bind(action)
            .bind(to_text(&self.audit.reason))
    }
}

/// Why nothing was resolved.
fn refused(record: &Record, verdict: &Verdict, owner_time_max: Duration) -> Resolved {
    let open = match record.state {
        State::OutcomeUnknown => true,
        State::Pending(lease) => !matches!(lease, Lease::Held(_)),
        // Sent again after a lost reply.
        State::Completed(id, _) => {
            let same = matches!(verdict, Verdict::Happened(c) if c.decision_id == id);
            return if same {
                Resolved::Done
            } else {
                Resolved::WrongState
            };
        }
        State::FailedBeforeCommit { .. } => false,
    };
    let wait = owner_time_max.saturating_sub(record.reserved_ago);
    if open && matches!(verdict, Verdict::NeverHappened) && !wait.is_zero() {
        return Resolved::TooEarly { wait };
    }
    Resolved::WrongState
}

fn bind_answer(statement: Statement, completion: &Completion) -> Statement {
    let recorded = &completion.recorded;
    let cors = recorded.cors.as_ref();
    statement
        .bind(completion.token.0)
        .bind(completion.decision_id.0)
        .bind(to_text(&completion.decided_by))
        .bind(i16::try_from(recorded.status).unwrap_or_default())
        .bind(recorded.headers.as_bytes())
        .bind(cors.map(|cors| &cors.origin[..]))
        .bind(cors.map(|cors| cors.headers.as_bytes()))
        .bind(recorded.body.as_deref())
}

fn searching(search: &Search) -> Statement {
    let after = search.after.as_ref();
    let unknown = search.status.as_deref() == Some("outcome_unknown");
    fixed(if unknown { FIND_UNKNOWN } else { FIND })
        .bind(search.tenant.as_deref())
        .bind(search.pool.as_deref())
        .bind(search.key_prefix.as_deref())
        .bind(search.status.as_deref())
        .bind(search.older_than.map(to_ms))
        .bind(after.map(|key| key.tenant.as_str()))
        .bind(after.map(|key| key.pool.as_str()))
        .bind(after.map(|key| key.key.as_str()))
        .bind(i64::from(search.limit))
}

fn found(row: &PgRow) -> Result<Found, StoreError> {
    let answer_status: Option<i16> = Cells::new(row, DECISIONS).get("answer_status")?;
    Ok(Found {
        record: record(row, record_key(Cells::new(row, RECORDS))?)?,
        answer_status: answer_status.and_then(|status| u16::try_from(status).ok()),
    })
}
