//! Some rows of a tensor.

use std::ops::Range;

use candle_core::{Result, Tensor};

/// Of the `groups` of equally many rows that a tensor (rows, ..) is divided into, `range` of each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Rows {
    pub groups: usize,
    pub range: Range<usize>,
}

impl Rows {
    /// The first `len` rows.
    pub fn first(len: usize) -> Self {
        Self { groups: 1, range: 0..len }
    }

    /// How many they are.
    pub fn len(&self) -> usize {
        self.groups * self.range.len()
    }

    /// The rows of a tensor, (len, ..): the tensor itself or a view of it where they lie side by side, a copy
    /// otherwise.
    pub fn of(&self, tensor: &Tensor) -> Result<Tensor> {
        let Range { start, end } = self.range;
        let (rows, columns) = (tensor.dims()[0], &tensor.dims()[1..]);
        match self.groups {
            1 if end - start == rows => Ok(tensor.clone()),
            1 => tensor.narrow(0, start, end - start)?.contiguous(),
            groups => {
                let grouped = tensor.reshape([&[groups, rows / groups], columns].concat())?;
                grouped.narrow(1, start, end - start)?.contiguous()?.reshape([&[self.len()], columns].concat())
            }
        }
    }

    /// The inverse: for each of several rows of one tensor what they hold, (len, ..), to the whole tensor.
    pub fn join(parts: &[(&Self, Tensor)]) -> Result<Tensor> {
        let grouped = parts
            .iter()
            .map(|(rows, part)| part.reshape([&[rows.groups, rows.range.len()], &part.dims()[1..]].concat()));
        Tensor::cat(&grouped.collect::<Result<Vec<_>>>()?, 1)?.flatten(0, 1)
    }
}
