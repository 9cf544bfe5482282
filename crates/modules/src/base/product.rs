//! Products of matrices by Candle's backends, with the same numbers on every device.
//!
//! Metal's kernels go from one matrix to the next by the stride of the last batch dimension alone. In (B, 1, M, K) that
//! stride has no meaning, and after a transpose it is not the distance of two matrices: `matmul` would read other rows,
//! without an error. Candle 0.11 on the CPU and on CUDA takes the stride of the other dimension.

use candle_core::{Result, Tensor};

/// Returns matrices that Candle multiplies in place on every device: row-major or column-major. Any others are copied.
///
/// # Errors
/// If the copy cannot be allocated.
pub fn matmul_ready(matrices: &Tensor) -> Result<Tensor> {
    if matrices.is_contiguous() || matrices.t()?.is_contiguous() { Ok(matrices.clone()) } else { matrices.contiguous() }
}

/// Multiplies matrices (.., M, K) with the same number of matrices (.., K, N). The result is contiguous.
///
/// # Errors
/// As `Tensor::matmul`.
pub fn matmul(lhs: &Tensor, rhs: &Tensor) -> Result<Tensor> {
    let (&[b, 1, m, _], &[_, 1, _, n]) = (lhs.dims(), rhs.dims()) else { return lhs.matmul(rhs) };
    // Not `unsqueeze`, whose new dimension has the stride of a row.
    lhs.squeeze(1)?.matmul(&rhs.squeeze(1)?)?.reshape((b, 1, m, n))
}

/// Multiplies matrices (B, H, M, K) with matrices (H, K, N) or (1, K, N) that all sequences share, to (B, H, M, N).
///
/// # Errors
/// As `Tensor::broadcast_matmul`.
pub fn matmul_by_head(lhs: &Tensor, rhs: &Tensor) -> Result<Tensor> {
    let (&[b, 1, m, _], &[1, _, n]) = (lhs.dims(), rhs.dims()) else { return lhs.broadcast_matmul(rhs) };
    lhs.squeeze(1)?.broadcast_matmul(rhs)?.reshape((b, 1, m, n))
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;

    /// Returns numbers (B, 1, T, D) whose second dimension has another stride than a copy, as a projection of one head.
    fn of_one_head(b: usize, t: usize, d: usize) -> Result<Tensor> {
        let numbers = Tensor::randn(0f32, 1.0, (b, t, 1, d), &Device::Cpu)?.transpose(1, 2)?;
        assert_eq!(numbers.stride(), [t * d, d, d, 1]);
        Ok(numbers)
    }

    fn largest_difference(found: &Tensor, expected: &Tensor) -> Result<f32> {
        assert_eq!((found.dims(), found.dtype()), (expected.dims(), DType::F32));
        (found - expected)?.abs()?.flatten_all()?.max(0)?.to_scalar()
    }

    #[test]
    fn product_of_one_head_matches_product_of_each_sequence() -> Result<()> {
        let (xs, ys) = (of_one_head(3, 4, 5)?, of_one_head(3, 6, 5)?);
        let (of_both, shared) = (matmul(&xs, &ys.t()?)?, matmul_by_head(&xs, &ys.narrow(0, 1, 1)?.squeeze(0)?.t()?)?);
        for product in [&of_both, &shared] {
            assert_eq!((product.dims(), product.stride()), ([3, 1, 4, 6].as_slice(), [24, 24, 6, 1].as_slice()));
        }
        for i in 0..3 {
            let left = xs.get(i)?.squeeze(0)?;
            let right = |sequence: usize| ys.get(sequence)?.squeeze(0)?.t();
            let of_sequence = |product: &Tensor| product.get(i)?.squeeze(0);
            assert!(largest_difference(&of_sequence(&of_both)?, &left.matmul(&right(i)?)?)? < 1e-6);
            assert!(largest_difference(&of_sequence(&shared)?, &left.matmul(&right(1)?)?)? < 1e-6);
        }
        Ok(())
    }
}
