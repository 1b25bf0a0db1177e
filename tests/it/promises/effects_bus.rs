//! Effects that go out as messages to a real NATS server, beside those that are HTTP calls.

use crate::support::client::send_all;
use crate::support::clock::eventually;
use crate::support::gateway::{Bench, Setup};
use crate::support::nats::Nats;
use crate::support::upstream::{Gate, Reply, Upstream};

each_store!(
    a_message_is_published_once_though_the_process_dies_before_it,
    what_is_published_while_the_server_is_down_comes_once_it_is_back,
);

fn to_bus(bench: &Bench, nats: &Nats, hook: &Upstream) -> Setup {
    let bus = format!(
        "id = \"bus\"\nurl = \"{}\"\ntimeout = \"2s\"\n\
         retry = {{ first = \"100ms\", max = \"500ms\", horizon = \"1h\" }}",
        nats.url()
    );
    let effects = r#"effect = [{ http = "hook", path = "/direct", body = "decision" },
        { publish = "bus", subject = "orders.created", template = '{{ decision.body.execution }}' }]"#;
    let outbox = "poll_interval = \"200ms\"\nclaim_lease = \"3500ms\"";
    let setup = bench.gateway().hook(hook).section("outbox", outbox);
    setup.more("destination", &bus).route(effects)
}

async fn a_message_is_published_once_though_the_process_dies_before_it(bench: Bench) {
    let (nats, hook) = (Nats::start().await, Upstream::start().await);
    let stream = nats.stream("ORDERS", "orders.>").await;
    let gate = Gate::closed();
    hook.on_post("/direct")
        .once()
        .reply(Reply::new(200).hold(&gate));
    let mut gateway = to_bus(&bench, &nats, &hook).start().await;
    let calls = (0..5).map(|n| gateway.post("/pay").key(format!("k{n}")));
    for answer in send_all(calls).await {
        answer.assert_is(200, "executed");
    }
    hook.until(|state| state.executions_at("/direct") == 5)
        .await;
    gateway.sigkill();
    gateway.restart().await;
    bench.database.until_runs_are(5, "completed").await;
    assert_eq!(nats.messages("ORDERS").await, 5);
    let mut ids = Vec::new();
    for sequence in 1..=5 {
        let message = stream.get_raw_message(sequence).await.expect("a message");
        let id = message.headers.get("Nats-Msg-Id").expect("an id");
        ids.push(id.as_str().to_owned());
        let execution = String::from_utf8(message.payload.to_vec()).expect("text");
        assert!(execution.parse::<u32>().is_ok(), "{execution}");
    }
    let intents = bench.database.intents().await;
    let published = intents.iter().filter(|intent| intent.destination == "bus");
    let mut keys: Vec<_> = published.map(|intent| intent.key.clone()).collect();
    keys.sort();
    ids.sort();
    assert_eq!(ids, keys);
}

async fn what_is_published_while_the_server_is_down_comes_once_it_is_back(bench: Bench) {
    let (mut nats, hook) = (Nats::start().await, Upstream::start().await);
    nats.stream("ORDERS", "orders.>").await;
    let setup = to_bus(&bench, &nats, &hook);
    let setup = setup.section("outbox", "breaker_open = \"300ms\"");
    let gateway = setup.start().await;
    nats.kill();
    let calls = (0..5).map(|n| gateway.post("/pay").key(format!("k{n}")));
    for answer in send_all(calls).await {
        answer.assert_is(200, "executed");
    }
    let failed = "select count(*) from eec_run_attempt where status = 'failed'";
    eventually("it was tried", async || {
        (bench.database.number(failed).await > 0).then_some(())
    })
    .await;
    nats.restart().await;
    bench.database.until_runs_are(5, "completed").await;
    assert_eq!(nats.messages("ORDERS").await, 5);
}
