//! The server's side of TLS: a certificate chain and its key from PEM files, ALPN for both
//! protocols (RFC 7301).

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::ServerConfig;
use rustls::crypto::ring;
use rustls_pki_types::pem::{self, PemObject};
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::config::ServerTls;

/// Turns sockets into encrypted ones.
#[derive(Clone)]
pub struct Tls(TlsAcceptor);

/// Why a certificate or key can't be used. Each names its file.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The file can't be read or is not PEM.
    #[error("can't read the {what} in {}: {source}", path.display())]
    Unreadable {
        /// Certificate or key.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        source: pem::Error,
    },
    /// The file is PEM but holds nothing of this kind.
    #[error("there is no {what} in {}; a PEM section is expected", path.display())]
    Missing {
        /// Certificate or key.
        what: &'static str,
        /// The file.
        path: PathBuf,
    },
    /// Each file is sound, but they can't be used together.
    #[error("can't use {} with the key in {}: {source}", certificate.display(), key.display())]
    Unusable {
        /// The chain's file.
        certificate: PathBuf,
        /// The key's file.
        key: PathBuf,
        /// Why.
        source: rustls::Error,
    },
}

impl Tls {
    /// Reads both files. Certificates are read once: a new one takes a restart.
    ///
    /// # Errors
    /// When a file can't be read or parsed, or when the two don't belong together.
    pub fn load(files: &ServerTls) -> Result<Self, TlsError> {
        let chain = chain(&files.certificate)?;
        let key = PrivateKeyDer::from_pem_file(&files.key)
            .map_err(|source| refused("private key", &files.key, source))?;
        let unusable = |source| TlsError::Unusable {
            certificate: files.certificate.clone(),
            key: files.key.clone(),
            source,
        };
        let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(unusable)?
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .map_err(unusable)?;
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Self(TlsAcceptor::from(Arc::new(config))))
    }

    /// The handshake; the caller bounds its time.
    pub(super) async fn accept(&self, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        self.0.accept(stream).await
    }
}

fn chain(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    const WHAT: &str = "certificate";
    let certificates = CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|source| refused(WHAT, path, source))?;
    if certificates.is_empty() {
        return Err(refused(WHAT, path, pem::Error::NoItemsFound));
    }
    Ok(certificates)
}

fn refused(what: &'static str, path: &Path, source: pem::Error) -> TlsError {
    let path = path.to_owned();
    match source {
        pem::Error::NoItemsFound => TlsError::Missing { what, path },
        source => TlsError::Unreadable { what, path, source },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(certificate: &str, key: &str) -> Result<Tls, TlsError> {
        let dir = tempfile::tempdir().unwrap();
        let files = ServerTls {
            certificate: dir.path().join("chain.pem"),
            key: dir.path().join("key.pem"),
        };
        if !certificate.is_empty() {
            std::fs::write(&files.certificate, certificate).unwrap();
        }
        std::fs::write(&files.key, key).unwrap();
        Tls::load(&files)
    }

    fn refusal(certificate: &str, key: &str) -> String {
        load(certificate, key).err().unwrap().to_string()
    }

    #[test]
    fn errors_name_the_file_and_the_reason() {
        let names = || vec!["localhost".to_owned()];
        let own = rcgen::generate_simple_self_signed(names()).unwrap();
        let other = rcgen::generate_simple_self_signed(names()).unwrap();
        let (chain, key) = (own.cert.pem(), own.signing_key.serialize_pem());
        assert!(load(&chain, &key).is_ok());

        let missing = refusal("", &key);
        assert!(missing.contains("chain.pem"), "{missing}");
        assert!(missing.contains("No such file"), "{missing}");
        let not_pem = refusal("nothing", &key);
        assert!(not_pem.contains("no certificate in"), "{not_pem}");
        let swapped = refusal(&chain, &chain);
        assert!(swapped.contains("no private key in"), "{swapped}");
        assert!(swapped.contains("key.pem"), "{swapped}");
        let foreign = refusal(&chain, &other.signing_key.serialize_pem());
        assert!(foreign.contains("key.pem"), "{foreign}");
        let broken = refusal(&chain.replace("-----END", "----END"), &key);
        assert!(broken.contains("chain.pem"), "{broken}");
    }
}
