//! One intent, once: from the claim to the written end.
//!
//! What the end of the process does to it is told by [`SendProgress`]: where nothing was handed
//! over the intent is given back at once, at the first word of a shutdown; where something was,
//! the try goes on until the hard shutdown and then is due again at once, which is nobody's fault.
//! The receiver may have taken it and is sent the same key and bytes again.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::Shared;
use super::capacity::Slot;
use super::claims::Held;
use super::verdict::{Tried, Verdict};
use crate::domain::intent::{ClaimedIntent, Finish};
use crate::ids;
use crate::telemetry::metric;
use crate::upstream::{SendProgress, Sent};

/// For how long the probe of an open breaker is waited for before the next may go.
pub const PROBE_MAX: Duration = Duration::from_secs(10);

/// An intent that was won and has room.
pub struct Dispatch {
    /// Everything that is needed.
    pub shared: Arc<Shared>,
    /// What.
    pub intent: ClaimedIntent,
    /// The claim, kept alive.
    pub held: Held,
    /// The room, freed once the end is written or given up.
    pub slot: Slot,
    /// Before the claim was asked for.
    pub asked: Instant,
}

impl Dispatch {
    /// Makes the try and writes its end.
    pub async fn run(mut self) {
        let tried = self.attempt().await;
        self.slot.say(tried.word);
        let (end, note) = tried.end(&self.intent, self.asked.elapsed(), ids::jitter());
        let finish = Finish {
            key: self.intent.key.clone(),
            stamp: self.intent.stamp,
            end,
            note,
        };
        self.shared.finisher.tell(finish, self.held.claim()).await;
    }

    async fn attempt(&mut self) -> Tried {
        if self.shared.soft.is_cancelled() {
            return self.count(Tried::unsent("shutdown", Duration::ZERO), None);
        }
        let begun = Instant::now();
        let tried = self.cuttable().await;
        let sent = !matches!(tried.verdict, Verdict::Unsent(_));
        self.count(tried, sent.then(|| begun.elapsed()))
    }

    /// The try, unless its time is over or the process ends before.
    async fn cuttable(&mut self) -> Tried {
        let (shared, intent) = (&self.shared, &self.intent);
        let claim = Arc::clone(self.held.claim());
        let progress = SendProgress::only_if(move || claim.holds());
        let limit = Duration::from_millis(intent.sending.timeout_ms);
        let sending = shared.transports.send(intent, &progress);
        let usual = self.slot.timeout();
        let sending = waited_for(sending, &mut self.slot);
        let mut sending = Box::pin(tokio::time::timeout(limit, sending));
        let over = |_| Tried::timed_out(limit, usual);
        let (soft, hard) = (&shared.soft, &shared.hard);
        tokio::select! {
            biased;
            tried = &mut sending => return tried.unwrap_or_else(over),
            () = soft.cancelled() => if progress.abandon() == Sent::No {
                return Tried::unsent("shutdown", Duration::ZERO);
            },
        }
        tokio::select! {
            biased;
            tried = &mut sending => tried.unwrap_or_else(over),
            () = hard.cancelled() => Tried::cut(),
        }
    }

    fn count(&self, tried: Tried, took: Option<Duration>) -> Tried {
        let class = self.intent.destination.class().to_owned();
        if let Some(took) = took {
            metrics::histogram!(metric::OUTBOX_SECONDS, "destination" => class.clone())
                .record(took);
        }
        metrics::counter!(
            metric::OUTBOX_ATTEMPTS,
            "destination" => class,
            "outcome" => tried.outcome
        )
        .increment(1);
        tracing::debug!(
            intent = %self.intent.key.id,
            outcome = tried.outcome,
            status = tried.status.map(|status| status.as_u16()),
            diagnostic = tried.diagnostic,
            "a try ended"
        );
        tried
    }
}

/// The try. If it is an open breaker's probe and slow, the breaker stays open and probes again
/// later, and the answer that comes in the end closes it all the same: a service that always takes
/// longer than a probe is no dead one.
async fn waited_for(sending: impl Future<Output = Tried>, slot: &mut Slot) -> Tried {
    let mut sending = std::pin::pin!(sending);
    if slot.is_probe() {
        match tokio::time::timeout(PROBE_MAX, &mut sending).await {
            Ok(tried) => return tried,
            Err(_) => slot.end_probe(),
        }
    }
    sending.await
}
