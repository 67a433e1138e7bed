//! `make chaos`: a pipeline that is killed, cut off, starved and filled up, again and again,
//! and the proof that nothing was lost and nothing done twice.
//!
//! First the host dies at every named place once; then at random, among other faults, until
//! the time is up. `MINUTES` and `SEED` come from the environment, `ONLY` names one place or
//! fault that is repeated, `POINTS=0` leaves the named places out. A seed repeats what is
//! done, not how the processes meet: a fault that was found comes back soon, but not
//! necessarily at once.

mod check;
mod faults;
mod fold;
mod host;
mod monitor;
mod points;
mod proxy;
mod sql;
mod tables;
mod traffic;
mod world;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use rand::Rng;

use points::{POINTS, Way};
use world::{Tally, World};

/// What fails here ends the run; there is nobody to handle it.
pub type Error = Box<dyn std::error::Error + Send + Sync>;
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// How long one pair of servers is used: then everything begins anew, with a first copy.
const CYCLE: Duration = Duration::from_secs(600);
/// From here on a run has the time for a proof behind every place.
const LONG: Duration = Duration::from_secs(300);
/// Faults between two proofs, at most.
const FAULTS_BETWEEN: u32 = 4;

struct Options {
    time: Duration,
    seed: u64,
    only: Option<String>,
    points: bool,
}

impl Options {
    fn from_environment() -> Result<Options> {
        let text = |name: &str| std::env::var(name).ok().filter(|text| !text.is_empty());
        let minutes: f64 = text("MINUTES").unwrap_or_else(|| "2".to_owned()).parse()?;
        let seed = match text("SEED") {
            Some(seed) => seed.parse()?,
            None => rand::rng().random_range(0..1_000_000),
        };
        let points = text("POINTS").is_none_or(|points| points != "0");
        Ok(Options { time: Duration::from_secs_f64(minutes * 60.0), seed, only: text("ONLY"), points })
    }
}

fn main() -> ExitCode {
    let options = match Options::from_environment() {
        Ok(options) => options,
        Err(error) => {
            eprintln!("chaos: MINUTES, SEED: {error}");
            return ExitCode::from(2);
        }
    };
    eprintln!("chaos: seed {}, {:.1} minutes", options.seed, options.time.as_secs_f64() / 60.0);
    let mut run = Run { options, start: Instant::now(), total: Tally::default(), cycles: 0 };
    match run.all() {
        Ok(()) => {
            run.report();
            ExitCode::SUCCESS
        }
        Err(error) => {
            run.report();
            eprintln!("chaos: FAILED with SEED={}: {error}", run.options.seed);
            ExitCode::FAILURE
        }
    }
}

struct Run {
    options: Options,
    start: Instant,
    total: Tally,
    cycles: u64,
}

impl Run {
    fn all(&mut self) -> Result<()> {
        let unknown = points::unknown();
        if !unknown.is_empty() {
            return Err(format!("places that are not known at both ends: {unknown:?}").into());
        }
        loop {
            let mut world = World::make(self.options.seed + self.cycles)?;
            let cycle = self.cycle(&mut world);
            self.total.add(&world.tally);
            self.cycles += 1;
            if let Err(error) = cycle {
                let last = world.host.last_words(60);
                let directory = world.keep();
                return Err(format!(
                    "{error}\n--- the end of the host's log; all of it is in {} ---\n{last}",
                    directory.display()
                )
                .into());
            }
            if self.is_over() {
                return Ok(());
            }
        }
    }

    fn is_over(&self) -> bool {
        self.start.elapsed() >= self.options.time
    }

    fn said<T>(&self, what: &str, result: Result<T>) -> Result<T> {
        result.map_err(|error| format!("in cycle {}, {what}: {error}", self.cycles).into())
    }

    fn cycle(&self, world: &mut World) -> Result<()> {
        let began = Instant::now();
        if let Some(only) = self.options.only.clone() {
            return self.repeat(world, &only);
        }
        let points = self.options.points;
        for (name, _) in POINTS.iter().filter(|(_, way)| points && *way == Way::First) {
            self.tell(name);
            self.said(name, points::die_at_first(world, name))?;
        }
        if !world.has_own_disk() {
            eprintln!("chaos: no file system of its own can be mounted, so no disk is filled");
        }
        self.said("at the first proof", world.verify())?;
        if points && self.cycles == 0 {
            self.points(world)?;
        }
        while !self.is_over() && began.elapsed() < CYCLE {
            let mut struck = Vec::new();
            for _ in 0..world.rng.random_range(1..=FAULTS_BETWEEN) {
                let fault = faults::choose(world);
                self.tell(fault.name);
                struck.push(fault.name);
                *world.tally.faults.entry(fault.name).or_default() += 1;
                self.said(fault.name, (fault.strike)(world).and_then(|()| world.heal()).and_then(|()| world.up()))?;
            }
            self.said(&format!("after {}", struck.join(", ")), world.verify())?;
        }
        Ok(())
    }

    /// Every place once. A long run has a proof behind each, a short one behind some.
    fn points(&self, world: &mut World) -> Result<()> {
        let between = if self.options.time < LONG { 4 } else { 1 };
        let places: Vec<&str> = POINTS.iter().filter(|(_, way)| *way != Way::First).map(|(name, _)| *name).collect();
        for some in places.chunks(between) {
            for name in some {
                self.tell(name);
                self.said(name, points::die_at(world, name, 1))?;
            }
            self.said(&format!("after {}", some.join(", ")), world.verify())?;
        }
        Ok(())
    }

    fn repeat(&self, world: &mut World, only: &str) -> Result<()> {
        self.said("at the first proof", world.verify())?;
        while !self.is_over() {
            self.tell(only);
            let struck = faults::only(world, only).and_then(|()| world.heal()).and_then(|()| world.up());
            self.said(only, struck.and_then(|()| world.verify()))?;
        }
        Ok(())
    }

    fn tell(&self, what: &str) {
        eprintln!("{:8.1} s  {what}", self.start.elapsed().as_secs_f64());
    }

    fn report(&self) {
        let total = &self.total;
        let faults: Vec<String> = total.faults.iter().map(|(name, count)| format!("{name} {count}")).collect();
        println!("seed {}, {:.0} s, {} cycles", self.options.seed, self.start.elapsed().as_secs_f64(), self.cycles);
        println!("kills survived      {}, at {} of {} named places", total.kills, total.points.len(), POINTS.len());
        println!("other faults        {}", faults.join(", "));
        println!(
            "transactions        {}, {} of them ALTER TABLE",
            total.transactions + total.alterations,
            total.alterations
        );
        println!("changes checked     {} applied at the mirror, {} in the log", total.applied, total.logged);
        println!("ends found equal    {} times", total.verified);
        println!("slot and checkpoint {} times compared", total.looks);
    }
}
