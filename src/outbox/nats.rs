//! NATS destinations: messages to a `JetStream` stream, acknowledged by it.
//!
//! One connection for each destination, made when it is first needed and made again by itself.
//! The key is the message's id, so within the stream's window a second try is no second message.

use std::error::Error as _;
use std::path::PathBuf;
use std::time::Duration;

use async_nats::header::{HeaderMap, HeaderValue, NATS_MESSAGE_ID};
use async_nats::jetstream::context::{PublishError, PublishErrorKind};
use async_nats::jetstream::message::PublishMessage;
use async_nats::jetstream::{self, context::ContextBuilder};
use async_nats::{ConnectOptions, Event, ServerAddr};
use tokio::sync::{OnceCell, watch};

use super::breaker::Word;
use super::http::request::AGENT;
use super::verdict::Tried;
use crate::body::BoxError;
use crate::config::SecretText;
use crate::domain::intent::{ClaimedIntent, Fault};
use crate::telemetry::Chain;
use crate::upstream::SendProgress;
use crate::upstream::tls::{self, Roots};

/// How long one attempt to connect may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a try waits for a connection.
const CONNECTION_WAIT: Duration = Duration::from_secs(10);
/// The longest pause between attempts to connect.
const RECONNECT_MAX: Duration = Duration::from_secs(5);
/// Messages that may be on their way to the connection.
const QUEUE_MAX: usize = 256;
/// Longer than any try: the caller's limit is the one that counts.
const ACK_TIMEOUT: Duration = Duration::from_hours(24);

/// NATS servers of one destination.
pub struct NatsDestination {
    servers: Vec<ServerAddr>,
    token: Option<SecretText>,
    credentials: Option<PathBuf>,
    tls: rustls::ClientConfig,
    link: OnceCell<Link>,
}

struct Link {
    context: jetstream::Context,
    connected: watch::Receiver<bool>,
}

impl NatsDestination {
    /// Connects to nothing yet.
    ///
    /// # Errors
    /// When a server's address is none.
    pub fn new(
        servers: &[String],
        token: Option<SecretText>,
        credentials: Option<PathBuf>,
        roots: &mut Roots,
    ) -> Result<Self, BoxError> {
        let servers: Result<_, _> = servers.iter().map(|server| server.parse()).collect();
        Ok(Self {
            servers: servers?,
            token,
            credentials,
            tls: tls::client_config(roots.with(None)?, &[]),
            link: OnceCell::new(),
        })
    }

    /// Makes one try: publishes and waits for the stream's word.
    pub async fn send(
        &self,
        intent: &ClaimedIntent,
        subject: &str,
        content_type: Option<&str>,
        progress: &SendProgress,
    ) -> Tried {
        let Some(message) = message(intent, subject, content_type) else {
            return Tried::unsendable("its subject, key or content type can't be sent");
        };
        let unreachable = |why: &str| Tried::failed(Fault::Destination, "unreachable", why);
        let link = match self.link.get_or_try_init(|| self.connect()).await {
            Ok(link) => link,
            Err(error) => return unreachable(&error.to_string()),
        };
        let mut connected = link.connected.clone();
        let waiting = connected.wait_for(|connected| *connected);
        if !matches!(
            tokio::time::timeout(CONNECTION_WAIT, waiting).await,
            Ok(Ok(_))
        ) {
            return unreachable("there is no connection to its servers");
        }
        if !progress.claim() {
            return Tried::unsent("lost", Duration::ZERO);
        }
        let published = async {
            let ack = link
                .context
                .send_publish(subject.to_owned(), message)
                .await?;
            ack.await
        };
        match published.await {
            // Also when it is a duplicate: the message is there.
            Ok(_) => Tried::delivered(None),
            Err(error) => refused(&error),
        }
    }

    /// Returns at once: the connection is made in the background.
    async fn connect(&self) -> Result<Link, BoxError> {
        let (tell, connected) = watch::channel(false);
        let mut options = ConnectOptions::new();
        if let Some(path) = &self.credentials {
            options = options
                .credentials_file(path)
                .await
                .map_err(|error| format!("its credentials file can't be used: {error}"))?;
        }
        if let Some(token) = &self.token {
            options = options.token(token.0.clone());
        }
        let client = options
            .name(AGENT)
            .tls_client_config(self.tls.clone())
            .connection_timeout(CONNECT_TIMEOUT)
            .client_capacity(QUEUE_MAX)
            .retry_on_initial_connect()
            .max_reconnects(None)
            .reconnect_delay_callback(pause)
            .event_callback(move |event| {
                match event {
                    Event::Connected => drop(tell.send_replace(true)),
                    Event::Disconnected | Event::Closed => drop(tell.send_replace(false)),
                    _ => {}
                }
                std::future::ready(())
            })
            .connect(&self.servers[..])
            .await?;
        let context = ContextBuilder::new().timeout(ACK_TIMEOUT).build(client);
        Ok(Link { context, connected })
    }
}

fn pause(attempts: usize) -> Duration {
    let doublings = u32::try_from(attempts.min(10)).unwrap_or(10);
    Duration::from_millis(50 << doublings).min(RECONNECT_MAX)
}

/// `None`: something of it is no part of a NATS message.
fn message(
    intent: &ClaimedIntent,
    subject: &str,
    content_type: Option<&str>,
) -> Option<PublishMessage> {
    if !is_subject(subject) {
        return None;
    }
    let mut headers = HeaderMap::new();
    let key: HeaderValue = intent.idempotency_key.parse().ok()?;
    headers.insert(NATS_MESSAGE_ID, key);
    if let Some(content_type) = content_type {
        let value: HeaderValue = content_type.parse().ok()?;
        headers.insert("Content-Type", value);
    }
    let message = PublishMessage::build().payload(intent.body.clone());
    Some(message.headers(headers))
}

/// Whether a message can be published there: tokens between dots, none of them a wildcard.
fn is_subject(subject: &str) -> bool {
    subject.split('.').all(|token| {
        let plain = token.chars().all(|c| !c.is_whitespace() && !c.is_control());
        plain && !matches!(token, "" | "*" | ">")
    })
}

fn refused(error: &PublishError) -> Tried {
    let destination = |outcome, why: &str| Tried::failed(Fault::Destination, outcome, why);
    match error.kind() {
        // One item's subject says nothing about the bus that all others share.
        PublishErrorKind::StreamNotFound => destination(
            "no_stream",
            "no JetStream stream takes this subject; create one, or correct the subject",
        )
        .saying(Word::Nothing),
        PublishErrorKind::MaxPayloadExceeded => {
            Tried::unsendable("it is longer than the server's max_payload")
        }
        PublishErrorKind::BrokenPipe => destination(
            "broken",
            "the connection ended before the stream's word came",
        ),
        PublishErrorKind::TimedOut => destination("timeout", "the stream said nothing"),
        _ if is_refusal(error) => Tried::unsendable(&Chain(error).to_string()),
        _ => destination("server_error", &Chain(error).to_string()),
    }
}

/// Whether the stream said that this message can't be taken as it is.
fn is_refusal(error: &PublishError) -> bool {
    let cause = error
        .source()
        .and_then(|cause| cause.downcast_ref::<jetstream::Error>());
    cause.is_some_and(|cause| (400..500).contains(&cause.code()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subject_is_plain_tokens() {
        for subject in ["orders", "orders.created", "orders.eu-1.é"] {
            assert!(is_subject(subject), "{subject}");
        }
        for subject in ["", ".", "a.", "a..b", "a.*", ">", "a b", "a\r\nPUB b"] {
            assert!(!is_subject(subject), "{subject:?}");
        }
    }

    #[test]
    fn pauses_between_attempts_to_connect_are_bounded() {
        assert_eq!(pause(0), Duration::from_millis(50));
        assert_eq!(pause(usize::MAX), RECONNECT_MAX);
    }
}
