//! How intents leave: by what their `sending` says.

use std::collections::HashMap;

use super::OutboxError;
use super::http::{AnyUrl, HttpDestination};
use super::nats::NatsDestination;
use super::pool;
use super::verdict::Tried;
use crate::body::BoxError;
use crate::config::{DestinationConfig, DestinationKind};
use crate::domain::intent::{ClaimedIntent, Destination, How};
use crate::domain::workflow::{HttpSend, Target};
use crate::upstream::tls::Roots;
use crate::upstream::{SendProgress, Upstreams};

/// Every way out.
pub struct Transports {
    configured: HashMap<Destination, Transport>,
    upstreams: Upstreams,
    any_url: AnyUrl,
}

enum Transport {
    Http(Box<HttpDestination>),
    Nats(Box<NatsDestination>),
}

impl Transports {
    /// Connects to nothing yet.
    ///
    /// # Errors
    /// When a destination can't be used as configured.
    pub fn new(
        destinations: &[DestinationConfig],
        upstreams: Upstreams,
    ) -> Result<Self, OutboxError> {
        let mut roots = Roots::default();
        let mut configured = HashMap::new();
        for destination in destinations {
            let id = destination.id.clone();
            let transport = transport(&destination.kind, &mut roots);
            let transport = transport.map_err(|source| OutboxError::Destination {
                destination: id.clone(),
                source,
            })?;
            configured.insert(id, transport);
        }
        Ok(Self {
            configured,
            upstreams,
            any_url: AnyUrl::new(&mut roots).map_err(OutboxError::Urls)?,
        })
    }

    /// Makes one try. The time limit is the caller's: it drops the future.
    pub async fn send(&self, intent: &ClaimedIntent, progress: &SendProgress) -> Tried {
        match &intent.sending.how {
            How::Http(http) => self.http(intent, http, progress).await,
            How::Publish {
                subject,
                content_type,
            } => match self.configured.get(&intent.destination) {
                Some(Transport::Nats(nats)) => {
                    let content_type = content_type.as_deref();
                    nats.send(intent, subject, content_type, progress).await
                }
                _ => Tried::unsendable("its destination is not a NATS server"),
            },
            How::Task { .. } => Tried::unsendable("tasks are pulled by step workers"),
        }
    }

    async fn http(
        &self,
        intent: &ClaimedIntent,
        http: &HttpSend,
        progress: &SendProgress,
    ) -> Tried {
        match &http.to {
            Target::Destination(_) => match self.configured.get(&intent.destination) {
                Some(Transport::Http(destination)) => {
                    destination.send(intent, http, progress).await
                }
                _ => Tried::unsendable("its destination is not an HTTP server"),
            },
            Target::Pool(id) => pool::send(&self.upstreams, intent, http, id, progress).await,
            Target::Url(url) => self.any_url.send(intent, http, url, progress).await,
        }
    }
}

fn transport(kind: &DestinationKind, roots: &mut Roots) -> Result<Transport, BoxError> {
    match kind {
        DestinationKind::Http {
            url,
            secrets,
            headers,
            allow_private,
            ca,
        } => {
            let secrets: Vec<_> = secrets.iter().map(|secret| &*secret.0).collect();
            let headers = headers
                .iter()
                .map(|(name, value)| (name.clone(), &*value.0));
            let headers: Vec<_> = headers.collect();
            let ca = ca.as_deref();
            let http = HttpDestination::new(url, &secrets, &headers, *allow_private, ca, roots)?;
            Ok(Transport::Http(Box::new(http)))
        }
        DestinationKind::Nats {
            servers,
            token,
            credentials,
        } => {
            let (token, credentials) = (token.clone(), credentials.clone());
            let nats = NatsDestination::new(servers, token, credentials, roots)?;
            Ok(Transport::Nats(Box::new(nats)))
        }
    }
}
