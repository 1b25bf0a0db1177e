//! A key counts within a tenant and a pool, and no answer or secret crosses over.

use crate::support::gateway::{Bench, Setup, TestGateway};
use crate::support::process::run;
use crate::support::rows::Database;
use crate::support::upstream::{Cut, Gate, Reply, Upstream};

each_store!(
    tenants_do_not_share_keys,
    pools_do_not_share_keys,
    no_delimiter_joins_tenant_and_key,
    credentials_are_told_apart_and_not_kept,
    a_new_secret_forgets_no_key_of_an_older_one,
    principals_of_a_tenant_do_not_share_answers,
    a_tenant_cannot_block_anothers_key,
    secrets_and_bodies_stay_out_of_log_and_metrics,
);

fn by_header(bench: &Bench) -> Setup {
    bench
        .gateway()
        .section("tenant", r#"source = "header:x-tenant""#)
}

async fn tenants_do_not_share_keys(bench: Bench) {
    let gateway = by_header(&bench).start().await;
    let call = |tenant: &str| gateway.post("/pay").key("k").header("X-Tenant", tenant);
    let one = call("one").send().await;
    one.assert_is(200, "executed");
    let two = call("two").send().await;
    two.assert_is(200, "executed");
    assert_ne!(one.text(), two.text());
    assert_ne!(one.decision(), two.decision());
    for (tenant, first) in [("one", one), ("two", two)] {
        let again = call(tenant).send().await;
        again.assert_is(200, "replayed");
        assert_eq!(again.kept(), first.kept());
    }
    let anonymous = gateway.post("/pay").key("k").send().await;
    anonymous.assert_problem(401, "tenant-missing", "refused");
    let empty = call("").send().await;
    empty.assert_problem(401, "tenant-missing", "refused");
    let free = gateway.post("/pay").send().await;
    free.assert_is(200, "");
    let doubled = call("one").header("X-Tenant", "two").send().await;
    assert!(
        doubled.status >= 400 && doubled.idempotency() == "refused",
        "{doubled:?}"
    );
    let records = bench.database.records().await;
    let tenants: Vec<_> = records.iter().map(|record| &*record.tenant).collect();
    assert_eq!(tenants, ["one", "two"]);
}

async fn pools_do_not_share_keys(bench: Bench) {
    let other = Upstream::start().await;
    let gateway = bench
        .gateway()
        .other_pool(&format!("id = \"other\"\ntargets = [{:?}]", other.url()))
        .other_route("path = \"/other/*\"\npool = \"other\"")
        .start()
        .await;
    for path in ["/pay", "/other/pay"] {
        let call = gateway.post(path).key("k");
        call.clone().send().await.assert_is(200, "executed");
        call.send().await.assert_is(200, "replayed");
    }
    assert_eq!(
        (bench.upstream.executions("k"), other.executions("k")),
        (1, 1)
    );
    let records = bench.database.records().await;
    let pools: Vec<_> = records.iter().map(|record| &*record.pool).collect();
    assert_eq!(pools, ["main", "other"]);
}

async fn no_delimiter_joins_tenant_and_key(bench: Bench) {
    let gateway = by_header(&bench).start().await;
    let pairs = [
        ("a:b", "c"),
        ("a", "b:c"),
        ("a/b", "c"),
        ("a", "b/c"),
        ("a|main", "c"),
    ];
    for (tenant, key) in pairs {
        let call = gateway.post("/pay").key(key).header("X-Tenant", tenant);
        call.send().await.assert_is(200, "executed");
    }
    assert_eq!(bench.database.records().await.len(), pairs.len());
}

async fn credentials_are_told_apart_and_not_kept(bench: Bench) {
    bench.allow_reruns();
    let setup = bench
        .gateway()
        .section("tenant", r#"source = "credential""#);
    let mut gateway = setup.start().await;
    let call = |gateway: &TestGateway, token: &str| {
        let call = gateway.post("/pay").key("k");
        call.header("Authorization", format!("Bearer {token}"))
    };
    call(&gateway, "sesame-1")
        .send()
        .await
        .assert_is(200, "executed");
    call(&gateway, "sesame-2")
        .send()
        .await
        .assert_is(200, "executed");
    call(&gateway, "sesame-1")
        .send()
        .await
        .assert_is(200, "replayed");
    gateway.restart().await;
    call(&gateway, "sesame-2")
        .send()
        .await
        .assert_is(200, "replayed");
    let none = gateway.post("/pay").key("k").send().await;
    none.assert_problem(401, "tenant-missing", "refused");
    let dump = bench.database.dump().await;
    assert!(memchr::memmem::find(&dump, b"sesame").is_none());
    assert_eq!(bench.upstream.executions("k"), 2);
}

async fn a_new_secret_forgets_no_key_of_an_older_one(bench: Bench) {
    bench.allow_reruns();
    let route = "on_unknown = \"redrive\"\nforward_key = \"derived\"";
    let setup = bench
        .gateway()
        .section("tenant", r#"source = "credential""#)
        .route(route);
    let mut gateway = setup.start().await;
    let call = |gateway: &TestGateway, path: &str, key: &str| {
        let call = gateway.post(path).key(key);
        call.header("Authorization", "Bearer sesame")
    };
    let done = call(&gateway, "/pay", "done").send().await;
    done.assert_is(200, "executed");
    let broken = Reply::new(201).cut_after(0, Cut::Rst);
    bench.upstream.on_post("/broken").once().reply(broken);
    let ambiguous = call(&gateway, "/broken", "ambiguous").send().await;
    assert_eq!(ambiguous.problem(), "outcome-unknown");
    let secret = match &bench.database {
        Database::Sqlite(_) => "x'".to_owned() + &"07".repeat(32) + "', 0",
        Database::Postgres(_) => "decode(repeat('07', 32), 'hex'), now()".to_owned(),
    };
    let insert =
        format!("insert into eec_secret (version, secret, created_at) values (2, {secret})");
    bench.database.execute(&insert).await;
    gateway.restart().await;

    let again = call(&gateway, "/pay", "done").send().await;
    again.assert_is(200, "replayed");
    assert_eq!(again.decision(), done.decision());
    let other = call(&gateway, "/pay", "done")
        .body("text/plain", "other")
        .send()
        .await;
    other.assert_problem(422, "key-reused", "mismatch");
    // Sent again in the same generation, so with the key that the service may know already.
    let sent_again = call(&gateway, "/broken", "ambiguous").send().await;
    sent_again.assert_is(200, "executed");
    let mut seen = bench.upstream.requests();
    seen.retain(|seen| seen.path() == "/broken");
    let keys: Vec<_> = seen
        .iter()
        .map(|seen| seen.header("idempotency-key"))
        .collect();
    assert!(keys.len() == 2 && keys[0] == keys[1], "{keys:?}");
    let fresh = call(&gateway, "/pay", "fresh").send().await;
    fresh.assert_is(200, "executed");
    let versions = "select count(distinct tenant_scope) from eec_routing_idempotency";
    assert_eq!(bench.database.number(versions).await, 2);
}

async fn principals_of_a_tenant_do_not_share_answers(bench: Bench) {
    bench.allow_reruns();
    let tenant = "source = \"header:x-tenant\"\nprincipal = \"header:x-user\"";
    let gateway = bench.gateway().section("tenant", tenant).start().await;
    let call = |user: &str, token: &str| {
        let call = gateway.post("/pay").key("k").header("X-Tenant", "t");
        call.header("X-User", user).header("Authorization", token)
    };
    let ann = call("ann", "token 1").send().await;
    ann.assert_is(200, "executed");
    let bob = call("bob", "token 2").send().await;
    bob.assert_is(200, "executed");
    assert_ne!(ann.text(), bob.text());
    // A fresh token is no other user.
    let again = call("ann", "token 3").send().await;
    again.assert_is(200, "replayed");
    assert_eq!(again.text(), ann.text());
    assert_eq!(bench.upstream.executions("k"), 2);
    let dump = bench.database.dump().await;
    assert!(memchr::memmem::find(&dump, b"ann").is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cookie_sessions_are_told_apart() {
    let bench = super::on_sqlite().await;
    bench.allow_reruns();
    let tenant = "source = \"fixed:acme\"\nprincipal = \"credential\"";
    let gateway = bench.gateway().section("tenant", tenant).start().await;
    let call = |cookie: &str| gateway.post("/pay").key("k").header("Cookie", cookie);
    call("session=1").send().await.assert_is(200, "executed");
    call("session=2").send().await.assert_is(200, "executed");
    call("session=1").send().await.assert_is(200, "replayed");
}

async fn a_tenant_cannot_block_anothers_key(bench: Bench) {
    let gate = Gate::closed();
    bench
        .upstream
        .on_post("/pay")
        .once()
        .reply(Reply::new(201).hold(&gate));
    let gateway = by_header(&bench).start().await;
    let call = |tenant: &str| {
        gateway
            .post("/pay")
            .key("order-1")
            .header("X-Tenant", tenant)
    };
    let squatter = call("squatter").begin();
    bench
        .upstream
        .until(|state| state.executions("order-1") == 1)
        .await;
    call("victim").send().await.assert_is(200, "executed");
    gate.open();
    squatter.answer().await.assert_is(201, "executed");
}

async fn secrets_and_bodies_stay_out_of_log_and_metrics(bench: Bench) {
    let setup = by_header(&bench).section("log", "filter = \"trace\"");
    let gateway = setup.start().await;
    let call = || {
        let call = gateway.post("/pay?token=hush-query").key("hush-key");
        let call = call.header("X-Tenant", "hush-tenant");
        call.header("Authorization", "Bearer hush-token")
            .header("Cookie", "s=hush-cookie")
    };
    bench
        .upstream
        .on_post("/pay")
        .once()
        .answer(200, "hush-answer");
    call()
        .json("hush-body")
        .send()
        .await
        .assert_is(200, "executed");
    call()
        .json("hush-body")
        .send()
        .await
        .assert_is(200, "replayed");
    call()
        .json("hush-other")
        .send()
        .await
        .assert_is(422, "mismatch");
    let broken = Reply::new(200).cut_after(0, crate::support::upstream::Cut::Rst);
    bench.upstream.on_post("/broken").reply(broken);
    let failing = gateway
        .post("/broken")
        .key("hush-key-2")
        .header("X-Tenant", "hush-tenant");
    failing
        .json("hush-body")
        .send()
        .await
        .assert_is(502, "unknown");
    for secret in [
        "hush-token",
        "hush-cookie",
        "hush-body",
        "hush-other",
        "hush-answer",
    ] {
        assert!(!gateway.log_holds(secret), "{secret} is in the log");
    }
    let metrics = gateway.metrics().await;
    assert!(metrics.names().count() > 10);
    for value in metrics.label_values() {
        assert!(!value.contains("hush"), "{value} is a label");
    }
}

/// Nobody is anonymous by default: without a source of tenants there is no server.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_without_a_tenant_source_refuses_to_start() {
    let bench = super::on_sqlite().await;
    let arguments = [
        "serve",
        "--listen",
        "127.0.0.1:0",
        "--admin",
        "127.0.0.1:0",
        "--store",
        &bench.database.url(),
        "--upstream",
        &bench.upstream.url(),
    ];
    let (status, text) = run(&arguments.map(str::to_owned)).await;
    assert!(status.code().is_some_and(|code| code != 0), "{status:?}");
    assert!(text.contains("tenant"), "{text}");
}

/// What a container's health check runs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_can_be_asked_whether_it_is_ready() {
    let bench = super::on_sqlite().await;
    let gateway = bench.gateway().start().await;
    let admin = gateway.admin_address().to_string();
    let (upstream, tenant) = (bench.upstream.url(), "fixed:acme");
    let arguments = [
        "check",
        "--ready",
        "--admin",
        &admin,
        "--upstream",
        &upstream,
    ];
    let arguments = [&arguments[..], &["--tenant", tenant]].concat();
    let arguments: Vec<String> = arguments.into_iter().map(str::to_owned).collect();
    let (status, text) = run(&arguments).await;
    assert_eq!((status.code(), text.trim()), (Some(0), "ready"));
    drop(gateway);
    let (status, text) = run(&arguments).await;
    assert_eq!(status.code(), Some(1), "{text}");
    assert!(text.contains("is it running?"), "{text}");
}

/// Every figure that the contract names is told, from the start.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_fixed_metrics_are_told() {
    let bench = super::on_sqlite().await;
    let gateway = bench.gateway().start().await;
    gateway
        .post("/pay")
        .key("k")
        .send()
        .await
        .assert_is(200, "executed");
    gateway
        .post("/pay")
        .key("k")
        .send()
        .await
        .assert_is(200, "replayed");
    let metrics = gateway.metrics().await;
    for (name, labels, value) in [
        (
            "oncegate_guarded_requests_total",
            &[("pool", "main"), ("status", "executed")][..],
            1.0,
        ),
        (
            "oncegate_guarded_requests_total",
            &[("pool", "main"), ("status", "replayed")],
            1.0,
        ),
        (
            "oncegate_upstream_calls_total",
            &[("pool", "main"), ("outcome", "answered")],
            1.0,
        ),
        ("oncegate_upstream_seconds_count", &[("pool", "main")], 1.0),
        ("oncegate_waiters", &[], 0.0),
        ("oncegate_unknown_records", &[], 0.0),
    ] {
        assert!(
            (metrics.sum(name, labels) - value).abs() < 0.1,
            "{name}{labels:?}: {metrics:?}"
        );
    }
    let names: std::collections::BTreeSet<_> = metrics.names().collect();
    for name in [
        "oncegate_waiters",
        "oncegate_unknown_records",
        "oncegate_store_seconds_count",
    ] {
        assert!(names.contains(name), "{name}");
    }
    for path in ["/healthz", "/readyz"] {
        let answer = gateway.admin_call("GET", path).send().await;
        assert_eq!(answer.status, 200, "{path}");
    }
    for path in ["/metrics", "/healthz", "/readyz"] {
        let public = gateway.call("GET", path).send().await;
        assert_eq!(
            public.text(),
            format!("{{\"execution\":{}}}", bench.upstream.requests().len())
        );
    }
    let closed = gateway.admin_call("GET", "/v1/records").send().await;
    assert_eq!(closed.status, 401);
}
