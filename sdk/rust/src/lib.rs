//! Write a Tidegate destination in Rust.

/// Generated from `wit/`.
pub mod bindings {
    wit_bindgen::generate!({
        path: "../../wit/v0_1",
        world: "destination",
        pub_export_macro: true,
        default_bindings_module: "tidegate_sdk::bindings",
        generate_all,
    });
}

pub use bindings::tidegate::destination::model;
