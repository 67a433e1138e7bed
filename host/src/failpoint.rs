//! Places where a test lets the process die, as a power cut would: one at each step that
//! has to survive it.
//!
//! `TIDEGATE_FAILPOINT=copy.begun` sends SIGKILL to the process itself when it gets there,
//! `copy.begun:3` when it gets there for the third time. Only builds with debug assertions
//! have this; in others nothing of it is left.

#[cfg(debug_assertions)]
pub use armed::NAMES;
#[cfg(debug_assertions)]
pub(crate) use armed::reached;

/// The process is at this place.
#[cfg(not(debug_assertions))]
#[inline(always)]
pub(crate) fn reached(_name: &str) {}

#[cfg(debug_assertions)]
mod armed {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU64, Ordering};

    use rustix::process::{Signal, getpid, kill_process};

    /// All places, in the order of a change's way.
    pub const NAMES: &[&str] = &[
        // The slot is an intent, is there, is recorded.
        "slot.intended",
        "slot.created",
        "slot.recorded",
        // One table's copy: its snapshot, its run, its rows, its end.
        "copy.snapshot",
        "copy.versioned",
        "copy.recorded",
        "copy.begun",
        "copy.cleaned",
        "copy.range-started",
        "copy.rows",
        "copy.range-done",
        "copy.flushed",
        "copy.finished",
        "copy.caught",
        "drain.begun",
        "drain.read",
        "drain.sent",
        "drain.live",
        // The stream.
        "router.committed",
        "router.sent",
        "router.told",
        "router.versioned",
        "router.behind",
        "router.rewound",
        "router.cut-off",
        // The spool's own steps.
        "spool.appended",
        "spool.committed",
        "spool.flushed",
        "spool.synced",
        "spool.rotating",
        "spool.rotated",
        "spool.rewound",
        "spool.deleted",
        // A group, from the ledger to the destination and back.
        "lane.opened",
        "lane.attached",
        "group.sending",
        "group.written",
        "group.flushed",
        "group.settled",
        "table.recorded",
        // Spool, checkpoint, confirmation.
        "checkpoint.spooled",
        "checkpoint.stored",
        "checkpoint.confirmed",
        // A schema change.
        "schema.flushed",
        "schema.applying",
        "schema.applied",
        "schema.inspected",
        "schema.recorded",
        // One that waits: its barrier, the router's word, the destination's, and on.
        "hold.recorded",
        "hold.routed",
        "hold.answered",
        "hold.released",
    ];

    /// Where this process is to die.
    struct Armed {
        name: String,
        /// How often it may still pass.
        left: AtomicU64,
    }

    impl Armed {
        fn parse(text: &str) -> Option<Armed> {
            let (name, times) = match text.split_once(':') {
                Some((name, times)) => (name, times.parse().ok()?),
                None => (text, 1),
            };
            NAMES.contains(&name).then(|| Armed { name: name.to_owned(), left: AtomicU64::new(times) })
        }

        fn is_due(&self, name: &str) -> bool {
            self.name == name && self.left.fetch_sub(1, Ordering::Relaxed) == 1
        }
    }

    /// The process is at this place.
    pub(crate) fn reached(name: &str) {
        static ARMED: OnceLock<Option<Armed>> = OnceLock::new();
        let armed = ARMED.get_or_init(|| {
            let text = std::env::var("TIDEGATE_FAILPOINT").ok().filter(|text| !text.is_empty())?;
            let armed = Armed::parse(&text);
            if armed.is_none() {
                eprintln!("TIDEGATE_FAILPOINT names no place: {text}");
            }
            armed
        });
        if armed.as_ref().is_some_and(|armed| armed.is_due(name)) {
            eprintln!("failpoint {name}");
            // Nothing after this may happen, whatever comes of the signal.
            let _ = kill_process(getpid(), Signal::KILL);
            std::process::abort();
        }
    }

    #[cfg(test)]
    mod tests {
        use std::collections::BTreeSet;
        use std::path::Path;

        use super::*;

        #[test]
        fn a_place_is_due_at_the_time_that_was_named_and_at_no_other() {
            let armed = Armed::parse("copy.begun:3").unwrap();
            let due: Vec<bool> = (0..5).map(|_| armed.is_due("copy.begun")).collect();
            assert_eq!(due, [false, false, true, false, false]);
            let armed = Armed::parse("copy.begun").unwrap();
            assert!(!armed.is_due("copy.rows") && armed.is_due("copy.begun"));
            assert!(Armed::parse("copy.begun:x").is_none() && Armed::parse("nowhere").is_none());
        }

        #[test]
        fn every_name_stands_at_a_place_and_every_place_has_a_name() {
            let mut found = BTreeSet::new();
            collect(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut found);
            let names: BTreeSet<String> = NAMES.iter().map(|name| (*name).to_owned()).collect();
            assert_eq!(found, names);
        }

        fn collect(directory: &Path, found: &mut BTreeSet<String>) {
            for entry in std::fs::read_dir(directory).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    collect(&path, found);
                } else if path.extension().is_some_and(|extension| extension == "rs") {
                    let text = std::fs::read_to_string(&path).unwrap();
                    let calls = text.split("failpoint::reached(\"").skip(1);
                    found.extend(calls.filter_map(|rest| Some(rest.split_once('"')?.0.to_owned())));
                }
            }
        }
    }
}
