//! A run's history as it happens.

use std::time::Duration;

use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE};
use http::{Method, Request};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use oncegate::api::WAITS_MAX;
use oncegate::coordinator::Coordinator;
use oncegate::domain::run::RunKey;
use oncegate::lifecycle::Bells;
use serde_json::{Value, json};

use super::started::{path, signal};
use super::{Admin, OPERATOR, READER, SERVICE, key_of};
use crate::openapi::Exchange;

/// Far longer than anything here takes.
const DEADLINE: Duration = Duration::from_secs(20);

/// An open stream and what was read of it.
struct Events {
    body: Incoming,
    text: String,
    /// Where the next event begins.
    at: usize,
}

#[derive(Debug, PartialEq)]
struct Told {
    id: Option<i64>,
    kind: String,
    data: Value,
}

impl Admin {
    async fn open(&self, run: &RunKey, query: &str, last: Option<&str>) -> (u16, Events) {
        let target = path(run, &format!("/transitions{query}"));
        let mut request = Request::get(format!("http://{}{target}", self.address))
            .header(ACCEPT, "text/event-stream")
            .header(AUTHORIZATION, format!("Bearer {READER}"));
        if let Some(last) = last {
            request = request.header("last-event-id", last);
        }
        let request = request.body(Full::default()).unwrap();
        let response = self.http.request(request).await.unwrap();
        let (head, body) = response.into_parts();
        if head.status == 200 {
            assert_eq!(head.headers[CONTENT_TYPE], "text/event-stream");
        }
        let events = Events {
            body,
            text: String::new(),
            at: 0,
        };
        (head.status.as_u16(), events)
    }
}

impl Events {
    /// The next event; `None`: the stream ended.
    async fn next(&mut self) -> Option<Told> {
        loop {
            if let Some(length) = self.text[self.at..].find("\n\n") {
                let block = self.text[self.at..self.at + length].to_owned();
                self.at += length + 2;
                match parse(&block) {
                    Some(told) => return Some(told),
                    None => continue,
                }
            }
            let frame = tokio::time::timeout(DEADLINE, self.body.frame()).await;
            let frame = frame.expect("the stream is silent")?;
            let data = frame.unwrap().into_data().unwrap();
            self.text += std::str::from_utf8(&data).unwrap();
        }
    }

    async fn rest(&mut self) -> Vec<Told> {
        let mut told = Vec::new();
        while let Some(event) = self.next().await {
            told.push(event);
        }
        told
    }
}

/// `None`: a comment.
fn parse(block: &str) -> Option<Told> {
    let field = |name: &str| {
        let lines = block.lines().find_map(|line| line.strip_prefix(name));
        lines.map(|value| value.trim_start().to_owned())
    };
    Some(Told {
        id: field("id:").map(|id| id.parse().unwrap()),
        kind: field("event:")?,
        data: serde_json::from_str(&field("data:")?).unwrap(),
    })
}

async fn waiting(admin: &Admin) -> RunKey {
    let steps = vec![signal("one"), signal("two")];
    admin
        .started(key_of("acme", "payments", "k"), "w", steps)
        .await
}

async fn tell(admin: &Admin, run: &RunKey, name: &str) {
    let path = path(run, &format!("/signals/{name}"));
    let reply = admin
        .post(SERVICE, &path, json!({ "payload": "a\nb" }))
        .await;
    assert_eq!(reply.status, 200);
}

#[tokio::test]
async fn a_stream_tells_the_whole_history_as_it_happens_and_ends_with_the_run() {
    let admin = Admin::start().await;
    let run = waiting(&admin).await;
    let (status, mut events) = admin.open(&run, "", None).await;
    assert_eq!(status, 200);
    assert_eq!(events.next().await.unwrap().kind, "started");
    assert_eq!(events.next().await.unwrap().kind, "step_started");
    tell(&admin, &run, "one").await;
    assert_eq!(events.next().await.unwrap().kind, "signal_received");
    tell(&admin, &run, "two").await;
    let mut told = events.rest().await;
    let end = told.pop().unwrap();
    assert_eq!((end.id, &*end.kind), (None, "end"));
    assert_eq!(end.data["status"], "completed");

    // The same as the pages tell, and as promised.
    let (_, mut again) = admin.open(&run, "", None).await;
    let mut told = again.rest().await;
    told.pop();
    let page = admin.get(READER, &path(&run, "/transitions")).await.json();
    let lines = page["transitions"].as_array().unwrap();
    assert_eq!(told.len(), lines.len());
    for (event, line) in told.iter().zip(lines) {
        assert_eq!(event.data, *line);
        assert_eq!(event.id, line["seq"].as_i64());
        assert_eq!(event.kind, line["kind"].as_str().unwrap());
    }
    admin.spec.check(&Exchange {
        method: &Method::GET,
        path: &path(&run, "/transitions"),
        sent: None,
        status: 200,
        content_type: "text/event-stream",
        body: again.text.as_bytes(),
    });
    admin.stop().await;
}

#[tokio::test]
async fn a_stream_resumes_after_the_last_event_without_a_gap_or_a_repeat() {
    let admin = Admin::start().await;
    let run = waiting(&admin).await;
    let (_, mut events) = admin.open(&run, "", None).await;
    let first = events.next().await.unwrap();
    drop(events);
    tell(&admin, &run, "one").await;
    tell(&admin, &run, "two").await;
    let last = first.id.unwrap().to_string();
    // The header outweighs the query, which a client repeats unchanged.
    for query in ["", "?after=99"] {
        let (_, mut events) = admin.open(&run, query, Some(&last)).await;
        let mut told = events.rest().await;
        assert_eq!(told.pop().unwrap().kind, "end");
        let ids: Vec<i64> = told.iter().map(|event| event.id.unwrap()).collect();
        assert_eq!(ids[0], 2);
        assert!(ids.windows(2).all(|pair| pair[1] == pair[0] + 1), "{ids:?}");
        let whole = admin.shown(&run).await["last_transition_seq"].as_i64();
        assert_eq!(ids.last().copied(), whole);
    }
    for wrong in ["x", "-1", "+1", ""] {
        let (status, _) = admin.open(&run, "", Some(wrong)).await;
        assert_eq!(status, 400, "{wrong:?}");
    }
    admin.stop().await;
}

#[tokio::test]
async fn what_another_gateway_commits_is_told_too() {
    let admin = Admin::start().await;
    let run = waiting(&admin).await;
    let (_, mut events) = admin.open(&run, "?after=2", None).await;
    // It shares the store and nothing else: no hint comes from it.
    let other = Coordinator::new(admin.store.clone(), admin.group.clone(), Bells::default());
    let input = oncegate::domain::run::Input {
        stamp: oncegate::ids::stamp(),
        by: "other".into(),
        event: oncegate::domain::run::Event::Cancel { reason: "r".into() },
    };
    other.apply(&run, input).await.unwrap();
    assert_eq!(events.next().await.unwrap().kind, "cancel_requested");
    admin.stop().await;
}

#[tokio::test]
async fn a_stream_ends_without_a_last_word_when_the_gateway_stops() {
    let admin = Admin::start().await;
    let run = waiting(&admin).await;
    let (_, mut events) = admin.open(&run, "?after=2", None).await;
    admin.closing.cancel();
    assert_eq!(events.rest().await, []);
    admin.stop().await;
}

#[tokio::test]
async fn a_client_that_goes_away_leaves_its_place() {
    let admin = Admin::start().await;
    let run = waiting(&admin).await;
    let (_, events) = admin.open(&run, "", None).await;
    assert_eq!(admin.waits.available_permits(), WAITS_MAX - 1);
    drop(events);
    let free = admin.waits.acquire_many(u32::try_from(WAITS_MAX).unwrap());
    drop(tokio::time::timeout(DEADLINE, free).await.unwrap().unwrap());
    admin.stop().await;
}

#[tokio::test]
async fn more_streams_than_there_is_room_for_are_refused_and_pages_are_not() {
    let admin = Admin::start().await;
    let run = waiting(&admin).await;
    let all = admin.waits.acquire_many(u32::try_from(WAITS_MAX).unwrap());
    let all = all.await.unwrap();
    let (status, events) = admin.open(&run, "", None).await;
    assert_eq!(status, 503);
    drop(events);
    let page = admin.get(OPERATOR, &path(&run, "/transitions")).await;
    assert_eq!(page.status, 200);
    drop(all);
    assert_eq!(admin.open(&run, "?after=2", None).await.0, 200);
    admin.stop().await;
}
