//! The contract's types and functions, generated from `wit/`.
//!
//! The host works with the newest version's types; a component of an older version is
//! adapted to them where it is linked.

/// `tidegate:destination@0.1.0`; documented in `wit/v0_1/destination.wit`.
#[allow(missing_docs)]
pub mod v0_1 {
    wasmtime::component::bindgen!({
        path: "../wit/v0_1",
        world: "destination",
        imports: { default: async | trappable },
        exports: { default: async },
        additional_derives: [Clone],
        with: {
            "tidegate:destination/net.connection": crate::plugin::net::Connection,
        },
    });
}

/// The types of tables, schemas and rows in the newest contract: what batches are
/// made of all the way from the decoder to the plugin.
pub use v0_1::tidegate::destination::model as wire;
