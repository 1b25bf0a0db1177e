//! Asks a running gateway whether traffic may come: `oncegate check --ready`, for containers
//! whose image holds nothing else that could ask, and `oncegate doctor`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use super::client::Client;
use super::gateway::Failure;

/// How long the answer may take.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Asks the admin listener at `admin`. `Ok`: traffic may come.
///
/// # Errors
/// When it may not, or nobody answers.
pub(super) async fn ask(admin: &str) -> Result<(), Failure> {
    let client = Client::new(admin, None)?;
    match tokio::time::timeout(TIMEOUT, client.text("/readyz")).await {
        Ok(told) => told.map(|_| ()),
        Err(_) => Err(Failure::NoAnswer(format!(
            "the gateway at {admin} did not answer in time"
        ))),
    }
}

/// Where a listener on every address is asked.
pub(super) fn reachable(admin: SocketAddr) -> SocketAddr {
    let ip = match admin.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        ip => ip,
    };
    SocketAddr::new(ip, admin.port())
}
