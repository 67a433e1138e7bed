//! `sha256`, `public_key` and `signature` of a `[[destination]]`.

use std::path::Path;

use super::section::Section;
use crate::error::Result;
use crate::plugin::Pin;
use crate::plugin::pin::{SignaturePlace, Signer, parse_key};

/// How a signature itself begins, and no path.
const COMMENT: &str = "untrusted comment:";

/// What the plugin's file has to be. A path is relative to `directory`.
pub(super) fn read(section: &Section<'_>, directory: &Path) -> Result<Pin> {
    Ok(Pin { sha256: digest(section)?, signer: signer(section, directory)? })
}

fn digest(section: &Section<'_>) -> Result<Option<String>> {
    let Some(text) = section.text("sha256")? else { return Ok(None) };
    if text.len() != 64 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(section
            .invalid("sha256", "is no SHA-256: it has 64 hexadecimal digits")
            .next("Write what `tidegate plugin inspect` or `sha256sum` prints for the plugin's file."));
    }
    Ok(Some(text.to_ascii_lowercase()))
}

fn signer(section: &Section<'_>, directory: &Path) -> Result<Option<Signer>> {
    let signature = section.text("signature")?;
    let Some(public_key) = section.text("public_key")? else {
        return match signature {
            None => Ok(None),
            Some(_) => Err(section
                .invalid("signature", "is there without `public_key`")
                .next("Add the key that made it: public_key = \"RW…\", or remove it.")),
        };
    };
    parse_key(&public_key).map_err(|why| {
        section
            .invalid("public_key", format_args!("cannot be used: {why}"))
            .next("Write the second line of the `.pub` file that `minisign -G` made.")
    })?;
    let signature = match signature {
        None => SignaturePlace::Beside,
        Some(text) if text.trim_start().starts_with(COMMENT) => SignaturePlace::Text(text),
        Some(path) => SignaturePlace::File(directory.join(path)),
    };
    Ok(Some(Signer { public_key, signature }))
}
