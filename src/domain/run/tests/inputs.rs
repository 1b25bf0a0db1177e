//! Signals, and what people want of a run.

use serde_json::json;

use super::super::{Refused, RunStatus, SIGNALS_HELD_MAX, history};
use super::model::{
    End, Model, awaits, cancel, on_failure, resume, retry, sends, signal, undone_by, waits,
    workflow,
};
use crate::domain::intent::IntentStatus;
use crate::domain::workflow::OnFailure;

#[test]
fn a_signal_is_awaited_or_waits_to_be() {
    let text = "{{ signals.paid.by }} {{ steps.wait.body.by }}";
    let flow = workflow(vec![
        sends("a", &["1"]),
        awaits("wait", "paid"),
        sends("b", &[text]),
    ]);
    let mut early = Model::start(&flow);
    early
        .input(signal("paid", json!({ "by": "card" })))
        .unwrap();
    early.delivers();
    assert_eq!(early.body(2), "card card");
    let mut late = Model::start(&flow);
    late.delivers();
    assert_eq!(late.run.status, RunStatus::Waiting);
    let told = late.history.last().unwrap().detail.clone();
    assert_eq!(told, Some(json!({ "signal": "paid" })), "what it waits for");
    assert_eq!(
        late.input(signal("other", json!(1))),
        Err(Refused::NeverAwaited)
    );
    assert_eq!(late.run.status, RunStatus::Waiting);
    late.input(signal("paid", json!({ "by": "card" }))).unwrap();
    assert!(!late.timer);
    assert_eq!(late.body(2), "card card");
    insta::assert_snapshot!(late.kinds().join(" "), @"started step_started effect_delivered step_completed step_started signal_received signal_consumed step_completed step_started");
}

#[test]
fn signals_are_consumed_in_the_order_in_which_they_came() {
    let steps = vec![
        waits("a"),
        awaits("b", "s"),
        awaits("c", "s"),
        sends("d", &["{{ steps.b.body }} {{ steps.c.body }}"]),
    ];
    let mut run = Model::start(&workflow(steps));
    run.input(signal("s", json!(1))).unwrap();
    run.input(signal("s", json!(2))).unwrap();
    run.time_passes();
    assert_eq!(run.body(1), "1 2");
}

#[test]
fn a_run_holds_so_many_signals_and_no_more_and_none_that_is_too_long() {
    let mut run = Model::start(&workflow(vec![
        waits("a"),
        awaits("b", "s"),
        sends("c", &["{{ signals.s }}"]),
    ]));
    run.input(signal("s", json!("x".repeat(70_000)))).unwrap();
    for _ in 1..SIGNALS_HELD_MAX {
        run.input(signal("s", json!(1))).unwrap();
    }
    let version = run.run.record_version;
    assert_eq!(
        run.input(signal("s", json!(1))),
        Err(Refused::TooManySignals)
    );
    assert_eq!(run.run.record_version, version);
    run.time_passes();
    assert_eq!(run.body(1), "null");
    run.input(signal("s", json!(1))).unwrap();
}

#[test]
fn a_signal_that_comes_too_late_is_failed_by_the_steps_rule_and_can_be_waited_for_again() {
    let late = |rule| {
        let steps = vec![
            undone_by("undo", sends("a", &["1"])),
            on_failure(rule, awaits("b", "s")),
            sends("c", &["2"]),
        ];
        let mut run = Model::start(&workflow(steps));
        run.delivers();
        run.time_passes();
        run
    };
    let mut run = late(OnFailure::Stop);
    assert_eq!(run.run.status, RunStatus::Stuck);
    run.input(signal("s", json!(1))).unwrap();
    assert_eq!(
        run.run.status,
        RunStatus::Stuck,
        "held, and an operator acts"
    );
    run.input(retry(None)).unwrap();
    assert_eq!(run.delivers(), 2);
    let mut run = late(OnFailure::Stop);
    run.input(retry(None)).unwrap();
    assert!(run.run.status == RunStatus::Waiting && run.timer && !run.timer_over);
    let mut run = late(OnFailure::Continue);
    assert_eq!(run.delivers(), 2);
    assert_eq!(run.run.status, RunStatus::Completed);
    let mut run = late(OnFailure::Compensate);
    run.delivers();
    assert_eq!(run.run.status, RunStatus::Compensated);
}

#[test]
fn a_retry_sends_the_same_bytes_under_the_same_key() {
    let mut run = Model::start(&workflow(vec![sends("a", &["1", "2"])]));
    assert_eq!(run.input(retry(None)), Err(Refused::NotStuck));
    let seq = run.ends(&End::Dead);
    let frozen = run.rows[&seq].intent.clone();
    assert_eq!(run.input(retry(Some(2))), Err(Refused::Gone));
    run.input(retry(Some(1))).unwrap();
    assert_eq!(
        (run.run.status, run.run.reason.clone()),
        (RunStatus::Running, None)
    );
    run.ends(&End::Quarantined);
    assert_eq!(run.run.status, RunStatus::Stuck);
    run.input(retry(None)).unwrap();
    assert_eq!([run.delivers(), run.delivers()], [1, 2]);
    let sent = &run.rows[&seq].intent;
    assert_eq!(
        (&sent.body, &sent.idempotency_key),
        (&frozen.body, &frozen.idempotency_key)
    );
    assert_eq!(run.run.status, RunStatus::Completed);
}

#[test]
fn a_retry_is_refused_once_the_bytes_are_gone_or_the_run_went_on() {
    let mut run = Model::start(&workflow(vec![sends("a", &["1"])]));
    run.ends(&End::Dead);
    run.rows.get_mut(&1).unwrap().has_body = false;
    assert_eq!(run.input(retry(None)), Err(Refused::Gone));
    assert_eq!(run.run.record_version, 2);
    let steps = vec![
        on_failure(OnFailure::Continue, sends("a", &["1"])),
        waits("b"),
    ];
    let mut run = Model::start(&workflow(steps));
    run.ends(&End::Dead);
    assert_eq!(run.input(retry(Some(1))), Err(Refused::Gone));
    assert_eq!(run.rows[&1].status, IntentStatus::Dead);
}

#[test]
fn a_resumed_run_goes_on_without_the_step_and_sees_the_result_that_was_given() {
    let steps = vec![
        undone_by("undo", sends("a", &["1", "2"])),
        sends("b", &["{{ steps.a.body.paid }}"]),
    ];
    let mut run = Model::start(&workflow(steps));
    assert_eq!(run.input(resume(json!({}))), Err(Refused::NotStuck));
    run.ends(&End::Dead);
    run.input(resume(json!({ "paid": "cash" }))).unwrap();
    assert_eq!(run.body(3), "cash");
    assert_eq!(
        run.statuses(),
        [
            IntentStatus::Dead,
            IntentStatus::Discarded,
            IntentStatus::Pending
        ]
    );
    // It may have run all the same.
    run.input(cancel()).unwrap();
    run.delivers();
    assert_eq!(run.body(4), "undo");
    assert_eq!(run.run.status, RunStatus::Cancelled);
    // And without one that could not be rendered.
    let steps = vec![
        sends("a", &["{{ nothing }}"]),
        sends("b", &["{{ steps.a.body }}"]),
    ];
    let mut run = Model::start(&workflow(steps));
    run.input(resume(json!(5))).unwrap();
    assert_eq!(run.body(1), "5");
}

#[test]
fn an_input_stands_in_the_history_with_its_stamp_and_who_told_it() {
    let mut run = Model::start(&workflow(vec![waits("a")]));
    let stamp = run.draw();
    run.input_stamped(stamp, cancel()).unwrap();
    let told: Vec<_> = run
        .history
        .iter()
        .filter(|told| told.stamp.is_some())
        .collect();
    assert_eq!(told.len(), 1);
    assert_eq!(
        (told[0].kind, told[0].stamp),
        (history::CANCEL_REQUESTED, Some(stamp))
    );
    assert_eq!(
        told[0].detail,
        Some(json!({ "by": "ops", "reason": "a mistake" }))
    );
    for event in [
        cancel(),
        retry(None),
        resume(json!(1)),
        signal("s", json!(1)),
    ] {
        assert_eq!(run.input(event), Err(Refused::Final));
    }
}

#[test]
fn an_input_is_taken_after_what_happened_before_it() {
    // The timer was over before the signal came.
    let mut run = Model::start(&workflow(vec![
        on_failure(OnFailure::Continue, awaits("a", "s")),
        awaits("b", "s"),
        waits("c"),
    ]));
    run.timer_over = true;
    run.input(signal("s", json!(1))).unwrap();
    let steps: Vec<_> = run
        .history
        .iter()
        .filter(|told| told.kind == history::SIGNAL_CONSUMED)
        .collect();
    assert_eq!(steps[0].step.as_deref(), Some("b"));
    // The intent was dead before the retry.
    let mut run = Model::start(&workflow(vec![sends("a", &["1"])]));
    let seq = run.claim().unwrap();
    run.finish(seq, &End::Dead);
    run.input(retry(None)).unwrap();
    assert_eq!(run.delivers(), 1);
    assert_eq!(run.run.status, RunStatus::Completed);
}
