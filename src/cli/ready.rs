//! Asks a running gateway whether traffic may come: `oncegate check --ready`, for containers
//! whose image holds nothing else that could ask.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context as _, bail};
use bytes::Bytes;
use http::{Request, StatusCode, header};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

/// How long the answer may take.
const TIMEOUT: Duration = Duration::from_secs(5);
/// The longest answer that is read, in bytes.
const ANSWER_BYTES_MAX: usize = 64 * 1024;

/// Asks the admin listener at `admin`. `Ok`: traffic may come.
///
/// # Errors
/// When it may not, or nobody answers.
pub(super) async fn ask(admin: SocketAddr) -> anyhow::Result<()> {
    let admin = reachable(admin);
    let asked = tokio::time::timeout(TIMEOUT, get(admin));
    let (status, body) = asked
        .await
        .context("the gateway did not answer in time")?
        .with_context(|| format!("no gateway answers at {admin}; is it running?"))?;
    if status == StatusCode::OK {
        return Ok(());
    }
    bail!(
        "the gateway at {admin} is not ready: {}",
        String::from_utf8_lossy(&body)
    )
}

async fn get(admin: SocketAddr) -> anyhow::Result<(StatusCode, Bytes)> {
    let stream = TcpStream::connect(admin).await?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let request = Request::get("/readyz")
        .header(header::HOST, admin.to_string())
        .header(header::CONNECTION, "close")
        .body(Empty::<Bytes>::new())?;
    let answered = async {
        let response = sender.send_request(request).await?;
        let status = response.status();
        let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX);
        let body = body
            .collect()
            .await
            .map_err(|error| anyhow::anyhow!(error))?;
        anyhow::Ok((status, body.to_bytes()))
    };
    tokio::pin!(answered);
    tokio::select! {
        answer = &mut answered => answer,
        // The connection may be over before its last answer was read.
        _ = connection => answered.await,
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
