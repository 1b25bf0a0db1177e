//! What operators find and do with intents and destinations.

use std::time::Duration;

use oncegate::domain::intent::{Destination, Finished, IntentKey, IntentStatus};
use oncegate::domain::run::RunStatus;
use oncegate::store::outbox::IntentSearch;
use oncegate::store::{Audit, Resolved};

use super::fixture::Fixture;
use super::intents::{Sown, dead, delivered, intent, sending};

pub async fn an_intent_is_found_by_its_id_alone(on: &Fixture) {
    let sown = intent().with(&[("redrives", "2"), ("diagnostic", "'so'")]);
    let key = on.sow(&sown).await;
    let line = on.line(&key).await;
    assert_eq!(
        (line.key.clone(), line.run_id, line.seq),
        (key, sown.run_id, 1)
    );
    assert_eq!((&*line.step, &*line.idempotency_key), ("receipt", "key-1"));
    assert_eq!(line.destination, Destination("mail".into()));
    assert_eq!((line.redrives, line.diagnostic.as_deref()), (2, Some("so")));
    assert_eq!(line.sending, sending());
    assert_eq!(line.body_bytes, Some(6));
    let age = line.age.unwrap();
    assert!(age >= Duration::from_secs(1) && age < Duration::from_secs(30));
    assert!(!line.claimed && line.due_at.is_some());
    let absent = on.store.find_intent(intent().key().id).await.unwrap();
    assert!(absent.is_none());
}

pub async fn intents_are_found_by_each_condition(on: &Fixture) {
    let one = Sown::of("acme").to("mail");
    let two = Sown {
        seq: 2,
        ..one.clone().to("sms").with(&[("status", "'dead'")])
    };
    let principal = Sown::of("acme 1-00ff").to("mail");
    let other = Sown::of("acme2")
        .to("mail")
        .with(&[("status", "'quarantined'")]);
    on.sow_run(&one, "stuck").await;
    let mut keys = Vec::new();
    for sown in [&one, &two, &principal, &other] {
        keys.push(on.sow(sown).await);
    }
    let [one_key, two_key, principal_key, other_key] = &keys[..] else {
        unreachable!()
    };
    let of = |search: IntentSearch| async move { found(on, &search).await };
    let tenant = |name: &str| IntentSearch {
        tenant: Some(name.into()),
        ..all()
    };
    assert_eq!(of(all()).await, sorted(&keys));
    assert_eq!(of(tenant("acme")).await, sorted(&keys[..3]));
    assert_eq!(of(tenant("acme2")).await, sorted(&keys[3..]));
    assert_eq!(of(tenant("acm")).await, []);
    let status = |status| IntentSearch {
        status: Some(status),
        ..all()
    };
    assert_eq!(of(status(IntentStatus::Dead)).await, sorted(&keys[1..2]));
    assert_eq!(
        of(status(IntentStatus::Quarantined)).await,
        sorted(&keys[3..])
    );
    assert_eq!(of(status(IntentStatus::Completed)).await, []);
    let pending = [one_key.clone(), principal_key.clone()];
    assert_eq!(of(status(IntentStatus::Pending)).await, sorted(&pending));
    let destination = IntentSearch {
        destination: Some(Destination("mail".into())),
        ..all()
    };
    let mail = [one_key.clone(), principal_key.clone(), other_key.clone()];
    assert_eq!(of(destination).await, sorted(&mail));
    let run = IntentSearch {
        run_id: Some(one.run_id),
        ..all()
    };
    assert_eq!(of(run.clone()).await, sorted(&keys[..2]));
    let several = IntentSearch {
        status: Some(IntentStatus::Dead),
        tenant: Some("acme".into()),
        ..run
    };
    assert_eq!(of(several).await, sorted(std::slice::from_ref(two_key)));
}

pub async fn a_search_of_intents_is_paged_without_gaps(on: &Fixture) {
    let mut keys = Vec::new();
    for tenant in ["a", "b", "a", "a b", "b", "a", "b"] {
        let dead = Sown::of(tenant).with(&[("status", "'dead'")]);
        keys.push(on.sow(&dead).await);
    }
    for status in [None, Some(IntentStatus::Dead)] {
        let mut pages: Vec<IntentKey> = Vec::new();
        loop {
            let search = IntentSearch {
                status,
                after: pages.last().cloned(),
                limit: 2,
                ..all()
            };
            let page = found(on, &search).await;
            assert!(page.len() <= 2);
            if page.is_empty() {
                break;
            }
            pages.extend(page);
        }
        assert_eq!(pages, sorted(&keys));
    }
}

pub async fn an_intent_is_given_up_where_nobody_works_on_it(on: &Fixture) {
    let waiting = intent();
    on.sow_run(&waiting, "running").await;
    let waiting = on.sow(&waiting).await;
    let not_its_turn = on.sow(&intent().due(None)).await;
    let dead_one = on
        .sow(&intent().with(&[("status", "'dead'")]).due(None))
        .await;
    let poison = [("status", "'quarantined'")];
    let poison = on.sow(&intent().with(Box::leak(Box::new(poison)))).await;
    let silent = on.sow(&intent()).await;
    let lost = on.lost(&silent).await;
    for key in [&waiting, &not_its_turn, &dead_one, &poison, &silent] {
        assert_eq!(discard(on, key).await, Resolved::Done);
        let line = on.line(key).await;
        assert_eq!(line.status, IntentStatus::Discarded);
        assert!(line.due_at.is_none() && line.ended_at.is_some() && !line.claimed);
        assert!(on.is_changed(key).await);
    }
    assert!(on.attempt_is(lost.stamp, "lost").await);
    assert_eq!(on.end(&lost, delivered()).await, Finished::Stale);
    let noted = format!(
        "action = 'discarded_intent' and operator = 'jo' and tenant_scope = 'acme' \
         and pool_id = 'payments' and idempotency_key = 'order-1' \
         and reason = '{}: not wanted'",
        waiting.id
    );
    assert_eq!(on.count_where("eec_operator_audit", &noted).await, 1);
    assert_eq!(on.count_where("eec_operator_audit", "true").await, 5);
}

pub async fn an_intent_under_way_or_over_is_not_given_up(on: &Fixture) {
    let held = on.sow(&intent()).await;
    on.claimed(&held).await;
    let completed = on.sow(&intent()).await;
    let wish = on.claimed(&completed).await;
    on.end(&wish, delivered()).await;
    let discarded = on.sow(&intent().with(&[("status", "'discarded'")])).await;
    let before = on.all_rows().await;
    for key in [&held, &completed, &discarded] {
        assert_eq!(discard(on, key).await, Resolved::WrongState);
    }
    assert_eq!(discard(on, &intent().key()).await, Resolved::NoRecord);
    assert_eq!(on.all_rows().await, before);
}

pub async fn pauses_are_told_and_audited_once(on: &Fixture) {
    let (mail, sms) = (Destination("mail".into()), Destination("sms".into()));
    for to in [&sms, &mail, &mail] {
        on.store.set_paused(to, true, &audit()).await.unwrap();
    }
    let paused = on.store.paused().await.unwrap();
    let told: Vec<_> = paused
        .iter()
        .map(|pause| (&*pause.destination.0, &*pause.operator, &*pause.reason))
        .collect();
    let why = "not wanted";
    assert_eq!(told, [("mail", "jo", why), ("sms", "jo", why)]);
    let present = on.store.ping().await.unwrap();
    assert!((present - paused[0].paused_at).abs() < Duration::from_mins(1));
    for to in [&mail, &mail] {
        on.store.set_paused(to, false, &audit()).await.unwrap();
    }
    assert_eq!(on.store.paused().await.unwrap().len(), 1);
    let noted = |action: &str| format!("action = '{action}' and reason = 'mail: not wanted'");
    for action in ["paused_destination", "resumed_destination"] {
        assert_eq!(
            on.count_where("eec_operator_audit", &noted(action)).await,
            1
        );
    }
    assert_eq!(on.count_where("eec_operator_audit", "true").await, 3);
}

pub async fn the_census_of_the_outbox_counts_what_is_not_over(on: &Fixture) {
    let empty = on.store.outbox_census().await.unwrap();
    assert_eq!(intents(&empty.intents), [0, 0, 0]);
    assert_eq!(empty.oldest_pending, None);
    for due_ms in [-60_000, -1000, 3_600_000] {
        on.sow(&intent().due(Some(due_ms))).await;
    }
    let key = on.sow(&intent()).await;
    let wish = on.claimed(&key).await;
    on.end(&wish, dead()).await;
    for _ in 0..2 {
        on.sow(&intent().with(&[("status", "'quarantined'")]).due(None))
            .await;
        on.sow(&intent().with(&[("status", "'completed'")]).due(None))
            .await;
    }
    for status in ["running", "running", "waiting", "stuck", "completed"] {
        on.sow_run(&intent(), status).await;
    }
    let census = on.store.outbox_census().await.unwrap();
    assert_eq!(intents(&census.intents), [3, 1, 2]);
    let oldest = census.oldest_pending.unwrap();
    assert!((60..90).contains(&oldest.as_secs()), "{oldest:?}");
    let mut runs = census.runs.clone();
    runs.sort_by_key(|(status, _)| status.word());
    let expected = [
        (RunStatus::Running, 2),
        (RunStatus::Stuck, 1),
        (RunStatus::Waiting, 1),
    ];
    assert_eq!(runs, expected);
}

fn intents(counted: &[(IntentStatus, u64)]) -> Vec<u64> {
    let count = |wanted| {
        let mut of = counted.iter().filter(|(status, _)| *status == wanted);
        of.next().unwrap().1
    };
    [
        IntentStatus::Pending,
        IntentStatus::Dead,
        IntentStatus::Quarantined,
    ]
    .map(count)
    .to_vec()
}

fn all() -> IntentSearch {
    IntentSearch {
        limit: 100,
        ..IntentSearch::default()
    }
}

fn sorted(keys: &[IntentKey]) -> Vec<IntentKey> {
    let mut keys = keys.to_vec();
    keys.sort();
    keys
}

async fn found(on: &Fixture, search: &IntentSearch) -> Vec<IntentKey> {
    let found = on.store.find_intents(search).await.unwrap();
    found.into_iter().map(|line| line.key).collect()
}

fn audit() -> Audit {
    Audit {
        operator: "jo".into(),
        reason: "not wanted".into(),
    }
}

async fn discard(on: &Fixture, key: &IntentKey) -> Resolved {
    on.store.discard(key, &audit()).await.unwrap()
}
