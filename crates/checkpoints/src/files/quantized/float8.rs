//! Floats of 8 bits: `weight` in E4M3 or E5M2 with scales by tensor, by row, by block or by group of a row.
//!
//! | written by | scales |
//! | --- | --- |
//! | DeepSeek, Qwen, transformers | `weight_scale_inv`, by blocks of `weight_block_size` in the config, or of 128 by 128 |
//! | FBGEMM, compressed-tensors, ModelOpt | `weight_scale`, one number or (out, 1) |
//! | ComfyUI | `scale_weight`, one number |
//!
//! A number is the float times its scale. Scales in U8 or F8_E8M0 are powers of 2. Other parameters than `weight`,
//! such as experts, have scales with the same endings. Scales of activations and of caches are passed over.

use std::sync::Arc;

use candle_core::Result;
use safetensors::Dtype;

use super::bits::greatest_common_divisor;
use super::floats::{e8m0, float8_of};
use super::tensors::Tensors;
use super::{Found, Module, QuantizedFormat, passed_over};
use candle_attention_modules::base::{CodeValues, Float8, GroupNumbers, QuantizedWeight};

/// The names of the scales of `weight`.
const SCALES: [&str; 3] = ["weight_scale_inv", "weight_scale", "scale_weight"];

/// The sizes of the blocks of DeepSeek.
pub(crate) const USUAL_BLOCK: ScaleBlock = ScaleBlock { rows: 128, columns: 128 };

/// The numbers of rows and columns that share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ScaleBlock {
    pub rows: usize,
    pub columns: usize,
}

/// How the scales of a weight belong to its rows: each matrix of the weight has a grid of scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ScaleGrid {
    /// The number of rows of all matrices.
    pub all_rows: usize,
    /// The number of rows of a matrix.
    rows: usize,
    pub columns: usize,
    block: ScaleBlock,
    /// The number of rows of the grid of a matrix.
    grid_rows: usize,
    grid_columns: usize,
}

impl ScaleGrid {
    /// Returns how a scale belongs to a weight; `None` for a scale of another shape.
    pub(super) fn new(weight: &[usize], scale: &[usize], configured: Option<ScaleBlock>) -> Option<Self> {
        let (columns, leading) = weight.split_last()?;
        let (columns, all_rows) = (*columns, leading.iter().product());
        let grid = |rows, block: ScaleBlock, grid_rows, grid_columns| {
            let block = ScaleBlock { rows: block.rows.max(1), columns: block.columns.max(1) };
            Some(Self { all_rows, rows, columns, block, grid_rows, grid_columns })
        };
        if scale.iter().product::<usize>() == 1 {
            return grid(all_rows, ScaleBlock { rows: all_rows, columns }, 1, 1);
        }
        // Each matrix of a weight has a grid.
        let matrix_rows = *leading.last().unwrap_or(&1);
        let scale = if weight.len() > 2 {
            let count = weight.len() - 2;
            if scale.get(..count) != Some(&weight[..count]) {
                return None;
            }
            &scale[count..]
        } else {
            scale
        };
        match *scale {
            [] | [1] | [1, 1] => grid(matrix_rows, ScaleBlock { rows: matrix_rows, columns }, 1, 1),
            [n] | [n, 1] if n == matrix_rows => grid(matrix_rows, ScaleBlock { rows: 1, columns }, n, 1),
            [n, m] => {
                for block in configured.into_iter().chain([USUAL_BLOCK]) {
                    if n == matrix_rows.div_ceil(block.rows) && m == columns.div_ceil(block.columns) {
                        return grid(matrix_rows, block, n, m);
                    }
                }
                if n == matrix_rows && m > 0 && columns.is_multiple_of(m) {
                    return grid(matrix_rows, ScaleBlock { rows: 1, columns: columns / m }, n, m);
                }
                None
            }
            _ => None,
        }
    }

    /// Returns the number of neighbouring columns whose scale is the same in all groups of that many.
    pub(super) fn group(&self) -> usize {
        if self.grid_columns <= 1 {
            self.columns.max(1)
        } else {
            greatest_common_divisor(self.block.columns, self.columns)
        }
    }

    /// Returns the scale of each group of each row.
    pub(super) fn of_groups<T: Copy>(&self, scales: &[T]) -> Vec<T> {
        let group = self.group();
        let mut numbers = Vec::with_capacity(self.all_rows * (self.columns / group));
        for row in 0..self.all_rows {
            let matrix = row / self.rows;
            let grid_row = matrix * self.grid_rows + row % self.rows / self.block.rows;
            let own = &scales[grid_row * self.grid_columns..][..self.grid_columns];
            for start in (0..self.columns).step_by(group) {
                numbers.push(own[start / self.block.columns]);
            }
        }
        numbers
    }
}

/// Floats of 8 bits with scales.
#[derive(Debug)]
struct Scaled {
    float: Float8,
    grid: ScaleGrid,
    scale: &'static str,
}

/// Finds a weight of floats of 8 bits with scales that fit. Reading one whose scales do not fit is an error of the
/// builder, which returns the floats without scales too.
pub(super) fn find(module: &Module) -> Result<Option<Found>> {
    let tensors = module.tensors;
    let Some(weight) = tensors.get("weight") else { return Ok(None) };
    let Some(float) = float8_of(weight.dtype) else { return Ok(None) };
    let Some((name, scale)) = SCALES.iter().find_map(|name| Some((*name, tensors.get(name)?))) else {
        return Ok(None);
    };
    let Some(grid) = ScaleGrid::new(&weight.shape, &scale.shape, module.settings.block()) else { return Ok(None) };
    let mut used = vec!["weight", name];
    used.extend(passed_over(module));
    let format = Arc::new(Scaled { float, grid, scale: name });
    Ok(Some(Found { outputs: grid.all_rows, inputs: grid.columns, format, tensors: used }))
}

impl QuantizedFormat for Scaled {
    fn read(&self, tensors: &Tensors) -> Result<QuantizedWeight> {
        let grid = self.grid;
        let scales = match tensors.dtype(self.scale)? {
            Dtype::U8 | Dtype::F8_E8M0 => {
                GroupNumbers::Bytes { bytes: grid.of_groups(&tensors.bytes(self.scale)?), table: e8m0() }
            }
            _ => GroupNumbers::F32(grid.of_groups(&tensors.f32(self.scale)?)),
        };
        Ok(QuantizedWeight {
            outputs: grid.all_rows,
            inputs: grid.columns,
            bits: 8,
            codes: tensors.bytes("weight")?,
            group: grid.group(),
            values: CodeValues::Float8(self.float),
            scales,
            input_order: None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the scales of all numbers of a weight, row by row, where the scales are 0, 1, ..
    fn scales(weight: &[usize], scale: &[usize], configured: Option<ScaleBlock>) -> Option<Vec<Vec<usize>>> {
        let grid = ScaleGrid::new(weight, scale, configured)?;
        let numbers: Vec<usize> = (0..scale.iter().product()).collect();
        let of_groups = grid.of_groups(&numbers);
        let rows = of_groups.chunks(grid.columns / grid.group());
        Some(rows.map(|row| row.iter().flat_map(|&number| vec![number; grid.group()]).collect()).collect())
    }

    #[test]
    fn float8_scales_belong_to_their_rows_blocks_and_matrices() {
        let block = Some(ScaleBlock { rows: 2, columns: 4 });
        assert_eq!(scales(&[3, 2], &[], None), Some(vec![vec![0, 0]; 3]));
        assert_eq!(scales(&[2, 3], &[2, 1], None), Some(vec![vec![0; 3], vec![1; 3]]));
        // Blocks of 2 by 4 in a matrix of 3 by 6.
        let expected = vec![vec![0, 0, 0, 0, 1, 1], vec![0, 0, 0, 0, 1, 1], vec![2, 2, 2, 2, 3, 3]];
        assert_eq!(scales(&[3, 6], &[2, 2], block), Some(expected));
        // Groups of a row.
        assert_eq!(scales(&[2, 4], &[2, 2], None), Some(vec![vec![0, 0, 1, 1], vec![2, 2, 3, 3]]));
        // Two matrices of one row, each with a scale, or with blocks.
        assert_eq!(scales(&[2, 1, 2], &[2, 1, 1], None), Some(vec![vec![0, 0], vec![1, 1]]));
        let of_matrices = vec![vec![0, 0, 0, 0, 1, 1], vec![2, 2, 2, 2, 3, 3]];
        assert_eq!(scales(&[2, 1, 6], &[2, 1, 2], block), Some(of_matrices));
    }

    #[test]
    fn float8_scales_of_other_shapes_are_not_taken() {
        for scale in [&[2, 2][..], &[3], &[2, 1, 1], &[2, 0]] {
            assert_eq!(scales(&[300, 260], scale, None), None, "{scale:?}");
        }
        assert_eq!(scales(&[2, 1, 6], &[3, 1, 2], Some(ScaleBlock { rows: 2, columns: 4 })), None);
    }
}
