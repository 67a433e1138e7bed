//! The files of plugins, as they are and as they should not be.

use std::path::PathBuf;

use serde_json::Value;

use crate::Result;

/// A built fixture.
pub fn fixture(name: &str) -> Result<PathBuf> {
    let directory = std::env::var_os("TIDEGATE_FIXTURES").ok_or("TIDEGATE_FIXTURES names no directory")?;
    let file = PathBuf::from(directory).join(name).with_extension("wasm");
    if file.exists() {
        Ok(file)
    } else {
        Err(format!("{} is missing: run `make fixtures` first", file.display()).into())
    }
}

/// What is done to the fixture's file.
#[derive(Clone)]
pub enum File {
    /// Nothing.
    Whole,
    /// Another mark: what it does at its start and in `describe`.
    Marked(Value),
    /// Cut in half.
    Cut,
    /// A core module.
    Core,
    /// One text for another of the same length.
    Patched(&'static str, &'static str),
}

impl File {
    pub fn bytes(&self) -> Result<Vec<u8>> {
        let mut bytes = std::fs::read(fixture("hostile")?)?;
        match self {
            File::Whole => {}
            File::Marked(mark) => {
                let mark = format!("hostile-mark:{mark}");
                overwrite(&mut bytes, "hostile-mark:{}", &mark)?;
            }
            File::Cut => bytes.truncate(bytes.len() / 2),
            File::Core => bytes = b"\0asm\x01\0\0\0".to_vec(),
            File::Patched(from, to) => overwrite(&mut bytes, from, to)?,
        }
        Ok(bytes)
    }
}

/// Every place of `from` becomes `to`.
fn overwrite(bytes: &mut [u8], from: &str, to: &str) -> Result<()> {
    let places: Vec<usize> =
        (0..bytes.len().saturating_sub(to.len())).filter(|at| bytes[*at..].starts_with(from.as_bytes())).collect();
    for at in &places {
        bytes[*at..*at + to.len()].copy_from_slice(to.as_bytes());
    }
    if places.is_empty() { Err(format!("{from} is not in the fixture").into()) } else { Ok(()) }
}
