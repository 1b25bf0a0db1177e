//! Tasks, as step workers pull them and tell their results.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use oncegate::domain::intent::{Finished, How, IntentStatus};
use oncegate::domain::scope::TenantScope;
use oncegate::outbox::tasks::{TaskResult, Tasks};
use serde_json::json;

use super::double::Failing;
use super::fixture::{Put, RETRY_SOON, Rig, put};
use crate::support::rows::Kind;

const LEASE: Duration = Duration::from_hours(1);

fn task(queue: &str, key: &str) -> Put {
    let mut task = put(&format!("task:{queue}"), key).retry(RETRY_SOON);
    task.sending.how = How::Task {
        step: "pack".to_owned(),
        content_type: None,
    };
    task
}

fn tasks(rig: &Rig) -> Tasks {
    Tasks::new(rig.store.clone(), rig.group.clone(), rig.bells.clone())
}

#[tokio::test]
async fn a_tenants_own_workers_see_a_task_behind_thousands_of_its_lanes() {
    let rig = Rig::store(Kind::Sqlite).await;
    let lanes: Vec<_> = (0..5_500)
        .map(|n| put(&format!("d-{n:05}"), "key"))
        .collect();
    for some in lanes.chunks(500) {
        rig.put(some).await;
    }
    let last = rig.put_one(task("pack", "last")).await;
    let tasks = tasks(&rig);
    let acme = TenantScope::named(b"acme").unwrap();
    let claim = async || tasks.claim(Some(&acme), "pack", 9, LEASE, "w").await;
    let mut found = Vec::new();
    for _ in 0..3 {
        found.extend(claim().await.unwrap());
    }
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].key, last);
    // Behind the end comes the beginning again.
    let next = rig.put_one(task("pack", "next").of("acme 1-user")).await;
    let mut found = Vec::new();
    for _ in 0..3 {
        found.extend(claim().await.unwrap());
    }
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].key, next);
    rig.stop().await;
}

#[tokio::test]
async fn principals_take_turns_at_their_tenants_own_workers() {
    let rig = Rig::store(Kind::Sqlite).await;
    let mut puts: Vec<_> = (0..9).map(|n| task("pack", &format!("a-{n}"))).collect();
    puts.push(task("pack", "p").of("acme 1-user"));
    rig.put(&puts).await;
    let tasks = tasks(&rig);
    let acme = TenantScope::named(b"acme").unwrap();
    let mut firsts = Vec::new();
    for _ in 0..2 {
        let claimed = tasks.claim(Some(&acme), "pack", 1, LEASE, "w").await;
        firsts.extend(claimed.unwrap().into_iter().map(|one| one.idempotency_key));
    }
    assert!(firsts.contains(&"p".to_owned()), "{firsts:?}");
    rig.stop().await;
}

#[tokio::test]
async fn tasks_that_were_won_reach_their_worker_though_a_later_look_fails() {
    let rig = Rig::store(Kind::Sqlite).await;
    rig.put_one(task("pack", "key-1")).await;
    let store = Arc::new(Failing {
        fails_at_look: Some(1),
        ..Failing::of(rig.store.clone())
    });
    let tasks = Tasks::new(store.clone(), rig.group.clone(), rig.bells.clone());
    let claimed = tasks.claim(None, "pack", 9, LEASE, "w").await.unwrap();
    assert_eq!(claimed.len(), 1);
    assert_eq!(store.looks.load(Ordering::SeqCst), 2, "it looked once more");
    drop((tasks, store));
    rig.stop().await;
}

async fn told(kind: Kind) {
    let rig = Rig::store(kind).await;
    let tasks = tasks(&rig);
    let key = rig.put_one(task("pack", "key-1")).await;
    let claimed = tasks.claim(None, "other", 9, LEASE, "w").await.unwrap();
    assert!(claimed.is_empty());
    let claimed = tasks.claim(None, "pack", 9, LEASE, "w").await.unwrap();
    assert_eq!(claimed.len(), 1);
    let claim = &claimed[0];
    assert_eq!(
        (&claim.key, &*claim.body),
        (&key, &b"{\"for\":\"key-1\"}"[..])
    );
    assert!(
        tasks
            .claim(None, "pack", 9, LEASE, "w2")
            .await
            .unwrap()
            .is_empty()
    );
    assert!(tasks.heartbeat(&key, claim.stamp, LEASE).await.unwrap());
    let foreign = oncegate::ids::stamp();
    assert!(!tasks.heartbeat(&key, foreign, LEASE).await.unwrap());
    let done = || TaskResult::Done(json!({"weight": 3}));
    let finish = |stamp| tasks.finish(&key, stamp, done());
    assert_eq!(finish(foreign).await.unwrap(), Finished::Stale);
    assert_eq!(finish(claim.stamp).await.unwrap(), Finished::Taken);
    let line = rig.line(&key).await;
    assert_eq!(
        (line.status, line.answer_status),
        (IntentStatus::Completed, Some(200))
    );
    for _ in 0..20 {
        assert_eq!(
            finish(claim.stamp).await.unwrap(),
            Finished::Taken,
            "told again"
        );
    }
    assert_eq!(finish(foreign).await.unwrap(), Finished::Stale);
    assert_eq!(rig.attempts().await, [("delivered", 1)].into());
    rig.stop().await;
}

#[tokio::test]
async fn a_result_is_taken_from_its_claim_alone_and_as_often_as_it_is_told_sqlite() {
    told(Kind::Sqlite).await;
}

#[tokio::test]
async fn a_result_is_taken_from_its_claim_alone_and_as_often_as_it_is_told_postgres() {
    told(Kind::Postgres).await;
}

#[tokio::test]
async fn a_task_that_failed_is_tried_again_or_given_up_as_its_worker_says() {
    let rig = Rig::store(Kind::Sqlite).await;
    let tasks = tasks(&rig);
    let key = rig.put_one(task("pack", "key-1")).await;
    let failed = |retryable| TaskResult::Failed {
        retryable,
        error: "no \0 box".to_owned(),
    };
    let stamp = tasks.claim(None, "pack", 1, LEASE, "w").await.unwrap()[0].stamp;
    let finished = tasks.finish(&key, stamp, failed(true)).await.unwrap();
    assert_eq!(finished, Finished::Taken);
    let line = rig.line(&key).await;
    assert_eq!(
        (line.status, line.tries, line.faults),
        (IntentStatus::Pending, 1, 0)
    );
    assert_eq!(line.diagnostic.as_deref(), Some("no   box"));
    let again = crate::support::clock::eventually("it is due again", async || {
        let claimed = tasks.claim(None, "pack", 1, LEASE, "w").await.unwrap();
        claimed.into_iter().next()
    })
    .await;
    assert_eq!((again.tries, again.idempotency_key.as_str()), (2, "key-1"));
    let late = tasks
        .finish(&key, stamp, TaskResult::Done(json!(1)))
        .await
        .unwrap();
    assert_eq!(
        late,
        Finished::Stale,
        "the first claim's word comes too late"
    );
    let finished = tasks
        .finish(&key, again.stamp, failed(false))
        .await
        .unwrap();
    assert_eq!(finished, Finished::Taken);
    assert_eq!(rig.line(&key).await.status, IntentStatus::Dead);
    rig.stop().await;
}

#[tokio::test]
async fn tenants_take_turns_and_a_tenants_workers_see_its_tasks_alone() {
    let rig = Rig::store(Kind::Sqlite).await;
    let tasks = tasks(&rig);
    let mut puts: Vec<_> = (0..30).map(|n| task("pack", &format!("a-{n}"))).collect();
    puts.push(task("pack", "p").of("acme 1-user"));
    puts.push(task("pack", "q").of("acme.other"));
    puts.push(task("pack", "b").of("beta"));
    puts.push(task("other", "x"));
    rig.put(&puts).await;
    let claim = async |tenant: Option<&TenantScope>, limit| -> Vec<String> {
        let claimed = tasks
            .claim(tenant, "pack", limit, LEASE, "w")
            .await
            .unwrap();
        claimed
            .into_iter()
            .map(|claim| claim.idempotency_key)
            .collect()
    };
    let mut firsts = Vec::new();
    for _ in 0..3 {
        firsts.extend(claim(None, 1).await);
    }
    assert_eq!(firsts.len(), 3);
    assert!(
        firsts.contains(&"b".to_owned()) && firsts.contains(&"q".to_owned()),
        "{firsts:?}"
    );
    let acme = TenantScope::named(b"acme").unwrap();
    let of_acme = claim(Some(&acme), 100).await;
    assert_eq!(of_acme.len(), 30);
    assert!(firsts.contains(&"p".to_owned()) || of_acme.contains(&"p".to_owned()));
    let beta = TenantScope::named(b"beta").unwrap();
    assert!(claim(Some(&beta), 9).await.is_empty());
    rig.stop().await;
}
