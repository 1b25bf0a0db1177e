//! The secret behind every keyed hash: made once, the same for all gateways, versioned.

use uuid::Uuid;

use super::fingerprint::{Fingerprint, RequestDigest};
use super::record::GenerationId;
use super::scope::RecordKey;
use crate::domain::derived_uuid;

/// One version of the secret that keys every hash.
#[derive(Clone)]
pub struct Secret {
    /// Counts up from 1.
    pub version: i32,
    /// 32 random bytes.
    pub bytes: [u8; 32],
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Secret {{ version: {} }}", self.version)
    }
}

/// All versions that rows may still refer to, newest first; never empty.
#[derive(Clone, Debug)]
pub struct Secrets(Vec<Secret>);

impl Secrets {
    /// `None` when there is no version at all.
    #[must_use]
    pub fn new(mut versions: Vec<Secret>) -> Option<Self> {
        versions.sort_by_key(|secret| -secret.version);
        (!versions.is_empty()).then_some(Self(versions))
    }

    /// The version that new rows get.
    #[must_use]
    pub fn current(&self) -> &Secret {
        &self.0[0]
    }

    /// Every version, newest first.
    pub fn iter(&self) -> impl Iterator<Item = &Secret> {
        self.0.iter()
    }

    /// The key that an upstream sees in place of the client's: a `UUIDv8` (RFC 9562) that only this
    /// record and this life of it give. Made with the oldest version, so that it stays the same
    /// for a generation whatever happens to the secrets.
    #[must_use]
    pub fn forward_key(&self, key: &RecordKey, generation_id: GenerationId) -> Uuid {
        let oldest = &self.0[self.0.len() - 1];
        let mut hasher = blake3::Hasher::new_keyed(&oldest.subkey("forward key"));
        let names = [key.tenant.as_str(), key.pool.as_str(), key.key.as_str()];
        for part in names
            .map(str::as_bytes)
            .into_iter()
            .chain([&generation_id.0.as_bytes()[..]])
        {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        derived_uuid(&hasher)
    }

    /// The fingerprint of a request under the current version.
    #[must_use]
    pub fn fingerprint(&self, digest: &RequestDigest) -> Fingerprint {
        self.current().fingerprint(digest)
    }

    /// Whether a row's fingerprint is this request's, under whichever version the row was made
    /// with. `None` on the row compares equal to everything; a version that is no longer known
    /// compares equal to nothing, which refuses and never runs twice.
    #[must_use]
    pub fn matches(&self, stored: Option<&Fingerprint>, digest: &RequestDigest) -> bool {
        let Some(stored) = stored else { return true };
        self.0
            .iter()
            .find(|secret| secret.version == stored.version)
            .is_some_and(|secret| secret.fingerprint(digest) == *stored)
    }
}

impl Secret {
    fn fingerprint(&self, digest: &RequestDigest) -> Fingerprint {
        let hash = blake3::keyed_hash(&self.subkey("fingerprint"), &digest.0);
        Fingerprint {
            version: self.version,
            hash: *hash.as_bytes(),
        }
    }

    /// A short mark of who someone is, for a tenant or a principal, under this version.
    #[must_use]
    pub fn mark(&self, purpose: &str, credential: &[u8]) -> String {
        let hash = blake3::keyed_hash(&self.subkey(purpose), credential);
        let hex = hash.to_hex();
        format!("{}-{}", self.version, &hex[..40])
    }

    /// One secret serves several purposes, each with a key of its own.
    fn subkey(&self, purpose: &str) -> [u8; 32] {
        *blake3::keyed_hash(&self.bytes, purpose.as_bytes()).as_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::fingerprint::{FingerprintRules, RequestParts};

    fn digest(body: &[u8]) -> RequestDigest {
        let parts = RequestParts {
            method: "POST",
            path: "/",
            query: None,
            content_type: None,
            content_encoding: None,
            body,
        };
        RequestDigest::of(&parts, &FingerprintRules::default())
    }

    #[test]
    fn an_older_version_still_matches_and_an_unknown_one_never_does() {
        let secret = |version, byte| Secret {
            version,
            bytes: [byte; 32],
        };
        let old = Secrets::new(vec![secret(1, 7)]).unwrap();
        let both = Secrets::new(vec![secret(1, 7), secret(2, 8)]).unwrap();
        let new = Secrets::new(vec![secret(2, 8)]).unwrap();
        let request = digest(b"{}");
        let stored = old.fingerprint(&request);
        assert!(both.matches(Some(&stored), &request));
        assert!(!both.matches(Some(&stored), &digest(b"[]")));
        assert!(!new.matches(Some(&stored), &request));
        assert!(new.matches(None, &request));
        assert_eq!(both.fingerprint(&request).version, 2);
    }
}
