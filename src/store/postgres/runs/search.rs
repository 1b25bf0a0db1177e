//! What people look for: runs, their history, their attempts.

use super::rows::{attempt, line, line_columns, run_columns, run_key, transition};
use crate::domain::run::{RunId, RunKey, RunStatus};
use crate::store::StoreError;
use crate::store::postgres::run::{Repeat, Runner, Statement, fixed};
use crate::store::runs::{Attempt, RunLine, RunSearch, Transition};

const BY_ID: &str = "select tenant_scope, run_id from eec_run where run_id = $1 limit 1";

const SHOW: &str = concat!(
    "select ",
    run_columns!(),
    line_columns!(),
    " from eec_run r where r.tenant_scope = $1 and r.run_id = $2"
);

/// Plans are made with the values in hand, so a condition that is not given costs nothing. Under
/// collation "C" no other tenant sorts between a tenant and its principals.
macro_rules! find_where {
    ($status:literal) => {
        concat!(
            "select ",
            run_columns!(),
            line_columns!(),
            " from eec_run r where ",
            $status,
            " and ($2::text is null or (r.tenant_scope >= $2 and r.tenant_scope < $2 || '!' \
                and (r.tenant_scope = $2 or starts_with(r.tenant_scope, $2 || ' ')))) \
            and ($3::text is null or r.workflow = $3) \
            and ($4::text is null or r.pool_id = $4) \
            and ($5::text is null or (r.tenant_scope, r.run_id) > ($5, $6)) \
            order by r.tenant_scope, r.run_id limit $7"
        )
    };
}

const FIND: &str = find_where!("($1::text is null or r.status = $1)");

/// What operators look for most, and what is rare, has an index of its own.
const FIND_STUCK: &str = find_where!("r.status = 'stuck' and $1::text is not null");

const TRANSITIONS: &str = "\
    select seq, record_version, at, kind, step, detail, stamp from eec_run_transition \
    where tenant_scope = $1 and run_id = $2 and seq > $3 order by seq limit $4";

const ATTEMPTS: &str = "\
    select intent_id, stamp, try, status, worker, started_at, ended_at, outcome, answer_status, \
        diagnostic \
    from eec_run_attempt where tenant_scope = $1 and run_id = $2 \
    order by started_at desc, stamp desc limit $3";

impl Runner {
    pub(in crate::store::postgres) async fn find_run(
        &self,
        id: RunId,
    ) -> Result<Option<RunKey>, StoreError> {
        let rows = self.rows(Repeat::Safe, || fixed(BY_ID).bind(id.0)).await?;
        rows.first().map(run_key).transpose()
    }

    pub(in crate::store::postgres) async fn show_run(
        &self,
        key: &RunKey,
    ) -> Result<Option<RunLine>, StoreError> {
        let rows = self.rows(Repeat::Safe, || of_run(SHOW, key)).await?;
        rows.first().map(line).transpose()
    }

    pub(in crate::store::postgres) async fn find_runs(
        &self,
        search: &RunSearch,
    ) -> Result<Vec<RunLine>, StoreError> {
        let stuck = search.status == Some(RunStatus::Stuck);
        let after = search.after.as_ref();
        let rows = self.rows(Repeat::Safe, || {
            fixed(if stuck { FIND_STUCK } else { FIND })
                .bind(search.status.map(RunStatus::word))
                .bind(search.tenant.as_deref())
                .bind(search.workflow.as_deref())
                .bind(search.pool.as_deref())
                .bind(after.map(|key| key.tenant.as_str()))
                .bind(after.map(|key| key.id.0))
                .bind(i64::from(search.limit))
        });
        rows.await?.iter().map(line).collect()
    }

    pub(in crate::store::postgres) async fn transitions(
        &self,
        key: &RunKey,
        after: i64,
        limit: u32,
    ) -> Result<Vec<Transition>, StoreError> {
        let rows = self.rows(Repeat::Safe, || {
            of_run(TRANSITIONS, key).bind(after).bind(i64::from(limit))
        });
        rows.await?.iter().map(transition).collect()
    }

    pub(in crate::store::postgres) async fn attempts(
        &self,
        key: &RunKey,
        limit: u32,
    ) -> Result<Vec<Attempt>, StoreError> {
        let rows = self.rows(Repeat::Safe, || {
            of_run(ATTEMPTS, key).bind(i64::from(limit))
        });
        rows.await?.iter().map(attempt).collect()
    }
}

fn of_run(sql: &'static str, key: &RunKey) -> Statement {
    fixed(sql).bind(key.tenant.as_str()).bind(key.id.0)
}
