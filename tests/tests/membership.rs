//! Tables and destinations that come and go while the pipeline runs, each under traffic.

use tidegate::store::TableState;
use tidegate_tests::{Database, Pipeline, Traffic, database, mirror, postgres_destination, source, wait_for};

/// A source and a mirror with a pipeline between them, table `a` published.
struct Bench {
    source: Database,
    mirror: Database,
    pipeline: Pipeline,
}

const TABLES: &str = "CREATE TABLE a (id int PRIMARY KEY, v text);
    CREATE TABLE b (id int PRIMARY KEY, v text);
    INSERT INTO a SELECT n, 'a' FROM generate_series(1, 2000) n;
    INSERT INTO b SELECT n, 'b' FROM generate_series(1, 20000) n;";

fn bench(test: &str, published: &str) -> Bench {
    let source = database(source(), test);
    let mirror = database(mirror(), test);
    source.sql(TABLES);
    source.sql(&format!("CREATE PUBLICATION pub FOR TABLE {published}"));
    let mut pipeline = Pipeline::new(&source, &postgres_destination("mirror", &mirror));
    pipeline.start();
    pipeline.wait_ready();
    Bench { source, mirror, pipeline }
}

impl Bench {
    /// Waits until a table of a destination is in a state.
    fn wait_table(&mut self, destination: &str, table: &str, state: TableState) {
        self.pipeline.wait_status(&format!("{table} of {destination} is {}", state.as_str()), |status| {
            let tables =
                status.destinations.iter().filter(|known| known.name == destination).flat_map(|known| &known.tables);
            tables.into_iter().any(|known| known.table == table && known.state == state)
        });
    }

    fn assert_equal(&mut self, tables: &[&str]) {
        self.pipeline.wait_caught_up(&self.source);
        for table in tables {
            assert!(self.source.rows(table) == self.mirror.rows(table), "{table} differs\n{}", self.pipeline.log());
        }
    }

    /// Runs a command of the binary and returns what it says.
    fn say(&self, arguments: &[&str]) -> (bool, String) {
        let output = self.pipeline.command(arguments).output().unwrap();
        let text = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8_lossy(&text).into_owned())
    }
}

/// Transactions over both tables.
fn traffic(source: &Database) -> Traffic {
    Traffic::start(source, |n| {
        format!(
            "BEGIN; INSERT INTO a VALUES (100000 + {n}, 'new'); INSERT INTO b VALUES (100000 + {n}, 'new');
             UPDATE a SET v = v || '.' WHERE id = 1 + {n} % 2000; UPDATE b SET v = v || '.' WHERE id = 1 + {n} * 7 % 20000;
             DELETE FROM b WHERE id = 3 + {n} * 13 % 20000; UPDATE b SET id = -id WHERE id = 5 + {n} * 17 % 20000; COMMIT"
        )
    })
}

#[test]
fn a_table_that_joins_under_traffic_is_copied_and_follows_with_no_change_lost() {
    let mut bench = bench("joins", "a");
    let traffic = traffic(&bench.source);
    traffic.wait_for(5);
    bench.source.sql("ALTER PUBLICATION pub ADD TABLE b");
    bench.wait_table("mirror", "public.b", TableState::Ready);
    traffic.wait_for(5);
    traffic.stop();
    bench.assert_equal(&["a", "b"]);
    // Known from then on: a restart does not copy it again.
    assert_eq!(bench.pipeline.stop(), 0);
    bench.source.sql("UPDATE b SET v = 'while away' WHERE id % 100 = 1");
    bench.pipeline.start();
    bench.wait_table("mirror", "public.b", TableState::Ready);
    bench.assert_equal(&["a", "b"]);
    assert_eq!(bench.pipeline.log().matches("the table has joined the publication").count(), 1);
}

#[test]
fn a_host_killed_while_a_table_joins_goes_on_with_it() {
    let mut bench = bench("joinkill", "a");
    let traffic = traffic(&bench.source);
    bench.source.sql("ALTER PUBLICATION pub ADD TABLE b");
    for pause in [5, 20, 60] {
        traffic.wait_for(pause);
        bench.pipeline.kill();
        bench.pipeline.start();
    }
    bench.wait_table("mirror", "public.b", TableState::Ready);
    traffic.stop();
    bench.assert_equal(&["a", "b"]);
}

#[test]
fn a_table_that_leaves_stops_and_can_come_back_or_be_forgotten() {
    let mut bench = bench("leaves", "a, b");
    let traffic = traffic(&bench.source);
    bench.source.sql("ALTER PUBLICATION pub DROP TABLE b");
    bench.wait_table("mirror", "public.b", TableState::Errored);
    traffic.wait_for(3);
    // The other one goes on, and what is known of this one stays.
    bench.source.sql("INSERT INTO a VALUES (-5, 'others go on')");
    wait_for("the other table follows", || {
        (bench.mirror.sql("SELECT count(*) FROM a WHERE id = -5") == "1").then_some(())
    });
    let error = bench.pipeline.status().unwrap().destinations[0].tables[1].error.clone().unwrap();
    assert_eq!(error.code, "table.unpublished");

    bench.source.sql("ALTER PUBLICATION pub ADD TABLE b");
    bench.wait_table("mirror", "public.b", TableState::Ready);
    traffic.stop();
    bench.assert_equal(&["a", "b"]);

    let (ok, said) = bench.say(&["tables", "--forget", "mirror", "public.b"]);
    assert!(!ok && said.contains("tables.published"), "{said}");
    bench.source.sql("ALTER PUBLICATION pub DROP TABLE b");
    bench.wait_table("mirror", "public.b", TableState::Errored);
    let (ok, said) = bench.say(&["tables", "--forget", "mirror", "public.b"]);
    assert!(ok, "{said}");
    assert!(bench.pipeline.status().unwrap().destinations[0].tables.iter().all(|table| table.table != "public.b"));
    assert_eq!(bench.pipeline.stop(), 0);
    let (_, said) = bench.say(&["tables", "--json"]);
    assert!(said.contains("public.a") && !said.contains("public.b"), "{said}");
}

#[test]
fn a_table_that_was_out_of_the_publication_between_two_looks_is_copied_again() {
    let mut bench = bench("between", "a, b");
    bench.source.sql(
        "ALTER PUBLICATION pub DROP TABLE b; UPDATE b SET v = 'unseen' WHERE id % 2 = 0; ALTER PUBLICATION pub ADD TABLE b",
    );
    wait_for("the mirror has what no stream told", || {
        (bench.mirror.sql("SELECT count(*) FROM b WHERE v = 'unseen'") == "10000").then_some(())
    });
    bench.wait_table("mirror", "public.b", TableState::Ready);
    bench.assert_equal(&["a", "b"]);
    // The same while nothing runs.
    assert_eq!(bench.pipeline.stop(), 0);
    bench.source.sql(
        "ALTER PUBLICATION pub DROP TABLE b; UPDATE b SET v = 'again' WHERE id % 2 = 0; ALTER PUBLICATION pub ADD TABLE b",
    );
    bench.pipeline.start();
    wait_for("the mirror has what no stream told", || {
        (bench.mirror.sql("SELECT count(*) FROM b WHERE v = 'again'") == "10000").then_some(())
    });
    bench.wait_table("mirror", "public.b", TableState::Ready);
    bench.assert_equal(&["a", "b"]);
}

#[test]
fn a_resync_under_traffic_mends_what_somebody_broke_at_the_destination() {
    let mut bench = bench("resyncs", "a, b");
    let traffic = traffic(&bench.source);
    for _ in 0..2 {
        bench.mirror.sql("UPDATE b SET v = 'broken' WHERE id % 3 = 0");
        let (ok, said) = bench.say(&["resync", "mirror", "public.b"]);
        assert!(ok && said.contains("copied again"), "{said}");
        wait_for("the mirror is mended", || {
            (bench.mirror.sql("SELECT count(*) FROM b WHERE v = 'broken'") == "0").then_some(())
        });
        bench.wait_table("mirror", "public.b", TableState::Ready);
    }
    traffic.stop();
    bench.assert_equal(&["a", "b"]);
    for (arguments, code) in [
        (["resync", "nobody", "public.b"], "destination.unknown"),
        (["resync", "mirror", "public.c"], "resync.unknown-table"),
    ] {
        let (ok, said) = bench.say(&arguments);
        assert!(!ok && said.contains(code), "{said}");
    }
}

#[test]
fn a_destination_that_is_added_by_a_reload_gets_its_copies_while_the_other_streams() {
    let mut bench = bench("reload", "a, b");
    let second = database(mirror(), "second");
    let traffic = traffic(&bench.source);
    let path = bench.pipeline.directory().join("tidegate.toml");
    let config = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, format!("{config}\n{}", postgres_destination("second", &second))).unwrap();
    bench.pipeline.hang_up();
    bench.wait_table("second", "public.a", TableState::Ready);
    bench.wait_table("second", "public.b", TableState::Ready);
    traffic.wait_for(3);
    traffic.stop();
    bench.assert_equal(&["a", "b"]);
    for table in ["a", "b"] {
        assert!(bench.source.rows(table) == second.rows(table), "{table} differs\n{}", bench.pipeline.log());
    }
    // It is there after a restart; what cannot be taken up is refused, and all goes on.
    assert_eq!(bench.pipeline.stop(), 0);
    bench.pipeline.start();
    bench.pipeline.wait_ready();
    std::fs::write(&path, config).unwrap();
    bench.pipeline.hang_up();
    wait_for("the reload is refused", || bench.pipeline.log().contains("reload.restart").then_some(()));
    bench.source.sql("INSERT INTO a VALUES (-1, 'on it goes')");
    bench.assert_equal(&["a"]);
}
