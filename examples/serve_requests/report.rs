//! The table at the end.

use std::fmt::Write;

use crate::common::counted;
use crate::scheduler::StepReport;

/// The times and counts of a request that was served, in seconds after the start.
#[derive(Debug, Clone)]
pub struct Served {
    pub arrival: f64,
    pub first_token: f64,
    pub end: f64,
    pub prompt_tokens: usize,
    /// The number of the prompt's tokens that were shared.
    pub shared_tokens: usize,
    pub generated: Vec<u32>,
}

impl Served {
    /// Returns the time from the arrival to the first token.
    pub fn to_first_token(&self) -> f64 {
        self.first_token - self.arrival
    }

    /// Returns the time from the arrival to the last token.
    pub fn latency(&self) -> f64 {
        self.end - self.arrival
    }

    /// Returns the mean time of a token after the first one, if there is one.
    fn of_later_token(&self) -> Option<f64> {
        let later = self.generated.len().saturating_sub(1);
        (later > 0).then(|| (self.end - self.first_token) / later as f64)
    }
}

/// The counts of all steps.
#[derive(Debug, Default)]
pub struct Totals {
    steps: usize,
    most_tokens: usize,
    preemptions: usize,
    most_pages: usize,
    /// The tokens that went through the model.
    tokens: usize,
}

impl Totals {
    /// Adds a step.
    pub fn add(&mut self, step: &StepReport) {
        self.steps += 1;
        self.tokens += step.tokens;
        self.most_tokens = self.most_tokens.max(step.tokens);
        self.preemptions += step.preempted.len();
        self.most_pages = self.most_pages.max(step.used_pages);
    }
}

/// The pool of a run.
#[derive(Debug)]
pub struct PoolSize {
    pub pages: usize,
    pub page_size: usize,
    /// The bytes of all layers.
    pub memory: usize,
}

/// Returns the table of a run that took `seconds`.
pub fn table(served: &[Served], failed: usize, totals: &Totals, pool: &PoolSize, seconds: f64) -> String {
    let prompts: usize = served.iter().map(|request| request.prompt_tokens).sum();
    let shared: usize = served.iter().map(|request| request.shared_tokens).sum();
    let generated: usize = served.iter().map(|request| request.generated.len()).sum();
    // Without preemptions, each token but the last one of a request and shared ones goes through the model once.
    let once = prompts + generated - served.len() - shared;
    let again = totals.tokens.saturating_sub(once);
    let share = 100.0 * shared as f64 / prompts.max(1) as f64;
    let per_second = |tokens: usize| tokens as f64 / seconds.max(1e-9);
    let mut text = String::new();
    let mut line = |name: &str, value: String| {
        let _ = writeln!(text, "{name:<12}{value}");
    };
    line("requests", format!("{} served, {failed} failed", served.len()));
    line("prompts", format!("{}, {shared} of them shared ({share:.0} %)", counted(prompts, "token")));
    line("generated", counted(generated, "token"));
    line("preemptions", format!("{}, {} computed again", totals.preemptions, counted(again, "token")));
    line("steps", format!("{}, with at most {}", totals.steps, counted(totals.most_tokens, "token")));
    line(
        "pages",
        format!(
            "at most {} of {} used, each of {} positions; {:.1} MiB in all layers",
            totals.most_pages,
            pool.pages,
            pool.page_size,
            pool.memory as f64 / f64::from(1 << 20)
        ),
    );
    line(
        "throughput",
        format!(
            "{:.1} tokens/s generated, {:.1} tokens/s with prompts, in {seconds:.2} s",
            per_second(generated),
            per_second(prompts + generated)
        ),
    );
    if served.is_empty() {
        return text;
    }
    text += "\nseconds                mean      50 %      90 %      99 %       max\n";
    for (name, times) in [
        ("to first token", served.iter().map(Served::to_first_token).collect::<Vec<_>>()),
        ("a later token", served.iter().filter_map(Served::of_later_token).collect()),
        ("latency", served.iter().map(Served::latency).collect()),
    ] {
        if !times.is_empty() {
            text += &row(name, times);
        }
    }
    text
}

/// Returns a row with the mean and percentiles of times.
fn row(name: &str, mut times: Vec<f64>) -> String {
    times.sort_by(f64::total_cmp);
    let mean = times.iter().sum::<f64>() / times.len() as f64;
    let mut row = format!("{name:<17}{mean:>10.4}");
    for percent in [50, 90, 99, 100] {
        let _ = write!(row, "{:>10.4}", percentile(&times, percent));
    }
    row + "\n"
}

/// Returns the smallest of some sorted times that at least `percent` of them do not exceed.
fn percentile(sorted: &[f64], percent: usize) -> f64 {
    let rank = (sorted.len() * percent).div_ceil(100);
    sorted[rank.max(1) - 1]
}
