//! Tables at the destination: what is there, and changing it.

use tidegate_sdk::model::{Column, Failure, FailureScope, Notice, PhysicalColumn, SchemaChange, SchemaStep};

use crate::connect::Stream;
use crate::error::of_table;
use crate::moves;
use crate::protocol::Answer;
use crate::session::Session;
use crate::settings::Settings;
use crate::sql::{ident, literal};
use crate::target::{Target, TargetColumn, physical_column, same_shape, shape};
use crate::transaction::{Origin, Transaction};
use crate::types;

/// Step kinds that `step` knows: the plugin's capabilities.
pub const STEPS: [&str; 10] = [
    "add-column",
    "drop-column",
    "rename-column",
    "alter-type",
    "set-default",
    "drop-default",
    "set-not-null",
    "drop-not-null",
    "rename-table",
    "change-key",
];

/// What is at a table's place.
#[derive(Debug)]
pub struct Found {
    /// In the destination's order.
    pub columns: Vec<PhysicalColumn>,
    /// Its key's columns have a unique index that ON CONFLICT can use.
    pub keyed: bool,
}

/// Two statements: kind and uniqueness, then columns. No row of the first: nothing is there.
pub fn look(target: &Target) -> String {
    let relation = format!("to_regclass({})", literal(&target.quoted));
    let mut names: Vec<String> = target.key.iter().map(|&column| literal(&target.columns[column].name)).collect();
    names.sort();
    format!(
        "SELECT c.relkind, EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisunique AND i.indisvalid AND i.indimmediate \
         AND i.indpred IS NULL AND i.indexprs IS NULL AND (SELECT array_agg(a.attname::text ORDER BY a.attname::text COLLATE \"C\") FROM pg_attribute a \
         WHERE a.attrelid = c.oid AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1])) = \
         (SELECT array_agg(n ORDER BY n COLLATE \"C\") FROM unnest(ARRAY[{names}]::text[]) n)) \
         FROM pg_class c WHERE c.oid = {relation}; \
         SELECT a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull FROM pg_attribute a \
         WHERE a.attrelid = {relation} AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum",
        names = names.join(", ")
    )
}

/// Reads the answers to `look`.
pub fn found(target: &Target, answers: &[Answer]) -> Result<Option<Found>, Failure> {
    let [head, columns] = answers else {
        return Err(of_table(
            target.id,
            "postgres.protocol",
            format!("{}: the catalog cannot be read", target.shown()),
        ));
    };
    let Some(head) = head.rows.first() else { return Ok(None) };
    let kind = head.first().cloned().flatten().unwrap_or_default();
    if kind != "r" && kind != "p" {
        let message = format!(
            "{} is not a table at the destination (relkind {kind}). Map the table to another name",
            target.shown()
        );
        return Err(of_table(target.id, "postgres.not-a-table", message));
    }
    let text = |row: &[Option<String>], index: usize| row.get(index).cloned().flatten().unwrap_or_default();
    let columns = columns.rows.iter().map(|row| physical_column(&text(row, 0), &text(row, 1), text(row, 2) != "t"));
    Ok(Some(Found { columns: columns.collect(), keyed: text(head, 1) == "t" }))
}

/// Makes the table exist, empty and in shape. `ours`: this destination made it, or
/// something before it at the same place.
pub fn make_empty<S: Stream>(tx: &mut Transaction<'_, S>, target: &Target, ours: bool) -> Result<(), Failure> {
    let origin = Origin { table: Some(target.id), ..Origin::default() };
    let exists =
        tx.query(&format!("SELECT FROM pg_namespace WHERE nspname = {}", literal(&target.schema)), target.id)?;
    if exists.iter().all(|answer| answer.rows.is_empty()) {
        tx.add(&format!("CREATE SCHEMA IF NOT EXISTS {}", ident(&target.schema)), origin)?;
    }
    let answers = tx.query(&look(target), target.id)?;
    match found(target, &answers)? {
        None => tx.add(&target.create(), origin)?,
        Some(found) if ours && found.keyed && same_shape(&found.columns, &target.physical().columns) => {
            tx.add(&format!("TRUNCATE TABLE {}", target.quoted), origin)?;
        }
        Some(_) if ours => {
            tx.add(&format!("DROP TABLE {}", target.quoted), origin)?;
            tx.add(&target.create(), origin)?;
        }
        Some(found) => adopt(tx, target, &found)?,
    }
    // A staging table has the columns of the table that was there before.
    tx.add(&crate::merge::drop_stage(target.id), origin)?;
    tx.send()?;
    tx.forget_staged(target.id);
    Ok(())
}

/// Takes a table that somebody else made, if it is what ours would be and holds nothing.
fn adopt<S: Stream>(tx: &mut Transaction<'_, S>, target: &Target, found: &Found) -> Result<(), Failure> {
    if let Some(reason) = unlike(target, found) {
        return Err(of_table(target.id, "postgres.foreign-table", reason));
    }
    let origin = Origin { table: Some(target.id), ..Origin::default() };
    tx.add(&format!("LOCK TABLE {} IN SHARE ROW EXCLUSIVE MODE", target.quoted), origin)?;
    let rows = tx.query(&format!("SELECT FROM {} LIMIT 1", target.quoted), target.id)?;
    if rows.iter().any(|answer| !answer.rows.is_empty()) {
        return Err(of_table(target.id, "postgres.foreign-table", holds_rows(target)));
    }
    Ok(())
}

/// What to say of a table with rows that are not ours.
pub fn holds_rows(target: &Target) -> String {
    format!(
        "{} exists at the destination, holds rows, and was not made by this destination. Empty or drop it, or map the table to another name",
        target.shown()
    )
}

/// Why a table that is there cannot be taken for ours.
pub fn unlike(target: &Target, found: &Found) -> Option<String> {
    let wanted = target.physical().columns;
    if !same_shape(&found.columns, &wanted) {
        return Some(format!(
            "{} exists at the destination, was not made by this destination, and is another table: there it is {}, here it would be {}. \
             Drop it, or map the table to another name",
            target.shown(),
            shape(&found.columns),
            shape(&wanted)
        ));
    }
    (!found.keyed).then(|| {
        format!(
            "{} exists at the destination without a unique index on ({}). Add a primary key",
            target.shown(),
            target.key_list("")
        )
    })
}

/// Runs the steps of a change that are not done yet.
pub fn apply<S: Stream>(
    tx: &mut Transaction<'_, S>,
    settings: &Settings,
    change: &SchemaChange,
) -> Result<(), Failure> {
    let ends = Ends::new(change, settings)?;
    let id = ends.after.id;
    let mut names = ends.columns(&tx.query(&look(&ends.before), id)?)?;
    let origin = Origin { table: Some(id), ..Origin::default() };
    tx.add(&crate::merge::drop_stage(id), origin)?;
    for step in &change.steps {
        let run = ends.statements(step, false, &mut names, &mut |sql| tx.query(sql, id)).and_then(|statements| {
            statements.iter().try_for_each(|sql| {
                tx.add(sql, origin)?;
                tx.send()
            })
        });
        run.map_err(|failure| ends.of_step(failure, step))?;
    }
    tx.send()?;
    tx.forget_staged(id);
    Ok(())
}

/// A table as a change begins with it and as it leaves it.
struct Ends {
    before: Target,
    after: Target,
}

impl Ends {
    fn new(change: &SchemaChange, settings: &Settings) -> Result<Ends, Failure> {
        Ok(Ends { before: Target::new(&change.before, settings)?, after: Target::new(&change.after, settings)? })
    }

    /// The columns that are there.
    fn columns(&self, looked: &[Answer]) -> Result<Vec<PhysicalColumn>, Failure> {
        let gone = || {
            let message = format!("{} is gone at the destination. Resync the table", self.before.shown());
            of_table(self.before.id, "resync-needed", message)
        };
        Ok(found(&self.before, looked)?.ok_or_else(gone)?.columns)
    }

    /// What to run for a step, given the columns that are there, which are kept up. Nothing:
    /// it is done. The table is where it was until its last step. `asked`: of the steps before
    /// it none was run.
    fn statements(
        &self,
        step: &SchemaStep,
        asked: bool,
        there: &mut Vec<PhysicalColumn>,
        query: moves::Query<'_>,
    ) -> Result<Vec<String>, Failure> {
        match step.kind.as_str() {
            "rename-table" => moves::rename(&self.before, &self.after, query),
            "change-key" => moves::change_key(&self.before, &self.after, asked, query),
            _ => {
                let sql = self.statement(step, there)?;
                Ok(sql.into_iter().map(|sql| format!("ALTER TABLE {} {sql}", self.before.quoted)).collect())
            }
        }
    }

    /// A step that rows stand in the way of is the table's failure, not theirs.
    fn of_step(&self, mut failure: Failure, step: &SchemaStep) -> Failure {
        if failure.scope == FailureScope::Row {
            failure.scope = FailureScope::Table;
            failure.table_id = Some(self.after.id);
            failure.rows.clear();
            if step.kind == "change-key" {
                failure = moves::not_a_key(&self.after, &failure.message);
            }
        }
        let column = step.after.as_ref().or(step.before.as_ref()).map_or("", |column| column.name.as_str());
        let what = format!("{} {column}", step.kind);
        failure.message = format!("{}: {}: {}", self.before.shown(), what.trim_end(), failure.message);
        failure
    }

    /// Whether a column names rows at either end.
    fn is_key(&self, ordinal: u16) -> bool {
        let of = |target: &Target| target.key.iter().any(|&index| target.columns[index].ordinal == ordinal);
        of(&self.before) || of(&self.after)
    }

    /// What ALTER TABLE is to do for a step of a column.
    fn statement(&self, step: &SchemaStep, there: &mut Vec<PhysicalColumn>) -> Result<Option<String>, Failure> {
        let target = &self.after;
        let place = |there: &[PhysicalColumn], column: &Column| there.iter().position(|one| one.name == column.name);
        match (step.kind.as_str(), &step.before, &step.after) {
            ("add-column", _, Some(column)) => add(target, column, there),
            ("drop-column", Some(column), _) => {
                let Some(index) = place(there, column) else { return Ok(None) };
                there.remove(index);
                Ok(Some(format!("DROP COLUMN {}", ident(&column.name))))
            }
            ("rename-column", Some(from), Some(to)) => match (place(there, from), place(there, to)) {
                (Some(index), None) => {
                    there[index].name = to.name.clone();
                    Ok(Some(format!("RENAME COLUMN {} TO {}", ident(&from.name), ident(&to.name))))
                }
                (None, Some(_)) => Ok(None),
                (Some(_), Some(_)) => {
                    Err(of_table(target.id, "name-collision", format!("a column {} is there already", to.name)))
                }
                (None, None) => {
                    Err(of_table(target.id, "postgres.no-column", format!("there is no column {}", from.name)))
                }
            },
            (_, before, Some(after)) => {
                let named =
                    [Some(after), before.as_ref()].into_iter().flatten().find_map(|column| place(there, column));
                let Some(index) = named else {
                    return Err(of_table(
                        target.id,
                        "postgres.no-column",
                        format!("there is no column {}", after.name),
                    ));
                };
                let name = ident(&there[index].name);
                self.alter(step, &name, before.as_ref(), after)
            }
            _ => Err(unknown(target, step)),
        }
    }

    fn alter(
        &self,
        step: &SchemaStep,
        name: &str,
        before: Option<&Column>,
        after: &Column,
    ) -> Result<Option<String>, Failure> {
        let default = after.default_literal.as_ref().map(|default| literal(&default.text));
        Ok(Some(match step.kind.as_str() {
            "set-default" => match default {
                Some(default) => format!("ALTER COLUMN {name} SET DEFAULT {default}"),
                None => format!("ALTER COLUMN {name} DROP DEFAULT"),
            },
            "drop-default" => format!("ALTER COLUMN {name} DROP DEFAULT"),
            "set-not-null" => format!("ALTER COLUMN {name} SET NOT NULL"),
            // The key's columns are never null; those of another one are let go with it.
            "drop-not-null" if self.is_key(after.ordinal) => return Ok(None),
            "drop-not-null" => format!("ALTER COLUMN {name} DROP NOT NULL"),
            "alter-type" => {
                let wanted = types::physical(after);
                // The source's own ALTER, without USING, went by the assignment cast too;
                // where one end is text in place of the type, only the text is known.
                let native = before.is_none_or(types::is_native) && types::is_native(after);
                let using = if native { String::new() } else { format!(" USING {name}::text::{wanted}") };
                let keep =
                    default.map(|default| format!(", ALTER COLUMN {name} SET DEFAULT {default}")).unwrap_or_default();
                format!("ALTER COLUMN {name} DROP DEFAULT, ALTER COLUMN {name} TYPE {wanted}{using}{keep}")
            }
            _ => return Err(unknown(&self.after, step)),
        }))
    }
}

fn add(target: &Target, column: &Column, there: &mut Vec<PhysicalColumn>) -> Result<Option<String>, Failure> {
    let wanted = TargetColumn::new(column);
    match there.iter().find(|one| one.name == column.name) {
        Some(one) if one.type_name == wanted.type_name => Ok(None),
        Some(one) => {
            let message = format!(
                "a column of this name is there already, of type {} and not {}",
                one.type_name, wanted.type_name
            );
            Err(of_table(target.id, "name-collision", message))
        }
        None => {
            there.push(physical_column(&wanted.name, &wanted.type_name, wanted.nullable));
            Ok(Some(format!("ADD COLUMN {}", wanted.definition())))
        }
    }
}

fn unknown(target: &Target, step: &SchemaStep) -> Failure {
    of_table(
        target.id,
        "unsupported",
        format!("{}: this plugin does not know the step `{}`. Resync the table", target.shown(), step.kind),
    )
}

/// What a change would do and cost.
pub fn describe<S: Stream>(
    session: &mut Session<S>,
    settings: &Settings,
    change: &SchemaChange,
) -> Result<Vec<Notice>, Failure> {
    const WHAT: &str = "look at the table";
    let ends = Ends::new(change, settings)?;
    let id = ends.after.id;
    let mut there = ends.columns(&session.query(&look(&ends.before), WHAT, Some(id))?)?;
    let mut notices = Vec::new();
    for step in &change.steps {
        let statements = ends
            .statements(step, true, &mut there, &mut |sql| session.query(sql, WHAT, Some(id)))
            .map_err(|failure| ends.of_step(failure, step))?;
        let (level, cost) = cost(step);
        notices.extend(statements.into_iter().map(|sql| Notice {
            level: level.to_owned(),
            table_id: Some(id),
            code: format!("postgres.{}", step.kind),
            message: format!("{sql}: {cost}"),
        }));
    }
    Ok(notices)
}

fn cost(step: &SchemaStep) -> (&'static str, &'static str) {
    match step.kind.as_str() {
        "alter-type" => ("warning", "may rewrite the table, under an exclusive lock"),
        "change-key" => ("warning", "reads the whole table and builds a unique index, under an exclusive lock"),
        "set-not-null" => ("info", "reads the whole table, under an exclusive lock"),
        "drop-column" => ("warning", "drops the column's values"),
        "add-column"
            if step.after.as_ref().is_some_and(|column| !column.nullable && column.default_literal.is_none()) =>
        {
            ("warning", "fails if the table holds rows: the column is NOT NULL and has no literal default")
        }
        _ => ("info", "changes the catalog only"),
    }
}
