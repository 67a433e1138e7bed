//! An ALTER with no rows behind it: how soon it arrives, and that it does when it is the last
//! thing before the source stops.

use std::time::{Duration, Instant};

use tidegate::scratch::{Cluster, ClusterOptions, Shutdown};
use tidegate_tests::{Database, Pipeline, database, mirror, postgres_destination, source, wait_for};

fn columns(database: &Database) -> String {
    database.sql(
        "SELECT string_agg(attname, ' ' ORDER BY attnum) FROM pg_attribute
         WHERE attrelid = 't'::regclass AND attnum > 0 AND NOT attisdropped",
    )
}

#[test]
fn an_alter_with_no_rows_behind_it_reaches_every_destination_within_a_second() {
    let from = database(source(), "silent_soon");
    let mirrors = [database(mirror(), "silent_one"), database(mirror(), "silent_two")];
    from.sql("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1); CREATE PUBLICATION pub FOR ALL TABLES");
    let destinations: Vec<String> =
        mirrors.iter().enumerate().map(|(index, to)| postgres_destination(&format!("mirror{index}"), to)).collect();
    let mut pipeline = Pipeline::new(&from, &destinations.join("\n"));
    pipeline.install_trigger();
    pipeline.start();
    pipeline.wait_ready();
    let mut took: Vec<Duration> = Vec::new();
    for round in 0..5 {
        let begin = Instant::now();
        from.sql(&format!("ALTER TABLE t ADD COLUMN c{round} int"));
        let wanted = columns(&from);
        wait_for("all mirrors have the column", || mirrors.iter().all(|to| columns(to) == wanted).then_some(()));
        took.push(begin.elapsed());
    }
    took.sort();
    println!("from an ALTER to all destinations: {took:.0?}");
    assert!(took[2] < Duration::from_secs(1), "{took:?}");
    // Each at its own place in the history.
    let output = pipeline.command(&["schema", "history", "public.t", "--json"]).output().unwrap();
    let history = String::from_utf8_lossy(&output.stdout).into_owned();
    for round in 0..5 {
        assert!(history.contains(&format!("c{round}")), "{history}");
    }
}

#[test]
fn an_alter_that_is_the_last_thing_before_the_source_stops_arrives_when_it_is_back() {
    let mut cluster = Cluster::start(&ClusterOptions::default()).unwrap();
    cluster.psql("postgres", "CREATE DATABASE silent").unwrap();
    let from = Database { url: cluster.url("silent"), port: cluster.port(), name: "silent".to_owned() };
    let to = database(mirror(), "silent_last");
    from.sql("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION pub FOR ALL TABLES");
    let mut pipeline = Pipeline::new(&from, &postgres_destination("mirror", &to));
    pipeline.install_trigger();
    pipeline.start();
    pipeline.wait_ready();
    let mut wanted = "id".to_owned();
    for (round, (how, host_dies)) in
        [(Shutdown::Fast, false), (Shutdown::Immediate, false), (Shutdown::Fast, true), (Shutdown::Immediate, true)]
            .into_iter()
            .enumerate()
    {
        from.sql(&format!("ALTER TABLE t ADD COLUMN c{round} int"));
        if host_dies {
            pipeline.kill();
        }
        cluster.halt(how).unwrap();
        cluster.resume().unwrap();
        if host_dies {
            pipeline.start();
        }
        wanted.push_str(&format!(" c{round}"));
        wait_for("the mirror has the column", || (columns(&to) == wanted).then_some(()));
    }
    pipeline.kill();
}
