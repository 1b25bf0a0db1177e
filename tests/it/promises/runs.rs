//! Runs: steps in sequence, timers, signals, tasks and compensations, each once, whatever is told
//! again and however often the gateway restarts.

use std::time::Duration;

use serde_json::{Value, json};

use crate::support::client::send_all;
use crate::support::clock::{eventually, let_pass};
use crate::support::gateway::{Bench, Setup, TestGateway};
use crate::support::invariants::assert_all;
use crate::support::upstream::{Reply, Seen, Upstream};

each_store!(
    steps_follow_one_another_and_see_earlier_results,
    an_answer_that_is_nested_without_end_stops_no_run,
    parked_runs_are_left_alone_by_restarts,
    a_timer_that_ended_while_nobody_ran_still_ends,
    a_signal_is_taken_once_however_often_it_is_told,
    a_signal_may_come_before_it_is_awaited,
    a_task_is_done_by_a_step_worker_and_its_result_counts_once,
    a_late_result_of_a_task_is_refused,
    what_was_done_is_undone_in_reverse_order_when_a_later_step_fails,
    a_cancelled_run_undoes_what_was_done_and_cannot_be_redriven,
    a_stuck_run_is_retried_or_resumed_by_an_operator,
    history_is_told_as_a_list_and_as_a_stream_that_resumes,
    every_life_after_a_redrive_has_as_many_tries_as_the_first,
);

/// A gateway whose route starts a workflow `flow` with these steps.
fn with_steps(bench: &Bench, hook: &Upstream, steps: &[&str]) -> Setup {
    let steps: Vec<String> = steps.iter().map(|step| format!("{{ {step} }}")).collect();
    let workflow = format!("name = \"flow\"\nstep = [{}]", steps.join(", "));
    let setup = bench.gateway().hook(hook).tokens();
    let setup = setup.section("outbox", "poll_interval = \"200ms\"");
    setup
        .more("workflow", &workflow)
        .route("follow_up = \"flow\"")
}

async fn api(
    gateway: &TestGateway,
    role: &str,
    method: &str,
    path: &str,
    body: Value,
) -> (u16, Value) {
    let call = gateway.api(role, method, path);
    let call = if method == "GET" {
        call
    } else {
        call.json(body.to_string())
    };
    let answer = call.send().await;
    let body = serde_json::from_str(&answer.text()).unwrap_or(Value::Null);
    (answer.status, body)
}

/// The id of the only run, with dashes.
async fn run_id(gateway: &TestGateway) -> String {
    let (status, runs) = api(gateway, "operator", "GET", "/v1/runs", Value::Null).await;
    assert_eq!(status, 200, "{runs}");
    runs["runs"][0]["run_id"]
        .as_str()
        .expect("an id")
        .to_owned()
}

async fn paid(gateway: &TestGateway) {
    gateway
        .post("/pay")
        .key("k")
        .send()
        .await
        .assert_is(200, "executed");
}

async fn steps_follow_one_another_and_see_earlier_results(bench: Bench) {
    let hook = Upstream::start().await;
    hook.on_post("/one").reply(
        Reply::new(200)
            .header("content-type", "application/json")
            .body(r#"{"id":"r-1"}"#),
    );
    let steps = [
        r#"name = "one", http = "hook", path = "/one""#,
        r#"name = "pause", wait = "300ms""#,
        r#"name = "two", http = "hook", path = "/two", template = '{{ steps.one.body.id }}'"#,
    ];
    let gateway = with_steps(&bench, &hook, &steps).start().await;
    paid(&gateway).await;
    bench.database.until_runs_are(1, "completed").await;
    let seen = hook.requests();
    assert_eq!(
        seen.iter().map(Seen::path).collect::<Vec<_>>(),
        ["/one", "/two"]
    );
    assert_eq!(seen[1].body, b"r-1");
    assert_all(&bench.database, &seen, 0).await;
}

async fn an_answer_that_is_nested_without_end_stops_no_run(bench: Bench) {
    let hook = Upstream::start().await;
    for levels in [126, 100_000] {
        let deep = "[".repeat(levels) + &"]".repeat(levels);
        let json = Reply::new(200).header("content-type", "application/json");
        hook.on_post("/one").once().reply(json.body(deep));
    }
    let steps = [
        r#"name = "one", http = "hook", path = "/one""#,
        r#"name = "two", http = "hook", path = "/two", template = '{{ steps.one.body | length }}'"#,
    ];
    let gateway = with_steps(&bench, &hook, &steps).start().await;
    paid(&gateway).await;
    bench.database.until_runs_are(1, "completed").await;
    assert_eq!(hook.requests()[1].body, b"252", "it is a text");
    gateway
        .post("/pay")
        .key("k2")
        .send()
        .await
        .assert_is(200, "executed");
    bench
        .database
        .until_runs("the longer one is left out, and can't be counted", |runs| {
            runs.len() == 2 && runs[1].status == "stuck"
        })
        .await;
    assert_all(&bench.database, &hook.requests(), 0).await;
}

async fn parked_runs_are_left_alone_by_restarts(bench: Bench) {
    let hook = Upstream::start().await;
    let steps = [
        r#"name = "approval", signal = "approved""#,
        r#"name = "send", http = "hook""#,
    ];
    let mut gateway = with_steps(&bench, &hook, &steps).start().await;
    let calls = (0..100).map(|n| gateway.post("/pay").key(format!("k{n}")));
    for answer in send_all(calls).await {
        answer.assert_is(200, "executed");
    }
    let parked = bench.database.until_runs_are(100, "waiting").await;
    let rows = bench.database.row_counts().await;
    for kill in [true, false, true, false, true] {
        if kill {
            gateway.sigkill();
        }
        gateway.restart().await;
    }
    assert_eq!(bench.database.runs().await, parked);
    assert_eq!(bench.database.row_counts().await, rows);
}

async fn a_timer_that_ended_while_nobody_ran_still_ends(bench: Bench) {
    let hook = Upstream::start().await;
    let steps = [
        r#"name = "pause", wait = "1s""#,
        r#"name = "send", http = "hook""#,
    ];
    let mut gateway = with_steps(&bench, &hook, &steps).start().await;
    paid(&gateway).await;
    bench.database.until_runs_are(1, "waiting").await;
    gateway.sigkill();
    let_pass(Duration::from_secs(1)).await;
    gateway.restart().await;
    bench.database.until_runs_are(1, "completed").await;
    assert_all(&bench.database, &hook.requests(), 0).await;
}

async fn a_signal_is_taken_once_however_often_it_is_told(bench: Bench) {
    let hook = Upstream::start().await;
    let steps = [
        r#"name = "approval", signal = "approved""#,
        r#"name = "send", http = "hook", template = '{{ signals.approved.by }}'"#,
    ];
    let gateway = with_steps(&bench, &hook, &steps).start().await;
    paid(&gateway).await;
    bench.database.until_runs_are(1, "waiting").await;
    let id = run_id(&gateway).await;
    let path = format!("/v1/runs/{id}/signals/approved");
    let request_id = "0193a0a0-0000-7000-8000-000000000001";
    let body = json!({ "request_id": request_id, "payload": { "by": "desk 4" } });
    let (status, answer) = api(&gateway, "service", "POST", &path, body.clone()).await;
    assert_eq!(status, 200, "{answer}");
    bench.database.until_runs_are(1, "completed").await;
    let rows = bench.database.row_counts().await;
    for _ in 0..20 {
        let (status, answer) = api(&gateway, "service", "POST", &path, body.clone()).await;
        assert_eq!(status, 200, "{answer}");
    }
    assert_eq!(bench.database.row_counts().await, rows);
    assert_eq!(hook.requests()[0].body, b"desk 4");
    assert_all(&bench.database, &hook.requests(), 0).await;
}

async fn a_signal_may_come_before_it_is_awaited(bench: Bench) {
    let hook = Upstream::start().await;
    let steps = [
        r#"name = "pause", wait = "2s""#,
        r#"name = "approval", signal = "approved""#,
    ];
    let gateway = with_steps(&bench, &hook, &steps).start().await;
    paid(&gateway).await;
    bench.database.until_runs_are(1, "waiting").await;
    let path = format!("/v1/runs/{}/signals/approved", run_id(&gateway).await);
    let (status, answer) = api(&gateway, "service", "POST", &path, json!({})).await;
    assert_eq!(status, 200, "{answer}");
    bench.database.until_runs_are(1, "completed").await;
    assert_all(&bench.database, &hook.requests(), 0).await;
}

async fn claimed(gateway: &TestGateway, lease: &str) -> Value {
    eventually("a task", async || {
        let body = json!({ "queue": "stock", "limit": 1, "lease": lease, "worker": "w" });
        let (status, tasks) = api(gateway, "worker", "POST", "/v1/tasks/claim", body).await;
        assert_eq!(status, 200, "{tasks}");
        tasks["tasks"].get(0).cloned()
    })
    .await
}

fn result_of(task: &Value, result: &Value) -> Value {
    json!({
        "tenant": task["tenant"], "intent_id": task["intent_id"], "stamp": task["stamp"],
        "result": result,
    })
}

async fn a_task_is_done_by_a_step_worker_and_its_result_counts_once(bench: Bench) {
    let hook = Upstream::start().await;
    let steps = [
        r#"name = "book", task = "stock", template = '{"key":"{{ key }}"}'"#,
        r#"name = "send", http = "hook", template = '{{ steps.book.body.place }}'"#,
    ];
    let gateway = with_steps(&bench, &hook, &steps).start().await;
    paid(&gateway).await;
    let task = claimed(&gateway, "10s").await;
    assert_eq!(task["body"], json!(r#"{"key":"k"}"#), "{task}");
    let body = result_of(&task, &json!({ "place": "a-7" }));
    let (status, answer) = api(&gateway, "worker", "POST", "/v1/tasks/result", body.clone()).await;
    assert_eq!(status, 200, "{answer}");
    bench.database.until_runs_are(1, "completed").await;
    assert_eq!(hook.requests()[0].body, b"a-7");
    let rows = bench.database.row_counts().await;
    for _ in 0..1000 {
        let call = gateway
            .api("worker", "POST", "/v1/tasks/result")
            .json(body.to_string());
        assert_eq!(call.send().await.status, 200);
    }
    assert_eq!(bench.database.row_counts().await, rows, "I7");
    let runs = bench.database.runs().await;
    assert_eq!(runs, bench.database.until_runs_are(1, "completed").await);
}

async fn a_late_result_of_a_task_is_refused(bench: Bench) {
    let hook = Upstream::start().await;
    let steps = [r#"name = "book", task = "stock""#];
    let gateway = with_steps(&bench, &hook, &steps).start().await;
    paid(&gateway).await;
    let late = claimed(&gateway, "1s").await;
    let present = claimed(&gateway, "30s").await;
    assert_eq!(late["intent_id"], present["intent_id"]);
    assert_ne!(late["stamp"], present["stamp"]);
    let rows = bench.database.row_counts().await;
    let body = result_of(&late, &json!(1));
    let (status, answer) = api(&gateway, "worker", "POST", "/v1/tasks/result", body).await;
    assert_eq!(status, 409, "{answer}");
    assert_eq!(bench.database.row_counts().await, rows);
    let stale = gateway
        .metrics()
        .await
        .sum("oncegate_stale_stamps_total", &[]);
    assert!((stale - 1.0).abs() < 0.5, "{stale}");
    let body = result_of(&present, &json!(2));
    let (status, _) = api(&gateway, "worker", "POST", "/v1/tasks/result", body).await;
    assert_eq!(status, 200);
    bench.database.until_runs_are(1, "completed").await;
}

async fn what_was_done_is_undone_in_reverse_order_when_a_later_step_fails(bench: Bench) {
    let hook = Upstream::start().await;
    hook.on_post("/three").reply(Reply::new(422));
    let steps = [
        r#"name = "one", http = "hook", path = "/one", compensation = { http = "hook", path = "/undo-one" }"#,
        r#"name = "two", http = "hook", path = "/two", compensation = { http = "hook", path = "/undo-two" }"#,
        r#"name = "three", http = "hook", path = "/three", on_failure = "compensate""#,
    ];
    let gateway = with_steps(&bench, &hook, &steps).start().await;
    paid(&gateway).await;
    let runs = bench.database.until_runs_are(1, "compensated").await;
    assert!(runs[0].reason.contains("three"), "{runs:?}");
    let paths: Vec<_> = hook
        .requests()
        .iter()
        .map(|seen| seen.path().to_owned())
        .collect();
    assert_eq!(
        paths,
        ["/one", "/two", "/three", "/three", "/undo-two", "/undo-one"]
    );
    assert_all(&bench.database, &hook.requests(), 1).await;
    let redrive = json!({ "filter": { "status": "dead" }, "reason": "again" });
    let (status, answer) = api(&gateway, "operator", "POST", "/v1/outbox/redrive", redrive).await;
    assert_eq!((status, &answer["done"]), (200, &json!(0)), "{answer}");
}

async fn a_cancelled_run_undoes_what_was_done_and_cannot_be_redriven(bench: Bench) {
    let hook = Upstream::start().await;
    let steps = [
        r#"name = "one", http = "hook", path = "/one", compensation = { http = "hook", path = "/undo-one" }"#,
        r#"name = "approval", signal = "approved""#,
    ];
    let gateway = with_steps(&bench, &hook, &steps).start().await;
    paid(&gateway).await;
    bench.database.until_runs_are(1, "waiting").await;
    let id = run_id(&gateway).await;
    let body = json!({ "reason": "the customer changed their mind" });
    let path = format!("/v1/runs/{id}/cancel");
    let (status, answer) = api(&gateway, "operator", "POST", &path, body.clone()).await;
    assert_eq!(status, 200, "{answer}");
    bench.database.until_runs_are(1, "cancelled").await;
    let paths: Vec<_> = hook
        .requests()
        .iter()
        .map(|seen| seen.path().to_owned())
        .collect();
    assert_eq!(paths, ["/one", "/undo-one"]);
    let (status, _) = api(&gateway, "operator", "POST", &path, body).await;
    assert_eq!(status, 409, "it is over");
    let path = format!("/v1/runs/{id}/signals/approved");
    let (status, _) = api(&gateway, "service", "POST", &path, json!({})).await;
    assert_eq!(status, 409);
    assert_all(&bench.database, &hook.requests(), 0).await;
}

async fn a_stuck_run_is_retried_or_resumed_by_an_operator(bench: Bench) {
    let hook = Upstream::start().await;
    hook.on_post("/one").reply(Reply::new(422));
    let steps = [
        r#"name = "one", http = "hook", path = "/one""#,
        r#"name = "two", http = "hook", path = "/two", template = '{{ steps.one.body.id }}'"#,
    ];
    let gateway = with_steps(&bench, &hook, &steps).start().await;
    paid(&gateway).await;
    bench.database.until_runs_are(1, "stuck").await;
    let id = run_id(&gateway).await;
    let reason = json!({ "reason": "try again" });
    let path = format!("/v1/runs/{id}/retry");
    let (status, answer) = api(&gateway, "operator", "POST", &path, reason).await;
    assert_eq!(status, 200, "{answer}");
    hook.until(|state| state.executions_at("/one") == 4).await;
    bench.database.until_runs_are(1, "stuck").await;
    let resume = json!({ "reason": "done by hand", "result": { "id": "by-hand" } });
    let path = format!("/v1/runs/{id}/resume");
    let (status, answer) = api(&gateway, "operator", "POST", &path, resume).await;
    assert_eq!(status, 200, "{answer}");
    bench.database.until_runs_are(1, "completed").await;
    let keys: Vec<_> = hook
        .requests()
        .iter()
        .map(|seen| seen.header("idempotency-key"))
        .collect();
    assert!(keys[..4].iter().all(|key| *key == keys[0]) && keys[4] != keys[0]);
    assert_all(&bench.database, &hook.requests(), 3).await;
}

async fn history_is_told_as_a_list_and_as_a_stream_that_resumes(bench: Bench) {
    let hook = Upstream::start().await;
    let steps = [r#"name = "one", http = "hook""#];
    let gateway = with_steps(&bench, &hook, &steps).start().await;
    paid(&gateway).await;
    let runs = bench.database.until_runs_are(1, "completed").await;
    let path = format!("/v1/runs/{}/transitions", run_id(&gateway).await);
    let (_, list) = api(&gateway, "operator", "GET", &path, Value::Null).await;
    let seqs: Vec<_> = list["transitions"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|line| line["seq"].as_i64())
        .collect();
    let all: Vec<_> = (1..=runs[0].last_transition_seq).map(Some).collect();
    assert_eq!(seqs, all);
    let stream = gateway
        .api("operator", "GET", &path)
        .header("accept", "text/event-stream");
    let whole = stream.send().await.text();
    for seq in 1..=runs[0].last_transition_seq {
        assert!(whole.contains(&format!("id: {seq}\n")), "{whole}");
    }
    let stream = gateway
        .api("operator", "GET", &path)
        .header("accept", "text/event-stream");
    let rest = stream.header("last-event-id", "2").send().await.text();
    assert!(
        !rest.contains("id: 2\n") && rest.contains("id: 3\n"),
        "{rest}"
    );
}

async fn every_life_after_a_redrive_has_as_many_tries_as_the_first(bench: Bench) {
    let hook = Upstream::start().await;
    hook.on_post("/").reply(Reply::new(503));
    let frail = format!(
        "id = \"frail\"\nurl = \"{}\"\nallow_private = true\ntimeout = \"1s\"\n\
         retry = {{ first = \"100ms\", max = \"1h\", horizon = \"2s\", faults = 2 }}",
        hook.url()
    );
    let setup = bench.gateway().tokens().more("destination", &frail);
    let rules = "poll_interval = \"100ms\"\nbreaker_faults = 1000";
    let setup = setup.section("outbox", rules);
    let setup = setup.route(r#"effect = [{ http = "frail" }]"#);
    let gateway = setup.start().await;
    paid(&gateway).await;
    let mut lives = Vec::new();
    for _ in 0..4 {
        bench.database.until_runs_are(1, "stuck").await;
        lives.push(hook.requests().len() - lives.iter().sum::<usize>());
        let path = format!("/v1/runs/{}/retry", run_id(&gateway).await);
        let again = json!({ "reason": "again" });
        let (status, answer) = api(&gateway, "operator", "POST", &path, again).await;
        assert_eq!(status, 200, "{answer}");
        bench.database.until_runs_are(1, "running").await;
    }
    // After 100, 300, 700 ms, and so on until the horizon, each pause spread by half.
    assert!(
        lives.iter().all(|tries| (4..=8).contains(tries)),
        "{lives:?}"
    );
}
