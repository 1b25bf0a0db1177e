//! What tests stand on: a database server, a network that misbehaves, a service that does.

pub mod chaos_proxy;
pub mod postgres;
pub mod upstream;
