//! Whom a pool trusts. Verification can't be turned off.

use std::path::Path;
use std::sync::Arc;

use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use tokio_rustls::TlsConnector;

use super::UpstreamError;
use crate::config::PoolConfig;
use crate::domain::scope::PoolId;

/// ALPN's name of HTTP/2.
pub(super) const H2: &[u8] = b"h2";
const HTTP1: &[u8] = b"http/1.1";

/// The system's certificates, read once and only if some pool needs them.
#[derive(Default)]
pub(super) struct Roots(Option<RootCertStore>);

/// A pool's TLS.
#[derive(Clone)]
pub(super) struct Tls {
    /// Offers HTTP/2 and HTTP/1.1.
    pub(super) any: TlsConnector,
    /// Offers HTTP/1.1 only, for upgrades.
    pub(super) http1: TlsConnector,
}

impl Tls {
    pub(super) fn new(config: &PoolConfig, roots: &mut Roots) -> Result<Self, UpstreamError> {
        let mut roots = roots.system();
        if let Some(path) = &config.ca {
            add(&mut roots, path, &config.id)?;
        }
        if roots.is_empty() {
            let pool = config.id.clone();
            return Err(UpstreamError::NoRoots { pool });
        }
        let roots = Arc::new(roots);
        let connector = |alpn: &[&[u8]]| {
            let provider = Arc::new(rustls::crypto::ring::default_provider());
            let mut config = ClientConfig::builder_with_provider(provider)
                .with_safe_default_protocol_versions()
                .expect("ring has the default protocol versions")
                .with_root_certificates(roots.clone())
                .with_no_client_auth();
            config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
            TlsConnector::from(Arc::new(config))
        };
        Ok(Self {
            any: connector(&[H2, HTTP1]),
            http1: connector(&[HTTP1]),
        })
    }
}

impl Roots {
    fn system(&mut self) -> RootCertStore {
        let read = || {
            let system = rustls_native_certs::load_native_certs();
            for error in &system.errors {
                tracing::warn!(%error, "a trusted certificate of this system can't be read");
            }
            let mut roots = RootCertStore::empty();
            roots.add_parsable_certificates(system.certs);
            roots
        };
        self.0.get_or_insert_with(read).clone()
    }
}

fn add(roots: &mut RootCertStore, path: &Path, pool: &PoolId) -> Result<(), UpstreamError> {
    let unusable = |source| UpstreamError::Ca {
        pool: pool.clone(),
        path: path.to_owned(),
        source,
    };
    let before = roots.len();
    let file = CertificateDer::pem_file_iter(path).map_err(|error| unusable(error.into()))?;
    for certificate in file {
        let certificate = certificate.map_err(|error| unusable(error.into()))?;
        let added = roots.add(certificate);
        added.map_err(|error| unusable(error.into()))?;
    }
    if roots.len() == before {
        return Err(unusable("the file holds no certificate".into()));
    }
    Ok(())
}
