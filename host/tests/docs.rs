//! The documentation says what the program does: codes, configurations, commands, files.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tidegate::config::Config;
use tidegate::plugin::{EngineLimits, Limit, Limits};
use tidegate::schema::classify::{Change, Class};
use tidegate::schema::decide::{ApplyMode, decide};

/// Literals that look like codes and are names of files.
const FILES: [&str; 18] = [
    "ca.pem",
    "control.sock",
    "manifest.ndjson",
    "memory.max",
    "plugins.json",
    "settings.toml",
    "postmaster.pid",
    "rustup-target-add.failed",
    "server.crt",
    "server.key",
    "shop.sql",
    "standby.signal",
    "state.db",
    "tidegate.lock",
    "tidegate.log",
    "tidegate.toml",
    "plugin.wasm",
    "orders.parquet",
];
/// What stands before a code that belongs to no area: `row-missing`, `fenced`.
const FAILURES: [&str; 5] = ["Failure::permanent(", "Failure::transient(", "of_table(", "of_rows(", "of_destination("];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

fn page(name: &str) -> String {
    fs::read_to_string(root().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Sources without their tests and comments, by path.
fn sources() -> BTreeMap<PathBuf, String> {
    let mut found = BTreeMap::new();
    let mut folders = vec![root().join("host/src"), root().join("sdk/rust/src")];
    folders.extend(fs::read_dir(root().join("plugins")).unwrap().map(|entry| entry.unwrap().path().join("src")));
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten() {
            let path = entry.unwrap().path();
            let stem = path.file_stem().unwrap().to_string_lossy().into_owned();
            if stem.starts_with("test") || stem.ends_with("tests") {
                continue;
            }
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path).unwrap();
                let program = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
                let lines: Vec<&str> = program.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
                found.insert(path, lines.join("\n"));
            }
        }
    }
    assert!(found.len() > 100, "only {} sources", found.len());
    found
}

/// Every string literal without an escape, with what stands before it.
fn literals(source: &str) -> impl Iterator<Item = (&str, &str)> {
    let mut rest = 0;
    std::iter::from_fn(move || {
        let open = rest + source[rest..].find('"')?;
        let close = open + 1 + source[open + 1..].find('"')?;
        // After what was no literal, its closing quote may open the next one.
        let inside = &source[open + 1..close];
        rest = if is_code(inside) { close + 1 } else { close };
        Some((&source[..open], inside))
    })
}

/// `area.what` or `what`, in lower-case words with hyphens.
fn is_code(text: &str) -> bool {
    let word = |word: &str| {
        word.starts_with(|first: char| first.is_ascii_lowercase())
            && !word.ends_with('-')
            && word.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
    };
    match text.split_once('.') {
        Some((area, what)) => word(area) && word(what),
        None => word(text),
    }
}

/// The codes of the sources, each with a file that has it.
fn codes_in_sources(sources: &BTreeMap<PathBuf, String>) -> BTreeMap<String, PathBuf> {
    let mut codes = BTreeMap::new();
    for (path, source) in sources {
        for (before, literal) in literals(source) {
            let call = || {
                let tail: String = before.chars().rev().take(60).collect::<Vec<_>>().into_iter().rev().collect();
                let call = tail.rsplit([';', '{', '"']).next().unwrap_or_default();
                FAILURES.iter().any(|name| call.contains(name))
            };
            // Places where a test kills the process are named alike.
            let place = path.ends_with("failpoint.rs") || before.ends_with("failpoint::reached(");
            if is_code(literal) && !place && !FILES.contains(&literal) && (literal.contains('.') || call()) {
                codes.insert(literal.to_owned(), path.clone());
            }
        }
    }
    codes
}

/// First cell and the rest of each row of the tables in `docs/error-codes.md` that list codes.
fn codes_on_page() -> Vec<(String, Vec<String>)> {
    let page = page("docs/error-codes.md");
    let rows = page.lines().filter(|line| line.starts_with("| `"));
    let rows = rows.map(|line| {
        let mut cells = line.trim_matches('|').split(" | ").map(|cell| cell.trim().to_owned());
        (cells.next().unwrap().trim_matches('`').to_owned(), cells.collect())
    });
    rows.collect()
}

#[test]
fn every_code_is_on_the_page_of_error_codes_and_no_other() {
    let sources = sources();
    let there = codes_in_sources(&sources);
    let listed: BTreeSet<String> = codes_on_page().into_iter().map(|(code, _)| code).collect();
    let missing: Vec<_> = there.iter().filter(|(code, _)| !listed.contains(*code)).collect();
    assert!(missing.is_empty(), "docs/error-codes.md lacks {missing:#?}");
    let literal = |code: &String| sources.values().any(|source| source.contains(&format!("\"{code}\"")));
    let gone: Vec<_> = listed.iter().filter(|code| !literal(code)).collect();
    assert!(gone.is_empty(), "docs/error-codes.md names {gone:?}, which no source has");
}

#[test]
fn the_page_of_schema_changes_has_every_class_and_decision_and_the_reason() {
    let page = page("docs/schema-changes.md");
    let rows: Vec<Vec<String>> = page
        .lines()
        .filter(|line| line.starts_with("| `") && line.matches(" | ").count() == 6)
        .map(|line| line.trim_matches('|').split(" | ").map(|cell| cell.trim().to_owned()).collect())
        .filter(|cells: &Vec<String>| cells[0] != "change")
        .collect();
    let modes = [ApplyMode::AutoSafe, ApplyMode::StagedRollout, ApplyMode::ManualReview, ApplyMode::BlockDestructive];
    let decided = |class: Class, mode: ApplyMode| serde_json::to_value(decide(class, mode)).unwrap();
    let expected: Vec<Vec<String>> = Change::ALL
        .iter()
        .map(|change| {
            let (class, reason) = change.class();
            let decisions = modes.map(|mode| decided(class, mode).as_str().unwrap().to_owned());
            let mut cells = vec![format!("`{}`", change.as_str()), class.as_str().to_owned()];
            cells.extend(decisions);
            cells.push(reason.to_owned());
            cells
        })
        .collect();
    assert_eq!(rows, expected, "docs/schema-changes.md");
    // What others differ in is said of each kind by name.
    let prose = page.split("## Where this differs").nth(1).unwrap();
    for kind in ["rename-column", "drop-column", "set-not-null", "change-type", "change-key", "rename-table", "unknown"]
    {
        assert!(prose.contains(&format!("`{kind}`")), "{kind}");
    }
}

#[test]
fn every_code_is_listed_once_with_class_meaning_and_remedy() {
    let mut seen = BTreeSet::new();
    for (code, cells) in codes_on_page() {
        assert!(seen.insert(code.clone()), "`{code}` is listed twice");
        assert_eq!(cells.len(), 3, "`{code}`: {cells:?}");
        assert!(cells.iter().all(|cell| !cell.is_empty()), "`{code}`: {cells:?}");
        for class in cells[0].split(", ") {
            assert!(["usage", "no", "permanent", "transient", "table", "notice"].contains(&class), "`{code}`: {class}");
        }
    }
}

#[test]
fn the_class_on_the_page_is_that_of_the_constructor() {
    let page: BTreeMap<String, Vec<String>> = codes_on_page().into_iter().collect();
    for (path, source) in sources() {
        for (before, literal) in literals(&source) {
            let before = before.trim_end();
            let class = ["usage", "no", "permanent", "transient"].into_iter().find(|class| {
                before.ends_with(&format!("Error::{class}(")) || before.ends_with(&format!("Failure::{class}("))
            });
            let (Some(class), Some(cells)) = (class, page.get(literal)) else { continue };
            // Its exit code is set apart from its class.
            let other = literal == "publication.missing";
            assert!(
                other || cells[0].split(", ").any(|listed| listed == class),
                "{}: `{literal}` is {class}, the page says {}",
                path.display(),
                cells[0]
            );
        }
    }
}

/// The fenced blocks of a page whose first line is three backticks and `language`.
fn blocks(page: &str, language: &str) -> Vec<String> {
    let mut blocks = Vec::new();
    let mut open: Option<(bool, Vec<&str>)> = None;
    for line in page.lines() {
        match (line.strip_prefix("```"), &mut open) {
            (Some(_), Some((wanted, lines))) => {
                if *wanted {
                    blocks.push(lines.join("\n"));
                }
                open = None;
            }
            (Some(word), None) => open = Some((word == language, Vec::new())),
            (None, Some((_, lines))) => lines.push(line),
            (None, None) => {}
        }
    }
    assert!(open.is_none(), "a block is not closed");
    blocks
}

const HEAD: &str = "[pipeline]\nname = \"shop\"\n[source]\nurl = \"postgres://me@db/shop\"\npublication = \"shop\"\n";

#[test]
fn every_configuration_in_the_documentation_can_be_read() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("password"), "secret").unwrap();
    let file = directory.path().join("tidegate.toml");
    let mut whole = 0;
    for name in ["README.md", "plugins/postgres/README.md", "plugins/files/README.md"] {
        for block in blocks(&page(name), "toml") {
            let text = match (block.contains("[pipeline]"), block.contains("[[destination]]")) {
                (true, _) => block.clone(),
                (false, true) => format!("{HEAD}{block}"),
                (false, false) => continue,
            };
            whole += usize::from(block.contains("[pipeline]"));
            // The one secret that is read with the configuration.
            fs::write(&file, text.replace("\"env:SHOP_PASSWORD\"", "\"file:password\"")).unwrap();
            if let Err(error) = Config::load(&file) {
                panic!("{name}: {}\n{block}", error.report());
            }
        }
    }
    assert!(whole >= 1, "the README has no whole configuration");
}

fn help(path: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_tidegate")).args(path).arg("--help").output().unwrap();
    assert!(output.status.success(), "{path:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Commands and options that a help text lists, by its two sections.
fn listed(help: &str) -> (BTreeSet<String>, BTreeSet<String>) {
    let commands = help.split("\nCommands:\n").nth(1).unwrap_or_default();
    let commands = commands.lines().take_while(|line| line.starts_with("  "));
    let commands = commands.filter_map(|line| Some(line.split_whitespace().next()?.to_owned())).collect();
    let options = help.split(|letter: char| letter.is_whitespace() || ",[]()=".contains(letter));
    (commands, options.filter(|word| word.starts_with("--")).map(str::to_owned).collect())
}

/// What is wrong with a command line as it is written in a text, if anything.
fn wrong(line: &str, helps: &mut BTreeMap<Vec<String>, String>) -> Option<String> {
    let mut path: Vec<String> = Vec::new();
    let mut at = |path: &Vec<String>| {
        let words: Vec<&str> = path.iter().map(String::as_str).collect();
        listed(helps.entry(path.clone()).or_insert_with(|| help(&words)))
    };
    let mut options = Vec::new();
    let mut value = false;
    for word in line.split_whitespace() {
        if word.starts_with("--") {
            options.push(word.trim_end_matches(['`', '.', ',']).to_owned());
            value = word == "--log" || word == "--config";
        } else if std::mem::take(&mut value) {
            continue;
        } else if at(&path).0.contains(word) {
            path.push(word.to_owned());
        } else if !at(&path).0.is_empty() {
            return Some(format!("there is no command `{word}` in {path:?}"));
        }
    }
    let known = at(&path).1;
    options.into_iter().find(|option| !known.contains(option)).map(|option| format!("{path:?} has no {option}"))
}

/// Command lines in a text: in backticks, and the lines of plain blocks.
fn command_lines(text: &str) -> Vec<String> {
    let blocks = blocks(text, "");
    let typed = blocks.iter().flat_map(|block| block.lines()).filter_map(|line| {
        let words = line.split_whitespace().skip_while(|word| word.contains('='));
        words.collect::<Vec<_>>().join(" ").strip_prefix("tidegate ").map(str::to_owned)
    });
    let fence = text.split("```").step_by(2).collect::<Vec<_>>().join(" ");
    typed.chain(quoted(&fence)).collect()
}

/// Command lines in backticks.
fn quoted(text: &str) -> Vec<String> {
    text.split('`').skip(1).step_by(2).filter_map(|word| Some(word.strip_prefix("tidegate ")?.to_owned())).collect()
}

#[test]
fn every_command_in_the_documentation_exists() {
    let mut helps = BTreeMap::new();
    let mut count = 0;
    for name in ["README.md", "docs/error-codes.md", "docs/architecture.md", "docs/schema-changes.md"] {
        for line in command_lines(&page(name)) {
            count += 1;
            assert_eq!(wrong(&line, &mut helps), None, "{name}: `tidegate {line}`");
        }
    }
    assert!(count > 20, "only {count} commands were found");
    assert!(wrong("plugin inspect --host", &mut helps).is_some());
    assert!(wrong("frobnicate", &mut helps).is_some());
}

#[test]
fn every_command_that_an_error_names_exists() {
    let mut helps = BTreeMap::new();
    let mut count = 0;
    for (path, source) in sources() {
        for line in source.lines().flat_map(quoted) {
            count += 1;
            assert_eq!(wrong(&line, &mut helps), None, "{}: `tidegate {line}`", path.display());
        }
    }
    assert!(count > 10, "only {count} commands were found");
}

#[test]
fn every_make_target_in_the_readme_exists() {
    let makefile = page("Makefile");
    let readme = page("README.md");
    let words: Vec<&str> = readme.split(|letter: char| letter.is_whitespace() || "`,.;:".contains(letter)).collect();
    let targets: BTreeSet<&str> = words.windows(2).filter(|pair| pair[0] == "make").map(|pair| pair[1]).collect();
    assert!(targets.contains("demo") && targets.contains("test"));
    for target in targets {
        assert!(makefile.lines().any(|line| line.starts_with(&format!("{target}:"))), "make {target}");
    }
}

#[test]
fn the_plugin_in_the_readme_is_the_one_that_the_sdk_compiles() {
    let readme = blocks(&page("README.md"), "rust");
    let [plugin] = &readme[..] else { panic!("{} Rust blocks", readme.len()) };
    let compiled = page("sdk/rust/examples/print.rs");
    assert_eq!(plugin.trim(), compiled.trim(), "README.md and the SDK's example differ");
    assert!(plugin.lines().filter(|line| !line.trim().is_empty()).count() <= 32);
}

#[test]
fn every_file_that_the_documentation_names_is_there() {
    for name in ["README.md", "docs/architecture.md", "docs/error-codes.md", "docs/limits.md", "docs/schema-changes.md"]
    {
        let page = page(name);
        let folders = ["host/", "sdk/", "plugins/", "wit/", "tests/", "docs/"];
        let named = page.split(|letter: char| letter.is_whitespace() || "`()[],;".contains(letter));
        let named: BTreeSet<&str> = named
            .filter(|word| folders.iter().any(|folder| word.starts_with(folder)))
            .filter(|word| !word.contains('*'))
            .collect();
        for file in named {
            let file = file.trim_end_matches(['.', ':']);
            let built = file.ends_with(".wasm");
            assert!(built || root().join(file).exists(), "{name} names {file}, which is not there");
        }
    }
}

/// Every `fn` of the sources and the tests, by name.
fn functions() -> BTreeSet<String> {
    let mut folders = vec![root().join("host"), root().join("tests"), root().join("plugins")];
    let mut found = BTreeSet::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path).unwrap();
                let after = text.split("fn ").skip(1);
                let name = |text: &str| {
                    text.split(|letter: char| !(letter.is_alphanumeric() || letter == '_')).next().map(str::to_owned)
                };
                found.extend(after.filter_map(name));
            }
        }
    }
    found
}

#[test]
fn every_limit_of_a_plugin_is_on_its_page_as_the_code_has_it() {
    let page = page("docs/limits.md");
    let rows = |limits: Vec<Limit>| {
        let row = |Limit { setting, value, what, reason }| format!("| `{setting}` | {value} | {what} | {reason} |");
        limits.into_iter().map(row).collect::<Vec<String>>()
    };
    for (section, expected) in [
        ("## Of one instance", rows(Limits::default().table())),
        ("## Of all plugins of a process", rows(EngineLimits::default().table())),
    ] {
        let text = page.split(section).nth(1).unwrap().split("\n## ").next().unwrap();
        let listed: Vec<&str> = text.lines().filter(|line| line.starts_with("| `")).collect();
        assert_eq!(listed, expected, "{section}");
    }
}

#[test]
fn every_rule_names_tests_that_are_there() {
    let (page, functions) = (page("docs/rules.md"), functions());
    let rows: Vec<&str> = page.lines().filter(|line| line.starts_with("| P")).collect();
    assert!(rows.len() >= 33, "{} rules", rows.len());
    for row in rows {
        let named: Vec<&str> = row.split('`').skip(1).step_by(2).collect();
        assert!(!named.is_empty(), "{row}");
        for name in named {
            assert!(functions.contains(name), "{row}: there is no `{name}`");
        }
    }
}
