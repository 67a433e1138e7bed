//! Read-only checks of all tables, before anything of them is written.

use std::collections::HashMap;

use tidegate_sdk::model::{Failure, Notice, Table};

use crate::connect::Stream;
use crate::ddl;
use crate::metadata::{Metadata, read_stored};
use crate::session::Session;
use crate::settings::Settings;
use crate::sql::literal;
use crate::target::Target;
use crate::types;

const WHAT: &str = "check the tables";

/// Notices of level `error` for what would not work, `info` for what an operator
/// should know.
pub fn check<S: Stream>(
    session: &mut Session<S>,
    settings: &Settings,
    metadata: &Metadata,
    tables: &[Table],
) -> Result<Vec<Notice>, Failure> {
    let mut notices = Vec::new();
    let mut places: HashMap<String, String> = HashMap::new();
    for table in tables {
        let target = match Target::new(table, settings) {
            Ok(target) => target,
            Err(failure) => {
                notices.push(notice("error", table.id, &failure.code, failure.message));
                continue;
            }
        };
        let source = format!("{}.{}", table.source.schema, table.source.name);
        if let Some(other) = places.insert(target.quoted.clone(), source.clone()) {
            let message = format!("{other} and {source} both go to {}. Map one of them elsewhere", target.shown());
            notices.push(notice("error", table.id, "name-collision", message));
        }
        types(table, &target, &mut notices);
        place(session, metadata, &target, &mut notices)?;
    }
    Ok(notices)
}

fn notice(level: &str, table: u32, code: &str, message: String) -> Notice {
    Notice { level: level.to_owned(), table_id: Some(table), code: code.to_owned(), message }
}

fn types(table: &Table, target: &Target, notices: &mut Vec<Notice>) {
    let texts: Vec<String> = (table.columns.iter().zip(&target.columns))
        .filter(|(column, _)| !types::is_native(column))
        .map(|(column, target)| format!("{} ({}) as {}", column.name, column.declared, target.type_name))
        .collect();
    if !texts.is_empty() {
        let message = format!(
            "{}: types that another server may not have are kept as text: {}",
            target.shown(),
            texts.join(", ")
        );
        notices.push(notice("info", table.id, "postgres.kept-as-text", message));
    }
}

/// Whether the table can be made where it goes, or what is there can be taken.
fn place<S: Stream>(
    session: &mut Session<S>,
    metadata: &Metadata,
    target: &Target,
    notices: &mut Vec<Notice>,
) -> Result<(), Failure> {
    let schema = literal(&target.schema);
    let privilege = format!(
        "SELECT CASE WHEN EXISTS (SELECT FROM pg_namespace WHERE nspname = {schema}) THEN has_schema_privilege({schema}, 'CREATE') \
         ELSE has_database_privilege(current_database(), 'CREATE') END"
    );
    let answers =
        session.query(&format!("{}; {}", ddl::look(target), metadata.look_up_at(target)), WHAT, Some(target.id));
    let answers = match answers {
        Ok(answers) => answers,
        Err(failure) if session.lost => return Err(failure),
        Err(failure) => {
            notices.push(notice("error", target.id, &failure.code, failure.message));
            return Ok(());
        }
    };
    let (look, stored) = answers.split_at(answers.len().min(2));
    let ours = stored.first().and_then(read_stored).is_some_and(|stored| !stored.is_empty());
    match ddl::found(target, look) {
        Err(failure) => notices.push(notice("error", target.id, &failure.code, failure.message)),
        Ok(Some(_)) if ours => {}
        Ok(Some(found)) => match ddl::unlike(target, &found) {
            Some(reason) => notices.push(notice("error", target.id, "postgres.foreign-table", reason)),
            None if !session
                .query(&format!("SELECT FROM {} LIMIT 1", target.quoted), WHAT, Some(target.id))?
                .iter()
                .all(|answer| answer.rows.is_empty()) =>
            {
                notices.push(notice("error", target.id, "postgres.foreign-table", ddl::holds_rows(target)));
            }
            None => {}
        },
        Ok(None) => {
            if session.value(&privilege, WHAT, Some(target.id))?.as_deref() != Some("t") {
                let message = format!(
                    "{}: the role may not create it. GRANT CREATE on the schema, or on the database if the schema is to be made",
                    target.shown()
                );
                notices.push(notice("error", target.id, "postgres.privilege", message));
            }
        }
    }
    Ok(())
}
