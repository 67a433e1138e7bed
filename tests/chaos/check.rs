//! What has to be true once nothing is under way: the ends hold what the source holds, and
//! every change came to them once.

use std::collections::HashSet;

use tidegate::status::{DestinationState, StatusReport};
use tidegate::store::TableState;

use crate::Result;
use crate::fold::join;
use crate::sql::Sql;
use crate::tables::{APPLIED_TWICE, TABLES};
use crate::world::World;

/// Rows shown of those that differ.
const SHOWN: usize = 5;

/// Proves it, or says what is wrong. Nobody writes meanwhile.
pub fn all(world: &mut World) -> Result<()> {
    let (source, mirror) = (world.at_source()?, world.at_mirror()?);
    world.log.advance()?;
    let mut wrong: Vec<String> = Vec::new();
    for table in TABLES {
        let columns = columns(&source, table.name)?;
        if table.mirrored {
            wrong.extend(mirrored(&source, &mirror, table.name, &columns)?);
        }
        if table.logged {
            wrong.extend(logged(world, &source, table.name, &columns)?);
        }
    }
    world.tally.applied += applied_once(&mirror, world.watermark, &mut wrong)?;
    if !wrong.is_empty() {
        return Err(wrong.join("\n").into());
    }
    source.run("TRUNCATE chaos.log")?;
    mirror.run("TRUNCATE chaos.applied")?;
    world.watermark = source.one("SELECT last_value FROM chaos.change")?.parse()?;
    Ok(())
}

/// Columns by name, with their types.
fn columns(session: &Sql, table: &str) -> Result<Vec<(String, String)>> {
    let rows = session.rows(&format!(
        "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute
         WHERE attrelid = to_regclass('public.{table}') AND attnum > 0 AND NOT attisdropped ORDER BY attname"
    ))?;
    let pair = |row: Vec<Option<String>>| {
        let mut cells = row.into_iter().map(Option::unwrap_or_default);
        (cells.next().unwrap_or_default(), cells.next().unwrap_or_default())
    };
    Ok(rows.into_iter().map(pair).collect())
}

fn mirrored(source: &Sql, mirror: &Sql, table: &str, there: &[(String, String)]) -> Result<Option<String>> {
    let here = columns(mirror, table)?;
    if here != there {
        return Ok(Some(format!("mirror, {table}: its columns are {here:?}, the source's are {there:?}")));
    }
    let list = list(there);
    let digest = format!(
        "SELECT count(*) || ' rows, ' || coalesce(sum(hashtextextended(ROW({list})::text, 0)::numeric), 0) FROM public.{table}"
    );
    if source.one(&digest)? == mirror.one(&digest)? {
        return Ok(None);
    }
    let rows = |session: &Sql| -> Result<Vec<String>> {
        Ok(session
            .rows(&format!("SELECT left(ROW({list})::text, 300) FROM public.{table}"))?
            .into_iter()
            .flatten()
            .flatten()
            .collect())
    };
    Ok(Some(difference(&format!("mirror, {table}"), &rows(source)?, &rows(mirror)?)))
}

fn logged(world: &mut World, source: &Sql, table: &str, columns: &[(String, String)]) -> Result<Vec<String>> {
    let mut wrong = Vec::new();
    let name = format!("public.{table}");
    let names: Vec<String> = columns.iter().map(|(name, _)| name.clone()).collect();
    match world.log.rows(&name, &names) {
        Ok(mut ours) => {
            let rows = source.rows(&format!("SELECT {} FROM public.{table}", list(columns)))?;
            let mut theirs: Vec<String> = rows.iter().map(|row| join(row.iter().map(Option::as_deref))).collect();
            ours.sort_unstable();
            theirs.sort_unstable();
            if ours != theirs {
                wrong.push(difference(&format!("log, {table}"), &theirs, &ours));
            }
        }
        Err(error) => wrong.push(format!("log, {table}: {error}")),
    }
    let seen = world.log.take(&name);
    world.tally.logged += seen.changes.len() as u64;
    let rows = source.rows(&format!("SELECT change FROM chaos.log WHERE tab = '{table}'"))?;
    let made: HashSet<i64> = rows.iter().flatten().flatten().filter_map(|text| text.parse().ok()).collect();
    let ours: HashSet<i64> = seen.changes.iter().copied().collect();
    if ours.len() < seen.changes.len() {
        wrong.push(format!("log, {table}: {} changes came twice", seen.changes.len() - ours.len()));
    }
    if let Some(odd) = ours.difference(&made).next() {
        wrong.push(format!(
            "log, {table}: change {odd} is in it, which the source has not committed since the last look"
        ));
    }
    // Changes before a copy are in its rows.
    let missing = made.difference(&ours).count();
    if !seen.copied && missing > 0 {
        let first = made.difference(&ours).min();
        wrong.push(format!("log, {table}: {missing} of {} changes are missing, the first is {first:?}", made.len()));
    }
    Ok(wrong)
}

/// How many rows were written, each of them later than what its key had.
fn applied_once(mirror: &Sql, watermark: i64, wrong: &mut Vec<String>) -> Result<u64> {
    let twice = mirror.rows(&APPLIED_TWICE.replace("{watermark}", &watermark.to_string()))?;
    for row in twice.iter().take(SHOWN) {
        let cells: Vec<&str> = row.iter().map(|cell| cell.as_deref().unwrap_or_default()).collect();
        wrong.push(format!("mirror: applied twice, or too late: {}", cells.join(" ")));
    }
    Ok(mirror.one("SELECT count(*) FROM chaos.applied WHERE op IN ('I', 'U', 'D')")?.parse()?)
}

/// No table and no destination has stopped.
pub fn nothing_errored(status: &StatusReport) -> Result<()> {
    for destination in &status.destinations {
        if destination.state == DestinationState::Errored {
            return Err(format!("destination {} has stopped: {:?}", destination.name, destination.error).into());
        }
        for table in &destination.tables {
            if table.state == TableState::Errored {
                return Err(format!("{} at {} has stopped: {:?}", table.table, destination.name, table.error).into());
            }
        }
    }
    Ok(())
}

fn list(columns: &[(String, String)]) -> String {
    columns.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", ")
}

fn difference(place: &str, source: &[String], ours: &[String]) -> String {
    let (theirs, mine): (HashSet<&String>, HashSet<&String>) = (source.iter().collect(), ours.iter().collect());
    format!(
        "{place}: {} rows there, {} here; missing {:?}; too many {:?}",
        source.len(),
        ours.len(),
        shown(theirs.difference(&mine).copied()),
        shown(mine.difference(&theirs).copied()),
    )
}

/// The first of many rows, none of them whole.
fn shown<'a>(rows: impl Iterator<Item = &'a String>) -> Vec<String> {
    rows.take(SHOWN).map(|row| row.chars().take(200).collect()).collect()
}

#[cfg(test)]
mod tests {
    use tidegate::scratch::{Cluster, ClusterOptions};

    use super::*;
    use crate::tables::{MIRROR_AUDIT, source_schema};

    /// What is said of a mirror at which this was done, behind the copy of a row by change 6.
    fn said_of(done: &str) -> Vec<String> {
        let cluster = Cluster::start(&ClusterOptions::default()).unwrap();
        let mirror = Sql::connect(&cluster.url("postgres")).unwrap();
        mirror.run(MIRROR_AUDIT).unwrap();
        mirror
            .run(
                "SET session_replication_role = replica; CREATE SCHEMA tidegate;
                 CREATE TABLE tidegate.position (target_name text PRIMARY KEY, run text, commit_lsn pg_lsn, ordinal numeric);
                 CREATE TABLE t (id int PRIMARY KEY, change bigint);
                 INSERT INTO tidegate.position VALUES ('t', 'run'); INSERT INTO t VALUES (1, 6);
                 UPDATE tidegate.position SET commit_lsn = '0/5', ordinal = 3",
            )
            .unwrap();
        mirror.run(done).unwrap();
        let mut wrong = Vec::new();
        applied_once(&mirror, 5, &mut wrong).unwrap();
        wrong
    }

    #[test]
    fn a_change_that_is_applied_twice_or_too_late_at_the_mirror_is_found() {
        let upsert = |change| {
            format!("INSERT INTO t VALUES (1, {change}) ON CONFLICT (id) DO UPDATE SET change = excluded.change;")
        };
        let fine =
            [upsert(7), "DELETE FROM t; TRUNCATE t;".to_owned(), upsert(8), "INSERT INTO t VALUES (2, 7);".to_owned()];
        assert_eq!(said_of(&fine.concat()), [""; 0]);
        assert_eq!(said_of(&(upsert(7) + &upsert(7))).len(), 1);
        assert_eq!(said_of(&(upsert(8) + "DELETE FROM t;" + &upsert(7))).len(), 1);
        assert_eq!(
            said_of("UPDATE tidegate.position SET ordinal = 4; UPDATE tidegate.position SET ordinal = 2").len(),
            1
        );
        // A new copy may bring what was there, a range of it again until it is finished.
        let again =
            "UPDATE tidegate.position SET run = 'next', commit_lsn = NULL; TRUNCATE t; INSERT INTO t VALUES (1, 6);";
        assert_eq!(said_of(again), [""; 0]);
        assert_eq!(said_of(&(again.to_owned() + &upsert(6))), [""; 0]);
        assert_eq!(said_of(&(again.to_owned() + &upsert(5))).len(), 1);
        let finished = again.to_owned() + "UPDATE tidegate.position SET commit_lsn = '0/9', ordinal = 1;";
        assert_eq!(said_of(&finished), [""; 0]);
        assert_eq!(said_of(&(finished + &upsert(6))).len(), 1);
    }

    #[test]
    fn rows_that_differ_between_the_ends_are_shown() {
        let cluster = Cluster::start(&ClusterOptions::default()).unwrap();
        cluster.psql("postgres", "CREATE DATABASE mirror").unwrap();
        let (source, mirror) =
            (Sql::connect(&cluster.url("postgres")).unwrap(), Sql::connect(&cluster.url("mirror")).unwrap());
        source.run(&source_schema()).unwrap();
        mirror.run("CREATE TABLE parent (id bigint PRIMARY KEY, change bigint, n int)").unwrap();
        source.run("INSERT INTO parent SELECT g, 0, g FROM generate_series(1, 3) g").unwrap();
        mirror.run("INSERT INTO parent VALUES (1, 1, 1), (2, 2, 2)").unwrap();
        let columns = columns(&source, "parent").unwrap();
        let said = mirrored(&source, &mirror, "parent", &columns).unwrap().unwrap();
        assert!(said.contains("3 rows there, 2 here") && said.contains("(3,3,3)"), "{said}");
        mirror.run("INSERT INTO parent VALUES (3, 3, 3)").unwrap();
        assert_eq!(mirrored(&source, &mirror, "parent", &columns).unwrap(), None);
        mirror.run("ALTER TABLE parent ADD COLUMN x int").unwrap();
        assert!(mirrored(&source, &mirror, "parent", &columns).unwrap().unwrap().contains("columns"));
    }
}
