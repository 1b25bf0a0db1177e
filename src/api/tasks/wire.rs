//! What goes over the wire about tasks.
//!
//! Every refusal is the end of a sentence that begins with what to mend.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::api::request::{self, present};
use crate::api::runs::wire::name;
use crate::domain::intent::{ClaimedIntent, How, IntentId, IntentKey, Stamp, diagnostic};
use crate::domain::millis;
use crate::domain::scope::TenantScope;
use crate::outbox::tasks::TaskResult;

/// Tasks that one claim gives at most.
pub const TASKS_MAX: u32 = 32;
/// The shortest and the longest lease.
pub const LEASE: [Duration; 2] = [Duration::from_secs(1), Duration::from_hours(1)];
/// The lease, if the worker doesn't say.
pub const LEASE_DEFAULT: Duration = Duration::from_secs(30);
/// The longest body of a result, in bytes.
pub const RESULT_BYTES_MAX: usize = 1024 * 1024;
/// The longest name of a worker, in bytes.
pub const WORKER_BYTES_MAX: usize = 100;

/// The body of a claim.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Claim {
    queue: String,
    #[serde(default, deserialize_with = "present")]
    limit: Option<u32>,
    #[serde(default, deserialize_with = "present")]
    lease: Option<String>,
    worker: String,
    #[serde(default, deserialize_with = "present")]
    tenant: Option<String>,
}

/// A claim, checked.
#[derive(Clone, Debug)]
pub struct Wish {
    /// Of this tenant and its principals; `None`: of any.
    pub tenant: Option<TenantScope>,
    /// Which queue.
    pub queue: String,
    /// At most this many.
    pub limit: u32,
    /// How long the worker may be silent.
    pub lease: Duration,
    /// Who it is, for people.
    pub worker: String,
}

impl Claim {
    /// What it asks for.
    pub fn into_wish(self) -> Result<Wish, String> {
        let limit = self.limit.unwrap_or(1);
        if !(1..=TASKS_MAX).contains(&limit) {
            return Err(format!("limit: 1 to {TASKS_MAX}"));
        }
        let fits = (1..=WORKER_BYTES_MAX).contains(&self.worker.len());
        if !fits || self.worker.contains(char::is_control) {
            return Err(format!(
                "worker: 1 to {WORKER_BYTES_MAX} bytes, without control characters"
            ));
        }
        Ok(Wish {
            tenant: self.tenant.as_deref().map(tenant).transpose()?,
            queue: name("queue", self.queue)?,
            limit,
            lease: lease(self.lease.as_deref())?,
            worker: self.worker,
        })
    }
}

/// The body of a heartbeat.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Heartbeat {
    tenant: String,
    intent_id: String,
    stamp: String,
    #[serde(default, deserialize_with = "present")]
    lease: Option<String>,
}

impl Heartbeat {
    /// Of which task, by which claim, for how long.
    pub fn into_parts(self) -> Result<(IntentKey, Stamp, Duration), String> {
        let key = key(&self.tenant, &self.intent_id)?;
        let stamp = Stamp(request::uuid("stamp", &self.stamp)?);
        Ok((key, stamp, lease(self.lease.as_deref())?))
    }
}

/// The body of a result.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Outcome {
    tenant: String,
    intent_id: String,
    stamp: String,
    /// `null` is a result too.
    #[serde(default, deserialize_with = "present")]
    result: Option<Value>,
    #[serde(default, deserialize_with = "present")]
    error: Option<String>,
    #[serde(default, deserialize_with = "present")]
    retryable: Option<bool>,
}

impl Outcome {
    /// Of which task, by which claim, and what came of it.
    pub fn into_parts(self) -> Result<(IntentKey, Stamp, TaskResult), String> {
        let key = key(&self.tenant, &self.intent_id)?;
        let stamp = Stamp(request::uuid("stamp", &self.stamp)?);
        let result = match (self.result, self.error, self.retryable) {
            (Some(result), None, None) => TaskResult::Done(result),
            (None, Some(error), Some(retryable)) if !error.is_empty() => TaskResult::Failed {
                retryable,
                error: diagnostic(&error),
            },
            _ => {
                return Err("give `result`, or `error` (some text) and `retryable`".into());
            }
        };
        Ok((key, stamp, result))
    }
}

fn key(tenant_text: &str, intent_id: &str) -> Result<IntentKey, String> {
    Ok(IntentKey {
        tenant: tenant(tenant_text)?,
        id: IntentId(request::uuid("intent_id", intent_id)?),
    })
}

fn tenant(text: &str) -> Result<TenantScope, String> {
    TenantScope::parse(text).map_err(|error| format!("tenant: {error}"))
}

fn lease(text: Option<&str>) -> Result<Duration, String> {
    let Some(text) = text else {
        return Ok(LEASE_DEFAULT);
    };
    let lease = humantime::parse_duration(text).map_err(|error| format!("lease: {error}"))?;
    let [shortest, longest] = LEASE;
    if lease < shortest || lease > longest {
        return Err("lease: 1s to 1h".into());
    }
    Ok(lease)
}

/// What a claim gives.
#[derive(Debug, Serialize)]
pub struct Claimed {
    tasks: Vec<TaskOut>,
}

#[derive(Debug, Serialize)]
struct TaskOut {
    tenant: String,
    run_id: String,
    intent_id: String,
    stamp: String,
    step: String,
    r#try: u32,
    idempotency_key: String,
    lease_ms: u64,
    content_type: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    body: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    body_base64: Option<String>,
}

impl Claimed {
    /// These, each for `lease`.
    #[must_use]
    pub fn new(claimed: &[ClaimedIntent], lease: Duration) -> Self {
        let task = |intent: &ClaimedIntent| {
            let text = std::str::from_utf8(&intent.body).ok();
            let coded = text.is_none().then(|| STANDARD.encode(&intent.body));
            TaskOut {
                tenant: intent.key.tenant.to_string(),
                run_id: intent.run_id.to_string(),
                intent_id: intent.key.id.to_string(),
                stamp: intent.stamp.to_string(),
                step: intent.step.clone(),
                r#try: intent.tries,
                idempotency_key: intent.idempotency_key.clone(),
                lease_ms: millis(lease),
                content_type: content_type(&intent.sending.how),
                body: text.map(str::to_owned),
                body_base64: coded,
            }
        };
        Self {
            tasks: claimed.iter().map(task).collect(),
        }
    }
}

fn content_type(how: &How) -> Option<String> {
    match how {
        How::Task { content_type, .. } | How::Publish { content_type, .. } => content_type.clone(),
        How::Http(_) => None,
    }
}

/// A claim that goes on.
#[derive(Debug, Serialize)]
pub struct Extended {
    lease_ms: u64,
}

impl Extended {
    /// For this long, from the store's present.
    #[must_use]
    pub fn by(lease: Duration) -> Self {
        Self {
            lease_ms: millis(lease),
        }
    }
}

/// A result that was taken, now or before.
#[derive(Debug, Serialize)]
pub struct Taken {
    /// `taken`.
    pub status: &'static str,
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = r#""tenant":"acme","intent_id":"018f4e9c-0000-7000-8000-000000000001","stamp":"018f4e9c-0000-7000-8000-000000000002""#;

    fn outcome(rest: &str) -> Result<TaskResult, String> {
        let json = format!("{{{HEAD}{rest}}}");
        let outcome: Outcome = serde_json::from_str(&json).unwrap();
        outcome.into_parts().map(|(_, _, result)| result)
    }

    #[test]
    fn a_result_is_a_value_or_an_error_and_never_both() {
        for done in [r#","result":null"#, r#","result":{"a":1}"#] {
            assert!(matches!(outcome(done), Ok(TaskResult::Done(_))), "{done}");
        }
        let failed = outcome(r#","error":"a\u0000b","retryable":true"#);
        let Ok(TaskResult::Failed { retryable, error }) = failed else {
            panic!("{failed:?}");
        };
        assert!(retryable && error == "a b", "{error:?}");
        for neither in [
            "",
            r#","result":1,"error":"e","retryable":false"#,
            r#","error":"e""#,
            r#","error":"","retryable":true"#,
            r#","retryable":true"#,
        ] {
            assert!(outcome(neither).is_err(), "{neither}");
        }
    }

    #[test]
    fn a_lease_is_bounded() {
        assert_eq!(lease(None), Ok(LEASE_DEFAULT));
        assert_eq!(lease(Some("2m")), Ok(Duration::from_mins(2)));
        for text in ["", "soon", "10ms", "2h"] {
            assert!(lease(Some(text)).is_err(), "{text}");
        }
    }
}
