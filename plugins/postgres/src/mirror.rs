//! The destination: what each call of the contract does.

use std::collections::{BTreeMap, HashMap};

use tidegate_sdk::model::{Ack, Batch, Content, Failure, Group, Notice, PhysicalTable, Position, SchemaChange, Table};

use crate::connect::Connector;
use crate::ddl;
use crate::error::{of_destination, of_table};
use crate::merge::{write_copy, write_merge};
use crate::metadata::{Metadata, Stored, read_stored};
use crate::preflight;
use crate::session::Session;
use crate::settings::Settings;
use crate::target::Target;
use crate::transaction::{Origin, Transaction};

/// One lane of one destination.
pub struct Mirror<C: Connector> {
    connector: C,
    settings: Settings,
    application: String,
    metadata: Metadata,
    session: Option<Session<C::Stream>>,
    /// Tables that were attached, by id.
    tables: HashMap<u32, Target>,
}

/// Who opens a mirror.
#[derive(Clone, Debug)]
pub struct Identity {
    /// Name of the pipeline.
    pub pipeline: String,
    /// Name of the destination.
    pub destination: String,
    /// The lane, counted from 0.
    pub lane: u32,
    /// Greater in every later instance of the lane.
    pub generation: u64,
}

impl<C: Connector> Mirror<C> {
    /// Connects and takes the lane from earlier generations.
    pub fn open(connector: C, settings: Settings, identity: &Identity) -> Result<Mirror<C>, Failure> {
        settings
            .check()
            .map_err(|reason| of_destination("postgres.settings", format!("the destination's settings: {reason}")))?;
        let application = settings.application_name.clone();
        let application =
            application.unwrap_or_else(|| format!("tidegate/{}/{}", identity.pipeline, identity.destination));
        let metadata = Metadata::new(&settings, identity);
        let session = Session::open(&connector, &settings, &application, &metadata)?;
        Ok(Mirror { connector, settings, application, metadata, session: Some(session), tables: HashMap::new() })
    }

    /// `server_version` of the destination.
    pub fn server_version(&self) -> &str {
        self.session.as_ref().map_or("", |session| &session.version)
    }

    /// See the contract. Problems of a table are notices of level `error`.
    pub fn preflight(&mut self, tables: &[Table]) -> Result<Vec<Notice>, Failure> {
        self.call(|mirror, session| preflight::check(session, mirror.settings, mirror.metadata, tables))
    }

    /// See the contract; asks no server.
    pub fn render_table(&self, table: &Table) -> Result<PhysicalTable, Failure> {
        Ok(Target::new(table, &self.settings)?.physical())
    }

    /// See the contract. The snapshot is the one stored with the table.
    pub fn inspect_table(&mut self, table: &Table) -> Result<Option<PhysicalTable>, Failure> {
        const WHAT: &str = "inspect a table";
        let target = Target::new(table, &self.settings)?;
        self.call(|mirror, session| {
            let answers = session.query(&ddl::look(&target), WHAT, Some(target.id))?;
            let Some(found) = ddl::found(&target, &answers)? else { return Ok(None) };
            let answers = session.query(&mirror.metadata.look_up(target.id), WHAT, Some(target.id))?;
            let stored = rows_of(&target, &answers)?.into_iter().find(|stored| is_at(stored, &target));
            Ok(Some(PhysicalTable {
                columns: found.columns,
                snapshot: stored.map(|stored| stored.snapshot),
                ..target.physical()
            }))
        })
    }

    /// Makes the table this lane's. The position is that of a finished copy or of the
    /// changes behind it, as long as the table is still there.
    pub fn attach_table(&mut self, table: &Table) -> Result<Option<Position>, Failure> {
        let target = Target::new(table, &self.settings)?;
        let position = self.call(|mirror, session| {
            let (mut tx, _) = Transaction::begin(session, mirror.metadata, &[], "attach a table")?;
            let answers = tx.query(&mirror.metadata.claim(&[target.id]), target.id)?;
            let there = is_there(&answers);
            let stored = rows_of(&target, &answers)?.into_iter().find(|stored| is_at(stored, &target));
            tx.commit()?;
            Ok(stored.filter(|_| there).and_then(|stored| stored.position))
        })?;
        self.tables.insert(target.id, target);
        Ok(position)
    }

    /// See the contract: a new run begins empty; one that is known goes on, and so does one
    /// that has ended, as far as that is all that is left to say.
    pub fn begin_copy(&mut self, table: &Table, run: &str) -> Result<(), Failure> {
        let target = Target::new(table, &self.settings)?;
        let goes_on = table.details.iter().any(|(name, value)| name == "resume" && value == "true");
        self.call(|mirror, session| {
            let (mut tx, _) = Transaction::begin(session, mirror.metadata, &[], "begin a copy")?;
            tx.query(&mirror.metadata.creation_lock(&target.quoted), target.id)?;
            let answers = tx.query(&mirror.metadata.stored_at(&target), target.id)?;
            let stored = rows_of(&target, &answers)?;
            let ours = stored.iter().any(|stored| is_at(stored, &target));
            let known = stored.iter().any(|stored| {
                let same = stored.table == target.id && stored.run.as_deref() == Some(run);
                same && (goes_on || stored.position.is_none())
            });
            if known && ours {
                let answers = tx.query(&mirror.metadata.claim(&[target.id]), target.id)?;
                if goes_on && !is_there(&answers) {
                    return Err(run_unknown(&target, run));
                }
            } else if goes_on {
                return Err(run_unknown(&target, run));
            } else {
                ddl::make_empty(&mut tx, &target, ours)?;
                tx.add(
                    &mirror.metadata.begin_run(&target, run),
                    Origin { table: Some(target.id), ..Origin::default() },
                )?;
            }
            tx.commit()
        })?;
        self.tables.insert(target.id, target);
        Ok(())
    }

    /// See the contract.
    pub fn finish_copy(&mut self, table: &Table, run: &str, as_of: Position) -> Result<(), Failure> {
        let target = Target::new(table, &self.settings)?;
        self.call(|mirror, session| {
            let (mut tx, stored) = Transaction::begin(session, mirror.metadata, &[target.id], "finish a copy")?;
            let stored = writable(mirror.metadata, &stored, &target)?;
            check_run(stored, &target, run)?;
            // Said before: changes may have moved the position on since.
            if stored.position.is_none_or(|position| position < as_of) {
                let origin = Origin { table: Some(target.id), ..Origin::default() };
                tx.add(&mirror.metadata.forget_copied(target.id), origin)?;
                tx.add(&mirror.metadata.set_position(target.id, as_of), origin)?;
            }
            tx.commit()
        })
    }

    /// See the contract: what the steps would do and cost.
    pub fn check_schema(&mut self, change: &SchemaChange) -> Result<Vec<Notice>, Failure> {
        self.call(|mirror, session| ddl::describe(session, mirror.settings, change))
    }

    /// All steps and the snapshot id in one transaction.
    pub fn apply_schema(&mut self, change: &SchemaChange) -> Result<Vec<Notice>, Failure> {
        let target = Target::new(&change.after, &self.settings)?;
        let before = Target::new(&change.before, &self.settings)?;
        self.call(|mirror, session| {
            let (mut tx, stored) = Transaction::begin(session, mirror.metadata, &[target.id], "change a table")?;
            // It is where it was until all of the change is done.
            let is_done = stored.iter().any(|stored| is_at(stored, &target) && stored.snapshot >= target.snapshot);
            let stored = writable(mirror.metadata, &stored, if is_done { &target } else { &before })?;
            if stored.snapshot < target.snapshot {
                let origin = Origin { table: Some(target.id), ..Origin::default() };
                ddl::apply(&mut tx, mirror.settings, change)?;
                if !is_at(stored, &target) {
                    tx.add(&mirror.metadata.set_place(&target), origin)?;
                }
                tx.add(&mirror.metadata.set_snapshot(target.id, target.snapshot), origin)?;
            }
            tx.commit()
        })?;
        self.tables.insert(target.id, target);
        Ok(Vec::new())
    }

    /// One transaction, durable on return.
    pub fn write_group(&mut self, group: &Group) -> Result<Ack, Failure> {
        let mut ids: Vec<u32> = group.batches.iter().map(|batch| batch.table_id).collect();
        ids.sort_unstable();
        ids.dedup();
        // Taken out for the call, so that the session and the tables can both be lent.
        let tables = std::mem::take(&mut self.tables);
        let written = self.call(|mirror, session| {
            let (mut tx, stored) = Transaction::begin(session, mirror.metadata, &ids, "write a group")?;
            let mut positions: BTreeMap<u32, Position> = BTreeMap::new();
            for (index, batch) in (0..).zip(&group.batches) {
                let Some(target) = tables.get(&batch.table_id) else { return Err(not_attached(batch)) };
                let stored = writable(mirror.metadata, &stored, target)?;
                let reached = positions.get(&target.id).copied().or(stored.position);
                if batch.through.is_some_and(|through| reached.is_some_and(|reached| through <= reached)) {
                    continue;
                }
                let origin = Origin { table: Some(target.id), ticket: group.ticket, batch: index, row: None };
                write_batch(&mut tx, mirror.metadata, target, stored, origin, batch)?;
                if let Some(through) = batch.through {
                    positions.insert(target.id, through);
                }
            }
            for (table, position) in positions {
                tx.add(
                    &mirror.metadata.set_position(table, position),
                    Origin { table: Some(table), ticket: group.ticket, ..Origin::default() },
                )?;
            }
            tx.commit()
        });
        self.tables = tables;
        written.map(|()| Ack { durable: group.ticket, refused: Vec::new(), wake_after_ms: None })
    }

    /// Drops the table if this destination made it, and forgets it.
    pub fn drop_table(&mut self, table: &Table) -> Result<(), Failure> {
        let target = Target::new(table, &self.settings)?;
        self.call(|mirror, session| {
            let (mut tx, stored) = Transaction::begin(session, mirror.metadata, &[target.id], "drop a table")?;
            let origin = Origin { table: Some(target.id), ..Origin::default() };
            if stored.iter().any(|stored| is_at(stored, &target)) {
                tx.add(&format!("DROP TABLE IF EXISTS {}", target.quoted), origin)?;
                tx.add(&mirror.metadata.forget(target.id), origin)?;
            }
            tx.commit()
        })?;
        self.tables.remove(&target.id);
        Ok(())
    }

    /// Says good-bye to the server.
    pub fn close(self) {
        if let Some(session) = self.session {
            session.client.terminate();
        }
    }

    /// Runs a call in the session, or in a new one if that is lost. A session that was
    /// lost while nothing was going on is found out by the first statement of the next
    /// call: that call is begun again.
    fn call<T>(
        &mut self,
        mut work: impl FnMut(&Borrowed<'_>, &mut Session<C::Stream>) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let borrowed = Borrowed { settings: &self.settings, metadata: &self.metadata };
        let mut fresh = self.session.is_none();
        loop {
            let mut session = match self.session.take() {
                Some(session) => session,
                None => Session::open(&self.connector, &self.settings, &self.application, &self.metadata)?,
            };
            let result = work(&borrowed, &mut session);
            let stale = session.lost && !session.answered && !fresh;
            if session.settle() {
                self.session = Some(session);
            }
            match result {
                Err(_) if stale => fresh = true,
                result => return result,
            }
        }
    }
}

/// What a call may read while it has the session.
struct Borrowed<'a> {
    settings: &'a Settings,
    metadata: &'a Metadata,
}

fn write_batch<S: crate::connect::Stream>(
    tx: &mut Transaction<'_, S>,
    metadata: &Metadata,
    target: &Target,
    stored: &Stored,
    origin: Origin,
    batch: &Batch,
) -> Result<(), Failure> {
    match &batch.content {
        Content::Copy(copy) => {
            check_run(stored, target, &copy.run)?;
            if stored.position.is_some() {
                return Err(of_table(
                    target.id,
                    "postgres.run-finished",
                    format!("{}: rows of run {} came after its end", target.shown(), copy.run),
                ));
            }
            let answers = tx.query(&metadata.note_copied(target.id, &copy.run, &copy.batch_id), target.id)?;
            if answers.iter().all(|answer| answer.count == 0) {
                return Ok(());
            }
            write_copy(tx, target, origin, copy)
        }
        Content::Merge(merge) => write_merge(tx, target, origin, merge),
        Content::Truncate(_) => tx.add(&format!("TRUNCATE TABLE {}", target.quoted), origin),
        Content::Changes(_) | Content::Messages(_) => Err(of_table(
            target.id,
            "unsupported",
            format!("{}: this plugin takes copies, merges and truncations only", target.shown()),
        )),
    }
}

/// The stored row of a table that this lane may write.
fn writable<'a>(metadata: &Metadata, stored: &'a [Stored], target: &Target) -> Result<&'a Stored, Failure> {
    match stored.iter().find(|stored| is_at(stored, target) && stored.table == target.id) {
        None => Err(of_table(
            target.id,
            "resync-needed",
            format!("{}: the destination knows of no copy of it. Resync the table", target.shown()),
        )),
        Some(stored) if metadata.is_mine(stored) => Ok(stored),
        Some(stored) => {
            let message = format!(
                "{}: lane {}, generation {}, has attached it since; this instance writes it no more",
                target.shown(),
                stored.lane,
                stored.generation
            );
            Err(of_table(target.id, "fenced", message))
        }
    }
}

fn check_run(stored: &Stored, target: &Target, run: &str) -> Result<(), Failure> {
    if stored.run.as_deref() == Some(run) {
        return Ok(());
    }
    let under_way = stored.run.as_deref().unwrap_or("none");
    Err(of_table(
        target.id,
        "postgres.wrong-run",
        format!("{}: run {run} is over, the run under way is {under_way}", target.shown()),
    ))
}

/// Whether a claimed table exists.
fn is_there(answers: &[crate::protocol::Answer]) -> bool {
    let mut rows = answers.iter().flat_map(|answer| &answer.rows);
    rows.any(|row| row.last().is_some_and(|there| there.as_deref() == Some("t")))
}

/// Rows that the host counts on are not here.
fn run_unknown(target: &Target, run: &str) -> Failure {
    of_table(target.id, "run-unknown", format!("{}: there is nothing here of run {run}", target.shown()))
}

fn is_at(stored: &Stored, target: &Target) -> bool {
    (&stored.schema, &stored.name) == (&target.schema, &target.name)
}

fn rows_of(target: &Target, answers: &[crate::protocol::Answer]) -> Result<Vec<Stored>, Failure> {
    answers.first().and_then(read_stored).ok_or_else(|| {
        of_table(
            target.id,
            "postgres.metadata",
            format!("{}: this plugin's own row for it cannot be read. Resync the table", target.shown()),
        )
    })
}

fn not_attached(batch: &Batch) -> Failure {
    of_table(
        batch.table_id,
        "postgres.contract",
        format!("table {} was not attached before its first batch", batch.table_id),
    )
}
