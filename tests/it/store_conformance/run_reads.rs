//! What is read of runs: by the coordinator, by clients, by people.

use std::collections::BTreeSet;
use std::time::Duration;

use oncegate::domain::intent::{IntentStatus, Order};
use oncegate::domain::run::{RunKey, RunStatus, Timer};
use oncegate::domain::scope::TenantScope;
use oncegate::ids;
use oncegate::store::runs::{DuePlace, RunSearch};

use super::fixture::{Fixture, LONG, claim, claim_of, key};
use super::run_fixture::{changing, run_of, starting, tick, timer};
use crate::support::rows::Kind;

const ANSWERED: &str = "insert into eec_effect_body \
    (tenant_scope, intent_id, part, status, headers, body) \
    select i.tenant_scope, i.intent_id, 'answer', 200, m.headers, m.body \
    from eec_effect_intent i join eec_effect_body m \
    on m.tenant_scope = i.tenant_scope and m.intent_id = i.intent_id where i.seq = 1";
const DELIVERED: &str = "update eec_effect_intent set status = 'completed', changed = true, \
    tries = 3, outcome = 'delivered', diagnostic = 'it works', due_at = null where seq = 1";

pub async fn ended_timers_and_changes_are_due_and_nothing_else(on: &Fixture) {
    on.begun("at-work", 2).await;
    let waits = on.begun("waits", 0).await;
    on.tick(&waits, timer(LONG)).await;
    let over = on.begun("over", 0).await;
    on.tick(&over, timer(Duration::ZERO)).await;
    assert_eq!(on.due(9).await, *std::slice::from_ref(&over));
    assert!(on.load(&over).await.timer_over);
    assert!(!on.load(&waits).await.timer_over);
    on.tick(&over, tick(RunStatus::Waiting)).await;
    assert_eq!(on.due(9).await, *std::slice::from_ref(&over));
    let mut cleared = tick(RunStatus::Running);
    cleared.timer = Timer::Clear;
    on.tick(&over, cleared).await;
    assert!(on.due(9).await.is_empty());
    // A run is told once, however much happened to it.
    on.raw
        .execute("update eec_effect_intent set changed = true")
        .await;
    on.raw
        .execute("update eec_run set due_at = created_at where last_transition_seq = 2")
        .await;
    assert_eq!(on.due(9).await.len(), 1);
}

pub async fn what_is_due_is_told_of_every_tenant(on: &Fixture) {
    for n in 0..12 {
        on.begun(&format!("busy{n}"), 3).await;
    }
    let mut quiet = claim("quiet");
    quiet.key.tenant = TenantScope::named(b"zeta").unwrap();
    let quiet = claim_of(quiet.key);
    on.win(&quiet).await;
    let completion = starting(&quiet, 1);
    on.complete(&completion).await.unwrap();
    on.raw
        .execute("update eec_effect_intent set changed = true")
        .await;
    let waits = on.begun("waits", 0).await;
    on.tick(&waits, timer(Duration::ZERO)).await;
    for limit in [3, 4, 6] {
        let due = on.due(limit).await;
        assert_eq!(due.len(), usize::try_from(limit).unwrap());
        assert!(
            due.contains(&run_of(&completion)) && due.contains(&waits),
            "{limit}"
        );
    }
    assert_eq!(on.due(100).await.len(), 14);
}

pub async fn each_look_for_what_is_due_goes_on_where_the_last_one_ended(on: &Fixture) {
    let mut all = BTreeSet::new();
    for n in 0..7 {
        all.insert(on.begun(&format!("changed{n}"), 2).await);
        let waits = on.begun(&format!("waits{n}"), 0).await;
        on.tick(&waits, timer(Duration::ZERO)).await;
        all.insert(waits);
    }
    on.raw
        .execute("update eec_effect_intent set changed = true")
        .await;
    // Nobody moves them on, and yet all are told, again and again.
    let mut place = DuePlace::default();
    for _ in 0..2 {
        let mut told = BTreeSet::new();
        for _ in 0..10 {
            let due = on.store.runs_due(&place, 3).await.unwrap();
            told.extend(due.keys);
            place = due.next;
        }
        assert_eq!(told, all);
    }
}

pub async fn a_run_is_loaded_with_what_a_tick_looks_at(on: &Fixture) {
    let key = on.begun("k", 5).await;
    on.raw.execute(ANSWERED).await;
    on.raw.execute(DELIVERED).await;
    for sql in [
        "update eec_effect_intent set status = 'completed' where seq = 2",
        "update eec_effect_intent set status = 'discarded' where seq = 3",
        "update eec_effect_intent set status = 'dead' where seq = 4",
    ] {
        on.raw.execute(sql).await;
    }
    let absent = RunKey {
        id: ids::decision_id().into(),
        ..key.clone()
    };
    let foreign = RunKey {
        tenant: TenantScope::named(b"other").unwrap(),
        ..key.clone()
    };
    let keys = [absent, key.clone(), foreign, key.clone()];
    let loaded = on.store.load_runs(&keys).await.unwrap();
    let there: Vec<bool> = loaded.iter().map(Option::is_some).collect();
    assert_eq!(there, [false, true, false, true]);
    let intents = &loaded[1].as_ref().unwrap().intents;
    let seqs: Vec<i64> = intents.iter().map(|i| i.seq).collect();
    assert_eq!(seqs, [1, 4, 5]);
    let first = &intents[0];
    assert_eq!((first.tries, first.changed), (3, true));
    assert_eq!(first.outcome.as_deref(), Some("delivered"));
    assert_eq!(first.diagnostic.as_deref(), Some("it works"));
    let answer = first.answer.as_ref().unwrap();
    assert_eq!((answer.status, answer.headers.is_empty()), (200, true));
    assert_eq!(answer.body.as_deref(), Some(&b"body 1"[..]));
    assert_eq!(intents[1].status, IntentStatus::Dead);
    assert!(intents[1..].iter().all(|i| i.answer.is_none()));
    // The answer of what the run knows already is not read again.
    on.tick(
        &key,
        changing(1, Some(IntentStatus::Completed), Order::None),
    )
    .await;
    let seqs: Vec<i64> = on.load(&key).await.intents.iter().map(|i| i.seq).collect();
    assert_eq!(seqs, [4, 5]);
    assert!(on.store.load_runs(&[]).await.unwrap().is_empty());
    assert!(on.store.commit_ticks(&[]).await.unwrap().is_empty());
}

pub async fn the_answer_of_an_accepted_request_is_told(on: &Fixture) {
    let run = on.begun("k", 2).await;
    let answer = on.store.run_answer(&run).await.unwrap();
    assert_eq!(answer, Some((RunStatus::Running, None)));
    on.raw.execute(ANSWERED).await;
    let (status, answer) = on.store.run_answer(&run).await.unwrap().unwrap();
    assert_eq!(status, RunStatus::Running);
    assert_eq!(answer.unwrap().body.as_deref(), Some(&b"body 1"[..]));
    let foreign = RunKey {
        tenant: TenantScope::named(b"other").unwrap(),
        ..run
    };
    assert_eq!(on.store.run_answer(&foreign).await.unwrap(), None);
    assert!(on.store.show_run(&foreign).await.unwrap().is_none());
}

pub async fn runs_are_found_by_each_condition(on: &Fixture) {
    let plain = on.begun("plain", 1).await;
    let stuck = on.begun("stuck", 1).await;
    on.tick(&stuck, tick(RunStatus::Stuck)).await;
    let mut others = Vec::new();
    for (tenant, workflow) in [("acme ab12", "orders"), ("acme2", "effects")] {
        let mut claim = claim("other");
        claim.key.tenant = TenantScope::parse(tenant).unwrap();
        on.win(&claim).await;
        let mut completion = starting(&claim, 0);
        completion.run.as_mut().unwrap().workflow = workflow.into();
        on.complete(&completion).await.unwrap();
        others.push(run_of(&completion));
    }
    let [principal, neighbour] = &others[..] else {
        panic!("two");
    };
    let all = RunSearch {
        limit: 10,
        ..RunSearch::default()
    };
    let found = async |search: RunSearch| {
        let found = on.store.find_runs(&search).await.unwrap();
        found.into_iter().map(|l| l.run.key).collect::<Vec<_>>()
    };
    let sorted = |keys: &[&RunKey]| {
        let mut keys: Vec<RunKey> = keys.iter().map(|key| (*key).clone()).collect();
        keys.sort();
        keys
    };
    let everything = sorted(&[&plain, &stuck, principal, neighbour]);
    assert_eq!(found(all.clone()).await, everything);
    let of_tenant = RunSearch {
        tenant: Some("acme".into()),
        ..all.clone()
    };
    assert_eq!(found(of_tenant).await, sorted(&[&plain, &stuck, principal]));
    let in_status = |status| RunSearch {
        status: Some(status),
        ..all.clone()
    };
    assert_eq!(found(in_status(RunStatus::Stuck)).await, sorted(&[&stuck]));
    assert_eq!(found(in_status(RunStatus::Running)).await.len(), 3);
    let of_workflow = RunSearch {
        workflow: Some("orders".into()),
        ..all.clone()
    };
    assert_eq!(found(of_workflow).await, sorted(&[principal]));
    let of_pool = RunSearch {
        pool: Some("nothing".into()),
        ..all
    };
    assert!(found(of_pool).await.is_empty());
    assert_eq!(on.store.find_run(stuck.id).await.unwrap(), Some(stuck));
    let absent = on.store.find_run(ids::decision_id().into()).await;
    assert_eq!(absent.unwrap(), None);
}

pub async fn a_search_of_runs_is_paged_without_gaps(on: &Fixture) {
    let mut all = Vec::new();
    for n in 0..7 {
        let mut claim = claim_of(key(&format!("k{n}")));
        claim.key.tenant = TenantScope::parse(["acme", "acme ab"][n % 2]).unwrap();
        on.win(&claim).await;
        let mut completion = starting(&claim, 0);
        completion.run.as_mut().unwrap().first.status = RunStatus::Stuck;
        on.complete(&completion).await.unwrap();
        all.push(run_of(&completion));
    }
    all.sort();
    for status in [None, Some(RunStatus::Stuck)] {
        let mut search = RunSearch {
            status,
            limit: 3,
            ..RunSearch::default()
        };
        let mut found = Vec::new();
        loop {
            let page = on.store.find_runs(&search).await.unwrap();
            found.extend(page.into_iter().map(|line| line.run.key));
            if found.last() == search.after.as_ref() {
                break;
            }
            search.after = found.last().cloned();
        }
        assert_eq!(found, all);
    }
}

pub async fn history_is_read_from_any_line_on(on: &Fixture) {
    let key = on.begun("k", 0).await;
    for _ in 0..5 {
        on.tick(&key, tick(RunStatus::Running)).await;
    }
    let read = async |after, limit| {
        let lines = on.store.transitions(&key, after, limit).await.unwrap();
        lines.into_iter().map(|line| line.seq).collect::<Vec<_>>()
    };
    assert_eq!(read(0, 3).await, [1, 2, 3]);
    assert_eq!(read(3, 100).await, [4, 5, 6, 7]);
    assert!(read(7, 100).await.is_empty());
}

pub async fn attempts_are_told_newest_first(on: &Fixture) {
    let key = on.begun("k", 2).await;
    on.begun("other", 2).await;
    // Each stands for one claim; ids of intents are as good as stamps.
    let attempts = match on.raw.kind() {
        Kind::Postgres => {
            "insert into eec_run_attempt (tenant_scope, run_id, intent_id, stamp, try, \
            worker, status, outcome, answer_status, diagnostic, started_at, ended_at) \
            select i.tenant_scope, i.run_id, i.intent_id, i.intent_id, 2, 'w', 'failed', \
            'refused', 503, 'busy', r.created_at - interval '1 s', \
            r.created_at - interval '1 s' from eec_effect_intent i join eec_run r on r.run_id = i.run_id where i.seq = 1"
        }
        Kind::Sqlite => {
            "insert into eec_run_attempt (tenant_scope, run_id, intent_id, stamp, try, \
            worker, status, outcome, answer_status, diagnostic, started_at, ended_at) \
            select i.tenant_scope, i.run_id, i.intent_id, i.intent_id, 2, 'w', 'failed', \
            'refused', 503, 'busy', r.created_at - 1000, \
            r.created_at - 1000 from eec_effect_intent i join eec_run r on r.run_id = i.run_id where i.seq = 1"
        }
    };
    on.raw.execute(attempts).await;
    let newest = "insert into eec_run_attempt (tenant_scope, run_id, intent_id, stamp, try, worker) \
        select tenant_scope, run_id, intent_id, intent_id, 1, 'v' from eec_effect_intent \
        where seq = 2";
    on.raw.execute(newest).await;
    let told = on.store.attempts(&key, 9).await.unwrap();
    assert_eq!(told.len(), 2);
    let (new, old) = (&told[0], &told[1]);
    assert_eq!(
        (&*new.worker, &*new.status, new.ended_at),
        ("v", "open", None)
    );
    assert_eq!((old.try_no, old.intent_id), (2, key.id.intent(1)));
    assert_eq!(old.outcome.as_deref(), Some("refused"));
    assert_eq!(
        (old.answer_status, old.ended_at),
        (Some(503), Some(old.started_at))
    );
    assert_eq!(old.diagnostic.as_deref(), Some("busy"));
    assert_eq!(on.store.attempts(&key, 1).await.unwrap().len(), 1);
}
