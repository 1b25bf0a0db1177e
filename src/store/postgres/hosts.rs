//! A PostgreSQL URL, which may name several hosts: `postgres://u:p@a:5432,b:5433/db`. sqlx knows
//! one host only; libpq's form for several is taken apart here.

use sqlx::ConnectOptions as _;
use sqlx::postgres::PgConnectOptions;

use crate::store::open::OpenError;

const MALFORMED: OpenError = OpenError::Url("it begins like PostgreSQL's but does not parse");

/// The options for each host that the URL names, in its order.
///
/// # Errors
/// [`OpenError::Url`], which does not repeat the URL.
pub fn parse(url: &str) -> Result<Vec<PgConnectOptions>, OpenError> {
    let (scheme, rest) = url.split_once("://").ok_or(MALFORMED)?;
    let end = rest.find(['/', '?']).unwrap_or(rest.len());
    let (authority, rest) = rest.split_at(end);
    let (user, hosts) = authority
        .rsplit_once('@')
        .map_or(("", authority), |(user, hosts)| {
            (&authority[..=user.len()], hosts)
        });
    let rest = without_session_attributes(rest);
    let one = |host: &str| format!("{scheme}://{user}{host}{rest}").parse();
    let one = |host: &str| one(host).map(ours).map_err(|_| MALFORMED);
    hosts.split(',').map(one).collect()
}

/// What is the same for every connection.
fn ours(host: PgConnectOptions) -> PgConnectOptions {
    // PgBouncer refuses `extra_float_digits`, and no float is ever read.
    let host = host.disable_statement_logging().extra_float_digits(None);
    match host.get_application_name() {
        Some(_) => host,
        None => host.application_name("oncegate"),
    }
}

/// `target_session_attrs=read-write` is how this store always connects; sqlx would warn that it
/// does not know it.
fn without_session_attributes(rest: &str) -> String {
    let Some((path, query)) = rest.split_once('?') else {
        return rest.to_owned();
    };
    let known = |pair: &&str| !pair.starts_with("target_session_attrs=");
    let query: Vec<&str> = query.split('&').filter(known).collect();
    format!("{path}?{}", query.join("&"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts(url: &str) -> Vec<(String, u16)> {
        let hosts = parse(url).unwrap();
        let of = |host: &PgConnectOptions| (host.get_host().to_owned(), host.get_port());
        hosts.iter().map(of).collect()
    }

    #[test]
    fn every_host_gets_the_whole_rest_of_the_url() {
        let url = "postgres://u:p%40w@a:1,b:2/d?target_session_attrs=read-write&sslmode=disable";
        assert_eq!(hosts(url), [("a".into(), 1), ("b".into(), 2)]);
        for host in parse(url).unwrap() {
            assert_eq!(host.get_username(), "u");
            assert_eq!(host.get_database(), Some("d"));
            assert_eq!(format!("{:?}", host.get_ssl_mode()), "Disable");
        }
        assert_eq!(
            hosts("postgresql://u@[::1]:5433/d"),
            [("[::1]".into(), 5433)]
        );
        assert_eq!(hosts("postgres:///d?host=/run/postgresql").len(), 1);
    }

    #[test]
    fn what_is_malformed_is_refused_without_repeating_it() {
        for url in [
            "postgres:/x",
            "postgres://u:hunter2@a:port/d",
            "postgres://u:hunter2@a:1,b:x/d",
        ] {
            let error = parse(url).unwrap_err();
            assert!(!format!("{error} {error:?}").contains("hunter2"));
        }
    }
}
