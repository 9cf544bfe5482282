//! The cells one after the other: inputs, check, turns, report.

use std::collections::HashMap;

use candle_core::{DType, Result};

use super::args::Args;
use super::cell::{Cell, Describe};
use super::check::Expected;
use super::engine::{Call, Engine, Entry, our_plan, prepare};
use super::inputs::Inputs;
use super::load::Load;
use super::peak::{self, Peak};
use super::report::{self, Kind, Outcome};
use super::rounds::in_turn;

/// The engines that compute attention alone.
const ENGINES: [Engine; 3] = [Engine::Ours, Engine::Reference, Engine::Flash];

/// The peaks measured in this run, each at its first use.
#[derive(Default)]
struct Peaks(HashMap<&'static str, Peak>);

impl Peaks {
    fn of(&mut self, dtype: DType) -> Result<Peak> {
        if let Some(peak) = self.0.get(dtype.as_str()) {
            return Ok(*peak);
        }
        let peak = peak::measure(dtype)?;
        eprintln!("peak for {}: {:.0} GFLOP/s ({})", dtype.as_str(), peak.gflops, peak.name);
        self.0.insert(dtype.as_str(), peak);
        Ok(peak)
    }
}

/// Returns the requested cells, or none if they were only listed by name or described as JSON.
pub fn cells<C: Describe>(args: &Args, bench: &str, cells: Vec<C>) -> Result<Option<Vec<C>>> {
    let cells = args.choose(cells)?;
    if !args.list {
        return Ok(Some(cells));
    }
    for cell in &cells {
        if args.json {
            let mut line = cell.to_json();
            line["bench"] = bench.into();
            println!("{line}");
        } else {
            println!("{}", cell.name());
        }
    }
    Ok(None)
}

/// A bench, and the limits of the machine as measured in this run.
pub struct Bench<'a> {
    args: &'a Args,
    kind: Kind,
    peaks: Peaks,
    bandwidth: Option<f64>,
}

/// The calls of a cell.
#[derive(Default)]
pub struct Calls<'a> {
    pub ready: Vec<(Engine, Call<'a>)>,
    /// The engines that have no call, and the reasons.
    pub skipped: Vec<(Engine, String)>,
    /// The bytes that a call of this crate adds to the process at its peak, where that is measured.
    pub memory: Option<u64>,
}

impl<'a> Bench<'a> {
    /// Measures the bandwidth of memory if the kind needs it, and prints the head of the table.
    pub fn start(args: &'a Args, kind: Kind) -> Self {
        let reads = matches!(kind, Kind::Decode | Kind::Linear);
        let bandwidth = reads.then(|| peak::read_bandwidth(args.total_bytes()));
        if let Some(bandwidth) = bandwidth {
            eprintln!("reading {} MiB: {bandwidth:.1} GB/s", args.total);
        }
        report::header(args, kind);
        Self { args, kind, peaks: Peaks::default(), bandwidth }
    }

    /// Returns the calls of those engines that were requested.
    pub fn calls<'c>(
        &self,
        cell: &dyn Describe,
        engines: &[Engine],
        call: impl Fn(Engine) -> Result<Entry<'c>>,
    ) -> Result<Calls<'c>> {
        let mut calls = Calls::default();
        for &engine in engines.iter().filter(|engine| self.args.engines.contains(engine)) {
            match call(engine) {
                Ok(Entry::Ready(call)) => calls.ready.push((engine, call)),
                Ok(Entry::Skipped(reason)) => calls.skipped.push((engine, reason)),
                // An error of this crate ends the bench. An error of another engine becomes a row of the table.
                Err(error) if engine == Engine::Ours => return Err(error.context(cell.name())),
                Err(error) => {
                    let error = error.to_string();
                    calls.skipped.push((engine, error.lines().next().unwrap_or_default().into()));
                }
            }
        }
        Ok(calls)
    }

    /// Times a cell's calls in turn and prints the outcome. `plan` is the path of this crate.
    pub fn time(&mut self, cell: &dyn Describe, plan: String, mut calls: Calls<'_>) -> Result<()> {
        let peak = self.peaks.of(cell.dtype())?;
        let load = Load::start();
        let times = in_turn(&mut calls.ready, self.args.rounds)?;
        let others = load.and_then(|load| load.others());
        let (kind, bandwidth, Calls { skipped, memory, .. }) = (self.kind, self.bandwidth, calls);
        report::print(self.args, &Outcome { kind, cell, peak, bandwidth, times, skipped, plan, others, memory })?;
        eprintln!("{}: done", cell.name());
        Ok(())
    }
}

/// Times attention in each cell. For decoding, each cell walks through more copies of its keys and values than the
/// processor's cache can store, and is compared with the bandwidth of memory.
pub fn attention(args: &Args, cells: &[Cell], kind: Kind) -> Result<()> {
    let mut bench = Bench::start(args, kind);
    for cell in cells {
        let copies = if kind == Kind::Decode { args.total_bytes().div_ceil(cell.kv_bytes()) } else { 1 };
        let inputs = Inputs::new(cell, copies)?;
        let expected = Expected::new(cell, &inputs)?;
        let calls = bench.calls(cell, &ENGINES, |engine| {
            let mut entry = prepare(engine, cell, &inputs, args.patience)?;
            if let Entry::Ready(call) = &mut entry {
                let gap = expected.compare(&call()?)?;
                eprintln!("{}: {} is within {gap:.1e} of the reference in f64", cell.name(), engine.label());
            }
            Ok(entry)
        })?;
        bench.time(cell, our_plan(cell, &inputs)?, calls)?;
    }
    Ok(())
}
