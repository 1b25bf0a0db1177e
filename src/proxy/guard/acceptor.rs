//! The owner of an accepted request: commits at once, then waits if its client asks for it.

use std::time::Duration;

use tokio::time::Instant;

use super::super::accept;
use super::super::answer::{Answer, Status};
use super::super::prefer;
use super::super::watch::Patience;
use super::{Asker, Guard, Guarded, Reply};
use crate::domain::message::Recorded;
use crate::domain::run::{RunId, RunKey, RunStatus};
use crate::domain::scope::TenantScope;
use crate::ids;
use crate::problem::{Kind, Problem, RETRY_AFTER};
use crate::routing::gate::{Ask, Denial};
use crate::routing::permit::Permit;
use crate::routing::replay::Decided;
use crate::routing::settle::{Outcome, Settled};
use crate::store::StoreError;
use crate::telemetry::Chain;

/// A request that was accepted, now or before, without its body.
pub(super) struct Accepted {
    ask: Ask,
    asker: Asker,
    run_wait: Option<Duration>,
}

/// What was seen of a run: how it stands, and the answer of its call.
type Seen = Option<(RunStatus, Option<Recorded>)>;

impl Guard {
    /// Commits the decision and the run under `permit`, and replies.
    pub(super) async fn accept(&self, permit: Permit, guarded: Guarded, reply: Reply) {
        let decision_id = ids::decision_id();
        let seen = accept::request_seen(&guarded.parts, guarded.body.bytes());
        let outgoing = self.outgoing(&permit, &guarded);
        let follow_up = accept::follow_up(&guarded.ask.policy, seen, outgoing);
        let outcome = Outcome::Answered {
            decision_id,
            recorded: accept::recorded(RunId::from(decision_id)),
            follow_up: Some(Box::new(follow_up)),
        };
        let settled = self.0.gate.settle(permit, outcome).await;
        // The body is in the store: whoever waits from here on holds none.
        let accepted = guarded.into_accepted();
        let answer = match settled {
            Settled::Committed(decided) => self.told(&accepted, &decided, Status::Executed).await,
            Settled::Superseded(decided) => self.replayed(&accepted, &decided, true).await,
            Settled::Refused(denial) => accepted.denied(denial),
            Settled::Unrecorded | Settled::Reclaimable | Settled::OutcomeUnknown => {
                Answer::problem(not_recorded(), Status::Unknown)
            }
        };
        reply.send(answer);
    }

    /// A stored decision, told again; of an accepted request the result, once there is one.
    pub(super) async fn replayed(
        &self,
        accepted: &Accepted,
        decided: &Decided,
        waited: bool,
    ) -> Answer {
        let status = if waited {
            Status::Waited
        } else {
            Status::Replayed
        };
        self.told(accepted, decided, status).await
    }

    async fn told(&self, accepted: &Accepted, decided: &Decided, status: Status) -> Answer {
        let (committed, asker) = (decided.committed, &accepted.asker);
        let Some(run) = accept::run_of(&committed, &decided.recorded) else {
            return Answer::told(committed, &decided.recorded, status, asker).await;
        };
        // To a client that would not wait: the call is only now to be made.
        let (result, waited) = if status == Status::Executed && accepted.run_wait.is_none() {
            (None, false)
        } else {
            self.result(accepted, run).await
        };
        let status = if waited && status == Status::Replayed {
            Status::Waited
        } else {
            status
        };
        let recorded = result.as_ref().unwrap_or(&decided.recorded);
        let mut answer = Answer::told(committed, recorded, status, asker).await;
        if let Some(wait) = accepted.run_wait {
            prefer::applied(answer.response.headers_mut(), wait);
        }
        answer
    }

    /// The answer of a run's call, if there is one by the time that its client wants to be
    /// answered, and whether that was waited for.
    async fn result(&self, accepted: &Accepted, run: RunId) -> (Option<Recorded>, bool) {
        let key = |tenant: &TenantScope| RunKey {
            tenant: tenant.clone(),
            id: run,
        };
        let ask = &accepted.ask;
        // The record may stand under an older secret, and its run with it.
        let older = ask.older.iter().map(|record| key(&record.tenant));
        let keys: Vec<RunKey> = std::iter::once(key(&ask.key.tenant)).chain(older).collect();
        let patience = Patience {
            until: accepted
                .run_wait
                .map_or_else(Instant::now, |_| ask.wait_until),
            gone: ask.gone.clone(),
        };
        let is_settled = |seen: &Seen| {
            seen.as_ref().is_none_or(|(status, answer)| {
                answer.is_some() || status.is_final() || *status == RunStatus::Stuck
            })
        };
        let look = || self.look_at_run(&keys);
        let (seen, waited) = self
            .0
            .watch
            .until_settled(&keys, &patience, look, is_settled)
            .await;
        match seen {
            Ok(seen) => (seen.and_then(|(_, answer)| answer), waited),
            Err(error) => {
                // That it was accepted is certain, and is told.
                tracing::warn!(error = %Chain(&error), "a run could not be looked at");
                (None, waited)
            }
        }
    }

    async fn look_at_run(&self, keys: &[RunKey]) -> Result<Seen, StoreError> {
        for key in keys {
            if let Some(seen) = self.0.store.run_answer(key).await? {
                return Ok(Some(seen));
            }
        }
        Ok(None)
    }
}

impl Accepted {
    pub(super) fn denied(&self, denial: Denial) -> Answer {
        Answer::denied(denial, &self.ask.key, self.ask.policy.lease)
    }
}

impl Guarded {
    /// Lets go of the body and its room.
    pub(super) fn into_accepted(self) -> Accepted {
        Accepted {
            ask: self.ask,
            asker: self.asker,
            run_wait: self.run_wait,
        }
    }
}

/// The store did not say in time whether it took the decision; it is being tried further.
fn not_recorded() -> Problem {
    Problem::new(
        Kind::StoreUnavailable,
        "The store did not confirm in time that the request was accepted; it may yet be. Try again \
         later with the same key: it will not be accepted twice.",
    )
    .retry_after(RETRY_AFTER)
}
