//! The command line.

use std::path::PathBuf;
use std::str::FromStr;

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

    /// Only run the small cases that check kernels at their first use on a GPU, and print a report for an issue
    #[arg(long)]
    pub first_use: bool,

    /// Fewer and smaller calls
    #[arg(long)]
    pub short: bool,

    /// The widths of heads that every row goes over: 64 with --short, and 32, 64, 96 and 128 without
    #[arg(long, value_delimiter = ',', value_name = "D")]
    pub widths: Vec<usize>,

    /// Check one of N parts of the rows, so that N processes check all of them: 1/4, 2/4 and so on
    #[arg(long, value_name = "I/N", default_value = "1/1")]
    pub part: Part,

    /// The repository's folder of small models
    #[arg(long, value_name = "DIR", default_value = "models")]
    pub models: PathBuf,

    /// Print which path the calls took, and why
    #[arg(long)]
    pub explain: bool,

    /// Allow errors of this many times the usual ones; 0 allows none
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = factor)]
    pub tolerance: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DeviceChoice {
    Cpu,
    Cuda,
    Metal,
    /// All devices that are present
    All,
}

/// One of several parts of the rows.
#[derive(Debug, Clone, Copy)]
pub struct Part {
    /// From 0 to `count - 1`.
    index: usize,
    count: usize,
}

impl Part {
    /// Returns whether the row at a position belongs to the part.
    pub fn has(self, row: usize) -> bool {
        row % self.count == self.index
    }
}

impl FromStr for Part {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers = text.split_once('/').and_then(|(i, n)| Some((i.parse().ok()?, n.parse().ok()?)));
        match numbers {
            Some((number, count)) if (1..=count).contains(&number) => Ok(Self { index: number - 1, count }),
            _ => Err("expected a part and their number, for example 1/4".into()),
        }
    }
}

fn factor(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(factor) if factor >= 0.0 && factor.is_finite() => Ok(factor),
        _ => Err("expected a number of 0 or more".into()),
    }
}
