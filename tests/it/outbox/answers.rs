//! What a destination answers, and how it misbehaves.

use std::time::{Duration, Instant};

use oncegate::config::DestinationKind;
use oncegate::domain::intent::IntentStatus;
use oncegate::domain::workflow::{Success, Target, Text};

use super::fixture::{RETRY_SOON, Rig, config, http, put, put_to};
use crate::support::clock::AT_ONCE;
use crate::support::destination::{Act, Destination};
use crate::support::rows::Kind;
use crate::support::upstream::Upstream;

async fn sent_once(kind: Kind) {
    let there = Destination::start().await;
    there.always(Act::Answer(201, b"{\"id\":7}".to_vec()));
    let mut shop = http("shop", &there.url("/hooks/in?a=b"));
    let DestinationKind::Http { headers, .. } = &mut shop.kind else {
        unreachable!()
    };
    let secret = oncegate::config::SecretText("Bearer s".to_owned());
    headers.push((http::header::AUTHORIZATION, secret));
    let rig = Rig::store(kind).await;
    rig.drain(&[shop], &config());
    let sent = put("shop", "key-1").http(|http| {
        http.path = Some(Text::Plain("out?c=d".to_owned()));
        let forged = [("authorization", "Bearer item"), ("x-name", "caf\u{e9}")];
        let forged = forged.map(|(name, value)| (name.to_owned(), Text::Plain(value.to_owned())));
        http.headers.extend(forged);
    });
    let key = rig.put_one(sent.clone()).await;
    let line = rig.until_status(&key, IntentStatus::Completed).await;
    assert_eq!((line.tries, line.answer_status), (1, Some(201)));
    assert_eq!(line.outcome.as_deref(), Some("delivered"));
    let received = there.received();
    assert_eq!(received.len(), 1);
    let received = &received[0];
    assert_eq!(
        (&*received.method, &*received.target),
        ("POST", "/hooks/out?c=d")
    );
    assert_eq!(
        (received.key(), &received.body),
        ("key-1".to_owned(), &sent.body)
    );
    let header = |name| received.header(name).unwrap_or_default();
    assert_eq!(header("content-type"), "application/json");
    assert_eq!(header("authorization"), "Bearer s", "the configuration's");
    assert_eq!(
        header("user-agent"),
        concat!("oncegate/", env!("CARGO_PKG_VERSION"))
    );
    let name = received.headers.iter().find(|(name, _)| name == "x-name");
    assert_eq!(name.unwrap().1, b"caf\xe9");
    assert_eq!(rig.attempts().await, [("delivered", 1)].into());
    rig.stop().await;
}

#[tokio::test]
async fn an_intent_is_sent_once_with_its_key_and_bytes_sqlite() {
    sent_once(Kind::Sqlite).await;
}

#[tokio::test]
async fn an_intent_is_sent_once_with_its_key_and_bytes_postgres() {
    sent_once(Kind::Postgres).await;
}

#[tokio::test]
async fn tries_that_broke_off_are_made_again_with_the_same_key_and_bytes() {
    let there = Destination::start().await;
    let mut acts = vec![
        Act::Reset,
        Act::Raw(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf"),
        Act::Raw(b"HTTP/1.1 200 OK\r\nX-Nul: a\0b\r\nContent-Length: 0\r\n\r\n"),
        Act::Raw(b"no HTTP\0at all\r\n\r\n"),
        Act::Answer(503, b"\0".to_vec()),
        Act::Answer(200, b"with \0 inside".to_vec()),
    ];
    let count = acts.len();
    there.script(move |_| acts.remove(0));
    let rig = Rig::start(&[http("shop", &there.url("/"))]).await;
    let key = rig.put_one(put("shop", "key-1").retry(RETRY_SOON)).await;
    let line = rig.until_status(&key, IntentStatus::Completed).await;
    let received = there.received();
    assert_eq!((received.len(), line.tries as usize), (count, count));
    for again in &received {
        assert_eq!(
            (again.key(), &again.sha256),
            ("key-1".to_owned(), &received[0].sha256)
        );
    }
    assert_eq!(
        (line.faults, line.deaths),
        (0, 0),
        "none was the item's fault"
    );
    assert_eq!(
        rig.attempts().await,
        [("delivered", 1), ("failed", 5)].into()
    );
    rig.stop().await;
}

#[tokio::test]
async fn a_refused_item_is_given_up_after_its_count_and_not_sooner() {
    let there = Destination::start().await;
    there.always(Act::Answer(422, b"no".to_vec()));
    let rig = Rig::start(&[http("shop", &there.url("/"))]).await;
    let key = rig.put_one(put("shop", "key-1").retry(RETRY_SOON)).await;
    let line = rig.until_status(&key, IntentStatus::Dead).await;
    assert_eq!(
        (line.tries, line.faults, line.answer_status),
        (5, 5, Some(422))
    );
    assert_eq!(there.received().len(), 5);
    rig.stop().await;
}

#[tokio::test]
async fn a_body_that_drips_frees_its_room_at_the_deadline() {
    let there = Destination::start().await;
    there.always(Act::Drip(Duration::from_millis(50)));
    let rig = Rig::start(&[http("shop", &there.url("/"))]).await;
    let begun = Instant::now();
    let key = rig.put_one(put("shop", "key-1").timeout(400)).await;
    let line = rig.tried(&key).await;
    assert_eq!(line.outcome.as_deref(), Some("timeout"));
    assert!(begun.elapsed() >= Duration::from_millis(400));
    assert_eq!((line.status, line.faults), (IntentStatus::Pending, 0));
    crate::support::clock::eventually("the connection is closed", async || {
        (there.open() == 0).then_some(())
    })
    .await;
    rig.stop().await;
}

#[tokio::test]
async fn of_an_answer_of_gigabytes_only_the_status_counts() {
    let there = Destination::start().await;
    there.always(Act::Chunked(2 << 30));
    let rig = Rig::start(&[http("shop", &there.url("/"))]).await;
    let begun = Instant::now();
    let key = rig.put_one(put("shop", "key-1")).await;
    let line = rig.until_status(&key, IntentStatus::Completed).await;
    assert!(begun.elapsed() < AT_ONCE, "it was not read to its end");
    assert_eq!(line.answer_status, Some(200));
    rig.stop().await;
}

#[tokio::test]
async fn retry_after_is_obeyed() {
    let there = Destination::start().await;
    let asked = vec![("Retry-After", "3".to_owned())];
    there.always(Act::Headers(429, asked));
    let rig = Rig::start(&[http("shop", &there.url("/"))]).await;
    let retry = oncegate::domain::workflow::Retry {
        max_ms: 60_000,
        ..RETRY_SOON
    };
    let key = rig.put_one(put("shop", "key-1").retry(retry)).await;
    let line = rig.tried(&key).await;
    assert_eq!(line.outcome.as_deref(), Some("throttled"));
    let begun = there.received()[0].at;
    let received = there.until(2).await;
    assert!(received[1].at - begun >= Duration::from_millis(2_900));
    rig.stop().await;
}

#[tokio::test]
async fn an_intent_is_tried_until_the_end_of_its_horizon_whatever_pauses_are_asked_for() {
    let there = Destination::start().await;
    let rig = Rig::start(&[http("shop", &there.url("/"))]).await;
    for (asked, key) in [("3600", "key-1"), ("0", "key-2")] {
        let retry_after = vec![("Retry-After", asked.to_owned())];
        there.always(Act::Headers(503, retry_after));
        let before = there.received().len();
        // Longer than what is left of the horizon, asked for or not.
        let retry = oncegate::domain::workflow::Retry {
            first_ms: if asked == "0" { 1_500 } else { 1 },
            max_ms: 3_600_000,
            horizon_ms: 2_000,
            ..RETRY_SOON
        };
        let key = rig.put_one(put("shop", key).retry(retry)).await;
        rig.until_status(&key, IntentStatus::Dead).await;
        let received = there.received().split_off(before);
        let last = received[received.len() - 1].at - received[0].at;
        // It counts from the claim, and a busy machine reads the first one later.
        assert!(last >= Duration::from_secs(1), "{last:?}");
        assert!(received.len() <= 4, "{}", received.len());
    }
    rig.stop().await;
}

#[tokio::test]
async fn a_pool_gets_the_request_and_its_answer_is_what_the_caller_wants_to_know() {
    let upstream = Upstream::start().await;
    upstream
        .on_post("//odd/path")
        .answer(404, "{\"nothing\":1}");
    let pool = oncegate::config::PoolConfig {
        id: oncegate::domain::scope::PoolId::new("payments").unwrap(),
        targets: vec![upstream.url().parse().unwrap()],
        connect_timeout: AT_ONCE,
        connections_max: 10,
        queue_timeout: AT_ONCE,
        idle_timeout: AT_ONCE,
        connection_age_max: Duration::from_mins(1),
        http2: false,
        ca: None,
        preserve_host: false,
    };
    let rig = Rig::store(Kind::Sqlite).await.with_pools(&[pool]);
    rig.drain(&[], &config());
    let to = Target::Pool("payments".to_owned());
    let asked = put_to("pool:payments", to, "key-1").http(|http| {
        http.path = Some(Text::Plain("//odd/path?q=1".to_owned()));
        http.success = Success::Answered {
            released: vec![429],
        };
    });
    let key = rig.put_one(asked).await;
    let line = rig.until_status(&key, IntentStatus::Completed).await;
    assert_eq!(line.answer_status, Some(404));
    assert_eq!(upstream.executions("key-1"), 1);
    assert_eq!(upstream.requests()[0].target, "//odd/path?q=1");
    rig.stop().await;
}
