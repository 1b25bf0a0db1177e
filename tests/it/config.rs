//! The configuration: what is told about a wrong one, and what a right one means.

#![expect(clippy::unwrap_used, reason = "a test fails where it stands")]

use std::path::PathBuf;
use std::time::Duration;

use oncegate::config::input::{Environment, Given, Overrides};
use oncegate::config::report::{Finding, Origin, Rejected};
use oncegate::config::{
    Loaded, LogFormat, PathPattern, PrincipalSource, Role, TenantSource, load, load_store,
};
use oncegate::domain::policy::{Duplicates, ForwardKey, KeySource, OnStoreDown, OnUnknown};
use proptest::prelude::*;

const EXAMPLE: &str = include_str!("../../oncegate.example.toml");

/// The least that is a configuration.
const LEAST: &str = r#"
[tenant]
source = "fixed:acme"
[[pool]]
id = "default"
targets = ["http://127.0.0.1:9000"]
[[route]]
path = "/*"
pool = "default"
"#;

/// A file in a directory that goes away with it.
struct File {
    dir: tempfile::TempDir,
    path: PathBuf,
}

fn file(text: impl AsRef<[u8]>) -> File {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("oncegate.toml");
    std::fs::write(&path, text).unwrap();
    File { dir, path }
}

fn flag(name: &'static str, text: &str) -> Given {
    Given {
        text: text.into(),
        origin: Origin::Flag(name),
    }
}

fn from(file: &File) -> Overrides {
    Overrides {
        config: Some(flag("--config", file.path.to_str().unwrap())),
        ..Overrides::default()
    }
}

fn load_text(text: impl AsRef<[u8]>) -> Result<Loaded, Rejected> {
    load_text_in(text, &Environment::default())
}

fn load_text_in(text: impl AsRef<[u8]>, environment: &Environment) -> Result<Loaded, Rejected> {
    load(&from(&file(text)), environment)
}

fn load_flags(overrides: &Overrides) -> Result<Loaded, Rejected> {
    load(overrides, &Environment::default())
}

/// One line for each, without the directory, which differs in each run.
fn lines(findings: &[Finding], file: &File) -> String {
    let dir = format!("{}/", file.dir.path().display());
    let line = |finding: &Finding| finding.to_string().replace(&dir, "");
    findings.iter().map(line).collect::<Vec<_>>().join("\n")
}

fn errors(text: impl AsRef<[u8]>) -> String {
    let file = file(text);
    lines(&load_flags(&from(&file)).unwrap_err().0.errors, &file)
}

fn warnings(text: &str) -> String {
    let file = file(text);
    lines(&load_flags(&from(&file)).unwrap().report.warnings, &file)
}

/// The least configuration with these lines in its route.
fn route(lines: &str) -> String {
    format!("{LEAST}{lines}\n")
}

#[test]
fn every_mistake_is_told_at_once_with_its_place() {
    insta::assert_snapshot!(errors(
        r#"
listen = "localhost:8080"
admin = 9090
lisen = "x"

[store]
url = "mysql://u:hunter2@h/d"
poll_intervall = "1s"

[tenant]
principal = "cookie"

[[pool]]
id = "payments"
targets = ["ftp://a", "http://b/path", "http://c"]

[[pool]]
id = "payments"
targets = []

[[route]]
path = "/v1/*"
pool = "payment"
mode = "accept"
duplicates = "follow"
wait = "1h"
lease = 5
methods = ["post", "GET"]
body_max = "10 MiBB"
required = "yes"
release = [99, "401"]
valid_for = "10s"
timeout = "60s"

[route.fingerprint]
ignore_json = ["id"]

[limits]
header_timeout = "0s"

[[token]]
name = "ann"
role = "root"
secret = "hunter2"

[log]
format = "xml"
filter = "onceg=ate=debug"
"#
    ));
}

#[test]
fn contradictions_name_both_values_and_what_to_do() {
    let contradictions = [
        ("", "listen = \"127.0.0.1:1\"\nadmin = \"127.0.0.1:1\""),
        ("lease = \"500ms\"", "[store]\npoll_interval = \"500ms\""),
        ("valid_for = \"10s\"\ntimeout = \"9s\"\nlinger = \"2s\"", ""),
        ("valid_for = \"2m\"", "[limits]\ncache_trust = \"2m\""),
        ("valid_for = \"2m\"", "[limits]\nrecord_retry = \"121s\""),
        ("body_max = \"512MiB\"", ""),
        ("store_body_max = \"65MiB\"", ""),
        ("on_unknown = \"redrive\"\nforward_key = \"none\"", ""),
        ("", "[limits]\nwaiters_max = 10"),
    ];
    let told =
        contradictions.map(|(in_route, before)| errors(format!("{before}\n{}", route(in_route))));
    insta::assert_snapshot!(told.join("\n\n"));
}

#[test]
fn what_only_a_default_contradicts_is_no_error() {
    let told = warnings(&route("valid_for = \"2s\"\nlease = \"1s\""));
    insta::assert_snapshot!(told);
}

#[test]
fn what_a_wrong_value_stands_for_is_not_compared() {
    let told = errors(route("lease = \"abc\"\nvalid_for = 5\ntimeout = \"23h\""));
    assert_eq!(told.lines().count(), 2, "{told}");
}

#[test]
fn errors_of_syntax_are_all_told_and_nothing_that_follows_from_them() {
    insta::assert_snapshot!(errors(
        "listen = \n[store]\nurl = \"sqlite:a.db\"\nurl = \"sqlite:b.db\"\nmigrate = maybe\nnotify = 1\n"
    ));
}

#[test]
fn a_file_that_can_not_be_read_is_told() {
    let overrides = Overrides {
        config: Some(flag("--config", "/no/such/file.toml")),
        ..Overrides::default()
    };
    let rejected = load_flags(&overrides).unwrap_err();
    assert_eq!(
        rejected.0.errors[0].to_string(),
        "--config: the file `/no/such/file.toml` can't be opened: No such file or directory (os error 2)"
    );
    assert!(errors(b"a = \"\xff\"").contains("is not UTF-8 from byte 5 on"));
    assert!(errors(vec![b'#'; 2 << 20]).contains("is longer than 1048576 bytes"));
}

#[test]
fn a_gateway_without_a_tenant_source_does_not_start() {
    let without = LEAST.replace("source = \"fixed:acme\"", "");
    assert!(errors(&without).contains("tenant.source is missing"));
    let overrides = Overrides {
        upstream: Some(flag("--upstream", "http://127.0.0.1:9000")),
        ..Overrides::default()
    };
    let rejected = load_flags(&overrides).unwrap_err();
    assert!(rejected.to_string().contains("tenant.source is missing"));
}

#[test]
fn nothing_at_all_tells_what_is_needed() {
    insta::assert_snapshot!(load_flags(&Overrides::default()).unwrap_err());
}

#[test]
fn flags_beat_the_environment_and_the_environment_beats_the_file() {
    let text = format!("listen = \"127.0.0.1:1\"\nadmin = \"127.0.0.1:2\"\n{LEAST}");
    let environment: Environment = [
        ("ONCEGATE_LISTEN", "127.0.0.1:3"),
        ("ONCEGATE_TENANT", "header:x-tenant"),
        ("ONCEGATE_ADMIN", ""),
    ]
    .into_iter()
    .collect();
    let pick = |flag: Option<&str>, name, variable| {
        Given::pick(flag.map(Into::into), name, variable, &environment)
    };
    let file = file(text);
    let overrides = Overrides {
        listen: pick(Some("127.0.0.1:4"), "--listen", "ONCEGATE_LISTEN"),
        admin: pick(None, "--admin", "ONCEGATE_ADMIN"),
        tenant: pick(None, "--tenant", "ONCEGATE_TENANT"),
        ..from(&file)
    };
    let loaded = load(&overrides, &environment).unwrap();
    assert_eq!(loaded.config.listen.port(), 4);
    assert_eq!(loaded.config.admin.port(), 2, "an empty variable is none");
    let header = TenantSource::Header("x-tenant".parse().unwrap());
    assert_eq!(loaded.config.tenant.source, header);
    let origin = |name: &str| {
        let setting = loaded
            .report
            .settings
            .iter()
            .find(|setting| setting.name == name);
        setting.unwrap().origin.clone()
    };
    assert_eq!(origin("listen"), Origin::Flag("--listen"));
    assert_eq!(
        origin("tenant.source"),
        Origin::Variable("ONCEGATE_TENANT".into())
    );
    assert!(matches!(origin("admin"), Origin::File { line: 2, .. }));
    assert_eq!(origin("limits.grace"), Origin::Default);
}

#[test]
fn a_wrong_flag_is_told_together_with_the_rest() {
    let file = file(LEAST.replace("\"/*\"", "\"v1\""));
    let overrides = Overrides {
        listen: Some(flag("--listen", ":8080")),
        ..from(&file)
    };
    let rejected = load_flags(&overrides).unwrap_err();
    insta::assert_snapshot!(lines(&rejected.0.errors, &file));
}

#[test]
fn upstream_alone_guards_every_path() {
    let overrides = Overrides {
        upstream: Some(flag("--upstream", "http://127.0.0.1:9000")),
        tenant: Some(flag("--tenant", "fixed:acme")),
        ..Overrides::default()
    };
    let config = load_flags(&overrides).unwrap().config;
    let [pool] = &config.pools[..] else {
        panic!("one pool");
    };
    assert_eq!(pool.id.as_str(), "default");
    assert_eq!(pool.targets, ["http://127.0.0.1:9000/"]);
    let [route] = &config.routes[..] else {
        panic!("one route");
    };
    assert_eq!(route.path, PathPattern::Prefix("/".to_owned()));
    assert_eq!(route.methods, ["POST", "PATCH"]);
    assert_eq!(route.policy.pool, pool.id);
}

#[test]
fn upstream_with_routes_is_the_target_of_the_pool_default_and_of_no_other() {
    let with_upstream = |text: &str| {
        let file = file(text);
        load_flags(&Overrides {
            upstream: Some(flag("--upstream", "https://other:1")),
            ..from(&file)
        })
    };
    let config = with_upstream(LEAST).unwrap().config;
    assert_eq!(config.pools[0].targets, ["https://other:1/"]);
    let no_pool =
        "[tenant]\nsource = \"credential\"\n[[route]]\npath = \"/a\"\npool = \"default\"\n";
    let config = with_upstream(no_pool).unwrap().config;
    assert_eq!(config.pools[0].targets, ["https://other:1/"]);
    for text in [
        LEAST.replace("\"default\"", "\"payments\""),
        LEAST.replace("pool = \"default\"", "pool = \"payments\"")
            + "[[pool]]\nid = \"payments\"\ntargets = [\"http://a\"]\n",
    ] {
        let rejected = with_upstream(&text).unwrap_err();
        let [error] = &rejected.0.errors[..] else {
            panic!("{rejected}");
        };
        assert!(
            error
                .to_string()
                .starts_with("--upstream: gives the targets of the pool \"default\", and no route")
        );
    }
}

#[test]
fn the_example_says_the_defaults() {
    let example = load_text(EXAMPLE).unwrap();
    assert_eq!(example.report.warnings, []);
    let least = load_text(LEAST).unwrap();
    for setting in &least.report.settings {
        let in_example = example
            .report
            .settings
            .iter()
            .find(|other| other.name == setting.name);
        let in_example =
            in_example.unwrap_or_else(|| panic!("{} is not in the example", setting.name));
        assert!(
            in_example.origin.is_written(),
            "{} is not in the example",
            setting.name
        );
        if !setting.origin.is_written() {
            assert_eq!(in_example.value, setting.value, "{}", setting.name);
        }
    }
}

/// A configuration in which everything is written, and nothing as the default is.
fn everything(dir: &std::path::Path) -> String {
    for name in ["cert.pem", "key.pem", "ca.pem"] {
        std::fs::write(dir.join(name), "pem").unwrap();
    }
    include_str!("config/everything.toml").replace("DIR", dir.to_str().unwrap())
}

fn secrets() -> Environment {
    [
        ("STORE_PASSWORD", "hunter2-store"),
        ("ANN_TOKEN", "hunter2-token-of-ann"),
    ]
    .into_iter()
    .collect()
}

#[test]
fn everything_that_may_be_written_means_something() {
    let dir = tempfile::tempdir().unwrap();
    let loaded = load_text_in(everything(dir.path()), &secrets()).unwrap();
    let config = &loaded.config;
    assert_eq!(config.listen, "0.0.0.0:443".parse().unwrap());
    assert_eq!(config.tls.as_ref().unwrap().key, dir.path().join("key.pem"));
    assert_eq!(config.store.url, "postgres://u:hunter2-store@db/oncegate");
    assert!(!config.store.migrate && !config.store.notify);
    assert_eq!(config.store.connections_max, 32);
    assert_eq!(config.tenant.source, TenantSource::Credential);
    let user = PrincipalSource::Header("x-user".parse().unwrap());
    assert_eq!(config.tenant.principal, Some(user));
    let pool = &config.pools[0];
    assert_eq!(
        pool.targets,
        ["http://127.0.0.1:9000/", "https://[::1]:9001/"]
    );
    assert!(pool.http2 && !pool.preserve_host);
    let route = &config.routes[0];
    assert_eq!(route.host.as_deref(), Some("api.example.com"));
    assert_eq!(route.path, PathPattern::Exact("/v1/charges".to_owned()));
    assert_eq!(route.methods, ["PUT", "DELETE"]);
    let policy = &route.policy;
    assert_eq!(policy.key_source, KeySource::Body("/id".to_owned()));
    assert!(policy.required && policy.store_set_cookie && !policy.store_5xx);
    assert_eq!(policy.duplicates, Duplicates::Reject);
    assert_eq!(policy.forward_key, ForwardKey::Derived);
    assert_eq!(policy.on_unknown, OnUnknown::Redrive);
    assert_eq!(policy.on_store_down, OnStoreDown::Pass);
    assert_eq!(policy.timeout, Duration::from_secs(90));
    assert_eq!(policy.valid_for, Duration::from_hours(7 * 24));
    assert_eq!(policy.release_statuses, [0u16; 0]);
    assert_eq!(policy.body_bytes_max, 1000);
    assert_eq!(policy.store_body_bytes_max, 1000);
    assert_eq!(policy.fingerprint.ignore_json, ["/a~1b"]);
    assert_eq!(config.limits.header_bytes_max, 8192);
    assert_eq!(config.log.format, LogFormat::Json);
    assert_eq!(config.tokens[0].role, Role::Operator);
    assert_eq!(config.tokens[1].sha256, [0xab; 32]);
    assert_eq!(config.tokens[1].tenant.as_ref().unwrap().as_str(), "acme");
    let defaulted = |name: &str| !name.starts_with("token") && !name.contains("[1]");
    for setting in &loaded.report.settings {
        assert!(
            setting.origin.is_written() || !defaulted(&setting.name),
            "{}",
            setting.name
        );
    }
    assert_eq!(loaded.report.warnings, []);
}

#[test]
fn every_key_is_in_the_example() {
    let dir = tempfile::tempdir().unwrap();
    let loaded = load_text_in(everything(dir.path()), &secrets()).unwrap();
    for setting in &loaded.report.settings {
        let key = setting.name.rsplit('.').next().unwrap();
        let written = EXAMPLE.lines().any(|line| {
            let line = line.trim_start_matches("# ");
            line.split_once(" = ").is_some_and(|(name, _)| name == key)
        });
        assert!(written, "{} is not in the example", setting.name);
    }
}

#[test]
fn no_secret_is_told_anywhere() {
    let dir = tempfile::tempdir().unwrap();
    let loaded = load_text_in(everything(dir.path()), &secrets()).unwrap();
    let told = format!("{loaded:?}");
    assert!(!told.contains("hunter2"), "{told}");
    assert!(!told.contains("abab"), "{told}");

    let plain = format!("[store]\nurl = \"postgres://u:hunter2@h/d\"\n{LEAST}");
    let told = format!("{:?}", load_text(&plain).unwrap());
    assert!(!told.contains("hunter2"), "{told}");
    assert!(told.contains("holds a password in plain text"), "{told}");

    let wrong = format!(
        "[store]\nurl = \"mysql://u:${{env:STORE_PASSWORD}}@h/d\"\nmigrate = \"${{env:STORE_PASSWORD}}\"\n{LEAST}\n[[token]]\nname = \"ann\"\nrole = \"${{env:ANN_TOKEN}}\"\nsecret = \"hunter2\"\nsha256 = \"hunter2\"\n"
    );
    let told = format!("{:?}", load_text_in(&wrong, &secrets()).unwrap_err());
    assert!(!told.contains("hunter2"), "{told}");
}

#[test]
fn a_token_is_known_by_its_hash_wherever_it_comes_from() {
    let dir = tempfile::tempdir().unwrap();
    let secret = dir.path().join("token");
    std::fs::write(&secret, "abc\n").unwrap();
    let text = format!(
        "{LEAST}\n[[token]]\nname = \"ann\"\nrole = \"reader\"\nsecret = \"${{file:{}}}\"\n",
        secret.display()
    );
    let loaded = load_text(text).unwrap();
    // FIPS 180-2, appendix B.1.
    let hash = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    let by_hash =
        format!("{LEAST}\n[[token]]\nname = \"ann\"\nrole = \"reader\"\nsha256 = \"{hash}\"\n");
    assert_eq!(
        loaded.config.tokens,
        load_text(by_hash).unwrap().config.tokens
    );
    let [warning] = &loaded.report.warnings[..] else {
        panic!("one warning");
    };
    assert!(warning.message.contains("token[0].secret is short"));
}

#[test]
fn a_route_that_no_request_can_reach_and_a_pool_without_routes_are_warned_of() {
    let more = r#"
[[route]]
path = "/v1/a"
pool = "default"
[[pool]]
id = "spare"
targets = ["http://a"]
"#;
    insta::assert_snapshot!(warnings(&route(more)));
    let reachable = LEAST.replace("path = \"/*\"", "path = \"/*\"\nhost = \"a\"");
    assert_eq!(
        warnings(&format!(
            "{reachable}[[route]]\npath = \"/*\"\npool = \"default\"\n"
        )),
        ""
    );
}

#[test]
fn a_mistyped_variable_is_warned_of_and_a_foreign_one_is_not() {
    let environment: Environment = [
        ("ONCEGATE_LISTN", "127.0.0.1:1"),
        ("ONCEGATE_PORT", "tcp://10.0.0.1:8080"),
        ("ONCEGATE_SERVICE_HOST", "10.0.0.1"),
    ]
    .into_iter()
    .collect();
    let loaded = load_text_in(LEAST, &environment).unwrap();
    let told: Vec<String> = loaded
        .report
        .warnings
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(
        told,
        ["ONCEGATE_LISTN: is not read; did you mean ONCEGATE_LISTEN?"]
    );
}

#[test]
fn migrating_needs_the_store_and_nothing_else() {
    let file = file("nonsense = 1\n[store]\nurl = \"sqlite:a.db\"\n[[route]]\n");
    let loaded = load_store(&from(&file), &Environment::default()).unwrap();
    assert_eq!(loaded.store.url, "sqlite:a.db");
}

proptest! {
    #[test]
    fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = load_text(bytes);
    }

    #[test]
    fn random_toml_like_text_never_panics(
        text in r#"([a-z\[\]{}="'#.,0-9 \\\n]|\[\[(route|pool|token)\]\]\n|(store|url|lease|path|key) = |true|"\$\{env:A\}"){0,60}"#,
    ) {
        let _ = load_text(text);
    }

    #[test]
    fn an_example_with_something_missing_or_doubled_never_panics(
        at in 0..EXAMPLE.len(), length in 0..200usize, double in any::<bool>(),
    ) {
        let bytes = EXAMPLE.as_bytes();
        let end = (at + length).min(bytes.len());
        let again = if double { at } else { end };
        let text = [&bytes[..if double { end } else { at }], &bytes[again..]].concat();
        let _ = load_text(text);
    }

    #[test]
    fn a_duration_means_what_it_says(ms in 1..=86_400_000u64, unit in 0..3usize) {
        let (text, meant) = match unit {
            0 => (format!("{ms}ms"), Duration::from_millis(ms)),
            1 => (format!("{}s {}ms", ms / 1000, ms % 1000), Duration::from_millis(ms)),
            _ => (format!("{}m", ms / 60_000 + 1), Duration::from_mins(ms / 60_000 + 1)),
        };
        let loaded = load_text(route(&format!("tombstone = \"{text}\""))).unwrap();
        prop_assert_eq!(loaded.config.routes[0].policy.tombstone_for, meant);
    }

    #[test]
    fn a_size_means_what_it_says(number in 1..=200u64, unit in 0..4usize) {
        let (unit, factor) = [("", 1), ("KB", 1000), ("KiB", 1024), ("MiB", 1 << 20)][unit];
        let loaded = load_text(route(&format!("body_max = \"{number}{unit}\""))).unwrap();
        let expected = usize::try_from(number * factor).unwrap();
        prop_assert_eq!(loaded.config.routes[0].policy.body_bytes_max, expected);
    }

    #[test]
    fn any_text_as_a_value_never_panics(value in ".{0,30}", key in 0..6usize) {
        let key = ["wait", "body_max", "path", "key", "host", "on_unknown"][key];
        let _ = load_text(route(&format!("{key} = {value:?}")));
    }
}
