//! Messages to a real NATS server.

use std::time::Duration;

use oncegate::config::{DestinationConfig, DestinationKind, OutboxConfig};
use oncegate::domain::intent::{Destination, How, IntentStatus};

use super::fixture::{Put, RETRY_SOON, Rig, config, http, put};
use crate::support::nats::Nats;
use crate::support::rows::Kind;

fn bus(nats: &Nats) -> DestinationConfig {
    DestinationConfig {
        id: Destination("bus".to_owned()),
        kind: DestinationKind::Nats {
            servers: vec![nats.url()],
            token: None,
            credentials: None,
        },
        ..http("bus", "http://unused.example/")
    }
}

fn event(subject: &str, key: &str) -> Put {
    let mut event = put("bus", key).retry(RETRY_SOON);
    event.sending.how = How::Publish {
        subject: subject.to_owned(),
        content_type: Some("application/json".to_owned()),
    };
    event
}

#[tokio::test]
async fn an_event_is_in_the_stream_once_however_often_it_is_told() {
    let nats = Nats::start().await;
    let stream = nats.stream("ORDERS", "orders.>").await;
    let rig = Rig::start(&[bus(&nats)]).await;
    // Two intents with one key are what two tries of one are to the server.
    for _ in 0..2 {
        let key = rig.put_one(event("orders.created", "key-1")).await;
        rig.until_status(&key, IntentStatus::Completed).await;
    }
    assert_eq!(nats.messages("ORDERS").await, 1);
    let message = stream.get_raw_message(1).await.unwrap();
    let header = |name| {
        message
            .headers
            .get(name)
            .map(|value| value.as_str().to_owned())
    };
    assert_eq!(header("Nats-Msg-Id").as_deref(), Some("key-1"));
    assert_eq!(header("Content-Type").as_deref(), Some("application/json"));
    assert_eq!(&message.payload[..], b"{\"for\":\"key-1\"}");
    rig.stop().await;
}

#[tokio::test]
async fn a_subject_without_a_stream_waits_for_one_and_says_so() {
    let nats = Nats::start().await;
    let rig = Rig::start(&[bus(&nats)]).await;
    let key = rig.put_one(event("nobody.listens", "key-1")).await;
    let line = rig.until(&key, |line| line.outcome.is_some()).await;
    assert_eq!(line.outcome.as_deref(), Some("no_stream"));
    assert!(line.diagnostic.unwrap().contains("stream"));
    assert_eq!(line.faults, 0);
    nats.stream("LATE", "nobody.>").await;
    rig.until_status(&key, IntentStatus::Completed).await;
    let wild = rig.put_one(event("nobody.*", "key-2")).await;
    let line = rig.until(&wild, |line| line.outcome.is_some()).await;
    assert_eq!(line.outcome.as_deref(), Some("unsendable"));
    rig.stop().await;
}

#[tokio::test]
async fn a_subject_without_a_stream_shuts_the_bus_for_nobody() {
    let nats = Nats::start().await;
    nats.stream("ORDERS", "orders.>").await;
    let rig = Rig::store(Kind::Sqlite).await;
    let rules = OutboxConfig {
        breaker_faults: 3,
        breaker_open: Duration::from_mins(1),
        ..config()
    };
    rig.drain(&[bus(&nats)], &rules);
    let wrong = rig.put_one(event("typo.a", "bad-1")).await;
    let line = rig.until(&wrong, |line| line.tries >= 4).await;
    assert_eq!((line.status, line.faults), (IntentStatus::Pending, 0));
    let right = rig.put_one(event("orders.a", "ok-1").of("beta")).await;
    rig.until_status(&right, IntentStatus::Completed).await;
    rig.stop().await;
}

#[tokio::test]
async fn what_meets_a_server_that_is_down_is_delivered_once_it_is_back() {
    let mut nats = Nats::start().await;
    nats.stream("ORDERS", "orders.>").await;
    let rig = Rig::start(&[bus(&nats)]).await;
    let first = rig.put_one(event("orders.a", "key-1")).await;
    rig.until_status(&first, IntentStatus::Completed).await;
    nats.kill();
    let second = rig.put_one(event("orders.a", "key-2").timeout(500)).await;
    let line = rig.until(&second, |line| line.outcome.is_some()).await;
    assert_eq!((line.status, line.faults), (IntentStatus::Pending, 0));
    nats.restart().await;
    rig.until_status(&second, IntentStatus::Completed).await;
    assert_eq!(nats.messages("ORDERS").await, 2);
    rig.stop().await;
}
