//! What operators and services see of runs, and tell them.
//!
//! Nothing here changes a run: every act becomes an input of the coordinator, whose stamp is the
//! caller's `request_id` where there is one, so that a repeat after a lost reply is recognised. Who
//! and why stand in the run's history, written with what the act did.

mod diagnosis;
pub(super) mod stream;
pub(super) mod wire;

use axum::Json;
use axum::body::Body;
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Extension, Path, Query, State};
use axum::http::{HeaderMap, Method, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};

use super::request::{self, MAY_HAVE_HAPPENED, detached, invalid, not_answered, read};
use super::token::Caller;
use super::{AdminState, Route};
use crate::config::Role;
use crate::coordinator::ApplyError;
use crate::domain::intent::Stamp;
use crate::domain::run::{Event, Input, RunId, RunKey};
use crate::ids;
use crate::problem::{Kind, Problem};
use crate::store::outbox::IntentSearch;
use crate::store::runs::RunLine;
use wire::{Acted, History, HistoryQuery, Page, RunsQuery, Shown};

/// Who may look at runs and intents.
pub(crate) const VIEWERS: &[Role] = &[Role::Reader, Role::Operator, Role::Service];

/// Runs.
pub const ROUTES: [Route; 7] = [
    Route {
        method: Method::GET,
        path: "/v1/runs",
        roles: VIEWERS,
        handler: || get(search),
    },
    Route {
        method: Method::GET,
        path: "/v1/runs/{run_id}",
        roles: VIEWERS,
        handler: || get(show),
    },
    Route {
        method: Method::GET,
        path: "/v1/runs/{run_id}/transitions",
        roles: VIEWERS,
        handler: || get(transitions),
    },
    Route {
        method: Method::POST,
        path: "/v1/runs/{run_id}/cancel",
        roles: &[Role::Operator],
        handler: || post(cancel),
    },
    Route {
        method: Method::POST,
        path: "/v1/runs/{run_id}/retry",
        roles: &[Role::Operator],
        handler: || post(retry),
    },
    Route {
        method: Method::POST,
        path: "/v1/runs/{run_id}/resume",
        roles: &[Role::Operator],
        handler: || post(resume),
    },
    Route {
        method: Method::POST,
        path: "/v1/runs/{run_id}/signals/{name}",
        roles: &[Role::Service, Role::Operator],
        handler: || post(signal),
    },
];

/// Intents of a run that are shown with it.
pub const INTENTS_MAX: u32 = 200;
/// Attempts of a run that are shown with it, newest first.
pub const ATTEMPTS_MAX: u32 = 200;
/// The longest request body of a signal or a resumption, in bytes. What it brings is shorter: that
/// is kept with the run.
pub const PAYLOAD_BYTES_MAX: usize = 256 * 1024;

type RunPath = Result<Path<String>, PathRejection>;

/// `GET /v1/runs`
pub(super) async fn search(
    State(state): State<AdminState>,
    Extension(caller): Extension<Caller>,
    query: Result<Query<RunsQuery>, QueryRejection>,
) -> Result<Json<Page>, Problem> {
    let Query(query) = query.map_err(|rejection| invalid(&rejection.body_text()))?;
    let mut search = query.into_search().map_err(|what| invalid(&what))?;
    if !caller.narrow(&mut search.tenant) {
        return Ok(Json(Page::default()));
    }
    let limit = search.limit;
    // One more tells whether there is another page.
    search.limit += 1;
    let found = state.store.find_runs(&search).await?;
    Ok(Json(Page::new(&found, limit)))
}

/// `GET /v1/runs/{run_id}`
pub(super) async fn show(
    State(state): State<AdminState>,
    Extension(caller): Extension<Caller>,
    path: RunPath,
) -> Result<Json<Shown>, Problem> {
    let key = run_key(&state, &caller, path).await?;
    let line = run_line(&state, &key).await?;
    let search = IntentSearch {
        tenant: Some(key.tenant.as_str().to_owned()),
        run_id: Some(key.id),
        limit: INTENTS_MAX,
        ..IntentSearch::default()
    };
    let mut intents = state.store.find_intents(&search).await?;
    intents.sort_by_key(|intent| intent.seq);
    let attempts = state.store.attempts(&key, ATTEMPTS_MAX).await?;
    let answer = state.store.run_answer(&key).await?;
    let answer = answer.and_then(|(_, answer)| answer);
    Ok(Json(Shown::new(
        &line,
        &intents,
        &attempts,
        answer.as_ref(),
    )))
}

/// `GET /v1/runs/{run_id}/transitions`: a page, or a stream for whoever accepts one.
pub(super) async fn transitions(
    State(state): State<AdminState>,
    Extension(caller): Extension<Caller>,
    path: RunPath,
    query: Result<Query<HistoryQuery>, QueryRejection>,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let Query(query) = query.map_err(|rejection| invalid(&rejection.body_text()))?;
    let (after, limit) = query.into_parts().map_err(|what| invalid(&what))?;
    let key = run_key(&state, &caller, path).await?;
    if wants_stream(&headers) {
        let after = stream::resumed_at(&headers)
            .map_err(|what| invalid(&what))?
            .unwrap_or(after);
        return Ok(stream::follow(&state, key, after)?.into_response());
    }
    // The run first: what is in the history then is at least what it tells.
    let line = run_line(&state, &key).await?;
    let found = state.store.transitions(&key, after, limit).await?;
    Ok(Json(History::new(&line.run, &found)).into_response())
}

/// `POST /v1/runs/{run_id}/cancel`
pub(super) async fn cancel(
    State(state): State<AdminState>,
    Extension(caller): Extension<Caller>,
    path: RunPath,
    body: Body,
) -> Result<Json<Acted>, Problem> {
    let key = run_key(&state, &caller, path).await?;
    let act: wire::Act = read(body).await?;
    let (reason, stamp) = act.into_parts().map_err(|what| invalid(&what))?;
    apply(
        state,
        caller,
        key,
        "cancel",
        stamp,
        Event::Cancel { reason },
    )
    .await
}

/// `POST /v1/runs/{run_id}/retry`
pub(super) async fn retry(
    State(state): State<AdminState>,
    Extension(caller): Extension<Caller>,
    path: RunPath,
    body: Body,
) -> Result<Json<Acted>, Problem> {
    let key = run_key(&state, &caller, path).await?;
    let act: wire::Act = read(body).await?;
    let (reason, stamp) = act.into_parts().map_err(|what| invalid(&what))?;
    let event = Event::Retry { seq: None, reason };
    apply(state, caller, key, "retry", stamp, event).await
}

/// `POST /v1/runs/{run_id}/resume`
pub(super) async fn resume(
    State(state): State<AdminState>,
    Extension(caller): Extension<Caller>,
    path: RunPath,
    body: Body,
) -> Result<Json<Acted>, Problem> {
    let key = run_key(&state, &caller, path).await?;
    let body = request::bytes(body, PAYLOAD_BYTES_MAX).await?;
    let wire::Resumption {
        reason: why,
        request_id,
        result,
    } = request::parse(&body)?;
    let reason = request::reason(&why).map_err(|what| invalid(&what))?;
    let stamp = wire::stamp(request_id.as_deref()).map_err(|what| invalid(&what))?;
    request::kept("result", &result)?;
    let event = Event::Resume { result, reason };
    apply(state, caller, key, "resume", stamp, event).await
}

/// `POST /v1/runs/{run_id}/signals/{name}`
pub(super) async fn signal(
    State(state): State<AdminState>,
    Extension(caller): Extension<Caller>,
    path: Result<Path<(String, String)>, PathRejection>,
    body: Body,
) -> Result<Json<Acted>, Problem> {
    let Path((run_id, name)) = path.map_err(|_| no_run())?;
    let key = run_key(&state, &caller, Ok(Path(run_id))).await?;
    let name = wire::name("name", name).map_err(|what| invalid(&what))?;
    let body = request::bytes(body, PAYLOAD_BYTES_MAX).await?;
    let wire::Signal {
        request_id,
        payload,
    } = request::parse(&body)?;
    let stamp = wire::stamp(request_id.as_deref()).map_err(|what| invalid(&what))?;
    request::kept("payload", &payload)?;
    let event = Event::Signal { name, payload };
    apply(state, caller, key, "signal", stamp, event).await
}

async fn apply(
    state: AdminState,
    caller: Caller,
    key: RunKey,
    act: &'static str,
    stamp: Option<Stamp>,
    event: Event,
) -> Result<Json<Acted>, Problem> {
    let input = Input {
        stamp: stamp.unwrap_or_else(ids::stamp),
        by: caller.name,
        event,
    };
    let (acts, coordinator) = (state.acts, state.coordinator);
    let (by, run_id, tenant) = (input.by.clone(), key.id, key.tenant.clone());
    let applying = async move { coordinator.apply(&key, input).await };
    let broke_off = "an act on a run broke off";
    let applied = detached(&acts, broke_off, MAY_HAVE_HAPPENED, applying).await;
    let applied = applied.and_then(|applied| applied.map_err(|error| not_applied(&error)));
    tracing::info!(by, act, %run_id, tenant = tenant.as_str(), done = applied.is_ok(), "an act on a run was asked for");
    let applied = applied?;
    Ok(Json(Acted::new(act, &applied)))
}

/// What an input gets that was not applied.
pub(super) fn not_applied(error: &ApplyError) -> Problem {
    match error {
        ApplyError::NoRun => no_run(),
        ApplyError::Refused(refused) => Problem::new(Kind::StateConflict, wire::sentence(*refused))
            .member("why", wire::why(*refused)),
        ApplyError::Contended => {
            Problem::new(Kind::Overloaded, CONTENDED).retry_after(crate::problem::RETRY_AFTER)
        }
        ApplyError::Store(error) => not_answered(error),
    }
}

const CONTENDED: &str = "Others keep changing this run, and nothing was done; try again.";

/// The run that a path names, of whichever tenant the caller sees.
async fn run_key(state: &AdminState, caller: &Caller, path: RunPath) -> Result<RunKey, Problem> {
    let Path(text) = path.map_err(|_| no_run())?;
    let id = request::uuid("run_id", &text).map_err(|_| no_run())?;
    let key = state.store.find_run(RunId(id)).await?;
    key.filter(|key| caller.sees(&key.tenant))
        .ok_or_else(no_run)
}

async fn run_line(state: &AdminState, key: &RunKey) -> Result<RunLine, Problem> {
    state.store.show_run(key).await?.ok_or_else(no_run)
}

/// Whether the client names server-sent events among what it accepts (RFC 9110 section 12.5.1).
fn wants_stream(headers: &HeaderMap) -> bool {
    let lines = headers.get_all(header::ACCEPT).iter();
    let ranges = lines
        .filter_map(|line| line.to_str().ok())
        .flat_map(|line| line.split(','));
    let mut types = ranges.map(|range| range.split(';').next().unwrap_or_default().trim());
    types.any(|name| name.eq_ignore_ascii_case("text/event-stream"))
}

fn no_run() -> Problem {
    Problem::new(
        Kind::NotFound,
        "There is no such run, or this token may not see it. A run that is over is forgotten after \
         a while.",
    )
}
