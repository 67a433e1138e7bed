//! What a change means to a table whose ranges were copied in several snapshots: a range
//! has every change below its own floor (P19).

use crate::copy::KeyRanges;
use crate::error::Result;
use crate::position::Lsn;
use crate::source::pgoutput::{Cell, Message, OldTuple, Relation, Tuple};
use crate::store::CopyRecord;

/// Floors by range.
#[derive(Debug)]
pub(super) struct Floors {
    column: String,
    keys: KeyRanges,
    floors: Vec<Lsn>,
    /// From here on every change counts.
    pub most: Lsn,
}

/// What is left of a change.
#[derive(Debug, PartialEq)]
pub(super) enum Left {
    /// All of it.
    All,
    /// Nothing: the copy has it.
    Nothing,
    /// This instead.
    Instead(Message),
    /// What is left cannot be told from it, and why: only another copy makes it right.
    Unknown(&'static str),
}

impl Floors {
    /// Of a copy all of whose ranges are done; `most`: the largest floor.
    pub fn new(copy: &CopyRecord, most: Lsn) -> Floors {
        let floors = copy.ranges.iter().map(|range| range.floor.unwrap_or(most)).collect();
        Floors { column: copy.column.clone(), keys: copy.keys.clone(), floors, most }
    }

    /// What is left of a change of the transaction that commits at `commit`, whose tuples
    /// are as `relation` says.
    ///
    /// # Errors
    /// `source.protocol`: a tuple is malformed.
    pub fn left(&self, commit: Lsn, relation: &Relation, message: &Message) -> Result<Left> {
        if commit >= self.most {
            return Ok(Left::All);
        }
        let Some(index) = column_at(relation, &self.column) else {
            return Ok(Left::Unknown("the column of its ranges has another name"));
        };
        let counts = |tuple: &Tuple| -> Result<Option<bool>> {
            let floor = range_of(&self.keys, tuple, index)?.and_then(|range| self.floors.get(range));
            Ok(floor.map(|floor| commit >= *floor))
        };
        let whole = |counts: Option<bool>| match counts {
            Some(true) => Left::All,
            Some(false) => Left::Nothing,
            None => Left::Unknown("a change has no key"),
        };
        Ok(match message {
            Message::Insert { new, .. } | Message::Update { old: None, new, .. } => whole(counts(new)?),
            Message::Delete { old, .. } => whole(counts(&old.tuple)?),
            Message::Update { oid, old: Some(old), new } => {
                // An unchanged key may be missing in either.
                let (from, to) = (counts(&old.tuple)?, counts(new)?);
                match (from.or(to), to.or(from)) {
                    (Some(true), Some(false)) => Left::Instead(Message::Delete { oid: *oid, old: old.clone() }),
                    (Some(false), Some(true)) => arrived(*oid, old, new)?,
                    (from, _) => whole(from),
                }
            }
            Message::Truncate { .. } => Left::Unknown("the table was truncated between its copies"),
            _ => Left::All,
        })
    }
}

/// Where a relation has a column.
pub(super) fn column_at(relation: &Relation, name: &str) -> Option<usize> {
    relation.columns.iter().position(|column| column.name == name)
}

/// The range that a row is in by its column at `index`; none if that was not sent, or is no
/// value of the key.
pub(super) fn range_of(keys: &KeyRanges, tuple: &Tuple, index: usize) -> Result<Option<usize>> {
    match tuple.cells().nth(index).transpose()? {
        Some(Cell::Text(key)) => Ok(keys.of(key)),
        _ => Ok(None),
    }
}

/// A row that came from a range that has the change to one that has not: as if it were new.
fn arrived(oid: u32, old: &OldTuple, new: &Tuple) -> Result<Left> {
    let new = new.filled(old)?;
    for cell in new.cells() {
        if cell? == Cell::Unchanged {
            return Ok(Left::Unknown("a row moved to a range that was copied before, and not all of it was sent"));
        }
    }
    Ok(Left::Instead(Message::Insert { oid, new }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::copy::KeyType;
    use crate::position::SnapshotId;
    use crate::schema::table::TableName;
    use crate::source::pgoutput::RelationColumn;
    use crate::store::RangeRecord;

    /// Range 0 up to 100 has floor 30, range 1 has floor 10.
    fn floors() -> Floors {
        let range = |floor| RangeRecord { since: Some(Lsn(10)), floor: Some(Lsn(floor)), rows: 0, bytes: 0 };
        let copy = CopyRecord {
            destination: "d".to_owned(),
            oid: 7,
            run: "run".to_owned(),
            snapshot: SnapshotId::default(),
            origin: String::new(),
            column: "id".to_owned(),
            keys: KeyRanges::stored(KeyType::Integer, &["100".to_owned()]).unwrap(),
            ranges: vec![range(30), range(10)],
        };
        Floors::new(&copy, Lsn(30))
    }

    fn relation(columns: &[&str]) -> Relation {
        let column = |name: &&str| RelationColumn { key: true, name: (*name).to_owned(), type_oid: 25, typmod: -1 };
        Relation {
            oid: 7,
            name: TableName::new("public", "t"),
            identity: b'd',
            columns: columns.iter().map(column).collect(),
        }
    }

    fn tuple(cells: &[Cell<'_>]) -> Tuple {
        Tuple::of_cells(cells)
    }

    fn row(key: &str, value: Cell<'_>) -> Tuple {
        tuple(&[value, Cell::Text(key.as_bytes())])
    }

    const VALUE: Cell<'_> = Cell::Text(b"value");

    fn left(commit: u64, message: Message) -> Left {
        floors().left(Lsn(commit), &relation(&["v", "id"]), &message).unwrap()
    }

    fn insert(key: &str) -> Message {
        Message::Insert { oid: 7, new: row(key, VALUE) }
    }

    fn moved(from: &str, to: &str, whole: bool, value: Cell<'_>) -> Message {
        let old = OldTuple { whole, tuple: row(from, if whole { Cell::Text(b"before") } else { Cell::Null }) };
        Message::Update { oid: 7, old: Some(old), new: row(to, value) }
    }

    #[test]
    fn a_change_counts_from_the_floor_of_its_range_on() {
        assert_eq!((left(29, insert("100")), left(30, insert("100"))), (Left::Nothing, Left::All));
        assert_eq!((left(9, insert("101")), left(10, insert("101"))), (Left::Nothing, Left::All));
        let update = |key| Message::Update { oid: 7, old: None, new: row(key, Cell::Unchanged) };
        assert_eq!((left(20, update("1")), left(20, update("101"))), (Left::Nothing, Left::All));
        let delete = |key| Message::Delete { oid: 7, old: OldTuple { whole: false, tuple: row(key, Cell::Null) } };
        assert_eq!((left(20, delete("1")), left(20, delete("101"))), (Left::Nothing, Left::All));
    }

    #[test]
    fn a_move_within_what_counts_or_what_does_not_is_whole() {
        assert_eq!(left(20, moved("101", "102", false, Cell::Unchanged)), Left::All);
        assert_eq!(left(20, moved("1", "2", false, Cell::Unchanged)), Left::Nothing);
        assert_eq!(left(30, moved("1", "101", false, Cell::Unchanged)), Left::All);
    }

    #[test]
    fn a_move_out_of_what_counts_is_a_delete() {
        let old = OldTuple { whole: false, tuple: row("101", Cell::Null) };
        let expected = Left::Instead(Message::Delete { oid: 7, old });
        assert_eq!(left(20, moved("101", "1", false, Cell::Unchanged)), expected);
    }

    #[test]
    fn a_move_into_what_counts_is_a_new_row_as_far_as_all_of_it_is_known() {
        let new = |value| Left::Instead(Message::Insert { oid: 7, new: row("101", value) });
        assert_eq!(left(20, moved("1", "101", false, VALUE)), new(VALUE));
        assert_eq!(left(20, moved("1", "101", true, Cell::Unchanged)), new(Cell::Text(b"before")));
        assert!(matches!(left(20, moved("1", "101", false, Cell::Unchanged)), Left::Unknown(_)));
    }

    #[test]
    fn what_cannot_be_placed_is_not_guessed() {
        let truncate = Message::Truncate { oids: vec![7], cascade: false, restart_identity: false };
        assert!(matches!(left(20, truncate.clone()), Left::Unknown(_)));
        assert_eq!(left(30, truncate), Left::All);
        let other = floors().left(Lsn(20), &relation(&["v", "renamed"]), &insert("1")).unwrap();
        assert!(matches!(other, Left::Unknown(_)));
        assert!(matches!(left(20, insert("no number")), Left::Unknown(_)));
        let null = Message::Insert { oid: 7, new: tuple(&[VALUE, Cell::Null]) };
        assert!(matches!(left(20, null), Left::Unknown(_)));
    }

    #[test]
    fn a_key_that_was_not_sent_again_is_that_of_the_old_row() {
        let old = OldTuple { whole: true, tuple: row("101", VALUE) };
        let update = Message::Update { oid: 7, old: Some(old), new: tuple(&[VALUE, Cell::Unchanged]) };
        assert_eq!(left(20, update), Left::All);
    }
}
