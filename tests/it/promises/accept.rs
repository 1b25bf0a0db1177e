//! Routes that accept requests durably: a 202 at once, one call with what the client sent, and its
//! answer for whoever asks, whatever is killed in between.

use std::time::{Duration, Instant};

use serde_json::Value;

use super::lookups::told;
use crate::support::client::{Answer, send_all};
use crate::support::clock::{AT_ONCE, eventually};
use crate::support::gateway::{Bench, Setup, TestGateway};
use crate::support::invariants::assert_all;
use crate::support::upstream::{Gate, Reply, Seen, State, Upstream};

each_store!(
    an_accepted_request_is_called_once_with_what_its_client_sent,
    a_duplicate_gets_the_same_run_and_then_its_result,
    a_client_that_waits_gets_the_answer,
    a_client_that_waits_too_short_is_told_where_to_look,
    a_drain_ends_a_wait_and_loses_nothing,
    another_request_with_the_key_is_refused,
    a_request_without_a_key_is_accepted_under_a_key_of_its_own,
    the_service_sees_the_key_that_the_route_says,
    any_header_and_path_is_sent_as_it_came,
    an_answer_that_is_no_success_is_the_result,
    an_answer_that_was_not_kept_is_said_to_be_so,
    a_released_answer_is_no_result_and_the_call_is_made_again_the_same,
    what_follows_the_call_sees_its_answer,
    nothing_follows_a_call_that_was_refused,
    accepted_runs_are_their_tenants_own,
    what_was_accepted_is_called_though_the_gateway_was_killed_at_once,
    a_call_whose_end_was_lost_is_made_again_the_same,
);

const QUICK: &str = "poll_interval = \"100ms\"\nclaim_lease = \"3500ms\"";

fn accepting(bench: &Bench) -> Setup {
    let setup = bench.gateway().section("outbox", QUICK);
    setup.route("mode = \"accept\"")
}

/// Asserts that it is a 202 that points to a run; gives the location.
#[track_caller]
fn accepted(answer: &Answer, idempotency: &str) -> String {
    answer.assert_is(202, idempotency);
    let location = answer.header("location").expect("a location");
    let document: Value = serde_json::from_slice(&answer.body).expect("JSON");
    let decision = answer.decision().expect("a decision");
    assert_eq!(location, format!("/.oncegate/runs/{decision}"));
    assert_eq!(document["run_id"], *decision);
    // Told again when the run is over, so that it can't say how the run is.
    assert_eq!(document.get("status"), None);
    assert_eq!(document["location"], *location);
    assert!(answer.header("idempotency-expires").is_some());
    location
}

async fn look(gateway: &TestGateway, location: &str) -> Value {
    told(&gateway.call("GET", location).send().await)
}

async fn answered(gateway: &TestGateway, location: &str) -> Value {
    eventually("the answer is there", async || {
        let run = look(gateway, location).await;
        (run["answer"] != Value::Null).then_some(run)
    })
    .await
}

async fn ended(gateway: &TestGateway, location: &str) -> Value {
    eventually("the run is over", async || {
        let run = look(gateway, location).await;
        (run["ended"] != Value::Null).then_some(run)
    })
    .await
}

fn key_of(seen: &Seen) -> String {
    let keys = seen.header("idempotency-key");
    assert_eq!(keys.len(), 1, "{keys:?}");
    keys.concat()
}

fn once(state: &State) -> bool {
    state.executions_at("/pay") == 1
}

async fn an_accepted_request_is_called_once_with_what_its_client_sent(bench: Bench) {
    let reply = Reply::new(201)
        .header("content-type", "application/json")
        .body(r#"{"id":7}"#);
    bench.upstream.on_post("/pay").reply(reply);
    let gateway = accepting(&bench).start().await;
    let body = br#"{"amount" : 1, "note": "bytes as they came"}"#;
    let call = gateway.post("/pay?dry=0&x=%20").key("k").json(body);
    let call = call.header("X-Trace", "a").header("X-Trace", "b");
    let first = call.header("Authorization", "Bearer t").send().await;
    let location = accepted(&first, "executed");
    assert!(!first.replayed());

    let run = ended(&gateway, &location).await;
    assert_eq!(run["status"], "completed");
    assert_eq!(run["workflow"], "call");
    assert_eq!(run["answer"]["status"], 201);
    assert_eq!(run["answer"]["body"]["id"], 7);
    assert_eq!(run["answer"]["content_type"], "application/json");
    let requests = bench.upstream.requests();
    assert_eq!(requests.len(), 1);
    let seen = &requests[0];
    assert_eq!((&*seen.method, &*seen.target), ("POST", "/pay?dry=0&x=%20"));
    assert_eq!(seen.body, body);
    assert_eq!(seen.header("x-trace"), ["a", "b"]);
    assert_eq!(seen.header("content-type"), ["application/json"]);
    assert_eq!(seen.header("authorization"), ["Bearer t"]);
    assert_eq!(seen.header("host"), ["gateway.test"]);
    assert_eq!(seen.header("content-length"), [body.len().to_string()]);
    assert_eq!(seen.header("via").len(), 1);
    let key = key_of(seen);
    assert!(key.len() == 36 && key != "k", "{key}");
    assert_all(&bench.database, &requests, 0).await;
    let record = gateway
        .call("GET", "/.oncegate/records/main/k")
        .send()
        .await;
    let record = told(&record);
    assert_eq!(record["status"], "completed");
    assert_eq!(record["decision"]["status"], 202);
    assert_eq!(record["run"]["run_id"], run["run_id"]);
    assert_eq!(record["run"]["location"], *location);
}

async fn a_duplicate_gets_the_same_run_and_then_its_result(bench: Bench) {
    let gate = Gate::closed();
    let reply = Reply::new(201).header("X-Receipt", "7").body("done");
    bench.upstream.on_post("/pay").reply(reply.hold(&gate));
    let gateway = accepting(&bench).start().await;
    let first = gateway.post("/pay").key("k").send().await;
    let location = accepted(&first, "executed");
    bench.upstream.until(once).await;
    let second = gateway.post("/pay").key("k").send().await;
    assert_eq!(accepted(&second, "replayed"), location);
    assert!(second.replayed());
    assert_eq!(second.kept(), first.kept());
    gate.open();
    answered(&gateway, &location).await;
    for _ in 0..3 {
        let result = gateway.post("/pay").key("k").send().await;
        result.assert_is(201, "replayed");
        assert!(result.replayed());
        assert_eq!(result.text(), "done");
        assert_eq!(result.header("x-receipt").as_deref(), Some("7"));
        assert_eq!(result.decision(), first.decision());
        let expires = "idempotency-expires";
        assert_eq!(result.header(expires), first.header(expires));
    }
    assert_eq!(bench.upstream.executions_at("/pay"), 1);
    assert_eq!(bench.database.count("eec_run").await, 1);
}

async fn a_client_that_waits_gets_the_answer(bench: Bench) {
    let gate = Gate::closed();
    let reply = Reply::new(201).header("X-Receipt", "7").body("done");
    bench.upstream.on_post("/pay").reply(reply.hold(&gate));
    let gateway = accepting(&bench).start().await;
    let call = || gateway.post("/pay").key("k").header("Prefer", "wait=10");
    let first = call().begin();
    bench.upstream.until(once).await;
    let others: Vec<_> = (0..3).map(|_| call().begin()).collect();
    gateway.until_parked(4).await;
    gate.open();
    let opened = Instant::now();
    let first = first.answer().await;
    first.assert_is(201, "executed");
    assert!(!first.replayed());
    assert_eq!(first.text(), "done");
    let applied = first.header("preference-applied");
    assert_eq!(applied.as_deref(), Some("wait=10"));
    for other in others {
        let other = other.answer().await;
        other.assert_is(201, "waited");
        assert_eq!(other.kept(), first.kept());
    }
    assert!(opened.elapsed() < AT_ONCE, "{:?}", opened.elapsed());
    assert_eq!(bench.upstream.executions_at("/pay"), 1);
    gateway.until_parked(0).await;
}

async fn a_client_that_waits_too_short_is_told_where_to_look(bench: Bench) {
    let gate = Gate::closed();
    let reply = Reply::new(201).hold(&gate);
    bench.upstream.on_post("/pay").reply(reply);
    let setup = accepting(&bench).route("wait = \"1s\"");
    let gateway = setup.start().await;
    let call = || gateway.post("/pay").key("k").header("Prefer", "wait=60");
    let asked = Instant::now();
    let first = call().send().await;
    let location = accepted(&first, "executed");
    let waited = asked.elapsed();
    assert!(waited >= Duration::from_millis(900), "{waited:?}");
    let applied = first.header("preference-applied");
    assert_eq!(applied.as_deref(), Some("wait=1"));
    let again = call().send().await;
    assert_eq!(accepted(&again, "waited"), location);
    gate.open();
    ended(&gateway, &location).await;
}

async fn a_drain_ends_a_wait_and_loses_nothing(bench: Bench) {
    let gate = Gate::closed();
    let reply = Reply::new(201).hold(&gate);
    bench.upstream.on_post("/pay").reply(reply);
    let mut gateway = accepting(&bench).start().await;
    let call = gateway.post("/pay").key("k").header("Prefer", "wait=10");
    let waiting = call.begin();
    bench.upstream.until(once).await;
    gateway.until_parked(1).await;
    gateway.sigterm();
    let location = accepted(&waiting.answer().await, "executed");
    gate.open();
    assert_eq!(gateway.end().await.code(), Some(0));
    gateway.restart().await;
    assert_eq!(ended(&gateway, &location).await["answer"]["status"], 201);
    assert_eq!(bench.upstream.executions_at("/pay"), 1);
}

async fn another_request_with_the_key_is_refused(bench: Bench) {
    let gateway = accepting(&bench).start().await;
    let first = gateway.post("/pay").key("k").send().await;
    let location = accepted(&first, "executed");
    let other = gateway.post("/pay").key("k").json("{}").send().await;
    other.assert_problem(422, "key-reused", "mismatch");
    ended(&gateway, &location).await;
    let other = gateway.post("/pay").key("k").json("{}").send().await;
    other.assert_problem(422, "key-reused", "mismatch");
    assert_eq!(bench.upstream.executions_at("/pay"), 1);
}

async fn a_request_without_a_key_is_accepted_under_a_key_of_its_own(bench: Bench) {
    let gateway = accepting(&bench).start().await;
    let mut locations = Vec::new();
    for empty in [false, true] {
        let call = gateway.post("/pay");
        let call = if empty { call.key("") } else { call };
        let answer = call.send().await;
        locations.push(accepted(&answer, "executed"));
    }
    assert_ne!(locations[0], locations[1]);
    for location in &locations {
        ended(&gateway, location).await;
    }
    let requests = bench.upstream.requests();
    assert_eq!(requests.len(), 2);
    assert_ne!(key_of(&requests[0]), key_of(&requests[1]));
    drop(gateway);
    let strict = accepting(&bench).route("required = true").start().await;
    let refused = strict.post("/pay").send().await;
    refused.assert_problem(400, "key-missing", "refused");
}

async fn the_service_sees_the_key_that_the_route_says(bench: Bench) {
    let route = |path: &str, key: &str| {
        format!("path = \"{path}\"\npool = \"main\"\nmode = \"accept\"\nforward_key = \"{key}\"")
    };
    let setup = accepting(&bench)
        .other_route(&route("/verbatim", "verbatim"))
        .other_route(&route("/derived", "derived"));
    let gateway = setup.start().await;
    for path in ["/verbatim", "/derived"] {
        let key = format!("\"a, b{path}\"");
        let answer = gateway.post(path).key(key).send().await;
        ended(&gateway, &accepted(&answer, "executed")).await;
    }
    let keyless = gateway.post("/verbatim").send().await;
    ended(&gateway, &accepted(&keyless, "executed")).await;
    let keys: Vec<_> = bench
        .upstream
        .requests()
        .iter()
        .map(|seen| seen.header("idempotency-key").concat())
        .collect();
    assert_eq!(keys[0], "\"a, b/verbatim\"");
    assert_eq!((keys[1].len(), keys[2].len()), (36, 36));
}

async fn any_header_and_path_is_sent_as_it_came(bench: Bench) {
    let gateway = accepting(&bench).start().await;
    let raw = b"\xe2\x80\x9cquoted\xe2\x80\x9d \xff".as_slice();
    let call = gateway.post("//pay//x?a=%00&b='{{").key("k");
    let call = call.header("X-Raw", raw).header("X-Template", "{{ key }}");
    let call = call.body("text/x-\u{e9}", [0_u8, 1, 255]);
    let answer = call.send().await;
    let run = ended(&gateway, &accepted(&answer, "executed")).await;
    assert_eq!(run["status"], "completed");
    let requests = bench.upstream.requests();
    let seen = &requests[0];
    assert_eq!(seen.target, "//pay//x?a=%00&b='{{");
    assert_eq!(seen.body, [0, 1, 255]);
    let value = |name: &str| {
        let mut lines = seen.headers.iter();
        let line = lines.find(|(have, _)| have.eq_ignore_ascii_case(name));
        line.map(|(_, value)| value.clone()).unwrap_or_default()
    };
    assert_eq!(value("x-raw"), raw);
    assert_eq!(value("x-template"), b"{{ key }}");
    assert_eq!(value("content-type"), "text/x-\u{e9}".as_bytes());
}

async fn an_answer_that_is_no_success_is_the_result(bench: Bench) {
    let reply = Reply::new(422)
        .header("content-type", "application/problem+json")
        .body(r#"{"title":"no"}"#);
    bench.upstream.on_post("/pay").reply(reply);
    let gateway = accepting(&bench).start().await;
    let call = gateway.post("/pay").key("k").header("Prefer", "wait=10");
    let first = call.send().await;
    first.assert_is(422, "executed");
    let location = format!("/.oncegate/runs/{}", first.decision().unwrap());
    let run = ended(&gateway, &location).await;
    assert_eq!(run["status"], "failed");
    assert_eq!(run["reason"], "a step failed for good");
    assert_eq!(run["answer"]["body"]["title"], "no");
    let again = gateway.post("/pay").key("k").send().await;
    again.assert_is(422, "replayed");
    assert_eq!(again.text(), r#"{"title":"no"}"#);
    assert_eq!(bench.upstream.executions_at("/pay"), 1);
}

async fn an_answer_that_was_not_kept_is_said_to_be_so(bench: Bench) {
    bench.upstream.on_post("/pay").answer(201, vec![b'x'; 2000]);
    let setup = accepting(&bench).route("store_body_max = \"1KiB\"");
    let gateway = setup.start().await;
    let call = gateway.post("/pay").key("k").header("Prefer", "wait=10");
    let first = call.send().await;
    first.assert_problem(409, "response-not-replayable", "executed");
    let again = gateway.post("/pay").key("k").send().await;
    again.assert_problem(409, "response-not-replayable", "replayed");
    let document: Value = serde_json::from_slice(&again.body).expect("JSON");
    assert_eq!(document["original_status"], 201);
    assert_eq!(bench.upstream.executions_at("/pay"), 1);
}

async fn a_released_answer_is_no_result_and_the_call_is_made_again_the_same(bench: Bench) {
    bench.allow_reruns();
    bench.upstream.on_post("/pay").once().answer(429, "later");
    bench.upstream.on_post("/pay").answer(201, "done");
    let gateway = accepting(&bench).start().await;
    let first = gateway.post("/pay").key("k").json("as it is").send().await;
    let location = accepted(&first, "executed");
    bench.upstream.until(once).await;
    let again = gateway.post("/pay").key("k").json("as it is").send().await;
    assert_eq!(accepted(&again, "replayed"), location);
    assert_eq!(answered(&gateway, &location).await["answer"]["status"], 201);
    let requests = bench.upstream.requests();
    assert_eq!(requests.len(), 2);
    assert_eq!(key_of(&requests[0]), key_of(&requests[1]));
    assert_eq!(requests[0].body, requests[1].body);
    assert_all(&bench.database, &requests, 1).await;
}

/// A route whose calls are followed by one effect that sees the call's answer.
fn followed(bench: &Bench, hook: &Upstream) -> Setup {
    let effect = r#"{ http = "hook", template = 'receipt {{ steps.call.body.id }}' }"#;
    let setup = accepting(bench).hook(hook);
    setup.route(&format!("effect = [{effect}]"))
}

async fn what_follows_the_call_sees_its_answer(bench: Bench) {
    let hook = Upstream::start().await;
    let reply = Reply::new(201)
        .header("content-type", "application/json")
        .body(r#"{"id":7}"#);
    bench.upstream.on_post("/pay").reply(reply);
    let gateway = followed(&bench, &hook).start().await;
    let first = gateway.post("/pay").key("k").send().await;
    let run = ended(&gateway, &accepted(&first, "executed")).await;
    assert_eq!(run["status"], "completed");
    assert_eq!(run["answer"]["body"]["id"], 7);
    assert_eq!(hook.requests()[0].body, b"receipt 7");
}

async fn nothing_follows_a_call_that_was_refused(bench: Bench) {
    let hook = Upstream::start().await;
    bench.upstream.on_post("/pay").answer(409, "no");
    let gateway = followed(&bench, &hook).start().await;
    let first = gateway.post("/pay").key("k").send().await;
    let run = ended(&gateway, &accepted(&first, "executed")).await;
    assert_eq!(run["status"], "failed");
    assert!(hook.requests().is_empty());
}

async fn accepted_runs_are_their_tenants_own(bench: Bench) {
    let source = "source = \"header:x-tenant\"";
    let gateway = accepting(&bench).section("tenant", source).start().await;
    let call = gateway.post("/pay").key("k").header("X-Tenant", "one");
    let location = accepted(&call.send().await, "executed");
    let look = |tenant: &str| gateway.call("GET", &location).header("X-Tenant", tenant);
    told(&look("one").send().await);
    let other = look("two").send().await;
    other.assert_problem(404, "not-found", "");
    let nobody = gateway.call("GET", &location).send().await;
    nobody.assert_problem(401, "tenant-missing", "");
    let anonymous = gateway.post("/pay").send().await;
    anonymous.assert_problem(401, "tenant-missing", "refused");
}

async fn what_was_accepted_is_called_though_the_gateway_was_killed_at_once(bench: Bench) {
    bench.allow_reruns();
    let mut gateway = accepting(&bench).start().await;
    for n in 0..4 {
        let key = format!("k{n}");
        let mut connection = gateway.post("/pay").key(&key).start().await;
        let head = connection.answer_head().await.expect("an answer");
        gateway.sigkill();
        assert_eq!(head.status, 202);
        gateway.restart().await;
        let location = head.header("location").expect("a location");
        let run = ended(&gateway, &location).await;
        assert_eq!(run["answer"]["status"], 200);
    }
    let calls = (0..4).map(|n| gateway.post("/pay").key(format!("k{n}")));
    for answer in send_all(calls).await {
        answer.assert_is(200, "replayed");
    }
    // A kill while the call was made costs a second one, under the same key.
    let mut keys: Vec<_> = bench.upstream.requests().iter().map(key_of).collect();
    keys.sort_unstable();
    keys.dedup();
    assert_eq!(keys.len(), 4);
}

async fn a_call_whose_end_was_lost_is_made_again_the_same(bench: Bench) {
    bench.allow_reruns();
    let held = Reply::new(201).body("first").hold(&Gate::closed());
    bench.upstream.on_post("/pay").once().reply(held);
    bench.upstream.on_post("/pay").answer(201, "second");
    let mut gateway = accepting(&bench).start().await;
    let first = gateway.post("/pay").key("k").send().await;
    let location = accepted(&first, "executed");
    bench.upstream.until(once).await;
    gateway.sigkill();
    gateway.restart().await;
    let again = gateway.post("/pay").key("k").send().await;
    assert_eq!(accepted(&again, "replayed"), location);
    assert_eq!(answered(&gateway, &location).await["answer"]["status"], 201);
    let requests = bench.upstream.requests();
    assert_eq!(requests.len(), 2);
    assert_eq!(key_of(&requests[0]), key_of(&requests[1]));
    assert_eq!(requests[0].sha256, requests[1].sha256);
    let result = gateway.post("/pay").key("k").send().await;
    result.assert_is(201, "replayed");
    assert_eq!(result.text(), "second");
}
