//! The architecture's invariants, checked on the text of the sources: what no lint can see.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use oncegate::problem::Kind;

const FILE_LINES_MAX: usize = 500;

/// A file of the repository.
struct Source {
    /// From the repository's root, with `/`.
    path: String,
    text: String,
}

impl Source {
    /// The lines before the file's unit tests, comments left out, with their numbers.
    fn code(&self) -> impl Iterator<Item = (usize, &str)> {
        let numbered = self.text.lines().enumerate();
        let numbered = numbered.map(|(number, line)| (number + 1, line.trim()));
        numbered
            .take_while(|(_, line)| !line.starts_with("#[cfg(test)]"))
            .filter(|(_, line)| !line.starts_with("//"))
    }

    /// The modules of this crate that it names, by their first segment.
    fn imports(&self) -> BTreeSet<&str> {
        let mut imports = BTreeSet::new();
        for (_, line) in self.code() {
            for (at, _) in line.match_indices("crate::") {
                let rest = &line[at + "crate::".len()..];
                let group = rest
                    .strip_prefix('{')
                    .and_then(|rest| rest.split('}').next());
                for name in group.map_or(vec![rest], |group| group.split(", ").collect()) {
                    let end = name.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
                    imports.insert(&name[..end.unwrap_or(name.len())]);
                }
            }
        }
        imports
    }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn files(folder: &str, ending: &str) -> Vec<Source> {
    let mut found = Vec::new();
    let mut folders: Vec<PathBuf> = vec![root().join(folder)];
    while let Some(folder) = folders.pop() {
        let Ok(entries) = fs::read_dir(&folder) else {
            continue;
        };
        for entry in entries.map(|entry| entry.unwrap()) {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.to_string_lossy().ends_with(ending) {
                let name = path.strip_prefix(root()).unwrap().to_string_lossy();
                found.push(Source {
                    path: name.into_owned(),
                    text: fs::read_to_string(&path).unwrap(),
                });
            }
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    found
}

fn sources() -> Vec<Source> {
    let found = files("src", ".rs");
    assert!(found.len() > 10, "the sources are found");
    found
}

/// Panics with every breach at once.
#[track_caller]
fn assert_none(breaches: &[String]) {
    assert!(breaches.is_empty(), "\n{}", breaches.join("\n"));
}

/// Lines of the code of some files that hold one of these words.
fn lines_with(sources: &[Source], words: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    for source in sources {
        for (number, line) in source.code() {
            for word in words.iter().filter(|word| line.contains(*word)) {
                found.push(format!("{}:{number} has `{word}`", source.path));
            }
        }
    }
    found
}

fn is_in(source: &Source, module: &str) -> bool {
    source.path == format!("src/{module}.rs") || source.path.starts_with(&format!("src/{module}/"))
}

#[test]
fn the_domain_is_pure() {
    let mut domain = sources();
    domain.retain(|source| is_in(source, "domain"));
    let impure = [
        "tokio",
        "sqlx",
        "axum",
        "hyper",
        "SystemTime",
        "Instant",
        "getrandom",
        "now_v7",
        "now_v4",
        "new_v4",
        "async ",
        ".await",
        "std::fs",
        "std::env",
        "std::net",
        "tracing::",
        "metrics::",
    ];
    let mut breaches = lines_with(&domain, &impure);
    for source in &domain {
        for import in source.imports().difference(&BTreeSet::from(["domain"])) {
            breaches.push(format!("{} imports {import}", source.path));
        }
    }
    assert_none(&breaches);
}

#[test]
fn routing_knows_no_http_framework() {
    let mut routing = sources();
    routing.retain(|source| is_in(source, "routing"));
    let words = [
        "axum",
        "hyper",
        "http::",
        "http_body",
        "StatusCode",
        "tower",
    ];
    assert_none(&lines_with(&routing, &words));
}

#[test]
fn sql_is_written_in_the_store_only() {
    let mut others = sources();
    others.retain(|source| !is_in(source, "store"));
    let mut breaches = lines_with(&others, &["sqlx"]);
    for source in &others {
        for (number, line) in source.code() {
            let line = line.to_ascii_lowercase();
            let sql = [
                "insert into ",
                "delete from ",
                " from eec_",
                "update eec_",
                "select ",
            ];
            if line.contains('"') && sql.iter().any(|word| line.contains(word)) {
                breaches.push(format!("{}:{number} looks like SQL", source.path));
            }
        }
    }
    assert_none(&breaches);
}

/// Each module may import what is below it, and nothing beside or above.
#[test]
fn imports_point_down_only() {
    const EDGES: [&str; 4] = ["proxy", "api", "outbox", "upkeep"];
    const BELOW_EDGES: [&str; 14] = [
        "address",
        "driver",
        "upstream",
        "head",
        "body",
        "routing",
        "coordinator",
        "store",
        "domain",
        "ids",
        "config",
        "problem",
        "telemetry",
        "lifecycle",
    ];
    let allowed = |module: &str| -> Option<Vec<&str>> {
        Some(match module {
            "domain" => vec!["domain"],
            "address" | "body" | "head" => vec![],
            "driver" => vec!["ids", "store", "telemetry"],
            "upstream" => vec!["domain", "body", "config", "telemetry"],
            "ids" | "problem" | "lifecycle" => vec!["domain", "telemetry"],
            "config" => vec!["domain", "telemetry", "address"],
            // Its own slice of the configuration.
            "telemetry" => vec!["config"],
            "store" => vec!["domain", "ids", "config", "telemetry", "lifecycle"],
            "routing" | "coordinator" => {
                vec!["store", "domain", "ids", "config", "telemetry", "lifecycle"]
            }
            // Step workers come in through it, to the outbox's tasks.
            "api" => [&BELOW_EDGES[..], &["outbox"]].concat(),
            edge if EDGES.contains(&edge) => BELOW_EDGES.to_vec(),
            // The composition root and what starts it name everything.
            _ => return None,
        })
    };
    let mut breaches = Vec::new();
    for source in sources() {
        let own = source.path["src/".len()..]
            .split(['/', '.'])
            .next()
            .unwrap_or_default();
        let Some(allowed) = allowed(own) else {
            continue;
        };
        for import in source.imports() {
            let is_item = import.starts_with(char::is_uppercase);
            if import != own && !is_item && !allowed.contains(&import) {
                breaches.push(format!("{} imports {import}", source.path));
            }
        }
    }
    assert_none(&breaches);
}

#[test]
fn no_file_is_long() {
    let mut breaches = Vec::new();
    for source in sources()
        .iter()
        .chain(&files("tests", ".rs"))
        .chain(&files("benches", ".rs"))
    {
        let lines = source.text.lines().count();
        if lines > FILE_LINES_MAX {
            breaches.push(format!("{} has {lines} lines", source.path));
        }
    }
    assert_none(&breaches);
}

/// Enough is said for a reader, and not so much that nobody keeps it true.
#[test]
fn doc_comments_keep_their_share() {
    let (mut docs, mut all) = (0, 0);
    for source in sources() {
        for line in source
            .text
            .lines()
            .map(str::trim)
            .filter(|line| !line.is_empty())
        {
            all += 1;
            docs += usize::from(line.starts_with("///") || line.starts_with("//!"));
        }
    }
    let percent = 100 * docs / all;
    assert!((8..=20).contains(&percent), "{percent} % of {all} lines");
}

/// Constants of `telemetry::metric`, by their values.
fn metric_names() -> BTreeSet<String> {
    let text = fs::read_to_string(root().join("src/telemetry/metric.rs")).unwrap();
    let quoted = text.split('"').skip(1).step_by(2);
    let names = quoted.filter(|name| {
        name.starts_with("oncegate_") && name.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'_'))
    });
    names.map(str::to_owned).collect()
}

#[test]
fn every_metric_is_in_the_operators_manual() {
    let manual = fs::read_to_string(root().join("docs/OPERATING.md")).unwrap_or_default();
    let names = metric_names();
    assert!(names.len() > 10, "{names:?}");
    let missing = names
        .into_iter()
        .filter(|name| !manual.contains(name.as_str()));
    assert_none(&missing.collect::<Vec<_>>());
}

#[test]
fn every_problem_has_a_page_and_every_page_a_problem() {
    let slugs: BTreeSet<_> = Kind::all().map(Kind::slug).collect();
    let pages = files("docs/problems", ".md");
    let page_of = |source: &Source| {
        let name = source.path.rsplit('/').next().unwrap_or_default();
        name.trim_end_matches(".md").to_owned()
    };
    let pages: BTreeSet<_> = pages.iter().map(page_of).collect();
    let mut breaches = Vec::new();
    for slug in slugs.iter().filter(|slug| !pages.contains(**slug)) {
        breaches.push(format!("{slug} has no page"));
    }
    let index = ["README", "index"];
    for page in pages.iter().filter(|page| !index.contains(&page.as_str())) {
        if !slugs.contains(page.as_str()) {
            breaches.push(format!("{page} is no problem"));
        }
    }
    assert_none(&breaches);
}

/// The two stores have the same migrations and the same tables.
#[test]
fn migrations_come_in_pairs() {
    let names = |folder: &str| -> Vec<String> {
        let found = files(folder, ".sql");
        let name = |source: &Source| {
            source
                .path
                .rsplit('/')
                .next()
                .unwrap_or_default()
                .to_owned()
        };
        found.iter().map(name).collect()
    };
    let (postgres, sqlite) = (names("migrations/postgres"), names("migrations/sqlite"));
    assert!(!postgres.is_empty());
    assert_eq!(postgres, sqlite);
}

/// Words that must not stand anywhere: unfinished work, loosened lints, paths of one machine.
#[test]
fn nothing_unfinished_and_no_machine_is_named() {
    let forbidden = [
        concat!("todo", "!("),
        concat!("unimplemented", "!("),
        concat!("FIX", "ME"),
        concat!("#[al", "low("),
        concat!("#![al", "low("),
        concat!("/home", "/"),
        concat!("/Users", "/"),
        concat!("/work", "/"),
        concat!("/root", "/"),
    ];
    let mut breaches = Vec::new();
    let folders = [
        "src",
        "tests",
        "benches",
        "migrations",
        "docs",
        "deploy",
        "scripts",
        ".ci",
    ];
    for source in folders.iter().flat_map(|folder| files(folder, "")) {
        for word in forbidden.iter().filter(|word| source.text.contains(**word)) {
            breaches.push(format!("{} has `{word}`", source.path));
        }
    }
    assert_none(&breaches);
}

/// Every crate that is linked has a licence that the product's own allows.
#[test]
fn every_dependency_has_an_allowed_licence() {
    let cargo = std::process::Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--locked"])
        .current_dir(root())
        .output()
        .expect("cargo runs");
    let told = String::from_utf8_lossy(&cargo.stderr).into_owned();
    assert!(cargo.status.success(), "{told}");
    let metadata: serde_json::Value = serde_json::from_slice(&cargo.stdout).unwrap();
    let mut breaches = Vec::new();
    for package in metadata["packages"].as_array().unwrap() {
        let licence = package["license"].as_str().unwrap_or_default();
        if !is_allowed(licence) {
            breaches.push(format!("{}: `{licence}`", package["name"]));
        }
    }
    assert_none(&breaches);
}

/// The licences of `deny.toml`.
fn allowed_licences() -> Vec<String> {
    let text = fs::read_to_string(root().join("deny.toml")).unwrap();
    let table: toml::Table = text.parse().unwrap();
    let allowed = table["licenses"]["allow"].as_array().unwrap();
    let names = allowed.iter().map(|name| name.as_str().unwrap().to_owned());
    names.collect()
}

/// Whether an SPDX expression can be met: every term of some alternative is allowed.
fn is_allowed(expression: &str) -> bool {
    let allowed = allowed_licences();
    // Older crates write `/` for OR. Nested groups are read from the inside out.
    let mut expression = expression.replace('/', " OR ");
    let met = |group: &str| {
        group.split(" OR ").any(|alternative| {
            let mut terms = alternative.split(" AND ").map(str::trim);
            terms.all(|term| term == "met" || allowed.iter().any(|name| name == term))
        })
    };
    while let Some(open) = expression.rfind('(') {
        let Some(length) = expression[open..].find(')') else {
            return false;
        };
        let inner = if met(&expression[open + 1..open + length]) {
            "met"
        } else {
            "unmet"
        };
        expression.replace_range(open..=open + length, inner);
    }
    !expression.trim().is_empty() && met(&expression)
}

#[test]
fn licence_expressions_are_read_right() {
    for allowed in [
        "MIT",
        "MIT OR Apache-2.0",
        "MIT/Apache-2.0",
        "GPL-3.0 OR MIT",
    ] {
        assert!(is_allowed(allowed), "{allowed}");
    }
    for refused in [
        "",
        "GPL-3.0",
        "MIT AND GPL-3.0",
        "(GPL-2.0 OR GPL-3.0) AND MIT",
    ] {
        assert!(!is_allowed(refused), "{refused}");
    }
    assert!(is_allowed("(MIT OR Apache-2.0) AND Unicode-3.0"));
}
