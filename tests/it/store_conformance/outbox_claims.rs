//! Claims of intents: who gets what, and what becomes of those who fall silent.

use std::time::Duration;

use futures_util::future::join_all;
use oncegate::domain::intent::{
    ClaimWish, Destination, Finished, IntentClaimed, IntentKey, IntentStatus, Stamp,
};
use oncegate::domain::scope::TenantScope;
use oncegate::store::Audit;
use oncegate::store::outbox::{ClaimBeat, Lane, LaneWish};

use super::fixture::{Fixture, LONG};
use super::intents::{Sown, again, dead, delivered, doomed, given_back, intent, sending, wish};
use crate::support::rows::Kind;

const CONCURRENT: usize = 32;
const BODY_BYTES: usize = 5 * 1024 * 1024;

pub async fn one_of_many_concurrent_claims_of_an_intent_wins(on: &Fixture) {
    let key = on.sow(&intent()).await;
    let wishes: Vec<ClaimWish> = (0..CONCURRENT).map(|_| wish(&key)).collect();
    let claimed = join_all(wishes.iter().map(|wish| on.claim_intent(wish))).await;
    let won = claimed.iter().zip(&wishes).filter_map(|(claimed, wish)| {
        matches!(claimed, IntentClaimed::Won(_)).then_some(wish.stamp)
    });
    let won: Vec<Stamp> = won.collect();
    assert_eq!(won.len(), 1, "{claimed:?}");
    assert!(on.attempt_is(won[0], "open").await);
    assert_eq!(on.count_where("eec_run_attempt", "true").await, 1);
    let line = on.line(&key).await;
    assert_eq!((line.tries, line.deaths, line.claimed), (1, 0, true));
}

pub async fn one_of_many_claims_of_an_intent_in_a_batch_wins(on: &Fixture) {
    let (key, other) = (on.sow(&intent()).await, on.sow(&intent()).await);
    let wishes = [wish(&key), wish(&other), wish(&key), wish(&key)];
    let claimed = on.store.claim(&wishes).await.unwrap();
    let won = claimed
        .iter()
        .map(|one| matches!(one, IntentClaimed::Won(_)));
    assert!(won.eq([true, true, false, false]), "{claimed:?}");
    let open = on.count_where("eec_run_attempt", "status = 'open'").await;
    assert_eq!(open, 2);
    assert_eq!(on.line(&other).await.tries, 1);
}

pub async fn a_claim_gets_all_that_is_sent(on: &Fixture) {
    let sown = intent().due(Some(-60_000));
    let key = on.sow(&sown).await;
    let wish = ClaimWish {
        worker: "w\u{0}1".into(),
        ..wish(&key)
    };
    let claimed = on.win_intent(&wish).await;
    assert_eq!(claimed.key, key);
    assert_eq!(claimed.run_id, sown.run_id);
    assert_eq!((claimed.seq, &*claimed.step), (1, "receipt"));
    assert_eq!(claimed.destination, Destination("mail".into()));
    assert_eq!(claimed.idempotency_key, "key-1");
    assert_eq!(claimed.stamp, wish.stamp);
    assert_eq!((claimed.tries, claimed.faults), (1, 0));
    // However long it waited: the horizon counts from the first try.
    assert!(claimed.age.as_secs() < 30, "{:?}", claimed.age);
    assert_eq!(claimed.sending, sending());
    assert_eq!(claimed.body, b"hello\0"[..]);
    assert_eq!(
        on.count_where("eec_run_attempt", "worker = 'w 1' and try = 1")
            .await,
        1
    );
}

pub async fn the_horizon_counts_from_the_first_try_after_a_redrive(on: &Fixture) {
    let sown = intent()
        .due(Some(-60_000))
        .with(&[("tries", "7"), ("tries_before", "7")]);
    let key = on.sow(&sown).await;
    let first = on.claimed(&key).await;
    on.end(&first, given_back()).await;
    // A claim that was given back was no try.
    let claimed = on.win_intent(&wish(&key)).await;
    assert_eq!((claimed.tries, claimed.tries_before), (8, 7));
    assert!(claimed.age.as_secs() < 30, "{:?}", claimed.age);
    let later = intent().due(Some(-60_000));
    let later = later.with(&[("tries", "8"), ("tries_before", "7")]);
    let key = on.sow(&later).await;
    let claimed = on.win_intent(&wish(&key)).await;
    assert!(claimed.age.as_secs() >= 60, "{:?}", claimed.age);
}

pub async fn a_body_of_five_megabytes_is_sent_whole(on: &Fixture) {
    let body = match on.raw.kind() {
        Kind::Postgres => format!("convert_to(repeat('x', {BODY_BYTES}), 'UTF8')"),
        Kind::Sqlite => {
            let half = BODY_BYTES / 2;
            format!("cast(replace(hex(zeroblob({half})), '0', 'x') as blob)")
        }
    };
    let key = on.sow_with(&intent(), &body).await;
    let bytes = u64::try_from(BODY_BYTES).unwrap();
    assert_eq!(on.line(&key).await.body_bytes, Some(bytes));
    let claimed = on.win_intent(&wish(&key)).await;
    assert_eq!(claimed.body.len(), BODY_BYTES);
    assert!(claimed.body.iter().all(|byte| *byte == b'x'));
}

pub async fn a_claim_of_an_intent_sent_again_is_won_again(on: &Fixture) {
    let key = on.sow(&intent()).await;
    // Also when its lease is over meanwhile: nobody else has it.
    for wish in [doomed(&key), wish(&key)] {
        let first = on.win_intent(&wish).await;
        let before = on.all_rows().await;
        let second = on.win_intent(&wish).await;
        assert_eq!(second.tries, first.tries);
        assert_eq!(second.body, first.body);
        assert_eq!(on.all_rows().await, before);
        let finished = on.end(&wish, given_back()).await;
        assert_eq!(finished, Finished::Taken);
        // A stamp is for one attempt.
        assert!(matches!(on.claim_intent(&wish).await, IntentClaimed::Lost));
    }
}

pub async fn only_what_is_pending_and_due_is_claimed(on: &Fixture) {
    let mut keys = vec![
        on.sow(&intent().due(None)).await,
        on.sow(&intent().due(Some(3_600_000))).await,
        on.sow(&intent().with(&[("status", "'completed'")])).await,
        on.sow(&intent().with(&[("status", "'dead'")])).await,
        on.sow(&intent().with(&[("status", "'discarded'")])).await,
    ];
    let held = on.sow(&intent()).await;
    on.claimed(&held).await;
    keys.push(held);
    keys.push(intent().key());
    let before = on.all_rows().await;
    let wishes: Vec<ClaimWish> = keys.iter().map(wish).collect();
    let claimed = on.store.claim(&wishes).await.unwrap();
    let lost = |one| matches!(one, &IntentClaimed::Lost);
    assert!(claimed.iter().all(lost), "{claimed:?}");
    assert_eq!(on.all_rows().await, before);
    let quarantined = on.sow(&intent().with(&[("status", "'quarantined'")])).await;
    let claimed = on.claim_intent(&wish(&quarantined)).await;
    assert!(matches!(claimed, IntentClaimed::Quarantined));
}

pub async fn a_claim_lost_to_the_end_of_its_lease_counts_a_death(on: &Fixture) {
    let key = on.sow(&intent()).await;
    let first = on.lost(&key).await;
    let second = on.claimed(&key).await;
    assert!(on.attempt_is(first.stamp, "lost").await);
    assert!(on.attempt_is(second.stamp, "open").await);
    let line = on.line(&key).await;
    assert_eq!((line.tries, line.deaths), (2, 1));
    assert_eq!(line.outcome.as_deref(), Some("lost"));
}

pub async fn three_deaths_in_a_row_quarantine_an_intent(on: &Fixture) {
    let key = on.sow(&intent()).await;
    let mut stamps = Vec::new();
    for _ in 0..3 {
        stamps.push(on.lost(&key).await.stamp);
    }
    let claimed = on.claim_intent(&wish(&key)).await;
    assert!(matches!(claimed, IntentClaimed::Quarantined), "{claimed:?}");
    for stamp in &stamps {
        assert!(on.attempt_is(*stamp, "lost").await);
    }
    assert_eq!(on.count_where("eec_run_attempt", "true").await, 3);
    let line = on.line(&key).await;
    assert_eq!(line.status, IntentStatus::Quarantined);
    assert_eq!((line.tries, line.deaths, line.claimed), (3, 3, false));
    assert!(line.ended_at.is_some() && line.due_at.is_none());
    assert!(line.body_bytes.is_some());
    assert!(on.is_changed(&key).await);
    // It is over: not even who had it can say more.
    let before = on.all_rows().await;
    let last = ClaimWish {
        stamp: stamps[2],
        ..wish(&key)
    };
    assert_eq!(on.end(&last, delivered()).await, Finished::Stale);
    assert_eq!(on.all_rows().await, before);
}

pub async fn a_try_that_ended_resets_the_deaths(on: &Fixture) {
    for (end, left) in [(again(), 0), (given_back(), 2)] {
        let key = on.sow(&intent()).await;
        on.lost(&key).await;
        on.lost(&key).await;
        let third = on.claimed(&key).await;
        assert_eq!(on.line(&key).await.deaths, 2);
        assert_eq!(on.end(&third, end).await, Finished::Taken);
        // One that was given back tells nothing of what killed the others.
        assert_eq!(on.line(&key).await.deaths, left);
    }
}

pub async fn a_withdrawn_intent_whose_claim_is_over_is_discarded(on: &Fixture) {
    let key = on.sow(&intent()).await;
    let first = on.lost(&key).await;
    on.raw
        .execute("update eec_effect_intent set withdrawn = true")
        .await;
    assert!(matches!(
        on.claim_intent(&wish(&key)).await,
        IntentClaimed::Lost
    ));
    assert_eq!(on.status(&key).await, IntentStatus::Discarded);
    assert!(on.is_changed(&key).await);
    assert!(on.attempt_is(first.stamp, "lost").await);
    assert_eq!(on.count_where("eec_run_attempt", "true").await, 1);
}

pub async fn a_paused_destination_is_not_claimed_and_keeps_its_backlog(on: &Fixture) {
    let key = on.sow(&intent().to("mail")).await;
    let other = on.sow(&intent().to("sms")).await;
    let held = on.sow(&intent().to("mail")).await;
    let at_work = on.claimed(&held).await;
    pause(on, "mail", true).await;
    let before = on.all_rows().await;
    assert_eq!(lanes(on, None, 10).await, ["acme sms"]);
    assert!(matches!(
        on.claim_intent(&wish(&key)).await,
        IntentClaimed::Lost
    ));
    assert_eq!(on.all_rows().await, before);
    on.claimed(&other).await;
    // What was under way ends as ever.
    assert_eq!(on.end(&at_work, delivered()).await, Finished::Taken);
    pause(on, "mail", false).await;
    assert_eq!(lanes(on, None, 10).await, ["acme mail"]);
    on.claimed(&key).await;
}

pub async fn lanes_are_told_in_order_where_something_is_due(on: &Fixture) {
    for (tenant, destination) in [("b", "mail"), ("a", "sms"), ("a", "mail"), ("a b", "mail")] {
        for _ in 0..3 {
            on.sow(&Sown::of(tenant).to(destination)).await;
        }
    }
    on.sow(&Sown::of("c").due(Some(3_600_000))).await;
    on.sow(&Sown::of("c").due(None)).await;
    on.sow(&Sown::of("d").with(&[("status", "'dead'")]).due(None))
        .await;
    let all = ["a mail", "a sms", "a b mail", "b mail"];
    assert_eq!(lanes(on, None, 10).await, all);
    assert_eq!(lanes(on, None, 2).await, all[..2]);
    assert_eq!(lanes(on, Some(lane("a", "mail")), 2).await, all[1..3]);
    assert_eq!(lanes(on, Some(lane("a", "n")), 9).await, all[1..]);
    assert_eq!(lanes(on, Some(lane("b", "mail")), 9).await, [""; 0]);
    assert_eq!(lanes(on, None, 0).await, [""; 0]);
}

pub async fn each_lane_gives_what_was_due_for_longest(on: &Fixture) {
    let mut acme = Vec::new();
    for due_ms in [-100, -300, -200, 3_600_000] {
        acme.push(on.sow(&intent().due(Some(due_ms))).await);
    }
    let other = on.sow(&Sown::of("other").due(Some(-400))).await;
    on.sow(&intent().to("sms")).await;
    let wishes = |limit| {
        let of = |(tenant, limit)| LaneWish {
            lane: lane(tenant, "mail"),
            limit,
        };
        [("other", 5), ("acme", limit), ("nobody", 5)]
            .map(of)
            .to_vec()
    };
    let due = |wishes: Vec<LaneWish>| async move { on.store.due(&wishes).await.unwrap() };
    let [latest, oldest, middle, _] = &acme[..] else {
        unreachable!()
    };
    assert_eq!(due(wishes(2)).await, refs([&other, oldest, middle]));
    assert_eq!(due(wishes(9)).await, refs([&other, oldest, middle, latest]));
    assert_eq!(due(wishes(0)).await, refs([&other]));
    assert_eq!(due(vec![]).await, refs([]));
    // A claim that lasts is not due, one that is over is.
    on.claimed(oldest).await;
    on.lost(latest).await;
    assert_eq!(due(wishes(9)).await, refs([&other, middle, latest]));
}

pub async fn a_claim_is_extended_by_its_stamp_alone(on: &Fixture) {
    let key = on.sow(&intent()).await;
    let first = on.lost(&key).await;
    let beat = |wish: &ClaimWish| ClaimBeat {
        key: wish.key.clone(),
        stamp: wish.stamp,
        lease: LONG,
    };
    let stranger = wish(&key);
    let beats = [beat(&first), beat(&stranger), beat(&first)];
    let extended = on.store.extend(&beats).await.unwrap();
    assert_eq!(extended, [true, false, true]);
    assert!(matches!(
        on.claim_intent(&wish(&key)).await,
        IntentClaimed::Lost
    ));
    assert!(on.line(&key).await.claimed);
    let mut short = beat(&first);
    short.lease = Duration::ZERO;
    assert_eq!(on.store.extend(&[short]).await.unwrap(), [true]);
    let second = on.claimed(&key).await;
    assert_eq!(on.store.extend(&[beat(&first)]).await.unwrap(), [false]);
    assert_eq!(on.end(&second, dead()).await, Finished::Taken);
    let before = on.all_rows().await;
    assert_eq!(on.store.extend(&[beat(&second)]).await.unwrap(), [false]);
    assert_eq!(on.all_rows().await, before);
}

pub async fn an_intent_that_cant_be_read_takes_no_other_with_it(on: &Fixture) {
    let (broken, sound) = (on.sow(&intent()).await, on.sow(&intent()).await);
    let (id, part) = (on.id(broken.id.0), "'message'");
    on.raw
        .run(format!(
            "delete from eec_effect_body where intent_id = {id} and part = {part}"
        ))
        .await;
    let claimed = on.store.claim(&[doomed(&broken), wish(&sound)]).await;
    let claimed = claimed.unwrap();
    assert!(matches!(claimed[0], IntentClaimed::Lost));
    assert!(matches!(claimed[1], IntentClaimed::Won(_)));
    for _ in 0..2 {
        on.claim_intent(&doomed(&broken)).await;
    }
    let claimed = on.claim_intent(&doomed(&broken)).await;
    assert!(matches!(claimed, IntentClaimed::Quarantined), "{claimed:?}");
}

fn refs<const N: usize>(keys: [&IntentKey; N]) -> Vec<IntentKey> {
    keys.into_iter().cloned().collect()
}

fn lane(tenant: &str, destination: &str) -> Lane {
    Lane {
        tenant: TenantScope::stored(tenant),
        destination: Destination(destination.into()),
    }
}

async fn lanes(on: &Fixture, after: Option<Lane>, limit: u32) -> Vec<String> {
    let lanes = on.store.lanes(after.as_ref(), limit).await.unwrap();
    let told = |lane: &Lane| format!("{} {}", lane.tenant.as_str(), lane.destination.0);
    lanes.iter().map(told).collect()
}

async fn pause(on: &Fixture, destination: &str, paused: bool) {
    let audit = Audit {
        operator: "jo".into(),
        reason: "they asked".into(),
    };
    let to = Destination(destination.into());
    on.store.set_paused(&to, paused, &audit).await.unwrap();
}
