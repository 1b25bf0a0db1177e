//! The duties on a real SQLite file: what they do to rows, and what they count.

use std::sync::Arc;
use std::time::Duration;

use metrics_exporter_prometheus::PrometheusBuilder;
use oncegate::domain::record::{GiveUp, State, Terms};
use oncegate::driver::{self, Report, Timing, Worker};
use oncegate::store::sqlite::SqliteStore;
use oncegate::store::{Store, StoreError};
use oncegate::upkeep::census::Census;
use oncegate::upkeep::retention::Retention;
use oncegate::upkeep::sweeper::{SWEEP_ROWS_MAX, Sweeper};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::store_conformance::fixture::{claim, completion, redrive, release, terms};

/// Runs a test on a store of its own and gives the metrics that it wrote.
fn with_metrics<T>(test: impl AsyncFnOnce(Arc<dyn Store>) -> T) -> (T, String) {
    let recorder = PrometheusBuilder::new().build_recorder();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let result = metrics::with_local_recorder(&recorder, || {
        runtime.block_on(async {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("store.db");
            let store: Arc<dyn Store> = Arc::new(SqliteStore::open(&path, true).await.unwrap());
            let result = test(Arc::clone(&store)).await;
            store.close().await;
            result
        })
    });
    (result, recorder.handle().render())
}

/// Claims whose lease is over at once.
async fn abandon(store: &Arc<dyn Store>, name: &str, terms: Terms) {
    let mut claim = claim(name);
    claim.terms = Terms {
        lease: Duration::ZERO,
        ..terms
    };
    store.reserve(&[claim]).await.unwrap();
}

#[test]
fn silent_owners_lose_their_records_and_are_counted_by_where_they_went() {
    let ((), metrics) = with_metrics(async |store| {
        abandon(&store, "k1", terms()).await;
        abandon(&store, "k2", terms()).await;
        abandon(&store, "k3", redrive()).await;
        store.reserve(&[claim("k4")]).await.unwrap();
        let sweeper = Sweeper(Arc::clone(&store));
        let report = sweeper.run_once().await.unwrap();
        assert_eq!((report.rows, report.full), (3, false));
        let report = sweeper.run_once().await.unwrap();
        assert_eq!(report.rows, 0);
    });
    assert!(
        metrics.contains("oncegate_swept_total{to=\"outcome_unknown\"} 2"),
        "{metrics}"
    );
    assert!(metrics.contains("oncegate_swept_total{to=\"failed_before_commit\"} 1"));
}

/// A sweeper that tells what its rounds did.
struct Telling(Sweeper, mpsc::Sender<Report>);

impl Worker for Telling {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    async fn run_once(&self) -> Result<Report, StoreError> {
        let report = self.0.run_once().await?;
        self.1.try_send(report).unwrap();
        Ok(report)
    }
}

#[test]
fn a_backlog_of_silent_owners_is_swept_without_a_pause() {
    let ((), metrics) = with_metrics(async |store| {
        let total = SWEEP_ROWS_MAX as usize * 2 + 1;
        let claims: Vec<_> = (0..total)
            .map(|number| {
                let mut claim = claim(&format!("k{number}"));
                claim.terms.lease = Duration::ZERO;
                claim
            })
            .collect();
        for page in claims.chunks(100) {
            store.reserve(page).await.unwrap();
        }
        let timing = Timing {
            period: Duration::from_hours(1),
            deadline: Duration::from_mins(1),
        };
        let (tracker, shutdown) = (TaskTracker::new(), CancellationToken::new());
        let sweeper = Sweeper(Arc::clone(&store));
        let (tell, mut told) = mpsc::channel(10);
        driver::start(Telling(sweeper, tell), timing, &tracker, &shutdown);
        let rested = async { while told.recv().await.is_some_and(|report| report.full) {} };
        tokio::time::timeout(Duration::from_mins(1), rested)
            .await
            .unwrap();
        let open = store.census().await.unwrap();
        assert_eq!((open.unknown, open.oldest_pending), (total as u64, None));
        shutdown.cancel();
        tracker.close();
        tracker.wait().await;
    });
    let rounds = "oncegate_worker_rounds_total{worker=\"sweeper\",result=\"ok\"} 3";
    assert!(metrics.contains(rounds), "{metrics}");
}

#[test]
fn what_is_past_its_time_is_forgotten_and_what_is_open_is_not() {
    let ((), metrics) = with_metrics(async |store| {
        let mut over = claim("over");
        over.terms.valid_for = Duration::ZERO;
        let (valid, unknown) = (claim("valid"), claim("unknown"));
        let claims = [over.clone(), valid.clone(), unknown.clone()];
        store.reserve(&claims).await.unwrap();
        let completions = [completion(&over), completion(&valid)];
        store.complete(&completions).await.unwrap();
        store
            .release(&[release(&unknown, GiveUp::Hold)])
            .await
            .unwrap();
        let report = Retention(Arc::clone(&store)).run_once().await.unwrap();
        assert_eq!((report.rows, report.full), (2, false));
        let keys = claims.map(|claim| claim.key);
        let found = store.look_up(&keys).await.unwrap();
        let states: Vec<_> = found
            .iter()
            .map(|one| one.as_ref().map(|one| one.state))
            .collect();
        assert!(matches!(
            states[..],
            [
                None,
                Some(State::Completed(..)),
                Some(State::OutcomeUnknown)
            ]
        ));
    });
    for table in ["eec_routing_idempotency", "eec_routing_decision"] {
        let line = format!("oncegate_purged_total{{table=\"{table}\"}} 1");
        assert!(metrics.contains(&line), "{metrics}");
    }
}

#[test]
fn the_census_shows_what_only_the_store_knows() {
    let ((), metrics) = with_metrics(async |store| {
        let unknown = claim("unknown");
        store
            .reserve(&[unknown.clone(), claim("pending")])
            .await
            .unwrap();
        store
            .release(&[release(&unknown, GiveUp::Hold)])
            .await
            .unwrap();
        Census(store).run_once().await.unwrap();
    });
    assert!(metrics.contains("oncegate_unknown_records 1"), "{metrics}");
    assert!(
        metrics.contains("oncegate_oldest_pending_seconds 0"),
        "{metrics}"
    );
}
