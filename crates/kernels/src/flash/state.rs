//! The state of the online softmax.

use super::packed_width::PackedWidth;
use crate::cpu::Scratch;

/// The state of the online softmax for a chunk of queries after some of the keys: for each panel the sums of weighted
/// values (D_v, panel), the largest exponent and the sum of the weights (panel).
pub(super) struct SoftmaxState {
    words: Scratch,
    /// D_v, padded to a multiple of the lanes.
    rows: usize,
    /// The number of columns of a panel.
    pub panel: usize,
}

impl SoftmaxState {
    /// Allocates the state of some panels.
    pub fn new(panel: usize, d_v: PackedWidth, panels: usize) -> Self {
        let rows = d_v.row_squares;
        Self { words: Scratch::zeros(panels * panel * (rows + 2)), rows, panel }
    }

    fn stride(&self) -> usize {
        self.panel * (self.rows + 2)
    }

    /// Sets the state before any key.
    pub fn clear(&mut self) {
        let stride = self.stride();
        let columns = self.panel;
        let sums = self.rows * columns;
        for panel in self.words.words_mut().chunks_exact_mut(stride) {
            panel[..sums].fill(0.0);
            panel[sums..sums + columns].fill(f32::NEG_INFINITY);
            panel[sums + columns..].fill(0.0);
        }
    }

    /// Returns pointers to the state of one panel.
    pub fn of_panel(&mut self, panel: usize) -> PanelState {
        let stride = self.stride();
        let sums = self.rows * self.panel;
        assert!((panel + 1) * stride <= self.words.words().len(), "the state has a part for each panel");
        // Derived from one pointer, so that each may be used after the others.
        let first = self.words.as_mut_ptr().wrapping_add(panel * stride);
        PanelState { values: first, max: first.wrapping_add(sums), sum: first.wrapping_add(sums + self.panel) }
    }
}

/// Pointers to the state of one panel.
#[derive(Clone, Copy)]
pub(super) struct PanelState {
    /// The sums of weighted values, (D_v, panel).
    pub values: *mut f32,
    /// The largest exponent of each column.
    pub max: *mut f32,
    /// The sum of the weights of each column.
    pub sum: *mut f32,
}
