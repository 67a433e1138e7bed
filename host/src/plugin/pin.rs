//! What a destination's configuration says that its plugin's file has to be.
//!
//! Checked on the very bytes that are compiled, before anything else looks at them.

use std::path::{Path, PathBuf};

use minisign_verify::{PublicKey, Signature};

use super::text::clean;
use crate::error::{Error, Result};

/// Bytes of a signature's file: four short lines, two of them comments.
const SIGNATURE_BYTES: u64 = 8 << 10;

/// See the module. The default asks for nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pin {
    /// The file's SHA-256, in lower-case hex.
    pub sha256: Option<String>,
    /// Who has to have signed it.
    pub signer: Option<Signer>,
}

/// Who has to have signed a plugin, and where the signature is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signer {
    /// As minisign prints it.
    pub public_key: String,
    /// Where the signature is.
    pub signature: SignaturePlace,
}

/// Where a signature is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SignaturePlace {
    /// Beside the plugin's file, with `.minisig` behind its name.
    Beside,
    /// In this file.
    File(PathBuf),
    /// Here.
    Text(String),
}

impl Pin {
    /// The signature's file, if it is in one.
    pub fn signature_file(&self, file: &Path) -> Option<PathBuf> {
        match &self.signer.as_ref()?.signature {
            SignaturePlace::Beside => {
                let mut path = file.as_os_str().to_owned();
                path.push(".minisig");
                Some(path.into())
            }
            SignaturePlace::File(path) => Some(path.clone()),
            SignaturePlace::Text(_) => None,
        }
    }

    /// Whose signature is asked for.
    pub fn public_key(&self) -> Option<&str> {
        self.signer.as_ref().map(|signer| signer.public_key.as_str())
    }

    /// Whether these bytes, of this digest, are what is asked for.
    ///
    /// # Errors
    /// `plugin.sha256`, `plugin.signature`; each names the file.
    pub fn check(&self, file: &Path, bytes: &[u8], sha256: &str) -> Result<()> {
        if let Some(wanted) = self.sha256.as_deref().filter(|wanted| *wanted != sha256) {
            return Err(Error::no(
                "plugin.sha256",
                format!("{} has the SHA-256 {sha256}, and the configuration asks for {wanted}", file.display()),
            )
            .next("Put the file that is meant there, or correct `sha256` of the destination."));
        }
        let Some(signer) = &self.signer else { return Ok(()) };
        let refused = |why: String| {
            Error::no("plugin.signature", format!("{}: {}", file.display(), clean(&why, 500)))
                .next("Put the file and its signature there together (`minisign -S`), or correct `public_key`.")
        };
        let key = parse_key(&signer.public_key).map_err(refused)?;
        let text = match (&signer.signature, self.signature_file(file)) {
            (SignaturePlace::Text(text), _) => text.clone(),
            (_, path) => read(&path.unwrap_or_default()).map_err(refused)?,
        };
        let signature = Signature::decode(text.trim())
            .map_err(|error| refused(format!("its signature is none of minisign's: {error}")))?;
        // Old signatures are of the file itself, new ones of its BLAKE2b digest: both hold.
        key.verify(bytes, &signature, true)
            .map_err(|error| refused(format!("its signature is not that of `public_key`: {error}")))
    }
}

/// A public key, as minisign prints it.
///
/// # Errors
/// What is wrong with it.
pub fn parse_key(text: &str) -> std::result::Result<PublicKey, String> {
    PublicKey::from_base64(text).map_err(|error| format!("it is no public key of minisign: {error}"))
}

fn read(path: &Path) -> std::result::Result<String, String> {
    use std::io::Read as _;
    let mut text = String::new();
    std::fs::File::open(path)
        .and_then(|file| file.take(SIGNATURE_BYTES).read_to_string(&mut text))
        .map_err(|error| format!("its signature {} cannot be read: {error}", path.display()))?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;

    fn sign(key: &minisign::KeyPair, bytes: &[u8]) -> String {
        minisign::sign(None, &key.sk, Cursor::new(bytes), None, None).unwrap().into_string()
    }

    fn pin(key: &minisign::KeyPair, signature: SignaturePlace) -> Pin {
        Pin { sha256: None, signer: Some(Signer { public_key: key.pk.to_base64(), signature }) }
    }

    #[test]
    fn only_what_the_key_has_signed_is_taken() {
        let (ours, other) =
            (minisign::KeyPair::generate_unencrypted_keypair(), minisign::KeyPair::generate_unencrypted_keypair());
        let (ours, other) = (ours.unwrap(), other.unwrap());
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("a.wasm");
        let beside = directory.path().join("a.wasm.minisig");
        let code = |pin: &Pin, bytes: &[u8]| pin.check(&file, bytes, "").map_err(|error| error.code().to_owned());
        let refused = Err("plugin.signature".to_owned());

        let by_us = pin(&ours, SignaturePlace::Beside);
        assert_eq!(code(&by_us, b"code"), refused, "there is no signature");
        std::fs::write(&beside, sign(&ours, b"code")).unwrap();
        assert_eq!(code(&by_us, b"code"), Ok(()));
        assert_eq!(code(&by_us, b"cod3"), refused);
        assert_eq!(code(&pin(&other, SignaturePlace::Beside), b"code"), refused);
        std::fs::write(&beside, "not a signature").unwrap();
        assert_eq!(code(&by_us, b"code"), refused);

        let elsewhere = directory.path().join("elsewhere");
        std::fs::write(&elsewhere, sign(&ours, b"code")).unwrap();
        assert_eq!(code(&pin(&ours, SignaturePlace::File(elsewhere)), b"code"), Ok(()));
        let by_other = SignaturePlace::Text(sign(&other, b"code"));
        assert_eq!(code(&pin(&other, by_other.clone()), b"code"), Ok(()));
        assert_eq!(code(&pin(&ours, by_other), b"code"), refused);
    }

    #[test]
    fn another_digest_is_refused_with_both() {
        let pin = Pin { sha256: Some("aa".to_owned()), signer: None };
        pin.check(Path::new("a.wasm"), b"", "aa").unwrap();
        let error = pin.check(Path::new("a.wasm"), b"", "bb").unwrap_err();
        assert_eq!(error.code(), "plugin.sha256");
        assert!(error.message().contains("SHA-256 bb") && error.message().contains("asks for aa"), "{error}");
    }
}
