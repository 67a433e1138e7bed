//! A row that ends the plugin while its table is copied. With the instance the run is
//! lost, and with the run its groups, so the row is looked for from one run to the next:
//! the rows of the group that trapped three times are sent by themselves, in ever fewer.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::hash::{BuildHasher, RandomState};

use crate::batch::TextRow;
use crate::schema::table::TableSchema;
use crate::store::{RefusedWhy, TableError};
use crate::wire;

use super::destination::{Destination, Stop};
use super::isolate::{self, RowAt};
use super::ledger::Entry;
use super::sending::RESYNC;

/// Traps and time-outs over the copy of one table before its rows are suspected.
const FAULTS: u32 = 3;
/// And before the table is given up on: more than it takes to find two rows.
const MOST_FAULTS: u32 = 24;
/// The suspects of a run are sent in so many groups.
const GROUPS: usize = 16;

/// What is known of a table whose copies end the plugin.
#[derive(Default)]
pub(super) struct Doubt {
    faults: u32,
    /// Faults over several of its groups at once, of which each may be the one.
    crowds: u32,
    /// Hashes of the rows among which it is.
    suspects: HashSet<u64>,
    /// Hashes of the rows that it is, and why.
    culprits: HashMap<u64, RefusedWhy>,
}

/// The doubts of a destination, by table.
#[derive(Default)]
pub(super) struct Doubts {
    tables: HashMap<u32, Doubt>,
    hasher: RandomState,
}

impl Doubts {
    fn hashes(&self, rows: &wire::Rows, schema: &TableSchema) -> Vec<u64> {
        let hash = |row| {
            let text = serde_json::to_string(&TextRow::take(rows, row, schema)).unwrap_or_default();
            self.hasher.hash_one(text)
        };
        (0..rows.count).map(hash).collect()
    }
}

impl Doubts {
    /// Whether rows of a table are looked for, or were found.
    pub fn suspect(&self, oid: u32) -> bool {
        self.tables.get(&oid).is_some_and(|doubt| !doubt.suspects.is_empty() || !doubt.culprits.is_empty())
    }
}

/// The rows of a copy that a content has: of a range that is copied again they are merged.
fn copied_rows(content: &wire::Content) -> Option<&wire::Rows> {
    match content {
        wire::Content::Copy(copy) => Some(&copy.rows),
        wire::Content::Merge(merge) if merge.deletes.count == 0 => Some(&merge.upserts),
        _ => None,
    }
}

impl Doubt {
    /// A group of these rows ended the plugin. Whether its one row is to blame.
    fn fault(&mut self, rows: &[u64], why: &RefusedWhy) -> bool {
        self.faults += 1;
        let among: HashSet<u64> = rows.iter().copied().filter(|row| self.suspects.contains(row)).collect();
        match rows {
            [only] if among.contains(only) => {
                self.culprits.insert(*only, why.clone());
                self.suspects.clear();
                return true;
            }
            _ if !among.is_empty() => self.suspects = among,
            _ if self.faults >= FAULTS => self.suspects = rows.iter().copied().collect(),
            _ => {}
        }
        false
    }

    /// The rows of a batch, apart: those to blame, and the suspects in small groups.
    fn divide(&self, rows: &[u64]) -> (Vec<u32>, Vec<Vec<u32>>) {
        let of = |wanted: &dyn Fn(&u64) -> bool| -> Vec<u32> {
            (0..).zip(rows).filter(|(_, hash)| wanted(hash)).map(|(row, _)| row).collect()
        };
        let suspects = of(&|hash| self.suspects.contains(hash));
        let size = self.suspects.len().div_ceil(GROUPS).max(1);
        (of(&|hash| self.culprits.contains_key(hash)), suspects.chunks(size).map(<[u32]>::to_vec).collect())
    }
}

impl Destination {
    /// The instance trapped, or took too long, over a group of a copy, if it is one.
    pub(super) async fn doubt(&mut self, index: usize, why: &RefusedWhy) -> Result<bool, Stop> {
        let Some(entry) = self.ledger.get_mut(index) else { return Ok(false) };
        let Some(oid) = entry.copied.as_ref().map(|copied| copied.oid) else { return Ok(false) };
        let Some(schema) = self.parts.tables.get(&oid).and_then(|table| table.schema.clone()) else { return Ok(true) };
        let Some(batch) = entry.group.batches.first() else { return Ok(false) };
        let rows = copied_rows(&batch.content).map(|rows| self.doubts.hashes(rows, &schema)).unwrap_or_default();
        let doubt = self.doubts.tables.entry(oid).or_default();
        if doubt.fault(&rows, why) {
            doubt.faults = 0;
        }
        if doubt.faults < MOST_FAULTS {
            return Ok(true);
        }
        self.doubts.tables.remove(&oid);
        let error = TableError { code: why.code.clone(), message: why.message.clone(), next: Some(RESYNC.to_owned()) };
        self.fail_table(oid, error).await?;
        Ok(true)
    }

    /// The instance trapped, or took too long, over several groups that it had accepted: if
    /// it does so again and again, those of copies are settled one by one.
    pub(super) fn doubt_crowd(&mut self) {
        for oid in self.ledger.accepted_copies() {
            self.doubts.tables.entry(oid).or_default().crowds += 1;
        }
    }

    /// Sends rows of a copy; in doubt those that are suspected by themselves, and those to
    /// blame not at all.
    pub(super) async fn submit_copy(&mut self, mut entry: Entry) -> Result<(), Stop> {
        let Some(oid) = entry.copied.as_ref().map(|copied| copied.oid) else { return self.submit(entry).await };
        let Some(doubt) = self.doubts.tables.get(&oid) else { return self.submit(entry).await };
        let Some(schema) = self.parts.tables.get(&oid).and_then(|table| table.schema.clone()) else { return Ok(()) };
        let Some(rows) = entry.group.batches.first().and_then(|batch| copied_rows(&batch.content)) else {
            return self.submit(entry).await;
        };
        entry.suspect |= doubt.crowds >= FAULTS;
        let hashes = self.doubts.hashes(rows, &schema);
        let (culprits, groups) = doubt.divide(&hashes);
        let blamed: BTreeMap<RowAt, RefusedWhy> = culprits
            .iter()
            .filter_map(|row| {
                Some((RowAt { batch: 0, row: *row }, doubt.culprits.get(&hashes[*row as usize])?.clone()))
            })
            .collect();
        if blamed.is_empty() && groups.is_empty() {
            return self.submit(entry).await;
        }
        let mut parts: Vec<Entry> = groups.iter().map(|rows| isolate::part_of_copy(&entry, rows)).collect();
        let apart: Vec<RowAt> =
            groups.into_iter().flatten().chain(culprits).map(|row| RowAt { batch: 0, row }).collect();
        if !blamed.is_empty() && !self.keep_of(oid, &entry, &blamed).await? {
            return Ok(());
        }
        isolate::remove_rows(&mut entry, &apart, false);
        parts.insert(0, entry);
        for part in parts.into_iter().filter(|part| !part.group.batches.is_empty()) {
            // With the instance the run ended, and these rows with it.
            if self.parts.tables.get(&oid).is_none_or(|table| table.run.is_none()) {
                return Ok(());
            }
            self.submit(part).await?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Copies 1,000 rows in groups of 100 until nothing traps; how many runs that took.
    fn copies(bad: &[u64]) -> (u32, Vec<u64>) {
        let mut doubt = Doubt::default();
        let why = RefusedWhy { code: "plugin.trap".to_owned(), message: String::new(), column: None };
        for run in 1..100 {
            let mut trapped = false;
            'run: for start in (0..1000).step_by(100) {
                let rows: Vec<u64> = (start..start + 100).collect();
                let (blamed, groups) = doubt.divide(&rows);
                let apart: Vec<u32> = groups.iter().flatten().chain(&blamed).copied().collect();
                let rest = (0..100).filter(|row| !apart.contains(row)).collect();
                for group in [rest].into_iter().chain(groups) {
                    let group: Vec<u64> = group.iter().map(|row| rows[*row as usize]).collect();
                    if group.iter().any(|row| bad.contains(row)) {
                        doubt.fault(&group, &why);
                        trapped = true;
                        break 'run;
                    }
                }
            }
            if !trapped {
                let mut found: Vec<u64> = doubt.culprits.keys().copied().collect();
                found.sort_unstable();
                return (run, found);
            }
        }
        panic!("it goes on for ever");
    }

    #[test]
    fn the_row_that_ends_the_plugin_is_found_in_a_few_runs_and_no_other() {
        assert_eq!(copies(&[]), (1, vec![]));
        let (runs, found) = copies(&[777]);
        assert_eq!(found, [777]);
        assert!(runs <= 3 + 2 + 1, "{runs} runs");
        assert_eq!(copies(&[0]).1, [0]);
        let (runs, found) = copies(&[150, 151, 900]);
        assert_eq!(found, [150, 151, 900]);
        assert!(runs < MOST_FAULTS, "{runs} runs");
    }
}
