//! Retention of runs, and records that their run keeps.

use std::time::Duration;

use oncegate::config::Keep;
use oncegate::domain::record::{Claim, Completion, State, Validity};
use oncegate::domain::run::{RunStatus, TickCommitted};
use oncegate::store::runs::RunsPurged;
use oncegate::store::{Audit, Purged, Resolved, Search};

use super::fixture::{Fixture, LONG, claim};
use super::run_fixture::{TABLES, on_loaded, run_of, starting, tick};

const NOW: Keep = Keep {
    runs: Duration::ZERO,
    dead: Duration::ZERO,
};
const LATER: Keep = Keep {
    runs: LONG,
    dead: LONG,
};
const NOTHING: RunsPurged = RunsPurged {
    runs: 0,
    intents: 0,
    bodies: 0,
};
const FINISHED: &str = "update eec_effect_intent set status = 'completed', due_at = null, \
    ended_at = created_at";
const ATTEMPTS: &str = "insert into eec_run_attempt \
    (tenant_scope, run_id, intent_id, stamp, try, worker) \
    select tenant_scope, run_id, intent_id, intent_id, 1, 'w' from eec_effect_intent";

pub async fn a_run_past_its_time_is_deleted_with_all_that_belongs_to_it(on: &Fixture) {
    for n in 0..5 {
        let key = on.begun(&format!("k{n}"), 3).await;
        on.tick(&key, tick(RunStatus::Completed)).await;
    }
    on.raw.execute(FINISHED).await;
    on.raw.execute(ATTEMPTS).await;
    assert_eq!(on.store.purge_runs(LATER, 9).await.unwrap(), NOTHING);
    let mut sum = RunsPurged::default();
    loop {
        let page = on.store.purge_runs(NOW, 2).await.unwrap();
        assert!(page.runs <= 2 && page.intents == 3 * page.runs, "{page:?}");
        if page == NOTHING {
            break;
        }
        sum.runs += page.runs;
        sum.intents += page.intents;
    }
    assert_eq!((sum.runs, sum.intents), (5, 15));
    for table in &TABLES[2..7] {
        assert_eq!(on.count(table).await, 0, "{table}");
    }
    assert_eq!(on.count("eec_routing_decision").await, 5);
}

pub async fn a_purge_never_touches_what_is_not_final(on: &Fixture) {
    for status in [RunStatus::Running, RunStatus::Waiting, RunStatus::Stuck] {
        let key = on.begun(status.word(), 2).await;
        on.tick(&key, tick(status)).await;
    }
    let pending = on.begun("pending", 1).await;
    on.tick(&pending, tick(RunStatus::Cancelled)).await;
    let before = on.every_row().await;
    assert_eq!(on.store.purge_runs(NOW, 100).await.unwrap(), NOTHING);
    // Not even when a row says that its time is over.
    let lie = "update eec_run set ended_at = created_at where status <> 'cancelled'";
    on.raw.execute(lie).await;
    let told = on.every_row().await;
    assert_eq!(on.store.purge_runs(NOW, 100).await.unwrap(), NOTHING);
    assert_eq!(on.every_row().await, told);
    assert_eq!(told.len(), before.len());
}

pub async fn a_final_run_is_kept_for_its_dead_intents(on: &Fixture) {
    let key = on.begun("k", 2).await;
    on.tick(&key, tick(RunStatus::Failed)).await;
    on.raw.execute(FINISHED).await;
    let dead = "update eec_effect_intent set status = 'dead' where seq = 2";
    on.raw.execute(dead).await;
    let dead_for_long = Keep { dead: LONG, ..NOW };
    assert_eq!(
        on.store.purge_runs(dead_for_long, 9).await.unwrap(),
        NOTHING
    );
    assert!(on.load(&key).await.intents[0].has_body);
    assert_eq!(on.store.purge_runs(NOW, 9).await.unwrap().runs, 1);
    assert_eq!(on.count("eec_effect_body").await, 0);
}

pub async fn bytes_of_what_is_dead_for_long_are_deleted(on: &Fixture) {
    let key = on.begun("k", 4).await;
    on.tick(&key, tick(RunStatus::Stuck)).await;
    for sql in [
        "update eec_effect_intent set status = 'dead', ended_at = created_at where seq = 1",
        "update eec_effect_intent set status = 'quarantined', ended_at = created_at where seq = 2",
        "update eec_effect_intent set status = 'completed', ended_at = created_at where seq = 3",
    ] {
        on.raw.execute(sql).await;
    }
    assert_eq!(on.store.purge_runs(LATER, 9).await.unwrap(), NOTHING);
    let one = RunsPurged {
        bodies: 1,
        ..NOTHING
    };
    for expected in [one, one, NOTHING] {
        assert_eq!(on.store.purge_runs(NOW, 1).await.unwrap(), expected);
    }
    let kept: Vec<_> = on.load(&key).await.intents;
    let kept: Vec<_> = kept.iter().map(|seen| (seen.seq, seen.has_body)).collect();
    assert_eq!(kept, [(1, false), (2, false), (4, true)]);
    assert_eq!(on.count("eec_effect_body").await, 2);
}

pub async fn remembered_claims_past_their_time_are_deleted(on: &Fixture) {
    let key = on.begun("k", 0).await;
    on.tick(&key, super::run_fixture::timer(LONG)).await;
    let claims = "insert into eec_routing_claim (tenant_scope, request_id, pool_id, \
        idempotency_key, attempt_token, generation, generation_id, lease_ms, keep_until) \
        select tenant_scope, run_id, 'p', 'k', run_id, 1, run_id, 1, created_at from eec_run \
        union all select 'other', run_id, 'p', 'k', run_id, 1, run_id, 1, due_at from eec_run";
    on.raw.execute(claims).await;
    assert_eq!(on.store.purge_runs(LATER, 9).await.unwrap(), NOTHING);
    let left = on.raw.rows("eec_routing_claim").await;
    assert_eq!(left.len(), 1);
    assert!(left[0].contains("other"));
}

/// An accepted request whose record is past its validity, kept by its run.
async fn accepted(on: &Fixture, tombstone_for: Duration) -> (Claim, Completion) {
    let mut claim = claim("k");
    claim.terms.valid_for = Duration::ZERO;
    claim.terms.tombstone_for = tombstone_for;
    on.win(&claim).await;
    let mut wanted = starting(&claim, 1);
    wanted.run.as_mut().unwrap().holds_record = true;
    assert!(on.complete(&wanted).await.is_some());
    (claim, wanted)
}

async fn looks_valid(on: &Fixture, claim: &Claim, wanted: &Completion) -> bool {
    let looks = |validity| match validity {
        Validity::Valid(left) => !left.is_zero() && left <= LONG,
        Validity::Tombstone | Validity::Expired => false,
    };
    let State::Completed(id, validity) = on.record(&claim.key).await.state else {
        panic!("it is completed");
    };
    assert_eq!(id, wanted.decision_id);
    let search = Search {
        limit: 9,
        ..Search::default()
    };
    let found = on.store.find(&search).await.unwrap().remove(0).record.state;
    assert!(matches!(found, State::Completed(_, v) if looks(v) == looks(validity)));
    let decision = on.store.decision(&claim.key.tenant, id).await.unwrap();
    let left = decision.and_then(|stored| stored.valid_for);
    assert_eq!(left.is_some_and(|left| !left.is_zero()), looks(validity));
    looks(validity)
}

pub async fn a_run_that_goes_on_keeps_its_record(on: &Fixture) {
    for tombstone_for in [Duration::ZERO, LONG] {
        let (claim, wanted) = accepted(on, tombstone_for).await;
        assert!(looks_valid(on, &claim, &wanted).await);
        let next = super::fixture::claim("k");
        let reclaimed = on.store.reclaim(&next, claim.token).await.unwrap();
        assert_eq!(reclaimed, None);
        let before = on.every_row().await;
        assert_eq!(on.store.purge(10).await.unwrap(), Purged::default());
        let audit = Audit {
            operator: "jo".into(),
            reason: "test".into(),
        };
        let purged = on.store.purge_one(&claim.key, &audit).await.unwrap();
        assert_eq!(purged, Resolved::WrongState);
        assert_eq!(on.every_row().await, before);
        // A stuck run is not over either.
        on.tick(&run_of(&wanted), tick(RunStatus::Stuck)).await;
        assert!(looks_valid(on, &claim, &wanted).await);
        on.tick(&run_of(&wanted), tick(RunStatus::Completed)).await;
        assert!(!looks_valid(on, &claim, &wanted).await);
        let purged = on.store.purge_one(&claim.key, &audit).await.unwrap();
        assert_eq!(purged, Resolved::Done);
    }
}

pub async fn a_run_that_ended_keeps_its_record_for_its_validity(on: &Fixture) {
    let (claim, wanted) = accepted(on, Duration::ZERO).await;
    on.tick(&run_of(&wanted), tick(RunStatus::Completed)).await;
    on.raw.execute(FINISHED).await;
    // As if it had taken that long.
    for sql in [
        "update eec_routing_idempotency set valid_for_ms = 3600000",
        "update eec_routing_decision set created_at = (select min(r.created_at) from eec_run r)",
    ] {
        on.raw.execute(sql).await;
    }
    let State::Completed(_, Validity::Valid(left)) = on.record(&claim.key).await.state else {
        panic!("its run keeps it");
    };
    assert!(left > Duration::from_mins(1) && left <= LONG, "{left:?}");
    let next = super::fixture::claim("k");
    assert_eq!(on.store.reclaim(&next, claim.token).await.unwrap(), None);
    // The run itself is what duplicates are told of.
    assert_eq!(on.store.purge_runs(NOW, 9).await.unwrap(), NOTHING);
    on.raw
        .execute("update eec_routing_idempotency set valid_for_ms = 0")
        .await;
    let reclaimed = on.store.reclaim(&next, claim.token).await.unwrap();
    assert_eq!(reclaimed.unwrap().generation, 2);
    assert_eq!(on.store.purge_runs(NOW, 9).await.unwrap().runs, 1);
}

pub async fn a_record_whose_run_does_not_hold_it_ends_as_ever(on: &Fixture) {
    let mut claim = claim("k");
    claim.terms.valid_for = Duration::ZERO;
    on.win(&claim).await;
    let wanted = starting(&claim, 1);
    assert!(on.complete(&wanted).await.is_some());
    assert!(!looks_valid(on, &claim, &wanted).await);
    let purged = Purged {
        records: 1,
        decisions: 1,
    };
    assert_eq!(on.store.purge(10).await.unwrap(), purged);
    // Its run goes on without it.
    let loaded = on.load(&run_of(&wanted)).await;
    let commit = on_loaded(&loaded, tick(RunStatus::Completed));
    assert_eq!(on.commit(&commit).await, TickCommitted::Committed);
}

pub async fn what_runs_keep_never_hides_what_is_past_its_time(on: &Fixture) {
    for n in 0..8 {
        let mut claim = claim(&format!("k{n}"));
        claim.terms.valid_for = Duration::ZERO;
        on.win(&claim).await;
        let mut wanted = starting(&claim, 0);
        wanted.run.as_mut().unwrap().holds_record = n < 6;
        assert!(on.complete(&wanted).await.is_some());
    }
    let mut purged = 0;
    // What is kept stands first, and fills pages.
    for _ in 0..8 {
        purged += on.store.purge(1).await.unwrap().decisions;
    }
    assert_eq!(purged, 2);
    assert_eq!(on.count("eec_routing_idempotency").await, 6);
}
