//! Where a key counts: tenant, pool and key, three separate values that no delimiter joins.

use std::fmt;
use std::sync::Arc;

use super::key::IdempotencyKey;

/// The longest tenant name that a header or the configuration may give, in bytes.
pub const TENANT_BYTES_MAX: usize = 200;
/// The longest pool id, in bytes.
pub const POOL_BYTES_MAX: usize = 64;

/// What separates a tenant from the mark of its principal. No tenant can hold a space.
const PRINCIPAL_SEPARATOR: char = ' ';

/// Whose record it is: a tenant, or one principal of a tenant.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TenantScope(Arc<str>);

/// The pool of upstream targets that a route sends to.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PoolId(Arc<str>);

/// The full key of a record.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct RecordKey {
    /// Whose it is.
    pub tenant: TenantScope,
    /// Which service it is for.
    pub pool: PoolId,
    /// The client's key.
    pub key: IdempotencyKey,
}

/// Why a name was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ScopeError {
    /// Not a tenant name.
    #[error("a tenant is 1 to 200 visible ASCII characters")]
    Tenant,
    /// Not a pool id.
    #[error("a pool id is 1 to 64 characters of a-z, A-Z, 0-9, '-', '_' and '.'")]
    Pool,
}

impl TenantScope {
    /// A tenant's name as the configuration or a trusted header gives it.
    ///
    /// # Errors
    /// When the name is empty, too long, or not visible ASCII.
    pub fn named(name: &[u8]) -> Result<Self, ScopeError> {
        let visible = name.iter().all(|byte| matches!(byte, b'!'..=b'~'));
        match std::str::from_utf8(name) {
            Ok(text) if visible && (1..=TENANT_BYTES_MAX).contains(&text.len()) => {
                Ok(Self(text.into()))
            }
            _ => Err(ScopeError::Tenant),
        }
    }

    /// A scope as people write it: a tenant's name, or what the store holds for one of its
    /// principals.
    ///
    /// # Errors
    /// When it is neither.
    pub fn parse(text: &str) -> Result<Self, ScopeError> {
        let Some((tenant, mark)) = text.split_once(PRINCIPAL_SEPARATOR) else {
            return Self::named(text.as_bytes());
        };
        let tenant = Self::named(tenant.as_bytes())?;
        let mark_text = Self::named(mark.as_bytes())?;
        Ok(tenant.with_principal(mark_text.as_str()))
    }

    /// Whether `other` is this scope, or one principal of it.
    #[must_use]
    pub fn covers(&self, other: &Self) -> bool {
        let rest = other.0.strip_prefix(self.as_str());
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(PRINCIPAL_SEPARATOR))
    }

    /// The tenant's name, whichever principal of it this is.
    #[must_use]
    pub fn tenant(&self) -> &str {
        let name = self.0.split(PRINCIPAL_SEPARATOR).next();
        name.unwrap_or_default()
    }

    /// One principal of this tenant. `mark` is a keyed hash of who they are, never their name.
    #[must_use]
    pub fn with_principal(&self, mark: &str) -> Self {
        Self(format!("{}{PRINCIPAL_SEPARATOR}{mark}", self.0).into())
    }

    /// Takes back what the store holds.
    #[must_use]
    pub fn stored(text: &str) -> Self {
        Self(text.into())
    }

    /// The text that the store holds.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl PoolId {
    /// A pool's id as the configuration gives it.
    ///
    /// # Errors
    /// When the id is empty, too long, or holds other characters.
    pub fn new(id: &str) -> Result<Self, ScopeError> {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
        if (1..=POOL_BYTES_MAX).contains(&id.len()) && id.bytes().all(allowed) {
            Ok(Self(id.into()))
        } else {
            Err(ScopeError::Pool)
        }
    }

    /// Takes back what the store holds.
    #[must_use]
    pub fn stored(text: &str) -> Self {
        Self(text.into())
    }

    /// The id itself; also a metric label.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for TenantScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for TenantScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", &*self.0)
    }
}

impl fmt::Display for PoolId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for PoolId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", &*self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_tenant_name_can_look_like_a_principal_of_another() {
        let tenant = TenantScope::named(b"acme").unwrap();
        let scoped = tenant.with_principal("p1-00ff");
        assert_eq!(scoped.as_str(), "acme p1-00ff");
        assert_eq!(
            TenantScope::named(scoped.as_str().as_bytes()),
            Err(ScopeError::Tenant)
        );
    }

    #[test]
    fn a_tenant_covers_itself_and_its_principals_only() {
        let tenant = TenantScope::named(b"acme").unwrap();
        let scoped = TenantScope::parse("acme p1-00ff").unwrap();
        assert_eq!(scoped, tenant.with_principal("p1-00ff"));
        assert!(tenant.covers(&tenant) && tenant.covers(&scoped));
        assert!(!scoped.covers(&tenant));
        assert!(!tenant.covers(&TenantScope::named(b"acme2").unwrap()));
        for text in ["", " ", "acme ", " p1", "acme p1 p2", "a\0b"] {
            assert_eq!(TenantScope::parse(text), Err(ScopeError::Tenant));
        }
    }

    #[test]
    fn names_outside_their_alphabet_are_refused() {
        for name in [&b""[..], b"a b", b"caf\xc3\xa9", b"a\x00b", &[b'a'; 201]] {
            assert_eq!(TenantScope::named(name), Err(ScopeError::Tenant));
        }
        for id in ["", "a/b", "a b", &"p".repeat(65)] {
            assert_eq!(PoolId::new(id), Err(ScopeError::Pool));
        }
        assert_eq!(TenantScope::named(b"a:b/c").unwrap().as_str(), "a:b/c");
    }
}
