//! The sweep, retention and the gauges. Work is found without locks and done by a guarded
//! statement that checks everything again, so any number of gateways may do it at once.
//!
//! The sweep looks for pending rows in the order of their claims, from a floor below which it
//! knows none: a claim always carries the present, so nothing becomes pending below it. The floor
//! stays a while behind the present, for claims that were begun and not yet committed and for a
//! clock that steps back at a failover; and once in a while the sweep starts from the beginning.

use std::time::Duration;

use time::OffsetDateTime;
use tokio::time::Instant;
use uuid::Uuid;

use super::batch::{bind_key, bind_keys};
use super::rows::{Cells, DECISIONS, RECORDS, holds, record_key, us_from_now};
use super::run::{Repeat, Runner, fixed};
use crate::domain::record::AttemptToken;
use crate::domain::scope::RecordKey;
use crate::store::{Census, Purged, StoreError, Swept};

/// Rows that one page of the sweep looks at.
const PAGE_ROWS: i64 = 2_000;
/// Pages of one sweep; the next one goes on where it stopped.
const PAGES_MAX: u32 = 25;
/// How far the floor stays behind the present.
const FLOOR_LAG: Duration = Duration::from_mins(2);
/// After this the sweep starts from the beginning.
const FULL_EVERY: Duration = Duration::from_hours(1);
/// More unknown records are not counted.
const UNKNOWN_MAX: i64 = 10_000;

/// Where the sweep stands.
pub(super) struct Sweep {
    /// Nothing that was claimed at or before this is open.
    floor: OffsetDateTime,
    /// The present round has looked at everything up to here.
    at: OffsetDateTime,
    /// The oldest claim that the present round found open.
    oldest: Option<OffsetDateTime>,
    /// When a round last started from the beginning.
    full_at: Instant,
}

/// What a page of the sweep saw.
struct Page {
    due: Vec<(RecordKey, AttemptToken)>,
    seen: i64,
    last: Option<OffsetDateTime>,
    oldest: Option<OffsetDateTime>,
    present: OffsetDateTime,
}

/// The transition of a pending row whose lease is over.
macro_rules! sweep {
    () => {
        "update eec_routing_idempotency r \
         set status = case when r.on_unknown = 'redrive' then 'failed_before_commit' \
                 else 'outcome_unknown' end, \
             maybe_sent = r.maybe_sent or r.on_unknown = 'redrive', \
             valid_until = now() + r.valid_for_ms * interval '1 ms' "
    };
}

const SWEEP_ONE: &str = concat!(
    sweep!(),
    "where r.tenant_scope = $1 and r.pool_id = $2 and r.idempotency_key = $3 \
        and r.attempt_token = $4 and r.status = 'pending' and r.lease_expires_at <= now() \
    returning r.status"
);

const SWEEP: &str = concat!(
    sweep!(),
    "from unnest($1::text[], $2::text[], $3::text[], $4::uuid[]) \
        as b(tenant_scope, pool_id, idempotency_key, attempt_token) \
    where r.tenant_scope = b.tenant_scope and r.pool_id = b.pool_id \
        and r.idempotency_key = b.idempotency_key and r.attempt_token = b.attempt_token \
        and r.status = 'pending' and r.lease_expires_at <= now() \
    returning r.status"
);

/// One row at least, which tells of the page; with a due row in it, or several such rows.
const PAGE: &str = "\
    with page as ( \
        select tenant_scope, pool_id, idempotency_key, attempt_token, reserved_at, \
            lease_expires_at, status \
        from eec_routing_idempotency where reserved_at > $1 \
        order by reserved_at fetch first $2 rows with ties \
    ), about as ( \
        select count(*) as seen, max(reserved_at) as last, now() as present, \
            min(reserved_at) filter (where status = 'pending' and lease_expires_at is not null) \
            as oldest \
        from page \
    ), due as ( \
        select tenant_scope, pool_id, idempotency_key, attempt_token from page \
        where status = 'pending' and lease_expires_at <= now() \
        order by tenant_scope, pool_id, idempotency_key limit $3 \
    ) \
    select * from about left join due on true";

/// `held`: its run keeps it for longer.
const EXPIRED_DECISIONS: &str = concat!(
    "select d.tenant_scope, d.decision_id, d.valid_until, exists (select 1 ",
    holds!(
        "d.tenant_scope",
        "d.decision_id",
        "(d.valid_until - d.created_at)"
    ),
    ") as held from eec_routing_decision d \
    where d.valid_until > $1 and d.valid_until <= now() order by d.valid_until limit $2"
);

/// A decision takes its record with it, unless that is kept for longer or lives another life.
const PURGE_DECISIONS: &str = concat!(
    "with gone as ( \
        delete from eec_routing_decision d \
        using unnest($1::text[], $2::uuid[]) as b(tenant_scope, decision_id) \
        where d.tenant_scope = b.tenant_scope and d.decision_id = b.decision_id \
            and d.valid_until <= now() and not exists (select 1 ",
    holds!(
        "d.tenant_scope",
        "d.decision_id",
        "(d.valid_until - d.created_at)"
    ),
    ") returning d.tenant_scope, d.pool_id, d.idempotency_key, d.decision_id \
    ), records as ( \
        delete from eec_routing_idempotency r using gone \
        where r.tenant_scope = gone.tenant_scope and r.pool_id = gone.pool_id \
            and r.idempotency_key = gone.idempotency_key and r.decision_id = gone.decision_id \
            and r.status = 'completed' \
            and r.valid_until + r.tombstone_for_ms * interval '1 ms' <= now() \
        returning 1 \
    ) \
    select (select count(*) from gone) as decisions, (select count(*) from records) as records"
);

/// What a record is past when retention may take it.
macro_rules! purgeable {
    () => {
        concat!(
            "r.status in ('completed', 'failed_before_commit') and r.purge_from <= now() \
             and r.purge_from + r.tombstone_for_ms * interval '1 ms' <= now() \
             and not exists (select 1 ",
            holds!(
                "r.tenant_scope",
                "r.decision_id",
                "r.valid_for_ms * interval '1 ms'"
            ),
            ")"
        )
    };
}

const EXPIRED_RECORDS: &str = concat!(
    "select tenant_scope, pool_id, idempotency_key, attempt_token \
    from eec_routing_idempotency r where ",
    purgeable!(),
    " order by purge_from limit $1"
);

const PURGE_RECORDS: &str = concat!(
    "delete from eec_routing_idempotency r \
    using unnest($1::text[], $2::text[], $3::text[], $4::uuid[]) \
        as b(tenant_scope, pool_id, idempotency_key, attempt_token) \
    where r.tenant_scope = b.tenant_scope and r.pool_id = b.pool_id \
        and r.idempotency_key = b.idempotency_key and r.attempt_token = b.attempt_token and ",
    purgeable!(),
    " returning 1"
);

const CENSUS: &str = concat!(
    "select (select count(*) from (select 1 from eec_routing_idempotency \
        where unknown_reserved_at is not null limit $1) unknown) as unknown, \
    (select ",
    us_from_now!("reserved_at"),
    " from eec_routing_idempotency where status = 'pending' and reserved_at > $2 \
        order by reserved_at limit 1) as oldest_us"
);

impl Sweep {
    /// Everything is still to be looked at.
    pub(super) fn new() -> Self {
        Self {
            floor: OffsetDateTime::UNIX_EPOCH,
            at: OffsetDateTime::UNIX_EPOCH,
            oldest: None,
            full_at: Instant::now(),
        }
    }

    /// Nothing that was claimed at or before this is open, rows without a lease aside.
    pub(super) fn floor(&self) -> OffsetDateTime {
        self.floor
    }

    /// The round is over: the next one starts from the floor that it found.
    fn end_round(&mut self, present: OffsetDateTime) {
        let floor = present - FLOOR_LAG;
        // The row itself is to be seen again.
        let below = |open: OffsetDateTime| open - Duration::from_micros(1);
        self.floor = self.oldest.map_or(floor, |open| below(open).min(floor));
        if self.full_at.elapsed() > FULL_EVERY {
            self.full_at = Instant::now();
            self.floor = OffsetDateTime::UNIX_EPOCH;
        }
        self.at = self.floor;
        self.oldest = None;
    }
}

impl Runner {
    pub(super) async fn sweep_one(
        &self,
        key: &RecordKey,
        token: AttemptToken,
    ) -> Result<bool, StoreError> {
        let rows = self.rows(Repeat::Safe, || {
            bind_key(fixed(SWEEP_ONE), key).bind(token.0)
        });
        Ok(!rows.await?.is_empty())
    }

    pub(super) async fn sweep(&self, sweep: &mut Sweep, limit: u32) -> Result<Swept, StoreError> {
        let mut swept = Swept::default();
        let mut left = i64::from(limit);
        for _ in 0..PAGES_MAX {
            let page = self.page(sweep.at, left).await?;
            let due = i64::try_from(page.due.len()).unwrap_or(left);
            self.sweep_due(&page.due, &mut swept).await?;
            left -= due;
            if left <= 0 {
                // There may be more on this page.
                break;
            }
            sweep.oldest = sweep.oldest.into_iter().chain(page.oldest).min();
            sweep.at = page.last.unwrap_or(sweep.at);
            if page.seen < PAGE_ROWS {
                sweep.end_round(page.present);
                break;
            }
        }
        Ok(swept)
    }

    async fn page(&self, at: OffsetDateTime, limit: i64) -> Result<Page, StoreError> {
        let rows = self
            .rows(Repeat::Safe, || {
                fixed(PAGE).bind(at).bind(PAGE_ROWS).bind(limit)
            })
            .await?;
        let about = rows
            .first()
            .ok_or(StoreError::Refused(sqlx::Error::RowNotFound))?;
        let mut due = Vec::new();
        for row in &rows {
            let cells = Cells::new(row, RECORDS);
            if let Some(token) = cells.get::<Option<Uuid>>("attempt_token")? {
                due.push((record_key(cells)?, AttemptToken(token)));
            }
        }
        let about = Cells::new(about, RECORDS);
        Ok(Page {
            due,
            seen: about.get("seen")?,
            last: about.get("last")?,
            oldest: about.get("oldest")?,
            present: about.get("present")?,
        })
    }

    async fn sweep_due(
        &self,
        due: &[(RecordKey, AttemptToken)],
        swept: &mut Swept,
    ) -> Result<(), StoreError> {
        if due.is_empty() {
            return Ok(());
        }
        let tokens: Vec<Uuid> = due.iter().map(|(_, token)| token.0).collect();
        let rows = self.rows(Repeat::Safe, || {
            bind_keys(fixed(SWEEP), &due.iter().map(|(key, _)| key)).bind(&tokens[..])
        });
        for row in &rows.await? {
            match Cells::new(row, RECORDS).get("status")? {
                "outcome_unknown" => swept.outcome_unknown += 1,
                _ => swept.failed_before_commit += 1,
            }
        }
        Ok(())
    }

    /// `at`: where the last purge stopped among the decisions; what their runs hold is passed over,
    /// so that it never has to be read again and again.
    pub(super) async fn purge(
        &self,
        at: &mut OffsetDateTime,
        limit: u32,
    ) -> Result<Purged, StoreError> {
        let mut purged = self.purge_decisions(at, limit).await?;
        let left = i64::from(limit) - i64::try_from(purged.records).unwrap_or_default();
        let found = self
            .rows(Repeat::Safe, || fixed(EXPIRED_RECORDS).bind(left.max(0)))
            .await?;
        let mut keys = Vec::with_capacity(found.len());
        let mut tokens: Vec<Uuid> = Vec::with_capacity(found.len());
        for row in &found {
            let cells = Cells::new(row, RECORDS);
            keys.push(record_key(cells)?);
            tokens.push(cells.get("attempt_token")?);
        }
        if !keys.is_empty() {
            let rows = self.rows(Repeat::Safe, || {
                bind_keys(fixed(PURGE_RECORDS), &keys.iter()).bind(&tokens[..])
            });
            purged.records += rows.await?.len() as u64;
        }
        Ok(purged)
    }

    async fn purge_decisions(
        &self,
        at: &mut OffsetDateTime,
        limit: u32,
    ) -> Result<Purged, StoreError> {
        let (tenants, ids) = self.expired_decisions(at, limit).await?;
        if ids.is_empty() {
            return Ok(Purged::default());
        }
        let rows = self.rows(Repeat::Safe, || {
            fixed(PURGE_DECISIONS).bind(&tenants[..]).bind(&ids[..])
        });
        let mut purged = Purged::default();
        for row in &rows.await? {
            let cells = Cells::new(row, DECISIONS);
            purged.decisions += cells.get::<i64>("decisions")?.unsigned_abs();
            purged.records += cells.get::<i64>("records")?.unsigned_abs();
        }
        Ok(purged)
    }

    /// Decisions that nothing keeps, from where the last search stopped; at the end the next one
    /// starts from the beginning.
    async fn expired_decisions(
        &self,
        at: &mut OffsetDateTime,
        limit: u32,
    ) -> Result<(Vec<String>, Vec<Uuid>), StoreError> {
        let limit = i64::from(limit);
        let mut expired = (Vec::new(), Vec::new());
        let mut left = limit;
        for _ in 0..PAGES_MAX {
            let from = *at;
            let page = self.rows(Repeat::Safe, || {
                fixed(EXPIRED_DECISIONS).bind(from).bind(limit)
            });
            let page = page.await?;
            for row in &page {
                if left == 0 {
                    return Ok(expired);
                }
                let cells = Cells::new(row, DECISIONS);
                *at = cells.get("valid_until")?;
                if !cells.get::<bool>("held")? {
                    expired.0.push(cells.get("tenant_scope")?);
                    expired.1.push(cells.get("decision_id")?);
                    left -= 1;
                }
            }
            if (page.len() as u64) < limit.unsigned_abs() {
                *at = OffsetDateTime::UNIX_EPOCH;
                break;
            }
        }
        Ok(expired)
    }

    pub(super) async fn census(&self, floor: OffsetDateTime) -> Result<Census, StoreError> {
        let rows = self.rows(Repeat::Safe, || fixed(CENSUS).bind(UNKNOWN_MAX).bind(floor));
        let rows = rows.await?;
        let Some(row) = rows.first() else {
            return Ok(Census::default());
        };
        let cells = Cells::new(row, RECORDS);
        let oldest_us: Option<i64> = cells.get("oldest_us")?;
        Ok(Census {
            unknown: cells.get::<i64>("unknown")?.unsigned_abs(),
            oldest_pending: oldest_us.map(|us| Duration::from_micros(us.unsigned_abs())),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_floor_stays_below_every_open_row_and_behind_the_present() {
        let present = OffsetDateTime::UNIX_EPOCH + Duration::from_hours(1000);
        let mut sweep = Sweep::new();
        sweep.end_round(present);
        assert_eq!(sweep.floor(), present - FLOOR_LAG);
        for open in [present, present - Duration::from_hours(2)] {
            sweep.oldest = Some(open);
            sweep.end_round(present);
            assert!(sweep.floor() < open && sweep.floor() <= present - FLOOR_LAG);
            assert_eq!((sweep.at, sweep.oldest), (sweep.floor(), None));
        }
    }
}
