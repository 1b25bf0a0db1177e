//! From flags, environment and file to a [`Config`], or to everything that is wrong with them.

use std::net::SocketAddr;
use std::path::Path;

use sha2::{Digest, Sha256};
use toml::de::DeTable;

use super::contradictions::{
    self, Compared, LimitsCompared, StoreCompared, effects as effect_contradictions,
};
use super::effects::Places;
use super::input::{Context, Environment, Overrides, Source, VARIABLES};
use super::parse::{self, DURATION_MAX, DURATION_MIN};
use super::report::{Origin, Rejected, Report};
use super::routing::{self, Known, RouteRead};
use super::section::Section;
use super::store_url;
use super::value::{Read, nearest};
use super::{Config, Limits, LogConfig, ServerTls, StoreConfig, TenantConfig, TokenConfig};
use super::{destinations, outbox, pools, workflows};

/// The least length of an admin token, in bytes, below which it is called short.
const TOKEN_BYTES_MIN: usize = 16;
/// More of anything than a machine can hold.
const COUNT_MAX: u64 = 10_000_000;
/// More memory than a machine gives to this.
const BYTES_MAX: u64 = 1 << 40;
/// HTTP/1 needs this much to read a head at all.
const HEADER_BYTES_MIN: u64 = 8 << 10;
/// The most header bytes of one request.
const HEADER_BYTES_MAX: u64 = 16 << 20;

/// A configuration, and what there is to tell about it.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// What the gateway runs with.
    pub config: Config,
    /// Warnings and the origin of each value; no errors.
    pub report: Report,
}

/// The part of a configuration that is about the store, and where to ask a gateway about it.
#[derive(Clone, Debug)]
pub struct LoadedStore {
    /// The store.
    pub store: StoreConfig,
    /// The admin listener, if what is written of it is sound.
    pub admin: Option<SocketAddr>,
    /// Warnings and the origin of each value; no errors.
    pub report: Report,
}

/// Reads the whole configuration.
///
/// # Errors
/// When anything in it is wrong; tells everything that is.
pub fn load(overrides: &Overrides, environment: &Environment) -> Result<Loaded, Rejected> {
    let mut report = Report::default();
    warn_of_variables(environment, &mut report);
    let config = with_file(overrides, environment, &mut report, |mut top, report| {
        let config = read_all(&mut top, overrides, report);
        report.merge(top.finish());
        config
    });
    match config.filter(|_| report.errors.is_empty()) {
        Some(config) => Ok(Loaded { config, report }),
        None => Err(Rejected(report)),
    }
}

/// Reads what is about the store, and leaves everything else unread.
///
/// # Errors
/// When anything in that part is wrong.
pub fn load_store(
    overrides: &Overrides,
    environment: &Environment,
) -> Result<LoadedStore, Rejected> {
    let mut report = Report::default();
    let store = with_file(overrides, environment, &mut report, |mut top, report| {
        let admin = read_admin(&mut top, overrides);
        let admin = (top.report.errors.is_empty()).then_some(admin.value);
        let store = read_store(top.table("store"), overrides, report).0;
        Some((store, admin))
    });
    match store.filter(|_| report.errors.is_empty()) {
        Some((store, admin)) => Ok(LoadedStore {
            store,
            admin,
            report,
        }),
        None => Err(Rejected(report)),
    }
}

/// Opens and parses the file, if there is one, and hands it over. Sorts what was found.
fn with_file<T>(
    overrides: &Overrides,
    environment: &Environment,
    report: &mut Report,
    read: impl FnOnce(Section<'_>, &mut Report) -> Option<T>,
) -> Option<T> {
    let source = match &overrides.config {
        None => None,
        Some(given) => match Source::read(Path::new(&given.text)) {
            Ok(source) => Some(source),
            Err(problem) => {
                let path = given.text.to_string_lossy();
                report.error(&given.origin, format!("the file `{path}` {problem}"));
                return None;
            }
        },
    };
    let (table, syntax) = source.as_ref().map_or_else(
        || (DeTable::new(), Vec::new()),
        |source| {
            let (table, errors) = DeTable::parse_recoverable(&source.text);
            (table.into_inner(), errors)
        },
    );
    let context = Context {
        source: source.as_ref(),
        environment,
        complete: syntax.is_empty(),
    };
    let value = read(Section::top(context, Some(&table)), report);
    if let Some(source) = &source {
        note_syntax(source, &syntax, report);
    }
    report.sort();
    value
}

/// Notes errors of syntax, and drops whatever else was found on their lines: it follows from them.
fn note_syntax(source: &Source, syntax: &[toml::de::Error], report: &mut Report) {
    for error in syntax {
        let origin = source.at(error.span().map_or(0, |span| span.start));
        report
            .errors
            .retain(|other| !same_line(&other.origin, &origin));
        report.error(&origin, format!("not TOML: {}", error.message()));
    }
}

fn same_line(one: &Origin, other: &Origin) -> bool {
    matches!((one, other), (Origin::File { line, .. }, Origin::File { line: other, .. }) if line == other)
}

fn read_admin(top: &mut Section<'_>, overrides: &Overrides) -> Read<SocketAddr> {
    let given = overrides.admin.as_ref();
    top.text_or_given("admin", given, "127.0.0.1:9090", parse::address)
}

fn read_all(top: &mut Section<'_>, overrides: &Overrides, report: &mut Report) -> Option<Config> {
    let listen = top.text_or_given(
        "listen",
        overrides.listen.as_ref(),
        "127.0.0.1:8080",
        parse::address,
    );
    let admin = read_admin(top, overrides);
    let trust_forwarded = top.switch("trust_forwarded", "false").value;
    report.merge(std::mem::take(&mut top.report));
    let tls = top.has("tls").then(|| read_tls(top.table("tls"), report));
    let (store, store_compared) = read_store(top.table("store"), overrides, report);
    let tenant = read_tenant(top.table("tenant"), overrides, report);
    let upstream = overrides.upstream.as_ref();
    let pools = pools::read(top, upstream, report);
    let destinations = destinations::read(top, report);
    let places = Places {
        destinations: &destinations,
        pools: &pools,
    };
    let workflows = workflows::read(top, places, report);
    let known = Known {
        places,
        workflows: &workflows,
    };
    let routes = routing::read(top, upstream, known, report);
    let (outbox, outbox_compared) = outbox::read_outbox(top.table("outbox"), report);
    let (keep, keep_compared) = outbox::read_keep(top.table("keep"), report);
    let (limits, limits_compared) = read_limits(top.table("limits"), report);
    let tokens = read_tokens(top.tables("token"), report);
    let log = read_log(top.table("log"), overrides, report);
    let (listen_at, admin_at) = (listen.value, admin.value);
    let compared = Compared {
        listen,
        admin,
        store: store_compared,
        limits: limits_compared,
        outbox: outbox_compared,
        keep: keep_compared,
    };
    contradictions::find(&compared, &routes, report);
    effect_contradictions::find(&compared, &routes, &destinations, &workflows, report);
    effect_contradictions::find_unused(&routes, &destinations, &workflows, &tokens, report);
    let known = destinations.known.into_iter();
    Some(Config {
        listen: listen_at,
        admin: admin_at,
        trust_forwarded,
        tls: tls.flatten(),
        store,
        tenant: tenant?,
        destinations: known.map(|read| read.config).collect(),
        workflows: workflows.sound().cloned().collect(),
        pools: pools.into_iter().filter_map(|(_, pool)| pool).collect(),
        routes: routes
            .into_iter()
            .filter_map(RouteRead::into_route)
            .collect(),
        outbox,
        keep,
        limits,
        tokens,
        log,
    })
}

fn read_tls(mut section: Section<'_>, report: &mut Report) -> Option<ServerTls> {
    let form = "the path of a PEM file";
    let certificate = section.text_required("certificate", None, form, parse::readable_file);
    let key = section.text_required("key", None, form, parse::readable_file);
    report.merge(section.finish());
    Some(ServerTls {
        certificate: certificate?.value,
        key: key?.value,
    })
}

fn read_store(
    mut section: Section<'_>,
    overrides: &Overrides,
    report: &mut Report,
) -> (StoreConfig, StoreCompared) {
    let given = overrides.store.as_ref();
    let url = section.text_or_given("url", given, "sqlite:oncegate.db", store_url::parse);
    warn_of_password(&url, report);
    let mut migrate = section.switch("migrate", "true").value;
    if overrides.no_migrate {
        migrate = false;
        section.note("migrate", "false", &Origin::Flag("--no-migrate"));
    }
    let times = DURATION_MIN..=DURATION_MAX;
    let poll_interval = section.duration("poll_interval", "250ms", times.clone());
    let operation_timeout = section.duration("operation_timeout", "3s", times.clone());
    let store = StoreConfig {
        url: url.value,
        migrate,
        connections_max: section.count("connections_max", "16", 1..=10_000).value,
        acquire_timeout: section
            .duration("acquire_timeout", "1s", times.clone())
            .value,
        operation_timeout: operation_timeout.value,
        poll_interval: poll_interval.value,
        notify: section.switch("notify", "true").value,
        sweep_interval: section
            .duration("sweep_interval", "1s", times.clone())
            .value,
        purge_interval: section.duration("purge_interval", "1m", times).value,
    };
    report.merge(section.finish());
    let compared = StoreCompared {
        poll_interval,
        operation_timeout,
    };
    (store, compared)
}

/// A password that others can read. A variable is as private as the process.
fn warn_of_password(url: &Read<String>, report: &mut Report) {
    let plain = url.written.contains(store_url::HIDDEN) && !url.has_reference;
    match &url.origin {
        Origin::Flag(name) if plain => report.warn(
            &url.origin,
            format!("{name} holds a password, which every user of this machine can read in the list of processes; use ONCEGATE_STORE, or a reference such as ${{env:NAME}}"),
        ),
        Origin::File { .. } if plain => report.warn(
            &url.origin,
            format!("{} holds a password in plain text; write a reference, such as ${{env:NAME}} or ${{file:PATH}}", url.name),
        ),
        _ => {}
    }
}

fn read_tenant(
    mut section: Section<'_>,
    overrides: &Overrides,
    report: &mut Report,
) -> Option<TenantConfig> {
    let source = section.text_required(
        "source",
        overrides.tenant.as_ref(),
        "[tenant] source = \"header:NAME\", \"credential\" or, when all clients are one, \"fixed:NAME\", or give --tenant; there is no default, since clients that share a tenant share answers",
        parse::tenant_source,
    );
    let principal = section.text_if_any("principal", None, parse::principal);
    report.merge(section.finish());
    Some(TenantConfig {
        source: source?.value,
        principal: principal.map(|principal| principal.value),
    })
}

fn read_limits(mut section: Section<'_>, report: &mut Report) -> (Limits, LimitsCompared) {
    let times = DURATION_MIN..=DURATION_MAX;
    let compared = LimitsCompared {
        waiters_per_key_max: section.count("waiters_per_key_max", "1000", 1..=COUNT_MAX),
        waiters_max: section.count("waiters_max", "10000", 1..=COUNT_MAX),
        body_bytes_total_max: section.size("body_bytes_total_max", "256MiB", 1..=BYTES_MAX),
        record_retry_bytes_max: section.size("record_retry_bytes_max", "64MiB", 1..=BYTES_MAX),
        record_retry: section.duration("record_retry", "10m", times.clone()),
        cache_bytes_max: section.size("cache_bytes_max", "64MiB", 1..=BYTES_MAX),
        cache_trust: section.duration("cache_trust", "30s", times.clone()),
    };
    let limits = Limits {
        connections_max: section
            .count("connections_max", "10000", 1..=COUNT_MAX)
            .value,
        header_bytes_max: section
            .size(
                "header_bytes_max",
                "64KiB",
                HEADER_BYTES_MIN..=HEADER_BYTES_MAX,
            )
            .value,
        header_timeout: section
            .duration("header_timeout", "10s", times.clone())
            .value,
        body_timeout: section.duration("body_timeout", "30s", times.clone()).value,
        waiters_per_key_max: compared.waiters_per_key_max.value,
        waiters_max: compared.waiters_max.value,
        body_bytes_total_max: compared.body_bytes_total_max.value,
        record_retry_bytes_max: compared.record_retry_bytes_max.value,
        record_retry: compared.record_retry.value,
        cache_bytes_max: compared.cache_bytes_max.value,
        cache_trust: compared.cache_trust.value,
        grace: section.duration("grace", "25s", times).value,
    };
    report.merge(section.finish());
    (limits, compared)
}

fn read_tokens(sections: Vec<Section<'_>>, report: &mut Report) -> Vec<TokenConfig> {
    let mut tokens: Vec<TokenConfig> = Vec::new();
    for section in sections {
        let origin = section.origin.clone();
        let Some(token) = read_token(section, report) else {
            continue;
        };
        if tokens.iter().any(|other| other.name == token.name) {
            let name = &token.name;
            report.error(
                &origin,
                format!("there is already a token \"{name}\"; give each its own name, the audit log tells them apart by it"),
            );
        }
        if let Some(other) = tokens.iter().find(|other| other.sha256 == token.sha256) {
            let (name, other) = (&token.name, &other.name);
            report.error(
                &origin,
                format!("token \"{name}\" has the same secret as token \"{other}\"; give each its own, nobody could tell who acts and with which role"),
            );
        }
        tokens.push(token);
    }
    tokens
}

fn read_token(mut section: Section<'_>, report: &mut Report) -> Option<TokenConfig> {
    let name = section.text_required("name", None, "who holds it", parse::token_name);
    let role = section.text_required(
        "role",
        None,
        "\"reader\", \"operator\", \"service\" or \"worker\"",
        parse::role,
    );
    let tenant = section.text_if_any("tenant", None, parse::tenant);
    let both = section.has("sha256") && section.has("secret");
    let neither = !section.has("sha256") && !section.has("secret");
    let hashed = section.text_hidden("sha256", parse::sha256);
    let secret = section.secret("secret");
    let origin = section.origin.clone();
    if both {
        let message = "a token has either sha256 or secret; leave one out";
        section.report.error(&origin, message);
    } else if neither {
        section.missing(
            "secret",
            "a reference such as \"${env:NAME}\", or sha256 with the hash of the token",
        );
    }
    if let Some(secret) = secret
        .as_ref()
        .filter(|secret| secret.value.len() < TOKEN_BYTES_MIN)
    {
        section.report.warn(
            &secret.origin,
            format!(
                "{} is short; make one with `openssl rand -hex 32`",
                secret.name
            ),
        );
    }
    report.merge(section.finish());
    let sha256 = match (hashed, secret) {
        (Some(hashed), _) => hashed.value,
        (None, Some(secret)) => Sha256::digest(secret.value.as_bytes()).into(),
        (None, None) => return None,
    };
    Some(TokenConfig {
        name: name?.value,
        role: role?.value,
        sha256,
        tenant: tenant.map(|tenant| tenant.value),
    })
}

fn read_log(mut section: Section<'_>, overrides: &Overrides, report: &mut Report) -> LogConfig {
    let (format, filter) = (overrides.log_format.as_ref(), overrides.log.as_ref());
    let log = LogConfig {
        format: section
            .text_or_given("format", format, "text", parse::log_format)
            .value,
        filter: section
            .text_or_given("filter", filter, "info", parse::log_filter)
            .value,
    };
    report.merge(section.finish());
    log
}

/// Variables that look like a mistyped one of ours. Others may be anyone's: orchestrators make
/// `ONCEGATE_SERVICE_HOST` and the like for a service of this name.
fn warn_of_variables(environment: &Environment, report: &mut Report) {
    for name in environment.own_names() {
        let short = name.trim_start_matches("ONCEGATE_");
        let known = VARIABLES.map(|known| known.trim_start_matches("ONCEGATE_"));
        let near = nearest(short, known.into_iter()).filter(|near| *near != short);
        if let Some(near) = near {
            report.warn(
                &Origin::Variable(name.into()),
                format!("is not read; did you mean ONCEGATE_{near}?"),
            );
        }
    }
}
