//! The output of a bench: a line of JSON for each cell and engine, or a Markdown table.

use candle_core::Result;
use serde_json::{Value, json};

use super::args::Args;
use super::cell::Describe;
use super::engine::Engine;
use super::peak::{self, Peak};
use super::rounds::Times;

/// The kind of a bench, which decides the columns of its table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Attention over sequences: the time of a (query, key) pair.
    Attention,
    /// Attention to a cache: the speed at which it is read.
    Decode,
    /// A layer, most of whose work may be projections.
    Layer,
    /// Projections: the speed at which the weight is read, in cells that read it from memory.
    Linear,
    /// Forward and backward: the bytes that a call adds to the memory of the process.
    Train,
}

impl Kind {
    /// Returns the columns that other kinds do not have.
    fn columns(self) -> &'static [&'static str] {
        match self {
            Self::Attention => &["ps a pair"],
            Self::Decode | Self::Linear => &["GB/s", "of reading"],
            Self::Layer => &[],
            Self::Train => &["MiB more"],
        }
    }
}

/// The measurements of a cell.
pub struct Outcome<'a> {
    pub kind: Kind,
    pub cell: &'a dyn Describe,
    /// The peak for the cell's dtype.
    pub peak: Peak,
    /// The GB/s of reading memory, in cells whose time is the time of reading.
    pub bandwidth: Option<f64>,
    /// The engines that were timed.
    pub times: Vec<(Engine, Times)>,
    /// The engines that were not timed, and the reasons.
    pub skipped: Vec<(Engine, String)>,
    /// The path of this crate that ran, and the reason.
    pub plan: String,
    /// The share of the processor that other processes used meanwhile.
    pub others: Option<f64>,
    /// The bytes that a call of this crate adds to the process at its peak, where that is measured.
    pub memory: Option<u64>,
}

/// The share of other processes from which times are marked as disturbed.
const DISTURBED: f64 = 0.05;

/// Prints the lines before the table; nothing before JSON.
pub fn header(args: &Args, kind: Kind) {
    if args.json {
        return;
    }
    println!("Processor: {}, {} threads.\n", processor(), peak::threads());
    let own: String = kind.columns().iter().map(|name| format!(" {name} |")).collect();
    println!("| cell | engine | ms | best ms | cores | GFLOP/s | of peak |{own} times ours | remarks |");
    println!("| --- | --- | ---: | ---: | ---: | ---: | ---: |{} ---: | --- |", " ---: |".repeat(kind.columns().len()));
}

/// Prints one cell.
pub fn print(args: &Args, outcome: &Outcome<'_>) -> Result<()> {
    let ours = outcome.times.iter().find(|(engine, _)| *engine == Engine::Ours).map(|(_, times)| times.median);
    for (engine, times) in &outcome.times {
        let line = line(outcome, *engine, *times)?;
        if args.json {
            println!("{line}");
        } else {
            println!("{}", row(outcome, &line, ours.map(|ours| times.median / ours)));
        }
    }
    for (engine, reason) in &outcome.skipped {
        if args.json {
            let mut line = outcome.cell.to_json();
            line["name"] = json!(engine.label());
            line["skipped"] = json!(reason);
            println!("{line}");
        } else {
            let columns = 6 + outcome.kind.columns().len();
            println!("| {} | {} |{} {reason} |", outcome.cell.name(), engine.label(), " |".repeat(columns));
        }
    }
    Ok(())
}

fn line(outcome: &Outcome<'_>, engine: Engine, times: Times) -> Result<Value> {
    let (cell, work) = (outcome.cell, outcome.cell.work()?);
    let seconds = times.median / 1e3;
    let mut line = cell.to_json();
    line["name"] = json!(engine.label());
    line["ms"] = json!(times.median);
    line["ms_min"] = json!(times.min);
    line["cores"] = json!(times.cores);
    line["gflops"] = json!(work.flops / seconds / 1e9);
    line["peak_gflops"] = json!(outcome.peak.gflops);
    line["peak_name"] = json!(outcome.peak.name);
    if let Some(pairs) = work.pairs {
        line["ps_per_pair"] = json!(seconds * 1e12 / pairs);
    }
    line["threads"] = json!(peak::threads());
    if let Some(bandwidth) = outcome.bandwidth {
        line["gb_s"] = json!(work.bytes / seconds / 1e9);
        line["peak_gb_s"] = json!(bandwidth);
    }
    if engine == Engine::Ours {
        line["plan"] = json!(outcome.plan);
        if let Some(bytes) = outcome.memory {
            line["mib_more"] = json!(bytes as f64 / f64::from(1 << 20));
        }
    }
    if let Some(others) = outcome.others {
        line["others"] = json!(others);
    }
    Ok(line)
}

fn row(outcome: &Outcome<'_>, line: &Value, ratio: Option<f64>) -> String {
    let number = |field: &str| line[field].as_f64().unwrap_or(f64::NAN);
    let mut row = format!(
        "| {} | {} | {} | {} | {:.1} | {:.0} | {:.0} % |",
        outcome.cell.name(),
        line["name"].as_str().unwrap_or_default(),
        milliseconds(number("ms")),
        milliseconds(number("ms_min")),
        number("cores"),
        number("gflops"),
        100.0 * number("gflops") / number("peak_gflops"),
    );
    row += &match outcome.kind {
        Kind::Attention => format!(" {:.1} |", number("ps_per_pair")),
        Kind::Decode | Kind::Linear => {
            format!(" {:.1} | {:.0} % |", number("gb_s"), 100.0 * number("gb_s") / number("peak_gb_s"))
        }
        Kind::Layer => String::new(),
        Kind::Train => line["mib_more"].as_f64().map_or_else(|| " |".into(), |mib| format!(" {mib:.0} |")),
    };
    row += &ratio.map_or_else(|| " |".into(), |ratio| format!(" {ratio:.2} |"));
    let mut remarks = Vec::new();
    if let Some(plan) = line["plan"].as_str().filter(|plan| plan.starts_with("Reference")) {
        remarks.push(plan.to_string());
    }
    if let Some(others) = outcome.others.filter(|&others| others > DISTURBED) {
        remarks.push(format!("others used {:.0} % of the processor", 100.0 * others));
    }
    format!("{row} {} |", remarks.join("; "))
}

/// Formats three significant digits, so that 0.0123 and 1230 are both readable.
fn milliseconds(ms: f64) -> String {
    let digits = (2.0 - ms.log10().floor()).clamp(0.0, 4.0) as usize;
    format!("{ms:.digits$}")
}

/// Returns the processor's name, where the system reports it.
fn processor() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find(|line| line.starts_with("model name")).and_then(|line| line.split_once(':'));
    name.map_or_else(|| std::env::consts::ARCH.to_string(), |(_, name)| name.trim().to_string())
}
