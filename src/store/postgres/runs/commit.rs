//! Ticks: one statement for a batch, and a second one for those that it did not take.
//!
//! Rows are locked in one order, runs by their keys and then intents by theirs, so two batches
//! can't wait for each other. Whatever else locks intents may; then one of the two is sent again.

use std::collections::HashMap;

use uuid::Uuid;

use super::parts::{Part, bind_parts, parts, pieces};
use crate::domain::intent::{IntentChange, IntentStatus, Stamp};
use crate::domain::run::{RunKey, TickCommit, TickCommitted, Timer};
use crate::store::StoreError;
use crate::store::postgres::batch::{column, doubt_after, in_doubt};
use crate::store::postgres::routing::nth;
use crate::store::postgres::rows::{to_ms, to_text};
use crate::store::postgres::run::{Repeat, Runner, Statement, fixed};
use crate::store::runs::change::{self, armed, change_intent, dropped, revived};
use crate::store::runs::columns;

/// `barred`: ticks whose input was applied before. An intent that is given up had no live claim;
/// what is left of one is `lost`.
const COMMIT: &str = concat!(
    "with barred as ( \
        select s.n from unnest($17::bigint[], $18::text[], $19::uuid[], $20::uuid[]) \
            as s(n, tenant_scope, run_id, stamp) \
        join eec_run_transition t on t.tenant_scope = s.tenant_scope and t.run_id = s.run_id \
            and t.stamp = s.stamp \
    ), hit as ( \
        update eec_run r \
        set record_version = r.record_version + 1, last_transition_seq = b.last_seq, \
            status = b.status, progress = b.progress, reason = b.reason, updated_at = now(), \
            due_at = case when b.keeps_timer then r.due_at \
                else now() + b.timer_ms * interval '1 ms' end, \
            ended_at = case when b.is_final then coalesce(r.ended_at, now()) end \
        from unnest($21::text[], $22::uuid[], $23::bigint[], $24::bigint[], $25::uuid[], \
            $26::bigint[], $27::text[], $28::bytea[], $29::text[], $30::bool[], $31::bigint[], \
            $32::bool[]) with ordinality as b(tenant_scope, run_id, seen_version, seen_seq, \
            tick_id, last_seq, status, progress, reason, keeps_timer, timer_ms, is_final, n) \
        where r.tenant_scope = b.tenant_scope and r.run_id = b.run_id \
            and r.record_version = b.seen_version and r.last_transition_seq = b.seen_seq \
            and not exists (select 1 from barred where barred.n = b.n) \
        returning b.n, r.tenant_scope, r.run_id, r.record_version, b.tick_id \
    ), ",
    parts!(),
    ", wanted as ( \
        select h.tenant_scope, c.intent_id, c.seen, c.word \
        from unnest($33::bigint[], $34::uuid[], $35::text[], $36::text[]) \
            as c(n, intent_id, seen, word) \
        join hit h on h.n = c.n \
        order by h.tenant_scope, c.intent_id \
    ), changed as ( \
        update eec_effect_intent i ",
    change_intent!("now()"),
    " from wanted c where i.tenant_scope = c.tenant_scope and i.intent_id = c.intent_id \
        returning i.tenant_scope, i.run_id, i.intent_id, \
            c.word = 'withdraw' and i.status = 'discarded' as is_dropped \
    ), closed as ( \
        update eec_run_attempt a set status = 'lost', ended_at = now() from changed c \
        where c.is_dropped and a.tenant_scope = c.tenant_scope and a.run_id = c.run_id \
            and a.intent_id = c.intent_id and a.status = 'open' \
    ) \
    select n from hit"
);

/// A tick that was committed has the transition after the one that it saw.
const COMMITTED_BEFORE: &str = "\
    select b.n from unnest($1::text[], $2::uuid[], $3::bigint[], $4::uuid[]) with ordinality \
        as b(tenant_scope, run_id, seq, tick_id, n) \
    join eec_run_transition t on t.tenant_scope = b.tenant_scope and t.run_id = b.run_id \
        and t.seq = b.seq and t.tick_id = b.tick_id";

impl Runner {
    pub(in crate::store::postgres) async fn commit_ticks(
        &self,
        ticks: &[TickCommit],
    ) -> Result<Vec<TickCommitted>, StoreError> {
        let mut committed = vec![TickCommitted::Conflict; ticks.len()];
        let mut sent = 0;
        for round in rounds(ticks) {
            for piece in pieces(round.into_iter().map(|index| (index, &ticks[index].tick))) {
                let rows = self.rows(Repeat::Safe, || bind_ticks(fixed(COMMIT), ticks, &piece));
                for row in &rows.await.map_err(doubt_after(sent))? {
                    committed[piece[nth(row)?]] = TickCommitted::Committed;
                }
                sent += 1;
            }
        }
        let is_missed = |index: &usize| committed[*index] == TickCommitted::Conflict;
        let missed: Vec<usize> = (0..ticks.len()).filter(is_missed).collect();
        if missed.is_empty() {
            return Ok(committed);
        }
        let rows = self.rows(Repeat::Safe, || {
            let missed = || missed.iter().map(|index| &ticks[*index]);
            bind_runs(fixed(COMMITTED_BEFORE), missed().map(|tick| &tick.key))
                .bind(column(missed(), |tick| tick.seen_seq.saturating_add(1)))
                .bind(column(missed(), |tick| tick.tick_id.0))
        });
        for row in &rows.await.map_err(in_doubt)? {
            committed[missed[nth(row)?]] = TickCommitted::Committed;
        }
        Ok(committed)
    }
}

/// Binds the two columns of runs, as the next two array parameters.
pub(super) fn bind_runs<'a>(
    statement: Statement,
    keys: impl Iterator<Item = &'a RunKey> + Clone,
) -> Statement {
    statement
        .bind(column(keys.clone(), |key| key.tenant.as_str()))
        .bind(column(keys, |key| key.id.0))
}

/// The indices of a batch in rounds, each in the order of keys: no round names a run twice, and
/// its ticks keep their order.
fn rounds(ticks: &[TickCommit]) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..ticks.len()).collect();
    order.sort_by_key(|index| &ticks[*index].key);
    let mut rounds: Vec<Vec<usize>> = Vec::new();
    let mut repeats: HashMap<&RunKey, usize> = HashMap::new();
    for index in order {
        let round = repeats.entry(&ticks[index].key).or_default();
        if rounds.len() == *round {
            rounds.push(Vec::new());
        }
        rounds[*round].push(index);
        *round += 1;
    }
    rounds
}

fn bind_ticks(statement: Statement, ticks: &[TickCommit], piece: &[usize]) -> Statement {
    let commits = || piece.iter().map(|index| &ticks[*index]);
    let parts = commits().map(|commit| Part {
        tick: &commit.tick,
        seen_seq: commit.seen_seq,
    });
    let statement = bind_parts(statement, parts);
    let statement = bind_stamps(statement, (1..).zip(commits()));
    let statement = bind_runs(statement, commits().map(|commit| &commit.key));
    let made = || commits().map(|commit| &commit.tick);
    let last_seq = |commit: &TickCommit| columns::last_seq(commit.seen_seq, &commit.tick);
    let timer_ms = |tick| match columns::timer(tick) {
        Timer::In(after) => Some(to_ms(after)),
        Timer::Keep | Timer::Clear => None,
    };
    let statement = statement
        .bind(column(commits(), |commit| commit.seen_version))
        .bind(column(commits(), |commit| commit.seen_seq))
        .bind(column(commits(), |commit| commit.tick_id.0))
        .bind(column(commits(), last_seq))
        .bind(column(made(), |tick| tick.status.word()))
        .bind(column(made(), |tick| &tick.progress[..]))
        .bind(column(made(), |tick| tick.reason.as_deref().map(to_text)))
        .bind(column(made(), |tick| columns::timer(tick) == Timer::Keep))
        .bind(column(made(), timer_ms))
        .bind(column(made(), |tick| tick.status.is_final()));
    bind_changes(statement, (1..).zip(commits()))
}

fn bind_stamps<'a>(
    statement: Statement,
    commits: impl Iterator<Item = (i64, &'a TickCommit)>,
) -> Statement {
    let mut stamps: Vec<(i64, &RunKey, Stamp)> = Vec::new();
    for (n, commit) in commits {
        let of_tick = commit.tick.transitions.iter().filter_map(|t| t.stamp);
        stamps.extend(of_tick.map(|stamp| (n, &commit.key, stamp)));
    }
    let statement = statement.bind(column(stamps.iter(), |(n, ..)| *n));
    bind_runs(statement, stamps.iter().map(|(_, key, _)| *key))
        .bind(column(stamps.iter(), |(.., stamp)| stamp.0))
}

fn bind_changes<'a>(
    statement: Statement,
    commits: impl Iterator<Item = (i64, &'a TickCommit)>,
) -> Statement {
    let mut changes: Vec<(i64, Uuid, IntentChange)> = Vec::new();
    for (n, commit) in commits {
        let merged = columns::merged(&commit.tick.changes).into_iter();
        changes.extend(merged.map(|change| (n, commit.key.id.intent(change.seq).0, change)));
    }
    let changes = || changes.iter();
    statement
        .bind(column(changes(), |(n, ..)| *n))
        .bind(column(changes(), |(_, id, _)| *id))
        .bind(column(changes(), |(.., change)| {
            change.seen.map(IntentStatus::word)
        }))
        .bind(column(changes(), |(.., change)| change::word(change.order)))
}
