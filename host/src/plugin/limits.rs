//! Every limit of a plugin's instance, with its default and the reason for it.

use std::time::Duration;

macro_rules! limits {
    ($($(#[doc = $doc:literal])* $name:ident: $type:ty = $default:expr, $reason:literal;)*) => {
        /// What one instance of a plugin may use. Each destination may override them.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct Limits {
            $($(#[doc = $doc])*
            #[doc = ""]
            #[doc = concat!("Default: `", stringify!($default), "`. ", $reason)]
            pub $name: $type,)*
        }

        impl Default for Limits {
            fn default() -> Limits {
                Limits { $($name: $default,)* }
            }
        }

        impl Limits {
            /// Name, default and reason of each limit, for documentation and `plugin inspect`.
            pub const TABLE: &'static [(&'static str, &'static str, &'static str)] =
                &[$((stringify!($name), stringify!($default), $reason),)*];
        }
    };
}

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
const SECOND: Duration = Duration::from_secs(1);

limits! {
    /// Linear memory of all the instance's memories together, in bytes.
    memory_bytes: usize = 512 * MIB, "A group of 16 MB in and its encoded form out fit several times; a leak does not take the host along.";
    /// Elements of one table.
    table_elements: usize = 100_000, "Tables hold function pointers; the largest guest seen (Python) needs 20,000.";
    /// Core instances within the component.
    core_instances: usize = 200, "A Rust guest has 4, a Python guest with native libraries about 60.";
    /// Tables within the component.
    tables: usize = 100, "One for each module with indirect calls, and the adapters'.";
    /// Memories within the component.
    memories: usize = 20, "Adapters may have their own; a guest has one.";
    /// Bytes that one call of the guest may hand to the host.
    hostcall_bytes: usize = 64 * MIB, "The host copies them before it looks; the largest honest call transmits one encoded group.";
    /// Handles that the component may hold.
    handles: usize = 10_000, "Files, directories, streams and connections.";
    /// Random bytes of one call.
    random_bytes: u64 = 64 * 1024, "Keys and nonces are small; more is made by the guest itself.";
    /// Open connections.
    connections: usize = 16, "One for each table written side by side, and some.";
    /// The longest that a connection waits for one operation.
    network_wait: Duration = 300 * SECOND, "The call's own limit ends it sooner in most functions.";
    /// Bytes of one `receive`.
    receive_bytes: usize = MIB, "More than a socket's buffer is never at hand.";
    /// `describe` and `render-table`.
    static_call: Duration = 10 * SECOND, "They compute and ask nobody; a Python guest starts its interpreter within.";
    /// `open`, to connect and log in.
    open: Duration = 60 * SECOND, "A warehouse that wakes up takes half of it.";
    /// `close`.
    close: Duration = 5 * SECOND, "What is not flushed is sent again; shutting down must stay bounded.";
    /// Any other call, since it began or called `working` last.
    call_idle: Duration = 120 * SECOND, "A group is written in seconds; who needs longer says so with `working`.";
    /// Any other call, whatever it says.
    call_hard: Duration = 900 * SECOND, "A quarter of an hour holds back the source's log; then somebody must look.";
    /// `apply-schema`, `begin-copy`, `finish-copy` and `drop-table`, whatever they say.
    schema_hard: Duration = 3600 * SECOND, "A rewrite of a large table at the destination is slow and cannot be split.";
    /// Lines of log and of standard output and error, per second.
    log_lines: u32 = 200, "Enough for a line per table and flush; a loop that logs does not fill the disk.";
    /// Bytes of one line, message or field.
    log_line_bytes: usize = 4 * KIB, "A long SQL statement fits.";
    /// Bytes of a failure's message, of a trap's, and of other text for a person.
    message_bytes: usize = 8 * KIB, "It goes into the store and to the terminal.";
    /// Bytes of standard error kept for a trap's message.
    stderr_tail_bytes: usize = 2 * KIB, "A panic's message with file and line.";
    /// Named counters of a destination.
    counters: usize = 100, "Each becomes a series of the metrics.";
    /// Bytes of a key of the plugin's state.
    state_key_bytes: usize = 256, "Keys are names.";
    /// Bytes of a value of the plugin's state.
    state_value_bytes: usize = MIB, "It is for positions and tokens, not for data.";
    /// Items of a list that the guest returns for a person (notices, details).
    answer_items: usize = 10_000, "One for each table and column of a large schema.";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_limit_has_a_reason() {
        assert!(Limits::TABLE.len() > 20);
        for (name, default, reason) in Limits::TABLE {
            assert!(!default.is_empty() && reason.ends_with('.'), "{name}");
        }
    }
}
