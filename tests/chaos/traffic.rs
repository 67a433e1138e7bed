//! Transactions, as many kinds as there are ways to get one wrong: what each writer does
//! follows from the seed alone, how the writers meet does not.
//!
//! Keys are born by one writer only, the one whose class they are, and never by two
//! transactions at a time: so the changes of a key grow in the order of its life, which is
//! what the mirror's record is checked against.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::Result;
use crate::sql::Sql;

/// Sessions that write at the same time.
const WRITERS: usize = 3;
/// Classes of keys: `key % CLASSES` is the writer's.
const CLASSES: u64 = 8;
/// Keyed tables that most statements choose from, with their key's column.
const KEYED: &[(&str, &str)] = &[
    ("accounts", "id"),
    ("docs", "id"),
    ("full_docs", "id"),
    ("by_index", "id"),
    ("parent", "id"),
    ("child", "id"),
    ("pairs", "a"),
];

/// Writers at work, until they are dropped.
pub struct Traffic {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    url: String,
    ended: AtomicBool,
    paused: AtomicBool,
    /// Writers inside a transaction.
    busy: AtomicUsize,
    committed: AtomicU64,
    /// Keys given out, by table and class.
    issued: Vec<Vec<AtomicU64>>,
    /// What the server said that it should not have.
    odd: Mutex<Option<String>>,
}

impl Traffic {
    pub fn start(url: &str, seed: u64) -> Traffic {
        let issued = KEYED.iter().map(|_| (0..CLASSES).map(|_| AtomicU64::new(0)).collect()).collect();
        let shared = Arc::new(Shared {
            url: url.to_owned(),
            ended: AtomicBool::new(false),
            paused: AtomicBool::new(false),
            busy: AtomicUsize::new(0),
            committed: AtomicU64::new(0),
            issued,
            odd: Mutex::new(None),
        });
        let threads = (0..WRITERS)
            .map(|class| {
                let writer = Writer {
                    shared: shared.clone(),
                    class: class as u64,
                    rng: StdRng::seed_from_u64(seed ^ (0x9E37_79B9 * (class as u64 + 1))),
                    next: vec![0; KEYED.len()],
                    free: KEYED.iter().map(|_| VecDeque::new()).collect(),
                    freed: Vec::new(),
                };
                std::thread::spawn(move || writer.work())
            })
            .collect();
        Traffic { shared, threads }
    }

    /// Lets nobody begin, and waits until nobody is inside.
    pub fn pause(&self) {
        self.shared.paused.store(true, Ordering::SeqCst);
        while self.shared.busy.load(Ordering::SeqCst) > 0 {
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    pub fn resume(&self) {
        self.shared.paused.store(false, Ordering::SeqCst);
    }

    /// Transactions that were committed.
    pub fn committed(&self) -> u64 {
        self.shared.committed.load(Ordering::Relaxed)
    }

    /// Whether the source refused what it should have taken: then nothing is tested.
    pub fn check(&self) -> Result<()> {
        match self.shared.odd.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone() {
            Some(odd) => Err(format!("the generator wrote a statement that the source does not take: {odd}").into()),
            None => Ok(()),
        }
    }
}

impl Drop for Traffic {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::SeqCst);
        for thread in self.threads.drain(..) {
            // A writer that panicked has said so.
            let _ = thread.join();
        }
    }
}

struct Writer {
    shared: Arc<Shared>,
    class: u64,
    rng: StdRng,
    /// The last key of this class, by table.
    next: Vec<u64>,
    /// Keys of this class that this writer has deleted, by table.
    free: Vec<VecDeque<u64>>,
    /// The same of the transaction that is being written.
    freed: Vec<(usize, u64)>,
}

type Statement = fn(&mut Writer) -> String;

/// How often each kind of statement comes.
const STATEMENTS: &[(u32, Statement)] = &[
    (24, Writer::insert_few),
    (3, Writer::insert_many),
    (22, Writer::update_few),
    (6, Writer::update_range),
    (10, Writer::update_without_the_large_value),
    (8, Writer::move_key),
    (6, Writer::swap_keys),
    (12, Writer::delete_few),
    (2, Writer::delete_oldest),
    (5, Writer::bear_again),
    (10, Writer::change_heap),
    (1, Writer::truncate),
];

impl Writer {
    fn work(mut self) {
        let mut session = None;
        while !self.shared.ended.load(Ordering::SeqCst) {
            let pause = self.rng.random_range(0..25);
            std::thread::sleep(Duration::from_millis(pause));
            self.shared.busy.fetch_add(1, Ordering::SeqCst);
            if !self.shared.paused.load(Ordering::SeqCst) {
                session = self.step(session);
            }
            self.shared.busy.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// One transaction, in a session that may have to be opened first.
    fn step(&mut self, session: Option<Sql>) -> Option<Sql> {
        let session = session.or_else(|| self.connect())?;
        let sql = self.transaction();
        let ran = session.run(&sql);
        let freed = std::mem::take(&mut self.freed);
        match ran {
            Ok(()) => {
                self.shared.committed.fetch_add(1, Ordering::Relaxed);
                for (table, key) in freed {
                    self.free[table].push_back(key);
                    self.free[table].truncate(50);
                }
                Some(session)
            }
            // Whether it was committed nobody knows: none of its keys is used again.
            Err(_) if session.is_lost() => {
                self.free.iter_mut().for_each(VecDeque::clear);
                None
            }
            Err(error) => {
                self.note(&error.to_string());
                session.run("ROLLBACK").is_ok().then_some(session)
            }
        }
    }

    /// Conflicts, deadlocks and waits are part of the game; what is not says so.
    fn note(&self, error: &str) {
        const EXPECTED: [&str; 6] = ["23505", "23503", "40P01", "55P03", "57", "40001"];
        if !EXPECTED.iter().any(|code| error.starts_with(code)) && error.as_bytes().get(5) == Some(&b':') {
            let mut odd = self.shared.odd.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            odd.get_or_insert_with(|| error.to_owned());
        }
    }

    fn connect(&self) -> Option<Sql> {
        let session = Sql::connect(&self.shared.url).ok()?;
        session.run("SET lock_timeout = '2s'").ok()?;
        Some(session)
    }

    fn transaction(&mut self) -> String {
        let mut sql = "BEGIN; ".to_owned();
        let statements = [1, 1, 1, 2, 3, 6][self.rng.random_range(0..6_usize)];
        for _ in 0..statements {
            match self.rng.random_range(0..12) {
                0 => {
                    let freed = self.freed.len();
                    let undone = self.statement();
                    sql.push_str(&format!("SAVEPOINT s; {undone}; ROLLBACK TO SAVEPOINT s; "));
                    self.freed.truncate(freed);
                }
                1 => {
                    let kept = self.statement();
                    sql.push_str(&format!("SAVEPOINT s; {kept}; RELEASE SAVEPOINT s; "));
                }
                _ => {}
            }
            sql.push_str(&self.statement());
            sql.push_str("; ");
        }
        if self.rng.random_range(0..15) == 0 {
            self.freed.clear();
            sql.push_str("ROLLBACK");
        } else {
            sql.push_str("COMMIT");
        }
        sql
    }

    fn statement(&mut self) -> String {
        let total: u32 = STATEMENTS.iter().map(|(weight, _)| weight).sum();
        let mut at = self.rng.random_range(0..total);
        for (weight, statement) in STATEMENTS {
            if at < *weight {
                return statement(self);
            }
            at -= weight;
        }
        self.insert_few()
    }

    // ---- keys ------------------------------------------------------------------------

    fn table(&mut self) -> usize {
        self.rng.random_range(0..KEYED.len())
    }

    /// So many keys that nobody has had; the first of them.
    fn fresh(&mut self, table: usize, count: u64) -> u64 {
        let first = self.next[table] + 1;
        self.next[table] += count;
        self.shared.issued[table][self.class as usize].store(self.next[table], Ordering::Relaxed);
        first
    }

    fn key(&self, number: u64) -> u64 {
        number * CLASSES + self.class
    }

    /// A key that may be there, of any writer.
    fn some_key(&mut self, table: usize) -> u64 {
        let class = self.rng.random_range(0..WRITERS as u64);
        let issued = self.shared.issued[table][class as usize].load(Ordering::Relaxed);
        let number = self.rng.random_range(issued.saturating_sub(200)..=issued);
        number * CLASSES + class
    }

    fn some_keys(&mut self, table: usize) -> String {
        let count = self.rng.random_range(1..8);
        (0..count).map(|_| self.some_key(table).to_string()).collect::<Vec<_>>().join(", ")
    }

    // ---- values ----------------------------------------------------------------------

    fn word(&mut self) -> String {
        const ODD: [&str; 6] = ["NULL", "''", "E'tab\\tline\\nback\\\\slash'", "'\\N'", "'quote '' \"'", "'Grüße 😀'"];
        match self.rng.random_range(0..12_usize) {
            at @ 0..6 => ODD[at].to_owned(),
            _ => format!("'w{}'", self.rng.random_range(0..100_000)),
        }
    }

    /// A value that is stored out of line, most of the time.
    fn large(&mut self) -> String {
        let times = [0, 1, 90, 200, 600][self.rng.random_range(0..5_usize)];
        format!("repeat(md5('{}'), {times})", self.rng.random_range(0..100_000))
    }

    /// `(columns) SELECT …` of rows whose numbers come from `rows`, with keys `number * 8 + class`.
    fn rows(&mut self, table: usize, rows: &str) -> String {
        let key = format!("g * {CLASSES} + {}", self.class);
        match KEYED[table].0 {
            "accounts" => format!("(id, name, n) SELECT {key}, {}, g FROM {rows} g", self.word()),
            "docs" | "full_docs" => format!("(id, big, n) SELECT {key}, {}, g FROM {rows} g", self.large()),
            "by_index" => format!("(id, code, v) SELECT {key}, 'c' || {key}, {} FROM {rows} g", self.word()),
            "parent" => format!("(id, n) SELECT {key}, g FROM {rows} g"),
            "child" => {
                let parent = self.some_key(4);
                format!("(id, parent, n) SELECT {key}, p.id, g FROM {rows} g, parent p WHERE p.id = {parent}")
            }
            _ => format!("(a, b, v) SELECT {key}, 'b' || g % 3, {} FROM {rows} g", self.word()),
        }
    }

    fn assignments(&mut self, table: usize) -> String {
        match KEYED[table].0 {
            "accounts" => format!("name = {}, n = n + 1", self.word()),
            "docs" | "full_docs" => match self.rng.random_range(0..3) {
                0 => format!("big = {}", self.large()),
                1 => "big = NULL".to_owned(),
                _ => "n = n + 1".to_owned(),
            },
            "parent" | "child" => "n = n + 1".to_owned(),
            _ => format!("v = {}", self.word()),
        }
    }

    // ---- statements ------------------------------------------------------------------

    fn insert_few(&mut self) -> String {
        let (table, count) = (self.table(), self.rng.random_range(1..6));
        let first = self.fresh(table, count);
        let rows = self.rows(table, &format!("generate_series({first}, {})", first + count - 1));
        format!("INSERT INTO {} {rows}", KEYED[table].0)
    }

    fn insert_many(&mut self) -> String {
        let (table, count) = (self.table(), self.rng.random_range(100..700));
        let count = if KEYED[table].0.ends_with("docs") { count / 10 } else { count };
        let first = self.fresh(table, count);
        let rows = self.rows(table, &format!("generate_series({first}, {})", first + count - 1));
        format!("INSERT INTO {} {rows}", KEYED[table].0)
    }

    fn update_few(&mut self) -> String {
        let table = self.table();
        let (name, key) = KEYED[table];
        let (set, keys) = (self.assignments(table), self.some_keys(table));
        format!("UPDATE {name} SET {set} WHERE {key} IN ({keys})")
    }

    fn update_range(&mut self) -> String {
        let table = self.table();
        let (name, key) = KEYED[table];
        let set = self.assignments(table);
        let modulus = self.rng.random_range(7..60);
        format!("UPDATE {name} SET {set} WHERE {key} % {modulus} = {}", self.rng.random_range(0..modulus))
    }

    fn update_without_the_large_value(&mut self) -> String {
        let table = self.rng.random_range(1..3);
        let keys = self.some_keys(table);
        format!("UPDATE {} SET n = n + 1 WHERE id IN ({keys})", KEYED[table].0)
    }

    fn move_key(&mut self) -> String {
        let table = self.table();
        let (name, key) = KEYED[table];
        let (from, to) = (self.some_key(table), self.fresh(table, 1));
        let to = self.key(to);
        match name {
            "by_index" => format!("UPDATE by_index SET id = {to}, code = 'c{to}' WHERE id = {from}"),
            "pairs" => format!("UPDATE pairs SET a = {to}, b = b || '+' WHERE a = {from}"),
            _ => format!("UPDATE {name} SET {key} = {to} WHERE {key} = {from}"),
        }
    }

    /// Both rows have to be there: no key is born here.
    fn swap_keys(&mut self) -> String {
        let table = self.rng.random_range(0..4);
        let name = KEYED[table].0;
        let (a, b) = (self.some_key(table), self.some_key(table));
        let set = |from: String, to: String| match name {
            "by_index" => format!("UPDATE by_index SET code = 'c{to}' WHERE code = 'c{from}';"),
            _ => format!("UPDATE {name} SET id = {to} WHERE id = {from};"),
        };
        let column = if name == "by_index" { "code" } else { "id" };
        let value = |key: u64| if name == "by_index" { format!("'c{key}'") } else { key.to_string() };
        format!(
            "DO $$ BEGIN IF (SELECT count(*) FROM (SELECT FROM {name} WHERE {column} IN ({}, {}) ORDER BY {column} FOR UPDATE) s) = 2 THEN {} {} {} END IF; END $$",
            value(a),
            value(b),
            set(a.to_string(), format!("-{a}")),
            set(b.to_string(), a.to_string()),
            set(format!("-{a}"), b.to_string()),
        )
    }

    fn delete_few(&mut self) -> String {
        let table = self.table();
        let (name, key) = KEYED[table];
        let gone: Vec<u64> = (0..self.rng.random_range(1..6)).map(|_| self.some_key(table)).collect();
        // Swapped codes do not go with the id.
        if name != "by_index" {
            let mine = gone.iter().filter(|gone| *gone % CLASSES == self.class).map(|gone| (table, *gone));
            self.freed.extend(mine);
        }
        let list: Vec<String> = gone.iter().map(u64::to_string).collect();
        format!("DELETE FROM {name} WHERE {key} IN ({})", list.join(", "))
    }

    /// Keeps tables from growing without end.
    fn delete_oldest(&mut self) -> String {
        let table = self.table();
        let (name, key) = KEYED[table];
        format!("DELETE FROM {name} WHERE {key} IN (SELECT {key} FROM {name} ORDER BY change DESC OFFSET 3000)")
    }

    /// A key that was deleted comes back, as another row.
    fn bear_again(&mut self) -> String {
        let table = self.table();
        let Some(key) = self.free[table].pop_front() else { return self.insert_few() };
        let number = key / CLASSES;
        let rows = self.rows(table, &format!("generate_series({number}, {number})"));
        format!("INSERT INTO {} {rows}", KEYED[table].0)
    }

    /// Tables without a key.
    fn change_heap(&mut self) -> String {
        let word = self.word();
        match self.rng.random_range(0..7) {
            0 | 1 => {
                let large = self.large();
                format!(
                    "INSERT INTO heap (big, v, n) SELECT {large}, {word}, g % 2 FROM generate_series(1, {}) g",
                    self.rng.random_range(1..20)
                )
            }
            2 => format!("UPDATE heap SET n = n + 1 WHERE change % 37 = {}", self.rng.random_range(0..37)),
            3 => format!("UPDATE heap SET v = {word} WHERE change % 41 = {}", self.rng.random_range(0..41)),
            4 => format!("DELETE FROM heap WHERE change % 23 = {}", self.rng.random_range(0..23)),
            _ => format!(
                "INSERT INTO events (v) SELECT {word} FROM generate_series(1, {})",
                self.rng.random_range(1..30)
            ),
        }
    }

    fn truncate(&mut self) -> String {
        const SETS: [&str; 6] = [
            "accounts",
            "docs, full_docs",
            "parent CASCADE",
            "child, pairs, events",
            "heap, by_index RESTART IDENTITY",
            "parent, accounts, heap CASCADE",
        ];
        if self.rng.random_range(0..30) > 0 {
            return self.update_few();
        }
        format!("TRUNCATE {}", SETS[self.rng.random_range(0..SETS.len())])
    }
}

/// Alters tables, and changes what it added, from one session.
pub struct Alterations {
    rng: StdRng,
    added: u32,
}

impl Alterations {
    pub fn new(seed: u64) -> Alterations {
        Alterations { rng: StdRng::seed_from_u64(seed ^ 0xA17E), added: 0 }
    }

    /// One ALTER TABLE, with or without rows around it. False if the source would not
    /// have it now, for want of a lock.
    pub fn alter(&mut self, session: &Sql) -> Result<bool> {
        let tables = crate::tables::names(|table| table.altered);
        let table = tables[self.rng.random_range(0..tables.len())];
        let extra: Vec<String> = session
            .rows(&format!(
                "SELECT attname FROM pg_attribute WHERE attrelid = '{table}'::regclass AND attname ~ '^x\\d+$' ORDER BY attnum"
            ))?
            .into_iter()
            .filter_map(|row| row.into_iter().next().flatten())
            .collect();
        let (change, column) = self.change(&extra);
        let touch = |n: u32| format!("UPDATE {table} SET change = 0 WHERE id % 11 = {n};");
        let fill = column.as_ref().map(|column| format!("UPDATE {table} SET {column} = {column} WHERE id % 7 = 3;"));
        let set = column.as_ref().map(|column| format!("UPDATE {table} SET {column} = DEFAULT WHERE id % 13 = 5;"));
        let sql = match self.rng.random_range(0..4) {
            0 => format!("ALTER TABLE {table} {change}"),
            1 => format!("ALTER TABLE {table} {change}; {}", fill.unwrap_or_default()),
            2 => format!("{} ALTER TABLE {table} {change}; {}", touch(1), set.unwrap_or_default()),
            _ => format!(
                "SAVEPOINT s; ALTER TABLE {table} ADD COLUMN undone int DEFAULT 1; {} ROLLBACK TO s; {} ALTER TABLE {table} {change}; {}",
                touch(2),
                touch(3),
                fill.unwrap_or_default()
            ),
        };
        match session.run(&format!("BEGIN; SET LOCAL lock_timeout = '2s'; {sql}; COMMIT")) {
            Ok(()) => Ok(true),
            Err(error) => {
                if !session.is_lost() {
                    session.run("ROLLBACK")?;
                    if !["55P03", "40P01"].iter().any(|code| error.to_string().starts_with(code)) {
                        return Err(error);
                    }
                }
                Ok(false)
            }
        }
    }

    /// An action, and the column that is there behind it.
    fn change(&mut self, extra: &[String]) -> (String, Option<String>) {
        const KINDS: [&str; 5] = [
            "int DEFAULT 5",
            "text",
            "text DEFAULT 'some ''text'''",
            "numeric(12,2) DEFAULT 1.50",
            "int NOT NULL DEFAULT 7",
        ];
        let choice = if extra.len() > 4 { 3 } else { self.rng.random_range(0..8) };
        if extra.is_empty() || choice < 3 {
            self.added += 1;
            // Names come back, as other columns.
            let name = format!("x{}", self.added % 7);
            if !extra.contains(&name) {
                let kind = KINDS[self.rng.random_range(0..KINDS.len())];
                return (format!("ADD COLUMN {name} {kind}"), Some(name));
            }
        }
        let column = extra[self.rng.random_range(0..extra.len())].clone();
        match choice {
            3 | 4 => (format!("DROP COLUMN {column}"), None),
            5 => {
                self.added += 1;
                let name = format!("x{}", 100 + self.added);
                (format!("RENAME COLUMN {column} TO {name}"), Some(name))
            }
            6 => (format!("ALTER COLUMN {column} DROP DEFAULT, ALTER COLUMN {column} DROP NOT NULL"), Some(column)),
            _ => (format!("ALTER COLUMN {column} SET DEFAULT '3'"), Some(column)),
        }
    }
}
