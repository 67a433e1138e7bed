//! Every version of every table's schema, and which one a row belongs to.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::change::carry_over;
use super::moment::Moment;
use super::table::TableSchema;
use super::tombstone::Tombstone;
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
    /// Ids at which the version in force came again, and when. If another version is put
    /// before one, it is a change after all.
    echoes: BTreeMap<SnapshotId, Option<Moment>>,
    /// Where it ended, by snapshot id. One that was only taken out of the publication can
    /// go on behind it.
    ended: Vec<Tombstone>,
}

/// What a table's history consists of.
#[derive(Clone, Debug, PartialEq)]
pub enum Entry {
    /// A version begins.
    Version(Arc<TableSchema>),
    /// The table is gone, or not published any more.
    Ended(Tombstone),
}

impl Entry {
    /// Where it stands.
    pub fn snapshot(&self) -> SnapshotId {
        match self {
            Entry::Version(schema) => schema.snapshot,
            Entry::Ended(tombstone) => tombstone.snapshot,
        }
    }

    /// When that was at the source, if it is known.
    pub fn at(&self) -> Option<Moment> {
        match self {
            Entry::Version(schema) => schema.committed_at,
            Entry::Ended(tombstone) => tombstone.at,
        }
    }
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

    fn remember_echo(&mut self, id: SnapshotId, at: Option<Moment>) {
        self.echoes.insert(id, at);
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
        let (again, at) = self.echoes.range(here..).find(|(id, _)| **id > here).map(|(id, at)| (*id, *at))?;
        if next.is_some_and(|next| next < again) {
            return None;
        }
        self.echoes.remove(&again);
        let revived = TableSchema { snapshot: again, committed_at: at, ..TableSchema::clone(&previous) };
        let revived = Arc::new(revived);
        self.insert(Arc::clone(&revived));
        Some(revived)
    }

    /// Whether the table ended between two places.
    fn ended_between(&self, from: SnapshotId, to: SnapshotId) -> bool {
        self.ended.iter().any(|tombstone| tombstone.snapshot > from && tombstone.snapshot <= to)
    }

    /// Where it ended, if no version came behind that.
    fn ended_at(&self) -> Option<SnapshotId> {
        let last = self.ended.last()?.snapshot;
        self.versions.last().is_none_or(|version| version.snapshot < last).then_some(last)
    }

    /// Versions and ends, in order.
    fn entries(&self) -> Vec<Entry> {
        let versions = self.versions.iter().cloned().map(Entry::Version);
        let mut entries: Vec<Entry> = versions.chain(self.ended.iter().cloned().map(Entry::Ended)).collect();
        entries.sort_by_key(Entry::snapshot);
        entries
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

    /// The same with where tables ended.
    pub fn with_ended(mut self, tombstones: impl IntoIterator<Item = Tombstone>) -> History {
        for tombstone in tombstones {
            let ended = &mut self.tables.entry(tombstone.oid).or_default().ended;
            ended.push(tombstone);
            ended.sort_by_key(|tombstone| tombstone.snapshot);
        }
        self
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
        // Behind its end an equal version is one of its own: the table is there again.
        let goes_on = previous.filter(|previous| !table.ended_between(previous.snapshot, schema.snapshot));
        if goes_on.is_some_and(|previous| alike(previous, &schema)) {
            table.remember_echo(schema.snapshot, schema.committed_at);
            return Appended::Known;
        }
        table.versions.insert(index, Arc::new(schema));
        let revived = table.revive(index);
        self.revived.extend(revived);
        Appended::New
    }

    /// Adds the end of a table, unless it is known to have ended there: by this tombstone,
    /// or by another with no version between, for an end can be told by a message and seen
    /// in the catalog as well.
    pub fn append_end(&mut self, tombstone: Tombstone) -> Appended {
        let table = self.tables.entry(tombstone.oid).or_default();
        let here = tombstone.snapshot;
        let lives = |version: &&Arc<TableSchema>| version.snapshot < here;
        let last = table.versions.iter().rev().find(lives).map(|version| version.snapshot);
        let next = table.versions.iter().map(|version| version.snapshot).find(|id| *id >= here);
        let same = |known: &Tombstone| {
            last.is_none_or(|last| known.snapshot > last) && next.is_none_or(|next| known.snapshot < next)
        };
        if table.ended.iter().any(same) {
            return Appended::Known;
        }
        let index = table.ended.partition_point(|known| known.snapshot <= here);
        table.ended.insert(index, tombstone);
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

    /// Versions and ends of a table, oldest first.
    pub fn entries(&self, oid: u32) -> Vec<Entry> {
        self.tables.get(&oid).map(Table::entries).unwrap_or_default()
    }

    /// What the history says of a table for rows committed at this LSN.
    pub fn at_lsn(&self, oid: u32, commit: Lsn) -> Option<Entry> {
        self.entries(oid).into_iter().rev().find(|entry| entry.snapshot().commit <= commit)
    }

    /// What the history says of a table at a moment, by the source's clock: the last entry
    /// that was committed by then. Entries of before times were kept are older than all
    /// that have one.
    ///
    /// Commits that are a moment apart may have their times in the other order: the later
    /// commit counts.
    pub fn at_time(&self, oid: u32, moment: Moment) -> Option<Entry> {
        self.entries(oid).into_iter().rev().find(|entry| entry.at().is_none_or(|at| at <= moment))
    }

    /// Tables whose history has not ended.
    pub fn living(&self) -> Vec<u32> {
        let lives = |table: &Table| !table.versions.is_empty() && table.ended_at().is_none();
        self.tables.iter().filter(|(_, table)| lives(table)).map(|(oid, _)| *oid).collect()
    }

    /// Tables that have more than `keep` versions or ends.
    pub fn longer_than(&self, keep: usize) -> Vec<u32> {
        let long = |table: &Table| table.versions.len() > keep || table.ended.len() > keep;
        self.tables.iter().filter(|(_, table)| long(table)).map(|(oid, _)| *oid).collect()
    }

    /// Tables that have ended for good as far as is known, with where, the first to end first.
    pub fn ended(&self) -> Vec<(SnapshotId, u32)> {
        let ended = self.tables.iter().filter_map(|(oid, table)| Some((table.ended_at()?, *oid)));
        let mut all: Vec<_> = ended.collect();
        all.sort_unstable();
        all
    }

    /// The oldest versions beyond the last `keep` that no row can need any more, given that
    /// every row that is still to come was written at or behind `rows_from`, and that no
    /// destination is at a version before `applied` and still on its way.
    ///
    /// A version is needed until its successor was committed before every such row (P2), and
    /// by a plan that begins at it or has it on its way (P28).
    pub fn removable(&self, oid: u32, keep: usize, rows_from: Lsn, applied: Option<SnapshotId>) -> Vec<SnapshotId> {
        let versions = self.versions(oid);
        let beyond = versions.len().saturating_sub(keep.max(1));
        let passed = |next: &SnapshotId| next.commit < rows_from && applied.is_none_or(|applied| *next <= applied);
        let pairs = versions.windows(2).take(beyond).map(|pair| (pair[0].snapshot, pair[1].snapshot));
        pairs.take_while(|(_, next)| passed(next)).map(|(id, _)| id).collect()
    }

    /// Forgets versions of a table, and ends of it before the first that is left.
    pub fn remove(&mut self, oid: u32, versions: &[SnapshotId]) {
        let Some(table) = self.tables.get_mut(&oid) else { return };
        table.versions.retain(|version| !versions.contains(&version.snapshot));
        if let Some(first) = table.versions.first().map(|version| version.snapshot) {
            table.ended.retain(|tombstone| tombstone.snapshot > first);
            table.echoes.retain(|id, _| *id > first);
        }
    }

    /// Forgets a table.
    pub fn forget(&mut self, oid: u32) {
        self.tables.remove(&oid);
    }

    /// The newest version, from the one in force backwards, that a RELATION fits. None is
    /// `ambiguous`: its rows must be held, not guessed (P5).
    pub fn matching(
        &self,
        oid: u32,
        in_force: SnapshotId,
        fits: impl Fn(&TableSchema) -> bool,
    ) -> Option<Arc<TableSchema>> {
        let table = self.tables.get(&oid)?;
        let versions = &table.versions[..table.up_to(in_force)];
        versions.iter().rev().find(|version| fits(version)).cloned()
    }
}

/// Whether the published columns are a RELATION's: by name and type, position by
/// position.
pub fn looks_like(schema: &TableSchema, relation: &[RelationColumn<'_>]) -> bool {
    schema.columns.len() == relation.len()
        && schema
            .columns
            .iter()
            .zip(relation)
            .all(|(column, other)| column.name == other.name && column.type_oid == other.type_oid)
}

/// Whether two versions differ in nothing but their id and where they were learnt, and
/// nothing happened between them that a copy would have to make up for.
fn alike(one: &TableSchema, other: &TableSchema) -> bool {
    one.name == other.name
        && one.replica_identity == other.replica_identity
        && one.columns == other.columns
        && (one.highest, one.listed) == (other.highest, other.listed)
        && !other.rewritten
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::samples::{at, column, table};
    use crate::schema::table::{Column, Literal, Origin};
    use crate::schema::tombstone::Ended;

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
    fn rows_that_were_rewritten_make_a_version_of_equal_columns_and_a_copy_after_it_none() {
        let mut history = History::default();
        history.append(at(&a(), 10, 5));
        let rewritten = TableSchema { rewritten: true, ..at(&a(), 20, 15) };
        assert_eq!(history.append(rewritten.clone()), Appended::New);
        assert_eq!(history.append(rewritten), Appended::Known);
        assert_eq!(history.append(at(&a(), 30, 0)), Appended::Known);
        assert_eq!(ids(&history), ["10:5", "20:15"]);
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
            let fits = |version: &TableSchema| looks_like(version, relation);
            history.matching(7, id.parse().unwrap(), fits).map(|version| version.snapshot.to_string())
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

    fn dated(schema: TableSchema, at: i64) -> TableSchema {
        TableSchema { committed_at: Some(Moment(at)), ..schema }
    }

    fn end(commit: u64, message: u64, why: Ended) -> Tombstone {
        let snapshot = SnapshotId { commit: Lsn(commit), message: Lsn(message) };
        Tombstone { oid: 7, name: a().name, snapshot, why, at: Some(Moment(commit as i64 * 10)) }
    }

    fn shown(entry: Option<Entry>) -> String {
        match entry {
            None => "none".to_owned(),
            Some(Entry::Version(version)) => version.snapshot.to_string(),
            Some(Entry::Ended(tombstone)) => format!("{} {}", tombstone.why.as_str(), tombstone.snapshot),
        }
    }

    #[test]
    fn a_moment_finds_the_version_that_was_the_newest_then() {
        let mut history = History::default();
        for (schema, commit) in [(a(), 10), (b(), 20), (a(), 30)] {
            history.append(dated(at(&schema, commit, commit - 1), commit as i64 * 10));
        }
        let found = |moment: i64| shown(history.at_time(7, Moment(moment)));
        assert_eq!(
            [found(99), found(100), found(199), found(200), found(i64::MAX)],
            ["none", "10:9", "10:9", "20:19", "30:29"]
        );
        assert_eq!(shown(history.at_lsn(7, Lsn(19))), "10:9");
        assert_eq!(shown(history.at_lsn(7, Lsn(20))), "20:19");
        assert_eq!(shown(history.at_time(8, Moment(0))), "none");
    }

    #[test]
    fn of_two_commits_whose_times_are_in_the_other_order_the_later_one_counts() {
        let mut history = History::default();
        history.append(dated(at(&a(), 10, 9), 105));
        history.append(dated(at(&b(), 11, 10), 104));
        assert_eq!(shown(history.at_time(7, Moment(104))), "11:10");
        assert_eq!(shown(history.at_time(7, Moment(200))), "11:10");
    }

    #[test]
    fn versions_of_before_times_were_kept_are_older_than_all_that_have_one() {
        let mut history = History::from_stored([at(&a(), 10, 9), at(&b(), 20, 19)]);
        history.append(dated(at(&a(), 30, 29), 300));
        assert_eq!(shown(history.at_time(7, Moment(299))), "20:19");
        assert_eq!(shown(history.at_time(7, Moment(300))), "30:29");
    }

    #[test]
    fn a_version_that_is_one_after_all_has_the_time_at_which_it_came_again() {
        let mut history = History::default();
        history.append(dated(at(&a(), 10, 5), 100));
        history.append(dated(at(&a(), 30, 25), 300));
        history.append(dated(at(&b(), 20, 0), 200));
        assert_eq!(history.get(7, "30:25".parse().unwrap()).unwrap().committed_at, Some(Moment(300)));
    }

    #[test]
    fn a_table_that_is_gone_leaves_a_tombstone_and_the_same_end_leaves_one() {
        let mut history = History::default();
        history.append(dated(at(&a(), 10, 5), 100));
        assert_eq!(history.append_end(end(20, 15, Ended::Dropped)), Appended::New);
        // By its message again, and as the next look at the catalog finds it.
        assert_eq!(history.append_end(end(20, 15, Ended::Dropped)), Appended::Known);
        assert_eq!(history.append_end(end(25, 0, Ended::Dropped)), Appended::Known);
        assert_eq!(history.append_end(end(18, 0, Ended::Dropped)), Appended::Known);
        assert_eq!(shown(history.at_lsn(7, Lsn(30))), "dropped 20:15");
        assert_eq!(shown(history.at_time(7, Moment(199))), "10:5");
        assert_eq!(history.ended(), [(SnapshotId { commit: Lsn(20), message: Lsn(15) }, 7)]);
        // Rows of before the end still find their version.
        assert_eq!(at_row(&history, 19, 18), "10:5");
        let loaded = History::from_stored([at(&a(), 10, 5)]).with_ended([end(20, 15, Ended::Dropped)]);
        assert_eq!(shown(loaded.at_lsn(7, Lsn(30))), "dropped 20:15");
    }

    #[test]
    fn a_table_that_comes_back_into_the_publication_has_a_version_behind_its_tombstone() {
        let mut history = History::default();
        history.append(at(&a(), 10, 5));
        history.append_end(end(20, 0, Ended::Unpublished));
        assert_eq!(history.append(at(&a(), 30, 0)), Appended::New);
        assert_eq!(history.append_end(end(20, 0, Ended::Unpublished)), Appended::Known);
        assert_eq!(history.ended(), []);
        assert_eq!(history.append_end(end(40, 0, Ended::Unpublished)), Appended::New);
        let entries: Vec<String> = history.entries(7).into_iter().map(|entry| shown(Some(entry))).collect();
        assert_eq!(entries, ["10:5", "unpublished 20:0", "30:0", "unpublished 40:0"]);
    }

    #[test]
    fn old_versions_go_when_no_row_to_come_and_no_destination_needs_them() {
        let mut history = History::default();
        for commit in 1..=6_u64 {
            let schema = if commit % 2 == 0 { a() } else { b() };
            history.append(at(&schema, commit * 100, commit * 100 - 1));
        }
        let removable = |keep: usize, rows_from: u64, applied: Option<&str>| {
            let applied = applied.map(|id| id.parse().unwrap());
            let ids = history.removable(7, keep, Lsn(rows_from), applied);
            ids.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(removable(2, 1000, None), ["100:99", "200:199", "300:299", "400:399"]);
        assert_eq!(removable(4, 1000, None), ["100:99", "200:199"]);
        assert_eq!(removable(6, 1000, None), [] as [&str; 0]);
        assert_eq!(removable(0, 1000, None).len(), 5, "the newest stays");
        // A row written at 300 may be of a transaction that had not seen the commit there.
        assert_eq!(removable(2, 300, None), ["100:99"]);
        assert_eq!(removable(2, 301, None), ["100:99", "200:199"]);
        // A plan from the applied version on looks at all that came with it and behind it.
        assert_eq!(removable(2, 1000, Some("200:199")), ["100:99"]);
        assert_eq!(removable(2, 1000, Some("100:99")), [] as [&str; 0]);
        history.append_end(end(150, 0, Ended::Unpublished));
        history.remove(7, &["100:99".parse().unwrap(), "200:199".parse().unwrap()]);
        assert_eq!(ids(&history)[0], "300:299");
        assert_eq!(history.entries(7).len(), 4, "an end before the first version is no part of the history");
        assert_eq!((history.longer_than(3), history.longer_than(4)), (vec![7], vec![]));
    }

    #[test]
    fn what_was_stored_is_loaded_as_it_was() {
        let stored = [at(&a(), 30, 0), at(&a(), 10, 5), at(&b(), 20, 15), at(&b(), 25, 24)];
        let history = History::from_stored(stored);
        assert_eq!(ids(&history), ["10:5", "20:15", "25:24", "30:0"]);
    }
}
