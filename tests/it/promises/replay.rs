//! A replay is the first answer again: status, headers and bytes, and nothing of its framing.

use std::collections::BTreeSet;

use crate::support::client::{Answer, Http2, send_all};
use crate::support::gateway::Bench;
use crate::support::rows::{Kind, RecordRow};
use crate::support::upstream::{Reply, Upstream};

each_store!(
    the_first_answer_passes_through_and_is_committed,
    every_final_status_is_replayed_as_it_was,
    the_upstreams_own_errors_are_decisions,
    a_route_may_leave_5xx_open,
    an_answer_that_says_try_again_leaves_the_key_open,
    headers_keep_their_repeats_order_and_bytes,
    bodies_are_bytes,
    a_decision_survives_a_restart,
    every_replay_tells_the_same_decision,
);

async fn the_first_answer_passes_through_and_is_committed(bench: Bench) {
    let reply = Reply::new(201).header("Content-Type", "application/json");
    let reply = reply.header("Location", "/charges/1").body(r#"{"id":1}"#);
    bench.upstream.on_post("/pay").reply(reply);
    let gateway = bench.gateway().start().await;
    let first = gateway.post("/pay?a=1").key("k").json("{}").send().await;
    first.assert_is(201, "executed");
    assert!(!first.replayed());
    assert_eq!(first.text(), r#"{"id":1}"#);
    assert_eq!(first.header("location").as_deref(), Some("/charges/1"));
    let seen = &bench.upstream.requests()[0];
    assert_eq!((&*seen.method, &*seen.target), ("POST", "/pay?a=1"));
    assert_eq!(
        (&*seen.body, seen.header("content-type")),
        (&b"{}"[..], vec!["application/json".to_owned()])
    );

    let record = bench.database.record("k").await.expect("a record");
    assert_eq!((&*record.tenant, &*record.pool), ("acme", "main"));
    assert_eq!((&*record.status, record.generation), ("completed", 1));
    let told = first.decision().expect("a decision").replace('-', "");
    assert_eq!(record.decision_id, told);
    let day = 24 * 60 * 60 * 1000;
    assert!(
        (day - 60_000..=day).contains(&record.valid_ms),
        "{record:?}"
    );

    for _ in 0..3 {
        let again = gateway.post("/pay?a=1").key("k").json("{}").send().await;
        again.assert_is(201, "replayed");
        assert!(again.replayed());
        assert_eq!(again.kept(), first.kept());
    }
    let after = bench.database.record("k").await.expect("a record");
    let lasting = |row: &RecordRow| (row.attempt_token.clone(), row.generation_id.clone());
    assert_eq!(lasting(&after), lasting(&record));
    assert_eq!(after.decision_id, record.decision_id);
}

async fn every_final_status_is_replayed_as_it_was(bench: Bench) {
    let released = [401, 403, 407, 408, 425, 429];
    let statuses: Vec<u16> = (200..600)
        .filter(|status| !released.contains(status))
        .collect();
    for status in &statuses {
        let reply = Reply::new(*status).header("X-Status", status.to_string());
        let path = format!("/{status}");
        bench.upstream.on_post(&path).reply(reply);
    }
    let setup = bench.gateway().route("lease = \"10s\"");
    let gateway = setup.start().await;
    for statuses in statuses.chunks(40) {
        let call = |status: &u16| gateway.post(&format!("/{status}")).key(status.to_string());
        let firsts = send_all(statuses.iter().map(call)).await;
        let replays = send_all(statuses.iter().map(call)).await;
        for ((status, first), replay) in statuses.iter().zip(firsts).zip(replays) {
            first.assert_is(*status, "executed");
            replay.assert_is(*status, "replayed");
            assert_eq!(first.kept(), replay.kept());
            assert_eq!(first.header("x-status"), Some(status.to_string()));
            let empty = matches!(status, 204 | 205 | 304);
            assert!(empty || !first.body.is_empty(), "{status}");
        }
    }
}

async fn the_upstreams_own_errors_are_decisions(bench: Bench) {
    let problem = r#"{"type":"https://upstream.test/no-funds","status":422}"#;
    for (path, status) in [
        ("/404", 404),
        ("/409", 409),
        ("/422", 422),
        ("/500", 500),
        ("/503", 503),
    ] {
        let reply = Reply::new(status).header("Content-Type", "application/problem+json");
        bench.upstream.on_post(path).reply(reply.body(problem));
    }
    let gateway = bench.gateway().start().await;
    for (path, status) in [
        ("/404", 404),
        ("/409", 409),
        ("/422", 422),
        ("/500", 500),
        ("/503", 503),
    ] {
        let first = gateway.post(path).key(path).send().await;
        first.assert_is(status, "executed");
        let again = gateway.post(path).key(path).send().await;
        again.assert_is(status, "replayed");
        assert_eq!(
            (again.text(), again.kept()),
            (problem.to_owned(), first.kept())
        );
    }
}

async fn a_route_may_leave_5xx_open(bench: Bench) {
    bench.allow_reruns();
    bench.upstream.on_post("/pay").once().answer(503, "down");
    bench.upstream.on_post("/pay").once().answer(500, "broken");
    bench.upstream.on_post("/pay").answer(201, "done");
    let gateway = bench.gateway().route("store_5xx = false").start().await;
    for (status, body) in [(503, "down"), (500, "broken")] {
        let answer = gateway.post("/pay").key("k").send().await;
        answer.assert_is(status, "executed");
        assert_eq!((answer.text(), answer.decision()), (body.to_owned(), None));
        assert_eq!(bench.database.status("k").await, "failed_before_commit");
    }
    let done = gateway.post("/pay").key("k").send().await;
    done.assert_is(201, "executed");
    let again = gateway.post("/pay").key("k").send().await;
    again.assert_is(201, "replayed");
    assert_eq!(bench.upstream.executions("k"), 3);
}

async fn an_answer_that_says_try_again_leaves_the_key_open(bench: Bench) {
    bench.allow_reruns();
    let gateway = bench.gateway().start().await;
    for status in [401, 403, 407, 408, 425, 429] {
        let (path, key) = (format!("/{status}"), format!("k{status}"));
        let reply = Reply::new(status).header("Retry-After", "3").body("later");
        bench.upstream.on_post(&path).once().reply(reply);
        bench.upstream.on_post(&path).answer(201, "done");
        let first = gateway.post(&path).key(&key).send().await;
        first.assert_is(status, "executed");
        assert_eq!(
            (first.text(), first.retry_after()),
            ("later".to_owned(), Some(3))
        );
        for name in [
            "idempotency-decision",
            "idempotency-created",
            "idempotency-expires",
        ] {
            assert!(first.header(name).is_none(), "{name}");
        }
        assert_eq!(bench.database.status(&key).await, "failed_before_commit");
        let retry = gateway.post(&path).key(&key).send().await;
        retry.assert_is(201, "executed");
    }
    assert_eq!(bench.database.count("eec_routing_decision").await, 6);
}

async fn headers_keep_their_repeats_order_and_bytes(bench: Bench) {
    let reply = Reply::new(201)
        .header("Link", "</1>; rel=a, </2>; rel=b")
        .header("X-First", "1")
        .header("Link", "</3>; rel=c")
        .header("Content-Disposition", r#"attachment; filename="a, b.txt""#)
        .header("Warning", "199 a \"x, y\"")
        .header("X-Latin", b"caf\xe9")
        .header("Warning", "199 b \"z\"")
        .header("X-Empty", "")
        .header("ETag", "\"v1\"");
    bench.upstream.on_post("/pay").reply(reply);
    let gateway = bench.gateway().start().await;
    let first = gateway.post("/pay").key("k").send().await;
    let again = gateway.post("/pay").key("k").send().await;
    again.assert_is(201, "replayed");
    assert_eq!(again.kept(), first.kept());
    assert_eq!(
        again.header_lines("link"),
        ["</1>; rel=a, </2>; rel=b", "</3>; rel=c"]
    );
    assert_eq!(
        again.header_lines("warning"),
        ["199 a \"x, y\"", "199 b \"z\""]
    );
    let latin = again.headers.iter().find(|(name, _)| name == "x-latin");
    assert_eq!(latin.expect("the header").1, b"caf\xe9");
    assert!(again.header("date").is_some());
}

async fn bodies_are_bytes(bench: Bench) {
    let all: Vec<u8> = (0..=255).collect();
    let bodies = [
        ("/empty", Vec::new()),
        ("/nul", vec![0; 10]),
        ("/all", all.repeat(40)),
        ("/invalid", b"\xff\xfe{\"a\":\xc3}".to_vec()),
        ("/large", all.repeat(4000)),
    ];
    for (path, body) in &bodies {
        bench.upstream.on_post(path).answer(200, body.clone());
    }
    let gateway = bench.gateway().start().await;
    for (path, body) in &bodies {
        let call = gateway.post(path).key(path).json(body);
        let first = call.clone().send().await;
        first.assert_is(200, "executed");
        let again = call.send().await;
        again.assert_is(200, "replayed");
        assert!(first.body == *body && again.body == *body, "{path}");
    }
    for (seen, (_, body)) in bench.upstream.requests().iter().zip(&bodies) {
        assert!(seen.body == *body);
    }
}

async fn a_decision_survives_a_restart(bench: Bench) {
    let mut gateway = bench.gateway().start().await;
    let first = gateway.post("/pay").key("k").send().await;
    gateway.restart().await;
    let again = gateway.post("/pay").key("k").send().await;
    again.assert_is(200, "replayed");
    assert_eq!(again.kept(), first.kept());
    let other = gateway.post("/pay").key("k").json("{}").send().await;
    other.assert_problem(422, "key-reused", "mismatch");
}

async fn every_replay_tells_the_same_decision(bench: Bench) {
    let gateway = bench.gateway().start().await;
    let call = gateway
        .post("/pay")
        .key("k")
        .header("Origin", "https://shop.test");
    let told = |answer: &Answer| {
        let names = [
            "idempotency-decision",
            "idempotency-created",
            "idempotency-expires",
        ];
        names.map(|name| answer.header(name).expect(name))
    };
    let first = call.clone().send().await;
    let answers = send_all((0..20).map(|_| call.clone())).await;
    for answer in answers {
        answer.assert_is(200, "replayed");
        assert_eq!(told(&answer), told(&first));
        let exposed = answer
            .header_lines("access-control-expose-headers")
            .join(",");
        let exposed: BTreeSet<_> = exposed
            .split(',')
            .map(|name| name.trim().to_ascii_lowercase())
            .collect();
        for name in [
            "idempotency-status",
            "idempotent-replayed",
            "idempotency-decision",
            "idempotency-created",
            "idempotency-expires",
        ] {
            assert!(exposed.contains(name), "{name} of {exposed:?}");
        }
    }
    let plain = gateway.post("/pay").key("k").send().await;
    assert!(plain.header("access-control-expose-headers").is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_belongs_to_a_hop_or_a_moment_is_not_kept() {
    let bench = super::on_sqlite().await;
    let gone = [
        ("Connection", "X-Secret-Hop"),
        ("X-Secret-Hop", "1"),
        ("Keep-Alive", "timeout=5"),
        ("Proxy-Authenticate", "Basic"),
        ("Proxy-Authentication-Info", "x"),
        ("TE", "trailers"),
        ("Trailer", "X-T"),
        ("Upgrade", "h2c"),
    ];
    let passed = [
        ("Set-Cookie", "a=1; Expires=Wed, 21 Oct 2030 07:28:00 GMT"),
        ("Set-Cookie", "b=2"),
        ("RateLimit", "r=10"),
        ("RateLimit-Policy", "q=10"),
        ("X-RateLimit-Remaining", "9"),
        ("Retry-After", "9"),
        ("Age", "3"),
        ("WWW-Authenticate", "Bearer"),
    ];
    let mut reply = Reply::new(201);
    for (name, value) in gone.iter().chain(&passed) {
        reply = reply.header(name, value);
    }
    bench.upstream.on_post("/pay").reply(reply);
    let gateway = bench.gateway().start().await;
    let first = gateway.post("/pay").key("k").send().await;
    let again = gateway.post("/pay").key("k").send().await;
    first.assert_is(201, "executed");
    again.assert_is(201, "replayed");
    for (name, value) in gone {
        let name = name.to_ascii_lowercase();
        let mut lines = first.header_lines(&name);
        lines.extend(again.header_lines(&name));
        // The gateway's own `Connection` is another matter.
        assert!(!lines.iter().any(|line| line == value), "{name}: {lines:?}");
    }
    for (name, value) in passed {
        let name = name.to_ascii_lowercase();
        assert!(
            first.header_lines(&name).iter().any(|line| line == value),
            "{name}"
        );
        assert_eq!(again.header_lines(&name), [""; 0], "{name}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_route_may_keep_cookies() {
    let bench = super::on_sqlite().await;
    let cookies = ["a=1; Expires=Wed, 21 Oct 2030 07:28:00 GMT", "b=2"];
    let reply = Reply::new(201)
        .header("Set-Cookie", cookies[0])
        .header("Set-Cookie", cookies[1]);
    bench.upstream.on_post("/pay").reply(reply);
    let gateway = bench
        .gateway()
        .route("store_set_cookie = true")
        .start()
        .await;
    for status in ["executed", "replayed"] {
        let answer = gateway.post("/pay").key("k").send().await;
        answer.assert_is(201, status);
        assert_eq!(answer.header_lines("set-cookie"), cookies);
    }
}

/// `Connection::answer` refuses an answer that has two framings.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn framing_is_this_hops_own() {
    let bench = super::on_sqlite().await;
    let chunked = Reply::new(200).body("chunked").trailer("X-Sum", "1");
    bench.upstream.on_post("/chunked").reply(chunked);
    bench
        .upstream
        .on_post("/close")
        .reply(Reply::new(200).body("close").until_close());
    let interim = Reply::new(200).body("interim").interim(103);
    bench.upstream.on_post("/interim").reply(interim);
    let gateway = bench.gateway().start().await;
    for path in ["/chunked", "/close", "/interim"] {
        let first = gateway.post(path).key(path).send().await;
        first.assert_is(200, "executed");
        let again = gateway.post(path).key(path).send().await;
        again.assert_is(200, "replayed");
        assert_eq!(
            (first.text(), again.text()),
            (path[1..].to_owned(), path[1..].to_owned())
        );
    }
    for status in [204, 304] {
        let path = format!("/{status}");
        bench.upstream.on_post(&path).reply(Reply::new(status));
        for _ in 0..2 {
            let mut connection = gateway.post(&path).key(&path).start().await;
            let answer = connection.answer().await.expect("an answer");
            assert_eq!(answer.status, status);
            assert!(status == 304 || answer.header("content-length").is_none());
            assert!(answer.header("transfer-encoding").is_none());
            connection.finish_writing().await;
            let more = connection.rest().await.expect("an end in order");
            assert!(more.is_empty(), "bytes after a {status}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_decision_crosses_http_versions() {
    let bench = Bench::with(Kind::Sqlite, Upstream::start_http2().await).await;
    let gateway = bench.gateway().pool("http2 = true").start().await;
    let http2 = Http2::to(gateway.listen()).await;
    let sorted = |answer: Answer| {
        let (status, mut headers, body) = answer.kept();
        headers.sort();
        (status, headers, body)
    };
    let call = gateway.post("/pay").key("a");
    let first = http2.send(&call).await;
    first.assert_is(200, "executed");
    let again = call.send().await;
    again.assert_is(200, "replayed");
    assert_eq!(sorted(first), sorted(again));

    let call = gateway.post("/pay").key("b");
    let first = call.clone().send().await;
    first.assert_is(200, "executed");
    let again = http2.send(&call).await;
    again.assert_is(200, "replayed");
    assert_eq!(sorted(first), sorted(again));
    assert_eq!(bench.upstream.connections(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redirect_is_a_decision_and_never_followed() {
    let bench = super::on_sqlite().await;
    let elsewhere = Reply::new(307).header("Location", "/elsewhere");
    bench.upstream.on_post("/pay").reply(elsewhere);
    let gateway = bench.gateway().start().await;
    for status in ["executed", "replayed"] {
        let answer = gateway.post("/pay").key("k").send().await;
        answer.assert_is(307, status);
        assert_eq!(answer.header("location").as_deref(), Some("/elsewhere"));
    }
    assert_eq!(bench.upstream.requests().len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn head_and_get_are_not_served_from_a_posts_record() {
    let bench = super::on_sqlite().await;
    let gateway = bench.gateway().start().await;
    gateway
        .post("/pay")
        .key("k")
        .send()
        .await
        .assert_is(200, "executed");
    for method in ["HEAD", "GET"] {
        let answer = gateway.call(method, "/pay").key("k").send().await;
        answer.assert_is(200, "");
    }
    assert_eq!(bench.upstream.requests().len(), 3);
}
