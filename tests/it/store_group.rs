//! Group commit, over a store that stops and goes on when a test says so.

mod stoppable;

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{join_all, try_join_all};
use oncegate::domain::fingerprint::{FingerprintRules, RequestDigest, RequestParts};
use oncegate::domain::policy::{Duplicates, ForwardKey, KeySource, OnStoreDown, OnUnknown, Policy};
use oncegate::domain::record::{Claim, GiveUp, Lease, Reserved, State};
use oncegate::domain::secret::Secrets;
use oncegate::lifecycle::Bells;
use oncegate::routing::gate::{Admission, Ask, Gate, Settings};
use oncegate::routing::settle::Outcome;
use oncegate::store::group::{BATCH_BYTES_MAX, BATCH_MAX, Group, GroupOptions, QUEUE_MAX};
use oncegate::store::sqlite::SqliteStore;
use oncegate::store::{Store, StoreError};
use tokio::sync::{Mutex, Semaphore, mpsc};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::stoppable::Stoppable;
use crate::store_conformance::fixture::{answer, claim, completion, heartbeat, key, release};

/// Far more than anything here takes.
const PATIENCE: Duration = Duration::from_secs(20);
/// So short that a stuck store is given up during a test.
const IMPATIENCE: Duration = Duration::from_millis(100);

#[tokio::test]
async fn every_operation_reaches_the_store_and_comes_back() {
    let on = Stand::open(1, PATIENCE).await;
    let claim = claim("k");
    let Reserved::Won(_) = on.group.reserve.ask(claim.clone()).await.unwrap() else {
        panic!("not won");
    };
    assert!(
        on.group
            .heartbeat
            .ask(heartbeat(&claim, PATIENCE))
            .await
            .unwrap()
    );
    let record = on
        .group
        .look_up
        .ask(claim.key.clone())
        .await
        .unwrap()
        .unwrap();
    assert!(matches!(record.state, State::Pending(Lease::Held(_))));
    let released = on.group.release.ask(release(&claim, GiveUp::Hold)).await;
    assert!(released.unwrap().is_some());
    let committed = on.group.complete.ask(completion(&claim)).await.unwrap();
    assert!(committed.is_some());
    assert!(on.group.look_up.ask(key("absent")).await.unwrap().is_none());
    on.close().await;
}

#[tokio::test]
async fn an_idle_gateway_commits_at_once_and_a_busy_one_in_batches() {
    let on = Stand::open(1, PATIENCE).await;
    on.store.stop();
    let first = asked_once(on.group.reserve.ask(claim("first")));
    // Alone in its batch, since nothing waits for company.
    assert_eq!(on.batch().await, 1);
    let rest: Vec<Claim> = (0..100)
        .map(|number| claim(&format!("k{number}")))
        .collect();
    let rest = asked_once(try_join_all(
        rest.into_iter().map(|claim| on.group.reserve.ask(claim)),
    ));
    on.store.go_on();
    assert!(matches!(first.await.unwrap(), Reserved::Won(_)));
    let won = rest.await.unwrap();
    assert!(won.iter().all(|one| matches!(one, Reserved::Won(_))));
    assert_eq!(on.batch().await, 100);
    on.close().await;
}

#[tokio::test]
async fn each_caller_gets_the_answer_to_its_own_question() {
    let on = Stand::open(1, PATIENCE).await;
    let claims: Vec<Claim> = (0..64)
        .map(|number| claim(&format!("k{}", number % 8)))
        .collect();
    let reserved = join_all(
        claims
            .iter()
            .map(|claim| on.group.reserve.ask(claim.clone())),
    )
    .await;
    let mut won = 0;
    for (claim, reserved) in claims.iter().zip(reserved) {
        match reserved.unwrap() {
            Reserved::Won(claimed) => {
                won += 1;
                assert_eq!(claimed.generation_id, claim.generation_id);
            }
            Reserved::Lost(record) => assert_eq!(record.key, claim.key),
            Reserved::Vanished => panic!("nobody deletes here"),
        }
    }
    assert_eq!(won, 8);
    on.close().await;
}

#[tokio::test]
async fn a_caller_that_goes_away_cancels_nothing() {
    let on = Stand::open(1, PATIENCE).await;
    let [begun, waiting] = ["begun", "waiting"].map(claim);
    on.store.stop();
    drop(asked_once(on.group.reserve.ask(begun.clone())));
    assert_eq!(on.batch().await, 1);
    drop(asked_once(on.group.reserve.ask(waiting.clone())));
    on.store.go_on();
    assert_eq!(on.batch().await, 1);
    on.group.close().await;
    for claim in [begun, waiting] {
        let found = on.store.inner.look_up(&[claim.key]).await.unwrap();
        assert_eq!(found[0].as_ref().unwrap().token, claim.token);
    }
    on.close().await;
}

#[tokio::test]
async fn a_stuck_store_is_told_from_one_that_was_never_asked() {
    let on = Stand::open(1, IMPATIENCE).await;
    on.store.stop();
    let begun = claim("begun");
    let waiting: Vec<Claim> = (0..3)
        .map(|number| claim(&format!("waiting{number}")))
        .collect();
    let asked = asked_once(on.group.reserve.ask(begun.clone()));
    assert_eq!(on.batch().await, 1);
    let refused = join_all(
        waiting
            .iter()
            .map(|claim| on.group.reserve.ask(claim.clone())),
    )
    .await;
    for refused in refused {
        let error = refused.unwrap_err();
        assert!(matches!(*error, StoreError::Unavailable(_)), "{error:?}");
        assert!(!error.may_have_happened());
    }
    let error = asked.await.unwrap_err();
    assert!(matches!(*error, StoreError::Ambiguous(_)), "{error:?}");

    // What began ends; what was refused is never done, although the store goes on.
    on.store.go_on();
    on.group.close().await;
    let found = on.store.inner.look_up(&[begun.key]).await.unwrap();
    assert!(found[0].is_some());
    for claim in waiting {
        assert!(on.store.inner.look_up(&[claim.key]).await.unwrap()[0].is_none());
    }
    assert!(on.another_batch().is_none(), "a batch of nothing was sent");
    on.close().await;
}

#[tokio::test]
async fn a_full_queue_refuses_at_once() {
    let on = Stand::open(1, PATIENCE).await;
    on.store.stop();
    let beat = heartbeat(&claim("k"), PATIENCE);
    drop(asked_once(on.group.heartbeat.ask(beat.clone())));
    assert_eq!(on.batch().await, 1);
    for _ in 0..QUEUE_MAX {
        drop(asked_once(on.group.heartbeat.ask(beat.clone())));
    }
    let error = on
        .group
        .heartbeat
        .ask(beat)
        .now_or_never()
        .unwrap()
        .unwrap_err();
    assert!(matches!(*error, StoreError::Unavailable(_)), "{error:?}");
    on.store.go_on();
    on.close().await;
    let mut left = QUEUE_MAX;
    while let Some(batch) = on.another_batch() {
        assert!(batch <= BATCH_MAX);
        left -= batch;
    }
    assert_eq!(left, 0);
}

#[tokio::test]
async fn a_batch_is_bounded_in_bytes() {
    let on = Stand::open(1, PATIENCE).await;
    on.store.stop();
    let claims = ["first", "half", "other half", "more", "long"].map(claim);
    for claim in &claims {
        on.store
            .inner
            .reserve(std::slice::from_ref(claim))
            .await
            .unwrap();
    }
    let sizes = [
        1,
        BATCH_BYTES_MAX / 2,
        BATCH_BYTES_MAX / 2,
        1,
        BATCH_BYTES_MAX + 1,
    ];
    let asked: Vec<_> = claims
        .iter()
        .zip(sizes)
        .map(|(claim, size)| {
            let mut completion = completion(claim);
            completion.recorded = answer(&vec![b'x'; size]);
            completion
        })
        .collect();
    let mut asked = asked.into_iter();
    let first = asked_once(on.group.complete.ask(asked.next().unwrap()));
    assert_eq!(on.batch().await, 1);
    let rest = asked_once(try_join_all(
        asked.map(|completion| on.group.complete.ask(completion)),
    ));
    on.store.go_on();
    assert!(first.await.unwrap().is_some());
    assert!(rest.await.unwrap().iter().all(Option::is_some));
    assert_eq!(
        [on.batch().await, on.batch().await, on.batch().await],
        [2, 1, 1]
    );
    on.close().await;
}

#[tokio::test]
async fn a_broken_row_fails_its_own_caller_only() {
    let on = Stand::open(1, PATIENCE).await;
    on.execute(
        "insert into eec_routing_idempotency (tenant_scope, pool_id, idempotency_key, status) \
         values ('acme', 'payments', 'broken', 'completed')",
    )
    .await;
    on.store.stop();
    let first = asked_once(on.group.reserve.ask(claim("first")));
    assert_eq!(on.batch().await, 1);
    let rest = ["a", "broken", "b"].map(claim);
    let rest = asked_once(join_all(
        rest.into_iter().map(|claim| on.group.reserve.ask(claim)),
    ));
    on.store.go_on();
    assert!(first.await.is_ok());
    let [a, broken, b] = <[_; 3]>::try_from(rest.await).unwrap();
    assert!(matches!(a, Ok(Reserved::Won(_))), "{a:?}");
    assert!(matches!(b, Ok(Reserved::Won(_))), "{b:?}");
    let error = broken.unwrap_err();
    assert!(
        matches!(*error, StoreError::Inconsistent { .. }),
        "{error:?}"
    );
    on.close().await;
}

#[tokio::test]
async fn no_more_batches_run_at_once_than_the_store_bears() {
    for concurrency in [1, 3] {
        let on = Stand::open(concurrency, PATIENCE).await;
        on.store.stop();
        let beat = heartbeat(&claim("k"), PATIENCE);
        for _ in 0..concurrency {
            drop(asked_once(on.group.heartbeat.ask(beat.clone())));
            assert_eq!(on.batch().await, 1);
        }
        for _ in 0..10 {
            drop(asked_once(on.group.heartbeat.ask(beat.clone())));
            tokio::task::yield_now().await;
        }
        assert!(on.another_batch().is_none());
        assert_eq!(on.store.running.load(Ordering::SeqCst), concurrency);
        on.store.go_on();
        on.close().await;
    }
}

#[tokio::test]
async fn closing_finishes_what_is_in_line_and_takes_nothing_more() {
    let on = Stand::open(1, PATIENCE).await;
    on.store.stop();
    let asked = ["begun", "a", "b"].map(claim);
    drop(asked_once(on.group.reserve.ask(asked[0].clone())));
    assert_eq!(on.batch().await, 1);
    for claim in &asked[1..] {
        drop(asked_once(on.group.reserve.ask(claim.clone())));
    }
    let group = on.group.clone();
    let closed = asked_once(group.close());
    on.store.go_on();
    closed.await;
    let error = on.group.reserve.ask(claim("late")).await.unwrap_err();
    assert!(matches!(*error, StoreError::Closed), "{error:?}");
    let keys = asked.clone().map(|claim| claim.key);
    let found = on.store.inner.look_up(&keys).await.unwrap();
    assert!(found.iter().all(Option::is_some));
    on.close().await;
}

#[tokio::test]
async fn operations_and_errors_are_counted() {
    let recorder = metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder();
    let handle = recorder.handle();
    let _guard = metrics::set_default_local_recorder(&recorder);
    let on = Stand::open(1, IMPATIENCE).await;
    assert!(on.group.reserve.ask(claim("k")).await.is_ok());
    on.store.stop();
    assert!(on.group.look_up.ask(key("k")).await.is_err());
    on.store.go_on();
    on.close().await;
    let text = handle.render();
    for line in [
        r#"oncegate_store_seconds_count{operation="reserve"} 1"#,
        r#"oncegate_store_seconds_count{operation="look_up"} 1"#,
        r#"oncegate_store_errors_total{operation="look_up",kind="ambiguous"} 1"#,
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
}

/// Polled once, and not done by that.
fn asked_once<F: Future>(future: F) -> Pin<Box<F>> {
    let mut future = Box::pin(future);
    assert!(future.as_mut().now_or_never().is_none());
    future
}

/// One silent connection must not cost an owner its lease.
#[tokio::test]
async fn an_owner_beats_again_while_a_beat_hangs() {
    let on = Stand::open(2, PATIENCE).await;
    let store: Arc<dyn Store> = Arc::<Stoppable>::clone(&on.store);
    let settings = Settings {
        waiters_per_key_max: 1,
        waiters_max: 1,
        poll_interval: PATIENCE,
        cache_bytes_max: 1,
        cache_trust: PATIENCE,
        record_retry: PATIENCE,
        record_retry_bytes_max: 1,
    };
    let secrets = Secrets::new(on.store.inner.secrets([7; 32]).await.unwrap()).unwrap();
    let (tracker, draining) = (TaskTracker::new(), CancellationToken::new());
    let gate = Gate::new(
        store,
        on.group.clone(),
        secrets,
        settings,
        Bells::default(),
        tracker,
        draining,
    );
    let Admission::Execute(permit) = gate.admit(&ask()).await else {
        panic!("not the owner");
    };
    assert_eq!(on.batch().await, 1);
    on.store.stop();
    let lease = permit.lease_clock();
    let two = async {
        assert_eq!((on.batch().await, on.batch().await), (1, 1));
        assert!(lease.holds());
    };
    tokio::select! {
        () = two => {}
        never = gate.keep_alive(&permit) => match never {},
    }
    on.store.go_on();
    gate.settle(*permit, Outcome::NotSent).await;
    on.close().await;
}

fn ask() -> Ask {
    let request = RequestParts {
        method: "POST",
        path: "/",
        query: None,
        content_type: None,
        content_encoding: None,
        body: b"",
    };
    Ask {
        key: key("k"),
        older: Vec::new(),
        digest: Some(RequestDigest::of(&request, &FingerprintRules::default())),
        request_id: None,
        policy: Arc::new(Policy {
            mode: oncegate::domain::policy::Mode::Proxy,
            follow_up: None,
            pool: key("k").pool,
            key_source: KeySource::Header(http::header::ETAG),
            required: false,
            duplicates: Duplicates::Wait,
            forward_key: ForwardKey::None,
            wait: PATIENCE,
            lease: Duration::from_secs(3),
            timeout: PATIENCE,
            linger: Duration::ZERO,
            valid_for: PATIENCE,
            tombstone_for: Duration::ZERO,
            on_unknown: OnUnknown::Hold,
            store_5xx: true,
            release_statuses: Vec::new(),
            store_set_cookie: false,
            on_store_down: OnStoreDown::Refuse,
            body_bytes_max: 0,
            store_body_bytes_max: 0,
            fingerprint: FingerprintRules::default(),
            retry: oncegate::domain::workflow::Retry::DEFAULT,
        }),
        wait_until: tokio::time::Instant::now() + PATIENCE,
        gone: CancellationToken::new(),
    }
}

/// A group over a store that a test can stop.
struct Stand {
    group: Group,
    store: Arc<Stoppable>,
    /// The sizes of the batches, each told when it reaches the store.
    batches: Mutex<mpsc::Receiver<usize>>,
    directory: tempfile::TempDir,
}

impl Stand {
    async fn open(concurrency: usize, patience: Duration) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store.db");
        let inner = SqliteStore::open(&path, true).await.unwrap();
        let (told, batches) = mpsc::channel(1000);
        let store = Arc::new(Stoppable {
            inner,
            told: Mutex::new(told),
            gate: Semaphore::new(Semaphore::MAX_PERMITS),
            running: AtomicUsize::new(0),
        });
        let options = GroupOptions {
            concurrency,
            patience,
        };
        let shared: Arc<dyn Store> = Arc::<Stoppable>::clone(&store);
        Self {
            group: Group::new(&shared, options),
            store,
            batches: Mutex::new(batches),
            directory,
        }
    }

    /// Waits for the next batch to reach the store.
    async fn batch(&self) -> usize {
        let mut batches = self.batches.lock().await;
        let batch = timeout(PATIENCE, batches.recv()).await;
        batch.unwrap().unwrap()
    }

    /// Whether another batch has reached the store already.
    fn another_batch(&self) -> Option<usize> {
        self.batches.try_lock().unwrap().try_recv().ok()
    }

    async fn execute(&self, sql: &'static str) {
        use sqlx::ConnectOptions as _;
        let path = self.directory.path().join("store.db");
        let options = sqlx::sqlite::SqliteConnectOptions::new().filename(path);
        let mut connection = options.connect().await.unwrap();
        sqlx::query(sql).execute(&mut connection).await.unwrap();
    }

    async fn close(&self) {
        self.group.close().await;
        self.store.close().await;
    }
}
