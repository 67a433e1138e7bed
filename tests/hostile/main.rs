//! `make hostile`: a plugin does its worst, one way after the other, beside a destination
//! that counts. One line for each: what it did, what the host did, what it cost the other,
//! what was lost.
//!
//! Each case has a pipeline of its own. First the counting destination is alone, and its
//! throughput is measured; then the hostile one is added while it runs, and it is measured
//! again. In the end the plugin is cured, and every row has to be there. `ONLY` names the
//! cases that are run; `fairness` and `rounds` are two more.

mod cases;
mod fairness;
mod load;
mod rounds;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::time::Instant;

/// What fails here is told, and the next case begins.
pub type Error = Box<dyn std::error::Error + Send + Sync>;
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What came of a case, for its line.
pub struct Outcome {
    /// What the host did.
    pub host: String,
    /// What the others noticed.
    pub cost: String,
    /// What was lost.
    pub lost: String,
}

fn main() -> ExitCode {
    if let Err(error) = prepare() {
        eprintln!("hostile: {error}");
        return ExitCode::from(2);
    }
    let only = std::env::var("ONLY").unwrap_or_default();
    let wanted = |name: &str| only.is_empty() || only.split(',').any(|one| one == name);
    let (start, mut ran, mut failed) = (Instant::now(), 0, Vec::new());
    let mut run = |name: &str, did: &str, work: &mut dyn FnMut() -> Result<Outcome>| {
        if !wanted(name) {
            return;
        }
        ran += 1;
        match catch_unwind(AssertUnwindSafe(work)) {
            Ok(Ok(Outcome { host, cost, lost })) => {
                println!("ok      {name:<22} {did}; host: {host}; others: {cost}; lost: {lost}");
            }
            Ok(Err(error)) => {
                println!("FAILED  {name:<22} {did}: {error}");
                failed.push(name.to_owned());
            }
            Err(_) => {
                println!("FAILED  {name:<22} {did}: see above");
                failed.push(name.to_owned());
            }
        }
    };
    for case in cases::all() {
        run(case.name, case.did, &mut || world::run(&case));
    }
    run("late-write", "leaves a write under way when it is ended", &mut || world::late_write());
    run("fairness", "two plugins burn all the time they get", &mut fairness::run);
    run("rounds", "1,000 instances end badly, with files and a connection open", &mut rounds::run);
    println!("{ran} cases in {:.0} s, {} failed {}", start.elapsed().as_secs_f64(), failed.len(), failed.join(" "));
    if failed.is_empty() && ran > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The binary under test is the one beside this.
fn prepare() -> Result<()> {
    if std::env::var_os("TIDEGATE_BIN").is_none() {
        let binary = std::env::current_exe()?.with_file_name("tidegate");
        if !binary.exists() {
            return Err(format!("{} is missing: run `cargo build -p tidegate` first", binary.display()).into());
        }
        // SAFETY: no other thread runs yet.
        unsafe { std::env::set_var("TIDEGATE_BIN", binary) };
    }
    load::fixture("hostile").map(drop)
}
