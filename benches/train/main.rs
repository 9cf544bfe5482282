//! Forward and backward through attention and through a layer, and a layer over variables in evaluation: `cargo bench
//! --bench train -- --python PATH` to include PyTorch, and `-- --help` for how to time one cell.
//!
//! The work of a backward pass counts as five products where the forward pass has two, 3.5 times the forward in all,
//! and as two products for each projection. The output and gradients of every engine are compared with this crate's
//! before anything is timed. Inputs get gradients too, as in the middle of a model.

mod cell;
#[expect(dead_code, reason = "each bench uses its own part of what they share")]
#[path = "../common/mod.rs"]
mod common;
mod step;

use std::cell::RefCell;
use std::time::Instant;

use candle_attention::Backend;
use candle_core::{Result, Tensor};
use clap::Parser;

use cell::{Cell, Part, cells};
use common::args::Args;
use common::cell::Describe;
use common::engine::{Engine, Entry};
use common::memory;
use common::peer::Peer;
use common::report::Kind;
use common::run::{self, Bench, Calls};
use step::{Data, Evaluation, Step, compare};

fn main() -> Result<()> {
    let args = Args::parse();
    let Some(cells) = run::cells(&args, "train", cells())? else { return Ok(()) };
    let torch = match args.engines.contains(&Engine::Torch) {
        true => Peer::start(&args.python, "train/pytorch.py").map_err(|error| {
            // Without a backtrace.
            error.to_string().lines().next().unwrap_or_default().to_string()
        }),
        false => Err("not asked for".into()),
    };
    let torch = torch.map(RefCell::new);
    let mut bench = Bench::start(&args, Kind::Train);
    for cell in &cells {
        let outcome = match cell.part {
            Part::Evaluation => evaluate(&mut bench, cell),
            Part::Attention | Part::Layer => train(&mut bench, cell, &args, &torch),
        };
        outcome.map_err(|error| error.context(cell.name()))?;
    }
    Ok(())
}

/// PyTorch, or the reason why it is not available.
type Torch = std::result::Result<RefCell<Peer>, String>;

/// Times a layer over variables, and a layer over plain tensors with the same values.
fn evaluate(bench: &mut Bench, cell: &Cell) -> Result<()> {
    let sides = Evaluation::new(cell)?;
    let calls = bench.calls(cell, &[Engine::Ours, Engine::Frozen], |engine| {
        Ok(Entry::Ready(match engine {
            Engine::Ours => Box::new(|| sides.trained.forward(&sides.xs)),
            _ => Box::new(|| sides.frozen.forward(&sides.xs)),
        }))
    })?;
    bench.time(cell, "a layer over variables".into(), calls)
}

/// Times the engines' forward and backward passes.
fn train(bench: &mut Bench, cell: &Cell, args: &Args, torch: &Torch) -> Result<()> {
    let data = Data::new(cell)?;
    let ours = Step::new(cell, &data, Backend::Auto)?;
    let plan = ours.plan()?.to_string();
    if let Some(obstacle) = ours.obstacle()? {
        let skipped = vec![(Engine::Ours, obstacle)];
        return bench.time(cell, plan, Calls { skipped, ..Calls::default() });
    }
    let results = ours.results()?;
    let reference = Step::new(cell, &data, Backend::Reference)?;
    let mut calls = bench.calls(cell, &[Engine::Ours, Engine::Reference, Engine::Torch], |engine| {
        Ok(match (engine, torch) {
            (Engine::Ours, _) => Entry::Ready(Box::new(|| ours.run())),
            (Engine::Reference, _) => match reference.obstacle()? {
                Some(obstacle) => Entry::Skipped(obstacle),
                None => {
                    let start = Instant::now();
                    checked(cell, &results, &reference.results()?)?;
                    match start.elapsed().as_secs_f64() {
                        seconds if seconds > args.patience => Entry::Skipped(format!("about {seconds:.0} s a call")),
                        _ => Entry::Ready(Box::new(|| reference.run())),
                    }
                }
            },
            (_, Err(problem)) => Entry::Skipped(problem.clone()),
            (_, Ok(torch)) => {
                let upstream = ("upstream", data.upstream.clone());
                let shapes = std::iter::once(&upstream).chain(&data.inputs).map(|(_, tensor)| tensor.dims());
                let shapes: Vec<_> = shapes.collect();
                let theirs = torch.borrow_mut().prepare(
                    cell.to_json(),
                    &data.inputs,
                    std::slice::from_ref(&upstream),
                    &shapes,
                )?;
                checked(cell, &results, &theirs)?;
                Entry::Ready(Box::new(|| {
                    torch.borrow_mut().run()?;
                    Ok(data.upstream.clone())
                }))
            }
        })
    })?;
    drop(results);
    calls.memory = memory_of(|| ours.run())?;
    bench.time(cell, plan, calls)
}

/// Checks that another engine's output and gradients agree with this crate's. With dropout each engine draws another
/// mask, so nothing is compared.
fn checked(cell: &Cell, ours: &[Tensor], theirs: &[Tensor]) -> Result<()> {
    if cell.dropout > 0.0 { Ok(()) } else { compare(ours, theirs) }
}

/// Returns the bytes that a call adds to the process at its peak, where the system reports it.
fn memory_of(call: impl Fn() -> Result<Tensor>) -> Result<Option<u64>> {
    memory::forget_peak();
    let before = memory::resident();
    call()?;
    Ok(memory::peak_resident().zip(before).map(|(peak, before)| peak.saturating_sub(before)))
}
