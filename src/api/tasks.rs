//! Step workers: claim tasks, say that they live, tell results.
//!
//! A result is taken from the claim that it belongs to, whose stamp the worker repeats; a late or
//! foreign one writes nothing. Telling the same result again gives the same answer. Any gateway
//! takes what another gave out.

mod wire;

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::extract::{Extension, State};
use axum::http::{HeaderMap, Method};
use axum::routing::post;
use tokio::sync::broadcast;
use tokio::time::Instant;

use super::request::{self, MAY_HAVE_HAPPENED, detached, invalid, not_answered, read};
use super::token::Caller;
use super::{AdminState, Route};
use crate::config::Role;
use crate::domain::intent::{ClaimedIntent, Finished, IntentKey};
use crate::domain::run::RunKey;
use crate::domain::scope::TenantScope;
use crate::head;
use crate::outbox::tasks::TaskResult;
use crate::problem::{Kind, Problem};
use wire::{Claimed, Extended, Taken};

/// Tasks, for step workers.
pub const ROUTES: [Route; 3] = [
    Route {
        method: Method::POST,
        path: "/v1/tasks/claim",
        roles: &[Role::Worker],
        handler: || post(claim),
    },
    Route {
        method: Method::POST,
        path: "/v1/tasks/heartbeat",
        roles: &[Role::Worker],
        handler: || post(heartbeat),
    },
    Route {
        method: Method::POST,
        path: "/v1/tasks/result",
        roles: &[Role::Worker],
        handler: || post(result),
    },
];

/// How long a claim waits for a task at most, whatever `Prefer: wait` says.
pub const WAIT_MAX: Duration = Duration::from_secs(20);
/// How often a claim that waits looks again without a hint.
const POLL: Duration = Duration::from_millis(500);

/// `POST /v1/tasks/claim`
pub(super) async fn claim(
    State(state): State<AdminState>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<Claimed>, Problem> {
    let asked: wire::Claim = read(body).await?;
    let mut wish = asked.into_wish().map_err(|what| invalid(&what))?;
    let mut tenant = wish
        .tenant
        .as_ref()
        .map(|tenant| tenant.as_str().to_owned());
    if !caller.narrow(&mut tenant) {
        return Ok(Json(Claimed::new(&[], wish.lease)));
    }
    wish.tenant = tenant.as_deref().map(TenantScope::stored);
    let wait = wait(&headers).map_err(|what| invalid(&what))?;
    // Without a place nobody waits: the worker asks again by itself.
    let place = Arc::clone(&state.waits).try_acquire_owned();
    let wait = if place.is_ok() { wait } else { Duration::ZERO };
    let until = Instant::now() + wait;
    let mut changes = state.coordinator.watch();
    loop {
        if state.closing.is_cancelled() {
            return Ok(Json(Claimed::new(&[], wish.lease)));
        }
        let claimed = claim_once(&state, &wish).await?;
        if !claimed.is_empty() || Instant::now() >= until {
            return Ok(Json(Claimed::new(&claimed, wish.lease)));
        }
        tokio::select! {
            () = state.closing.cancelled() => {}
            () = tokio::time::sleep_until(until) => {}
            () = tokio::time::sleep(POLL) => {}
            () = changed(&mut changes) => {}
        }
    }
}

/// On a task of its own: a claim that is made is made whole, also when its worker went away; its
/// lease gives it back.
async fn claim_once(state: &AdminState, wish: &wire::Wish) -> Result<Vec<ClaimedIntent>, Problem> {
    let (tasks, wish) = (state.tasks.clone(), wish.clone());
    let claiming = async move {
        let wire::Wish {
            tenant,
            queue,
            limit,
            lease,
            worker,
        } = wish;
        tasks
            .claim(tenant.as_ref(), &queue, limit, lease, &worker)
            .await
    };
    let broke_off = "a claim of tasks broke off";
    Ok(detached(&state.acts, broke_off, MAY_HAVE_HAPPENED, claiming).await??)
}

/// Waits for a hint that some run went on; without hints it waits for ever.
async fn changed(changes: &mut broadcast::Receiver<RunKey>) {
    if let Err(broadcast::error::RecvError::Closed) = changes.recv().await {
        std::future::pending::<()>().await;
    }
}

/// `POST /v1/tasks/heartbeat`
pub(super) async fn heartbeat(
    State(state): State<AdminState>,
    Extension(caller): Extension<Caller>,
    body: Body,
) -> Result<Json<Extended>, Problem> {
    let asked: wire::Heartbeat = read(body).await?;
    let (key, stamp, lease) = asked.into_parts().map_err(|what| invalid(&what))?;
    visible(&caller, &key)?;
    if state.tasks.heartbeat(&key, stamp, lease).await? {
        Ok(Json(Extended::by(lease)))
    } else {
        Err(stale())
    }
}

/// `POST /v1/tasks/result`
pub(super) async fn result(
    State(state): State<AdminState>,
    Extension(caller): Extension<Caller>,
    body: Body,
) -> Result<Json<Taken>, Problem> {
    let body = request::bytes(body, wire::RESULT_BYTES_MAX).await?;
    let asked: wire::Outcome = request::parse(&body)?;
    let (key, stamp, result) = asked.into_parts().map_err(|what| invalid(&what))?;
    visible(&caller, &key)?;
    if let TaskResult::Done(value) = &result {
        request::kept("result", value)?;
    }
    let tasks = state.tasks;
    let telling = async move { tasks.finish(&key, stamp, result).await };
    let broke_off = "a task's result broke off";
    let finished = detached(&state.acts, broke_off, MAY_HAVE_HAPPENED, telling).await?;
    match finished.map_err(|error| not_answered(&error))? {
        Finished::Taken => Ok(Json(Taken { status: "taken" })),
        Finished::Stale => Err(stale()),
    }
}

fn visible(caller: &Caller, key: &IntentKey) -> Result<(), Problem> {
    let detail = "There is no such task, or this token may not see it.";
    caller
        .sees(&key.tenant)
        .then_some(())
        .ok_or_else(|| Problem::new(Kind::NotFound, detail))
}

fn stale() -> Problem {
    Problem::new(
        Kind::AttemptStale,
        "This claim is over, and nothing was written: its lease ended, the task is done, or the \
         stamp is another's. Stop working on it.",
    )
}

/// How long the client is willing to wait.
fn wait(headers: &HeaderMap) -> Result<Duration, String> {
    match head::preferred_waits(headers).next() {
        None => Ok(Duration::ZERO),
        Some(preferred) => preferred
            .map(|wait| wait.min(WAIT_MAX))
            .ok_or_else(|| "Prefer: wait is a number of seconds".into()),
    }
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn waiting_is_asked_for_and_bounded() {
        let asked = |value: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert("prefer", HeaderValue::from_static(value));
            wait(&headers)
        };
        assert_eq!(wait(&HeaderMap::new()), Ok(Duration::ZERO));
        assert_eq!(asked("wait=3"), Ok(Duration::from_secs(3)));
        assert_eq!(asked("respond-async, Wait = 4"), Ok(Duration::from_secs(4)));
        assert_eq!(asked("wait=999999"), Ok(WAIT_MAX));
        assert_eq!(asked("wait=99999999999999999999999"), Ok(WAIT_MAX));
        assert!(asked("wait=soon").is_err());
    }
}
