//! Tasks: intents that step workers pull, work on and tell the result of.
//!
//! A worker has the claim's stamp and nothing else; whatever it tells with a stamp that is not the
//! claim's any more is refused and counted. The same result told again is the same success.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use serde_json::Value;

use super::claiming;
use super::finish::Finisher;
use super::plan::{self, Rooms, Turn};
use crate::domain::intent::{
    ClaimWish, ClaimedIntent, Destination, End, Fault, Finish, Finished, IntentClaimed, IntentKey,
    Next, Note, Stamp, diagnostic,
};
use crate::domain::message::Recorded;
use crate::domain::scope::TenantScope;
use crate::ids;
use crate::lifecycle::Bells;
use crate::store::StoreError;
use crate::store::group::Group;
use crate::store::outbox::{ClaimBeat, IntentLine, Lane, OutboxStore};
use crate::telemetry::metric;

/// The most tasks of one claim.
pub const CLAIM_MAX: u32 = 100;
/// Lanes in one look.
const LANES_PAGE: u32 = 500;
/// Looks of one claim; the next claim goes on where this one ended.
const LOOKS_MAX: usize = 10;
/// Rounds of one claim: a lane can have less than its share.
const ROUNDS_MAX: usize = 4;
/// Places that are remembered.
const PLACES_MAX: usize = 4096;

/// What a worker says of a task.
#[derive(Clone, Debug)]
pub enum TaskResult {
    /// Done; later steps see this.
    Done(Value),
    /// Not done.
    Failed {
        /// Whether another try may do: until the retry's horizon is over. Else the task is given
        /// up at once.
        retryable: bool,
        /// Why, for people.
        error: String,
    },
}

/// The tasks of a store. Clones are the same.
#[derive(Clone)]
pub struct Tasks {
    store: Arc<dyn OutboxStore>,
    finisher: Finisher,
    places: Arc<Mutex<HashMap<Whose, Place>>>,
}

/// Claims that take turns: those of a queue, for a tenant's own workers or for all others.
type Whose = (String, Option<TenantScope>);

/// Where the next claim begins.
#[derive(Clone, Default)]
struct Place {
    after: Option<Lane>,
    turn: Turn,
}

impl Tasks {
    /// Rings for the runs whose tasks are done or given up.
    pub fn new(store: Arc<dyn OutboxStore>, group: Group, bells: Bells) -> Self {
        // Each caller waits for its own answer and tells again by itself.
        let never = tokio_util::sync::CancellationToken::new();
        Self {
            store,
            finisher: Finisher::new(group, bells, never),
            places: Arc::default(),
        }
    }

    /// Claims up to `limit` tasks of a queue, at most [`CLAIM_MAX`]; of a tenant and its
    /// principals, or of all tenants in turn. None is no error.
    ///
    /// # Errors
    /// The store's own. Tasks that were claimed then come back when `lease` is over.
    pub async fn claim(
        &self,
        tenant: Option<&TenantScope>,
        queue: &str,
        limit: u32,
        lease: Duration,
        worker: &str,
    ) -> Result<Vec<ClaimedIntent>, StoreError> {
        let limit = limit.min(CLAIM_MAX) as usize;
        let whose = (queue.to_owned(), tenant.cloned());
        let mut place = self.places().get(&whose).cloned().unwrap_or_default();
        let mut won: Vec<ClaimedIntent> = Vec::new();
        let lanes = self.lanes(tenant, queue, &mut place).await?;
        for _ in 0..ROUNDS_MAX {
            // A plan without room would count as somebody's turn.
            if won.len() >= limit {
                break;
            }
            // In a scope of its own: what is held while waiting must be fit for another thread.
            let wishes = {
                let rooms = Rooms {
                    total: limit.saturating_sub(won.len()),
                    tenant: &|_| usize::MAX,
                    destination: &|_| usize::MAX,
                };
                plan::plan(&lanes, &rooms, &mut place.turn)
            };
            if wishes.is_empty() {
                break;
            }
            let keys = match self.store.due(&wishes).await {
                Ok(keys) => keys,
                // What was won before must reach its worker.
                Err(_) if !won.is_empty() => break,
                Err(error) => return Err(error),
            };
            let claimed = self.claim_all(keys, lease, worker).await;
            match claimed {
                Ok(claimed) if claimed.is_empty() => break,
                Ok(claimed) => won.extend(claimed),
                // What was won before must reach its worker.
                Err(_) if !won.is_empty() => break,
                Err(error) => return Err(error),
            }
        }
        self.remember(whose, place);
        Ok(won)
    }

    /// The worker is alive: the lease counts anew. `false`: the task is not its own any more.
    ///
    /// # Errors
    /// The store's own.
    pub async fn heartbeat(
        &self,
        key: &IntentKey,
        stamp: Stamp,
        lease: Duration,
    ) -> Result<bool, StoreError> {
        let beat = ClaimBeat {
            key: key.clone(),
            stamp,
            lease,
        };
        let extended = self.store.extend(&[beat]).await?;
        let extended = extended.first().copied().unwrap_or(false);
        if !extended {
            metrics::counter!(metric::STALE_STAMPS).increment(1);
        }
        Ok(extended)
    }

    /// Takes a task's result in.
    ///
    /// # Errors
    /// The store's own; telling the same again is safe.
    pub async fn finish(
        &self,
        key: &IntentKey,
        stamp: Stamp,
        result: TaskResult,
    ) -> Result<Finished, Arc<StoreError>> {
        let line = self.store.find_intent(key.id).await?;
        let Some(line) = line.filter(|line| is_task_of(line, key)) else {
            return Ok(Finished::Stale);
        };
        let (end, note) = ended(&line, result, ids::jitter());
        let outcome = note.outcome.clone();
        let finish = Finish {
            key: key.clone(),
            stamp,
            end,
            note,
        };
        let finished = self.finisher.tell_once(&finish).await?;
        if finished == Finished::Taken {
            let class = line.destination.class().to_owned();
            metrics::counter!(metric::OUTBOX_ATTEMPTS, "destination" => class, "outcome" => outcome)
                .increment(1);
        }
        Ok(finished)
    }

    /// Lanes of this queue in which something is due, from `place` on.
    async fn lanes(
        &self,
        tenant: Option<&TenantScope>,
        queue: &str,
        place: &mut Place,
    ) -> Result<Vec<Lane>, StoreError> {
        let destination = Destination::task(queue);
        let first = tenant.map(|tenant| Lane {
            tenant: tenant.clone(),
            destination: Destination(String::new()),
        });
        let resumed = place.after.is_some();
        let mut after = place.after.take().or(first);
        let mut found = Vec::new();
        for _ in 0..LOOKS_MAX {
            let page = self.store.lanes(after.as_ref(), LANES_PAGE).await?;
            // A tenant's lanes and those of its principals stand behind one another, maybe with
            // others between them that begin alike.
            let beyond = page.last().is_some_and(|lane| {
                tenant.is_some_and(|tenant| !lane.tenant.as_str().starts_with(tenant.as_str()))
            });
            let last = beyond || page.len() < LANES_PAGE as usize;
            after = page.last().filter(|_| !last).cloned();
            let wanted = |lane: &Lane| {
                lane.destination == destination
                    && tenant.is_none_or(|tenant| tenant.covers(&lane.tenant))
            };
            found.extend(page.into_iter().filter(wanted));
            if last || found.len() >= LANES_PAGE as usize {
                break;
            }
        }
        // Behind the end comes the beginning, at once if nothing was found.
        place.after = after;
        if found.is_empty() && resumed && place.after.is_none() {
            return Box::pin(self.lanes(tenant, queue, place)).await;
        }
        Ok(found)
    }

    async fn claim_all(
        &self,
        keys: Vec<IntentKey>,
        lease: Duration,
        worker: &str,
    ) -> Result<Vec<ClaimedIntent>, StoreError> {
        let wish = |key| ClaimWish {
            key,
            stamp: ids::stamp(),
            lease,
            worker: worker.to_owned(),
        };
        let wishes: Vec<_> = keys.into_iter().map(wish).collect();
        if wishes.is_empty() {
            return Ok(Vec::new());
        }
        let claimed = match claiming::claim(&*self.store, &wishes).await {
            Ok(claimed) => claimed,
            Err(none) => {
                self.give_back(none.may_be_won, wishes).await;
                return Err(none.error);
            }
        };
        let mut won = Vec::new();
        for claimed in claimed {
            match claimed {
                IntentClaimed::Won(intent) => won.push(*intent),
                IntentClaimed::Lost => {}
                IntentClaimed::Quarantined => self.finisher.given_up("quarantined"),
            }
        }
        Ok(won)
    }

    /// So that claims that nobody heard of don't count against their tasks. Told once: the store
    /// just failed to answer.
    async fn give_back(&self, may_be_won: bool, wishes: Vec<ClaimWish>) {
        for wish in wishes.into_iter().filter(|_| may_be_won) {
            let finish = claiming::given_back(wish.key, wish.stamp, "no_answer");
            if self.finisher.tell_once(&finish).await.is_err() {
                return;
            }
        }
    }

    /// Places at the beginning are forgotten first: whoever has none begins there.
    fn remember(&self, whose: Whose, place: Place) {
        let mut places = self.places();
        if places.len() >= PLACES_MAX && !places.contains_key(&whose) {
            places.retain(|_, place| place.after.is_some());
            if places.len() >= PLACES_MAX {
                places.clear();
            }
        }
        places.insert(whose, place);
    }

    /// Every change is whole before anything can panic.
    fn places(&self) -> MutexGuard<'_, HashMap<Whose, Place>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_task_of(line: &IntentLine, key: &IntentKey) -> bool {
    line.key == *key && line.destination.queue().is_some()
}

fn ended(line: &IntentLine, result: TaskResult, jitter: f64) -> (End, Note) {
    match result {
        TaskResult::Done(value) => {
            let answer = answer(&value);
            let note = Note {
                outcome: "delivered".to_owned(),
                answer_status: Some(answer.status),
                diagnostic: None,
            };
            let end = End::Delivered {
                fenced: true,
                answer: Some(answer),
            };
            (end, note)
        }
        TaskResult::Failed { retryable, error } => {
            let note = Note {
                // What a claim is told to be is told again as that.
                outcome: if retryable {
                    "task_failed"
                } else {
                    "task_refused"
                }
                .to_owned(),
                answer_status: None,
                diagnostic: Some(diagnostic(&error)),
            };
            (failed(line, retryable, jitter), note)
        }
    }
}

fn failed(line: &IntentLine, retryable: bool, jitter: f64) -> End {
    let (fault, age) = (Fault::Destination, line.age.unwrap_or_default());
    let retry = &line.sending.retry;
    let tries = line.tries.saturating_sub(line.tries_before);
    let next = retry.after(fault, tries, line.faults, age, None, jitter);
    match next {
        Next::Again(after) if retryable => End::Again {
            after,
            item_fault: false,
        },
        _ => End::Dead {
            item_fault: !retryable,
        },
    }
}

fn answer(value: &Value) -> Recorded {
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    let body = Bytes::from(value.to_string());
    Recorded::new(200, &headers, Some(body), None, false)
}
