//! `[destination.limits]` and `[pipeline.engine]`: numbers, by the names that the limits
//! have where they are enforced.

use std::collections::BTreeMap;
use std::path::Path;

use super::section::Section;
use crate::error::Result;
use crate::plugin::{EngineLimits, Limits};

/// What `[destination.limits]` may set beside [`Limits::SETTINGS`]: the names of the
/// contract's `ready.limits`.
const PACE: [&str; 4] = ["group_bytes", "linger_ms", "settle_ms", "settle_bytes"];
/// With less no guest starts, and with more one recursion has what a process has.
const STACK_BYTES: std::ops::RangeInclusive<u64> = (64 << 10)..=(256 << 20);

/// `[destination.limits]`, as far as it says something.
pub(super) fn destination(file: &Path, destination: &Section<'_>, name: &str) -> Result<BTreeMap<String, u64>> {
    let Some(table) = destination.table("limits")? else { return Ok(BTreeMap::new()) };
    let keys: Vec<&str> = PACE.iter().chain(Limits::SETTINGS).copied().collect();
    let section = Section::new(file, format!("[destination.limits] of {name}"), table, &keys)?;
    let mut limits = BTreeMap::new();
    for key in &keys {
        match section.number(key)? {
            // Nothing could ever be sent, or kept in memory, or answered.
            Some(0) if !key.starts_with("linger") && !key.starts_with("settle") => {
                return Err(section.invalid(key, "is 0").next("Write a number above 0, or leave it out."));
            }
            Some(number) => {
                limits.insert((*key).to_owned(), number);
            }
            None => {}
        }
    }
    Ok(limits)
}

/// `[pipeline.engine]`.
pub(super) fn engine(file: &Path, pipeline: &Section<'_>) -> Result<EngineLimits> {
    let mut limits = EngineLimits::default();
    let Some(table) = pipeline.table("engine")? else { return Ok(limits) };
    let section = Section::new(file, "[pipeline.engine]", table, EngineLimits::SETTINGS)?;
    for key in EngineLimits::SETTINGS {
        match section.number(key)? {
            Some(0) => return Err(section.invalid(key, "is 0").next("Write a number above 0, or leave it out.")),
            Some(number) if *key == "stack_bytes" && !STACK_BYTES.contains(&number) => {
                let (least, most) = (STACK_BYTES.start(), STACK_BYTES.end());
                return Err(section
                    .invalid(key, format_args!("is {number}"))
                    .next(format!("Write a number from {least} to {most}, or leave it out.")));
            }
            Some(number) => {
                limits.set(key, number);
            }
            None => {}
        }
    }
    Ok(limits)
}
