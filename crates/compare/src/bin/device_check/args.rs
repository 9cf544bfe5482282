//! The command line.

use clap::{Parser, ValueEnum};

/// Attention on every device of this machine, held to the CPU's reference path in f64.
///
/// Prints a table for each device, and ends with exit code 1 where a number is off. CUDA and Metal take part where the
/// program was built with `--features cuda`, `--features flash-attn` or `--features metal`.
#[derive(Debug, Parser)]
#[command(name = "device_check")]
pub struct Args {
    /// Which devices to check
    #[arg(long, value_enum, default_value_t = DeviceChoice::All)]
    pub device: DeviceChoice,

    /// Fewer and smaller calls; decoding is timed on keys that a cache may hold
    #[arg(long)]
    pub short: bool,

    /// Say which path the calls took, and why
    #[arg(long)]
    pub explain: bool,

    /// Allow errors of so many times what is usual; 0 allows none
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = factor)]
    pub tolerance: f64,

    /// Time attention as well: milliseconds, TFLOP/s and GB/s
    #[arg(long)]
    pub bench: bool,

    /// Time no longer sequences than this
    #[arg(long, value_name = "T", default_value_t = 16_384)]
    pub longest: usize,

    /// Time no reference path whose scores take more than this
    #[arg(long, value_name = "GIB", default_value_t = 20.0, value_parser = factor)]
    pub scores: f64,

    /// Print what --bench would time, one JSON object a line, for torch_sdpa.py
    #[arg(long, conflicts_with = "bench")]
    pub list: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DeviceChoice {
    Cpu,
    Cuda,
    Metal,
    /// Those that are present; the CPU is not timed beside another
    All,
}

fn factor(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(factor) if factor >= 0.0 && factor.is_finite() => Ok(factor),
        _ => Err("expected a number of 0 or more".into()),
    }
}
