//! The order of results in memory.

/// The order in memory of an attention output, or of the gradients of queries, keys and values.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OutputLayout {
    /// Contiguous as (B, H, T, D).
    #[default]
    Bhtd,
    /// Contiguous as (B, T, H, D), as a layer merges its heads: transposed and reshaped to (B, T, H·D) without a copy.
    Bthd,
}

/// The elements from a row of queries, keys or values to the row of the next sequence, head or position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayoutStrides {
    /// From a sequence to the next.
    pub sequence: usize,
    /// From a head to the next.
    pub head: usize,
    /// From a position to the next.
    pub position: usize,
}

impl OutputLayout {
    /// Returns the dimensions of rows (B, H, T, D) in this order.
    #[inline]
    pub fn dims(self, b: usize, heads: usize, positions: usize, width: usize) -> [usize; 4] {
        match self {
            Self::Bhtd => [b, heads, positions, width],
            Self::Bthd => [b, positions, heads, width],
        }
    }

    /// Returns the strides of contiguous rows of `width` elements.
    #[inline]
    pub fn strides(self, heads: usize, positions: usize, width: usize) -> LayoutStrides {
        // The strides of an empty tensor may overflow, and are not used.
        let sequence = heads.wrapping_mul(positions).wrapping_mul(width);
        match self {
            Self::Bhtd => LayoutStrides { sequence, head: positions.wrapping_mul(width), position: width },
            Self::Bthd => LayoutStrides { sequence, head: width, position: heads.wrapping_mul(width) },
        }
    }
}

impl LayoutStrides {
    /// Returns the index of the first element of a row.
    #[inline(always)]
    pub fn start(&self, b: usize, head: usize, position: usize) -> usize {
        b * self.sequence + head * self.head + position * self.position
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_layout_strides_reach_every_element_once() {
        let (heads, positions, width) = (3, 4, 5);
        for layout in [OutputLayout::Bhtd, OutputLayout::Bthd] {
            let strides = layout.strides(heads, positions, width);
            let mut starts = Vec::new();
            for b in 0..2 {
                for head in 0..heads {
                    for position in 0..positions {
                        starts.push(strides.start(b, head, position));
                    }
                }
            }
            starts.sort_unstable();
            assert_eq!(starts, (0..2 * heads * positions).map(|row| row * width).collect::<Vec<_>>(), "{layout:?}");
        }
        assert_eq!(OutputLayout::Bthd.dims(2, heads, positions, width), [2, 4, 3, 5]);
        assert_eq!(OutputLayout::Bhtd.dims(2, heads, positions, width), [2, 3, 4, 5]);
        assert_eq!(OutputLayout::Bthd.strides(heads, positions, width).start(1, 2, 3), ((4 + 3) * 3 + 2) * 5);
        assert_eq!(OutputLayout::Bhtd.strides(heads, positions, width).start(1, 2, 3), ((3 + 2) * 4 + 3) * 5);
    }
}
