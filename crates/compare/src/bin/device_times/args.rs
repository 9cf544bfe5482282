//! The command line.

use clap::{Parser, ValueEnum};

use super::cell::Section;

/// Times attention, layers and a model on a device through the public functions.
///
/// Prints one JSON object a line for each thing that is timed. beside_pytorch.py times the same with PyTorch and prints
/// a table.
#[derive(Debug, Parser)]
#[command(name = "device_times")]
pub struct Args {
    /// The device
    #[arg(long, value_enum, default_value_t = DeviceChoice::Cuda)]
    pub device: DeviceChoice,

    /// Time these sections only
    #[arg(long, value_enum, value_delimiter = ',')]
    pub sections: Vec<Section>,

    /// Time only rows whose name contains this
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    pub rows: String,

    /// Time no sequences longer than this, and a small model instead of one with 1.1 billion parameters if this is less
    /// than 2048
    #[arg(long, value_name = "T", default_value_t = 131_072, value_parser = clap::value_parser!(u32).range(16..))]
    pub longest: u32,

    /// Time each call in this many turns of 40 ms, of which the median counts
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub turns: u32,

    /// Print what would be timed, one JSON object a line
    #[arg(long, conflicts_with = "first_call")]
    pub list: bool,

    /// Time the first call of this process: the device, the weights of the model, a prompt
    #[arg(long)]
    pub first_call: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DeviceChoice {
    Cpu,
    Cuda,
    Metal,
}
