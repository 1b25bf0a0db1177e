//! What only SQLite can do wrong: full disks, locked files, broken cells, plans that scan.

use std::path::PathBuf;

use uuid::Uuid;

use super::*;
use crate::domain::key::IdempotencyKey;
use crate::domain::message::Recorded;
use crate::domain::policy::OnUnknown;
use crate::domain::record::{GenerationId, Terms};
use crate::domain::scope::PoolId;
use crate::ids;

#[tokio::test]
async fn a_full_disk_refuses_writes_whole_and_the_store_goes_on_once_there_is_room() {
    let on = Stand::open().await;
    let first = claim("first");
    on.store.reserve(slice(&first)).await.unwrap();
    let pages: i64 = on.ask_writer("pragma page_count").await;
    let before = on.rows().await;
    // The record fits, its decision does not: neither is there afterwards.
    for _ in 0..3 {
        // SQLite undoes it all by itself, so the store goes on with another connection each time.
        on.tell_writer(format!("pragma max_page_count = {}", pages + 2))
            .await;
        let error = on.store.complete(&[completion(&first, 1 << 20)]).await;
        let error = error.unwrap_err();
        assert!(matches!(error, StoreError::Refused(_)), "{error:?}");
        assert!(!error.may_have_happened());
        assert_eq!(on.rows().await, before);
    }
    assert!(
        on.store
            .look_up(std::slice::from_ref(&first.key))
            .await
            .unwrap()[0]
            .is_some()
    );
    on.tell_writer("pragma max_page_count = 1000000".to_owned())
        .await;
    let done = on
        .store
        .complete(&[completion(&first, 1 << 20)])
        .await
        .unwrap();
    assert!(done[0].is_some());
    on.store.close().await;
}

#[tokio::test]
async fn a_file_that_turned_read_only_refuses_writes_and_still_answers() {
    let on = Stand::open().await;
    on.store.reserve(&[claim("k")]).await.unwrap();
    on.tell_writer("pragma query_only = on".to_owned()).await;
    let error = on.store.reserve(&[claim("other")]).await.unwrap_err();
    assert!(matches!(error, StoreError::Refused(_)), "{error:?}");
    assert!(on.store.look_up(&[key("k")]).await.unwrap()[0].is_some());
    on.tell_writer("pragma query_only = off".to_owned()).await;
    on.store.reserve(&[claim("other")]).await.unwrap();
    on.store.close().await;
}

#[tokio::test]
async fn a_file_locked_by_a_shell_is_waited_for_and_then_counts_as_unreachable() {
    let on = Stand::open().await;
    on.tell_writer("pragma busy_timeout = 1".to_owned()).await;
    let mut shell = options(&on.path).connect().await.unwrap();
    sqlx::query("begin immediate")
        .execute(&mut shell)
        .await
        .unwrap();
    let error = on.store.reserve(&[claim("k")]).await.unwrap_err();
    assert!(matches!(error, StoreError::Unavailable(_)), "{error:?}");
    // The writer that comes next waits again, and here it does not wait in vain.
    let claims = [claim("k")];
    let (reserved, freed) = tokio::join!(
        on.store.reserve(&claims),
        sqlx::query("rollback").execute(&mut shell)
    );
    freed.unwrap();
    assert!(matches!(reserved.unwrap()[0], Reserved::Won(_)));
    on.store.close().await;
}

#[tokio::test]
async fn an_error_in_a_transaction_undoes_what_came_before_it() {
    let on = Stand::open().await;
    let failed: Result<(), StoreError> = on
        .store
        .write(|connection, now_ms| {
            async move {
                batches::reserve(connection, now_ms, &[claim("k")]).await?;
                Err(StoreError::Closed)
            }
            .boxed()
        })
        .await;
    assert!(matches!(failed, Err(StoreError::Closed)));
    assert!(on.store.look_up(&[key("k")]).await.unwrap()[0].is_none());
    assert!(matches!(
        on.store.reserve(&[claim("k")]).await.unwrap()[0],
        Reserved::Won(_)
    ));
    on.store.close().await;
}

#[tokio::test]
async fn a_panic_in_a_transaction_is_ambiguous_and_the_next_one_runs() {
    let on = Stand::open().await;
    let failed: Result<(), StoreError> = on
        .store
        .write(|connection, now_ms| {
            async move {
                batches::reserve(connection, now_ms, &[claim("k")]).await?;
                panic!("as a bug would")
            }
            .boxed()
        })
        .await;
    assert!(matches!(failed, Err(StoreError::Ambiguous(_))));
    assert!(matches!(
        on.store.reserve(&[claim("k")]).await.unwrap()[0],
        Reserved::Won(_)
    ));
    on.store.close().await;
}

#[tokio::test]
async fn no_cell_can_make_the_program_panic() {
    let records = [
        ("attempt_token", "x'00'"),
        ("attempt_token", "'text'"),
        ("generation", "'many'"),
        ("generation_id", "x''"),
        ("fingerprint", "x'0102'"),
        ("fingerprint_version", "null"),
        ("lease_ms", "-1"),
        ("lease_ms", "9e300"),
        ("valid_for_ms", "'long'"),
        ("tombstone_for_ms", "x'00'"),
        ("status", "'gone'"),
        ("on_unknown", "x'ff'"),
        ("lease_expires_at", "'soon'"),
        ("created_at", "9223372036854775807"),
        ("reserved_at", "-9223372036854775808"),
        ("reserved_at", "1.5"),
    ];
    for (column, value) in records {
        let on = Stand::open().await;
        on.store.reserve(&[claim("k")]).await.unwrap();
        on.break_cell("eec_routing_idempotency", column, value)
            .await;
        let error = on.store.look_up(&[key("k")]).await.unwrap_err();
        named(&error, "eec_routing_idempotency", column);
        assert!(
            on.store
                .find(&Search {
                    limit: 9,
                    ..Search::default()
                })
                .await
                .is_err()
        );
        on.store.close().await;
    }
    let decisions = [
        ("created_at", "9223372036854775807"),
        ("valid_until", "'never'"),
        ("decided_by", "x'ff'"),
        ("answer_status", "0"),
        ("answer_status", "70000"),
        ("answer_headers", "'no colon'"),
        ("answer_body", "17"),
    ];
    for (column, value) in decisions {
        let on = Stand::open().await;
        let claim = claim("k");
        on.store.reserve(slice(&claim)).await.unwrap();
        let completion = completion(&claim, 3);
        on.store
            .complete(std::slice::from_ref(&completion))
            .await
            .unwrap();
        on.break_cell("eec_routing_decision", column, value).await;
        let decision = on
            .store
            .decision(&claim.key.tenant, completion.decision_id)
            .await;
        named(&decision.unwrap_err(), "eec_routing_decision", column);
        on.store.close().await;
    }
}

#[tokio::test]
async fn no_statement_looks_at_every_row() {
    let on = Stand::open().await;
    let statements = upkeep::STATEMENTS
        .into_iter()
        .chain(records::STATEMENTS)
        .chain(runs::commit::STATEMENTS)
        .chain(runs::load::STATEMENTS)
        .chain(runs::search::STATEMENTS)
        .chain(runs::purge::statements())
        .chain(remembered::STATEMENTS)
        .chain(outbox::claims::STATEMENTS)
        .chain(outbox::ends::STATEMENTS)
        .chain(outbox::operators::STATEMENTS);
    let statements = statements.map(str::to_owned).chain(batches::statements());
    let mut breaches = Vec::new();
    for sql in statements {
        let plan = on.plan(sql.clone()).await;
        assert!(!plan.is_empty(), "{sql}");
        for line in plan {
            let whole = line.starts_with("SCAN") && !line.contains("INDEX") && !is_a_batch(&line);
            if whole {
                breaches.push(format!("{line}: {sql}"));
            }
        }
    }
    assert!(breaches.is_empty(), "{breaches:#?}");
    on.store.close().await;
}

#[tokio::test]
async fn what_is_due_is_found_by_steps_in_the_index() {
    let on = Stand::open().await;
    let due = "(tenant_scope=? AND destination=? AND due_at<?)";
    let lanes = [
        "((tenant_scope,destination)>(?,?))",
        "(tenant_scope=? AND destination>?)",
        "(tenant_scope>?)",
        due,
    ];
    let statements = [
        (outbox::claims::LANES, &lanes[..]),
        (outbox::claims::DUE, &[due]),
    ];
    for (sql, steps) in statements {
        let plan = on.plan(sql.to_owned()).await;
        let of_intents = plan
            .iter()
            .filter_map(|line| line.split_once("eec_effect_intent_due "));
        let found: Vec<&str> = of_intents.map(|(_, step)| step).collect();
        assert_eq!(found, steps, "{plan:?}");
        // Nothing is sorted.
        assert!(plan.iter().all(|line| !line.contains("B-TREE")), "{plan:?}");
    }
    on.store.close().await;
}

/// Whether a line of a plan goes through the rows of a statement itself.
fn is_a_batch(line: &str) -> bool {
    let parts = [
        "SCAN v",
        "SCAN 2-ROW VALUES",
        "SCAN CONSTANT ROW",
        "SCAN (subquery",
        "SCAN lane",
    ];
    // The present, one change, and the tenants that were found so far.
    let own = ["SCAN n", "SCAN c", "SCAN t", "SCAN tenants"];
    own.contains(&line) || parts.iter().any(|part| line.starts_with(part))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_log_starts_anew_under_steady_writing() {
    const BODY_BYTES: usize = 1 << 20;
    const WRITES: usize = 96;
    let on = Stand::open().await;
    let log = on.path.with_extension("db-wal");
    let writing = async {
        for number in 0..WRITES {
            let claim = claim(&format!("k{number}"));
            on.store.reserve(slice(&claim)).await.unwrap();
            let done = on.store.complete(&[completion(&claim, BODY_BYTES)]).await;
            assert!(done.unwrap()[0].is_some());
        }
    };
    let mut longest = 0;
    let rounds = async {
        let options = options(&on.path);
        let mut connection = None;
        loop {
            let round = checkpoint::round(&on.store.writer, &options, &mut connection);
            round.await.unwrap();
            longest = longest.max(std::fs::metadata(&log).unwrap().len());
        }
    };
    tokio::select! {
        () = writing => {}
        () = rounds => {}
    }
    let written = (WRITES * BODY_BYTES) as u64;
    assert!(longest < written / 2, "{longest} of {written} bytes");
    on.store.close().await;
}

#[tokio::test]
async fn a_closed_store_leaves_its_file_alone_in_the_directory() {
    let on = Stand::open().await;
    on.store.reserve(&[claim("k")]).await.unwrap();
    assert!(on.store.look_up(&[key("k")]).await.unwrap()[0].is_some());
    on.store.close().await;
    let files = std::fs::read_dir(on.path.parent().unwrap()).unwrap();
    let mut files: Vec<_> = files.map(|file| file.unwrap().file_name()).collect();
    files.sort();
    assert_eq!(files, ["store.db", "store.db.lock"]);
}

struct Stand {
    store: SqliteStore,
    path: PathBuf,
    _directory: tempfile::TempDir,
}

impl Stand {
    async fn open() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store.db");
        Self {
            store: SqliteStore::open(&path, true).await.unwrap(),
            path,
            _directory: directory,
        }
    }

    /// The lines of a statement's plan.
    async fn plan(&self, sql: String) -> Vec<String> {
        let sql = sqlx::AssertSqlSafe(format!("explain query plan {sql}"));
        let plan = self.store.read(|connection, _| {
            async move {
                sqlx::query_as(sql)
                    .fetch_all(connection)
                    .await
                    .map_err(failure::before)
            }
            .boxed()
        });
        let plan: Vec<(i64, i64, i64, String)> = plan.await.unwrap();
        plan.into_iter().map(|(.., line)| line).collect()
    }

    /// Runs a statement on the writing connection.
    async fn tell_writer(&self, sql: String) {
        let told = self.store.write(|connection, _| {
            async move {
                statement::run(connection, sqlx::query(sqlx::AssertSqlSafe(sql))).await?;
                Ok(())
            }
            .boxed()
        });
        told.await.unwrap();
    }

    async fn ask_writer(&self, sql: &'static str) -> i64 {
        let asked = self.store.write(move |connection, _| {
            async move {
                sqlx::query_scalar(sql)
                    .fetch_one(connection)
                    .await
                    .map_err(failure::before)
            }
            .boxed()
        });
        asked.await.unwrap()
    }

    /// Writes what no version of this program would.
    async fn break_cell(&self, table: &str, column: &str, value: &str) {
        let mut shell = options(&self.path).connect().await.unwrap();
        let unchecked = "pragma ignore_check_constraints = on";
        sqlx::query(unchecked).execute(&mut shell).await.unwrap();
        let sql = format!("update {table} set {column} = {value}");
        sqlx::query(sqlx::AssertSqlSafe(sql))
            .execute(&mut shell)
            .await
            .unwrap();
    }

    async fn rows(&self) -> (i64, i64) {
        let mut shell = options(&self.path).connect().await.unwrap();
        sqlx::query_as(
            "select (select count(*) from eec_routing_idempotency where status = 'pending'), \
                    (select count(*) from eec_routing_decision)",
        )
        .fetch_one(&mut shell)
        .await
        .unwrap()
    }
}

fn named(error: &StoreError, table: &str, column: &str) {
    let StoreError::Inconsistent {
        table: t,
        column: c,
        ..
    } = error
    else {
        panic!("{column}: {error:?}");
    };
    assert_eq!((*t, *c), (table, column), "{error}");
}

fn slice(claim: &Claim) -> &[Claim] {
    std::slice::from_ref(claim)
}

fn key(name: &str) -> RecordKey {
    RecordKey {
        tenant: TenantScope::named(b"acme").unwrap(),
        pool: PoolId::new("payments").unwrap(),
        key: IdempotencyKey::from_text(name).unwrap().unwrap(),
    }
}

fn claim(name: &str) -> Claim {
    let hour = Duration::from_hours(1);
    Claim {
        request_id: None,
        key: key(name),
        token: ids::attempt_token(),
        generation_id: GenerationId(Uuid::nil()),
        fingerprint: Some(crate::domain::fingerprint::Fingerprint {
            version: 1,
            hash: [7; 32],
        }),
        terms: Terms {
            lease: hour,
            valid_for: hour,
            tombstone_for: Duration::ZERO,
            on_unknown: OnUnknown::Hold,
        },
    }
}

fn completion(claim: &Claim, body_bytes: usize) -> Completion {
    let body = Some(vec![b'x'; body_bytes].into());
    Completion {
        key: claim.key.clone(),
        token: claim.token,
        decision_id: ids::decision_id(),
        decided_by: "gateway".into(),
        run: None,
        recorded: Recorded::new(200, &http::HeaderMap::new(), body, None, false),
    }
}
