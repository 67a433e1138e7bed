//! A running instance: its store, its limits, and a typed call for each function.
//!
//! An instance is used by one caller, one call at a time. After a trap or a time-out
//! nobody knows what state its memory is in: the store is dropped at once, with the
//! connections and files in it, and every further call is refused.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::{Instant, sleep_until};
use wasmtime::component::ResourceTable;
use wasmtime::{ResourceLimiter, Store};
use wasmtime_wasi::WasiCtx;

use super::answer::Answer;
use super::bindings::{v0_1, wire};
use super::engine::Plugin;
use super::host_calls::{Counters, PluginState};
use super::limits::Limits;
use super::log::Log;
use super::permissions::Grants;
use super::text::clean;
use super::wasi::{self, Tail};
use crate::error::{Class, Error};

/// What an instance is given.
#[derive(Clone)]
pub struct InstanceOptions {
    /// Name of the destination: in every line of log, and the key of its state.
    pub destination: String,
    /// For the log; the plugin learns it in `open`.
    pub lane: u32,
    /// What it may reach.
    pub grants: Arc<Grants>,
    /// What it may use.
    pub limits: Limits,
    /// Where its own small state is.
    pub state: Arc<dyn PluginState>,
    /// Where it counts; share one among the lanes of a destination.
    pub counters: Arc<Counters>,
}

impl InstanceOptions {
    /// Lane 0, default limits, counters of its own.
    pub fn new(destination: impl Into<String>, grants: Arc<Grants>, state: Arc<dyn PluginState>) -> InstanceOptions {
        InstanceOptions {
            destination: destination.into(),
            lane: 0,
            grants,
            limits: Limits::default(),
            state,
            counters: Arc::default(),
        }
    }
}

/// What a call of a plugin came to.
pub type Called<T> = Result<T, CallError>;

/// Why a call of a plugin brought no answer, or a bad one.
#[derive(Clone, Debug)]
pub enum CallError {
    /// The plugin's own answer. Its texts are bounded and free of control characters.
    Failure(wire::Failure),
    /// It panicked, exited, or broke a rule of the sandbox. The instance is gone.
    Trap {
        /// One line, with the end of what it wrote to standard error.
        message: String,
    },
    /// It took too long. The instance is gone.
    Timeout {
        /// As the contract spells it.
        function: &'static str,
        /// The limit that ended it.
        after: Duration,
    },
    /// The host's own fault, or the instance was gone before the call.
    Host(Arc<Error>),
}

impl CallError {
    /// Whether the instance is unusable from now on.
    pub fn is_fatal(&self) -> bool {
        !matches!(self, CallError::Failure(_))
    }

    /// Stable and machine-readable: `plugin.trap`, `plugin.timeout`, or the plugin's or
    /// the host's own.
    pub fn code(&self) -> &str {
        match self {
            CallError::Failure(failure) => &failure.code,
            CallError::Trap { .. } => "plugin.trap",
            CallError::Timeout { .. } => "plugin.timeout",
            CallError::Host(error) => error.code(),
        }
    }

    /// As the host's error: `plugin.trap`, `plugin.timeout`, or the plugin's own code.
    pub fn into_error(self, who: &str) -> Error {
        let message = format!("{who}: {self}");
        match self {
            CallError::Failure(failure) if failure.class == wire::FailureClass::Transient => {
                Error::transient(failure.code, message)
            }
            CallError::Failure(failure) => Error::permanent(failure.code, message),
            CallError::Trap { .. } => Error::transient("plugin.trap", message),
            CallError::Timeout { .. } => Error::transient("plugin.timeout", message),
            CallError::Host(error) => {
                let code = error.code().to_owned();
                let new = match error.class() {
                    Class::Transient => Error::transient(code, message),
                    Class::Permanent => Error::permanent(code, message),
                };
                let new = new.exit(error.exit_code());
                match error.next_step() {
                    Some(next) => new.next(next),
                    None => new,
                }
            }
        }
    }
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CallError::Failure(failure) => write!(f, "{} ({})", failure.message, failure.code),
            CallError::Trap { message } => f.write_str(message),
            CallError::Timeout { function, after } => write!(f, "`{function}` did not return within {after:?}"),
            CallError::Host(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for CallError {}

impl From<Error> for CallError {
    fn from(error: Error) -> CallError {
        CallError::Host(Arc::new(error))
    }
}

/// What the host keeps for an instance, and what its imports work on.
pub(crate) struct State {
    pub(super) wasi: WasiCtx,
    pub(super) table: ResourceTable,
    pub(super) limits: Limits,
    pub(super) log: Log,
    pub(super) destination: Arc<str>,
    pub(super) grants: Arc<Grants>,
    pub(super) state: Arc<dyn PluginState>,
    pub(super) counters: Arc<Counters>,
    pub(super) activity: Arc<Activity>,
    /// Open ones.
    pub(super) connections: usize,
    limiter: Limiter,
}

/// When a call last said that it is at work.
#[derive(Debug)]
pub(crate) struct Activity {
    origin: Instant,
    /// Milliseconds after `origin`.
    last: AtomicU64,
}

impl Activity {
    fn new() -> Activity {
        Activity { origin: Instant::now(), last: AtomicU64::new(0) }
    }

    pub(super) fn working(&self) {
        let now = u64::try_from(self.origin.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last.store(now, Ordering::Relaxed);
    }

    fn last(&self) -> Instant {
        self.origin + Duration::from_millis(self.last.load(Ordering::Relaxed))
    }
}

/// Counts what the guest allocates. A refused growth is an answer the guest can act on
/// (`memory.grow` gives -1), not a trap.
#[derive(Debug)]
struct Limiter {
    memory: usize,
    memory_limit: usize,
    memory_peak: usize,
    memory_refused: bool,
    table_elements: usize,
    instances: usize,
    tables: usize,
    memories: usize,
}

impl ResourceLimiter for Limiter {
    fn memory_growing(&mut self, current: usize, desired: usize, maximum: Option<usize>) -> wasmtime::Result<bool> {
        let total = self.memory.saturating_add(desired.saturating_sub(current));
        if total > self.memory_limit {
            self.memory_refused = true;
            return Ok(false);
        }
        if maximum.is_some_and(|maximum| desired > maximum) {
            return Ok(false);
        }
        self.memory = total;
        self.memory_peak = self.memory_peak.max(total);
        Ok(true)
    }

    fn table_growing(&mut self, _: usize, desired: usize, _: Option<usize>) -> wasmtime::Result<bool> {
        Ok(desired <= self.table_elements)
    }

    fn instances(&self) -> usize {
        self.instances
    }

    fn tables(&self) -> usize {
        self.tables
    }

    fn memories(&self) -> usize {
        self.memories
    }
}

/// One instance of a plugin.
pub struct Instance {
    running: Option<Running>,
    plugin: Arc<Plugin>,
    log: Log,
    limits: Limits,
    activity: Arc<Activity>,
    stderr: Tail,
    memory_peak: usize,
}

struct Running {
    store: Store<State>,
    bindings: v0_1::Destination,
}

impl Plugin {
    /// A new instance, not yet opened.
    ///
    /// # Errors
    /// `Host` where a granted directory cannot be opened; `Trap` and `Timeout` where the
    /// guest's own start fails.
    pub async fn instantiate(self: &Arc<Self>, options: &InstanceOptions) -> Called<Instance> {
        let InstanceOptions { destination, lane, grants, limits, state, counters } = options;
        let log = Log::new(destination.as_str().into(), self.name.as_str().into(), *lane, limits);
        let (wasi, stderr) = wasi::context(grants, limits, &log)?;
        let activity = Arc::new(Activity::new());
        let mut table = ResourceTable::new();
        table.set_max_capacity(limits.handles);
        let mut store = Store::new(
            self.engine(),
            State {
                wasi,
                table,
                limits: limits.clone(),
                log: log.clone(),
                destination: destination.as_str().into(),
                grants: Arc::clone(grants),
                state: Arc::clone(state),
                counters: Arc::clone(counters),
                activity: Arc::clone(&activity),
                connections: 0,
                limiter: Limiter {
                    memory: 0,
                    memory_limit: limits.memory_bytes,
                    memory_peak: 0,
                    memory_refused: false,
                    table_elements: limits.table_elements,
                    instances: limits.core_instances,
                    tables: limits.tables,
                    memories: limits.memories,
                },
            },
        );
        store.limiter(|state| &mut state.limiter);
        store.set_hostcall_fuel(limits.hostcall_bytes);
        store.set_max_component_handles(limits.handles);
        // Armed before the guest runs at all: a data segment counts as running. At each
        // tick the guest gives way, which is when a time-out can end it.
        store.set_epoch_deadline(1);
        store.epoch_deadline_async_yield_and_update(1);

        let mut instance = Instance {
            running: None,
            plugin: Arc::clone(self),
            log,
            limits: limits.clone(),
            activity,
            stderr,
            memory_peak: 0,
        };
        let clock = instance.clock("instantiate");
        match clock.run(self.pre().instantiate_async(&mut store)).await {
            Ok(bindings) => {
                instance.running = Some(Running { store, bindings });
                Ok(instance)
            }
            Err(fault) => Err(instance.fault("instantiate", fault, store.data().limiter.memory_refused)),
        }
    }
}

/// One call's limits.
struct Clock {
    idle: Duration,
    hard: Duration,
    activity: Arc<Activity>,
}

/// Why a call did not return.
enum Fault {
    Failed(wasmtime::Error),
    TimedOut(Duration),
}

impl Clock {
    async fn run<T>(self, call: impl Future<Output = wasmtime::Result<T>>) -> Result<T, Fault> {
        self.activity.working();
        let hard = Instant::now() + self.hard;
        tokio::pin!(call);
        loop {
            let idle = self.activity.last() + self.idle;
            tokio::select! {
                biased;
                result = &mut call => return result.map_err(Fault::Failed),
                () = sleep_until(idle.min(hard)) => {
                    let now = Instant::now();
                    if now >= hard {
                        return Err(Fault::TimedOut(self.hard));
                    }
                    if now >= self.activity.last() + self.idle {
                        return Err(Fault::TimedOut(self.idle));
                    }
                }
            }
        }
    }
}

/// Calls one function of the export; the rest is the same for all of them.
macro_rules! call {
    ($self:ident, $function:literal, $method:ident($($argument:expr),*)) => {{
        let clock = $self.clock($function);
        // Taken for the time of the call: whoever gives up waiting for the answer drops
        // the store with it, half-way as it is.
        let Some(mut running) = $self.running.take() else { return Err($self.gone()) };
        let Running { store, bindings } = &mut running;
        let outcome = clock.run(bindings.tidegate_destination_plugin().$method(&mut *store, $($argument),*)).await;
        $self.end($function, running, outcome)
    }};
}

/// Functions of [`wire`]'s contract; see `wit/` for what each one means. All of them
/// fail with `Failure` where the plugin says so, and with `Trap`, `Timeout` or `Host`,
/// after which the instance is gone.
impl Instance {
    /// What the plugin is.
    pub(crate) async fn describe(&mut self) -> Called<wire::Manifest> {
        call!(self, "describe", call_describe())
    }

    /// Connects.
    pub async fn open(&mut self, session: &wire::Session) -> Called<wire::Ready> {
        call!(self, "open", call_open(session))?.map_err(CallError::Failure)
    }

    /// Read-only checks of all tables.
    pub async fn preflight(&mut self, tables: &[wire::Table]) -> Called<Vec<wire::Notice>> {
        call!(self, "preflight", call_preflight(tables))?.map_err(CallError::Failure)
    }

    /// What a table is to be there.
    pub async fn render_table(&mut self, table: &wire::Table) -> Called<wire::PhysicalTable> {
        call!(self, "render-table", call_render_table(table))?.map_err(CallError::Failure)
    }

    /// What it is there.
    pub async fn inspect_table(&mut self, table: &wire::Table) -> Called<Option<wire::PhysicalTable>> {
        call!(self, "inspect-table", call_inspect_table(table))?.map_err(CallError::Failure)
    }

    /// For each table the position that is stored with its data. As many as `tables`, or
    /// it is a `Trap`.
    pub async fn attach_tables(&mut self, tables: &[wire::Table]) -> Called<Vec<Option<wire::Position>>> {
        let positions = call!(self, "attach-tables", call_attach_tables(tables))?.map_err(CallError::Failure)?;
        if positions.len() != tables.len() {
            return Err(
                self.liar("attach-tables", format!("{} positions for {} tables", positions.len(), tables.len()))
            );
        }
        Ok(positions)
    }

    /// Makes the table exist for a copy.
    pub async fn begin_copy(&mut self, table: &wire::Table, run: &str) -> Called<()> {
        call!(self, "begin-copy", call_begin_copy(table, run))?.map_err(CallError::Failure)
    }

    /// All rows of the copy have been sent.
    pub async fn finish_copy(&mut self, table: &wire::Table, run: &str, as_of: wire::Position) -> Called<()> {
        call!(self, "finish-copy", call_finish_copy(table, run, as_of))?.map_err(CallError::Failure)
    }

    /// What `apply_schema` would do.
    pub async fn check_schema(&mut self, change: &wire::SchemaChange) -> Called<Vec<wire::Notice>> {
        call!(self, "check-schema", call_check_schema(change))?.map_err(CallError::Failure)
    }

    /// Runs the steps.
    pub async fn apply_schema(&mut self, change: &wire::SchemaChange) -> Called<Vec<wire::Notice>> {
        call!(self, "apply-schema", call_apply_schema(change))?.map_err(CallError::Failure)
    }

    /// Writes a group.
    pub async fn write_group(&mut self, group: &wire::Group) -> Called<wire::Ack> {
        call!(self, "write-group", call_write_group(group))?.map_err(CallError::Failure)
    }

    /// Makes all that was accepted durable.
    pub async fn flush(&mut self) -> Called<wire::Ack> {
        call!(self, "flush", call_flush())?.map_err(CallError::Failure)
    }

    /// Time for upkeep.
    pub async fn tick(&mut self) -> Called<wire::Ack> {
        call!(self, "tick", call_tick())?.map_err(CallError::Failure)
    }

    /// Removes the table there.
    pub async fn drop_table(&mut self, table: &wire::Table) -> Called<()> {
        call!(self, "drop-table", call_drop_table(table))?.map_err(CallError::Failure)
    }

    /// Says goodbye, for at most [`Limits::close`]; then the instance is gone.
    pub async fn close(&mut self) -> Called<()> {
        let closed = call!(self, "close", call_close());
        self.running = None;
        closed
    }

    /// Whether it can be called.
    pub fn is_usable(&self) -> bool {
        self.running.is_some()
    }

    /// The most linear memory it had when its last call ended, in bytes.
    pub fn memory_peak(&self) -> usize {
        self.memory_peak
    }

    /// The plugin it is an instance of.
    pub fn plugin(&self) -> &Arc<Plugin> {
        &self.plugin
    }

    fn clock(&self, function: &str) -> Clock {
        self.stderr.clear();
        let limits = &self.limits;
        let (idle, hard) = match function {
            "instantiate" | "describe" | "render-table" => (limits.static_call, limits.static_call),
            "open" => (limits.open, limits.open),
            "close" => (limits.close, limits.close),
            "apply-schema" | "begin-copy" | "finish-copy" | "drop-table" => (limits.call_idle, limits.schema_hard),
            _ => (limits.call_idle, limits.call_hard),
        };
        Clock { idle, hard, activity: Arc::clone(&self.activity) }
    }

    fn end<T: Answer>(&mut self, function: &'static str, running: Running, outcome: Result<T, Fault>) -> Called<T> {
        let limiter = &running.store.data().limiter;
        self.memory_peak = limiter.memory_peak;
        match outcome {
            Ok(mut answer) => {
                answer.make_presentable(&self.limits, &self.log);
                self.running = Some(running);
                Ok(answer)
            }
            Err(fault) => Err(self.fault(function, fault, limiter.memory_refused)),
        }
    }

    fn fault(&self, function: &'static str, fault: Fault, memory_refused: bool) -> CallError {
        let error = match fault {
            Fault::TimedOut(after) => return CallError::Timeout { function, after },
            Fault::Failed(error) => error,
        };
        tracing::debug!(target: "tidegate::plugin", plugin = %self.plugin.name, function, "{}", clean(&format!("{error:?}"), 16 * 1024));
        let mut message = match error.downcast_ref::<wasmtime_wasi::I32Exit>() {
            Some(exit) => format!("`{function}` ended the plugin with exit code {}", exit.0),
            None => format!("`{function}` trapped: {}", error.root_cause()),
        };
        if memory_refused {
            message.push_str(&format!("; it had reached its memory limit of {} MiB", self.limits.memory_bytes >> 20));
        }
        let stderr = self.stderr.text();
        if !stderr.is_empty() {
            message.push_str(&format!("; it said: {stderr}"));
        }
        CallError::Trap { message: clean(&self.log.redact(&message), self.limits.message_bytes) }
    }

    /// An answer that the contract rules out.
    fn liar(&mut self, function: &str, what: String) -> CallError {
        self.running = None;
        CallError::Trap { message: format!("`{function}` broke the contract: {what}") }
    }

    fn gone(&self) -> CallError {
        Error::transient(
            "plugin.gone",
            format!("this instance of the plugin {} is gone: it trapped, timed out or was closed", self.plugin.name),
        )
        .into()
    }
}
