//! Named places to die at, and how the host is brought to each.

use std::time::{Duration, Instant};

use rand::Rng;
use tidegate::failpoint;

use crate::Result;
use crate::host::Ended;
use crate::proxy::Link;
use crate::world::World;

/// How long the host may take to get to a place.
const PATIENCE: Duration = Duration::from_secs(60);

/// How often one place is tried behind another.
const TRIES: u32 = 10;

/// What has to go on for a place to be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// The first start of all.
    First,
    /// Writers are at work, which they always are.
    Stream,
    /// Tables are copied, while they are written to.
    Copy,
    /// The same of tables whose copies go on after a restart.
    Resume,
    /// Tables are altered.
    Alter,
    /// So much comes for a table that is being copied that the spool needs several files.
    Flood,
    /// A destination takes nothing while much comes for it.
    Behind,
    /// The link to the source breaks inside a transaction.
    Break,
    /// The process died at another place before.
    After(&'static str),
}

/// Every place; the test of `failpoint` in the host proves that it knows no other.
pub const POINTS: &[(&str, Way)] = &[
    ("slot.intended", Way::First),
    ("slot.created", Way::First),
    ("slot.recorded", Way::First),
    ("copy.snapshot", Way::Copy),
    ("copy.versioned", Way::Copy),
    ("copy.recorded", Way::Copy),
    ("copy.begun", Way::Copy),
    ("copy.cleaned", Way::After("copy.range-done")),
    ("copy.range-started", Way::Resume),
    ("copy.rows", Way::Copy),
    ("copy.range-done", Way::Resume),
    ("copy.flushed", Way::Copy),
    ("copy.finished", Way::Copy),
    ("copy.caught", Way::Copy),
    ("drain.begun", Way::Copy),
    ("drain.read", Way::Copy),
    ("drain.sent", Way::Copy),
    ("drain.live", Way::Copy),
    ("router.committed", Way::Stream),
    ("router.sent", Way::Stream),
    ("router.told", Way::Stream),
    ("router.versioned", Way::Alter),
    ("router.behind", Way::Behind),
    ("router.rewound", Way::Behind),
    ("router.cut-off", Way::Break),
    ("spool.appended", Way::Copy),
    ("spool.committed", Way::Copy),
    ("spool.flushed", Way::Copy),
    ("spool.synced", Way::Copy),
    ("spool.rotating", Way::Flood),
    ("spool.rotated", Way::Flood),
    ("spool.rewound", Way::After("spool.synced")),
    ("spool.deleted", Way::Flood),
    ("lane.opened", Way::Stream),
    ("lane.attached", Way::Stream),
    ("group.sending", Way::Stream),
    ("group.written", Way::Stream),
    ("group.flushed", Way::Stream),
    ("group.settled", Way::Stream),
    ("table.recorded", Way::Copy),
    ("checkpoint.spooled", Way::Stream),
    ("checkpoint.stored", Way::Stream),
    ("checkpoint.confirmed", Way::Stream),
    ("schema.flushed", Way::Alter),
    ("schema.applying", Way::Alter),
    ("schema.applied", Way::Alter),
    ("schema.inspected", Way::After("schema.applying")),
    ("schema.recorded", Way::Alter),
    ("hold.recorded", Way::Alter),
    ("hold.routed", Way::Alter),
    ("hold.answered", Way::Alter),
    ("hold.released", Way::Alter),
];

/// Names without a way, and ways without a name.
pub fn unknown() -> Vec<&'static str> {
    let named = failpoint::NAMES.iter().filter(|name| !POINTS.iter().any(|(point, _)| point == *name)).copied();
    let gone = POINTS.iter().map(|(point, _)| *point).filter(|point| !failpoint::NAMES.contains(point));
    named.chain(gone).collect()
}

/// How the host gets to a place.
pub fn way(name: &str) -> Result<Way> {
    let found = POINTS.iter().find(|(point, _)| *point == name);
    Ok(found.ok_or_else(|| format!("there is no place {name}"))?.1)
}

/// Lets the host die at a place, and starts it again. `times`: how often it passes before,
/// at most; if the place is not reached so often, the first time has to do.
pub fn die_at(world: &mut World, name: &str, times: u64) -> Result<()> {
    let way = way(name)?;
    if let Way::After(before) = way {
        die_after(world, name, before)?;
    } else if times == 1 || !try_later(world, name, way, times)? {
        die(world, name, way, 1)?;
    }
    world.heal()?;
    world.up()
}

/// The same behind another place. Not each death there leaves what leads on.
fn die_after(world: &mut World, name: &str, before: &str) -> Result<()> {
    for _ in 0..TRIES {
        die(world, before, way(before)?, 1)?;
        world.to_mirror.set(Link::Open);
        world.host.start(Some(name))?;
        poke_until_dead(world, Way::Stream, PATIENCE / 10)?;
        if world.host.pid().is_none() {
            return noted(world, name);
        }
        world.heal()?;
    }
    Err(format!("the host did not get to {name} after {before} in {TRIES} tries").into())
}

/// The same at the first start of all, whose next attempt may be killed as well.
pub fn die_at_first(world: &mut World, name: &str) -> Result<()> {
    die(world, name, Way::First, 1)
}

/// The time that was asked for may never come.
fn try_later(world: &mut World, name: &str, way: Way, times: u64) -> Result<bool> {
    if way == Way::First {
        return Ok(false);
    }
    prepare(world, way)?;
    world.host.start(Some(&format!("{name}:{times}")))?;
    poke_until_dead(world, way, PATIENCE / 10)?;
    match world.host.pid() {
        None => noted(world, name).map(|()| true),
        Some(_) => {
            world.heal()?;
            Ok(false)
        }
    }
}

fn die(world: &mut World, name: &str, way: Way, times: u64) -> Result<()> {
    prepare(world, way)?;
    world.host.start(Some(&format!("{name}:{times}")))?;
    reached(world, name, way, PATIENCE)
}

/// The state in which the host has to start.
fn prepare(world: &mut World, way: Way) -> Result<()> {
    if world.host.pid().is_some() {
        world.kill()?;
    }
    match way {
        Way::Copy => {
            let tables = ["accounts", "docs", "full_docs", "by_index", "pairs", "heap"];
            let some = [
                tables[world.rng.random_range(0..2_usize)],
                tables[world.rng.random_range(2..4_usize)],
                "pairs",
                "heap",
            ];
            world.resync(&some)
        }
        Way::Resume => {
            // A log's copies do not go on, nor would that of the mirror beside them.
            const TABLES: [&str; 4] = ["accounts", "docs", "full_docs", "pairs"];
            TABLES
                .iter()
                .try_for_each(|table| world.host.run(&["resync", "mirror", &format!("public.{table}")]).map(drop))
        }
        Way::Flood => {
            world.at_source()?.run("DELETE FROM bulk")?;
            world.resync(&["bulk"])
        }
        _ => Ok(()),
    }
}

fn reached(world: &mut World, name: &str, way: Way, patience: Duration) -> Result<()> {
    poke_until_dead(world, way, patience)?;
    if world.host.pid().is_some() {
        return Err(format!("the host did not get to {name} ({way:?}) within {patience:?}").into());
    }
    noted(world, name)
}

fn noted(world: &mut World, name: &str) -> Result<()> {
    let log = world.host.log();
    let last = log.lines().rev().find(|line| line.starts_with("failpoint "));
    if last.and_then(|line| line.strip_prefix("failpoint ")) != Some(name) {
        return Err(format!("the host was to die at {name}, its log has {last:?}").into());
    }
    world.tally.kills += 1;
    if !world.tally.points.iter().any(|known| known == name) {
        world.tally.points.push(name.to_owned());
    }
    Ok(())
}

/// Does what leads to the place, until the process is dead.
fn poke_until_dead(world: &mut World, way: Way, patience: Duration) -> Result<()> {
    let start = Instant::now();
    let mut pokes = 0;
    if matches!(way, Way::Copy | Way::Resume) {
        // Else a copy is over before anybody writes.
        world.to_mirror.set(Link::Slow(Duration::from_millis(5)));
    }
    let mut next = Instant::now();
    loop {
        match world.host.ended()? {
            Some(Ended::Killed) => return Ok(()),
            Some(ended) => return Err(format!("the host ended by itself: {ended:?}").into()),
            None => {}
        }
        if start.elapsed() > patience {
            return Ok(());
        }
        if Instant::now() >= next {
            poke(world, way, pokes)?;
            pokes += 1;
            next = Instant::now() + Duration::from_millis(300);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn poke(world: &mut World, way: Way, pokes: u64) -> Result<()> {
    match (way, pokes) {
        (Way::Alter, _) => world.alter(),
        // Its copy goes on while this is spooled.
        (Way::Flood, 0) => {
            world.to_mirror.set(Link::Stalled);
            Ok(())
        }
        (Way::Flood, 3) => world.flood(140, 7),
        (Way::Flood, 6) => {
            world.to_mirror.set(Link::Open);
            Ok(())
        }
        (Way::Behind, 2) => {
            world.to_mirror.set(Link::Stalled);
            world.flood(150, 15)
        }
        (Way::Break, _) if pokes % 4 == 2 => {
            world.to_source.set(Link::Limited(3_000_000));
            world.flood(10, 1)
        }
        (Way::Break, _) if pokes % 4 == 0 => {
            world.to_source.set(Link::Open);
            Ok(())
        }
        _ => Ok(()),
    }
}
