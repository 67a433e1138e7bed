//! The initial copy under the whole host: what is copied, what goes on meanwhile, and what
//! `status` says of it.

use tidegate::position::Lsn;
use tidegate::status::{StatusReport, TableStatus};
use tidegate::store::TableState;
use tidegate_tests::{Database, Pipeline, database, mirror, postgres_destination, source, wait_for};

/// A source with a publication of its own, and a mirror with a pipeline between them.
struct Bench {
    source: Database,
    mirror: Database,
    pipeline: Pipeline,
}

fn bench(test: &str, schema: &str) -> Bench {
    let source = database(source(), test);
    let mirror = database(mirror(), test);
    source.sql(schema);
    let pipeline = Pipeline::new(&source, &postgres_destination("mirror", &mirror));
    Bench { source, mirror, pipeline }
}

impl Bench {
    fn configure_source(&self, keys: &str) {
        let file = self.pipeline.directory().join("tidegate.toml");
        let text = std::fs::read_to_string(&file).unwrap();
        std::fs::write(&file, text.replace("publication = \"pub\"", &format!("publication = \"pub\"\n{keys}")))
            .unwrap();
    }

    fn confirmed(&self) -> Lsn {
        let slot = format!(
            "SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = 'tidegate_{}'",
            self.source.name
        );
        self.source.sql(&slot).parse().unwrap()
    }
}

fn table<'a>(status: &'a StatusReport, name: &str) -> Option<&'a TableStatus> {
    status.destinations.first()?.tables.iter().find(|table| table.table == name)
}

fn state(status: &StatusReport, name: &str) -> Option<TableState> {
    table(status, name).map(|table| table.state)
}

/// Enough that its copy takes seconds.
const LARGE: &str = "CREATE TABLE large (id int PRIMARY KEY, a text);
    INSERT INTO large SELECT i, repeat(md5(i::text), 30) FROM generate_series(1, 300000) i";

#[test]
fn the_slot_and_the_other_tables_go_on_while_a_large_table_is_copied() {
    let mut bench = bench(
        "goes_on",
        &format!("{LARGE}; CREATE TABLE small (id int PRIMARY KEY); CREATE PUBLICATION pub FOR ALL TABLES"),
    );
    // The other connections are for the small one.
    bench.configure_source("copy_connections = 3\ncopy_connections_per_table = 1");
    bench.pipeline.start();
    bench
        .pipeline
        .wait_status("the small table is live", |status| state(status, "public.small") == Some(TableState::Ready));
    let mut rounds = 0;
    let copying =
        |bench: &Bench| state(&bench.pipeline.status().unwrap(), "public.large") == Some(TableState::DataSync);
    while copying(&bench) {
        bench.source.sql(&format!(
            "BEGIN; UPDATE large SET a = 'changed' WHERE id % 100 = {rounds}; INSERT INTO small VALUES ({rounds}); COMMIT"
        ));
        let written: Lsn = bench.source.sql("SELECT pg_current_wal_insert_lsn()").parse().unwrap();
        wait_for("the small table's change is there", || {
            (bench.mirror.sql(&format!("SELECT count(*) FROM small WHERE id = {rounds}")) == "1").then_some(())
        });
        wait_for("the slot has passed it", || {
            bench.source.sql("SELECT pg_logical_emit_message(true, 'tidegate-test', 'mark')");
            (bench.confirmed() >= written).then_some(())
        });
        if copying(&bench) {
            rounds += 1;
        }
    }
    assert!(rounds >= 2, "{rounds} changes came and were confirmed during the copy\n{}", bench.pipeline.log());
    bench.pipeline.wait_ready();
    bench.pipeline.wait_caught_up(&bench.source);
    assert!(bench.source.rows("large") == bench.mirror.rows("large"), "{}", bench.pipeline.log());
    assert_eq!(bench.source.rows("small"), bench.mirror.rows("small"));
}

#[test]
fn a_copy_says_how_far_it_is_and_how_old_its_snapshot_is() {
    let mut bench = bench("progress", &format!("{LARGE}; CREATE PUBLICATION pub FOR ALL TABLES"));
    bench.pipeline.start();
    let status = bench.pipeline.wait_status("a part is copied", |status| {
        let part = |table: &TableStatus| table.percent > Some(0.0) && table.state == TableState::DataSync;
        status.copy_snapshot_seconds.is_some() && table(status, "public.large").is_some_and(part)
    });
    let large = table(&status, "public.large").unwrap();
    let percent = large.percent.unwrap();
    assert!(percent > 0.0 && percent <= 100.0 && large.seconds_left.is_some(), "{large:#?}");
    let total = large.bytes_total.unwrap();
    assert!((300_000_000..400_000_000).contains(&total) && large.bytes_copied <= total, "{large:#?}");
    // Never analysed: by its size.
    assert!(large.rows_copied > 0 && large.rows_total.is_some_and(|rows| rows > 0), "{large:#?}");
    let shown = bench.pipeline.command(&["status"]).output().unwrap();
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(shown.contains(" of about ") || shown.contains("ready"), "{shown}");
    bench.pipeline.wait_ready();
    let status = bench.pipeline.wait_status("the snapshot is let go", |status| status.copy_snapshot_seconds.is_none());
    let large = table(&status, "public.large").unwrap();
    assert_eq!((large.rows_copied, large.bytes_copied), (300_000, total), "{large:#?}");
    assert_eq!((large.percent, large.seconds_left), (Some(100.0), None), "{large:#?}");
}

#[test]
fn names_that_need_care_and_empty_tables_are_copied_and_followed() {
    // 63 bytes, of which the last two are one letter.
    let longest = format!("{}ü", "l".repeat(61));
    let names =
        ["a b", "a.b", "Upper", "select", "quo\"te", "tick'", "tür", "日本", "back\\slash", "%s", "$1", &longest];
    let quoted = |name: &str| format!("\"{}\"", name.replace('"', "\"\""));
    let mut schema = String::new();
    for name in names {
        let name = quoted(name);
        schema += &format!(
            "CREATE TABLE {name} ({name} int PRIMARY KEY, \"from\" text); INSERT INTO {name} VALUES (1, E'tab\\tquote\\'');"
        );
    }
    schema += "CREATE TABLE empty (id int PRIMARY KEY, v text); CREATE SCHEMA \"Sch e.ma\"; CREATE TABLE \"Sch e.ma\".t (id int PRIMARY KEY);
               INSERT INTO \"Sch e.ma\".t VALUES (7); CREATE PUBLICATION pub FOR ALL TABLES";
    let mut bench = bench("names", &schema);
    bench.pipeline.start();
    bench.pipeline.wait_ready();
    assert_eq!(bench.mirror.sql("SELECT count(*) FROM empty"), "0");
    for name in names {
        let name = quoted(name);
        bench.source.sql(&format!("INSERT INTO {name} VALUES (2, 'followed')"));
    }
    bench.source.sql("INSERT INTO \"Sch e.ma\".t VALUES (8)");
    bench.pipeline.wait_caught_up(&bench.source);
    for name in names.map(quoted).into_iter().chain(["empty".to_owned(), "\"Sch e.ma\".t".to_owned()]) {
        assert_eq!(bench.source.rows(&name), bench.mirror.rows(&name), "{name}\n{}", bench.pipeline.log());
    }
}

#[test]
fn filters_column_lists_and_roots_hold_for_the_copy_and_behind_it() {
    let mut bench = bench(
        "filters",
        "CREATE TABLE listed (id int PRIMARY KEY, shown text, hidden text, twice int GENERATED ALWAYS AS (id * 2) STORED);
         INSERT INTO listed SELECT i, 'shown', 'hidden' FROM generate_series(1, 1000) i;
         CREATE TABLE filtered (id int PRIMARY KEY, v text);
         INSERT INTO filtered SELECT i, 'v' FROM generate_series(1, 1000) i;
         CREATE TABLE root (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);
         CREATE TABLE low PARTITION OF root FOR VALUES FROM (0) TO (500);
         CREATE TABLE high PARTITION OF root FOR VALUES FROM (500) TO (2000);
         INSERT INTO root SELECT i, 'v' FROM generate_series(1, 1000) i;
         CREATE PUBLICATION pub FOR TABLE listed (id, shown), filtered WHERE (id > 900), root WHERE (id % 2 = 0)
             WITH (publish_via_partition_root)",
    );
    bench.pipeline.start();
    bench.pipeline.wait_ready();
    bench.source.sql("INSERT INTO listed VALUES (1001, 'shown', 'hidden')");
    bench.source.sql("INSERT INTO filtered VALUES (0, 'no'), (1001, 'yes')");
    bench.source.sql("INSERT INTO root VALUES (1001, 'no'), (1002, 'yes')");
    bench.pipeline.wait_caught_up(&bench.source);
    let expected = |sql: &str| bench.source.sql(sql);
    let found = |sql: &str| bench.mirror.sql(sql);
    assert_eq!(
        expected("SELECT count(*), sum(id) FROM filtered WHERE id > 900"),
        found("SELECT count(*), sum(id) FROM filtered")
    );
    assert_eq!(
        expected("SELECT count(*), sum(id) FROM root WHERE id % 2 = 0"),
        found("SELECT count(*), sum(id) FROM root")
    );
    let columns = "SELECT string_agg(attname, ' ' ORDER BY attnum) FROM pg_attribute
                   WHERE attrelid = 'listed'::regclass AND attnum > 0 AND NOT attisdropped";
    assert_eq!(found(columns), "id shown");
    assert_eq!(found("SELECT count(*) FROM listed"), "1001");
}

#[test]
fn a_table_that_cannot_be_copied_stops_alone() {
    let mut bench = bench(
        "alone",
        "CREATE TABLE root (id int PRIMARY KEY) PARTITION BY RANGE (id);
         CREATE UNLOGGED TABLE leaf PARTITION OF root FOR VALUES FROM (0) TO (500);
         CREATE TABLE fine (id int PRIMARY KEY); INSERT INTO fine VALUES (1);
         CREATE PUBLICATION pub FOR TABLE root, fine WITH (publish_via_partition_root)",
    );
    bench.pipeline.start();
    let status = bench.pipeline.wait_status("one is live and one has stopped", |status| {
        state(status, "public.fine") == Some(TableState::Ready)
            && state(status, "public.root") == Some(TableState::Errored)
    });
    let error = table(&status, "public.root").unwrap().error.clone().unwrap();
    assert_eq!(error.code, "copy.unlogged", "{error:?}");
    assert!(error.next.is_some_and(|next| next.contains("SET LOGGED")));
    bench.source.sql("INSERT INTO fine VALUES (2)");
    bench.pipeline.wait_caught_up(&bench.source);
    assert_eq!(bench.source.rows("fine"), bench.mirror.rows("fine"));
}

#[test]
fn a_host_that_is_killed_in_the_middle_of_a_copy_copies_again_and_doubles_nothing() {
    let mut bench = bench("killed_in_copy", &format!("{LARGE}; CREATE PUBLICATION pub FOR ALL TABLES"));
    for _ in 0..2 {
        bench.pipeline.start();
        bench.pipeline.wait_status("a part is copied", |status| {
            table(status, "public.large").is_some_and(|table| table.rows_copied > 10_000)
        });
        bench.source.sql("UPDATE large SET a = a || '!' WHERE id % 1000 = 0");
        bench.pipeline.kill();
    }
    bench.pipeline.start();
    bench.pipeline.wait_ready();
    bench.pipeline.wait_caught_up(&bench.source);
    assert!(bench.source.rows("large") == bench.mirror.rows("large"), "{}", bench.pipeline.log());
}
