//! One TLS configuration for both kinds of connection.

use std::path::Path;
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};
use sha2::{Digest, Sha256, Sha384, Sha512};
use x509_cert::Certificate;
use x509_cert::der::Decode;
use x509_cert::der::oid::db::rfc5912 as oid;

use super::config::{SourceConfig, SslMode};
use crate::error::{Error, Result};

/// The client configuration that `sslmode` and `sslrootcert` ask for.
///
/// The provider is named, not the process's default, which another library may set
/// or not. Errors: `source.tls-roots` when the authorities cannot be read.
pub(super) fn client_config(config: &SourceConfig) -> Result<ClientConfig> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|error| Error::permanent("source.tls", format!("TLS cannot be set up: {error}")))?;
    // As libpq: a root file turns prefer and require into a check of the chain.
    let chain = config.sslrootcert.is_some() || config.sslmode == SslMode::VerifyCa;
    let verifier: Arc<dyn ServerCertVerifier> = match config.sslmode {
        SslMode::VerifyFull => Arc::new(Verifier { inner: Some(webpki(config, &provider)?), name: true, provider }),
        _ if chain => Arc::new(Verifier { inner: Some(webpki(config, &provider)?), name: false, provider }),
        _ => Arc::new(Verifier { inner: None, name: false, provider }),
    };
    Ok(builder.dangerous().with_custom_certificate_verifier(verifier).with_no_client_auth())
}

fn webpki(config: &SourceConfig, provider: &Arc<CryptoProvider>) -> Result<Arc<WebPkiServerVerifier>> {
    let roots = match &config.sslrootcert {
        Some(file) => roots_of_file(file)?,
        None => roots_of_system()?,
    };
    WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider.clone())
        .build()
        .map_err(|error| roots_error(format!("the authorities to trust cannot be used: {error}")))
}

fn roots_of_file(file: &Path) -> Result<RootCertStore> {
    let wrong = |what: String| roots_error(format!("sslrootcert {}: {what}", file.display()));
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(file).map_err(|error| wrong(error.to_string()))? {
        let certificate = certificate.map_err(|error| wrong(error.to_string()))?;
        roots.add(certificate).map_err(|error| wrong(error.to_string()))?;
    }
    if roots.is_empty() { Err(wrong("there is no certificate in it".to_owned())) } else { Ok(roots) }
}

fn roots_of_system() -> Result<RootCertStore> {
    let found = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(found.certs);
    if roots.is_empty() { Err(roots_error("this system has no certificate authorities".to_owned())) } else { Ok(roots) }
}

fn roots_error(message: String) -> Error {
    Error::no("source.tls-roots", message)
        .next("Point `sslrootcert` in the source url to a PEM file with the server's certificate authority.")
}

/// Checks what `sslmode` asks for; signatures of the handshake in any case.
#[derive(Debug)]
struct Verifier {
    /// Checks the chain; `None`: no certificate is refused.
    inner: Option<Arc<WebPkiServerVerifier>>,
    /// Whether the name has to fit.
    name: bool,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let Some(inner) = &self.inner else { return Ok(ServerCertVerified::assertion()) };
        match inner.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now) {
            // The chain is checked before the name.
            Err(rustls::Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) if !self.name => Ok(ServerCertVerified::assertion()),
            answer => answer,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signature, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signature, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// `tls-server-end-point` (RFC 5929): the certificate's hash under the hash of its
/// signature, SHA-1 and MD5 raised to SHA-256. None where the signature names no
/// hash (Ed25519, PSS): then the channel is not bound, as with libpq.
pub(super) fn end_point_hash(certificate: &CertificateDer<'_>) -> Option<Vec<u8>> {
    let parsed = Certificate::from_der(certificate).ok()?;
    match parsed.signature_algorithm.oid {
        oid::SHA_1_WITH_RSA_ENCRYPTION | oid::SHA_256_WITH_RSA_ENCRYPTION | oid::ECDSA_WITH_SHA_256 => {
            Some(Sha256::digest(certificate).to_vec())
        }
        oid::SHA_384_WITH_RSA_ENCRYPTION | oid::ECDSA_WITH_SHA_384 => Some(Sha384::digest(certificate).to_vec()),
        oid::SHA_512_WITH_RSA_ENCRYPTION => Some(Sha512::digest(certificate).to_vec()),
        _ => None,
    }
}

/// What a failed handshake means.
pub(super) fn handshake_error(config: &SourceConfig, error: &std::io::Error) -> Error {
    let at = config.endpoint();
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match inner {
        Some(rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer)) => Error::no(
            "source.tls-authority",
            format!("{at}: the server's certificate comes from an authority we do not know"),
        )
        .next("Add sslrootcert=/path/to/ca.pem to the source url, with the authority that signed it."),
        Some(rustls::Error::InvalidCertificate(
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
        )) => {
            Error::no("source.tls-name", format!("{at}: the server's certificate is not made out to `{}`", config.host))
                .next("Use the name in the certificate as the host, or sslmode=verify-ca to check the authority alone.")
        }
        Some(rustls::Error::InvalidCertificate(
            CertificateError::Expired | CertificateError::ExpiredContext { .. },
        )) => Error::no("source.tls-expired", format!("{at}: the server's certificate has expired"))
            .next("Renew the server's certificate."),
        Some(error) => Error::no("source.tls", format!("{at}: no TLS connection: {error}"))
            .next("Check the server's ssl_cert_file, ssl_min_protocol_version and the sslrootcert of the source url."),
        None => Error::transient("source.unreachable", format!("{at}: the TLS handshake ended: {error}"))
            .next("Check that the server is up and that nothing between cuts TLS connections."),
    }
}
