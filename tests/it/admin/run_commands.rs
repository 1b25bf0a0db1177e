//! `oncegate runs` and `oncegate outbox`, against a running admin listener.

use clap::Parser;
use oncegate::cli::outbox;
use oncegate::cli::runs::{self, Failure, Paint};
use oncegate::domain::workflow::OnFailure;
use serde_json::Value;

use super::started::{mail, sends, signal};
use super::{ACME, Admin, OPERATOR, READER, SERVICE, key_of};

#[derive(Parser)]
enum Command {
    Runs(runs::Args),
    Outbox(outbox::Args),
}

/// Runs `oncegate WORDS`; what it wrote, and how it ended.
async fn run(admin: &Admin, token: &str, words: &[&str]) -> (String, Result<(), Failure>) {
    let token_file = admin.directory.path().join(token);
    std::fs::write(&token_file, token).unwrap();
    let address = admin.address.to_string();
    let mut line = vec!["oncegate", words[0], "--admin", &address, "--token-file"];
    line.push(token_file.to_str().unwrap());
    line.extend(&words[1..]);
    let command = Command::try_parse_from(line).unwrap();
    let mut out = Vec::new();
    let done = match &command {
        Command::Runs(args) => runs::execute(args, &mut out, Paint::PLAIN).await,
        Command::Outbox(args) => outbox::execute(args, &mut out, Paint::PLAIN).await,
    };
    (String::from_utf8(out).unwrap(), done)
}

/// The same, which must succeed.
async fn out(admin: &Admin, token: &str, words: &[&str]) -> String {
    let (out, done) = run(admin, token, words).await;
    done.unwrap();
    out
}

#[tokio::test]
async fn a_stuck_run_is_found_understood_and_moved_on_from_the_command_line() {
    let admin = Admin::start().await;
    let stuck = admin.stuck("order-1").await;
    admin
        .started(
            key_of("other", "mail", "order-2"),
            "approvals",
            vec![signal("s")],
        )
        .await;
    let id = stuck.id.to_string();
    let listed = out(&admin, READER, &["runs", "list", "--status", "stuck"]).await;
    let lines: Vec<&str> = listed.lines().collect();
    assert_eq!(lines.len(), 2, "{listed}");
    assert!(lines[0].starts_with("STATUS  RUN"));
    for part in ["stuck", &id, "acme", "receipts", "order-1"] {
        assert!(lines[1].contains(part), "{part}: {listed}");
    }
    let shown = out(&admin, READER, &["runs", "show", &id]).await;
    for part in [
        "receipt",
        "mail",
        "no such address",
        "Tries, newest first",
        "Diagnosis",
        "started",
        "gateway-1",
        "422",
    ] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    let moved = out(
        &admin,
        OPERATOR,
        &["runs", "retry", &id, "--reason", "r", "-y"],
    )
    .await;
    assert_eq!(moved, "Done (retry): the run is running now.\n");
    let json = out(&admin, READER, &["runs", "show", &id, "--json"]).await;
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["status"], "running");
    assert_eq!(json["transitions"][0]["kind"], "started");
    let none = out(&admin, READER, &["runs", "list", "--pool", "none"]).await;
    assert_eq!(none, "No run matches.\n");
    admin.stop().await;
}

#[tokio::test]
async fn a_run_is_signalled_resumed_and_cancelled_from_the_command_line() {
    let admin = Admin::start().await;
    let steps = vec![signal("approved"), sends("receipt", mail())];
    let run = admin
        .started(key_of("acme", "payments", "k"), "w", steps)
        .await;
    let id = run.id.to_string();
    let words = [
        "runs",
        "signal",
        &id,
        "approved",
        "--payload",
        r#"{"by":"ann"}"#,
    ];
    let told = out(&admin, SERVICE, &words).await;
    assert_eq!(told, "Done (signal): the run is running now.\n");
    admin.give_up(&run, 1).await;
    admin.advance().await;
    let once = ["--request-id", "018f4e9c-0000-7000-8000-000000000001"];
    let words = [
        "runs", "resume", &id, "--reason", "r", "--result", "7", once[0], once[1],
    ];
    let told = out(&admin, OPERATOR, &words).await;
    assert_eq!(told, "Done (resume): the run is completed now.\n");
    let again = out(&admin, OPERATOR, &words).await;
    assert_eq!(again, "Done before (resume): the run is completed now.\n");
    let other = admin
        .started(key_of("acme", "payments", "k2"), "w", vec![signal("s")])
        .await;
    let words = [
        "runs",
        "cancel",
        &other.id.to_string(),
        "--reason",
        "the customer called",
    ];
    let told = out(&admin, OPERATOR, &words).await;
    assert!(
        told.starts_with("Done (cancel): the run is cancelled now: "),
        "{told}"
    );
    assert!(told.contains("the customer called"), "{told}");
    admin.stop().await;
}

#[tokio::test]
async fn what_was_given_up_is_sent_again_and_what_is_refused_is_told() {
    let admin = Admin::start().await;
    let mut steps = vec![sends("receipt", mail()), signal("s")];
    steps[0].on_failure = OnFailure::Continue;
    let gone_on = admin
        .started(key_of("acme", "payments", "k0"), "w", steps)
        .await;
    admin.give_up(&gone_on, 1).await;
    admin.advance().await;
    let stuck = admin.stuck("k1").await;
    let intent = stuck.id.intent(1).to_string();
    let listed = out(&admin, READER, &["outbox", "list", "--status", "dead"]).await;
    assert_eq!(listed.lines().count(), 3, "{listed}");
    let shown = out(&admin, READER, &["outbox", "show", &intent]).await;
    for part in ["dead", "http POST", "answered 422", "12 bytes", "gateway-1"] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    let words = [
        "outbox",
        "redrive",
        "--destination",
        "mail",
        "--reason",
        "r",
    ];
    let (told, done) = run(&admin, OPERATOR, &words).await;
    assert_eq!(done.unwrap_err().exit_code(), 5);
    let refused = format!("Not to {}: gone", gone_on.id.intent(1));
    assert!(
        told.contains("Done (redrive) to 1 intents.") && told.contains(&refused),
        "{told}"
    );
    let words = [
        "outbox",
        "discard",
        "--intent",
        &gone_on.id.intent(1).to_string(),
        "--reason",
        "r",
    ];
    assert_eq!(
        out(&admin, OPERATOR, &words).await,
        "Done (discard) to 1 intents.\n"
    );
    admin.stop().await;
}

#[tokio::test]
async fn a_redrive_goes_through_every_page() {
    let admin = Admin::start().await;
    for name in ["k1", "k2", "k3"] {
        admin.stuck(name).await;
    }
    let words = [
        "outbox", "redrive", "--all", "--reason", "r", "--limit", "2", "--json",
    ];
    let told: Value = serde_json::from_str(&out(&admin, OPERATOR, &words).await).unwrap();
    assert_eq!(told["done"], 2);
    assert!(told["next"].is_string());
    let words = ["outbox", "redrive", "--all", "--reason", "r"];
    assert_eq!(
        out(&admin, OPERATOR, &words).await,
        "Done (redrive) to 1 intents.\n"
    );
    admin.stop().await;
}

#[tokio::test]
async fn destinations_are_paused_and_resumed_from_the_command_line() {
    let admin = Admin::start().await;
    let told = out(
        &admin,
        OPERATOR,
        &["outbox", "pause", "mail", "--reason", "an outage"],
    )
    .await;
    assert_eq!(told, "Done: mail is paused.\n");
    let all = out(&admin, READER, &["outbox", "destinations"]).await;
    let line = all.lines().nth(1).unwrap();
    assert!(
        line.starts_with("paused  mail") && line.ends_with("an outage"),
        "{all}"
    );
    let told = out(
        &admin,
        OPERATOR,
        &["outbox", "resume", "mail", "--reason", "over"],
    )
    .await;
    assert_eq!(told, "Done: mail is sent to again.\n");
    admin.stop().await;
}

#[tokio::test]
async fn each_failure_has_its_exit_code_and_says_what_to_do() {
    let admin = Admin::start().await;
    let run_id = admin
        .started(key_of("other", "payments", "k"), "w", vec![signal("s")])
        .await
        .id
        .to_string();
    let act = |act| vec!["runs", act, &*run_id, "--reason", "r"];
    for (token, words, code, says) in [
        (READER, act("cancel"), 6, "role"),
        (ACME, act("cancel"), 4, "no such run"),
        (OPERATOR, act("retry"), 5, "not stuck"),
        (READER, vec!["runs", "list", "--limit", "0"], 2, "limit"),
        (READER, vec!["outbox", "show", "x"], 4, "no such intent"),
        (
            OPERATOR,
            vec!["outbox", "redrive", "--reason", "r"],
            2,
            "--all",
        ),
        (
            "no-such-token",
            vec!["outbox", "destinations"],
            6,
            "bearer token",
        ),
    ] {
        let (out, done) = run(&admin, token, &words).await;
        let failure = done.unwrap_err();
        let said = failure.to_string();
        assert_eq!(
            (failure.exit_code(), &*out),
            (code, ""),
            "{words:?}: {said}"
        );
        assert!(said.contains(says) && !said.contains(token), "{said}");
    }
    admin.stop().await;
}
