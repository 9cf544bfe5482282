//! Norms and candle-nn's norms: `cargo bench --bench norm`, and `-- --help` for how to time one cell.
//!
//! In forward cells, candle-nn's norm is its fused operation, which has no backward pass. In cells that train, it is
//! Candle's operations one by one.

#[expect(dead_code, reason = "each bench uses its own part of what they share")]
mod common;

use candle_attention::{LayerNorm, RmsNorm};
use candle_core::{DType, Module, Result, Tensor, Var};
use clap::Parser;
use serde_json::{Value, json};

use common::args::Args;
use common::cell::{Describe, Work, dtype_name};
use common::check::compare_rows;
use common::engine::{Call, Engine, Entry};
use common::inputs::random;
use common::report::Kind;
use common::run;

const EPS: f64 = 1e-5;

fn main() -> Result<()> {
    let args = Args::parse();
    let Some(cells) = run::cells(&args, "norm", cells())? else { return Ok(()) };
    let mut bench = run::Bench::start(&args, Kind::Linear);
    for cell in &cells {
        let inputs = cell.inputs(DType::F64)?;
        let expected = cell.call(Engine::Ours, &inputs)?()?;
        let inputs = inputs.each_ref().map(|tensor| tensor.to_dtype(cell.dtype));
        let inputs = inputs.into_iter().collect::<Result<Vec<_>>>()?;
        let calls = bench.calls(cell, &[Engine::Ours, Engine::Norm], |engine| {
            let mut call = cell.call(engine, &inputs)?;
            compare_rows(&call()?, &expected)?;
            Ok(Entry::Ready(call))
        })?;
        bench.time(cell, String::new(), calls)?;
    }
    Ok(())
}

struct Cell {
    dtype: DType,
    rows: usize,
    width: usize,
    /// Whether the norm has a mean and a bias. In cells that train it has the mean alone, since candle-nn
    /// differentiates no bias.
    is_layer: bool,
    trains: bool,
}

/// Returns one token and a prompt of a small model, and a prompt of one of 7 billion parameters.
fn cells() -> Vec<Cell> {
    let mut cells = Vec::new();
    for (trains, is_layer) in [(false, false), (false, true), (true, false), (true, true)] {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            for (rows, width) in [(1, 576), (256, 576), (2048, 4096)] {
                cells.push(Cell { dtype, rows, width, is_layer, trains });
            }
        }
    }
    cells
}

impl Describe for Cell {
    fn name(&self) -> String {
        let kind = if self.is_layer { "layer" } else { "rms" };
        let step = if self.trains { " train" } else { "" };
        format!("{kind}{step} {} x {} {}", self.rows, self.width, dtype_name(self.dtype))
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn to_json(&self) -> Value {
        json!({
            "cell": self.name(), "dtype": dtype_name(self.dtype), "rows": self.rows, "width": self.width,
            "layer": self.is_layer, "train": self.trains,
        })
    }

    /// Returns the work: a forward pass reads the inputs and writes the outputs; a backward pass reads the inputs and
    /// the gradient, and writes a gradient.
    fn work(&self) -> Result<Work> {
        let (count, passes) = ((self.rows * self.width) as f64, if self.trains { 5.0 } else { 2.0 });
        let flops = if self.trains { 12.0 } else { 4.0 };
        Ok(Work { flops: flops * count, bytes: passes * count * self.dtype.size_in_bytes() as f64, pairs: None })
    }
}

impl Cell {
    /// Returns xs, the gradient of the outputs, weight and bias, rounded to the cell's dtype.
    fn inputs(&self, dtype: DType) -> Result<[Tensor; 4]> {
        let draw = |rows: usize| random((rows, self.width), 1.0, self.dtype)?.to_dtype(dtype);
        Ok([draw(self.rows)?, draw(self.rows)?, draw(1)?.squeeze(0)?, draw(1)?.squeeze(0)?])
    }

    fn norm(&self, engine: Engine, weight: Tensor, bias: Tensor) -> Result<Box<dyn Module>> {
        Ok(match (engine, self.is_layer, self.trains) {
            (Engine::Ours, false, _) => Box::new(RmsNorm::new(weight, EPS)?),
            (Engine::Ours, true, false) => Box::new(LayerNorm::new(weight, bias, EPS)?),
            (Engine::Ours, true, true) => Box::new(LayerNorm::new_no_bias(weight, EPS)?),
            (_, false, false) => Box::new(candle_nn::RmsNorm::new(weight, EPS)),
            (_, false, true) => Box::new(candle_nn::LayerNorm::rms_norm(weight, EPS)),
            (_, true, false) => Box::new(candle_nn::LayerNorm::new(weight, bias, EPS)),
            (_, true, true) => Box::new(candle_nn::LayerNorm::new_no_bias(weight, EPS)),
        })
    }

    /// Returns a call that computes the outputs, or the gradient of xs in a cell that trains.
    fn call(&self, engine: Engine, inputs: &[Tensor]) -> Result<Call<'static>> {
        let [xs, factors, weight, bias] = inputs else { candle_core::bail!("[call] expected four inputs") };
        if !self.trains {
            let (norm, xs) = (self.norm(engine, weight.clone(), bias.clone())?, xs.clone());
            return Ok(Box::new(move || norm.forward(&xs)));
        }
        let [xs, weight] = [xs, weight].map(Var::from_tensor);
        let (xs, weight, factors) = (xs?, weight?, factors.clone());
        let norm = self.norm(engine, weight.into_inner(), bias.clone())?;
        Ok(Box::new(move || {
            let mut gradients = (norm.forward(&xs)? * &factors)?.sum_all()?.backward()?;
            match gradients.remove(&xs) {
                Some(gradient) => Ok(gradient),
                None => candle_core::bail!("[call] the input has no gradient"),
            }
        }))
    }
}
