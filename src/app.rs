//! The composition root.

use metrics_exporter_prometheus::PrometheusHandle;

use crate::config::Config;
use crate::lifecycle::{Exit, Shutdown};

/// Runs the gateway until it has stopped.
///
/// # Errors
/// Always: the parts are not put together yet.
#[expect(
    clippy::unused_async,
    reason = "the parts that it will await are not there"
)]
pub async fn serve(
    _config: Config,
    _metrics: PrometheusHandle,
    _shutdown: Shutdown,
) -> anyhow::Result<Exit> {
    anyhow::bail!("not wired")
}
