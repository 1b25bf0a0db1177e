//! Two gateways behind PgBouncer in transaction mode: the same promises, with polling for hints.

use super::duplicates::assert_one_executed;
use crate::support::client::{Call, send_all};
use crate::support::clock::eventually;
use crate::support::gateway::{Bench, TestGateway};
use crate::support::pgbouncer::PgBouncer;
use crate::support::rows::Database;
use crate::support::upstream::{Gate, Reply};

on_postgres!(behind_a_transaction_pooler_the_promises_hold);

async fn behind(bench: &Bench, pooler: &PgBouncer) -> TestGateway {
    let Database::Postgres(database) = &bench.database else {
        panic!("on PostgreSQL");
    };
    let setup = bench
        .gateway()
        .store_url(&database.url_through(pooler.address()));
    let setup = setup.section("store", "notify = false");
    setup.route("lease = \"10s\"").start().await
}

async fn behind_a_transaction_pooler_the_promises_hold(bench: Bench) {
    let Database::Postgres(database) = &bench.database else {
        panic!("on PostgreSQL");
    };
    // Fewer connections than the gateways have: each transaction may come on another.
    let pooler = PgBouncer::start(database, 3).await;
    let mut gateways = [behind(&bench, &pooler).await, behind(&bench, &pooler).await];

    let calls = (0..200).map(|n| gateways[n % 2].post("/pay").key(format!("k{}", n / 4)));
    for answers in send_all(calls).await.chunks(4) {
        assert_one_executed(answers);
    }

    let gate = Gate::closed();
    bench
        .upstream
        .on_post("/slow")
        .reply(Reply::new(201).hold(&gate));
    let calls = (0..10).map(|n| gateways[n % 2].post("/slow").key("slow"));
    let begun: Vec<_> = calls.map(Call::begin).collect();
    eventually("they wait on both sides", async || {
        let mut parked = 0.0;
        for gateway in &gateways {
            parked += gateway.metrics().await.sum("oncegate_waiters", &[]);
        }
        (parked > 7.5).then_some(())
    })
    .await;
    gate.open();
    let mut answers = Vec::new();
    for call in begun {
        answers.push(call.answer().await);
    }
    assert_one_executed(&answers);

    gateways[0].restart().await;
    let again = gateways[0].post("/slow").key("slow").send().await;
    again.assert_is(201, "replayed");
    let other = gateways[1]
        .post("/slow")
        .key("slow")
        .json("{}")
        .send()
        .await;
    other.assert_problem(422, "key-reused", "mismatch");
}
