//! `plugin new`: a project that builds as it is written, offline.
//!
//! Its code is the plugin of the SDK's documentation, and its versions are those of this
//! binary's own lock file: whoever could build the host has them at hand.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// The plugin that the SDK's documentation and tests have too.
const CODE: &str = include_str!("../../../sdk/rust/examples/print.rs");
const LOCK: &str = include_str!("../../../Cargo.lock");
/// Where the SDK is, in the sources that this binary was made of.
const SDK: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../sdk/rust");
/// Crates that a plugin's own would hide.
const TAKEN: [&str; 8] = ["alloc", "core", "proc_macro", "schemars", "serde", "std", "test", "tidegate_sdk"];
const NAME_BYTES: usize = 40;

/// Writes a project for Rust into `directory`, which may not be there yet. `sdk`: the
/// SDK's directory; by default that of the sources this binary was made of.
///
/// # Errors
/// `plugin.name`, `plugin.exists`, `plugin.no-sdk`, `plugin.io`.
pub fn write(directory: &Path, name: &str, sdk: Option<&Path>) -> Result<Vec<PathBuf>> {
    check_name(name)?;
    let sdk = find_sdk(sdk)?;
    if directory.exists() {
        return Err(Error::usage("plugin.exists", format!("{} is there already", directory.display()))
            .next("Choose another name, or remove it."));
    }
    let files = [
        ("Cargo.toml", manifest(name, &sdk)),
        ("Cargo.lock", LOCK.to_owned()),
        ("src/lib.rs", code(name)),
        (
            "settings.toml",
            "# What [destination.settings] holds, for `tidegate plugin test`.\nprefix = \"seen\"\n".to_owned(),
        ),
        ("README.md", readme(name)),
    ];
    let mut written = Vec::new();
    for (file, text) in files {
        let path = directory.join(file);
        let made = path.parent().map_or(Ok(()), fs::create_dir_all).and_then(|()| fs::write(&path, text));
        made.map_err(|e| Error::permanent("plugin.io", format!("{} cannot be written: {e}", path.display())))?;
        written.push(path);
    }
    Ok(written)
}

/// The name becomes a crate, a file, and what configurations say.
fn check_name(name: &str) -> Result<()> {
    let legal = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
    let is_word =
        name.len() <= NAME_BYTES && name.bytes().all(legal) && name.starts_with(|c: char| c.is_ascii_lowercase());
    if is_word && !TAKEN.contains(&name) && !is_keyword(name) {
        return Ok(());
    }
    Err(Error::usage("plugin.name", format!("`{}` cannot be a plugin's name", super::clean(name, 100))).next(format!(
        "Use 1 to {NAME_BYTES} lower-case letters, digits and `_`, a letter first, and no word of Rust."
    )))
}

fn is_keyword(name: &str) -> bool {
    const WORDS: &str = "as async await break const continue crate dyn else enum extern false fn for gen if impl in let \
        loop match mod move mut pub ref return self static struct super trait true type unsafe use where while abstract \
        become box do final macro override priv try typeof unsized virtual yield";
    WORDS.split_whitespace().any(|word| word == name)
}

fn find_sdk(given: Option<&Path>) -> Result<PathBuf> {
    let place = given.unwrap_or(Path::new(SDK));
    let found = place.canonicalize().ok().filter(|place| place.join("Cargo.toml").is_file());
    found.ok_or_else(|| {
        Error::usage("plugin.no-sdk", format!("the SDK for Rust is not in {}", place.display()))
            .next("Name its directory, `sdk/rust` in Tidegate's sources: --sdk DIR.")
    })
}

fn manifest(name: &str, sdk: &Path) -> String {
    // As a string of TOML: a path may hold anything.
    let sdk = toml::Value::from(sdk.display().to_string());
    format!(
        "[package]\nname = \"{name}\"\nversion = \"0.1.0\"\nedition = \"2024\"\npublish = false\n\n\
         [lib]\ncrate-type = [\"cdylib\"]\n\n\
         [dependencies]\nschemars = \"1\"\nserde = {{ version = \"1\", features = [\"derive\"] }}\ntidegate-sdk = {{ path = {sdk} }}\n\n\
         # A panic carries its file and line itself; names stay, for backtraces.\n\
         [profile.release]\nopt-level = 3\npanic = \"abort\"\nlto = \"thin\"\nstrip = \"debuginfo\"\ndebug = \"line-tables-only\"\n\n\
         # Of its own, wherever it lies.\n[workspace]\n"
    )
}

fn code(name: &str) -> String {
    CODE.replace("\"print\"", &format!("\"{name}\"")).replace("Print", &type_name(name))
}

/// `to_clickhouse` as `ToClickhouse`.
fn type_name(name: &str) -> String {
    let words = name.split('_').filter(|word| !word.is_empty());
    let type_name: String = words
        .flat_map(|word| {
            let mut letters = word.chars();
            letters.next().map(|first| first.to_ascii_uppercase()).into_iter().chain(letters)
        })
        .collect();
    // Names of the SDK's that the code has beside it.
    match type_name.as_str() {
        "Ack" | "Destination" | "Failure" | "Group" | "NoSettings" | "PhysicalTable" | "Ready" | "Session"
        | "Settings" | "String" | "Table" | "Vec" => format!("{type_name}Plugin"),
        _ => type_name,
    }
}

fn readme(name: &str) -> String {
    format!(
        "# {name}\n\nA destination for Tidegate. It writes each batch to the log; `src/lib.rs` is where to begin.\n\n\
         ```\ntidegate plugin build . --out plugins\ntidegate plugin test plugins/{name}.wasm --settings settings.toml\n```\n\n\
         In `tidegate.toml`:\n\n```toml\n[[destination]]\nname   = \"{name}\"\nplugin = \"{name}\"\nmode   = \"changes\"\n\n\
         [destination.settings]\nprefix = \"seen\"\n```\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_project_is_written_once_and_named_as_a_crate_can_be() {
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path().join("to_log");
        let written = write(&place, "to_log", None).unwrap();
        assert!(written.iter().all(|file| file.is_file()), "{written:?}");
        let code = fs::read_to_string(place.join("src/lib.rs")).unwrap();
        assert!(
            code.contains("impl Destination for ToLog {") && code.contains("NAME: &'static str = \"to_log\""),
            "{code}"
        );
        assert!(!code.contains("rint"), "{code}");
        assert_eq!(write(&place, "to_log", None).unwrap_err().code(), "plugin.exists");
        for name in ["", "To", "1st", "a-b", "../x", "fn", "std", "serde", &"x".repeat(41)] {
            assert_eq!(write(&directory.path().join("x"), name, None).unwrap_err().code(), "plugin.name", "{name}");
        }
        let elsewhere = write(&directory.path().join("x"), "x", Some(directory.path())).unwrap_err();
        assert_eq!(elsewhere.code(), "plugin.no-sdk");
        assert!(!directory.path().join("x").exists());
        assert_eq!(type_name("table"), "TablePlugin");
    }
}
