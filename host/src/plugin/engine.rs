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
use super::limits::EngineLimits;
use super::permissions::Grants;
use super::pin::Pin;
use super::{build, component, text, wasi};
use crate::error::{Error, Result};

/// How the engine works; the same for all plugins.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Directory of compiled code, made with mode 0700.
    pub cache: PathBuf,
    /// What all plugins have to keep to.
    pub limits: EngineLimits,
    /// How often a running guest gives way to others on its thread. Default 10 ms: a
    /// fraction of the delay that a reader of the log may have.
    pub tick: Duration,
}

impl EngineOptions {
    /// Defaults, with compiled code in `cache`.
    pub fn new(cache: impl Into<PathBuf>) -> EngineOptions {
        EngineOptions { cache: cache.into(), limits: EngineLimits::default(), tick: Duration::from_millis(10) }
    }
}

impl Default for EngineOptions {
    /// The cache in the user's cache directory.
    fn default() -> EngineOptions {
        EngineOptions::new(build::cache_home().join("tidegate/code"))
    }
}

impl From<EngineLimits> for EngineOptions {
    /// The cache in the user's cache directory.
    fn from(limits: EngineLimits) -> EngineOptions {
        EngineOptions { limits, ..EngineOptions::default() }
    }
}

/// Compiles, links and loads plugins. Cheap to clone; one for the process is enough.
#[derive(Clone)]
pub struct PluginEngine(Arc<Inner>);

struct Inner {
    engine: Engine,
    compilers: rayon::ThreadPool,
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
    /// Its code was made for this load, and not taken from the cache.
    pub compiled: bool,
    engine: Engine,
    pre: v0_1::DestinationPre<State>,
}

impl Plugin {
    /// Whether it says that it can do this.
    pub fn can(&self, capability: &str) -> bool {
        self.manifest.capabilities.iter().any(|known| known == capability)
    }

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
        let compilers = compilers()?;
        let mut linker = Linker::new(&engine);
        wasi::link(&mut linker).map_err(failed)?;
        v0_1::Destination::add_to_linker::<_, HasSelf<_>>(&mut linker, |state| state).map_err(failed)?;
        start_ticker(&engine, options.tick)?;
        Ok(PluginEngine(Arc::new(Inner {
            engine,
            compilers,
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
    /// `plugin.extra-import`); `plugin.compile-time`; `plugin.incompatible` where a
    /// function has another type;
    /// `plugin.describe` where it cannot say what it is. Each names the file.
    pub async fn load(&self, file: &Path) -> Result<Arc<Plugin>> {
        self.load_pinned(file, &Pin::default()).await
    }

    /// The same for a file that has to be a certain one.
    ///
    /// # Errors
    /// As of [`PluginEngine::load`], and those of [`Pin::check`].
    pub async fn load_pinned(&self, file: &Path, pin: &Pin) -> Result<Arc<Plugin>> {
        let _one_at_a_time = self.0.loading.lock().await;
        let (this, path, pin) = (self.clone(), file.to_owned(), pin.clone());
        let prepared = match blocking(move || this.prepare(&path, &pin)).await? {
            Loaded::Known(plugin) => return Ok(plugin),
            Loaded::Cached(prepared) => prepared,
            Loaded::New { sha256, key, bytes } => {
                let component = self.compile(file, bytes).await?;
                Prepared { sha256, key, component, manifest: None }
            }
        };
        self.link(file, prepared).await
    }

    /// What `file` was when it had this digest, if the cache has it.
    ///
    /// # Errors
    /// As of [`PluginEngine::load`].
    pub(crate) async fn load_kept(&self, file: &Path, sha256: &str) -> Result<Option<Arc<Plugin>>> {
        let _one_at_a_time = self.0.loading.lock().await;
        let (this, path, sha256) = (self.clone(), file.to_owned(), sha256.to_owned());
        let kept = blocking(move || match this.known(&path, &sha256) {
            Some(plugin) => Ok(Some(Loaded::Known(plugin))),
            None => Ok(this.cached(&path, &sha256).map(Loaded::Cached)),
        });
        match kept.await? {
            Some(Loaded::Known(plugin)) => Ok(Some(plugin)),
            Some(Loaded::Cached(prepared)) => self.link(file, prepared).await.map(Some),
            _ => Ok(None),
        }
    }

    async fn link(&self, file: &Path, prepared: Prepared) -> Result<Arc<Plugin>> {
        let Prepared { sha256, key, component, manifest } = prepared;
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
            compiled: !is_cached,
            engine: self.0.engine.clone(),
            pre,
        };
        if !is_cached {
            plugin = on_own_thread(describe(plugin)).await?;
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

    /// For components that are no plugins.
    #[cfg(test)]
    pub(super) fn parts(&self) -> (&Engine, &Linker<State>) {
        (&self.0.engine, &self.0.linker)
    }

    /// Compilations and cache hits.
    pub fn stats(&self) -> EngineStats {
        EngineStats { compiled: self.0.compiled.load(Ordering::Relaxed), cached: self.0.cached.load(Ordering::Relaxed) }
    }

    fn prepare(&self, file: &Path, pin: &Pin) -> Result<Loaded> {
        let bytes = read(file, self.0.options.limits.component_bytes)?;
        let sha256 = hex(&Sha256::digest(&bytes));
        pin.check(file, &bytes, &sha256)?;
        if let Some(plugin) = self.known(file, &sha256) {
            return Ok(Loaded::Known(plugin));
        }
        component::check(file, &bytes)?;
        match self.cached(file, &sha256) {
            Some(prepared) => Ok(Loaded::Cached(prepared)),
            None => Ok(Loaded::New { key: self.key(&sha256), sha256, bytes }),
        }
    }

    /// What is loaded of this file already.
    fn known(&self, file: &Path, sha256: &str) -> Option<Arc<Plugin>> {
        let loaded = self.0.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        loaded.get(&(file.to_owned(), sha256.to_owned())).and_then(Weak::upgrade)
    }

    /// What the cache has of it.
    fn cached(&self, file: &Path, sha256: &str) -> Option<Prepared> {
        let key = self.key(sha256);
        let Compiled { manifest, code } = self.0.cache.load(&key)?;
        // SAFETY: the bytes are what this engine's `Component::serialize` gave: they
        // come from a directory that only we can write to (`Cache::open`), their
        // checksum is right, and wasmtime itself checks version and settings.
        match unsafe { Component::deserialize(&self.0.engine, &code) } {
            Ok(component) => {
                self.0.cached.fetch_add(1, Ordering::Relaxed);
                Some(Prepared { sha256: sha256.to_owned(), key, component, manifest: Some(manifest) })
            }
            Err(error) => {
                tracing::warn!(file = %file.display(), %error, "the cached code does not fit this engine and will be made again");
                None
            }
        }
    }

    /// Compiles on threads that give way to all others. A compilation cannot be ended: one
    /// that takes too long is given up, and goes on there until the process ends.
    async fn compile(&self, file: &Path, bytes: Vec<u8>) -> Result<Component> {
        tracing::info!(file = %file.display(), bytes = bytes.len(), "compiling plugin");
        let (start, most) = (Instant::now(), self.0.options.limits.compile);
        let (done, compiled) = tokio::sync::oneshot::channel();
        let engine = self.0.engine.clone();
        self.0.compilers.spawn(move || {
            // Nobody waits any more if it took too long.
            let _ = done.send(Component::from_binary(&engine, &bytes));
        });
        let compiled = match tokio::time::timeout(most, compiled).await {
            Ok(Ok(compiled)) => compiled,
            Ok(Err(_)) => return Err(Error::permanent("plugin.engine", "the compiler of plugins panicked")),
            Err(_) => {
                return Err(Error::no(
                    "plugin.compile-time",
                    format!("{} was not compiled within {} s", file.display(), most.as_secs_f64()),
                )
                .next("Build it smaller, or raise `compile_ms` in [pipeline.engine]."));
            }
        };
        let component = compiled.map_err(|e| {
            Error::no(
                "plugin.damaged",
                format!("{} cannot be compiled: {}", file.display(), text::clean(&format!("{e:#}"), 500)),
            )
            .next("Copy or build it again.")
        })?;
        self.0.compiled.fetch_add(1, Ordering::Relaxed);
        tracing::info!(file = %file.display(), seconds = start.elapsed().as_secs_f64(), "compiled plugin");
        Ok(component)
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
    Cached(Prepared),
    New { sha256: String, key: String, bytes: Vec<u8> },
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
        .max_wasm_stack(options.limits.stack_bytes)
        // The guest's, and as much for the host functions it calls.
        .async_stack_size(options.limits.stack_bytes * 2 + (1 << 20))
        // What no guest toolchain needs by default is surface for nothing.
        .wasm_memory64(false)
        .wasm_multi_memory(false)
        .wasm_relaxed_simd(false)
        .wasm_tail_call(false)
        .wasm_custom_page_sizes(false)
        .wasm_wide_arithmetic(false);
    config
}

/// Threads that compile. Starting can wait; whoever replicates at that moment cannot.
fn compilers() -> Result<rayon::ThreadPool> {
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(|index| format!("plugin-compile-{index}"))
        .start_handler(|_| lower_priority(COMPILER_NICE))
        .build()
        .map_err(|e| Error::permanent("plugin.engine", format!("the plugin engine cannot start a thread: {e}")))
}

/// Half of what separates the keenest process from the laziest.
const COMPILER_NICE: i32 = 10;

/// Gives way to other threads from here on. Linux keeps this for each thread.
pub(crate) fn lower_priority(nice: i32) {
    if let Err(error) = rustix::process::setpriority_process(None, nice) {
        tracing::debug!(%error, "a thread keeps its priority");
    }
}

/// Runs what calls a plugin on a thread of its own: it may burn its time to the end, and
/// the threads of the process are for others.
async fn on_own_thread<T: Send + 'static>(work: impl Future<Output = Result<T>> + Send + 'static) -> Result<T> {
    let runtime = tokio::runtime::Handle::current();
    let (done, result) = tokio::sync::oneshot::channel();
    std::thread::Builder::new()
        .name("plugin-describe".into())
        .spawn(move || {
            // Nobody waits any more if the load was given up.
            let _ = done.send(runtime.block_on(work));
        })
        .map_err(|e| Error::permanent("plugin.engine", format!("the plugin engine cannot start a thread: {e}")))?;
    result.await.unwrap_or_else(|_| Err(Error::permanent("plugin.engine", "loading a plugin was interrupted")))
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
            .next("Build it without debug information (`strip`), or raise `component_bytes` in [pipeline.engine]."));
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
