//! Acts on one intent, or on those that a filter finds: one after another, each whole by itself.
//!
//! A page of them may be cut off by the clock between two intents; the answer then tells where to
//! go on. Doing it again is safe: what was redriven or discarded is refused the second time, or
//! recognised by its `request_id`.

use std::time::Duration;

use axum::Json;
use tokio::time::Instant;

use super::wire::{self, Acted, Order, RefusedOut, Which};
use crate::api::request::{MAY_HAVE_HAPPENED, detached, invalid};
use crate::api::runs::not_applied;
use crate::api::runs::wire::why;
use crate::api::token::Caller;
use crate::api::{AdminState, REQUEST_TIMEOUT};
use crate::coordinator::ApplyError;
use crate::domain::intent::{IntentKey, IntentStatus};
use crate::domain::run::{Event, Input, Refused, RunKey};
use crate::ids;
use crate::problem::{Kind, Problem};
use crate::store::outbox::{IntentLine, IntentSearch};
use crate::store::{Audit, Resolved};

/// How long one request works; what is left then is for the next.
const TIME_MAX: Duration = REQUEST_TIMEOUT.saturating_sub(Duration::from_secs(10));
/// Intents that are read at once.
const PAGE: u32 = 100;

pub(super) const BROKE_OFF: &str = "an operator's act broke off";

/// What is done to intents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Deed {
    /// Sent again, with the same key and bytes.
    Redrive,
    /// Given up.
    Discard,
}

impl Deed {
    fn word(self) -> &'static str {
        match self {
            Self::Redrive => "redrive",
            Self::Discard => "discard",
        }
    }
}

pub(super) async fn act(
    state: AdminState,
    caller: Caller,
    deed: Deed,
    asked: wire::Act,
) -> Result<Json<Acted>, Problem> {
    let order = asked.into_order().map_err(|what| invalid(&what))?;
    let acts = state.acts.clone();
    let operator = caller.name.clone();
    let performing = async move { perform(&state, &caller, deed, order).await };
    let acted = detached(&acts, BROKE_OFF, MAY_HAVE_HAPPENED, performing).await??;
    tracing::info!(
        operator,
        act = deed.word(),
        done = acted.done,
        refused = acted.refused.len(),
        "an operator asked for an act on intents"
    );
    Ok(Json(acted))
}

async fn perform(
    state: &AdminState,
    caller: &Caller,
    deed: Deed,
    order: Order,
) -> Result<Acted, Problem> {
    let work = Work {
        state,
        caller,
        deed,
        order: &order,
    };
    match &order.which {
        Which::One(id) => {
            let line = super::intent(state, caller, *id).await?;
            work.on_one(&line).await
        }
        Which::Found(search) => work.on_found(search.clone()).await,
    }
}

struct Work<'a> {
    state: &'a AdminState,
    caller: &'a Caller,
    deed: Deed,
    order: &'a Order,
}

impl Work<'_> {
    /// A refusal of the only one is a problem.
    async fn on_one(&self, line: &IntentLine) -> Result<Acted, Problem> {
        let mut acted = self.nothing_yet();
        match self.on(line).await? {
            Came::Done => acted.done = 1,
            Came::Repeated => acted.repeated = 1,
            Came::Not(No::Refused(refused)) => {
                return Err(not_applied(&ApplyError::Refused(refused)));
            }
            Came::Not(no) => {
                let detail = "The intent's state does not allow this; nothing was done to it.";
                return Err(Problem::new(Kind::StateConflict, detail).member("why", no.word()));
            }
        }
        Ok(acted)
    }

    /// Goes through what the search finds until its limit or the time is used up.
    async fn on_found(&self, mut search: IntentSearch) -> Result<Acted, Problem> {
        let mut acted = self.nothing_yet();
        if !self.caller.narrow(&mut search.tenant) {
            return Ok(acted);
        }
        // Whoever means what stops its processes must say so.
        search.status.get_or_insert(IntentStatus::Dead);
        let until = Instant::now() + TIME_MAX;
        let mut left = search.limit;
        loop {
            search.limit = PAGE;
            let page = self.state.store.find_intents(&search).await?;
            for line in &page {
                if left == 0 || Instant::now() >= until {
                    acted.next = search.after.as_ref().map(wire::cursor);
                    return Ok(acted);
                }
                search.after = Some(line.key.clone());
                left -= 1;
                match self.on(line).await? {
                    Came::Done => acted.done += 1,
                    Came::Repeated => acted.repeated += 1,
                    Came::Not(no) => acted.refused.push(RefusedOut {
                        intent_id: line.key.id.to_string(),
                        why: no.word(),
                    }),
                }
            }
            if page.len() < PAGE as usize {
                return Ok(acted);
            }
        }
    }

    fn nothing_yet(&self) -> Acted {
        Acted {
            act: self.deed.word(),
            done: 0,
            repeated: 0,
            refused: Vec::new(),
            next: None,
        }
    }

    async fn on(&self, line: &IntentLine) -> Result<Came, Problem> {
        match self.deed {
            Deed::Redrive => self.redrive(line).await,
            Deed::Discard => self.discard(&line.key).await,
        }
    }

    async fn redrive(&self, line: &IntentLine) -> Result<Came, Problem> {
        let run = RunKey {
            tenant: line.key.tenant.clone(),
            id: line.run_id,
        };
        let input = Input {
            stamp: self.order.stamp(&line.key).unwrap_or_else(ids::stamp),
            by: self.caller.name.clone(),
            event: Event::Retry {
                seq: Some(line.seq),
                reason: self.order.reason.clone(),
            },
        };
        match self.state.coordinator.apply(&run, input).await {
            Ok(applied) if applied.repeated => Ok(Came::Repeated),
            Ok(_) => Ok(Came::Done),
            Err(ApplyError::Refused(refused)) => Ok(Came::Not(No::Refused(refused))),
            Err(ApplyError::NoRun) => Ok(Came::Not(No::Absent)),
            Err(ApplyError::Contended) => Ok(Came::Not(No::Contended)),
            Err(error) => Err(not_applied(&error)),
        }
    }

    async fn discard(&self, key: &IntentKey) -> Result<Came, Problem> {
        let audit = Audit {
            operator: self.caller.name.clone(),
            reason: self.order.reason.clone(),
        };
        match self.state.store.discard(key, &audit).await? {
            Resolved::Done => {
                self.state.bells.runs.notify_one();
                Ok(Came::Done)
            }
            Resolved::NoRecord => Ok(Came::Not(No::Absent)),
            Resolved::WrongState | Resolved::TooEarly { .. } => Ok(Came::Not(No::WrongState)),
        }
    }
}

/// What came of an act on an intent.
enum Came {
    /// It was done.
    Done,
    /// It had been done before, by the same `request_id`.
    Repeated,
    /// It was not done.
    Not(No),
}

/// Why it was not done to an intent.
enum No {
    /// Its run does not take it.
    Refused(Refused),
    /// It is gone.
    Absent,
    /// Its own state does not allow it.
    WrongState,
    /// Others keep changing its run.
    Contended,
}

impl No {
    fn word(&self) -> &'static str {
        match self {
            Self::Refused(refused) => why(*refused),
            Self::Absent => "absent",
            Self::WrongState => "wrong_state",
            Self::Contended => "contended",
        }
    }
}
