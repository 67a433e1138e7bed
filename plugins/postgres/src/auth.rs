//! Logging in: cleartext, MD5 and SCRAM-SHA-256 with channel binding.

use fallible_iterator::FallibleIterator;
use postgres_protocol::authentication::md5_hash;
use postgres_protocol::authentication::sasl::{ChannelBinding, SCRAM_SHA_256, SCRAM_SHA_256_PLUS, ScramSha256};
use postgres_protocol::message::backend::{AuthenticationSaslBody, Message};
use postgres_protocol::message::frontend;
use sha2::{Digest, Sha256, Sha384, Sha512};

use crate::connect::Stream;
use crate::error::Error;
use crate::protocol::Client;

/// Answers what the server asks until it says AuthenticationOk. The password is
/// fetched only when it is asked for.
pub fn authenticate<S: Stream>(
    client: &mut Client<S>,
    user: &str,
    encrypted: bool,
    password: &dyn Fn() -> Result<String, String>,
) -> Result<(), Error> {
    let secret = || {
        password().map_err(|reason| {
            Error::Login(format!("the server wants a password, and the secret `password` cannot be read: {reason}"))
        })
    };
    loop {
        match client.receive()? {
            Message::AuthenticationOk => return Ok(()),
            Message::AuthenticationCleartextPassword if encrypted => {
                client.send(|out| frontend::password_message(secret()?.as_bytes(), out).map_err(Error::from))?;
            }
            Message::AuthenticationCleartextPassword => {
                return Err(Error::Login("the server wants the password in clear, and the connection is not encrypted".to_owned()));
            }
            Message::AuthenticationMd5Password(body) => {
                let hash = md5_hash(user.as_bytes(), secret()?.as_bytes(), body.salt());
                client.send(|out| frontend::password_message(hash.as_bytes(), out).map_err(Error::from))?;
            }
            Message::AuthenticationSasl(body) => scram(client, &body, encrypted, &secret()?)?,
            Message::ErrorResponse(body) => return Err(crate::protocol::server_error(&body)),
            _ => return Err(Error::Login("the server asks for a way to log in that this plugin does not know (it knows scram-sha-256, md5 and password)".to_owned())),
        }
    }
}

fn scram<S: Stream>(
    client: &mut Client<S>,
    body: &AuthenticationSaslBody,
    encrypted: bool,
    password: &str,
) -> Result<(), Error> {
    let (mut plain, mut plus) = (false, false);
    let mut mechanisms = body.mechanisms();
    while let Some(mechanism) = mechanisms.next()? {
        plain |= mechanism == SCRAM_SHA_256;
        plus |= mechanism == SCRAM_SHA_256_PLUS;
    }
    let binding = if encrypted { client.peer_certificate().and_then(|der| end_point(&der)) } else { None };
    let (channel, mechanism) = match binding {
        Some(hash) if plus => (ChannelBinding::tls_server_end_point(hash), SCRAM_SHA_256_PLUS),
        // Says that we could have: somebody in between who hid PLUS is found out.
        Some(_) if plain => (ChannelBinding::unrequested(), SCRAM_SHA_256),
        _ if plain => (ChannelBinding::unsupported(), SCRAM_SHA_256),
        _ => {
            return Err(Error::Login(
                "the server offers no SASL mechanism that this plugin knows (it knows SCRAM-SHA-256)".to_owned(),
            ));
        }
    };
    let mut scram = ScramSha256::new(password.as_bytes(), channel);
    client.send(|out| frontend::sasl_initial_response(mechanism, scram.message(), out).map_err(Error::from))?;
    match client.receive()? {
        Message::AuthenticationSaslContinue(body) => scram.update(body.data()).map_err(not_proved)?,
        Message::ErrorResponse(body) => return Err(crate::protocol::server_error(&body)),
        _ => return Err(Error::Protocol("the server broke off SCRAM".to_owned())),
    }
    client.send(|out| frontend::sasl_response(scram.message(), out).map_err(Error::from))?;
    match client.receive()? {
        Message::AuthenticationSaslFinal(body) => scram.finish(body.data()).map_err(not_proved),
        Message::ErrorResponse(body) => Err(crate::protocol::server_error(&body)),
        _ => Err(Error::Protocol("the server broke off SCRAM".to_owned())),
    }
}

/// The server could not prove that it knows the password.
fn not_proved(error: std::io::Error) -> Error {
    Error::Login(format!("SCRAM: {error}"))
}

/// `tls-server-end-point` (RFC 5929, 4.1): the certificate's hash under the hash of its
/// signature, SHA-256 in place of MD5 and SHA-1. None where that is not one hash.
fn end_point(certificate: &[u8]) -> Option<Vec<u8>> {
    const RSA: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01];
    const ECDSA_SHA2: &[u8] = &[0x2a, 0x86, 0x48, 0xce, 0x3d, 0x04, 0x03];
    const ECDSA_SHA1: &[u8] = &[0x2a, 0x86, 0x48, 0xce, 0x3d, 0x04, 0x01];
    let oid = signature_algorithm(certificate)?;
    if oid == ECDSA_SHA1 {
        return Some(Sha256::digest(certificate).to_vec());
    }
    let (last, arc) = oid.split_last()?;
    match (arc, last) {
        (RSA, 4 | 5 | 11) | (ECDSA_SHA2, 2) => Some(Sha256::digest(certificate).to_vec()),
        (RSA, 12) | (ECDSA_SHA2, 3) => Some(Sha384::digest(certificate).to_vec()),
        (RSA, 13) | (ECDSA_SHA2, 4) => Some(Sha512::digest(certificate).to_vec()),
        _ => None,
    }
}

/// The OID in `Certificate ::= SEQUENCE { tbsCertificate, signatureAlgorithm, ... }`.
fn signature_algorithm(certificate: &[u8]) -> Option<&[u8]> {
    const SEQUENCE: u8 = 0x30;
    const OID: u8 = 0x06;
    let (certificate, _) = element(certificate, SEQUENCE)?;
    let (_, rest) = element(certificate, SEQUENCE)?;
    let (algorithm, _) = element(rest, SEQUENCE)?;
    element(algorithm, OID).map(|(oid, _)| oid)
}

/// Content of the DER element at the front, which has this tag, and what follows it.
fn element(der: &[u8], tag: u8) -> Option<(&[u8], &[u8])> {
    let (&first, rest) = der.split_first()?;
    let (&length, rest) = rest.split_first()?;
    if first != tag {
        return None;
    }
    let (length, rest) = if length < 0x80 {
        (usize::from(length), rest)
    } else {
        let count = usize::from(length & 0x7f);
        let (bytes, rest) = rest.split_at_checked(count)?;
        if count == 0 || count > 4 {
            return None;
        }
        (bytes.iter().fold(0usize, |length, &byte| length << 8 | usize::from(byte)), rest)
    };
    rest.split_at_checked(length)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn certificate(oid: &[u8]) -> Vec<u8> {
        let wrap = |tag: u8, content: &[u8]| [&[tag, content.len() as u8], content].concat();
        let algorithm = wrap(0x30, &wrap(0x06, oid));
        wrap(0x30, &[wrap(0x30, &[0x02, 0x01, 0x05]), algorithm, wrap(0x03, &[0, 1])].concat())
    }

    #[test]
    fn the_end_point_is_hashed_as_the_certificate_is_signed() {
        let sha384 = certificate(&[0x2a, 0x86, 0x48, 0xce, 0x3d, 0x04, 0x03, 3]);
        assert_eq!(end_point(&sha384), Some(Sha384::digest(&sha384).to_vec()));
        let sha1 = certificate(&[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01, 5]);
        assert_eq!(end_point(&sha1), Some(Sha256::digest(&sha1).to_vec()));
    }

    #[test]
    fn a_certificate_that_is_cut_off_or_signed_otherwise_gives_no_binding() {
        let ed25519 = certificate(&[0x2b, 0x65, 0x70]);
        assert_eq!(end_point(&ed25519), None);
        for length in 0..ed25519.len() {
            assert_eq!(end_point(&ed25519[..length]), None);
        }
    }
}
