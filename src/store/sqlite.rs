//! The store on one SQLite file.

mod lock;

pub use lock::FileLock;
