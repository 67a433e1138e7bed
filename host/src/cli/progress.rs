//! Progress the eye can follow: bars and spinners on a terminal, lines elsewhere.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io::IsTerminal;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use super::paint;
use crate::status::{StatusBoard, StatusReport, TableStatus};
use crate::store::TableState;

/// How often bars are drawn anew.
const REDRAW: Duration = Duration::from_millis(200);
/// Bars beyond this many would scroll the terminal: the rest is in `status`.
const MOST_BARS: usize = 12;

/// All bars of the process: log lines have to step around them.
static BARS: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);

/// Whether a person watches standard error.
pub(super) fn watched() -> bool {
    std::io::stderr().is_terminal() && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// Writes to standard error with the bars out of the way.
pub(super) fn aside(write: impl FnOnce()) {
    if watched() { BARS.suspend(write) } else { write() }
}

/// Takes all bars from the screen.
pub(super) fn clear() {
    if watched() {
        // The terminal may be gone; then so are the bars.
        let _ = BARS.clear();
    }
}

/// Shows a bar for each table that is being copied, until this is dropped.
pub(super) struct CopyBars {
    bars: BTreeMap<String, ProgressBar>,
}

impl CopyBars {
    /// Follows the board for as long as the future is polled: never returns.
    pub(super) async fn follow(board: StatusBoard) -> Infallible {
        if !watched() {
            return std::future::pending().await;
        }
        let mut shown = CopyBars { bars: BTreeMap::new() };
        loop {
            shown.draw(&board.report());
            tokio::time::sleep(REDRAW).await;
        }
    }

    fn draw(&mut self, report: &StatusReport) {
        for destination in &report.destinations {
            for table in &destination.tables {
                let name = format!("{} {}", destination.name, table.table);
                if table.state == TableState::DataSync {
                    if self.bars.len() < MOST_BARS || self.bars.contains_key(&name) {
                        let bar = self.bars.entry(name.clone()).or_insert_with(|| new_bar(name));
                        bar.set_length(table.bytes_total.unwrap_or_default());
                        bar.set_position(table.bytes_copied);
                        bar.set_message(rows_and_time(table));
                    }
                } else if let Some(bar) = self.bars.remove(&name) {
                    bar.finish_and_clear();
                }
            }
        }
    }
}

impl Drop for CopyBars {
    fn drop(&mut self) {
        for bar in self.bars.values() {
            bar.finish_and_clear();
        }
    }
}

fn new_bar(name: String) -> ProgressBar {
    let style = ProgressStyle::with_template("  {prefix:32!} {bar:30} {percent:>3} %  {msg}")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    BARS.add(ProgressBar::new(0).with_style(style).with_prefix(name))
}

fn rows_and_time(table: &TableStatus) -> String {
    let rows = paint::number(table.rows_copied);
    match table.seconds_left {
        Some(left) => format!("{rows} rows, {} left", paint::duration(left)),
        None => format!("{rows} rows"),
    }
}

/// One thing after another, each with the time it took.
pub(super) struct Steps {
    current: Option<Step>,
}

struct Step {
    title: String,
    began: Instant,
    spinner: ProgressBar,
}

impl Steps {
    /// Nothing yet.
    pub(super) fn new() -> Steps {
        Steps { current: None }
    }

    /// Ends the current step and begins the next.
    pub(super) fn begin(&mut self, title: impl Into<String>) {
        self.finish(None);
        let title = title.into();
        let spinner = if watched() {
            let spinner = BARS.add(ProgressBar::new_spinner().with_message(title.clone()));
            spinner.enable_steady_tick(REDRAW / 2);
            spinner
        } else {
            ProgressBar::hidden()
        };
        self.current = Some(Step { title, began: Instant::now(), spinner });
    }

    /// How far the current step is; only a terminal shows it.
    pub(super) fn note(&self, note: &str) {
        if let Some(step) = &self.current {
            step.spinner.set_message(format!("{}: {note}", step.title));
        }
    }

    /// Ends the current step, with what came of it.
    pub(super) fn done(&mut self, result: &str) {
        self.finish(Some(result));
    }

    fn finish(&mut self, result: Option<&str>) {
        let Some(step) = self.current.take() else { return };
        step.spinner.finish_and_clear();
        let result = result.map(|result| format!(": {result}")).unwrap_or_default();
        let seconds = step.began.elapsed().as_secs_f64();
        let mark = if paint::coloured(&std::io::stderr()) { "\x1b[32m✓\x1b[0m" } else { "-" };
        aside(|| eprintln!("{mark} {}{result} ({seconds:.1} s)", step.title));
    }
}

impl Drop for Steps {
    fn drop(&mut self) {
        // Left in the middle: an error or Ctrl-C says the rest.
        if let Some(step) = self.current.take() {
            step.spinner.finish_and_clear();
        }
    }
}
