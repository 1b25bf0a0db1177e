//! What tests stand on: a database server, a network that misbehaves.

pub mod chaos_proxy;
pub mod postgres;
