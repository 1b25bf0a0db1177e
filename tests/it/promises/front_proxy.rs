//! Retries that others make: a proxy in front, and a client library.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde::Deserialize;

use crate::support::client::Call;
use crate::support::clock::eventually;
use crate::support::gateway::Bench;
use crate::support::process::Process;
use crate::support::upstream::{Cut, Reply};

on_postgres!(a_proxy_that_sends_again_runs_nothing_twice);
each_store!(a_thousand_operations_of_a_retrying_client_run_at_most_once_each);

/// A real nginx, in front of some gateways. It gives up on one after a second and sends the same
/// POST to the next.
async fn nginx(bench: &Bench, gateways: [SocketAddr; 2]) -> (Process, SocketAddr) {
    let free = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = free.local_addr().expect("an address");
    drop(free);
    let folder = bench.path("nginx");
    std::fs::create_dir(&folder).expect("a folder");
    let folder = folder.display();
    let [one, other] = gateways;
    let config = format!(
        "daemon off; master_process off; pid {folder}/pid; error_log stderr;
         events {{ worker_connections 512; }}
         http {{
           access_log off;
           client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
           fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi;
           scgi_temp_path {folder}/scgi;
           upstream gateways {{ server {one} max_fails=0; server {other} max_fails=0; keepalive 32; }}
           server {{
             listen {address};
             location / {{
               proxy_pass http://gateways;
               proxy_http_version 1.1;
               proxy_set_header Connection \"\";
               proxy_read_timeout 1s;
               proxy_next_upstream error timeout non_idempotent;
             }}
           }}
         }}"
    );
    let file = bench.path("nginx.conf");
    std::fs::write(&file, config).expect("the folder takes files");
    let program = ["/usr/sbin/nginx", "/usr/bin/nginx"];
    let program = program.into_iter().find(|path| Path::new(path).exists());
    let mut command = Command::new(program.expect("nginx is installed by scripts/setup"));
    command.arg("-e").arg("stderr").arg("-c").arg(&file);
    let process = Process::spawn(command);
    eventually("nginx listens", async || {
        let connection = tokio::net::TcpStream::connect(address).await;
        connection.ok()
    })
    .await;
    (process, address)
}

async fn a_proxy_that_sends_again_runs_nothing_twice(bench: Bench) {
    let gateways = [bench.gateway().start().await, bench.gateway().start().await];
    let (_nginx, front) = nginx(&bench, [gateways[0].listen(), gateways[1].listen()]).await;
    let slow = |ms| Reply::new(201).delay(Duration::from_millis(ms));
    // Longer than the proxy's patience with one gateway, and with both.
    bench.upstream.on_post("/once").reply(slow(1500));
    bench.upstream.on_post("/twice").reply(slow(2500));
    let call = |path: &str, key: &str| Call::new(front, "POST", path).key(key).json("{}");
    let until_final = |path: &'static str, key: String| async move {
        let mut tries = 0;
        loop {
            let answer = call(path, &key).send().await;
            tries += 1;
            if answer.status == 201 {
                return (answer, tries);
            }
            // The proxy's own page, or an answer of the gateway that says to come back.
            assert!(matches!(answer.status, 409 | 504), "{answer:?}");
            assert!(tries < 20, "{answer:?}");
        }
    };
    let operations = (0..20).map(|n| {
        let path = if n % 2 == 0 { "/once" } else { "/twice" };
        until_final(path, format!("k{n}"))
    });
    let outcomes = futures_util::future::join_all(operations).await;
    for (n, (answer, _)) in outcomes.iter().enumerate() {
        assert!(answer.decision().is_some(), "{answer:?}");
        assert_eq!(bench.upstream.executions(&format!("k{n}")), 1);
    }
    assert!(
        outcomes.iter().any(|(_, tries)| *tries > 1),
        "the proxy gave up on some"
    );
    // What the gateway says passes the proxy as it is.
    let other = call("/once", "k0").json("[]").send().await;
    other.assert_problem(422, "key-reused", "mismatch");
    let again = call("/once", "k0").send().await;
    again.assert_is(201, "replayed");
}

/// What the client script tells of one operation.
#[derive(Debug, Deserialize)]
struct Told {
    key: String,
    status: u16,
    idempotency: String,
    problem: String,
    error: String,
}

/// A Python that has `requests`.
fn python() -> &'static str {
    let candidates = ["/usr/bin/python3", "python3"];
    let has_requests = |program: &&str| {
        let import = Command::new(program)
            .args(["-c", "import requests"])
            .output();
        import.is_ok_and(|output| output.status.success())
    };
    let found = candidates.into_iter().find(has_requests);
    found.expect("python3 with requests is installed by scripts/setup")
}

async fn a_thousand_operations_of_a_retrying_client_run_at_most_once_each(bench: Bench) {
    for n in 0..1000 {
        let path = format!("/op/{n}");
        let reply = match n % 10 {
            0 => Reply::new(201).cut_after(0, Cut::Rst),
            1 => Reply::new(201).delay(Duration::from_millis(700)),
            2 => Reply::new(201).cut_after(0, Cut::Fin),
            _ => Reply::new(201),
        };
        bench.upstream.on_post(&path).reply(reply);
    }
    for _ in 0..20 {
        bench.upstream.break_next_accept(Cut::Rst);
    }
    let gateway = bench.gateway().route("lease = \"10s\"").start().await;
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/clients/retrying.py");
    let output = tokio::process::Command::new(python())
        .args([script, &format!("http://{}", gateway.listen()), "1000"])
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(Duration::from_mins(2), output).await;
    let output = output.expect("the client ends").expect("the client starts");
    let trouble = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{trouble}");
    let told = String::from_utf8_lossy(&output.stdout);
    let told: Vec<Told> = told
        .lines()
        .map(|line| serde_json::from_str(line).expect("a line of JSON"))
        .collect();
    assert_eq!(told.len(), 1000);

    let mut outcomes: BTreeMap<String, u32> = BTreeMap::new();
    for told in &told {
        assert_eq!(told.error, "", "{told:?}");
        let runs = bench.upstream.executions(&told.key);
        let typed = match (told.status, &*told.problem) {
            (201, "") => runs == 1,
            (409 | 502 | 504, "outcome-unknown") => runs <= 1,
            _ => false,
        };
        assert!(typed, "{told:?} after {runs} runs");
        let outcome = format!("{} {}", told.status, told.idempotency);
        *outcomes.entry(outcome).or_default() += 1;
    }
    let waited = outcomes.get("201 waited").copied().unwrap_or_default()
        + outcomes.get("201 replayed").copied().unwrap_or_default();
    assert!(
        waited >= 90,
        "retries after time-outs got the first answer: {outcomes:?}"
    );
    let done = told.iter().find(|told| told.status == 201);
    let key = &done.expect("some were done").key;
    let n = &key["op-".len()..];
    let call = gateway.post(&format!("/op/{n}")).key(key);
    let again = call.json(format!("{{\"n\": {n}}}")).send().await;
    again.assert_is(201, "replayed");
}
