//! How long it takes from an `ALTER` with no rows behind it to `Applied`: from the commit at
//! the source to when the destination had it, as the history has both. Told, not judged.

use serde_json::Value;
use tidegate::schema::moment::Moment;
use tidegate_tests::majors::servers;
use tidegate_tests::{Pipeline, database, postgres_destination, wait_for};

use crate::Result;
use crate::report::{Outcome, Report};

/// Changes that are measured.
const CHANGES: usize = 20;

pub fn run(report: &Report) -> Result<()> {
    const CASE: &str = "silent, from commit to applied";
    if !report.options().wants(CASE) {
        return Ok(());
    }
    for major in report.options().majors.clone() {
        let Some(servers) = servers(major) else {
            report.case(CASE, &major.to_string(), "-", Outcome::Skipped("there is no such server here".to_owned()));
            continue;
        };
        let (source, mirror) = (database(&servers.source, "silent"), database(&servers.mirror, "silent"));
        source.sql("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION pub FOR ALL TABLES");
        let mut pipeline = Pipeline::new(&source, &postgres_destination("mirror", &mirror));
        pipeline.install_trigger();
        pipeline.start();
        pipeline.wait_ready();
        for change in 0..CHANGES {
            source.sql(&format!("ALTER TABLE t ADD c{change} int"));
            wait_for("the change is applied", || {
                let there = "SELECT count(*) FROM pg_attribute WHERE attrelid = 't'::regclass AND attnum > 0";
                (mirror.sql(there) == (change + 2).to_string()).then_some(())
            });
        }
        let mut delays = wait_for("all are recorded", || {
            let delays = delays(&pipeline).unwrap_or_default();
            (delays.len() == CHANGES).then_some(delays)
        });
        delays.sort_unstable();
        pipeline.stop();
        let ms = |us: i64| us as f64 / 1000.0;
        let outcome = format!(
            "{CHANGES} changes without rows: median {:.0} ms, at most {:.0} ms",
            ms(delays[CHANGES / 2]),
            ms(delays[CHANGES - 1])
        );
        report.case(CASE, &major.to_string(), "compatible", Outcome::Expected(outcome));
    }
    Ok(())
}

/// Microseconds of each version that was not copied.
fn delays(pipeline: &Pipeline) -> Option<Vec<i64>> {
    let output = pipeline.command(&["schema", "history", "public.t", "--json"]).output().ok()?;
    let history: Value = serde_json::from_slice(&output.stdout).ok()?;
    let moment = |value: &Value| value.as_str()?.parse::<Moment>().ok();
    let delay = |version: &Value| {
        let applied = version["destinations"].as_array()?.iter().find(|one| one["how"] == "applied")?;
        Some(moment(&applied["at"])?.0 - moment(&version["time"])?.0)
    };
    Some(history["versions"].as_array()?.iter().filter_map(delay).collect())
}
