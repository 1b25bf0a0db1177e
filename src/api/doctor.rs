//! What `oncegate doctor` asks of a running gateway: how the store is, seen from here.

use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::Method;
use axum::routing::get;
use serde::Serialize;
use time::OffsetDateTime;

use super::{AdminState, READERS, Route};
use crate::config::{OutboxConfig, Route as GuardedRoute};
use crate::outbox::wall_clock;
use crate::store::doctor::{Finding, examine};

/// The store's health.
pub const ROUTES: [Route; 1] = [Route {
    method: Method::GET,
    path: "/v1/doctor",
    roles: READERS,
    handler: || get(doctor),
}];

/// What was looked at.
#[derive(Debug, Serialize)]
pub struct Findings {
    findings: Vec<FindingOut>,
}

#[derive(Debug, Serialize)]
struct FindingOut {
    check: &'static str,
    health: &'static str,
    says: String,
}

impl Findings {
    /// In this order.
    #[must_use]
    pub fn new(findings: Vec<Finding>) -> Self {
        let told = findings.into_iter().map(|finding| FindingOut {
            check: finding.check,
            health: finding.health.word(),
            says: finding.says,
        });
        Self {
            findings: told.collect(),
        }
    }
}

/// `GET /v1/doctor`: always 200; what can't be asked is a finding.
pub(super) async fn doctor(State(state): State<AdminState>) -> Json<Findings> {
    let findings = examine(&*state.store, wall, state.lease_min).await;
    Json(Findings::new(findings))
}

/// This machine's clock.
#[must_use]
pub fn wall() -> OffsetDateTime {
    wall_clock::now().into()
}

/// The shortest lease of any owner or claim: what clocks are held against.
#[must_use]
pub fn lease_min(routes: &[GuardedRoute], outbox: &OutboxConfig) -> Duration {
    let leases = routes.iter().map(|route| route.policy.lease);
    leases
        .min()
        .map_or(outbox.claim_lease, |least| least.min(outbox.claim_lease))
}
