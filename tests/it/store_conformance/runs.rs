//! Runs begin with their decision, and ticks move them on: each whole or not at all.

use std::time::Duration;

use futures_util::future::join_all;
use oncegate::domain::intent::IntentStatus;
use oncegate::domain::record::{GiveUp, State};
use oncegate::domain::run::{RunStatus, TickCommitted, Timer};
use oncegate::ids;
use oncegate::store::{Audit, Resolved, Verdict};

use super::fixture::{Fixture, LONG, claim, completion};
use super::run_fixture::{caused_by, intent, on_loaded, run_of, starting, tick, timer, transition};

pub async fn a_decision_and_its_run_are_committed_whole(on: &Fixture) {
    let claim = claim("k");
    on.win(&claim).await;
    let mut wanted = starting(&claim, 2);
    wanted.run.as_mut().unwrap().holds_record = true;
    wanted.run.as_mut().unwrap().first.timer = Timer::In(LONG);
    on.complete(&wanted).await.unwrap();
    let (key, begun) = (run_of(&wanted), wanted.run.as_ref().unwrap());
    let loaded = on.load(&key).await;
    let run = &loaded.run;
    assert_eq!((&run.key, &run.record), (&key, &claim.key));
    assert_eq!((run.record_version, run.last_transition_seq), (1, 2));
    assert_eq!(run.status, RunStatus::Running);
    assert_eq!((&*run.workflow, run.holds_record), ("effects", true));
    assert_eq!(run.definition, begun.definition);
    assert_eq!(run.input, begun.input);
    assert_eq!(run.progress, begun.first.progress);
    assert_eq!((run.reason.as_deref(), loaded.timer_over), (None, false));
    let seen: Vec<_> = loaded.intents.iter().map(|i| (i.seq, i.status)).collect();
    assert_eq!(
        seen,
        [(1, IntentStatus::Pending), (2, IntentStatus::Pending)]
    );
    assert!(loaded.intents.iter().all(|i| i.has_body && !i.changed));
    let history = on.store.transitions(&key, 0, 10).await.unwrap();
    let kinds: Vec<_> = history.iter().map(|t| (t.seq, &*t.kind)).collect();
    assert_eq!(kinds, [(1, "begun"), (2, "moved")]);
    assert!(history.iter().all(|t| t.record_version == 1));
    assert_eq!(
        history[0].detail.as_deref().unwrap(),
        br#"{"told":"\u0000"}"#
    );
    let line = on.store.show_run(&key).await.unwrap().unwrap();
    assert_eq!(line.due_at.unwrap() - line.created_at, LONG);
    assert_eq!((line.ended_at, line.updated_at), (None, line.created_at));
    // Only the first has its turn.
    let first = "update eec_effect_intent set outcome = 'its turn' \
                 where due_at is not null and first_due_at = due_at and seq = 1";
    on.raw.execute(first).await;
    on.raw
        .execute("update eec_effect_intent set outcome = 'not yet' where due_at is null")
        .await;
    let outcomes = on.load(&key).await.intents.into_iter().map(|i| i.outcome);
    let outcomes: Vec<String> = outcomes.flatten().collect();
    assert_eq!(outcomes, ["its turn", "not yet"]);
    assert_eq!(on.count("eec_effect_body").await, 2);
}

pub async fn a_stale_token_starts_no_run(on: &Fixture) {
    let (first, stale) = (claim("k"), claim("k"));
    on.win(&first).await;
    let before = on.every_row().await;
    assert_eq!(on.complete(&starting(&stale, 2)).await, None);
    assert_eq!(on.every_row().await, before);
    // Nor does a second decision with the right one.
    assert!(on.complete(&starting(&first, 1)).await.is_some());
    let before = on.every_row().await;
    assert_eq!(on.complete(&starting(&first, 1)).await, None);
    assert_eq!(on.every_row().await, before);
}

pub async fn a_decision_sent_again_starts_one_run(on: &Fixture) {
    let claim = claim("k");
    on.win(&claim).await;
    let wanted = starting(&claim, 2);
    let committed = on.complete(&wanted).await;
    let before = on.every_row().await;
    assert_eq!(on.complete(&wanted).await, committed);
    let both = [wanted.clone(), wanted];
    let again = on.store.complete(&both).await.unwrap();
    assert_eq!(again, [committed, committed]);
    assert_eq!(on.every_row().await, before);
}

pub async fn some_decisions_of_a_batch_start_runs(on: &Fixture) {
    let claims: Vec<_> = (0..6).map(|n| claim(&format!("k{n}"))).collect();
    on.store.reserve(&claims).await.unwrap();
    let mut batch: Vec<_> = claims[..4].iter().map(|c| starting(c, 2)).collect();
    batch[1] = completion(&claims[1]);
    batch.push(starting(&claim("k4"), 2));
    batch.push(batch[2].clone());
    batch.push(completion(&claims[5]));
    let committed = on.store.complete(&batch).await.unwrap();
    let taken: Vec<bool> = committed.iter().map(Option::is_some).collect();
    assert_eq!(taken, [true, true, true, true, false, true, true]);
    assert_eq!(committed[2], committed[5]);
    let keys: Vec<_> = batch.iter().map(run_of).collect();
    let loaded = on.store.load_runs(&keys).await.unwrap();
    let runs: Vec<bool> = loaded.iter().map(Option::is_some).collect();
    assert_eq!(runs, [true, false, true, true, false, true, false]);
    for (run, key) in loaded.iter().zip(&keys) {
        if let Some(run) = run {
            assert_eq!((&run.run.key, run.intents.len()), (key, 2));
        }
    }
    assert_eq!(on.count("eec_effect_intent").await, 6);
}

pub async fn a_first_tick_may_end_a_run_or_stop_it(on: &Fixture) {
    for (name, status) in [("s", RunStatus::Stuck), ("c", RunStatus::Completed)] {
        let claim = claim(name);
        on.win(&claim).await;
        let mut wanted = starting(&claim, 0);
        let first = &mut wanted.run.as_mut().unwrap().first;
        first.status = status;
        first.timer = Timer::In(Duration::ZERO);
        first.reason = Some("a payload that can't be rendered: \0".into());
        assert!(on.complete(&wanted).await.is_some());
        let line = on.store.show_run(&run_of(&wanted)).await.unwrap().unwrap();
        assert_eq!(line.run.status, status);
        assert!(line.run.reason.unwrap().starts_with("a payload"));
        assert_eq!(line.ended_at.is_some(), status.is_final());
        // What is final waits for nothing.
        assert_eq!(line.due_at.is_none(), status.is_final());
    }
}

pub async fn a_late_decision_starts_its_run(on: &Fixture) {
    let unknown = on.unknown("u").await;
    let failed = claim("f");
    on.win(&failed).await;
    assert!(on.release(&failed, GiveUp::NotSent).await.is_some());
    for claim in [unknown, failed] {
        let late = starting(&claim, 1);
        assert!(on.complete(&late).await.is_some());
        assert_eq!(on.load(&run_of(&late)).await.intents.len(), 1);
    }
}

pub async fn an_operators_word_starts_a_run(on: &Fixture) {
    let audit = Audit {
        operator: "jo".into(),
        reason: "looked".into(),
    };
    let claim = on.unknown("k").await;
    let told = |completion| Verdict::Happened(Box::new(completion));
    let resolve = async |verdict: &Verdict| {
        let resolved = on.store.resolve(&claim.key, verdict, LONG, &audit).await;
        resolved.unwrap()
    };
    let before = on.every_row().await;
    let mut stale = starting(&claim, 1);
    stale.token = ids::attempt_token();
    assert_eq!(resolve(&told(stale)).await, Resolved::WrongState);
    assert_eq!(on.every_row().await, before);
    let wanted = starting(&claim, 2);
    let verdict = told(wanted.clone());
    assert_eq!(resolve(&verdict).await, Resolved::Done);
    assert_eq!(on.load(&run_of(&wanted)).await.intents.len(), 2);
    assert_eq!(on.count("eec_operator_audit").await, 1);
    let record = on.record(&claim.key).await;
    assert!(matches!(record.state, State::Completed(id, _) if id == wanted.decision_id));
    let before = on.every_row().await;
    assert_eq!(resolve(&verdict).await, Resolved::Done);
    assert_eq!(on.every_row().await, before);
}

pub async fn a_tick_moves_a_run_on(on: &Fixture) {
    let key = on.begun("k", 1).await;
    let mut next = timer(LONG);
    next.reason = Some("waits".into());
    next.progress = vec![0, b'x', 0].into();
    next.transitions.push(transition("waits"));
    next.intents = vec![intent(key.id, 2, true)];
    on.tick(&key, next).await;
    let line = on.store.show_run(&key).await.unwrap().unwrap();
    assert_eq!(line.run.status, RunStatus::Waiting);
    let numbers = (line.run.record_version, line.run.last_transition_seq);
    assert_eq!(numbers, (2, 4));
    assert_eq!(&line.run.progress[..], b"\0x\0");
    assert_eq!(line.run.reason.as_deref(), Some("waits"));
    assert_eq!(line.due_at.unwrap() - line.updated_at, LONG);
    assert_eq!(on.load(&key).await.intents.len(), 2);
    // A timer is kept, and then cleared.
    on.tick(&key, tick(RunStatus::Waiting)).await;
    let kept = on.store.show_run(&key).await.unwrap().unwrap();
    assert_eq!((kept.due_at, kept.run.reason), (line.due_at, None));
    let mut last = tick(RunStatus::Completed);
    last.timer = Timer::Clear;
    on.tick(&key, last).await;
    let ended = on.store.show_run(&key).await.unwrap().unwrap();
    assert_eq!(
        (ended.due_at, ended.ended_at),
        (None, Some(ended.updated_at))
    );
    // What still is to be noted later does not move its end.
    on.tick(&key, tick(RunStatus::Completed)).await;
    let noted = on.store.show_run(&key).await.unwrap().unwrap();
    assert_eq!(noted.ended_at, ended.ended_at);
}

pub async fn a_tick_that_comes_too_late_writes_nothing(on: &Fixture) {
    let key = on.begun("k", 2).await;
    let loaded = on.load(&key).await;
    on.tick(&key, tick(RunStatus::Running)).await;
    let before = on.every_row().await;
    let mut late = tick(RunStatus::Failed);
    late.intents = vec![intent(key.id, 3, true)];
    late.changes = super::run_fixture::changing(
        1,
        Some(IntentStatus::Pending),
        oncegate::domain::intent::Order::Withdraw,
    )
    .changes;
    let late = on_loaded(&loaded, late);
    assert_eq!(on.commit(&late).await, TickCommitted::Conflict);
    let mut absent = late;
    absent.key.id = ids::decision_id().into();
    assert_eq!(on.commit(&absent).await, TickCommitted::Conflict);
    assert_eq!(on.every_row().await, before);
}

pub async fn a_tick_sent_again_is_recognised(on: &Fixture) {
    let key = on.begun("k", 1).await;
    let mut next = tick(RunStatus::Running);
    next.intents = vec![intent(key.id, 2, false)];
    let commit = on_loaded(&on.load(&key).await, next);
    let twice = [commit.clone(), commit.clone()];
    let done = on.store.commit_ticks(&twice).await.unwrap();
    assert_eq!(done, [TickCommitted::Committed; 2]);
    let before = on.every_row().await;
    assert_eq!(on.commit(&commit).await, TickCommitted::Committed);
    assert_eq!(on.every_row().await, before);
    // Also when the run went on since, and also from a new commit of its last version.
    on.tick(&key, tick(RunStatus::Running)).await;
    let before = on.every_row().await;
    assert_eq!(on.commit(&commit).await, TickCommitted::Committed);
    let mut other = commit;
    other.tick_id = ids::stamp();
    assert_eq!(on.commit(&other).await, TickCommitted::Conflict);
    assert_eq!(on.every_row().await, before);
}

pub async fn an_input_is_applied_once(on: &Fixture) {
    let (key, other) = (on.begun("k", 1).await, on.begun("other", 1).await);
    let stamp = ids::stamp();
    assert!(!on.store.is_applied(&key, stamp).await.unwrap());
    on.tick(&key, caused_by(stamp)).await;
    assert!(on.store.is_applied(&key, stamp).await.unwrap());
    assert!(!on.store.is_applied(&other, stamp).await.unwrap());
    let transitions = on.store.transitions(&key, 2, 9).await.unwrap();
    assert_eq!(transitions[0].stamp, Some(stamp));
    // Told again to a gateway that has seen the newest version, beside another run's tick.
    let again = on_loaded(&on.load(&key).await, caused_by(stamp));
    let beside = on_loaded(&on.load(&other).await, caused_by(stamp));
    let rows = on.count("eec_run_transition").await;
    let done = on.store.commit_ticks(&[again, beside]).await.unwrap();
    assert_eq!(done, [TickCommitted::Conflict, TickCommitted::Committed]);
    assert_eq!(on.count("eec_run_transition").await, rows + 1);
    assert_eq!(on.load(&key).await.run.record_version, 2);
}

pub async fn one_late_tick_leaves_the_others_of_a_batch_alone(on: &Fixture) {
    let mut commits = Vec::new();
    for n in 0..5 {
        let key = on.begun(&format!("k{n}"), 1).await;
        let mut next = tick(RunStatus::Running);
        next.intents = vec![intent(key.id, 2, false)];
        commits.push(on_loaded(&on.load(&key).await, next));
    }
    on.tick(&commits[2].key, tick(RunStatus::Running)).await;
    commits.reverse();
    let done = on.store.commit_ticks(&commits).await.unwrap();
    for (n, done) in done.iter().enumerate() {
        let expected = if n == 2 {
            TickCommitted::Conflict
        } else {
            TickCommitted::Committed
        };
        assert_eq!(*done, expected, "{n}");
        let intents = on.load(&commits[n].key).await.intents.len();
        assert_eq!(intents, if n == 2 { 1 } else { 2 });
    }
}

pub async fn ticks_of_one_run_in_a_batch_count_as_if_one_by_one(on: &Fixture) {
    let key = on.begun("k", 1).await;
    let first = on_loaded(&on.load(&key).await, tick(RunStatus::Running));
    let mut second = first.clone();
    (second.seen_version, second.seen_seq) = (2, 3);
    second.tick_id = ids::stamp();
    let mut late = first.clone();
    late.tick_id = ids::stamp();
    let done = on.store.commit_ticks(&[first, second, late]).await.unwrap();
    let [committed, conflict] = [TickCommitted::Committed, TickCommitted::Conflict];
    assert_eq!(done, [committed, committed, conflict]);
    assert_eq!(on.load(&key).await.run.record_version, 3);
}

pub async fn history_has_no_gap_whoever_writes_it(on: &Fixture) {
    const WRITERS: usize = 8;
    const TICKS: usize = 5;
    let key = on.begun("k", 1).await;
    let writer = async || {
        for _ in 0..TICKS {
            loop {
                let mut next = tick(RunStatus::Running);
                next.transitions.push(transition("more"));
                let commit = on_loaded(&on.load(&key).await, next);
                if on.commit(&commit).await == TickCommitted::Committed {
                    break;
                }
            }
        }
    };
    join_all((0..WRITERS).map(|_| writer())).await;
    let ticks = i64::try_from(WRITERS * TICKS).unwrap();
    let run = on.load(&key).await.run;
    assert_eq!(run.record_version, 1 + ticks);
    assert_eq!(run.last_transition_seq, 2 + 2 * ticks);
    let history = on.store.transitions(&key, 0, 1000).await.unwrap();
    let seqs: Vec<i64> = history.iter().map(|t| t.seq).collect();
    assert_eq!(seqs, (1..=run.last_transition_seq).collect::<Vec<_>>());
}

pub async fn a_body_of_five_megabytes_is_kept(on: &Fixture) {
    let claim = claim("k");
    on.win(&claim).await;
    let mut wanted = starting(&claim, 1);
    let body: Vec<u8> = (0..5 << 20).map(|n: u32| n.to_le_bytes()[1]).collect();
    let run = wanted.run.as_mut().unwrap();
    run.first.intents[0].body = body.into();
    run.input = b"\0\0".to_vec().into();
    assert!(on.complete(&wanted).await.is_some());
    let key = run_of(&wanted);
    assert_eq!(&on.load(&key).await.run.input[..], b"\0\0");
    let kept = "update eec_effect_intent set outcome = 'whole' where exists \
        (select 1 from eec_effect_body b where b.intent_id = eec_effect_intent.intent_id \
         and b.part = 'message' and length(b.body) = 5242880)";
    on.raw.execute(kept).await;
    let outcome = on.load(&key).await.intents.remove(0).outcome;
    assert_eq!(outcome.as_deref(), Some("whole"));
}
