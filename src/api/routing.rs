//! Reserve and complete: the gate for services that are not behind the proxy. They play the
//! upstream themselves.
//!
//! Every call may be sent again after a lost reply. What was asked for is done on a task of its
//! own: neither a lost connection nor the shutdown cuts it in two.

mod denial;
mod wire;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::extract::{Extension, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use self::wire::{ClaimOut, CompleteIn, HeartbeatIn, ReleaseIn, ReserveIn, ReserveOut};
use super::request::{self, invalid, read_within};
use super::token::Caller;
use super::workflow::{self, Catalog};
use super::{AdminState, Route};
use crate::config::Role;
use crate::domain::fingerprint::RequestDigest;
use crate::domain::key::IdempotencyKey;
use crate::domain::millis;
use crate::domain::record::{AttemptToken, State as RecordState};
use crate::domain::run::FollowUp;
use crate::domain::scope::{PoolId, RecordKey, TenantScope};
use crate::head;
use crate::problem::{Kind, Problem};
use crate::routing::callers::{Decree, Decreed, Reservation, Told, Wish};
use crate::routing::gate::Denial;

/// The longest request body of a completion, in bytes.
pub const BODY_BYTES_MAX: usize = 8 * 1024 * 1024;
/// The longest request body of the other calls, in bytes.
const CALL_BYTES_MAX: usize = 16 * 1024;
/// Bodies of completions that are read and worked on at one time, in KiB.
pub const BODIES_KIB_MAX: usize = 128 * 1024;
/// How long a completion waits for room for its body.
const ROOM_WAIT: Duration = Duration::from_secs(5);
/// Callers that may be parked at one time; the others are told at once. The rest of the
/// connections is left to those who end the waiting.
pub const PARKED_MAX: usize = super::CONNECTIONS_MAX / 2;

const SERVICES: &[Role] = &[Role::Service];

/// Reserve, complete, and what belongs to it.
pub const ROUTES: [Route; 4] = [
    Route {
        method: Method::POST,
        path: "/v1/routing/reserve",
        roles: SERVICES,
        handler: || post(reserve),
    },
    Route {
        method: Method::POST,
        path: "/v1/routing/heartbeat",
        roles: SERVICES,
        handler: || post(heartbeat),
    },
    Route {
        method: Method::POST,
        path: "/v1/routing/complete",
        roles: SERVICES,
        handler: || post(complete),
    },
    Route {
        method: Method::POST,
        path: "/v1/routing/release",
        roles: SERVICES,
        handler: || post(release),
    },
];

/// What this area works with besides the store.
pub struct Room {
    parked: Arc<Semaphore>,
    bodies: Arc<Semaphore>,
}

impl Default for Room {
    fn default() -> Self {
        Self {
            parked: Arc::new(Semaphore::new(PARKED_MAX)),
            bodies: Arc::new(Semaphore::new(BODIES_KIB_MAX)),
        }
    }
}

/// `POST /v1/routing/reserve`
async fn reserve(
    State(state): State<AdminState>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Problem> {
    let call: ReserveIn = read_within(body, CALL_BYTES_MAX).await?;
    let asked = call.asked().map_err(|what| invalid(&what))?;
    let (tenant, pool) = scope(&caller, call.tenant.as_deref(), &call.pool)?;
    let Some(key) = parse_key(&call.key)? else {
        return Ok(Json(ReserveOut::Fresh).into_response());
    };
    known_pool(&state, &tenant, &pool, call.request_id).await?;
    let place = Arc::clone(&state.room.parked).try_acquire_owned().ok();
    let wait = match place {
        Some(_) => {
            let preferred = head::preferred_waits(&headers).flatten().next();
            preferred.map_or(asked.wait, |wait| wait.min(asked.wait))
        }
        None => Duration::ZERO,
    };
    // Dropped with this future when the caller goes away.
    let gone = CancellationToken::new();
    let _gone = gone.clone().drop_guard();
    let lease = asked.terms.lease;
    let wish = Wish {
        key: RecordKey { tenant, pool, key },
        request_id: call.request_id,
        digest: asked.fingerprint.as_deref().map(RequestDigest::named),
        terms: asked.terms,
        duplicates: asked.duplicates,
        wait_until: Instant::now() + wait,
        gone,
    };
    let (gate, key) = (state.gate.clone(), wish.key.clone());
    let reserving = async move { gate.reserve(&wish).await };
    let reservation = detached(&state.acts, reserving).await?;
    let reservation = reservation.map_err(|error| denial::not_answered(&error))?;
    let answer = told(reservation, &key, lease);
    let outcome = match &answer {
        Ok((word, _)) => word,
        Err(problem) => problem.kind().slug(),
    };
    tell("reserve", &caller, &key, outcome);
    answer.map(|(_, response)| response)
}

/// A typo would be a space of keys of its own. A claim that was made before is told all the same.
async fn known_pool(
    state: &AdminState,
    tenant: &TenantScope,
    pool: &PoolId,
    request_id: Uuid,
) -> Result<(), Problem> {
    let Err(what) = state.catalog.has_pool(pool) else {
        return Ok(());
    };
    let remembered = state.store.remembered(tenant, request_id).await;
    match remembered.map_err(|error| denial::not_answered(&error))? {
        Some(_) => Ok(()),
        None => Err(invalid(&what)),
    }
}

/// What a caller is told, with the word for it.
fn told(
    reservation: Reservation,
    key: &RecordKey,
    lease: Duration,
) -> Result<(&'static str, Response), Problem> {
    let (word, out) = match reservation {
        Reservation::Owned(held, lease) => {
            let out = ReserveOut::Reserved {
                state: "pending",
                lease_ms: millis(lease),
                claim: ClaimOut::new(&held),
            };
            ("reserved", out)
        }
        Reservation::Decided { decided, .. } if decided.recorded.body.is_none() => {
            return Err(denial::not_replayable(&decided));
        }
        Reservation::Decided {
            decided,
            waited,
            held,
        } => {
            let out = ReserveOut::Replayed {
                state: "completed",
                waited,
                claim: held.as_ref().map(ClaimOut::new),
                decision: wire::decided(&decided),
            };
            ("replayed", out)
        }
        Reservation::Ended(held, RecordState::FailedBeforeCommit { .. }) => {
            let out = ReserveOut::Released {
                state: "failed_before_commit",
                claim: ClaimOut::new(&held),
            };
            ("released", out)
        }
        Reservation::Ended(held, _) => return Err(denial::unknown(&held)),
        Reservation::Superseded(late) => return Err(denial::stale(&late)),
        Reservation::OtherRecord => {
            return Err(invalid(
                "request_id: it claimed another record; draw a new one for each claim",
            ));
        }
        Reservation::Refused(Denial::Follow(_)) => {
            return Ok(("in-progress", follow(key)));
        }
        Reservation::Refused(denial) => return Err(denial::denied(denial, lease)),
    };
    Ok((word, Json(out).into_response()))
}

/// Where the owner can be followed.
fn follow(key: &RecordKey) -> Response {
    let location = super::records::path_of(key);
    let body = Json(json!({ "outcome": "in_progress", "location": location }));
    let mut response = (StatusCode::ACCEPTED, body).into_response();
    if let Ok(location) = HeaderValue::from_str(&location) {
        response.headers_mut().insert(header::LOCATION, location);
    }
    response
}

/// `POST /v1/routing/heartbeat`
async fn heartbeat(
    State(state): State<AdminState>,
    Extension(caller): Extension<Caller>,
    body: Body,
) -> Result<Json<Value>, Problem> {
    let call: HeartbeatIn = read_within(body, CALL_BYTES_MAX).await?;
    let lease = call.lease().map_err(|what| invalid(&what))?;
    let key = record(&caller, call.tenant.as_deref(), &call.pool, &call.key)?;
    let token = AttemptToken(call.attempt_token);
    let gate = state.gate.clone();
    let beating = async move { gate.beat(&key, token, lease).await };
    match detached(&state.acts, beating).await? {
        Ok(Ok(lease)) => Ok(Json(json!({ "lease_ms": millis(lease) }))),
        Ok(Err(late)) => Err(denial::stale(&late)),
        Err(error) => Err(denial::not_answered(&error)),
    }
}

/// `POST /v1/routing/complete`
async fn complete(
    State(state): State<AdminState>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<Value>, Problem> {
    let _room = room(&state, &headers).await?;
    let call: CompleteIn = read_within(body, BODY_BYTES_MAX).await?;
    let key = record(&caller, call.tenant.as_deref(), &call.pool, &call.key)?;
    let recorded = call.decision.recorded().map_err(|what| invalid(&what))?;
    let token = AttemptToken(call.attempt_token);
    let given = (call.effects, call.run, call.input);
    let follow_up = match follow_up(&state.catalog, &key.tenant, given) {
        Ok(follow_up) => follow_up.map(Box::new),
        // What is decided is told, whatever has become of the configuration since.
        Err(what) => {
            let decreed = state.gate.decreed(&key, token).await;
            let decreed = decreed.map_err(|error| denial::not_answered(&error))?;
            return decreed.map_or_else(|| Err(invalid(&what)), |decreed| completed(Ok(decreed)));
        }
    };
    let decree = Decree {
        key: key.clone(),
        token,
        decided_by: format!("service:{}", caller.name),
        recorded,
        follow_up,
    };
    let (gate, bells) = (state.gate.clone(), state.bells.clone());
    let decreeing = async move {
        let decreed = gate.decree(decree).await;
        if matches!(&decreed, Ok(Ok(decreed)) if decreed.run_id.is_some()) {
            bells.outbox.notify_one();
            bells.runs.notify_one();
        }
        decreed
    };
    let decreed = detached(&state.acts, decreeing).await?;
    let outcome = match &decreed {
        Ok(Ok(_)) => "completed",
        Ok(Err(_)) => "stale",
        Err(_) => "not answered",
    };
    tell("complete", &caller, &key, outcome);
    completed(decreed)
}

/// What follows a decision with these effects, this run and this input.
fn follow_up(
    catalog: &Catalog,
    tenant: &TenantScope,
    (effects, run, input): (Option<Value>, Option<Value>, Option<Value>),
) -> Result<Option<FollowUp>, String> {
    let input = workflow::input(input)?;
    let workflow = catalog.read(effects, run, tenant)?;
    Ok(workflow.map(|workflow| FollowUp {
        workflow,
        request: None,
        input,
        first_key: None,
        holds_record: false,
    }))
}

/// What a completion is told.
fn completed(decreed: Told<Decreed>) -> Result<Json<Value>, Problem> {
    match decreed {
        Ok(Ok(decreed)) => {
            let mut told = json!({ "decision": wire::committed(&decreed.committed) });
            if let Some(run_id) = decreed.run_id {
                told["run_id"] = json!(run_id.to_string());
            }
            Ok(Json(told))
        }
        Ok(Err(late)) => Err(denial::stale(&late)),
        Err(error) => Err(denial::not_answered(&error)),
    }
}

/// `POST /v1/routing/release`
async fn release(
    State(state): State<AdminState>,
    Extension(caller): Extension<Caller>,
    body: Body,
) -> Result<Json<Value>, Problem> {
    let call: ReleaseIn = read_within(body, CALL_BYTES_MAX).await?;
    let key = record(&caller, call.tenant.as_deref(), &call.pool, &call.key)?;
    let (token, reason) = (AttemptToken(call.attempt_token), call.reason());
    let (gate, released) = (state.gate.clone(), key.clone());
    let releasing = async move { gate.relinquish(&released, token, reason).await };
    let released = detached(&state.acts, releasing).await?;
    let outcome = match &released {
        Ok(Ok(state)) => state.word(),
        Ok(Err(_)) => "stale",
        Err(_) => "not answered",
    };
    tell("release", &caller, &key, outcome);
    match released {
        Ok(Ok(state)) => Ok(Json(json!({ "status": state.word() }))),
        Ok(Err(late)) => Err(denial::stale(&late)),
        Err(error) => Err(denial::not_answered(&error)),
    }
}

async fn detached<T: Send + 'static>(
    acts: &TaskTracker,
    work: impl Future<Output = T> + Send + 'static,
) -> Result<T, Problem> {
    let broke_off = "a call of a service broke off";
    request::detached(acts, broke_off, denial::SEND_AGAIN, work).await
}

/// Room for the body that is announced; an unannounced one may be the longest.
async fn room(
    state: &AdminState,
    headers: &HeaderMap,
) -> Result<tokio::sync::OwnedSemaphorePermit, Problem> {
    let announced = headers.get(header::CONTENT_LENGTH);
    let announced = announced.and_then(|length| length.to_str().ok()?.parse().ok());
    let bytes = announced.unwrap_or(BODY_BYTES_MAX).min(BODY_BYTES_MAX);
    let kib = u32::try_from(bytes / 1024 + 1).unwrap_or(u32::MAX);
    let room = Arc::clone(&state.room.bodies).acquire_many_owned(kib);
    match tokio::time::timeout(ROOM_WAIT, room).await {
        Ok(Ok(permit)) => Ok(permit),
        _ => Err(Problem::new(
            Kind::Overloaded,
            "The gateway has no room for this body now. Send the same call again.",
        )
        .retry_after(crate::problem::RETRY_AFTER)),
    }
}

/// The record that a call names.
fn record(
    caller: &Caller,
    tenant: Option<&str>,
    pool: &str,
    key: &str,
) -> Result<RecordKey, Problem> {
    let (tenant, pool) = scope(caller, tenant, pool)?;
    let key = parse_key(key)?.ok_or_else(|| {
        Problem::new(
            Kind::KeyInvalid,
            "Without a key there is no record: a reserve without one is answered with `fresh`.",
        )
    })?;
    Ok(RecordKey { tenant, pool, key })
}

/// Whose it is: as the call says, or as the token is bound.
fn scope(
    caller: &Caller,
    tenant: Option<&str>,
    pool: &str,
) -> Result<(TenantScope, PoolId), Problem> {
    let tenant = match (tenant, &caller.tenant) {
        (Some(tenant), _) => {
            TenantScope::parse(tenant).map_err(|error| invalid(&format!("tenant: {error}")))?
        }
        (None, Some(own)) => own.clone(),
        (None, None) => {
            return Err(invalid(
                "tenant: write it, since this token is bound to none",
            ));
        }
    };
    if !caller.sees(&tenant) {
        return Err(Problem::new(
            Kind::Forbidden,
            "This token is bound to another tenant.",
        ));
    }
    let pool = PoolId::new(pool).map_err(|error| invalid(&format!("pool: {error}")))?;
    Ok((tenant, pool))
}

fn parse_key(key: &str) -> Result<Option<IdempotencyKey>, Problem> {
    IdempotencyKey::from_text(key)
        .map_err(|error| Problem::new(Kind::KeyInvalid, format!("Nothing was claimed: {error}.")))
}

fn tell(call: &'static str, caller: &Caller, key: &RecordKey, outcome: &str) {
    tracing::info!(
        service = caller.name,
        call,
        pool = key.pool.as_str(),
        tenant = key.tenant.as_str(),
        key = key.key.as_str(),
        outcome,
        "a service called"
    );
}
