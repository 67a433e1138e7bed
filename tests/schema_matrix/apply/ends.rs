//! Whether the ends are equal: rows, columns, types, nullability, and who has a default.

use tidegate_tests::Database;

use super::{Bench, Plugin};

impl Bench<'_> {
    /// How the ends differ, if they do, in a table as it is called in the end.
    pub(super) fn differs(&self, table: &str) -> Option<String> {
        let columns = self.source.sql(&format!(
            "SELECT attname FROM pg_attribute WHERE attrelid = '{table}'::regclass AND attnum > 0 AND NOT attisdropped
             ORDER BY attnum"
        ));
        let columns: Vec<&str> = columns.lines().collect();
        let cells = columns.iter().map(|column| {
            let quoted = format!("\"{}\"", column.replace('"', "\"\""));
            format!("'{}', CASE WHEN {quoted} IS NOT NULL THEN format('%s', {quoted}) END", column.replace('\'', "''"))
        });
        let query = format!(
            "SELECT jsonb_strip_nulls(jsonb_build_object({}))::text FROM {table} ORDER BY 1",
            cells.collect::<Vec<_>>().join(", ")
        );
        let wanted: Vec<String> = self.source.sql(&query).lines().map(str::to_owned).collect();
        let (found, there): (Vec<String>, Vec<String>) = match self.plugin {
            Plugin::Postgres => {
                if !is_there(&self.mirror, table, &columns) {
                    return Some("the mirror has other columns".to_owned());
                }
                (self.mirror.sql(&query).lines().map(str::to_owned).collect(), shape(&self.mirror, table))
            }
            Plugin::Steps => self.in_files(table),
        };
        let wanted_shape = shape(&self.source, table);
        match (found == wanted, there == wanted_shape) {
            (true, true) => None,
            (false, _) => Some(format!("the rows are {found:?}, and not {wanted:?}")),
            (_, false) => Some(format!("the columns are {there:?}, and not {wanted_shape:?}")),
        }
    }

    /// Rows and columns as the fixture has them, as `differs` asks for them.
    fn in_files(&self, table: &str) -> (Vec<String>, Vec<String>) {
        let file = self.pipeline.directory().join("steps").join(format!("{table}.json"));
        let text = std::fs::read_to_string(&file).unwrap_or_default();
        let kept: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
        let rows =
            kept["rows"].as_object().map(|rows| rows.values().map(ToString::to_string).collect()).unwrap_or_default();
        let text = |column: &serde_json::Value| {
            let required = if column["nullable"] == false { " not null" } else { "" };
            let default = if column["default"].is_string() { " default" } else { "" };
            format!("{} {}{required}{default}", column["name"].as_str()?, column["declared"].as_str()?).into()
        };
        let columns: Vec<Option<String>> =
            kept["columns"].as_array().map(|all| all.iter().map(text).collect()).unwrap_or_default();
        let mut columns: Vec<String> = columns.into_iter().flatten().collect();
        columns.sort();
        // As the server prints JSON, through itself.
        let rows: Vec<String> = rows;
        let quoted: Vec<String> = rows.iter().map(|row| format!("'{}'", row.replace('\'', "''"))).collect();
        let printed = self.source.sql(&format!(
            "SELECT jsonb_strip_nulls(row::jsonb)::text FROM unnest(ARRAY[{}]::text[]) row ORDER BY 1",
            quoted.join(", ")
        ));
        (printed.lines().map(str::to_owned).collect(), columns)
    }
}

fn is_there(database: &Database, table: &str, columns: &[&str]) -> bool {
    let there = database.sql(&format!(
        "SELECT attname FROM pg_attribute WHERE attrelid = to_regclass('{table}') AND attnum > 0 AND NOT attisdropped"
    ));
    let mut there: Vec<&str> = there.lines().collect();
    let mut wanted = columns.to_vec();
    there.sort_unstable();
    wanted.sort_unstable();
    there == wanted
}

/// Name, type, nullability and whether there is a literal default, of each column.
fn shape(database: &Database, table: &str) -> Vec<String> {
    let shape = database.sql(&format!(
        "SELECT a.attname || ' ' || format_type(a.atttypid, a.atttypmod) || CASE WHEN a.attnotnull THEN ' not null' ELSE '' END
             || CASE WHEN pg_get_expr(d.adbin, d.adrelid) !~ 'random' THEN ' default' ELSE '' END
         FROM pg_attribute a LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
         WHERE a.attrelid = to_regclass('{table}') AND a.attnum > 0 AND NOT a.attisdropped"
    ));
    let mut shape: Vec<String> = shape.lines().map(str::to_owned).collect();
    shape.sort();
    shape
}
