//! Parked duplicates: one flight per key in this process, led by one request.
//!
//! Whoever comes first leads: it alone talks to the store, first to claim the record, then as its
//! owner or, when another gateway owns it, as the one that polls for all. The rest follow: they
//! hold no database connection and wake when the flight closes, then decide again from the start,
//! so that exactly one of them leads next. A thousand duplicates cost the store one look.
//!
//! The lock guards a map look-up and is never held across an await.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, watch};

use crate::domain::fingerprint::Fingerprint;
use crate::domain::scope::RecordKey;
use crate::telemetry::metric;

/// All flights of this process.
#[derive(Clone)]
pub struct Flights(Arc<Inner>);

struct Inner {
    flights: Mutex<HashMap<RecordKey, Arc<Flight>>>,
    waiters: AtomicUsize,
    waiters_per_key_max: usize,
    waiters_max: usize,
}

struct Flight {
    phase: watch::Sender<Phase>,
    /// Rung when the record changed although this flight's leader does not own it.
    bell: Notify,
    waiters: AtomicUsize,
}

/// What a follower sees of its flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The leader is asking the store.
    Opening,
    /// Somebody owns the record, for a request with this fingerprint.
    Held(Option<Fingerprint>),
    /// The store gave no answer, and what the leader asked for is being undone.
    StoreDown,
    /// Over: decide again.
    Closed,
}

/// A request's place in a flight.
pub enum Joined {
    /// It leads.
    Leader(Leader),
    /// It follows.
    Follower(Follower),
    /// The key has as many waiters as it may have. What a follower would see.
    KeyFull(Phase),
    /// The gateway has as many waiters as it may have. What a follower would see.
    Full(Phase),
}

/// The right to talk to the store about a key. Dropping it closes the flight.
pub struct Leader {
    flights: Flights,
    key: RecordKey,
    flight: Arc<Flight>,
}

/// A parked duplicate's view of its flight.
pub struct Follower {
    phase: watch::Receiver<Phase>,
    _place: Place,
}

/// One of the places for waiters on a key, given back on drop.
pub struct Place {
    flight: Arc<Flight>,
    _parked: Parked,
}

/// One of the places for waiters in all, given back on drop.
pub struct Parked(Flights);

impl Flights {
    /// No flights yet, with room for this many waiters.
    #[must_use]
    pub fn new(waiters_per_key_max: usize, waiters_max: usize) -> Self {
        metrics::gauge!(metric::WAITERS).set(0);
        Self(Arc::new(Inner {
            flights: Mutex::default(),
            waiters: AtomicUsize::new(0),
            waiters_per_key_max,
            waiters_max,
        }))
    }

    /// Takes a place in the key's flight; opens the flight when there is none.
    #[must_use]
    pub fn join(&self, key: &RecordKey) -> Joined {
        match self.lock().entry(key.clone()) {
            Entry::Vacant(vacant) => {
                let flight = Arc::new(Flight {
                    phase: watch::Sender::new(Phase::Opening),
                    bell: Notify::new(),
                    waiters: AtomicUsize::new(0),
                });
                vacant.insert(Arc::clone(&flight));
                Joined::Leader(Leader {
                    flights: self.clone(),
                    key: key.clone(),
                    flight,
                })
            }
            Entry::Occupied(occupied) => self.follow(occupied.get()),
        }
    }

    /// Lets a leader that waits for an owner elsewhere look at the store at once.
    pub fn look_again(&self, key: &RecordKey) {
        if let Some(flight) = self.lock().get(key) {
            flight.bell.notify_one();
        }
    }

    /// How many duplicates are parked now.
    #[must_use]
    pub fn waiters(&self) -> usize {
        self.0.waiters.load(Ordering::Relaxed)
    }

    fn follow(&self, flight: &Arc<Flight>) -> Joined {
        // Under the map's lock, so that racing joins can't overrun the key's count.
        if flight.waiters.load(Ordering::Relaxed) >= self.0.waiters_per_key_max {
            return Joined::KeyFull(*flight.phase.borrow());
        }
        match self.place(flight) {
            None => Joined::Full(*flight.phase.borrow()),
            Some(place) => Joined::Follower(Follower {
                phase: flight.phase.subscribe(),
                _place: place,
            }),
        }
    }

    fn place(&self, flight: &Arc<Flight>) -> Option<Place> {
        let parked = self.park()?;
        flight.waiters.fetch_add(1, Ordering::Relaxed);
        Some(Place {
            flight: Arc::clone(flight),
            _parked: parked,
        })
    }

    /// A place for one that waits for something else than an owner.
    #[must_use]
    pub fn park(&self) -> Option<Parked> {
        let most = self.0.waiters_max;
        let one_more = |waiters| (waiters < most).then_some(waiters + 1);
        let (success, failure) = (Ordering::Relaxed, Ordering::Relaxed);
        self.0
            .waiters
            .fetch_update(success, failure, one_more)
            .ok()?;
        metrics::gauge!(metric::WAITERS).increment(1);
        Some(Parked(self.clone()))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<RecordKey, Arc<Flight>>> {
        // The critical sections can't panic half-way through a change.
        self.0
            .flights
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Leader {
    /// Tells the followers that the record is owned, and for which request.
    pub fn hold(&self, fingerprint: Option<Fingerprint>) {
        self.flight.phase.send_replace(Phase::Held(fingerprint));
    }

    /// Tells the followers that the store gave no answer.
    pub fn store_down(&self) {
        self.flight.phase.send_replace(Phase::StoreDown);
    }

    /// A place for the leader itself, when it waits for another gateway's owner. `None`: the
    /// gateway has as many waiters as it may have.
    #[must_use]
    pub fn wait(&self) -> Option<Place> {
        self.flights.place(&self.flight)
    }

    /// Ends when the record was changed by somebody else in this process. A ring from before is
    /// kept: it costs a look.
    pub async fn rung(&self) {
        self.flight.bell.notified().await;
    }

    /// Whether duplicates are parked behind this leader.
    #[must_use]
    pub fn has_followers(&self) -> bool {
        self.flight.waiters.load(Ordering::Relaxed) > 0
    }
}

impl Drop for Leader {
    fn drop(&mut self) {
        // First out of the map, then closed: whoever wakes finds no flight and may lead.
        self.flights.lock().remove(&self.key);
        self.flight.phase.send_replace(Phase::Closed);
    }
}

impl Follower {
    /// The present phase.
    #[must_use]
    pub fn phase(&mut self) -> Phase {
        *self.phase.borrow_and_update()
    }

    /// Waits until the phase has changed since it was last looked at.
    pub async fn changed(&mut self) {
        // An error means that the flight is gone, which `phase` shows as closed.
        let _ = self.phase.changed().await;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.flight.waiters.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for Parked {
    fn drop(&mut self) {
        self.0.0.waiters.fetch_sub(1, Ordering::Relaxed);
        metrics::gauge!(metric::WAITERS).decrement(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::key::IdempotencyKey;
    use crate::domain::scope::{PoolId, TenantScope};

    fn key(text: &str) -> RecordKey {
        RecordKey {
            tenant: TenantScope::stored("t"),
            pool: PoolId::stored("p"),
            key: IdempotencyKey::from_text(text).unwrap().unwrap(),
        }
    }

    fn leader(joined: Joined) -> Leader {
        match joined {
            Joined::Leader(leader) => leader,
            _ => panic!("not the leader"),
        }
    }

    fn follower(joined: Joined) -> Follower {
        match joined {
            Joined::Follower(follower) => follower,
            _ => panic!("not a follower"),
        }
    }

    #[tokio::test]
    async fn when_a_flight_closes_exactly_one_follower_leads_next() {
        let flights = Flights::new(10, 10);
        let first = leader(flights.join(&key("k")));
        let mut second = follower(flights.join(&key("k")));
        let mut third = follower(flights.join(&key("k")));
        assert_eq!(second.phase(), Phase::Opening);
        first.hold(None);
        second.changed().await;
        assert_eq!(second.phase(), Phase::Held(None));
        drop(first);
        second.changed().await;
        third.changed().await;
        assert_eq!(
            (second.phase(), third.phase()),
            (Phase::Closed, Phase::Closed)
        );
        let next = flights.join(&key("k"));
        assert!(matches!(next, Joined::Leader(_)));
        assert!(matches!(flights.join(&key("k")), Joined::Follower(_)));
    }

    #[test]
    fn waiters_are_bounded_per_key_and_in_all_and_leave_nothing_behind() {
        let flights = Flights::new(2, 3);
        let a = leader(flights.join(&key("a")));
        let b = leader(flights.join(&key("b")));
        let a1 = follower(flights.join(&key("a")));
        let a2 = follower(flights.join(&key("a")));
        assert!(matches!(flights.join(&key("a")), Joined::KeyFull(_)));
        let b1 = follower(flights.join(&key("b")));
        assert!(matches!(flights.join(&key("b")), Joined::Full(_)));
        drop(a1);
        assert!(matches!(flights.join(&key("b")), Joined::Follower(_)));
        drop((a, a2, b, b1));
        assert_eq!(flights.waiters(), 0);
        assert!(flights.lock().is_empty());
    }
}
