//! What operators see of intents and destinations, and do to them.
//!
//! A redrive is an input of the intent's run, so that a run that went on without it refuses it; it
//! never makes a new key or new bytes. Discarding and pausing are written with who and why in the
//! same transaction. Bodies are never told.

mod acts;
pub(super) mod wire;

use axum::Json;
use axum::body::Body;
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Extension, Path, Query, State};
use axum::http::Method;
use axum::routing::{get, post};

use super::request::{self, MAY_HAVE_HAPPENED, Reason, detached, invalid, read};
use super::runs::{ATTEMPTS_MAX, VIEWERS};
use super::token::Caller;
use super::{AdminState, Route};
use crate::config::{Role, nearest};
use crate::domain::intent::{Destination, IntentId};
use crate::domain::run::RunKey;
use crate::problem::{Kind, Problem};
use crate::store::Audit;
use crate::store::outbox::IntentLine;
use acts::Deed;
use wire::{Acted, Destinations, IntentsQuery, Page, Paused, Shown};

/// Intents and destinations.
pub const ROUTES: [Route; 7] = [
    Route {
        method: Method::GET,
        path: "/v1/outbox",
        roles: VIEWERS,
        handler: || get(search),
    },
    Route {
        method: Method::POST,
        path: "/v1/outbox/redrive",
        roles: &[Role::Operator],
        handler: || post(redrive),
    },
    Route {
        method: Method::POST,
        path: "/v1/outbox/discard",
        roles: &[Role::Operator],
        handler: || post(discard),
    },
    Route {
        method: Method::GET,
        path: "/v1/outbox/destinations",
        roles: VIEWERS,
        handler: || get(destinations),
    },
    Route {
        method: Method::POST,
        path: "/v1/outbox/destinations/{destination}/pause",
        roles: &[Role::Operator],
        handler: || post(pause),
    },
    Route {
        method: Method::POST,
        path: "/v1/outbox/destinations/{destination}/resume",
        roles: &[Role::Operator],
        handler: || post(resume),
    },
    Route {
        method: Method::GET,
        path: "/v1/outbox/{intent_id}",
        roles: VIEWERS,
        handler: || get(show),
    },
];

type OnePath = Result<Path<String>, PathRejection>;

/// `GET /v1/outbox`
pub(super) async fn search(
    State(state): State<AdminState>,
    Extension(caller): Extension<Caller>,
    query: Result<Query<IntentsQuery>, QueryRejection>,
) -> Result<Json<Page>, Problem> {
    let Query(query) = query.map_err(|rejection| invalid(&rejection.body_text()))?;
    let mut search = query.into_search().map_err(|what| invalid(&what))?;
    if !caller.narrow(&mut search.tenant) {
        return Ok(Json(Page::default()));
    }
    let limit = search.limit;
    // One more tells whether there is another page.
    search.limit += 1;
    let found = state.store.find_intents(&search).await?;
    Ok(Json(Page::new(&found, limit)))
}

/// `GET /v1/outbox/{intent_id}`
pub(super) async fn show(
    State(state): State<AdminState>,
    Extension(caller): Extension<Caller>,
    path: OnePath,
) -> Result<Json<Shown>, Problem> {
    let Path(text) = path.map_err(|_| no_intent())?;
    let id = request::uuid("intent_id", &text).map_err(|_| no_intent())?;
    let line = intent(&state, &caller, IntentId(id)).await?;
    let run = RunKey {
        tenant: line.key.tenant.clone(),
        id: line.run_id,
    };
    let attempts = state.store.attempts(&run, ATTEMPTS_MAX).await?;
    Ok(Json(Shown::new(&line, &attempts)))
}

/// `POST /v1/outbox/redrive`
pub(super) async fn redrive(
    State(state): State<AdminState>,
    Extension(caller): Extension<Caller>,
    body: Body,
) -> Result<Json<Acted>, Problem> {
    acts::act(state, caller, Deed::Redrive, read(body).await?).await
}

/// `POST /v1/outbox/discard`
pub(super) async fn discard(
    State(state): State<AdminState>,
    Extension(caller): Extension<Caller>,
    body: Body,
) -> Result<Json<Acted>, Problem> {
    acts::act(state, caller, Deed::Discard, read(body).await?).await
}

/// `GET /v1/outbox/destinations`
pub(super) async fn destinations(
    State(state): State<AdminState>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<Destinations>, Problem> {
    let mut paused = state.store.paused().await?;
    // A host or a queue that no configuration names may be another tenant's secret.
    if caller.tenant.is_some() {
        paused.retain(|pause| state.destinations.contains(&pause.destination));
    }
    Ok(Json(Destinations::new(&state.destinations, &paused)))
}

/// `POST /v1/outbox/destinations/{destination}/pause`
pub(super) async fn pause(
    State(state): State<AdminState>,
    Extension(caller): Extension<Caller>,
    path: OnePath,
    body: Body,
) -> Result<Json<Paused>, Problem> {
    set_paused(state, caller, path, body, true).await
}

/// `POST /v1/outbox/destinations/{destination}/resume`
pub(super) async fn resume(
    State(state): State<AdminState>,
    Extension(caller): Extension<Caller>,
    path: OnePath,
    body: Body,
) -> Result<Json<Paused>, Problem> {
    set_paused(state, caller, path, body, false).await
}

async fn set_paused(
    state: AdminState,
    caller: Caller,
    path: OnePath,
    body: Body,
    paused: bool,
) -> Result<Json<Paused>, Problem> {
    if caller.tenant.is_some() {
        let detail = "A destination is every tenant's; use a token that is bound to none.";
        return Err(Problem::new(Kind::Forbidden, detail));
    }
    let path = path.map_err(|rejection| invalid(&rejection.body_text()));
    let destination = wire::destination(path?.0).map_err(|what| invalid(&what))?;
    let Reason { reason: why } = read(body).await?;
    let audit = Audit {
        operator: caller.name,
        reason: request::reason(&why).map_err(|what| invalid(&what))?,
    };
    known(&state, &destination).await?;
    let store = state.store;
    let (asked, operator) = (destination.clone(), audit.operator.clone());
    let setting = async move { store.set_paused(&asked, paused, &audit).await };
    detached(&state.acts, acts::BROKE_OFF, MAY_HAVE_HAPPENED, setting).await??;
    state.bells.outbox.notify_one();
    tracing::info!(
        operator,
        destination = destination.0,
        paused,
        "an operator stopped or resumed a destination"
    );
    Ok(Json(Paused {
        destination: destination.0,
        paused,
    }))
}

/// Refuses the name of no destination: configured here, or paused by a gateway that may have
/// another configuration. Hosts, pools and queues need no configuration.
async fn known(state: &AdminState, asked: &Destination) -> Result<(), Problem> {
    if asked.0.contains(':') || state.destinations.contains(asked) {
        return Ok(());
    }
    let paused = state.store.paused().await?;
    if paused.iter().any(|pause| pause.destination == *asked) {
        return Ok(());
    }
    let paused = paused.iter().map(|pause| &pause.destination);
    let known = state.destinations.iter().chain(paused);
    let detail = match nearest(&asked.0, known.map(|known| known.0.as_str())) {
        Some(near) => format!("There is no such destination; did you mean \"{near}\"?"),
        None => "There is no such destination in the configuration of this gateway.".to_owned(),
    };
    Err(Problem::new(Kind::NotFound, detail))
}

/// The intent of this id, of whichever tenant the caller sees.
async fn intent(state: &AdminState, caller: &Caller, id: IntentId) -> Result<IntentLine, Problem> {
    let line = state.store.find_intent(id).await?;
    line.filter(|line| caller.sees(&line.key.tenant))
        .ok_or_else(no_intent)
}

fn no_intent() -> Problem {
    Problem::new(
        Kind::NotFound,
        "There is no such intent, or this token may not see it.",
    )
}
