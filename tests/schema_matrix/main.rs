//! `make schema-matrix`: schema changes, case by case, each on the versions of PostgreSQL
//! where it may differ. One line for each case, and a last line with the counts; exit 1 if
//! any outcome is not the expected one.
//!
//! The part `silent` measures, and has one case.
//!
//! From the environment: `ONLY` names one part, `MAJORS` some versions (`15,18`), `CASE` is
//! a text that a case's name has to contain.

mod apply;
mod capture;
mod corpus;
mod pairs;
mod plan;
mod report;
mod silent;

use std::process::ExitCode;

use tidegate_tests::majors::MAJORS;

use report::Report;

/// What fails here is no outcome of a case, and ends the part; there is nobody to handle it.
pub type Error = Box<dyn std::error::Error + Send + Sync>;
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A part, by the name that `ONLY` knows it by.
type Part = (&'static str, fn(&Report) -> Result<()>);

const PARTS: &[Part] =
    &[("capture", capture::run), ("plan", plan::run), ("apply", apply::run), ("silent", silent::run)];

/// What was asked for.
pub struct Options {
    /// Versions of PostgreSQL.
    pub majors: Vec<u32>,
    /// They were named, and not all are meant.
    pub named: bool,
    case: Option<String>,
    only: Option<String>,
}

impl Options {
    fn from_environment() -> Result<Options> {
        let text = |name: &str| std::env::var(name).ok().filter(|text| !text.is_empty());
        let majors = match text("MAJORS") {
            Some(majors) => majors.split(',').map(|major| major.trim().parse()).collect::<Result<Vec<u32>, _>>()?,
            None => MAJORS.to_vec(),
        };
        let options = Options { majors, named: text("MAJORS").is_some(), case: text("CASE"), only: text("ONLY") };
        match &options.only {
            Some(only) if !PARTS.iter().any(|(name, _)| name == only) => {
                Err(format!("there is no part `{only}`").into())
            }
            _ => Ok(options),
        }
    }

    /// Whether a case of this name is to run.
    pub fn wants(&self, case: &str) -> bool {
        self.case.as_ref().is_none_or(|wanted| case.contains(wanted.as_str()))
    }
}

fn main() -> ExitCode {
    let options = match Options::from_environment() {
        Ok(options) => options,
        Err(error) => {
            eprintln!("schema-matrix: ONLY, MAJORS: {error}");
            return ExitCode::from(2);
        }
    };
    let report = Report::new(options);
    let mut whole = true;
    for (name, run) in PARTS {
        if report.options().only.as_ref().is_some_and(|only| only != name) {
            continue;
        }
        if let Err(error) = run(&report) {
            eprintln!("schema-matrix: {name}: {error}");
            whole = false;
        }
    }
    if report.end() && whole { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
