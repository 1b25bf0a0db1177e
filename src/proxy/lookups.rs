//! What clients may look up on the public listener: a record by its key, a run by its id, each as
//! JSON, under a path that no route can take: `/.oncegate/`.
//!
//! A client sees what is its tenant's, found in the same way as for a guarded request; to others it
//! is not there. Nothing is told of payloads, nor what an operator or a service wrote about a run.

mod told;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{ALLOW, CACHE_CONTROL, CONTENT_LENGTH, CONTENT_TYPE, RETRY_AFTER};
use http::request::Parts;
use http::{HeaderValue, Method, Response};
use percent_encoding::percent_decode_str;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use self::told::{Document, RecordSeen, RunSeen};
use super::tenant::{Scopes, Tenants};
use super::watch::{Patience, Watch};
use super::{Body, full, matching, prefer, problem_response};
use crate::domain::decide::{Decision, decide};
use crate::domain::key::IdempotencyKey;
use crate::domain::policy::Duplicates;
use crate::domain::record::{Record, State};
use crate::domain::run::{RunId, RunKey};
use crate::domain::scope::{PoolId, RecordKey, TenantScope};
use crate::head::path_segment;
use crate::problem::{self, Kind, Problem, whole_seconds};
use crate::store::{Store, StoreError};
use crate::telemetry::Chain;

/// The beginning of every path that is the gateway's own.
const OWN_PATH: &str = "/.oncegate/";
/// The longest time that a look-up waits.
const WAIT_MAX: Duration = Duration::from_mins(1);

/// Where a record can be looked up.
pub fn record_location(key: &RecordKey) -> String {
    let (pool, key) = (
        path_segment(key.pool.as_str()),
        path_segment(key.key.as_str()),
    );
    format!("{OWN_PATH}records/{pool}/{key}")
}

/// Where a run can be looked up.
pub fn run_location(run: RunId) -> String {
    format!("{OWN_PATH}runs/{run}")
}

/// Whether a path is the gateway's own, however it is written.
pub fn takes(path: &str) -> bool {
    let path = matching::folded(path);
    path.starts_with(OWN_PATH) || path == OWN_PATH.trim_end_matches('/')
}

/// Answers look-ups; cheap to clone.
#[derive(Clone)]
pub struct Lookups {
    /// Where records and runs are.
    pub store: Arc<dyn Store>,
    /// Tells whose a request is.
    pub tenants: Arc<Tenants>,
    /// Waits for what is not settled.
    pub watch: Watch,
    /// Waits for tasks at shutdown.
    pub tracker: TaskTracker,
}

/// What is looked up.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Target {
    Record(PoolId, IdempotencyKey),
    Run(RunId),
}

impl Lookups {
    /// Answers a request whose path is [the gateway's own](takes).
    pub async fn answer(&self, head: &Parts) -> Response<Body> {
        let asked = match self.asked(head) {
            Ok(asked) => asked,
            Err(refused) => return refused,
        };
        let gone = CancellationToken::new();
        // Dropped when the client goes away, which must not cut off a look at the store.
        let _present = gone.clone().drop_guard();
        let lookups = self.clone();
        let (target, scopes) = asked;
        let wait = prefer::wait(&head.headers, WAIT_MAX);
        let patience = Patience {
            until: Instant::now() + wait.unwrap_or_default(),
            gone,
        };
        let looking = async move { lookups.look(&target, &scopes, &patience).await };
        let document = match self.tracker.spawn(looking).await {
            Ok(Ok(Some(document))) => document,
            Ok(Ok(None)) => return problem_response(not_found()),
            Ok(Err(error)) => {
                tracing::warn!(error = %Chain(&error), "a look-up failed");
                return problem_response(not_answered());
            }
            Err(error) => {
                tracing::error!(%error, "a look-up broke off");
                return problem_response(not_answered());
            }
        };
        let mut response = shown(&document, &head.method);
        if let Some(wait) = wait {
            prefer::applied(response.headers_mut(), wait);
        }
        response
    }

    #[expect(clippy::result_large_err, reason = "built once, and passed on at once")]
    fn asked(&self, head: &Parts) -> Result<(Target, Scopes), Response<Body>> {
        matching::authority(head.version, &head.uri, &head.headers)
            .map_err(|error| problem_response(error.into()))?;
        let target = Target::parse(head.uri.path()).ok_or_else(|| problem_response(not_found()))?;
        if !matches!(head.method, Method::GET | Method::HEAD) {
            return Err(not_allowed());
        }
        let scopes = self.tenants.scopes(&head.headers);
        let scopes = scopes.ok_or_else(|| problem_response(tenant_missing()))?;
        Ok((target, scopes))
    }

    async fn look(
        &self,
        target: &Target,
        scopes: &Scopes,
        patience: &Patience,
    ) -> Result<Option<Document>, StoreError> {
        let scopes = || std::iter::once(&scopes.current).chain(&scopes.older);
        match target {
            Target::Record(pool, key) => {
                let record = |tenant: &TenantScope| RecordKey {
                    tenant: tenant.clone(),
                    pool: pool.clone(),
                    key: key.clone(),
                };
                let keys: Vec<_> = scopes().map(record).collect();
                let look = || self.record(&keys);
                let is_settled = |seen: &Option<Record>| {
                    let pending = |record: &Record| matches!(record.state, State::Pending(_));
                    !seen.as_ref().is_some_and(pending)
                };
                let seen = self
                    .watch
                    .until_settled(&[], patience, look, is_settled)
                    .await
                    .0?;
                let Some(record) = seen else { return Ok(None) };
                let seen = self.with_decision(record).await?;
                Ok(Some(Document::of_record(&seen)))
            }
            Target::Run(id) => {
                let run = |tenant: &TenantScope| RunKey {
                    tenant: tenant.clone(),
                    id: *id,
                };
                let keys: Vec<_> = scopes().map(run).collect();
                let look = || self.run(&keys);
                let is_settled =
                    |seen: &Option<RunSeen>| seen.as_ref().is_none_or(RunSeen::is_settled);
                let seen = self
                    .watch
                    .until_settled(&keys, patience, look, is_settled)
                    .await
                    .0?;
                Ok(seen.as_ref().map(Document::of_run))
            }
        }
    }

    /// The record as a guarded request would meet it: one that lives under an older secret counts
    /// before one under the present.
    async fn record(&self, keys: &[RecordKey]) -> Result<Option<Record>, StoreError> {
        let mut found = self.store.look_up(keys).await?;
        let lives = |record: &Option<Record>| {
            record.as_ref().is_some_and(|record| {
                decide(record.state, true, Duplicates::Wait) != Decision::TakeOver
                    || record.state == State::FailedBeforeCommit { maybe_sent: true }
            })
        };
        let living = found.iter().skip(1).position(lives).map(|older| older + 1);
        let shown = living.or_else(|| found.iter().position(Option::is_some));
        Ok(shown.and_then(|index| found.swap_remove(index)))
    }

    async fn with_decision(&self, record: Record) -> Result<RecordSeen, StoreError> {
        let State::Completed(id, _) = record.state else {
            return Ok(RecordSeen::new(record));
        };
        let tenant = record.key.tenant.clone();
        let decision = self.store.decision(&tenant, id).await?;
        let run = RunKey {
            tenant,
            id: id.into(),
        };
        let run = self.store.show_run(&run).await?;
        Ok(RecordSeen {
            record,
            decision,
            run: run.map(|line| line.run),
        })
    }

    /// The answer is told of an accepted request only: what other runs are answered is between
    /// them and their destinations.
    async fn run(&self, keys: &[RunKey]) -> Result<Option<RunSeen>, StoreError> {
        for key in keys {
            let Some(line) = self.store.show_run(key).await? else {
                continue;
            };
            let answer = if line.run.holds_record {
                let seen = self.store.run_answer(key).await?;
                seen.and_then(|(_, answer)| answer)
            } else {
                None
            };
            return Ok(Some(RunSeen { line, answer }));
        }
        Ok(None)
    }
}

impl Target {
    fn parse(path: &str) -> Option<Self> {
        let path = matching::folded(path);
        let mut segments = path.strip_prefix(OWN_PATH)?.split('/');
        let kind = segments.next()?;
        let decoded = |segment| percent_decode_str(segment).decode_utf8().ok();
        let target = match kind {
            "records" => {
                let pool = PoolId::new(&decoded(segments.next()?)?).ok()?;
                let key = decoded(segments.next()?)?;
                Self::Record(pool, IdempotencyKey::from_text(&key).ok()??)
            }
            "runs" => Self::Run(RunId(Uuid::try_parse(segments.next()?).ok()?)),
            _ => return None,
        };
        segments.next().is_none().then_some(target)
    }
}

/// The document, or only what is told about it (`HEAD`).
fn shown(document: &Document, method: &Method) -> Response<Body> {
    let bytes = Bytes::from(format!("{}\n", document.json));
    let length = HeaderValue::from(bytes.len());
    let body = if *method == Method::HEAD {
        Bytes::new()
    } else {
        bytes
    };
    let mut response = Response::new(full(body));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(CONTENT_LENGTH, length);
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    if let Some(wait) = document.retry_after {
        headers.insert(RETRY_AFTER, HeaderValue::from(whole_seconds(wait)));
    }
    response
}

fn not_found() -> Problem {
    Problem::new(
        Kind::NotFound,
        "There is no such record or run, or it is not yours. Take the location as it was told.",
    )
}

fn not_allowed() -> Response<Body> {
    let problem = Problem::new(
        Kind::MethodNotAllowed,
        "Records and runs can only be looked up: send GET or HEAD.",
    );
    let mut response = problem_response(problem);
    let allowed = HeaderValue::from_static("GET, HEAD");
    response.headers_mut().insert(ALLOW, allowed);
    response
}

fn tenant_missing() -> Problem {
    Problem::new(
        Kind::TenantMissing,
        "The request does not say whose it is, exactly once and in a valid form. Send what the \
         first request sent.",
    )
}

fn not_answered() -> Problem {
    Problem::new(
        Kind::StoreUnavailable,
        "It can't be looked up now. Try again later.",
    )
    .retry_after(problem::RETRY_AFTER)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(key: &str) -> RecordKey {
        RecordKey {
            tenant: TenantScope::stored("t"),
            pool: PoolId::stored("p.1"),
            key: IdempotencyKey::from_text(key).unwrap().unwrap(),
        }
    }

    #[test]
    fn any_key_is_found_where_its_location_says() {
        let all: String = (b' '..=b'~').map(char::from).collect();
        for key in [&*all, "a/b//c", "%41", "..", "a?b#c", "k"] {
            let record = record(key);
            let location = record_location(&record);
            let parsed = location.parse::<http::Uri>().unwrap();
            assert_eq!(parsed.path(), location);
            let target = Target::Record(record.pool, record.key);
            assert_eq!(Target::parse(&location), Some(target), "{location}");
        }
    }

    #[test]
    fn a_run_is_found_where_its_location_says() {
        let run = RunId(Uuid::from_u128(7));
        assert_eq!(Target::parse(&run_location(run)), Some(Target::Run(run)));
    }

    #[test]
    fn other_paths_below_are_nothing() {
        let id = Uuid::nil();
        for rest in [
            "",
            "runs",
            "runs/",
            "runs/1",
            "records/p",
            "records/p/",
            "records//k",
            "records/p/k/",
            "records/p/k/x",
            "records/p/%00",
            "records/p/%FF",
            "other",
        ] {
            assert_eq!(Target::parse(&format!("{OWN_PATH}{rest}")), None, "{rest}");
        }
        assert_eq!(Target::parse(&format!("{OWN_PATH}runs/{id}/x")), None);
    }

    #[test]
    fn the_own_paths_are_known_however_they_are_written() {
        for path in [
            "/.oncegate",
            "/.oncegate/",
            "//.oncegate/x",
            "/%2Eoncegate/runs/1",
            "/.%6Fncegate//records",
            "/.oncegate/../v1",
        ] {
            assert!(takes(path), "{path}");
        }
        for path in ["/", "*", "/.oncegates", "/v1/.oncegate/", "/oncegate/"] {
            assert!(!takes(path), "{path}");
        }
    }
}
