//! Whom a client of this program trusts. Verification can't be turned off.

use std::path::Path;
use std::sync::Arc;

use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use tokio_rustls::TlsConnector;

use super::UpstreamError;
use crate::body::BoxError;
use crate::config::PoolConfig;

/// ALPN's name of HTTP/2.
pub(crate) const H2: &[u8] = b"h2";
/// ALPN's name of HTTP/1.1.
pub(crate) const HTTP1: &[u8] = b"http/1.1";

/// The system's certificates, read once and only if they are needed.
#[derive(Default)]
pub struct Roots(Option<RootCertStore>);

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
        let trusted = roots.with(config.ca.as_deref());
        let trusted = trusted.map_err(|source| UpstreamError::Ca {
            pool: config.id.clone(),
            path: config.ca.clone().unwrap_or_default(),
            source,
        })?;
        if trusted.is_empty() {
            let pool = config.id.clone();
            return Err(UpstreamError::NoRoots { pool });
        }
        let connector =
            |alpn: &[&[u8]]| TlsConnector::from(Arc::new(client_config(trusted.clone(), alpn)));
        Ok(Self {
            any: connector(&[H2, HTTP1]),
            http1: connector(&[HTTP1]),
        })
    }
}

/// A client that trusts these and no others, and offers these protocols.
///
/// # Panics
/// Never: ring has the default protocol versions.
#[must_use]
pub fn client_config(roots: RootCertStore, alpn: &[&[u8]]) -> ClientConfig {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("ring has the default protocol versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
    config
}

impl Roots {
    /// The system's certificates and those of a PEM file; may be none at all.
    ///
    /// # Errors
    /// When the file can't be read or holds no certificate.
    pub fn with(&mut self, ca: Option<&Path>) -> Result<RootCertStore, BoxError> {
        let mut roots = self.system();
        if let Some(path) = ca {
            add(&mut roots, path)?;
        }
        Ok(roots)
    }

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

fn add(roots: &mut RootCertStore, path: &Path) -> Result<(), BoxError> {
    let before = roots.len();
    for certificate in CertificateDer::pem_file_iter(path)? {
        roots.add(certificate?)?;
    }
    if roots.len() == before {
        return Err("the file holds no certificate".into());
    }
    Ok(())
}
