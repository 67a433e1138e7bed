//! Reads what a file is and what it imports and exports, before anything is compiled.

use std::path::Path;

use wasmparser::{ComponentExternalKind, Encoding, Parser, Payload};

use super::text::clean;
use super::wasi;
use crate::error::{Error, Result};

/// The versions of the contract that this host speaks, each by a directory under `wit/`.
pub(crate) const VERSIONS: [&str; 1] = ["0.1.0"];
const EXPORT: &str = "tidegate:destination/plugin";
const PACKAGE: &str = "tidegate:destination/";

/// Checks a component's outside.
///
/// # Errors
/// `plugin.not-a-component`, `plugin.damaged`, `plugin.missing-export`,
/// `plugin.version`, `plugin.extra-import`; each names the file.
pub(crate) fn check(file: &Path, bytes: &[u8]) -> Result<()> {
    let (imports, exports) = outside(file, bytes)?;
    let name = file.display();
    let versions: Vec<&str> = exports.iter().filter_map(|export| version_of(export, EXPORT)).collect();
    if versions.is_empty() {
        let there = if exports.is_empty() { "nothing".to_owned() } else { list(&exports) };
        return Err(Error::no(
            "plugin.missing-export",
            format!("{name} is a component of another world: it exports {there}, not {EXPORT}"),
        )
        .next("Build it against the world `destination` of Tidegate's wit/ (in Rust: tidegate_sdk::export!)."));
    }
    let spoken = imports
        .iter()
        .filter(|import| import.starts_with(PACKAGE))
        .filter_map(|import| Some(import.split_once('@')?.1));
    if let Some(unknown) = versions.iter().copied().chain(spoken).find(|version| !VERSIONS.contains(version)) {
        return Err(Error::no(
            "plugin.version",
            format!(
                "{name} was built for version {} of the plugin contract; this host speaks {}",
                clean(unknown, 40),
                VERSIONS.join(", ")
            ),
        )
        .next("Build the plugin with the SDK of this host's version, or install a host that speaks the plugin's."));
    }
    match imports.iter().find(|import| !is_offered(import)) {
        None => Ok(()),
        Some(import) => {
            let why = if import.starts_with("wasi:sockets/") {
                "; plugins have no sockets of their own, they dial what is granted through the contract's `net`"
            } else {
                ""
            };
            Err(Error::no("plugin.extra-import", format!("{name} imports {}, which this host does not offer{why}", clean(import, 100)))
                .next("Build the plugin without it: only tidegate:destination and the cli, clocks, filesystem, io and random interfaces of WASI 0.2 are there."))
        }
    }
}

fn is_offered(import: &str) -> bool {
    let (interface, version) = import.split_once('@').unwrap_or((import, ""));
    match interface.strip_prefix(PACKAGE) {
        Some(name) => matches!(name, "model" | "host" | "net"),
        None => wasi::INTERFACES.contains(&interface) && version.starts_with("0.2."),
    }
}

fn version_of<'a>(export: &'a str, interface: &str) -> Option<&'a str> {
    export.strip_prefix(interface)?.strip_prefix('@')
}

fn list(names: &[String]) -> String {
    clean(&names.join(", "), 300)
}

/// Names of the outermost component's imports, and of the instances it exports.
fn outside(file: &Path, bytes: &[u8]) -> Result<(Vec<String>, Vec<String>)> {
    let not_a_component = |what: &str| {
        Error::no("plugin.not-a-component", format!("{} is not a WebAssembly component: {what}", file.display()))
            .next("Build it for wasm32-wasip2 (`tidegate plugin build DIR`).")
    };
    if !bytes.starts_with(b"\0asm") {
        return Err(not_a_component("it does not begin like WebAssembly at all"));
    }
    let damaged = |why: &str| {
        Error::no("plugin.damaged", format!("{} is damaged or cut short: {}", file.display(), clean(why, 200)))
            .next("Copy or build it again.")
    };
    let (mut imports, mut exports) = (Vec::new(), Vec::new());
    let mut depth = 0_u32;
    for payload in Parser::new(0).parse_all(bytes) {
        match payload.map_err(|e| damaged(&e.to_string()))? {
            Payload::Version { encoding: Encoding::Module, .. } if depth == 0 => {
                return Err(not_a_component("it is a core module"));
            }
            // `parse_all` goes into nested modules and components, whose outside is not ours.
            Payload::ModuleSection { .. } | Payload::ComponentSection { .. } => depth += 1,
            Payload::End(_) => depth = depth.saturating_sub(1),
            Payload::ComponentImportSection(section) if depth == 0 => {
                for import in section {
                    imports.push(import.map_err(|e| damaged(&e.to_string()))?.name.name.to_owned());
                }
            }
            Payload::ComponentExportSection(section) if depth == 0 => {
                for export in section {
                    let export = export.map_err(|e| damaged(&e.to_string()))?;
                    if export.kind == ComponentExternalKind::Instance {
                        exports.push(export.name.name.to_owned());
                    }
                }
            }
            _ => {}
        }
    }
    Ok((imports, exports))
}
