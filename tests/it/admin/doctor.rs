//! `oncegate doctor`: over the API of a gateway that has the file, and on a store of its own.

use std::time::Duration;

use clap::Parser;
use oncegate::cli::doctor::{Line, Patient, look, tell};
use oncegate::cli::runs::Paint;
use oncegate::store::Store as _;
use oncegate::store::sqlite::SqliteStore;
use serde_json::Value;

use super::faulty::Fault;
use super::{Admin, OPERATOR, READER, SERVICE, key_of};
use crate::support::postgres;

fn patient(admin: &Admin, url: &str) -> Patient {
    let token_file = admin.directory.path().join("doctor.token");
    std::fs::write(&token_file, READER).unwrap();
    Patient {
        store: postgres::config(url),
        admin: admin.address.to_string(),
        token_file: Some(token_file),
        lease_min: Duration::from_secs(5),
    }
}

fn health(lines: &[Line], check: &str) -> String {
    let line = lines.iter().find(|line| line.check == check);
    line.unwrap_or_else(|| panic!("{check}: {lines:#?}"))
        .health
        .clone()
}

#[tokio::test]
async fn a_gateway_tells_how_its_store_is() {
    let admin = Admin::start().await;
    admin.stuck("k1").await;
    admin.unknown(key_of("acme", "payments", "k2")).await;
    let path = "/v1/outbox/destinations/url:https:%2F%2Fsecret.example:443/pause";
    let body = serde_json::json!({ "reason": "r" });
    assert_eq!(admin.post(OPERATOR, path, body).await.status, 200);
    for token in [READER, OPERATOR] {
        let told = admin.get(token, "/v1/doctor").await.json();
        let health = |check: &str| {
            let findings = told["findings"].as_array().unwrap();
            let found = findings.iter().find(|finding| finding["check"] == check);
            found.unwrap()["health"].as_str().unwrap().to_owned()
        };
        for good in ["clock", "server", "pending", "unsent", "quarantined"] {
            assert_eq!(health(good), "good", "{good}: {told}");
        }
        for warn in ["unknown", "dead", "stuck", "paused"] {
            assert_eq!(health(warn), "warn", "{warn}: {told}");
        }
        // It may be another tenant's host.
        assert!(!told.to_string().contains("secret.example"), "{told}");
    }
    assert_eq!(admin.get(SERVICE, "/v1/doctor").await.status, 403);
    admin.stop().await;
}

#[tokio::test]
async fn a_file_that_a_gateway_has_is_looked_at_through_the_gateway() {
    let admin = Admin::start().await;
    let url = format!(
        "sqlite:{}",
        admin.directory.path().join("store.db").display()
    );
    let mut patient = patient(&admin, &url);
    let lines = look(&patient).await;
    assert!(
        lines[0].says.contains("is in use by a gateway"),
        "{lines:#?}"
    );
    for check in ["gateway", "clock", "server", "pending"] {
        assert_eq!(health(&lines, check), "good", "{check}");
    }
    // Without a token nobody tells, and that is said.
    patient.token_file = Some(admin.directory.path().join("none"));
    let lines = look(&patient).await;
    let last = lines.last().unwrap();
    assert_eq!(last.health, "bad");
    assert!(last.says.contains("did not tell"), "{last:?}");
    admin.stop().await;
}

#[tokio::test]
async fn a_file_that_nobody_has_is_looked_at_itself_and_a_missing_one_is_not_made() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store.db");
    let patient = Patient {
        store: postgres::config(&format!("sqlite:{}", path.display())),
        admin: "127.0.0.1:1".into(),
        token_file: None,
        lease_min: Duration::from_secs(5),
    };
    let lines = look(&patient).await;
    assert_eq!(health(&lines, "store"), "bad");
    assert!(!path.exists());
    SqliteStore::open(&path, true).await.unwrap().close().await;
    let lines = look(&patient).await;
    for check in [
        "store", "schema", "clock", "server", "unknown", "dead", "stuck",
    ] {
        assert_eq!(health(&lines, check), "good", "{check}: {lines:#?}");
    }
    assert_eq!(health(&lines, "gateway"), "warn");
}

#[tokio::test]
async fn what_is_found_is_told_as_a_table_and_as_json() {
    let lines = [
        ("good", "store", "it can be reached"),
        ("bad", "schema", "it is behind\u{1b}[31m"),
    ]
    .map(|(health, check, says)| Line {
        check: check.into(),
        health: health.into(),
        says: says.into(),
    });
    let mut table = Vec::new();
    tell(&mut table, &lines, false, Paint::PLAIN).unwrap();
    let table = String::from_utf8(table).unwrap();
    let expected = "HEALTH  CHECK   MORE\ngood    store   it can be reached\nbad     schema  it is behind?[31m\n";
    assert_eq!(table, expected);
    let mut json = Vec::new();
    tell(&mut json, &lines, true, Paint::PLAIN).unwrap();
    let json: Value = serde_json::from_slice(&json).unwrap();
    assert_eq!(json["bad"], true);
    assert_eq!(json["findings"][0]["check"], "store");
}

#[tokio::test]
async fn a_store_that_does_not_answer_is_a_finding_and_no_error() {
    let admin = Admin::start().await;
    admin.store.next(Fault::Unreachable);
    let told = admin.get(READER, "/v1/doctor").await.json();
    let first = &told["findings"][0];
    assert_eq!(
        (&first["check"], &first["health"]),
        (&"store".into(), &"bad".into())
    );
    admin.stop().await;
}

#[tokio::test]
async fn postgresql_tells_of_its_listener_and_of_who_holds_rows() {
    let database = postgres::database().await;
    oncegate::store::migrate::apply(&database.url)
        .await
        .unwrap();
    let patient = Patient {
        store: postgres::config(&database.url),
        admin: "127.0.0.1:1".into(),
        token_file: None,
        lease_min: Duration::from_secs(5),
    };
    let lines = look(&patient).await;
    for check in [
        "store",
        "schema",
        "server",
        "listener",
        "transactions",
        "held rows",
        "clock",
    ] {
        assert_eq!(health(&lines, check), "good", "{check}: {lines:#?}");
    }
    let wrong = Patient {
        store: postgres::config("postgres://nobody@127.0.0.1:1/none"),
        ..patient
    };
    let lines = look(&wrong).await;
    assert_eq!(health(&lines, "store"), "bad");
}

#[derive(Parser)]
struct Command {
    #[command(flatten)]
    _args: oncegate::cli::doctor::Args,
}

#[test]
fn the_definition_is_sound() {
    use clap::CommandFactory as _;
    Command::command().debug_assert();
}
