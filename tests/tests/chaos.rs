//! The short run of `make chaos`: every named place, then faults at random. And what it
//! found, one by one.

use std::io::Write;
use std::process::{Command, Stdio};

use tidegate::position::Lsn;
use tidegate_tests::{Database, Pipeline, database, mirror, postgres_destination, source, wait_for};

#[test]
fn nothing_is_lost_or_done_twice_whatever_dies_and_wherever() {
    let output = Command::new(env!("CARGO_BIN_EXE_chaos"))
        .envs([("MINUTES", "2"), ("SEED", "1"), ("ONLY", ""), ("POINTS", "1")])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).replace(',', "");
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    let places: Vec<usize> = said
        .lines()
        .find(|line| line.contains("named places"))
        .unwrap()
        .split(' ')
        .filter_map(|word| word.parse().ok())
        .collect();
    let [_, reached, all] = places[..] else { panic!("{said}") };
    assert_eq!(reached, all, "{said}");
    println!("{said}");
}

fn columns(database: &Database) -> String {
    database.sql(
        "SELECT string_agg(attname, ', ' ORDER BY attnum) FROM pg_attribute
         WHERE attrelid = 't'::regclass AND attnum > 0 AND NOT attisdropped",
    )
}

#[test]
fn an_alter_with_no_rows_behind_it_arrives_although_the_host_died_between_its_version_and_its_turn() {
    let (from, to) = (database(source(), "silent"), database(mirror(), "silent"));
    from.sql("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION pub FOR ALL TABLES");
    let mut pipeline = Pipeline::new(&from, &postgres_destination("mirror", &to));
    pipeline.install_trigger();
    pipeline.start_with(&[("TIDEGATE_FAILPOINT", "router.versioned")]);
    pipeline.wait_ready();
    from.sql("ALTER TABLE t ADD COLUMN added int");
    // By SIGKILL, which is no exit code.
    assert_eq!(pipeline.wait_end(), -1, "{}", pipeline.log());
    pipeline.start();
    pipeline.wait_caught_up(&from);
    wait_for("the mirror has the column", || (columns(&to) == "id, added").then_some(()));
    assert_eq!(pipeline.stop(), 0);
}

#[test]
fn an_alter_is_made_once_although_the_host_died_at_each_step_of_it() {
    let (from, to) = (database(source(), "steps"), database(mirror(), "steps"));
    from.sql("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION pub FOR ALL TABLES");
    let mut pipeline = Pipeline::new(&from, &postgres_destination("mirror", &to));
    pipeline.install_trigger();
    let mut all = "id".to_owned();
    for (index, point) in ["flushed", "applying", "applied", "recorded"].into_iter().enumerate() {
        pipeline.start_with(&[("TIDEGATE_FAILPOINT", &format!("schema.{point}"))]);
        pipeline.wait_ready();
        from.sql(&format!("ALTER TABLE t ADD COLUMN {point} int; INSERT INTO t (id, {point}) VALUES ({index}, 7)"));
        assert_eq!(pipeline.wait_end(), -1, "{}", pipeline.log());
        pipeline.start();
        pipeline.wait_caught_up(&from);
        all.push_str(", ");
        all.push_str(point);
        wait_for("the mirror has the column", || (columns(&to) == all).then_some(()));
        let rows = format!("SELECT count(*) FROM t WHERE {point} = 7");
        wait_for("the mirror has the row", || (to.sql(&rows) == "1").then_some(()));
        assert_eq!(pipeline.stop(), 0);
    }
}

#[test]
fn rows_of_before_an_alter_that_the_copy_has_do_not_stop_their_table_when_they_come_again() {
    let (from, to) = (database(source(), "again"), database(mirror(), "again"));
    from.sql("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE other (id int); CREATE PUBLICATION pub FOR TABLE t");
    let mut pipeline = Pipeline::new(&from, &postgres_destination("mirror", &to));
    pipeline.install_trigger();
    pipeline.start_with(&[("TIDEGATE_FAILPOINT", "slot.recorded")]);
    assert_eq!(pipeline.wait_end(), -1, "{}", pipeline.log());
    // The snapshot of the copy waits for it, and so is behind all that follows.
    let mut holder =
        Command::new("psql").args(["-X", "-q", "-d", &from.url]).stdin(Stdio::piped()).spawn().expect("psql runs");
    let mut commands = holder.stdin.take().unwrap();
    commands.write_all(b"BEGIN; INSERT INTO other VALUES (1);\n").unwrap();
    let open = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND backend_xid IS NOT NULL";
    wait_for("the transaction is open", || (from.sql(open) == "1").then_some(()));
    // When the table is recorded as ready, the checkpoint is where it was.
    pipeline.start_with(&[("TIDEGATE_FAILPOINT", "table.recorded:3")]);
    let idle: Lsn = from.sql("SELECT pg_current_wal_flush_lsn()").parse().unwrap();
    // It moves while nothing comes, and then not for some seconds.
    pipeline.wait_status("the checkpoint moves", |status| status.slot.confirmed >= Some(idle));
    // With columns that no version has: the copy is the first.
    from.sql("INSERT INTO t VALUES (1)");
    from.sql("ALTER TABLE t ADD COLUMN added int");
    from.sql("INSERT INTO t VALUES (2, 2)");
    commands.write_all(b"COMMIT;\n").unwrap();
    drop(commands);
    assert!(holder.wait().unwrap().success());
    assert_eq!(pipeline.wait_end(), -1, "{}", pipeline.log());
    pipeline.start();
    pipeline.wait_ready();
    from.sql("INSERT INTO t VALUES (3, 3)");
    pipeline.wait_caught_up(&from);
    assert_eq!(from.rows("t"), to.rows("t"), "{}", pipeline.log());
    assert_eq!(pipeline.stop(), 0);
}
