//! Inserts runs and what belongs to them: transitions, intents, bodies. Rows of several runs go
//! into one statement: each is a trip to the connection's thread.

use sqlx::query_builder::Separated;
use sqlx::{QueryBuilder, Sqlite, SqliteConnection};

use crate::domain::intent::{NewIntent, Stamp};
use crate::domain::record::Completion;
use crate::domain::run::{NewRun, NewTransition, RunId, Tick, Timer};
use crate::domain::scope::TenantScope;
use crate::store::StoreError;
use crate::store::runs::columns;
use crate::store::sqlite::rows;
use crate::store::sqlite::statement;

/// Rows of one statement: no statement has more than 32,766 parameters.
const ROWS_MAX: usize = 512;

const RUNS: &str = "\
    insert into eec_run \
        (tenant_scope, run_id, record_version, last_transition_seq, status, workflow, pool_id, \
         idempotency_key, holds_record, definition, input, progress, reason, due_at, created_at, \
         updated_at, ended_at) ";

const TRANSITIONS: &str = "\
    insert into eec_run_transition \
        (tenant_scope, run_id, seq, record_version, tick_id, at, kind, step, detail, stamp) ";

const INTENTS: &str = "\
    insert into eec_effect_intent \
        (tenant_scope, intent_id, run_id, seq, step, destination, idempotency_key, sending, \
         horizon_ms, due_at, first_due_at, created_at) ";

const BODIES: &str = "insert into eec_effect_body (tenant_scope, intent_id, part, body) ";

/// A tick that was taken, whose parts are to be inserted.
pub struct Part<'a> {
    /// Whose run.
    pub tenant: &'a TenantScope,
    /// Which run.
    pub run_id: RunId,
    /// The version that it makes.
    pub record_version: i64,
    /// The number of the newest transition before it.
    pub seen_seq: i64,
    /// How it is recognised.
    pub tick_id: Stamp,
    /// What it makes.
    pub tick: &'a Tick,
}

type Row<'a> = Separated<'a, Sqlite, &'static str>;

/// Inserts the runs that decisions start, each whole.
pub async fn begin(
    connection: &mut SqliteConnection,
    now_ms: i64,
    decided: &[&Completion],
) -> Result<(), StoreError> {
    let starts: Vec<(&Completion, &NewRun)> = decided
        .iter()
        .filter_map(|completion| completion.run.as_deref().map(|run| (*completion, run)))
        .collect();
    insert(connection, RUNS, &starts, |row, (completion, run)| {
        let tick = &run.first;
        row.push_bind(completion.key.tenant.as_str());
        row.push_bind(completion.decision_id.0);
        row.push_bind(1_i64);
        row.push_bind(columns::last_seq(0, tick));
        row.push_bind(tick.status.word());
        row.push_bind(run.workflow.as_str());
        row.push_bind(completion.key.pool.as_str());
        row.push_bind(completion.key.key.as_str());
        row.push_bind(run.holds_record);
        row.push_bind(&run.definition[..]);
        row.push_bind(&run.input[..]);
        row.push_bind(&tick.progress[..]);
        row.push_bind(tick.reason.as_deref());
        row.push_bind(due_ms(tick, now_ms));
        row.push_bind(now_ms);
        row.push_bind(now_ms);
        row.push_bind(tick.status.is_final().then_some(now_ms));
    })
    .await?;
    let parts: Vec<Part<'_>> = starts
        .iter()
        .map(|(completion, run)| Part {
            tenant: &completion.key.tenant,
            run_id: completion.decision_id.into(),
            record_version: 1,
            seen_seq: 0,
            tick_id: run.tick_id,
            tick: &run.first,
        })
        .collect();
    add(connection, now_ms, &parts).await
}

/// Inserts what ticks add to their runs.
pub async fn add(
    connection: &mut SqliteConnection,
    now_ms: i64,
    parts: &[Part<'_>],
) -> Result<(), StoreError> {
    let mut transitions: Vec<(&Part<'_>, i64, &NewTransition)> = Vec::new();
    let mut intents: Vec<(&Part<'_>, &NewIntent)> = Vec::new();
    for part in parts {
        let seqs = part.seen_seq.saturating_add(1)..;
        let numbered = seqs.zip(&part.tick.transitions);
        transitions.extend(numbered.map(|(seq, transition)| (part, seq, transition)));
        intents.extend(part.tick.intents.iter().map(|intent| (part, intent)));
    }
    insert(
        connection,
        TRANSITIONS,
        &transitions,
        |row, (part, seq, t)| {
            row.push_bind(part.tenant.as_str());
            row.push_bind(part.run_id.0);
            row.push_bind(*seq);
            row.push_bind(part.record_version);
            row.push_bind(part.tick_id.0);
            row.push_bind(now_ms);
            row.push_bind(t.kind);
            row.push_bind(t.step.as_deref());
            row.push_bind(columns::detail(t));
            row.push_bind(t.stamp.map(|stamp| stamp.0));
        },
    )
    .await?;
    insert(connection, INTENTS, &intents, |row, (part, intent)| {
        let turn = intent.armed.then_some(now_ms);
        row.push_bind(part.tenant.as_str());
        row.push_bind(intent.id.0);
        row.push_bind(part.run_id.0);
        row.push_bind(intent.seq);
        row.push_bind(intent.step.as_str());
        row.push_bind(intent.destination.0.as_str());
        row.push_bind(intent.idempotency_key.as_str());
        row.push_bind(columns::json(&intent.sending));
        row.push_bind(columns::horizon_ms(intent));
        row.push_bind(turn);
        row.push_bind(turn);
        row.push_bind(now_ms);
    })
    .await?;
    insert(connection, BODIES, &intents, |row, (part, intent)| {
        row.push_bind(part.tenant.as_str());
        row.push_bind(intent.id.0);
        row.push_bind("message");
        row.push_bind(&intent.body[..]);
    })
    .await
}

/// When the timer that a tick leaves is over; for a run that has none yet.
pub fn due_ms(tick: &Tick, now_ms: i64) -> Option<i64> {
    match columns::timer(tick) {
        Timer::In(after) => Some(now_ms.saturating_add(rows::span_ms(after))),
        Timer::Keep | Timer::Clear => None,
    }
}

async fn insert<T>(
    connection: &mut SqliteConnection,
    beginning: &'static str,
    items: &[T],
    bind: impl Fn(&mut Row<'_>, &T),
) -> Result<(), StoreError> {
    for items in items.chunks(ROWS_MAX) {
        let mut query: QueryBuilder<Sqlite> = QueryBuilder::new(beginning);
        query.push_values(items, |mut row, item| bind(&mut row, item));
        let query = query.build().persistent(items.len() == 1);
        statement::run(connection, query).await?;
    }
    Ok(())
}
