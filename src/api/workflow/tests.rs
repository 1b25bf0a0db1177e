mod tell;

use proptest::prelude::*;
use serde_json::json;

use self::tell::tell_workflow;
use super::*;
use crate::domain::workflow::{ANSWER_BYTES_MAX, HttpSend, Payload, Send, Success, Target, Text};

fn catalog() -> Catalog {
    let known = |is_http| Known {
        is_http,
        times: Times {
            timeout_ms: 7_000,
            retry: Retry {
                first_ms: 1_000,
                ..Retry::DEFAULT
            },
        },
    };
    let configured = Workflow {
        name: "after-order".into(),
        steps: Vec::new(),
    };
    Catalog {
        destinations: [
            ("receipts".to_owned(), known(true)),
            ("events".to_owned(), known(false)),
        ]
        .into(),
        pools: ["orders".to_owned()].into(),
        workflows: [("after-order".to_owned(), Arc::new(configured))].into(),
        follow_ups: BTreeMap::new(),
        allow_urls: true,
        tenant_header: None,
    }
}

fn effect(effect: Value) -> Result<Effect, String> {
    catalog().effect(effect, "effects[0]")
}

#[test]
fn what_is_not_said_is_as_the_destination_says() {
    let told = effect(json!({ "http": "receipts" })).unwrap();
    let Send::Http(http) = &told.send else {
        panic!("{told:?}")
    };
    assert_eq!(http.to, Target::Destination("receipts".into()));
    assert_eq!((http.method.as_str(), &http.path), ("POST", &None));
    assert_eq!((told.timeout_ms, told.retry.first_ms), (7_000, 1_000));
    assert_eq!(told.payload, Payload::Decision);
    let own = json!({
        "http": "receipts",
        "timeout": "2s",
        "retry": { "first": "3s", "faults": 2 },
        "payload": null,
    });
    let own = effect(own).unwrap();
    assert_eq!((own.timeout_ms, own.retry.first_ms), (2_000, 3_000));
    assert_eq!(own.retry.faults_max, 2);
    assert_eq!(own.retry.max_ms, Retry::DEFAULT.max_ms);
    assert_eq!(own.payload, Payload::Json(Value::Null));
    let task = effect(json!({ "task": "emails" })).unwrap();
    assert_eq!((task.timeout_ms, task.retry), (30_000, Retry::DEFAULT));
}

#[test]
fn texts_with_braces_are_templates() {
    let told = effect(json!({
        "pool": "orders",
        "path": "/orders/{{ decision.body.id }}",
        "headers": [["x-a", "1"], ["x-a", "{% if true %}2{% endif %}"]],
    }));
    let Send::Http(http) = told.unwrap().send else {
        panic!("no HTTP")
    };
    let path = Text::Template("/orders/{{ decision.body.id }}".into());
    assert_eq!(http.path, Some(path));
    let template = Text::Template("{% if true %}2{% endif %}".into());
    let headers = [("x-a", Text::Plain("1".into())), ("x-a", template)];
    let headers = headers.map(|(name, value)| (name.to_owned(), value));
    assert_eq!(http.headers, headers);
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table")]
fn every_refusal_names_its_place() {
    for (told, what) in [
        (json!([]), "effects[0]: write an object"),
        (json!({}), "effects[0]: write one of http, pool"),
        (
            json!({ "htp": "x" }),
            "effects[0].htp: did you mean `http`?",
        ),
        (
            json!({ "http": "receipts", "task": "q" }),
            "effects[0]: leave `http` or `task` out",
        ),
        (
            json!({ "http": "reciepts" }),
            "effects[0].http: there is no such destination; did you mean \"receipts\"?",
        ),
        (
            json!({ "http": "events" }),
            "effects[0].http: write `publish`: this destination is NATS",
        ),
        (
            json!({ "publish": "receipts", "subject": "a" }),
            "effects[0].publish: write `http`",
        ),
        (
            json!({ "publish": "events", "subject": "a..b" }),
            "effects[0].subject: write a subject",
        ),
        (json!({ "pool": "other", "path": "/" }), "effects[0].pool: "),
        (
            json!({ "pool": "orders" }),
            "effects[0].path: write the path",
        ),
        (json!({ "task": "no name" }), "effects[0].task: a name is"),
        (json!({ "url": "ftp://a/" }), "effects[0].url: write https"),
        (
            json!({ "url": "https://u@a/" }),
            "effects[0].url: write https",
        ),
        (
            json!({ "http": "receipts", "method": "post" }),
            "effects[0].method: write a method",
        ),
        (
            json!({ "http": "receipts", "path": "x" }),
            "effects[0].path: write a path",
        ),
        (
            json!({ "http": "receipts", "headers": { "host": "a" } }),
            "effects[0].headers: host is written by the gateway",
        ),
        (
            json!({ "http": "receipts", "headers": { "authorization": "a" } }),
            "effects[0].headers: authorization would be stored",
        ),
        (
            json!({ "http": "receipts", "headers": { "a": "b\r\nc: d" } }),
            "effects[0].headers: the value of a",
        ),
        (
            json!({ "http": "receipts", "payload": 1, "body": "none" }),
            "effects[0]: write only one of `payload`",
        ),
        (
            json!({ "http": "receipts", "body": "all" }),
            "effects[0].body: write decision, request or none",
        ),
        (
            json!({ "http": "receipts", "content_type": "a/b" }),
            "effects[0].content_type: it belongs to",
        ),
        (
            json!({ "http": "receipts", "timeout": "0s" }),
            "effects[0].timeout: write a duration",
        ),
        (
            json!({ "http": "receipts", "retry": { "horizon": "60days" } }),
            "effects[0].retry.horizon: write a duration",
        ),
        (
            json!({ "http": "receipts", "retry": { "first": "10s", "max": "1s" } }),
            "effects[0].retry.max: write a duration that is not shorter",
        ),
        (
            json!({ "http": "receipts", "retry": { "fault": 1 } }),
            "effects[0].retry.fault: did you mean `faults`?",
        ),
        (
            json!({ "http": "receipts", "retry": { "faults": 0 } }),
            "effects[0].retry.faults: write a number",
        ),
        (
            json!({ "http": "receipts", "colour": "red" }),
            "effects[0].colour: there is no such key here",
        ),
    ] {
        let refused = effect(told.clone()).unwrap_err();
        assert!(refused.starts_with(what), "{told}: {refused}");
    }
}

#[test]
fn urls_are_refused_where_the_configuration_says_so() {
    let catalog = Catalog {
        allow_urls: false,
        ..catalog()
    };
    let refused = catalog.effect(json!({ "url": "https://a.example/" }), "effects[0]");
    assert!(refused.unwrap_err().contains("outbox.allow_urls"));
}

#[test]
fn effects_are_a_first_step_before_the_run() {
    let catalog = catalog();
    let read = |effects, run| catalog.read(effects, run, &TenantScope::stored("acme"));
    assert_eq!(read(None, None), Ok(None));
    assert_eq!(read(Some(json!([])), Some(Value::Null)), Ok(None));
    let only = read(Some(json!([{ "task": "q" }, { "task": "r" }])), None);
    let only = only.unwrap().unwrap();
    assert_eq!((only.name.as_str(), only.steps.len()), ("effects", 1));
    let run = json!({ "name": "ship", "steps": [
        { "name": "pause", "wait": "10m" },
        { "name": "paid", "signal": "paid", "timeout": "1h", "on_failure": "continue" },
        { "name": "send", "task": "q", "on_failure": "compensate",
          "compensation": { "http": "receipts", "method": "DELETE" } },
    ]});
    let both = read(Some(json!([{ "task": "q" }])), Some(run))
        .unwrap()
        .unwrap();
    let names: Vec<&str> = both.steps.iter().map(|step| step.name.as_str()).collect();
    assert_eq!(both.name, "ship");
    assert_eq!(names, ["effects", "pause", "paid", "send"]);
    assert_eq!(both.steps[1].action, Action::Wait { for_ms: 600_000 });
    assert!(both.steps[3].compensation.is_some());
    let configured = read(None, Some(json!({ "workflow": "after-order" })));
    assert_eq!(configured.unwrap().unwrap().name, "after-order");
    for (run, what) in [
        (
            json!({ "workflow": "after-oder" }),
            "run.workflow: there is no such workflow; did you",
        ),
        (
            json!({ "name": "n", "steps": [] }),
            "run.steps: write a list",
        ),
        (json!({ "name": "n" }), "run: write `steps`"),
        (
            json!({ "name": "n", "steps": [{ "wait": "1s" }] }),
            "run.steps[0].name: ",
        ),
        (
            json!({ "name": "n", "steps": [{ "name": "a", "wait": "1s", "wiat": 1 }] }),
            "run.steps[0].wiat: did you mean `wait`?",
        ),
        (
            json!({ "name": "n", "steps": [{ "name": "effects", "wait": "1s" }] }),
            "two steps have the name `effects`",
        ),
    ] {
        let refused = read(Some(json!([{ "task": "q" }])), Some(run.clone())).unwrap_err();
        assert!(refused.starts_with(what), "{run}: {refused}");
    }
    let many = vec![json!({ "task": "q" }); EFFECTS_MAX + 1];
    let refused = read(Some(Value::Array(many)), None).unwrap_err();
    assert!(refused.starts_with("effects: write a list of 1 to 1000"));
}

#[test]
fn what_follows_a_resolution_is_what_all_routes_of_its_pool_say() {
    let one = |name: &str| {
        let steps = Vec::new();
        let name = name.to_owned();
        Some(Arc::new(Workflow { name, steps }))
    };
    let pool = |id: &str| PoolId::new(id).unwrap();
    let follow_ups = [
        (pool("agreed"), vec![one("receipt")]),
        (pool("torn"), vec![one("receipt"), None, one("parcel")]),
    ];
    let catalog = Catalog {
        follow_ups: follow_ups.into(),
        ..catalog()
    };
    assert_eq!(catalog.follow_up_of(&pool("agreed")), Ok(one("receipt")));
    assert_eq!(catalog.follow_up_of(&pool("unknown")), Ok(None));
    let choices = vec!["receipt".to_owned(), "parcel".to_owned()];
    assert_eq!(catalog.follow_up_of(&pool("torn")), Err(choices));
}

fn ms() -> impl Strategy<Value = u64> {
    1_u64..86_400_000
}

fn texts() -> impl Strategy<Value = Text> {
    prop_oneof![
        "/[a-z]{0,9}".prop_map(Text::Plain),
        "/[a-z]{0,4}\\{\\{ key \\}\\}".prop_map(Text::Template),
    ]
}

fn sends() -> impl Strategy<Value = Send> {
    let to = prop_oneof![
        Just(Target::Destination("receipts".into())),
        Just(Target::Pool("orders".into())),
        "[a-z]{1,9}".prop_map(|host| Target::Url(format!("https://{host}.example/hook"))),
    ];
    let headers = proptest::collection::vec(("x-[a-c]", texts()), 0..4);
    let http = (to, "(POST|PUT|DELETE)", texts(), headers);
    prop_oneof![
        http.prop_map(|(to, method, path, headers)| Send::Http(HttpSend {
            to,
            method,
            path: Some(path),
            headers,
            success: Success::Ok,
            answer_bytes_max: ANSWER_BYTES_MAX,
        })),
        ("[a-z]{1,5}\\.[a-z]{1,5}").prop_map(|subject| Send::Publish {
            destination: "events".into(),
            subject: Text::Plain(subject),
        }),
        "[a-z]{1,9}".prop_map(|queue| Send::Task { queue }),
    ]
}

fn effects() -> impl Strategy<Value = Effect> {
    let payload = prop_oneof![
        Just(Payload::Empty),
        Just(Payload::Decision),
        Just(Payload::Request),
        any::<i64>().prop_map(|number| Payload::Json(json!({ "n": [number, null, "ä"] }))),
        "[^{%#}]*".prop_map(|template| Payload::Template {
            template,
            content_type: "text/plain".into(),
        }),
    ];
    let retry =
        (ms(), ms(), ms(), 1_u32..1000).prop_map(|(first, more, horizon_ms, faults_max)| Retry {
            first_ms: first,
            max_ms: first + more,
            horizon_ms,
            faults_max,
        });
    (sends(), payload, retry, ms()).prop_map(|(send, payload, retry, timeout_ms)| Effect {
        send,
        payload,
        retry,
        timeout_ms,
    })
}

fn actions() -> impl Strategy<Value = Action> {
    prop_oneof![
        proptest::collection::vec(effects(), 1..4).prop_map(Action::Effects),
        ms().prop_map(|for_ms| Action::Wait { for_ms }),
        ("[a-z]{1,9}", proptest::option::of(ms()))
            .prop_map(|(signal, timeout_ms)| Action::Signal { signal, timeout_ms }),
    ]
}

fn workflows() -> impl Strategy<Value = Workflow> {
    let failures = prop_oneof![
        Just(OnFailure::Stop),
        Just(OnFailure::Compensate),
        Just(OnFailure::Continue),
    ];
    let step = (actions(), failures, proptest::option::of(effects()));
    ("[a-z]{1,9}", proptest::collection::vec(step, 1..5)).prop_map(|(name, steps)| Workflow {
        name,
        steps: steps
            .into_iter()
            .enumerate()
            .map(|(n, (action, on_failure, compensation))| Step {
                name: format!("step-{n}"),
                action,
                on_failure,
                compensation,
            })
            .collect(),
    })
}

proptest! {
    #[test]
    fn a_workflow_is_read_as_it_was_told(workflow in workflows()) {
        let tenant = TenantScope::stored("acme");
        let read = catalog().read(None, Some(tell_workflow(&workflow)), &tenant);
        let read = read.map(|read| read.as_deref().cloned());
        prop_assert_eq!(read, Ok(Some(workflow)));
    }

    #[test]
    fn no_json_panics(text in "[\\[\\]{}\":,a-z0-9]{0,60}") {
        if let Ok(value) = serde_json::from_str::<Value>(&text) {
            let tenant = TenantScope::stored("acme");
            let _ = catalog().read(Some(value.clone()), Some(value), &tenant);
        }
    }
}
