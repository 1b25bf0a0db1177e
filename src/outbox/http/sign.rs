//! Signatures of Standard Webhooks: HMAC-SHA-256 over id, timestamp and body.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::{HeaderMap, HeaderName, HeaderValue};

/// The message's id: the same at every try.
pub const WEBHOOK_ID: HeaderName = HeaderName::from_static("webhook-id");
/// When this try was made, in seconds since 1970.
pub const WEBHOOK_TIMESTAMP: HeaderName = HeaderName::from_static("webhook-timestamp");
/// One signature for each secret, separated by spaces.
pub const WEBHOOK_SIGNATURE: HeaderName = HeaderName::from_static("webhook-signature");

/// A secret that signs.
pub struct SigningKey(Vec<u8>);

/// A secret is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a webhook secret is `whsec_` and base64")]
pub struct NoSecret;

impl SigningKey {
    /// Reads `whsec_` and base64.
    ///
    /// # Errors
    /// When it is something else, or too short to be a secret at all.
    pub fn parse(text: &str) -> Result<Self, NoSecret> {
        let encoded = text.strip_prefix("whsec_").ok_or(NoSecret)?;
        let key = STANDARD.decode(encoded).map_err(|_| NoSecret)?;
        if key.is_empty() {
            Err(NoSecret)
        } else {
            Ok(Self(key))
        }
    }

    fn sign(&self, id: &str, timestamp: u64, body: &[u8]) -> String {
        let mut mac = hmac_sha256::HMAC::new(&self.0);
        mac.update(format!("{id}.{timestamp}."));
        mac.update(body);
        format!("v1,{}", STANDARD.encode(mac.finalize()))
    }
}

/// Adds the three headers, signed with every secret; nothing when there is none.
///
/// # Errors
/// When the id is no header value.
pub fn sign(
    headers: &mut HeaderMap,
    keys: &[SigningKey],
    id: &str,
    timestamp: u64,
    body: &[u8],
) -> Result<(), http::header::InvalidHeaderValue> {
    if keys.is_empty() {
        return Ok(());
    }
    let signatures: Vec<_> = keys
        .iter()
        .map(|key| key.sign(id, timestamp, body))
        .collect();
    headers.insert(WEBHOOK_ID, HeaderValue::from_str(id)?);
    headers.insert(WEBHOOK_TIMESTAMP, HeaderValue::from(timestamp));
    headers.insert(
        WEBHOOK_SIGNATURE,
        HeaderValue::from_str(&signatures.join(" "))?,
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_example_has_its_published_signature() {
        let key = SigningKey::parse("whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD").unwrap();
        let body = br#"{"email":"test@example.com","username":"test_user"}"#;
        let signature = key.sign("msg_27UH4WbU6Z5A5EzD8u03UvzRbpk", 1_649_367_553, body);
        assert_eq!(signature, "v1,tZ1I4/hDygAJgO5TYxiSd6Sd0kDW6hPenDe+bTa3Kkw=");
    }

    #[test]
    fn what_is_no_secret_is_refused() {
        for text in ["", "whsec_", "whsec_?", "C2FVsBQIhrscChlQIMV+b5sSYspob7oD"] {
            assert!(SigningKey::parse(text).is_err(), "{text}");
        }
    }
}
