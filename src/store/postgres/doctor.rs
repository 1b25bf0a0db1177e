//! What can be told of a PostgreSQL server's health beyond its settings: who holds back its
//! cleaning up, and whether hints arrive.

use std::fmt::Write as _;
use std::time::Duration;

use super::rows::Cells;
use super::run::{Repeat, Runner, fixed};
use super::wakeup::Wakeups;
use crate::store::StoreError;
use crate::store::doctor::{Finding, Health};

/// How long a connection that listens may take to be there.
const LISTEN_MAX: Duration = Duration::from_secs(3);
/// From when on a transaction of anybody is worth a look, and from when on it does harm.
const OPEN: [Duration; 2] = [Duration::from_mins(5), Duration::from_hours(1)];
/// From how many transactions on, that a forgotten holder keeps from being cleaned up.
const HELD_MAX: i64 = 10_000_000;

/// What others do is hidden from a role that is not in `pg_read_all_stats`, but for their number.
const HOLDERS: &str = "\
    select current_setting('server_version') as version, \
    (select (extract(epoch from max(now() - xact_start)) * 1000)::bigint from pg_stat_activity \
        where datname = current_database() and pid <> pg_backend_pid()) as open_ms, \
    (select max(age(backend_xmin))::bigint from pg_stat_activity \
        where datname = current_database() and pid <> pg_backend_pid()) as held, \
    (select count(*) from pg_stat_activity \
        where datname = current_database() and state is null and backend_type = 'client backend') as hidden, \
    (select (extract(epoch from max(now() - prepared)) * 1000)::bigint from pg_prepared_xacts \
        where database = current_database()) as prepared_ms, \
    (select max(greatest(age(xmin), age(catalog_xmin)))::bigint from pg_replication_slots) as slots";

impl Runner {
    pub(super) async fn doctor(&self, wakeups: &Wakeups) -> Result<Vec<Finding>, StoreError> {
        let rows = self.rows(Repeat::Safe, || fixed(HOLDERS)).await?;
        let mut findings = vec![listener(wakeups).await];
        let Some(row) = rows.first() else {
            return Ok(findings);
        };
        let cells = Cells::new(row, "pg_stat_activity");
        let version: &str = cells.get("version")?;
        findings.push(Finding::new(
            "server",
            Health::Good,
            format!("PostgreSQL {version}"),
        ));
        findings.push(transactions(cells.get("open_ms")?, cells.get("hidden")?));
        findings.push(held(
            cells.get("held")?,
            cells.get("slots")?,
            cells.get("prepared_ms")?,
        ));
        Ok(findings)
    }
}

async fn listener(wakeups: &Wakeups) -> Finding {
    if !wakeups.on() {
        let says = "gateways are not woken by each other and poll instead: `store.notify` is off, or \
                    a transaction pooler stands between";
        return Finding::new("listener", Health::Warn, says);
    }
    if wakeups.listens_within(LISTEN_MAX).await {
        return Finding::new("listener", Health::Good, "hints from other gateways arrive");
    }
    let says = "the connection that listens for hints is not there; polling goes on, and the \
                gateway's log says why";
    Finding::new("listener", Health::Warn, says)
}

/// A long transaction keeps dead rows from being cleaned up, and every claim slows down.
fn transactions(open_ms: Option<i64>, hidden: i64) -> Finding {
    let open = Duration::from_millis(open_ms.unwrap_or_default().unsigned_abs());
    let whole = humantime::format_duration(Duration::from_secs(open.as_secs()));
    let mut says = format!("the oldest transaction in this database is open for {whole}");
    let [long, harmful] = OPEN;
    let health = match open {
        open if open >= harmful => Health::Bad,
        open if open >= long => Health::Warn,
        _ => Health::Good,
    };
    if health != Health::Good {
        says += "; find it in pg_stat_activity by xact_start, and end it";
    }
    if hidden > 0 {
        let _ = write!(
            says,
            " ({hidden} sessions are hidden from this role; pg_read_all_stats shows them)"
        );
    }
    Finding::new("transactions", health, says)
}

fn held(held: Option<i64>, slots: Option<i64>, prepared_ms: Option<i64>) -> Finding {
    let (held, slots) = (held.unwrap_or(0), slots.unwrap_or(0));
    let prepared = Duration::from_millis(prepared_ms.unwrap_or_default().unsigned_abs());
    let [long, _] = OPEN;
    let mut says = format!("rows deleted {held} transactions ago are still held by sessions");
    let mut health = Health::Good;
    if slots > HELD_MAX {
        health = Health::Warn;
        let _ = write!(
            says,
            ", and {slots} by a replication slot: is its reader gone?"
        );
    }
    if prepared >= long {
        health = Health::Warn;
        says += ", and a prepared transaction was forgotten: see pg_prepared_xacts";
    }
    if held > HELD_MAX {
        health = Health::Warn;
    }
    Finding::new("held rows", health, says)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transaction_that_is_open_for_long_is_told() {
        let minutes = |minutes: i64| transactions(Some(minutes * 60_000), 0).health;
        assert_eq!(transactions(None, 3).health, Health::Good);
        assert_eq!(minutes(1), Health::Good);
        assert_eq!(minutes(5), Health::Warn);
        assert_eq!(minutes(90), Health::Bad);
    }

    #[test]
    fn a_slot_that_nobody_reads_and_a_forgotten_transaction_are_told() {
        assert_eq!(held(Some(7), None, None).health, Health::Good);
        assert_eq!(held(None, Some(HELD_MAX + 1), None).health, Health::Warn);
        assert_eq!(held(None, None, Some(3_600_000)).health, Health::Warn);
    }
}
