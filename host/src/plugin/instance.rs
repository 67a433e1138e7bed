//! A running instance: its store, its limits, and a typed call for each function.
//!
//! An instance is used by one caller, one call at a time. After a trap or a time-out
//! nobody knows what state its memory is in: the store is dropped at once, with the
//! connections and files in it, and every further call is refused.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep_until};
use wasmtime::component::ResourceTable;
use wasmtime::{Engine, ResourceLimiter, Store};
use wasmtime_wasi::WasiCtx;

use super::answer::Answer;
use super::bindings::{v0_1, wire};
use super::engine::Plugin;
use super::given::Given;
use super::host_calls::{Counters, PluginState};
use super::limits::Limits;
use super::log::Log;
use super::permissions::Grants;
use super::text::clean;
use super::usage::{Ending, Usage};
use super::wasi::{self, Tail};
use crate::error::{Class, Error};
use crate::memory::{Budget, GuestMemory};

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
    /// Where its linear memory counts.
    pub memory: Option<Budget>,
    /// Where what it uses counts; share one among the lanes of a destination.
    pub usage: Arc<Usage>,
}

impl InstanceOptions {
    /// Lane 0, default limits, counters and usage of its own.
    pub fn new(destination: impl Into<String>, grants: Arc<Grants>, state: Arc<dyn PluginState>) -> InstanceOptions {
        InstanceOptions {
            destination: destination.into(),
            lane: 0,
            grants,
            limits: Limits::default(),
            state,
            counters: Arc::default(),
            memory: None,
            usage: Arc::default(),
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
    /// Its answer is one that the contract rules out: a lie. The instance is gone.
    Broken {
        /// One line.
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

    /// Stable and machine-readable: `plugin.trap`, `plugin.broken-answer`, `plugin.timeout`,
    /// or the plugin's or the host's own.
    pub fn code(&self) -> &str {
        match self {
            CallError::Failure(failure) => &failure.code,
            CallError::Trap { .. } => "plugin.trap",
            CallError::Broken { .. } => "plugin.broken-answer",
            CallError::Timeout { .. } => "plugin.timeout",
            CallError::Host(error) => error.code(),
        }
    }

    /// One sentence, with the code at its end.
    pub fn with_code(&self) -> String {
        match self {
            // It has it there already.
            CallError::Failure(_) => self.to_string(),
            _ => format!("{self} ({})", self.code()),
        }
    }

    /// As the host's error, with the code of [`CallError::code`].
    pub fn to_error(&self, who: &str) -> Error {
        let message = format!("{who}: {self}");
        match self {
            CallError::Failure(failure) if failure.class == wire::FailureClass::Transient => {
                Error::transient(failure.code.clone(), message)
            }
            CallError::Failure(failure) => Error::permanent(failure.code.clone(), message),
            CallError::Trap { .. } => Error::transient("plugin.trap", message)
                .next("It is tried again by itself. If it comes again, report it to the plugin's author."),
            CallError::Broken { .. } => Error::transient("plugin.broken-answer", message)
                .next("Report it to the plugin's author; another version of the plugin is what helps."),
            CallError::Timeout { .. } => Error::transient("plugin.timeout", message)
                .next("See whether the destination is slow; docs/limits.md says how the limit is raised."),
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
            CallError::Trap { message } | CallError::Broken { message } => f.write_str(message),
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
    /// Of names that are looked up at a time.
    pub(super) lookups: Arc<Semaphore>,
    limiter: Limiter,
}

impl State {
    /// What an instance of this plugin gets, and the end of what it will write to standard
    /// error.
    pub(super) fn new(plugin: &str, options: &InstanceOptions) -> Result<(State, Tail), Error> {
        let InstanceOptions { destination, lane, grants, limits, state, counters, memory, usage } = options;
        let log = Log::new(destination.as_str().into(), plugin.into(), *lane, limits, Arc::clone(usage));
        let (wasi, stderr) = wasi::context(grants, limits, &log)?;
        let mut table = ResourceTable::new();
        table.set_max_capacity(limits.handles);
        let state = State {
            wasi,
            table,
            limits: limits.clone(),
            log,
            destination: destination.as_str().into(),
            grants: Arc::clone(grants),
            state: Arc::clone(state),
            counters: Arc::clone(counters),
            activity: Arc::new(Activity::new()),
            connections: 0,
            lookups: usage.lookups(limits.lookups),
            limiter: Limiter::new(limits, memory.as_ref().map(Budget::guest)),
        };
        Ok((state, stderr))
    }
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
struct Limiter {
    memory: usize,
    memory_limit: usize,
    memory_peak: usize,
    memory_refused: bool,
    table_elements: usize,
    table_limit: usize,
    table_refused: bool,
    instances: usize,
    tables: usize,
    memories: usize,
    counted: Option<GuestMemory>,
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
        if let Some(counted) = &mut self.counted {
            counted.grown_to(total);
        }
        Ok(true)
    }

    fn table_growing(&mut self, current: usize, desired: usize, maximum: Option<usize>) -> wasmtime::Result<bool> {
        let total = self.table_elements.saturating_add(desired.saturating_sub(current));
        if total > self.table_limit {
            self.table_refused = true;
            return Ok(false);
        }
        if maximum.is_some_and(|maximum| desired > maximum) {
            return Ok(false);
        }
        self.table_elements = total;
        Ok(true)
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

impl Limiter {
    fn new(limits: &Limits, counted: Option<GuestMemory>) -> Limiter {
        Limiter {
            memory: 0,
            memory_limit: limits.memory_bytes,
            memory_peak: 0,
            memory_refused: false,
            table_elements: 0,
            table_limit: limits.table_elements,
            table_refused: false,
            instances: limits.core_instances,
            tables: limits.tables,
            memories: limits.memories,
            counted,
        }
    }

    /// What was refused to it, for the message of a trap that may be for want of it.
    fn refused(&self) -> String {
        let mut text = String::new();
        if self.memory_refused {
            text.push_str(&format!("; it had reached its memory limit of {} MiB", self.memory_limit >> 20));
        }
        if self.table_refused {
            text.push_str(&format!("; it had reached its limit of {} table elements", self.table_limit));
        }
        text
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
    usage: Arc<Usage>,
    given: Given,
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
        let InstanceOptions { lane, limits, usage, .. } = options;
        let (state, stderr) = State::new(&self.name, options)?;
        let (log, activity) = (state.log.clone(), Arc::clone(&state.activity));
        let mut store = new_store(self.engine(), state);
        let mut instance = Instance {
            running: None,
            plugin: Arc::clone(self),
            log,
            limits: limits.clone(),
            activity,
            stderr,
            memory_peak: 0,
            usage: Arc::clone(usage),
            given: Given::default(),
        };
        usage.started(*lane);
        let clock = instance.clock("instantiate");
        let began = Instant::now();
        let outcome = clock.run(self.pre().instantiate_async(&mut store)).await;
        usage.called("instantiate", began.elapsed());
        match outcome {
            Ok(bindings) => {
                instance.running = Some(Running { store, bindings });
                Ok(instance)
            }
            Err(fault) => Err(instance.fault("instantiate", fault, &store.data().limiter)),
        }
    }
}

/// A store with all limits armed.
pub(super) fn new_store(engine: &Engine, state: State) -> Store<State> {
    let (hostcall_bytes, handles) = (state.limits.hostcall_bytes, state.limits.handles);
    let mut store = Store::new(engine, state);
    store.limiter(|state| &mut state.limiter);
    store.set_hostcall_fuel(hostcall_bytes);
    store.set_max_component_handles(handles);
    // Armed before the guest runs at all: a data segment counts as running. At each
    // tick the guest gives way, which is when a time-out can end it.
    store.set_epoch_deadline(1);
    store.epoch_deadline_async_yield_and_update(1);
    store
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
        let began = Instant::now();
        let outcome = clock.run(bindings.tidegate_destination_plugin().$method(&mut *store, $($argument),*)).await;
        $self.usage.called($function, began.elapsed());
        $self.end($function, running, outcome)
    }};
}

/// Functions of [`wire`]'s contract; see `wit/` for what each one means. All of them
/// fail with `Failure` where the plugin says so, and with `Trap`, `Broken`, `Timeout` or
/// `Host`, after which the instance is gone.
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
    /// the answer is `Broken`.
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
        self.given.add(group);
        let (rows, bytes) = Given::size_of(group);
        self.usage.given(rows, bytes);
        let answer = call!(self, "write-group", call_write_group(group))?;
        if answer.is_err() {
            // It has to be given again, whole or in parts.
            self.given.take_back(group.ticket);
        }
        self.acknowledged("write-group", answer)
    }

    /// Makes all that was accepted durable.
    pub async fn flush(&mut self) -> Called<wire::Ack> {
        let answer = call!(self, "flush", call_flush())?;
        self.acknowledged("flush", answer)
    }

    /// Time for upkeep.
    pub async fn tick(&mut self) -> Called<wire::Ack> {
        let answer = call!(self, "tick", call_tick())?;
        self.acknowledged("tick", answer)
    }

    /// An answer about groups names groups that it was given, and rows that they have.
    fn acknowledged(&mut self, function: &'static str, answer: Result<wire::Ack, wire::Failure>) -> Called<wire::Ack> {
        let ack = answer.map_err(CallError::Failure)?;
        match self.given.check(&ack) {
            Ok(()) => Ok(ack),
            Err(what) => Err(self.liar(function, what)),
        }
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
        self.usage.memory(limiter.memory_peak);
        match outcome {
            Ok(mut answer) => {
                if let Err(what) = answer.make_presentable(&self.limits, &self.log) {
                    return Err(self.liar(function, what));
                }
                self.usage.ended(if answer.is_failure() { Ending::Failed } else { Ending::Answered });
                self.running = Some(running);
                Ok(answer)
            }
            Err(fault) => Err(self.fault(function, fault, limiter)),
        }
    }

    fn fault(&self, function: &'static str, fault: Fault, limiter: &Limiter) -> CallError {
        let error = match fault {
            Fault::TimedOut(after) => {
                self.usage.ended(Ending::TimedOut);
                return CallError::Timeout { function, after };
            }
            Fault::Failed(error) => error,
        };
        self.usage.ended(Ending::Trapped);
        let details = clean(&self.log.redact(&format!("{error:?}")), 16 * 1024);
        tracing::debug!(target: "tidegate::plugin", plugin = %self.plugin.name, function, "{details}");
        let mut message = match error.downcast_ref::<wasmtime_wasi::I32Exit>() {
            Some(exit) => format!("`{function}` ended the plugin with exit code {}", exit.0),
            None => format!("`{function}` trapped: {}", error.root_cause()),
        };
        message.push_str(&limiter.refused());
        let stderr = self.stderr.text();
        if !stderr.is_empty() {
            message.push_str(&format!("; it said: {}", self.log.redact_cut(&stderr)));
        }
        CallError::Trap { message: clean(&self.log.redact(&message), self.limits.message_bytes) }
    }

    /// An answer that the contract rules out.
    fn liar(&mut self, function: &str, what: String) -> CallError {
        self.running = None;
        self.usage.ended(Ending::Broke);
        CallError::Broken { message: format!("`{function}` broke the contract: {what}") }
    }

    fn gone(&self) -> CallError {
        Error::transient(
            "plugin.gone",
            format!("this instance of the plugin {} is gone: it trapped, timed out or was closed", self.plugin.name),
        )
        .into()
    }
}
