//! What is told about wrong destinations, workflows and effects, and what right ones mean.

use std::time::Duration;

use oncegate::config::{DestinationKind, Loaded};
use oncegate::domain::policy::{ForwardKey, Mode, OnUnknown};
use oncegate::domain::workflow::{
    ANSWER_BYTES_MAX, Action, Effect, HttpSend, OnFailure, Payload, Retry, Send, Success, Target,
    Text, Workflow,
};

use super::example::{everything, secrets};
use super::{LEAST, errors, load_text, load_text_in, route, warnings};

fn all() -> (tempfile::TempDir, Loaded) {
    let dir = tempfile::tempdir().unwrap();
    let loaded = load_text_in(everything(dir.path()), &secrets()).unwrap();
    (dir, loaded)
}

fn plain(text: &str) -> Text {
    Text::Plain(text.to_owned())
}

fn template(text: &str) -> Text {
    Text::Template(text.to_owned())
}

fn retry(seconds: u64, minutes: u64, hours: u64, faults_max: u32) -> Retry {
    Retry {
        first_ms: seconds * 1000,
        max_ms: minutes * 60_000,
        horizon_ms: hours * 3_600_000,
        faults_max,
    }
}

#[test]
fn destinations_mean_what_is_written() {
    let (dir, loaded) = all();
    let [receipts, events, audit] = &loaded.config.destinations[..] else {
        panic!("three destinations");
    };
    assert_eq!(receipts.id.0, "receipts");
    assert_eq!(receipts.concurrency_max, 4);
    assert_eq!(receipts.rate_max, Some(2.5));
    assert_eq!(receipts.timeout, Duration::from_secs(10));
    assert_eq!(receipts.retry, retry(1, 1, 2, 3));
    let DestinationKind::Http {
        url,
        secrets,
        headers,
        allow_private,
        ca,
    } = &receipts.kind
    else {
        panic!("HTTP");
    };
    assert_eq!(url, "http://10.0.0.7:9000/hooks?v=1");
    assert_eq!(secrets.len(), 2);
    let mut headers: Vec<_> = headers
        .iter()
        .map(|(name, text)| (name.as_str(), text.0.as_str()))
        .collect();
    headers.sort_unstable();
    assert_eq!(
        headers,
        [
            ("authorization", "Bearer hunter2-receipts"),
            ("x-source", "oncegate")
        ]
    );
    assert!(allow_private);
    assert_eq!(ca.as_deref(), Some(&*dir.path().join("ca.pem")));
    let DestinationKind::Nats { servers, token, .. } = &events.kind else {
        panic!("NATS");
    };
    assert_eq!(servers, &["nats://127.0.0.1:4222", "nats://10.0.0.9:4222"]);
    assert_eq!(token.as_ref().unwrap().0, "hunter2-nats");
    assert_eq!(events.rate_max, Some(1000.0));
    let DestinationKind::Nats {
        servers,
        credentials,
        ..
    } = &audit.kind
    else {
        panic!("NATS");
    };
    assert_eq!(servers, &["tls://audit.example.com"]);
    assert_eq!(credentials.as_deref(), Some(&*dir.path().join("key.pem")));
    assert_eq!(audit.rate_max, Some(7.0));
    let outbox = &loaded.config.outbox;
    assert_eq!(outbox.claim_lease, Duration::from_secs(20));
    assert!(outbox.allow_urls);
    assert_eq!(outbox.in_flight_per_tenant_max, 5);
    assert_eq!(loaded.config.keep.runs, Duration::from_hours(40 * 24));
    assert_eq!(loaded.config.keep.dead, Duration::from_hours(41 * 24));
}

#[test]
fn workflows_mean_what_is_written() {
    let (_dir, loaded) = all();
    let [workflow] = &loaded.config.workflows[..] else {
        panic!("one workflow");
    };
    let [receipt, cool_off, approval, pack] = &workflow.steps[..] else {
        panic!("four steps");
    };
    assert_eq!(receipt.on_failure, OnFailure::Compensate);
    let expected = Effect {
        send: Send::Http(HttpSend {
            to: Target::Destination("receipts".to_owned()),
            method: "PUT".to_owned(),
            path: Some(template("/receipts/{{ decision.body.id }}")),
            headers: vec![("x-order".to_owned(), template("{{ decision.body.id }}"))],
            success: Success::Ok,
            answer_bytes_max: ANSWER_BYTES_MAX,
        }),
        payload: Payload::Template {
            template: r#"{"id": {{ decision.body.id | tojson }}}"#.to_owned(),
            content_type: "application/merge-patch+json".to_owned(),
        },
        retry: retry(1, 1, 2, 3),
        timeout_ms: 10_000,
    };
    assert_eq!(receipt.action, Action::Effects(vec![expected]));
    let undo = receipt.compensation.as_ref().unwrap();
    let Send::Http(http) = &undo.send else {
        panic!("HTTP");
    };
    assert_eq!(http.to, Target::Pool("payments".to_owned()));
    assert_eq!(undo.payload, Payload::Empty);
    assert_eq!((undo.retry, undo.timeout_ms), (retry(4, 4, 5, 7), 5000));
    assert_eq!(cool_off.action, Action::Wait { for_ms: 600_000 });
    let signal = Action::Signal {
        signal: "approved".to_owned(),
        timeout_ms: Some(24 * 3_600_000),
    };
    assert_eq!(approval.action, signal);
    let Action::Effects(pack) = &pack.action else {
        panic!("a task");
    };
    assert_eq!(
        pack[0].send,
        Send::Task {
            queue: "packing".to_owned()
        }
    );
    let payload = serde_json::json!({"fragile": true, "parts": [1, 2.5, "a"]});
    assert_eq!(pack[0].payload, Payload::Json(payload));
}

#[test]
fn effects_of_a_route_come_before_what_follows_up() {
    let (_dir, loaded) = all();
    let follow_up = loaded.config.routes[0].policy.follow_up.as_ref().unwrap();
    assert_eq!(follow_up.name, "after-charge");
    assert_eq!(follow_up.steps.len(), 5);
    assert_eq!(follow_up.steps[0].name, "effects");
    let Action::Effects(effects) = &follow_up.steps[0].action else {
        panic!("effects");
    };
    let publish = Send::Publish {
        destination: "events".to_owned(),
        subject: plain("charges.created"),
    };
    assert_eq!(effects[0].send, publish);
    assert_eq!(effects[0].payload, Payload::Request);
    assert_eq!(
        (effects[0].retry, effects[0].timeout_ms),
        (retry(2, 2, 3, 4), 6000)
    );
    let Send::Http(http) = &effects[1].send else {
        panic!("HTTP");
    };
    let url = Target::Url("https://hooks.example.com/charges".to_owned());
    assert_eq!((&http.to, &http.path), (&url, &None));
    assert_eq!(effects[1].payload, Payload::Json("charged".into()));
    assert_eq!(effects[1].retry, retry(6, 6, 7, 9));

    let alone = route("required = true\n[[route.effect]]\ntask = \"pack\"");
    let loaded = load_text(&alone).unwrap();
    let Workflow { name, steps } = &**loaded.config.routes[0].policy.follow_up.as_ref().unwrap();
    assert_eq!((name.as_str(), steps.len()), ("effects", 1));
    let Action::Effects(effects) = &steps[0].action else {
        panic!("effects");
    };
    assert_eq!(
        (effects[0].retry, effects[0].timeout_ms),
        (Retry::DEFAULT, 30_000)
    );
    assert_eq!(effects[0].payload, Payload::Decision);
    assert_eq!(loaded.report.warnings, []);
}

#[test]
fn an_accepted_request_is_sent_again_under_a_key_of_its_own() {
    let loaded = load_text(route("mode = \"accept\"")).unwrap();
    let policy = &loaded.config.routes[0].policy;
    assert_eq!(policy.mode, Mode::Accept);
    assert_eq!(policy.on_unknown, OnUnknown::Redrive);
    assert_eq!(policy.forward_key, ForwardKey::Derived);
    assert_eq!(loaded.report.warnings, []);
    assert_eq!(policy.retry, Retry::DEFAULT);
    let own = route(
        "mode = \"accept\"\nretry = { first = \"1s\", max = \"2m\", horizon = \"3h\", faults = 4 }",
    );
    assert_eq!(
        load_text(own).unwrap().config.routes[0].policy.retry,
        retry(1, 2, 3, 4)
    );
    let told = errors(route("retry = { first = \"1s\" }"));
    assert!(told.contains("called once"), "{told}");
    let told = errors(route(
        "mode = \"accept\"\nretry = { first = \"3h\", horizon = \"1s\" }",
    ));
    assert!(told.contains("retry.first = 3h is longer than"), "{told}");
    assert!(
        told.contains("is longer than route[0].retry.horizon = 1s"),
        "{told}"
    );
    let verbatim = route("mode = \"accept\"\nforward_key = \"verbatim\"");
    let policy = &load_text(verbatim).unwrap().config.routes[0].policy;
    assert_eq!(policy.forward_key, ForwardKey::Verbatim);
}

/// Before the least configuration.
const MISTAKES: &str = r#"
[[destination]]
id = "pool"
url = "https://user:hunter2@a/"
[[destination]]
id = "receipts"
url = "https://receipts.example.com"
secrets = ["whsec_hunter2", 5]
headers = { authorization = "hunter2", "idempotency-key" = "x", x-a = "a\nb", x-b = 1 }
token = "hunter2"
rate_max = -1
retry = { first = "2h", max = "1h", horizon = "31d", fault = 2 }
[[destination]]
id = "receipts"
url = "http://10.0.0.1/"
secrets = []
[[destination]]
id = "events"
url = "nats://a:4222,http://b"
subject = "a"
[[destination]]
id = "bus"
url = "nats://a:4222"
token = "hunter2"

[[workflow]]
name = "after order"
[[workflow]]
name = "after-order"
[[workflow.step]]
name = "one"
[[workflow.step]]
name = "two"
http = "receipts"
task = "pack"
[[workflow.step]]
name = "three"
http = "bus"
[[workflow.step]]
name = "four"
publish = "bus"
[[workflow.step]]
name = "four"
wait = 5
on_failure = "retry"
[[workflow.step]]
name = "five"
pool = "defautl"
body = "answer"
payload = 1
[[workflow.step]]
name = "six"
url = "http://127.0.0.1/"
headers = { authorization = "${env:A}", host = "b" }
[[workflow.step]]
name = "seven"
http = "receipts"
path = "orders"
template = "${env:A}"
[workflow.step.compensation]
wait = "1s"
"#;

/// In its route.
const MISTAKES_IN_ROUTE: &str = r#"follow_up = "after-oder"
[[route.effect]]
publish = "receipts"
subject = "a..b"
[[route.effect]]
signal = "a"
[[route.effect]]
http = "receits"
payload = nan
"#;

#[test]
fn every_mistake_in_effects_is_told_at_once_with_its_place() {
    let text = format!("{MISTAKES}{}", route(MISTAKES_IN_ROUTE));
    insta::assert_snapshot!(errors(text));
}

#[test]
fn a_mistyped_name_is_told_with_the_one_that_was_meant() {
    let text = r#"
[[destination]]
id = "receipts"
url = "https://receipts.example.com"
secrets = []
[[workflow]]
name = "after-order"
[[workflow.step]]
name = "one"
http = "receits"
[[workflow.step]]
name = "two"
publish = "events"
subject = "a"
"#;
    let told = errors(format!("{text}{}", route("follow_up = \"after-oder\"")));
    let lines: Vec<_> = told.lines().collect();
    assert_eq!(
        lines,
        [
            "oncegate.toml:10:8: workflow[0].step[0].http = receits: there is no such destination; did you mean \"receipts\"?",
            "oncegate.toml:13:11: workflow[0].step[1].publish = events: there is no such destination; add a [[destination]] with this id",
            "oncegate.toml:24:13: route[0].follow_up = after-oder: there is no such workflow; did you mean \"after-order\"?",
        ]
    );
}

#[test]
fn contradictions_in_effects_name_both_values_and_what_to_do() {
    let task = "required = true\n[[route.effect]]\ntask = \"pack\"\n";
    let told = [
        errors(route("mode = \"accept\"\non_unknown = \"hold\"")),
        errors(route("mode = \"accept\"\non_store_down = \"pass\"")),
        errors(route("mode = \"accept\"\nforward_key = \"none\"")),
        errors(
            route("mode = \"accept\"\n[keep]\nruns = \"72h\"\n[limits]\ncache_trust = \"1s\"")
                .replace("mode", "valid_for = \"73h\"\nmode"),
        ),
        errors(route("mode = \"accept\"\n[keep]\nruns = \"71h\"")),
        errors(route(&format!("{task}[keep]\ndead = \"71h\""))),
        errors(route(&format!("{task}retry = {{ horizon = \"5s\" }}"))),
        errors(route(&format!("{task}retry = {{ first = \"2h\" }}"))),
        errors(route(&format!("methods = []\n{task}"))),
        errors(route(
            "mode = \"accept\"\nfollow_up = \"w\"\n[[workflow]]\nname = \"w\"\n[[workflow.step]]\nname = \"call\"\nwait = \"1s\"",
        )),
        errors(route(&format!("{task}template = \"{{{{ a \""))),
        errors(route("[outbox]\nclaim_lease = \"3s\"")),
        errors(route("[outbox]\nclaim_lease = \"1s\"")),
        errors(route("[outbox]\nin_flight_max = 10")),
        errors(route(&format!(
            "follow_up = \"w\"\n{task}[[workflow]]\nname = \"w\"\n[[workflow.step]]\nname = \"effects\"\nwait = \"1s\""
        ))),
    ];
    insta::assert_snapshot!(told.join("\n\n"));
}

#[test]
fn doubtful_destinations_and_effects_are_warned_of() {
    let text = format!(
        "{LEAST}on_store_down = \"pass\"\n[[route.effect]]\nhttp = \"a\"\n{}",
        r#"
[[destination]]
id = "a"
url = "http://a.example.com/"
[[destination]]
id = "b"
url = "http://127.0.0.1:1/"
allow_private = true
secrets = []
[[workflow]]
name = "w"
[[workflow.step]]
name = "s"
wait = "1s"
"#
    );
    insta::assert_snapshot!(warnings(&text));
    let by_callers = format!(
        "{text}[[token]]\nname = \"a\"\nrole = \"service\"\nsha256 = \"{}\"\n",
        "ab".repeat(32)
    );
    assert!(!warnings(&by_callers).contains("nobody else"));
}

/// As they are dialled, whatever way they are written.
#[test]
fn a_private_address_is_refused_in_each_of_its_forms() {
    let destination = |host: &str| {
        format!("{LEAST}[[destination]]\nid = \"hook\"\nurl = \"https://{host}/\"\nsecrets = []\n")
    };
    for host in [
        "10.0.0.1",
        "100.64.0.1",
        "198.18.0.1",
        "127.1",
        "2130706433",
        "0x7f.1",
        "[::ffff:127.0.0.1]",
        "[64:ff9b::a9fe:a9fe]",
        "localhost",
        "a.localhost.",
    ] {
        let told = errors(destination(host));
        assert!(told.contains("is in a private network"), "{host}: {told}");
    }
    for host in ["1.1.1.1", "[2606:4700::1111]", "hook.example.com"] {
        assert!(load_text(destination(host)).is_ok(), "{host}");
    }
}

#[test]
fn a_template_that_asks_for_what_is_not_there_is_refused() {
    let told = errors(format!(
        "{LEAST}effect = [{{ http = \"hook\", template = \"{{{{ decison.body }}}}\" }}]\n\
         [[destination]]\nid = \"hook\"\nurl = \"https://hook.example.com/\"\nsecrets = []\n"
    ));
    assert!(told.contains("asks for `decison`"), "{told}");
}
