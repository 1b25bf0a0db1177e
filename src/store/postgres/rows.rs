//! Between rows and the domain's types, and the pieces of SQL that both directions share.

use std::time::Duration;

use bytes::Bytes;
use sqlx::postgres::PgRow;
use sqlx::{Decode, Postgres, Row as _, Type};
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
pub(super) const RECORDS: &str = "eec_routing_idempotency";
/// The decision table.
pub(super) const DECISIONS: &str = "eec_routing_decision";

/// Longer durations are cut to this, about a hundred years, so that no sum leaves the range of a
/// `timestamptz` and fails a whole batch.
const DURATION_MAX_MS: i64 = 36_500 * 24 * 3600 * 1000;

/// How long an instant is from now, in microseconds; null for null. Infinity, which only a hand
/// can have written, becomes a hundred years.
macro_rules! us_from_now {
    ($instant:literal) => {
        concat!(
            "case when isfinite(",
            $instant,
            ") then (extract(epoch from ",
            $instant,
            " - now()) * 1000000)::bigint when ",
            $instant,
            " > now() then 3153600000000000 when ",
            $instant,
            " <= now() then -3153600000000000 end"
        )
    };
}

/// A run `h` that holds its record: not final, or so for less than the record's validity. It is
/// found by the decision's id.
macro_rules! holds {
    ($tenant:literal, $decision_id:literal, $valid_for:literal) => {
        concat!(
            "from eec_run h where h.tenant_scope = ",
            $tenant,
            " and h.run_id = ",
            $decision_id,
            " and h.holds_record and (h.ended_at is null or h.ended_at + ",
            $valid_for,
            " > now())"
        )
    };
}

/// For how many microseconds a record or decision is valid whose `$valid_until` is over, if a run
/// holds it: until the hold ends, and for a second at a time while nobody knows when that is.
/// Nothing is looked for while it is valid by itself.
macro_rules! valid_us {
    ($is_over:literal, $valid_until:literal, $tenant:literal, $decision_id:literal, $for:literal) => {
        concat!(
            "case when ",
            $is_over,
            " then coalesce((select coalesce((extract(epoch from h.ended_at + ",
            $for,
            " - now()) * 1000000)::bigint, 1000000) ",
            $crate::store::postgres::rows::holds!($tenant, $decision_id, $for),
            "), ",
            us_from_now!($valid_until),
            ") else ",
            us_from_now!($valid_until),
            " end"
        )
    };
}

/// The columns of a record `r` that [`record`] reads.
macro_rules! record_columns {
    () => {
        concat!(
            "r.status, r.attempt_token, r.generation, r.generation_id, r.fingerprint, \
             r.fingerprint_version, r.maybe_sent, r.lease_ms, r.valid_for_ms, r.tombstone_for_ms, \
             r.on_unknown, r.decision_id, r.created_at, r.reserved_at, ",
            us_from_now!("r.reserved_at"),
            " as reserved_us, ",
            us_from_now!("r.lease_expires_at"),
            " as lease_us, ",
            valid_us!(
                "r.status = 'completed' and r.valid_until <= now()",
                "r.valid_until",
                "r.tenant_scope",
                "r.decision_id",
                "r.valid_for_ms * interval '1 ms'"
            ),
            " as valid_us"
        )
    };
}

pub(super) use {holds, record_columns, us_from_now, valid_us};

/// A duration as milliseconds for a parameter.
pub(super) fn to_ms(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).map_or(DURATION_MAX_MS, |ms| ms.min(DURATION_MAX_MS))
}

/// Text that a person wrote. PostgreSQL takes no NUL in text, and must not refuse for one.
pub(super) fn to_text(text: &str) -> String {
    text.replace('\0', "\u{fffd}")
}

/// The cells of one row, each read with a check: what no version of this program wrote becomes an
/// error that names table and column.
#[derive(Clone, Copy)]
pub(super) struct Cells<'r> {
    row: &'r PgRow,
    table: &'static str,
}

impl<'r> Cells<'r> {
    /// Of a row of that table.
    pub(super) fn new(row: &'r PgRow, table: &'static str) -> Self {
        Self { row, table }
    }

    /// A cell; one that may be null is an option.
    pub(super) fn get<T>(self, column: &'static str) -> Result<T, StoreError>
    where
        T: Decode<'r, Postgres> + Type<Postgres>,
    {
        self.row
            .try_get(column)
            .map_err(|error| self.inconsistent(column, error.to_string()))
    }

    /// Bytes.
    pub(super) fn bytes(self, column: &'static str) -> Result<Bytes, StoreError> {
        self.get(column).map(Bytes::copy_from_slice)
    }

    /// Bytes that may be null.
    pub(super) fn bytes_if_any(self, column: &'static str) -> Result<Option<Bytes>, StoreError> {
        let bytes: Option<&[u8]> = self.get(column)?;
        Ok(bytes.map(Bytes::copy_from_slice))
    }

    /// A count, which is never below zero.
    pub(super) fn count(self, column: &'static str) -> Result<u32, StoreError> {
        let count: i32 = self.get(column)?;
        u32::try_from(count).map_err(|_| self.inconsistent(column, format!("{count} is no count")))
    }

    /// The status of an answer.
    pub(super) fn status(self, column: &'static str) -> Result<u16, StoreError> {
        let status: i16 = self.get(column)?;
        match u16::try_from(status) {
            Ok(status @ 100..=999) => Ok(status),
            _ => Err(self.inconsistent(column, format!("{status} is no status of an answer"))),
        }
    }

    /// The report of a cell that no version of this program wrote.
    pub(super) fn inconsistent(self, column: &'static str, what: impl Into<String>) -> StoreError {
        StoreError::inconsistent(self.table, column, what)
    }
}

/// The key of a row that holds its three columns.
pub(super) fn record_key(cells: Cells<'_>) -> Result<RecordKey, StoreError> {
    let key = IdempotencyKey::from_text(cells.get("idempotency_key")?);
    let key = key.ok().flatten();
    let key =
        key.ok_or_else(|| cells.inconsistent("idempotency_key", "no key that a client can send"))?;
    Ok(RecordKey {
        tenant: TenantScope::stored(cells.get("tenant_scope")?),
        pool: PoolId::stored(cells.get("pool_id")?),
        key,
    })
}

/// The record that `record_columns!` gave.
pub(super) fn record(row: &PgRow, key: RecordKey) -> Result<Record, StoreError> {
    let cells = Cells::new(row, RECORDS);
    let terms = Terms {
        lease: from_ms(cells.get("lease_ms")?),
        valid_for: from_ms(cells.get("valid_for_ms")?),
        tombstone_for: from_ms(cells.get("tombstone_for_ms")?),
        on_unknown: OnUnknown::from_word(cells.get("on_unknown")?),
    };
    Ok(Record {
        key,
        state: state(cells, terms.tombstone_for)?,
        token: AttemptToken(cells.get("attempt_token")?),
        generation: cells.get("generation")?,
        generation_id: GenerationId(cells.get("generation_id")?),
        fingerprint: fingerprint(cells.get("fingerprint")?, cells.get("fingerprint_version")?),
        terms,
        created_at: cells.get("created_at")?,
        reserved_at: cells.get("reserved_at")?,
        reserved_ago: from_us(-cells.get::<i64>("reserved_us")?),
    })
}

/// The decision of a row with all its columns and `valid_us`.
pub(super) fn decision(row: &PgRow, id: DecisionId) -> Result<StoredDecision, StoreError> {
    let cells = Cells::new(row, DECISIONS);
    let valid_us: i64 = cells.get("valid_us")?;
    Ok(StoredDecision {
        committed: Committed {
            decision_id: id,
            created_at: cells.get("created_at")?,
            valid_until: cells.get("valid_until")?,
            awaited: false,
        },
        valid_for: (valid_us > 0).then(|| from_us(valid_us)),
        decided_by: cells.get("decided_by")?,
        recorded: recorded(cells)?,
    })
}

fn state(cells: Cells<'_>, tombstone_for: Duration) -> Result<State, StoreError> {
    let status: &str = cells.get("status")?;
    Ok(match status {
        "pending" => State::Pending(match cells.get::<Option<i64>>("lease_us")? {
            None => Lease::Unbounded,
            Some(us) if us > 0 => Lease::Held(from_us(us)),
            Some(_) => Lease::Over,
        }),
        "completed" => {
            let id: Option<Uuid> = cells.get("decision_id")?;
            let valid_us: Option<i64> = cells.get("valid_us")?;
            let (Some(id), Some(valid_us)) = (id, valid_us) else {
                let column = if id.is_none() {
                    "decision_id"
                } else {
                    "valid_until"
                };
                return Err(cells.inconsistent(column, "null in a completed record"));
            };
            let validity = if valid_us > 0 {
                Validity::Valid(from_us(valid_us))
            } else if from_us(-valid_us) < tombstone_for {
                Validity::Tombstone
            } else {
                Validity::Expired
            };
            State::Completed(DecisionId(id), validity)
        }
        "failed_before_commit" => State::FailedBeforeCommit {
            maybe_sent: cells.get("maybe_sent")?,
        },
        "outcome_unknown" => State::OutcomeUnknown,
        other => return Err(cells.inconsistent("status", format!("{other} is no state"))),
    })
}

/// What is there but is no fingerprint of ours gets version 0, which is never issued: it compares
/// equal to nothing, so it refuses and never runs twice, and fails no batch.
fn fingerprint(hash: Option<&[u8]>, version: Option<i32>) -> Option<Fingerprint> {
    let hash = hash?;
    let whole = <[u8; 32]>::try_from(hash).ok().zip(version);
    Some(whole.map_or(
        Fingerprint {
            version: 0,
            hash: [0; 32],
        },
        |(hash, version)| Fingerprint { version, hash },
    ))
}

fn recorded(cells: Cells<'_>) -> Result<Recorded, StoreError> {
    let block = |column, bytes| {
        HeaderBlock::stored(bytes)
            .ok_or_else(|| cells.inconsistent(column, "not a block of header lines"))
    };
    let origin = cells.bytes_if_any("cors_origin")?;
    let headers = cells.bytes_if_any("cors_headers")?;
    let cors = match origin.zip(headers) {
        Some((origin, headers)) => Some(Cors {
            origin,
            headers: block("cors_headers", headers)?,
        }),
        None => None,
    };
    Ok(Recorded {
        status: cells.status("answer_status")?,
        headers: block("answer_headers", cells.bytes("answer_headers")?)?,
        cors,
        body: cells.bytes_if_any("answer_body")?,
    })
}

pub(super) fn from_ms(ms: i64) -> Duration {
    Duration::from_millis(u64::try_from(ms).unwrap_or(0))
}

/// Zero for what is past.
pub(super) fn from_us(us: i64) -> Duration {
    Duration::from_micros(u64::try_from(us).unwrap_or(0))
}
