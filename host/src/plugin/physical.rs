//! What a plugin says that a table is at its destination, compared.

use super::bindings::wire;

/// Name, type and whether null is allowed of each column, in the destination's spelling
/// and in no order of its own.
pub(crate) fn sorted_columns(table: &wire::PhysicalTable) -> Vec<(String, String, bool)> {
    let all = table.columns.iter();
    let mut columns: Vec<_> =
        all.map(|column| (column.name.clone(), column.type_name.clone(), column.nullable)).collect();
    columns.sort();
    columns
}

/// Same columns in the same spelling, in any order.
pub(crate) fn same_columns(a: &wire::PhysicalTable, b: &wire::PhysicalTable) -> bool {
    sorted_columns(a) == sorted_columns(b)
}

/// Same columns in the same place.
pub(crate) fn same_table(a: &wire::PhysicalTable, b: &wire::PhysicalTable) -> bool {
    a.path == b.path && same_columns(a, b)
}
