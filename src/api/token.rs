//! Who asks: bearer tokens (RFC 6750) of the admin API.
//!
//! The configuration holds a token's SHA-256 only. Tokens are long and random, so a plain hash
//! can't be searched; hashes are compared in constant time, all of them, so that time tells
//! nothing of which came close.

use axum::extract::{Request, State};
use axum::http::{HeaderMap, header};
use axum::middleware::Next;
use axum::response::Response;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use super::AdminState;
use crate::config::{Role, TokenConfig};
use crate::domain::scope::TenantScope;
use crate::problem::{Kind, Problem};

/// Who asks, for handlers behind [`require`].
#[derive(Clone, Debug)]
pub struct Caller {
    /// The token's name, for the audit log.
    pub name: String,
    /// The only tenant that they may see; `None`: all.
    pub tenant: Option<TenantScope>,
}

impl Caller {
    /// Whether records of this scope exist for them.
    #[must_use]
    pub fn sees(&self, scope: &TenantScope) -> bool {
        self.tenant.as_ref().is_none_or(|own| own.covers(scope))
    }

    /// Narrows the tenant that a search asks for to what exists for them. `false`: nothing of it
    /// does.
    pub(super) fn narrow(&self, tenant: &mut Option<String>) -> bool {
        let Some(own) = &self.tenant else {
            return true;
        };
        if let Some(asked) = tenant {
            return own.covers(&TenantScope::stored(asked));
        }
        *tenant = Some(own.as_str().to_owned());
        true
    }
}

/// Lets a request pass whose token has the role, and tells the handler who it is.
pub async fn require(
    State((state, roles)): State<(AdminState, &'static [Role])>,
    mut request: Request,
    next: Next,
) -> Result<Response, Problem> {
    let token = known(&state.tokens, request.headers()).ok_or_else(unauthorized)?;
    if !roles.contains(&token.role) {
        let wanted: Vec<&str> = roles.iter().map(|role| role.word()).collect();
        return Err(Problem::new(
            Kind::Forbidden,
            format!(
                "This token has the role \"{}\"; use one with the role \"{}\".",
                token.role.word(),
                wanted.join("\" or \"")
            ),
        ));
    }
    let caller = Caller {
        name: token.name.clone(),
        tenant: token.tenant.clone(),
    };
    request.extensions_mut().insert(caller);
    Ok(next.run(request).await)
}

/// The configured token that the request bears. A request with two `Authorization` lines bears
/// none.
pub(super) fn known<'a>(tokens: &'a [TokenConfig], headers: &HeaderMap) -> Option<&'a TokenConfig> {
    let mut lines = headers.get_all(header::AUTHORIZATION).iter();
    let (Some(line), None) = (lines.next(), lines.next()) else {
        return None;
    };
    let presented = bearer(line.as_bytes())?;
    let digest = Sha256::digest(presented);
    let mut found = None;
    for token in tokens {
        if bool::from(token.sha256.ct_eq(&digest[..])) {
            found = Some(token);
        }
    }
    found
}

/// What a request gets without a known token.
pub(super) fn unauthorized() -> Problem {
    Problem::new(
        Kind::Unauthorized,
        "Send `Authorization: Bearer TOKEN` with a token whose SHA-256 is in the gateway's \
         configuration.",
    )
}

/// The scheme's name is case-insensitive (RFC 9110 section 11.1).
fn bearer(line: &[u8]) -> Option<&[u8]> {
    let (scheme, rest) = line.split_at_checked(7)?;
    let token = rest.trim_ascii();
    (scheme.eq_ignore_ascii_case(b"bearer ") && !token.is_empty()).then_some(token)
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    fn token(name: &str, secret: &str) -> TokenConfig {
        TokenConfig {
            name: name.into(),
            role: Role::Reader,
            sha256: Sha256::digest(secret).into(),
            tenant: None,
        }
    }

    fn who(lines: &[&'static str]) -> Option<String> {
        let tokens = [token("a", "secret-a"), token("b", "secret-b")];
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append(header::AUTHORIZATION, HeaderValue::from_static(line));
        }
        known(&tokens, &headers).map(|token| token.name.clone())
    }

    #[test]
    fn only_a_whole_known_token_in_one_line_counts() {
        assert_eq!(who(&["Bearer secret-a"]).as_deref(), Some("a"));
        assert_eq!(who(&["bEARER   secret-b"]).as_deref(), Some("b"));
        for lines in [
            &[][..],
            &["Bearer"],
            &["Bearer "],
            &["Bearer secret-"],
            &["Bearer secret-aa"],
            &["secret-a"],
            &["Basic secret-a"],
            &["Bearer secret-a", "Bearer secret-a"],
        ] {
            assert_eq!(who(lines), None, "{lines:?}");
        }
    }
}
