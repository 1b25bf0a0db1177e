//! Rows to values. A row may have been written by any hand, so nothing in it is trusted: what no
//! version of this program would write becomes an error that names table and column.

use std::time::Duration;

use bytes::Bytes;
use sqlx::sqlite::SqliteRow;
use sqlx::{Decode, QueryBuilder, Row, Sqlite, Type};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::domain::fingerprint::Fingerprint;
use crate::domain::key::IdempotencyKey;
use crate::domain::message::{Cors, HeaderBlock, Recorded};
use crate::domain::policy::OnUnknown;
use crate::domain::record::{
    AttemptToken, Committed, DecisionId, GenerationId, Lease, Record, State, StoredDecision, Terms,
    Validity,
};
use crate::domain::scope::{PoolId, RecordKey, TenantScope};
use crate::store::StoreError;

/// The record table.
pub const RECORDS: &str = "eec_routing_idempotency";
/// The decision table.
pub const DECISIONS: &str = "eec_routing_decision";

/// The longest time that is stamped on a row: far enough, and no sum of it overflows.
const SPAN_MS_MAX: i64 = 100 * 365 * 24 * 3_600_000;

/// What [`record`] reads.
macro_rules! record_columns {
    () => {
        "r.tenant_scope, r.pool_id, r.idempotency_key, r.status, r.attempt_token, r.generation, \
         r.generation_id, r.fingerprint, r.fingerprint_version, r.maybe_sent, r.lease_ms, \
         r.valid_for_ms, r.tombstone_for_ms, r.on_unknown, r.decision_id, r.lease_expires_at, \
         r.valid_until, r.created_at, r.reserved_at"
    };
}
pub(super) use record_columns;

/// Until when a run holds a record or decision whose validity is over: null when none does, and a
/// second from now while nobody knows. Nothing is looked for while it is valid by itself.
macro_rules! held_until {
    ($is_over:expr, $now:expr, $tenant:expr, $decision_id:expr, $valid_for:expr) => {
        concat!(
            "case when ",
            $is_over,
            " then (select iif(h.ended_at is null, ",
            $now,
            " + 1000, h.ended_at + ",
            $valid_for,
            ") from eec_run h where h.tenant_scope = ",
            $tenant,
            " and h.run_id = ",
            $decision_id,
            " and h.holds_record) end"
        )
    };
}

/// That no run holds a record or decision.
macro_rules! not_held {
    ($now:expr, $tenant:expr, $decision_id:expr, $valid_for:expr) => {
        concat!(
            "not exists (select 1 from eec_run h where h.tenant_scope = ",
            $tenant,
            " and h.run_id = ",
            $decision_id,
            " and h.holds_record and (h.ended_at is null or h.ended_at + ",
            $valid_for,
            " > ",
            $now,
            "))"
        )
    };
}
pub(super) use {held_until, not_held};

/// A row of the record table, judged at `now_ms`.
pub fn record(row: &SqliteRow, now_ms: i64) -> Result<Record, StoreError> {
    let cells = Cells::new(row, RECORDS);
    let reserved_at_ms: i64 = cells.get("reserved_at")?;
    let fingerprint = match cells.find::<Vec<u8>>("fingerprint")? {
        None => None,
        Some(bytes) => Some(Fingerprint {
            version: cells.get("fingerprint_version")?,
            hash: cells.exactly("fingerprint", bytes)?,
        }),
    };
    Ok(Record {
        key: key(&cells)?,
        state: state(&cells, now_ms)?,
        token: AttemptToken(cells.id("attempt_token")?),
        generation: cells.get("generation")?,
        generation_id: GenerationId(cells.id("generation_id")?),
        fingerprint,
        terms: Terms {
            lease: cells.span("lease_ms")?,
            valid_for: cells.span("valid_for_ms")?,
            tombstone_for: cells.span("tombstone_for_ms")?,
            on_unknown: OnUnknown::from_word(&cells.get::<String>("on_unknown")?),
        },
        created_at: cells.instant("created_at")?,
        reserved_at: cells.instant("reserved_at")?,
        reserved_ago: between(reserved_at_ms, now_ms),
    })
}

/// A row of the decision table, judged at `now_ms`.
pub fn decision(row: &SqliteRow, now_ms: i64) -> Result<StoredDecision, StoreError> {
    let cells = Cells::new(row, DECISIONS);
    let valid_until_ms: i64 = cells.get("valid_until")?;
    let held_until_ms: Option<i64> = cells.find("held_until")?;
    let valid_until_ms = held_until_ms.map_or(valid_until_ms, |ms| ms.max(valid_until_ms));
    let cors = match cells.find::<Vec<u8>>("cors_origin")? {
        None => None,
        Some(origin) => Some(Cors {
            origin: origin.into(),
            headers: cells.headers("cors_headers")?,
        }),
    };
    Ok(StoredDecision {
        committed: Committed {
            decision_id: DecisionId(cells.id("decision_id")?),
            created_at: cells.instant("created_at")?,
            valid_until: cells.instant("valid_until")?,
            awaited: false,
        },
        valid_for: (valid_until_ms > now_ms).then(|| between(now_ms, valid_until_ms)),
        decided_by: cells.get("decided_by")?,
        recorded: Recorded {
            status: cells.status("answer_status")?,
            headers: cells.headers("answer_headers")?,
            cors,
            body: cells.bytes_if_any("answer_body")?,
        },
    })
}

/// Adds that the rows are the tenant's, if one is asked for: its own and, behind a space, its
/// principals'. No tenant holds a character below '!'.
pub fn of_tenant(query: &mut QueryBuilder<Sqlite>, column: &'static str, tenant: Option<&str>) {
    if let Some(tenant) = tenant {
        query.push(" and ").push(column).push(" >= ");
        query.push_bind(tenant);
        query.push(" and ").push(column).push(" < ");
        query.push_bind(format!("{tenant}!"));
    }
}

/// An instant for people.
pub fn instant(
    ms: i64,
    table: &'static str,
    column: &'static str,
) -> Result<OffsetDateTime, StoreError> {
    let nanos = i128::from(ms) * 1_000_000;
    OffsetDateTime::from_unix_timestamp_nanos(nanos)
        .map_err(|_| StoreError::inconsistent(table, column, format!("{ms} is no instant")))
}

/// A duration as a row keeps it.
pub fn span_ms(span: Duration) -> i64 {
    i64::try_from(span.as_millis()).map_or(SPAN_MS_MAX, |ms| ms.min(SPAN_MS_MAX))
}

/// The time from one instant to a later one; zero when it is not later.
pub fn between(from_ms: i64, to_ms: i64) -> Duration {
    Duration::from_millis(u64::try_from(to_ms.saturating_sub(from_ms)).unwrap_or_default())
}

/// The cells of one row, each read with a check.
pub struct Cells<'r> {
    row: &'r SqliteRow,
    table: &'static str,
}

impl<'r> Cells<'r> {
    /// Of a row of that table.
    pub fn new(row: &'r SqliteRow, table: &'static str) -> Self {
        Self { row, table }
    }

    /// A cell that is never null. SQLite itself would read null as zero.
    pub fn get<T>(&self, column: &'static str) -> Result<T, StoreError>
    where
        T: Decode<'r, Sqlite> + Type<Sqlite>,
    {
        self.find(column)?
            .ok_or_else(|| self.inconsistent(column, "null"))
    }

    /// A cell that may be null.
    pub fn find<T>(&self, column: &'static str) -> Result<Option<T>, StoreError>
    where
        T: Decode<'r, Sqlite> + Type<Sqlite>,
    {
        self.row
            .try_get(column)
            .map_err(|error| self.inconsistent(column, error.to_string()))
    }

    /// An id of 16 bytes.
    pub fn id(&self, column: &'static str) -> Result<Uuid, StoreError> {
        self.exactly(column, self.get(column)?)
            .map(Uuid::from_bytes)
    }

    /// An id of 16 bytes that may be null.
    pub fn id_if_any(&self, column: &'static str) -> Result<Option<Uuid>, StoreError> {
        let bytes: Option<Vec<u8>> = self.find(column)?;
        let id = bytes.map(|bytes| self.exactly(column, bytes).map(Uuid::from_bytes));
        id.transpose()
    }

    /// Bytes that may be null.
    pub fn bytes_if_any(&self, column: &'static str) -> Result<Option<Bytes>, StoreError> {
        Ok(self.find::<Vec<u8>>(column)?.map(Bytes::from))
    }

    /// A count, which is never below zero.
    pub fn count(&self, column: &'static str) -> Result<u32, StoreError> {
        let count: i64 = self.get(column)?;
        u32::try_from(count).map_err(|_| self.inconsistent(column, format!("{count} is no count")))
    }

    /// An instant for people.
    pub fn instant(&self, column: &'static str) -> Result<OffsetDateTime, StoreError> {
        instant(self.get(column)?, self.table, column)
    }

    /// An instant for people that may be null.
    pub fn instant_if_any(
        &self,
        column: &'static str,
    ) -> Result<Option<OffsetDateTime>, StoreError> {
        let ms: Option<i64> = self.find(column)?;
        ms.map(|ms| instant(ms, self.table, column)).transpose()
    }

    /// The status of an answer.
    pub fn status(&self, column: &'static str) -> Result<u16, StoreError> {
        let status: i64 = self.get(column)?;
        match u16::try_from(status) {
            Ok(status @ 100..=999) => Ok(status),
            _ => Err(self.inconsistent(column, format!("{status} is no status of an answer"))),
        }
    }

    /// A duration.
    pub fn span(&self, column: &'static str) -> Result<Duration, StoreError> {
        let ms: i64 = self.get(column)?;
        let ms = u64::try_from(ms.min(SPAN_MS_MAX));
        ms.map(Duration::from_millis)
            .map_err(|_| self.inconsistent(column, "a negative duration"))
    }

    fn headers(&self, column: &'static str) -> Result<HeaderBlock, StoreError> {
        let bytes: Vec<u8> = self.get(column)?;
        HeaderBlock::stored(bytes.into())
            .ok_or_else(|| self.inconsistent(column, "no block of header lines"))
    }

    /// So many bytes and no others.
    pub fn exactly<const N: usize>(
        &self,
        column: &'static str,
        bytes: Vec<u8>,
    ) -> Result<[u8; N], StoreError> {
        let length = bytes.len();
        bytes
            .try_into()
            .map_err(|_| self.inconsistent(column, format!("{length} bytes instead of {N}")))
    }

    /// The report of a cell that no version of this program wrote.
    pub fn inconsistent(&self, column: &'static str, what: impl Into<String>) -> StoreError {
        StoreError::inconsistent(self.table, column, what)
    }
}

/// The key of a row that holds its three columns.
pub fn key(cells: &Cells<'_>) -> Result<RecordKey, StoreError> {
    let text: String = cells.get("idempotency_key")?;
    let key = match IdempotencyKey::from_text(&text) {
        Ok(Some(key)) => key,
        Ok(None) => return Err(cells.inconsistent("idempotency_key", "empty")),
        Err(error) => return Err(cells.inconsistent("idempotency_key", error.to_string())),
    };
    Ok(RecordKey {
        tenant: TenantScope::stored(&cells.get::<String>("tenant_scope")?),
        pool: PoolId::stored(&cells.get::<String>("pool_id")?),
        key,
    })
}

fn state(cells: &Cells<'_>, now_ms: i64) -> Result<State, StoreError> {
    match cells.get::<&str>("status")? {
        "pending" => Ok(State::Pending(
            match cells.find::<i64>("lease_expires_at")? {
                None => Lease::Unbounded,
                Some(ends_ms) if ends_ms <= now_ms => Lease::Over,
                Some(ends_ms) => Lease::Held(between(now_ms, ends_ms)),
            },
        )),
        "completed" => {
            let id = DecisionId(cells.id("decision_id")?);
            let valid_until_ms: i64 = cells.get("valid_until")?;
            let tombstone_ms: i64 = cells.get("tombstone_for_ms")?;
            let held_until_ms: Option<i64> = cells.find("held_until")?;
            Ok(State::Completed(
                id,
                match held_until_ms {
                    Some(ends_ms) if ends_ms > now_ms => Validity::Valid(between(now_ms, ends_ms)),
                    _ => validity(valid_until_ms, tombstone_ms, now_ms),
                },
            ))
        }
        "failed_before_commit" => Ok(State::FailedBeforeCommit {
            maybe_sent: cells.get("maybe_sent")?,
        }),
        "outcome_unknown" => Ok(State::OutcomeUnknown),
        other => Err(cells.inconsistent("status", format!("{other} is no state"))),
    }
}

fn validity(valid_until_ms: i64, tombstone_ms: i64, now_ms: i64) -> Validity {
    if valid_until_ms > now_ms {
        Validity::Valid(between(now_ms, valid_until_ms))
    } else if valid_until_ms.saturating_add(tombstone_ms) > now_ms {
        Validity::Tombstone
    } else {
        Validity::Expired
    }
}
