//! Interface `net` against listeners of the test's own.

use std::path::PathBuf;
use std::process::Command;

use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::json;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use super::*;

/// Answers `pong` to whoever sends something.
async fn answer(mut stream: impl AsyncRead + AsyncWrite + Unpin) {
    let mut bytes = [0; 16];
    while stream.read(&mut bytes).await.is_ok_and(|count| count > 0) {
        if stream.write_all(b"pong").await.is_err() {
            break;
        }
    }
}

/// A listener's port; `tls` makes it speak TLS.
async fn listen(tls: Option<TlsAcceptor>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let tls = tls.clone();
            tokio::spawn(async move {
                match tls {
                    None => answer(stream).await,
                    Some(tls) => {
                        if let Ok(stream) = tls.accept(stream).await {
                            answer(stream).await;
                        }
                    }
                }
            });
        }
    });
    port
}

fn granting(grants: &[NetworkGrant]) -> InstanceOptions {
    options(Grants { network: grants.to_vec(), ..Grants::default() })
}

fn grant(text: &str) -> NetworkGrant {
    NetworkGrant::parse(text).unwrap()
}

fn dial(host: &str, port: u16) -> Value {
    json!({"on": "open", "do": "dial", "host": host, "port": port})
}

#[tokio::test]
async fn a_guest_reaches_what_is_granted_and_nothing_else() {
    let port = listen(None).await;
    let pong = ("told".to_owned(), "pong false".to_owned());
    let granted = grant(&format!("127.0.0.1:{port}"));
    assert_eq!(told(&granting(std::slice::from_ref(&granted)), dial("127.0.0.1", port)).await, pong);
    assert_eq!(told(&granting(&[grant(&format!("localhost:{port}"))]), dial("LocalHost.", port)).await, pong);
    for (host, port) in
        [("127.0.0.1", port.wrapping_add(1)), ("localhost", port), ("127.0.0.2", port), ("example.com", 80)]
    {
        let (code, message) = told(&granting(std::slice::from_ref(&granted)), dial(host, port)).await;
        assert!(code == "forbidden" && message.contains(host), "{host}: {message}");
    }
    assert_eq!(told(&granting(&[]), dial("127.0.0.1", port)).await.0, "forbidden");
}

#[tokio::test]
async fn a_granted_name_that_leads_inside_is_refused_unless_the_grant_says_private() {
    let port = listen(None).await;
    // The name of this machine, which resolves to an address of its own.
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap().trim().to_lowercase();
    let Ok(found) = tokio::net::lookup_host((name.as_str(), port)).await else { return };
    if found.map(|found| found.ip()).any(|ip| !ip.is_loopback()) {
        return;
    }
    let named = grant(&format!("{name}:{port}"));
    let (code, message) = told(&granting(std::slice::from_ref(&named)), dial(&name, port)).await;
    assert!(code == "forbidden" && message.contains("loopback"), "{message}");
    let private = NetworkGrant { private: true, ..named };
    assert_ne!(told(&granting(&[private]), dial(&name, port)).await.0, "forbidden");
}

#[tokio::test]
async fn every_spelling_of_an_address_inside_is_refused_and_counted() {
    let port = listen(None).await;
    // The resolver takes these for addresses of the machine itself.
    for name in ["127.1", "2130706433", "0x7f000001", "0177.0.0.1", "localhost.localdomain"] {
        let (code, message) = told(&granting(&[grant(&format!("{name}:{port}"))]), dial(name, port)).await;
        assert!(code == "dns" || (code == "forbidden" && message.contains("loopback")), "{name}: {code} {message}");
    }
    let options = granting(&[grant("*.example.com:80")]);
    for name in ["example.com", "a.b.example.com", "127.0.0.1", "[::ffff:127.0.0.1]", "::1%lo", "x\0.example.com"] {
        let (code, _) = told(&options, dial(name, 80)).await;
        assert!(code == "forbidden" || code == "dns", "{name:?}: {code}");
    }
    let flood = json!({"on": "open", "do": "dial-flood", "host": "169.254.169.254", "port": 80, "times": 1000});
    let before = options.usage.snapshot().refused_permissions;
    assert_eq!(told(&options, flood).await.1, "{\"forbidden\": 1000}");
    assert_eq!(options.usage.snapshot().refused_permissions - before, 1000);
}

#[tokio::test]
async fn protocols_that_no_handshake_can_carry_are_an_answer_and_no_panic() {
    let port = listen(None).await;
    let odd = json!({"on": "open", "do": "odd-protocols", "host": "127.0.0.1", "port": port});
    let (_, codes) = told(&granting(&[grant(&format!("127.0.0.1:{port}"))]), odd).await;
    assert_eq!(codes, "invalid invalid invalid");
}

#[tokio::test]
async fn nobody_listening_is_told_apart_from_not_permitted() {
    let port = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap().port()
    };
    assert_eq!(told(&granting(&[grant(&format!("127.0.0.1:{port}"))]), dial("127.0.0.1", port)).await.0, "refused");
}

#[tokio::test]
async fn silence_is_a_timeout_and_too_many_connections_are_refused() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let options = granting(&[grant(&format!("127.0.0.1:{port}"))]);
    let mut quiet = dial("127.0.0.1", port);
    quiet["wait_ms"] = json!(50);
    assert_eq!(told(&options, quiet).await.0, "timeout");
    let mut many = dial("127.0.0.1", port);
    many["many"] = json!(options.limits.connections + 1);
    let (code, message) = told(&options, many).await;
    assert!(code == "forbidden" && message.contains("too many"), "{message}");
}

/// A certificate for `localhost` and its key, made by openssl(1).
fn certificate(directory: &std::path::Path) -> (PathBuf, PathBuf) {
    let (certificate, key) = (directory.join("cert.pem"), directory.join("key.pem"));
    let made = Command::new("openssl")
        .args([
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=test",
        ])
        .args(["-addext", "subjectAltName=DNS:localhost", "-addext", "basicConstraints=critical,CA:FALSE"])
        .arg("-keyout")
        .arg(&key)
        .arg("-out")
        .arg(&certificate)
        .output()
        .unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    (certificate, key)
}

#[tokio::test]
async fn tls_is_spoken_by_the_host_and_checks_name_and_authority() {
    let directory = tempfile::tempdir().unwrap();
    let (certificate, key) = certificate(directory.path());
    let chain = vec![CertificateDer::from_pem_file(&certificate).unwrap()];
    let key = PrivateKeyDer::from_pem_file(&key).unwrap();
    let config = rustls::ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .unwrap();
    let port = listen(Some(TlsAcceptor::from(Arc::new(config)))).await;
    let secure = |host: &str| json!({"on": "open", "do": "dial", "host": host, "port": port, "tls": true});
    let by = |host: &str, ca: Option<PathBuf>| granting(&[NetworkGrant { ca, ..grant(&format!("{host}:{port}")) }]);

    // The certificate crosses too, for channel binding.
    assert_eq!(
        told(&by("localhost", Some(certificate.clone())), secure("localhost")).await,
        ("told".into(), "pong true".into())
    );
    // Another name than the certificate's.
    assert_eq!(told(&by("127.0.0.1", Some(certificate.clone())), secure("127.0.0.1")).await.0, "tls");
    // An authority that the system does not know.
    assert_eq!(told(&by("localhost", None), secure("localhost")).await.0, "tls");
    let (code, message) = told(&by("localhost", Some(directory.path().join("none.pem"))), secure("localhost")).await;
    assert!(code == "tls" && message.contains("none.pem"), "{message}");
    // A server that does not speak TLS.
    let plain = listen(None).await;
    let grants = granting(&[NetworkGrant { ca: Some(certificate), ..grant(&format!("localhost:{plain}")) }]);
    assert_eq!(
        told(&grants, json!({"on": "open", "do": "dial", "host": "localhost", "port": plain, "tls": true})).await.0,
        "tls"
    );
}
