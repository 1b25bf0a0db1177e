//! What the loop promises when commits go wrong.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use serde_json::json;
use uuid::Uuid;

use super::double::{Double, Fault};
use super::{ApplyError, Coordinator, TRIES_MAX};
use crate::domain::intent::Stamp;
use crate::domain::run::tests::model::{
    End, Model, awaits, cancel, retry, run_key, sends, signal, waits, workflow,
};
use crate::domain::run::{Event, Input, Refused, RunStatus};
use crate::domain::workflow::Step;
use crate::lifecycle::Bells;
use crate::store::Store;
use crate::store::group::{Group, GroupOptions};

struct Bench {
    store: Arc<Double>,
    coordinator: Coordinator,
    bells: Bells,
}

impl Bench {
    /// Runs of these numbers, all with these steps.
    fn new(runs: &[u128], steps: &[Step]) -> Self {
        let store = Arc::new(Double::default());
        for id in runs {
            let run = Model::with_id(*id, &workflow(steps.to_vec()));
            store.open().runs.insert(run_key(*id), run);
        }
        let bells = Bells::default();
        let shared: Arc<dyn Store> = store.clone();
        let options = GroupOptions {
            concurrency: 1,
            patience: Duration::from_secs(5),
        };
        let group = Group::new(&shared, options);
        let coordinator = Coordinator::new(shared, group, bells.clone());
        Self {
            store,
            coordinator,
            bells,
        }
    }

    /// Something happens to a run that nobody has taken in.
    fn with<T>(&self, id: u128, act: impl FnOnce(&mut Model) -> T) -> T {
        act(self.store.open().runs.get_mut(&run_key(id)).unwrap())
    }

    fn is_sent(&self, id: u128) {
        self.with(id, |run| {
            let seq = run.claim().unwrap();
            run.finish(seq, &End::Delivered(200, "{}"));
        });
    }

    fn status(&self, id: u128) -> RunStatus {
        self.with(id, |run| run.run.status)
    }

    fn fails(&self, faults: &[Fault]) {
        self.store.open().faults.extend(faults);
    }
}

fn told(stamp: u128, event: Event) -> Input {
    Input {
        stamp: Stamp(Uuid::from_u128(stamp)),
        by: "ops".to_owned(),
        event,
    }
}

#[tokio::test(start_paused = true)]
async fn due_runs_move_on_and_the_others_stay() {
    let bench = Bench::new(&[1, 2, 3], &[sends("a", &["1", "2"])]);
    let mut watch = bench.coordinator.watch();
    assert_eq!(bench.coordinator.advance(10).await.unwrap(), 0);
    bench.is_sent(1);
    bench.is_sent(3);
    assert_eq!(bench.coordinator.advance(10).await.unwrap(), 2);
    assert_eq!(bench.coordinator.advance(10).await.unwrap(), 0);
    let versions = [1, 2, 3].map(|id| bench.with(id, |run| run.run.record_version));
    assert_eq!(versions, [2, 1, 2]);
    let mut seen = [watch.recv().await.unwrap(), watch.recv().await.unwrap()];
    seen.sort();
    assert_eq!(seen, [run_key(1), run_key(3)]);
    assert!(bench.bells.outbox.notified().now_or_never().is_some());
}

#[tokio::test(start_paused = true)]
async fn a_lost_reply_is_cleared_up_before_anything_is_computed_anew() {
    for faults in [
        &[Fault::ReplyLost, Fault::RequestLost][..],
        &[Fault::RequestLost, Fault::ReplyLost],
    ] {
        let bench = Bench::new(&[1], &[sends("a", &["1", "2"])]);
        bench.is_sent(1);
        bench.fails(faults);
        assert_eq!(bench.coordinator.advance(10).await.unwrap(), 1);
        assert_eq!(bench.with(1, |run| run.run.record_version), 2);
        let sent = bench.store.open().sent.clone();
        assert_eq!(sent.len(), 3);
        assert!(sent.iter().all(|one| *one == sent[0]), "the very same");
    }
}

#[tokio::test(start_paused = true)]
async fn an_input_whose_reply_is_lost_is_taken_once() {
    let bench = Bench::new(&[1], &[awaits("a", "s"), awaits("b", "s"), waits("c")]);
    bench.fails(&[Fault::ReplyLost]);
    let input = told(1, signal("s", json!(1)));
    let applied = bench.coordinator.apply(&run_key(1), input.clone()).await;
    let applied = applied.unwrap();
    assert!(!applied.repeated);
    assert_eq!(applied.run.record_version, 2);
    let again = bench.coordinator.apply(&run_key(1), input).await.unwrap();
    assert!(again.repeated);
    assert_eq!(
        bench.with(1, |run| (
            run.run.record_version,
            run.run.last_transition_seq
        )),
        (2, applied.run.last_transition_seq)
    );
}

#[tokio::test(start_paused = true)]
async fn a_thousand_repeats_of_an_input_write_nothing() {
    let bench = Bench::new(&[1], &[waits("a"), awaits("b", "s")]);
    let input = told(1, signal("s", json!(1)));
    for round in 0..1000 {
        let applied = bench.coordinator.apply(&run_key(1), input.clone()).await;
        assert_eq!(applied.unwrap().repeated, round > 0);
    }
    assert_eq!(bench.store.open().sent.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn whoever_is_beaten_loads_and_computes_again() {
    let bench = Bench::new(&[1], &[waits("a"), awaits("b", "s")]);
    // The other gateway was told the same.
    bench.fails(&[Fault::Beaten]);
    let input = told(1, signal("s", json!(1)));
    let applied = bench.coordinator.apply(&run_key(1), input).await.unwrap();
    assert!(applied.repeated);
    assert_eq!(bench.with(1, |run| run.run.record_version), 2);
    // And here it took in the same end of an intent.
    let bench = Bench::new(&[1], &[sends("a", &["1"])]);
    bench.is_sent(1);
    bench.fails(&[Fault::Beaten]);
    assert_eq!(bench.coordinator.advance(10).await.unwrap(), 0);
    assert_eq!(bench.status(1), RunStatus::Completed);
}

#[tokio::test(start_paused = true)]
async fn one_runs_trouble_stops_no_other() {
    let bench = Bench::new(&[1, 2, 3], &[sends("a", &["1"])]);
    for id in [1, 2, 3] {
        bench.is_sent(id);
    }
    bench.store.open().unreadable.insert(run_key(1));
    bench.fails(&[Fault::Refused, Fault::Refused]);
    // A batch that is refused is sent one by one; the first of them is refused again.
    assert_eq!(bench.coordinator.advance(10).await.unwrap(), 1);
    bench.store.open().unreadable.clear();
    assert_eq!(bench.coordinator.advance(10).await.unwrap(), 2);
    for id in [1, 2, 3] {
        assert_eq!(bench.status(id), RunStatus::Completed);
    }
}

#[tokio::test(start_paused = true)]
async fn runs_that_can_never_be_moved_on_starve_no_other() {
    let bench = Bench::new(&[1, 2, 3, 4, 5, 6, 7], &[sends("a", &["1"])]);
    for id in 1..=7 {
        bench.is_sent(id);
    }
    // Together they fill every round.
    bench.store.open().unreadable = [1, 2, 3].map(run_key).into();
    for _ in 0..4 {
        bench.coordinator.advance(3).await.unwrap();
    }
    for id in 4..=7 {
        assert_eq!(bench.status(id), RunStatus::Completed);
    }
    // Behind the end comes the beginning again.
    bench.store.open().unreadable.clear();
    for _ in 0..2 {
        bench.coordinator.advance(3).await.unwrap();
    }
    for id in 1..=3 {
        assert_eq!(bench.status(id), RunStatus::Completed);
    }
}

#[tokio::test(start_paused = true)]
async fn runs_that_take_too_long_to_load_together_are_loaded_one_by_one() {
    let ids: Vec<u128> = (1..=200).collect();
    let bench = Bench::new(&ids, &[sends("a", &["1"])]);
    for id in &ids {
        bench.is_sent(*id);
    }
    bench.store.open().heavy = Some(run_key(70));
    for _ in 0..20 {
        // A round that moved nothing on tells why.
        let _moved_on = bench.coordinator.advance(500).await;
    }
    for id in ids {
        assert_eq!(bench.status(id), RunStatus::Completed, "{id}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_error_that_says_that_nothing_happened_is_passed_on_at_once() {
    let bench = Bench::new(&[1], &[waits("a")]);
    bench.fails(&[Fault::Refused]);
    let input = told(1, cancel());
    let refused = bench.coordinator.apply(&run_key(1), input.clone()).await;
    assert!(matches!(refused, Err(ApplyError::Store(_))));
    assert_eq!(bench.status(1), RunStatus::Waiting);
    bench.fails(&[Fault::RequestLost; TRIES_MAX as usize]);
    let lost = bench.coordinator.apply(&run_key(1), input.clone()).await;
    assert!(matches!(lost, Err(ApplyError::Store(error)) if error.may_have_happened()));
    let applied = bench.coordinator.apply(&run_key(1), input).await.unwrap();
    assert_eq!(applied.run.status, RunStatus::Cancelled);
}

#[tokio::test(start_paused = true)]
async fn what_a_run_refuses_writes_nothing() {
    let bench = Bench::new(&[1], &[waits("a")]);
    let nobody = bench
        .coordinator
        .apply(&run_key(9), told(1, cancel()))
        .await;
    assert!(matches!(nobody, Err(ApplyError::NoRun)));
    let refused = bench
        .coordinator
        .apply(&run_key(1), told(2, retry(None)))
        .await;
    assert!(matches!(
        refused,
        Err(ApplyError::Refused(Refused::NotStuck))
    ));
    assert!(bench.store.open().sent.is_empty());
    bench
        .coordinator
        .apply(&run_key(1), told(3, cancel()))
        .await
        .unwrap();
    let again = bench
        .coordinator
        .apply(&run_key(1), told(3, cancel()))
        .await
        .unwrap();
    assert!(again.repeated, "told again, not refused");
    let second = bench
        .coordinator
        .apply(&run_key(1), told(4, cancel()))
        .await;
    assert!(matches!(second, Err(ApplyError::Refused(Refused::Final))));
}

#[tokio::test(start_paused = true)]
async fn bells_ring_for_what_a_tick_makes_due() {
    let rings = |bell: &Arc<tokio::sync::Notify>| bell.notified().now_or_never().is_some();
    let bench = Bench::new(&[1], &[sends("a", &["1", "2"])]);
    bench.with(1, |run| {
        let seq = run.claim().unwrap();
        run.finish(seq, &End::Dead);
    });
    bench.coordinator.advance(10).await.unwrap();
    assert!(!rings(&bench.bells.outbox));
    bench
        .coordinator
        .apply(&run_key(1), told(1, retry(None)))
        .await
        .unwrap();
    assert!(rings(&bench.bells.outbox));
    assert!(!rings(&bench.bells.runs));
    bench
        .coordinator
        .apply(&run_key(1), told(2, cancel()))
        .await
        .unwrap();
    assert!(rings(&bench.bells.runs));
    assert_eq!(bench.coordinator.advance(10).await.unwrap(), 1);
    assert_eq!(bench.status(1), RunStatus::Cancelled);
}
