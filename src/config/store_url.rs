//! The store's URL: which are allowed, and how one is told without its password.

/// What stands where a password is not told.
pub(super) const HIDDEN: &str = "***";

const FORM: &str = "write sqlite:PATH or postgres://USER@HOST/DATABASE";

/// `sqlite:PATH` or `postgres://…`.
pub(super) fn parse(text: &str) -> Result<String, String> {
    match text.split_once(':') {
        Some(("sqlite", rest)) => {
            let path = rest.strip_prefix("//").unwrap_or(rest);
            let (path, query) = path.split_once('?').unwrap_or((path, ""));
            if path.is_empty() {
                Err(format!("names no file; {FORM}"))
            } else if path == ":memory:" || query.contains("mode=memory") {
                Err(format!(
                    "is a store in memory, which forgets every key at a restart; {FORM}"
                ))
            } else if !query.is_empty() {
                Err(format!(
                    "has options behind its path, which are not supported; {FORM}"
                ))
            } else {
                Ok(text.to_owned())
            }
        }
        Some(("postgres" | "postgresql", rest)) if rest.starts_with("//") => Ok(text.to_owned()),
        _ => Err(format!("is no store; {FORM}")),
    }
}

/// The URL without its password, in whichever place it stands. Hides too much rather than too
/// little: what stands before the last `@` is taken for user and password.
pub(super) fn without_password(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else {
        return url.to_owned();
    };
    let (user, rest) = match rest.rsplit_once('@') {
        Some((user, rest)) => match user.split_once(':') {
            Some((name, _)) => (format!("{name}:{HIDDEN}@"), rest),
            None => (format!("{user}@"), rest),
        },
        None => (String::new(), rest),
    };
    let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
    let pairs: Vec<String> = query.split('&').map(pair_without_password).collect();
    let mark = if query.is_empty() { "" } else { "?" };
    format!("{scheme}://{user}{place}{mark}{}", pairs.join("&"))
}

fn pair_without_password(pair: &str) -> String {
    match pair.split_once('=') {
        Some((name, _)) if name.contains("password") => format!("{name}={HIDDEN}"),
        _ => pair.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn only_stores_that_keep_keys_are_taken() {
        for url in [
            "sqlite:a.db",
            "sqlite:///var/a.db",
            "postgres://h/d",
            "postgresql:///d",
        ] {
            assert!(parse(url).is_ok(), "{url}");
        }
        for url in [
            "",
            "a.db",
            "sqlite:",
            "sqlite://",
            "sqlite::memory:",
            "sqlite:a?mode=memory",
            "mysql://h/d",
            "postgres:h",
        ] {
            assert!(parse(url).is_err(), "{url}");
        }
    }

    #[test]
    fn what_is_not_a_password_is_told() {
        for (url, told) in [
            (
                "postgres://u:pw@h:5432/d?sslmode=require",
                "postgres://u:***@h:5432/d?sslmode=require",
            ),
            (
                "postgres:///d?user=u&password=pw",
                "postgres:///d?user=u&password=***",
            ),
            ("postgres://u@h/d", "postgres://u@h/d"),
            ("sqlite:a.db", "sqlite:a.db"),
        ] {
            assert_eq!(without_password(url), told);
        }
    }

    proptest! {
        #[test]
        fn no_password_is_ever_told(password in "[A-Z!-/:-@]{4,20}", in_query in any::<bool>()) {
            prop_assume!(!(in_query && password.contains(['&', '?', '@'])));
            let url = if in_query {
                format!("postgres://h/d?password={password}")
            } else {
                format!("postgres://u:{password}@h/d")
            };
            prop_assert!(!without_password(&url).contains(&password));
        }
    }
}
