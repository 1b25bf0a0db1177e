//! `oncegate records`, against a running admin listener.

use std::path::Path;

use clap::Parser;
use oncegate::cli::records::{self, Failure, Paint};
use serde_json::Value;

use super::{ACME, Admin, OPERATOR, READER, key_of};

#[derive(Parser)]
struct Command {
    #[command(flatten)]
    args: records::Args,
}

/// Runs `oncegate records WORDS`; what it wrote, or why not.
async fn run(admin: &Admin, token: &str, words: &[&str]) -> Result<String, Failure> {
    let token_file = admin.directory.path().join(token);
    std::fs::write(&token_file, format!("{token}\n")).unwrap();
    run_at(&admin.address.to_string(), &token_file, words).await
}

async fn run_at(admin: &str, token_file: &Path, words: &[&str]) -> Result<String, Failure> {
    let mut line = vec!["records", "--admin", admin, "--token-file"];
    line.push(token_file.to_str().unwrap());
    line.extend(words);
    let command = Command::try_parse_from(line).unwrap();
    let mut out = Vec::new();
    records::execute(&command.args, &mut out, Paint::PLAIN).await?;
    Ok(String::from_utf8(out).unwrap())
}

#[tokio::test]
async fn records_are_listed_in_columns_and_paged() {
    let admin = Admin::start().await;
    admin.unknown(key_of("acme", "payments", "order-1")).await;
    admin
        .completed(key_of("acme p1-00ff", "payments", "order-2"))
        .await;
    admin.pending(key_of("other", "mail", "order-3")).await;
    let out = run(&admin, READER, &["find", "--tenant", "acme"])
        .await
        .unwrap();
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!(lines.len(), 3, "{out}");
    assert!(lines[0].starts_with("STATUS           TENANT        POOL      KEY      CLAIMED"));
    assert!(lines[1].starts_with("outcome_unknown  acme          payments  order-1  "));
    assert!(lines[2].starts_with("completed        acme p1-00ff  payments  order-2  "));
    assert!(lines[2].ends_with("answered 201, valid"), "{out}");
    let out = run(&admin, READER, &["find", "--limit", "1"])
        .await
        .unwrap();
    let cursor = out.trim().rsplit_once(' ').unwrap().1;
    let out = run(&admin, READER, &["find", "--cursor", cursor])
        .await
        .unwrap();
    assert!(!out.contains("order-1") && out.contains("order-3"), "{out}");
    let out = run(&admin, READER, &["find", "--pool", "none"])
        .await
        .unwrap();
    assert_eq!(out, "No record matches.\n");
    let out = run(&admin, READER, &["find", "--json"]).await.unwrap();
    let page: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(page["records"].as_array().unwrap().len(), 3);
    admin.stop().await;
}

#[tokio::test]
async fn an_unknown_outcome_is_settled_from_the_command_line() {
    let admin = Admin::start().await;
    let key = key_of("acme", "payments", "../a b/%2F");
    let named = ["acme", "payments", "../a b/%2F"];
    let words = |act: &'static str, more: &[&'static str]| {
        let act = std::iter::once(act).chain(named);
        act.chain(more.iter().copied()).collect::<Vec<_>>()
    };
    admin.unknown(key.clone()).await;
    let more = [
        "--yes", "--reason", "r", "--status", "201", "--body", "{}", "--header", "x-a: b:c",
    ];
    let out = run(&admin, OPERATOR, &words("resolve", &more))
        .await
        .unwrap();
    assert_eq!(out, "Done (resolve): the record is completed now.\n");
    let out = run(&admin, READER, &words("show", &[])).await.unwrap();
    for fact in [
        "../a b/%2F",
        "completed",
        "operator:operator",
        "201",
        "x-a",
        "2 bytes",
    ] {
        assert!(out.contains(fact), "{fact}: {out}");
    }
    let more = ["--yes", "--reason", "r"];
    let out = run(&admin, OPERATOR, &words("purge", &more)).await.unwrap();
    assert_eq!(out, "Done (purge): the record is gone.\n");
    admin.unknown(key.clone()).await;
    let out = run(&admin, OPERATOR, &words("release", &more))
        .await
        .unwrap();
    assert_eq!(
        out,
        "Done (release): the record is failed_before_commit now.\n"
    );
    assert_eq!(admin.state(&key).await, Some("failed_before_commit"));
    admin.stop().await;
}

#[tokio::test]
async fn a_file_is_the_answers_body_byte_for_byte() {
    let admin = Admin::start().await;
    admin.unknown(key_of("acme", "payments", "k")).await;
    let file = admin.directory.path().join("answer");
    std::fs::write(&file, [0, 159, 146, 150]).unwrap();
    let file = file.to_str().unwrap();
    let words = [
        "resolve", "acme", "payments", "k", "-y", "--reason", "r", "--status", "200",
    ];
    let words = [&words[..], &["--body-file", file]].concat();
    run(&admin, OPERATOR, &words).await.unwrap();
    let out = run(&admin, READER, &["show", "acme", "payments", "k"])
        .await
        .unwrap();
    assert!(out.contains("4 bytes"), "{out}");
    admin.stop().await;
}

#[tokio::test]
async fn each_failure_has_its_exit_code_and_says_what_to_do() {
    let admin = Admin::start().await;
    admin.completed(key_of("acme", "payments", "k")).await;
    admin.completed(key_of("other", "payments", "k")).await;
    let act = |act, tenant| [act, tenant, "payments", "k", "--yes", "--reason", "r"];
    for (token, words, code, says) in [
        ("no-such-token", &["find"][..], 6, "bearer token"),
        (READER, &act("purge", "acme"), 6, "role"),
        (OPERATOR, &act("release", "acme"), 5, "outcome_unknown"),
        (ACME, &act("purge", "other"), 4, "no such record"),
        (READER, &["find", "--older-than", "soon"], 2, "older_than"),
    ] {
        let failure = run(&admin, token, words).await.unwrap_err();
        let said = failure.to_string();
        assert_eq!(failure.exit_code(), code, "{said}");
        assert!(said.contains(says) && !said.contains(token), "{said}");
    }
    admin.stop().await;
}

#[tokio::test]
async fn a_gateway_that_is_not_there_is_told_from_one_that_is_no_gateway() {
    let admin = Admin::start().await;
    let token_file = admin.directory.path().join("token");
    let failure = run_at("127.0.0.1:1", &token_file, &["find"])
        .await
        .unwrap_err();
    assert!(
        failure.to_string().contains("token"),
        "the file is missing: {failure}"
    );
    std::fs::write(&token_file, READER).unwrap();
    let closed = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = closed.local_addr().unwrap().to_string();
    drop(closed);
    let failure = run_at(&address, &token_file, &["find"]).await.unwrap_err();
    assert_eq!(failure.exit_code(), 1);
    let said = failure.to_string();
    for part in [
        "can't be reached",
        "refused",
        "is it running?",
        "--admin",
        &address,
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let elsewhere = format!("http://{}/other/", admin.address);
    let failure = run_at(&elsewhere, &token_file, &["find"])
        .await
        .unwrap_err();
    assert_eq!(failure.exit_code(), 4);
    for wrong in ["ftp://127.0.0.1", "http://", "127.0.0.1:x", "http://a b"] {
        let failure = run_at(wrong, &token_file, &["find"]).await.unwrap_err();
        assert!(failure.to_string().contains("--admin"), "{failure}");
    }
    admin.stop().await;
}
