//! Interface `host`, and what of WASI is there.

use std::sync::Mutex;

use serde_json::json;
use tracing::field::{Field, Visit};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};

use super::*;
use crate::store::{DestinationRecord, Store};

/// Collects the lines that plugins wrote.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<String>>>);

impl<S: tracing::Subscriber> Layer<S> for Lines {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        struct Text(String);
        impl Visit for Text {
            fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
                use std::fmt::Write as _;
                let _ = write!(self.0, "{}={value:?} ", field.name());
            }
        }
        let mut text = Text(format!("{} {} ", event.metadata().level(), event.metadata().target()));
        event.record(&mut text);
        self.0.lock().unwrap().push(text.0);
    }
}

#[tokio::test]
async fn what_a_guest_prints_is_a_line_with_the_destinations_name() {
    let lines = Lines::default();
    let subscriber = tracing_subscriber::registry().with(lines.clone());
    let _guard = tracing::subscriber::set_default(subscriber);
    open(&options(Grants::default()), json!({"on": "open", "do": "print"})).await.1.unwrap();
    let lines = lines.0.lock().unwrap();
    let line = lines.iter().find(|line| line.contains("out of the guest")).unwrap_or_else(|| panic!("{lines:?}"));
    for part in ["tidegate::plugin", "destination=lake", "plugin=hostile", "lane=0", "stderr"] {
        assert!(line.contains(part), "{line}");
    }
}

#[tokio::test]
async fn clocks_and_random_numbers_are_there_and_the_environment_is_not() {
    let options = options(Grants::default());
    assert_eq!(told(&options, json!({"on": "open", "do": "clock-and-random"})).await.1, "true 2");
    assert_eq!(told(&options, json!({"on": "open", "do": "environment"})).await.1, "0 0");
}

#[tokio::test]
async fn a_secret_is_read_only_where_granted_and_never_repeated() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "hunter2\n").unwrap();
    let secret = |readable| SecretGrant { source: SecretSource::File(file.path().into()), readable };
    let grants = Grants {
        secrets: [("open".to_owned(), secret(true)), ("kept".to_owned(), secret(false))].into(),
        ..Grants::default()
    };
    let options = options(grants);
    // The guest repeats it in a failure; the host does not.
    assert_eq!(
        told(&options, json!({"on": "open", "do": "secret", "name": "open"})).await,
        ("told".into(), "it is ***".into())
    );
    assert_eq!(told(&options, json!({"on": "open", "do": "secret", "name": "kept"})).await.0, "refused");
    assert_eq!(told(&options, json!({"on": "open", "do": "secret", "name": "none"})).await.0, "refused");
}

#[tokio::test]
async fn signing_keeps_the_key_in_the_host() {
    // RFC 4231, test case 2.
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "Jefe").unwrap();
    let grant = SecretGrant { source: SecretSource::File(file.path().into()), readable: false };
    let options = options(Grants { secrets: [("key".to_owned(), grant)].into(), ..Grants::default() });
    let sign = |algorithm: &str| json!({"on": "open", "do": "sign", "name": "key", "algorithm": algorithm});
    let (_, signature) = told(&options, sign("hmac-sha256")).await;
    assert_eq!(signature, "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    let (code, message) = told(&options, sign("ed25519")).await;
    assert!(code == "refused" && message.contains("ed25519"), "{message}");
}

#[tokio::test]
async fn state_outlives_the_instance_and_has_limits() {
    let options = options(Grants::default());
    let do_state = json!({"on": "open", "do": "state"});
    let (_, first) = told(&options, do_state.clone()).await;
    assert!(first.starts_with("None Some([118])") && first.contains("at most"), "{first}");
    assert!(first.ends_with("(true, true)"), "{first}");
    let (_, second) = told(&options, do_state).await;
    assert!(second.starts_with("Some([118]) Some([118])"), "{second}");
}

#[tokio::test]
async fn a_secret_that_is_repeated_in_code_panic_log_or_counter_is_taken_out() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "hunter2-first-line\nhunter2-second-line\n").unwrap();
    let grant = SecretGrant { source: SecretSource::File(file.path().into()), readable: true };
    let options = options(Grants { secrets: [("open".to_owned(), grant)].into(), ..Grants::default() });
    let lines = Lines::default();
    let _guard = tracing::subscriber::set_default(tracing_subscriber::registry().with(lines.clone()));
    let ask = |what: &str| json!({"on": "open", "do": what, "name": "open"});
    let (code, message) = told(&options, ask("secret-in-code")).await;
    let panic = trap_of(open(&options, ask("secret-in-panic")).await.1);
    open(&options, ask("secret-in-log")).await.1.unwrap();
    let lines = lines.0.lock().unwrap();
    assert!(lines.iter().any(|line| line.contains("stdout")) && lines.iter().any(|line| line.contains("stderr")));
    let counters = options.counters.all();
    assert_eq!(counters.len(), 1);
    for text in lines.iter().chain(counters.keys()).chain([&code, &message, &panic]) {
        assert!(!text.contains("hunt"), "{text}");
    }
}

#[tokio::test]
async fn a_flood_of_lines_is_cut_and_counted_and_hides_no_refusal() {
    let lines = Lines::default();
    let _guard = tracing::subscriber::set_default(tracing_subscriber::registry().with(lines.clone()));
    let mut options = options(Grants::default());
    options.limits.log_lines = 50;
    options.limits.log_bytes = 20_000;
    let (mut instance, ready) = open(&options, json!({"on": "open", "do": "log-flood", "lines": 2000})).await;
    ready.unwrap();
    let usage = options.usage.snapshot();
    assert!(usage.log_lines_left_out > 1000, "{usage:?}");
    instance.close().await.unwrap();
    drop(instance);
    let written = lines.0.lock().unwrap().iter().filter(|line| line.contains("message=line ")).count();
    assert_eq!(written as u64 + usage.log_lines_left_out, 2000);
    let (code, _) = told(&options, json!({"on": "open", "do": "secret", "name": "none"})).await;
    assert_eq!(code, "refused");
    let audit = lines.0.lock().unwrap().iter().filter(|line| line.contains("tidegate::audit")).count();
    assert_eq!((audit, options.usage.snapshot().refused_permissions), (1, 1));
}

/// The state, as the host has it.
struct Kept(Store);

impl PluginState for Kept {
    fn get<'a>(&'a self, destination: &'a str, key: &'a str) -> StateFuture<'a, Option<Vec<u8>>> {
        Box::pin(self.0.get_state(destination, key))
    }

    fn set<'a>(&'a self, destination: &'a str, key: &'a str, value: Option<Vec<u8>>) -> StateFuture<'a, ()> {
        Box::pin(self.0.set_state(destination, key, value))
    }
}

#[tokio::test]
async fn a_plugin_cannot_fill_the_disk_that_all_checkpoints_are_on() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path(), "shop").unwrap();
    let record =
        DestinationRecord { name: "lake".into(), plugin: "hostile".into(), checkpoint: crate::position::Lsn::ZERO };
    store.save_destination(record).await.unwrap();
    let mut options = options(Grants::default());
    options.state = Arc::new(Kept(store));
    let (_, message) = told(&options, json!({"on": "open", "do": "many-states"})).await;
    assert!(message.starts_with("4096 "), "{message}");
}

#[tokio::test]
async fn a_granted_directory_that_is_not_there_is_named() {
    let grant = FileGrant { path: "/nowhere/at/all".into(), guest: "x".into(), write: true };
    let options = options(Grants { files: vec![grant], ..Grants::default() });
    match hostile().await.instantiate(&options).await.map(drop) {
        Err(CallError::Host(error)) => {
            assert_eq!(error.code(), "plugin.directory");
            assert!(error.message().contains("/nowhere/at/all"));
        }
        other => panic!("{other:?}"),
    }
}
