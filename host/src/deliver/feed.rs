//! One table's changes, decoded into batches: from the stream while the table is live,
//! from the spool while it catches up. Both ways give the same batches.

use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::batch::{ChangeBatch, ChangeBuilder, RelationMap, RowPosition};
use crate::error::{Error, Result};
use crate::memory;
use crate::position::{Lsn, Position};
use crate::schema::history::{History, RelationColumn, looks_like};
use crate::schema::table::{ReplicaIdentity, TableSchema};
use crate::source::pgoutput::{Message, Relation};

/// The history of all tables, shared by whoever decodes.
#[derive(Clone)]
pub(super) struct SharedHistory(Arc<RwLock<History>>);

impl SharedHistory {
    pub fn new(history: History) -> SharedHistory {
        SharedHistory(Arc::new(RwLock::new(history)))
    }

    /// For look-ups. A panic elsewhere leaves whole versions only, so that what is there
    /// can be read all the same.
    pub fn read(&self) -> RwLockReadGuard<'_, History> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// For appending.
    pub fn write(&self) -> RwLockWriteGuard<'_, History> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A relation's columns, as versions are compared with them.
pub(super) fn relation_columns(relation: &Relation) -> Vec<RelationColumn<'_>> {
    let columns = relation.columns.iter();
    columns.map(|column| RelationColumn { name: &column.name, type_oid: column.type_oid }).collect()
}

/// Whether a relation tells nothing that differs from a version: columns, name and replica
/// identity.
pub(super) fn is_told_by(version: &TableSchema, relation: &Relation) -> bool {
    let identity = match version.replica_identity {
        ReplicaIdentity::Default => b'd',
        ReplicaIdentity::Nothing => b'n',
        ReplicaIdentity::Full => b'f',
        ReplicaIdentity::Index => b'i',
    };
    looks_like(version, &relation_columns(relation))
        && version.name == relation.name
        && identity == relation.identity
        && version.columns.iter().zip(&relation.columns).all(|(column, told)| column.identity == told.key)
}

/// The transaction a row belongs to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Transaction {
    /// LSN of the commit record.
    pub commit: Lsn,
    /// Microseconds since 1970-01-01 UTC.
    pub committed_at: i64,
    /// Transaction id.
    pub xid: u32,
}

/// One TRUNCATE of one table (P33).
#[derive(Clone, Copy, Debug)]
pub(super) struct Truncation {
    /// Where it stands.
    pub at: RowPosition,
    /// CASCADE was said.
    pub cascade: bool,
    /// RESTART IDENTITY was said.
    pub restart_identity: bool,
}

/// What a feed yields, in source order.
#[derive(Clone, Debug)]
pub(super) enum Fed {
    /// Changes of one schema.
    Batch(Arc<ChangeBatch>),
    /// The table was emptied.
    Truncate { schema: Arc<TableSchema>, truncation: Truncation },
    /// From here on rows have this schema.
    Schema(Arc<TableSchema>),
}

/// Why a change could not be decoded here.
pub(super) enum Undecoded {
    /// No known version of the table looks like the relation its rows came with: the
    /// catalog has to be asked once their transaction is at hand whole (P3).
    UnknownRelation,
    /// The change is not what the protocol says.
    Failed(Error),
}

impl From<Error> for Undecoded {
    fn from(error: Error) -> Self {
        Undecoded::Failed(error)
    }
}

/// Decodes the changes of one table.
pub(super) struct Feed {
    oid: u32,
    epoch: u32,
    history: SharedHistory,
    relation: Option<Arc<Relation>>,
    schema: Option<Arc<TableSchema>>,
    /// How the relation's columns fall on the schema's; none until the next row asks.
    map: Option<RelationMap>,
    /// Where `schema` was last looked up: rows of one transaction with no message
    /// between need no second look.
    looked_up: Option<(Lsn, Lsn)>,
    builder: Option<ChangeBuilder>,
    fed: Vec<Fed>,
}

impl Feed {
    /// A feed that knows no relation and no schema yet.
    pub fn new(oid: u32, epoch: u32, history: SharedHistory) -> Feed {
        Feed {
            oid,
            epoch,
            history,
            relation: None,
            schema: None,
            map: None,
            looked_up: None,
            builder: None,
            fed: Vec::new(),
        }
    }

    /// Rows behind this are encoded as `relation` says (P2).
    pub fn relation(&mut self, relation: Arc<Relation>) {
        self.relation = Some(relation);
        self.map = None;
        self.looked_up = None;
    }

    /// A version of the schema begins at `row` in `transaction`: what was decoded so
    /// far belongs to the one before.
    pub fn schema(&mut self, transaction: Transaction, row: Lsn) {
        self.looked_up = None;
        if let Some(schema) = self.look_up(transaction.commit, row) {
            let known = self.schema.as_ref().map(|schema| schema.snapshot);
            self.enter(schema.clone());
            if known != Some(schema.snapshot) {
                self.fed.push(Fed::Schema(schema));
            }
        }
    }

    /// Decodes one change of the table.
    pub fn change(
        &mut self,
        transaction: Transaction,
        row: Lsn,
        ordinal: u64,
        message: &Message,
    ) -> Result<(), Undecoded> {
        let at = RowPosition {
            position: Position { epoch: self.epoch, commit: transaction.commit, ordinal },
            committed_at: transaction.committed_at,
            xid: transaction.xid,
        };
        self.place(transaction.commit, row)?;
        if let Message::Truncate { cascade, restart_identity, .. } = message {
            return self.truncate(at, *cascade, *restart_identity);
        }
        self.ensure_map()?;
        let (Some(map), Some(builder)) = (&self.map, &mut self.builder) else {
            return Err(Undecoded::UnknownRelation);
        };
        if let Message::Oversized { bytes, limit, beginning, .. } = message {
            let schema = builder.schema();
            let error = memory::too_large(&schema.name, map.key_of(schema, beginning).as_deref(), *bytes, *limit);
            return Err(Undecoded::Failed(error));
        }
        match message {
            Message::Insert { new, .. } => builder.insert(map, new, at)?,
            Message::Update { old, new, .. } => builder.update(map, old.as_ref(), new, at)?,
            Message::Delete { old, .. } => builder.delete(map, old, at)?,
            _ => return Err(Undecoded::Failed(not_a_change(self.oid))),
        }
        Ok(())
    }

    /// Bytes that the open batch has taken for more rows than it has.
    pub fn reserved(&self) -> usize {
        self.builder.as_ref().map_or(0, ChangeBuilder::reserved)
    }

    /// Closes the open batch and takes what was fed so far.
    pub fn take(&mut self) -> std::vec::Drain<'_, Fed> {
        self.close();
        self.fed.drain(..)
    }

    /// Finds the schema in force for a row, and enters it if it is another one.
    fn place(&mut self, commit: Lsn, row: Lsn) -> Result<(), Undecoded> {
        if self.looked_up.is_some_and(|(at, from)| at == commit && from <= row) && self.schema.is_some() {
            return Ok(());
        }
        let schema = self.look_up(commit, row).ok_or(Undecoded::UnknownRelation)?;
        self.looked_up = Some((commit, row));
        self.enter(schema);
        Ok(())
    }

    fn look_up(&self, commit: Lsn, row: Lsn) -> Option<Arc<TableSchema>> {
        self.history.read().in_force(self.oid, commit, row)
    }

    fn enter(&mut self, schema: Arc<TableSchema>) {
        if self.schema.as_ref().is_some_and(|current| current.snapshot == schema.snapshot) {
            return;
        }
        self.close();
        self.builder = Some(ChangeBuilder::new(schema.clone()));
        self.schema = Some(schema);
        self.map = None;
    }

    fn close(&mut self) {
        if let Some(builder) = &mut self.builder
            && builder.rows() > 0
        {
            self.fed.push(Fed::Batch(Arc::new(builder.finish())));
        }
    }

    fn truncate(&mut self, at: RowPosition, cascade: bool, restart_identity: bool) -> Result<(), Undecoded> {
        let schema = self.schema.clone().ok_or(Undecoded::UnknownRelation)?;
        self.close();
        self.fed.push(Fed::Truncate { schema, truncation: Truncation { at, cascade, restart_identity } });
        Ok(())
    }

    /// Lays the relation's columns over the schema in force: by the version that looks
    /// like the relation, which may be an older one (P2).
    fn ensure_map(&mut self) -> Result<(), Undecoded> {
        if self.map.is_some() {
            return Ok(());
        }
        let (Some(relation), Some(schema)) = (&self.relation, &self.schema) else {
            return Err(Undecoded::UnknownRelation);
        };
        let fits = |version: &TableSchema| is_told_by(version, relation);
        let alike = self.history.read().matching(self.oid, schema.snapshot, fits).ok_or(Undecoded::UnknownRelation)?;
        let ordinals = alike.columns.iter().map(|column| Some(column.ordinal)).collect();
        self.map = Some(RelationMap::new(ordinals, schema));
        Ok(())
    }
}

fn not_a_change(oid: u32) -> Error {
    Error::permanent("source.protocol", format!("table {oid}: a message that is no change stands among its changes"))
}
