//! One key is one request: another one under it is refused, and told nothing.

use crate::support::client::{Answer, Call};
use crate::support::gateway::{Bench, TestGateway};
use crate::support::upstream::{Cut, Gate, Reply};

each_store!(
    another_request_under_a_key_is_refused_in_every_state,
    every_part_of_a_request_counts,
    after_nothing_was_sent_another_body_is_a_first_attempt,
    after_a_released_answer_another_body_is_a_first_attempt,
    after_an_ambiguous_attempt_only_the_same_request_is_sent_again,
    no_plain_hash_of_a_body_is_kept,
);

#[track_caller]
fn assert_tells_nothing(answer: &Answer) {
    answer.assert_problem(422, "key-reused", "mismatch");
    let told = format!("{answer:?} {}", answer.text());
    for name in ["decision", "created", "expires"] {
        assert!(answer.header(&format!("idempotency-{name}")).is_none());
    }
    assert!(!answer.replayed() && !told.contains("secret"), "{told}");
    let detail = answer.text();
    for part in ["method", "path", "query", "body"] {
        assert!(detail.contains(part), "{part} is compared: {detail}");
    }
}

async fn another_request_under_a_key_is_refused_in_every_state(bench: Bench) {
    let gate = Gate::closed();
    let secret = Reply::new(201).body("secret").hold(&gate);
    bench.upstream.on_post("/pay").reply(secret);
    let broken = Reply::new(200).cut_after(0, Cut::Rst);
    bench.upstream.on_post("/broken").reply(broken);
    let gateway = bench.gateway().start().await;
    let other = |path: &str, key: &str| gateway.post(path).key(key).json(r#"{"amount":2}"#);

    let first = gateway.post("/pay").key("k").begin();
    bench
        .upstream
        .until(|state| state.executions("k") == 1)
        .await;
    let pending = other("/pay", "k").send().await;
    assert!(!first.is_over(), "a mismatch is never parked");
    assert_tells_nothing(&pending);

    gate.open();
    first.answer().await.assert_is(201, "executed");
    let completed = other("/pay", "k").send().await;
    assert_tells_nothing(&completed);
    assert_eq!(completed.text(), pending.text());
    let again = gateway.post("/pay").key("k").send().await;
    again.assert_is(201, "replayed");
    assert_eq!(again.text(), "secret");

    let broken = gateway.post("/broken").key("u").send().await;
    broken.assert_problem(502, "outcome-unknown", "unknown");
    let unknown = other("/broken", "u").send().await;
    assert_tells_nothing(&unknown);
    assert_eq!(bench.upstream.requests().len(), 2);
}

async fn every_part_of_a_request_counts(bench: Bench) {
    let gateway = bench.gateway().start().await;
    let first = || {
        gateway
            .post("/pay?a=1&b=2")
            .key("k")
            .json(r#"{"a":1,"b":2}"#)
    };
    first().send().await.assert_is(200, "executed");
    let long = |end: &str| format!("{{\"a\":\"{}{end}\"}}", "x".repeat(2 << 20));
    let others = [
        gateway
            .call("PATCH", "/pay?a=1&b=2")
            .json(r#"{"a":1,"b":2}"#),
        gateway.post("/other?a=1&b=2").json(r#"{"a":1,"b":2}"#),
        gateway.post("/pay?a=1&b=3").json(r#"{"a":1,"b":2}"#),
        gateway.post("/pay?b=2&a=1").json(r#"{"a":1,"b":2}"#),
        gateway.post("/pay").json(r#"{"a":1,"b":2}"#),
        gateway.post("/pay?a=1&b=2").json(r#"{"b":2,"a":1}"#),
        gateway.post("/pay?a=1&b=2").json(r#"{"a":1, "b":2}"#),
        gateway.post("/pay?a=1&b=2").json(""),
        gateway
            .post("/pay?a=1&b=2")
            .body("text/plain", r#"{"a":1,"b":2}"#),
        first().without("content-type"),
        first()
            .header("Content-Encoding", "gzip")
            .without("idempotency-key"),
    ];
    for other in others {
        let answer = other.without("idempotency-key").key("k").send().await;
        answer.assert_problem(422, "key-reused", "mismatch");
    }
    // Headers that are neither framing nor content don't count: a retry has another trace id.
    let retry = first().header("Traceparent", "1").header("User-Agent", "x");
    retry.chunked().send().await.assert_is(200, "replayed");

    gateway
        .post("/pay")
        .key("l")
        .json(long("1"))
        .send()
        .await
        .assert_is(200, "executed");
    let answer = gateway.post("/pay").key("l").json(long("2")).send().await;
    answer.assert_problem(422, "key-reused", "mismatch");

    let null = gateway
        .post("/pay")
        .key("n")
        .json(r#"{"a":null}"#)
        .send()
        .await;
    null.assert_is(200, "executed");
    for body in ["{}", r#"{"a":[]}"#] {
        let answer = gateway.post("/pay").key("n").json(body).send().await;
        answer.assert_problem(422, "key-reused", "mismatch");
    }
}

async fn after_nothing_was_sent_another_body_is_a_first_attempt(bench: Bench) {
    let gateway = bench.gateway().start().await;
    bench.upstream.refuse().await;
    let refused = gateway.post("/pay").key("k").send().await;
    refused.assert_problem(502, "upstream-unreachable", "refused");
    bench.upstream.accept_again().await;
    let other = gateway.post("/pay").key("k").json("{}").send().await;
    other.assert_is(200, "executed");
    let first = gateway.post("/pay").key("k").send().await;
    first.assert_problem(422, "key-reused", "mismatch");
}

async fn after_a_released_answer_another_body_is_a_first_attempt(bench: Bench) {
    bench.allow_reruns();
    bench
        .upstream
        .on_post("/pay")
        .once()
        .answer(401, "who are you?");
    let gateway = bench.gateway().start().await;
    let refused = gateway.post("/pay").key("k").json("wrong").send().await;
    refused.assert_is(401, "executed");
    let right = gateway.post("/pay").key("k").json("right").send().await;
    right.assert_is(200, "executed");
}

async fn after_an_ambiguous_attempt_only_the_same_request_is_sent_again(bench: Bench) {
    bench.allow_reruns();
    let broken = Reply::new(200).cut_after(0, Cut::Rst);
    bench.upstream.on_post("/pay").once().reply(broken);
    let gateway = bench
        .gateway()
        .route("on_unknown = \"redrive\"")
        .start()
        .await;
    let first = gateway.post("/pay").key("k").send().await;
    assert_eq!((first.status, &*first.problem()), (502, "outcome-unknown"));
    let other = gateway.post("/pay").key("k").json("{}").send().await;
    other.assert_problem(422, "key-reused", "mismatch");
    let retry = gateway.post("/pay").key("k").send().await;
    retry.assert_is(200, "executed");
}

/// A plain hash of a short body would let whoever reads the database guess it.
async fn no_plain_hash_of_a_body_is_kept(bench: Bench) {
    use sha2::Digest as _;
    let gateway = bench.gateway().start().await;
    let body = r#"{"pin":"1234"}"#;
    gateway
        .post("/pay")
        .key("k")
        .json(body)
        .send()
        .await
        .assert_is(200, "executed");
    let dump = bench.database.dump().await;
    let hashes = [
        sha2::Sha256::digest(body).to_vec(),
        blake3::hash(body.as_bytes()).as_bytes().to_vec(),
    ];
    for hash in hashes {
        let hex = hex(&hash);
        assert!(memchr::memmem::find(&dump, &hash).is_none());
        assert!(memchr::memmem::find(&dump, hex.as_bytes()).is_none());
    }
    assert!(memchr::memmem::find(&dump, b"1234").is_none());
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("memory");
        text
    })
}

async fn with_rules(bench: &Bench, rules: &str) -> TestGateway {
    let route = format!("[fingerprint]\n{rules}");
    bench.gateway().route(&route).start().await
}

async fn assert_same(first: Call, same: impl IntoIterator<Item = Call>) {
    first.key("k").send().await.assert_is(200, "executed");
    for call in same {
        call.key("k").send().await.assert_is(200, "replayed");
    }
}

async fn assert_other(others: impl IntoIterator<Item = Call>) {
    for call in others {
        let answer = call.key("k").send().await;
        answer.assert_problem(422, "key-reused", "mismatch");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_route_may_ignore_query_parameters() {
    let bench = super::on_sqlite().await;
    let gateway = with_rules(&bench, r#"ignore_query = ["trace"]"#).await;
    let post = |target: &str| gateway.post(target);
    let same = ["/pay?a=1&trace=2", "/pay?trace=3&a=1", "/pay?a=1"].map(post);
    assert_same(post("/pay?a=1&trace=1"), same).await;
    assert_other(["/pay?a=2&trace=1", "/pay?a=1&b=1", "/pay"].map(post)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_route_may_compare_json_by_its_meaning() {
    let bench = super::on_sqlite().await;
    let gateway = with_rules(&bench, "canonical_json = true").await;
    let json = |body: &str| gateway.post("/pay").json(body);
    let same = [
        r#"{"b":2.0,"a":1}"#,
        "{ \"a\": 1,\n\"b\": 2 }",
        r#"{"\u0061":1,"b":2}"#,
    ]
    .map(json);
    assert_same(json(r#"{"a":1,"b":2}"#), same).await;
    assert_other([r#"{"a":1}"#, r#"{"a":1,"b":3}"#, r#"{"a":1,"b":null}"#].map(json)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_route_may_leave_fields_out() {
    let bench = super::on_sqlite().await;
    let gateway = with_rules(&bench, r#"ignore_json = ["/sent_at", "/auth/token"]"#).await;
    let json = |body: &str| gateway.post("/pay").json(body);
    let same = [
        r#"{"a":1,"sent_at":2,"auth":{"token":"y","user":1}}"#,
        r#"{"a":1,"auth":{"user":1}}"#,
    ];
    let first = r#"{"a":1,"sent_at":1,"auth":{"token":"x","user":1}}"#;
    assert_same(json(first), same.map(json)).await;
    let others = [
        r#"{"a":2,"auth":{"user":1}}"#,
        r#"{"a":1,"auth":{"user":2}}"#,
    ];
    assert_other(others.map(json)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_route_may_compare_forms_by_their_parts() {
    let bench = super::on_sqlite().await;
    let gateway = with_rules(&bench, "multipart = true").await;
    let form = |boundary: &str, value: &str| {
        let body = format!(
            "--{boundary}\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\n{value}\r\n\
             --{boundary}--\r\n"
        );
        let kind = format!("multipart/form-data; boundary={boundary}");
        gateway.post("/pay").body(&kind, body)
    };
    assert_same(form("one", "1"), [form("two", "1"), form("one", "1")]).await;
    assert_other([form("one", "2"), gateway.post("/pay")]).await;
}
