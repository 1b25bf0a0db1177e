//! One destination never delays another, one tenant never starves another.

use std::time::Duration;

use oncegate::config::OutboxConfig;
use oncegate::domain::intent::IntentStatus;

use super::fixture::{Rig, config, http, put, put_to, put_url};
use crate::support::clock::AT_ONCE;
use crate::support::destination::{Act, Destination};
use crate::support::rows::Kind;

#[tokio::test]
async fn a_dead_destination_among_fifty_live_ones_delays_none_of_them() {
    let (dead, live) = (Destination::start().await, Destination::start().await);
    dead.always(Act::Hang);
    let mut destinations = vec![http("dead", &dead.url("/"))];
    let mut puts: Vec<_> = (0..300)
        .map(|n| put("dead", &format!("dead-{n}")))
        .collect();
    for n in 0..50 {
        destinations.push(http(&format!("live-{n}"), &live.url("/")));
        puts.extend((0..4).map(|_| put(&format!("live-{n}"), &format!("live-{n}"))));
    }
    let rig = Rig::start(&destinations).await;
    let begun = std::time::Instant::now();
    rig.put(&puts).await;
    let received = live.until(200).await;
    assert!(
        received[199].at - begun < AT_ONCE * 2,
        "all live ones, beside 300 that hang"
    );
    assert!(dead.received().len() <= destinations[0].concurrency_max);
    rig.hard.cancel();
    rig.stop().await;
}

#[tokio::test]
async fn a_quiet_tenant_is_served_beside_one_with_a_long_backlog() {
    let there = Destination::start().await;
    there.always(Act::After(
        Duration::from_millis(5),
        Box::new(Act::Answer(200, Vec::new())),
    ));
    let mut shop = http("shop", &there.url("/"));
    shop.concurrency_max = 2;
    let rig = Rig::store(Kind::Sqlite).await;
    let loud: Vec<_> = (0..2_000)
        .map(|n| put("shop", &format!("loud-{n}")))
        .collect();
    rig.put(&loud).await;
    rig.drain(&[shop], &config());
    there.until(20).await;
    let quiet = rig.put_one(put("shop", "quiet").of("beta")).await;
    let before = there.received().len();
    rig.until_status(&quiet, IntentStatus::Completed).await;
    let received = there.received();
    let place = received
        .iter()
        .position(|one| one.key() == "quiet")
        .unwrap();
    assert!(
        place < before + 100,
        "{place} came before it, {before} of them before it was there"
    );
    rig.stop().await;
}

#[tokio::test]
async fn caps_hold_for_a_destination_a_tenant_and_in_all() {
    let there = Destination::start().await;
    there.always(Act::Hang);
    let caps = OutboxConfig {
        in_flight_max: 6,
        in_flight_per_tenant_max: 4,
        ..config()
    };
    let mut narrow = http("narrow", &there.url("/narrow"));
    narrow.concurrency_max = 1;
    let rig = Rig::store(Kind::Sqlite).await;
    let mut puts = Vec::new();
    for n in 0..10 {
        puts.push(put("narrow", &format!("a-{n}")));
        puts.push(put("wide", &format!("a-{n}")));
        puts.push(put("wide", &format!("b-{n}")).of("beta"));
    }
    rig.put(&puts).await;
    rig.drain(&[narrow, http("wide", &there.url("/wide"))], &caps);
    let received = there.until(6).await;
    let count = |start: &str| {
        received
            .iter()
            .filter(|one| one.key().starts_with(start))
            .count()
    };
    assert!(count("a-") <= 4 && count("b-") <= 4);
    assert!(
        received
            .iter()
            .filter(|one| one.target == "/narrow")
            .count()
            <= 1
    );
    // Several polls later there are no more.
    crate::support::clock::let_pass(Duration::from_millis(500)).await;
    assert_eq!(there.received().len(), 6);
    rig.hard.cancel();
    rig.stop().await;
}

#[tokio::test]
async fn a_rate_is_kept() {
    let there = Destination::start().await;
    let mut shop = http("shop", &there.url("/"));
    shop.rate_max = Some(20.0);
    let rig = Rig::store(Kind::Sqlite).await;
    let puts: Vec<_> = (0..40).map(|n| put("shop", &format!("k-{n}"))).collect();
    rig.put(&puts).await;
    rig.drain(&[shop], &config());
    let received = there.until(40).await;
    // Twenty at once, then twenty a second.
    let took = received[39].at - received[0].at;
    assert!(took >= Duration::from_millis(900), "{took:?}");
    rig.stop().await;
}

#[tokio::test]
async fn intents_for_a_destination_that_is_not_configured_wait_and_cost_nothing() {
    let there = Destination::start().await;
    let rig = Rig::start(&[http("shop", &there.url("/"))]).await;
    let strange = rig.put_one(put("gone", "key-1")).await;
    let task = put_to(
        "task:queue",
        oncegate::domain::workflow::Target::Pool("x".into()),
        "t",
    );
    let task = rig.put_one(task).await;
    let known = rig.put_one(put("shop", "key-2")).await;
    rig.until_status(&known, IntentStatus::Completed).await;
    for key in [strange, task] {
        let line = rig.line(&key).await;
        assert_eq!(
            (line.status, line.tries, line.claimed),
            (IntentStatus::Pending, 0, false)
        );
    }
    rig.stop().await;
}

#[tokio::test]
async fn intents_for_a_pool_or_a_url_that_this_gateway_has_not_wait_and_cost_nothing() {
    let there = Destination::start().await;
    let rig = Rig::store(Kind::Sqlite).await;
    let without_urls = OutboxConfig {
        allow_urls: false,
        ..config()
    };
    rig.drain(&[http("shop", &there.url("/"))], &without_urls);
    let to = oncegate::domain::workflow::Target::Pool("nowhere".to_owned());
    let pool = rig.put_one(put_to("pool:nowhere", to, "key-1")).await;
    let url = rig
        .put_one(put_url("https://127.0.0.1/hook", "key-2"))
        .await;
    let known = rig.put_one(put("shop", "key-3")).await;
    rig.until_status(&known, IntentStatus::Completed).await;
    // Several polls later they still wait.
    crate::support::clock::let_pass(Duration::from_millis(500)).await;
    for key in [pool, url] {
        let line = rig.line(&key).await;
        assert_eq!(
            (line.status, line.tries, line.outcome),
            (IntentStatus::Pending, 0, None)
        );
    }
    rig.stop().await;
}
