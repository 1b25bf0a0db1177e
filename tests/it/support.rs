//! What the tests stand on.

pub mod blackhole;
pub mod chaos_proxy;
pub mod client;
pub mod clock;
pub mod delegate;
pub mod destination;
pub mod gateway;
pub mod invariants;
pub mod metrics;
pub mod nats;
pub mod pgbouncer;
pub mod postgres;
pub mod process;
pub mod rows;
pub mod upstream;
pub mod wal;
pub mod wiretap;
