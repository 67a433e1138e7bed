//! Every limit of a plugin's instance, with its default and the reason for it.

use std::time::Duration;

/// A limit as `[destination.limits]` sets it.
trait Setting {
    fn set(&mut self, number: u64);
    /// As the configuration spells it.
    fn shown(&self) -> u64;
}

impl Setting for usize {
    fn set(&mut self, number: u64) {
        *self = usize::try_from(number).unwrap_or(usize::MAX);
    }

    fn shown(&self) -> u64 {
        *self as u64
    }
}

impl Setting for u32 {
    fn set(&mut self, number: u64) {
        *self = u32::try_from(number).unwrap_or(u32::MAX);
    }

    fn shown(&self) -> u64 {
        u64::from(*self)
    }
}

impl Setting for u64 {
    fn set(&mut self, number: u64) {
        *self = number;
    }

    fn shown(&self) -> u64 {
        *self
    }
}

impl Setting for Duration {
    /// Milliseconds. A year is as good as no limit, and can still be added to a clock.
    fn set(&mut self, number: u64) {
        *self = Duration::from_millis(number.min(365 * 24 * 3600 * 1000));
    }

    fn shown(&self) -> u64 {
        u64::try_from(self.as_millis()).unwrap_or(u64::MAX)
    }
}

/// One limit, for documentation and `plugin inspect`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// Its key in the configuration: `_bytes`, `_ms`, or a number of something.
    pub setting: &'static str,
    /// As the configuration spells it.
    pub value: u64,
    /// What it bounds.
    pub what: &'static str,
    /// Why it is as high, and no higher.
    pub reason: &'static str,
}

macro_rules! limits {
    ($(#[$outer:meta])* pub struct $of:ident;
     $(#[doc = $doc:literal] $name:ident: $type:ty = $default:expr, $setting:literal, $reason:literal;)*) => {
        $(#[$outer])*
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct $of {
            $(#[doc = $doc]
            #[doc = ""]
            #[doc = concat!("Default: `", stringify!($default), "`. ", $reason)]
            pub $name: $type,)*
        }

        impl Default for $of {
            fn default() -> $of {
                $of { $($name: $default,)* }
            }
        }

        impl $of {
            /// The keys by which the configuration sets them.
            pub const SETTINGS: &'static [&'static str] = &[$($setting,)*];

            /// Each limit, as `self` has it.
            pub fn table(&self) -> Vec<Limit> {
                vec![$(Limit {
                    setting: $setting, value: self.$name.shown(), what: $doc.trim_ascii(), reason: $reason,
                },)*]
            }

            /// Sets one by its key. False if there is no such limit.
            pub fn set(&mut self, setting: &str, number: u64) -> bool {
                match setting {
                    $($setting => self.$name.set(number),)*
                    _ => return false,
                }
                true
            }
        }
    };
}

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
const SECOND: Duration = Duration::from_secs(1);

limits! {
    /// What all plugins of a process have to keep to: `[pipeline.engine]`.
    pub struct EngineLimits;
    /// Bytes of a component's file.
    component_bytes: u64 = 256 << 20, "component_bytes", "A Python guest with its libraries has 20 million.";
    /// The longest that a component may take to be compiled.
    compile: Duration = 300 * SECOND, "compile_ms", "A Python guest takes 20 s of two processors, and a busy machine several times that.";
    /// Bytes of the stack that compiled code uses.
    stack_bytes: usize = MIB, "stack_bytes", "What a native thread's recursion may need twice; deeper is a runaway.";
}

limits! {
    /// What one instance of a plugin may use. Each destination may override them:
    /// `[destination.limits]`.
    pub struct Limits;
    /// Linear memory of all the instance's memories together.
    memory_bytes: usize = 512 * MIB, "memory_bytes", "A group of 16 MB in and its encoded form out fit several times; a leak does not take the host along.";
    /// Elements of all its tables together.
    table_elements: usize = 100_000, "table_elements", "Tables hold function pointers, eight bytes each in the host; the largest guest seen (Python) needs 20,000.";
    /// Core instances within the component.
    core_instances: usize = 200, "core_instances", "A Rust guest has 4, a Python guest with native libraries about 60.";
    /// Tables within the component.
    tables: usize = 100, "tables", "One for each module with indirect calls, and the adapters'.";
    /// Memories within the component.
    memories: usize = 20, "memories", "Adapters may have their own; a guest has one.";
    /// Bytes that one call may hand over, in either direction of an answer: host-call fuel.
    hostcall_bytes: usize = 64 * MIB, "hostcall_bytes", "The host copies them before it looks; the largest honest call transmits one encoded group.";
    /// Handles that it may hold: files, directories, streams, connections.
    handles: usize = 1_000, "handles", "A file for each of a few hundred tables, and its stream. Most are a file of the process, which has some thousands for all.";
    /// Random bytes of one call.
    random_bytes: u64 = 64 * 1024, "random_bytes", "Keys and nonces are small; more is made by the guest itself.";
    /// Open connections.
    connections: usize = 16, "connections", "One for each table written side by side, and some.";
    /// Names that are looked up at a time.
    lookups: usize = 4, "lookups", "A look-up cannot be ended and holds a thread of the process until the name server answers.";
    /// The longest that a connection waits for one operation.
    network_wait: Duration = 300 * SECOND, "network_wait_ms", "The call's own limit ends it sooner in most functions.";
    /// Bytes of one `receive`.
    receive_bytes: usize = MIB, "receive_bytes", "More than a socket's buffer is never at hand.";
    /// Instantiation, `describe` and `render-table`.
    static_call: Duration = 10 * SECOND, "static_call_ms", "They compute and ask nobody; a Python guest starts its interpreter within.";
    /// `open`, to connect and log in.
    open: Duration = 60 * SECOND, "open_ms", "A warehouse that wakes up takes half of it.";
    /// `close`.
    close: Duration = 5 * SECOND, "close_ms", "What is not flushed is sent again; shutting down must stay bounded.";
    /// Any other call, since it began or called `working` last; time in the host counts.
    call_idle: Duration = 120 * SECOND, "call_idle_ms", "A group is written in seconds; who needs longer says so with `working`.";
    /// Any other call, whatever it says.
    call_hard: Duration = 900 * SECOND, "call_hard_ms", "A quarter of an hour holds back the source's log; then somebody must look.";
    /// `apply-schema`, `begin-copy`, `finish-copy` and `drop-table`, whatever they say.
    schema_hard: Duration = 3600 * SECOND, "schema_hard_ms", "A rewrite of a large table at the destination is slow and cannot be split.";
    /// Lines of log, standard output and standard error, each second.
    log_lines: u32 = 200, "log_lines", "Enough for a line per table and flush; a loop that logs does not fill the disk.";
    /// Bytes of these lines, each second.
    log_bytes: u32 = 256 * 1024, "log_bytes", "The same with long lines: a gigabyte takes an hour, and rotation keeps up.";
    /// Bytes of one line, message or field.
    log_line_bytes: usize = 4 * KIB, "log_line_bytes", "A long SQL statement fits.";
    /// Lines of audit about what was refused, each second.
    audit_lines: u32 = 20, "audit_lines", "Apart from the plugin's own lines, which could crowd them out; the rest is counted.";
    /// Bytes of a failure's message, of a trap's, and of other text for a person.
    message_bytes: usize = 8 * KIB, "message_bytes", "It goes into the store and to the terminal.";
    /// Bytes of standard error kept for a trap's message.
    stderr_tail_bytes: usize = 2 * KIB, "stderr_tail_bytes", "A panic's message with file and line.";
    /// Named counters of a destination.
    counters: usize = 100, "counters", "Each becomes a series of the metrics.";
    /// Bytes of a key of the plugin's state.
    state_key_bytes: usize = 256, "state_key_bytes", "Keys are names.";
    /// Bytes of a value of the plugin's state.
    state_value_bytes: usize = MIB, "state_value_bytes", "It is for positions and tokens, not for data.";
    /// Items of a list that it answers with: columns, details, notices, capabilities.
    answer_items: usize = 10_000, "answer_items", "One for each table and column of a large schema.";
    /// Columns of a table that it answers with.
    answer_columns: usize = 2_000, "answer_columns", "PostgreSQL has 1,600 at most, and the plugin a few of its own.";
    /// Bytes of a schema of settings.
    schema_bytes: usize = 256 * KIB, "schema_bytes", "A hundred settings with a paragraph each; the host compiles it.";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_limit_has_a_setting_and_a_reason() {
        let table = Limits::default().table();
        assert!(table.len() > 25);
        for (index, limit) in table.iter().enumerate() {
            assert!(limit.value > 0 && limit.reason.ends_with('.') && limit.what.ends_with('.'), "{limit:?}");
            let mut changed = Limits::default();
            assert!(changed.set(limit.setting, 7));
            let differ: Vec<usize> = (0..table.len()).filter(|at| changed.table()[*at] != table[*at]).collect();
            assert_eq!((differ, changed.table()[index].value), (vec![index], 7), "{limit:?}");
        }
        assert!(!Limits::default().set("memory", 7));
    }
}
