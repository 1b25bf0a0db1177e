//! Decisions, and the runs that they start. A batch is one statement, or two when some of its
//! decisions start runs, and one more that tells why some of it was not taken.
//!
//! The guarded update feeds the inserts: a row that it did not return gets nothing anywhere.

use sqlx::postgres::PgRow;

use super::batch::{bind_keys, column, doubt_after, in_doubt, rounds};
use super::routing::nth;
use super::rows::{Cells, RECORDS, to_ms, to_text};
use super::run::{Repeat, Runner, Statement, fixed};
use super::runs::parts::{Part, bind_parts, parts, pieces};
use crate::domain::record::{Committed, Completion, DecisionId};
use crate::domain::run::{NewRun, Timer};
use crate::store::StoreError;
use crate::store::runs::columns;

const COMPLETE: &str = "\
    with done as ( \
        update eec_routing_idempotency r \
        set status = 'completed', decision_id = b.decision_id, \
            valid_until = now() + r.valid_for_ms * interval '1 ms' \
        from unnest($1::text[], $2::text[], $3::text[], $4::uuid[], $5::uuid[], $6::text[], \
            $7::smallint[], $8::bytea[], $9::bytea[], $10::bytea[], $11::bytea[]) with ordinality \
            as b(tenant_scope, pool_id, idempotency_key, attempt_token, decision_id, decided_by, \
            answer_status, answer_headers, cors_origin, cors_headers, answer_body, n) \
        where r.tenant_scope = b.tenant_scope and r.pool_id = b.pool_id \
            and r.idempotency_key = b.idempotency_key and r.attempt_token = b.attempt_token \
            and r.status in ('pending', 'outcome_unknown', 'failed_before_commit') \
        returning r.generation_id, r.valid_until, r.awaited, b.* \
    ), kept as ( \
        insert into eec_routing_decision (tenant_scope, decision_id, pool_id, idempotency_key, \
            generation_id, decided_by, created_at, valid_until, answer_status, answer_headers, \
            cors_origin, cors_headers, answer_body) \
        select tenant_scope, decision_id, pool_id, idempotency_key, generation_id, decided_by, \
            now(), valid_until, answer_status, answer_headers, cors_origin, cors_headers, \
            answer_body from done \
    ) \
    select n, now() as created_at, valid_until, awaited from done";

/// The same for decisions that start runs, up to the condition on the record's state.
macro_rules! complete {
    () => {
        "with done as ( \
            update eec_routing_idempotency r \
            set status = 'completed', decision_id = b.decision_id, \
                valid_until = now() + r.valid_for_ms * interval '1 ms' \
            from unnest($17::text[], $18::text[], $19::text[], $20::uuid[], $21::uuid[], \
                $22::text[], $23::smallint[], $24::bytea[], $25::bytea[], $26::bytea[], \
                $27::bytea[], $28::text[], $29::bool[], $30::bytea[], $31::bytea[], \
                $32::uuid[], $33::bigint[], $34::text[], $35::bytea[], $36::text[], \
                $37::bigint[], $38::bool[]) with ordinality \
                as b(tenant_scope, pool_id, idempotency_key, attempt_token, decision_id, \
                decided_by, answer_status, answer_headers, cors_origin, cors_headers, \
                answer_body, workflow, holds_record, definition, input, tick_id, last_seq, \
                run_status, progress, reason, timer_ms, is_final, n) \
            where r.tenant_scope = b.tenant_scope and r.pool_id = b.pool_id \
                and r.idempotency_key = b.idempotency_key and r.attempt_token = b.attempt_token \
                and "
    };
}

/// The rest of it: decision, run and what belongs to the run.
macro_rules! begin {
    () => {
        concat!(
            " returning r.generation_id, r.valid_until, r.awaited, b.* \
            ), kept as ( \
                insert into eec_routing_decision (tenant_scope, decision_id, pool_id, \
                    idempotency_key, generation_id, decided_by, created_at, valid_until, \
                    answer_status, answer_headers, cors_origin, cors_headers, answer_body) \
                select tenant_scope, decision_id, pool_id, idempotency_key, generation_id, \
                    decided_by, now(), valid_until, answer_status, answer_headers, cors_origin, \
                    cors_headers, answer_body from done \
            ), begun as ( \
                insert into eec_run (tenant_scope, run_id, record_version, last_transition_seq, \
                    status, workflow, pool_id, idempotency_key, holds_record, definition, input, \
                    progress, reason, due_at, ended_at) \
                select tenant_scope, decision_id, 1, last_seq, run_status, workflow, pool_id, \
                    idempotency_key, holds_record, definition, input, progress, reason, \
                    now() + timer_ms * interval '1 ms', case when is_final then now() end \
                from done \
            ), hit as ( \
                select n, tenant_scope, decision_id as run_id, 1::bigint as record_version, \
                    tick_id from done \
            ), ",
            parts!()
        )
    };
}

const COMPLETE_WITH_RUN: &str = concat!(
    complete!(),
    "r.status in ('pending', 'outcome_unknown', 'failed_before_commit')",
    begin!(),
    " select n, now() as created_at, valid_until, awaited from done"
);

/// An operator's word: on a record that nobody works on, with a line in the audit log.
pub(super) const HAPPENED_WITH_RUN: &str = concat!(
    complete!(),
    "(r.status = 'outcome_unknown' or (r.status = 'pending' \
        and (r.lease_expires_at is null or r.lease_expires_at <= now())))",
    begin!(),
    ", audited as ( \
        insert into eec_operator_audit \
            (tenant_scope, audit_id, operator, action, pool_id, idempotency_key, reason) \
        select tenant_scope, $39, $40, $41, pool_id, idempotency_key, $42 from done \
    ) \
    select 1 from done"
);

const COMPLETED_BEFORE: &str = "\
    select b.n, d.created_at, d.valid_until, r.awaited \
    from unnest($1::text[], $2::text[], $3::text[], $4::uuid[]) with ordinality \
        as b(tenant_scope, pool_id, idempotency_key, decision_id, n) \
    join eec_routing_idempotency r on r.tenant_scope = b.tenant_scope \
        and r.pool_id = b.pool_id and r.idempotency_key = b.idempotency_key \
        and r.status = 'completed' and r.decision_id = b.decision_id \
    join eec_routing_decision d on d.tenant_scope = b.tenant_scope \
        and d.decision_id = b.decision_id";

impl Runner {
    pub(super) async fn complete(
        &self,
        completions: &[Completion],
    ) -> Result<Vec<Option<Committed>>, StoreError> {
        let mut committed = vec![None; completions.len()];
        let rounds = rounds(completions, |completion| {
            (&completion.key, completion.token)
        });
        let Some(first) = rounds.first() else {
            return Ok(committed);
        };
        let starts = |index: &usize| completions[*index].run.is_some();
        let (starting, plain): (Vec<usize>, Vec<usize>) = first.iter().partition(|i| starts(i));
        let first_tick = |index: usize| {
            let run = completions[index].run.as_ref();
            run.map(|run| (index, &run.first))
        };
        let pieces = pieces(starting.iter().filter_map(|index| first_tick(*index)));
        let plain = (!plain.is_empty()).then_some((COMPLETE, plain));
        let statements = plain
            .into_iter()
            .chain(pieces.into_iter().map(|piece| (COMPLETE_WITH_RUN, piece)));
        for (nth_statement, (sql, round)) in statements.enumerate() {
            let rows = self.rows(Repeat::Safe, || {
                let round = || round.iter().map(|index| &completions[*index]);
                if sql == COMPLETE {
                    bind_completions(fixed(sql), &round())
                } else {
                    bind_starts(fixed(sql), &round())
                }
            });
            for row in &rows.await.map_err(doubt_after(nth_statement))? {
                let index = round[nth(row)?];
                committed[index] = Some(to_committed(row, completions[index].decision_id)?);
            }
        }
        let missed: Vec<usize> = rounds
            .concat()
            .into_iter()
            .filter(|index| committed[*index].is_none())
            .collect();
        if missed.is_empty() {
            return Ok(committed);
        }
        let missed_ones = || missed.iter().map(|index| &completions[*index]);
        let rows = self.rows(Repeat::Safe, || {
            bind_keys(
                fixed(COMPLETED_BEFORE),
                &missed_ones().map(|missed| &missed.key),
            )
            .bind(column(missed_ones(), |missed| missed.decision_id.0))
        });
        for row in &rows.await.map_err(in_doubt)? {
            let index = missed[nth(row)?];
            committed[index] = Some(to_committed(row, completions[index].decision_id)?);
        }
        Ok(committed)
    }
}

fn bind_completions<'a>(
    statement: Statement,
    completions: &(impl Iterator<Item = &'a Completion> + Clone),
) -> Statement {
    let completions = || completions.clone();
    let recorded = || completions().map(|completion| &completion.recorded);
    let cors = || recorded().map(|recorded| recorded.cors.as_ref());
    // An answer's status is below 600.
    let status = |status: u16| i16::try_from(status).unwrap_or_default();
    bind_keys(statement, &completions().map(|completion| &completion.key))
        .bind(column(completions(), |completion| completion.token.0))
        .bind(column(completions(), |completion| completion.decision_id.0))
        .bind(column(completions(), |completion| {
            to_text(&completion.decided_by)
        }))
        .bind(column(recorded(), |recorded| status(recorded.status)))
        .bind(column(recorded(), |recorded| recorded.headers.as_bytes()))
        .bind(column(cors(), |cors| cors.map(|cors| &cors.origin[..])))
        .bind(column(cors(), |cors| {
            cors.map(|cors| cors.headers.as_bytes())
        }))
        .bind(column(recorded(), |recorded| recorded.body.as_deref()))
}

/// Binds completions that start a run, with all that belongs to it, as parameters 1 to 38.
pub(super) fn bind_starts<'a>(
    statement: Statement,
    completions: &(impl Iterator<Item = &'a Completion> + Clone),
) -> Statement {
    let starts = || completions.clone().filter_map(|c| c.run.as_deref());
    let part = |run: &'a NewRun| Part {
        tick: &run.first,
        seen_seq: 0,
    };
    let statement = bind_parts(statement, starts().map(part));
    let statement = bind_completions(statement, completions);
    let ticks = || starts().map(|run| &run.first);
    let timer_ms = |tick| match columns::timer(tick) {
        Timer::In(after) => Some(to_ms(after)),
        Timer::Keep | Timer::Clear => None,
    };
    statement
        .bind(column(starts(), |run| &*run.workflow))
        .bind(column(starts(), |run| run.holds_record))
        .bind(column(starts(), |run| &run.definition[..]))
        .bind(column(starts(), |run| &run.input[..]))
        .bind(column(starts(), |run| run.tick_id.0))
        .bind(column(ticks(), |tick| columns::last_seq(0, tick)))
        .bind(column(ticks(), |tick| tick.status.word()))
        .bind(column(ticks(), |tick| &tick.progress[..]))
        .bind(column(ticks(), |tick| tick.reason.as_deref().map(to_text)))
        .bind(column(ticks(), timer_ms))
        .bind(column(ticks(), |tick| tick.status.is_final()))
}

fn to_committed(row: &PgRow, decision_id: DecisionId) -> Result<Committed, StoreError> {
    let cells = Cells::new(row, RECORDS);
    Ok(Committed {
        decision_id,
        created_at: cells.get("created_at")?,
        valid_until: cells.get("valid_until")?,
        awaited: cells.get("awaited")?,
    })
}
