//! What became of a claim: its end is written to the intent, to its attempt and, with an answer, to
//! the answer's body, in the batch's transaction.
//!
//! An end counts once, and only from whoever has the claim. One that is delivered is true whoever
//! has the claim by now: unless it is fenced, it counts from all who had it.

use sqlx::SqliteConnection;
use uuid::Uuid;

use super::claims::{lose, of_claim, of_intent};
use super::rows::{INTENTS, status};
use crate::domain::intent::{End, Finish, Finished, IntentStatus};
use crate::store::StoreError;
use crate::store::outbox::{attempt_status, brings, note_text, outcome_word};
use crate::store::sqlite::rows::{Cells, span_ms};
use crate::store::sqlite::statement::{self, Query};

/// With the attempt of the stamp, and the answer that is kept.
const SEE: &str = "\
    select i.run_id, i.status, i.claim_token, i.withdrawn, a.status as attempt, a.outcome, \
        k.body as kept \
    from eec_effect_intent i left join eec_run_attempt a on a.tenant_scope = i.tenant_scope \
         and a.run_id = i.run_id and a.stamp = ?3 and a.intent_id = i.intent_id \
    left join eec_effect_body k on k.tenant_scope = i.tenant_scope \
         and k.intent_id = i.intent_id and k.part = 'answer' \
    where i.tenant_scope = ?1 and i.intent_id = ?2";

const END: &str = "\
    update eec_effect_intent \
    set status = ?3, claim_token = null, due_at = null, ended_at = ?4, changed = 1, deaths = 0 \
    where tenant_scope = ?1 and intent_id = ?2";

const AGAIN: &str = "\
    update eec_effect_intent set claim_token = null, due_at = ?3 \
    where tenant_scope = ?1 and intent_id = ?2";

const GIVE_BACK: &str = "\
    update eec_effect_intent set tries = max(tries - 1, 0) \
    where tenant_scope = ?1 and intent_id = ?2";

const NOTE: &str = "\
    update eec_effect_intent \
    set faults = faults + ?3, outcome = ?4, answer_status = ?5, diagnostic = ?6, deaths = 0 \
    where tenant_scope = ?1 and intent_id = ?2";

const CLOSE: &str = "\
    update eec_run_attempt \
    set status = ?4, ended_at = ?5, outcome = ?6, answer_status = ?7, diagnostic = ?8 \
    where tenant_scope = ?1 and run_id = ?2 and stamp = ?3";

const KEEP: &str = "\
    insert into eec_effect_body (tenant_scope, intent_id, part, status, headers, body) \
    values (?1, ?2, 'answer', ?3, ?4, ?5) \
    on conflict (tenant_scope, intent_id, part) do nothing";

/// Every statement that looks for rows, for the test of their plans.
#[cfg(test)]
pub const STATEMENTS: [&str; 6] = [SEE, END, AGAIN, GIVE_BACK, NOTE, CLOSE];

/// Writes the ends of tries, one after another.
pub async fn finish(
    connection: &mut SqliteConnection,
    now_ms: i64,
    ends: &[Finish],
) -> Result<Vec<Finished>, StoreError> {
    let mut finished = Vec::with_capacity(ends.len());
    for end in ends {
        finished.push(finish_one(connection, now_ms, end).await?);
    }
    Ok(finished)
}

/// What an end sees of its intent.
struct Seen {
    run_id: Uuid,
    pending: bool,
    held: Option<Uuid>,
    withdrawn: bool,
    /// Of the attempt with the end's stamp.
    attempt: Option<String>,
    outcome: Option<String>,
    /// The body of the answer that is kept.
    kept: Option<Vec<u8>>,
}

impl Seen {
    async fn read(
        connection: &mut SqliteConnection,
        told: &Finish,
    ) -> Result<Option<Self>, StoreError> {
        let Some(row) = statement::row(connection, of_claim(SEE, &told.key, told.stamp)).await?
        else {
            return Ok(None);
        };
        let cells = Cells::new(&row, INTENTS);
        Ok(Some(Self {
            run_id: cells.id("run_id")?,
            pending: status(&cells)? == IntentStatus::Pending,
            held: cells.id_if_any("claim_token")?,
            withdrawn: cells.get("withdrawn")?,
            attempt: cells.find("attempt")?,
            outcome: cells.find("outcome")?,
            kept: cells.find("kept")?,
        }))
    }

    /// Whether the end may be written. Who says "delivered" and has not the claim any more must
    /// have had it.
    fn takes(&self, told: &Finish) -> bool {
        let anybodys = matches!(told.end, End::Delivered { fenced: false, .. });
        let own = self.held == Some(told.stamp.0);
        self.pending && (own || (anybodys && self.attempt.is_some()))
    }

    /// Whether it was written before.
    fn knows(&self, told: &Finish) -> bool {
        self.attempt.as_deref() == Some(attempt_status(&told.end))
            && self.outcome.as_deref() == Some(&outcome_word(&told.note))
            && brings(&told.end, self.kept.as_deref())
    }

    /// What the intent becomes; `None`: it stays pending.
    fn becomes(&self, end: &End) -> Option<IntentStatus> {
        match end {
            End::Delivered { .. } => Some(IntentStatus::Completed),
            _ if self.withdrawn => Some(IntentStatus::Discarded),
            End::Dead { .. } => Some(IntentStatus::Dead),
            End::Again { .. } | End::GivenBack { .. } => None,
        }
    }
}

async fn finish_one(
    connection: &mut SqliteConnection,
    now_ms: i64,
    told: &Finish,
) -> Result<Finished, StoreError> {
    let Some(seen) = Seen::read(connection, told).await? else {
        return Ok(Finished::Stale);
    };
    if !seen.takes(told) {
        return Ok(if seen.knows(told) {
            Finished::Taken
        } else {
            Finished::Stale
        });
    }
    let after = match &told.end {
        End::Again { after, .. } | End::GivenBack { after } => span_ms(*after),
        End::Delivered { .. } | End::Dead { .. } => 0,
    };
    let moved = match seen.becomes(&told.end) {
        Some(status) => of_intent(END, &told.key).bind(status.word()).bind(now_ms),
        None => of_intent(AGAIN, &told.key).bind(now_ms.saturating_add(after)),
    };
    statement::run(connection, moved).await?;
    statement::run(connection, noted(told)).await?;
    let close = sqlx::query(CLOSE)
        .bind(told.key.tenant.as_str())
        .bind(seen.run_id)
        .bind(told.stamp.0)
        .bind(attempt_status(&told.end))
        .bind(now_ms)
        .bind(outcome_word(&told.note))
        .bind(told.note.answer_status)
        .bind(note_text(&told.note));
    statement::run(connection, close).await?;
    if let Some(held) = seen.held.filter(|held| *held != told.stamp.0) {
        // Whoever has it now is told by its own end.
        lose(connection, now_ms, &told.key, seen.run_id, held).await?;
    }
    if let End::Delivered {
        answer: Some(answer),
        ..
    } = &told.end
    {
        let keep = of_intent(KEEP, &told.key)
            .bind(answer.status)
            .bind(answer.headers.as_bytes())
            .bind(answer.body.as_deref());
        statement::run(connection, keep).await?;
    }
    Ok(Finished::Taken)
}

/// What is told of the newest try; one that was given back was none.
fn noted(told: &Finish) -> Query<'_> {
    let item_fault = match told.end {
        End::GivenBack { .. } => return of_intent(GIVE_BACK, &told.key),
        End::Again { item_fault, .. } | End::Dead { item_fault } => item_fault,
        End::Delivered { .. } => false,
    };
    of_intent(NOTE, &told.key)
        .bind(item_fault)
        .bind(outcome_word(&told.note))
        .bind(told.note.answer_status)
        .bind(note_text(&told.note))
}
