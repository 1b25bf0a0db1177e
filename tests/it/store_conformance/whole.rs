//! The store as a whole: secrets, clock, closing, and callers that go away.

use std::slice;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::join_all;
use oncegate::domain::record::State;
use oncegate::domain::scope::RecordKey;
use oncegate::store::StoreError;
use tokio::time::Instant;

use super::fixture::{Fixture, claim, claim_of, completion, key};

pub async fn the_first_secret_is_made_once(on: &Fixture) {
    let made = join_all((1..=8).map(|seed| on.store.secrets([seed; 32]))).await;
    let first = made[0].as_ref().unwrap();
    assert_eq!(first.len(), 1);
    assert_eq!(first[0].version, 1);
    let bytes = first[0].bytes;
    assert!((1..=8).any(|seed| bytes == [seed; 32]));
    for secrets in made {
        assert_eq!(secrets.unwrap()[0].bytes, bytes);
    }
    assert_eq!(on.store.secrets([9; 32]).await.unwrap()[0].bytes, bytes);
}

pub async fn the_stores_clock_does_not_run_backwards(on: &Fixture) {
    let mut last = on.store.ping().await.unwrap();
    for number in 0..20 {
        let claim = claim(&format!("k{number}"));
        on.win(&claim).await;
        let reserved_at = on.record(&claim.key).await.reserved_at;
        let now = on.store.ping().await.unwrap();
        assert!(last <= reserved_at && reserved_at <= now);
        last = now;
    }
}

pub async fn a_batch_of_nothing_is_answered_with_nothing(on: &Fixture) {
    assert!(on.store.reserve(&[]).await.unwrap().is_empty());
    assert!(on.store.heartbeat(&[]).await.unwrap().is_empty());
    assert!(on.store.complete(&[]).await.unwrap().is_empty());
    assert!(on.store.release(&[]).await.unwrap().is_empty());
    assert!(on.store.look_up(&[]).await.unwrap().is_empty());
}

pub async fn a_closed_store_says_so(on: &Fixture) {
    let claim = claim("k");
    on.win(&claim).await;
    on.store.close().await;
    let closed = |error: StoreError| assert!(matches!(error, StoreError::Closed), "{error:?}");
    closed(on.store.reserve(slice::from_ref(&claim)).await.unwrap_err());
    closed(on.store.look_up(&[key("k")]).await.unwrap_err());
    closed(on.store.complete(&[completion(&claim)]).await.unwrap_err());
    closed(on.store.ping().await.unwrap_err());
    on.store.close().await;
}

pub async fn a_caller_that_goes_away_leaves_nothing_half_done(on: &Fixture) {
    let names: Vec<RecordKey> = (0..20).map(|number| key(&format!("k{number}"))).collect();
    for key in &names {
        let claim = claim_of(key.clone());
        on.win(&claim).await;
        // Polled once, then dropped: begun or not, but hardly done yet.
        let completions = [completion(&claim)];
        drop(on.store.complete(&completions).now_or_never());
        let claims = [claim];
        drop(on.store.reserve(&claims).now_or_never());
    }
    // What comes later runs on connections that are in no forgotten transaction.
    let last = claim("last");
    on.win(&last).await;
    assert!(on.complete(&completion(&last)).await.is_some());
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let found = on.store.look_up(&names).await.unwrap();
        let states = found.into_iter().map(|record| record.unwrap().state);
        let completed = states
            .filter(|state| matches!(state, State::Completed(..)))
            .count();
        if on.raw.rows("eec_routing_decision").await.len() == completed + 1 {
            return;
        }
        assert!(Instant::now() < deadline, "records and decisions differ");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
