//! What clients look up on the public listener: their own records and runs, and no others'.

use std::time::{Duration, Instant};

use serde_json::Value;

use super::store_outage::{behind, proxy};
use crate::support::chaos_proxy::Mode;
use crate::support::client::{Answer, Call};
use crate::support::clock::AT_ONCE;
use crate::support::gateway::{Bench, TestGateway};
use crate::support::rows::Database;
use crate::support::upstream::{Gate, Reply, State, Upstream};

each_store!(
    a_record_is_told_as_it_stands,
    a_look_up_waits_for_the_answer_if_asked_to,
    a_look_up_waits_no_longer_than_asked,
    a_stuck_run_is_not_waited_for,
    a_drain_ends_a_look_up_that_waits,
    what_is_anothers_is_not_there,
    principals_see_their_own_records_only,
    a_record_under_an_older_secret_is_found,
    no_route_ever_sees_the_gateways_own_paths,
    only_looking_is_allowed,
);

on_postgres!(without_the_store_a_look_up_says_so);

/// A look-up's document.
#[track_caller]
pub fn told(answer: &Answer) -> Value {
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(answer.header("cache-control").as_deref(), Some("no-store"));
    assert_eq!(answer.idempotency(), "");
    serde_json::from_slice(&answer.body).expect("JSON")
}

fn record(gateway: &TestGateway, key: &str) -> Call {
    gateway.call("GET", &format!("/.oncegate/records/main/{key}"))
}

fn executed(state: &State) -> bool {
    state.executions("k") == 1
}

async fn a_record_is_told_as_it_stands(bench: Bench) {
    let gate = Gate::closed();
    let slow = Reply::new(201).hold(&gate);
    bench.upstream.on_post("/pay").reply(slow);
    let gateway = bench.gateway().start().await;
    record(&gateway, "k")
        .send()
        .await
        .assert_problem(404, "not-found", "");
    let first = gateway.post("/pay").key("k").begin();
    bench.upstream.until(executed).await;
    let pending = record(&gateway, "k").send().await;
    assert!(matches!(pending.retry_after(), Some(1..=2)), "{pending:?}");
    let document = told(&pending);
    assert_eq!(document["pool"], "main");
    assert_eq!(document["key"], "k");
    assert_eq!(document["status"], "pending");
    assert_eq!(document["decision"], Value::Null);
    assert_eq!(document["run"], Value::Null);
    assert_eq!(document["retry_after"], pending.retry_after().unwrap());

    gate.open();
    let first = first.answer().await;
    first.assert_is(201, "executed");
    let completed = record(&gateway, "k").send().await;
    assert_eq!(completed.retry_after(), None);
    let document = told(&completed);
    assert_eq!(document["status"], "completed");
    let decision = &document["decision"];
    assert_eq!(decision["id"], first.decision().unwrap());
    assert_eq!(decision["status"], 201);
    let header = |name| first.header(name).unwrap();
    assert_eq!(decision["created"], header("idempotency-created"));
    assert_eq!(decision["expires"], header("idempotency-expires"));
    assert_eq!(document["run"], Value::Null);

    let head = gateway.call("HEAD", "/.oncegate/records/main/k");
    let head = head.send().await;
    assert_eq!((head.status, head.body.len()), (200, 0));
    let length = completed.body.len().to_string();
    assert_eq!(head.header("content-length"), Some(length));
}

async fn a_look_up_waits_for_the_answer_if_asked_to(bench: Bench) {
    let gate = Gate::closed();
    let slow = Reply::new(201).hold(&gate);
    bench.upstream.on_post("/pay").reply(slow);
    let gateway = bench.gateway().start().await;
    let first = gateway.post("/pay").key("k").begin();
    bench.upstream.until(executed).await;
    let looking = record(&gateway, "k").header("Prefer", "wait=30").begin();
    gateway.until_parked(1).await;
    assert!(!looking.is_over());
    gate.open();
    first.answer().await.assert_is(201, "executed");
    let opened = Instant::now();
    let seen = looking.answer().await;
    assert!(opened.elapsed() < AT_ONCE);
    assert_eq!(told(&seen)["status"], "completed");
    let applied = seen.header("preference-applied");
    assert_eq!(applied.as_deref(), Some("wait=30"));
    gateway.until_parked(0).await;
}

async fn a_look_up_waits_no_longer_than_asked(bench: Bench) {
    let gate = Gate::closed();
    let slow = Reply::new(201).hold(&gate);
    bench.upstream.on_post("/pay").reply(slow);
    let gateway = bench.gateway().start().await;
    let first = gateway.post("/pay").key("k").begin();
    bench.upstream.until(executed).await;
    let asked = Instant::now();
    let seen = record(&gateway, "k")
        .header("Prefer", "wait=1")
        .send()
        .await;
    assert_eq!(told(&seen)["status"], "pending");
    let waited = asked.elapsed();
    assert!(
        waited >= Duration::from_millis(900) && waited < AT_ONCE,
        "{waited:?}"
    );
    gate.open();
    first.answer().await.assert_is(201, "executed");
    // What is settled is not waited for.
    let asked = Instant::now();
    let seen = record(&gateway, "k")
        .header("Prefer", "wait=30")
        .send()
        .await;
    assert_eq!(told(&seen)["status"], "completed");
    assert!(asked.elapsed() < AT_ONCE);
}

async fn a_stuck_run_is_not_waited_for(bench: Bench) {
    let hook = Upstream::start().await;
    let effect = r#"follow_up = "flow""#;
    let workflow = r#"
        name = "flow"
        step = [{ name = "one", http = "hook", template = "{{ decision.body.absent.deeper }}" }]
    "#;
    let setup = bench.gateway().hook(&hook).more("workflow", workflow);
    let gateway = setup.route(effect).start().await;
    let first = gateway.post("/pay").key("k").send().await;
    first.assert_is(200, "executed");
    bench.database.until_runs_are(1, "stuck").await;
    let path = format!("/.oncegate/runs/{}", first.decision().unwrap());
    let asked = Instant::now();
    let seen = gateway.call("GET", &path).header("Prefer", "wait=30");
    let seen = seen.send().await;
    assert_eq!(told(&seen)["status"], "stuck");
    assert!(asked.elapsed() < AT_ONCE);
    assert_eq!(seen.retry_after(), None);
}

async fn a_drain_ends_a_look_up_that_waits(bench: Bench) {
    let gate = Gate::closed();
    let slow = Reply::new(201).hold(&gate);
    bench.upstream.on_post("/pay").reply(slow);
    let mut gateway = bench.gateway().start().await;
    let first = gateway.post("/pay").key("k").begin();
    bench.upstream.until(executed).await;
    let looking = record(&gateway, "k").header("Prefer", "wait=30").begin();
    gateway.until_parked(1).await;
    gateway.sigterm();
    assert_eq!(told(&looking.answer().await)["status"], "pending");
    gate.open();
    first.answer().await.assert_is(201, "executed");
    assert_eq!(gateway.end().await.code(), Some(0));
}

async fn what_is_anothers_is_not_there(bench: Bench) {
    let source = "source = \"header:x-tenant\"";
    let gateway = bench.gateway().section("tenant", source).start().await;
    let own = gateway.post("/pay").key("k").header("X-Tenant", "one");
    own.send().await.assert_is(200, "executed");
    let own = record(&gateway, "k").header("X-Tenant", "one").send().await;
    assert_eq!(told(&own)["status"], "completed");
    let other = record(&gateway, "k").header("X-Tenant", "two").send().await;
    other.assert_problem(404, "not-found", "");
    let absent = record(&gateway, "nowhere").header("X-Tenant", "two");
    let absent = absent.send().await;
    // Nothing tells what is there and another's from what is not there.
    assert_eq!(other.body, absent.body);
    for nobody in [
        record(&gateway, "k"),
        record(&gateway, "k").header("X-Tenant", ""),
        record(&gateway, "nowhere"),
    ] {
        let nobody = nobody.send().await;
        nobody.assert_problem(401, "tenant-missing", "");
    }
}

async fn principals_see_their_own_records_only(bench: Bench) {
    let setup = bench
        .gateway()
        .section("tenant", "principal = \"credential\"");
    let gateway = setup.start().await;
    let call = |call: Call, who: &str| call.header("Authorization", format!("Bearer {who}"));
    let first = call(gateway.post("/pay").key("k"), "ann").send().await;
    first.assert_is(200, "executed");
    let own = call(record(&gateway, "k"), "ann").send().await;
    assert_eq!(told(&own)["status"], "completed");
    let other = call(record(&gateway, "k"), "bob").send().await;
    other.assert_problem(404, "not-found", "");
}

async fn a_record_under_an_older_secret_is_found(bench: Bench) {
    let setup = bench.gateway().section("tenant", "source = \"credential\"");
    let mut gateway = setup.start().await;
    let by = |call: Call| call.header("Authorization", "Bearer sesame");
    let first = by(gateway.post("/pay").key("k")).send().await;
    first.assert_is(200, "executed");
    let secret = match &bench.database {
        Database::Sqlite(_) => "x'".to_owned() + &"07".repeat(32) + "', 0",
        Database::Postgres(_) => "decode(repeat('07', 32), 'hex'), now()".to_owned(),
    };
    let insert =
        format!("insert into eec_secret (version, secret, created_at) values (2, {secret})");
    bench.database.execute(&insert).await;
    gateway.restart().await;
    let seen = by(record(&gateway, "k")).send().await;
    let document = told(&seen);
    assert_eq!(document["decision"]["id"], first.decision().unwrap());
}

async fn no_route_ever_sees_the_gateways_own_paths(bench: Bench) {
    let route = "path = \"/.oncegate/*\"\npool = \"main\"";
    let gateway = bench.gateway().other_route(route).start().await;
    let own = [
        "/.oncegate",
        "/.oncegate/",
        "/.oncegate/other",
        "//.oncegate//records/main/k",
        "/%2eoncegate/records/main/k",
        "/.%6Fncegate/runs/1",
        "/.oncegate/runs/not-an-id",
        "/.oncegate/runs/018f0000-0000-7000-8000-000000000000",
        "/.oncegate/records/main/",
        "/.oncegate/records/main/%00",
        "/.oncegate/records/main/k/more",
        "/.oncegate/../pay",
    ];
    for path in own {
        let answer = gateway.call("GET", path).send().await;
        answer.assert_problem(404, "not-found", "");
    }
    let nameless = gateway.call("GET", "/.oncegate/records/main/k");
    let nameless = nameless.without("host").send().await;
    assert_eq!(nameless.status, 400, "{nameless:?}");
    assert!(bench.upstream.requests().is_empty());
    gateway.call("GET", "/oncegate/").send().await;
    assert_eq!(bench.upstream.requests().len(), 1);
}

async fn only_looking_is_allowed(bench: Bench) {
    let gateway = bench.gateway().start().await;
    for method in ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"] {
        let call = gateway.call(method, "/.oncegate/records/main/k").key("k");
        let answer = call.send().await;
        answer.assert_problem(405, "method-not-allowed", "");
        assert_eq!(answer.header("allow").as_deref(), Some("GET, HEAD"));
    }
    assert!(bench.upstream.requests().is_empty());
}

async fn without_the_store_a_look_up_says_so(bench: Bench) {
    let proxy = proxy(&bench).await;
    let gateway = behind(&bench, &proxy).start().await;
    let first = gateway.post("/pay").key("k").send().await;
    first.assert_is(200, "executed");
    proxy.set(Mode::Reset);
    let run = format!("/.oncegate/runs/{}", first.decision().unwrap());
    for path in ["/.oncegate/records/main/k", &run] {
        let asked = Instant::now();
        let answer = gateway.call("GET", path).send().await;
        answer.assert_problem(503, "store-unavailable", "");
        assert!(answer.retry_after().is_some());
        assert!(asked.elapsed() < AT_ONCE);
    }
}
