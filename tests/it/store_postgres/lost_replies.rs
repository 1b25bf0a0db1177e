//! The database did it, and its reply got lost: the store finds out by itself.

use oncegate::domain::record::{GiveUp, Reserved, State};
use oncegate::store::Store as _;

use super::{Gateway, count};
use crate::store_conformance::fixture::{LONG, claim, completion, heartbeat, key, release, terms};
use crate::support::chaos_proxy::{ChaosProxy, Mode};
use crate::support::postgres::{self, Database};

/// A gateway behind a proxy, with every statement prepared.
async fn behind_proxy() -> (Database, ChaosProxy, Gateway) {
    let database = postgres::database().await;
    let proxy = ChaosProxy::start(database.address()).await;
    let mut config = postgres::config(&database.url_through(proxy.address()));
    config.connections_max = 1;
    config.notify = false;
    let gateway = Gateway::open(&config).await;
    let store = &gateway.store;
    let claim = claim("warm");
    for _ in 0..2 {
        store.reserve(std::slice::from_ref(&claim)).await.unwrap();
    }
    store.heartbeat(&[heartbeat(&claim, LONG)]).await.unwrap();
    for _ in 0..2 {
        store
            .release(&[release(&claim, GiveUp::NotSent)])
            .await
            .unwrap();
    }
    let next = crate::store_conformance::fixture::claim("warm");
    for _ in 0..2 {
        store.reclaim(&next, claim.token).await.unwrap();
    }
    let wanted = completion(&next);
    for _ in 0..2 {
        store.complete(std::slice::from_ref(&wanted)).await.unwrap();
    }
    (database, proxy, gateway)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_whose_reply_was_lost_is_won() {
    let (_database, proxy, gateway) = behind_proxy().await;
    let claim = claim("k");
    proxy.set(Mode::Swallow(b""));
    let reserved = gateway
        .store
        .reserve(std::slice::from_ref(&claim))
        .await
        .unwrap();
    assert_eq!(proxy.swallowed(), 1);
    let Reserved::Won(claimed) = &reserved[0] else {
        panic!("its own row was taken for another's: {reserved:?}");
    };
    assert_eq!(claimed.generation_id, claim.generation_id);
    gateway.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reclaim_whose_reply_was_lost_is_won() {
    let (_database, proxy, gateway) = behind_proxy().await;
    let first = claim("k");
    gateway
        .store
        .reserve(std::slice::from_ref(&first))
        .await
        .unwrap();
    gateway
        .store
        .release(&[release(&first, GiveUp::NotSent)])
        .await
        .unwrap();
    let second = claim("k");
    proxy.set(Mode::Swallow(b""));
    let claimed = gateway
        .store
        .reclaim(&second, first.token)
        .await
        .unwrap()
        .unwrap();
    assert_eq!(proxy.swallowed(), 1);
    assert_eq!(claimed.generation_id, first.generation_id);
    gateway.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_completion_whose_reply_was_lost_is_committed_once() {
    let (database, proxy, gateway) = behind_proxy().await;
    let claim = claim("k");
    gateway
        .store
        .reserve(std::slice::from_ref(&claim))
        .await
        .unwrap();
    let wanted = completion(&claim);
    proxy.set(Mode::Swallow(b""));
    let committed = gateway
        .store
        .complete(std::slice::from_ref(&wanted))
        .await
        .unwrap();
    assert_eq!(proxy.swallowed(), 1);
    let committed = committed[0].unwrap();
    let stored = gateway
        .store
        .decision(&claim.key.tenant, wanted.decision_id)
        .await;
    assert_eq!(stored.unwrap().unwrap().committed, committed);
    let mut conn = database.connect().await;
    let decisions = "select count(*) from eec_routing_decision where idempotency_key = 'k'";
    assert_eq!(count(&mut conn, decisions).await, 1);
    gateway.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_and_a_heartbeat_whose_replies_were_lost_are_taken() {
    let (_database, proxy, gateway) = behind_proxy().await;
    let mut claim = claim("k");
    claim.terms = terms();
    gateway
        .store
        .reserve(std::slice::from_ref(&claim))
        .await
        .unwrap();
    proxy.set(Mode::Swallow(b""));
    assert_eq!(
        gateway
            .store
            .heartbeat(&[heartbeat(&claim, LONG)])
            .await
            .unwrap(),
        [true]
    );
    proxy.set(Mode::Swallow(b""));
    let released = gateway
        .store
        .release(&[release(&claim, GiveUp::Redrive)])
        .await
        .unwrap();
    assert!(released[0].is_some());
    assert_eq!(proxy.swallowed(), 2);
    let found = gateway.store.look_up(&[key("k")]).await.unwrap();
    let state = found[0].as_ref().unwrap().state;
    assert_eq!(state, State::FailedBeforeCommit { maybe_sent: true });
    gateway.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operators_act_whose_reply_was_lost_is_said_to_be_in_doubt() {
    let (database, proxy, gateway) = behind_proxy().await;
    let audit = oncegate::store::Audit {
        operator: "jo".into(),
        reason: "test".into(),
    };
    let absent = key("absent");
    gateway.store.purge_one(&absent, &audit).await.unwrap();
    proxy.set(Mode::Swallow(b""));
    let purged = gateway.store.purge_one(&key("warm"), &audit).await;
    assert!(purged.unwrap_err().may_have_happened());
    let mut conn = database.connect().await;
    assert_eq!(
        count(&mut conn, "select count(*) from eec_operator_audit").await,
        1
    );
    assert_eq!(
        count(&mut conn, "select count(*) from eec_routing_decision").await,
        0
    );
    gateway.close().await;
}
