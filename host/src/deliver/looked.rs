//! What is at a destination after a change that was cut off, beside what its table would
//! be before the step under way and after it (P27).

use crate::plugin::{Called, Instance, same_columns};
use crate::position::SnapshotId;
use crate::schema::change::SchemaChange;
use crate::store::TableError;
use crate::wire;

use super::sending::RESYNC;

/// A look at a table, wherever the step may have left it.
pub(super) struct Looked {
    /// What is where the table goes after the step.
    there: Option<wire::PhysicalTable>,
    /// What is where it was, if the step takes it elsewhere.
    left: Option<wire::PhysicalTable>,
    before: wire::PhysicalTable,
    after: wire::PhysicalTable,
}

impl Looked {
    /// Asks the plugin about the states before a step and after it.
    pub async fn at(instance: &mut Instance, before: &wire::Table, after: &wire::Table) -> Called<Looked> {
        let there = instance.inspect_table(after).await?;
        let (rendered_before, rendered_after) =
            (instance.render_table(before).await?, instance.render_table(after).await?);
        let left = match rendered_before.path == rendered_after.path {
            true => None,
            false => instance.inspect_table(before).await?,
        };
        Ok(Looked { there, left, before: rendered_before, after: rendered_after })
    }

    /// Whether the destination itself says that it has this version.
    pub fn has_version(&self, version: &SnapshotId) -> bool {
        let stored = self.there.as_ref().and_then(|there| there.snapshot.as_ref());
        stored.is_some_and(|stored| stored.commit == version.commit.0 && stored.message == version.message.0)
    }

    /// Whether the step is done; none if the table is like neither. `has_version`: the
    /// destination says so itself. A step whose effect cannot be seen is done again.
    pub fn is_done(&self, has_version: bool) -> Option<bool> {
        let is = |there: &Option<wire::PhysicalTable>, wanted: &wire::PhysicalTable| {
            there.as_ref().is_some_and(|there| same_columns(there, wanted))
        };
        if has_version {
            return Some(true);
        }
        if self.before.path != self.after.path {
            // While it is where it was, whatever is at the other place is somebody else's.
            return match (&self.left, &self.there) {
                (Some(_), _) => is(&self.left, &self.before).then_some(false),
                (None, _) => is(&self.there, &self.after).then_some(true),
            };
        }
        match (is(&self.there, &self.before), is(&self.there, &self.after)) {
            (true, _) => Some(false),
            (false, true) => Some(true),
            (false, false) => None,
        }
    }

    /// What is there, for a person.
    fn found(&self) -> Option<&wire::PhysicalTable> {
        self.left.as_ref().or(self.there.as_ref())
    }
}

/// Why it is not known how an interrupted change goes on, with the lists side by side.
pub(super) fn fits_neither(change: &SchemaChange, last: Option<Looked>) -> TableError {
    let list = |table: &wire::PhysicalTable| {
        let columns: Vec<String> =
            table.columns.iter().map(|column| format!("{} {}", column.name, column.type_name)).collect();
        columns.join(", ")
    };
    let message = match &last {
        Some(looked) => match looked.found() {
            Some(there) => format!(
                "after an interrupted change from {} to {} the table is ({}), neither ({}) nor ({})",
                change.before.snapshot,
                change.after.snapshot,
                list(there),
                list(&looked.before),
                list(&looked.after)
            ),
            None => "after an interrupted change the table does not exist at the destination".to_owned(),
        },
        None => "after an interrupted change the table could not be inspected".to_owned(),
    };
    TableError { code: "schema.fits-neither".to_owned(), message, next: Some(RESYNC.to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(name: &str, columns: &[&str]) -> wire::PhysicalTable {
        let column = |name: &&str| wire::PhysicalColumn {
            name: (*name).to_owned(),
            type_name: "int".to_owned(),
            nullable: true,
            details: Vec::new(),
        };
        wire::PhysicalTable {
            path: vec!["public".to_owned(), name.to_owned()],
            columns: columns.iter().map(column).collect(),
            snapshot: None,
        }
    }

    #[test]
    fn a_step_of_columns_is_told_by_them_and_one_that_cannot_be_seen_is_done_again() {
        let looked = |there: &[&str], after: &[&str]| {
            let (before, after) = (table("t", &["a"]), table("t", after));
            Looked { there: Some(table("t", there)), left: None, before, after }
        };
        assert_eq!(looked(&["a"], &["a", "b"]).is_done(false), Some(false));
        assert_eq!(looked(&["b", "a"], &["a", "b"]).is_done(false), Some(true));
        assert_eq!(looked(&["c"], &["a", "b"]).is_done(false), None);
        assert_eq!(looked(&["a"], &["a"]).is_done(false), Some(false));
        assert_eq!(looked(&["a"], &["a"]).is_done(true), Some(true), "the destination says that it has it");
    }

    #[test]
    fn a_step_that_takes_the_table_elsewhere_is_told_by_where_it_is() {
        let looked = |left: Option<&[&str]>, there: Option<&[&str]>| Looked {
            there: there.map(|columns| table("new", columns)),
            left: left.map(|columns| table("old", columns)),
            before: table("old", &["a"]),
            after: table("new", &["a"]),
        };
        assert_eq!(looked(Some(&["a"]), None).is_done(false), Some(false));
        assert_eq!(looked(None, Some(&["a"])).is_done(false), Some(true));
        // Somebody else's is at the new name.
        assert_eq!(looked(Some(&["a"]), Some(&["a"])).is_done(false), Some(false));
        assert_eq!(looked(Some(&["z"]), Some(&["a"])).is_done(false), None);
        assert_eq!(looked(None, None).is_done(false), None);
    }
}
