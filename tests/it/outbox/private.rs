//! Addresses of private networks are not dialled, in whatever form they come.

use oncegate::config::{DestinationConfig, DestinationKind};
use oncegate::domain::intent::IntentStatus;

use super::fixture::{Rig, http, put, put_url};
use crate::support::destination::{Act, Destination};

#[tokio::test]
async fn urls_that_lead_to_loopback_in_any_form_are_never_dialled() {
    let there = Destination::start().await;
    let port = there.address().port();
    let rig = Rig::start(&[]).await;
    let hosts = [
        "127.0.0.1",
        "localhost",
        "2130706433",
        "0x7f000001",
        "0177.0.0.1",
        "127.1",
        "0.0.0.0",
        "[::1]",
        "[::]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[64:ff9b::7f00:1]",
        "[2002:7f00:1::]",
        "169.254.169.254",
        "10.0.0.1",
    ];
    for host in hosts {
        let url = format!("http://{host}:{port}/");
        let key = rig.put_one(put_url(&url, "key-1").timeout(3_000)).await;
        let line = rig.tried(&key).await;
        assert_eq!(line.outcome.as_deref(), Some("private_address"), "{host}");
        assert_eq!(
            (line.status, line.faults),
            (IntentStatus::Pending, 1),
            "{host}"
        );
    }
    assert_eq!(there.received().len(), 0);
    rig.stop().await;
}

#[tokio::test]
async fn a_configured_destination_is_refused_too_unless_it_is_allowed_and_its_intents_wait() {
    let there = Destination::start().await;
    let strict = |id: &str, host: &str| -> DestinationConfig {
        let mut strict = http(id, &format!("http://{host}:{}/", there.address().port()));
        let DestinationKind::Http { allow_private, .. } = &mut strict.kind else {
            unreachable!()
        };
        *allow_private = false;
        strict
    };
    let rig = Rig::start(&[strict("literal", "127.0.0.1"), strict("name", "localhost")]).await;
    for id in ["literal", "name"] {
        let key = rig.put_one(put(id, "key-1")).await;
        let line = rig.tried(&key).await;
        assert_eq!(line.outcome.as_deref(), Some("private_address"), "{id}");
        assert_eq!(line.faults, 0, "not the item's fault");
    }
    assert_eq!(there.received().len(), 0);
    rig.stop().await;
}

#[tokio::test]
async fn redirects_are_not_followed() {
    let (there, secret) = (Destination::start().await, Destination::start().await);
    for status in [301, 302, 307, 308] {
        there.always(Act::Headers(status, vec![("Location", secret.url("/"))]));
        let rig = Rig::start(&[http("shop", &there.url("/"))]).await;
        let key = rig.put_one(put("shop", "key-1")).await;
        let line = rig.tried(&key).await;
        assert_eq!(line.outcome.as_deref(), Some("redirect"));
        assert_eq!((line.answer_status, line.faults), (Some(status), 1));
        rig.stop().await;
    }
    assert_eq!(secret.received().len(), 0);
}

#[tokio::test]
async fn a_path_can_not_lead_to_another_host() {
    let (there, secret) = (Destination::start().await, Destination::start().await);
    let rig = Rig::start(&[http("shop", &there.url("/in"))]).await;
    let elsewhere = secret.address();
    for path in [
        format!("//{elsewhere}/"),
        format!("http://{elsewhere}/"),
        format!("/\\{elsewhere}/"),
        format!("\t//{elsewhere}/"),
    ] {
        let put = put("shop", "key-1").http(|http| {
            http.path = Some(oncegate::domain::workflow::Text::Plain(path.clone()));
        });
        let key = rig.put_one(put).await;
        let line = rig.tried(&key).await;
        assert_eq!(line.outcome.as_deref(), Some("unsendable"), "{path:?}");
    }
    assert_eq!((secret.received().len(), there.received().len()), (0, 0));
    rig.stop().await;
}
