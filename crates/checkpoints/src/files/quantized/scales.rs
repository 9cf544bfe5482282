//! Blocks of a weight that share a scale.

use candle_core::Result;

use super::float8::ScaleBlock;
use super::groups::Groups;
use candle_attention_modules::base::GroupNumbers;

impl ScaleBlock {
    /// Returns the shape of the scales of a weight.
    pub(super) fn grid(self, outputs: usize, inputs: usize) -> [usize; 2] {
        [outputs.div_ceil(self.rows), inputs.div_ceil(self.columns)]
    }

    /// Returns the size of the blocks that share a scale, from the shape of the scales: one scale, one for each output,
    /// or one for each group of the inputs of an output. `None` for another shape. `group` is the size of groups, if it
    /// is known.
    pub(super) fn of_shape(outputs: usize, inputs: usize, scale: &[usize], group: Option<usize>) -> Option<Self> {
        match *scale {
            [] | [1] | [1, 1] => Some(Self { rows: outputs, columns: inputs }),
            [rows] | [rows, 1] if rows == outputs => Some(Self { rows: 1, columns: inputs }),
            [rows, groups] if rows == outputs && groups > 0 => match group {
                Some(size) if size > 0 && inputs.div_ceil(size) == groups => Some(Self { rows: 1, columns: size }),
                _ if inputs.is_multiple_of(groups) => Some(Self { rows: 1, columns: inputs / groups }),
                _ => None,
            },
            _ => None,
        }
    }

    /// Returns the number of each group of each output, from one number for each block, in rows of `columns`.
    pub(super) fn numbers(
        self,
        outputs: usize,
        groups: &Groups,
        numbers: &GroupNumbers,
        columns: usize,
    ) -> Result<GroupNumbers> {
        groups.numbers(outputs, numbers, |output, group| output / self.rows * columns + group)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_of_blocks_are_those_of_their_rows_and_columns() -> Result<()> {
        let blocks = ScaleBlock { rows: 2, columns: 4 };
        assert_eq!(blocks.grid(3, 6), [2, 2]);
        let stored = GroupNumbers::F32(vec![1.0, 2.0, 3.0, 4.0]);
        let groups = Groups::of_neighbours(6, 4);
        let numbers = blocks.numbers(3, &groups, &stored, 2)?;
        // Groups of 2, so that the smaller last block has whole ones.
        assert_eq!(numbers, GroupNumbers::F32(vec![1.0, 1.0, 2.0, 1.0, 1.0, 2.0, 3.0, 3.0, 4.0]));
        Ok(())
    }
}
