//! Interface `host`, and what of WASI is there.

use std::sync::Mutex;

use serde_json::json;
use tracing::field::{Field, Visit};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};

use super::*;

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
    let (_, second) = told(&options, do_state).await;
    assert!(second.starts_with("Some([118]) Some([118])"), "{second}");
}

#[tokio::test]
async fn only_granted_directories_are_there_and_none_leads_out() {
    let root = tempfile::tempdir().unwrap();
    let path = |name: &str| root.path().join(name);
    for name in ["rw", "ro"] {
        std::fs::create_dir(path(name)).unwrap();
        std::fs::write(path(name).join("a"), "inside").unwrap();
    }
    std::fs::write(path("outside"), "outside").unwrap();
    std::os::unix::fs::symlink(path("outside"), path("rw").join("link")).unwrap();
    let grant = |name: &str, write| FileGrant { path: path(name), guest: format!("/data/{name}"), write };
    let options = options(Grants { files: vec![grant("rw", true), grant("ro", false)], ..Grants::default() });
    let read = |path: &str| json!({"on": "open", "do": "read-file", "path": path});
    let write = |path: &str| json!({"on": "open", "do": "write-file", "path": path, "content": "new"});
    assert_eq!(told(&options, read("/data/rw/a")).await, ("told".into(), "inside".into()));
    assert_eq!(told(&options, read("/data/ro/a")).await, ("told".into(), "inside".into()));
    for beyond in [
        "/data/rw/link",
        "/data/rw/../outside",
        "/data/rw/../../../../../../etc/passwd",
        "/etc/passwd",
        "/data/ro/../rw/../outside",
    ] {
        assert_eq!(told(&options, read(beyond)).await.0, "refused", "{beyond}");
    }
    open(&options, write("/data/rw/b")).await.1.unwrap();
    assert_eq!(std::fs::read_to_string(path("rw").join("b")).unwrap(), "new");
    assert_eq!(told(&options, write("/data/ro/b")).await.0, "refused");
    assert_eq!(told(&options, write("/data/ro/a")).await.0, "refused");
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
