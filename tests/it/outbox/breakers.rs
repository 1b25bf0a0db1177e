//! The breaker: open costs no attempt, one probe decides.

use std::time::Duration;

use oncegate::config::OutboxConfig;
use oncegate::domain::intent::IntentStatus;

use super::fixture::{RETRY_SOON, Rig, config, http, put};
use crate::support::destination::{Act, Destination};
use crate::support::rows::Kind;

#[tokio::test]
async fn an_open_breaker_costs_no_attempt_and_one_probe_opens_the_way_again() {
    let there = Destination::start().await;
    there.always(Act::Answer(503, Vec::new()));
    let rig = Rig::store(Kind::Sqlite).await;
    let rules = OutboxConfig {
        breaker_faults: 3,
        breaker_open: Duration::from_secs(1),
        ..config()
    };
    let mut shop = http("shop", &there.url("/"));
    shop.concurrency_max = 1;
    rig.drain(&[shop], &rules);
    let puts: Vec<_> = (0..20)
        .map(|n| put("shop", &format!("k-{n}")).retry(RETRY_SOON))
        .collect();
    let keys = rig.put(&puts).await;
    let closed = there.until(3).await;
    // The fourth is the probe.
    let probed = there.until(4).await;
    let pause = probed[3].at - closed[2].at;
    assert!(pause >= Duration::from_millis(700), "{pause:?}");
    there.always(Act::Answer(200, Vec::new()));
    for key in &keys {
        rig.until_status(key, IntentStatus::Completed).await;
    }
    // Twenty deliveries, and every other try got a 503: none was taken for an open breaker.
    let failed = rig.attempts().await.get("failed").copied().unwrap_or(0);
    assert_eq!(
        there.received().len(),
        20 + usize::try_from(failed).unwrap()
    );
    assert!(failed <= 6, "{failed}");
    rig.stop().await;
}

#[tokio::test]
async fn a_breaker_of_one_destination_is_none_of_another() {
    let (dead, live) = (Destination::start().await, Destination::start().await);
    dead.always(Act::Reset);
    let rig = Rig::store(Kind::Sqlite).await;
    let rules = OutboxConfig {
        breaker_faults: 1,
        breaker_open: Duration::from_mins(1),
        ..config()
    };
    rig.drain(
        &[http("dead", &dead.url("/")), http("live", &live.url("/"))],
        &rules,
    );
    let first = rig.put_one(put("dead", "d-1")).await;
    rig.tried(&first).await;
    let waits = rig.put_one(put("dead", "d-2")).await;
    let live_one = rig.put_one(put("live", "l-1")).await;
    rig.until_status(&live_one, IntentStatus::Completed).await;
    let waiting = rig.line(&waits).await;
    assert_eq!((waiting.tries, waiting.status), (0, IntentStatus::Pending));
    assert_eq!(dead.received().len(), 1);
    rig.stop().await;
}

#[tokio::test]
async fn a_service_that_takes_longer_than_a_probe_gets_out_of_an_open_breaker() {
    let there = Destination::start().await;
    let mut first = true;
    there.script(move |_| {
        if std::mem::take(&mut first) {
            return Act::Answer(503, Vec::new());
        }
        let ok = Box::new(Act::Answer(200, Vec::new()));
        // A probe is waited for ten seconds.
        Act::After(Duration::from_secs(11), ok)
    });
    let rig = Rig::store(Kind::Sqlite).await;
    let rules = OutboxConfig {
        breaker_faults: 1,
        breaker_open: Duration::from_millis(200),
        ..config()
    };
    rig.drain(&[http("shop", &there.url("/"))], &rules);
    let slow = put("shop", "k").retry(RETRY_SOON).timeout(60_000);
    let key = rig.put_one(slow).await;
    let line = rig.until_status(&key, IntentStatus::Completed).await;
    assert_eq!(line.tries, 2, "the 503, and the probe");
    // The way is free again: two at one time.
    there.always(Act::After(
        Duration::from_millis(500),
        Box::new(Act::Answer(200, Vec::new())),
    ));
    let keys = rig.put(&[put("shop", "k-1"), put("shop", "k-2")]).await;
    let received = there.until(4).await;
    assert!(received[3].at - received[2].at < Duration::from_millis(500));
    for key in &keys {
        rig.until_status(key, IntentStatus::Completed).await;
    }
    rig.stop().await;
}

#[tokio::test]
async fn a_time_out_that_an_effect_chose_says_nothing_about_its_destination() {
    let (quick, slow) = (Destination::start().await, Destination::start().await);
    let late = |ms| {
        Act::After(
            Duration::from_millis(ms),
            Box::new(Act::Answer(200, Vec::new())),
        )
    };
    quick.always(late(300));
    slow.always(Act::Hang);
    let rig = Rig::store(Kind::Sqlite).await;
    let rules = OutboxConfig {
        breaker_faults: 1,
        breaker_open: Duration::from_mins(1),
        ..config()
    };
    let mut bounded = http("slow", &slow.url("/"));
    bounded.timeout = Duration::from_millis(200);
    rig.drain(&[http("quick", &quick.url("/")), bounded], &rules);
    let hasty = rig.put_one(put("quick", "k-1").timeout(50)).await;
    let line = rig.tried(&hasty).await;
    assert_eq!(line.outcome.as_deref(), Some("timeout"));
    assert_eq!((line.status, line.faults), (IntentStatus::Pending, 0));
    let other = rig.put_one(put("quick", "k-2").of("beta")).await;
    rig.until_status(&other, IntentStatus::Completed).await;
    // Its own time-out does say something.
    let cut = rig.put_one(put("slow", "k-3").timeout(200)).await;
    rig.tried(&cut).await;
    let waits = rig.put_one(put("slow", "k-4").of("beta")).await;
    let quick_again = rig.put_one(put("quick", "k-5")).await;
    rig.until_status(&quick_again, IntentStatus::Completed)
        .await;
    let waiting = rig.line(&waits).await;
    assert_eq!((waiting.tries, waiting.status), (0, IntentStatus::Pending));
    rig.stop().await;
}
