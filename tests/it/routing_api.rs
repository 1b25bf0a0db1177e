//! Reserve and complete: what services that play the upstream may rely on. The real binary, real
//! sockets, both stores; every exchange is held against `openapi.yaml`.

use std::time::Duration;

use http::Method;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::openapi::{Exchange, Spec};
use crate::support::client::{Answer, Call};
use crate::support::gateway::{Bench, Setup, TestGateway};
use crate::support::rows::{Database, Kind};

/// Makes two tests of each promise, one for each store.
macro_rules! each_store {
    ($($promise:ident),+ $(,)?) => {$(
        mod $promise {
            use crate::routing_api::{Bench, Kind};

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn sqlite() {
                Box::pin(super::$promise(Bench::new(Kind::Sqlite).await)).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn postgres() {
                Box::pin(super::$promise(Bench::new(Kind::Postgres).await)).await;
            }
        }
    )+};
}

mod access;
mod claims;
mod ends;
mod follow_ups;
mod repeats;

/// May do everything here, for every tenant.
const SERVICE: &str = "service-token";
/// The same, bound to the tenant `acme`.
const ACME: &str = "acme-token";
/// Looks at records and acts on them.
const OPERATOR: &str = "operator-token";
/// Looks at records.
const READER: &str = "reader-token";
/// Pulls tasks.
const WORKER: &str = "worker-token";

/// Every table that a call can write to.
const TABLES: [&str; 8] = [
    "eec_routing_idempotency",
    "eec_routing_decision",
    "eec_routing_claim",
    "eec_run",
    "eec_run_transition",
    "eec_effect_intent",
    "eec_effect_body",
    "eec_run_attempt",
];

/// What came back.
struct Reply {
    status: u16,
    json: Value,
    answer: Answer,
}

impl Reply {
    /// The value of a member, as text.
    #[track_caller]
    fn text(&self, member: &str) -> String {
        let value = self.json[member].as_str();
        value
            .unwrap_or_else(|| panic!("no {member}: {}", self.json))
            .to_owned()
    }

    /// Asserts that the caller owns the key; gives its token.
    #[track_caller]
    fn token(&self) -> String {
        assert_eq!(
            (self.status, &self.json["outcome"]),
            (200, &json!("reserved")),
            "{}",
            self.json
        );
        self.text("attempt_token")
    }

    /// Asserts that there is a decision; gives its id.
    #[track_caller]
    fn replayed(&self) -> String {
        assert_eq!(
            (self.status, &self.json["outcome"]),
            (200, &json!("replayed")),
            "{}",
            self.json
        );
        self.json["decision"]["id"].as_str().unwrap().to_owned()
    }

    /// Asserts that it is this problem.
    #[track_caller]
    fn is_problem(&self, status: u16, slug: &str) {
        let seen = (self.status, self.answer.problem());
        assert_eq!(seen, (status, slug.to_owned()), "{}", self.json);
    }
}

/// A gateway with tokens, as those who hold them see it.
struct Api {
    gateway: TestGateway,
    spec: Spec,
}

impl Api {
    async fn start(bench: &Bench) -> Self {
        Self::with(setup(bench)).await
    }

    async fn with(setup: Setup) -> Self {
        Self {
            gateway: setup.start().await,
            spec: Spec::load(),
        }
    }

    /// A call of the service.
    async fn post(&self, call: &str, body: Value) -> Reply {
        self.call(SERVICE, call, body).await
    }

    async fn call(&self, token: &str, call: &str, body: Value) -> Reply {
        let path = format!("/v1/routing/{call}");
        let sent = self.request(token, &path, &body).send().await;
        self.checked(Method::POST, &path, Some(&body), sent)
    }

    fn request(&self, token: &str, path: &str, body: &Value) -> Call {
        self.gateway
            .admin_call("POST", path)
            .header("authorization", format!("Bearer {token}"))
            .json(body.to_string())
    }

    async fn get(&self, token: &str, path: &str) -> Reply {
        let call = self.gateway.admin_call("GET", path);
        let answer = call
            .header("authorization", format!("Bearer {token}"))
            .send()
            .await;
        self.checked(Method::GET, path, None, answer)
    }

    #[expect(clippy::needless_pass_by_value, reason = "shorter for its callers")]
    fn checked(&self, method: Method, path: &str, sent: Option<&Value>, answer: Answer) -> Reply {
        let content_type = answer.header("content-type").unwrap_or_default();
        self.spec.check(&Exchange {
            method: &method,
            path,
            sent,
            status: answer.status,
            content_type: &content_type,
            body: &answer.body,
        });
        Reply {
            status: answer.status,
            json: serde_json::from_slice(&answer.body).unwrap(),
            answer,
        }
    }

    /// Reserves with a request id of its own.
    async fn reserve(&self, key: &str) -> Reply {
        self.post("reserve", reserve(key)).await
    }

    /// Completes with a 201.
    async fn complete(&self, key: &str, token: &str) -> Reply {
        self.post("complete", complete(key, token)).await
    }
}

/// Short times, and a token for each role.
fn setup(bench: &Bench) -> Setup {
    let token = |name: &str, role: &str, more: &str| {
        let hash = Sha256::digest(name);
        let hash = hash
            .iter()
            .fold(String::new(), |hex, byte| hex + &format!("{byte:02x}"));
        format!("name = \"{name}\"\nrole = \"{role}\"\nsha256 = \"{hash}\"\n{more}")
    };
    bench
        .gateway()
        .token(&token(SERVICE, "service", ""))
        .token(&token(ACME, "service", "tenant = \"acme\""))
        .token(&token(OPERATOR, "operator", ""))
        .token(&token(READER, "reader", ""))
        .token(&token(WORKER, "worker", ""))
}

fn fresh_id() -> String {
    oncegate::ids::generated_key().to_string()
}

/// A reserve of a key of `acme`, whose lease outlasts the test.
fn reserve(key: &str) -> Value {
    json!({
        "tenant": "acme",
        "pool": "main",
        "key": key,
        "request_id": fresh_id(),
        "lease": "1m",
    })
}

/// The same with other members.
fn reserve_with(key: &str, more: Value) -> Value {
    with(reserve(key), more)
}

fn with(mut body: Value, more: Value) -> Value {
    let Value::Object(more) = more else {
        panic!("no members: {more}")
    };
    body.as_object_mut().unwrap().extend(more);
    body
}

fn of_claim(key: &str, token: &str) -> Value {
    json!({ "tenant": "acme", "pool": "main", "key": key, "attempt_token": token })
}

fn complete(key: &str, token: &str) -> Value {
    let decision = json!({
        "status": 201,
        "headers": [["content-type", "text/plain"], ["x-a", "1"], ["x-a", "2"]],
        "body": "done",
    });
    with(of_claim(key, token), json!({ "decision": decision }))
}

fn release(key: &str, token: &str, outcome: &str) -> Value {
    with(of_claim(key, token), json!({ "outcome": outcome }))
}

/// Rows of every table, to be compared.
async fn rows(database: &Database) -> Vec<(&'static str, i64)> {
    let mut counts = Vec::new();
    for table in TABLES {
        counts.push((table, database.count(table).await));
    }
    counts
}

/// Shorter than any wait of these tests.
const SHORT_LEASE: &str = "500ms";
/// What the sweep needs for it, and more.
const SHORT: Duration = Duration::from_millis(600);
