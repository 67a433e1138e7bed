//! What the demo prints.

use comfy_table::{Cell, CellAlignment};
use serde::Serialize;

use super::compare::Outcome;
use crate::cli::paint;
use crate::status::DelaySummary;

/// Everything the demo found.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) equal: bool,
    pub(super) tables: Vec<TableResult>,
    pub(super) destinations: Vec<DestinationResult>,
    /// Rows in the shop before the copy.
    pub(super) rows_copied: u64,
    /// Rows changed after it.
    pub(super) changes: u64,
    pub(super) schema_changes: u64,
}

/// A table at the source and at both destinations.
#[derive(Debug, Serialize)]
pub(super) struct TableResult {
    pub(super) table: String,
    /// Rows at the source.
    pub(super) source: u64,
    pub(super) mirror: Outcome,
    pub(super) files: Outcome,
}

/// How fast a destination was.
#[derive(Clone, Debug, Serialize)]
pub(super) struct DestinationResult {
    pub(super) name: String,
    /// From the start of the process until all tables were live.
    pub(super) copy_seconds: f64,
    /// Of the burst, from its first change until the last was durable.
    pub(super) changes_per_second: Option<f64>,
    /// From commit to durable, in the paced part of the workload.
    pub(super) delay_ms: Option<DelaySummary>,
}

impl TableResult {
    pub(super) fn equal(&self) -> bool {
        self.mirror.differences.is_empty() && self.files.differences.is_empty()
    }

    fn differences(&self) -> impl Iterator<Item = String> {
        [("mirror", &self.mirror), ("files", &self.files)].into_iter().flat_map(move |(name, outcome)| {
            outcome.differences.iter().map(move |difference| format!("{} in {name}: {difference}", self.table))
        })
    }
}

impl Report {
    pub(super) fn render(&self) -> String {
        let right = |text: String| Cell::new(text).set_alignment(CellAlignment::Right);
        let mut tables = paint::table(&["table", "source", "mirror", "files (folded)", ""]);
        for table in &self.tables {
            tables.add_row(vec![
                Cell::new(&table.table),
                right(paint::number(table.source)),
                right(paint::number(table.mirror.rows)),
                right(paint::number(table.files.rows)),
                if table.equal() { paint::good("equal") } else { paint::bad("differs") },
            ]);
        }
        let mut speed =
            paint::table(&["destination", "copy", "changes per second", "commit to durable: median", "p99"]);
        for destination in &self.destinations {
            let ms = |value: Option<f64>| right(value.map_or("-".to_owned(), |ms| format!("{ms:.0} ms")));
            speed.add_row(vec![
                Cell::new(&destination.name),
                right(format!("{:.1} s", destination.copy_seconds)),
                right(destination.changes_per_second.map_or("-".to_owned(), |rate| paint::number(rate as u64))),
                ms(destination.delay_ms.map(|delay| delay.median)),
                ms(destination.delay_ms.map(|delay| delay.p99)),
            ]);
        }
        let mut text = format!(
            "{tables}\n{speed}\n{} rows copied, then {} changes and {} schema changes: ",
            paint::number(self.rows_copied),
            paint::number(self.changes),
            self.schema_changes,
        );
        if self.equal {
            text.push_str("source and destinations are equal");
        } else {
            text.push_str("source and destinations differ");
            for difference in self.tables.iter().flat_map(TableResult::differences) {
                text.push_str(&format!("\n  {difference}"));
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_is_printed() {
        let outcome = |rows, differences: &[&str]| Outcome {
            rows,
            differences: differences.iter().map(|&text| text.to_owned()).collect(),
        };
        let report = Report {
            equal: false,
            tables: vec![TableResult {
                table: "orders".to_owned(),
                source: 1234,
                mirror: outcome(1233, &["1 missing: (7)"]),
                files: outcome(1234, &[]),
            }],
            destinations: vec![DestinationResult {
                name: "mirror".to_owned(),
                copy_seconds: 1.25,
                changes_per_second: Some(45_678.9),
                delay_ms: Some(DelaySummary { median: 12.4, p99: 56.7 }),
            }],
            rows_copied: 200_000,
            changes: 100,
            schema_changes: 8,
        };
        let text = report.render();
        for part in ["1,234", "1,233", "differs", "45,678", "12 ms", "57 ms", "\n  orders in mirror: 1 missing: (7)"] {
            assert!(text.contains(part), "`{part}` is not in:\n{text}");
        }
        assert_eq!(serde_json::to_value(&report).unwrap()["tables"][0]["mirror"]["rows"], 1233);
    }
}
