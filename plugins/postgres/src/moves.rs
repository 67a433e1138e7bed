//! Steps of a table as a whole: another place, another key.

use tidegate_sdk::model::Failure;

use crate::ddl;
use crate::error::of_table;
use crate::protocol::Answer;
use crate::sql::{ident, literal};
use crate::target::Target;

/// Runs statements at once, and returns their answers.
pub type Query<'a> = &'a mut dyn FnMut(&str) -> Result<Vec<Answer>, Failure>;

/// The statements that take a table from one place to another; none where the mapping has
/// both names at one place. What is at the new place already is never taken.
pub fn rename(before: &Target, after: &Target, query: Query<'_>) -> Result<Vec<String>, Failure> {
    if before.quoted == after.quoted {
        return Ok(Vec::new());
    }
    if ddl::found(after, &query(&ddl::look(after))?)?.is_some() {
        let message = format!(
            "{} is to become {}, which is there already at the destination. Drop or rename that, or map the table to another name",
            before.shown(),
            after.shown()
        );
        return Err(of_table(after.id, "name-collision", message));
    }
    let mut statements = Vec::new();
    if before.schema != after.schema {
        let looked = query(&format!("SELECT FROM pg_namespace WHERE nspname = {}", literal(&after.schema)))?;
        if looked.iter().all(|answer| answer.rows.is_empty()) {
            statements.push(format!("CREATE SCHEMA {}", ident(&after.schema)));
        }
    }
    let alter =
        |schema: &str, name: &str, what: String| format!("ALTER TABLE {}.{} {what}", ident(schema), ident(name));
    let rename_to = |name: &str| format!("RENAME TO {}", ident(name));
    let set_schema = format!("SET SCHEMA {}", ident(&after.schema));
    match (before.schema == after.schema, before.name == after.name) {
        (true, _) => statements.push(alter(&before.schema, &before.name, rename_to(&after.name))),
        (false, true) => statements.push(alter(&before.schema, &before.name, set_schema)),
        // Neither schema has to have room for the other one's name.
        (false, false) => {
            let between = format!("tidegate_rename_{}", before.id);
            statements.push(alter(&before.schema, &before.name, rename_to(&between)));
            statements.push(alter(&before.schema, &between, set_schema));
            statements.push(alter(&after.schema, &between, rename_to(&after.name)));
        }
    }
    Ok(statements)
}

/// The statements that give a table, which still is where it was, the key that merges go by.
/// Where it is only asked about, columns have their names of before still, and rows that the
/// key cannot tell apart are refused; later the index finds them.
pub fn change_key(before: &Target, after: &Target, asked: bool, query: Query<'_>) -> Result<Vec<String>, Failure> {
    let now = if asked { before } else { after };
    let (old, new) = (names(before, now), names(after, now));
    let there = query(&unique_indexes(&before.quoted))?;
    let mut indexes = Vec::new();
    for row in there.iter().flat_map(|answer| &answer.rows) {
        indexes.extend(Index::read(row));
    }
    // An old key that says more than the new one would refuse rows that come.
    let (gone, stay): (Vec<Index>, Vec<Index>) = indexes
        .into_iter()
        .partition(|index| Some(&index.columns) == old.as_ref() && Some(&index.columns) != new.as_ref());
    let has_new = stay.iter().any(|index| Some(&index.columns) == new.as_ref());
    let has_primary = stay.iter().any(|index| index.primary);
    if let Some(key) = new.as_ref().filter(|_| asked && !has_new) {
        distinct(after, &before.quoted, key, query)?;
    }
    let mut statements: Vec<String> = gone
        .iter()
        .filter(|index| index.constraint.is_none())
        .map(|index| format!("DROP INDEX {}", index.name))
        .collect();
    let mut parts: Vec<String> = gone
        .iter()
        .filter_map(|index| Some(format!("DROP CONSTRAINT {}", ident(index.constraint.as_ref()?))))
        .collect();
    // Until now they could not be null, whatever the source said.
    for column in old_columns(before, after).filter(|column| column.nullable) {
        parts.push(format!("ALTER COLUMN {} DROP NOT NULL", column.quoted));
    }
    parts.extend(after.key.iter().map(|&index| format!("ALTER COLUMN {} SET NOT NULL", after.columns[index].quoted)));
    if !has_new {
        let kind = if has_primary { "UNIQUE" } else { "PRIMARY KEY" };
        parts.push(format!("ADD {kind} ({})", after.key_list("")));
    }
    statements.push(format!("ALTER TABLE {} {}", before.quoted, parts.join(", ")));
    Ok(statements)
}

/// A unique index that ON CONFLICT can use.
struct Index {
    /// Schema and name in quotes.
    name: String,
    constraint: Option<String>,
    primary: bool,
    /// Sorted.
    columns: Vec<String>,
}

impl Index {
    fn read(row: &[Option<String>]) -> Option<Index> {
        let text = |index: usize| row.get(index).cloned().flatten();
        let mut columns: Vec<String> = text(3)?.split(' ').map(unescaped).collect();
        columns.sort();
        Some(Index { name: text(0)?, constraint: text(1), primary: text(2)? == "t", columns })
    }
}

/// One row each: name, constraint, whether it is the primary key, columns in hexadecimal.
fn unique_indexes(table: &str) -> String {
    format!(
        "SELECT quote_ident(n.nspname) || '.' || quote_ident(c.relname), k.conname, i.indisprimary, \
         (SELECT string_agg(encode(convert_to(a.attname::text, 'UTF8'), 'hex'), ' ') FROM pg_attribute a \
          WHERE a.attrelid = i.indrelid AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1])) \
         FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid JOIN pg_namespace n ON n.oid = c.relnamespace \
         LEFT JOIN pg_constraint k ON k.conindid = i.indexrelid AND k.conrelid = i.indrelid AND k.contype IN ('p', 'u') \
         WHERE i.indrelid = to_regclass({}) AND i.indisunique AND i.indisvalid AND i.indimmediate \
         AND i.indpred IS NULL AND i.indexprs IS NULL ORDER BY 1",
        literal(table)
    )
}

fn unescaped(hex: &str) -> String {
    let digit = |at: usize| hex.get(at..at + 2).and_then(|pair| u8::from_str_radix(pair, 16).ok());
    let bytes: Vec<u8> = (0..hex.len()).step_by(2).filter_map(digit).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The names that a version's key has in `now`, sorted; none if one of its columns is gone,
/// and with it every index on it.
fn names(of: &Target, now: &Target) -> Option<Vec<String>> {
    let name = |&index: &usize| {
        let ordinal = of.columns[index].ordinal;
        now.columns.iter().find(|column| column.ordinal == ordinal).map(|column| column.name.clone())
    };
    let mut names: Vec<String> = of.key.iter().map(name).collect::<Option<_>>()?;
    names.sort();
    Some(names)
}

/// Columns that named a row, are there, and do not any more.
fn old_columns<'a>(before: &'a Target, after: &'a Target) -> impl Iterator<Item = &'a crate::target::TargetColumn> {
    let was_key = |ordinal: u16| before.key.iter().any(|&index| before.columns[index].ordinal == ordinal);
    let columns = after.columns.iter().enumerate().filter(move |(_, column)| was_key(column.ordinal));
    columns.filter(|(index, _)| !after.key.contains(index)).map(|(_, column)| column)
}

/// Whether these columns tell all rows apart.
fn distinct(after: &Target, table: &str, key: &[String], query: Query<'_>) -> Result<(), Failure> {
    let columns: Vec<String> = key.iter().map(|name| ident(name)).collect();
    let nulls: Vec<String> = columns.iter().map(|column| format!("{column} IS NULL")).collect();
    let list = columns.join(", ");
    let answers = query(&format!(
        "SELECT ROW({list})::text FROM {table} WHERE {} LIMIT 1; \
         SELECT ROW({list})::text FROM {table} GROUP BY {list} HAVING count(*) > 1 LIMIT 1",
        nulls.join(" OR ")
    ))?;
    for (answer, what) in answers.iter().zip(["there is a row with", "there is more than one row with"]) {
        if let Some(row) = answer.rows.first() {
            let found = row.first().cloned().flatten().unwrap_or_default();
            return Err(not_a_key(after, &format!("{what} {found}")));
        }
    }
    Ok(())
}

/// Rows that are there stand in the way of a key.
pub fn not_a_key(after: &Target, why: &str) -> Failure {
    let message = format!(
        "({}) cannot name the rows of {}: {why}. They differ from the source's: mend them, or resync the table",
        after.key_list(""),
        after.shown()
    );
    of_table(after.id, "postgres.not-a-key", message)
}
