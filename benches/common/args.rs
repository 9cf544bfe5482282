//! The command line, the same for every bench.

use candle_core::{DType, Result, bail};
use clap::Parser;

use super::cell::{Describe, dtype_name};
use super::engine::Engine;

/// Times attention or one of its parts in turn with other implementations.
#[derive(Debug, Clone, Parser)]
pub struct Args {
    /// One JSON object a line for each cell and engine instead of a Markdown table.
    #[arg(long)]
    pub json: bool,
    /// Names the cells and times nothing.
    #[arg(long)]
    pub list: bool,
    /// Only the cells whose name contains this.
    #[arg(long, value_name = "SUBSTRING")]
    pub only: Option<String>,
    /// Only the cells of this dtype.
    #[arg(long, value_parser = parse_dtype)]
    pub dtype: Option<DType>,
    /// How often each engine has its turn.
    #[arg(long, value_name = "N", default_value_t = 11, value_parser = clap::value_parser!(u64).range(1..))]
    pub rounds: u64,
    /// Only these engines, by comma.
    #[arg(long, value_delimiter = ',', default_values_t = Engine::ALL)]
    pub engines: Vec<Engine>,
    /// An engine whose single call takes more than this many seconds is left out of a cell.
    #[arg(long, value_name = "SECONDS", default_value_t = 4.0)]
    pub patience: f64,
    /// The 65536 tokens, and the memory that they take, instead of the other cells.
    #[arg(long)]
    pub long: bool,
    /// MiB of keys and values, or of weights, that decoding walks through, and of the buffer for the read bandwidth:
    /// more than the cache.
    #[arg(long, value_name = "MIB", default_value_t = 1024, value_parser = clap::value_parser!(u64).range(1..))]
    pub total: u64,
    /// A Python that has PyTorch, for the bench that trains.
    #[arg(long, value_name = "PATH", default_value = "python3")]
    pub python: String,
    /// Given by `cargo bench`.
    #[arg(long, hide = true)]
    pub bench: bool,
}

impl Args {
    /// Returns the requested cells.
    ///
    /// # Errors
    /// If no cell matches, since a filter is then likely to be misspelt.
    pub fn choose<C: Describe>(&self, cells: Vec<C>) -> Result<Vec<C>> {
        let chosen = |cell: &C| {
            self.only.as_ref().is_none_or(|part| cell.name().contains(part))
                && self.dtype.is_none_or(|dtype| cell.dtype() == dtype)
        };
        let chosen: Vec<C> = cells.into_iter().filter(chosen).collect();
        if chosen.is_empty() {
            bail!("[--only] no cell of that name and dtype, expected one of those that --list prints")
        }
        Ok(chosen)
    }

    pub fn total_bytes(&self) -> usize {
        usize::try_from(self.total).unwrap_or(usize::MAX).saturating_mul(1 << 20)
    }
}

fn parse_dtype(name: &str) -> Result<DType> {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        if dtype_name(dtype) == name {
            return Ok(dtype);
        }
    }
    bail!("expected f32, bf16 or f16, found {name}")
}
