//! Hints from one gateway to another.

use std::collections::HashSet;
use std::time::Duration;

use oncegate::store::{Store as _, Wakeup, wake_hash};
use tokio::sync::broadcast::Receiver;
use tokio::time::timeout;

use super::{Gateway, PATIENCE, count};
use crate::store_conformance::fixture::{claim, completion, key};
use crate::support::postgres;

/// A receiver whose gateway listens.
async fn listening(gateway: &Gateway) -> Receiver<Wakeup> {
    let mut hints = gateway.store.wakeups();
    // Its own start says "everything", unless that was before we subscribed.
    let _ = timeout(Duration::from_secs(1), hints.recv()).await;
    hints
}

/// Every hash that is told until all of `wanted` were.
async fn told(hints: &mut Receiver<Wakeup>, wanted: usize) -> HashSet<u64> {
    let mut told = HashSet::new();
    let listen = async {
        while told.len() < wanted {
            if let Wakeup::Records(hashes) = hints.recv().await.unwrap() {
                told.extend(hashes.iter().copied());
            }
        }
    };
    timeout(PATIENCE, listen).await.unwrap();
    told
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hint_reaches_every_other_gateway_and_not_its_sender() {
    let database = postgres::database().await;
    let config = postgres::config(&database.url);
    let [here, there] = [Gateway::open(&config).await, Gateway::open(&config).await];
    let mut near = listening(&here).await;
    let mut far = listening(&there).await;

    let claim = claim("k");
    here.store
        .reserve(std::slice::from_ref(&claim))
        .await
        .unwrap();
    there.store.mark_awaited(&claim.key).await.unwrap();
    let committed = here.store.complete(&[completion(&claim)]).await.unwrap();
    assert!(committed[0].unwrap().awaited);
    let hash = wake_hash(&claim.key);
    here.store.notify(&[hash]).await.unwrap();
    assert_eq!(told(&mut far, 1).await, HashSet::from([hash]));

    // More than one payload can hold; and the other way round.
    let many: HashSet<u64> = (0..1_200)
        .map(|n| wake_hash(&key(&format!("k{n}"))))
        .collect();
    there
        .store
        .notify(&many.iter().copied().collect::<Vec<_>>())
        .await
        .unwrap();
    assert_eq!(told(&mut near, many.len()).await, many);
    assert!(far.try_recv().is_err(), "it was told what it said itself");
    here.close().await;
    there.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_a_pending_record_is_awaited() {
    let database = postgres::database().await;
    let gateway = Gateway::open(&postgres::config(&database.url)).await;
    let store = &gateway.store;
    store.mark_awaited(&key("absent")).await.unwrap();
    let claim = claim("k");
    store.reserve(std::slice::from_ref(&claim)).await.unwrap();
    let wanted = [completion(&claim)];
    assert!(!store.complete(&wanted).await.unwrap()[0].unwrap().awaited);
    store.mark_awaited(&claim.key).await.unwrap();
    assert!(!store.complete(&wanted).await.unwrap()[0].unwrap().awaited);
    gateway.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_listener_comes_back_and_says_so() {
    let database = postgres::database().await;
    let config = postgres::config(&database.url);
    let [here, there] = [Gateway::open(&config).await, Gateway::open(&config).await];
    let mut hints = listening(&there).await;
    let mut conn = database.connect().await;
    let listeners = "select count(pg_terminate_backend(pid)) from pg_stat_activity \
                     where datname = current_database() and query like 'LISTEN%'";
    assert!(count(&mut conn, listeners).await >= 1);
    let hint = timeout(PATIENCE, hints.recv()).await.unwrap().unwrap();
    assert!(matches!(hint, Wakeup::Everything), "{hint:?}");
    // Both listen again: once for the loss and once for the return, then hints as before.
    let hash = wake_hash(&key("k"));
    let again = async {
        loop {
            here.store.notify(&[hash]).await.unwrap();
            let next = timeout(Duration::from_millis(200), hints.recv()).await;
            if matches!(next, Ok(Ok(Wakeup::Records(_)))) {
                return;
            }
        }
    };
    timeout(PATIENCE, again).await.unwrap();
    here.close().await;
    there.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_hints_off_nobody_listens() {
    let database = postgres::database().await;
    let mut config = postgres::config(&database.url);
    config.notify = false;
    let gateway = Gateway::open(&config).await;
    gateway.store.notify(&[1]).await.unwrap();
    assert_eq!(gateway.tracker.len(), 0);
    gateway.close().await;
}
