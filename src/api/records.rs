//! What operators see of records, and do to them when a gateway can't decide.
//!
//! An act never touches a record by itself: the store judges state, token and time in the
//! statement that writes, and writes who and why in the same transaction. Bodies, attempt tokens
//! and fingerprints are never told.

pub(super) mod resolution;
mod wire;

use std::collections::HashMap;
use std::time::Duration;

use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Extension, Path, Query, State};
use axum::http::Method;
use axum::routing::{get, post};
use axum::{Json, body::Body};

use super::request::{self, MAY_HAVE_HAPPENED, Reason, detached, invalid, read};
use super::token::Caller;
use super::{AdminState, READERS, RECORD_READERS, Route};
use crate::config::Role;
use crate::domain::key::IdempotencyKey;
use crate::domain::record::{Completion, State as RecordState};
use crate::domain::run::FollowUp;
use crate::domain::scope::{PoolId, RecordKey, TenantScope};
use crate::head::path_segment;
use crate::ids;
use crate::problem::{Kind, Problem};
use crate::store::{Audit, Resolved, StoreError, Verdict, wake_hash};
use crate::telemetry::Chain;
use resolution::{Answer, Resolution};
use wire::{Acted, Page, SearchQuery, Shown};

/// Records, for operators.
pub const ROUTES: [Route; 5] = [
    Route {
        method: Method::GET,
        path: "/v1/records",
        roles: READERS,
        handler: || get(search),
    },
    Route {
        method: Method::GET,
        path: "/v1/records/{tenant}/{pool}/{key}",
        roles: RECORD_READERS,
        handler: || get(show),
    },
    Route {
        method: Method::POST,
        path: "/v1/records/{tenant}/{pool}/{key}/release",
        roles: &[Role::Operator],
        handler: || post(release),
    },
    Route {
        method: Method::POST,
        path: "/v1/records/{tenant}/{pool}/{key}/resolve",
        roles: &[Role::Operator],
        handler: || post(resolve),
    },
    Route {
        method: Method::POST,
        path: "/v1/records/{tenant}/{pool}/{key}/purge",
        roles: &[Role::Operator],
        handler: || post(purge),
    },
];

/// How much longer than its route allows an owner is waited for before an operator may say that
/// its request never happened: the commit itself, and clocks that run apart.
pub const OWNER_MARGIN: Duration = Duration::from_secs(30);

/// After which time since its claim an owner is certainly gone, by pool.
#[derive(Clone, Debug)]
pub struct OwnerTimes {
    by_pool: HashMap<PoolId, Duration>,
    longest: Duration,
}

impl OwnerTimes {
    /// The longest of the routes of each pool, and `margin` on top: [`OWNER_MARGIN`].
    #[must_use]
    pub fn new(routes: &[crate::config::Route], margin: Duration) -> Self {
        let mut by_pool = HashMap::new();
        for policy in routes.iter().map(|route| &route.policy) {
            let time = policy.owner_time_max() + margin;
            let longest: &mut Duration = by_pool.entry(policy.pool.clone()).or_default();
            *longest = time.max(*longest);
        }
        let longest = by_pool.values().copied().max().unwrap_or(margin);
        Self { by_pool, longest }
    }

    /// For records of this pool. One that is not configured any more counts as the slowest.
    #[must_use]
    pub fn of(&self, pool: &PoolId) -> Duration {
        self.by_pool.get(pool).copied().unwrap_or(self.longest)
    }
}

type RecordPath = Result<Path<(String, String, String)>, PathRejection>;

/// `GET /v1/records`
pub(super) async fn search(
    State(state): State<AdminState>,
    Extension(caller): Extension<Caller>,
    query: Result<Query<SearchQuery>, QueryRejection>,
) -> Result<Json<Page>, Problem> {
    let Query(query) = query.map_err(|rejection| invalid(&rejection.body_text()))?;
    let mut search = query.into_search().map_err(|what| invalid(&what))?;
    if !caller.narrow(&mut search.tenant) {
        return Ok(Json(Page::default()));
    }
    let limit = search.limit;
    // One more tells whether there is another page.
    search.limit += 1;
    let found = state.store.find(&search).await?;
    Ok(Json(Page::new(&found, limit)))
}

/// `GET /v1/records/{tenant}/{pool}/{key}`
pub(super) async fn show(
    State(state): State<AdminState>,
    Extension(caller): Extension<Caller>,
    path: RecordPath,
) -> Result<Json<Shown>, Problem> {
    let key = record_key(&caller, path)?;
    let mut looked_up = state.store.look_up(std::slice::from_ref(&key)).await?;
    let record = looked_up.pop().flatten().ok_or_else(no_record)?;
    let decision = match record.state {
        RecordState::Completed(id, _) => state.store.decision(&key.tenant, id).await?,
        _ => None,
    };
    Ok(Json(Shown::new(&record, decision.as_ref())))
}

/// `POST /v1/records/{tenant}/{pool}/{key}/release`: it never happened.
pub(super) async fn release(
    State(state): State<AdminState>,
    Extension(caller): Extension<Caller>,
    path: RecordPath,
    body: Body,
) -> Result<Json<Acted>, Problem> {
    let key = record_key(&caller, path)?;
    let Reason { reason } = read(body).await?;
    act(state, caller, key, reason, Act::Release).await
}

/// `POST /v1/records/{tenant}/{pool}/{key}/resolve`: it happened, and this was the answer.
pub(super) async fn resolve(
    State(state): State<AdminState>,
    Extension(caller): Extension<Caller>,
    path: RecordPath,
    body: Body,
) -> Result<Json<Acted>, Problem> {
    let key = record_key(&caller, path)?;
    let resolution: Resolution = read(body).await?;
    let (reason, answer, following) = resolution.into_parts().map_err(|what| invalid(&what))?;
    let follow_up = following.read(&state.catalog, &key, answer.status())?;
    let answer = Act::Resolve(Box::new((answer, follow_up)));
    act(state, caller, key, reason, answer).await
}

/// `POST /v1/records/{tenant}/{pool}/{key}/purge`: forget it.
pub(super) async fn purge(
    State(state): State<AdminState>,
    Extension(caller): Extension<Caller>,
    path: RecordPath,
    body: Body,
) -> Result<Json<Acted>, Problem> {
    let key = record_key(&caller, path)?;
    let Reason { reason } = read(body).await?;
    act(state, caller, key, reason, Act::Purge).await
}

enum Act {
    Release,
    Resolve(Box<(Answer, Option<FollowUp>)>),
    Purge,
}

impl Act {
    fn word(&self) -> &'static str {
        match self {
            Self::Release => "release",
            Self::Resolve(_) => "resolve",
            Self::Purge => "purge",
        }
    }

    /// What it needs, for who tried it in vain.
    fn needs(&self) -> &'static str {
        match self {
            Self::Release | Self::Resolve(_) => {
                "The record must be `outcome_unknown`, or `pending` with its lease over."
            }
            Self::Purge => "The record must be `completed` or `failed_before_commit`.",
        }
    }

    /// The record's state afterwards; `None`: there is no record.
    fn leads_to(&self) -> Option<&'static str> {
        match self {
            Self::Release => Some("failed_before_commit"),
            Self::Resolve(_) => Some("completed"),
            Self::Purge => None,
        }
    }
}

async fn act(
    state: AdminState,
    caller: Caller,
    key: RecordKey,
    reason: String,
    act: Act,
) -> Result<Json<Acted>, Problem> {
    let reason = request::reason(&reason).map_err(|what| invalid(&what))?;
    let audit = Audit {
        operator: caller.name,
        reason,
    };
    let acts = state.acts.clone();
    let performing = async move { perform(&state, &key, &act, &audit).await };
    let broke_off = "an operator's act broke off";
    let acted = detached(&acts, broke_off, MAY_HAVE_HAPPENED, performing).await??;
    Ok(Json(acted))
}

async fn perform(
    state: &AdminState,
    key: &RecordKey,
    act: &Act,
    audit: &Audit,
) -> Result<Acted, Problem> {
    let result = write(state, key, act, audit).await;
    let changed = match &result {
        Ok(resolved) => *resolved == Resolved::Done,
        Err(error) => error.may_have_happened(),
    };
    if changed {
        tell_everyone(state, key).await;
        if matches!(act, Act::Resolve(_)) {
            state.bells.outbox.notify_one();
            state.bells.runs.notify_one();
        }
    }
    let outcome = result?;
    tracing::info!(
        operator = audit.operator,
        act = act.word(),
        pool = key.pool.as_str(),
        tenant = key.tenant.as_str(),
        key = key.key.as_str(),
        done = outcome == Resolved::Done,
        "an operator asked for an act on a record"
    );
    match outcome {
        Resolved::Done => Ok(Acted {
            act: act.word(),
            status: act.leads_to(),
        }),
        Resolved::NoRecord => Err(no_record()),
        Resolved::WrongState => Err(Problem::new(Kind::StateConflict, act.needs())),
        Resolved::TooEarly { wait } => {
            let seconds = wait.as_secs() + 1;
            let detail = format!("Its owner may still be at work; ask again in {seconds} s.");
            Err(Problem::new(Kind::StateConflict, detail).retry_after(wait))
        }
    }
}

async fn write(
    state: &AdminState,
    key: &RecordKey,
    act: &Act,
    audit: &Audit,
) -> Result<Resolved, StoreError> {
    let owner_time_max = state.owner_times.of(&key.pool);
    let verdict = match act {
        Act::Purge => return state.store.purge_one(key, audit).await,
        Act::Release => Verdict::NeverHappened,
        Act::Resolve(resolution) => {
            let (answer, follow_up) = &**resolution;
            let looked_up = state.store.look_up(std::slice::from_ref(key)).await?;
            let Some(record) = looked_up.into_iter().flatten().next() else {
                return Ok(Resolved::NoRecord);
            };
            let (decision_id, recorded) = (ids::decision_id(), answer.recorded());
            let run = follow_up.as_ref().map(|follow_up| {
                let key_seed = state.gate.secrets().forward_key(key, record.generation_id);
                Box::new(follow_up.begin(key, decision_id, &recorded, key_seed, ids::stamp()))
            });
            Verdict::Happened(Box::new(Completion {
                key: key.clone(),
                token: record.token,
                decision_id,
                decided_by: format!("operator:{}", audit.operator),
                run,
                recorded,
            }))
        }
    };
    state
        .store
        .resolve(key, &verdict, owner_time_max, audit)
        .await
}

/// This gateway at once, the others by a hint; without the hint they find out by polling, and
/// their caches when they stop trusting the entry.
async fn tell_everyone(state: &AdminState, key: &RecordKey) {
    (state.changed)(key);
    if let Err(error) = state.store.notify(&[wake_hash(key)]).await {
        tracing::warn!(error = %Chain(&error), "other gateways were not told of an operator's act");
    }
}

/// The record that a path names. What can't be a record, or is not the caller's to see, does not
/// exist.
fn record_key(caller: &Caller, path: RecordPath) -> Result<RecordKey, Problem> {
    let Path((tenant, pool, key)) = path.map_err(|_| no_record())?;
    let key = parse_key(&tenant, &pool, &key).ok_or_else(no_record)?;
    if caller.sees(&key.tenant) {
        Ok(key)
    } else {
        Err(no_record())
    }
}

/// The path of a record, each part one percent-encoded segment.
pub(super) fn path_of(key: &RecordKey) -> String {
    let parts = [key.tenant.as_str(), key.pool.as_str(), key.key.as_str()];
    format!("/v1/records/{}", parts.map(path_segment).join("/"))
}

fn parse_key(tenant: &str, pool: &str, key: &str) -> Option<RecordKey> {
    Some(RecordKey {
        tenant: TenantScope::parse(tenant).ok()?,
        pool: PoolId::new(pool).ok()?,
        key: IdempotencyKey::from_text(key).ok()??,
    })
}

pub(super) fn no_record() -> Problem {
    Problem::new(
        Kind::NotFound,
        "There is no such record, or this token may not see it. Percent-encode each part of the \
         path, also a `/` in a key.",
    )
}
