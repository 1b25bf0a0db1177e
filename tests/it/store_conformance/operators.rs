//! What operators find and do, and that the audit log knows of it.

use std::time::Duration;

use oncegate::domain::record::{
    Completion, DecisionId, GiveUp, Lease, State, StoredDecision, Validity,
};
use oncegate::domain::scope::{PoolId, RecordKey, TenantScope};
use oncegate::ids;
use oncegate::store::{Audit, Resolved, Search, Verdict};

use super::fixture::{Fixture, LONG, claim, claim_of, completion, key, terms};

pub async fn records_are_found_by_each_condition(on: &Fixture) {
    let tenant = |name: &str| TenantScope::named(name.as_bytes()).unwrap();
    let scoped = |tenant: TenantScope, pool: &str, name: &str| RecordKey {
        tenant,
        pool: PoolId::new(pool).unwrap(),
        ..key(name)
    };
    let keys = [
        scoped(tenant("acme"), "p1", "order-1"),
        scoped(tenant("acme"), "p2", "order-2"),
        scoped(tenant("acme").with_principal("1-00ff"), "p1", "order-3"),
        scoped(tenant("acme!"), "p1", "order_4"),
        scoped(tenant("acme2"), "p1", "Order-5"),
    ];
    for key in &keys {
        on.win(&claim_of(key.clone())).await;
    }
    let of = |search: Search| async move { found(on, &search).await };
    assert_eq!(
        of(all()).await,
        ["order-1", "order-2", "order-3", "order_4", "Order-5"]
    );
    let tenant = |name: &str| Search {
        tenant: Some(name.into()),
        ..all()
    };
    assert_eq!(of(tenant("acme")).await, ["order-1", "order-2", "order-3"]);
    assert_eq!(of(tenant("acme!")).await, ["order_4"]);
    assert_eq!(of(tenant("acm")).await, [""; 0]);
    assert_eq!(
        of(Search {
            pool: Some("p2".into()),
            ..all()
        })
        .await,
        ["order-2"]
    );
    let prefix = |text: &str| Search {
        key_prefix: Some(text.into()),
        ..all()
    };
    assert_eq!(
        of(prefix("order-")).await,
        ["order-1", "order-2", "order-3"]
    );
    assert_eq!(of(prefix("order_")).await, ["order_4"]);
    assert_eq!(of(prefix("%")).await, [""; 0]);
    let status = |word: &str| Search {
        status: Some(word.into()),
        ..all()
    };
    assert_eq!(of(status("pending")).await.len(), 5);
    assert_eq!(of(status("completed")).await, [""; 0]);
    let older = |than| Search {
        older_than: Some(than),
        ..all()
    };
    assert_eq!(of(older(Duration::ZERO)).await.len(), 5);
    assert_eq!(of(older(LONG)).await, [""; 0]);
    let several = Search {
        pool: Some("p1".into()),
        ..tenant("acme")
    };
    assert_eq!(of(several).await, ["order-1", "order-3"]);
}

pub async fn a_search_is_paged_without_gaps(on: &Fixture) {
    let mut keys = Vec::new();
    for number in 0..7 {
        let key = RecordKey {
            tenant: TenantScope::named(format!("t{}", number % 2).as_bytes()).unwrap(),
            pool: PoolId::new(&format!("p{}", number % 3)).unwrap(),
            ..key(&format!("k{number}"))
        };
        on.win(&claim_of(key.clone())).await;
        keys.push(key);
    }
    keys.sort();
    let mut pages: Vec<RecordKey> = Vec::new();
    loop {
        let search = Search {
            after: pages.last().cloned(),
            limit: 2,
            ..all()
        };
        let page = on.store.find(&search).await.unwrap();
        assert!(page.len() <= 2);
        if page.is_empty() {
            break;
        }
        pages.extend(page.into_iter().map(|found| found.record.key));
    }
    assert_eq!(pages, keys);
}

pub async fn a_search_tells_the_status_of_the_stored_answer(on: &Fixture) {
    let [a, b] = ["a", "b"].map(claim);
    on.win(&a).await;
    on.win(&b).await;
    assert!(on.complete(&completion(&a)).await.is_some());
    let found = on.store.find(&all()).await.unwrap();
    let statuses: Vec<Option<u16>> = found.iter().map(|found| found.answer_status).collect();
    assert_eq!(statuses, [Some(201), None]);
    assert!(matches!(
        found[0].record.state,
        State::Completed(_, Validity::Valid(_))
    ));
    assert!(matches!(
        found[1].record.state,
        State::Pending(Lease::Held(_))
    ));
}

pub async fn an_unknown_outcome_is_resolved_and_audited(on: &Fixture) {
    let happened = on.unknown("happened").await;
    let over = on.abandoned("over", terms()).await;
    for claim in [&happened, &over] {
        let wanted = by_operator(completion(claim));
        let verdict = Verdict::Happened(Box::new(wanted.clone()));
        assert_eq!(
            resolve(on, &claim.key, &verdict, LONG).await,
            Resolved::Done
        );
        let state = on.record(&claim.key).await.state;
        assert!(
            matches!(state, State::Completed(id, Validity::Valid(_)) if id == wanted.decision_id)
        );
        let stored = decision(on, wanted.decision_id).await.unwrap();
        assert_eq!(stored.decided_by, "operator:jo");
        assert_eq!(stored.recorded, wanted.recorded);
        // The owner comes late, with another decision: stale.
        assert_eq!(on.complete(&completion(claim)).await, None);
    }

    let never = on.unknown("never").await;
    let verdict = Verdict::NeverHappened;
    assert_eq!(
        resolve(on, &never.key, &verdict, Duration::ZERO).await,
        Resolved::Done
    );
    let state = on.record(&never.key).await.state;
    assert_eq!(state, State::FailedBeforeCommit { maybe_sent: false });
    assert_eq!(on.store.purge(10).await.unwrap().records, 0);

    let log = on.raw.rows("eec_operator_audit").await;
    assert_eq!(log.len(), 3);
    for name in ["happened", "over", "never"] {
        let line = log.iter().find(|line| line.contains(name)).unwrap();
        for word in ["acme", "payments", "jo", "asked the bank; it's \"so\""] {
            assert!(
                line.replace("''", "'").replace("\"\"", "\"").contains(word),
                "{line}"
            );
        }
    }
}

pub async fn a_record_whose_owner_is_at_work_is_not_resolved(on: &Fixture) {
    let pending = claim("pending");
    on.win(&pending).await;
    let failed = claim("failed");
    on.win(&failed).await;
    assert!(on.release(&failed, GiveUp::NotSent).await.is_some());
    let completed = claim("completed");
    on.win(&completed).await;
    assert!(on.complete(&completion(&completed)).await.is_some());
    let before = on.everything().await;
    for claim in [&pending, &failed, &completed] {
        let happened = Verdict::Happened(Box::new(by_operator(completion(claim))));
        for verdict in [happened, Verdict::NeverHappened] {
            let resolved = resolve(on, &claim.key, &verdict, Duration::ZERO).await;
            assert_eq!(resolved, Resolved::WrongState, "{:?}", claim.key);
        }
    }
    let verdict = Verdict::NeverHappened;
    let resolved = resolve(on, &key("absent"), &verdict, Duration::ZERO).await;
    assert_eq!(resolved, Resolved::NoRecord);
    assert_eq!(on.everything().await, before);
    assert_eq!(on.raw.rows("eec_operator_audit").await, [""; 0]);
}

pub async fn it_never_happened_is_refused_too_early(on: &Fixture) {
    let claim = on.unknown("k").await;
    let before = on.everything().await;
    let resolved = resolve(on, &claim.key, &Verdict::NeverHappened, LONG).await;
    assert!(
        matches!(resolved, Resolved::TooEarly { wait } if wait <= LONG && wait > LONG / 2),
        "{resolved:?}"
    );
    assert_eq!(on.everything().await, before);
    assert_eq!(on.raw.rows("eec_operator_audit").await, [""; 0]);
}

pub async fn a_row_without_a_lease_is_resolved(on: &Fixture) {
    on.raw
        .execute(
            "insert into eec_routing_idempotency (tenant_scope, pool_id, idempotency_key, status) \
             values ('acme', 'payments', 'k', 'pending')",
        )
        .await;
    let verdict = Verdict::NeverHappened;
    assert_eq!(
        resolve(on, &key("k"), &verdict, Duration::ZERO).await,
        Resolved::Done
    );
    let state = on.record(&key("k")).await.state;
    assert_eq!(state, State::FailedBeforeCommit { maybe_sent: false });
}

pub async fn a_resolution_with_a_stale_token_writes_nothing(on: &Fixture) {
    let seen = on.unknown("k").await;
    let before = on.everything().await;
    let mut wanted = by_operator(completion(&seen));
    wanted.token = ids::attempt_token();
    let verdict = Verdict::Happened(Box::new(wanted));
    assert_eq!(
        resolve(on, &seen.key, &verdict, LONG).await,
        Resolved::WrongState
    );
    assert_eq!(on.everything().await, before);
    assert_eq!(on.raw.rows("eec_operator_audit").await, [""; 0]);
}

pub async fn one_record_is_purged_and_audited(on: &Fixture) {
    let [completed, failed, other] = ["completed", "failed", "other"].map(claim);
    for claim in [&completed, &failed, &other] {
        on.win(claim).await;
    }
    let wanted = completion(&completed);
    assert!(on.complete(&wanted).await.is_some());
    assert!(on.complete(&completion(&other)).await.is_some());
    assert!(on.release(&failed, GiveUp::NotSent).await.is_some());
    for claim in [&completed, &failed] {
        let purged = on.store.purge_one(&claim.key, &audit()).await.unwrap();
        assert_eq!(purged, Resolved::Done);
        assert!(!on.is_there(&claim.key).await);
        let again = on.store.purge_one(&claim.key, &audit()).await.unwrap();
        assert_eq!(again, Resolved::NoRecord);
    }
    assert!(decision(on, wanted.decision_id).await.is_none());
    assert!(on.is_there(&other.key).await);
    assert_eq!(on.raw.rows("eec_routing_decision").await.len(), 1);
    assert_eq!(on.raw.rows("eec_operator_audit").await.len(), 2);
    // The owner of what is gone has nothing to complete.
    assert_eq!(on.complete(&wanted).await, None);
    assert_eq!(on.raw.rows("eec_routing_decision").await.len(), 1);
}

pub async fn an_open_record_is_not_purged(on: &Fixture) {
    let pending = claim("pending");
    on.win(&pending).await;
    let over = on.abandoned("over", terms()).await;
    let unknown = on.unknown("unknown").await;
    let before = on.everything().await;
    for claim in [&pending, &over, &unknown] {
        let purged = on.store.purge_one(&claim.key, &audit()).await.unwrap();
        assert_eq!(purged, Resolved::WrongState);
    }
    assert_eq!(on.everything().await, before);
    assert_eq!(on.raw.rows("eec_operator_audit").await, [""; 0]);
}

fn all() -> Search {
    Search {
        limit: 100,
        ..Search::default()
    }
}

async fn found(on: &Fixture, search: &Search) -> Vec<String> {
    let found = on.store.find(search).await.unwrap();
    found
        .iter()
        .map(|found| found.record.key.key.to_string())
        .collect()
}

fn audit() -> Audit {
    Audit {
        operator: "jo".into(),
        reason: "asked the bank; it's \"so\"".into(),
    }
}

fn by_operator(completion: Completion) -> Completion {
    Completion {
        decided_by: "operator:jo".into(),
        ..completion
    }
}

async fn resolve(on: &Fixture, key: &RecordKey, verdict: &Verdict, max: Duration) -> Resolved {
    on.store.resolve(key, verdict, max, &audit()).await.unwrap()
}

async fn decision(on: &Fixture, id: DecisionId) -> Option<StoredDecision> {
    on.store.decision(&key("k").tenant, id).await.unwrap()
}
