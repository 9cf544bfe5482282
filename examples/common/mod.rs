//! Code that examples share: the command line, the files of a model, a progress bar, and output.
#![allow(dead_code, reason = "each program uses a part")]

mod command_line;
pub mod page;

pub use command_line::*;

use std::fmt::Display;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use candle_attention::QuantizationFormat;
use candle_attention::weights::Checkpoint;
use candle_core::{DType, Device, Error, Result, bail};
use candle_nn::VarBuilder;
use clap::builder::{PathBufValueParser, PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::Value;

/// The name of the program, at the beginning of its error messages.
pub const EXAMPLE: &str = env!("CARGO_CRATE_NAME");

/// The files of a model, its device and dtype, and the page of its attention.
#[derive(Debug, Clone, Args)]
pub struct ModelArgs {
    /// A folder with config.json, weights (safetensors or .bin) and, for text, tokenizer.json
    #[arg(long, value_name = "PATH", conflicts_with = "model_id")]
    pub model: Option<PathBuf>,

    /// A checkpoint of the Hugging Face hub, `organisation/name[@revision]` (needs `--features hub`)
    #[arg(long, value_name = "ID")]
    pub model_id: Option<String>,

    /// The device to compute on
    #[arg(long, value_enum, default_value_t = DeviceChoice::Cpu)]
    pub device: DeviceChoice,

    /// The type of weights and activations
    #[arg(long, default_value = "f32")]
    #[arg(value_parser = PossibleValuesParser::new(["f32", "bf16", "f16", "f64"]).try_map(|s| s.parse::<DType>()))]
    pub dtype: DType,

    /// Writes a page to explore the attention of every head, FILE.html; of several texts, that of the first
    #[arg(long, value_name = "FILE", value_parser = file_name(&["html"]))]
    pub page: Option<PathBuf>,
}

impl ModelArgs {
    pub fn is_given(&self) -> bool {
        self.model.is_some() || self.model_id.is_some()
    }

    /// Returns the folder of --model, or the folder of --model-id in the hub's cache, with some more `files`.
    pub fn folder(&self, files: &[&str]) -> Result<PathBuf> {
        let folder = match (&self.model, &self.model_id) {
            (Some(folder), _) => folder.clone(),
            (None, Some(id)) => fetch(id, files)?,
            // The command line of a program that needs a model does not allow this.
            (None, None) => bail!("[{EXAMPLE}] expected --model or --model-id"),
        };
        // A checkpoint of sentence-transformers may have the model in another folder below it.
        if !["config.json", "modules.json"].iter().any(|name| folder.join(name).is_file()) {
            bail!("[{EXAMPLE}] {}: no config.json there", folder.display())
        }
        Ok(folder)
    }

    /// Opens the checkpoint in [`folder`](Self::folder).
    pub fn open(&self, files: &[&str]) -> Result<Files> {
        self.open_folder(&self.folder(files)?, None)
    }

    /// Opens the checkpoint in a folder, with weights quantised as they are read on request.
    pub fn open_folder(&self, folder: &Path, quantize: Option<QuantizationFormat>) -> Result<Files> {
        let config = read_json(&folder.join("config.json"))?;
        let mut checkpoint = Checkpoint::open(folder)?;
        if let Some(format) = quantize {
            checkpoint = checkpoint.with_quantization(format)?;
        }
        let vb = checkpoint.var_builder(self.dtype, &self.device.open(0)?)?;
        Ok(Files { folder: folder.to_path_buf(), config, vb })
    }
}

/// Returns the parser of a format of quantised weights.
pub fn quantization() -> impl TypedValueParser<Value = QuantizationFormat> {
    PossibleValuesParser::new(["int8", "int4-32", "int4-64", "int4-128", "nf4"]).map(|name| match name.as_str() {
        "int8" => QuantizationFormat::Int8,
        "int4-32" => QuantizationFormat::Int4 { group: 32 },
        "int4-64" => QuantizationFormat::Int4 { group: 64 },
        "int4-128" => QuantizationFormat::Int4 { group: 128 },
        _ => QuantizationFormat::Nf4, // the one other name
    })
}

/// A checkpoint.
pub struct Files {
    pub folder: PathBuf,
    /// The contents of config.json.
    pub config: Value,
    /// The weights, at the root of the checkpoint.
    pub vb: VarBuilder<'static>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DeviceChoice {
    Cpu,
    Cuda,
    Metal,
    /// CUDA or Metal if there is one, else the CPU
    Auto,
}

impl DeviceChoice {
    /// Opens the device of this number, if there are several of a kind.
    pub fn open(self, n: usize) -> Result<Device> {
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

/// Fetches a checkpoint of the hub with some more files, and returns its folder in the cache.
#[cfg(feature = "hub")]
fn fetch(id: &str, files: &[&str]) -> Result<PathBuf> {
    let model = candle_attention::hub::HubModel::new(id)?;
    let files = files.iter().try_fold(model, |model, file| model.with_file(file))?.fetch()?;
    Ok(files.config.parent().unwrap_or(Path::new("")).to_path_buf())
}

#[cfg(not(feature = "hub"))]
fn fetch(_: &str, _: &[&str]) -> Result<PathBuf> {
    bail!("--model-id needs the hub: run again with `cargo run --features hub --example {EXAMPLE} ..`")
}

/// Reads a text file.
pub fn read_text(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(cannot("read", path))
}

/// Returns the parser of the name of a file with one of these extensions, for an option that writes a file.
pub fn file_name(extensions: &'static [&'static str]) -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().try_map(move |path| {
        let found = path.extension().unwrap_or_default().to_ascii_lowercase();
        if extensions.iter().any(|extension| found == *extension) {
            return Ok(path);
        }
        Err(format!("expected the extension {}", extensions.join(" or ")))
    })
}

/// Makes the folders of the files that a program will write, and checks that it can write them. A program calls this
/// before its work, since a file that cannot be written should not cost a run.
///
/// # Errors
/// If a folder cannot be made, there is a folder with the name of a file, or a file cannot be opened for writing.
pub fn make_folders(files: &[Option<&PathBuf>]) -> Result<()> {
    for file in files.iter().flatten() {
        if file.is_dir() {
            bail!("[{EXAMPLE}] cannot write {}: there is a folder of that name", file.display())
        }
        if let Some(folder) = file.parent() {
            std::fs::create_dir_all(folder).map_err(cannot("write", file))?;
        }
        check_writable(file).map_err(cannot("write", file))?;
    }
    Ok(())
}

/// Checks that a file can be written. A file that is there stays as it is, and none is left where there was none.
/// Pipes and devices are not opened, since closing one can end what reads it.
fn check_writable(file: &Path) -> std::io::Result<()> {
    if file.is_file() {
        return OpenOptions::new().append(true).open(file).map(drop);
    }
    if file.exists() {
        return Ok(());
    }
    File::create_new(file)?;
    std::fs::remove_file(file)
}

/// Reads a number of 1 or more from the command line.
pub fn count(text: &str) -> std::result::Result<NonZeroUsize, String> {
    text.parse().map_err(|_| "expected a whole number of 1 or more".to_string())
}

/// Returns a number with what it counts: "1 head", "2 heads".
pub fn counted(number: usize, noun: &str) -> String {
    if number == 1 { format!("1 {noun}") } else { format!("{number} {noun}s") }
}

/// Returns a function that makes the error of a file operation.
pub fn cannot<E: Display>(what: &str, path: &Path) -> impl FnOnce(E) -> Error {
    move |error| Error::Msg(format!("[{EXAMPLE}] cannot {what} {}: {error}", path.display()))
}

/// Reads a JSON file.
pub fn read_json(path: &Path) -> Result<Value> {
    serde_json::from_str(&read_text(path)?).map_err(cannot("read", path))
}

/// Reads a JSON file; returns null if there is none.
pub fn read_optional(path: &Path) -> Result<Value> {
    if path.is_file() { read_json(path) } else { Ok(Value::Null) }
}

/// Makes a progress bar on stderr, if that is a terminal: the activity, and the numbers of items done and in all.
pub fn bar(doing: &str, len: usize, of: &str) -> ProgressBar {
    let style = ProgressStyle::with_template(&format!("{doing} {{bar:40}} {{pos}}/{{len}} {of}"));
    ProgressBar::new(len as u64).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// Runs a function that reports the numbers of items done and in all, with a [`bar`].
pub fn with_bar<T>(doing: &str, of: &str, run: impl FnOnce(&mut dyn FnMut(usize, usize)) -> Result<T>) -> Result<T> {
    let bar = bar(doing, 0, of);
    let result = run(&mut |done, all| {
        bar.set_length(all as u64);
        bar.set_position(done as u64);
    });
    bar.finish_and_clear();
    result
}

/// Prints a report at once. A reader that has closed the pipe (`| head`) is not an error.
pub fn print(text: &str) -> Result<()> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}
