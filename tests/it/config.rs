//! The configuration: what is told about a wrong one, and what a right one means.

#![expect(clippy::unwrap_used, reason = "a test fails where it stands")]

mod any_text;
mod effects;
mod example;

use std::path::PathBuf;

use oncegate::config::input::{Environment, Given, Overrides};
use oncegate::config::report::{Finding, Origin, Rejected};
use oncegate::config::{Loaded, PathPattern, TenantSource, load, load_store};

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

#[test]
fn two_tokens_of_one_secret_are_refused() {
    let token = |name: &str, role: &str, secret: &str| {
        format!("[[token]]\nname = \"{name}\"\nrole = \"{role}\"\n{secret}\n")
    };
    let environment: Environment = [("ONE", "a-secret-of-this-test")].into_iter().collect();
    let hash = "sha256 = \"e1b2cdcf7b24b6b5c3c0c57ef0b8ee6b1b3b9bb0f5d2f1e9cb7b3e8f0b6b9a11\"";
    let own = "secret = \"${env:ONE}\"";
    let both = |one: &str, two: &str| {
        let text = format!(
            "{LEAST}{}{}",
            token("reader", "reader", one),
            token("boss", "operator", two)
        );
        load_text_in(text, &environment)
    };
    assert!(both(own, hash).is_ok());
    for secret in [own, hash] {
        let told = both(secret, secret).unwrap_err().to_string();
        assert!(
            told.contains("has the same secret as token \"reader\""),
            "{told}"
        );
    }
}
