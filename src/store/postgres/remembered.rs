//! Claims: their statements, and the memory of those that a caller of the API may ask for again.
//!
//! A claim is remembered by the statement that wins it. The first one that a request id won stays,
//! whatever the caller does with the id afterwards.

use uuid::Uuid;

use super::rows::{Cells, from_ms, holds, record_key};
use super::run::{Repeat, Runner, fixed};
use crate::domain::record::{AttemptToken, Claimed, GenerationId, Remembered};
use crate::domain::scope::TenantScope;
use crate::store::StoreError;

macro_rules! reserve {
    () => {
        "\
            insert into eec_routing_idempotency (tenant_scope, pool_id, idempotency_key, attempt_token, \
                generation_id, fingerprint, fingerprint_version, lease_ms, valid_for_ms, \
                tombstone_for_ms, on_unknown, lease_expires_at) \
            select b.*, now() + b.lease_ms * interval '1 ms' \
            from unnest($1::text[], $2::text[], $3::text[], $4::uuid[], $5::uuid[], $6::bytea[], \
                $7::int[], $8::bigint[], $9::bigint[], $10::bigint[], $11::text[]) \
                as b(tenant_scope, pool_id, idempotency_key, attempt_token, generation_id, fingerprint, \
                fingerprint_version, lease_ms, valid_for_ms, tombstone_for_ms, on_unknown) \
            on conflict (tenant_scope, pool_id, idempotency_key) do nothing \
            "
    };
}

macro_rules! reclaim {
    () => {
        concat!(
            "update eec_routing_idempotency r \
            set status = 'pending', attempt_token = $5, \
                generation = r.generation + (r.status = 'completed')::int, \
                generation_id = case when r.status = 'completed' then $6 else r.generation_id end, \
                maybe_sent = r.maybe_sent and r.status <> 'completed', awaited = false, \
                fingerprint = $7, fingerprint_version = $8, lease_ms = $9, valid_for_ms = $10, \
                tombstone_for_ms = $11, on_unknown = $12, decision_id = null, valid_until = null, \
                lease_expires_at = now() + $9::bigint * interval '1 ms', reserved_at = now() \
            where r.tenant_scope = $1 and r.pool_id = $2 and r.idempotency_key = $3 \
                and r.attempt_token = $4 \
                and (r.status = 'failed_before_commit' or (r.status = 'completed' \
                    and r.valid_until + r.tombstone_for_ms * interval '1 ms' <= now() \
                    and not exists (select 1 ",
            holds!(
                "r.tenant_scope",
                "r.decision_id",
                "r.valid_for_ms * interval '1 ms'"
            ),
            "))) "
        )
    };
}

/// Remembers the claims of `won`, of which each bears its `request_id`: for as long as a decision
/// of theirs may be asked for, at least a day.
macro_rules! remember {
    ($request_id:literal, $of:literal) => {
        concat!(
            "insert into eec_routing_claim (tenant_scope, request_id, pool_id, idempotency_key, \
                attempt_token, generation, generation_id, lease_ms, keep_until) \
            select won.tenant_scope, ",
            $request_id,
            ", won.pool_id, won.idempotency_key, won.attempt_token, won.generation, \
                won.generation_id, won.lease_ms, \
                now() + (greatest(won.valid_for_ms, 86400000) + won.lease_ms) * interval '1 ms' \
            from won ",
            $of,
            " on conflict (tenant_scope, request_id) do nothing"
        )
    };
}

/// Inserts each claim where no row is.
pub(super) const RESERVE: &str = concat!(reserve!(), "returning attempt_token");

/// The same, and remembers those that have a request id.
pub(super) const RESERVE_REMEMBERED: &str = concat!(
    "with won as (",
    reserve!(),
    "returning *), kept as (",
    remember!(
        "c.request_id",
        "join unnest($4::uuid[], $12::uuid[]) as c(attempt_token, request_id) \
            on c.attempt_token = won.attempt_token and c.request_id is not null"
    ),
    ") select attempt_token from won"
);

/// Claims a row that is reclaimable.
pub(super) const RECLAIM: &str = concat!(reclaim!(), "returning r.generation, r.generation_id");

/// The same, and remembers it.
pub(super) const RECLAIM_REMEMBERED: &str = concat!(
    "with won as (",
    reclaim!(),
    // The id may have won a claim since it was looked up: it never wins a second one.
    "and not exists (select 1 from eec_routing_claim c where c.tenant_scope = $1 \
        and c.request_id = $13::uuid and c.keep_until > now()) \
    returning r.*), kept as (",
    remember!("$13::uuid", ""),
    ") select generation, generation_id from won"
);

const REMEMBERED: &str = "\
    select pool_id, idempotency_key, tenant_scope, attempt_token, generation, generation_id, \
        lease_ms \
    from eec_routing_claim \
    where tenant_scope = $1 and request_id = $2 and keep_until > now()";

impl Runner {
    pub(super) async fn remembered(
        &self,
        tenant: &TenantScope,
        request_id: Uuid,
    ) -> Result<Option<Remembered>, StoreError> {
        let rows = self.rows(Repeat::Safe, || {
            fixed(REMEMBERED).bind(tenant.as_str()).bind(request_id)
        });
        let rows = rows.await?;
        let Some(row) = rows.first() else {
            return Ok(None);
        };
        let cells = Cells::new(row, "eec_routing_claim");
        Ok(Some(Remembered {
            key: record_key(cells)?,
            token: AttemptToken(cells.get("attempt_token")?),
            claimed: Claimed {
                generation: cells.get("generation")?,
                generation_id: GenerationId(cells.get("generation_id")?),
            },
            lease: from_ms(cells.get("lease_ms")?),
        }))
    }
}
