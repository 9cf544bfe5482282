//! Attention over whole sequences: `cargo bench --bench sdpa`, and `-- --help` for how to time one cell.
//!
//! GFLOP/s count the (query, key) pairs that the mask allows, so that skipping masked pairs shows as speed, and
//! computing them in vain does not.

#[expect(dead_code, reason = "each bench uses its own part of what they share")]
mod common;

use candle_core::{DType, Result};
use clap::Parser;

use common::args::Args;
use common::cell::{Cell, Describe, Mask};
use common::inputs::Inputs;
use common::report::Kind;
use common::{memory, run};

fn main() -> Result<()> {
    let args = Args::parse();
    let Some(cells) = run::cells(&args, "sdpa", if args.long { long() } else { cells() })? else { return Ok(()) };
    if args.long {
        for cell in &cells {
            report_memory(cell, &args)?;
        }
    }
    run::attention(&args, &cells, Kind::Attention)
}

fn cells() -> Vec<Cell> {
    let mut cells = Vec::new();
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for d in [64, 96, 128] {
            cells.push(Cell::square(2048, d, Mask::None, dtype));
            cells.push(Cell::square(2048, d, Mask::Causal, dtype));
        }
        cells.push(Cell { h: 32, h_kv: 8, ..Cell::square(2048, 128, Mask::Causal, dtype) });
    }
    for dtype in [DType::F32, DType::BF16] {
        for mask in [Mask::None, Mask::Causal] {
            cells.push(Cell { b: 4, h: 12, h_kv: 12, ..Cell::square(512, 64, mask, dtype) });
        }
        // The window and the whole sequence: the time per pair should hardly differ.
        cells.push(Cell::square(8192, 64, Mask::Causal, dtype));
        cells.push(Cell::square(8192, 64, Mask::Window(256), dtype));
        // Half of a padded batch is padding: it should take half the time of the whole.
        let lens = vec![128, 256, 384, 512, 512, 640, 768, 896];
        cells.push(Cell { b: 8, ..Cell::square(1024, 64, Mask::None, dtype) });
        cells.push(Cell { b: 8, ..Cell::square(1024, 64, Mask::Lens(lens), dtype) });
        // A chunk of a prompt whose beginning is in the cache.
        cells.push(Cell { t_q: 512, ..Cell::square(4096, 128, Mask::Causal, dtype) });
    }
    cells
}

/// Returns cells that the reference path has too little memory for.
fn long() -> Vec<Cell> {
    let cell = |dtype| Cell { h: 1, h_kv: 1, ..Cell::square(65536, 64, Mask::Causal, dtype) };
    [DType::F32, DType::BF16].map(cell).into()
}

/// Prints on stderr what one call of this crate adds to the memory of the process.
fn report_memory(cell: &Cell, args: &Args) -> Result<()> {
    use common::engine::{Engine, Entry, prepare};

    let inputs = Inputs::new(cell, 1)?;
    let Entry::Ready(mut call) = prepare(Engine::Ours, cell, &inputs, args.patience)? else { return Ok(()) };
    memory::forget_peak();
    let before = memory::peak_resident();
    let context = call()?;
    let (Some(before), Some(after)) = (before, memory::peak_resident()) else { return Ok(()) };
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let own = context.elem_count() * context.dtype().size_in_bytes();
    eprintln!(
        "{}: peak resident memory {:.1} MiB before the call, {:.1} MiB after, of which the context is {:.1} MiB",
        cell.name(),
        mib(before),
        mib(after),
        mib(own as u64)
    );
    Ok(())
}
