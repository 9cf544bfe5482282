//! The check that an engine computes attention, without which its time means nothing.

use candle_attention::{Backend, SdpaOptions, scaled_dot_product_attention};
use candle_core::{DType, Result, Tensor, bail};

use super::cell::Cell;
use super::inputs::Inputs;

/// The number of queries in each of the three blocks that are compared.
const BLOCK: usize = 8;

/// Returns the largest difference that is allowed, relative to the largest entry of the block.
///
/// f32: a score is a sum of D products and an attention output a sum of thousands, each rounded to 2⁻²⁴, in an order
/// that each engine chooses. A single wrong key changes the output by far more than 1e-4. f16 and bf16: an engine may
/// round the weights to the 11 and 8 bits of the dtype before it multiplies the values, and has to round the output.
pub fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 5e-3,
        DType::BF16 => 3e-2,
        _ => 1e-4,
    }
}

/// Returns the largest difference, relative to the largest entry of `want`, or infinity if there is a NaN. Both become
/// f64.
pub fn gap(found: &Tensor, want: &Tensor) -> Result<f64> {
    let (found, want) = (found.to_dtype(DType::F64)?, want.to_dtype(DType::F64)?);
    let difference = (found - &want)?.abs()?;
    // A maximum skips NaN, a sum does not.
    if difference.sum_all()?.to_scalar::<f64>()?.is_nan() {
        return Ok(f64::INFINITY);
    }
    let size = want.abs()?.max_all()?.to_scalar::<f64>()?.max(f64::MIN_POSITIVE);
    Ok(difference.max_all()?.to_scalar::<f64>()? / size)
}

/// The output of the reference path in f64 for the first, the middle and the last queries of a cell.
pub struct Expected {
    /// The largest difference allowed in the cell's dtype, also for an engine that returns another dtype.
    tolerance: f64,
    /// The first query of each block and the block's output (B, H, BLOCK, D).
    blocks: Vec<(usize, Tensor)>,
}

impl Expected {
    pub fn new(cell: &Cell, inputs: &Inputs) -> Result<Self> {
        let Some((k, v)) = inputs.kv.first() else { bail!("[check] no keys to attend to") };
        let (k, v) = (k.to_dtype(DType::F64)?, v.to_dtype(DType::F64)?);
        let rows = cell.t_q.min(BLOCK);
        let mut starts = vec![0, (cell.t_q - rows) / 2, cell.t_q - rows];
        starts.dedup();
        let options = SdpaOptions::default().with_backend(Backend::Reference);
        let block = |start: usize| {
            let q = inputs.q.narrow(2, start, rows)?.to_dtype(DType::F64)?;
            let mask = cell.mask.at(start + cell.t_kv - cell.t_q);
            Ok((start, scaled_dot_product_attention(&q, &k, &v, &mask, &options)?))
        };
        let blocks = starts.into_iter().map(block).collect::<Result<_>>()?;
        Ok(Self { tolerance: tolerance(cell.dtype), blocks })
    }

    /// Returns the largest difference of an output (B, H, T_q, D), relative to the largest entry of its block.
    ///
    /// # Errors
    /// If the output differs by more than the rounding of the cell's dtype explains.
    pub fn compare(&self, context: &Tensor) -> Result<f64> {
        let mut worst = 0.0;
        for (start, want) in &self.blocks {
            let gap = gap(&context.narrow(2, *start, want.dim(2)?)?, want)?;
            if gap > self.tolerance {
                bail!("differs from the reference by {gap:.1e} in the queries from {start}")
            }
            worst = gap.max(worst);
        }
        Ok(worst)
    }
}

/// Returns the largest difference of rows (rows, out) from the same rows in f64, relative to the largest entry.
///
/// # Errors
/// If the rows differ by more than the rounding of their dtype explains.
pub fn compare_rows(found: &Tensor, want: &Tensor) -> Result<f64> {
    let (tolerance, gap) = (tolerance(found.dtype()), gap(found, want)?);
    if gap > tolerance {
        bail!("differs from the product in f64 by {gap:.1e}, expected at most {tolerance:.0e}")
    }
    Ok(gap)
}

/// Checks that two outputs of a layer (B, T, E) agree. There is no layer in f64 to compare both with.
pub fn compare_outputs(ours: &Tensor, theirs: &Tensor) -> Result<()> {
    // Both sides round q, k, v and the attention output to the dtype.
    let (gap, allowed) = (gap(ours, theirs)?, 2.0 * tolerance(ours.dtype()));
    if gap > allowed {
        bail!("the two sides differ by {gap:.1e}, expected at most {allowed:.0e}")
    }
    Ok(())
}
