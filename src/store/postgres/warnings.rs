//! Settings of the server that weaken the promise. None of them is refused: whoever set them may
//! have reasons, and is told what they cost.

use sqlx::postgres::PgRow;

use super::rows::Cells;
use super::run::{Repeat, Runner, fixed};
use crate::store::StoreError;

const SETTINGS: &str = "\
    select current_setting('synchronous_commit') as synchronous_commit, \
    current_setting('fsync') as fsync, \
    current_setting('full_page_writes') as full_page_writes, \
    current_setting('synchronous_standby_names') as standby_names, \
    (select count(*) from pg_stat_replication) as replicas, \
    (select count(*) from pg_class where relpersistence <> 'p' and oid in \
        (to_regclass('eec_routing_idempotency'), to_regclass('eec_routing_decision'))) as unlogged";

const POOLED: &str = "the store is reached through a transaction pooler: gateways are not woken by \
    each other and poll instead, and statements are not prepared; connect to PostgreSQL itself for \
    lower latency";

impl Runner {
    pub(super) async fn warnings(&self, pooled: bool) -> Result<Vec<String>, StoreError> {
        let rows = self.rows(Repeat::Safe, || fixed(SETTINGS)).await?;
        let mut warnings = match rows.first() {
            Some(row) => judge(row)?,
            None => Vec::new(),
        };
        if pooled {
            warnings.push(POOLED.to_owned());
        }
        Ok(warnings)
    }
}

fn judge(row: &PgRow) -> Result<Vec<String>, StoreError> {
    let cells = Cells::new(row, "pg_settings");
    let commit: &str = cells.get("synchronous_commit")?;
    let replicated = cells.get::<i64>("replicas")? > 0;
    let standbys: &str = cells.get("standby_names")?;
    let waits_for_standbys = !standbys.is_empty() && commit != "local";
    let weak = [
        (
            cells.get::<&str>("fsync")? == "off",
            "PostgreSQL runs with fsync = off: a crash can corrupt the database; set fsync = on",
        ),
        (
            cells.get::<&str>("full_page_writes")? == "off",
            "PostgreSQL runs with full_page_writes = off: a loss of power can corrupt the database; set full_page_writes = on",
        ),
        (
            commit == "off",
            "PostgreSQL runs with synchronous_commit = off: a crash loses decisions that were acknowledged, and requests run twice; set synchronous_commit = on",
        ),
        (
            replicated && !waits_for_standbys,
            "PostgreSQL is replicated and commits wait for no standby: a failover loses decisions that were acknowledged, and requests run twice; set synchronous_standby_names, and synchronous_commit = on",
        ),
        (
            cells.get::<i64>("unlogged")? > 0,
            "tables of the store are unlogged: a crash empties them, and requests run twice; alter them to be logged",
        ),
    ];
    let told = weak.into_iter().filter(|(is, _)| *is);
    Ok(told.map(|(_, warning)| warning.to_owned()).collect())
}
