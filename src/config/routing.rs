//! `[[pool]]` and `[[route]]`, and what `--upstream` makes of them.
//!
//! `--upstream` gives the targets of the pool `default`, which it makes when the file has none.
//! When the file has no route, it also makes one that guards every path.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use http::{Method, Uri};

use super::input::Given;
use super::parse::{self, DURATION_MAX, DURATION_MIN};
use super::report::{Origin, Report};
use super::section::Section;
use super::value::{Read, nearest};
use super::{PathPattern, PoolConfig, Route};
use crate::domain::fingerprint::FingerprintRules;
use crate::domain::policy::{
    Duplicates, ForwardKey, KeySource, Mode, OnStoreDown, OnUnknown, Policy,
};
use crate::domain::scope::PoolId;

/// The pool that `--upstream` gives the targets of.
const DEFAULT_POOL: &str = "default";

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

/// All pools and routes.
pub(super) struct Routing {
    pub(super) pools: Vec<PoolConfig>,
    pub(super) routes: Vec<RouteRead>,
}

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
    pub(super) body_max: Read<usize>,
    pub(super) store_body_max: Read<usize>,
    methods: Vec<Method>,
    key_source: KeySource,
    required: bool,
    duplicates: Duplicates,
    wait: Duration,
    tombstone: Duration,
    store_5xx: bool,
    release: Vec<u16>,
    store_set_cookie: bool,
    on_store_down: OnStoreDown,
    fingerprint: FingerprintRules,
}

/// Reads every pool and route of the file and applies `--upstream`.
pub(super) fn read(
    top: &mut Section<'_>,
    upstream: Option<&Given>,
    report: &mut Report,
) -> Routing {
    let pools = read_pools(top, upstream, report);
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
        .map(|section| read_route(section, implied, report))
        .collect();
    check_pools_of(&routes, &pools, report);
    check_routes_to(&pools, &routes, upstream, report);
    Routing {
        pools: pools.into_iter().filter_map(|(_, pool)| pool).collect(),
        routes,
    }
}

impl RouteRead {
    /// The route, if nothing is missing.
    pub(super) fn into_route(self) -> Option<Route> {
        let policy = Policy {
            pool: self.pool?.value,
            mode: self.mode.value,
            follow_up: None,
            key_source: self.key_source,
            required: self.required,
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
            on_store_down: self.on_store_down,
            body_bytes_max: self.body_max.value,
            store_body_bytes_max: self.store_body_max.value,
            fingerprint: self.fingerprint,
        };
        Some(Route {
            host: self.host.map(|host| host.value),
            path: self.path?.value,
            methods: self.methods,
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

fn read_pools(
    top: &mut Section<'_>,
    upstream: Option<&Given>,
    report: &mut Report,
) -> Vec<(Origin, Option<PoolConfig>)> {
    let mut sections = top.tables("pool");
    let has_default = sections
        .iter_mut()
        .any(|section| section.says("id", DEFAULT_POOL));
    let implied = upstream.filter(|_| !has_default).map(|given| Given {
        text: DEFAULT_POOL.into(),
        origin: given.origin.clone(),
    });
    if let Some(given) = &implied {
        let name = format!("pool[{}]", sections.len());
        sections.push(top.implied(name, given.origin.clone()));
    }
    let last = sections.len().saturating_sub(1);
    let mut pools: Vec<(Origin, Option<PoolConfig>)> = Vec::new();
    for (index, section) in sections.into_iter().enumerate() {
        let origin = section.origin.clone();
        let id = implied.as_ref().filter(|_| index == last);
        let pool = read_pool(section, id, upstream, report);
        let twin = pools.iter().find(|(_, earlier)| {
            earlier.as_ref().map(|pool| &pool.id) == pool.as_ref().map(|pool| &pool.id)
        });
        if let (Some((earlier, _)), Some(pool)) = (twin, &pool) {
            let id = &pool.id;
            report.error(
                &origin,
                format!("pool `{id}` is already at {earlier}; give each pool its own id"),
            );
        }
        pools.push((origin, pool));
    }
    pools
}

fn read_pool(
    mut section: Section<'_>,
    id: Option<&Given>,
    upstream: Option<&Given>,
    report: &mut Report,
) -> Option<PoolConfig> {
    let id = section.text_required("id", id, "an id such as \"payments\"", parse::pool_id);
    let is_default = id
        .as_ref()
        .is_some_and(|id| id.value.as_str() == DEFAULT_POOL);
    let targets = read_targets(&mut section, upstream.filter(|_| is_default));
    let duration = |section: &mut Section<'_>, key, default| {
        section
            .duration(key, default, DURATION_MIN..=DURATION_MAX)
            .value
    };
    let connect_timeout = duration(&mut section, "connect_timeout", "3s");
    let connections_max = section.count("connections_max", "256", 1..=1_000_000).value;
    let queue_timeout = duration(&mut section, "queue_timeout", "5s");
    let idle_timeout = duration(&mut section, "idle_timeout", "4s");
    let connection_age_max = duration(&mut section, "connection_age_max", "5m");
    let http2 = section.switch("http2", "false").value;
    let ca = section.text_if_any("ca", None, parse::readable_file);
    let preserve_host = section.switch("preserve_host", "true").value;
    report.merge(section.finish());
    Some(PoolConfig {
        id: id?.value,
        targets,
        connect_timeout,
        connections_max,
        queue_timeout,
        idle_timeout,
        connection_age_max,
        http2,
        ca: ca.map(|ca: Read<PathBuf>| ca.value),
        preserve_host,
    })
}

fn read_targets(section: &mut Section<'_>, upstream: Option<&Given>) -> Vec<Uri> {
    let form = "targets such as [\"http://127.0.0.1:9000\"]";
    if upstream.is_some() {
        let target = section.text_required("targets", upstream, form, parse::target);
        return target.into_iter().map(|target| target.value).collect();
    }
    let targets = section.texts("targets", &[], parse::target);
    if !targets.origin.is_written() && targets.sound {
        section.missing("targets", form);
    } else if targets.value.is_empty() && targets.sound {
        let name = section.full_name("targets");
        section
            .report
            .error(&targets.origin, format!("{name} is empty; write {form}"));
    }
    targets.value
}

fn read_route(
    mut section: Section<'_>,
    upstream: Option<&Given>,
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
    let mode = section.text("mode", "proxy", parse::mode);
    let any = DURATION_MIN..=DURATION_MAX;
    let route = RouteRead {
        origin: section.origin.clone(),
        mode,
        host,
        path,
        pool,
        methods: section
            .texts("methods", &["POST", "PATCH"], parse::method)
            .value,
        key_source: section
            .text("key", "header:idempotency-key", parse::key_source)
            .value,
        required: section.switch("required", "false").value,
        duplicates: section.text("duplicates", "wait", parse::duplicates).value,
        forward_key: section.text("forward_key", "verbatim", parse::forward_key),
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
        on_unknown: section.text("on_unknown", "hold", parse::on_unknown),
        store_5xx: section.switch("store_5xx", "true").value,
        release: section
            .counts("release", &RELEASED, parse::release_status)
            .value,
        store_set_cookie: section.switch("store_set_cookie", "false").value,
        on_store_down: section
            .text("on_store_down", "refuse", parse::on_store_down)
            .value,
        body_max: section.size("body_max", "10MiB", 1..=BODY_BYTES_MAX),
        store_body_max: section.size("store_body_max", "1MiB", 1..=BODY_BYTES_MAX),
        fingerprint: {
            let fingerprint = section.table("fingerprint");
            read_fingerprint(fingerprint, &mut section.report)
        },
    };
    report.merge(section.finish());
    route
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

/// Every route's pool must exist.
fn check_pools_of(
    routes: &[RouteRead],
    pools: &[(Origin, Option<PoolConfig>)],
    report: &mut Report,
) {
    if pools.iter().any(|(_, pool)| pool.is_none()) {
        return;
    }
    let ids = || {
        pools
            .iter()
            .filter_map(|(_, pool)| Some(pool.as_ref()?.id.as_str()))
    };
    for pool in routes.iter().filter_map(|route| route.pool.as_ref()) {
        if ids().any(|id| id == pool.value.as_str()) {
            continue;
        }
        let hint = nearest(pool.value.as_str(), ids()).map_or_else(
            || "add a [[pool]] with this id".to_owned(),
            |near| format!("did you mean \"{near}\"?"),
        );
        report.error(
            &pool.origin,
            format!("{pool}: there is no such pool; {hint}"),
        );
    }
}

/// A pool that no route sends to is doubtful, and a mistake when `--upstream` is about it.
fn check_routes_to(
    pools: &[(Origin, Option<PoolConfig>)],
    routes: &[RouteRead],
    upstream: Option<&Given>,
    report: &mut Report,
) {
    if routes.iter().any(|route| route.pool.is_none()) {
        return;
    }
    let is_used = |id: &PoolId| {
        let mut pools = routes.iter().filter_map(|route| route.pool.as_ref());
        pools.any(|pool| pool.value == *id)
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
