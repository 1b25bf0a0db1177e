//! A run's history as it happens, as server-sent events.
//!
//! An event's id is the number of its transition, so a client that was cut off resumes with
//! `Last-Event-ID` and misses none: every line comes from the store, the coordinator's hints only
//! tell when to look. A stream ends after the run is final, at the shutdown, and after
//! [`TIME_MAX`] at the latest, because no connection of the admin listener lives for ever.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::http::HeaderMap;
use axum::response::IntoResponse;
use axum::response::sse::{Event, KeepAlive, Sse};
use serde_json::json;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{OwnedSemaphorePermit, broadcast};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::wire::TransitionOut;
use crate::api::AdminState;
use crate::domain::run::RunKey;
use crate::problem::{Kind, Problem};
use crate::store::runs::Transition;
use crate::store::{Store, StoreError};
use crate::telemetry::Chain;

/// How long a stream may last; its client resumes it.
pub const TIME_MAX: Duration = Duration::from_mins(2);
/// How often something is sent at least, so that what stands between keeps the connection open.
pub const KEEP_ALIVE: Duration = Duration::from_secs(10);
/// How often the store is looked at without a hint.
const POLL: Duration = Duration::from_secs(1);
/// Transitions that are read at once.
const PAGE: u32 = 100;

/// Where a client wants to go on, if it says so.
pub(super) fn resumed_at(headers: &HeaderMap) -> Result<Option<i64>, String> {
    let Some(id) = headers.get("last-event-id") else {
        return Ok(None);
    };
    let text = id.to_str().unwrap_or_default();
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
    let seq = text.parse().ok().filter(|_| is_number);
    seq.map(Some)
        .ok_or_else(|| "Last-Event-ID: the id of an event of this stream".into())
}

/// The history after this number, from now on.
pub(super) fn follow(
    state: &AdminState,
    key: RunKey,
    after: i64,
) -> Result<impl IntoResponse + use<>, Problem> {
    let place = Arc::clone(&state.waits).try_acquire_owned();
    let place = place.map_err(|_| {
        let detail = "Too many requests are waiting here; read the history in pages, or try again.";
        Problem::new(Kind::Overloaded, detail).retry_after(crate::problem::RETRY_AFTER)
    })?;
    let follow = Follow {
        store: Arc::clone(&state.store),
        // Before the first look: what happens after it is heard.
        changes: Some(state.coordinator.watch()),
        key,
        at: after,
        found: VecDeque::new(),
        over: false,
        closing: state.closing.clone(),
        until: Instant::now() + TIME_MAX,
        _place: place,
    };
    let events = futures_util::stream::unfold(follow, |mut follow| async move {
        let event = follow.next().await?;
        Some((Ok::<_, Infallible>(event), follow))
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)))
}

struct Follow {
    store: Arc<dyn Store>,
    /// `None`: nobody tells any more, and the store is looked at all the same.
    changes: Option<broadcast::Receiver<RunKey>>,
    key: RunKey,
    /// The newest transition that was found.
    at: i64,
    found: VecDeque<Event>,
    over: bool,
    closing: CancellationToken,
    until: Instant,
    _place: OwnedSemaphorePermit,
}

impl Follow {
    async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.found.pop_front() {
                return Some(event);
            }
            if self.over {
                return None;
            }
            if let Err(error) = self.look().await {
                // The client comes back, and then meets a store that answers or a problem.
                tracing::debug!(error = %Chain(&error), "a stream of transitions ended early");
                return None;
            }
            if self.found.is_empty() && !self.over {
                self.wait().await;
            }
        }
    }

    /// Takes what is new. The run is read first: when it is final, its whole history is there.
    async fn look(&mut self) -> Result<(), StoreError> {
        let Some(line) = self.store.show_run(&self.key).await? else {
            self.over = true;
            return Ok(());
        };
        let new = self.store.transitions(&self.key, self.at, PAGE).await?;
        self.at = new.last().map_or(self.at, |last| last.seq);
        self.found.extend(new.iter().map(event));
        if line.run.status.is_final() && self.at >= line.run.last_transition_seq {
            let end = json!({ "status": line.run.status.word(), "reason": line.run.reason });
            let end = Event::default().event("end").data(end.to_string());
            self.found.push_back(end);
            self.over = true;
        }
        Ok(())
    }

    async fn wait(&mut self) {
        let Self { changes, key, .. } = self;
        tokio::select! {
            () = self.closing.cancelled() => self.over = true,
            () = tokio::time::sleep_until(self.until) => self.over = true,
            () = tokio::time::sleep(POLL) => {}
            () = changed(changes, key) => {}
        }
    }
}

/// Waits for a hint that may be about this run.
async fn changed(changes: &mut Option<broadcast::Receiver<RunKey>>, key: &RunKey) {
    while let Some(receiver) = changes {
        match receiver.recv().await {
            Ok(other) if other != *key => {}
            Ok(_) | Err(RecvError::Lagged(_)) => return,
            Err(RecvError::Closed) => *changes = None,
        }
    }
    std::future::pending::<()>().await;
}

fn event(transition: &Transition) -> Event {
    let data = TransitionOut::new(transition).as_json().to_string();
    Event::default()
        .id(transition.seq.to_string())
        .event(transition.kind.replace(char::is_control, "?"))
        .data(data)
}
