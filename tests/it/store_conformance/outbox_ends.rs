//! The ends of tries: which are taken, and what they leave behind.

use oncegate::domain::intent::Finished::{Stale, Taken};
use oncegate::domain::intent::{End, Finish, Finished, IntentClaimed, IntentStatus};

use super::fixture::{Fixture, LONG, answer};
use super::intents::{again, dead, delivered, fenced, given_back, intent, told, wish};

const RESENT: usize = 1000;

pub async fn a_delivered_intent_is_completed_and_its_answer_kept(on: &Fixture) {
    let key = on.sow(&intent()).await;
    let wish = on.claimed(&key).await;
    assert_eq!(on.end(&wish, delivered()).await, Finished::Taken);
    let line = on.line(&key).await;
    assert_eq!(line.status, IntentStatus::Completed);
    assert_eq!(line.outcome.as_deref(), Some("answered"));
    assert_eq!(line.answer_status, Some(503));
    assert_eq!(line.diagnostic.as_deref(), Some("as it was"));
    assert_eq!((line.tries, line.claimed), (1, false));
    assert!(line.ended_at.is_some() && line.due_at.is_none());
    assert!(on.is_changed(&key).await);
    assert!(on.attempt_is(wish.stamp, "delivered").await);
    let kept = "part = 'answer' and status = 201 and length(body) = 8";
    assert_eq!(on.count_where("eec_effect_body", kept).await, 1);
}

pub async fn an_intent_to_be_tried_again_is_due_after_its_pause(on: &Fixture) {
    let key = on.sow(&intent()).await;
    let first = on.claimed(&key).await;
    let end = End::Again {
        after: LONG,
        item_fault: true,
    };
    assert_eq!(on.end(&first, end).await, Finished::Taken);
    let line = on.line(&key).await;
    assert_eq!(line.status, IntentStatus::Pending);
    assert_eq!((line.tries, line.faults, line.claimed), (1, 1, false));
    assert!(line.due_at.is_some() && line.ended_at.is_none());
    assert!(line.age.is_some());
    assert!(!on.is_changed(&key).await);
    assert!(on.attempt_is(first.stamp, "failed").await);
    assert!(matches!(
        on.claim_intent(&wish(&key)).await,
        IntentClaimed::Lost
    ));
}

pub async fn a_dead_intent_keeps_its_bytes_and_tells_its_run(on: &Fixture) {
    let key = on.sow(&intent()).await;
    let wish = on.claimed(&key).await;
    assert_eq!(on.end(&wish, dead()).await, Finished::Taken);
    let line = on.line(&key).await;
    assert_eq!(line.status, IntentStatus::Dead);
    assert_eq!(line.faults, 1);
    assert!(line.body_bytes.is_some() && line.ended_at.is_some());
    assert!(on.is_changed(&key).await);
    assert!(on.attempt_is(wish.stamp, "failed").await);
}

pub async fn what_is_given_back_cost_no_try(on: &Fixture) {
    let key = on.sow(&intent()).await;
    let first = on.claimed(&key).await;
    assert_eq!(on.end(&first, again()).await, Finished::Taken);
    let before = on.line(&key).await;
    for _ in 0..3 {
        let back = on.claimed(&key).await;
        let mut end = told(&back, given_back());
        end.note.outcome = "shutdown".into();
        assert_eq!(on.store.finish(&[end]).await.unwrap(), [Finished::Taken]);
        assert!(on.attempt_is(back.stamp, "released").await);
    }
    let line = on.line(&key).await;
    assert_eq!((line.tries, line.faults), (1, 0));
    assert_eq!(line.outcome, before.outcome);
    assert_eq!(line.age.is_some(), before.age.is_some());
    assert!(!on.is_changed(&key).await);
    assert_eq!(on.win_intent(&wish(&key)).await.tries, 2);
}

pub async fn a_withdrawn_intent_ends_as_discarded_unless_it_was_delivered(on: &Fixture) {
    let ends = [
        (again(), IntentStatus::Discarded),
        (given_back(), IntentStatus::Discarded),
        (dead(), IntentStatus::Discarded),
        (delivered(), IntentStatus::Completed),
        (fenced(), IntentStatus::Completed),
    ];
    for (end, status) in ends {
        let key = on.sow(&intent()).await;
        let wish = on.claimed(&key).await;
        on.raw
            .execute("update eec_effect_intent set withdrawn = true")
            .await;
        assert_eq!(on.end(&wish, end).await, Finished::Taken);
        let line = on.line(&key).await;
        assert_eq!(line.status, status);
        assert!(line.ended_at.is_some() && line.due_at.is_none());
        assert!(on.is_changed(&key).await);
    }
}

pub async fn a_stale_end_writes_nothing_anywhere(on: &Fixture) {
    let key = on.sow(&intent()).await;
    let first = on.lost(&key).await;
    let second = on.claimed(&key).await;
    let stranger = wish(&key);
    let before = on.all_rows().await;
    for end in [again(), dead(), given_back(), fenced()] {
        for stale in [&first, &stranger] {
            assert_eq!(on.end(stale, end.clone()).await, Finished::Stale);
        }
    }
    // Who never had it can't even say that it was delivered.
    assert_eq!(on.end(&stranger, delivered()).await, Finished::Stale);
    assert_eq!(on.all_rows().await, before);
    let nobody = wish(&intent().key());
    assert_eq!(on.end(&nobody, delivered()).await, Finished::Stale);
    assert_eq!(on.all_rows().await, before);
    assert_eq!(on.end(&second, fenced()).await, Finished::Taken);
}

pub async fn a_success_of_a_stale_claim_is_taken_once(on: &Fixture) {
    let key = on.sow(&intent()).await;
    let first = on.lost(&key).await;
    let second = on.claimed(&key).await;
    assert_eq!(on.end(&first, delivered()).await, Finished::Taken);
    assert_eq!(on.status(&key).await, IntentStatus::Completed);
    assert!(on.attempt_is(first.stamp, "delivered").await);
    assert!(on.attempt_is(second.stamp, "lost").await);
    let before = on.all_rows().await;
    assert_eq!(on.end(&first, delivered()).await, Finished::Taken);
    for end in [delivered(), again(), dead(), given_back()] {
        assert_eq!(on.end(&second, end).await, Finished::Stale);
    }
    assert_eq!(on.all_rows().await, before);
    assert_eq!(
        on.count_where("eec_effect_body", "part = 'answer'").await,
        1
    );
}

pub async fn a_success_told_while_the_intent_waits_for_its_next_try_is_taken(on: &Fixture) {
    let key = on.sow(&intent()).await;
    let first = on.claimed(&key).await;
    assert_eq!(on.end(&first, again()).await, Finished::Taken);
    let second = on.claimed(&key).await;
    assert_eq!(on.end(&second, given_back()).await, Finished::Taken);
    assert_eq!(on.end(&first, fenced()).await, Finished::Stale);
    assert_eq!(on.end(&first, delivered()).await, Finished::Taken);
    assert_eq!(on.status(&key).await, IntentStatus::Completed);
    assert!(on.attempt_is(second.stamp, "released").await);
}

pub async fn a_late_success_and_a_new_claim_at_once_are_both_told_the_truth(on: &Fixture) {
    for _ in 0..20 {
        let key = on.sow(&intent()).await;
        let first = on.lost(&key).await;
        let next = wish(&key);
        let (finished, claimed) = tokio::join!(on.end(&first, delivered()), on.claim_intent(&next));
        assert_eq!(finished, Finished::Taken);
        assert_eq!(on.status(&key).await, IntentStatus::Completed);
        assert!(on.attempt_is(first.stamp, "delivered").await);
        if matches!(claimed, IntentClaimed::Won(_)) {
            assert!(on.attempt_is(next.stamp, "lost").await);
        } else {
            assert!(!on.attempt_is(next.stamp, "lost").await);
        }
    }
    assert_eq!(
        on.count_where("eec_run_attempt", "status = 'open'").await,
        0
    );
}

pub async fn results_that_are_told_again_write_nothing(on: &Fixture) {
    let ends = [delivered(), fenced(), again(), dead(), given_back()];
    let mut results: Vec<Finish> = Vec::new();
    for end in &ends {
        let key = on.sow(&intent()).await;
        let claimed = on.claimed(&key).await;
        results.push(told(&claimed, end.clone()));
    }
    let first = on.store.finish(&results).await.unwrap();
    assert_eq!(first, vec![Finished::Taken; ends.len()]);
    let before = on.all_rows().await;
    // One by one, and all at once.
    let all: Vec<Finish> = results.iter().cycle().take(RESENT).cloned().collect();
    for end in all.iter().take(RESENT / 10) {
        let finished = on.store.finish(std::slice::from_ref(end)).await;
        assert_eq!(finished.unwrap(), [Finished::Taken]);
    }
    let finished = on.store.finish(&all).await.unwrap();
    assert_eq!(finished, vec![Finished::Taken; RESENT]);
    assert_eq!(on.all_rows().await, before);
    // Another end by the same claim is another matter.
    for end in [&results[2], &results[4]] {
        let mut other = end.clone();
        other.note.outcome = "other".into();
        assert_eq!(on.store.finish(&[other]).await.unwrap(), [Finished::Stale]);
    }
    let other = |told: &Finish, body| Finish {
        end: End::Delivered {
            fenced: true,
            answer: Some(answer(body)),
        },
        ..told.clone()
    };
    let key = on.sow(&intent()).await;
    let claimed = told(&on.claimed(&key).await, fenced());
    let (one, two) = (other(&claimed, b"one"), other(&claimed, b"two"));
    let batch = [one.clone(), two.clone(), one.clone()];
    let finished = on.store.finish(&batch).await.unwrap();
    assert_eq!(finished, [Taken, Stale, Taken]);
    assert_eq!(on.store.finish(&[two]).await.unwrap(), [Stale]);
    assert_eq!(on.store.finish(&[one]).await.unwrap(), [Taken]);
}

pub async fn ends_in_a_batch_count_as_if_one_by_one(on: &Fixture) {
    let key = on.sow(&intent()).await;
    let other = on.sow(&intent()).await;
    let first = on.lost(&key).await;
    let second = on.claimed(&key).await;
    let third = on.claimed(&other).await;
    let mut kept = told(&first, delivered());
    kept.end = End::Delivered {
        fenced: false,
        answer: Some(answer(b"first")),
    };
    let batch = [
        told(&first, again()),
        told(&second, again()),
        told(&third, dead()),
        told(&second, again()),
        kept.clone(),
        told(&second, delivered()),
        kept,
    ];
    let finished = on.store.finish(&batch).await.unwrap();
    assert_eq!(finished, [Stale, Taken, Taken, Taken, Taken, Stale, Taken]);
    assert_eq!(on.status(&key).await, IntentStatus::Completed);
    assert_eq!(on.status(&other).await, IntentStatus::Dead);
    assert_eq!(
        on.count_where("eec_effect_body", "part = 'answer'").await,
        1
    );
    assert!(on.store.finish(&[]).await.unwrap().is_empty());
}

pub async fn no_character_of_a_note_can_fail_the_end_of_a_try(on: &Fixture) {
    let key = on.sow(&intent()).await;
    let claimed = on.claimed(&key).await;
    let mut end = told(&claimed, again());
    end.note.outcome = "not\u{0}\u{1}ok é".into();
    end.note.diagnostic = Some(format!("a\u{0}b\u{7f}\u{ffff}é{}", "x".repeat(10_000)));
    let finished = on.store.finish(&[end.clone(), end]).await.unwrap();
    assert_eq!(finished, [Finished::Taken; 2]);
    let line = on.line(&key).await;
    assert_eq!(line.outcome.as_deref(), Some("notok"));
    let diagnostic = line.diagnostic.unwrap();
    assert!(diagnostic.starts_with("a b \u{ffff}éxxx"), "{diagnostic}");
    assert!(diagnostic.len() <= 2048);
}
