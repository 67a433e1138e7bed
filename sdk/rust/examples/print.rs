use tidegate_sdk::prelude::*;

/// Holds what stands before each line.
struct Print(String);

#[derive(serde::Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
struct Settings {
    /// Stands before each line.
    prefix: String,
}

impl Destination for Print {
    type Settings = Settings;
    type TableSettings = NoSettings;
    const NAME: &'static str = "print";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const DESCRIPTION: &'static str = "Writes each batch to the log";

    fn capabilities() -> Vec<&'static str> {
        capability::with_steps(capability::STEPS, &[capability::CHANGES])
    }
    fn open(session: Session<Settings>) -> Result<(Self, Ready), Failure> {
        Ok((Print(session.settings.prefix), Ready::default()))
    }
    fn render_table(&mut self, table: &Table) -> Result<PhysicalTable, Failure> {
        Ok(PhysicalTable::like(table))
    }
    fn write_group(&mut self, group: Group) -> Result<Ack, Failure> {
        for batch in &group.batches {
            info!("{}: table {}, {} rows", self.0, batch.table_id, batch.rows());
        }
        Ok(Ack::durable(group.ticket))
    }
}

tidegate_sdk::export!(Print);
