//! The memory that one task works in.

use super::heuristics::PackedSizes;
use super::problem::ScoreInputs;
use super::statistics::kept_scores;
use crate::cpu::{Kernel, Scratch, Vector};

/// What the online softmax knows of a chunk of queries after some of the keys: for each panel the sums of weighted
/// values (context, panel), the largest exponent and the sum of the weights (panel).
pub(super) struct State {
    words: Scratch,
    context: usize,
    /// The columns of a panel.
    pub panel: usize,
}

impl State {
    pub fn new<K: Kernel>(sizes: PackedSizes, panels: usize) -> Self {
        let panel = K::PANEL;
        Self {
            words: Scratch::zeros(panels * panel * (sizes.d_v.row_squares + 2)),
            context: sizes.d_v.row_squares,
            panel,
        }
    }

    fn stride(&self) -> usize {
        self.panel * (self.context + 2)
    }

    /// The state before any key.
    pub fn clear(&mut self) {
        let (stride, context) = (self.stride(), self.context * self.panel);
        for panel in self.words.words_mut().chunks_exact_mut(stride) {
            panel[..context].fill(0.0);
            panel[context..context + self.panel].fill(f32::NEG_INFINITY);
            panel[context + self.panel..].fill(0.0);
        }
    }

    /// The state of all panels, to be copied.
    pub fn words(&self) -> &[f32] {
        self.words.words()
    }

    /// Merges the state of the same panels over other keys into this one. `unit` is [`ScoreUnits::exponent_unit`].
    ///
    /// [`ScoreUnits::exponent_unit`]: super::problem::ScoreUnits::exponent_unit
    pub fn merge(&mut self, other: &[f32], unit: f32) {
        let (stride, panel) = (self.stride(), self.panel);
        for (mine, other) in self.words.words_mut().chunks_exact_mut(stride).zip(other.chunks_exact(stride)) {
            for column in 0..panel {
                let (max, sum) = (stride - 2 * panel + column, stride - panel + column);
                let most = mine[max].max(other[max]);
                // Where neither has seen a key, both factors are of zeros.
                let shift = if most == f32::NEG_INFINITY { 0.0 } else { most };
                let (keep, take) = (((mine[max] - shift) * unit).exp2(), ((other[max] - shift) * unit).exp2());
                for at in (column..stride - 2 * panel).step_by(panel) {
                    mine[at] = mine[at] * keep + other[at] * take;
                }
                mine[sum] = mine[sum] * keep + other[sum] * take;
                mine[max] = most;
            }
        }
    }

    /// The state of one panel.
    pub fn of_panel(&mut self, panel: usize) -> PanelState {
        let (stride, context) = (self.stride(), self.context * self.panel);
        assert!((panel + 1) * stride <= self.words.words().len(), "the state has a part for each panel");
        // Derived from one pointer, so that each may be used after the others.
        let first = self.words.as_mut_ptr().wrapping_add(panel * stride);
        PanelState { context: first, max: first.wrapping_add(context), sum: first.wrapping_add(context + self.panel) }
    }
}

/// Pointers to the state of one panel.
#[derive(Clone, Copy)]
pub(super) struct PanelState {
    pub context: *mut f32,
    pub max: *mut f32,
    pub sum: *mut f32,
}

/// Everything a thread needs for its tasks. Its size depends on D, D_v, the tier and whether weights are dropped, up to
/// about a megabyte and a half at D = 128, and grows with them.
pub(super) struct Workspace {
    pub sizes: PackedSizes,
    /// (panels, D, panel).
    pub queries: Scratch,
    pub state: State,
    /// (block, D).
    pub keys: Scratch,
    /// (D_v / rows, block, rows) for words of one element, (D_v, block / 2) for pairs.
    pub values: Scratch,
    /// (block, panel).
    pub scores: Scratch,
    /// (block / 2, panel), for pairs.
    pub weights: Scratch,
    /// (block, panel), where weights are dropped.
    pub dropout: Scratch,
    /// Rows on their way to being transposed.
    pub staging: Scratch,
    /// Where statistics are wanted, the scores of all keys (panels, T_kv, panel), until the sum of their weights is
    /// known, and what is found of them: see [`kept_scores`]. `None` too where there is no memory for them.
    pub kept: Option<Scratch>,
}

impl Workspace {
    pub fn new<K: Kernel>(inputs: &ScoreInputs, panels: usize, keeps_scores: bool) -> Self {
        let sizes = PackedSizes::new::<K>(&inputs.dims);
        let (block, lanes) = (K::BLOCK, K::Vector::LANES);
        // For scores, a row of a block for each lane.
        let staging = (lanes * block).max(sizes.d.staging_words::<K>()).max(sizes.d_v.staging_words::<K>());
        Self {
            sizes,
            queries: Scratch::zeros(panels * sizes.d.word_squares * K::PANEL),
            state: State::new::<K>(sizes, panels),
            keys: Scratch::zeros(block * sizes.d.words),
            values: Scratch::zeros(sizes.d_v.column_words::<K>()),
            scores: Scratch::zeros(block * K::PANEL),
            weights: Scratch::zeros(if K::IS_BF16 { block / 2 * K::PANEL } else { 0 }),
            dropout: Scratch::zeros(if inputs.options.dropout.is_some() { block * K::PANEL } else { 0 }),
            staging: Scratch::zeros(staging),
            kept: if keeps_scores { kept_scores(&inputs.dims, panels, K::PANEL) } else { None },
        }
    }
}
