//! What examples of whole models share: where and in which type to compute, a checkpoint's JSON, and how a run ends.

mod exit;

pub use exit::*;

use std::path::Path;

use candle_core::{DType, Device, Error, Result};
use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::Value;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DeviceChoice {
    Cpu,
    Cuda,
    Metal,
}

impl DeviceChoice {
    pub fn open(self) -> Result<Device> {
        match self {
            Self::Cpu => Ok(Device::Cpu),
            Self::Cuda => Device::new_cuda(0),
            Self::Metal => Device::new_metal(0),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Precision {
    F32,
    Bf16,
    F16,
}

impl Precision {
    pub fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 => DType::BF16,
            Self::F16 => DType::F16,
        }
    }
}

/// A file of JSON; the example's name stands before what went wrong.
pub fn read_json(example: &str, path: &Path) -> Result<Value> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| Error::Msg(format!("[{example}] cannot read {}: {error}", path.display())))?;
    serde_json::from_str(&text).map_err(|error| Error::Msg(format!("[{example}] {}: {error}", path.display())))
}

/// A bar on stderr, where that is a terminal: what is done, and how many of what.
pub fn bar(doing: &str, of: &str) -> ProgressBar {
    let style = ProgressStyle::with_template(&format!("{doing} {{bar:40}} {{pos}}/{{len}} {of}"));
    ProgressBar::new(0).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}
