//! The versions of the secret that keys every hash.

use sqlx::SqliteConnection;

use super::rows::Cells;
use super::statement;
use crate::domain::secret::Secret;
use crate::store::StoreError;

const MAKE: &str = "\
    insert into eec_secret (version, secret, created_at) \
    select 1, ?1, ?2 where not exists (select 1 from eec_secret)";

const ALL: &str = "select version, secret from eec_secret order by version";

/// Every version; makes the first from `fresh` when there is none.
pub async fn all(
    connection: &mut SqliteConnection,
    now_ms: i64,
    fresh: [u8; 32],
) -> Result<Vec<Secret>, StoreError> {
    let made = sqlx::query(MAKE).bind(&fresh[..]).bind(now_ms);
    statement::run(connection, made).await?;
    let rows = statement::rows(connection, sqlx::query(ALL)).await?;
    let secret = |row| {
        let cells = Cells::new(row, "eec_secret");
        Ok(Secret {
            version: cells.get("version")?,
            bytes: cells.exactly("secret", cells.get("secret")?)?,
        })
    };
    rows.iter().map(secret).collect()
}
