//! How much may be under way: in all, for each tenant, and for each destination by its cap, rate
//! and breaker.
//!
//! Configured destinations and pools have a place each; those of URLs get one when they are first
//! met, and lose it when room is needed: idle ones first, else the one whose breaker lets something
//! pass again first, for so little is forgotten with it. Whatever else has no place: it waits for a
//! gateway that knows it. A [`Slot`] is the right to one try and frees its room when it is dropped.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::breaker::{Breaker, Passage, Rules, Word};
use super::rate::Bucket;
use crate::config::{DestinationConfig, OutboxConfig};
use crate::domain::intent::Destination;
use crate::domain::scope::{PoolId, TenantScope};
use crate::ids;
use crate::telemetry::metric;

/// Destinations of URLs that have a place at one time.
pub const PLACES_MAX: usize = 10_000;

/// How long a try for a pool or a URL may take, unless its effect says otherwise.
const TIMEOUT: Duration = Duration::from_secs(30);

/// All rooms. Clones are the same.
#[derive(Clone)]
pub struct Capacity(Arc<Mutex<Rooms>>);

struct Rooms {
    limits: Limits,
    in_flight: usize,
    tenants: HashMap<String, usize>,
    places: HashMap<Destination, Place>,
    /// Whether URLs get a place.
    urls: bool,
    /// Of those in `places`, how many are not configured.
    on_demand: usize,
    /// Somebody may be left without room: freed room is worth a round.
    wanted: bool,
}

#[derive(Clone, Copy)]
struct Limits {
    in_flight_max: usize,
    per_tenant_max: usize,
    concurrency_max: usize,
    breaker: Rules,
}

struct Place {
    configured: bool,
    concurrency_max: usize,
    timeout: Duration,
    in_flight: usize,
    breaker: Breaker,
    bucket: Option<Bucket>,
}

/// Why there is no slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shut {
    /// The breaker is open, for about this long.
    Open(Duration),
    /// There is no room at this moment.
    Full,
    /// This gateway's configuration has no such destination.
    Unknown,
}

/// The right to one try.
pub struct Slot {
    capacity: Capacity,
    tenant: String,
    destination: Destination,
    probe: bool,
    timeout: Duration,
    said: bool,
    /// Rung when the room that is freed is wanted.
    freed: Arc<tokio::sync::Notify>,
}

impl Capacity {
    /// With a place for each configured destination and each of these pools. `urls`: whether
    /// effects may go to any others.
    #[must_use]
    pub fn new<'a>(
        destinations: &[DestinationConfig],
        pools: impl Iterator<Item = &'a PoolId>,
        urls: bool,
        config: &OutboxConfig,
    ) -> Self {
        let limits = Limits {
            in_flight_max: config.in_flight_max,
            per_tenant_max: config.in_flight_per_tenant_max,
            concurrency_max: config.concurrency_max,
            breaker: Rules {
                faults: config.breaker_faults.max(1),
                open: config.breaker_open,
            },
        };
        let now = Instant::now();
        let pools = pools.map(|id| {
            let place = Place::new(true, limits.concurrency_max, limits.breaker);
            (Destination::pool(id.as_str()), place)
        });
        let destinations = destinations.iter().map(|destination| {
            let place = Place {
                timeout: destination.timeout,
                bucket: destination.rate_max.map(|rate| Bucket::new(rate, now)),
                ..Place::new(true, destination.concurrency_max, limits.breaker)
            };
            (destination.id.clone(), place)
        });
        Self(Arc::new(Mutex::new(Rooms {
            limits,
            in_flight: 0,
            tenants: HashMap::new(),
            places: pools.chain(destinations).collect(),
            urls,
            on_demand: 0,
            wanted: false,
        })))
    }

    /// Room in all.
    #[must_use]
    pub fn total(&self) -> usize {
        let rooms = self.rooms();
        rooms.limits.in_flight_max.saturating_sub(rooms.in_flight)
    }

    /// Room for a tenant, by name.
    #[must_use]
    pub fn of_tenant(&self, tenant: &str) -> usize {
        let rooms = self.rooms();
        let in_flight = rooms.tenants.get(tenant).copied().unwrap_or(0);
        rooms.limits.per_tenant_max.saturating_sub(in_flight)
    }

    /// Room for a destination: zero when its breaker is open.
    #[must_use]
    pub fn of_destination(&self, destination: &Destination, now: Instant) -> usize {
        let mut rooms = self.rooms();
        rooms.place(destination).map_or(0, |place| place.room(now))
    }

    /// Whether a destination is configured, a pool, or a URL where these are allowed.
    #[must_use]
    pub fn knows(&self, destination: &Destination) -> bool {
        let rooms = self.rooms();
        rooms.urls && is_url(destination) || rooms.places.contains_key(destination)
    }

    /// When a rate that holds one of these back lets something pass; `None`: no rate does.
    #[must_use]
    pub fn next_token<'a>(
        &self,
        destinations: impl Iterator<Item = &'a Destination>,
        now: Instant,
    ) -> Option<Duration> {
        let rooms = self.rooms();
        let places = destinations.filter_map(|destination| rooms.places.get(destination));
        places.filter_map(|place| place.next_token(now)).min()
    }

    /// Says whether somebody may be left without room: then the next slot that is freed rings.
    pub fn set_wanted(&self, wanted: bool) {
        self.rooms().wanted = wanted;
    }

    /// Takes the room of one try.
    ///
    /// # Errors
    /// When there is none; nothing is taken then.
    pub fn enter(
        &self,
        tenant: &TenantScope,
        destination: &Destination,
        freed: &Arc<tokio::sync::Notify>,
    ) -> Result<Slot, Shut> {
        let now = Instant::now();
        let tenant = tenant.tenant();
        let mut rooms = self.rooms();
        let of_tenant = rooms.tenants.get(tenant).copied().unwrap_or(0);
        if rooms.in_flight >= rooms.limits.in_flight_max || of_tenant >= rooms.limits.per_tenant_max
        {
            return Err(Shut::Full);
        }
        let place = rooms.place(destination).ok_or(Shut::Unknown)?;
        let (probe, timeout) = (place.enter(now)?, place.timeout);
        rooms.in_flight += 1;
        *rooms.tenants.entry(tenant.to_owned()).or_default() += 1;
        tell_in_flight(rooms.in_flight);
        drop(rooms);
        Ok(Slot {
            capacity: self.clone(),
            tenant: tenant.to_owned(),
            destination: destination.clone(),
            probe,
            timeout,
            said: false,
            freed: Arc::clone(freed),
        })
    }

    /// Sets the breakers' gauges: of a pool's and a URL's, the worst of all.
    pub fn tell(&self) {
        let mut worst: BTreeMap<String, f64> = BTreeMap::new();
        for (destination, place) in &self.rooms().places {
            let told = worst.entry(destination.class().to_owned()).or_default();
            *told = told.max(place.breaker.gauge());
        }
        for (class, value) in worst {
            metrics::gauge!(metric::BREAKER_OPEN, "destination" => class).set(value);
        }
    }

    /// Every change is whole before anything can panic.
    fn rooms(&self) -> MutexGuard<'_, Rooms> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Rooms {
    /// The destination's place; made for a URL, if these are allowed and there is room.
    fn place(&mut self, destination: &Destination) -> Option<&mut Place> {
        if !self.places.contains_key(destination) {
            if !self.urls || !is_url(destination) || !self.make_room() {
                return None;
            }
            let place = Place::new(false, self.limits.concurrency_max, self.limits.breaker);
            self.places.insert(destination.clone(), place);
            self.on_demand += 1;
        }
        self.places.get_mut(destination)
    }

    /// Forgets every idle place when there are too many; if there is none, the shut one whose pause
    /// is over first. `false`: all are at work.
    fn make_room(&mut self) -> bool {
        if self.on_demand < PLACES_MAX {
            return true;
        }
        let now = Instant::now();
        self.places
            .retain(|_, place| place.configured || !place.is_idle(now));
        if self.of_urls().count() >= PLACES_MAX {
            let at_rest = self.of_urls().filter(|(_, place)| place.in_flight == 0);
            let first = at_rest.min_by_key(|(_, place)| place.shut_for(now));
            if let Some(first) = first.map(|(destination, _)| destination.clone()) {
                self.places.remove(&first);
            }
        }
        self.on_demand = self.of_urls().count();
        self.on_demand < PLACES_MAX
    }

    fn of_urls(&self) -> impl Iterator<Item = (&Destination, &Place)> {
        self.places.iter().filter(|(_, place)| !place.configured)
    }
}

impl Place {
    fn new(configured: bool, concurrency_max: usize, breaker: Rules) -> Self {
        Self {
            configured,
            concurrency_max,
            timeout: TIMEOUT,
            in_flight: 0,
            breaker: Breaker::new(breaker),
            bucket: None,
        }
    }

    fn room(&self, now: Instant) -> usize {
        let passing = match self.breaker.passage(now) {
            Passage::Free => usize::MAX,
            Passage::Probe => 1,
            Passage::Shut(_) => 0,
        };
        let tokens = self.bucket.map_or(usize::MAX, |bucket| bucket.room(now));
        let free = self.concurrency_max.saturating_sub(self.in_flight);
        free.min(passing).min(tokens)
    }

    /// `true`: as the probe.
    fn enter(&mut self, now: Instant) -> Result<bool, Shut> {
        if let Passage::Shut(open) = self.breaker.passage(now) {
            return Err(Shut::Open(open));
        }
        if self.room(now) == 0 {
            return Err(Shut::Full);
        }
        let probe = self.breaker.pass(now).ok_or(Shut::Full)?;
        if let Some(bucket) = &mut self.bucket {
            bucket.take(now);
        }
        self.in_flight += 1;
        Ok(probe)
    }

    /// `None`: something else than the rate holds it back, or nothing does.
    fn next_token(&self, now: Instant) -> Option<Duration> {
        let bucket = self.bucket.filter(|bucket| bucket.room(now) == 0)?;
        let held = self.in_flight >= self.concurrency_max || !self.shut_for(now).is_zero();
        (!held).then(|| bucket.wait(now))
    }

    fn shut_for(&self, now: Instant) -> Duration {
        match self.breaker.passage(now) {
            Passage::Shut(pause) => pause,
            Passage::Free | Passage::Probe => Duration::ZERO,
        }
    }

    /// Nothing is on its way, and its breaker holds nothing back now: a place for a host that
    /// failed once and is never asked again must not stay for ever.
    fn is_idle(&self, now: Instant) -> bool {
        self.in_flight == 0 && self.shut_for(now).is_zero()
    }
}

impl Slot {
    /// Whether this try decides about an open breaker.
    #[must_use]
    pub fn is_probe(&self) -> bool {
        self.probe
    }

    /// How long a try of the destination may take, unless its effect says otherwise.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// The probe is not waited for any more: the breaker stays open, and the try goes on as any
    /// other does.
    pub fn end_probe(&mut self) {
        self.say(Word::Fails);
        self.probe = false;
    }

    /// What the try says about its destination; a slot that is freed without says nothing.
    pub fn say(&mut self, word: Word) {
        self.said = true;
        let (now, jitter) = (Instant::now(), ids::jitter());
        let mut rooms = self.capacity.rooms();
        if let Some(place) = rooms.places.get_mut(&self.destination) {
            place.breaker.hear(word, self.probe, now, jitter);
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if !self.said {
            self.say(Word::Nothing);
        }
        let mut rooms = self.capacity.rooms();
        rooms.in_flight -= 1;
        tell_in_flight(rooms.in_flight);
        if let Some(of_tenant) = rooms.tenants.get_mut(&self.tenant) {
            *of_tenant -= 1;
            if *of_tenant == 0 {
                rooms.tenants.remove(&self.tenant);
            }
        }
        if let Some(place) = rooms.places.get_mut(&self.destination) {
            place.in_flight -= 1;
        }
        let ring = std::mem::take(&mut rooms.wanted);
        drop(rooms);
        if ring {
            self.freed.notify_one();
        }
    }
}

fn is_url(destination: &Destination) -> bool {
    destination.0.starts_with("url:")
}

#[expect(clippy::cast_precision_loss, reason = "a gauge is a float")]
fn tell_in_flight(in_flight: usize) {
    metrics::gauge!(metric::OUTBOX_IN_FLIGHT).set(in_flight as f64);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn capacity(in_flight_max: usize, per_tenant_max: usize) -> Capacity {
        let config = OutboxConfig {
            poll_interval: Duration::from_secs(1),
            claim_lease: Duration::from_secs(30),
            in_flight_max,
            in_flight_per_tenant_max: per_tenant_max,
            concurrency_max: 2,
            allow_urls: true,
            breaker_faults: 2,
            breaker_open: Duration::from_secs(10),
        };
        let pools = ["x", "y", "z"].map(PoolId::stored);
        Capacity::new(&[], pools.iter(), true, &config)
    }

    fn enter(capacity: &Capacity, tenant: &str, destination: &str) -> Result<Slot, Shut> {
        let freed = Arc::default();
        let destination = Destination(destination.to_owned());
        capacity.enter(&TenantScope::stored(tenant), &destination, &freed)
    }

    #[tokio::test(start_paused = true)]
    async fn each_cap_holds_and_a_freed_slot_makes_room() {
        let capacity = capacity(5, 3);
        let full = |tenant, destination| enter(&capacity, tenant, destination).err();
        let first = enter(&capacity, "a", "pool:x").unwrap();
        let _second = enter(&capacity, "a 1", "pool:x").unwrap();
        assert_eq!(full("b", "pool:x"), Some(Shut::Full), "the destination's");
        let _third = enter(&capacity, "a", "pool:y").unwrap();
        assert_eq!(full("a 2", "pool:y"), Some(Shut::Full), "the tenant's");
        let _fourth = enter(&capacity, "b", "pool:y").unwrap();
        let _fifth = enter(&capacity, "b", "pool:z").unwrap();
        assert_eq!(full("b", "pool:z"), Some(Shut::Full), "all");
        drop(first);
        assert!(full("b", "pool:x").is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn an_open_breaker_shuts_its_destination_alone_and_one_probe_opens_it() {
        let capacity = capacity(9, 9);
        for _ in 0..2 {
            enter(&capacity, "a", "pool:x").unwrap().say(Word::Fails);
        }
        let shut = enter(&capacity, "a", "pool:x").err();
        assert!(matches!(shut, Some(Shut::Open(_))), "{shut:?}");
        assert!(enter(&capacity, "a", "pool:y").is_ok());
        tokio::time::advance(Duration::from_secs(13)).await;
        let mut probe = enter(&capacity, "a", "pool:x").unwrap();
        assert!(probe.is_probe());
        assert!(enter(&capacity, "a", "pool:x").is_err());
        probe.say(Word::Works);
        drop(probe);
        assert!(!enter(&capacity, "a", "pool:x").unwrap().is_probe());
    }

    #[tokio::test(start_paused = true)]
    async fn places_that_are_made_on_demand_are_bounded() {
        let capacity = capacity(9, 9);
        let busy = enter(&capacity, "a", "url:https://busy:443").unwrap();
        for n in 0..2 * PLACES_MAX {
            let room = capacity.of_destination(&Destination(format!("url:x{n}")), Instant::now());
            assert_eq!(room, 2);
            assert!(capacity.rooms().on_demand <= PLACES_MAX);
        }
        assert!(capacity.rooms().places.contains_key(&busy.destination));
        let unknown = |to| enter(&capacity, "a", to).err() == Some(Shut::Unknown);
        assert!(unknown("nobody") && unknown("pool:nobody"));
        drop(busy);
        assert_eq!(capacity.total(), 9);
    }

    #[tokio::test(start_paused = true)]
    async fn places_whose_breakers_are_open_make_room_for_pools_and_other_hosts() {
        let capacity = capacity(9, 9);
        let fail = |host: &str| {
            for _ in 0..2 {
                enter(&capacity, "a", host).unwrap().say(Word::Fails);
            }
        };
        // The one that is asked again first.
        fail("url:oldest");
        tokio::time::advance(Duration::from_secs(6)).await;
        for n in 1..PLACES_MAX {
            fail(&format!("url:x{n}"));
        }
        let room = |to: &str| capacity.of_destination(&Destination(to.to_owned()), Instant::now());
        assert_eq!(room("pool:x"), 2);
        assert_eq!(room("url:x1"), 0);
        assert_eq!(room("url:next"), 2);
        assert_eq!(room("url:oldest"), 2, "it begins anew");
    }

    /// Else hosts that failed once and are never asked again would keep all others out.
    #[tokio::test(start_paused = true)]
    async fn places_of_hosts_that_failed_once_make_room_for_others() {
        let capacity = capacity(9, 9);
        for n in 0..PLACES_MAX {
            let host = format!("url:x{n}");
            enter(&capacity, "a", &host).unwrap().say(Word::Fails);
        }
        let next = Destination("url:next".to_owned());
        assert_eq!(capacity.of_destination(&next, Instant::now()), 2);
    }
}
