//! What the areas share: bodies and reasons that are taken in, and the problems that come of it.
//!
//! A refusal is the end of a sentence, which [`invalid`] begins.

use std::future::Future;
use std::time::Duration;

use axum::body::Body;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use bytes::Bytes;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use crate::domain::run::RESULT_BYTES_MAX;
use crate::domain::scope::TenantScope;
use crate::domain::workflow::{DEPTH_MAX, is_shallow};
use crate::problem::{Kind, Problem};
use crate::store::StoreError;
use crate::telemetry::Chain;

/// The longest request body, in bytes: 1 MiB in base64, and what stands around it.
pub const BODY_BYTES_MAX: usize = 2 * 1024 * 1024;
/// How long a request body may take to arrive.
pub const BODY_TIMEOUT: Duration = Duration::from_secs(10);
/// Lines on one page.
pub const LIMIT_MAX: u32 = 200;
/// Lines on one page, if the request doesn't say.
pub const LIMIT_DEFAULT: u32 = 50;
/// The longest reason, in characters.
pub const REASON_CHARS_MAX: usize = 500;
/// When to ask again after the store gave no answer.
const STORE_RETRY: Duration = Duration::from_secs(2);

pub(super) const MAY_HAVE_HAPPENED: &str =
    "The store did not answer. Look again before you repeat an act: it may have happened.";

/// A request's JSON body, whole and in time.
pub(super) async fn read<T: DeserializeOwned>(body: Body) -> Result<T, Problem> {
    read_within(body, BODY_BYTES_MAX).await
}

/// A request's JSON body of at most `bytes_max`, whole and in time.
pub(super) async fn read_within<T: DeserializeOwned>(
    body: Body,
    bytes_max: usize,
) -> Result<T, Problem> {
    parse(&bytes(body, bytes_max).await?)
}

/// A request's body of at most `bytes_max`, whole and in time.
pub(super) async fn bytes(body: Body, bytes_max: usize) -> Result<Bytes, Problem> {
    let read = Limited::new(body, bytes_max);
    match tokio::time::timeout(BODY_TIMEOUT, read.collect()).await {
        Err(_) => Err(invalid("the body did not arrive in time")),
        Ok(Err(error)) if error.is::<LengthLimitError>() => {
            let detail = format!("A body here is at most {bytes_max} bytes.");
            Err(Problem::new(Kind::BodyTooLarge, detail))
        }
        Ok(Err(_)) => Err(invalid("the body broke off")),
        Ok(Ok(collected)) => Ok(collected.to_bytes()),
    }
}

/// A body as JSON.
pub(super) fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, Problem> {
    serde_json::from_slice(body).map_err(|error| invalid(&format!("the JSON body: {error}")))
}

/// An optional member, which may be left out and, unless it is any JSON, not be `null`.
pub(super) fn present<'de, D, T>(given: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    T::deserialize(given).map(Some)
}

/// Whether a value is nested no deeper than what is kept with a run may be.
pub(super) fn shallow(name: &str, value: &Value) -> Result<(), String> {
    let what = || format!("{name}: it is nested deeper than {DEPTH_MAX} levels");
    is_shallow(value).then_some(()).ok_or_else(what)
}

/// Refuses a value for later steps that could not be kept whole.
pub(super) fn kept(name: &str, value: &Value) -> Result<(), Problem> {
    shallow(name, value).map_err(|what| invalid(&what))?;
    if value.to_string().len() > RESULT_BYTES_MAX {
        let detail = format!("`{name}` is at most {RESULT_BYTES_MAX} bytes, written as JSON.");
        return Err(Problem::new(Kind::BodyTooLarge, detail));
    }
    Ok(())
}

/// A UUID, in the one form in which this API writes them (RFC 9562 section 4), in any case.
pub(super) fn uuid(name: &str, text: &str) -> Result<Uuid, String> {
    let parsed = text.parse().ok().filter(|_| text.len() == 36);
    parsed.ok_or_else(|| format!("{name}: not a UUID"))
}

/// The same, where it is read.
pub(super) fn given_uuid<'de, D: Deserializer<'de>>(given: D) -> Result<Uuid, D::Error> {
    let text = String::deserialize(given)?;
    uuid("it", &text).map_err(serde::de::Error::custom)
}

/// The body of acts that need nothing else.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Reason {
    /// Why, for the audit log.
    pub reason: String,
}

/// A reason, as the audit log takes it: of characters that a line can hold.
pub(super) fn reason(text: &str) -> Result<String, String> {
    let text = text.trim();
    let length = text.chars().count();
    if !(1..=REASON_CHARS_MAX).contains(&length) || text.contains(char::is_control) {
        return Err(format!(
            "reason: 1 to {REASON_CHARS_MAX} characters, on one line"
        ));
    }
    Ok(text.to_owned())
}

/// How many a page holds.
pub(super) fn limit(asked: Option<u32>) -> Result<u32, String> {
    let limit = asked.unwrap_or(LIMIT_DEFAULT);
    let allowed = (1..=LIMIT_MAX).contains(&limit);
    allowed
        .then_some(limit)
        .ok_or_else(|| format!("limit: 1 to {LIMIT_MAX}"))
}

/// The page of what was found, which may be one more than `limit`, and its last line if there is
/// another page.
pub(super) fn page<T>(found: &[T], limit: u32) -> (&[T], Option<&T>) {
    let limit = limit as usize;
    let shown = &found[..found.len().min(limit)];
    (shown, shown.last().filter(|_| found.len() > limit))
}

/// Where a page of what a tenant and an id name ended. No tenant holds a line break.
pub(super) fn write_cursor(tenant: &TenantScope, id: Uuid) -> String {
    URL_SAFE_NO_PAD.encode(format!("{tenant}\n{id}"))
}

/// Reads it back.
pub(super) fn read_cursor(cursor: &str) -> Result<(TenantScope, Uuid), String> {
    let parsed = || {
        let text = String::from_utf8(URL_SAFE_NO_PAD.decode(cursor).ok()?).ok()?;
        let (tenant, id) = text.split_once('\n')?;
        Some((TenantScope::parse(tenant).ok()?, id.parse().ok()?))
    };
    parsed().ok_or_else(|| "cursor: take `next` of the page before, unchanged".into())
}

/// Runs `work` on a task of its own: the caller may go away at any time, and what follows a commit
/// must follow it all the same. `broke_off` goes to the log and `detail` to the caller when the
/// task did not end by itself: what it did by then is done.
pub(super) async fn detached<T: Send + 'static>(
    acts: &TaskTracker,
    broke_off: &'static str,
    detail: &'static str,
    work: impl Future<Output = T> + Send + 'static,
) -> Result<T, Problem> {
    acts.spawn(work).await.map_err(|error| {
        tracing::error!(%error, "{broke_off}");
        Problem::new(Kind::StoreUnavailable, detail)
    })
}

impl From<StoreError> for Problem {
    fn from(error: StoreError) -> Self {
        not_answered(&error)
    }
}

/// What an operator's or a worker's request gets to which the store gave no answer; services' calls
/// have words of their own.
pub(super) fn not_answered(error: &StoreError) -> Problem {
    let detail = match error {
        StoreError::Inconsistent { .. } => {
            "A row holds what this version can't read; the gateway's log names it."
        }
        error if error.may_have_happened() => MAY_HAVE_HAPPENED,
        _ => "The store can't be asked, and nothing was changed; the gateway's log says why.",
    };
    tracing::warn!(error = %Chain(error), "a request to the admin API failed");
    Problem::new(Kind::StoreUnavailable, detail).retry_after(STORE_RETRY)
}

/// What a malformed request gets; `what` ends a sentence.
pub(super) fn invalid(what: &str) -> Problem {
    Problem::new(Kind::RequestInvalid, format!("Mend the request: {what}."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_survives_every_tenant() {
        let tenant = TenantScope::parse("acme p1-00ff").unwrap();
        let id = Uuid::from_u128(7);
        let cursor = write_cursor(&tenant, id);
        assert_eq!(read_cursor(&cursor), Ok((tenant, id)));
        for cursor in ["", "!", "YQ", "YQo"] {
            assert!(read_cursor(cursor).is_err(), "{cursor}");
        }
    }

    #[tokio::test]
    async fn what_broke_off_counts_as_possibly_done() {
        let (acts, work) = (TaskTracker::new(), async { panic!("halfway") });
        let told = detached::<()>(&acts, "it broke off", MAY_HAVE_HAPPENED, work).await;
        let response = told.unwrap_err().into_response();
        assert_eq!(response.status(), 503);
        let body = String::from_utf8_lossy(response.body()).into_owned();
        assert!(body.contains(MAY_HAVE_HAPPENED), "{body}");
    }

    #[test]
    fn a_reason_is_one_short_line() {
        assert_eq!(
            reason("  checked by hand ").as_deref(),
            Ok("checked by hand")
        );
        assert!(reason(&"é".repeat(500)).is_ok());
        for text in ["", "  ", "a\nb", "a\0", &"é".repeat(501)] {
            assert!(reason(text).is_err());
        }
    }

    #[test]
    fn a_uuid_has_one_form() {
        assert!(uuid("id", "018f4e9c-0000-7000-8000-00000000000A").is_ok());
        for text in [
            "",
            "018f4e9c000070008000000000000001",
            "{018f4e9c-0000-7000-8000-000000000001}",
        ] {
            assert_eq!(uuid("id", text), Err("id: not a UUID".into()));
        }
    }
}
