//! The key: where it is found, which are taken, what is refused, and who sees it.

use crate::support::client::{Connection, Http2};
use crate::support::gateway::Bench;
use crate::support::upstream::Reply;

each_store!(
    a_request_without_a_key_passes_unprotected,
    a_required_key_that_is_missing_is_refused,
    both_written_forms_are_one_key,
    a_malformed_key_is_refused_and_never_taken_for_absent,
    a_key_of_255_bytes_is_taken_and_a_longer_one_refused,
    the_longest_names_fit_together,
    what_the_gateway_refuses_leaves_the_key_free,
);

async fn a_request_without_a_key_passes_unprotected(bench: Bench) {
    let gateway = bench.gateway().start().await;
    for call in [
        gateway.post("/pay"),
        gateway.post("/pay").key(""),
        gateway.post("/pay").key(r#""""#),
    ] {
        for _ in 0..2 {
            let answer = call.clone().send().await;
            answer.assert_is(200, "");
            assert!(!answer.replayed() && answer.decision().is_none());
        }
    }
    assert_eq!(bench.upstream.executions_at("/pay"), 6);
    assert_eq!(bench.database.records().await, []);
}

async fn a_required_key_that_is_missing_is_refused(bench: Bench) {
    let gateway = bench.gateway().route("required = true").start().await;
    for call in [gateway.post("/pay"), gateway.post("/pay").key("")] {
        let answer = call.send().await;
        assert_eq!((answer.status, &*answer.problem()), (400, "key-missing"));
        let link = answer.header("link").unwrap_or_default();
        assert!(link.contains("describedby"), "{link}");
    }
    let free = gateway.call("GET", "/pay").send().await;
    free.assert_is(200, "");
    assert_eq!(bench.upstream.executions_at("/pay"), 1);
    assert_eq!(bench.database.records().await, []);
}

async fn both_written_forms_are_one_key(bench: Bench) {
    let gateway = bench.gateway().start().await;
    let quoted = gateway.post("/pay").key(r#""abc""#).send().await;
    quoted.assert_is(200, "executed");
    let spellings = [
        ("Idempotency-Key", "abc"),
        ("IDEMPOTENCY-KEY", "abc"),
        ("idempotency-key", r#""abc";v=1"#),
        ("Idempotency-Key", r#" "abc" "#),
    ];
    for (name, value) in spellings {
        let again = gateway.post("/pay").header(name, value).send().await;
        again.assert_is(200, "replayed");
        assert_eq!(again.kept(), quoted.kept());
    }
    let http2 = Http2::to(gateway.listen()).await;
    let again = http2.send(&gateway.post("/pay").key("abc")).await;
    again.assert_is(200, "replayed");

    let escaped = gateway.post("/pay").key(r#""a\"b\\c d""#).send().await;
    escaped.assert_is(200, "executed");
    let again = gateway.post("/pay").key(r#""a\"b\\c d";x"#).send().await;
    again.assert_is(200, "replayed");

    let records = bench.database.records().await;
    let keys: std::collections::BTreeSet<_> = records.iter().map(|record| &*record.key).collect();
    assert_eq!(keys.into_iter().collect::<Vec<_>>(), [r#"a"b\c d"#, "abc"]);
    assert_eq!(bench.upstream.executions_at("/pay"), 2);
}

async fn a_malformed_key_is_refused_and_never_taken_for_absent(bench: Bench) {
    let gateway = bench.gateway().start().await;
    let malformed: [&[u8]; 12] = [
        br#""abc"#,
        br#""a\x""#,
        br#""a" junk"#,
        br#""a", "b""#,
        br#"a"b"#,
        b"a,b",
        b"a, b",
        b"a b",
        b"a\tb",
        b"a\\b",
        b"caf\xe9",
        b"\"caf\xc3\xa9\"",
    ];
    for key in malformed {
        let answer = gateway.post("/pay").key(key).send().await;
        answer.assert_problem(400, "key-invalid", "refused");
    }
    for (first, second) in [("a", "a"), ("a", "b"), ("", "a"), (r#""a""#, "a")] {
        let answer = gateway.post("/pay").key(first).key(second).send().await;
        answer.assert_problem(400, "key-invalid", "refused");
    }
    // These are no field values at all (RFC 9110 section 5.5): the HTTP layer refuses them.
    for control in [b"a\x01b", b"a\x7fb", b"a\0b"] {
        let answer = gateway.post("/pay").key(control).send().await;
        assert_eq!(answer.status, 400);
    }
    assert_eq!(bench.upstream.requests().len(), 0);
    assert_eq!(bench.database.records().await, []);
}

async fn a_key_of_255_bytes_is_taken_and_a_longer_one_refused(bench: Bench) {
    let gateway = bench.gateway().start().await;
    let longest = "k".repeat(255);
    let answer = gateway.post("/pay").key(&longest).send().await;
    answer.assert_is(200, "executed");
    let quoted = format!("\"{longest}\"");
    let answer = gateway.post("/pay").key(quoted).send().await;
    answer.assert_is(200, "replayed");
    for length in [256, 2700, 8000] {
        let bare = "k".repeat(length);
        let quoted = format!("\"{bare}\"");
        for key in [bare, quoted] {
            let answer = gateway.post("/pay").key(key).send().await;
            answer.assert_problem(400, "key-invalid", "refused");
        }
    }
    let answer = gateway.post("/pay").key("k".repeat(100_000)).send().await;
    assert!(matches!(answer.status, 400 | 431), "{answer:?}");
    assert_eq!(bench.upstream.executions_at("/pay"), 1);
    assert_eq!(bench.database.records().await.len(), 1);
}

async fn the_longest_names_fit_together(bench: Bench) {
    let pool = "p".repeat(64);
    let target = bench.upstream.url();
    let gateway = bench
        .gateway()
        .section("tenant", r#"source = "header:x-tenant""#)
        .other_pool(&format!("id = {pool:?}\ntargets = [{target:?}]"))
        .route(&format!("pool = {pool:?}"))
        .start()
        .await;
    let call = gateway
        .post("/pay")
        .header("X-Tenant", "t".repeat(200))
        .key("order-42_a.b~c/".repeat(17));
    call.clone().send().await.assert_is(200, "executed");
    call.send().await.assert_is(200, "replayed");
}

async fn what_the_gateway_refuses_leaves_the_key_free(bench: Bench) {
    let gateway = bench
        .gateway()
        .section("tenant", r#"source = "header:x-tenant""#)
        .route("body_max = \"1KiB\"")
        .start()
        .await;
    let large = [b'x'; 2000];
    let call = gateway.post("/pay").key("k").header("X-Tenant", "t");

    let answer = call.clone().json(large).send().await;
    answer.assert_problem(413, "body-too-large", "refused");
    let answer = call.clone().json(large).chunked().send().await;
    answer.assert_problem(413, "body-too-large", "refused");
    let answer = call.clone().without("x-tenant").send().await;
    answer.assert_problem(401, "tenant-missing", "refused");

    assert_eq!(bench.database.records().await, []);
    assert_eq!(bench.upstream.requests().len(), 0);
    call.send().await.assert_is(200, "executed");
}

/// Route, key, tenant, size, fingerprint, record: the first that fails answers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn checks_come_in_the_written_order() {
    let bench = super::on_sqlite().await;
    let gateway = bench
        .gateway()
        .section("tenant", r#"source = "header:x-tenant""#)
        .route("body_max = \"1KiB\"\npath = \"/v1/*\"")
        .start()
        .await;
    let large = [b'x'; 2000];
    let answer = gateway.post("/other").key("a,b").json(large).send().await;
    answer.assert_problem(404, "no-route", "refused");
    let answer = gateway.post("/v1/pay").key("a,b").json(large).send().await;
    answer.assert_problem(400, "key-invalid", "refused");
    let answer = gateway.post("/v1/pay").key("k").json(large).send().await;
    answer.assert_problem(401, "tenant-missing", "refused");

    let good = gateway.post("/v1/pay").key("k").header("X-Tenant", "t");
    good.clone().send().await.assert_is(200, "executed");
    let answer = good.clone().json(large).send().await;
    answer.assert_problem(413, "body-too-large", "refused");
    let answer = good.json("{}").send().await;
    answer.assert_problem(422, "key-reused", "mismatch");
    assert_eq!(bench.upstream.executions_at("/v1/pay"), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unguarded_methods_pass_with_their_key_and_leave_no_record() {
    let bench = super::on_sqlite().await;
    let gateway = bench.gateway().route("required = true").start().await;
    for method in ["GET", "HEAD", "OPTIONS", "PUT", "DELETE"] {
        for _ in 0..2 {
            let answer = gateway.call(method, "/thing").key("k").send().await;
            answer.assert_is(200, "");
            assert!(!answer.replayed());
        }
    }
    assert_eq!(bench.upstream.executions("k"), 10);
    assert_eq!(bench.database.records().await, []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_route_says_which_methods_are_guarded() {
    let bench = super::on_sqlite().await;
    let gateway = bench.gateway().route(r#"methods = ["PUT"]"#).start().await;
    let put = gateway.call("PUT", "/thing").key("k");
    put.clone().send().await.assert_is(200, "executed");
    put.send().await.assert_is(200, "replayed");
    let post = gateway.post("/thing").key("p").send().await;
    post.assert_is(200, "");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_route_that_matches_decides() {
    let bench = super::on_sqlite().await;
    let gateway = bench
        .gateway()
        .other_route("path = \"/free\"\npool = \"main\"\nmethods = []")
        .start()
        .await;
    let free = gateway.post("/free").key("a").send().await;
    free.assert_is(200, "");
    let guarded = gateway.post("/free/more").key("b").send().await;
    guarded.assert_is(200, "executed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_browsers_preflight_passes_and_is_never_taken_for_a_key() {
    let bench = super::on_sqlite().await;
    let allowed = Reply::new(204).header("Access-Control-Allow-Headers", "idempotency-key");
    bench.upstream.on("OPTIONS", "/pay").reply(allowed);
    let gateway = bench.gateway().route("required = true").start().await;
    let preflight = gateway
        .call("OPTIONS", "/pay")
        .header("Origin", "https://shop.test")
        .header("Access-Control-Request-Method", "POST")
        .header("Access-Control-Request-Headers", "idempotency-key");
    let answer = preflight.send().await;
    answer.assert_is(204, "");
    let allowed = answer.header("access-control-allow-headers");
    assert_eq!(allowed.as_deref(), Some("idempotency-key"));
    assert_eq!(bench.database.records().await, []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_can_forge_the_gateways_headers() {
    let bench = super::on_sqlite().await;
    let forged = [
        ("Idempotency-Status", "replayed"),
        ("Idempotent-Replayed", "true"),
        ("Idempotency-Decision", "0"),
        ("Idempotency-Created", "0"),
        ("Idempotency-Expires", "0"),
    ];
    let reply = forged
        .into_iter()
        .fold(Reply::new(201), |reply, (name, value)| {
            reply.header(name, value)
        });
    bench.upstream.on_post("/pay").reply(reply);
    let gateway = bench.gateway().start().await;
    let forge = |call| {
        forged
            .into_iter()
            .fold(call, |call: crate::support::client::Call, (name, value)| {
                call.header(name, value)
            })
    };
    let call = forge(gateway.post("/pay").key("k"));
    let first = call.clone().send().await;
    first.assert_is(201, "executed");
    assert!(!first.replayed());
    assert_eq!(first.header_lines("idempotency-decision").len(), 1);
    assert_ne!(first.decision().as_deref(), Some("0"));
    call.send().await.assert_is(201, "replayed");
    let unguarded = forge(gateway.call("GET", "/free")).send().await;
    unguarded.assert_is(200, "");
    for seen in bench.upstream.requests() {
        for (name, _) in forged {
            let lines = seen.header(name);
            assert!(lines.is_empty(), "{name} reached the upstream");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_upstream_sees_the_key_that_the_route_says() {
    let bench = super::on_sqlite().await;
    let gateway = bench
        .gateway()
        .section("tenant", r#"source = "header:x-tenant""#)
        .other_route("path = \"/derived\"\npool = \"main\"\nforward_key = \"derived\"")
        .other_route("path = \"/none\"\npool = \"main\"\nforward_key = \"none\"")
        .start()
        .await;
    let seen = async |path: &str, tenant: &str, key: &str| {
        let call = gateway.post(path).header("X-Tenant", tenant).key(key);
        call.send().await.assert_is(200, "executed");
        let requests = bench.upstream.requests();
        let last = requests.last().expect("a request");
        last.header("idempotency-key")
    };
    assert_eq!(seen("/pay", "t", "bare").await, ["bare"]);
    assert_eq!(seen("/pay", "t", r#""quoted""#).await, [r#""quoted""#]);
    assert!(seen("/none", "t", "n").await.is_empty());
    let one = seen("/derived", "t", "a").await.concat();
    let other_key = seen("/derived", "t", "b").await.concat();
    let other_tenant = seen("/derived", "u", "a").await.concat();
    for derived in [&one, &other_key, &other_tenant] {
        let bare = derived.trim_matches('"');
        assert!(uuid::Uuid::parse_str(bare).is_ok(), "{derived}");
    }
    assert!(one != other_key && one != other_tenant && other_key != other_tenant);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_route_says_where_the_key_is() {
    let bench = super::on_sqlite().await;
    let gateway = bench
        .gateway()
        .other_route("path = \"/hook\"\npool = \"main\"\nkey = \"header:webhook-id\"")
        .other_route("path = \"/body\"\npool = \"main\"\nkey = \"body:/meta/id\"")
        .start()
        .await;
    let hook = |id: &str| gateway.post("/hook").header("Webhook-Id", id);
    hook("msg_1").send().await.assert_is(200, "executed");
    hook("msg_1").send().await.assert_is(200, "replayed");
    hook("a,b")
        .send()
        .await
        .assert_problem(400, "key-invalid", "refused");
    let other = gateway.post("/hook").key("not-this-one").send().await;
    other.assert_is(200, "");

    let body = |id: &str| {
        gateway
            .post("/body")
            .json(format!("{{\"meta\":{{\"id\":{id}}}}}"))
    };
    body("\"order 1\"").send().await.assert_is(200, "executed");
    body("\"order 1\"").send().await.assert_is(200, "replayed");
    body("17").send().await.assert_is(200, "executed");
    for absent in ["null", "\"\""] {
        body(absent).send().await.assert_is(200, "");
    }
    let rounded = ["12345678901234567890123", "17.5", "1e3"];
    for malformed in ["[]", "\"caf\u{e9}\""].into_iter().chain(rounded) {
        let answer = body(malformed).send().await;
        answer.assert_problem(400, "key-invalid", "refused");
    }
    let unfolding = format!("\"order 1\",\"list\":[{}0]", "0,".repeat(200_000));
    let answer = body(&unfolding).send().await;
    answer.assert_problem(400, "request-invalid", "refused");
    let records = bench.database.records().await;
    let keys: std::collections::BTreeSet<_> = records.iter().map(|row| &*row.key).collect();
    let right = ["17", "msg_1", "order 1"];
    assert_eq!(keys.into_iter().collect::<Vec<_>>(), right);
}

/// Nobody needs to send a gigabyte to learn that it is too much.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_that_says_that_it_is_too_large_is_refused_before_it_comes() {
    let bench = super::on_sqlite().await;
    let gateway = bench.gateway().start().await;
    let mut connection = Connection::to(gateway.listen()).await.expect("it listens");
    let head = b"POST /pay HTTP/1.1\r\nHost: a\r\nIdempotency-Key: k\r\n\
        Content-Length: 1000000000\r\n\r\n";
    connection.write(head).await.expect("it reads");
    let answer = connection.answer().await.expect("an answer");
    answer.assert_problem(413, "body-too-large", "refused");
    assert_eq!(bench.database.records().await, []);
}
