//! A batch in the one shape that both formats are written from.

use std::collections::BTreeMap;

use serde_json::{Map, Value};
use tidegate_sdk::model::{ChangeRows, Content, CopyRows, Failure, Position, Rows, Sequence, Truncation};
use tidegate_sdk::prelude::*;
use tidegate_sdk::rows::ColumnView;

use crate::physical::Layout;

/// What our own columns say of each row, and the rows.
pub(crate) struct Changes {
    pub ops: Ops,
    pub epoch: u32,
    pub commit: Vec<u64>,
    pub ordinal: Vec<u64>,
    /// Commit times and transaction ids; rows of a copy have none.
    pub origin: Option<(Vec<i64>, Vec<u32>)>,
    pub rows: Rows,
    /// Row to JSON object: the old key, where it differs.
    pub old_keys: BTreeMap<usize, String>,
}

/// What was done to each row.
pub(crate) enum Ops {
    /// To all the same: copy or truncate.
    All(&'static str),
    /// As in the contract: 0 insert, 1 update, 2 delete.
    Each(Vec<u8>),
}

impl Ops {
    pub(crate) fn of(&self, row: usize) -> &'static str {
        match self {
            Ops::All(name) => name,
            Ops::Each(ops) => match ops[row] {
                0 => "insert",
                1 => "update",
                _ => "delete",
            },
        }
    }
}

impl Changes {
    /// Takes a batch apart. Fails for content this plugin did not ask for.
    pub(crate) fn new(content: Content, layout: &Layout) -> Result<Changes, Failure> {
        match content {
            Content::Copy(copy) => Ok(Changes::of_copy(copy)),
            Content::Changes(changes) => Ok(Changes::of_changes(changes, layout)),
            Content::Truncate(truncation) => Ok(Changes::of_truncation(truncation)),
            Content::Merge(_) | Content::Messages(_) => {
                let message = "the plugin `files` takes changes and copies, neither merged rows nor messages";
                Err(Failure::permanent("unsupported", message))
            }
        }
    }

    fn of_copy(copy: CopyRows) -> Changes {
        let count = copy.rows.len();
        Changes {
            ops: Ops::All("copy"),
            epoch: copy.as_of.epoch,
            commit: vec![copy.as_of.commit; count],
            ordinal: vec![copy.as_of.ordinal; count],
            origin: None,
            rows: copy.rows,
            old_keys: BTreeMap::new(),
        }
    }

    fn of_changes(changes: ChangeRows, layout: &Layout) -> Changes {
        let old_keys = old_keys(&changes, layout);
        let Sequence { epoch, commit, ordinal, committed_at, xid } = changes.sequence;
        let ops = Ops::Each(changes.ops);
        Changes { ops, epoch, commit, ordinal, origin: Some((committed_at, xid)), rows: changes.rows, old_keys }
    }

    fn of_truncation(truncation: Truncation) -> Changes {
        let Sequence { epoch, commit, ordinal, committed_at, xid } = truncation.sequence;
        Changes {
            ops: Ops::All("truncate"),
            epoch,
            rows: Rows { count: commit.len() as u32, columns: Vec::new() },
            commit,
            ordinal,
            origin: Some((committed_at, xid)),
            old_keys: BTreeMap::new(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.commit.len()
    }

    /// Position of a row.
    pub(crate) fn position(&self, row: usize) -> Position {
        Position { epoch: self.epoch, commit: self.commit[row], ordinal: self.ordinal[row] }
    }

    /// Whether cells that were not sent are worth a word: of a truncation none are.
    pub(crate) fn lists_missing(&self) -> bool {
        !matches!(self.ops, Ops::All("truncate"))
    }

    /// Checks that every list has one item for each row, so that nothing below has to.
    pub(crate) fn check(&self) -> Result<(), String> {
        let count = self.rows.len();
        let ops = match &self.ops {
            Ops::All(_) => count,
            Ops::Each(ops) => ops.len(),
        };
        let (times, xids) = self.origin.as_ref().map_or((count, count), |(times, xids)| (times.len(), xids.len()));
        let lengths = [ops, self.commit.len(), self.ordinal.len(), times, xids];
        if lengths.iter().any(|&length| length != count) {
            return Err(format!("a batch of {count} rows has operations and positions for {lengths:?}"));
        }
        Ok(())
    }
}

/// For each update with an old row: the columns that named the row before, if they
/// differ from what they are now. Without a key the whole old row names it.
fn old_keys(changes: &ChangeRows, layout: &Layout) -> BTreeMap<usize, String> {
    if changes.old_index.is_empty() {
        return BTreeMap::new();
    }
    let table = &layout.table;
    let keyless = table.key.is_empty();
    let named: Vec<_> = table.columns.iter().filter(|column| keyless || table.key.contains(&column.ordinal)).collect();
    let views: Vec<(ColumnView<'_>, ColumnView<'_>)> = named
        .iter()
        .map(|column| (changes.old_rows.column(column.ordinal), changes.rows.column(column.ordinal)))
        .collect();
    let mut found = BTreeMap::new();
    for (old, &new) in changes.old_index.iter().enumerate() {
        let new = new as usize;
        if !keyless && views.iter().all(|(before, after)| before.cell(old) == after.cell(new)) {
            continue;
        }
        let mut key = Map::new();
        for (column, (before, _)) in named.iter().zip(&views) {
            let cell = before.cell(old);
            let mut text = String::new();
            if cell.write_as(column, &mut text) {
                key.insert(column.name.clone(), Value::String(text));
            } else if cell == Cell::Null {
                key.insert(column.name.clone(), Value::Null);
            }
        }
        found.insert(new, Value::Object(key).to_string());
    }
    found
}
