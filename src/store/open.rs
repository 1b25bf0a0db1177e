//! From the store's URL to a store, and every way in which that fails at start-up.

use std::error::Error;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sqlx::migrate::MigrateError;
use sqlx::postgres::PgConnectOptions;
use tokio_util::task::TaskTracker;

use super::postgres::{self, PostgresStore};
use super::sqlite::SqliteStore;
use super::{Store, StoreError};
use crate::config::StoreConfig;

/// Opens the store that the configuration names. Its tasks run on `tracker` and end when it is
/// closed.
///
/// # Errors
/// When it can't be used; each kind tells what to do.
pub async fn open(
    config: &StoreConfig,
    tracker: &TaskTracker,
) -> Result<Arc<dyn Store>, OpenError> {
    match Target::parse(&config.url)? {
        Target::Sqlite(path) => Ok(Arc::new(SqliteStore::open(&path, config.migrate).await?)),
        Target::Postgres(_) => Ok(Arc::new(PostgresStore::open(config, tracker).await?)),
    }
}

/// What a store's URL names.
#[derive(Clone)]
pub enum Target {
    /// One SQLite file.
    Sqlite(PathBuf),
    /// A PostgreSQL database, by each of the hosts that may have it; passwords included.
    Postgres(Vec<PgConnectOptions>),
}

/// Why there is no store to start with. No text here repeats the URL: it may hold a password.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Neither of the two forms.
    #[error(
        "the store's URL is not understood ({0}); write sqlite:PATH or postgres://USER:PASSWORD@HOST:PORT/DATABASE"
    )]
    Url(&'static str),
    /// Another process holds the SQLite file.
    #[error(
        "{path} is in use by another process; one gateway at a time may use a SQLite file: stop the other one first, or let several gateways share PostgreSQL"
    )]
    InUse {
        /// The database file.
        path: PathBuf,
    },
    /// The file, its directory or its lock can't be used.
    #[error("{path} can't be used as a store: {advice}")]
    File {
        /// What can't be used.
        path: PathBuf,
        /// What to do.
        advice: &'static str,
        /// What the system or SQLite said.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// PostgreSQL did not take the connection.
    #[error(
        "the database can't be reached or does not let us in; check that it runs, and host, port, database, user and password in the store's URL"
    )]
    Unreachable(#[source] sqlx::Error),
    /// The server is older than any that is supported.
    #[error("the database is PostgreSQL {found}; Oncegate needs {least} or newer")]
    TooOld {
        /// The server's major version.
        found: u32,
        /// The oldest one that will do.
        least: u32,
    },
    /// A newer program has migrated the schema.
    #[error(
        "the database has schema version {database}, this program knows none above {program}; start the newer program again, or restore a backup from before its migration"
    )]
    NewerSchema {
        /// The newest migration that was applied.
        database: i64,
        /// The newest migration that this program holds.
        program: i64,
    },
    /// A migration of the same number has another text.
    #[error(
        "schema version {0} in the database was made by another migration than this program's; use the program that made it, or another database"
    )]
    OtherSchema(i64),
    /// Migrations are missing and were not to be applied.
    #[error(
        "the schema is behind this program by {0} migration(s); run `oncegate migrate`, or let `serve` migrate"
    )]
    Behind(usize),
    /// A migration failed; the schema is as it was.
    #[error(
        "a migration failed and nothing was changed; the cause tells what the database refused"
    )]
    Migration(#[source] MigrateError),
    /// The store failed once it was open.
    #[error("the store failed at start-up")]
    Store(#[from] StoreError),
}

impl Target {
    /// Reads a store's URL: `sqlite:PATH` or `postgres://…`.
    ///
    /// # Errors
    /// [`OpenError::Url`], for everything else.
    pub fn parse(url: &str) -> Result<Self, OpenError> {
        if let Some(rest) = url.strip_prefix("sqlite:") {
            return sqlite_path(rest.strip_prefix("//").unwrap_or(rest));
        }
        if url.starts_with("postgres://") || url.starts_with("postgresql://") {
            return postgres::hosts(url).map(Self::Postgres);
        }
        Err(OpenError::Url(
            "it begins neither with sqlite: nor with postgres://",
        ))
    }
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sqlite(path) => write!(f, "Sqlite({})", path.display()),
            Self::Postgres(_) => write!(f, "Postgres"),
        }
    }
}

fn sqlite_path(path: &str) -> Result<Target, OpenError> {
    match path {
        "" => Err(OpenError::Url("the path is empty")),
        ":memory:" => Err(OpenError::Url(
            "a store must outlive the process, memory does not",
        )),
        path if path.contains(['?', '\0']) => {
            Err(OpenError::Url("options behind the path are not supported"))
        }
        path => Ok(Target::Sqlite(Path::new(path).to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(url: &str) -> Option<String> {
        match Target::parse(url) {
            Ok(Target::Sqlite(path)) => Some(path.display().to_string()),
            _ => None,
        }
    }

    #[test]
    fn both_kinds_of_url_are_read() {
        assert_eq!(path("sqlite:oncegate.db").as_deref(), Some("oncegate.db"));
        assert_eq!(path("sqlite://a/b.db").as_deref(), Some("a/b.db"));
        assert_eq!(path("sqlite:///var/b.db").as_deref(), Some("/var/b.db"));
        for url in ["postgres://u:p@h:5432/d", "postgresql:///d?host=/run/pg"] {
            assert!(matches!(Target::parse(url), Ok(Target::Postgres(_))));
        }
    }

    #[test]
    fn what_is_not_understood_is_refused_without_repeating_it() {
        for url in [
            "",
            "mysql://u:hunter2@h/d",
            "oncegate.db",
            "sqlite:",
            "sqlite::memory:",
            "sqlite:a.db?mode=memory&x=hunter2",
            "postgres://u:hunter2@h:port/d",
        ] {
            let error = Target::parse(url).unwrap_err();
            assert!(matches!(error, OpenError::Url(_)), "{url}");
            assert!(!format!("{error} {error:?}").contains("hunter2"));
        }
    }
}
