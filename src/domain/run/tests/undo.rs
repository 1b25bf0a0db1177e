//! Runs turn around.

use super::super::{Refused, RunStatus, history};
use super::model::{
    End, Model, awaits, cancel, on_failure, resume, retry, sends, undone_by, waits, workflow,
};
use crate::domain::intent::IntentStatus;
use crate::domain::workflow::{OnFailure, Step, Workflow};

/// Two steps that can be undone, and a third that turns around when it fails.
fn booking(last: Step) -> Workflow {
    workflow(vec![
        undone_by("undo a {{ steps.a.body.ok }}", sends("a", &["1"])),
        sends("b", &["2"]),
        undone_by("undo c", sends("c", &["3"])),
        on_failure(OnFailure::Compensate, last),
    ])
}

fn bodies(run: &Model) -> Vec<&str> {
    let delivered = run.delivered.iter();
    delivered.map(|seq| run.body(*seq)).collect()
}

#[test]
fn what_was_done_is_undone_in_reverse_order_the_step_that_may_have_run_first() {
    let last = undone_by("undo d", sends("d", &["4", "5"]));
    let mut run = Model::start(&booking(last));
    for _ in 0..3 {
        run.delivers();
    }
    run.ends(&End::Dead);
    assert_eq!(run.rows[&5].status, IntentStatus::Discarded);
    assert_eq!(run.run.status, RunStatus::Running);
    assert_eq!([run.delivers(), run.delivers(), run.delivers()], [6, 7, 8]);
    assert_eq!(bodies(&run)[3..], ["undo d", "undo c", "undo a true"]);
    assert_eq!(run.run.status, RunStatus::Compensated);
    assert!(
        run.run
            .reason
            .as_ref()
            .unwrap()
            .starts_with("step `d`: dead")
    );
    assert_eq!(run.rows[&4].status, IntentStatus::Dead, "to be seen");
    assert_eq!(run.input(retry(Some(4))), Err(Refused::Final));
}

#[test]
fn without_anything_to_undo_the_run_has_failed() {
    let steps = vec![
        sends("a", &["1"]),
        on_failure(OnFailure::Compensate, awaits("b", "never")),
    ];
    let mut run = Model::start(&workflow(steps));
    run.delivers();
    run.time_passes();
    assert_eq!(run.run.status, RunStatus::Failed);
    let reason = run.run.reason.as_deref();
    assert_eq!(reason, Some("step `b`: its signal did not come in time"));
    insta::assert_snapshot!(run.kinds().join(" "), @"started step_started effect_delivered step_completed step_started timer_over step_failed undoing failed");
}

#[test]
fn a_compensation_that_can_not_be_delivered_makes_the_run_stuck_until_somebody_acts() {
    let stuck = || {
        let mut run = Model::start(&booking(waits("d")));
        for _ in 0..3 {
            run.delivers();
        }
        run.input(cancel()).unwrap();
        run.ends(&End::Dead);
        assert_eq!(run.run.status, RunStatus::Stuck);
        assert!(
            run.run
                .reason
                .as_ref()
                .unwrap()
                .starts_with("undoing step `c`: dead")
        );
        assert_eq!(run.input(cancel()), Err(Refused::Undoing));
        run
    };
    let mut run = stuck();
    run.input(retry(None)).unwrap();
    assert_eq!([run.delivers(), run.delivers()], [4, 5]);
    assert_eq!(bodies(&run)[3..], ["undo c", "undo a true"]);
    assert_eq!(run.run.status, RunStatus::Cancelled);
    let mut run = stuck();
    run.input(resume(serde_json::Value::Null)).unwrap();
    assert_eq!(run.input(retry(Some(4))), Err(Refused::Gone));
    run.delivers();
    assert_eq!(bodies(&run)[3..], ["undo a true"]);
    assert_eq!(run.run.status, RunStatus::Cancelled);
    assert!(run.run.reason.as_ref().unwrap().contains("a mistake"));
    let mut run = stuck();
    run.discard(4);
    run.settle();
    run.delivers();
    assert_eq!(run.run.status, RunStatus::Cancelled);
}

#[test]
fn a_compensation_that_can_not_be_rendered_makes_the_run_stuck() {
    let steps = vec![undone_by("{{ nothing }}", sends("a", &["1"])), waits("b")];
    let mut run = Model::start(&workflow(steps));
    run.delivers();
    run.input(cancel()).unwrap();
    assert_eq!(run.run.status, RunStatus::Stuck);
    assert!(run.run.reason.as_ref().unwrap().contains("undefined"));
    run.input(retry(None)).unwrap();
    assert_eq!(run.run.status, RunStatus::Stuck);
    run.input(resume(serde_json::Value::Null)).unwrap();
    assert_eq!(run.run.status, RunStatus::Cancelled);
}

#[test]
fn a_cancelled_run_withdraws_what_is_not_sent_and_undoes_what_may_have_been() {
    let flow = || {
        workflow(vec![
            undone_by("undo", sends("a", &["1", "2"])),
            sends("b", &["3"]),
        ])
    };
    // Nothing was sent.
    let mut run = Model::start(&flow());
    run.input(cancel()).unwrap();
    assert_eq!(run.run.status, RunStatus::Cancelled);
    assert_eq!(run.statuses(), [IntentStatus::Discarded; 2]);
    assert_eq!(
        run.run.reason.as_deref(),
        Some("cancelled by ops: a mistake")
    );
    assert_eq!(run.input(cancel()), Err(Refused::Final));
    // One was tried.
    let mut run = Model::start(&flow());
    run.ends(&End::Again);
    run.input(cancel()).unwrap();
    run.delivers();
    assert_eq!(bodies(&run), ["undo"]);
    assert_eq!(run.run.status, RunStatus::Cancelled);
    // One was delivered.
    let mut run = Model::start(&flow());
    run.delivers();
    run.input(cancel()).unwrap();
    run.delivers();
    assert_eq!(bodies(&run), ["1", "undo"]);
    assert_eq!(run.run.status, RunStatus::Cancelled);
}

#[test]
fn a_cancelled_run_waits_for_the_claim_that_is_out() {
    let ended = |end: &End| {
        let steps = vec![undone_by("undo", sends("a", &["1", "2"]))];
        let mut run = Model::start(&workflow(steps));
        let seq = run.claim().unwrap();
        run.input(cancel()).unwrap();
        assert_eq!(run.run.status, RunStatus::Running);
        assert_eq!(run.input(cancel()), Err(Refused::Undoing));
        assert_eq!(run.rows.len(), 2, "nothing is undone yet");
        run.finish(seq, end);
        run.settle();
        assert_eq!(run.delivers(), 3);
        assert_eq!(run.run.status, RunStatus::Cancelled);
        assert_eq!(run.rows[&2].status, IntentStatus::Discarded);
        run
    };
    let run = ended(&End::Delivered(200, ""));
    assert_eq!(bodies(&run), ["1", "undo"]);
    let run = ended(&End::Again);
    assert_eq!(bodies(&run), ["undo"]);
    let run = ended(&End::Dead);
    assert_eq!(bodies(&run), ["undo"]);
}

/// A worker may die with a claim on a lane that nobody pulls from any more.
#[test]
fn a_cancelled_run_does_not_wait_for_a_worker_that_is_gone() {
    let steps = vec![undone_by("undo", sends("a", &["1"]))];
    let mut run = Model::start(&workflow(steps));
    let seq = run.claim().unwrap();
    run.input(cancel()).unwrap();
    run.time_passes();
    assert_eq!(run.rows[&seq].status, IntentStatus::Pending, "it is held");
    run.rows.get_mut(&seq).unwrap().claimed = false;
    run.time_passes();
    assert_eq!(run.rows[&seq].status, IntentStatus::Discarded);
    run.delivers();
    assert_eq!(bodies(&run), ["undo"]);
    assert_eq!(run.run.status, RunStatus::Cancelled);
}

#[test]
fn a_claim_that_was_given_back_has_done_nothing_to_undo() {
    let steps = vec![undone_by("undo", sends("a", &["1"]))];
    let mut run = Model::start(&workflow(steps));
    let seq = run.claim().unwrap();
    run.input(cancel()).unwrap();
    run.rows.get_mut(&seq).unwrap().tries = 0;
    run.finish(seq, &End::Again);
    run.settle();
    assert_eq!(run.run.status, RunStatus::Cancelled);
    assert_eq!(run.rows.len(), 1);
}

#[test]
fn a_run_that_waits_or_is_stuck_can_be_cancelled() {
    for last in [
        waits("d"),
        awaits("d", "never"),
        sends("d", &["{{ nothing }}"]),
    ] {
        let mut run = Model::start(&booking(last));
        for _ in 0..3 {
            run.delivers();
        }
        run.input(cancel()).unwrap();
        assert!(!run.timer);
        run.delivers();
        run.delivers();
        assert_eq!(bodies(&run)[3..], ["undo c", "undo a true"]);
        assert_eq!(run.run.status, RunStatus::Cancelled);
    }
    let mut run = Model::start(&workflow(vec![undone_by("undo", sends("a", &["1", "2"]))]));
    run.ends(&End::Dead);
    assert_eq!(run.run.status, RunStatus::Stuck);
    run.input(cancel()).unwrap();
    assert_eq!(run.statuses()[..2], [IntentStatus::Discarded; 2]);
    run.delivers();
    assert_eq!(run.run.status, RunStatus::Cancelled);
}

#[test]
fn an_effect_that_a_cancelling_tick_would_have_begun_does_not_begin() {
    let steps = vec![undone_by("undo", sends("a", &["1"])), sends("b", &["2"])];
    let mut run = Model::start(&workflow(steps));
    let seq = run.claim().unwrap();
    run.finish(seq, &End::Delivered(200, ""));
    run.input(cancel()).unwrap();
    let bodies: Vec<_> = run.rows.keys().map(|seq| run.body(*seq)).collect();
    assert_eq!(bodies, ["1", "undo"]);
    run.ends(&End::Delivered(200, ""));
    assert_eq!(run.run.status, RunStatus::Cancelled);
    assert_eq!(run.kinds().last(), Some(&history::CANCELLED));
}
