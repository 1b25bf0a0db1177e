//! Several gateways on one database.

use std::collections::HashMap;

use futures_util::future::join_all;
use oncegate::domain::record::{Claim, Heartbeat, Reserved};
use oncegate::store::Store as _;
use oncegate::store::postgres::PostgresStore;

use super::{Gateway, Random, count};
use crate::store_conformance::fixture::{LONG, claim, completion, heartbeat};
use crate::support::postgres;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_gateways_one_wins_each_key_and_batches_never_deadlock() {
    const KEYS: u64 = 200;
    const BATCHES: u64 = 20;
    let database = postgres::database().await;
    let config = postgres::config(&database.url);
    let gateways = [Gateway::open(&config).await, Gateway::open(&config).await];
    let mut random = Random(7);
    let mut batches: Vec<Vec<Claim>> = Vec::new();
    for _ in 0..BATCHES {
        let pick = |_| claim(&format!("k{}", random.below(KEYS)));
        batches.push((0..50).map(pick).collect());
    }
    let work = batches.iter().enumerate().map(|(number, batch)| {
        let store = &gateways[number % 2].store;
        async move {
            let reserved = store.reserve(batch).await.unwrap();
            let won = batch
                .iter()
                .zip(reserved)
                .filter(|(_, one)| matches!(one, Reserved::Won(_)));
            let won: Vec<&Claim> = won.map(|(claim, _)| claim).collect();
            let mut beats: Vec<Heartbeat> = won.iter().map(|c| heartbeat(c, LONG)).collect();
            let completions: Vec<_> = won.iter().map(|claim| completion(claim)).collect();
            // The same rows from two sides at once, in opposite orders.
            beats.reverse();
            let (_, committed) =
                tokio::join!(store.heartbeat(&beats), store.complete(&completions));
            assert!(committed.unwrap().iter().all(Option::is_some));
            won.iter()
                .map(|claim| claim.key.clone())
                .collect::<Vec<_>>()
        }
    });
    let mut winners = HashMap::new();
    for key in join_all(work).await.concat() {
        *winners.entry(key).or_insert(0) += 1;
    }
    assert!(winners.values().all(|times| *times == 1));
    let mut conn = database.connect().await;
    let decisions = count(&mut conn, "select count(*) from eec_routing_decision").await;
    assert_eq!(decisions, i64::try_from(winners.len()).unwrap());
    let deadlocks = "select deadlocks from pg_stat_database where datname = current_database()";
    assert_eq!(count(&mut conn, deadlocks).await, 0);
    for gateway in gateways {
        gateway.close().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gateways_that_start_at_once_on_an_empty_database_agree() {
    let database = postgres::shared().await.empty_database().await;
    let config = postgres::config(&database.url);
    let gateways = join_all((0..4).map(|_| Gateway::open(&config))).await;
    let secrets = gateways
        .iter()
        .zip(1..)
        .map(|(gateway, seed)| gateway.store.secrets([seed; 32]));
    let secrets = join_all(secrets).await;
    let first = secrets[0].as_ref().unwrap()[0].bytes;
    for secrets in &secrets {
        let secrets = secrets.as_ref().unwrap();
        assert_eq!((secrets.len(), secrets[0].bytes), (1, first));
    }
    for gateway in gateways {
        gateway.close().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_retired_first_secret_is_not_made_again() {
    let database = postgres::database().await;
    let gateway = Gateway::open(&postgres::config(&database.url)).await;
    let mut conn = database.connect().await;
    let newer =
        "insert into eec_secret (version, secret) values (2, decode(repeat('02', 32), 'hex'))";
    sqlx::raw_sql(newer).execute(&mut conn).await.unwrap();
    let secrets = gateway.store.secrets([1; 32]).await.unwrap();
    assert_eq!(secrets.len(), 1);
    assert_eq!((secrets[0].version, secrets[0].bytes), (2, [2; 32]));
    gateway.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_of_a_newer_program_is_not_opened() {
    let database = postgres::database().await;
    let mut conn = database.connect().await;
    let newer = "insert into eec_migration (version, description, success, checksum, execution_time) \
         values (9999, 'later', true, '', 0)";
    sqlx::raw_sql(newer).execute(&mut conn).await.unwrap();
    let tracker = tokio_util::task::TaskTracker::new();
    let opened = PostgresStore::open(&postgres::config(&database.url), &tracker).await;
    let error = opened.err().unwrap().to_string();
    assert!(error.contains("9999"), "{error}");
}
