//! The process is killed at every boundary of its work, one after another: before and after each
//! statement that changes the store, at each delivery, and all along the writes of a file.
//!
//! One run goes through what there is: a decision, a delivery that fails at first, a timer, a task,
//! a delivery that fails for good, and the compensation of what was done. Wherever the process
//! died, the client gets one decision, and the run ends as it would have without the death.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::{StreamExt as _, stream};
use serde_json::json;

use crate::support::clock::within;
use crate::support::gateway::{Bench, Setup, TestGateway};
use crate::support::invariants::{assert_all, what_was_final_still_is};
use crate::support::rows::{Database, Kind};
use crate::support::upstream::{Reply, Upstream};
use crate::support::wal::LogWatch;
use crate::support::wiretap::{Side, Wiretap};

/// Deaths that are tried at a time.
const AT_A_TIME: usize = 3;

/// What is sent when nobody dies: `/one` twice, `/two`, `/three` twice, `/undo-one`.
const DELIVERIES: usize = 6;

/// Of these, what only follows from the destination's own refusals.
const REFUSED: usize = 2;

/// How many writes of a file are a process's last.
const DEATHS_OF_A_FILE: usize = 16;

const STEPS: &str = r#"
    { name = "one", http = "hook", path = "/one", compensation = { http = "hook", path = "/undo-one" } },
    { name = "pause", wait = "50ms" },
    { name = "book", task = "stock" },
    { name = "two", http = "hook", path = "/two" },
    { name = "three", http = "hook", path = "/three", on_failure = "compensate" },
"#;

/// One death: a bench of its own, its destination, and what the client and worker go on doing.
struct Death {
    bench: Bench,
    hook: Upstream,
}

impl Death {
    async fn prepare(kind: Kind) -> Self {
        let bench = Bench::new(kind).await;
        // `redrive`: the upstream is called again by a retry, and each run comes to its end.
        bench.allow_reruns();
        let hook = Upstream::start().await;
        hook.on_post("/one").once().reply(Reply::new(503));
        // Long enough for heartbeats of its claim.
        hook.on_post("/two")
            .reply(Reply::new(200).delay(Duration::from_millis(1200)));
        hook.on_post("/three").reply(Reply::new(422));
        Self { bench, hook }
    }

    fn file(&self) -> &Path {
        match &self.bench.database {
            Database::Sqlite(path) => path,
            Database::Postgres(_) => panic!("on SQLite"),
        }
    }

    fn setup(&self) -> Setup {
        let setup = self.bench.gateway().hook(&self.hook).tokens();
        let setup = setup.section("store", "operation_timeout = \"1s\"");
        setup
            .section(
                "outbox",
                "poll_interval = \"100ms\"\nclaim_lease = \"1500ms\"",
            )
            .more("workflow", &format!("name = \"flow\"\nstep = [{STEPS}]"))
            .route("follow_up = \"flow\"\nlease = \"1s\"\non_unknown = \"redrive\"")
    }

    /// The client asks until it has the answer; the worker does the task; the run ends.
    async fn go_on(&self, gateway: &TestGateway) {
        within(Duration::from_secs(40), "the run is over", async || {
            let _ = pay(gateway).await;
            work(gateway).await;
            let runs = self.bench.database.runs().await;
            let over = runs.first().is_some_and(|run| run.status == "compensated");
            over.then_some(())
        })
        .await;
    }

    /// There is one decision, one run, and each effect came once but for what this death allows.
    async fn assert_whole(&self, gateway: &TestGateway, doubled_max: usize) {
        let answer = pay(gateway).await.expect("an answer");
        answer.assert_is(200, "replayed");
        let database = &self.bench.database;
        assert_eq!(database.count("eec_routing_decision").await, 1);
        assert_eq!(database.runs().await.len(), 1);
        let requests = self.hook.requests();
        assert!(requests.len() >= DELIVERIES, "{}", requests.len());
        let last = requests.last().expect("some");
        assert_eq!(last.path(), "/undo-one");
        assert_all(database, &requests, REFUSED + doubled_max).await;
    }
}

async fn pay(gateway: &TestGateway) -> std::io::Result<crate::support::client::Answer> {
    let pay = gateway.post("/pay").key("k").try_send();
    tokio::time::timeout(Duration::from_secs(2), pay)
        .await
        .unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()))
}

/// Does the task, if there is one.
async fn work(gateway: &TestGateway) {
    let claim = json!({ "queue": "stock", "limit": 1, "lease": "1s", "worker": "w" });
    let call = gateway.api("worker", "POST", "/v1/tasks/claim");
    let Ok(answer) = call.json(claim.to_string()).try_send().await else {
        return;
    };
    let tasks: serde_json::Value = serde_json::from_str(&answer.text()).unwrap_or_default();
    let task = &tasks["tasks"][0];
    if task.is_null() {
        return;
    }
    let result = json!({
        "tenant": task["tenant"], "intent_id": task["intent_id"], "stamp": task["stamp"],
        "result": { "place": "a-7" },
    });
    let call = gateway.api("worker", "POST", "/v1/tasks/result");
    let _ = call.json(result.to_string()).try_send().await;
}

fn changes(statement: &str) -> bool {
    ["insert ", "update ", "delete "]
        .iter()
        .any(|verb| statement.contains(verb))
}

async fn tapped(death: &Death) -> (Wiretap, TestGateway) {
    let Database::Postgres(database) = &death.bench.database else {
        panic!("on PostgreSQL");
    };
    let tap = Wiretap::start(database.address()).await;
    let url = database.url_through(tap.address());
    let gateway = death.setup().store_url(&url).start().await;
    tap.forget();
    (tap, gateway)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn before_and_after_each_statement() {
    let untouched = Death::prepare(Kind::Postgres).await;
    let (tap, gateway) = tapped(&untouched).await;
    untouched.go_on(&gateway).await;
    untouched.assert_whole(&gateway, 0).await;
    let mut statements = tap.asked();
    statements.retain(|statement| changes(statement));
    drop(gateway);
    // Reserve, complete, tick, claim, give up or put off, end, the worker's claim and result.
    assert!(statements.len() >= 6, "{statements:#?}");
    let boundaries = statements
        .iter()
        .flat_map(|statement| [(statement, Side::Before), (statement, Side::After)]);
    stream::iter(boundaries)
        .for_each_concurrent(AT_A_TIME, |(statement, side)| async move {
            println!("killed {side:?} {}", &statement[..statement.len().min(90)]);
            let death = Death::prepare(Kind::Postgres).await;
            let (tap, mut gateway) = tapped(&death).await;
            tap.stop_next(statement, side);
            tokio::select! {
                () = tap.stopped() => {}
                () = death.go_on(&gateway) => panic!("never asked: {statement}"),
            }
            gateway.sigkill();
            let before = death.bench.database.intents().await;
            gateway.restart().await;
            death.go_on(&gateway).await;
            what_was_final_still_is(&before, &death.bench.database.intents().await);
            death.assert_whole(&gateway, 1).await;
        })
        .await;
}

/// A file has no statements to stop: the process is killed right after writes to its log, spread
/// over all that the work takes, inside transactions and between them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_along_the_writes_of_a_file() {
    let untouched = Death::prepare(Kind::Sqlite).await;
    let gateway = untouched.setup().start().await;
    let log = LogWatch::start(untouched.file(), None);
    untouched.go_on(&gateway).await;
    untouched.assert_whole(&gateway, 0).await;
    let writes = log.writes();
    drop((log, gateway));
    assert!(writes > DEATHS_OF_A_FILE, "{writes}");
    let deaths = &AtomicUsize::new(0);
    stream::iter(0..DEATHS_OF_A_FILE)
        .for_each_concurrent(AT_A_TIME, |nth| async move {
            let at = 1 + nth * writes / DEATHS_OF_A_FILE;
            println!("killed at write {at} of about {writes}");
            let death = Death::prepare(Kind::Sqlite).await;
            let mut gateway = death.setup().start().await;
            let log = LogWatch::start(death.file(), Some((gateway.process_id(), at)));
            tokio::select! {
                () = log.until(at) => {
                    deaths.fetch_add(1, Ordering::Relaxed);
                    gateway.sigkill();
                    gateway.restart().await;
                    death.go_on(&gateway).await;
                }
                // Several writes can count as one: this time there were not so many.
                () = death.go_on(&gateway) => {}
            }
            death.assert_whole(&gateway, 1).await;
        })
        .await;
    let deaths = deaths.load(Ordering::Relaxed);
    assert!(deaths > DEATHS_OF_A_FILE / 2, "{deaths}");
}

/// The destination has the request, and nobody hears what it says.
async fn at_each_delivery(kind: Kind) {
    stream::iter(1..=DELIVERIES)
        .for_each_concurrent(AT_A_TIME, |nth| async move {
            println!("killed at delivery {nth}");
            let death = Death::prepare(kind).await;
            let mut gateway = death.setup().start().await;
            tokio::select! {
                _ = death.hook.until(|state| state.requests.len() >= nth) => {}
                () = death.go_on(&gateway) => panic!("delivery {nth} never came"),
            }
            gateway.sigkill();
            gateway.restart().await;
            death.go_on(&gateway).await;
            death.assert_whole(&gateway, 1).await;
        })
        .await;
}

mod at_each_delivery_it_is_taken_up {
    use crate::support::rows::Kind;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn sqlite() {
        Box::pin(super::at_each_delivery(Kind::Sqlite)).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn postgres() {
        Box::pin(super::at_each_delivery(Kind::Postgres)).await;
    }
}
