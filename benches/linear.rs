//! Projections and Candle's `Linear`: `cargo bench --bench linear`, and `-- --help` for how to time one cell.
//!
//! A product of few rows with a large weight takes as long as reading the weight. A model reads the weights of all its
//! layers before it returns to the first, so each call takes the next of many copies, which are `--total` MiB together;
//! such cells are named "from memory". The other cells multiply with one weight again and again.

#[expect(dead_code, reason = "each bench uses its own part of what they share")]
mod common;

use candle_attention::PackedLinear;
use candle_core::{DType, Module, Result, Tensor};
use candle_nn::Linear;
use clap::Parser;
use serde_json::{Value, json};

use common::args::Args;
use common::cell::{Describe, Work, dtype_name};
use common::check::compare_rows;
use common::engine::{Call, Engine, Entry};
use common::inputs::random;
use common::report::Kind;
use common::run;

/// The number of rows in each of the three blocks that are compared.
const BLOCK: usize = 8;

fn main() -> Result<()> {
    let args = Args::parse();
    let Some(cells) = run::cells(&args, "linear", cells())? else { return Ok(()) };
    let mut bench = run::Bench::start(&args, Kind::Linear);
    for cell in &cells {
        let sides = Sides::new(cell, &args)?;
        let calls =
            bench.calls(cell, &[Engine::Ours, Engine::Linear], |engine| Ok(Entry::Ready(sides.checked(engine)?)))?;
        let plan = sides.packed.first().map_or_else(String::new, |packed| format!("{packed:?}"));
        bench.time(cell, plan, calls)?;
    }
    Ok(())
}

/// (rows, inputs) times a weight (outputs, inputs).
struct Cell {
    dtype: DType,
    rows: usize,
    inputs: usize,
    outputs: usize,
    from_memory: bool,
}

/// Returns the projections of a small model and of one of 7 billion parameters: one token, a few, a prompt.
fn cells() -> Vec<Cell> {
    let mut cells = Vec::new();
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let square = |rows, width, from_memory| Cell { dtype, rows, inputs: width, outputs: width, from_memory };
        cells.extend([1, 8, 32, 2048].map(|rows| square(rows, 1536, false)));
        cells.extend([1, 8].map(|rows| square(rows, 4096, true)));
        cells.extend([512, 2048].map(|rows| square(rows, 4096, false)));
    }
    cells
}

impl Cell {
    fn weight_bytes(&self) -> usize {
        self.inputs * self.outputs * self.dtype.size_in_bytes()
    }
}

impl Describe for Cell {
    fn name(&self) -> String {
        let from = if self.from_memory { " from memory" } else { "" };
        format!("r{} {} x {} {}{from}", self.rows, self.inputs, self.outputs, dtype_name(self.dtype))
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn to_json(&self) -> Value {
        json!({
            "cell": self.name(), "dtype": dtype_name(self.dtype), "rows": self.rows, "in": self.inputs,
            "out": self.outputs, "from_memory": self.from_memory,
        })
    }

    fn work(&self) -> Result<Work> {
        let flops = 2.0 * self.rows as f64 * self.inputs as f64 * self.outputs as f64;
        Ok(Work { flops, bytes: self.weight_bytes() as f64, pairs: None })
    }
}

/// Both sides of a cell, each with one or more copies of the weight, and their input.
struct Sides {
    xs: Tensor,
    packed: Vec<PackedLinear>,
    linears: Vec<Linear>,
    /// The first row of each block, and the block's expected output in f64.
    expected: Vec<(usize, Tensor)>,
}

impl Sides {
    fn new(cell: &Cell, args: &Args) -> Result<Self> {
        let xs = random((cell.rows, cell.inputs), 1.0, cell.dtype)?;
        let weight = random((cell.outputs, cell.inputs), (cell.inputs as f64).recip().sqrt(), cell.dtype)?;
        let copies = if cell.from_memory { args.total_bytes().div_ceil(cell.weight_bytes()) } else { 1 };
        let (mut packed, mut linears) = (Vec::new(), Vec::new());
        for _ in 0..copies {
            if args.engines.contains(&Engine::Ours) {
                packed.push(PackedLinear::new(&weight, None)?);
            }
            if args.engines.contains(&Engine::Linear) {
                linears.push(Linear::new(weight.copy()?, None));
            }
        }
        let weight = weight.to_dtype(DType::F64)?.t()?;
        let rows = cell.rows.min(BLOCK);
        let mut starts = vec![0, (cell.rows - rows) / 2, cell.rows - rows];
        starts.dedup();
        let block = |start| Ok((start, xs.narrow(0, start, rows)?.to_dtype(DType::F64)?.matmul(&weight)?));
        let expected = starts.into_iter().map(block).collect::<Result<_>>()?;
        Ok(Self { xs, packed, linears, expected })
    }

    /// Returns the engine's call after checking its numbers. Each run takes the next copy.
    fn checked(&self, engine: Engine) -> Result<Call<'_>> {
        let copies: Vec<&dyn Module> = match engine {
            Engine::Ours => self.packed.iter().map(|packed| packed as _).collect(),
            _ => self.linears.iter().map(|linear| linear as _).collect(),
        };
        let mut copies = copies.into_iter().cycle();
        let mut call = move || match copies.next() {
            Some(copy) => copy.forward(&self.xs),
            None => candle_core::bail!("[checked] no weight to multiply with"),
        };
        let found = call()?;
        for (start, want) in &self.expected {
            compare_rows(&found.narrow(0, *start, want.dim(0)?)?, want)?;
        }
        Ok(Box::new(call))
    }
}
