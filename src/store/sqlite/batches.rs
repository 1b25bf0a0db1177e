//! The hot operations: a whole batch in one statement, or in two.
//!
//! Each statement is a trip to the connection's thread, and the trips, not SQLite, are what a
//! request costs. Rows of a statement are handled one after another in their order, so one record
//! may stand in a batch twice.
//!
//! Updates are written as upserts of rows that exist: an upsert finds each row by its key, whatever
//! the planner thinks, where `update … from` may choose to look at them all.

use std::collections::{HashMap, HashSet};

use sqlx::query_builder::Separated;
use sqlx::sqlite::SqliteRow;
use sqlx::{QueryBuilder, Sqlite, SqliteConnection};
use uuid::Uuid;

use super::remembered;
use super::rows::{self, Cells, DECISIONS, RECORDS, held_until, record_columns};
use super::runs::parts;
use super::statement;
use crate::domain::record::{
    AttemptToken, Claim, Claimed, Committed, Completion, DecisionId, Heartbeat, Record, Reserved,
    State,
};
use crate::domain::scope::RecordKey;
use crate::store::StoreError;

/// Rows of one statement: no statement has more than 32,766 parameters.
const ROWS_MAX: usize = 512;

const INSERT: &str = "\
    insert into eec_routing_idempotency \
        (tenant_scope, pool_id, idempotency_key, attempt_token, generation_id, fingerprint, \
         fingerprint_version, lease_ms, valid_for_ms, tombstone_for_ms, on_unknown, \
         lease_expires_at, created_at, reserved_at) ";

const ON_CONFLICT: &str = " on conflict (tenant_scope, pool_id, idempotency_key) do ";

/// Closes the rows of an upsert: those that exist.
const EXISTING: &str = "\
    ) v where exists \
        (select 1 from eec_routing_idempotency r \
         where r.tenant_scope = v.column1 and r.pool_id = v.column2 \
           and r.idempotency_key = v.column3)";

const HEARTBEAT: &str = "\
    insert into eec_routing_idempotency \
        (tenant_scope, pool_id, idempotency_key, attempt_token, lease_expires_at) \
    select * from (";

const EXTEND: &str = "\
    update set lease_expires_at = excluded.lease_expires_at \
    where attempt_token = excluded.attempt_token and status = 'pending' \
    returning attempt_token";

const COMPLETE: &str = "\
    insert into eec_routing_idempotency \
        (tenant_scope, pool_id, idempotency_key, attempt_token, decision_id, valid_until) \
    select * from (";

/// `excluded.valid_until` is the present.
const COMMIT: &str = "\
    update set status = 'completed', decision_id = excluded.decision_id, \
        valid_until = excluded.valid_until + valid_for_ms, lease_expires_at = null \
    where attempt_token = excluded.attempt_token \
      and status in ('pending', 'outcome_unknown', 'failed_before_commit') \
    returning decision_id, generation_id, valid_until, valid_for_ms";

const COMPLETED: &str = "\
    select decision_id, generation_id, valid_until, valid_for_ms from eec_routing_idempotency \
    where tenant_scope = ?1 and pool_id = ?2 and idempotency_key = ?3 \
      and status = 'completed' and decision_id = ?4";

const DECIDE: &str = "\
    insert into eec_routing_decision \
        (tenant_scope, pool_id, idempotency_key, decision_id, generation_id, decided_by, \
         created_at, valid_until, answer_status, answer_headers, cors_origin, cors_headers, \
         answer_body) ";

const LOOK_UP: &str = concat!(
    "select ",
    record_columns!(),
    ", ",
    held_until!(
        "r.status = 'completed' and r.valid_until <= n.ms",
        "n.ms",
        "r.tenant_scope",
        "r.decision_id",
        "r.valid_for_ms"
    ),
    " as held_until from (select "
);

/// Follows the present, which is bound once.
const OF_KEYS: &str = " as ms) n cross join (";

/// The keys first, each of which leads to its row.
const BY_KEY: &str = "\
    ) v cross join eec_routing_idempotency r \
      where r.tenant_scope = v.column1 and r.pool_id = v.column2 \
        and r.idempotency_key = v.column3";

/// Every statement that looks for rows, each of a batch of two, for the test of their plans.
#[cfg(test)]
pub fn statements() -> impl Iterator<Item = String> {
    let of = |beginning: &str, columns: usize, end: [&str; 3]| {
        let row = format!("({})", vec!["?"; columns].join(", "));
        format!("{beginning}values {row}, {row}{}", end.concat())
    };
    [
        of(INSERT, 14, [ON_CONFLICT, "nothing", ""]),
        of(HEARTBEAT, 5, [EXISTING, ON_CONFLICT, EXTEND]),
        of(COMPLETE, 6, [EXISTING, ON_CONFLICT, COMMIT]),
        of(&format!("{LOOK_UP}?{OF_KEYS}"), 3, [BY_KEY, "", ""]),
        COMPLETED.to_owned(),
    ]
    .into_iter()
}

/// Inserts each claim where no row is, and looks at the row where one is. No row vanishes between
/// the two: nobody else writes.
pub async fn reserve(
    connection: &mut SqliteConnection,
    now_ms: i64,
    claims: &[Claim],
) -> Result<Vec<Reserved>, StoreError> {
    let mut reserved = Vec::with_capacity(claims.len());
    for claims in claims.chunks(ROWS_MAX) {
        let mut insert = of_rows(INSERT, claims, |row, claim| {
            stamped(row, claim, now_ms);
        });
        insert.push(ON_CONFLICT).push("nothing");
        let inserted = insert.build().persistent(claims.len() == 1);
        let inserted = statement::run(connection, inserted).await?;
        if usize::try_from(inserted) == Ok(claims.len()) {
            for claim in claims {
                let claimed = Claimed {
                    generation: 1,
                    generation_id: claim.generation_id,
                };
                remembered::keep(connection, now_ms, claim, claimed).await?;
                reserved.push(Reserved::Won(claimed));
            }
            continue;
        }
        let keys = claims.iter().map(|claim| &claim.key);
        let found = find(connection, now_ms, keys).await?;
        for claim in claims {
            let Some(record) = found.get(&claim.key) else {
                reserved.push(Reserved::Vanished);
                continue;
            };
            if let Some(claimed) = owned(record, claim.token) {
                // Told again it is remembered already, and stays so.
                remembered::keep(connection, now_ms, claim, claimed).await?;
                reserved.push(Reserved::Won(claimed));
            } else {
                reserved.push(Reserved::Lost(Box::new(record.clone())));
            }
        }
    }
    Ok(reserved)
}

/// Extends leases.
pub async fn heartbeat(
    connection: &mut SqliteConnection,
    now_ms: i64,
    beats: &[Heartbeat],
) -> Result<Vec<bool>, StoreError> {
    let mut owners = HashSet::new();
    for beats in beats.chunks(ROWS_MAX) {
        let mut update = of_rows(HEARTBEAT, beats, |row, beat| {
            of_key(row, &beat.key);
            row.push_bind(beat.token.0);
            row.push_bind(now_ms.saturating_add(rows::span_ms(beat.lease)));
        });
        update.push(EXISTING).push(ON_CONFLICT).push(EXTEND);
        let extended = update.build().persistent(beats.len() == 1);
        for row in statement::rows(connection, extended).await? {
            owners.insert(Cells::new(&row, RECORDS).id("attempt_token")?);
        }
    }
    // A token is never reused, so it alone tells whose lease was extended.
    let extended = beats.iter().map(|beat| owners.contains(&beat.token.0));
    Ok(extended.collect())
}

/// Commits decisions.
pub async fn complete(
    connection: &mut SqliteConnection,
    now_ms: i64,
    completions: &[Completion],
) -> Result<Vec<Option<Committed>>, StoreError> {
    let mut committed = Vec::with_capacity(completions.len());
    for completions in completions.chunks(ROWS_MAX) {
        let mut update = of_rows(COMPLETE, completions, |row, completion| {
            of_key(row, &completion.key);
            row.push_bind(completion.token.0);
            row.push_bind(completion.decision_id.0);
            row.push_bind(now_ms);
        });
        update.push(EXISTING).push(ON_CONFLICT).push(COMMIT);
        let taken = update.build().persistent(completions.len() == 1);
        let taken = statement::rows(connection, taken).await?;
        let mut taken = by_decision(&taken)?;
        let mut decided = Vec::with_capacity(taken.len());
        for completion in completions {
            if let Some(taken) = taken.remove(&completion.decision_id) {
                committed.push(Some(taken.committed));
                decided.push((completion, taken));
            } else {
                committed.push(sent_again(connection, completion).await?);
            }
        }
        decide(connection, now_ms, &decided).await?;
        let decided = decided.iter().map(|(completion, _)| *completion);
        let starting: Vec<&Completion> = decided.filter(|done| done.run.is_some()).collect();
        parts::begin(connection, now_ms, &starting).await?;
    }
    Ok(committed)
}

/// Looks at records.
pub async fn look_up(
    connection: &mut SqliteConnection,
    now_ms: i64,
    keys: &[RecordKey],
) -> Result<Vec<Option<Record>>, StoreError> {
    let mut records = Vec::with_capacity(keys.len());
    for keys in keys.chunks(ROWS_MAX) {
        let found = find(connection, now_ms, keys.iter()).await?;
        records.extend(keys.iter().map(|key| found.get(key).cloned()));
    }
    Ok(records)
}

/// What the claim with that token has, if the record is still its own.
pub fn owned(record: &Record, token: AttemptToken) -> Option<Claimed> {
    let own = record.token == token && matches!(record.state, State::Pending(_));
    own.then_some(Claimed {
        generation: record.generation,
        generation_id: record.generation_id,
    })
}

/// A row that a completion was taken by.
struct Taken {
    committed: Committed,
    generation_id: Uuid,
    valid_until_ms: i64,
}

impl Taken {
    /// The row alone tells when it was committed, so the answer is the same after the decision
    /// itself was purged.
    fn read(row: &SqliteRow) -> Result<Self, StoreError> {
        let cells = Cells::new(row, RECORDS);
        let valid_until_ms: i64 = cells.get("valid_until")?;
        let valid_for_ms: i64 = cells.get("valid_for_ms")?;
        let created_at_ms = valid_until_ms.saturating_sub(valid_for_ms);
        let committed = Committed {
            decision_id: DecisionId(cells.id("decision_id")?),
            created_at: rows::instant(created_at_ms, RECORDS, "valid_for_ms")?,
            valid_until: rows::instant(valid_until_ms, RECORDS, "valid_until")?,
            awaited: false,
        };
        Ok(Self {
            committed,
            generation_id: cells.id("generation_id")?,
            valid_until_ms,
        })
    }
}

/// The rows that took a completion. No decision is for two records: another key would be told its
/// answer.
fn by_decision(rows: &[SqliteRow]) -> Result<HashMap<DecisionId, Taken>, StoreError> {
    let mut all = HashMap::with_capacity(rows.len());
    for row in rows {
        let taken = Taken::read(row)?;
        if all.insert(taken.committed.decision_id, taken).is_some() {
            let what = "one decision for two records";
            return Err(StoreError::inconsistent(DECISIONS, "decision_id", what));
        }
    }
    Ok(all)
}

/// The answer to a completion that was taken before, if it was.
async fn sent_again(
    connection: &mut SqliteConnection,
    completion: &Completion,
) -> Result<Option<Committed>, StoreError> {
    let row = super::records::of_key(COMPLETED, &completion.key).bind(completion.decision_id.0);
    let row = statement::row(connection, row).await?;
    row.map(|row| Taken::read(&row).map(|taken| taken.committed))
        .transpose()
}

/// Inserts the decisions of rows that were just completed.
async fn decide(
    connection: &mut SqliteConnection,
    now_ms: i64,
    decided: &[(&Completion, Taken)],
) -> Result<(), StoreError> {
    if decided.is_empty() {
        return Ok(());
    }
    let mut insert = of_rows(DECIDE, decided, |row, (completion, taken)| {
        let recorded = &completion.recorded;
        let cors = recorded.cors.as_ref();
        of_key(row, &completion.key);
        row.push_bind(completion.decision_id.0);
        row.push_bind(taken.generation_id);
        row.push_bind(completion.decided_by.as_str());
        row.push_bind(now_ms);
        row.push_bind(taken.valid_until_ms);
        row.push_bind(recorded.status);
        row.push_bind(recorded.headers.as_bytes());
        row.push_bind(cors.map(|cors| &cors.origin[..]));
        row.push_bind(cors.map(|cors| cors.headers.as_bytes()));
        row.push_bind(recorded.body.as_deref());
    });
    let inserted = insert.build().persistent(decided.len() == 1);
    statement::run(connection, inserted).await?;
    Ok(())
}

async fn find(
    connection: &mut SqliteConnection,
    now_ms: i64,
    keys: impl ExactSizeIterator<Item = &RecordKey>,
) -> Result<HashMap<RecordKey, Record>, StoreError> {
    let one = keys.len() == 1;
    let mut select = QueryBuilder::new(LOOK_UP);
    select.push_bind(now_ms).push(OF_KEYS);
    select.push_values(keys, |mut row, key| of_key(&mut row, key));
    select.push(BY_KEY);
    let rows = statement::rows(connection, select.build().persistent(one)).await?;
    let record = |row| rows::record(row, now_ms).map(|record| (record.key.clone(), record));
    rows.iter().map(record).collect()
}

/// A statement's beginning and its rows.
fn of_rows<T>(
    beginning: &'static str,
    items: impl IntoIterator<Item = T>,
    bind: impl Fn(&mut Row<'_>, T),
) -> QueryBuilder<Sqlite> {
    let mut query = QueryBuilder::new(beginning);
    query.push_values(items, |mut row, item| bind(&mut row, item));
    query
}

type Row<'a> = Separated<'a, Sqlite, &'static str>;

fn of_key(row: &mut Row<'_>, key: &RecordKey) {
    row.push_bind(key.tenant.as_str());
    row.push_bind(key.pool.as_str());
    row.push_bind(key.key.as_str());
}

fn stamped(row: &mut Row<'_>, claim: &Claim, now_ms: i64) {
    let fingerprint = claim.fingerprint.as_ref();
    let lease_ms = rows::span_ms(claim.terms.lease);
    of_key(row, &claim.key);
    row.push_bind(claim.token.0);
    row.push_bind(claim.generation_id.0);
    row.push_bind(fingerprint.map(|made| &made.hash[..]));
    row.push_bind(fingerprint.map(|made| made.version));
    row.push_bind(lease_ms);
    row.push_bind(rows::span_ms(claim.terms.valid_for));
    row.push_bind(rows::span_ms(claim.terms.tombstone_for));
    row.push_bind(claim.terms.on_unknown.word());
    row.push_bind(now_ms.saturating_add(lease_ms));
    row.push_bind(now_ms);
    row.push_bind(now_ms);
}
