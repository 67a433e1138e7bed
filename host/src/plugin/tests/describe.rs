//! What a file does before it is trusted with anything: in its constructors, and when it
//! is asked what it is.

use std::time::Instant;

use serde_json::json;

use super::*;

#[tokio::test]
async fn a_describe_that_never_ends_or_says_nothing_usable_is_refused() {
    for (mark, code, said) in [
        (json!({"describe": "trap"}), "plugin.describe", "unreachable"),
        (json!({"describe": "memory"}), "plugin.describe", "memory limit of 512 MiB"),
        (json!({"describe": "many-capabilities"}), "plugin.describe", "1000000 capabilities"),
        (json!({"describe": "long-schema"}), "plugin.describe", "the schema of its settings has 4194"),
        (json!({"start": "trap"}), "plugin.describe", "`describe` trapped"),
    ] {
        let error = load_marked(mark.clone()).await.map(drop).unwrap_err();
        assert_eq!(error.code(), code, "{mark}: {}", error.report());
        assert!(error.message().contains(said), "{mark}: {}", error.report());
        assert!(error.next_step().is_some());
    }
}

#[tokio::test]
async fn a_loop_in_describe_or_before_it_ends_and_leaves_this_thread_to_others() {
    for mark in [json!({"describe": "loop"}), json!({"start": "loop"})] {
        let start = Instant::now();
        let load = load_marked(mark.clone());
        tokio::pin!(load);
        let mut longest = std::time::Duration::ZERO;
        let error = loop {
            let turn = Instant::now();
            tokio::select! {
                loaded = &mut load => break loaded.map(drop).unwrap_err(),
                () = tokio::time::sleep(std::time::Duration::from_millis(1)) => longest = longest.max(turn.elapsed()),
            }
        };
        assert_eq!(error.code(), "plugin.describe", "{mark}");
        assert!(error.message().contains("did not return within 10s"), "{mark}: {}", error.report());
        assert!(start.elapsed().as_secs() < 30 && longest.as_millis() < 1000, "{mark}: {longest:?}");
    }
}

#[tokio::test]
async fn names_for_a_terminal_have_no_codes_and_a_schema_that_cannot_be_used_is_named() {
    let mark = json!({"name": "a\u{1b}[2Jb\nc\u{202e}", "description": "two\nlines", "schema": "{\"$ref\": \"#\"}",
                      "capabilities": ["merge", "x\u{1b}"], "permissions": ["network:a\u{9b}"]});
    let plugin = load_marked(mark).await.unwrap();
    let manifest = &plugin.manifest;
    assert_eq!((manifest.name.as_str(), manifest.description.as_str()), ("a\u{fffd}[2Jb c\u{fffd}", "two lines"));
    assert_eq!(manifest.capabilities, ["merge", "x\\u{1b}"]);
    assert_eq!(manifest.permissions, ["network:a\\u{9b}"]);
    let error = SettingsSchema::new(&plugin.name, &manifest.settings_schema).err().unwrap();
    assert_eq!(error.code(), "plugin.manifest");
}
