//! Claims: one winner, whoever asks how often.

use std::time::Duration;

use futures_util::future::join_all;
use oncegate::domain::fingerprint::Fingerprint;
use oncegate::domain::policy::OnUnknown;
use oncegate::domain::record::{
    AttemptToken, Claim, Claimed, GenerationId, GiveUp, Lease, Reserved, State, Terms, Validity,
};
use oncegate::domain::scope::{PoolId, TenantScope};
use oncegate::ids;

use super::fixture::{Fixture, LONG, claim, claim_of, completion, key, redrive, terms};

const CONCURRENT: usize = 32;

pub async fn one_of_many_concurrent_claims_wins(on: &Fixture) {
    let claims: Vec<Claim> = (0..CONCURRENT).map(|_| claim("k")).collect();
    let reserved = join_all(claims.iter().map(|claim| on.reserve(claim))).await;
    let record = on.record(&key("k")).await;
    let mut won = 0;
    for (claim, reserved) in claims.iter().zip(reserved) {
        match reserved {
            Reserved::Won(claimed) => {
                won += 1;
                assert_eq!(record.token, claim.token);
                assert_eq!(record.generation_id, claim.generation_id);
                assert_eq!(claimed, first_life(claim));
            }
            Reserved::Lost(seen) => assert_eq!(seen.token, record.token),
            Reserved::Vanished => panic!("nobody deletes here"),
        }
    }
    assert_eq!(won, 1);
}

pub async fn one_of_many_claims_in_a_batch_wins(on: &Fixture) {
    let claims = [claim("k"), claim("other"), claim("k"), claim("k")];
    let reserved = on.store.reserve(&claims).await.unwrap();
    assert!(matches!(reserved[0], Reserved::Won(claimed) if claimed == first_life(&claims[0])));
    assert!(matches!(reserved[1], Reserved::Won(claimed) if claimed == first_life(&claims[1])));
    for lost in &reserved[2..] {
        let Reserved::Lost(record) = lost else {
            panic!("two owners: {lost:?}");
        };
        assert_eq!(record.token, claims[0].token);
    }
    let again = on
        .store
        .reserve(&[claims[0].clone(), claims[0].clone()])
        .await;
    let again = again.unwrap();
    assert!(
        again.iter().all(|one| matches!(one, Reserved::Won(_))),
        "{again:?}"
    );
}

pub async fn a_claim_sent_again_after_a_lost_reply_is_won_again(on: &Fixture) {
    let first = claim("k");
    on.win(&first).await;
    let before = on.everything().await;
    assert_eq!(on.win(&first).await, first_life(&first));
    assert_eq!(on.everything().await, before);

    // Its generation is the row's, not the one that it would have opened.
    assert!(on.release(&first, GiveUp::NotSent).await.is_some());
    let second = claim("k");
    let claimed = on.store.reclaim(&second, first.token).await.unwrap();
    assert_eq!(claimed, Some(first_life(&first)));
    assert_eq!(on.win(&second).await, first_life(&first));
}

pub async fn a_claim_sent_again_after_its_lease_was_swept_is_not_won(on: &Fixture) {
    let claim = on.abandoned("k", terms()).await;
    assert!(on.store.sweep_one(&claim.key, claim.token).await.unwrap());
    let Reserved::Lost(record) = on.reserve(&claim).await else {
        panic!("a claim was won on a record that is not pending");
    };
    assert_eq!(record.token, claim.token);
    assert_eq!(record.state, State::OutcomeUnknown);
}

pub async fn a_lost_claim_is_shown_the_record(on: &Fixture) {
    let mut first = claim("k");
    first.terms = Terms {
        lease: Duration::from_secs(1000),
        valid_for: Duration::from_secs(2000),
        tombstone_for: Duration::from_mins(50),
        on_unknown: OnUnknown::Redrive,
    };
    on.win(&first).await;
    let Reserved::Lost(record) = on.reserve(&claim("k")).await else {
        panic!("two owners");
    };
    assert_eq!(record.key, first.key);
    assert_eq!(record.token, first.token);
    assert_eq!(record.generation, 1);
    assert_eq!(record.generation_id, first.generation_id);
    assert_eq!(record.fingerprint, first.fingerprint);
    assert_eq!(record.terms, first.terms);
    assert_eq!(record.created_at, record.reserved_at);
    assert!(record.reserved_ago < Duration::from_secs(100));
    let State::Pending(Lease::Held(left)) = record.state else {
        panic!("{:?}", record.state);
    };
    assert!(
        left <= first.terms.lease && left > Duration::from_mins(15),
        "{left:?}"
    );
}

pub async fn answers_stand_in_the_order_of_what_was_asked(on: &Fixture) {
    let names = ["m", "a", "z", "b", "y"];
    let claims = names.map(claim);
    on.win(&claims[1]).await;
    on.win(&claims[3]).await;
    let rivals = names.map(claim);
    let reserved = on.store.reserve(&rivals).await.unwrap();
    for (index, reserved) in reserved.iter().enumerate() {
        match reserved {
            Reserved::Won(claimed) => {
                assert!(index % 2 == 0);
                assert_eq!(*claimed, first_life(&rivals[index]));
            }
            Reserved::Lost(record) => {
                assert!(index % 2 == 1);
                assert_eq!(record.key, claims[index].key);
            }
            Reserved::Vanished => panic!("nobody deletes here"),
        }
    }
    let keys = ["z", "absent", "a", "z"].map(key);
    let found = on.store.look_up(&keys).await.unwrap();
    assert_eq!(found.len(), 4);
    for (key, found) in keys.iter().zip(found) {
        assert_eq!(
            found.map(|record| record.key),
            (key.key.as_str() != "absent").then(|| key.clone())
        );
    }
}

pub async fn tenant_pool_and_key_each_make_another_record(on: &Fixture) {
    let first = key("k");
    let mut tenant = first.clone();
    tenant.tenant = TenantScope::named(b"other").unwrap();
    let mut principal = first.clone();
    principal.tenant = first.tenant.with_principal("1-00ff");
    let mut pool = first.clone();
    pool.pool = PoolId::new("other").unwrap();
    let keys = [first, tenant, principal, pool, key("K")];
    let claims = keys.clone().map(claim_of);
    let reserved = on.store.reserve(&claims).await.unwrap();
    assert!(
        reserved.iter().all(|one| matches!(one, Reserved::Won(_))),
        "{reserved:?}"
    );
    let found = on.store.look_up(&keys).await.unwrap();
    for (claim, record) in claims.iter().zip(found) {
        assert_eq!(record.unwrap().token, claim.token);
    }
}

pub async fn one_of_many_concurrent_reclaims_wins(on: &Fixture) {
    let first = claim("k");
    on.win(&first).await;
    assert!(on.release(&first, GiveUp::NotSent).await.is_some());
    let rivals: Vec<Claim> = (0..CONCURRENT).map(|_| claim("k")).collect();
    let seen = first.token;
    let reclaims = rivals.iter().map(|rival| on.store.reclaim(rival, seen));
    let reclaimed = join_all(reclaims).await;
    let winners: Vec<AttemptToken> = rivals
        .iter()
        .zip(reclaimed)
        .filter_map(|(rival, claimed)| claimed.unwrap().map(|_| rival.token))
        .collect();
    assert_eq!(winners, [on.record(&first.key).await.token]);
}

pub async fn a_reclaim_sent_again_after_a_lost_reply_is_won_again(on: &Fixture) {
    let mut first = claim("k");
    first.terms.valid_for = Duration::ZERO;
    on.win(&first).await;
    assert!(on.complete(&completion(&first)).await.is_some());
    let second = claim("k");
    let claimed = on.store.reclaim(&second, first.token).await.unwrap();
    assert_eq!(
        claimed,
        Some(Claimed {
            generation: 2,
            generation_id: second.generation_id
        })
    );
    let before = on.everything().await;
    assert_eq!(
        on.store.reclaim(&second, first.token).await.unwrap(),
        claimed
    );
    assert_eq!(on.everything().await, before);
}

pub async fn only_a_failed_or_expired_record_is_reclaimed(on: &Fixture) {
    let pending = claim("pending");
    on.win(&pending).await;
    let over = on.abandoned("over", terms()).await;
    let unknown = on.unknown("unknown").await;
    let valid = claim("valid");
    on.win(&valid).await;
    assert!(on.complete(&completion(&valid)).await.is_some());
    let mut tombstone = claim("tombstone");
    tombstone.terms.valid_for = Duration::ZERO;
    tombstone.terms.tombstone_for = LONG;
    on.win(&tombstone).await;
    assert!(on.complete(&completion(&tombstone)).await.is_some());

    let before = on.everything().await;
    for seen in [pending, over, unknown, valid, tombstone] {
        let rival = claim_of(seen.key.clone());
        assert_eq!(
            on.store.reclaim(&rival, seen.token).await.unwrap(),
            None,
            "{:?}",
            seen.key
        );
    }
    let absent = claim("absent");
    assert_eq!(on.store.reclaim(&absent, absent.token).await.unwrap(), None);
    assert_eq!(on.everything().await, before);
}

pub async fn a_reclaim_of_another_token_than_seen_is_refused(on: &Fixture) {
    let first = claim("k");
    on.win(&first).await;
    assert!(on.release(&first, GiveUp::NotSent).await.is_some());
    let before = on.everything().await;
    let reclaimed = on.store.reclaim(&claim("k"), ids::attempt_token()).await;
    assert_eq!(reclaimed.unwrap(), None);
    assert_eq!(on.everything().await, before);
}

pub async fn a_failed_record_keeps_its_generation_and_what_may_have_been_sent(on: &Fixture) {
    let mut first = claim("k");
    first.terms = redrive();
    on.win(&first).await;
    assert!(on.release(&first, GiveUp::Redrive).await.is_some());
    let mut seen = first.token;
    for _ in 0..3 {
        let next = claim("k");
        let claimed = on.store.reclaim(&next, seen).await.unwrap();
        assert_eq!(claimed, Some(first_life(&first)));
        let record = on.record(&first.key).await;
        assert!(matches!(record.state, State::Pending(Lease::Held(_))));
        assert_eq!(
            (record.generation, record.generation_id),
            (1, first.generation_id)
        );
        assert!(on.release(&next, GiveUp::NotSent).await.is_some());
        let state = on.record(&first.key).await.state;
        assert_eq!(state, State::FailedBeforeCommit { maybe_sent: true });
        seen = next.token;
    }
}

pub async fn an_expired_record_begins_a_new_generation(on: &Fixture) {
    let mut seen = claim("k");
    seen.terms.valid_for = Duration::ZERO;
    seen.terms.on_unknown = OnUnknown::Redrive;
    on.win(&seen).await;
    assert!(on.release(&seen, GiveUp::Redrive).await.is_some());
    assert!(on.complete(&completion(&seen)).await.is_some());
    for generation in 2..5 {
        let State::Completed(_, Validity::Expired) = on.record(&seen.key).await.state else {
            panic!("not expired");
        };
        let mut next = claim("k");
        next.terms.valid_for = Duration::ZERO;
        let claimed = on.store.reclaim(&next, seen.token).await.unwrap();
        let generation_id = next.generation_id;
        assert_eq!(
            claimed,
            Some(Claimed {
                generation,
                generation_id
            })
        );
        assert!(on.release(&next, GiveUp::NotSent).await.is_some());
        let state = on.record(&next.key).await.state;
        assert_eq!(state, State::FailedBeforeCommit { maybe_sent: false });
        assert!(on.complete(&completion(&next)).await.is_some());
        seen = next;
    }
}

pub async fn a_reclaim_stamps_its_own_terms_and_fingerprint(on: &Fixture) {
    let first = claim("k");
    on.win(&first).await;
    assert!(on.release(&first, GiveUp::Answered).await.is_some());
    let before = on.record(&first.key).await;
    let mut present = before.reserved_at;
    while present == before.reserved_at {
        present = on.store.ping().await.unwrap();
    }
    let mut second = claim("k");
    second.fingerprint = Some(Fingerprint {
        version: 2,
        hash: [9; 32],
    });
    second.terms = Terms {
        lease: Duration::from_secs(1000),
        valid_for: Duration::from_secs(2000),
        tombstone_for: Duration::from_mins(50),
        on_unknown: OnUnknown::Redrive,
    };
    assert!(
        on.store
            .reclaim(&second, first.token)
            .await
            .unwrap()
            .is_some()
    );
    let record = on.record(&first.key).await;
    assert_eq!(record.token, second.token);
    assert_eq!(record.fingerprint, second.fingerprint);
    assert_eq!(record.terms, second.terms);
    assert_eq!(record.created_at, before.created_at);
    assert!(record.reserved_at >= present);
    let State::Pending(Lease::Held(left)) = record.state else {
        panic!("{:?}", record.state);
    };
    assert!(
        left <= second.terms.lease && left > Duration::from_mins(15),
        "{left:?}"
    );

    assert!(on.release(&second, GiveUp::NotSent).await.is_some());
    let mut third = claim("k");
    third.fingerprint = None;
    assert!(
        on.store
            .reclaim(&third, second.token)
            .await
            .unwrap()
            .is_some()
    );
    assert_eq!(on.record(&first.key).await.fingerprint, None);
}

/// What the claim that opens a key gets.
fn first_life(claim: &Claim) -> Claimed {
    let generation_id: GenerationId = claim.generation_id;
    Claimed {
        generation: 1,
        generation_id,
    }
}
