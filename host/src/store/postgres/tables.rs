//! Source, destinations, tables, history and what plugins keep. Each operation says the
//! same when it is done twice, but for generations, which may skip numbers.

use tokio_postgres::Row;
use tokio_postgres::types::PgLsn;

use super::super::limits::{check_total, unknown_destination};
use super::super::records::{Loaded, Progress, SlotRecord, SourceRecord, TableError, TableRecord};
use super::history;
use super::link::{Failure, Link, one};
use super::quarantine;
use super::rows::{count, destination_record, ordinal, pg_lsn, source_record, table_record, unreadable};
use super::{barriers, copies};
use crate::position::Position;
use crate::schema::table::TableSchema;

/// A table's position only grows, by epoch, commit, ordinal; `reset_table` is the one
/// way back.
const SAVE_TABLE: &str = "
    INSERT INTO tables (destination, oid, schema_name, table_name, state, floor, run,
        position_epoch, position_commit, position_ordinal,
        applied, applying_from, applying_to, applying_step, needs_resync, rows_copied, rows_total,
        error_code, error_message, error_next)
    VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20)
    ON CONFLICT (destination, oid) DO UPDATE SET
        schema_name = excluded.schema_name, table_name = excluded.table_name,
        state = excluded.state, floor = excluded.floor, run = excluded.run,
        applied = excluded.applied, applying_from = excluded.applying_from,
        applying_to = excluded.applying_to, applying_step = excluded.applying_step,
        needs_resync = excluded.needs_resync,
        rows_copied = excluded.rows_copied, rows_total = excluded.rows_total,
        error_code = excluded.error_code, error_message = excluded.error_message,
        error_next = excluded.error_next";

/// A table that is not begun has no position: one that comes now was sent before it
/// was reset.
const MOVE_POSITION: &str = "
    UPDATE tables SET position_epoch = $3, position_commit = $4, position_ordinal = $5
    WHERE destination = $1 AND oid = $2 AND state <> 'init'
      AND (position_epoch IS NULL
           OR (position_epoch, position_commit, position_ordinal) < ($3, $4, $5))";

const MOVE_CHECKPOINT: &str = "UPDATE destinations SET checkpoint = $2 WHERE name = $1 AND checkpoint < $2";

const SAVE_SOURCE: &str = "
    INSERT INTO source (id, system, timeline, slot, publication, publication_oid, plugin, epoch, slot_created_at)
    VALUES (1, $1, $2, $3, $4, $5, $6, $7, $8)
    ON CONFLICT (id) DO UPDATE SET system = excluded.system, timeline = excluded.timeline, slot = excluded.slot,
        publication = excluded.publication, publication_oid = excluded.publication_oid, plugin = excluded.plugin,
        epoch = excluded.epoch, slot_created_at = excluded.slot_created_at";

const SAVE_MEMBER: &str =
    "INSERT INTO members (oid, key) VALUES ($1, $2) ON CONFLICT (oid) DO UPDATE SET key = excluded.key";

pub(super) async fn load(link: &Link) -> Result<Loaded, Failure> {
    let mut loaded = Loaded::default();
    let source = link.query("SELECT * FROM source", &[]).await?;
    loaded.source = source.first().map(source_record).transpose()?;
    for row in link.query("SELECT * FROM destinations ORDER BY name", &[]).await? {
        let (record, error) = destination_record(&row)?;
        if let Some(error) = error {
            loaded.destination_errors.insert(record.name.clone(), error);
        }
        loaded.destinations.push(record);
    }
    let tables = link.query("SELECT * FROM tables ORDER BY destination, oid", &[]).await?;
    loaded.tables = tables.iter().map(table_record).collect::<Result<_, _>>()?;
    for row in link.query("SELECT oid, key FROM members", &[]).await? {
        loaded.members.insert(row.try_get(0)?, row.try_get(1)?);
    }
    let versions = link.query("SELECT table_schema FROM history ORDER BY oid, commit_lsn, message_lsn", &[]).await?;
    let schema = |row: &Row| serde_json::from_str(row.try_get(0)?).map_err(unreadable);
    loaded.history = versions.iter().map(schema).collect::<Result<_, _>>()?;
    loaded.ended = history::ends(link).await?;
    loaded.removed = history::removed(link).await?;
    loaded.applied = history::applied(link).await?;
    loaded.quarantined = quarantine::counts(link).await?;
    loaded.copies = copies::load(link).await?;
    loaded.barriers = barriers::load(link).await?;
    Ok(loaded)
}

pub(super) async fn save_source(link: &Link, source: &SourceRecord) -> Result<(), Failure> {
    let created: Option<PgLsn> = match source.slot_state {
        SlotRecord::Intended => None,
        SlotRecord::Created { at } => Some(pg_lsn(at)),
    };
    link.execute(
        SAVE_SOURCE,
        &[
            &source.system,
            &i64::from(source.timeline),
            &source.slot,
            &source.publication,
            &source.publication_oid,
            &source.plugin,
            &i64::from(source.epoch),
            &created,
        ],
    )
    .await
    .map(drop)
}

pub(super) async fn known_destination(link: &Link, destination: &str) -> Result<(), Failure> {
    match link.query("SELECT 1 FROM destinations WHERE name = $1", &[&destination]).await?.is_empty() {
        true => Err(unknown_destination(destination).into()),
        false => Ok(()),
    }
}

pub(super) async fn save_error(link: &Link, destination: &str, error: Option<&TableError>) -> Result<(), Failure> {
    known_destination(link, destination).await?;
    let [code, message, next] = bytes_of(error);
    link.execute(
        "UPDATE destinations SET error_code = $2, error_message = $3, error_next = $4 WHERE name = $1",
        &[&destination, &code, &message, &next],
    )
    .await
    .map(drop)
}

pub(super) async fn append_history(link: &Link, schema: &TableSchema) -> Result<(), Failure> {
    let (commit, message) = (pg_lsn(schema.snapshot.commit), pg_lsn(schema.snapshot.message));
    let shape = schema.shape();
    let json = serde_json::to_string(schema).map_err(unreadable)?;
    let origin = serde_json::to_value(schema.origin).map_err(unreadable)?;
    let added = link
        .execute(
            "INSERT INTO history (oid, commit_lsn, message_lsn, origin, shape, table_schema)
             VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT DO NOTHING",
            &[&schema.oid, &commit, &message, &origin.as_str().unwrap_or_default(), &shape, &json],
        )
        .await?;
    if added > 0 {
        return Ok(());
    }
    let rows = link
        .query(
            "SELECT shape FROM history WHERE oid = $1 AND commit_lsn = $2 AND message_lsn = $3",
            &[&schema.oid, &commit, &message],
        )
        .await?;
    if one(&rows)?.try_get::<_, &str>(0)? != shape {
        // An odd entry does not stop the stream (design, section 4).
        tracing::warn!(
            table = %schema.name, snapshot = %schema.snapshot,
            "a schema version came again with another shape: the first is kept"
        );
    }
    Ok(())
}

pub(super) async fn save_tables(link: &Link, tables: &[TableRecord]) -> Result<(), Failure> {
    let mut checked = None;
    for table in tables {
        if checked != Some(&table.destination) {
            known_destination(link, &table.destination).await?;
            checked = Some(&table.destination);
        }
    }
    link.each(SAVE_TABLE, tables, save_table).await?;
    let moved: Vec<_> =
        tables.iter().filter_map(|table| Some((table.destination.as_str(), table.oid, table.position?))).collect();
    move_positions(link, &moved).await
}

async fn save_table(link: &Link, table: &TableRecord) -> Result<(), Failure> {
    let TableRecord { position, applying, .. } = table;
    let [code, message, next] = bytes_of(table.error.as_ref());
    link.execute(
        SAVE_TABLE,
        &[
            &table.destination,
            &table.oid,
            &table.name.schema,
            &table.name.name,
            &table.state.as_str(),
            &table.floor.map(pg_lsn),
            &table.run.as_ref().map(|run| run.as_bytes()),
            &position.map(|position| i64::from(position.epoch)),
            &position.map(|position| pg_lsn(position.commit)),
            &position.map(|position| ordinal(position.ordinal)),
            &table.applied.map(|applied| applied.to_string()),
            &applying.map(|applying| applying.from.to_string()),
            &applying.map(|applying| applying.to.to_string()),
            &applying.map(|applying| i64::from(applying.step)),
            &table.needs_resync,
            &count(table.rows_copied),
            &table.rows_total.map(count),
            &code,
            &message,
            &next,
        ],
    )
    .await?;
    history::put_applied(link, table).await
}

async fn move_positions(link: &Link, moved: &[(&str, u32, Position)]) -> Result<(), Failure> {
    link.each(MOVE_POSITION, moved, async |link, (destination, oid, position)| {
        let Position { epoch, commit, ordinal: number } = *position;
        link.execute(MOVE_POSITION, &[destination, oid, &i64::from(epoch), &pg_lsn(commit), &ordinal(number)])
            .await
            .map(drop)
    })
    .await
}

pub(super) async fn stop_tables(link: &Link, destination: &str, error: &TableError) -> Result<(), Failure> {
    let [code, message, next] = bytes_of(Some(error));
    link.execute(
        "UPDATE tables SET state = 'errored', needs_resync = true, run = NULL,
             error_code = $2, error_message = $3, error_next = $4
         WHERE destination = $1 AND state <> 'errored'",
        &[&destination, &code, &message, &next],
    )
    .await?;
    barriers::delete_all(link, destination).await
}

pub(super) async fn delete_table(link: &Link, destination: &str, oid: u32) -> Result<(), Failure> {
    link.execute("DELETE FROM tables WHERE destination = $1 AND oid = $2", &[&destination, &oid]).await?;
    copies::delete(link, destination, oid).await?;
    barriers::delete(link, destination, oid).await?;
    quarantine::clear(link, destination, oid).await
}

pub(super) async fn reset_table(link: &Link, destination: &str, oid: u32) -> Result<(), Failure> {
    link.execute(
        "UPDATE tables SET state = 'init', floor = NULL, run = NULL,
             position_epoch = NULL, position_commit = NULL, position_ordinal = NULL,
             applied = NULL, applying_from = NULL, applying_to = NULL, applying_step = NULL,
             needs_resync = false, rows_copied = 0, rows_total = NULL,
             error_code = NULL, error_message = NULL, error_next = NULL
         WHERE destination = $1 AND oid = $2",
        &[&destination, &oid],
    )
    .await?;
    copies::delete(link, destination, oid).await?;
    barriers::delete(link, destination, oid).await?;
    quarantine::clear(link, destination, oid).await
}

pub(super) async fn save_members(link: &Link, members: &[(u32, String)]) -> Result<(), Failure> {
    link.each(SAVE_MEMBER, members, async |link, (oid, key)| link.execute(SAVE_MEMBER, &[oid, key]).await.map(drop))
        .await
}

pub(super) async fn save_progress(link: &Link, progress: &Progress) -> Result<(), Failure> {
    let Progress { destination, checkpoint, positions } = progress;
    known_destination(link, destination).await?;
    if let Some(checkpoint) = checkpoint {
        link.execute(MOVE_CHECKPOINT, &[destination, &pg_lsn(*checkpoint)]).await?;
    }
    let moved: Vec<_> = positions.iter().map(|(oid, position)| (destination.as_str(), *oid, *position)).collect();
    move_positions(link, &moved).await
}

pub(super) async fn next_generation(link: &Link, destination: &str, lane: u32) -> Result<u64, Failure> {
    let rows = link
        .query(
            "INSERT INTO generations AS known (destination, lane, generation) VALUES ($1, $2, 1)
             ON CONFLICT (destination, lane) DO UPDATE SET generation = known.generation + 1
             RETURNING generation",
            &[&destination, &i64::from(lane)],
        )
        .await?;
    Ok(one(&rows)?.try_get::<_, i64>(0)?.cast_unsigned())
}

pub(super) async fn get_state(link: &Link, destination: &str, key: &str) -> Result<Option<Vec<u8>>, Failure> {
    let rows = link
        .query("SELECT value FROM plugin_state WHERE destination = $1 AND key = $2", &[&destination, &key.as_bytes()])
        .await?;
    Ok(rows.first().map(|row| row.try_get(0)).transpose()?)
}

pub(super) async fn set_state(link: &Link, destination: &str, key: &str, value: Option<&[u8]>) -> Result<(), Failure> {
    let key = key.as_bytes();
    let Some(value) = value else {
        let remove = "DELETE FROM plugin_state WHERE destination = $1 AND key = $2";
        return link.execute(remove, &[&destination, &key]).await.map(drop);
    };
    let rows = link
        .query(
            "SELECT count(*), coalesce(sum(octet_length(value)), 0)::bigint FROM plugin_state
             WHERE destination = $1 AND key <> $2",
            &[&destination, &key],
        )
        .await?;
    let row = one(&rows)?;
    check_total(destination, row.try_get(0)?, row.try_get(1)?, value)?;
    link.execute(
        "INSERT INTO plugin_state (destination, key, value) VALUES ($1, $2, $3)
         ON CONFLICT (destination, key) DO UPDATE SET value = excluded.value",
        &[&destination, &key, &value],
    )
    .await
    .map(drop)
}

/// Code, message and next step of an error, as they are stored.
fn bytes_of(error: Option<&TableError>) -> [Option<&[u8]>; 3] {
    [
        error.map(|error| error.code.as_bytes()),
        error.map(|error| error.message.as_bytes()),
        error.and_then(|error| error.next.as_ref()).map(|next| next.as_bytes()),
    ]
}
