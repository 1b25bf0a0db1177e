//! How tries end: claims that are lost, shutdowns, stores that do not answer.

use std::sync::Arc;
use std::time::Duration;

use oncegate::config::OutboxConfig;
use oncegate::domain::intent::{ClaimWish, IntentClaimed, IntentKey, IntentStatus, Stamp};
use oncegate::ids;

use super::double::Failing;
use super::fixture::{Rig, config, http, put};
use crate::support::blackhole::Blackhole;
use crate::support::clock::{AT_ONCE, eventually, let_pass, within};
use crate::support::destination::{Act, Destination};
use crate::support::rows::Kind;

/// Takes the claim away, as if its lease had ended here and another worker had been faster.
async fn steal(rig: &Rig, key: &IntentKey) -> Stamp {
    let due = match rig.database {
        crate::support::rows::Database::Sqlite(_) => "0",
        crate::support::rows::Database::Postgres(_) => "now() - interval '1 second'",
    };
    let sql = format!("update eec_effect_intent set due_at = {due}");
    rig.database.execute(&sql).await;
    let wish = ClaimWish {
        key: key.clone(),
        stamp: ids::stamp(),
        lease: Duration::from_hours(1),
        worker: "another".to_owned(),
    };
    let claimed = rig.store.claim(std::slice::from_ref(&wish)).await.unwrap();
    assert!(matches!(claimed[0], IntentClaimed::Won(_)), "{claimed:?}");
    wish.stamp
}

async fn stolen(kind: Kind, act: Act) -> (Rig, IntentKey) {
    let there = Destination::start().await;
    there.always(Act::After(Duration::from_millis(800), Box::new(act)));
    let rig = Rig::store(kind).await;
    rig.drain(&[http("shop", &there.url("/"))], &config());
    let key = rig.put_one(put("shop", "key-1")).await;
    there.until(1).await;
    steal(&rig, &key).await;
    eventually("the answer is there", async || {
        (there.open() == 0).then_some(())
    })
    .await;
    (rig, key)
}

async fn late(kind: Kind) {
    let (rig, key) = stolen(kind, Act::Answer(422, Vec::new())).await;
    let soft = rig.soft.clone();
    soft.cancel();
    let line = rig.line(&key).await;
    assert!(line.claimed && line.status == IntentStatus::Pending && line.faults == 0);
    assert_eq!(rig.attempts().await, [("open", 1), ("lost", 1)].into());
    rig.stop().await;
    let (rig, key) = stolen(kind, Act::Answer(200, Vec::new())).await;
    let line = rig.until_status(&key, IntentStatus::Completed).await;
    assert!(!line.claimed);
    rig.stop().await;
}

#[tokio::test]
async fn a_late_failure_changes_nothing_and_a_late_success_is_taken_sqlite() {
    late(Kind::Sqlite).await;
}

#[tokio::test]
async fn a_late_failure_changes_nothing_and_a_late_success_is_taken_postgres() {
    late(Kind::Postgres).await;
}

#[tokio::test]
async fn heartbeats_keep_a_claim_through_a_call_that_is_longer_than_its_lease() {
    let there = Destination::start().await;
    let slow = Act::After(
        Duration::from_secs(3),
        Box::new(Act::Answer(200, Vec::new())),
    );
    there.always(slow);
    let rig = Rig::store(Kind::Sqlite).await;
    let short = OutboxConfig {
        claim_lease: Duration::from_millis(900),
        ..config()
    };
    rig.drain(&[http("shop", &there.url("/"))], &short);
    let key = rig.put_one(put("shop", "key-1")).await;
    let line = rig.until_status(&key, IntentStatus::Completed).await;
    assert_eq!((line.tries, line.deaths), (1, 0));
    assert_eq!(there.received().len(), 1);
    rig.stop().await;
}

#[tokio::test]
async fn a_soft_shutdown_lets_what_was_sent_end_and_claims_nothing_more() {
    let there = Destination::start().await;
    let slow = Act::After(
        Duration::from_millis(600),
        Box::new(Act::Answer(200, Vec::new())),
    );
    there.always(slow);
    let rig = Rig::start(&[http("shop", &there.url("/"))]).await;
    let sent = rig.put_one(put("shop", "key-1")).await;
    there.until(1).await;
    rig.soft.cancel();
    let late = rig.put_one(put("shop", "key-2")).await;
    rig.until_status(&sent, IntentStatus::Completed).await;
    let line = rig.line(&late).await;
    assert_eq!(
        (line.status, line.tries, line.claimed),
        (IntentStatus::Pending, 0, false)
    );
    rig.stop().await;
}

#[tokio::test]
async fn a_hard_shutdown_leaves_what_was_sent_due_at_once_and_blames_nobody() {
    let there = Destination::start().await;
    there.always(Act::Hang);
    let rig = Rig::start(&[http("shop", &there.url("/"))]).await;
    let key = rig.put_one(put("shop", "key-1")).await;
    there.until(1).await;
    rig.hard.cancel();
    let line = rig.tried(&key).await;
    assert_eq!(line.outcome.as_deref(), Some("cut"));
    assert_eq!((line.faults, line.deaths, line.claimed), (0, 0, false));
    assert_eq!(line.status, IntentStatus::Pending);
    rig.stop().await;
}

#[tokio::test]
async fn a_store_that_is_gone_when_a_try_ends_hears_of_it_when_it_is_back() {
    let there = Destination::start().await;
    let slow = Act::After(
        Duration::from_millis(500),
        Box::new(Act::Answer(200, Vec::new())),
    );
    there.always(slow);
    let rig = Rig::store(Kind::Sqlite).await;
    rig.drain(&[http("shop", &there.url("/"))], &config());
    let key = rig.put_one(put("shop", "key-1")).await;
    there.until(1).await;
    // Every end is refused while this trigger is there.
    rig.database
        .execute(
            "create trigger refuse before update of status on eec_effect_intent \
             begin select raise(abort, 'refused'); end",
        )
        .await;
    eventually("the answer is there", async || {
        (there.open() == 0).then_some(())
    })
    .await;
    assert_eq!(rig.line(&key).await.status, IntentStatus::Pending);
    rig.database.execute("drop trigger refuse").await;
    let line = rig.until_status(&key, IntentStatus::Completed).await;
    assert_eq!(line.tries, 1);
    assert_eq!(there.received().len(), 1, "it was not sent again");
    rig.stop().await;
}

#[tokio::test]
async fn claims_that_take_too_long_together_are_taken_one_by_one_and_hold_nothing_up() {
    let there = Destination::start().await;
    let rig = Rig::store(Kind::Sqlite).await;
    let puts: Vec<_> = (0..40).map(|n| put("shop", &format!("k-{n}"))).collect();
    let keys = rig.put(&puts).await;
    let store = Arc::new(Failing {
        heavy: Some(keys[5].clone()),
        ..Failing::of(rig.store.clone())
    });
    let mut wide = http("shop", &there.url("/"));
    wide.concurrency_max = 100;
    rig.drain_from(store, &[wide], &config());
    for key in &keys {
        let line = rig.until_status(key, IntentStatus::Completed).await;
        assert_eq!((line.tries, line.deaths), (1, 0));
    }
    rig.stop().await;
}

#[tokio::test]
async fn a_soft_shutdown_while_connecting_gives_back_at_once_and_costs_no_try() {
    let hole = Blackhole::new().await;
    let rig = Rig::start(&[http("shop", &hole.url())]).await;
    let key = rig.put_one(put("shop", "key-1").timeout(60_000)).await;
    rig.until(&key, |line| line.claimed).await;
    // It is connecting by now.
    let_pass(Duration::from_millis(500)).await;
    rig.soft.cancel();
    let line = within(AT_ONCE, "it is given back", async || {
        let line = rig.line(&key).await;
        (!line.claimed).then_some(line)
    })
    .await;
    assert_eq!((line.status, line.tries), (IntentStatus::Pending, 0));
    assert_eq!(rig.attempts().await, [("released", 1)].into());
    rig.stop().await;
}

#[tokio::test]
async fn a_claim_that_is_lost_while_connecting_sends_nothing() {
    let there = Destination::start().await;
    let mut hole = Blackhole::new().await;
    let rig = Rig::store(Kind::Sqlite).await;
    let short = OutboxConfig {
        claim_lease: Duration::from_millis(900),
        ..config()
    };
    rig.drain(&[http("shop", &hole.url())], &short);
    let key = rig.put_one(put("shop", "key-1").timeout(60_000)).await;
    rig.until(&key, |line| line.claimed).await;
    steal(&rig, &key).await;
    // The next heartbeat tells that the claim is another's.
    let_pass(Duration::from_millis(600)).await;
    hole.open(there.address());
    // The kernel knocks again one and three seconds after the first time.
    let_pass(Duration::from_secs(4)).await;
    assert_eq!(there.received().len(), 0);
    assert_eq!(there.open(), 0, "it knocked, and went away");
    rig.stop().await;
}
