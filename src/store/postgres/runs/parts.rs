//! What a tick adds to its run: transitions, intents, bodies. One piece of SQL and its arrays, as
//! parameters 1 to 16, for every statement that may insert them.
//!
//! The statement names what it wrote `hit(n, tenant_scope, run_id, record_version, tick_id)`; what
//! belongs to another `n` is not inserted.

use crate::domain::intent::NewIntent;
use crate::domain::run::{NewTransition, Tick};
use crate::store::postgres::batch::column;
use crate::store::postgres::run::Statement;
use crate::store::runs::columns;

/// Ticks of one statement: at most this many rows belong to them, or it is one tick. The rows are
/// joined to their ticks one by one.
const ROWS_MAX: usize = 2_000;

macro_rules! parts {
    () => {
        "laid_transitions as ( \
            insert into eec_run_transition (tenant_scope, run_id, seq, record_version, tick_id, \
                kind, step, detail, stamp) \
            select h.tenant_scope, h.run_id, t.seq, h.record_version, h.tick_id, t.kind, t.step, \
                t.detail, t.stamp \
            from unnest($1::bigint[], $2::bigint[], $3::text[], $4::text[], $5::bytea[], \
                $6::uuid[]) as t(n, seq, kind, step, detail, stamp) \
            join hit h on h.n = t.n \
        ), laid_intents as ( \
            insert into eec_effect_intent (tenant_scope, run_id, intent_id, seq, step, \
                destination, idempotency_key, sending, horizon_ms, due_at, first_due_at) \
            select h.tenant_scope, h.run_id, i.intent_id, i.seq, i.step, i.destination, \
                i.idempotency_key, i.sending, i.horizon_ms, case when i.armed then now() end, \
                case when i.armed then now() end \
            from unnest($7::bigint[], $8::uuid[], $9::bigint[], $10::text[], $11::text[], \
                $12::text[], $13::bytea[], $14::bigint[], $15::bool[]) as i(n, intent_id, seq, \
                step, destination, idempotency_key, sending, horizon_ms, armed) \
            join hit h on h.n = i.n \
        ), laid_bodies as ( \
            insert into eec_effect_body (tenant_scope, intent_id, part, body) \
            select h.tenant_scope, m.intent_id, 'message', m.body \
            from unnest($7::bigint[], $8::uuid[], $16::bytea[]) as m(n, intent_id, body) \
            join hit h on h.n = m.n \
        )"
    };
}

pub(in crate::store::postgres) use parts;

/// A tick in a statement.
pub(in crate::store::postgres) struct Part<'a> {
    /// What it makes.
    pub(in crate::store::postgres) tick: &'a Tick,
    /// The number of the newest transition before it.
    pub(in crate::store::postgres) seen_seq: i64,
}

/// Binds what the ticks add, the first of them being number 1 of the statement.
pub(in crate::store::postgres) fn bind_parts<'a>(
    statement: Statement,
    parts: impl Iterator<Item = Part<'a>> + Clone,
) -> Statement {
    let statement = bind_transitions(statement, parts.clone());
    bind_intents(statement, (1..).zip(parts))
}

fn bind_transitions<'a>(statement: Statement, parts: impl Iterator<Item = Part<'a>>) -> Statement {
    let mut rows: Vec<(i64, i64, &NewTransition)> = Vec::new();
    for (n, part) in (1..).zip(parts) {
        let seqs = part.seen_seq.saturating_add(1)..;
        let numbered = seqs.zip(&part.tick.transitions);
        rows.extend(numbered.map(|(seq, transition)| (n, seq, transition)));
    }
    let transitions = || rows.iter().map(|(.., transition)| *transition);
    statement
        .bind(column(rows.iter(), |(n, ..)| *n))
        .bind(column(rows.iter(), |(_, seq, _)| *seq))
        .bind(column(transitions(), |transition| transition.kind))
        .bind(column(transitions(), |transition| {
            transition.step.as_deref()
        }))
        .bind(column(transitions(), columns::detail))
        .bind(column(transitions(), |transition| {
            transition.stamp.map(|stamp| stamp.0)
        }))
}

fn bind_intents<'a>(
    statement: Statement,
    parts: impl Iterator<Item = (i64, Part<'a>)>,
) -> Statement {
    let mut rows: Vec<(i64, &NewIntent)> = Vec::new();
    for (n, part) in parts {
        rows.extend(part.tick.intents.iter().map(|intent| (n, intent)));
    }
    let intents = || rows.iter().map(|(_, intent)| *intent);
    statement
        .bind(column(rows.iter(), |(n, _)| *n))
        .bind(column(intents(), |intent| intent.id.0))
        .bind(column(intents(), |intent| intent.seq))
        .bind(column(intents(), |intent| intent.step.as_str()))
        .bind(column(intents(), |intent| intent.destination.0.as_str()))
        .bind(column(intents(), |intent| intent.idempotency_key.as_str()))
        .bind(column(intents(), |intent| columns::json(&intent.sending)))
        .bind(column(intents(), columns::horizon_ms))
        .bind(column(intents(), |intent| intent.armed))
        .bind(column(intents(), |intent| &intent.body[..]))
}

/// Cuts ticks, each with its place in the batch, into pieces that fit into a statement, without
/// changing their order.
pub(in crate::store::postgres) fn pieces<'a>(
    ticks: impl Iterator<Item = (usize, &'a Tick)>,
) -> Vec<Vec<usize>> {
    let mut pieces: Vec<Vec<usize>> = Vec::new();
    let mut room = 0;
    for (index, tick) in ticks {
        let rows = tick.transitions.len() + tick.intents.len() + tick.changes.len();
        match pieces.last_mut() {
            Some(piece) if rows <= room => piece.push(index),
            _ => {
                room = ROWS_MAX;
                pieces.push(vec![index]);
            }
        }
        room = room.saturating_sub(rows);
    }
    pieces
}
