//! The store on one SQLite file.
