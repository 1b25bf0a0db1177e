//! Time: judged by the store alone. Leases that end, validities that end, and who clears up.

use std::time::Duration;

use ::time::OffsetDateTime;
use futures_util::future::join_all;
use oncegate::domain::record::{Claim, GiveUp, Lease, State, Terms, Validity};
use oncegate::store::{Purged, Swept};
use tokio::time::Instant;

use super::fixture::{Fixture, LONG, claim, completion, key, redrive, terms};

/// How long a case may wait for something to end.
const PATIENCE: Duration = Duration::from_secs(20);

pub async fn a_lease_is_held_and_then_over(on: &Fixture) {
    let mut claim = claim("k");
    claim.terms.lease = Duration::from_millis(300);
    on.win(&claim).await;
    let end = on.record(&claim.key).await.reserved_at + claim.terms.lease;
    let deadline = Instant::now() + PATIENCE;
    loop {
        let (before, state, after) = between_two_looks_at_the_clock(on, &claim).await;
        match state {
            State::Pending(Lease::Held(left)) => {
                assert!(before < end && left <= claim.terms.lease);
                let swept = on.store.sweep_one(&claim.key, claim.token).await.unwrap();
                assert!(!swept || on.store.ping().await.unwrap() >= end);
                if swept {
                    return;
                }
            }
            State::Pending(Lease::Over) => {
                assert!(after >= end);
                assert!(on.store.sweep_one(&claim.key, claim.token).await.unwrap());
                return;
            }
            other => panic!("{other:?}"),
        }
        pause(deadline).await;
    }
}

pub async fn a_validity_ends_and_a_tombstone_follows(on: &Fixture) {
    let mut claim = claim("k");
    claim.terms.valid_for = Duration::from_millis(300);
    claim.terms.tombstone_for = Duration::from_millis(300);
    on.win(&claim).await;
    let wanted = completion(&claim);
    let committed = on.complete(&wanted).await.unwrap();
    let end = committed.valid_until;
    assert_eq!(end - committed.created_at, claim.terms.valid_for);
    let deadline = Instant::now() + PATIENCE;
    loop {
        let (before, state, after) = between_two_looks_at_the_clock(on, &claim).await;
        let State::Completed(id, validity) = state else {
            panic!("{state:?}");
        };
        assert_eq!(id, wanted.decision_id);
        match validity {
            Validity::Valid(left) => assert!(before < end && left <= claim.terms.valid_for),
            Validity::Tombstone => {
                assert!(after >= end && before < end + claim.terms.tombstone_for);
                let stored = on.store.decision(&claim.key.tenant, id).await.unwrap();
                assert_eq!(stored.unwrap().valid_for, None);
            }
            Validity::Expired => {
                assert!(after >= end + claim.terms.tombstone_for);
                return;
            }
        }
        pause(deadline).await;
    }
}

pub async fn the_sweep_follows_the_terms_on_the_row(on: &Fixture) {
    let hold = on.abandoned("hold", terms()).await;
    let short = Terms {
        valid_for: Duration::ZERO,
        ..redrive()
    };
    let kept = on.abandoned("redrive", redrive()).await;
    on.abandoned("redrive-short", short).await;
    let swept = on.store.sweep(10).await.unwrap();
    assert_eq!(
        swept,
        Swept {
            failed_before_commit: 2,
            outcome_unknown: 1
        }
    );
    assert_eq!(on.record(&hold.key).await.state, State::OutcomeUnknown);
    let state = on.record(&kept.key).await.state;
    assert_eq!(state, State::FailedBeforeCommit { maybe_sent: true });
    assert_eq!(on.store.sweep(10).await.unwrap(), Swept::default());
    // What was swept is kept for its validity, from the sweep on.
    let purged = on.store.purge(10).await.unwrap();
    assert_eq!(
        purged,
        Purged {
            records: 1,
            decisions: 0
        }
    );
    assert!(on.is_there(&kept.key).await);
}

pub async fn the_sweep_leaves_a_held_lease_alone(on: &Fixture) {
    let held = claim("held");
    on.win(&held).await;
    let over = on.abandoned("over", terms()).await;
    let before = on.raw.rows("eec_routing_idempotency").await;
    assert!(!on.store.sweep_one(&held.key, held.token).await.unwrap());
    assert!(!on.store.sweep_one(&over.key, held.token).await.unwrap());
    assert_eq!(on.raw.rows("eec_routing_idempotency").await, before);
    assert_eq!(on.store.sweep(10).await.unwrap().outcome_unknown, 1);
    assert!(matches!(
        on.record(&held.key).await.state,
        State::Pending(Lease::Held(_))
    ));
}

pub async fn the_sweep_moves_no_more_than_it_is_told(on: &Fixture) {
    for number in 0..5 {
        on.abandoned(&format!("k{number}"), terms()).await;
    }
    for moved in [2, 2, 1, 0] {
        assert_eq!(on.store.sweep(2).await.unwrap().outcome_unknown, moved);
    }
}

pub async fn one_of_many_sweeps_moves_a_record(on: &Fixture) {
    let claim = on.abandoned("k", terms()).await;
    let sweeps = (0..16).map(|_| on.store.sweep_one(&claim.key, claim.token));
    let moved = join_all(sweeps)
        .await
        .into_iter()
        .filter(|moved| *moved.as_ref().unwrap());
    assert_eq!(moved.count(), 1);
}

pub async fn a_row_without_a_lease_is_never_swept(on: &Fixture) {
    on.raw
        .execute(
            "insert into eec_routing_idempotency (tenant_scope, pool_id, idempotency_key, status) \
             values ('acme', 'payments', 'k', 'pending')",
        )
        .await;
    let record = on.record(&key("k")).await;
    assert_eq!(record.state, State::Pending(Lease::Unbounded));
    assert!(!on.store.sweep_one(&record.key, record.token).await.unwrap());
    assert_eq!(on.store.sweep(10).await.unwrap(), Swept::default());
    assert_eq!(on.store.purge(10).await.unwrap(), Purged::default());
    assert_eq!(
        on.record(&key("k")).await.state,
        State::Pending(Lease::Unbounded)
    );
}

pub async fn retention_deletes_what_is_past_its_time_in_pages(on: &Fixture) {
    for number in 0..5 {
        settled(on, &format!("over{number}"), Duration::ZERO).await;
        settled(on, &format!("kept{number}"), LONG).await;
    }
    let mut failed = claim("failed");
    failed.terms.valid_for = Duration::ZERO;
    on.win(&failed).await;
    assert!(on.release(&failed, GiveUp::NotSent).await.is_some());
    let mut sum = Purged::default();
    loop {
        let page = on.store.purge(3).await.unwrap();
        assert!(page.records <= 3 && page.decisions <= 3, "{page:?}");
        if page == Purged::default() {
            break;
        }
        sum.records += page.records;
        sum.decisions += page.decisions;
    }
    assert_eq!(
        sum,
        Purged {
            records: 6,
            decisions: 5
        }
    );
    assert_eq!(on.raw.rows("eec_routing_idempotency").await.len(), 5);
    assert_eq!(on.raw.rows("eec_routing_decision").await.len(), 5);
    for number in 0..5 {
        assert!(on.is_there(&key(&format!("kept{number}"))).await);
        assert!(!on.is_there(&key(&format!("over{number}"))).await);
    }
}

pub async fn retention_never_touches_what_is_open(on: &Fixture) {
    let short = Terms {
        valid_for: Duration::ZERO,
        ..terms()
    };
    let pending = on.abandoned("pending", short).await;
    let unknown = on.abandoned("unknown", short).await;
    assert!(
        on.store
            .sweep_one(&unknown.key, unknown.token)
            .await
            .unwrap()
    );
    // Neither what was open from the start nor what a new owner has opened again.
    let mut first = claim("reopened");
    first.terms.valid_for = Duration::ZERO;
    on.win(&first).await;
    assert!(on.complete(&completion(&first)).await.is_some());
    let mut reopened = claim("reopened");
    reopened.terms.valid_for = Duration::ZERO;
    assert!(
        on.store
            .reclaim(&reopened, first.token)
            .await
            .unwrap()
            .is_some()
    );
    let purged = on.store.purge(10).await.unwrap();
    assert_eq!(
        purged,
        Purged {
            records: 0,
            decisions: 1
        }
    );
    assert_eq!(
        on.record(&pending.key).await.state,
        State::Pending(Lease::Over)
    );
    assert_eq!(on.record(&unknown.key).await.state, State::OutcomeUnknown);
    assert!(matches!(
        on.record(&reopened.key).await.state,
        State::Pending(_)
    ));
    assert!(on.release(&reopened, GiveUp::Hold).await.is_some());
    // Not even when a row says that its time is over.
    on.raw
        .execute("update eec_routing_idempotency set valid_until = created_at")
        .await;
    assert_eq!(on.store.purge(10).await.unwrap(), Purged::default());
    assert_eq!(on.record(&reopened.key).await.state, State::OutcomeUnknown);
}

pub async fn retention_keeps_a_record_through_its_tombstone(on: &Fixture) {
    let mut claim = claim("k");
    claim.terms.valid_for = Duration::ZERO;
    claim.terms.tombstone_for = LONG;
    on.win(&claim).await;
    let wanted = completion(&claim);
    assert!(on.complete(&wanted).await.is_some());
    let purged = on.store.purge(10).await.unwrap();
    assert_eq!(
        purged,
        Purged {
            records: 0,
            decisions: 1
        }
    );
    let state = on.record(&claim.key).await.state;
    assert_eq!(
        state,
        State::Completed(wanted.decision_id, Validity::Tombstone)
    );
    // A completion sent again does not bring the body back.
    let before = on.everything().await;
    let _ = on.complete(&wanted).await;
    assert_eq!(on.everything().await, before);
}

pub async fn a_purged_key_gets_a_generation_that_never_was(on: &Fixture) {
    let first = settled(on, "k", Duration::ZERO).await;
    assert_eq!(
        on.store.purge(10).await.unwrap(),
        Purged {
            records: 1,
            decisions: 1
        }
    );
    let second = claim("k");
    let claimed = on.win(&second).await;
    assert_eq!(claimed.generation, 1);
    assert_ne!(claimed.generation_id, first.generation_id);
    assert_eq!(on.complete(&completion(&first)).await, None);
}

pub async fn the_census_counts_what_is_open(on: &Fixture) {
    let census = on.store.census().await.unwrap();
    assert_eq!((census.unknown, census.oldest_pending), (0, None));
    settled(on, "completed", LONG).await;
    on.unknown("u1").await;
    on.unknown("u2").await;
    let census = on.store.census().await.unwrap();
    assert_eq!((census.unknown, census.oldest_pending), (2, None));
    let pending = claim("pending");
    on.win(&pending).await;
    let census = on.store.census().await.unwrap();
    assert_eq!(census.unknown, 2);
    let age = census.oldest_pending.unwrap();
    assert!(age < PATIENCE && age <= on.record(&pending.key).await.reserved_ago);
}

/// A claim that won and was completed, valid for that long.
async fn settled(on: &Fixture, name: &str, valid_for: Duration) -> Claim {
    let mut claim = claim(name);
    claim.terms.valid_for = valid_for;
    on.win(&claim).await;
    assert!(on.complete(&completion(&claim)).await.is_some());
    claim
}

/// The record's state, and the store's present before and after it was read.
async fn between_two_looks_at_the_clock(
    on: &Fixture,
    claim: &Claim,
) -> (OffsetDateTime, State, OffsetDateTime) {
    let before = on.store.ping().await.unwrap();
    let state = on.record(&claim.key).await.state;
    (before, state, on.store.ping().await.unwrap())
}

async fn pause(deadline: Instant) {
    assert!(Instant::now() < deadline, "it does not end");
    tokio::time::sleep(Duration::from_millis(5)).await;
}
