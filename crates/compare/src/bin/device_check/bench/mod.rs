//! Times of attention: the path that this crate chooses, and its reference path.

mod cell;

pub use cell::{Cell, cells};

use std::time::{Duration, Instant};

use candle_attention::{Backend, SdpaOptions, plan, scaled_dot_product_attention};
use candle_core::{Device, Result, Tensor};

use super::args::Args;
use super::progress::Progress;
use crate::command_line::one_line;

/// Calls of a turn take this long together, so that the time to start and to wait for them does not count.
const TURN: Duration = Duration::from_millis(60);
const TURNS: usize = 7;

/// The bytes of keys and values that are read in turn when decoding exceed this, so that no cache can store them.
const CACHED: usize = 512 << 20;

/// Prints a row for each cell and path.
pub fn run(args: &Args, device: &Device) -> Result<()> {
    let cells = cells(args.longest);
    let progress = Progress::new(cells.len());
    println!("\n{:<34}{:<11}{:>10}{:>10}{:>8}  path", "cell", "", "ms", "TFLOP/s", "GB/s");
    for cell in cells {
        progress.step(&cell.to_string());
        let copies = if cell.is_decode() && !args.short { CACHED.div_ceil(cell.kv_bytes()) } else { 1 };
        let (q, kv) = cell.tensors(copies, device)?;
        let mask = cell.mask();
        for (name, backend) in [("chosen", Backend::Auto), ("reference", Backend::Reference)] {
            let options = SdpaOptions::default().with_backend(backend);
            let Some((k, v)) = kv.first() else { continue };
            let plan = plan(&q, k, v, &mask, &options)?;
            let gib = cell.score_bytes() / f64::from(1 << 30);
            let outcome = if plan.backend == Backend::Reference && gib > args.scores {
                Err(format!("skipped: scores of {gib:.0} GiB"))
            } else {
                let call = |n: usize| {
                    let (keys, values) = &kv[n % kv.len()];
                    scaled_dot_product_attention(&q, keys, values, &mask, &options)
                };
                milliseconds(call, device).map_err(|error| one_line(&error))
            };
            progress.print(&row(&cell, name, outcome, &plan.to_string()));
        }
    }
    Ok(())
}

/// Returns the median of a call's time over [`TURNS`] turns.
fn milliseconds(call: impl Fn(usize) -> Result<Tensor>, device: &Device) -> Result<f64> {
    let turn = |calls: usize| -> Result<f64> {
        device.synchronize()?;
        let start = Instant::now();
        for n in 0..calls {
            std::hint::black_box(call(n)?);
        }
        device.synchronize()?;
        Ok(start.elapsed().as_secs_f64() / calls as f64)
    };
    // The first call compiles kernels and fills the allocator.
    turn(1)?;
    let calls = (TURN.as_secs_f64() / turn(1)?).ceil().clamp(1.0, 1e4) as usize;
    let mut times = (0..TURNS).map(|_| turn(calls)).collect::<Result<Vec<_>>>()?;
    times.sort_by(f64::total_cmp);
    Ok(1e3 * times[TURNS / 2])
}

fn row(cell: &Cell, name: &str, outcome: std::result::Result<f64, String>, plan: &str) -> String {
    let start = format!("{:<34}{name:<11}", cell.to_string());
    match outcome {
        Ok(ms) => {
            let tflops = cell.flops() / ms / 1e9;
            let gb_s = cell.kv_bytes() as f64 / ms / 1e6;
            let gb_s = if cell.is_decode() { format!("{gb_s:.0}") } else { "-".into() };
            format!("{start}{ms:>10.3}{tflops:>10.2}{gb_s:>8}  {plan}")
        }
        Err(reason) => format!("{start}{reason}"),
    }
}
