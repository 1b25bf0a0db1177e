//! The command as a person or a script meets it.

#![expect(clippy::unwrap_used, reason = "a test fails where it stands")]

use std::process::{Command, Output, Stdio};

fn oncegate(arguments: &[&str], environment: &[(&str, &str)]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_oncegate"))
        .args(arguments)
        .env_clear()
        .envs(environment.iter().copied())
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn every_command_tells_what_it_does() {
    for command in [
        "", "serve", "demo", "migrate", "check", "runs", "outbox", "doctor",
    ] {
        let arguments: Vec<&str> = [command, "--help"]
            .into_iter()
            .filter(|word| !word.is_empty())
            .collect();
        let output = oncegate(&arguments, &[]);
        assert!(output.status.success());
        insta::assert_snapshot!(format!("help {command}").trim(), stdout(&output));
    }
}

#[test]
fn the_version_is_the_packages() {
    let version = stdout(&oncegate(&["--version"], &[]));
    assert_eq!(
        version.trim(),
        concat!("oncegate ", env!("CARGO_PKG_VERSION"))
    );
}

#[test]
fn check_tells_every_value_and_where_it_stands() {
    let output = oncegate(
        &[
            "check",
            "--upstream",
            "http://127.0.0.1:9000",
            "--no-migrate",
            "--store",
            "postgres://u:${env:PW}@h/d",
        ],
        &[("ONCEGATE_TENANT", "fixed:acme"), ("PW", "hunter2")],
    );
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    insta::assert_snapshot!(stdout(&output));
    assert_eq!(stderr(&output), "");
}

#[test]
fn check_as_json_is_one_object_whether_valid_or_not() {
    let output = oncegate(
        &["check", "--json", "--tenant", "fixed:acme", "--listen", "x"],
        &[],
    );
    assert_eq!(output.status.code(), Some(78));
    let object: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(object["valid"], false);
    assert_eq!(object["errors"][0]["origin"], "--listen");
    let settings = object["settings"].as_array().unwrap();
    let tenant = settings
        .iter()
        .find(|setting| setting["name"] == "tenant.source")
        .unwrap();
    assert_eq!(tenant["value"], "fixed:acme");

    let arguments = [
        "check",
        "--json",
        "--tenant",
        "fixed:acme",
        "--upstream",
        "http://a",
    ];
    let output = oncegate(&arguments, &[]);
    assert_eq!(output.status.code(), Some(0));
    let object: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(object["valid"], true);
}

#[test]
fn a_wrong_configuration_is_told_on_standard_error_with_its_own_code() {
    for command in ["serve", "check"] {
        let output = oncegate(&[command, "--listen", "x"], &[]);
        assert_eq!(output.status.code(), Some(78));
        assert_eq!(stdout(&output), "");
        let told = stderr(&output);
        assert!(
            told.contains("error: --listen: listen = \"x\" is no address"),
            "{told}"
        );
        assert!(told.contains("3 errors in the configuration"), "{told}");
    }
}

#[test]
fn a_wrong_command_line_has_a_code_of_its_own() {
    let output = oncegate(&["serve", "--lisen", "x"], &[]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("--listen"));
}

/// Whether a gateway is ready is asked without a token.
#[test]
fn doctor_warns_of_a_token_only_if_it_sends_one() {
    let arguments = ["doctor", "--store", "sqlite:no.db", "--admin", "0.0.0.0:1"];
    let warned = |environment: &[(&str, &str)]| {
        stderr(&oncegate(&arguments, environment)).contains("the token goes to 0.0.0.0 unencrypted")
    };
    assert!(!warned(&[]));
    assert!(warned(&[("ONCEGATE_TOKEN", "t")]));
}

#[test]
fn every_variable_is_in_the_help() {
    let help = stdout(&oncegate(&["serve", "--help"], &[]));
    for variable in oncegate::config::input::VARIABLES {
        assert!(help.contains(variable), "{variable}");
    }
}

/// The store is looked at, and the gateway asked where the file says, whatever else is wrong in it.
#[test]
fn doctor_asks_where_the_file_says_though_the_file_has_errors() {
    let directory = crate::support::process::scratch();
    let file = directory.path().join("oncegate.toml");
    let text = "admin = \"127.0.0.1:1\"\nlisten = \"nowhere\"\n[store]\nurl = \"sqlite:no.db\"\n";
    std::fs::write(&file, text).unwrap();
    let output = oncegate(&["doctor", "--config", file.to_str().unwrap()], &[]);
    let (told, warned) = (stdout(&output), stderr(&output));
    assert!(told.contains("127.0.0.1:1 "), "{told}");
    assert!(
        warned.contains("the configuration has") && warned.contains("oncegate check"),
        "{warned}"
    );
    let elsewhere = [("ONCEGATE_ADMIN", "127.0.0.1:2")];
    let output = oncegate(&["doctor", "--store", "sqlite:no.db"], &elsewhere);
    assert!(
        stdout(&output).contains("127.0.0.1:2 "),
        "{}",
        stdout(&output)
    );
}
