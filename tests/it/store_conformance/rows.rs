//! Rows that another hand wrote, and names that look like something else.

use oncegate::domain::policy::OnUnknown;
use oncegate::domain::record::{GiveUp, Lease, State};
use oncegate::domain::scope::{PoolId, RecordKey, TenantScope};
use oncegate::store::StoreError;

use super::fixture::{Fixture, claim, claim_of, completion, key};

pub async fn a_row_inserted_by_hand_is_read(on: &Fixture) {
    on.raw
        .execute(
            "insert into eec_routing_idempotency (tenant_scope, pool_id, idempotency_key, status) \
             values ('acme', 'payments', 'p', 'pending'), \
                    ('acme', 'payments', 'f', 'failed_before_commit'), \
                    ('acme', 'payments', 'u', 'outcome_unknown')",
        )
        .await;
    for (name, state) in [
        ("p", State::Pending(Lease::Unbounded)),
        ("f", State::FailedBeforeCommit { maybe_sent: false }),
        ("u", State::OutcomeUnknown),
    ] {
        let record = on.record(&key(name)).await;
        assert_eq!(record.state, state);
        assert_eq!(record.generation, 1);
        assert_eq!(record.fingerprint, None);
        assert_eq!(record.terms.on_unknown, OnUnknown::Hold);
        assert_eq!(record.created_at, record.reserved_at);
    }
    // The failed one is reclaimed by the token that it shows, and lives on as any other.
    let seen = on.record(&key("f")).await;
    let next = claim("f");
    let claimed = on.store.reclaim(&next, seen.token).await.unwrap().unwrap();
    assert_eq!(claimed.generation_id, seen.generation_id);
    assert!(on.release(&next, GiveUp::Hold).await.is_some());
    assert!(on.complete(&completion(&next)).await.is_some());
}

pub async fn a_completed_row_without_a_decision_is_an_error_that_names_it(on: &Fixture) {
    on.raw
        .execute(
            "insert into eec_routing_idempotency (tenant_scope, pool_id, idempotency_key, status) \
             values ('acme', 'payments', 'k', 'completed')",
        )
        .await;
    let error = on.store.look_up(&[key("k")]).await.unwrap_err();
    let StoreError::Inconsistent { table, column, .. } = error else {
        panic!("{error:?}");
    };
    assert_eq!((table, column), ("eec_routing_idempotency", "decision_id"));
    assert!(on.store.reserve(&[claim("k")]).await.is_err());
    // It is nobody's to claim and nobody's to delete.
    let before = on.everything().await;
    let nil = oncegate::domain::record::AttemptToken(uuid::Uuid::nil());
    let reclaimed = on.store.reclaim(&claim("k"), nil).await;
    assert!(!matches!(reclaimed, Ok(Some(_))), "{reclaimed:?}");
    assert_eq!(on.store.purge(10).await.unwrap().records, 0);
    assert_eq!(on.everything().await, before);
}

pub async fn names_with_every_allowed_character_stay_apart(on: &Fixture) {
    let printable: String = (b' '..=b'~').map(char::from).collect();
    let tenant = |name: &str| TenantScope::named(name.as_bytes()).unwrap();
    let names = [
        (tenant("a"), "p", printable.clone()),
        (tenant("a"), "p", "k".repeat(255)),
        (tenant("a"), "p", "K".repeat(255)),
        (
            tenant("a"),
            "p",
            "'; drop table eec_routing_idempotency; --".to_owned(),
        ),
        (tenant("a"), "p", "%".to_owned()),
        (tenant("a"), "p", " k".to_owned()),
        (tenant("a"), "p", "k ".to_owned()),
        (tenant("a"), "p", "k".to_owned()),
        (tenant("A"), "p", "k".to_owned()),
        (tenant("a/p"), "p", "k".to_owned()),
        (tenant("a"), "p.k", "k".to_owned()),
        (tenant("a").with_principal("1-00ff"), "p", "k".to_owned()),
        (tenant(&"t".repeat(200)), "p", "k".to_owned()),
    ];
    let claims = names.map(|(tenant, pool, text)| {
        claim_of(RecordKey {
            tenant,
            pool: PoolId::new(pool).unwrap(),
            ..key(&text)
        })
    });
    for claim in &claims {
        on.win(claim).await;
    }
    let keys: Vec<RecordKey> = claims.iter().map(|claim| claim.key.clone()).collect();
    let found = on.store.look_up(&keys).await.unwrap();
    for (claim, record) in claims.iter().zip(found) {
        let record = record.unwrap();
        assert_eq!(record.key, claim.key);
        assert_eq!(record.token, claim.token);
    }
}
