//! What a right configuration means, that the example shows all of it, and that secrets stay secret.

use std::time::Duration;

use oncegate::config::input::Environment;
use oncegate::config::{LogFormat, PathPattern, PrincipalSource, Role, TenantSource};
use oncegate::domain::policy::{Duplicates, ForwardKey, KeySource, OnStoreDown, OnUnknown};

use super::{EXAMPLE, LEAST, load_text, load_text_in};

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

/// Holds `hunter2` in its base64.
pub(super) const WEBHOOK_SECRET: &str = "whsec_hunter2AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA";

/// A configuration in which everything is written, and nothing as the default is.
pub(super) fn everything(dir: &std::path::Path) -> String {
    for name in ["cert.pem", "key.pem", "ca.pem"] {
        std::fs::write(dir.join(name), "pem").unwrap();
    }
    std::fs::write(dir.join("secret"), format!("{WEBHOOK_SECRET}\n")).unwrap();
    include_str!("everything.toml").replace("DIR", dir.to_str().unwrap())
}

pub(super) fn secrets() -> Environment {
    [
        ("STORE_PASSWORD", "hunter2-store"),
        ("ANN_TOKEN", "hunter2-token-of-ann"),
        ("SHOP_TOKEN", "hunter2-token-of-shop"),
        ("RECEIPT_SECRET", WEBHOOK_SECRET),
        ("RECEIPT_TOKEN", "hunter2-receipts"),
        ("NATS_TOKEN", "hunter2-nats"),
        ("RECEIPT_AUTHORIZATION", "Bearer hunter2-receipts"),
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
    assert!(config.trust_forwarded);
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
    let [warning] = &loaded.report.warnings[..] else {
        panic!("{:?}", loaded.report.warnings);
    };
    assert!(warning.message.contains("on_store_down = pass"));
}

#[test]
fn every_key_is_in_the_example() {
    let dir = tempfile::tempdir().unwrap();
    let loaded = load_text_in(everything(dir.path()), &secrets()).unwrap();
    for setting in &loaded.report.settings {
        let key = setting.name.rsplit('.').next().unwrap();
        let written = EXAMPLE.lines().any(|line| {
            let line = line.trim_start_matches("# ");
            let names = line.split_once(" = ").map(|(name, _)| name);
            let is_free = setting.name.contains(".headers.");
            is_free
                || names == Some(key)
                || line.starts_with(&format!("{} = {{ {key}", parent(&setting.name)))
        });
        assert!(written, "{} is not in the example", setting.name);
    }
}

#[test]
fn every_key_is_in_the_manual() {
    let manual = include_str!("../../../docs/CONFIGURATION.md");
    let dir = tempfile::tempdir().unwrap();
    let loaded = load_text_in(everything(dir.path()), &secrets()).unwrap();
    let settings = loaded.report.settings.iter();
    for setting in settings.filter(|setting| !setting.name.contains(".headers.")) {
        let key = setting.name.rsplit('.').next().unwrap();
        let forms = [format!("`{key}`"), format!("`{key} = "), format!(".{key}`")];
        let told = forms.iter().any(|form| manual.contains(form));
        assert!(told, "{} is not in the manual", setting.name);
    }
}

/// The name of the table that a setting stands in.
fn parent(name: &str) -> &str {
    let table = name.rsplit('.').nth(1).unwrap_or_default();
    table.split('[').next().unwrap_or_default()
}

#[test]
fn what_the_example_leaves_out_is_right_too() {
    let dir = tempfile::tempdir().unwrap();
    let pem = dir.path().join("pem");
    std::fs::write(&pem, "pem").unwrap();
    let with = |line: &str| {
        let bare = line.strip_prefix("# ").unwrap_or(line);
        let is_key = bare
            .split_once(" = ")
            .is_some_and(|(name, _)| !name.contains(' '));
        let is_example = bare.contains("\"…\"") || bare.starts_with("token = ");
        let taken = (is_key && !is_example) || bare.starts_with('[');
        let line = if taken { bare } else { line };
        let name = line.split_once(" = ").map_or(line, |(name, _)| name);
        let is_file =
            line.contains(".pem\"") || line.contains("server.key") || line.contains(".creds");
        if taken && is_file {
            format!("{name} = {:?}\n", pem.to_str().unwrap())
        } else {
            format!("{line}\n")
        }
    };
    let whole: String = EXAMPLE.lines().map(with).collect();
    let environment = secrets();
    let loaded = load_text_in(&whole, &environment).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(loaded.config.destinations.len(), 2);
    assert_eq!(loaded.config.workflows[0].steps.len(), 4);
    let follow_up = loaded.config.routes[0].policy.follow_up.as_ref();
    assert_eq!(follow_up.unwrap().steps.len(), 5);
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

    let target = LEAST.replace("http://", "http://u:hunter2@");
    let told = format!("{:?}", load_text(target).unwrap_err());
    assert!(!told.contains("hunter2"), "{told}");

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
