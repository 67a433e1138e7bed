//! The checks with an instance, for one mode.

use std::sync::Arc;

use serde_json::Value;

use super::rows::{self, Cells, STEPS};
use super::{Check, Outcome};
use crate::plugin::{CallError, Instance, InstanceOptions, Plugin, same_table, sorted_columns};
use crate::position::{Lsn, SnapshotId};
use crate::schema::plan::plan;
use crate::schema::table::TableSchema;
use crate::schema::wire::snapshot_to_wire;
use crate::wire;

/// Why a check is not passed.
pub(super) enum Problem {
    /// It failed.
    Failed(String),
    /// It was not for this plugin.
    Skipped(&'static str),
}

type Done = Result<(), Problem>;

impl From<CallError> for Problem {
    fn from(error: CallError) -> Problem {
        Problem::Failed(error.with_code())
    }
}

fn failed<T>(why: impl Into<String>) -> Result<T, Problem> {
    Err(Problem::Failed(why.into()))
}

/// One mode's run.
pub(super) struct Suite<'a> {
    plugin: Arc<Plugin>,
    options: InstanceOptions,
    session: wire::Session,
    mode: &'static str,
    tell: &'a mut dyn FnMut(Check),
    instance: Option<Instance>,
    table: Arc<TableSchema>,
    ticket: u64,
    commit: u64,
    turn: u64,
    /// Up to where the table's changes are durable.
    durable: Option<wire::Position>,
}

impl<'a> Suite<'a> {
    pub(super) fn new(
        plugin: &Arc<Plugin>,
        options: &InstanceOptions,
        settings: &Value,
        mode: &'static str,
        tell: &'a mut dyn FnMut(Check),
    ) -> Suite<'a> {
        let session = wire::Session {
            pipeline: "test".to_owned(),
            destination: options.destination.clone(),
            settings: settings.to_string(),
            lane: 0,
            lanes: 1,
            // Greater than in an earlier run, whose writes the destination may remember.
            generation: now_ms(),
            details: vec![("host-version".to_owned(), env!("CARGO_PKG_VERSION").to_owned())],
        };
        Suite {
            plugin: plugin.clone(),
            options: options.clone(),
            session,
            mode,
            tell,
            instance: None,
            table: Arc::new(rows::table(mode)),
            ticket: 0,
            // So are positions.
            commit: now_ms() << 8,
            turn: 0,
            durable: None,
        }
    }

    /// All checks, one behind the other; each begins with an open instance, if it can.
    pub(super) async fn run(mut self) {
        if !self.check("open", async |suite| suite.reopen().await).await {
            return;
        }
        self.check("preflight: read-only checks of the table", Suite::preflight).await;
        self.check("render-table: the same twice", Suite::renders).await;
        self.check("drop-table: a table that is not there, twice", Suite::drops).await;
        self.check("attach-tables: a table that is not there has no position", Suite::attaches_new).await;
        if !self.check("copy: of an empty table", Suite::copies_nothing).await {
            return;
        }
        self.check("copy: begins anew, every batch twice, finished twice", Suite::copies).await;
        self.check("inspect-table: as render-table says", Suite::inspects).await;
        self.check("write-group: every batch twice, then durable by flush", Suite::inserts).await;
        self.check("write-group: rows with cells that were not sent", Suite::partial_rows).await;
        self.check("write-group: old images and other keys", Suite::old_images).await;
        self.check("write-group: deletes", Suite::deletes).await;
        self.check("write-group: truncate", Suite::truncates).await;
        self.check("flush: with nothing to do", Suite::flushes).await;
        self.check("restart: an instance that was dropped with accepted rows", Suite::restarts).await;
        self.check("position: what is stored with the data comes back", Suite::positions).await;
        for (kind, change) in STEPS {
            let name = format!("schema: {kind}, twice, and rows behind it");
            self.check(&name, async move |suite| suite.steps(kind, change).await).await;
        }
        self.check("drop-table: twice", Suite::drops).await;
        self.check("close", Suite::closes).await;
    }

    /// Makes a check, and whether it was passed.
    async fn check(&mut self, name: &str, body: impl AsyncFnOnce(&mut Suite<'a>) -> Done) -> bool {
        let is_open = self.instance.as_ref().is_some_and(Instance::is_usable);
        let ready = if is_open || name == "open" { Ok(()) } else { self.reopen().await };
        let done = match ready {
            Ok(()) => body(self).await,
            Err(why) => Err(why),
        };
        let (outcome, detail) = match done {
            Ok(()) => (Outcome::Ok, None),
            Err(Problem::Failed(why)) => (Outcome::Failed, Some(why)),
            Err(Problem::Skipped(why)) => (Outcome::Skipped, Some(why.to_owned())),
        };
        (self.tell)(Check { check: name.to_owned(), mode: Some(self.mode), outcome, detail });
        outcome != Outcome::Failed
    }

    fn instance(&mut self) -> Result<&mut Instance, Problem> {
        self.instance.as_mut().ok_or_else(|| Problem::Failed("there is no instance".to_owned()))
    }

    fn wire_table(&self) -> wire::Table {
        self.table.to_wire(&self.table.name, self.mode, "{}")
    }

    /// A new instance, that is told of the table.
    async fn reopen(&mut self) -> Done {
        self.open().await?;
        if self.durable.is_some() {
            self.attach().await?;
        }
        Ok(())
    }

    async fn open(&mut self) -> Done {
        // Dropped as after a trap, not closed.
        self.instance = None;
        self.session.generation += 1;
        let mut instance = self.plugin.instantiate(&self.options).await?;
        instance.open(&self.session).await?;
        self.instance = Some(instance);
        Ok(())
    }

    async fn attach(&mut self) -> Result<Option<wire::Position>, Problem> {
        let table = self.wire_table();
        let mut positions = self.instance()?.attach_tables(&[table]).await?;
        Ok(positions.pop().flatten())
    }

    async fn preflight(&mut self) -> Done {
        let table = self.wire_table();
        let notices = self.instance()?.preflight(&[table]).await?;
        match notices.into_iter().find(|notice| notice.level == "error") {
            Some(notice) => failed(format!("{} ({})", notice.message, notice.code)),
            None => Ok(()),
        }
    }

    async fn renders(&mut self) -> Done {
        let table = self.wire_table();
        let first = self.instance()?.render_table(&table).await?;
        let second = self.instance()?.render_table(&table).await?;
        if !same_table(&first, &second) {
            return failed("two answers about one table differ");
        }
        Ok(())
    }

    async fn inspects(&mut self) -> Done {
        let table = self.wire_table();
        let rendered = self.instance()?.render_table(&table).await?;
        let Some(there) = self.instance()?.inspect_table(&table).await? else {
            return failed("it says that there is no table");
        };
        let (wanted, found) = (sorted_columns(&rendered), sorted_columns(&there));
        if wanted != found {
            return failed(format!("the table is to be {wanted:?}, and is {found:?}"));
        }
        Ok(())
    }

    async fn drops(&mut self) -> Done {
        let table = self.wire_table();
        for _ in 0..2 {
            match self.instance()?.drop_table(&table).await {
                Ok(()) => {}
                Err(CallError::Failure(failure)) if failure.code == "unsupported" => {
                    return Err(Problem::Skipped("it does not drop tables"));
                }
                Err(error) => return Err(error.into()),
            }
        }
        self.durable = None;
        Ok(())
    }

    async fn attaches_new(&mut self) -> Done {
        match self.attach().await? {
            // Of an earlier run, where the plugin does not drop tables.
            Some(position) if self.plugin.can("transactional") && position.commit < self.commit => Ok(()),
            None => Ok(()),
            Some(position) => failed(format!("it returns {position:?}")),
        }
    }

    async fn copies_nothing(&mut self) -> Done {
        self.copy("empty", &[]).await
    }

    async fn copies(&mut self) -> Done {
        self.copy("rows", &[&[1, 2, 3, 4], &[5, 6, 7, 8]]).await
    }

    async fn copy(&mut self, run: &str, batches: &[&[i32]]) -> Done {
        let (table, run) = (self.wire_table(), format!("{run}-{}", self.commit));
        self.commit += 1;
        let as_of = rows::position(self.commit, 0);
        self.instance()?.begin_copy(&table, &run).await?;
        for (number, ids) in batches.iter().enumerate() {
            let content = wire::Content::Copy(wire::CopyRows {
                run: run.clone(),
                batch_id: number.to_string(),
                as_of,
                rows: rows::rows(&self.table, ids, self.turn, Cells::All),
            });
            self.write_twice(content, None).await?;
        }
        self.flush().await?;
        for _ in 0..2 {
            self.instance()?.finish_copy(&table, &run, as_of).await?;
        }
        self.durable = Some(as_of);
        let position = self.attach().await?;
        self.compare(position)
    }

    /// What a transactional plugin returns is what was made durable.
    fn compare(&self, position: Option<wire::Position>) -> Done {
        match (self.plugin.can("transactional"), position) {
            (true, position) if place(position) != place(self.durable) => {
                failed(format!("{:?} is durable, and it returns {position:?}", self.durable))
            }
            (false, Some(position)) => failed(format!("it is not transactional, and returns {position:?}")),
            _ => Ok(()),
        }
    }

    /// A group of one batch, and the same again.
    async fn write_twice(&mut self, content: wire::Content, through: Option<wire::Position>) -> Done {
        let group = self.group(content, through);
        self.write(&group).await?;
        self.write(&group).await
    }

    fn group(&mut self, content: wire::Content, through: Option<wire::Position>) -> wire::Group {
        self.ticket += 1;
        let (table, snapshot) = (self.wire_table(), snapshot_to_wire(self.table.snapshot));
        let batch = wire::Batch { table_id: table.id, snapshot, through, content };
        let details = vec![(format!("shape.{}", table.id), table.shape)];
        wire::Group { ticket: self.ticket, whole: true, batches: vec![batch], details }
    }

    async fn write(&mut self, group: &wire::Group) -> Done {
        let ack = self.instance()?.write_group(group).await?;
        match ack.refused.first() {
            Some(refusal) => failed(format!("it refuses row {}: {} ({})", refusal.row, refusal.message, refusal.code)),
            None => Ok(()),
        }
    }

    async fn flush(&mut self) -> Done {
        let ticket = self.ticket;
        let ack = self.instance()?.flush().await?;
        if ack.durable < ticket && ticket > 0 {
            return failed(format!("`flush` returned with {} durable, and ticket {ticket} accepted", ack.durable));
        }
        Ok(())
    }

    /// Changes twice, then durable.
    async fn settle(&mut self, content: wire::Content, rows: usize) -> Done {
        let through = rows::position(self.commit, rows);
        self.write_twice(content, Some(through)).await?;
        self.flush().await?;
        self.durable = Some(through);
        Ok(())
    }

    /// These rows as they are to be, inserted or updated.
    fn upserts(&mut self, ids: &[i32], op: u8, cells: Cells) -> wire::Content {
        (self.commit, self.turn) = (self.commit + 1, self.turn + 1);
        let rows = rows::rows(&self.table, ids, self.turn, cells);
        let sequence = rows::sequence(self.commit, ids.len());
        match self.mode {
            "merge" => merge(sequence, rows, rows::none()),
            _ => changes(sequence, vec![op; ids.len()], rows),
        }
    }

    async fn inserts(&mut self) -> Done {
        let ids: Vec<i32> = (10..30).collect();
        let content = self.upserts(&ids, 0, Cells::All);
        self.settle(content, ids.len()).await
    }

    async fn partial_rows(&mut self) -> Done {
        if self.mode == "merge" && !self.plugin.can("partial-rows") {
            return Err(Problem::Skipped("it has no `partial-rows`, and is sent whole rows"));
        }
        let content = self.upserts(&[10, 11, 12], 1, Cells::NoText);
        self.settle(content, 3).await
    }

    async fn old_images(&mut self) -> Done {
        (self.commit, self.turn) = (self.commit + 1, self.turn + 1);
        let sequence = rows::sequence(self.commit, 2);
        let old = |cells| rows::rows(&self.table, &[13, 14], self.turn - 1, cells);
        let content = match self.mode {
            "merge" => {
                // Two rows have other keys; their old ones are deleted.
                let rows = rows::rows(&self.table, &[113, 114], self.turn, Cells::All);
                wire::Content::Merge(wire::MergeRows {
                    sequence: rows::sequence(self.commit, 4),
                    upserts: rows,
                    moved_index: vec![0, 1],
                    moved_from: old(Cells::Key),
                    deletes: old(Cells::Key),
                })
            }
            _ => wire::Content::Changes(wire::ChangeRows {
                sequence,
                ops: vec![1, 1],
                rows: rows::rows(&self.table, &[13, 14], self.turn, Cells::All),
                old_index: vec![0, 1],
                old_rows: old(Cells::All),
            }),
        };
        self.settle(content, if self.mode == "merge" { 4 } else { 2 }).await
    }

    async fn deletes(&mut self) -> Done {
        self.commit += 1;
        let gone = rows::rows(&self.table, &[15, 16, 17], self.turn, Cells::Key);
        let sequence = rows::sequence(self.commit, 3);
        let content = match self.mode {
            "merge" => merge(sequence, rows::none(), gone),
            _ => changes(sequence, vec![2; 3], gone),
        };
        self.settle(content, 3).await
    }

    async fn truncates(&mut self) -> Done {
        self.commit += 1;
        let sequence = rows::sequence(self.commit, 1);
        let truncation = wire::Truncation { sequence, cascade: false, restart_identity: true };
        self.settle(wire::Content::Truncate(truncation), 1).await?;
        // Not empty for what comes.
        self.inserts().await
    }

    async fn flushes(&mut self) -> Done {
        self.flush().await?;
        self.flush().await
    }

    async fn restarts(&mut self) -> Done {
        let content = self.upserts(&[40, 41, 42], 0, Cells::All);
        let (through, before) = (rows::position(self.commit, 3), self.durable);
        let group = self.group(content, Some(through));
        self.write(&group).await?;
        self.open().await?;
        let position = self.attach().await?;
        if self.plugin.can("transactional") && place(position) == place(Some(through)) {
            self.durable = position;
            return Ok(());
        }
        self.durable = before;
        self.compare(position)?;
        // It was not durable, and is sent again.
        self.write(&group).await?;
        self.flush().await?;
        self.durable = Some(through);
        Ok(())
    }

    async fn positions(&mut self) -> Done {
        if !self.plugin.can("transactional") {
            return Err(Problem::Skipped("it is not `transactional`"));
        }
        // A batch without a row brings one all the same: its rows went into quarantine.
        let content = self.upserts(&[], 0, Cells::All);
        self.settle(content, 1).await?;
        self.open().await?;
        let position = self.attach().await?;
        self.compare(position)
    }

    async fn steps(&mut self, kind: &'static str, change: fn(&mut TableSchema)) -> Done {
        let before = self.table.clone();
        let mut after = TableSchema::clone(&before);
        change(&mut after);
        self.commit += 1;
        after.snapshot = SnapshotId { commit: Lsn(self.commit), message: Lsn(self.commit) };
        let plan = plan(before, Arc::new(after));
        if plan.steps.is_empty() || plan.steps.iter().any(|step| !self.plugin.can(step.kind.as_str())) {
            return Err(Problem::Skipped(match kind {
                "drop-column" | "rename-column" => "it does not have this step, or not the one that goes before",
                _ => "it does not have this step",
            }));
        }
        let wire = plan.steps_to_wire(0..plan.steps.len(), |version| version.to_wire(&version.name, self.mode, "{}"));
        self.instance()?.check_schema(&wire).await?;
        // An interruption leaves the host in doubt: it may come again.
        for _ in 0..2 {
            self.instance()?.apply_schema(&wire).await?;
        }
        self.table = plan.after.clone();
        self.attach().await?;
        let content = self.upserts(&[50, 51, 52], 0, Cells::All);
        self.settle(content, 3).await?;
        self.inspects().await
    }

    async fn closes(&mut self) -> Done {
        let closed = self.instance()?.close().await;
        self.instance = None;
        Ok(closed?)
    }
}

fn changes(sequence: wire::Sequence, ops: Vec<u8>, rows: wire::Rows) -> wire::Content {
    wire::Content::Changes(wire::ChangeRows { sequence, ops, rows, old_index: Vec::new(), old_rows: rows::none() })
}

fn merge(sequence: wire::Sequence, upserts: wire::Rows, deletes: wire::Rows) -> wire::Content {
    wire::Content::Merge(wire::MergeRows {
        sequence,
        upserts,
        moved_index: Vec::new(),
        moved_from: rows::none(),
        deletes,
    })
}

fn place(position: Option<wire::Position>) -> Option<(u32, u64, u64)> {
    position.map(|at| (at.epoch, at.commit, at.ordinal))
}

fn now_ms() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(1, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX >> 16))
}
