//! The lock that keeps a second process off the file.
//!
//! It is the operating system's, on a file beside the database that is never removed, so it ends
//! with the process however that dies.

use std::ffi::OsString;
use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::Instant;

use crate::store::open::OpenError;

/// What is made here is for the gateway's user alone: the database holds answers, and the secret of
/// every keyed hash. SQLite makes the files beside it with the same mode.
const MODE: u32 = 0o600;
/// Between two looks at a lock that is held.
const PAUSE: Duration = Duration::from_millis(20);

/// The right to use one database file; given back when dropped.
#[derive(Debug)]
pub struct FileLock {
    database: PathBuf,
    _file: File,
}

impl FileLock {
    /// Takes the lock of the database at `path`, which need not exist yet; its directory must.
    ///
    /// # Errors
    /// [`OpenError::InUse`] when another process has it, [`OpenError::File`] when there can't be
    /// one.
    pub fn take(path: &Path) -> Result<Self, OpenError> {
        let database = resolve(path)?;
        let mut lock = OsString::from(&database);
        lock.push(".lock");
        let file = make(Path::new(&lock))?;
        match file.try_lock() {
            Ok(()) => Ok(Self {
                database,
                _file: file,
            }),
            Err(TryLockError::WouldBlock) => Err(OpenError::InUse { path: database }),
            Err(TryLockError::Error(source)) => Err(OpenError::File {
                path: database,
                advice: "use a file system that has locks",
                source: source.into(),
            }),
        }
    }

    /// The same, but waits up to `patience` for another process to give it back.
    ///
    /// # Errors
    /// As for [`FileLock::take`].
    pub async fn wait(path: &Path, patience: Duration) -> Result<Self, OpenError> {
        let deadline = Instant::now() + patience;
        loop {
            match Self::take(path) {
                Err(OpenError::InUse { .. }) if Instant::now() < deadline => {
                    tokio::time::sleep(PAUSE).await;
                }
                taken => return taken,
            }
        }
    }

    /// Makes an empty database where there is none, readable by the gateway's user alone. One that
    /// is there keeps its mode.
    ///
    /// # Errors
    /// [`OpenError::File`] when there can't be one.
    pub fn make_database(&self) -> Result<(), OpenError> {
        make(&self.database).map(drop)
    }

    /// The database's path, the same by whichever link it was reached.
    pub fn database(&self) -> &Path {
        &self.database
    }
}

fn make(path: &Path) -> Result<File, OpenError> {
    let mut options = OpenOptions::new();
    let options = options.create(true).truncate(false).write(true).mode(MODE);
    options.open(path).map_err(|source| OpenError::File {
        path: path.to_owned(),
        advice: "let the gateway's user write it, and in its directory",
        source: source.into(),
    })
}

/// One name for one file: two links to it must not make two locks.
fn resolve(path: &Path) -> Result<PathBuf, OpenError> {
    let refuse = |advice, source: io::Error| OpenError::File {
        path: path.to_owned(),
        advice,
        source: source.into(),
    };
    match path.canonicalize() {
        Ok(found) if found.is_dir() => {
            let source = io::ErrorKind::IsADirectory.into();
            Err(refuse("name a file, not a directory", source))
        }
        Ok(found) => Ok(found),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
                return Err(refuse("name a file", error));
            };
            let here = parent.as_os_str().is_empty();
            let parent = if here { Path::new(".") } else { parent };
            let parent = parent.canonicalize();
            let parent = parent.map_err(|source| refuse("create its directory first", source))?;
            Ok(parent.join(name))
        }
        Err(error) => Err(refuse("let the gateway's user reach it", error)),
    }
}
