//! The drainer: finds what is due, claims as much as there is room for, and sets it on its way.
//!
//! A round looks at one page of lanes and goes on with the next page in the next round, so that
//! its cost depends neither on the backlog nor on the number of lanes. It waits for no try. What it
//! claims, it claims in a task of its own: a round that is cut off loses no claim.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::Shared;
use super::capacity::Shut;
use super::claiming;
use super::dispatch::Dispatch;
use super::plan::{self, Rooms, Turn};
use super::verdict::Tried;
use crate::domain::intent::{
    ClaimWish, ClaimedIntent, Destination, Finish, IntentClaimed, IntentKey,
};
use crate::driver::{Report, Worker};
use crate::ids;
use crate::store::StoreError;
use crate::store::outbox::{Lane, LaneWish};

/// Lanes that one round looks at.
pub const LANES_PAGE: u32 = 1000;
/// Intents that are claimed at once, at most: their bodies come in one reply.
pub const CLAIMS_MAX: usize = 32;
/// When an intent is due again that found no room after all.
const NO_ROOM_PAUSE: Duration = Duration::from_secs(1);
/// Destinations that the log was told of at most.
const STRANGERS_MAX: usize = 100;

/// The duty. One for each [`Outbox`](super::Outbox): its rounds are the only ones that take room.
pub struct Drainer {
    shared: Arc<Shared>,
    place: Mutex<Place>,
    /// Whether a wake-up for a rate's next token is set.
    nudging: Arc<AtomicBool>,
}

/// Where the drainer is.
#[derive(Default)]
struct Place {
    /// The lane after which the next page begins.
    after: Option<Lane>,
    turn: Turn,
    /// Destinations of lanes that are not configured here, told once.
    strangers: HashSet<Destination>,
}

impl Worker for Drainer {
    fn name(&self) -> &'static str {
        "outbox"
    }

    async fn run_once(&self) -> Result<Report, StoreError> {
        let capacity = &self.shared.capacity;
        capacity.tell();
        // Before anything is looked at: room that is freed from now on may be missing below.
        capacity.set_wanted(true);
        if capacity.total() == 0 {
            return Ok(Report::default());
        }
        let after = self.place().after.clone();
        let page = self.shared.store.lanes(after.as_ref(), LANES_PAGE).await?;
        let more = page.len() >= LANES_PAGE as usize;
        let next = page.last().filter(|_| more).cloned();
        let lanes: Vec<Lane> = page.into_iter().filter(is_sent).collect();
        let wishes = self.plan(&lanes);
        let short = more || after.is_some() || wishes.len() < lanes.len();
        // Also if this page's claims fail or take too long.
        self.place().after = next;
        let claimed = self.claim(&wishes).await?;
        capacity.set_wanted(short || claimed > 0);
        Ok(Report {
            rows: claimed,
            // Also after the last page, if something was found: the first may have more.
            full: more || claimed > 0,
        })
    }
}

impl Drainer {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self {
            shared,
            place: Mutex::default(),
            nudging: Arc::default(),
        }
    }

    fn plan(&self, lanes: &[Lane]) -> Vec<LaneWish> {
        let capacity = &self.shared.capacity;
        let now = Instant::now();
        let rooms = Rooms {
            total: capacity.total(),
            tenant: &|tenant| capacity.of_tenant(tenant),
            destination: &|destination| capacity.of_destination(destination, now),
        };
        let mut place = self.place();
        let wishes = plan::plan(lanes, &rooms, &mut place.turn);
        place.tell_strangers(lanes, |destination| capacity.knows(destination));
        drop(place);
        let destinations = lanes.iter().map(|lane| &lane.destination);
        if let Some(wait) = capacity.next_token(destinations, now) {
            self.nudge_in(wait);
        }
        wishes
    }

    /// Claims what is due in these lanes; returns how much was won.
    async fn claim(&self, wishes: &[LaneWish]) -> Result<u64, StoreError> {
        if wishes.is_empty() {
            return Ok(0);
        }
        let due = self.shared.store.due(wishes).await?;
        let (mut won, mut failed) = (0, None);
        let mut rest = &due[..];
        while !rest.is_empty() {
            let (keys, later) = self.shared.portion.split(rest);
            rest = later;
            let (shared, keys) = (Arc::clone(&self.shared), keys.to_vec());
            let claiming = async move {
                let claimed = Arc::clone(&shared).claim_and_dispatch(&keys).await;
                let too_much = shared.portion.hear(&claimed);
                (claimed, too_much)
            };
            // Nothing aborts it; a panic is a bug that the log has.
            match self.shared.tracker.spawn(claiming).await {
                Ok((Ok(claimed), _)) => won += claimed,
                Ok((Err(error), true)) => failed = Some(error),
                Ok((Err(error), false)) => return Err(error),
                Err(_) => {}
            }
        }
        match failed {
            Some(error) if won == 0 => Err(error),
            _ => Ok(won),
        }
    }

    /// Rings when a rate lets something pass before the next poll.
    fn nudge_in(&self, wait: Duration) {
        if wait >= self.shared.poll_interval || self.nudging.swap(true, Ordering::AcqRel) {
            return;
        }
        let (nudging, bell) = (
            Arc::clone(&self.nudging),
            Arc::clone(&self.shared.bells.outbox),
        );
        let soft = self.shared.soft.clone();
        self.shared.tracker.spawn(async move {
            soft.run_until_cancelled(tokio::time::sleep(wait)).await;
            nudging.store(false, Ordering::Release);
            bell.notify_one();
        });
    }

    /// Every change is whole before anything can panic.
    fn place(&self) -> MutexGuard<'_, Place> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place {
    /// Intents of such lanes wait: another gateway, or this one with its next configuration, may
    /// know where to send them.
    fn tell_strangers(&mut self, lanes: &[Lane], knows: impl Fn(&Destination) -> bool) {
        for destination in lanes.iter().map(|lane| &lane.destination) {
            if self.strangers.len() < STRANGERS_MAX
                && !knows(destination)
                && self.strangers.insert(destination.clone())
            {
                tracing::warn!(
                    destination = destination.0,
                    "intents wait for a destination that is not in the configuration of this gateway"
                );
            }
        }
    }
}

impl Shared {
    /// Claims these and sets those that were won on their way; returns how many they are.
    async fn claim_and_dispatch(self: Arc<Self>, keys: &[IntentKey]) -> Result<u64, StoreError> {
        if self.soft.is_cancelled() {
            return Ok(0);
        }
        let wish = |key: &IntentKey| ClaimWish {
            key: key.clone(),
            stamp: ids::stamp(),
            lease: self.claims.lease(),
            worker: self.worker.clone(),
        };
        let wishes: Vec<_> = keys.iter().map(wish).collect();
        let asked = Instant::now();
        let claimed = match claiming::claim(&*self.store, &wishes).await {
            Ok(claimed) => claimed,
            Err(none) => {
                if none.may_be_won {
                    self.disown(wishes, asked);
                }
                return Err(none.error);
            }
        };
        let mut won = 0;
        for (key, claimed) in keys.iter().zip(claimed) {
            match claimed {
                IntentClaimed::Won(intent) => {
                    won += 1;
                    self.dispatch(*intent, asked);
                }
                IntentClaimed::Lost => {}
                IntentClaimed::Quarantined => {
                    tracing::warn!(intent = %key.id, "an intent is quarantined: its claims ended without a word");
                    self.finisher.given_up("quarantined");
                }
            }
        }
        Ok(won)
    }

    fn dispatch(self: &Arc<Self>, intent: ClaimedIntent, asked: Instant) {
        let held = self.claims.hold(intent.key.clone(), intent.stamp, asked);
        let freed = &self.bells.outbox;
        match self
            .capacity
            .enter(&intent.key.tenant, &intent.destination, freed)
        {
            Ok(slot) => {
                let dispatch = Dispatch {
                    shared: Arc::clone(self),
                    intent,
                    held,
                    slot,
                    asked,
                };
                self.tracker.spawn(dispatch.run());
            }
            Err(shut) => {
                let (outcome, after) = match shut {
                    Shut::Open(after) => ("breaker_open", after),
                    Shut::Full | Shut::Unknown => ("no_room", NO_ROOM_PAUSE),
                };
                let shared = Arc::clone(self);
                self.tracker.spawn(async move {
                    let tried = Tried::unsent(outcome, after);
                    let (end, note) = tried.end(&intent, asked.elapsed(), ids::jitter());
                    let finish = Finish {
                        key: intent.key,
                        stamp: intent.stamp,
                        end,
                        note,
                    };
                    shared.finisher.tell(finish, held.claim()).await;
                });
            }
        }
    }

    /// Gives back claims that were asked for and may have been won, so that they do not end
    /// without a word, which would count against their intents.
    fn disown(self: &Arc<Self>, wishes: Vec<ClaimWish>, asked: Instant) {
        let shared = Arc::clone(self);
        self.tracker.spawn(async move {
            for wish in wishes {
                let claim = shared.claims.unkept(wish.key.clone(), wish.stamp, asked);
                let finish = claiming::given_back(wish.key, wish.stamp, "no_answer");
                shared.finisher.tell(finish, &claim).await;
            }
        });
    }
}

fn is_sent(lane: &Lane) -> bool {
    lane.destination.queue().is_none()
}
