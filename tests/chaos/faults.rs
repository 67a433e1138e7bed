//! What goes wrong at random, one thing after the other.

use std::time::Duration;

use rand::Rng;
use tidegate::scratch::Shutdown;

use crate::points::{POINTS, Way, die_at};
use crate::proxy::Link;
use crate::world::World;
use crate::{Result, points};

/// A fault: how often it comes, its name, and what is done. Afterwards everything is healed
/// and the host, if it is dead, started.
pub struct Fault {
    pub weight: u32,
    pub name: &'static str,
    pub strike: fn(&mut World) -> Result<()>,
}

pub const FAULTS: &[Fault] = &[
    Fault { weight: 30, name: "kill", strike: kill },
    Fault { weight: 12, name: "kill at a place", strike: kill_at_a_place },
    Fault { weight: 4, name: "kill twice", strike: kill_twice },
    Fault { weight: 4, name: "stop", strike: stop },
    Fault { weight: 4, name: "source link cut", strike: source_cut },
    Fault { weight: 3, name: "source link slow", strike: source_slow },
    Fault { weight: 3, name: "source link half open", strike: source_half_open },
    Fault { weight: 4, name: "source link cut after bytes", strike: source_limited },
    Fault { weight: 3, name: "source refuses at the start", strike: source_refuses_at_the_start },
    Fault { weight: 4, name: "mirror link cut", strike: mirror_cut },
    Fault { weight: 3, name: "mirror link slow", strike: mirror_slow },
    Fault { weight: 3, name: "mirror link half open", strike: mirror_half_open },
    Fault { weight: 4, name: "mirror link cut after bytes", strike: mirror_limited },
    Fault { weight: 4, name: "mirror stopped", strike: mirror_stopped },
    Fault { weight: 3, name: "mirror crashed", strike: mirror_crashed },
    Fault { weight: 3, name: "source crashed", strike: source_crashed },
    Fault { weight: 5, name: "sessions ended", strike: sessions_ended },
    Fault { weight: 10, name: "alter", strike: alter },
    Fault { weight: 4, name: "alter in silence", strike: alter_in_silence },
    Fault { weight: 8, name: "copy again", strike: copy_again },
    Fault { weight: 3, name: "flood", strike: flood },
    Fault { weight: 4, name: "large transaction", strike: large_transaction },
    Fault { weight: 3, name: "disk full", strike: disk_full },
];

/// A fault, by weight.
pub fn choose(world: &mut World) -> &'static Fault {
    let total: u32 = FAULTS.iter().map(|fault| fault.weight).sum();
    let mut at = world.rng.random_range(0..total);
    for fault in FAULTS {
        if at < fault.weight {
            return fault;
        }
        at -= fault.weight;
    }
    &FAULTS[0]
}

fn pause(world: &mut World, most: u64) {
    let pause = world.rng.random_range(0..most);
    std::thread::sleep(Duration::from_millis(pause));
}

fn kill(world: &mut World) -> Result<()> {
    pause(world, 1500);
    world.kill()
}

/// Also while it starts.
fn kill_twice(world: &mut World) -> Result<()> {
    for _ in 0..world.rng.random_range(2..5) {
        pause(world, 500);
        if world.host.pid().is_some() {
            world.host.kill()?;
            world.tally.kills += 1;
        }
        world.host.start(None)?;
    }
    Ok(())
}

fn kill_at_a_place(world: &mut World) -> Result<()> {
    let places: Vec<&str> = POINTS
        .iter()
        .filter(|(_, way)| !matches!(way, Way::First | Way::Flood | Way::Behind))
        .map(|(name, _)| *name)
        .collect();
    let (name, times) = (places[world.rng.random_range(0..places.len())], world.rng.random_range(1..6));
    points::die_at(world, name, times)
}

fn stop(world: &mut World) -> Result<()> {
    pause(world, 500);
    world.stop()
}

fn source_cut(world: &mut World) -> Result<()> {
    world.to_source.cut();
    pause(world, 500);
    world.to_source.set(Link::Refusing);
    world.to_source.cut();
    pause(world, 1500);
    Ok(())
}

fn source_slow(world: &mut World) -> Result<()> {
    world.to_source.set(Link::Slow(Duration::from_millis(40)));
    pause(world, 3000);
    Ok(())
}

fn source_half_open(world: &mut World) -> Result<()> {
    world.to_source.set(Link::HalfOpen);
    pause(world, 9000);
    Ok(())
}

fn source_limited(world: &mut World) -> Result<()> {
    for _ in 0..3 {
        let bytes = world.rng.random_range(1_000..400_000);
        world.to_source.set(Link::Limited(bytes));
        pause(world, 1000);
    }
    Ok(())
}

fn source_refuses_at_the_start(world: &mut World) -> Result<()> {
    world.kill()?;
    world.to_source.set(Link::Refusing);
    world.host.start(None)?;
    pause(world, 1000);
    Ok(())
}

fn mirror_cut(world: &mut World) -> Result<()> {
    world.to_mirror.cut();
    pause(world, 500);
    world.to_mirror.set(Link::Refusing);
    world.to_mirror.cut();
    pause(world, 1500);
    Ok(())
}

fn mirror_slow(world: &mut World) -> Result<()> {
    world.to_mirror.set(Link::Slow(Duration::from_millis(30)));
    pause(world, 3000);
    Ok(())
}

fn mirror_half_open(world: &mut World) -> Result<()> {
    world.to_mirror.set(Link::HalfOpen);
    pause(world, 4000);
    Ok(())
}

fn mirror_limited(world: &mut World) -> Result<()> {
    for _ in 0..3 {
        let bytes = world.rng.random_range(1_000..200_000);
        world.to_mirror.set(Link::Limited(bytes));
        pause(world, 1000);
    }
    Ok(())
}

fn mirror_stopped(world: &mut World) -> Result<()> {
    world.stop_mirror(Shutdown::Fast)?;
    pause(world, 2500);
    if world.rng.random_bool(0.3) {
        world.kill()?;
    }
    Ok(())
}

fn mirror_crashed(world: &mut World) -> Result<()> {
    world.stop_mirror(Shutdown::Immediate)?;
    pause(world, 500);
    Ok(())
}

fn source_crashed(world: &mut World) -> Result<()> {
    world.crash_source()?;
    pause(world, 1500);
    if world.rng.random_bool(0.3) {
        world.kill()?;
    }
    Ok(())
}

/// All backends of the host's at either end.
fn sessions_ended(world: &mut World) -> Result<()> {
    let session = if world.rng.random_bool(0.5) { world.at_source()? } else { world.at_mirror()? };
    session.run("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name ILIKE '%tidegate%'")?;
    pause(world, 500);
    Ok(())
}

fn alter(world: &mut World) -> Result<()> {
    for _ in 0..world.rng.random_range(1..4) {
        world.alter()?;
        pause(world, 300);
    }
    if world.rng.random_bool(0.5) {
        world.kill()?;
    }
    Ok(())
}

/// With no row behind it that would bring it along.
fn alter_in_silence(world: &mut World) -> Result<()> {
    world.traffic.pause();
    for _ in 0..world.rng.random_range(1..3) {
        world.alter()?;
    }
    pause(world, 60);
    world.kill()?;
    world.verify()
}

fn copy_again(world: &mut World) -> Result<()> {
    world.kill()?;
    let tables = ["accounts", "pairs", "docs", "full_docs", "by_index", "parent", "child", "heap", "events"];
    let some: Vec<&str> = tables.iter().filter(|_| world.rng.random_bool(0.4)).copied().collect();
    world.resync(&some)?;
    world.host.start(None)?;
    pause(world, 800);
    if world.rng.random_bool(0.4) {
        world.alter()?;
    }
    if world.rng.random_bool(0.6) {
        world.kill()?;
    }
    Ok(())
}

fn flood(world: &mut World) -> Result<()> {
    if world.rng.random_bool(0.5) {
        world.to_mirror.set(Link::Stalled);
        world.flood(120, 12)?;
        pause(world, 3000);
        if world.rng.random_bool(0.5) {
            world.kill()?;
        }
    } else {
        world.flood(60, 1)?;
    }
    Ok(())
}

/// Most of it undone, and perhaps nobody there to see its end.
fn large_transaction(world: &mut World) -> Result<()> {
    let rows = world.rng.random_range(5_000..40_000);
    if world.rng.random_bool(0.5) {
        let bytes = world.rng.random_range(100_000..20_000_000);
        world.to_source.set(Link::Limited(bytes));
    }
    world.large_transaction(rows)?;
    pause(world, 800);
    if world.rng.random_bool(0.4) {
        world.kill()?;
    }
    Ok(())
}

fn disk_full(world: &mut World) -> Result<()> {
    if !world.has_own_disk() {
        return Ok(());
    }
    if world.rng.random_bool(0.5) {
        world.kill()?;
        world.resync(&["docs", "accounts", "events"])?;
        world.host.start(None)?;
        pause(world, 300);
    }
    world.fill_disk()?;
    pause(world, 4000);
    world.free_disk()
}

/// A place by name, for repeating one.
pub fn only(world: &mut World, name: &str) -> Result<()> {
    match FAULTS.iter().find(|fault| fault.name == name) {
        Some(fault) => (fault.strike)(world),
        None => die_at(world, name, 1),
    }
}
