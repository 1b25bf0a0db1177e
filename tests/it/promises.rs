//! What a client, an upstream, an operator and a scraper may rely on, tried from the outside: the
//! real binary as a process of its own, real sockets, real stores. A test is named by its promise.

use crate::support::gateway::Bench;
use crate::support::rows::Kind;

/// Makes two tests of each promise, one for each store.
macro_rules! each_store {
    ($($promise:ident),+ $(,)?) => {$(
        mod $promise {
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn sqlite() {
                Box::pin(super::$promise(crate::promises::on_sqlite().await)).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn postgres() {
                Box::pin(super::$promise(crate::promises::on_postgres().await)).await;
            }
        }
    )+};
}

/// Makes a test of each promise that is about several gateways or about PostgreSQL itself.
macro_rules! on_postgres {
    ($($promise:ident),+ $(,)?) => {$(
        mod $promise {
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn postgres() {
                Box::pin(super::$promise(crate::promises::on_postgres().await)).await;
            }
        }
    )+};
}

mod accept;
mod content;
mod crash;
mod crash_windows;
mod duplicates;
mod effects;
mod effects_bus;
mod effects_faults;
mod effects_load;
mod effects_store;
mod fingerprint;
mod follow;
mod follow_up;
mod framing;
mod front_proxy;
mod keys;
mod late_owners;
mod lookups;
mod pooler;
mod replay;
mod runs;
mod store_outage;
mod store_trouble;
mod streaming;
mod tenancy;
mod time;
mod two_gateways;
mod upstream_connections;
mod upstream_failure;
mod zombies;

async fn on_sqlite() -> Bench {
    Bench::new(Kind::Sqlite).await
}

async fn on_postgres() -> Bench {
    Bench::new(Kind::Postgres).await
}
