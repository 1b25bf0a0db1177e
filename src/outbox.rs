//! HTTP and NATS out: intents on their way to their destinations.
//!
//! [`drainer`] finds what is due and claims it, as [`plan`] shares the room that [`capacity`] has;
//! [`dispatch`] makes one try of each, through [`http`], [`pool`] or [`nats`]; [`verdict`] says what
//! follows from what came of it, and [`finish`] writes that. [`tasks`] hands the intents of step
//! workers out.
//!
//! It does not know what an intent is for. Its invariants:
//! - Nothing is sent without a claim that certainly holds at that moment, by the monotonic clock;
//!   of a request without a body to a destination or URL: at the moment before it connects.
//! - While something is sent, no connection of the store is held.
//! - Room is freed only once the end of the try is written, or given up: memory is bounded by the
//!   room, whatever the store does.
//! - One slow or dead destination takes no more room than its cap; open breakers and shutdowns
//!   cost no attempt.

mod breaker;
mod capacity;
mod claiming;
mod claims;
mod dispatch;
mod drainer;
mod finish;
mod http;
mod nats;
mod plan;
mod pool;
mod rate;
pub mod tasks;
mod transports;
mod verdict;
pub(crate) mod wall_clock;

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::capacity::Capacity;
use self::claims::Claims;
use self::drainer::Drainer;
use self::finish::Finisher;
use self::transports::Transports;
use crate::body::BoxError;
use crate::config::{DestinationConfig, OutboxConfig};
use crate::domain::intent::Destination;
use crate::ids;
use crate::lifecycle::Bells;
use crate::store::group::Group;
use crate::store::outbox::OutboxStore;
use crate::store::portion::Portion;
use crate::upstream::Upstreams;

/// What an [`Outbox`] is made of.
pub struct OutboxParts<'a> {
    /// Where intents are.
    pub store: Arc<dyn OutboxStore>,
    /// Where the ends of tries are written, in batches.
    pub group: Group,
    /// Where effects go.
    pub destinations: &'a [DestinationConfig],
    /// How.
    pub config: OutboxConfig,
    /// The pools.
    pub upstreams: Upstreams,
    /// Whether effects go to URLs: callers may name them, or the configuration does. Else those
    /// that are there wait.
    pub urls: bool,
    /// Rung and heard.
    pub bells: Bells,
    /// Where every task is spawned.
    pub tracker: TaskTracker,
    /// Nothing new is sent after it.
    pub soft: CancellationToken,
    /// What is being sent is cut off by it.
    pub hard: CancellationToken,
}

/// Why destinations can't be used as configured.
#[derive(Debug, thiserror::Error)]
pub enum OutboxError {
    /// A URL, a secret, a header, a certificate or a server of it.
    #[error("destination {}: it can't be used as configured", destination.0)]
    Destination {
        /// Which.
        destination: Destination,
        /// Why.
        source: BoxError,
    },
    /// No client for URLs can be made.
    #[error("the client for URLs that are no configured destination can't be made")]
    Urls(#[source] BoxError),
}

/// The sending half of the outbox.
pub struct Outbox {
    shared: Arc<Shared>,
}

/// What the drainer and every try share.
pub struct Shared {
    store: Arc<dyn OutboxStore>,
    transports: Transports,
    capacity: Capacity,
    claims: Claims,
    portion: Portion,
    finisher: Finisher,
    bells: Bells,
    tracker: TaskTracker,
    soft: CancellationToken,
    hard: CancellationToken,
    /// This process, among all that ever run.
    worker: String,
    poll_interval: Duration,
}

impl Outbox {
    /// Reads certificates and secrets, and starts the heartbeats of claims; must be called in a
    /// runtime. Nothing is claimed before [`Self::drainer`] is driven.
    ///
    /// # Errors
    /// When a destination can't be used as configured.
    pub fn new(parts: OutboxParts<'_>) -> Result<Self, OutboxError> {
        let claims = Claims::new(parts.config.claim_lease);
        let beating = claims
            .clone()
            .beat(Arc::clone(&parts.store), parts.soft.clone());
        let (pools, urls) = (parts.upstreams.ids(), parts.urls);
        let capacity = Capacity::new(parts.destinations, pools, urls, &parts.config);
        let shared = Shared {
            transports: Transports::new(parts.destinations, parts.upstreams)?,
            capacity,
            claims,
            portion: Portion::new(drainer::CLAIMS_MAX),
            finisher: Finisher::new(parts.group, parts.bells.clone(), parts.hard.clone()),
            store: parts.store,
            bells: parts.bells,
            tracker: parts.tracker,
            soft: parts.soft,
            hard: parts.hard,
            worker: ids::instance(),
            poll_interval: parts.config.poll_interval,
        };
        shared.tracker.spawn(beating);
        Ok(Self {
            shared: Arc::new(shared),
        })
    }

    /// The duty to drive: every `poll_interval`, and when the outbox's bell rings. Only one at a
    /// time.
    #[must_use]
    pub fn drainer(&self) -> Drainer {
        Drainer::new(Arc::clone(&self.shared))
    }
}
