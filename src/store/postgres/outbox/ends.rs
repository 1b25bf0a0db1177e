//! What became of a claim: its end is written to the intent, to its attempt and, with an answer, to
//! the answer's body, in one statement.
//!
//! An end counts once, and only from whoever has the claim. One that is delivered is true whoever
//! has the claim by now: unless it is fenced, it counts from all who had it.

use sqlx::postgres::PgRow;

use super::claims::{ascii, bind_claims};
use super::rows::{INTENTS, refused};
use crate::domain::intent::{End, Finish, Finished, Note, diagnostic};
use crate::domain::message::Recorded;
use crate::store::StoreError;
use crate::store::outbox::{attempt_status, brings, first_told, outcome_word};
use crate::store::postgres::batch::{column, doubt_after, in_doubt, in_rounds};
use crate::store::postgres::routing::nth;
use crate::store::postgres::rows::{Cells, to_ms};
use crate::store::postgres::run::{Repeat, Runner, Statement, fixed};

/// How often an end is told that lost races against claims; each of these takes a lease.
const RACES_MAX: usize = 8;

/// Whether the intent is over with this end.
macro_rules! over {
    () => {
        "(b.delivered or b.dead or i.withdrawn)"
    };
}

/// A claim that came between shows in that `o`, the row as the statement found it, differs; then
/// nothing happens and the end is told again. Who says "delivered" and has not the claim any more
/// must have had it; whoever has it now is told by its own end, its attempt is lost here.
const FINISH: &str = concat!(
    "with ended as ( \
        update eec_effect_intent i \
        set status = case when b.delivered then 'completed' when i.withdrawn then 'discarded' \
                when b.dead then 'dead' else i.status end, \
            changed = i.changed or ",
    over!(),
    ", claim_token = null, \
            due_at = case when not ",
    over!(),
    " then now() + b.after_ms * interval '1 ms' end, \
            ended_at = case when ",
    over!(),
    " then now() end, \
            tries = greatest(i.tries - (b.attempt = 'released')::int, 0), \
            faults = i.faults + b.item_fault::int, \
            deaths = case when b.attempt = 'released' then i.deaths else 0 end, \
            outcome = case when b.attempt = 'released' then i.outcome else b.outcome end, \
            answer_status = case when b.attempt = 'released' then i.answer_status \
                else b.answer_status end, \
            diagnostic = case when b.attempt = 'released' then i.diagnostic \
                else b.diagnostic end \
        from unnest($1::text[], $2::uuid[], $3::uuid[], $4::text[], $5::bool[], $6::bool[], \
            $7::bool[], $8::bigint[], $9::bool[], $10::text[], $11::int[], $12::text[], \
            $13::smallint[], $14::bytea[], $15::bytea[]) with ordinality \
            as b(tenant_scope, intent_id, stamp, attempt, delivered, dead, fenced, after_ms, \
            item_fault, outcome, answer_status, diagnostic, kept_status, kept_headers, \
            kept_body, n) \
        join eec_effect_intent o on o.tenant_scope = b.tenant_scope \
            and o.intent_id = b.intent_id \
        where i.tenant_scope = b.tenant_scope and i.intent_id = b.intent_id \
            and i.status = 'pending' and i.claim_token is not distinct from o.claim_token \
            and (i.claim_token = b.stamp or (b.delivered and not b.fenced and b.intent_id = \
                (select a.intent_id from eec_run_attempt a where a.tenant_scope = b.tenant_scope \
                    and a.run_id = i.run_id and a.stamp = b.stamp))) \
        returning b.*, i.run_id, o.claim_token as held \
    ), own as ( \
        update eec_run_attempt a \
        set status = e.attempt, ended_at = now(), outcome = e.outcome, \
            answer_status = e.answer_status, diagnostic = e.diagnostic \
        from ended e where a.tenant_scope = e.tenant_scope and a.run_id = e.run_id \
            and a.stamp = e.stamp \
    ), lost as ( \
        update eec_run_attempt a set status = 'lost', ended_at = now() from ended e \
        where a.tenant_scope = e.tenant_scope and a.run_id = e.run_id and a.stamp = e.held \
            and e.held <> e.stamp and a.status = 'open' \
    ), kept as ( \
        insert into eec_effect_body (tenant_scope, intent_id, part, status, headers, body) \
        select tenant_scope, intent_id, 'answer', kept_status, kept_headers, kept_body \
        from ended where kept_status is not null \
        on conflict (tenant_scope, intent_id, part) do nothing \
    ) \
    select n from ended"
);

const FINISHED_BEFORE: &str = "\
    select b.n, i.status = 'pending' as pending, i.claim_token = b.stamp as own, \
        a.status as attempt, a.outcome, k.body as kept \
    from unnest($1::text[], $2::uuid[], $3::uuid[]) with ordinality \
        as b(tenant_scope, intent_id, stamp, n) \
    join eec_effect_intent i on i.tenant_scope = b.tenant_scope and i.intent_id = b.intent_id \
    left join eec_run_attempt a on a.tenant_scope = b.tenant_scope and a.run_id = i.run_id \
        and a.stamp = b.stamp and a.intent_id = b.intent_id \
    left join eec_effect_body k on k.tenant_scope = b.tenant_scope \
        and k.intent_id = b.intent_id and k.part = 'answer'";

impl Runner {
    pub(super) async fn finish(&self, ends: &[Finish]) -> Result<Vec<Finished>, StoreError> {
        let first = first_told(ends);
        let told_once: Vec<usize> = (0..ends.len()).filter(|at| first[*at] == *at).collect();
        let rounds = in_rounds(told_once.len(), |at| &ends[told_once[at]].key);
        let mut finished = vec![Finished::Stale; ends.len()];
        for (nth_round, round) in rounds.iter().enumerate() {
            let mut open: Vec<usize> = round.iter().map(|at| told_once[*at]).collect();
            for race in 0..RACES_MAX {
                let taken = self.finishing(ends, &open).await;
                for row in &taken.map_err(doubt_after(nth_round + race))? {
                    finished[open[nth(row)?]] = Finished::Taken;
                }
                open.retain(|index| finished[*index] == Finished::Stale);
                open = self.undecided(ends, &open, &mut finished).await?;
                if open.is_empty() {
                    break;
                }
            }
        }
        Ok(first.into_iter().map(|at| finished[at]).collect())
    }

    async fn finishing(&self, ends: &[Finish], round: &[usize]) -> Result<Vec<PgRow>, StoreError> {
        let told = |text| {
            self.rows(Repeat::Safe, move || {
                bind_ends(fixed(FINISH), ends, round, text)
            })
        };
        match told(diagnostic).await {
            Err(error) if refused(&error) => told(ascii).await,
            rows => rows,
        }
    }

    /// Looks why these were not taken. Gives back those that only lost a race.
    async fn undecided(
        &self,
        ends: &[Finish],
        missed: &[usize],
        finished: &mut [Finished],
    ) -> Result<Vec<usize>, StoreError> {
        let mut races = Vec::new();
        if missed.is_empty() {
            return Ok(races);
        }
        let rows = self.rows(Repeat::Safe, || {
            let claims = missed.iter().map(|at| (&ends[*at].key, ends[*at].stamp));
            bind_claims(fixed(FINISHED_BEFORE), &claims)
        });
        for row in &rows.await.map_err(in_doubt)? {
            let index = missed[nth(row)?];
            let Finish { end, note, .. } = &ends[index];
            let cells = Cells::new(row, INTENTS);
            let attempt: Option<&str> = cells.get("attempt")?;
            let outcome: Option<&str> = cells.get("outcome")?;
            let own: Option<bool> = cells.get("own")?;
            let anybodys = matches!(end, End::Delivered { fenced: false, .. });
            let kept: Option<&[u8]> = cells.get("kept")?;
            if attempt == Some(attempt_status(end))
                && outcome == Some(&outcome_word(note))
                && brings(end, kept)
            {
                finished[index] = Finished::Taken;
            } else if cells.get("pending")?
                && (own == Some(true) || (anybodys && attempt.is_some()))
            {
                races.push(index);
            }
        }
        Ok(races)
    }
}

fn bind_ends(
    statement: Statement,
    ends: &[Finish],
    round: &[usize],
    text: fn(&str) -> String,
) -> Statement {
    let all = || round.iter().map(|index| &ends[*index]);
    let flags = |of: fn(&End) -> bool| column(all(), |told| of(&told.end));
    let after = |end: &End| match end {
        End::Again { after, .. } | End::GivenBack { after } => to_ms(*after),
        End::Delivered { .. } | End::Dead { .. } => 0,
    };
    let notes = || all().map(|told| &told.note);
    let status = |note: &Note| note.answer_status.map(i32::from);
    let kept = || all().map(|told| kept(&told.end));
    // An answer's status is below 600.
    let kept_status = |kept: &Recorded| i16::try_from(kept.status).unwrap_or_default();
    bind_claims(statement, &all().map(|told| (&told.key, told.stamp)))
        .bind(column(all(), |told| attempt_status(&told.end)))
        .bind(flags(|end| matches!(end, End::Delivered { .. })))
        .bind(flags(|end| matches!(end, End::Dead { .. })))
        .bind(flags(|end| {
            !matches!(end, End::Delivered { fenced: false, .. })
        }))
        .bind(column(all(), |told| after(&told.end)))
        .bind(flags(|end| {
            let (End::Again { item_fault, .. } | End::Dead { item_fault }) = end else {
                return false;
            };
            *item_fault
        }))
        .bind(column(notes(), outcome_word))
        .bind(column(notes(), status))
        .bind(column(notes(), |note| note.diagnostic.as_deref().map(text)))
        .bind(column(kept(), |kept| kept.map(kept_status)))
        .bind(column(kept(), |kept| {
            kept.map(|kept| kept.headers.as_bytes())
        }))
        .bind(column(kept(), |kept| kept?.body.as_deref()))
}

fn kept(end: &End) -> Option<&Recorded> {
    match end {
        End::Delivered { answer, .. } => answer.as_ref(),
        _ => None,
    }
}
