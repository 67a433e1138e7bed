//! Granted directories: what is in them, and no way out of them.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::json;

use super::*;

/// A directory with `rw`, `ro` and what is outside of both.
struct Place {
    root: tempfile::TempDir,
}

impl Place {
    fn new() -> Place {
        let place = Place { root: tempfile::tempdir().unwrap() };
        for name in ["rw", "ro"] {
            std::fs::create_dir(place.path(name)).unwrap();
            std::fs::write(place.path(name).join("a"), "inside").unwrap();
        }
        std::fs::create_dir(place.path("other")).unwrap();
        std::fs::write(place.path("other/secret"), "outside").unwrap();
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    fn options(&self) -> InstanceOptions {
        let grant = |name: &str, write| FileGrant { path: self.path(name), guest: format!("/data/{name}"), write };
        options(Grants { files: vec![grant("rw", true), grant("ro", false)], ..Grants::default() })
    }
}

fn op(op: &str, path: &str, to: &str) -> Value {
    json!({"on": "open", "do": "file", "op": op, "path": path, "to": to})
}

async fn done(options: &InstanceOptions, settings: Value) {
    open(options, settings).await.1.unwrap();
}

async fn refused(options: &InstanceOptions, settings: Value) {
    assert_eq!(told(options, settings.clone()).await.0, "refused", "{settings}");
}

#[tokio::test]
async fn only_granted_directories_are_there_and_none_leads_out() {
    let place = Place::new();
    symlink(place.path("other/secret"), place.path("rw/absolute")).unwrap();
    symlink("../other/secret", place.path("rw/relative")).unwrap();
    symlink("../other", place.path("rw/directory")).unwrap();
    symlink("/dev", place.path("rw/devices")).unwrap();
    symlink("a", place.path("rw/within")).unwrap();
    let options = place.options();
    let inside = ("told".to_owned(), "inside".to_owned());
    for path in ["/data/rw/a", "/data/ro/a", "/data/rw/within", "/data/rw/./a"] {
        assert_eq!(told(&options, op("read", path, "")).await, inside, "{path}");
    }
    for beyond in [
        "/data/rw/absolute",
        "/data/rw/relative",
        "/data/rw/directory/secret",
        "/data/rw/devices/zero",
        "/data/rw/../other/secret",
        "/data/rw/../../../../../../etc/passwd",
        "/etc/passwd",
        "etc/passwd",
        "/dev/zero",
        "/proc/self/environ",
        "/data/ro/../rw/../other/secret",
    ] {
        refused(&options, op("read", beyond, "")).await;
        refused(&options, op("write", beyond, "new")).await;
    }
    done(&options, op("write", "/data/rw/b", "new")).await;
    assert_eq!(std::fs::read_to_string(place.path("rw/b")).unwrap(), "new");
    assert_eq!(std::fs::read_to_string(place.path("other/secret")).unwrap(), "outside");
    assert_eq!(std::fs::read_dir(place.path("other")).unwrap().count(), 1);
}

#[tokio::test]
async fn what_may_be_read_cannot_be_changed_by_any_way() {
    let place = Place::new();
    let options = place.options();
    for settings in [
        op("write", "/data/ro/a", "new"),
        op("write", "/data/ro/b", "new"),
        op("remove", "/data/ro/a", ""),
        op("rename", "/data/ro/a", "/data/rw/b"),
        op("rename", "/data/rw/a", "/data/ro/b"),
        op("rename", "/data/ro/a", "/data/ro/b"),
        // A second name of the file, where it may be written.
        op("link", "/data/ro/a", "/data/rw/b"),
        op("link", "/data/rw/a", "/data/ro/b"),
        op("symlink", "a", "/data/ro/b"),
    ] {
        refused(&options, settings).await;
    }
    for name in ["ro", "rw"] {
        assert_eq!(std::fs::read_to_string(place.path(name).join("a")).unwrap(), "inside", "{name}");
        assert_eq!(std::fs::read_dir(place.path(name)).unwrap().count(), 1, "{name}");
    }
}

#[tokio::test]
async fn a_link_that_the_guest_makes_leads_nowhere_outside() {
    let place = Place::new();
    let options = place.options();
    for (number, target) in ["/etc/passwd", "../other/secret", "../../../../etc/passwd"].into_iter().enumerate() {
        let link = format!("/data/rw/l{number}");
        match open(&options, op("symlink", target, &link)).await.1 {
            Ok(_) => {
                refused(&options, op("read", &link, "")).await;
                refused(&options, op("write", &link, "new")).await;
            }
            // It cannot even be made.
            Err(CallError::Failure(_)) => assert!(place.path(&format!("rw/l{number}")).symlink_metadata().is_err()),
            Err(other) => panic!("{other:?}"),
        }
    }
    done(&options, op("link", "/data/rw/a", "/data/rw/b")).await;
    refused(&options, op("link", "/data/rw/../other/secret", "/data/rw/c")).await;
    assert_eq!(std::fs::read_to_string(place.path("other/secret")).unwrap(), "outside");
}

/// Makes `name` a file and a link out of the directory, by turns.
fn swap(place: &Path, stop: &AtomicBool) -> u32 {
    let mut swaps = 0;
    while !stop.load(Ordering::Relaxed) {
        let (file, link) = (place.join("rw/new-file"), place.join("rw/new-link"));
        std::fs::write(&file, "inside").unwrap();
        std::fs::rename(&file, place.join("rw/swapped")).unwrap();
        symlink("../other/secret", &link).unwrap();
        std::fs::rename(&link, place.join("rw/swapped")).unwrap();
        swaps += 1;
    }
    swaps
}

#[tokio::test]
async fn a_file_that_becomes_a_link_while_it_is_opened_leads_nowhere_either() {
    let place = Place::new();
    std::fs::write(place.path("rw/swapped"), "inside").unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let (root, until) = (place.root.path().to_owned(), Arc::clone(&stop));
    let swapping = std::thread::spawn(move || swap(&root, &until));
    let mut options = place.options();
    options.limits.open = std::time::Duration::from_secs(30);
    let watched = open(&options, op("watch", "/data/rw/swapped", "inside")).await.1;
    stop.store(true, Ordering::Relaxed);
    assert!(swapping.join().unwrap() > 10);
    watched.unwrap();
}
