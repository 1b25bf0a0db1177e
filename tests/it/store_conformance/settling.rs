//! Completions, releases and heartbeats: taken from the row's present owner, and from nobody else.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};
use oncegate::domain::message::Recorded;
use oncegate::domain::record::{
    Claim, Completion, DecisionId, GiveUp, Lease, State, StoredDecision, Validity,
};
use oncegate::ids;

use super::fixture::{
    Fixture, LONG, answer, claim, claim_of, completion, heartbeat, key, redrive, release, terms,
};

const GIVE_UPS: [GiveUp; 4] = [
    GiveUp::NotSent,
    GiveUp::Answered,
    GiveUp::Redrive,
    GiveUp::Hold,
];

pub async fn a_decision_is_told_again_byte_for_byte(on: &Fixture) {
    let mut headers = HeaderMap::new();
    for (name, value) in [
        ("content-type", &b"application/octet-stream"[..]),
        ("link", b"<a>, <b>"),
        ("x-raw", b"caf\xe9 \xff"),
        ("link", b"<c>"),
        ("access-control-allow-origin", b"https://a.example"),
    ] {
        let name = HeaderName::from_static(name);
        headers.append(name, HeaderValue::from_bytes(value).unwrap());
    }
    let body: Vec<u8> = (0..=255).chain([0, 0]).collect();
    let origin = HeaderValue::from_static("https://a.example");
    let body = Some(Bytes::from(body));
    let recorded = Recorded::new(599, &headers, body, Some(&origin), false);
    assert!(recorded.cors.is_some());

    let claim = claim("k");
    on.win(&claim).await;
    let wanted = Completion {
        recorded: recorded.clone(),
        decided_by: "operator:someone".into(),
        ..completion(&claim)
    };
    let committed = on.complete(&wanted).await.unwrap();
    assert_eq!(committed.decision_id, wanted.decision_id);
    assert_eq!(committed.valid_until - committed.created_at, LONG);
    let stored = decision(on, wanted.decision_id).await.unwrap();
    assert_eq!(stored.committed, committed);
    assert_eq!(stored.decided_by, "operator:someone");
    assert_eq!(stored.recorded, recorded);
    assert!(stored.valid_for.unwrap() <= LONG);

    let state = on.record(&claim.key).await.state;
    let State::Completed(decision_id, Validity::Valid(left)) = state else {
        panic!("{state:?}");
    };
    assert_eq!(decision_id, wanted.decision_id);
    assert!(left <= LONG);

    // Another tenant's decision is nobody's business.
    let tenant = claim.key.tenant.with_principal("1-00ff");
    let other = on
        .store
        .decision(&tenant, wanted.decision_id)
        .await
        .unwrap();
    assert!(other.is_none());
    assert!(decision(on, ids::decision_id()).await.is_none());
}

pub async fn a_kept_empty_body_is_not_a_body_that_was_not_kept(on: &Fixture) {
    for (name, body) in [("empty", Some(Bytes::new())), ("none", None)] {
        let claim = claim(name);
        on.win(&claim).await;
        let mut wanted = completion(&claim);
        wanted.recorded.body.clone_from(&body);
        assert!(on.complete(&wanted).await.is_some());
        let stored = decision(on, wanted.decision_id).await.unwrap();
        assert_eq!(stored.recorded.body, body);
    }
}

pub async fn a_body_of_a_mebibyte_is_kept(on: &Fixture) {
    let body: Vec<u8> = (0..1_048_576_u32).map(|at| at.to_le_bytes()[1]).collect();
    let claim = claim("k");
    on.win(&claim).await;
    let mut wanted = completion(&claim);
    wanted.recorded = answer(&body);
    assert!(on.complete(&wanted).await.is_some());
    let stored = decision(on, wanted.decision_id).await.unwrap();
    assert!(stored.recorded == wanted.recorded);
}

pub async fn a_completion_sent_again_gets_the_same_answer(on: &Fixture) {
    let claim = claim("k");
    on.win(&claim).await;
    let wanted = completion(&claim);
    let committed = on.complete(&wanted).await;
    assert!(committed.is_some());
    let before = on.everything().await;
    assert_eq!(on.complete(&wanted).await, committed);
    assert_eq!(on.everything().await, before);
}

pub async fn a_second_decision_is_stale(on: &Fixture) {
    let claim = claim("k");
    on.win(&claim).await;
    assert!(on.complete(&completion(&claim)).await.is_some());
    let before = on.everything().await;
    assert_eq!(on.complete(&completion(&claim)).await, None);
    assert_eq!(on.everything().await, before);
}

pub async fn a_late_completion_is_taken_from_every_open_state(on: &Fixture) {
    let over = on.abandoned("over", terms()).await;
    let unknown = on.unknown("unknown").await;
    let swept = on.abandoned("swept", redrive()).await;
    assert!(on.store.sweep_one(&swept.key, swept.token).await.unwrap());
    let released = claim("released");
    on.win(&released).await;
    assert!(on.release(&released, GiveUp::NotSent).await.is_some());
    for claim in [over, unknown, swept, released] {
        let wanted = completion(&claim);
        let committed = on.complete(&wanted).await.unwrap();
        // Valid from its commit, whatever a release had set before.
        assert_eq!(committed.valid_until - committed.created_at, LONG);
        let state = on.record(&claim.key).await.state;
        assert!(
            matches!(state, State::Completed(id, Validity::Valid(_)) if id == wanted.decision_id)
        );
        assert!(decision(on, wanted.decision_id).await.is_some());
    }
}

pub async fn a_stale_token_writes_nothing_anywhere(on: &Fixture) {
    let first = claim("k");
    on.win(&first).await;
    assert!(on.release(&first, GiveUp::NotSent).await.is_some());
    let second = claim("k");
    assert!(
        on.store
            .reclaim(&second, first.token)
            .await
            .unwrap()
            .is_some()
    );
    // Once against the new owner at work, then against each state that it can leave behind.
    for give_up in [None, Some(GiveUp::Hold), Some(GiveUp::NotSent)] {
        if let Some(give_up) = give_up {
            assert!(on.release(&second, give_up).await.is_some());
        }
        everything_is_refused(on, &first).await;
    }
    assert!(on.complete(&completion(&second)).await.is_some());
    everything_is_refused(on, &first).await;
    everything_is_refused(on, &claim("absent")).await;
}

async fn everything_is_refused(on: &Fixture, stale: &Claim) {
    let before = on.everything().await;
    assert_eq!(on.complete(&completion(stale)).await, None);
    assert!(!on.heartbeat(stale, LONG).await);
    for give_up in GIVE_UPS {
        assert_eq!(on.release(stale, give_up).await, None);
    }
    assert!(!on.store.sweep_one(&stale.key, stale.token).await.unwrap());
    assert_eq!(on.everything().await, before);
}

pub async fn duplicates_in_a_batch_count_as_if_one_by_one(on: &Fixture) {
    let [a, b, c] = ["a", "b", "c"].map(claim);
    for claim in [&a, &b, &c] {
        on.win(claim).await;
    }
    let first = completion(&a);
    let batch = [
        first.clone(),
        completion(&a),
        completion(&claim("a")),
        first.clone(),
        completion(&b),
    ];
    let committed = on.store.complete(&batch).await.unwrap();
    assert!(committed[0].is_some());
    assert_eq!(committed[1], None);
    assert_eq!(committed[2], None);
    assert_eq!(committed[3], committed[0]);
    assert!(committed[4].is_some());
    assert_eq!(on.raw.rows("eec_routing_decision").await.len(), 2);

    let batch = [
        release(&c, GiveUp::Hold),
        release(&c, GiveUp::Hold),
        release(&c, GiveUp::Redrive),
        release(&c, GiveUp::NotSent),
        release(&claim("c"), GiveUp::NotSent),
    ];
    let released = on.store.release(&batch).await.unwrap();
    let taken: Vec<bool> = released.iter().map(Option::is_some).collect();
    assert_eq!(taken, [true, true, false, true, false]);
    let state = on.record(&c.key).await.state;
    assert_eq!(state, State::FailedBeforeCommit { maybe_sent: false });

    let d = claim("d");
    on.win(&d).await;
    let beats = [
        heartbeat(&d, Duration::from_secs(1)),
        heartbeat(&claim("d"), Duration::ZERO),
        heartbeat(&d, LONG),
        heartbeat(&c, LONG),
    ];
    assert_eq!(
        on.store.heartbeat(&beats).await.unwrap(),
        [true, false, true, false]
    );
    let state = on.record(&d.key).await.state;
    assert!(
        matches!(state, State::Pending(Lease::Held(left)) if left > Duration::from_mins(1)),
        "{state:?}"
    );
}

pub async fn a_release_leads_where_the_owner_says(on: &Fixture) {
    for (give_up, state) in [
        (
            GiveUp::NotSent,
            State::FailedBeforeCommit { maybe_sent: false },
        ),
        (
            GiveUp::Answered,
            State::FailedBeforeCommit { maybe_sent: false },
        ),
        (
            GiveUp::Redrive,
            State::FailedBeforeCommit { maybe_sent: true },
        ),
        (GiveUp::Hold, State::OutcomeUnknown),
    ] {
        let claim = claim(&format!("{give_up:?}"));
        on.win(&claim).await;
        assert!(on.release(&claim, give_up).await.is_some());
        let record = on.record(&claim.key).await;
        assert_eq!(record.state, state);
        assert_eq!(record.token, claim.token);
    }
}

pub async fn a_release_sent_again_gets_the_same_answer(on: &Fixture) {
    for give_up in GIVE_UPS {
        let claim = claim(&format!("{give_up:?}"));
        on.win(&claim).await;
        let released = on.release(&claim, give_up).await;
        assert!(released.is_some());
        let before = on.everything().await;
        assert_eq!(on.release(&claim, give_up).await, released);
        assert_eq!(on.everything().await, before);
    }
}

pub async fn only_who_is_certain_releases_an_unknown_outcome(on: &Fixture) {
    for certain in [GiveUp::NotSent, GiveUp::Answered] {
        let claim = on.unknown(&format!("{certain:?}")).await;
        let before = on.everything().await;
        assert_eq!(on.release(&claim, GiveUp::Redrive).await, None);
        assert_eq!(on.everything().await, before);
        assert!(on.release(&claim, certain).await.is_some());
        let state = on.record(&claim.key).await.state;
        assert_eq!(state, State::FailedBeforeCommit { maybe_sent: false });
        // Back to unknown it does not go.
        assert_eq!(on.release(&claim, GiveUp::Hold).await, None);
    }
}

pub async fn what_may_have_been_sent_is_never_forgotten_within_a_generation(on: &Fixture) {
    let first = on.abandoned("k", redrive()).await;
    assert!(on.store.sweep_one(&first.key, first.token).await.unwrap());
    // The owner comes late and says that it sent nothing: taken, and yet nothing is forgotten.
    assert!(on.release(&first, GiveUp::NotSent).await.is_some());
    let mut seen = first.token;
    for give_up in [GiveUp::NotSent, GiveUp::Answered, GiveUp::NotSent] {
        let next = claim("k");
        assert!(on.store.reclaim(&next, seen).await.unwrap().is_some());
        assert!(on.release(&next, give_up).await.is_some());
        let state = on.record(&next.key).await.state;
        assert_eq!(state, State::FailedBeforeCommit { maybe_sent: true });
        seen = next.token;
    }
    let last = claim("k");
    assert!(on.store.reclaim(&last, seen).await.unwrap().is_some());
    assert!(on.release(&last, GiveUp::Hold).await.is_some());
    assert!(on.release(&last, GiveUp::NotSent).await.is_some());
    let state = on.record(&last.key).await.state;
    assert_eq!(state, State::FailedBeforeCommit { maybe_sent: true });
}

pub async fn a_heartbeat_extends_a_lease_that_nobody_swept(on: &Fixture) {
    let claim = on.abandoned("k", terms()).await;
    assert_eq!(
        on.record(&claim.key).await.state,
        State::Pending(Lease::Over)
    );
    let before = on.record(&claim.key).await;
    assert!(on.heartbeat(&claim, LONG).await);
    let record = on.record(&claim.key).await;
    assert!(matches!(record.state, State::Pending(Lease::Held(_))));
    // The claim itself is as old as before.
    assert_eq!(record.reserved_at, before.reserved_at);
    assert!(!on.store.sweep_one(&claim.key, claim.token).await.unwrap());
}

pub async fn a_heartbeat_is_refused_once_the_record_is_not_pending(on: &Fixture) {
    for give_up in GIVE_UPS {
        let claim = claim(&format!("{give_up:?}"));
        on.win(&claim).await;
        assert!(on.release(&claim, give_up).await.is_some());
        assert!(!on.heartbeat(&claim, LONG).await);
    }
    let claim = claim_of(key("completed"));
    on.win(&claim).await;
    assert!(on.complete(&completion(&claim)).await.is_some());
    assert!(!on.heartbeat(&claim, LONG).await);
}

async fn decision(on: &Fixture, id: DecisionId) -> Option<StoredDecision> {
    on.store.decision(&key("k").tenant, id).await.unwrap()
}
