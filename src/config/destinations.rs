//! `[[destination]]`: where effects go, and what is said of a try at it.

use std::ops::RangeInclusive;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::{HeaderName, HeaderValue, Uri};

use super::parse::{self, DURATION_MIN};
use super::report::{Origin, Report};
use super::section::Section;
use super::value::{Read, Shown};
use super::{DestinationConfig, DestinationKind, SecretText};
use crate::address::{is_public, literal};
use crate::domain::intent::Destination;
use crate::domain::message::CREDENTIAL_HEADERS;
use crate::domain::millis;
use crate::domain::workflow::{
    FAULTS_MAX, GATEWAY_HEADERS, NAME_BYTES_MAX, Retry, TIMEOUT_MAX, is_name,
};

/// Tries in a second, from one in about a quarter of an hour.
const RATES: RangeInclusive<f64> = 0.001..=1_000_000.0;
/// Of a Standard Webhooks secret, decoded.
const SECRET_BYTES: RangeInclusive<usize> = 24..=64;

/// Lanes of what is no configured destination begin with these.
const CLASSES: [&str; 3] = ["pool", "url", "task"];

/// How long a try may take and when it is tried again, still to be compared.
#[derive(Clone)]
pub(super) struct Timing {
    pub(super) timeout: Read<Duration>,
    pub(super) retry: Retries,
}

/// When something is tried again, still to be compared.
#[derive(Clone)]
pub(super) struct Retries {
    pub(super) first: Read<Duration>,
    pub(super) max: Read<Duration>,
    pub(super) horizon: Read<Duration>,
    faults: Read<u32>,
}

/// A destination whose times can still be inherited and compared.
pub(super) struct DestinationRead {
    pub(super) origin: Origin,
    pub(super) config: DestinationConfig,
    pub(super) timing: Timing,
}

/// All destinations that were read.
pub(super) struct Destinations {
    pub(super) known: Vec<DestinationRead>,
    /// Whether these are all that were written.
    pub(super) complete: bool,
}

impl Timing {
    /// Reads `timeout` and `retry`; what is not written is inherited.
    pub(super) fn read(section: &mut Section<'_>, inherited: Option<&Self>) -> Self {
        let any = DURATION_MIN..=TIMEOUT_MAX;
        let from = inherited.map(|timing| &timing.timeout);
        let timeout = section.duration_or("timeout", from, "30s", any);
        let retry = Retries::read(section, inherited.map(|timing| &timing.retry));
        Self { timeout, retry }
    }

    pub(super) fn timeout_ms(&self) -> u64 {
        millis(self.timeout.value)
    }
}

impl Retries {
    /// Reads `retry`; what is not written is inherited.
    pub(super) fn read(section: &mut Section<'_>, inherited: Option<&Self>) -> Self {
        let mut table = section.table("retry");
        let pauses = || DURATION_MIN..=Retry::HORIZON_MAX;
        let from = |part: fn(&Self) -> &Read<Duration>| inherited.map(part);
        let retries = Self {
            first: table.duration_or("first", from(|retries| &retries.first), "10s", pauses()),
            max: table.duration_or("max", from(|retries| &retries.max), "1h", pauses()),
            horizon: table.duration_or(
                "horizon",
                from(|retries| &retries.horizon),
                "72h",
                pauses(),
            ),
            faults: table.count_or(
                "faults",
                inherited.map(|retries| &retries.faults),
                "5",
                1..=FAULTS_MAX.into(),
            ),
        };
        section.report.merge(table.finish());
        retries
    }

    pub(super) fn value(&self) -> Retry {
        Retry {
            first_ms: millis(self.first.value),
            max_ms: millis(self.max.value),
            horizon_ms: millis(self.horizon.value),
            faults_max: self.faults.value,
        }
    }
}

impl Destinations {
    pub(super) fn ids(&self) -> impl Iterator<Item = &str> {
        self.known.iter().map(|read| read.config.id.0.as_str())
    }

    pub(super) fn find(&self, id: &str) -> Option<&DestinationRead> {
        self.known.iter().find(|read| read.config.id.0 == id)
    }
}

/// Reads every destination.
pub(super) fn read(top: &mut Section<'_>, report: &mut Report) -> Destinations {
    let mut destinations = Destinations {
        known: Vec::new(),
        complete: true,
    };
    for section in top.tables("destination") {
        let Some(read) = read_one(section, report) else {
            destinations.complete = false;
            continue;
        };
        if let Some(earlier) = destinations.find(&read.config.id.0) {
            let (id, at) = (&read.config.id, &earlier.origin);
            report.error(
                &read.origin,
                format!(
                    "destination \"{}\" is already at {at}; give each destination its own id",
                    id.0
                ),
            );
        }
        destinations.known.push(read);
    }
    destinations
}

fn read_one(mut section: Section<'_>, report: &mut Report) -> Option<DestinationRead> {
    let id = section.text_required("id", None, "an id such as \"receipts\"", destination_id);
    let form =
        "where it is, such as \"https://receipts.example.com/hooks\" or \"nats://127.0.0.1:4222\"";
    let place = section.text_required("url", None, form, place);
    let kind = match &place {
        Some(Read {
            value: Place::Nats(servers),
            ..
        }) => Some(read_nats(&mut section, servers)),
        Some(url) => read_http(&mut section, url),
        // Which keys there are depends on what is there.
        None => {
            section.ask(&[
                "secrets",
                "headers",
                "allow_private",
                "ca",
                "token",
                "credentials",
            ]);
            None
        }
    };
    let concurrency_max = section.count("concurrency_max", "16", 1..=100_000).value;
    let rate_max = section.rate_if_any("rate_max", RATES);
    let timing = Timing::read(&mut section, None);
    let origin = section.origin.clone();
    report.merge(section.finish());
    let config = DestinationConfig {
        id: Destination(id?.value),
        kind: kind?,
        concurrency_max,
        rate_max: rate_max.map(|rate| rate.value),
        timeout: timing.timeout.value,
        retry: timing.retry.value(),
    };
    Some(DestinationRead {
        origin,
        config,
        timing,
    })
}

fn read_http(section: &mut Section<'_>, place: &Read<Place>) -> Option<DestinationKind> {
    let secrets = section.secrets("secrets", webhook_secret);
    let is_signed = section.has("secrets");
    let headers = read_headers(section);
    let allow_private = section.switch("allow_private", "false");
    let ca = section.text_if_any("ca", None, parse::readable_file);
    let Place::Http(url) = &place.value else {
        return None;
    };
    let (origin, host) = (&place.origin, url.host().unwrap_or_default());
    let is_private = is_private(host);
    if is_private && !allow_private.value && allow_private.sound {
        section.report.error(
            origin,
            format!("{place} is in a private network, and {allow_private} refuses these; write allow_private = true if it is meant"),
        );
    }
    if !looks_private(host) && url.scheme_str() == Some("http") {
        section.report.warn(
            origin,
            format!("{place} goes over a network in clear text; write https"),
        );
    }
    let has_credential = headers
        .iter()
        .any(|(name, _)| CREDENTIAL_HEADERS.contains(&name.as_str()));
    if !is_signed && !has_credential {
        let name = section.full_name("secrets");
        let origin = section.origin.clone();
        section.report.warn(
            &origin,
            format!("{name} is missing: the receiver can't tell these effects from forged ones; write secrets = [\"${{env:NAME}}\"], or secrets = [] if that is meant"),
        );
    }
    Some(DestinationKind::Http {
        url: url.clone(),
        secrets,
        headers,
        allow_private: allow_private.value,
        ca: ca.map(|ca| ca.value),
    })
}

fn read_headers(section: &mut Section<'_>) -> Vec<(HeaderName, SecretText)> {
    let mut headers = Vec::new();
    for entry in section.entries("headers", Shown::Never) {
        let Some(text) = section.followed("headers", &entry) else {
            continue;
        };
        let is_credential = CREDENTIAL_HEADERS.contains(&entry.name.to_ascii_lowercase().as_str());
        let parsed = if is_credential && !entry.has_reference {
            Err("holds a secret in plain text; write a reference, such as \"${env:NAME}\" or \"${file:PATH}\"".to_owned())
        } else if HeaderValue::from_str(&text).is_err() {
            Err("is no value of a header; write visible ASCII characters and spaces".to_owned())
        } else {
            header_name(&entry.name)
        };
        match parsed {
            Ok(name) => headers.push((name, SecretText(text))),
            Err(problem) => section.wrong_entry("headers", &entry, &problem),
        }
    }
    headers
}

fn read_nats(section: &mut Section<'_>, servers: &[String]) -> DestinationKind {
    let token = section.secret("token");
    let credentials = section.text_if_any("credentials", None, parse::readable_file);
    if section.has("token") && section.has("credentials") {
        section.wrong("has a token and credentials; leave one out");
    }
    DestinationKind::Nats {
        servers: servers.to_vec(),
        token: token.map(|token| SecretText(token.value)),
        credentials: credentials.map(|credentials| credentials.value),
    }
}

/// What a destination's URL says.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Place {
    Http(Uri),
    Nats(Vec<String>),
}

fn place(text: &str) -> Result<Place, String> {
    let scheme = text.split("://").next().unwrap_or_default();
    match scheme {
        "http" | "https" => http_url(text).map(Place::Http),
        "nats" | "tls" => {
            let servers = text.split(',').map(|server| nats_server(server, scheme));
            Ok(Place::Nats(servers.collect::<Result<_, _>>()?))
        }
        _ => Err("is no place that effects can go to; write https://HOST/PATH, http://HOST/PATH, nats://HOST:PORT or tls://HOST:PORT".to_owned()),
    }
}

/// An absolute URL of an HTTP server, without a user.
pub(super) fn http_url(text: &str) -> Result<Uri, String> {
    let form = "write https://HOST/PATH or http://HOST/PATH";
    let uri: Uri = text.parse().map_err(|_| format!("is no URL; {form}"))?;
    if !matches!(uri.scheme_str(), Some("http" | "https")) {
        return Err(format!("has no scheme that is known; {form}"));
    }
    let authority = uri.authority().map_or("", |authority| authority.as_str());
    let host = uri.host().unwrap_or_default();
    if host.is_empty() || authority.contains('@') || text.contains('#') {
        return Err(format!(
            "must name a host, and neither a user nor a fragment; {form}"
        ));
    }
    let has_port = authority.len() > host.len();
    if has_port && uri.port_u16().is_none_or(|port| port == 0) {
        return Err(format!("must name a port from 1 to 65535; {form}"));
    }
    Ok(uri)
}

/// `nats://host:port` or `tls://host:port`; those after the first may leave the scheme out.
fn nats_server(text: &str, scheme: &str) -> Result<String, String> {
    let form = "write nats://HOST:PORT or tls://HOST:PORT, several with commas between them";
    let (scheme, place) = text
        .trim()
        .split_once("://")
        .unwrap_or((scheme, text.trim()));
    let authority: http::uri::Authority = place
        .trim_end_matches('/')
        .parse()
        .map_err(|_| format!("is no list of servers; {form}"))?;
    if !matches!(scheme, "nats" | "tls") || authority.host().is_empty() {
        return Err(format!("is no list of NATS servers; {form}"));
    }
    if authority.as_str().contains('@') {
        return Err("must not hold a user; write token or credentials".to_owned());
    }
    let has_port = authority.as_str().len() > authority.host().len();
    if has_port && authority.port_u16().is_none_or(|port| port == 0) {
        return Err(format!("must name ports from 1 to 65535; {form}"));
    }
    Ok(format!("{scheme}://{authority}"))
}

/// An id, which no lane of something else can be taken for.
fn destination_id(text: &str) -> Result<String, String> {
    let id = name(text)?;
    if CLASSES.contains(&text) {
        return Err("is the word for what is no destination; choose another".to_owned());
    }
    Ok(id)
}

/// A name of a destination, workflow, step, signal or queue.
pub(super) fn name(text: &str) -> Result<String, String> {
    if is_name(text) {
        Ok(text.to_owned())
    } else {
        Err(format!(
            "is no name; write 1 to {NAME_BYTES_MAX} letters, digits, dashes, underscores and dots"
        ))
    }
}

/// A header that effects may carry besides the gateway's own, in lower case.
pub(super) fn header_name(text: &str) -> Result<HeaderName, String> {
    let name = HeaderName::from_bytes(text.as_bytes())
        .map_err(|_| "names no header; write letters, digits and dashes".to_owned())?;
    if GATEWAY_HEADERS.contains(&name.as_str()) {
        return Err("is written by the gateway itself; leave it out".to_owned());
    }
    Ok(name)
}

/// A Standard Webhooks secret: `whsec_` and 24 to 64 bytes in base64.
fn webhook_secret(text: &str) -> Result<SecretText, String> {
    let decoded = text
        .strip_prefix("whsec_")
        .and_then(|encoded| STANDARD.decode(encoded).ok());
    match decoded {
        Some(bytes) if SECRET_BYTES.contains(&bytes.len()) => Ok(SecretText(text.to_owned())),
        _ => Err("is no secret of Standard Webhooks; make one with `echo whsec_$(openssl rand -base64 32)`".to_owned()),
    }
}

/// Whether a host is an address that is not of the public internet, however it is written
/// (`127.1`, `2130706433`), or this machine's name for itself. Judged as it is when it is dialled.
pub(super) fn is_private(host: &str) -> bool {
    let url = reqwest::Url::parse(&format!("http://{host}/"));
    let host = url.as_ref().ok().and_then(reqwest::Url::host_str);
    let host = host.unwrap_or_default();
    match literal(host) {
        Some(address) => !is_public(address),
        None => last_label(host) == "localhost",
    }
}

/// Whether a host may be in a private network, also by its name.
fn looks_private(host: &str) -> bool {
    let is_short = !host.trim_end_matches('.').contains('.');
    is_private(host) || is_short || matches!(&*last_label(host), "local" | "internal")
}

fn last_label(host: &str) -> String {
    let name = host.trim_end_matches('.');
    let last = name.rsplit('.').next().unwrap_or_default();
    last.to_ascii_lowercase()
}
