//! The rotation of rows before they become codes of 4 bits: a Hadamard matrix spreads what one column has that is
//! larger than the others over all columns of a block, so that their common scale is smaller.

use candle_attention_call::KvCodeFormat;
use candle_attention_kernels::{Workers, for_each_chunk};
use candle_attention_modules::base::rowwise::{TASK_ELEMENTS, to_vec};
use candle_core::{DType, Device, Result, Tensor};

use crate::sdpa::Attended;

/// A rotation of each block of numbers of a row, by a symmetric Hadamard matrix over the root of its size. It is its
/// own inverse, and does not change the product of two rows: rotated queries and keys have the same scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hadamard {
    /// The numbers of a block, a power of two.
    block: usize,
}

impl Hadamard {
    /// Returns the rotation of rows of these widths, all of which are whole blocks, if rows of the format are rotated.
    pub fn of(format: KvCodeFormat, widths: &[usize]) -> Option<Self> {
        match format {
            KvCodeFormat::Q8 | KvCodeFormat::E4M3 => None,
            KvCodeFormat::Q4 => {
                let bits = widths.iter().fold(0, |bits, width| bits | width);
                (bits > 0).then(|| Self { block: 1 << bits.trailing_zeros() })
            }
        }
    }

    /// Returns rotated rows (.., width) in their dtype.
    pub fn apply(self, rows: &Tensor) -> Result<Tensor> {
        if rows.elem_count() == 0 {
            return Ok(rows.clone());
        }
        if !rows.device().is_cpu() || rows.track_op() || rows.dtype() == DType::F64 {
            return self.by_product(rows);
        }
        let mut numbers = to_vec::<f32>(rows)?;
        let of_task = TASK_ELEMENTS.next_multiple_of(self.block);
        let rotate = |_: usize, some: &mut [f32]| {
            for block in some.chunks_exact_mut(self.block) {
                rotate_block(block);
            }
        };
        let workers = Workers::for_tasks(numbers.len().div_ceil(of_task));
        for_each_chunk(&mut numbers, of_task, workers, &rotate);
        Tensor::from_vec(numbers, rows.shape(), rows.device())?.to_dtype(rows.dtype())
    }

    /// Returns rotated rows by a product with the matrix, through which gradients flow.
    fn by_product(self, rows: &Tensor) -> Result<Tensor> {
        let dtype = if rows.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        let mut matrix = vec![0f64; self.block * self.block];
        for (n, entry) in matrix.iter_mut().enumerate() {
            let common = (n / self.block) & (n % self.block);
            let sign = if common.count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
            *entry = sign / (self.block as f64).sqrt();
        }
        // Converted on the CPU: Metal has no F64.
        let matrix = Tensor::from_vec(matrix, (self.block, self.block), &Device::Cpu)?.to_dtype(dtype)?;
        let matrix = matrix.to_device(rows.device())?;
        let blocks = rows.to_dtype(dtype)?.contiguous()?.reshape(((), self.block))?;
        blocks.matmul(&matrix)?.reshape(rows.shape())?.to_dtype(rows.dtype())
    }
}

/// Returns the results of attention to rotated values, with the output rotated back.
pub(crate) fn rotated_back(found: Attended, rotation: Option<Hadamard>) -> Result<Attended> {
    match rotation {
        Some(rotation) => Ok(Attended { output: rotation.apply(&found.output)?, ..found }),
        None => Ok(found),
    }
}

/// Returns rows, rotated if there is a rotation.
pub(crate) fn rotated(rows: &Tensor, rotation: Option<Hadamard>) -> Result<Tensor> {
    match rotation {
        Some(rotation) => rotation.apply(rows),
        None => Ok(rows.clone()),
    }
}

/// Multiplies a block by the matrix: sums and differences at each power of two as a distance.
fn rotate_block(block: &mut [f32]) {
    // Before the sums, so that large numbers do not overflow.
    let factor = 1.0 / (block.len() as f32).sqrt();
    block.iter_mut().for_each(|x| *x *= factor);
    let mut distance = 1;
    while distance < block.len() {
        for pairs in block.chunks_exact_mut(2 * distance) {
            let (first, second) = pairs.split_at_mut(distance);
            for (a, b) in first.iter_mut().zip(second) {
                let sum = *a + *b;
                *b = *a - *b;
                *a = sum;
            }
        }
        distance *= 2;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_attention_modules::init::TorchSeed;
    use candle_core::D;

    #[test]
    fn rotation_is_its_own_inverse_and_keeps_products_of_rows() -> Result<()> {
        let generator = TorchSeed::new(5);
        for (width, block) in [(32, 32), (64, 64), (96, 32), (128, 128), (576, 64)] {
            let rotation = Hadamard::of(KvCodeFormat::Q4, &[width]).expect("rows of 4 bits are rotated");
            assert_eq!(rotation, Hadamard { block });
            let a = generator.randn((3, 2, width))?;
            let b = generator.randn((3, 2, width))?;
            let [rotated_a, rotated_b] = [rotation.apply(&a)?, rotation.apply(&b)?];
            let difference = |x: &Tensor, y: &Tensor| (x - y)?.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>();
            assert!(difference(&rotation.apply(&rotated_a)?, &a)? < 1e-5);
            assert!(difference(&(&rotated_a * &rotated_b)?.sum(D::Minus1)?, &(&a * &b)?.sum(D::Minus1)?)? < 1e-4);
            assert!(difference(&rotation.by_product(&a)?, &rotated_a)? < 1e-5);
        }
        // The rows of latents and the values in their first columns have common blocks.
        assert_eq!(Hadamard::of(KvCodeFormat::Q4, &[576, 512]), Some(Hadamard { block: 64 }));
        assert_eq!(Hadamard::of(KvCodeFormat::Q8, &[64]), None);
        Ok(())
    }

    #[test]
    fn rotation_spreads_one_large_number_over_its_block() -> Result<()> {
        let mut row = [0f32; 64];
        row[37] = 8.0;
        let rotated = Hadamard { block: 64 }.apply(&Tensor::new(&row, &candle_core::Device::Cpu)?)?;
        assert!(rotated.to_vec1::<f32>()?.iter().all(|x| (x.abs() - 1.0).abs() < 1e-6));
        Ok(())
    }
}
