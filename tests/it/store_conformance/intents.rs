//! Intents for the cases about them, sown by SQL, and the words that those cases are written in.

use std::fmt::Write as _;
use std::time::Duration;

use oncegate::domain::intent::{
    ClaimWish, ClaimedIntent, End, Finish, Finished, How, IntentClaimed, IntentKey, IntentStatus,
    Note, Sending, Stamp,
};
use oncegate::domain::run::RunId;
use oncegate::domain::scope::TenantScope;
use oncegate::domain::workflow::{HttpSend, Retry, Success, Target, Text};
use oncegate::ids;
use oncegate::store::outbox::IntentLine;
use uuid::Uuid;

use super::fixture::{Fixture, LONG, answer};
use crate::support::rows::Kind;

/// Every table that anything about records, runs and intents may touch.
const ALL: [&str; 10] = [
    "eec_routing_idempotency",
    "eec_routing_decision",
    "eec_routing_claim",
    "eec_operator_audit",
    "eec_run",
    "eec_run_transition",
    "eec_run_attempt",
    "eec_effect_intent",
    "eec_effect_body",
    "eec_destination_pause",
];

/// An intent to sow: due for a second, unclaimed.
#[derive(Clone)]
pub struct Sown {
    pub tenant: &'static str,
    pub run_id: RunId,
    pub seq: i64,
    pub destination: &'static str,
    /// When it is due, in milliseconds from now.
    pub due_ms: Option<i64>,
    /// More columns, with what they hold in words of SQL that are the same on every store.
    pub more: &'static [(&'static str, &'static str)],
}

/// The intent of a run of its own.
pub fn intent() -> Sown {
    Sown {
        tenant: "acme",
        run_id: ids::decision_id().into(),
        seq: 1,
        destination: "mail",
        due_ms: Some(-1000),
        more: &[],
    }
}

impl Sown {
    pub fn of(tenant: &'static str) -> Self {
        Self { tenant, ..intent() }
    }

    pub fn to(self, destination: &'static str) -> Self {
        Self {
            destination,
            ..self
        }
    }

    pub fn due(self, due_ms: Option<i64>) -> Self {
        Self { due_ms, ..self }
    }

    pub fn with(self, more: &'static [(&'static str, &'static str)]) -> Self {
        Self { more, ..self }
    }

    pub fn key(&self) -> IntentKey {
        IntentKey {
            tenant: TenantScope::stored(self.tenant),
            id: self.run_id.intent(self.seq),
        }
    }
}

/// How every sown intent is sent.
pub fn sending() -> Sending {
    Sending {
        how: How::Http(HttpSend {
            to: Target::Destination("mail".into()),
            method: "POST".into(),
            path: Some(Text::Plain("/receipts".into())),
            headers: vec![("x-order".into(), Text::Plain("1".into()))],
            success: Success::Ok,
            answer_bytes_max: 1000,
        }),
        retry: Retry::DEFAULT,
        timeout_ms: 10_000,
    }
}

/// A new wish for a claim that lasts.
pub fn wish(key: &IntentKey) -> ClaimWish {
    ClaimWish {
        key: key.clone(),
        stamp: ids::stamp(),
        lease: LONG,
        worker: "worker-1".into(),
    }
}

/// The same, for one whose lease is over at once.
pub fn doomed(key: &IntentKey) -> ClaimWish {
    ClaimWish {
        lease: Duration::ZERO,
        ..wish(key)
    }
}

/// The end of that claim's try.
pub fn told(wish: &ClaimWish, end: End) -> Finish {
    Finish {
        key: wish.key.clone(),
        stamp: wish.stamp,
        note: Note {
            outcome: "answered".into(),
            answer_status: Some(503),
            diagnostic: Some("as it was".into()),
        },
        end,
    }
}

/// Delivered, as drainers tell it.
pub fn delivered() -> End {
    End::Delivered {
        fenced: false,
        answer: Some(answer(b"thanks\0\xff")),
    }
}

/// Delivered, as step workers tell it.
pub fn fenced() -> End {
    End::Delivered {
        fenced: true,
        answer: None,
    }
}

/// To be tried again at once.
pub fn again() -> End {
    End::Again {
        after: Duration::ZERO,
        item_fault: false,
    }
}

/// Given up.
pub fn dead() -> End {
    End::Dead { item_fault: true }
}

/// Given back, due at once.
pub fn given_back() -> End {
    End::GivenBack {
        after: Duration::ZERO,
    }
}

impl Fixture {
    /// An id in the words of this store's SQL.
    pub fn id(&self, id: Uuid) -> String {
        match self.raw.kind() {
            Kind::Postgres => format!("'{id}'"),
            Kind::Sqlite => format!("x'{}'", id.simple()),
        }
    }

    /// An instant, in milliseconds from now.
    pub fn instant(&self, ms: i64) -> String {
        match self.raw.kind() {
            Kind::Postgres => format!("now() + {ms} * interval '1 ms'"),
            Kind::Sqlite => format!("cast(unixepoch('subsec') * 1000 as integer) + ({ms})"),
        }
    }

    fn bytes(&self, bytes: &[u8]) -> String {
        let mut hex = String::new();
        for byte in bytes {
            write!(hex, "{byte:02x}").unwrap();
        }
        match self.raw.kind() {
            Kind::Postgres => format!("decode('{hex}', 'hex')"),
            Kind::Sqlite => format!("x'{hex}'"),
        }
    }

    /// Sows an intent with the message `hello\0`.
    pub async fn sow(&self, intent: &Sown) -> IntentKey {
        let body = self.bytes(b"hello\0");
        self.sow_with(intent, &body).await
    }

    /// Sows an intent with the message that `body` gives.
    pub async fn sow_with(&self, intent: &Sown, body: &str) -> IntentKey {
        let key = intent.key();
        let (id, run_id) = (self.id(key.id.0), self.id(intent.run_id.0));
        let due = intent.due_ms.map(|ms| self.instant(ms));
        let due = due.unwrap_or_else(|| "null".into());
        let sending = self.bytes(&serde_json::to_vec(&sending()).unwrap());
        let (mut columns, mut values) = (String::new(), String::new());
        for (column, value) in intent.more {
            write!(columns, ", {column}").unwrap();
            write!(values, ", {value}").unwrap();
        }
        let Sown {
            tenant,
            seq,
            destination,
            ..
        } = intent;
        self.raw
            .run(format!(
                "insert into eec_effect_intent (tenant_scope, intent_id, run_id, seq, step, \
                 destination, idempotency_key, sending, horizon_ms, due_at, first_due_at{columns}) \
                 values ('{tenant}', {id}, {run_id}, {seq}, 'receipt', '{destination}', \
                 'key-{seq}', {sending}, 1000, {due}, {due}{values})"
            ))
            .await;
        self.raw
            .run(format!(
                "insert into eec_effect_body (tenant_scope, intent_id, part, body) \
                 values ('{tenant}', {id}, 'message', {body})"
            ))
            .await;
        key
    }

    /// Sows the run of an intent.
    pub async fn sow_run(&self, intent: &Sown, status: &str) {
        let run_id = self.id(intent.run_id.0);
        let empty = self.bytes(b"{}");
        self.raw
            .run(format!(
                "insert into eec_run (tenant_scope, run_id, status, workflow, pool_id, \
                 idempotency_key, definition, input, progress) values ('{}', {run_id}, \
                 '{status}', 'order', 'payments', 'order-1', {empty}, {empty}, {empty})",
                intent.tenant
            ))
            .await;
    }

    /// Sends one wish.
    pub async fn claim_intent(&self, wish: &ClaimWish) -> IntentClaimed {
        let claimed = self.store.claim(std::slice::from_ref(wish)).await;
        claimed.unwrap().pop().unwrap()
    }

    /// Sends one wish, which must win.
    pub async fn win_intent(&self, wish: &ClaimWish) -> ClaimedIntent {
        match self.claim_intent(wish).await {
            IntentClaimed::Won(claimed) => *claimed,
            other => panic!("the claim did not win: {other:?}"),
        }
    }

    /// Wins a claim that lasts.
    pub async fn claimed(&self, key: &IntentKey) -> ClaimWish {
        let wish = wish(key);
        self.win_intent(&wish).await;
        wish
    }

    /// Wins a claim whose lease is over.
    pub async fn lost(&self, key: &IntentKey) -> ClaimWish {
        let wish = doomed(key);
        self.win_intent(&wish).await;
        wish
    }

    /// Tells one end.
    pub async fn end(&self, wish: &ClaimWish, end: End) -> Finished {
        let finished = self.store.finish(&[told(wish, end)]).await;
        finished.unwrap().pop().unwrap()
    }

    /// The intent, which must be there.
    pub async fn line(&self, key: &IntentKey) -> IntentLine {
        let line = self.store.find_intent(key.id).await.unwrap();
        line.expect("no intent")
    }

    pub async fn status(&self, key: &IntentKey) -> IntentStatus {
        self.line(key).await.status
    }

    /// Whether its run is to be told.
    pub async fn is_changed(&self, key: &IntentKey) -> bool {
        let id = self.id(key.id.0);
        let changed =
            format!("select count(*) from eec_effect_intent where intent_id = {id} and changed");
        self.raw.number(changed).await == 1
    }

    /// Rows of a table for which this holds.
    pub async fn count_where(&self, table: &str, condition: &str) -> i64 {
        let sql = format!("select count(*) from {table} where {condition}");
        self.raw.number(sql).await
    }

    /// Whether the attempt with this stamp stands so.
    pub async fn attempt_is(&self, stamp: Stamp, status: &str) -> bool {
        let stamp = self.id(stamp.0);
        let ended = if status == "open" {
            "ended_at is null"
        } else {
            "ended_at is not null"
        };
        let such = format!("stamp = {stamp} and status = '{status}' and {ended}");
        self.count_where("eec_run_attempt", &such).await == 1
    }

    /// Every row of every table.
    pub async fn all_rows(&self) -> Vec<Vec<String>> {
        let mut rows = Vec::new();
        for table in ALL {
            rows.push(self.raw.rows(table).await);
        }
        rows
    }
}
