//! What is printed and written.

use serde_json::json;

use crate::Result;
use crate::host::Measured;

/// One turn of ours and of the reference.
pub struct Run {
    pub ours: Measured,
    /// Seconds of the reference.
    pub limit: f64,
}

/// One line of the table.
pub struct Work {
    pub name: String,
    /// The tool that sets the limit.
    pub reference: &'static str,
    /// What the time before the work is.
    pub before: &'static str,
    /// Rows or changes.
    pub items: u64,
    /// The least ratio of rates that is wanted.
    pub goal: f64,
    pub runs: Vec<Run>,
}

/// What has no reference but a bound.
pub struct Figure {
    pub name: &'static str,
    pub unit: &'static str,
    pub at_most: f64,
    pub runs: Vec<f64>,
}

impl Figure {
    pub fn at_most(name: &'static str, unit: &'static str, at_most: f64, runs: Vec<f64>) -> Figure {
        Figure { name, unit, at_most, runs }
    }

    fn spread(&self) -> Spread {
        Spread::of(self.runs.iter().copied())
    }

    fn met(&self) -> bool {
        self.spread().median <= self.at_most
    }
}

/// Median with the extremes.
struct Spread {
    median: f64,
    min: f64,
    max: f64,
}

impl Spread {
    fn of(values: impl Iterator<Item = f64>) -> Spread {
        let mut values: Vec<f64> = values.collect();
        values.sort_by(f64::total_cmp);
        let middle = values.len() / 2;
        let median = if values.len() % 2 == 1 { values[middle] } else { (values[middle - 1] + values[middle]) / 2.0 };
        Spread { median, min: values[0], max: values[values.len() - 1] }
    }
}

impl Work {
    fn ours(&self) -> Spread {
        Spread::of(self.runs.iter().map(|run| run.ours.seconds))
    }

    fn limit(&self) -> Spread {
        Spread::of(self.runs.iter().map(|run| run.limit))
    }

    /// Of rates: 1 is as fast, more is faster.
    fn ratio(&self) -> Spread {
        let Spread { min, max, .. } = Spread::of(self.runs.iter().map(|run| run.limit / run.ours.seconds));
        Spread { median: self.limit().median / self.ours().median, min, max }
    }

    fn met(&self) -> bool {
        self.ratio().median >= self.goal
    }
}

/// Works beside their references, then what they cost, then figures with a bound.
pub fn print(works: &[Work], figures: &[Figure]) {
    if !works.is_empty() {
        print_works(works);
    }
    if figures.is_empty() {
        return;
    }
    println!("\n{:<48} {:>29} {:>12}  met", "figure: median (min to max)", "", "at most");
    for figure in figures {
        let (spread, met) = (show(&figure.spread()), if figure.met() { "yes" } else { "no" });
        let at_most = format!("{} {}", figure.at_most, figure.unit);
        println!("{:<48} {spread:>25} {:<3} {at_most:>12}  {met}", figure.name, figure.unit);
    }
}

fn print_works(works: &[Work]) {
    println!("\nseconds and ratios: median (min to max); ratio: our rate by the reference's\n");
    println!("{:<48} {:<15} {:>21} {:>21} {:>21} {:>5}  met", "work", "reference", "ours", "limit", "ratio", "goal");
    for work in works {
        println!(
            "{:<48} {:<15} {:>21} {:>21} {:>21} {:>5}  {}",
            work.name,
            work.reference,
            show(&work.ours()),
            show(&work.limit()),
            show(&work.ratio()),
            work.goal,
            if work.met() { "yes" } else { "no" },
        );
    }
    println!("\nthe host meanwhile\n");
    println!("{:<48} {:>10} {:>12} {:>14} {:>9}  not counted", "work", "rows/s", "CPU s", "ns CPU a row", "peak MiB");
    for work in works {
        let cpu = Spread::of(work.runs.iter().map(|run| run.ours.cpu)).median;
        let peak = Spread::of(work.runs.iter().map(|run| run.ours.peak)).max;
        let before = Spread::of(work.runs.iter().map(|run| run.ours.before));
        println!(
            "{:<48} {:>10.0} {:>12.2} {:>14.0} {:>9.0}  {} {} s",
            work.name,
            work.items as f64 / work.ours().median,
            cpu,
            cpu / work.items as f64 * 1e9,
            peak,
            show(&before),
            work.before,
        );
    }
}

fn show(spread: &Spread) -> String {
    format!("{:.2} ({:.2} to {:.2})", spread.median, spread.min, spread.max)
}

/// An array with an object per work or figure; of a work `ours` and `limit` are seconds.
pub fn write_json(works: &[Work], figures: &[Figure], path: &str) -> Result<()> {
    let mut all: Vec<serde_json::Value> = works
        .iter()
        .map(|work| {
            json!({
                "work": work.name,
                "ours": work.ours().median,
                "limit": work.limit().median,
                "ratio": work.ratio().median,
                "goal": work.goal,
                "met": work.met(),
                "runs": work.runs.iter().map(|run| json!({
                    "ours": run.ours.seconds,
                    "limit": run.limit,
                    "ratio": run.limit / run.ours.seconds,
                    "cpu_seconds": run.ours.cpu,
                    "peak_mib": run.ours.peak,
                    "before_seconds": run.ours.before,
                })).collect::<Vec<_>>(),
            })
        })
        .collect();
    all.extend(figures.iter().map(|figure| {
        let ours = figure.spread().median;
        json!({
            "work": figure.name,
            "unit": figure.unit,
            "ours": ours,
            "limit": figure.at_most,
            "ratio": ours / figure.at_most,
            "goal": 1.0,
            "met": figure.met(),
            "runs": figure.runs,
        })
    }));
    std::fs::write(path, serde_json::to_string_pretty(&all)? + "\n").map_err(|error| format!("{path}: {error}").into())
}
