//! Effects whatever happens to the gateways: at least once, never more often than the faults allow.

use std::time::Duration;

use super::effects::with_effects;
use crate::support::client::send_all;
use crate::support::clock::eventually;
use crate::support::gateway::Bench;
use crate::support::invariants::{assert_all, what_was_final_still_is};
use crate::support::upstream::{Gate, Reply, Upstream};

each_store!(
    kills_at_any_moment_lose_nothing,
    a_drain_gives_claims_back_and_charges_no_try,
    an_intent_that_kills_its_process_three_times_is_quarantined_and_others_flow,
    a_claim_whose_process_died_is_taken_over_within_two_leases,
);
on_postgres!(
    a_drainer_that_was_stopped_past_its_claim_changes_nothing_that_is_final,
    two_gateways_send_everything_once_and_in_order,
);

const QUICK: &str = "poll_interval = \"200ms\"\nclaim_lease = \"3500ms\"";
const THREE: &str = r#"{ http = "hook", path = "/a" }, { http = "hook", path = "/b" },
    { http = "hook", path = "/c" }"#;

async fn kills_at_any_moment_lose_nothing(bench: Bench) {
    bench.allow_reruns();
    let hook = Upstream::start().await;
    for path in ["/a", "/b", "/c"] {
        hook.on_post(path)
            .reply(Reply::new(200).delay(Duration::from_millis(15)));
    }
    let setup = with_effects(&bench, &hook, THREE).section("outbox", QUICK);
    let mut gateway = setup.start().await;
    let mut decided = 0;
    for round in 0..6_u64 {
        let calls = (0..15).map(|n| gateway.post("/pay").key(format!("k{round}-{n}")));
        for answer in send_all(calls).await {
            answer.assert_is(200, "executed");
            decided += 1;
        }
        // At another point of the work each time.
        let seen = hook.requests().len();
        let more = usize::try_from(round * 4).expect("small");
        eventually("some were sent", async || {
            (hook.requests().len() >= seen + more).then_some(())
        })
        .await;
        gateway.sigkill();
        gateway.restart().await;
    }
    bench.database.until_runs_are(decided, "completed").await;
    // Six kills, each with at most as many in flight as there are runs of its round.
    assert_all(&bench.database, &hook.requests(), 6 * 15).await;
}

async fn a_drain_gives_claims_back_and_charges_no_try(bench: Bench) {
    let hook = Upstream::start().await;
    let setup = with_effects(&bench, &hook, THREE);
    let mut gateway = setup.start().await;
    let calls = (0..30).map(|n| gateway.post("/pay").key(format!("k{n}")));
    send_all(calls).await;
    gateway.sigterm();
    assert_eq!(gateway.end().await.code(), Some(0));
    let held = "select count(*) from eec_effect_intent where claim_token is not null";
    assert_eq!(
        bench.database.number(held).await,
        0,
        "claims are given back"
    );
    let charged = "select count(*) from eec_effect_intent where status = 'pending' and tries > 0";
    assert_eq!(bench.database.number(charged).await, 0, "no try is charged");
    gateway.restart().await;
    bench.database.until_runs_are(30, "completed").await;
    assert_all(&bench.database, &hook.requests(), 0).await;
}

async fn an_intent_that_kills_its_process_three_times_is_quarantined_and_others_flow(bench: Bench) {
    let hook = Upstream::start().await;
    hook.on_post("/poison")
        .reply(Reply::new(200).hold(&Gate::closed()));
    let setup = with_effects(&bench, &hook, r#"{ http = "hook", path = "/poison" }"#);
    let setup = setup.section("outbox", QUICK);
    let mut gateway = setup.start().await;
    gateway
        .post("/pay")
        .key("k")
        .send()
        .await
        .assert_is(200, "executed");
    for deaths in 1..=3 {
        hook.until(|state| state.executions_at("/poison") == deaths)
            .await;
        gateway.sigkill();
        gateway.restart().await;
    }
    let runs = bench.database.until_runs_are(1, "stuck").await;
    assert!(runs[0].reason.contains("quarantined"), "{runs:?}");
    assert_eq!(bench.database.intents().await[0].status, "quarantined");
    assert_eq!(hook.requests().len(), 3);
    assert_all(&bench.database, &hook.requests(), 2).await;
}

async fn a_claim_whose_process_died_is_taken_over_within_two_leases(bench: Bench) {
    let hook = Upstream::start().await;
    let gate = Gate::closed();
    hook.on_post("/").once().reply(Reply::new(200).hold(&gate));
    let setup = with_effects(&bench, &hook, r#"{ http = "hook" }"#);
    let mut gateway = setup.section("outbox", QUICK).start().await;
    gateway
        .post("/pay")
        .key("k")
        .send()
        .await
        .assert_is(200, "executed");
    hook.until(|state| state.requests.len() == 1).await;
    gateway.sigkill();
    let killed = std::time::Instant::now();
    gateway.restart().await;
    hook.until(|state| state.requests.len() == 2).await;
    assert!(
        killed.elapsed() < Duration::from_secs(7),
        "{:?}",
        killed.elapsed()
    );
    bench.database.until_runs_are(1, "completed").await;
    assert_all(&bench.database, &hook.requests(), 1).await;
    let lost = "select count(*) from eec_run_attempt where status = 'lost'";
    assert_eq!(bench.database.number(lost).await, 1);
}

async fn a_drainer_that_was_stopped_past_its_claim_changes_nothing_that_is_final(bench: Bench) {
    let hook = Upstream::start().await;
    let gate = Gate::closed();
    // The first try of each of five hangs, and fails once it goes on.
    for _ in 0..5 {
        hook.on_post("/").once().reply(Reply::new(422).hold(&gate));
    }
    let setup = || with_effects(&bench, &hook, r#"{ http = "hook" }"#).section("outbox", QUICK);
    let mut stopped = setup().start().await;
    let calls = (0..5).map(|n| stopped.post("/pay").key(format!("k{n}")));
    send_all(calls).await;
    hook.until(|state| state.requests.len() == 5).await;
    stopped.sigstop();
    let other = setup().start().await;
    bench.database.until_runs_are(5, "completed").await;
    let before = bench.database.intents().await;
    let rows = bench.database.row_counts().await;
    gate.open();
    stopped.sigcont();
    eventually("its late words are refused and counted", async || {
        let stale = stopped
            .metrics()
            .await
            .sum("oncegate_stale_stamps_total", &[]);
        (stale > 4.5).then_some(())
    })
    .await;
    what_was_final_still_is(&before, &bench.database.intents().await);
    assert_eq!(bench.database.row_counts().await, rows);
    assert_all(&bench.database, &hook.requests(), 5).await;
    drop(other);
}

async fn two_gateways_send_everything_once_and_in_order(bench: Bench) {
    let hook = Upstream::start().await;
    let effect = r#"{ http = "hook" }"#;
    let twenty = vec![effect; 20].join(", ");
    let setup = || {
        let setup = with_effects(&bench, &hook, &twenty);
        setup.section("outbox", "poll_interval = \"100ms\"")
    };
    let gateways = [setup().start().await, setup().start().await];
    let calls = (0..40).map(|n| gateways[n % 2].post("/pay").key(format!("k{n}")));
    for answer in send_all(calls).await {
        answer.assert_is(200, "executed");
    }
    bench.database.until_runs_are(40, "completed").await;
    assert_eq!(hook.requests().len(), 800);
    assert_all(&bench.database, &hook.requests(), 0).await;
}
