//! The schema's migrations, embedded in the program, for both databases.
//!
//! All that are missing are applied in one transaction, so the schema is never half-way and a
//! transaction pooler in front of PostgreSQL sees one unit. Any number of processes may do it at
//! once: on SQLite the write lock puts them in line; on PostgreSQL the one that comes second fails
//! on what the first has just created, looks again and finds nothing left to do. No advisory lock
//! is taken: a transaction pooler would strand it, and some databases only pretend to have them.

use std::path::Path;
use std::time::Duration;

use sqlx::migrate::{Migrate, MigrateError, Migration, Migrator};
use sqlx::postgres::PgConnectOptions;
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode};
use sqlx::{ConnectOptions, Connection, PgConnection, SqliteConnection};
use tokio::time::Instant;

use super::open::{OpenError, Target};
use super::postgres::connect_plain;
use super::sqlite::{FileLock, unopened};

/// Where the applied migrations are listed; our own table, since the database may be shared with a
/// program that uses the same library.
const TABLE: &str = "eec_migration";
/// How often a migration is tried again that met another process's.
const TRIES_MAX: u32 = 5;
/// Between two tries.
const PAUSE: Duration = Duration::from_millis(200);
/// How long connecting to PostgreSQL may take.
const CONNECT_MAX: Duration = Duration::from_secs(10);
/// How long `apply` waits for another process that may be migrating the same file.
const LOCK_WAIT: Duration = Duration::from_secs(5);

/// What sqlx prepares to list migrations stays on the server's connection, which a transaction
/// pooler hands to others, who may use the same names.
const FORGET: &str = "deallocate all";
/// What an earlier program may have left there would be in our way.
const POSTGRES_BEGIN: &str = "begin; deallocate all";

/// One migration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Counts up from 1.
    pub version: i64,
    /// Its name.
    pub description: String,
}

/// The migrations that the database lacks, oldest first. Writes nothing; a SQLite file that is not
/// there yet lacks all of them.
///
/// # Errors
/// When the database can't be reached or its schema is not one of ours.
pub async fn pending(url: &str) -> Result<Vec<Step>, OpenError> {
    match Target::parse(url)? {
        Target::Sqlite(path) => {
            if !path.exists() {
                return Ok(steps(&sqlite_migrator(), &[]));
            }
            let options = sqlite_options(&path).read_only(true);
            let conn = options.connect().await;
            let mut conn = conn.map_err(|error| unopened(error, &path))?;
            sqlite(&mut conn, &path, false).await
        }
        Target::Postgres(hosts) => {
            let mut conn = postgres_connect(&hosts).await?;
            postgres(&mut conn, false).await
        }
    }
}

/// Applies the migrations that the database lacks and returns them, oldest first.
///
/// # Errors
/// When the database can't be reached, its schema is not one of ours, a SQLite file is in use by
/// a gateway, or a migration fails; then nothing was changed.
pub async fn apply(url: &str) -> Result<Vec<Step>, OpenError> {
    match Target::parse(url)? {
        Target::Sqlite(path) => {
            let lock = FileLock::wait(&path, LOCK_WAIT).await?;
            lock.make_database()?;
            let path = lock.database();
            let options = sqlite_options(path).create_if_missing(true);
            let options = options.journal_mode(SqliteJournalMode::Wal);
            let conn = options.connect().await;
            let mut conn = conn.map_err(|error| unopened(error, path))?;
            let done = sqlite(&mut conn, path, true).await;
            conn.close().await.map_err(|error| unopened(error, path))?;
            done
        }
        Target::Postgres(hosts) => {
            let mut conn = postgres_connect(&hosts).await?;
            postgres(&mut conn, true).await
        }
    }
}

/// The same for an open connection: what was missing, and with `apply` no longer is.
///
/// # Errors
/// As for [`pending`] and [`apply`].
pub async fn sqlite(
    conn: &mut SqliteConnection,
    path: &Path,
    apply: bool,
) -> Result<Vec<Step>, OpenError> {
    let migrator = sqlite_migrator();
    let listed = "select exists (select 1 from sqlite_schema where name = 'eec_migration')";
    let begin = if apply { "begin immediate" } else { "begin" };
    let tx = conn.begin_with(begin).await;
    let mut tx = tx.map_err(|error| unopened(error, path))?;
    let listed = sqlx::query_scalar(listed).fetch_one(&mut *tx).await;
    let listed = listed.map_err(|error| unopened(error, path))?;
    let missing = missing(&mut *tx, &migrator, listed).await?;
    if apply && !missing.is_empty() {
        let run = migrator.run_direct(None, &mut *tx, false).await;
        run.map_err(OpenError::Migration)?;
    }
    tx.commit()
        .await
        .map_err(|error| OpenError::Migration(error.into()))?;
    Ok(missing)
}

/// The same for PostgreSQL.
///
/// # Errors
/// As for [`pending`] and [`apply`].
pub async fn postgres(conn: &mut PgConnection, apply: bool) -> Result<Vec<Step>, OpenError> {
    let mut tries = 1;
    loop {
        match postgres_once(conn, apply).await {
            Err(OpenError::Migration(error)) if tries < TRIES_MAX && is_refusal(&error) => {
                tries += 1;
                tokio::time::sleep(PAUSE).await;
            }
            done => return done,
        }
    }
}

async fn postgres_once(conn: &mut PgConnection, apply: bool) -> Result<Vec<Step>, OpenError> {
    let migrator = postgres_migrator();
    let listed = "select to_regclass('eec_migration') is not null";
    let begin = conn.begin_with(POSTGRES_BEGIN).await;
    let mut tx = begin.map_err(OpenError::Unreachable)?;
    let listed = sqlx::query_scalar(listed).fetch_one(&mut *tx).await;
    let missing = missing(&mut *tx, &migrator, listed.map_err(OpenError::Unreachable)?).await?;
    if apply && !missing.is_empty() {
        let run = migrator.run_direct(None, &mut *tx, false).await;
        run.map_err(OpenError::Migration)?;
    }
    let end = async {
        sqlx::raw_sql(FORGET).execute(&mut *tx).await?;
        tx.commit().await
    };
    end.await
        .map_err(|error| OpenError::Migration(error.into()))?;
    Ok(missing)
}

/// What `migrator` holds and the database lacks, once every migration that was applied is known.
async fn missing<C: Migrate>(
    conn: &mut C,
    migrator: &Migrator,
    listed: bool,
) -> Result<Vec<Step>, OpenError> {
    let program = migrator.iter().map(|known| known.version).max();
    let program = program.unwrap_or_default();
    let mut applied = Vec::new();
    if listed {
        let list = conn.list_applied_migrations(TABLE).await;
        applied = list.map_err(OpenError::Migration)?;
    }
    let newest = applied.iter().map(|applied| applied.version).max();
    let newest = newest.unwrap_or_default();
    for applied in &applied {
        let known = migrator
            .iter()
            .find(|known| known.version == applied.version);
        match known {
            Some(known) if known.checksum == applied.checksum => {}
            None if newest > program => {
                let database = newest;
                return Err(OpenError::NewerSchema { database, program });
            }
            _ => return Err(OpenError::OtherSchema(applied.version)),
        }
    }
    let applied: Vec<i64> = applied.iter().map(|applied| applied.version).collect();
    Ok(steps(migrator, &applied))
}

fn steps(migrator: &Migrator, applied: &[i64]) -> Vec<Step> {
    let missing = migrator
        .iter()
        .filter(|known| !applied.contains(&known.version));
    let step = |known: &Migration| Step {
        version: known.version,
        description: known.description.to_string(),
    };
    missing.map(step).collect()
}

/// Whether the database answered and said no, as it does to the second of two that migrate.
fn is_refusal(error: &MigrateError) -> bool {
    match error {
        MigrateError::Execute(error) | MigrateError::ExecuteMigration(error, _) => {
            matches!(error, sqlx::Error::Database(_))
        }
        _ => false,
    }
}

fn sqlite_migrator() -> Migrator {
    configured(sqlx::migrate!("./migrations/sqlite"))
}

fn postgres_migrator() -> Migrator {
    configured(sqlx::migrate!("./migrations/postgres"))
}

fn configured(mut migrator: Migrator) -> Migrator {
    migrator.dangerous_set_table_name(TABLE);
    migrator.set_locking(false);
    migrator
}

fn sqlite_options(path: &Path) -> SqliteConnectOptions {
    SqliteConnectOptions::new()
        .filename(path)
        .disable_statement_logging()
}

async fn postgres_connect(hosts: &[PgConnectOptions]) -> Result<PgConnection, OpenError> {
    connect_plain(hosts, Instant::now() + CONNECT_MAX).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_migration_is_embedded_and_both_databases_have_the_same() {
        let [sqlite, postgres] = [sqlite_migrator(), postgres_migrator()].map(|migrator| {
            let names = migrator.iter().map(|known| {
                let name = known.description.replace(' ', "_");
                format!("{:04}_{name}.sql", known.version)
            });
            names.collect::<Vec<_>>()
        });
        assert_eq!(sqlite, postgres);
        // The compiler does not notice a new file: touch this one.
        for directory in ["migrations/sqlite", "migrations/postgres"] {
            let files = std::fs::read_dir(directory).unwrap();
            let mut files: Vec<_> = files
                .map(|file| file.unwrap().file_name().into_string().unwrap())
                .collect();
            files.sort();
            assert_eq!(files, sqlite, "{directory}");
        }
    }
}
