//! The engine: how plugins are compiled, linked and loaded.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use sha2::{Digest as _, Sha256};
use wasmtime::component::{Component, HasSelf, Linker};
use wasmtime::{Config, Engine, OptLevel};

use super::bindings::{v0_1, wire};
use super::cache::{Cache, Compiled};
use super::host_calls::MemoryState;
use super::instance::{InstanceOptions, State};
use super::permissions::Grants;
use super::{build, component, text, wasi};
use crate::error::{Error, Result};

/// How the engine works; the same for all plugins.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Directory of compiled code, made with mode 0700.
    pub cache: PathBuf,
    /// Bytes of a component. Default 256 MiB: a Python guest with its libraries has 20.
    pub component_bytes: u64,
    /// Bytes of the stack that compiled code uses. Default 1 MiB: what a native thread's
    /// recursion may need twice; deeper is a runaway.
    pub stack_bytes: usize,
    /// How often a running guest gives way to others on its thread. Default 10 ms: a
    /// fraction of the delay that a reader of the log may have.
    pub tick: Duration,
}

impl EngineOptions {
    /// Defaults, with compiled code in `cache`.
    pub fn new(cache: impl Into<PathBuf>) -> EngineOptions {
        EngineOptions {
            cache: cache.into(),
            component_bytes: 256 << 20,
            stack_bytes: 1 << 20,
            tick: Duration::from_millis(10),
        }
    }
}

impl Default for EngineOptions {
    /// The cache in the user's cache directory.
    fn default() -> EngineOptions {
        EngineOptions::new(build::cache_home().join("tidegate/code"))
    }
}

/// Compiles, links and loads plugins. Cheap to clone; one for the process is enough.
#[derive(Clone)]
pub struct PluginEngine(Arc<Inner>);

struct Inner {
    engine: Engine,
    linker: Linker<State>,
    cache: Cache,
    options: EngineOptions,
    compiled: AtomicU64,
    cached: AtomicU64,
    loaded: Mutex<HashMap<(PathBuf, String), Weak<Plugin>>>,
    /// One load at a time: two destinations with one plugin compile it once.
    loading: tokio::sync::Mutex<()>,
}

/// What the engine did since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineStats {
    /// Components compiled.
    pub compiled: u64,
    /// Components whose code came from the cache.
    pub cached: u64,
}

/// A plugin that is ready to be instantiated.
pub struct Plugin {
    /// The file's name without `.wasm`.
    pub name: String,
    /// Where it was loaded from.
    pub file: PathBuf,
    /// Of the file, in hex.
    pub sha256: String,
    /// What it says about itself.
    pub manifest: wire::Manifest,
    engine: Engine,
    pre: v0_1::DestinationPre<State>,
}

impl Plugin {
    pub(super) fn engine(&self) -> &Engine {
        &self.engine
    }

    pub(super) fn pre(&self) -> &v0_1::DestinationPre<State> {
        &self.pre
    }
}

impl PluginEngine {
    /// # Errors
    /// `plugin.cache`; `plugin.engine` where this machine cannot run compiled code.
    pub fn new(options: EngineOptions) -> Result<PluginEngine> {
        let failed =
            |e: wasmtime::Error| Error::permanent("plugin.engine", format!("the plugin engine cannot start: {e:#}"));
        let cache = Cache::open(&options.cache)?;
        let engine = Engine::new(&config(&options)).map_err(failed)?;
        let mut linker = Linker::new(&engine);
        wasi::link(&mut linker).map_err(failed)?;
        v0_1::Destination::add_to_linker::<_, HasSelf<_>>(&mut linker, |state| state).map_err(failed)?;
        start_ticker(&engine, options.tick)?;
        Ok(PluginEngine(Arc::new(Inner {
            engine,
            linker,
            cache,
            options,
            compiled: AtomicU64::new(0),
            cached: AtomicU64::new(0),
            loaded: Mutex::default(),
            loading: tokio::sync::Mutex::default(),
        })))
    }

    /// Checks a file, compiles it or takes its code from the cache, and asks it what it
    /// is. The same file, unchanged, is the same plugin as long as somebody holds it.
    ///
    /// # Errors
    /// `plugin.file`, `plugin.too-large`; those of the file's outside (`plugin.damaged`,
    /// `plugin.not-a-component`, `plugin.missing-export`, `plugin.version`,
    /// `plugin.extra-import`); `plugin.incompatible` where a function has another type;
    /// `plugin.describe` where it cannot say what it is. Each names the file.
    pub async fn load(&self, file: &Path) -> Result<Arc<Plugin>> {
        let _one_at_a_time = self.0.loading.lock().await;
        let this = self.clone();
        let path = file.to_owned();
        let prepared = blocking(move || this.prepare(&path)).await?;
        let Prepared { sha256, key, component, manifest } = match prepared {
            Loaded::Known(plugin) => return Ok(plugin),
            Loaded::New(prepared) => prepared,
        };
        let pre = self.0.linker.instantiate_pre(&component).and_then(v0_1::DestinationPre::new).map_err(|e| {
            Error::no(
                "plugin.incompatible",
                format!("{} does not fit the plugin contract: {}", file.display(), text::clean(&format!("{e:#}"), 500)),
            )
            .next("Build the plugin with the SDK of this host's version.")
        })?;
        let is_cached = manifest.is_some();
        let name = file.file_stem().map_or_else(String::new, |stem| stem.to_string_lossy().into_owned());
        let mut plugin = Plugin {
            name,
            file: file.to_owned(),
            sha256,
            manifest: manifest.unwrap_or_else(not_asked_yet),
            engine: self.0.engine.clone(),
            pre,
        };
        if !is_cached {
            plugin = describe(plugin).await?;
            let this = self.clone();
            let manifest = plugin.manifest.clone();
            blocking(move || {
                match component.serialize() {
                    Ok(code) => this.0.cache.store(&key, &manifest, &code),
                    Err(error) => tracing::warn!(%error, "a compiled plugin cannot be kept"),
                }
                Ok(())
            })
            .await?;
        }
        let plugin = Arc::new(plugin);
        let mut loaded = self.0.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        loaded.retain(|_, plugin| plugin.strong_count() > 0);
        loaded.insert((plugin.file.clone(), plugin.sha256.clone()), Arc::downgrade(&plugin));
        Ok(plugin)
    }

    /// Compilations and cache hits.
    pub fn stats(&self) -> EngineStats {
        EngineStats { compiled: self.0.compiled.load(Ordering::Relaxed), cached: self.0.cached.load(Ordering::Relaxed) }
    }

    fn prepare(&self, file: &Path) -> Result<Loaded> {
        let bytes = read(file, self.0.options.component_bytes)?;
        let sha256 = hex(&Sha256::digest(&bytes));
        let known = self
            .0
            .loaded
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&(file.to_owned(), sha256.clone()))
            .and_then(Weak::upgrade);
        if let Some(plugin) = known {
            return Ok(Loaded::Known(plugin));
        }
        component::check(file, &bytes)?;
        let key = self.key(&sha256);
        if let Some(Compiled { manifest, code }) = self.0.cache.load(&key) {
            // SAFETY: the bytes are what this engine's `Component::serialize` gave: they
            // come from a directory that only we can write to (`Cache::open`), their
            // checksum is right, and wasmtime itself checks version and settings.
            match unsafe { Component::deserialize(&self.0.engine, &code) } {
                Ok(component) => {
                    self.0.cached.fetch_add(1, Ordering::Relaxed);
                    return Ok(Loaded::New(Prepared { sha256, key, component, manifest: Some(manifest) }));
                }
                Err(error) => {
                    tracing::warn!(file = %file.display(), %error, "the cached code does not fit this engine and will be made again")
                }
            }
        }
        tracing::info!(file = %file.display(), bytes = bytes.len(), "compiling plugin");
        let start = Instant::now();
        let component = Component::from_binary(&self.0.engine, &bytes).map_err(|e| {
            Error::no(
                "plugin.damaged",
                format!("{} cannot be compiled: {}", file.display(), text::clean(&format!("{e:#}"), 500)),
            )
            .next("Copy or build it again.")
        })?;
        self.0.compiled.fetch_add(1, Ordering::Relaxed);
        tracing::info!(file = %file.display(), seconds = start.elapsed().as_secs_f64(), "compiled plugin");
        Ok(Loaded::New(Prepared { sha256, key, component, manifest: None }))
    }

    /// Content, and whatever of the engine and this machine the code depends on.
    fn key(&self, sha256: &str) -> String {
        let mut hasher = DefaultHasher::new();
        self.0.engine.precompile_compatibility_hash().hash(&mut hasher);
        format!("{sha256}-{:016x}", hasher.finish())
    }
}

enum Loaded {
    Known(Arc<Plugin>),
    New(Prepared),
}

struct Prepared {
    sha256: String,
    key: String,
    component: Component,
    /// From the cache.
    manifest: Option<wire::Manifest>,
}

/// An instance without any permission answers.
async fn describe(plugin: Plugin) -> Result<Plugin> {
    let plugin = Arc::new(plugin);
    let failed = |e: super::CallError| {
        Error::no("plugin.describe", format!("{} cannot say what it is: {e}", plugin.file.display()))
            .next("Report it to the plugin's author.")
    };
    let options = InstanceOptions::new("", Arc::new(Grants::default()), Arc::new(MemoryState::default()));
    let mut instance = plugin.instantiate(&options).await.map_err(failed)?;
    let manifest = instance.describe().await.map_err(failed)?;
    drop(instance);
    match Arc::try_unwrap(plugin) {
        Ok(plugin) => Ok(Plugin { manifest, ..plugin }),
        Err(_) => Err(Error::permanent("plugin.describe", "the plugin is still in use")),
    }
}

/// Stands in until the plugin has said what it is.
fn not_asked_yet() -> wire::Manifest {
    wire::Manifest {
        name: String::new(),
        version: String::new(),
        description: String::new(),
        settings_schema: String::new(),
        table_settings_schema: String::new(),
        capabilities: Vec::new(),
        permissions: Vec::new(),
        details: Vec::new(),
    }
}

fn config(options: &EngineOptions) -> Config {
    let mut config = Config::new();
    config
        .wasm_component_model(true)
        .epoch_interruption(true)
        .cranelift_opt_level(OptLevel::Speed)
        .max_wasm_stack(options.stack_bytes)
        // The guest's, and as much for the host functions it calls.
        .async_stack_size(options.stack_bytes * 2 + (1 << 20))
        // What no guest toolchain needs by default is surface for nothing.
        .wasm_memory64(false)
        .wasm_multi_memory(false)
        .wasm_relaxed_simd(false)
        .wasm_tail_call(false)
        .wasm_custom_page_sizes(false)
        .wasm_wide_arithmetic(false);
    config
}

/// Moves the epoch on until the engine is gone.
fn start_ticker(engine: &Engine, tick: Duration) -> Result<()> {
    let weak = engine.weak();
    let ticker = move || {
        while let Some(engine) = weak.upgrade() {
            engine.increment_epoch();
            drop(engine);
            std::thread::sleep(tick);
        }
    };
    std::thread::Builder::new()
        .name("plugin-epoch".into())
        .spawn(ticker)
        .map(drop)
        .map_err(|e| Error::permanent("plugin.engine", format!("the plugin engine cannot start a thread: {e}")))
}

fn read(file: &Path, most: u64) -> Result<Vec<u8>> {
    let unreadable = |e: std::io::Error| {
        Error::usage("plugin.file", format!("the plugin {} cannot be read: {e}", file.display()))
            .next("Name a .wasm file that exists.")
    };
    let mut bytes = Vec::new();
    std::fs::File::open(file).and_then(|f| f.take(most + 1).read_to_end(&mut bytes)).map_err(unreadable)?;
    if bytes.len() as u64 > most {
        return Err(Error::no("plugin.too-large", format!("{} has more than {} MiB", file.display(), most >> 20))
            .next("Build it without debug information (`strip`), or raise the limit."));
    }
    Ok(bytes)
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(e) => Err(Error::permanent("plugin.engine", format!("loading a plugin was interrupted: {e}"))),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}
