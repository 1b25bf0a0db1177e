//! Claims of callers of the API: the same request id is always the same claim.

use std::time::Duration;

use futures_util::future::join_all;
use oncegate::domain::record::{Claim, GiveUp, Remembered, Reserved, Terms};
use oncegate::domain::scope::{RecordKey, TenantScope};
use oncegate::ids;
use uuid::Uuid;

use super::fixture::{Fixture, claim, claim_of, completion, key, terms};

pub async fn a_claim_with_a_request_id_is_remembered(on: &Fixture) {
    let (asked, plain) = (asked("k"), claim("plain"));
    let reserved = on.store.reserve(&[asked.clone(), plain.clone()]).await;
    assert!(matches!(
        reserved.unwrap()[..],
        [Reserved::Won(_), Reserved::Won(_)]
    ));
    let remembered = remembered(on, &asked).await.unwrap();
    assert_eq!(remembered.key, asked.key);
    assert_eq!(remembered.token, asked.token);
    assert_eq!(remembered.claimed.generation, 1);
    assert_eq!(remembered.claimed.generation_id, asked.generation_id);
    assert_eq!(remembered.lease, asked.terms.lease);
    assert_eq!(on.count_where("eec_routing_claim", "true").await, 1);
    let other = TenantScope::named(b"other").unwrap();
    let id = asked.request_id.unwrap();
    assert_eq!(on.store.remembered(&other, id).await.unwrap(), None);
    let never = ids::audit_id();
    assert_eq!(on.store.remembered(&other, never).await.unwrap(), None);
}

pub async fn a_claim_with_a_request_id_sent_again_writes_nothing(on: &Fixture) {
    let asked = asked("k");
    on.win(&asked).await;
    let before = on.all_rows().await;
    on.win(&asked).await;
    let again = on.store.reserve(&[asked.clone(), asked.clone()]).await;
    assert!(matches!(
        again.unwrap()[..],
        [Reserved::Won(_), Reserved::Won(_)]
    ));
    assert_eq!(on.all_rows().await, before);
}

pub async fn of_claims_with_one_request_id_one_is_remembered(on: &Fixture) {
    let id = ids::audit_id();
    let claims: Vec<Claim> = (0..16).map(|_| with_id("k", id)).collect();
    let reserved = join_all(claims.iter().map(|claim| on.reserve(claim))).await;
    let won = reserved.iter().zip(&claims);
    let mut won = won.filter(|(reserved, _)| matches!(reserved, Reserved::Won(_)));
    let (_, winner) = won.next().unwrap();
    assert!(won.next().is_none());
    assert_eq!(remembered(on, winner).await.unwrap().token, winner.token);
    assert_eq!(on.count_where("eec_routing_claim", "true").await, 1);
}

pub async fn a_claim_that_lost_is_not_remembered(on: &Fixture) {
    on.win(&claim("k")).await;
    let asked = asked("k");
    assert!(matches!(on.reserve(&asked).await, Reserved::Lost(_)));
    assert_eq!(remembered(on, &asked).await, None);
}

pub async fn a_reclaim_with_a_request_id_is_remembered(on: &Fixture) {
    let first = asked("k");
    on.win(&first).await;
    assert!(on.release(&first, GiveUp::NotSent).await.is_some());
    let second = asked("k");
    let claimed = on.store.reclaim(&second, first.token).await.unwrap();
    let remembered_second = remembered(on, &second).await.unwrap();
    assert_eq!(Some(remembered_second.claimed), claimed);
    assert_eq!(remembered_second.token, second.token);
    assert_eq!(remembered_second.claimed.generation_id, first.generation_id);
    let before = on.all_rows().await;
    let again = on.store.reclaim(&second, first.token).await.unwrap();
    assert_eq!(again, claimed);
    // One that is refused is not.
    let third = asked("k");
    assert_eq!(on.store.reclaim(&third, first.token).await.unwrap(), None);
    assert_eq!(on.all_rows().await, before);
}

pub async fn a_claim_is_remembered_when_another_has_its_record(on: &Fixture) {
    let first = asked("k");
    on.win(&first).await;
    assert!(on.release(&first, GiveUp::NotSent).await.is_some());
    let second = claim("k");
    on.store
        .reclaim(&second, first.token)
        .await
        .unwrap()
        .unwrap();
    assert_eq!(remembered(on, &first).await.unwrap().token, first.token);
}

pub async fn a_claim_is_remembered_when_its_record_is_purged(on: &Fixture) {
    let mut asked = asked("k");
    asked.terms = Terms {
        valid_for: Duration::ZERO,
        ..terms()
    };
    on.win(&asked).await;
    on.complete(&completion(&asked)).await.unwrap();
    assert_eq!(on.store.purge(10).await.unwrap().records, 1);
    assert!(!on.is_there(&asked.key).await);
    assert_eq!(remembered(on, &asked).await.unwrap().token, asked.token);
    // For a day at least, and as long as the lease and the decision's validity.
    let day = Duration::from_hours(24) + asked.terms.lease;
    let kept = |after: Duration| {
        let after_ms = i64::try_from(after.as_millis()).unwrap();
        format!("keep_until > {}", on.instant(after_ms))
    };
    let lag = Duration::from_mins(2);
    assert_eq!(
        on.count_where("eec_routing_claim", &kept(day.saturating_sub(lag)))
            .await,
        1
    );
    assert_eq!(
        on.count_where("eec_routing_claim", &kept(day + lag)).await,
        0
    );
    let mut long = asked_of(key("long"));
    long.terms.valid_for = Duration::from_hours(48);
    on.win(&long).await;
    let two = Duration::from_hours(48) + long.terms.lease;
    assert_eq!(
        on.count_where("eec_routing_claim", &kept(two.saturating_sub(lag)))
            .await,
        1
    );
    assert_eq!(
        on.count_where("eec_routing_claim", &kept(two + lag)).await,
        0
    );
}

pub async fn a_claim_past_its_time_is_not_remembered(on: &Fixture) {
    let asked = asked("k");
    on.win(&asked).await;
    on.raw
        .execute("update eec_routing_claim set keep_until = created_at")
        .await;
    assert_eq!(remembered(on, &asked).await, None);
}

pub async fn a_request_id_that_won_two_records_stays_with_the_first(on: &Fixture) {
    let id = ids::audit_id();
    let (first, second) = (with_id("first", id), with_id("second", id));
    on.win(&first).await;
    on.win(&second).await;
    assert_eq!(remembered(on, &first).await.unwrap().token, first.token);
    assert!(on.release(&second, GiveUp::NotSent).await.is_some());
    let third = with_id("second", id);
    let claimed = on.store.reclaim(&third, second.token).await.unwrap();
    assert!(claimed.is_none(), "it never wins a second claim");
    assert_eq!(remembered(on, &first).await.unwrap().token, first.token);
    let batch = ids::audit_id();
    let batch = [with_id("a", batch), with_id("b", batch)];
    let reserved = on.store.reserve(&batch).await.unwrap();
    assert!(matches!(reserved[..], [Reserved::Won(_), Reserved::Won(_)]));
    assert_eq!(on.count_where("eec_routing_claim", "true").await, 2);
}

fn asked(name: &str) -> Claim {
    asked_of(key(name))
}

fn asked_of(key: RecordKey) -> Claim {
    Claim {
        request_id: Some(ids::audit_id()),
        ..claim_of(key)
    }
}

fn with_id(name: &str, id: Uuid) -> Claim {
    Claim {
        request_id: Some(id),
        ..claim(name)
    }
}

async fn remembered(on: &Fixture, claim: &Claim) -> Option<Remembered> {
    let id = claim.request_id.unwrap();
    on.store.remembered(&claim.key.tenant, id).await.unwrap()
}
