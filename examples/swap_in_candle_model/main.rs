//! Replaces the attention of an existing Candle model by this crate's layer. `before.rs` is the attention that the
//! model had, `after.rs` the attention that it has now; `model.rs`, the rest of the model, does not change. Both get
//! the same weights under the same names; the program compares their logits and counts their lines.
//!
//! ```sh
//! cargo run --example swap_in_candle_model
//! ```

mod after;
mod before;
#[path = "../common/command_line.rs"]
mod command_line;
mod model;

use std::io::Write;
use std::process::ExitCode;

use candle_attention::TorchSeed;
use candle_core::{DType, Device, Result, Tensor, bail};
use clap::Parser;

use model::{Config, Model};

/// Compares a small Candle model with its own attention and with this crate's.
#[derive(Parser)]
struct Args {
    /// The largest difference of logits, relative to the largest logit, that counts as equal
    #[arg(long, default_value_t = 1e-5)]
    tolerance: f32,
}

const CONFIG: Config = Config {
    vocab_size: 512,
    hidden_size: 128,
    intermediate_size: 352,
    num_layers: 3,
    num_heads: 8,
    num_kv_heads: 2,
    max_positions: 128,
    rope_theta: 10_000.0,
    rms_norm_eps: 1e-6,
};
const SEQUENCES: usize = 2;

/// Some calls with the same number of positions.
struct Step {
    name: &'static str,
    calls: usize,
    positions: usize,
}

/// A prompt, a second one after the cached first, and tokens one by one.
const STEPS: [Step; 3] = [
    Step { name: "prompt", calls: 1, positions: 48 },
    Step { name: "a second", calls: 1, positions: 16 },
    Step { name: "one by one", calls: 32, positions: 1 },
];

fn main() -> ExitCode {
    command_line::main(run)
}

fn run(args: Args) -> Result<()> {
    // A name that was drawn before returns the same tensor again.
    let vb = TorchSeed::new(0).var_builder(DType::F32, &Device::Cpu);
    let mut before = Model::<before::Attention>::new(&CONFIG, vb.clone())?;
    let mut after = Model::<after::Attention>::new(&CONFIG, vb)?;

    let mut out = std::io::stdout();
    writeln!(
        out,
        "{SEQUENCES} sequences                      positions  largest logit  largest difference  of the largest"
    )?;
    let mut parts = Vec::new();
    for again in ["", ", again after clearing"] {
        let mut position = 0;
        for Step { name, calls, positions } in STEPS {
            let mut logits = Vec::new();
            let mut differences = Vec::new();
            for _ in 0..calls {
                let ids = ids(position, positions)?;
                let expected = before.forward(&ids)?;
                let found = after.forward(&ids)?;
                differences.extend((found - &expected)?.flatten_all()?.to_vec1::<f32>()?);
                logits.extend(expected.flatten_all()?.to_vec1::<f32>()?);
                position += positions;
            }
            let logit = largest(logits);
            let difference = largest(differences);
            let part = difference / logit;
            parts.push(part);
            writeln!(
                out,
                "{:<32} {:>9} {logit:>14.3} {difference:>19.1e} {part:>15.1e}",
                format!("{name}{again}"),
                calls * positions
            )?;
        }
        before.clear_kv_cache();
        after.clear_kv_cache();
    }
    let lines_before = lines_of_code(include_str!("before.rs"));
    let lines_after = lines_of_code(include_str!("after.rs"));
    writeln!(out, "lines of attention: {lines_before} before, {lines_after} after")?;
    let gap = largest(parts);
    if gap <= args.tolerance {
        return Ok(());
    }
    bail!("[swap_in_candle_model] the logits differ by {gap:.1e} of the largest, expected at most {:e}", args.tolerance)
}

/// Returns token ids (B, T) of the positions from `position` on.
fn ids(position: usize, t: usize) -> Result<Tensor> {
    let id = |sequence: usize, at: usize| ((at * 37 + sequence * 101 + 11) % CONFIG.vocab_size) as u32;
    let ids = (0..SEQUENCES).flat_map(|sequence| (position..position + t).map(move |at| id(sequence, at)));
    Tensor::from_vec(ids.collect(), (SEQUENCES, t), &Device::Cpu)
}

/// Returns the largest absolute value; NaN if there is one.
fn largest(numbers: Vec<f32>) -> f32 {
    numbers.into_iter().map(f32::abs).max_by(f32::total_cmp).unwrap_or(0.0)
}

/// Counts the lines that are neither empty nor a comment.
fn lines_of_code(source: &str) -> usize {
    source.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("//")).count()
}
