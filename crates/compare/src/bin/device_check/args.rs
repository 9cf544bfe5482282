//! The command line.

use clap::{Parser, ValueEnum};

/// Compares attention on every device of this machine with the CPU's reference path in f64.
///
/// Prints a table for each device, and ends with exit code 1 if a number is wrong. CUDA and Metal take part if the
/// program was built with `--features cuda` or `--features metal`.
#[derive(Debug, Parser)]
#[command(name = "device_check")]
pub struct Args {
    /// The devices to check
    #[arg(long, value_enum, default_value_t = DeviceChoice::All)]
    pub device: DeviceChoice,

    /// Fewer and smaller calls; decoding is timed on keys that may fit in the processor's cache
    #[arg(long)]
    pub short: bool,

    /// Print which path the calls took, and why
    #[arg(long)]
    pub explain: bool,

    /// Allow errors of this many times the usual ones; 0 allows none
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = factor)]
    pub tolerance: f64,

    /// Time attention as well: milliseconds, TFLOP/s and GB/s
    #[arg(long)]
    pub bench: bool,

    /// Time no sequences longer than this
    #[arg(long, value_name = "T", default_value_t = 16_384)]
    pub longest: usize,

    /// Time no reference path whose scores take more than this many GiB
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
    /// All devices that are present; the CPU is not timed if there is another
    All,
}

fn factor(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(factor) if factor >= 0.0 && factor.is_finite() => Ok(factor),
        _ => Err("expected a number of 0 or more".into()),
    }
}
