//! Runs as a decision starts them, and what happens to their intents without an outbox.

use std::time::Duration;

use bytes::Bytes;
use oncegate::domain::intent::{
    ClaimWish, ClaimedIntent, End, Finish, Finished, IntentClaimed, IntentKey, Note, Stamp,
};
use oncegate::domain::run::{Beginning, RunKey, begin};
use oncegate::domain::scope::RecordKey;
use oncegate::domain::workflow::{
    Action, Effect, HttpSend, OnFailure, Payload, Retry, Send, Step, Success, Target, Workflow,
};
use oncegate::ids;
use oncegate::store::Store;
use oncegate::store::outbox::OutboxStore;
use serde_json::{Value, json};

use super::{Admin, key_of};
use crate::store_conformance::fixture;

/// A post to the configured destination `mail`.
pub fn mail() -> Effect {
    effect(Send::Http(HttpSend {
        to: Target::Destination("mail".into()),
        method: "POST".into(),
        path: None,
        headers: Vec::new(),
        success: Success::Ok,
        answer_bytes_max: 1024,
    }))
}

/// A task of a queue.
pub fn task(queue: &str) -> Effect {
    effect(Send::Task {
        queue: queue.into(),
    })
}

fn effect(send: Send) -> Effect {
    Effect {
        send,
        payload: Payload::Json(json!({ "order": 42 })),
        retry: Retry::DEFAULT,
        timeout_ms: 10_000,
    }
}

/// A step that stops the run when it fails.
pub fn step(name: &str, action: Action) -> Step {
    Step {
        name: name.into(),
        action,
        on_failure: OnFailure::Stop,
        compensation: None,
    }
}

/// A step that waits for ever for a signal of this name.
pub fn signal(name: &str) -> Step {
    let action = Action::Signal {
        signal: name.into(),
        timeout_ms: None,
    };
    step(name, action)
}

/// A step with one effect.
pub fn sends(name: &str, effect: Effect) -> Step {
    step(name, Action::Effects(vec![effect]))
}

impl Admin {
    /// The run that a decision on this record starts.
    pub async fn started(&self, key: RecordKey, workflow: &str, steps: Vec<Step>) -> RunKey {
        self.decided(key, workflow, steps, b"done").await
    }

    /// The same, of a decision with this body.
    pub async fn decided(
        &self,
        key: RecordKey,
        workflow: &str,
        steps: Vec<Step>,
        answer: &[u8],
    ) -> RunKey {
        let claim = fixture::claim_of(key);
        self.reserve(&claim).await;
        let mut completion = fixture::completion(&claim);
        completion.recorded = fixture::answer(answer);
        let workflow = Workflow {
            name: workflow.into(),
            steps,
        };
        completion.run = Some(Box::new(begin(&Beginning {
            workflow: &workflow,
            run_id: completion.decision_id.into(),
            record: &claim.key,
            key_seed: claim.generation_id.0,
            first_key: None,
            tick_id: ids::stamp(),
            holds_record: false,
            request: None,
            decision: Some(&completion.recorded),
            input: Value::Null,
        })));
        let run = RunKey {
            tenant: claim.key.tenant.clone(),
            id: completion.decision_id.into(),
        };
        let committed = self.store.complete(&[completion]).await.unwrap();
        assert!(committed[0].is_some());
        run
    }

    /// A run of `acme` with one effect for `mail`, given up: it is stuck.
    pub async fn stuck(&self, name: &str) -> RunKey {
        let steps = vec![sends("receipt", mail())];
        let run = self
            .started(key_of("acme", "payments", name), "receipts", steps)
            .await;
        self.give_up(&run, 1).await;
        self.advance().await;
        run
    }

    /// Moves every run on as far as it goes.
    pub async fn advance(&self) {
        while self.coordinator.advance(100).await.unwrap() > 0 {}
    }

    /// A worker takes the intent at this place.
    pub async fn claim(&self, run: &RunKey, seq: i64, lease: Duration) -> Box<ClaimedIntent> {
        let wish = ClaimWish {
            key: intent(run, seq),
            stamp: ids::stamp(),
            lease,
            worker: "gateway-1".into(),
        };
        let claimed = self.store.claim(&[wish]).await.unwrap().pop().unwrap();
        match claimed {
            IntentClaimed::Won(claimed) => claimed,
            other => panic!("{other:?}"),
        }
    }

    /// A worker tells the end of its try.
    pub async fn finish(&self, key: &IntentKey, stamp: Stamp, end: End, note: Note) {
        let finish = Finish {
            key: key.clone(),
            stamp,
            end,
            note,
        };
        let finished = self.store.finish(&[finish]).await.unwrap();
        assert_eq!(finished, [Finished::Taken]);
    }

    /// The intent at this place can't be delivered.
    pub async fn give_up(&self, run: &RunKey, seq: i64) {
        let claimed = self.claim(run, seq, fixture::LONG).await;
        let note = Note {
            outcome: "answered".into(),
            answer_status: Some(422),
            diagnostic: Some("no such address".into()),
        };
        let end = End::Dead { item_fault: true };
        self.finish(&claimed.key, claimed.stamp, end, note).await;
    }

    /// The intent at this place is delivered, and its run knows it.
    pub async fn deliver(&self, run: &RunKey, seq: i64) {
        let claimed = self.claim(run, seq, fixture::LONG).await;
        let end = End::Delivered {
            fenced: false,
            answer: Some(fixture::answer(&Bytes::from_static(b"{\"sent\":true}"))),
        };
        let note = Note {
            outcome: "delivered".into(),
            answer_status: Some(201),
            diagnostic: None,
        };
        self.finish(&claimed.key, claimed.stamp, end, note).await;
        self.advance().await;
    }

    /// The run as the API shows it.
    pub async fn shown(&self, run: &RunKey) -> Value {
        let reply = self.get(super::OPERATOR, &path(run, "")).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        let mut shown = reply.json();
        // It grows by itself.
        for intent in shown["intents"].as_array_mut().expect("intents") {
            intent.as_object_mut().expect("an intent").remove("age_ms");
        }
        shown
    }
}

/// The intent at this place.
pub fn intent(run: &RunKey, seq: i64) -> IntentKey {
    IntentKey {
        tenant: run.tenant.clone(),
        id: run.id.intent(seq),
    }
}

/// The run's path; `act` is empty or begins with a slash.
pub fn path(run: &RunKey, act: &str) -> String {
    format!("/v1/runs/{}{act}", run.id)
}
