//! Services of the host: counters, secrets, signatures, a small store, a sign of life.

#[cfg(target_family = "wasm")]
use crate::bindings::tidegate::destination::host as wire;
use crate::model::Failure;

/// Outside of the sandbox nobody answers.
#[cfg(not(target_family = "wasm"))]
mod wire {
    const NO_HOST: &str = "there is no host outside of the sandbox";

    pub(super) fn count(_: &str, _: u64) {}
    pub(super) fn working(_: &str) {}
    pub(super) fn secret(_: &str) -> Result<String, String> {
        Err(NO_HOST.to_owned())
    }
    pub(super) fn sign(_: &str, _: &str, _: &[u8]) -> Result<Vec<u8>, String> {
        Err(NO_HOST.to_owned())
    }
    pub(super) fn get_state(_: &str) -> Result<Option<Vec<u8>>, String> {
        Err(NO_HOST.to_owned())
    }
    pub(super) fn set_state(_: &str, _: Option<&[u8]>) -> Result<(), String> {
        Err(NO_HOST.to_owned())
    }
}

/// Adds to a counter of the plugin's own among the host's metrics.
pub fn count(name: &str, value: u64) {
    wire::count(name, value);
}

/// Still at work: restarts the idle limit of the call under way, not its hard limit.
pub fn working(note: &str) {
    wire::working(note);
}

/// The value of a secret that the configuration grants to be read. Secrets rotate:
/// ask again when one is rejected.
pub fn secret(name: &str) -> Result<String, Failure> {
    wire::secret(name).map_err(|reason| Failure::permanent("sdk.secret", format!("the secret `{name}`: {reason}")))
}

/// Signs with a granted secret that stays in the host. `algorithm`: hmac-sha256,
/// rsa-sha256, ecdsa-p256-sha256, ed25519.
pub fn sign(secret: &str, algorithm: &str, data: &[u8]) -> Result<Vec<u8>, Failure> {
    wire::sign(secret, algorithm, data)
        .map_err(|reason| Failure::permanent("sdk.sign", format!("signing with the secret `{secret}`: {reason}")))
}

/// A small store of the destination's, shared by its lanes. A value is durable when
/// the call returns.
pub mod state {
    use super::{Failure, wire};

    fn failed(key: &str, reason: String) -> Failure {
        Failure::transient("sdk.state", format!("the stored value `{key}`: {reason}"))
    }

    /// The value of a key.
    pub fn get(key: &str) -> Result<Option<Vec<u8>>, Failure> {
        wire::get_state(key).map_err(|reason| failed(key, reason))
    }

    /// Stores a value.
    pub fn set(key: &str, value: &[u8]) -> Result<(), Failure> {
        wire::set_state(key, Some(value)).map_err(|reason| failed(key, reason))
    }

    /// Forgets a key.
    pub fn remove(key: &str) -> Result<(), Failure> {
        wire::set_state(key, None).map_err(|reason| failed(key, reason))
    }
}
