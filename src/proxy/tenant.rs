//! Who a guarded request is from.

use std::sync::atomic::{AtomicBool, Ordering};

use http::header::{AUTHORIZATION, COOKIE, HeaderMap, HeaderName};

use crate::config::{PrincipalSource, TenantConfig, TenantSource};
use crate::domain::scope::TenantScope;
use crate::domain::secret::{Secret, Secrets};

/// Finds the tenant of a request, and its principal if the configuration names one.
pub struct Tenants {
    config: TenantConfig,
    secrets: Secrets,
    warned: AtomicBool,
}

/// Whose record a request may use. With keyed hashes it may also stand under an older secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scopes {
    /// Under the current secret.
    pub current: TenantScope,
    /// Under older secrets, newest first.
    pub older: Vec<TenantScope>,
}

impl Tenants {
    /// Reads what the configuration says.
    #[must_use]
    pub fn new(config: TenantConfig, secrets: Secrets) -> Self {
        Self {
            config,
            secrets,
            warned: AtomicBool::new(false),
        }
    }

    /// Whose request it is. `None`: it doesn't say, or says it twice, or not in a valid way.
    #[must_use]
    pub fn scopes(&self, headers: &HeaderMap) -> Option<Scopes> {
        self.warn_of_shared_answers(headers);
        let current = self.scope(headers, self.secrets.current())?;
        let older = if self.is_hashed() {
            let older = self.secrets.iter().skip(1);
            older
                .filter_map(|secret| self.scope(headers, secret))
                .collect()
        } else {
            Vec::new()
        };
        Some(Scopes { current, older })
    }

    /// The header that must not be nominated by `Connection`, besides the standard ones.
    #[must_use]
    pub fn header(&self) -> Option<&HeaderName> {
        match &self.config.source {
            TenantSource::Header(name) => Some(name),
            TenantSource::Fixed(_) | TenantSource::Credential => None,
        }
    }

    fn scope(&self, headers: &HeaderMap, secret: &Secret) -> Option<TenantScope> {
        let tenant = match &self.config.source {
            TenantSource::Fixed(tenant) => tenant.clone(),
            TenantSource::Header(name) => TenantScope::named(only(headers, name)?).ok()?,
            TenantSource::Credential => {
                let mark = secret.mark("tenant", only(headers, &AUTHORIZATION)?);
                TenantScope::named(format!("credential-{mark}").as_bytes()).ok()?
            }
        };
        let principal = match &self.config.principal {
            None => return Some(tenant),
            Some(PrincipalSource::Header(name)) => only(headers, name)?.to_vec(),
            // One that is doubled is no reason to go by the cookies.
            Some(PrincipalSource::Credential) if headers.contains_key(AUTHORIZATION) => {
                only(headers, &AUTHORIZATION)?.to_vec()
            }
            Some(PrincipalSource::Credential) => cookies(headers)?,
        };
        Some(tenant.with_principal(&secret.mark("principal", &principal)))
    }

    fn is_hashed(&self) -> bool {
        self.config.source == TenantSource::Credential || self.config.principal.is_some()
    }

    /// One tenant for all and no principal: users who authenticate would share answers.
    fn warn_of_shared_answers(&self, headers: &HeaderMap) {
        let fixed = matches!(self.config.source, TenantSource::Fixed(_));
        let authenticated = headers.contains_key(AUTHORIZATION) || headers.contains_key(COOKIE);
        if fixed
            && self.config.principal.is_none()
            && authenticated
            && !self.warned.swap(true, Ordering::Relaxed)
        {
            tracing::warn!(
                "requests carry credentials, but the tenant is fixed and no principal is set: \
                 two users with one key and one body share an answer; set tenant.principal"
            );
        }
    }
}

/// The header's value, if it stands there exactly once and is not empty.
fn only<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a [u8]> {
    let mut values = headers.get_all(name).iter();
    let value = values.next()?.as_bytes();
    (values.next().is_none() && !value.is_empty()).then_some(value)
}

/// All cookies, if there are any. HTTP/2 lets a client send them one by one, and that means the
/// same as one line (RFC 9113 section 8.2.3).
fn cookies(headers: &HeaderMap) -> Option<Vec<u8>> {
    let lines = headers.get_all(COOKIE).iter();
    let lines: Vec<_> = lines.map(http::HeaderValue::as_bytes).collect();
    let cookies = lines.join(&b"; "[..]);
    (!cookies.is_empty()).then_some(cookies)
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn tenants(source: TenantSource, principal: Option<PrincipalSource>) -> Tenants {
        let secret = |version| Secret {
            version,
            bytes: [7; 32],
        };
        let secrets = Secrets::new(vec![secret(1), secret(2)]).unwrap();
        Tenants::new(TenantConfig { source, principal }, secrets)
    }

    fn headers(lines: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, value) in lines {
            map.append(*name, HeaderValue::from_static(value));
        }
        map
    }

    #[test]
    fn a_tenant_that_is_missing_doubled_or_malformed_is_none() {
        let tenants = tenants(
            TenantSource::Header(HeaderName::from_static("x-tenant")),
            None,
        );
        let of = |lines: &[_]| {
            tenants
                .scopes(&headers(lines))
                .map(|s| s.current.to_string())
        };
        assert_eq!(of(&[("x-tenant", "acme")]), Some("acme".into()));
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[("x-tenant", "")]), None);
        assert_eq!(of(&[("x-tenant", "a b")]), None);
        assert_eq!(of(&[("x-tenant", "acme"), ("x-tenant", "acme")]), None);
    }

    #[test]
    fn a_credential_becomes_a_hash_that_tells_nothing_and_differs_by_secret() {
        let tenants = tenants(TenantSource::Credential, None);
        let scopes = |token| {
            tenants
                .scopes(&headers(&[("authorization", token)]))
                .unwrap()
        };
        let one = scopes("Bearer one");
        assert!(!one.current.as_str().contains("one"));
        assert_ne!(one.current, scopes("Bearer two").current);
        assert_eq!(one.older.len(), 1);
        assert_ne!(one.current, one.older[0]);
    }

    #[test]
    fn principals_of_one_tenant_are_kept_apart_and_must_be_there() {
        let fixed = TenantSource::Fixed(TenantScope::named(b"acme").unwrap());
        let tenants = tenants(fixed, Some(PrincipalSource::Credential));
        let of = |lines: &[_]| tenants.scopes(&headers(lines)).map(|s| s.current);
        let a = of(&[("cookie", "session=a")]).unwrap();
        let b = of(&[("cookie", "session=b")]).unwrap();
        assert_ne!(a, b);
        assert!(a.as_str().starts_with("acme "));
        assert_eq!(of(&[]), None);
    }

    #[test]
    fn a_principal_is_the_same_whether_its_cookies_come_in_one_line_or_one_by_one() {
        let fixed = TenantSource::Fixed(TenantScope::named(b"acme").unwrap());
        let tenants = tenants(fixed, Some(PrincipalSource::Credential));
        let of = |lines: &[_]| tenants.scopes(&headers(lines)).map(|s| s.current);
        let one_by_one = of(&[("cookie", "session=a"), ("cookie", "lang=en")]);
        assert!(one_by_one.is_some());
        assert_eq!(one_by_one, of(&[("cookie", "session=a; lang=en")]));
    }

    #[test]
    fn a_doubled_credential_is_not_replaced_by_cookies() {
        let fixed = TenantSource::Fixed(TenantScope::named(b"acme").unwrap());
        let tenants = tenants(fixed, Some(PrincipalSource::Credential));
        let credential = |value| ("authorization", value);
        let doubled = [
            credential("Bearer a"),
            credential("Bearer b"),
            ("cookie", "lang=en"),
        ];
        assert_eq!(tenants.scopes(&headers(&doubled)), None);
        let empty = [credential(""), ("cookie", "lang=en")];
        assert_eq!(tenants.scopes(&headers(&empty)), None);
    }
}
