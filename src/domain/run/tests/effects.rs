//! Steps go forward.

use serde_json::json;

use super::super::{Beginning, RunStatus, begin, history};
use super::model::{
    End, Model, decision, http, new_run, on_failure, plain, record, retry, run_key, sends,
    template, waits, workflow,
};
use crate::domain::intent::{How, IntentStatus, Stamp};
use crate::domain::workflow::{Action, Effect, OnFailure, Payload, Send, Step, Success, Target};

#[test]
fn a_runs_effects_are_sent_one_after_another_and_each_step_sees_the_ones_before() {
    let steps = vec![
        sends(
            "a",
            &[
                "1 {{ input.name }} {{ decision.body.order }}",
                "2 {{ key }}",
            ],
        ),
        sends(
            "b",
            &["3 {{ steps.a.body.ok }} {{ decision.headers['x-a'] }}"],
        ),
    ];
    let mut run = Model::start(&workflow(steps));
    assert_eq!(run.run.record_version, 1);
    assert_eq!(run.rows.len(), 2);
    assert!(run.rows[&1].armed && !run.rows[&2].armed);
    assert_eq!((run.body(1), run.body(2)), ("1 Ada 17", "2 k-1"));
    assert_eq!([run.delivers(), run.delivers(), run.delivers()], [1, 2, 3]);
    assert_eq!(run.body(3), "3 true 1, 2");
    assert_eq!(run.run.status, RunStatus::Completed);
    insta::assert_snapshot!(run.kinds().join(" "), @"started step_started effect_delivered effect_delivered step_completed step_started effect_delivered step_completed completed");
    assert_eq!(run.run.record_version, 4);
}

#[test]
fn each_of_many_effects_takes_a_tick_and_a_transition() {
    let texts: Vec<_> = (0..100).map(|_| "x").collect();
    let mut run = Model::start(&workflow(vec![sends("a", &texts)]));
    for seq in 1..=100 {
        assert_eq!(run.delivers(), seq);
    }
    assert_eq!(run.run.status, RunStatus::Completed);
    let delivered = |kind: &&str| *kind == history::EFFECT_DELIVERED;
    assert_eq!(run.kinds().into_iter().filter(delivered).count(), 100);
    assert_eq!(run.run.record_version, 101);
}

#[test]
fn keys_are_made_from_the_generation_and_the_place_and_the_first_may_be_given() {
    let flow = workflow(vec![sends("a", &["1", "2"])]);
    let keys = |first| {
        let run = Model::of(1, new_run(1, &flow, first));
        [1, 2].map(|seq| run.rows[&seq].intent.idempotency_key.clone())
    };
    let [made, second] = keys(None);
    assert_eq!(keys(None), [made.clone(), second.clone()]);
    assert_eq!(
        keys(Some("client-key")),
        ["client-key".to_owned(), second.clone()]
    );
    assert_ne!(made, second);
    let version = uuid::Uuid::parse_str(&made).unwrap().get_version_num();
    assert_eq!(version, 8);
}

/// An operator's word and a caller's completion bring no request: nothing empty is sent instead.
#[test]
fn a_request_that_nobody_knows_makes_the_run_stuck() {
    let mut step = sends("a", &[""]);
    let Action::Effects(effects) = &mut step.action else {
        panic!()
    };
    effects[0].payload = Payload::Request;
    let new = begin(&Beginning {
        workflow: &workflow(vec![step]),
        run_id: run_key(1).id,
        record: &record(),
        key_seed: uuid::Uuid::from_u128(99),
        first_key: None,
        tick_id: Stamp(uuid::Uuid::from_u128(1)),
        holds_record: false,
        request: None,
        decision: Some(&decision()),
        input: json!(null),
    });
    let run = Model::of(1, new);
    assert_eq!(run.run.status, RunStatus::Stuck);
    assert!(run.rows.is_empty());
    let reason = run.run.reason.as_deref().unwrap();
    assert!(reason.contains("without a request"), "{reason}");
}

#[test]
fn the_bodies_of_the_decision_and_the_request_pass_unchanged_with_their_content_type() {
    let mut step = sends("a", &["", "", "", ""]);
    let Action::Effects(effects) = &mut step.action else {
        panic!()
    };
    effects[0].payload = Payload::Decision;
    effects[1].payload = Payload::Request;
    effects[2].payload = Payload::Json(json!({ "b": 1, "a": 2 }));
    effects[3].payload = Payload::Empty;
    let run = Model::start(&workflow(vec![step]));
    let sent = |seq: i64| {
        let intent = &run.rows[&seq].intent;
        let How::Http(http) = &intent.sending.how else {
            panic!()
        };
        (intent.body.to_vec(), http.headers.clone())
    };
    let typed = |value: &str| vec![("content-type".to_owned(), plain(value))];
    assert_eq!(
        sent(1),
        (br#"{"order":17}"#.to_vec(), typed("application/json"))
    );
    assert_eq!(sent(2), (b"\xff\x00raw".to_vec(), typed("text/plain")));
    assert_eq!(
        sent(3),
        (br#"{"b":1,"a":2}"#.to_vec(), typed("application/json"))
    );
    assert_eq!(sent(4), (Vec::new(), Vec::new()));
}

#[test]
fn texts_are_rendered_into_the_intent_and_its_lane_is_known() {
    let mut to_url = sends("a", &[""]);
    let mut publish = sends("b", &[""]);
    let mut task = sends("c", &[""]);
    for (step, send) in [
        (
            &mut publish,
            Send::Publish {
                destination: "events".to_owned(),
                subject: template("order.{{ input.name }}"),
            },
        ),
        (
            &mut task,
            Send::Task {
                queue: "packing".to_owned(),
            },
        ),
    ] {
        effects_of(step)[0].send = send;
    }
    let sent = http(&mut effects_of(&mut to_url)[0]);
    sent.to = Target::Url("https://Example.com/x".to_owned());
    sent.path = Some(template("/p/{{ 'a b' | urlencode }}"));
    sent.headers = vec![("x-name".to_owned(), template("{{ input.name }}"))];
    let mut run = Model::start(&workflow(vec![to_url, publish, task]));
    let How::Http(frozen) = &run.rows[&1].intent.sending.how else {
        panic!()
    };
    assert_eq!(frozen.path, Some(plain("/p/a%20b")));
    assert_eq!(frozen.headers[0].1, plain("Ada"));
    assert_eq!(
        run.rows[&1].intent.destination.0,
        "url:https://example.com:443"
    );
    run.delivers();
    run.delivers();
    let publish = &run.rows[&2].intent;
    assert_eq!(publish.destination.0, "events");
    assert!(matches!(&publish.sending.how, How::Publish { subject, .. } if subject == "order.Ada"));
    let task = &run.rows[&3].intent;
    assert_eq!(task.destination.0, "task:packing");
    assert!(matches!(&task.sending.how, How::Task { step, .. } if step == "c"));
}

type Spoil = fn(&mut Effect);

#[test]
fn a_payload_that_can_not_be_rendered_makes_the_run_stuck_and_sends_nothing() {
    let cases: [(&str, Spoil); 6] = [
        ("header `x`: it renders to more than 8192 bytes", |effect| {
            let long = template("{{ 'x' * 8193 }}");
            http(effect).headers = vec![("x".to_owned(), long)];
        }),
        ("path: it renders to more than 8192 bytes", |effect| {
            http(effect).path = Some(template("/{{ 'x' * 8193 }}"));
        }),
        ("payload", |effect| {
            effect.payload = Payload::Template {
                template: "{{ decision.body.order }} {{ input.nam }}".to_owned(),
                content_type: "text/plain".to_owned(),
            };
        }),
        ("path", |effect| {
            http(effect).path = Some(template("{{ input.name }}"));
        }),
        ("header `x`", |effect| {
            http(effect).headers = vec![("x".to_owned(), template("a\r\nb: {{ input.name }}"))];
        }),
        ("url", |effect| {
            http(effect).to = Target::Url("nowhere".to_owned());
        }),
    ];
    for (what, spoil) in cases {
        let mut step = sends("a", &["fine", "x"]);
        spoil(&mut effects_of(&mut step)[1]);
        let run = Model::start(&workflow(vec![step]));
        assert_eq!(run.run.status, RunStatus::Stuck, "{what}");
        assert!(run.rows.is_empty(), "{what}");
        let reason = run.run.reason.unwrap();
        assert!(reason.contains("step `a`, effect 2"), "{reason}");
        assert!(what == "url" || reason.contains(what), "{reason}");
        assert!(
            !reason.contains("Ada") && !reason.contains("17"),
            "{reason}"
        );
    }
}

#[test]
fn an_accepted_request_that_the_service_refuses_ends_the_run() {
    let mut step = sends("call", &["", "after"]);
    let call = http(&mut effects_of(&mut step)[0]);
    call.success = Success::Answered {
        released: vec![429],
    };
    let flow = workflow(vec![step, sends("b", &["x"])]);
    let mut run = Model::of(1, new_run(1, &flow, Some("client-key")));
    run.ends(&End::Delivered(422, "no"));
    assert_eq!(run.run.status, RunStatus::Failed);
    assert_eq!(run.run.reason.as_deref(), Some("the service answered 422"));
    assert_eq!(
        run.statuses(),
        [IntentStatus::Completed, IntentStatus::Discarded]
    );
    let mut run = Model::of(1, new_run(1, &flow, Some("client-key")));
    run.ends(&End::Dead);
    assert_eq!(run.run.status, RunStatus::Stuck);
    run.discard(1);
    run.settle();
    assert_eq!(run.run.status, RunStatus::Failed, "nothing follows");
    assert!(run.run.reason.unwrap().contains("discarded"));
    for fine in [200, 303] {
        let mut run = Model::of(1, new_run(1, &flow, Some("client-key")));
        run.ends(&End::Delivered(fine, ""));
        assert_eq!(run.run.status, RunStatus::Running);
        assert_eq!([run.delivers(), run.delivers()], [2, 3]);
        assert_eq!(run.run.status, RunStatus::Completed);
    }
}

#[test]
fn an_answer_that_is_too_long_for_later_templates_is_cut_out_and_marked() {
    let long: &'static str = Box::leak("x".repeat(70_000).into_boxed_str());
    let text = "{{ steps.a.status }} {{ steps.a.cut }} {{ steps.a.body }}";
    let steps = vec![sends("a", &["1"]), sends("b", &[text])];
    let mut run = Model::start(&workflow(steps));
    run.ends(&End::Delivered(200, long));
    assert_eq!(run.body(2), "200 true null");
}

#[test]
fn an_answer_that_is_nested_too_deep_is_a_text_to_later_templates() {
    let deep = |levels: usize| -> &'static str {
        let text = "[".repeat(levels) + &"]".repeat(levels);
        Box::leak(text.into_boxed_str())
    };
    for levels in [64, 65, 127, 128, 1000] {
        let text = "{{ steps.a.body is string }}";
        let steps = vec![sends("a", &["1"]), sends("b", &[text])];
        let mut run = Model::start(&workflow(steps));
        run.ends(&End::Delivered(200, deep(levels)));
        assert_eq!(run.body(2), (levels > 64).to_string(), "{levels}");
        run.delivers();
        assert_eq!(run.run.status, RunStatus::Completed);
    }
}

#[test]
fn an_answer_whose_body_was_not_kept_says_so() {
    let text = "{{ steps.a.status }} {{ steps.a.cut }} {{ steps.a.body }}";
    let steps = vec![sends("a", &["1"]), sends("b", &[text])];
    let mut run = Model::start(&workflow(steps));
    let seq = run.claim().unwrap();
    run.finish(seq, &End::Delivered(200, ""));
    run.rows
        .get_mut(&seq)
        .unwrap()
        .answer
        .as_mut()
        .unwrap()
        .body = None;
    run.settle();
    assert_eq!(run.body(2), "200 true null");
}

#[test]
fn a_dead_effect_stops_its_run_or_is_gone_without_by_its_step() {
    let dead = |rule, end: &End| {
        let steps = vec![
            on_failure(rule, sends("a", &["1", "2"])),
            sends("b", &["3"]),
        ];
        let mut run = Model::start(&workflow(steps));
        run.ends(end);
        run
    };
    for end in [End::Dead, End::Quarantined] {
        let run = dead(OnFailure::Stop, &end);
        assert_eq!(run.run.status, RunStatus::Stuck);
        let reason = run.run.reason.clone().unwrap();
        assert!(reason.starts_with("step `a`: "), "{reason}");
        assert!(!run.rows[&2].armed);
        let mut run = dead(OnFailure::Continue, &end);
        assert_eq!([run.delivers(), run.delivers()], [2, 3]);
        assert_eq!(run.run.status, RunStatus::Completed);
        assert!(run.kinds().contains(&history::SKIPPED));
    }
    let reason = dead(OnFailure::Stop, &End::Dead).run.reason.unwrap();
    assert_eq!(reason, "step `a`: dead: item_fault: refused by the peer");
}

#[test]
fn what_an_operator_discards_is_gone_without_before_its_turn_and_at_its_turn() {
    let mut run = Model::start(&workflow(vec![sends("a", &["1", "2", "3", "4"])]));
    run.discard(3);
    run.settle();
    assert_eq!(run.run.record_version, 2);
    assert_eq!(run.delivers(), 1);
    run.discard(2);
    run.settle();
    assert_eq!(run.delivers(), 4);
    assert_eq!(run.run.status, RunStatus::Completed);
    insta::assert_snapshot!(run.kinds().join(" "), @"started step_started skipped effect_delivered skipped effect_delivered step_completed completed");
    // The one that a run is stuck at.
    let mut run = Model::start(&workflow(vec![sends("a", &["1", "2"])]));
    run.ends(&End::Dead);
    run.discard(1);
    run.settle();
    assert_eq!(run.run.status, RunStatus::Running);
    assert_eq!(run.delivers(), 2);
    // And one that it went on without: noted, or it would be due for ever.
    let steps = vec![on_failure(OnFailure::Continue, sends("a", &["1"]))];
    let mut run = Model::start(&workflow(steps));
    run.ends(&End::Dead);
    assert_eq!(run.run.status, RunStatus::Completed);
    run.discard(1);
    run.settle();
    assert_eq!(run.kinds().last(), Some(&history::NOTED));
    assert_eq!(run.run.status, RunStatus::Completed);
}

#[test]
fn a_wait_ends_with_its_timer() {
    let steps = vec![waits("pause"), waits("more"), sends("a", &["1"])];
    let mut run = Model::start(&workflow(steps));
    assert_eq!(run.run.status, RunStatus::Waiting);
    run.time_passes();
    assert!(run.timer && !run.timer_over, "the next one is a new one");
    run.time_passes();
    assert!(!run.timer);
    assert_eq!(run.run.status, RunStatus::Running);
    run.delivers();
    insta::assert_snapshot!(run.kinds().join(" "), @"started step_started timer_over step_completed step_started timer_over step_completed step_started effect_delivered step_completed completed");
}

#[test]
fn a_run_that_another_version_wrote_is_shown_as_stuck_and_left_as_it_is() {
    let mut run = Model::start(&workflow(vec![sends("a", &["1"])]));
    let progress = run.run.progress.clone();
    run.run.progress = "{}".into();
    let tick = super::super::tick(&run.load(), None).unwrap().unwrap();
    assert_eq!(
        (tick.status, &tick.progress[..]),
        (RunStatus::Stuck, &b"{}"[..])
    );
    let tick_id = run.draw();
    let commit = run.commit_of(tick, tick_id);
    run.commit(&commit);
    assert!(super::super::tick(&run.load(), None).unwrap().is_none());
    run.run.progress = progress;
    run.input(retry(None)).unwrap();
    run.delivers();
    assert_eq!(run.run.status, RunStatus::Completed);
}

fn effects_of(step: &mut Step) -> &mut Vec<Effect> {
    match &mut step.action {
        Action::Effects(effects) => effects,
        other => panic!("{other:?}"),
    }
}
