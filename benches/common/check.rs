//! Whether an engine computes attention, before its time means anything.

use candle_attention::{Backend, SdpaOptions, scaled_dot_product_attention};
use candle_core::{DType, Result, Tensor, bail};

use super::cell::Cell;
use super::inputs::Inputs;

/// Queries of each of the three blocks that are compared.
const BLOCK: usize = 8;

/// The largest gap allowed, relative to the largest entry of the block.
///
/// f32: a score is a sum of D products and a context one of thousands, each rounded to 2⁻²⁴, in an order of the
/// engine's own; what is wrong by one key is wrong by far more than 1e-4. f16 and bf16: an engine may round the weights
/// to the 11 and 8 bits of the dtype before they meet the values, and has to round the context.
pub fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 5e-3,
        DType::BF16 => 3e-2,
        _ => 1e-4,
    }
}

/// The largest difference, relative to the largest entry of `want`, or infinity if there is a NaN. Both become f64.
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

/// What the reference path gives in f64 for some queries of a cell: the first, the middle and the last.
pub struct Expected {
    /// The largest gap allowed in the cell's dtype, whatever dtype an engine returns.
    tolerance: f64,
    /// The first query of each block and the block's context (B, H, BLOCK, D).
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

    /// The largest gap of a context (B, H, T_q, D), relative to the largest entry of its block.
    ///
    /// # Errors
    /// For a context that is further off than the cell's dtype explains.
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

/// The largest gap of rows (rows, out) from what they should be in f64, relative to its largest entry.
///
/// # Errors
/// For rows that are further off than their dtype explains.
pub fn compare_rows(found: &Tensor, want: &Tensor) -> Result<f64> {
    let (tolerance, gap) = (tolerance(found.dtype()), gap(found, want)?);
    if gap > tolerance {
        bail!("differs from the product in f64 by {gap:.1e}, expected at most {tolerance:.0e}")
    }
    Ok(gap)
}

/// The same for two whole results of a layer (B, T, E): there is no f64 layer to stand between them.
pub fn compare_outputs(ours: &Tensor, theirs: &Tensor) -> Result<()> {
    // Both sides round q, k, v and the context to the dtype, each for itself.
    let (gap, allowed) = (gap(ours, theirs)?, 2.0 * tolerance(ours.dtype()));
    if gap > allowed {
        bail!("the two sides differ by {gap:.1e}, expected at most {allowed:.0e}")
    }
    Ok(())
}
