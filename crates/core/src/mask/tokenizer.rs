//! Attention masks of ones and zeros, as tokenizers return them.

use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor, bail};

use super::OP;
use super::placement::Placement;
use candle_attention_modules::base::check_memory;
use candle_attention_modules::warn_once;

/// A tokenizer's attention mask (B, T_kv) of ones and zeros.
#[derive(Debug, Clone)]
pub(super) struct Tokenized {
    /// The number of columns, T_kv.
    pub columns: usize,
    /// The column after the last one of each row; 0 for a row of zeros.
    pub ends: Arc<[usize]>,
    /// Whether a row has zeros between ones.
    pub has_gaps: bool,
}

impl Tokenized {
    /// Checks that no row has a token after the end of its sequence in a cache.
    pub fn check_ends(&self, placements: &[Placement]) -> Result<()> {
        for (s, (&end, placement)) in self.ends.iter().zip(placements).enumerate() {
            let len = placement.keys.end;
            if end > len {
                bail!(
                    "[{OP}] the attention mask has a token in column {} of sequence {s}, expected none after its {len} \
                     positions: a cache stores no padding that was given by `AttentionInput::with_starts` or \
                     `with_valid_lens`, and masks do not count it",
                    end - 1
                )
            }
        }
        Ok(())
    }
}

/// The ones in a row of a tokenizer's attention mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowOfOnes {
    /// The first column with a one; 0 for a row of zeros.
    pub start: usize,
    /// The column after the last one; 0 for a row of zeros.
    pub end: usize,
    /// Whether there are zeros between ones.
    pub has_gaps: bool,
}

/// Returns the ones in each row of a tokenizer's attention mask (B, T_kv), in any dtype.
///
/// # Errors
/// For a value other than 0 and 1, and if the mask does not fit in memory.
pub fn rows_of_ones(op: &str, mask: &Tensor) -> Result<Vec<RowOfOnes>> {
    let bytes = [mask.dims(), &[size_of::<f32>()]].concat();
    check_memory(op, format_args!("the attention mask of shape {:?}", mask.dims()), &bytes)?;
    let rows = mask.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.to_vec2::<f32>()?;
    if let Some(other) = rows.iter().flatten().find(|&&value| value != 0.0 && value != 1.0) {
        bail!("[{op}] the attention mask has {other}, expected ones and zeros")
    }
    let found: Vec<_> = rows.iter().map(|row| row_of_ones(row)).collect();
    if mask.dim(1)? > 0
        && let Some(empty) = found.iter().position(|row| row.end == 0)
    {
        warn_once!(
            "[{op}] row {empty} of the attention mask is all zeros, so that its sequence has no token; expected 1 for \
             a token and 0 for padding: a mask that has 1 for padding is inverted by `mask.eq(0u8)?`"
        );
    }
    Ok(found)
}

fn row_of_ones(row: &[f32]) -> RowOfOnes {
    let is_one = |&value: &f32| value == 1.0;
    match (row.iter().position(is_one), row.iter().rposition(is_one)) {
        (Some(start), Some(last)) => {
            RowOfOnes { start, end: last + 1, has_gaps: !row[start..=last].iter().all(is_one) }
        }
        _ => RowOfOnes { start: 0, end: 0, has_gaps: false },
    }
}
