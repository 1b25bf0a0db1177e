//! `[[route]]`, and what `--upstream` makes of it.
//!
//! `--upstream` gives the targets of the pool `default`, which it makes when the file has none.
//! When the file has no route, it also makes one that guards every path.

use std::sync::Arc;
use std::time::Duration;

use http::Method;

use super::destinations::Retries;
use super::effects::{Places, unknown};
use super::input::Given;
use super::parse::{self, DURATION_MAX, DURATION_MIN};
use super::pools::{DEFAULT_POOL, Pools};
use super::report::{Origin, Report};
use super::section::Section;
use super::value::Read;
use super::workflows::{self, FollowUpRead, Workflows};
use super::{PathPattern, PoolConfig, Route};
use crate::domain::fingerprint::FingerprintRules;
use crate::domain::policy::{
    Duplicates, ForwardKey, KeySource, Mode, OnStoreDown, OnUnknown, Policy,
};
use crate::domain::scope::PoolId;
use crate::domain::workflow::Retry;

/// The shortest lease: heartbeats come at a third of it, and each is a round trip to the store.
pub const LEASE_MIN: Duration = Duration::from_millis(500);
/// The longest lease: so long is a key blocked when its owner dies.
pub const LEASE_MAX: Duration = Duration::from_hours(1);
/// The longest time that a duplicate is parked.
pub const WAIT_MAX: Duration = Duration::from_mins(10);
/// The longest upstream call, and the longest time that its owner listens on.
pub const TIMEOUT_MAX: Duration = Duration::from_hours(24);
/// The longest body of a request or of a kept answer, in bytes.
pub const BODY_BYTES_MAX: u64 = 1 << 30;

/// Answers that are not kept unless the route says otherwise.
const RELEASED: [&str; 6] = ["401", "403", "407", "408", "425", "429"];

/// A route whose values can still be compared with others.
pub(super) struct RouteRead {
    pub(super) origin: Origin,
    pub(super) mode: Read<Mode>,
    pub(super) host: Option<Read<String>>,
    pub(super) path: Option<Read<PathPattern>>,
    pub(super) pool: Option<Read<PoolId>>,
    pub(super) forward_key: Read<ForwardKey>,
    pub(super) lease: Read<Duration>,
    pub(super) timeout: Read<Duration>,
    pub(super) linger: Read<Duration>,
    pub(super) valid_for: Read<Duration>,
    pub(super) on_unknown: Read<OnUnknown>,
    pub(super) on_store_down: Read<OnStoreDown>,
    pub(super) required: Read<bool>,
    pub(super) methods: Read<Vec<Method>>,
    pub(super) follow_up: FollowUpRead,
    /// Of the calls of accepted requests.
    pub(super) retry: Option<Retries>,
    pub(super) body_max: Read<usize>,
    pub(super) store_body_max: Read<usize>,
    key_source: KeySource,
    duplicates: Duplicates,
    wait: Duration,
    tombstone: Duration,
    store_5xx: bool,
    release: Vec<u16>,
    store_set_cookie: bool,
    fingerprint: FingerprintRules,
}

/// What a route may refer to.
#[derive(Clone, Copy)]
pub(super) struct Known<'k> {
    pub(super) places: Places<'k>,
    pub(super) workflows: &'k Workflows,
}

/// Reads every route of the file and applies `--upstream`.
pub(super) fn read(
    top: &mut Section<'_>,
    upstream: Option<&Given>,
    known: Known<'_>,
    report: &mut Report,
) -> Vec<RouteRead> {
    let mut sections = top.tables("route");
    let implied = upstream.filter(|_| !top.has("route"));
    if let Some(given) = implied {
        sections.push(top.implied("route[0]".to_owned(), given.origin.clone()));
    } else if !top.has("route") {
        top.missing(
            "route",
            "a [[route]] with path and pool, or give --upstream URL",
        );
    }
    let routes: Vec<RouteRead> = sections
        .into_iter()
        .map(|section| read_route(section, implied, known, report))
        .collect();
    check_routes_to(&routes, upstream, known, report);
    routes
}

impl RouteRead {
    /// The route, if nothing is missing.
    pub(super) fn into_route(self) -> Option<Route> {
        let policy = Policy {
            pool: self.pool?.value,
            mode: self.mode.value,
            follow_up: self.follow_up.workflow,
            key_source: self.key_source,
            required: self.required.value,
            duplicates: self.duplicates,
            forward_key: self.forward_key.value,
            wait: self.wait,
            lease: self.lease.value,
            timeout: self.timeout.value,
            linger: self.linger.value,
            valid_for: self.valid_for.value,
            tombstone_for: self.tombstone,
            on_unknown: self.on_unknown.value,
            store_5xx: self.store_5xx,
            release_statuses: self.release,
            store_set_cookie: self.store_set_cookie,
            on_store_down: self.on_store_down.value,
            body_bytes_max: self.body_max.value,
            store_body_bytes_max: self.store_body_max.value,
            fingerprint: self.fingerprint,
            retry: self.retry.map_or(Retry::DEFAULT, |retry| retry.value()),
        };
        Some(Route {
            host: self.host.map(|host| host.value),
            path: self.path?.value,
            methods: self.methods.value,
            policy: Arc::new(policy),
        })
    }

    /// Whether no request can reach `later` past this route.
    pub(super) fn hides(&self, later: &Self) -> bool {
        let (Some(path), Some(later_path)) = (&self.path, &later.path) else {
            return false;
        };
        let host = self.host.as_ref().map(|host| &host.value);
        let hosts = host.is_none() || host == later.host.as_ref().map(|host| &host.value);
        let paths = match (&path.value, &later_path.value) {
            (PathPattern::Exact(path), PathPattern::Exact(later)) => path == later,
            (PathPattern::Exact(_), PathPattern::Prefix(_)) => false,
            (
                PathPattern::Prefix(prefix),
                PathPattern::Exact(later) | PathPattern::Prefix(later),
            ) => later.starts_with(prefix),
        };
        hosts && paths
    }
}

fn read_route(
    mut section: Section<'_>,
    upstream: Option<&Given>,
    known: Known<'_>,
    report: &mut Report,
) -> RouteRead {
    let implied = |text: &str| {
        upstream.map(|given| Given {
            text: text.into(),
            origin: given.origin.clone(),
        })
    };
    let host = section.text_if_any("host", None, parse::host);
    let path = section.text_required(
        "path",
        implied("/*").as_ref(),
        "a path such as \"/v1/*\"",
        parse::path_pattern,
    );
    let pool = section.text_required(
        "pool",
        implied(DEFAULT_POOL).as_ref(),
        "the id of a [[pool]]",
        parse::pool_id,
    );
    check_pool_of(&mut section, pool.as_ref(), known);
    let mode = section.text("mode", "proxy", parse::mode);
    // An accepted request is sent until it is answered: under a key that only it has.
    let (forward_key, on_unknown) = match mode.value {
        Mode::Proxy => ("verbatim", "hold"),
        Mode::Accept => ("derived", "redrive"),
    };
    let retry = read_retry(&mut section, &mode);
    let any = DURATION_MIN..=DURATION_MAX;
    let route = RouteRead {
        origin: section.origin.clone(),
        mode,
        retry,
        host,
        path,
        pool,
        methods: section.texts("methods", &["POST", "PATCH"], parse::method),
        key_source: section
            .text("key", "header:idempotency-key", parse::key_source)
            .value,
        required: section.switch("required", "false"),
        duplicates: section.text("duplicates", "wait", parse::duplicates).value,
        forward_key: section.text("forward_key", forward_key, parse::forward_key),
        wait: section
            .duration("wait", "25s", Duration::ZERO..=WAIT_MAX)
            .value,
        lease: section.duration("lease", "5s", LEASE_MIN..=LEASE_MAX),
        timeout: section.duration("timeout", "60s", DURATION_MIN..=TIMEOUT_MAX),
        linger: section.duration("linger", "0s", Duration::ZERO..=TIMEOUT_MAX),
        valid_for: section.duration("valid_for", "24h", any),
        tombstone: section
            .duration("tombstone", "0s", Duration::ZERO..=DURATION_MAX)
            .value,
        on_unknown: section.text("on_unknown", on_unknown, parse::on_unknown),
        store_5xx: section.switch("store_5xx", "true").value,
        release: section
            .counts("release", &RELEASED, parse::release_status)
            .value,
        store_set_cookie: section.switch("store_set_cookie", "false").value,
        on_store_down: section.text("on_store_down", "refuse", parse::on_store_down),
        body_max: section.size("body_max", "10MiB", 1..=BODY_BYTES_MAX),
        store_body_max: section.size("store_body_max", "1MiB", 1..=BODY_BYTES_MAX),
        fingerprint: {
            let fingerprint = section.table("fingerprint");
            read_fingerprint(fingerprint, &mut section.report)
        },
        follow_up: workflows::read_follow_up(&mut section, known.places, known.workflows),
    };
    report.merge(section.finish());
    route
}

/// How the calls of accepted requests are tried again; in mode `proxy` the service is called once.
fn read_retry(section: &mut Section<'_>, mode: &Read<Mode>) -> Option<Retries> {
    let is_written = section.has("retry");
    if mode.value == Mode::Accept {
        return Some(Retries::read(section, None));
    }
    if is_written {
        let table = section.table("retry");
        let advice = "the client waits and the service is called once; write mode = \"accept\" or leave retry out";
        section
            .report
            .error(&table.origin, format!("{mode} has no retry: {advice}"));
    }
    None
}

fn read_fingerprint(mut section: Section<'_>, report: &mut Report) -> FingerprintRules {
    let rules = FingerprintRules {
        ignore_query: section
            .texts("ignore_query", &[], |name| Ok(name.to_owned()))
            .value,
        canonical_json: section.switch("canonical_json", "false").value,
        ignore_json: section.texts("ignore_json", &[], parse::json_pointer).value,
        multipart: section.switch("multipart", "false").value,
    };
    report.merge(section.finish());
    rules
}

/// A route's pool must exist.
fn check_pool_of(section: &mut Section<'_>, pool: Option<&Read<PoolId>>, known: Known<'_>) {
    let Some(pool) = pool else { return };
    let pools = known.places.pools;
    let ids = || {
        let sound = pools.iter().filter_map(|(_, pool)| pool.as_ref());
        sound.map(|pool| pool.id.as_str())
    };
    let is_complete = pools.iter().all(|(_, pool)| pool.is_some());
    if is_complete && !ids().any(|id| id == pool.value.as_str()) {
        unknown(section, pool, "pool", pool.value.as_str(), ids());
    }
}

/// A pool that nothing is sent to is doubtful, and a mistake when `--upstream` is about it.
fn check_routes_to(
    routes: &[RouteRead],
    upstream: Option<&Given>,
    known: Known<'_>,
    report: &mut Report,
) {
    let pools: &Pools = known.places.pools;
    if routes.iter().any(|route| route.pool.is_none()) {
        return;
    }
    let is_used = |id: &PoolId| {
        let followed = routes
            .iter()
            .filter_map(|route| route.follow_up.workflow.as_ref());
        let mut effects = followed.chain(known.workflows.sound());
        let mut pools = routes.iter().filter_map(|route| route.pool.as_ref());
        pools.any(|pool| pool.value == *id)
            || effects.any(|workflow| {
                let mut sends = workflows::sends(workflow);
                sends.any(|send| workflows::pool_of(send) == Some(id.as_str()))
            })
    };
    for (origin, pool) in pools {
        let Some(PoolConfig { id, .. }) = pool.as_ref().filter(|pool| !is_used(&pool.id)) else {
            continue;
        };
        match upstream.filter(|_| id.as_str() == DEFAULT_POOL) {
            Some(given) => report.error(
                &given.origin,
                format!("gives the targets of the pool \"{id}\", and no route of the file sends there; write pool = \"{id}\" in a [[route]], or leave this out"),
            ),
            None => report.warn(origin, format!("no route sends to the pool \"{id}\"")),
        }
    }
}
