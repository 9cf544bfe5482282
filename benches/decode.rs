//! A few new queries against a long cache: `cargo bench --bench decode`, and `-- --help` for how to time one cell.
//!
//! The time of these calls is the time of reading keys and values. A model reads the keys of all its layers before it
//! returns to the first, so each call takes the next of many copies, which are `--total` MiB together.

#[expect(dead_code, reason = "each bench uses its own part of what they share")]
mod common;

use candle_attention::KvCodeFormat;
use candle_core::{DType, Result};
use clap::Parser;

use common::args::Args;
use common::cell::{Cell, Mask};
use common::report::Kind;
use common::run;

fn main() -> Result<()> {
    let args = Args::parse();
    let Some(cells) = run::cells(&args, "decode", cells())? else { return Ok(()) };
    run::attention(&args, &cells, Kind::Decode)
}

fn cells() -> Vec<Cell> {
    let mut cells = Vec::new();
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let after = |t_q, t_kv| Cell { h: 32, h_kv: 8, t_q, ..Cell::square(t_kv, 128, Mask::Causal, dtype) };
        cells.extend([16, 32, 64].map(|size| Cell { page_size: Some(size), ..after(1, 16384) }));
        for codes in [None, Some(KvCodeFormat::Q8), Some(KvCodeFormat::E4M3), Some(KvCodeFormat::Q4)] {
            cells.extend([after(1, 4096), after(1, 16384)].map(|cell| Cell { codes, ..cell }));
            // Speculative decoding has several queries at once.
            cells.extend([4, 8, 16].map(|t_q| Cell { codes, ..after(t_q, 4096) }));
            // Without grouped heads, a token is one row of a key head.
            cells.extend([1, 4, 8].map(|t_q| Cell { h: 8, codes, ..after(t_q, 4096) }));
        }
    }
    cells
}
