//! Signatures, verified with the public Standard Webhooks library.

use http::{HeaderMap, HeaderName, HeaderValue};
use oncegate::config::{DestinationConfig, DestinationKind, SecretText};
use oncegate::domain::intent::IntentStatus;
use standardwebhooks::Webhook;

use super::fixture::{RETRY_SOON, Rig, http, put};
use crate::support::destination::{Act, Destination, Received};

const OLD: &str = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD";
const NEW: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

fn signed(there: &Destination, secrets: &[&str]) -> DestinationConfig {
    let mut signed = http("shop", &there.url("/"));
    let DestinationKind::Http { secrets: all, .. } = &mut signed.kind else {
        unreachable!()
    };
    all.extend(
        secrets
            .iter()
            .map(|secret| SecretText((*secret).to_owned())),
    );
    signed
}

fn verify(secret: &str, received: &Received) -> bool {
    let mut headers = HeaderMap::new();
    for (name, value) in &received.headers {
        let name = HeaderName::from_bytes(name.as_bytes()).unwrap();
        headers.append(name, HeaderValue::from_bytes(value).unwrap());
    }
    Webhook::new(secret)
        .unwrap()
        .verify(&received.body, &headers)
        .is_ok()
}

#[tokio::test]
async fn receivers_can_change_over_from_one_secret_to_the_next() {
    let there = Destination::start().await;
    for (secrets, verified) in [
        (&[OLD][..], (true, false)),
        (&[OLD, NEW], (true, true)),
        (&[NEW], (false, true)),
        (&[], (false, false)),
    ] {
        let rig = Rig::start(&[signed(&there, secrets)]).await;
        let key = rig.put_one(put("shop", "key-1")).await;
        rig.until_status(&key, IntentStatus::Completed).await;
        let received = there.received().pop().unwrap();
        assert_eq!((verify(OLD, &received), verify(NEW, &received)), verified);
        let id = received.header("webhook-id");
        assert_eq!(id, (!secrets.is_empty()).then(|| "key-1".to_owned()));
        rig.stop().await;
    }
}

#[tokio::test]
async fn every_try_has_the_same_id_and_a_signature_that_verifies() {
    let there = Destination::start().await;
    let mut acts = vec![
        Act::Answer(500, Vec::new()),
        Act::Reset,
        Act::Answer(204, Vec::new()),
    ];
    there.script(move |_| acts.remove(0));
    let rig = Rig::start(&[signed(&there, &[NEW])]).await;
    let mut intent = put("shop", "key-1").retry(RETRY_SOON);
    intent.body = "{\"nul\":\"\0\"}".into();
    let key = rig.put_one(intent).await;
    rig.until_status(&key, IntentStatus::Completed).await;
    let received = there.received();
    assert_eq!(received.len(), 3);
    for one in received {
        assert!(verify(NEW, &one));
        assert_eq!(one.header("webhook-id").as_deref(), Some("key-1"));
    }
    rig.stop().await;
}
