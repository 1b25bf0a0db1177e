//! The memory of claims that a caller of the API may ask for again. The first one that a request id
//! won stays, whatever the caller does with the id afterwards.

use std::time::Duration;

use sqlx::SqliteConnection;
use uuid::Uuid;

use super::records;
use super::rows::{self, Cells};
use super::statement;
use crate::domain::record::{AttemptToken, Claim, Claimed, GenerationId, Remembered};
use crate::domain::scope::TenantScope;
use crate::store::StoreError;

/// A claim is remembered for as long as a decision of it may be asked for, and at least this long.
const KEPT_MIN: Duration = Duration::from_hours(24);

const REMEMBER: &str = "\
    insert into eec_routing_claim \
        (tenant_scope, pool_id, idempotency_key, request_id, attempt_token, generation, \
         generation_id, lease_ms, created_at, keep_until) \
    values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10) \
    on conflict (tenant_scope, request_id) do nothing";

const REMEMBERED: &str = "\
    select tenant_scope, pool_id, idempotency_key, attempt_token, generation, generation_id, \
           lease_ms \
    from eec_routing_claim \
    where tenant_scope = ?1 and request_id = ?2 and keep_until > ?3";

/// The statement that looks for a row, for the test of their plans.
#[cfg(test)]
pub const STATEMENTS: [&str; 1] = [REMEMBERED];

/// Remembers a claim that won, if it is to be.
pub async fn keep(
    connection: &mut SqliteConnection,
    now_ms: i64,
    claim: &Claim,
    claimed: Claimed,
) -> Result<(), StoreError> {
    let Some(request_id) = claim.request_id else {
        return Ok(());
    };
    let lease_ms = rows::span_ms(claim.terms.lease);
    let kept_ms = rows::span_ms(claim.terms.valid_for.max(KEPT_MIN));
    let kept = records::of_key(REMEMBER, &claim.key)
        .bind(request_id)
        .bind(claim.token.0)
        .bind(claimed.generation)
        .bind(claimed.generation_id.0)
        .bind(lease_ms)
        .bind(now_ms)
        .bind(now_ms.saturating_add(kept_ms).saturating_add(lease_ms));
    statement::run(connection, kept).await?;
    Ok(())
}

/// The claim that this request id won.
pub async fn find(
    connection: &mut SqliteConnection,
    now_ms: i64,
    tenant: &TenantScope,
    request_id: Uuid,
) -> Result<Option<Remembered>, StoreError> {
    let row = sqlx::query(REMEMBERED)
        .bind(tenant.as_str())
        .bind(request_id)
        .bind(now_ms);
    let Some(row) = statement::row(connection, row).await? else {
        return Ok(None);
    };
    let cells = Cells::new(&row, "eec_routing_claim");
    Ok(Some(Remembered {
        key: rows::key(&cells)?,
        token: AttemptToken(cells.id("attempt_token")?),
        claimed: Claimed {
            generation: cells.get("generation")?,
            generation_id: GenerationId(cells.id("generation_id")?),
        },
        lease: cells.span("lease_ms")?,
    }))
}
