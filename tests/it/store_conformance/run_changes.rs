//! What ticks order for intents, and what a run is told of them.

use oncegate::domain::intent::{IntentChange, IntentStatus, Order};
use oncegate::domain::run::{RunKey, RunStatus};

use super::fixture::Fixture;
use super::run_fixture::{changing, on_loaded, tick};

const CLAIMED: &str = "update eec_effect_intent set tries = 1, claim_token = intent_id, \
    due_at = (select max(r.due_at) from eec_run r) where seq = 1";
const OVER: &str = "update eec_effect_intent set tries = 1, claim_token = intent_id, \
    due_at = created_at where seq = 1";
const ATTEMPT: &str = "insert into eec_run_attempt \
    (tenant_scope, run_id, intent_id, stamp, try, worker) \
    select tenant_scope, run_id, intent_id, intent_id, 1, 'w' from eec_effect_intent where seq = 1";
const DELIVERED: &str = "update eec_effect_intent set status = 'completed', changed = true, \
    due_at = null, claim_token = null, ended_at = created_at where seq = 1";
const DEAD: &str = "update eec_effect_intent set status = 'dead', changed = true, due_at = null, \
    faults = 5, deaths = 1, tries = 7, ended_at = created_at where seq = 1";

/// How an intent stands, as far as orders go, by conditions that mean the same on every store.
async fn is(on: &Fixture, key: &RunKey, seq: i64, condition: &'static str) -> bool {
    on.raw
        .execute("update eec_effect_intent set outcome = null")
        .await;
    on.raw.execute(condition).await;
    let line = on
        .load(key)
        .await
        .intents
        .into_iter()
        .find(|i| i.seq == seq);
    line.is_some_and(|seen| seen.outcome.as_deref() == Some("so"))
}

macro_rules! so {
    ($condition:literal) => {
        concat!(
            "update eec_effect_intent set outcome = 'so' where ",
            $condition
        )
    };
}

pub async fn an_intent_gets_its_turn_once(on: &Fixture) {
    let key = on.begun("k", 2).await;
    on.tick(&key, changing(2, None, Order::Arm)).await;
    assert!(
        is(
            on,
            &key,
            2,
            so!("first_due_at is not null and due_at = first_due_at")
        )
        .await
    );
    // Its next try stands later: another turn must not bring it forward.
    on.raw
        .execute("update eec_effect_intent set due_at = null where seq = 2")
        .await;
    on.tick(&key, changing(2, None, Order::Arm)).await;
    assert!(
        is(
            on,
            &key,
            2,
            so!("due_at is null and first_due_at is not null")
        )
        .await
    );
    assert_eq!(on.load(&key).await.intents[1].status, IntentStatus::Pending);
}

pub async fn a_withdrawn_intent_that_nobody_has_is_discarded(on: &Fixture) {
    let key = on.begun("k", 2).await;
    let mut both = changing(1, None, Order::Withdraw);
    both.changes
        .extend(changing(2, None, Order::Withdraw).changes);
    on.tick(&key, both).await;
    let intents = on.load(&key).await.intents;
    assert_eq!(intents.len(), 2);
    for seen in intents {
        assert_eq!((seen.status, seen.changed), (IntentStatus::Discarded, true));
    }
    let done = so!("due_at is null and claim_token is null and ended_at is not null");
    assert!(is(on, &key, 1, done).await && is(on, &key, 2, done).await);
    assert_eq!(on.due(9).await, [key]);
}

pub async fn a_withdrawn_intent_is_left_to_whom_has_it(on: &Fixture) {
    let key = on.begun("k", 1).await;
    let mut waiting = tick(RunStatus::Running);
    waiting.timer = oncegate::domain::run::Timer::In(super::fixture::LONG);
    on.tick(&key, waiting).await;
    on.raw.execute(CLAIMED).await;
    on.raw.execute(ATTEMPT).await;
    on.tick(&key, changing(1, None, Order::Withdraw)).await;
    let seen = on.load(&key).await.intents.remove(0);
    assert_eq!((seen.status, seen.changed), (IntentStatus::Pending, false));
    assert!(is(on, &key, 1, so!("withdrawn and claim_token is not null")).await);
    assert_eq!(on.store.attempts(&key, 9).await.unwrap()[0].status, "open");
    // Delivered all the same: withdrawing what is done changes nothing.
    on.raw.execute(DELIVERED).await;
    on.tick(&key, changing(1, None, Order::Withdraw)).await;
    let seen = on.load(&key).await.intents.remove(0);
    assert_eq!((seen.status, seen.changed), (IntentStatus::Completed, true));
}

pub async fn an_intent_that_is_withdrawn_after_its_claim_is_discarded(on: &Fixture) {
    let key = on.begun("k", 1).await;
    on.raw.execute(OVER).await;
    on.raw.execute(ATTEMPT).await;
    on.tick(&key, changing(1, None, Order::Withdraw)).await;
    let seen = on.load(&key).await.intents.remove(0);
    assert_eq!((seen.status, seen.changed), (IntentStatus::Discarded, true));
    let attempt = on.store.attempts(&key, 9).await.unwrap().remove(0);
    assert_eq!(attempt.status, "lost");
    assert!(attempt.ended_at.is_some());
}

pub async fn a_dead_intent_is_redriven_with_new_budgets(on: &Fixture) {
    let key = on.begun("k", 1).await;
    on.raw.execute(DEAD).await;
    // Seen and redriven at once, and told in two pieces.
    let mut redrive = changing(1, Some(IntentStatus::Dead), Order::None);
    redrive
        .changes
        .extend(changing(1, None, Order::Redrive).changes);
    on.tick(&key, redrive).await;
    let seen = on.load(&key).await.intents.remove(0);
    assert_eq!((seen.status, seen.changed), (IntentStatus::Pending, false));
    assert_eq!((seen.tries, seen.has_body), (7, true));
    let anew = so!(
        "faults = 0 and deaths = 0 and redrives = 1 and ended_at is null \
        and tries_before = 7 and due_at = first_due_at and due_at > created_at"
    );
    assert!(is(on, &key, 1, anew).await);
    // What is pending is not redriven.
    on.tick(&key, changing(1, None, Order::Redrive)).await;
    assert!(is(on, &key, 1, so!("redrives = 1 and status = 'pending'")).await);
}

pub async fn a_dead_intent_is_withdrawn_and_keeps_its_counts(on: &Fixture) {
    let key = on.begun("k", 1).await;
    on.raw.execute(DEAD).await;
    let withdraw = changing(1, Some(IntentStatus::Dead), Order::Withdraw);
    on.tick(&key, withdraw).await;
    let seen = on.load(&key).await.intents.remove(0);
    assert_eq!((seen.status, seen.changed), (IntentStatus::Discarded, true));
    assert!(is(on, &key, 1, so!("tries = 7 and faults = 5")).await);
}

pub async fn a_redrive_without_bytes_is_told_to_the_run_again(on: &Fixture) {
    let key = on.begun("k", 1).await;
    on.raw.execute(DEAD).await;
    let loaded = on.load(&key).await;
    // Retention comes between the look and the tick.
    let keep = oncegate::config::Keep {
        runs: super::fixture::LONG,
        dead: std::time::Duration::ZERO,
    };
    assert_eq!(on.store.purge_runs(keep, 9).await.unwrap().bodies, 1);
    let redrive = changing(1, Some(IntentStatus::Dead), Order::Redrive);
    on.commit(&on_loaded(&loaded, redrive)).await;
    let seen = on.load(&key).await.intents.remove(0);
    assert_eq!((seen.status, seen.changed), (IntentStatus::Dead, true));
    assert!(!seen.has_body);
}

pub async fn a_change_is_told_until_it_was_seen(on: &Fixture) {
    let key = on.begun("k", 2).await;
    on.raw.execute(DEAD).await;
    let loaded = on.load(&key).await;
    assert!(loaded.intents[0].changed);
    assert_eq!(on.due(9).await, *std::slice::from_ref(&key));
    // It changes once more between the look and the commit.
    on.raw.execute(DELIVERED).await;
    let seen = |status| changing(1, Some(status), Order::None);
    on.commit(&on_loaded(&loaded, seen(IntentStatus::Dead)))
        .await;
    let again = on.load(&key).await;
    assert!(again.intents[0].changed);
    assert_eq!(again.intents[0].status, IntentStatus::Completed);
    assert_eq!(on.due(9).await, *std::slice::from_ref(&key));
    on.commit(&on_loaded(&again, seen(IntentStatus::Completed)))
        .await;
    assert!(on.due(9).await.is_empty());
    // Known and done, it is not shown any more.
    let seqs: Vec<i64> = on.load(&key).await.intents.iter().map(|i| i.seq).collect();
    assert_eq!(seqs, [2]);
}

pub async fn a_tick_takes_one_in_and_gives_the_next_its_turn(on: &Fixture) {
    let key = on.begun("k", 1000).await;
    on.raw.execute(DELIVERED).await;
    let mut next = changing(1, Some(IntentStatus::Completed), Order::None);
    next.changes.push(IntentChange {
        seq: 2,
        seen: None,
        order: Order::Arm,
    });
    on.tick(&key, next).await;
    let loaded = on.load(&key).await;
    assert_eq!(loaded.intents.len(), 999);
    assert!(is(on, &key, 2, so!("due_at is not null")).await);
    assert!(!is(on, &key, 3, so!("due_at is not null")).await);
    // All of them at once.
    let mut last = tick(RunStatus::Cancelled);
    let withdraw = |seq| IntentChange {
        seq,
        seen: None,
        order: Order::Withdraw,
    };
    last.changes = (1..=1000).map(withdraw).collect();
    on.tick(&key, last).await;
    let intents = on.load(&key).await.intents;
    assert_eq!(intents.len(), 999);
    let discarded = |seen: &oncegate::domain::intent::IntentSeen| {
        seen.changed && seen.status == IntentStatus::Discarded
    };
    assert!(intents.iter().all(discarded));
}
