//! What examples of whole models share: the command line, where and in which type to compute, and a checkpoint's files.

mod command_line;

pub use command_line::*;

use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Error, Result, bail};
use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::Value;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DeviceChoice {
    Cpu,
    Cuda,
    Metal,
    /// CUDA or Metal where there is one, else the CPU
    Auto,
}

impl DeviceChoice {
    pub fn open(self) -> Result<Device> {
        self.open_at(0)
    }

    /// The device of this number, where there are several of a kind.
    pub fn open_at(self, n: usize) -> Result<Device> {
        let (name, device) = match self {
            Self::Cpu => return Ok(Device::Cpu),
            Self::Auto => return Ok(Device::new_cuda(n).or_else(|_| Device::new_metal(n)).unwrap_or(Device::Cpu)),
            Self::Cuda => ("cuda", Device::new_cuda(n)),
            Self::Metal => ("metal", Device::new_metal(n)),
        };
        device.map_err(|error| {
            let reason = one_line(&error);
            Error::Msg(format!("no {name} device: {reason}; try `--device cpu`, or build with `--features {name}`"))
        })
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

/// The folder of a checkpoint: that of --model, or where the hub's cache has --model-id with some more files.
pub fn checkpoint(example: &str, model: Option<&Path>, model_id: Option<&str>, files: &[String]) -> Result<PathBuf> {
    let folder = match (model, model_id) {
        (Some(folder), _) => folder.to_path_buf(),
        (None, Some(id)) => fetch(example, id, files)?,
        (None, None) => bail!("[{example}] expected --model or --model-id"),
    };
    if !folder.join("config.json").is_file() {
        bail!("[{example}] {} has no config.json", folder.display())
    }
    Ok(folder)
}

/// A checkpoint of the hub with some more files: its folder in the cache, whose name is the commit.
#[cfg(feature = "hub")]
pub fn fetch(_: &str, id: &str, files: &[String]) -> Result<PathBuf> {
    let model = candle_attention::hub::HubModel::new(id)?;
    let files = files.iter().try_fold(model, |model, file| model.with_file(file))?.fetch()?;
    Ok(files.config.parent().unwrap_or(Path::new("")).to_path_buf())
}

#[cfg(not(feature = "hub"))]
pub fn fetch(example: &str, _: &str, _: &[String]) -> Result<PathBuf> {
    bail!("--model-id needs the hub: run again with `cargo run --features hub --example {example} ..`")
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

/// Writes a report at once; a reader that went away (`| head`) is no error.
pub fn print(text: &str) -> Result<()> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}
