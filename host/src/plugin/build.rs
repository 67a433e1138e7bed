//! Builds a plugin's crate into a `.wasm`: the one place that finds the guest toolchain.
//!
//! Looked for in this order:
//! 1. the Rust compiler on the `PATH` has the standard library of `wasm32-wasip2`;
//! 2. `rustup target add wasm32-wasip2` gets it;
//! 3. Debian's `rustc-web`, which carries the library's source: the standard library is
//!    built from it, once, against Debian's `wasi-libc`;
//! 4. otherwise an error that says what to install.
//!
//! All guests share one target directory apart from the host's, so that their
//! dependencies (and in case 3 the standard library) are compiled once.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use serde_json::Value;

use crate::error::{Error, Result};

/// What guests are compiled for.
pub const TARGET: &str = "wasm32-wasip2";

/// The packages of Debian that make the third way.
pub const DEBIAN_PACKAGES: &str = "apt-get install --no-install-recommends rustc-web cargo-web rust-web-src wasi-libc";

/// A download that takes longer is given up: where there is no network, rustup retries
/// for minutes.
const ADD_TARGET_LIMIT: Duration = Duration::from_secs(60);
/// Where another way exists, a failed download is not tried again for this long.
const ADD_TARGET_AGAIN: Duration = Duration::from_secs(24 * 3600);

/// How to build; the default is right for a person at a terminal.
#[derive(Clone, Debug, Default)]
pub struct BuildOptions {
    /// The guests' target directory; [`guest_target_dir`] when absent.
    pub target_dir: Option<PathBuf>,
    /// Fail instead of changing `Cargo.lock`.
    pub locked: bool,
    /// Only warnings and errors on stderr, no progress.
    pub quiet: bool,
}

/// How guests are compiled on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Toolchain {
    /// `cargo` on the `PATH` knows the target.
    Installed,
    /// Debian's compiler builds the standard library too.
    Debian {
        /// The directory of `rust-lld` and `wasm-component-ld`.
        linkers: PathBuf,
    },
}

impl Toolchain {
    /// Finds it, and may download it (up to a minute).
    ///
    /// # Errors
    /// `plugin.no-toolchain`, with the line to type.
    pub fn find(target_dir: &Path) -> Result<Toolchain> {
        if target_installed() {
            return Ok(Toolchain::Installed);
        }
        let debian = find_debian();
        // Without another way a download is always worth the wait.
        let failed = target_dir.join("rustup-target-add.failed");
        if (debian.is_err() || !is_younger(&failed, ADD_TARGET_AGAIN)) && program("rustup").is_some() {
            if add_target() && target_installed() {
                let _ = fs::remove_file(&failed);
                return Ok(Toolchain::Installed);
            }
            let _ = fs::create_dir_all(target_dir).and_then(|()| fs::write(&failed, b""));
        }
        debian.map(|linkers| Toolchain::Debian { linkers }).map_err(|missing| {
            Error::permanent(
                "plugin.no-toolchain",
                format!("the Rust toolchain cannot compile for {TARGET}: rustup has no such target and cannot add it, and Debian's way lacks {missing}"),
            )
            .next(format!("Run `rustup target add {TARGET}`, or on Debian 12: `{DEBIAN_PACKAGES}` (with rustup's stable toolchain for the linker)."))
        })
    }

    /// A command that runs cargo with this toolchain, free of what the caller's
    /// environment says about another build.
    fn cargo(&self) -> Command {
        let mut command = match self {
            Toolchain::Installed => Command::new("cargo"),
            Toolchain::Debian { .. } => Command::new("/usr/bin/cargo"),
        };
        for (name, _) in std::env::vars_os() {
            if is_of_another_build(&name) {
                command.env_remove(name);
            }
        }
        if let Toolchain::Debian { linkers } = self {
            let mut path = OsString::from(linkers);
            path.push(":");
            path.push(std::env::var_os("PATH").unwrap_or_default());
            command
                .env("PATH", path)
                .env("RUSTC_BOOTSTRAP", "1")
                .env("RUSTC", "/usr/bin/rustc")
                .env("CARGO_TARGET_WASM32_WASIP2_LINKER", linkers.join("wasm-component-ld"))
                .env("RUSTFLAGS", "-L /usr/lib/wasm32-wasi -C link-self-contained=no");
        }
        command
    }
}

/// `$TIDEGATE_GUEST_TARGET`, else `tidegate/guests` in the user's cache directory.
pub fn guest_target_dir() -> PathBuf {
    if let Some(given) = std::env::var_os("TIDEGATE_GUEST_TARGET").filter(|v| !v.is_empty()) {
        return PathBuf::from(given);
    }
    cache_home().join("tidegate/guests")
}

/// `$XDG_CACHE_HOME`, else `~/.cache` (XDG Base Directory Specification: a relative
/// value is to be ignored).
pub(crate) fn cache_home() -> PathBuf {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    absolute("XDG_CACHE_HOME")
        .or_else(|| absolute("HOME").map(|home| home.join(".cache")))
        .unwrap_or_else(std::env::temp_dir)
}

/// Builds the plugin in `crate_dir` and puts `<library name>.wasm` into `out_dir`, whole
/// (by rename). Blocks; cargo's progress goes to stderr.
///
/// # Errors
/// As [`build_all`].
pub fn build(crate_dir: &Path, out_dir: &Path, options: &BuildOptions) -> Result<PathBuf> {
    let mut files = build_all(&[crate_dir], out_dir, options)?;
    files.pop().ok_or_else(|| Error::permanent("plugin.build", format!("{}: nothing was built", crate_dir.display())))
}

/// Builds several crates, those of one workspace in one run of cargo. The files come in
/// the order of `crate_dirs`.
///
/// # Errors
/// `plugin.no-toolchain`; `plugin.not-a-crate` where a directory is not a crate with a
/// `cdylib`; `plugin.build` where cargo fails (it has said why on stderr); `plugin.io`.
pub fn build_all<P: AsRef<Path>>(crate_dirs: &[P], out_dir: &Path, options: &BuildOptions) -> Result<Vec<PathBuf>> {
    let target_dir = options.target_dir.clone().unwrap_or_else(guest_target_dir);
    let toolchain = Toolchain::find(&target_dir)?;
    let guests = crate_dirs.iter().map(|dir| Guest::read(&toolchain, dir.as_ref())).collect::<Result<Vec<_>>>()?;
    fs::create_dir_all(out_dir).map_err(|e| io_error(out_dir, "cannot be created", &e))?;
    fs::create_dir_all(&target_dir).map_err(|e| io_error(&target_dir, "cannot be created", &e))?;

    // Held until the files are copied: cargo names the output after the library alone,
    // so another workspace's library of the same name would replace it.
    let _lock = lock(&target_dir)?;
    let mut by_workspace: BTreeMap<&Path, Vec<&Guest>> = BTreeMap::new();
    for guest in &guests {
        by_workspace.entry(&guest.workspace).or_default().push(guest);
    }
    let mut built = BTreeMap::new();
    for (workspace, guests) in by_workspace {
        run_cargo(&toolchain, workspace, &guests, &target_dir, options, &mut built)?;
    }
    guests
        .iter()
        .map(|guest| {
            let artifact = built.get(&guest.manifest).ok_or_else(|| {
                Error::permanent(
                    "plugin.build",
                    format!("{}: cargo built no {}.wasm", guest.manifest.display(), guest.library),
                )
            })?;
            let file = out_dir.join(format!("{}.wasm", guest.library));
            install(artifact, &file)?;
            Ok(file)
        })
        .collect()
}

/// One crate, as `cargo metadata` describes it.
struct Guest {
    manifest: PathBuf,
    package: String,
    library: String,
    workspace: PathBuf,
}

impl Guest {
    fn read(toolchain: &Toolchain, dir: &Path) -> Result<Guest> {
        let not_a_crate = |why: String| {
            Error::usage("plugin.not-a-crate", format!("{} is not a plugin's crate: {why}", dir.display()))
                .next("Name a directory whose Cargo.toml has `[lib] crate-type = [\"cdylib\"]`.")
        };
        let manifest = dir.join("Cargo.toml");
        let manifest = manifest.canonicalize().map_err(|e| not_a_crate(format!("{}: {e}", manifest.display())))?;
        let output = toolchain
            .cargo()
            .args(["metadata", "--no-deps", "--format-version", "1", "--manifest-path"])
            .arg(&manifest)
            .stdin(Stdio::null())
            .output()
            .map_err(|e| cannot_run_cargo(&e))?;
        if !output.status.success() {
            return Err(not_a_crate(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
        }
        let metadata: Value =
            serde_json::from_slice(&output.stdout).map_err(|e| not_a_crate(format!("cargo metadata: {e}")))?;
        let package = metadata["packages"]
            .as_array()
            .into_iter()
            .flatten()
            .find(|p| p["manifest_path"].as_str().is_some_and(|path| Path::new(path) == manifest))
            .ok_or_else(|| not_a_crate("its Cargo.toml describes no package".into()))?;
        let target = package["targets"]
            .as_array()
            .into_iter()
            .flatten()
            .find(|t| is_cdylib(t))
            .ok_or_else(|| not_a_crate("it has no library of type `cdylib`".into()))?;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        Ok(Guest {
            package: text(&package["name"]),
            library: text(&target["name"]).replace('-', "_"),
            workspace: PathBuf::from(text(&metadata["workspace_root"])),
            manifest,
        })
    }
}

fn is_cdylib(target: &Value) -> bool {
    target["crate_types"].as_array().is_some_and(|types| types.iter().any(|t| t == "cdylib"))
}

/// One run of cargo; adds the path of each guest's `.wasm` under its manifest's.
fn run_cargo(
    toolchain: &Toolchain,
    workspace: &Path,
    guests: &[&Guest],
    target_dir: &Path,
    options: &BuildOptions,
    built: &mut BTreeMap<PathBuf, PathBuf>,
) -> Result<()> {
    for guest in guests {
        forget_namesake(target_dir, guest)?;
    }
    let mut command = toolchain.cargo();
    command.arg("build").args(["--release", "--target", TARGET, "--message-format", "json-render-diagnostics"]);
    command.arg("--target-dir").arg(target_dir);
    if matches!(toolchain, Toolchain::Debian { .. }) {
        command.arg("-Zbuild-std=std,panic_abort");
    }
    if options.locked {
        command.arg("--locked");
    }
    if options.quiet {
        command.arg("--quiet");
    }
    for guest in guests {
        command.args(["-p", &guest.package]);
    }
    // In the workspace's directory, so that its `.cargo/config.toml` counts.
    command.current_dir(workspace).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.spawn().map_err(|e| cannot_run_cargo(&e))?;
    if let Some(stdout) = child.stdout.take() {
        for line in BufReader::new(stdout).lines().map_while(std::io::Result::ok) {
            if let Some((manifest, file)) = artifact(&line) {
                built.insert(manifest, file);
            }
        }
    }
    let status = child.wait().map_err(|e| cannot_run_cargo(&e))?;
    if status.success() {
        return Ok(());
    }
    let names: Vec<_> = guests.iter().map(|g| g.package.as_str()).collect();
    Err(Error::permanent(
        "plugin.build",
        format!("cargo cannot build {} in {} ({status})", names.join(", "), workspace.display()),
    )
    .next("Read what cargo printed above."))
}

/// The manifest and the `.wasm` of a `compiler-artifact` message for a `cdylib`.
fn artifact(line: &str) -> Option<(PathBuf, PathBuf)> {
    let message: Value = serde_json::from_str(line).ok()?;
    if message["reason"] != "compiler-artifact" || !is_cdylib(&message["target"]) {
        return None;
    }
    let file = message["filenames"].as_array()?.iter().filter_map(Value::as_str).find(|f| f.ends_with(".wasm"))?;
    Some((PathBuf::from(message["manifest_path"].as_str()?), PathBuf::from(file)))
}

/// Cargo gives a wasm library no hash in its name and thinks it fresh as long as a file
/// of that name is there, even another crate's. So the file goes when its builder was
/// another; only that one crate is compiled again.
fn forget_namesake(target_dir: &Path, guest: &Guest) -> Result<()> {
    let owners = target_dir.join("owners");
    fs::create_dir_all(&owners).map_err(|e| io_error(&owners, "cannot be created", &e))?;
    let owner = owners.join(&guest.library);
    let ours = guest.manifest.as_os_str().as_encoded_bytes();
    if fs::read(&owner).is_ok_and(|theirs| theirs == ours) {
        return Ok(());
    }
    let _ = fs::remove_file(target_dir.join(TARGET).join("release/deps").join(format!("{}.wasm", guest.library)));
    fs::write(&owner, ours).map_err(|e| io_error(&owner, "cannot be written", &e))
}

/// Copies by temporary file and rename: who watches the directory sees it whole.
fn install(from: &Path, to: &Path) -> Result<()> {
    let temporary = to.with_extension(format!("wasm.{}.tmp", std::process::id()));
    fs::copy(from, &temporary).and_then(|_| fs::rename(&temporary, to)).map_err(|e| {
        let _ = fs::remove_file(&temporary);
        io_error(to, "cannot be written", &e)
    })
}

fn lock(target_dir: &Path) -> Result<File> {
    let path = target_dir.join("tidegate.lock");
    let failed = |e: &std::io::Error| io_error(&path, "cannot be locked", e);
    let file = File::options().create(true).append(true).open(&path).map_err(|e| failed(&e))?;
    if file.try_lock().is_err() {
        tracing::info!(lock = %path.display(), "waiting for another build of plugins");
        file.lock().map_err(|e| failed(&e))?;
    }
    Ok(file)
}

/// Whether the compiler on the `PATH` has the target's standard library: asked of the
/// compiler, for not every one comes from rustup.
fn target_installed() -> bool {
    let Some(libraries) = output_of("rustc", &["--print", "target-libdir", "--target", TARGET]) else {
        return false;
    };
    fs::read_dir(libraries)
        .is_ok_and(|entries| entries.flatten().any(|e| e.file_name().as_encoded_bytes().starts_with(b"libstd-")))
}

fn add_target() -> bool {
    tracing::info!("rustup target add {TARGET}");
    let spawned = Command::new("rustup")
        .args(["target", "add", TARGET])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let Ok(mut child) = spawned else { return false };
    let give_up = Instant::now() + ADD_TARGET_LIMIT;
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return status.success(),
            Ok(None) if Instant::now() < give_up => std::thread::sleep(Duration::from_millis(50)),
            _ => {
                let _ = child.kill();
                let _ = child.wait();
                return false;
            }
        }
    }
}

/// The directory of the linkers when all of Debian's way is there, else what is missing.
fn find_debian() -> Result<PathBuf, String> {
    for needed in [
        "/usr/bin/rustc",
        "/usr/bin/cargo",
        "/usr/lib/wasm32-wasi/libc.a",
        "/usr/lib/rustlib/src/rust/library/std/Cargo.toml",
    ] {
        // `/usr/lib/rustlib/src/rust` is a link, whose end another package holds.
        if !Path::new(needed).exists() {
            return Err(needed.to_owned());
        }
    }
    let missing =
        || format!("rust-lld and wasm-component-ld of a rustup toolchain (component rustc, {TARGET}'s linker)");
    let sysroot = output_of("rustc", &["--print", "sysroot"]).ok_or_else(missing)?;
    let version = output_of("rustc", &["-vV"]).ok_or_else(missing)?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: ")).ok_or_else(missing)?;
    let linkers = Path::new(&sysroot).join("lib/rustlib").join(host).join("bin");
    let complete = ["rust-lld", "wasm-component-ld"].iter().all(|linker| linkers.join(linker).exists());
    if complete { Ok(linkers) } else { Err(missing()) }
}

fn output_of(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn program(name: &str) -> Option<PathBuf> {
    std::env::split_paths(&std::env::var_os("PATH")?).map(|dir| dir.join(name)).find(|path| path.is_file())
}

fn is_younger(file: &Path, than: Duration) -> bool {
    let modified = fs::metadata(file).and_then(|m| m.modified());
    modified.is_ok_and(|at| SystemTime::now().duration_since(at).unwrap_or_default() < than)
}

/// Variables that say something about one build: a guest's must not inherit them from
/// the build (or `cargo run`) that we may be part of. Settings of the person stay.
fn is_of_another_build(name: &OsString) -> bool {
    const STAY: [&str; 8] = [
        "CARGO_HOME",
        "CARGO_BUILD_JOBS",
        "CARGO_INCREMENTAL",
        "CARGO_NET_",
        "CARGO_HTTP_",
        "CARGO_TERM_",
        "CARGO_REGISTR",
        "CARGO_SOURCE_",
    ];
    let name = name.to_string_lossy();
    match name.as_ref() {
        "CARGO"
        | "RUSTC"
        | "RUSTFLAGS"
        | "RUSTDOCFLAGS"
        | "RUSTC_BOOTSTRAP"
        | "RUSTC_WORKSPACE_WRAPPER"
        | "TARGET"
        | "HOST"
        | "OUT_DIR"
        | "LD_LIBRARY_PATH" => true,
        name => name.starts_with("CARGO_") && !STAY.iter().any(|stay| name.starts_with(stay)),
    }
}

fn cannot_run_cargo(error: &std::io::Error) -> Error {
    Error::permanent("plugin.no-toolchain", format!("cargo cannot be run: {error}"))
        .next("Install Rust with rustup (https://rustup.rs), or put cargo on the PATH.")
}

fn io_error(path: &Path, what: &str, error: &std::io::Error) -> Error {
    Error::permanent("plugin.io", format!("{} {what}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A crate with a workspace of its own whose library answers `value`.
    fn tiny_crate(dir: &Path, name: &str, value: u32) {
        fs::create_dir_all(dir.join("src")).unwrap();
        let manifest = format!(
            "[package]\nname = \"{name}\"\nversion = \"0.0.0\"\nedition = \"2024\"\n[lib]\ncrate-type = [\"cdylib\"]\n[workspace]\n[profile.release]\npanic = \"abort\"\n"
        );
        fs::write(dir.join("Cargo.toml"), manifest).unwrap();
        let source = format!("#[unsafe(no_mangle)]\npub extern \"C\" fn value() -> u32 {{ {value} }}\n");
        fs::write(dir.join("src/lib.rs"), source).unwrap();
    }

    #[test]
    fn a_crate_becomes_a_component_and_its_namesake_elsewhere_another() {
        let root = tempfile::tempdir().unwrap();
        let (a, b) = (root.path().join("a"), root.path().join("b"));
        tiny_crate(&a, "tidegate-build-probe", 1);
        tiny_crate(&b, "tidegate-build-probe", 77_777);
        let options = BuildOptions { quiet: true, ..BuildOptions::default() };
        let build = |from: &Path, out: &str| fs::read(build(from, &root.path().join(out), &options).unwrap()).unwrap();
        let first = build(&a, "out");
        // A component's layer field is 1, a core module's 0.
        assert_eq!(first[..8], [0, b'a', b's', b'm', 0x0d, 0, 1, 0]);
        let second = build(&b, "out");
        assert!(first != second);
        assert!(first == build(&a, "out"), "cargo took the namesake's file for ours");
        let left: Vec<_> = fs::read_dir(root.path().join("out")).unwrap().flatten().map(|e| e.file_name()).collect();
        assert_eq!(left, ["tidegate_build_probe.wasm"]);
    }

    #[test]
    fn a_directory_without_a_crate_is_named() {
        let root = tempfile::tempdir().unwrap();
        let target = root.path().join("target");
        let options = BuildOptions { target_dir: Some(target), ..BuildOptions::default() };
        let error = build(&root.path().join("nowhere"), root.path(), &options).unwrap_err();
        assert_eq!(error.code(), "plugin.not-a-crate");
        assert!(error.message().contains("nowhere"), "{}", error.report());
    }

    #[test]
    fn variables_of_the_callers_build_do_not_reach_the_guests() {
        for name in
            ["CARGO_TARGET_DIR", "CARGO_BUILD_TARGET_DIR", "RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS", "CARGO_MANIFEST_DIR"]
        {
            assert!(is_of_another_build(&name.into()), "{name}");
        }
        for name in
            ["CARGO_HOME", "CARGO_NET_OFFLINE", "RUSTUP_TOOLCHAIN", "PATH", "CARGO_REGISTRIES_CRATES_IO_PROTOCOL"]
        {
            assert!(!is_of_another_build(&name.into()), "{name}");
        }
    }
}
