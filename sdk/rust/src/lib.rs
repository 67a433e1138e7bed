//! Write a Tidegate destination in Rust.
//!
//! A destination is a WebAssembly component that the host calls with tables, schema
//! changes and groups of batches. A plugin implements [`Destination`] and names its
//! type in [`export!`]. This one writes each batch to the log, and is whole:
//!
//! ```
#![doc = include_str!("../examples/print.rs")]
//! ```
//!
//! The crate's `Cargo.toml` says `crate-type = ["cdylib"]`; `tidegate plugin build`
//! makes the component.
//!
//! # What is where
//!
//! - [`model`]: the contract's own types, generated from `wit/`.
//! - [`rows`]: columns, rows and cells of a batch as views, without a copy.
//! - [`text`]: any cell as PostgreSQL prints it.
//! - [`net`]: TCP and TLS through the host. `std::net` does not work in a plugin.
//! - `std::fs` works below the directories the configuration grants, under the very
//!   paths it grants them by. Nothing else is there.
//! - [`log`], [`host`]: log lines, counters, secrets, a small durable store.
//!
//! # Outside of the sandbox
//!
//! The crate compiles for the machine it is developed on, so that the pure parts of
//! a plugin are tested with `cargo test`. There, log lines go to stderr, counters
//! are dropped, and whatever else needs the host answers with an error.

pub mod capability;
mod guest;
pub mod host;
pub mod log;
pub mod net;
mod outcome;
pub mod rows;
pub mod settings;
pub mod text;

/// Generated from `wit/`.
#[allow(missing_docs)]
pub mod bindings {
    wit_bindgen::generate!({
        path: "../../wit/v0_1",
        world: "destination",
        pub_export_macro: true,
        default_bindings_module: "tidegate_sdk::bindings",
        additional_derives: [PartialEq],
        generate_all,
    });
}

pub use bindings::tidegate::destination::model;
pub use guest::{Destination, Session};
pub use outcome::OrFailure;
pub use settings::NoSettings;

#[doc(hidden)]
pub use guest::Exported;

/// What most plugins need, for `use tidegate_sdk::prelude::*`.
pub mod prelude {
    pub use crate::model::{
        Ack, Batch, Content, Failure, FailureClass, FailureScope, Group, Notice, PhysicalColumn, PhysicalTable,
        Position, Ready, Refusal, SchemaChange, SchemaStep, SnapshotId, Table, TableName,
    };
    pub use crate::rows::{Cell, ColumnView, Kind};
    pub use crate::{Destination, NoSettings, OrFailure, Session, capability, debug, error, host, info, log, warn};
}

/// Makes a type that implements [`Destination`] the plugin of this component.
///
/// Once in a crate, at its top. On other targets than WebAssembly it only checks
/// the type.
#[macro_export]
macro_rules! export {
    ($destination:ty) => {
        #[cfg(target_family = "wasm")]
        const _: () = {
            type TidegateExport = $crate::Exported<$destination>;
    $crate::bindings::export!(TidegateExport with_types_in $crate::bindings);
        };
        #[cfg(not(target_family = "wasm"))]
        const _: () = {
            const fn is_a_destination<D: $crate::Destination>() {}
            is_a_destination::<$destination>()
        };
    };
}
