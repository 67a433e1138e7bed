//! Every version of every table's schema, and which one a row belongs to.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use super::change::carry_over;
use super::table::TableSchema;
use crate::position::{Lsn, SnapshotId};

/// Ids of versions that were no entry, kept per table. They are rare (DDL that
/// changes nothing a destination sees) and matter only while a copy of that table is
/// under way.
const MAX_ECHOES: usize = 1024;

/// A column of a RELATION message, as far as versions are told apart by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RelationColumn<'a> {
    /// The column's name.
    pub name: &'a str,
    /// `pg_attribute.atttypid`.
    pub type_oid: u32,
}

/// What became of an appended version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Appended {
    /// It is an entry now, to be stored before any checkpoint passes it (P5).
    New,
    /// Its id is there, or it equals the version before it (P5): nothing changed.
    Known,
}

/// The versions of all tables.
#[derive(Debug, Default)]
pub struct History {
    tables: HashMap<u32, Table>,
    revived: Vec<Arc<TableSchema>>,
}

#[derive(Debug, Default)]
struct Table {
    /// By snapshot id.
    versions: Vec<Arc<TableSchema>>,
    /// Ids at which the version in force came again. If another version is put
    /// before one, it is a change after all.
    echoes: BTreeSet<SnapshotId>,
}

impl Table {
    /// How many versions have an id up to this one.
    fn up_to(&self, id: SnapshotId) -> usize {
        self.versions.partition_point(|version| version.snapshot <= id)
    }

    fn insert(&mut self, schema: Arc<TableSchema>) {
        let index = self.up_to(schema.snapshot);
        self.versions.insert(index, schema);
    }

    fn remember_echo(&mut self, id: SnapshotId) {
        self.echoes.insert(id);
        if self.echoes.len() > MAX_ECHOES {
            self.echoes.pop_first();
        }
    }

    /// After a version was put at `index`: where the one before it came again before
    /// the next entry, that is a version of its own now.
    fn revive(&mut self, index: usize) -> Option<Arc<TableSchema>> {
        let previous = Arc::clone(self.versions.get(index.checked_sub(1)?)?);
        let here = self.versions[index].snapshot;
        let next = self.versions.get(index + 1).map(|version| version.snapshot);
        let again = *self.echoes.range(here..).find(|id| **id > here)?;
        if next.is_some_and(|next| next < again) {
            return None;
        }
        self.echoes.remove(&again);
        let revived = Arc::new(TableSchema { snapshot: again, ..TableSchema::clone(&previous) });
        self.insert(Arc::clone(&revived));
        Some(revived)
    }
}

impl History {
    /// The history that a store held: each version is an entry, as it was when stored.
    pub fn from_stored(versions: impl IntoIterator<Item = TableSchema>) -> History {
        let mut history = History::default();
        for schema in versions {
            let table = history.tables.entry(schema.oid).or_default();
            if table.versions.binary_search_by_key(&schema.snapshot, |version| version.snapshot).is_err() {
                table.insert(Arc::new(schema));
            }
        }
        history
    }

    /// Adds a version in its place, which need not be the end: a copy's `(S, 0)` can
    /// come after messages that are newer.
    ///
    /// A version whose origin is the catalog keeps what a relation does not carry from
    /// the version before it, so store what [`History::get`] returns.
    pub fn append(&mut self, schema: TableSchema) -> Appended {
        let table = self.tables.entry(schema.oid).or_default();
        let index = table.up_to(schema.snapshot);
        let previous = index.checked_sub(1).map(|index| &table.versions[index]);
        let schema = match previous {
            Some(previous) if previous.snapshot == schema.snapshot => return Appended::Known,
            Some(previous) => carry_over(previous, schema),
            None => schema,
        };
        if previous.is_some_and(|previous| alike(previous, &schema)) {
            table.remember_echo(schema.snapshot);
            return Appended::Known;
        }
        table.versions.insert(index, Arc::new(schema));
        let revived = table.revive(index);
        self.revived.extend(revived);
        Appended::New
    }

    /// Versions that equalled their predecessor when they were appended and do no
    /// longer, because one was put between: entries now, to be stored like others.
    pub fn take_revived(&mut self) -> Vec<Arc<TableSchema>> {
        std::mem::take(&mut self.revived)
    }

    /// The version that a row belongs to, by the LSN of its commit record and its own
    /// WAL position (P2).
    ///
    /// It is the newest that is of the row's own transaction and not behind the row,
    /// or of a transaction that had committed before the row was written, or was read
    /// by a copy that the row is not part of (P14): while a row's transaction is open,
    /// its lock lets nothing that a copy could read change the columns. If the table
    /// was met later than that, its first version that is not behind the row's commit.
    pub fn in_force(&self, oid: u32, commit: Lsn, row: Lsn) -> Option<Arc<TableSchema>> {
        let table = self.tables.get(&oid)?;
        let end = table.up_to(SnapshotId { commit, message: row });
        let candidates = &table.versions[..end];
        let in_force = candidates.iter().rev().find(|version| {
            let id = version.snapshot;
            id.commit < row || id.commit == commit || id.message == Lsn::ZERO
        });
        in_force.or(candidates.last()).cloned()
    }

    /// The last version.
    pub fn newest(&self, oid: u32) -> Option<Arc<TableSchema>> {
        self.versions(oid).last().cloned()
    }

    /// The version with this id.
    pub fn get(&self, oid: u32, snapshot: SnapshotId) -> Option<Arc<TableSchema>> {
        let versions = self.versions(oid);
        let index = versions.binary_search_by_key(&snapshot, |version| version.snapshot).ok()?;
        Some(Arc::clone(&versions[index]))
    }

    /// All versions of a table, oldest first.
    pub fn versions(&self, oid: u32) -> &[Arc<TableSchema>] {
        self.tables.get(&oid).map_or(&[], |table| &table.versions)
    }

    /// The newest version, from the one in force backwards, whose published columns
    /// are a RELATION's: by name and type, position by position. None is `ambiguous`:
    /// its rows must be held, not guessed (P5).
    pub fn matching(
        &self,
        oid: u32,
        relation: &[RelationColumn<'_>],
        in_force: SnapshotId,
    ) -> Option<Arc<TableSchema>> {
        let table = self.tables.get(&oid)?;
        let versions = &table.versions[..table.up_to(in_force)];
        versions.iter().rev().find(|version| matches(version, relation)).cloned()
    }
}

fn matches(schema: &TableSchema, relation: &[RelationColumn<'_>]) -> bool {
    schema.columns.len() == relation.len()
        && schema
            .columns
            .iter()
            .zip(relation)
            .all(|(column, other)| column.name == other.name && column.type_oid == other.type_oid)
}

/// Whether two versions differ in nothing but their id and where they were learnt.
fn alike(one: &TableSchema, other: &TableSchema) -> bool {
    one.name == other.name && one.replica_identity == other.replica_identity && one.columns == other.columns
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::samples::{at, column, table};
    use crate::schema::table::{Column, Literal, Origin};

    fn a() -> TableSchema {
        table(vec![column(1, "a", "int4")])
    }

    fn b() -> TableSchema {
        table(vec![column(1, "b", "int4")])
    }

    fn ids(history: &History) -> Vec<String> {
        history.versions(7).iter().map(|version| version.snapshot.to_string()).collect()
    }

    fn at_row(history: &History, commit: u64, row: u64) -> String {
        history.in_force(7, Lsn(commit), Lsn(row)).map_or_else(String::new, |version| version.snapshot.to_string())
    }

    #[test]
    fn a_version_that_comes_again_changes_nothing() {
        let mut history = History::default();
        assert_eq!(history.append(at(&a(), 10, 5)), Appended::New);
        assert_eq!(history.append(at(&b(), 20, 15)), Appended::New);
        assert_eq!(history.append(at(&a(), 10, 5)), Appended::Known);
        assert_eq!(history.append(at(&b(), 20, 15)), Appended::Known);
        assert_eq!(history.append(at(&a(), 20, 15)), Appended::Known);
        assert_eq!(ids(&history), ["10:5", "20:15"]);
        assert_eq!(history.newest(7).unwrap().columns, b().columns);
    }

    #[test]
    fn there_and_back_again_is_three_versions() {
        let mut history = History::default();
        for (schema, commit) in [(a(), 10), (b(), 20), (a(), 30)] {
            assert_eq!(history.append(at(&schema, commit, commit - 5)), Appended::New);
        }
        assert_eq!(ids(&history), ["10:5", "20:15", "30:25"]);
    }

    #[test]
    fn a_copy_that_finds_what_is_known_is_no_version() {
        let mut history = History::default();
        history.append(at(&a(), 10, 5));
        assert_eq!(history.append(at(&a(), 20, 0)), Appended::Known);
        assert_eq!(ids(&history), ["10:5"]);
    }

    #[test]
    fn a_copy_that_comes_late_takes_its_place_in_order() {
        let mut history = History::default();
        history.append(at(&b(), 30, 25));
        assert_eq!(history.append(at(&a(), 20, 0)), Appended::New);
        assert_eq!(ids(&history), ["20:0", "30:25"]);
        assert_eq!(at_row(&history, 25, 24), "20:0");
        assert_eq!(at_row(&history, 40, 35), "30:25");
    }

    #[test]
    fn a_version_put_between_makes_what_equalled_its_predecessor_a_version() {
        let mut history = History::default();
        history.append(at(&a(), 10, 5));
        assert_eq!(history.append(at(&a(), 30, 25)), Appended::Known);
        assert_eq!(history.append(at(&a(), 35, 32)), Appended::Known);
        assert_eq!(history.append(at(&b(), 20, 0)), Appended::New);
        assert_eq!(ids(&history), ["10:5", "20:0", "30:25"]);
        assert_eq!(history.newest(7).unwrap().columns, a().columns);
        let revived = history.take_revived();
        assert_eq!(revived, [history.get(7, "30:25".parse().unwrap()).unwrap()]);
        assert!(history.take_revived().is_empty());
    }

    #[test]
    fn a_row_belongs_to_the_newest_version_committed_before_it_was_written() {
        let mut history = History::default();
        for (schema, commit, message) in [(a(), 100, 0), (b(), 200, 190), (a(), 300, 280), (b(), 300, 290)] {
            history.append(at(&schema, commit, message));
        }
        assert_eq!(at_row(&history, 150, 140), "100:0");
        // Its own transaction's messages count up to the row.
        assert_eq!(at_row(&history, 300, 270), "200:190");
        assert_eq!(at_row(&history, 300, 280), "300:280");
        assert_eq!(at_row(&history, 300, 289), "300:280");
        assert_eq!(at_row(&history, 300, 295), "300:290");
        assert_eq!(at_row(&history, 400, 390), "300:290");
        // Written before another transaction's message committed, committed after it.
        assert_eq!(at_row(&history, 250, 195), "100:0");
        assert_eq!(at_row(&history, 250, 201), "200:190");
        assert_eq!(at_row(&history, 50, 40), "");
        assert_eq!(history.in_force(8, Lsn(1), Lsn(1)), None);
    }

    #[test]
    fn a_row_written_before_a_copy_and_committed_after_it_belongs_to_what_the_copy_read() {
        let mut history = History::default();
        history.append(at(&a(), 100, 0));
        assert_eq!(at_row(&history, 110, 90), "100:0");
        history.append(at(&b(), 200, 0));
        assert_eq!(at_row(&history, 210, 190), "200:0");
        assert_eq!(at_row(&history, 200, 190), "200:0");
        assert_eq!(at_row(&history, 199, 190), "100:0");
    }

    #[test]
    fn a_row_older_than_every_message_takes_the_first_version_before_its_commit() {
        let mut history = History::default();
        history.append(at(&a(), 100, 95));
        assert_eq!(at_row(&history, 110, 90), "100:95");
    }

    #[test]
    fn a_relation_finds_the_newest_version_it_fits_that_is_in_force_or_older() {
        let mut history = History::default();
        let wide = table(vec![column(1, "a", "int4"), column(2, "b", "text")]);
        for (schema, commit) in [(a(), 100), (wide.clone(), 200), (a(), 300), (wide, 400)] {
            history.append(at(&schema, commit, commit - 1));
        }
        let narrow = [RelationColumn { name: "a", type_oid: 23 }];
        let found = |relation: &[RelationColumn<'_>], id: &str| {
            history.matching(7, relation, id.parse().unwrap()).map(|version| version.snapshot.to_string())
        };
        assert_eq!(found(&narrow, "400:399").as_deref(), Some("300:299"));
        assert_eq!(found(&narrow, "200:199").as_deref(), Some("100:99"));
        let both = [narrow[0], RelationColumn { name: "b", type_oid: 25 }];
        assert_eq!(found(&both, "300:299").as_deref(), Some("200:199"));
        assert_eq!(found(&both, "100:99"), None);
        assert_eq!(found(&[RelationColumn { name: "a", type_oid: 20 }], "400:399"), None);
        assert_eq!(found(&[both[1], both[0]], "400:399"), None);
    }

    #[test]
    fn a_relation_does_not_make_a_version_by_what_it_does_not_carry() {
        let mut history = History::default();
        let literal = Literal { kind: "numeric".to_owned(), text: "1".to_owned() };
        let known = Column {
            nullable: false,
            default_expression: Some("1".to_owned()),
            default_literal: Some(literal),
            ..column(1, "a", "int4")
        };
        history.append(at(&table(vec![known]), 100, 99));
        let relation = TableSchema { origin: Origin::Catalog, ..at(&a(), 200, 199) };
        assert_eq!(history.append(relation), Appended::Known);
    }

    #[test]
    fn what_was_stored_is_loaded_as_it_was() {
        let stored = [at(&a(), 30, 0), at(&a(), 10, 5), at(&b(), 20, 15), at(&b(), 25, 24)];
        let history = History::from_stored(stored);
        assert_eq!(ids(&history), ["10:5", "20:15", "25:24", "30:0"]);
    }
}
