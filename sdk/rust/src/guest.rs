//! The trait a plugin implements, and what stands between it and the component's
//! exports.

use std::any::Any;
use std::cell::RefCell;
use std::marker::PhantomData;

use schemars::JsonSchema;
use serde::de::DeserializeOwned;

use crate::bindings::exports::tidegate::destination::plugin::Guest;
use crate::model::{
    Ack, Failure, Group, Manifest, Notice, PhysicalTable, Position, Ready, SchemaChange, Session as WireSession, Table,
};
use crate::settings;

/// What a plugin is told when it is opened.
#[derive(Clone, Debug)]
pub struct Session<S> {
    /// Name of the pipeline.
    pub pipeline: String,
    /// Name of the destination in the configuration.
    pub destination: String,
    /// The destination's settings. Of a secret they hold only the name.
    pub settings: S,
    /// This instance's lane, counted from 0, and how many there are.
    pub lane: u32,
    /// How many lanes the destination has.
    pub lanes: u32,
    /// Greater in every later instance of this lane, across restarts. What an earlier
    /// one left under way must not land over this one's writes.
    pub generation: u64,
    /// Open set: memory-bytes, call-ms, host-version.
    pub details: Vec<(String, String)>,
}

/// A destination.
///
/// One instance serves one lane. Its functions are called one at a time, and every
/// one may be called again with the same arguments after a failure or a restart: the
/// host goes on from what is durable, not from what it called.
pub trait Destination: Sized + 'static {
    /// Settings of the destination. Their JSON Schema is made from the type, and the
    /// host refuses what does not fit it before the plugin is opened.
    type Settings: DeserializeOwned + JsonSchema;
    /// Settings of a table; read them with [`Table::settings_as`].
    type TableSettings: DeserializeOwned + JsonSchema;
    /// Name of the plugin, as its file is called.
    const NAME: &'static str;
    /// Usually `env!("CARGO_PKG_VERSION")`.
    const VERSION: &'static str;
    /// One line, for a person.
    const DESCRIPTION: &'static str;
    /// What it asks for: `network:<setting>`, `files:<setting>`, `secret:<name>`,
    /// `inject:<name>`, `sign:<name>`.
    const PERMISSIONS: &'static [&'static str] = &[];

    /// What it can do: [`crate::capability`].
    fn capabilities() -> Vec<&'static str>;

    /// Connects. Lane 0 comes first.
    fn open(session: Session<Self::Settings>) -> Result<(Self, Ready), Failure>;

    /// Read-only checks of all tables of the destination, before anything is written
    /// and again when a table or a schema is new. In lane 0.
    fn preflight(&mut self, tables: &[Table]) -> Result<Vec<Notice>, Failure> {
        let _ = tables;
        Ok(Vec::new())
    }

    /// What the table is to be there, from names and types alone.
    fn render_table(&mut self, table: &Table) -> Result<PhysicalTable, Failure>;

    /// What it is there; `None` if it does not exist. By default what
    /// [`render_table`](Self::render_table) says, for destinations that keep no tables.
    fn inspect_table(&mut self, table: &Table) -> Result<Option<PhysicalTable>, Failure> {
        self.render_table(table).map(Some)
    }

    /// Before this instance's first batch of the table. A transactional plugin
    /// returns the `through` that is stored there with the data; all others `None`.
    fn attach_table(&mut self, table: &Table) -> Result<Option<Position>, Failure> {
        let _ = table;
        Ok(None)
    }

    /// Makes the table exist for a copy. A new run begins empty and without position,
    /// and no write of an earlier run may land later.
    fn begin_copy(&mut self, table: &Table, run: &str) -> Result<(), Failure> {
        let _ = (table, run);
        Ok(())
    }

    /// All rows of the run are durable: puts the table in place. Idempotent.
    fn finish_copy(&mut self, table: &Table, run: &str, as_of: Position) -> Result<(), Failure> {
        let _ = (table, run, as_of);
        Ok(())
    }

    /// Read-only: what [`apply_schema`](Self::apply_schema) would do and cost. An
    /// error is a no.
    fn check_schema(&mut self, change: &SchemaChange) -> Result<Vec<Notice>, Failure> {
        let _ = change;
        Ok(Vec::new())
    }

    /// Runs the steps in order. Nothing of the table is merely accepted when this is
    /// called; it is attached as `change.after` on return. A step that is done
    /// already is a success.
    fn apply_schema(&mut self, change: &SchemaChange) -> Result<Vec<Notice>, Failure> {
        let _ = change;
        Ok(Vec::new())
    }

    /// Takes the batches in order. They are the plugin's own: what it keeps it can
    /// keep without a copy.
    fn write_group(&mut self, group: Group) -> Result<Ack, Failure>;

    /// Makes everything accepted so far durable before it returns. By default right
    /// for plugins whose every [`write_group`](Self::write_group) answers
    /// `Ack::durable`: the SDK fills in the last ticket they answered.
    fn flush(&mut self) -> Result<Option<Ack>, Failure> {
        Ok(None)
    }

    /// Time for upkeep, when the plugin asked for it. `None` says that nothing has
    /// become durable since the last answer.
    fn tick(&mut self) -> Result<Option<Ack>, Failure> {
        Ok(None)
    }

    /// The operator wants the table gone. Idempotent.
    fn drop_table(&mut self, table: &Table) -> Result<(), Failure> {
        let _ = table;
        Ok(())
    }

    /// The instance is not called again.
    fn close(self) {}
}

struct Running<D> {
    destination: D,
    /// The highest ticket that was answered as durable.
    durable: u64,
}

thread_local! {
    /// The plugin of this component: one instance of the component is one lane.
    static RUNNING: RefCell<Option<Box<dyn Any>>> = const { RefCell::new(None) };
}

fn running<D: Destination, T>(call: impl FnOnce(&mut Running<D>) -> Result<T, Failure>) -> Result<T, Failure> {
    RUNNING.with_borrow_mut(|slot| {
        let running = slot.as_mut().and_then(|any| any.downcast_mut::<Running<D>>());
        match running {
            Some(running) => call(running),
            None => Err(Failure::permanent("sdk.not-open", "the plugin was called before it was opened")),
        }
    })
}

impl<D> Running<D> {
    fn answered(&mut self, ack: Ack) -> Ack {
        self.durable = self.durable.max(ack.durable);
        ack
    }

    fn answered_or_unchanged(&mut self, ack: Option<Ack>) -> Ack {
        let ack = ack.unwrap_or_else(|| Ack::durable(self.durable));
        self.answered(ack)
    }
}

/// The component's exports for a [`Destination`]; made by [`crate::export!`].
#[doc(hidden)]
pub struct Exported<D>(PhantomData<D>);

impl<D: Destination> Guest for Exported<D> {
    fn describe() -> Manifest {
        Manifest {
            name: D::NAME.to_owned(),
            version: D::VERSION.to_owned(),
            description: D::DESCRIPTION.to_owned(),
            settings_schema: settings::schema::<D::Settings>(),
            table_settings_schema: settings::schema::<D::TableSettings>(),
            capabilities: D::capabilities().into_iter().map(str::to_owned).collect(),
            permissions: D::PERMISSIONS.iter().map(|&permission| permission.to_owned()).collect(),
            details: vec![("sdk".to_owned(), concat!("rust/", env!("CARGO_PKG_VERSION")).to_owned())],
        }
    }

    fn open(session: WireSession) -> Result<Ready, Failure> {
        if RUNNING.with_borrow(Option::is_some) {
            return Err(Failure::permanent("sdk.open-twice", "the plugin is open already"));
        }
        let settings = settings::parse(&session.settings)
            .map_err(|error| Failure::permanent("sdk.settings", format!("the destination's settings: {error}")))?;
        let (destination, ready) = D::open(Session {
            pipeline: session.pipeline,
            destination: session.destination,
            settings,
            lane: session.lane,
            lanes: session.lanes,
            generation: session.generation,
            details: session.details,
        })?;
        let running: Box<dyn Any> = Box::new(Running { destination, durable: 0 });
        RUNNING.set(Some(running));
        Ok(ready)
    }

    fn preflight(tables: Vec<Table>) -> Result<Vec<Notice>, Failure> {
        for table in &tables {
            table.settings_as::<D::TableSettings>()?;
        }
        running::<D, _>(|it| it.destination.preflight(&tables))
    }

    fn render_table(table: Table) -> Result<PhysicalTable, Failure> {
        running::<D, _>(|it| it.destination.render_table(&table))
    }

    fn inspect_table(table: Table) -> Result<Option<PhysicalTable>, Failure> {
        running::<D, _>(|it| it.destination.inspect_table(&table))
    }

    fn attach_tables(tables: Vec<Table>) -> Result<Vec<Option<Position>>, Failure> {
        running::<D, _>(|it| tables.iter().map(|table| it.destination.attach_table(table)).collect())
    }

    fn begin_copy(table: Table, run: String) -> Result<(), Failure> {
        running::<D, _>(|it| it.destination.begin_copy(&table, &run))
    }

    fn finish_copy(table: Table, run: String, as_of: Position) -> Result<(), Failure> {
        running::<D, _>(|it| it.destination.finish_copy(&table, &run, as_of))
    }

    fn check_schema(change: SchemaChange) -> Result<Vec<Notice>, Failure> {
        running::<D, _>(|it| it.destination.check_schema(&change))
    }

    fn apply_schema(change: SchemaChange) -> Result<Vec<Notice>, Failure> {
        running::<D, _>(|it| it.destination.apply_schema(&change))
    }

    fn write_group(group: Group) -> Result<Ack, Failure> {
        running::<D, _>(|it| it.destination.write_group(group).map(|ack| it.answered(ack)))
    }

    fn flush() -> Result<Ack, Failure> {
        running::<D, _>(|it| it.destination.flush().map(|ack| it.answered_or_unchanged(ack)))
    }

    fn tick() -> Result<Ack, Failure> {
        running::<D, _>(|it| it.destination.tick().map(|ack| it.answered_or_unchanged(ack)))
    }

    fn drop_table(table: Table) -> Result<(), Failure> {
        running::<D, _>(|it| it.destination.drop_table(&table))
    }

    fn close() {
        let taken = RUNNING.take();
        if let Some(running) = taken.and_then(|any| any.downcast::<Running<D>>().ok()) {
            running.destination.close();
        }
    }
}
