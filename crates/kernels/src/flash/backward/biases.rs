//! The gradients of what is added to scores: biases, distance biases and ALiBi's slopes.

use std::cell::Cell;

use crate::cpu::{Kernel, MAX_COLUMNS, MAX_LANES, SharedPtr, Vector};
use crate::flash::distances::DistanceOutput;
use crate::flash::problem::{Alibi, Dims, Row, ScoreInputs};
use crate::flash::scores::TileScores;
use crate::number::{load_first, store_first};

/// The gradient of a bias: a contiguous tensor whose dimensions are those of the scores (B, H, T_q, T_kv), or 1.
#[derive(Clone, Copy)]
pub(super) struct BiasOutput {
    pub at: SharedPtr<f32>,
    pub strides: [usize; 4],
    /// Whether queries share entries, which are then summed by the task before they are added to the tensor.
    pub is_summed_over_queries: bool,
}

impl BiasOutput {
    pub fn new(at: SharedPtr<f32>, shape: [usize; 4]) -> Self {
        let mut strides = [0; 4];
        let mut stride = 1;
        for n in (0..4).rev() {
            strides[n] = if shape[n] == 1 { 0 } else { stride };
            stride *= shape[n];
        }
        Self { at, strides, is_summed_over_queries: shape[2] == 1 }
    }

    /// Whether key heads or sequences share entries.
    pub fn is_shared(&self, dims: &Dims) -> bool {
        (self.strides[0] == 0 && dims.b > 1) || (self.strides[1] == 0 && dims.h_kv > 1)
    }

    /// The last tile that shares entries with one that ends before the row `end`: where heads share them, rows of the
    /// same query may lie in several tiles.
    pub fn last_sharing<K: Kernel>(&self, dims: &Dims, end: usize) -> usize {
        let end = if self.strides[1] == 0 { end.next_multiple_of(dims.group()) } else { end };
        (end - 1) / K::PANEL
    }

    /// The entry of a key of a row.
    #[inline(always)]
    pub fn entry(&self, row: Row, key: usize) -> *mut f32 {
        let [b, h, query, keys] = self.strides;
        self.at.0.wrapping_add(row.b * b + row.head * h + row.query * query + key * keys)
    }
}

/// Where a task adds the gradients of what was added to its scores.
#[derive(Clone, Copy)]
pub(super) struct BiasGradients<'a> {
    pub bias: Option<BiasOutput>,
    /// Sums over the task's queries, for each head of the group and key of the task, if queries share entries.
    pub by_key: &'a [Cell<f32>],
    pub distances: Option<DistanceOutput>,
    /// The task's sums for the distance biases of the group, at the places of its table.
    pub by_distance: &'a [Cell<f32>],
    /// The first key of the task, and how many it has.
    pub first_key: usize,
    pub keys: usize,
    /// Sums of the task for each head of the group, or nothing.
    pub slopes: &'a [Cell<f32>],
}

impl BiasGradients<'_> {
    /// Adds the gradients of a tile's scores (keys, panel).
    ///
    /// # Safety
    /// The processor has the tier of K; `gradients` is valid for what `scores` is; no other thread uses the entries of
    /// the tile's rows.
    #[inline(always)]
    pub unsafe fn add<K: Kernel>(&self, scores: &TileScores, gradients: *const f32) {
        // SAFETY: as this method's contract.
        unsafe {
            if let Some(alibi) = scores.inputs.options.alibi.as_ref().filter(|_| !self.slopes.is_empty()) {
                self.add_slopes::<K>(scores, alibi, gradients);
            }
            if self.distances.is_some() {
                self.add_distances::<K>(scores, gradients);
            }
            match &self.bias {
                Some(bias) if bias.is_summed_over_queries => self.add_by_key::<K>(scores, gradients),
                Some(bias) => self.add_bias::<K>(bias, scores, gradients),
                None => {}
            }
        }
    }

    /// A slope is multiplied by minus the distance.
    ///
    /// # Safety
    /// As [`add`](Self::add).
    #[inline(always)]
    unsafe fn add_slopes<K: Kernel>(&self, scores: &TileScores, alibi: &Alibi, gradients: *const f32) {
        let dims = &scores.inputs.dims;
        let mut positions = [0f32; MAX_COLUMNS];
        let rows = || scores.tile.rows.clone().map(|row| dims.row(scores.tile.kv, row));
        for (position, row) in positions.iter_mut().zip(rows()) {
            *position = scores.inputs.slope_and_position(alibi, row).1;
        }
        let mut sums = [0f32; MAX_COLUMNS];
        // SAFETY: as this method's contract; the arrays have an element for each column.
        unsafe {
            for column in (0..scores.tile.vectors * K::Vector::LANES).step_by(K::Vector::LANES) {
                let position = K::Vector::load(positions.as_ptr().add(column));
                let mut sum = K::Vector::splat(0.0);
                for key in 0..scores.keys {
                    let distance = position.sub(K::Vector::splat((scores.first + key) as f32)).abs();
                    sum = K::Vector::load(gradients.add(key * K::PANEL + column)).mul_add(distance, sum);
                }
                sum.store(sums.as_mut_ptr().add(column));
            }
        }
        for (sum, row) in sums.iter().zip(rows()) {
            let slope = &self.slopes[row.head % dims.group()];
            slope.set(slope.get() - sum);
        }
    }

    /// Along the diagonals.
    ///
    /// # Safety
    /// As [`add`](Self::add).
    #[inline(always)]
    unsafe fn add_distances<K: Kernel>(&self, scores: &TileScores, gradients: *const f32) {
        let Some(table) = scores.inputs.distances else { return };
        let sums = self.by_distance.as_ptr().cast::<f32>().cast_mut();
        for run in table.runs(&scores.inputs.dims, scores.tile, K::Vector::LANES) {
            for key in 0..scores.keys {
                // SAFETY: as this method's contract; cells of the task alone, a vector from each word of a run on.
                unsafe {
                    let to = sums.add(run.word(scores.first + key));
                    let gradient: K::Vector = load_first(gradients.add(key * K::PANEL + run.column), run.width);
                    let sum: K::Vector = load_first(to.cast_const(), run.width);
                    store_first(sum.add(gradient), to, run.width);
                }
            }
        }
    }

    /// # Safety
    /// As [`add`](Self::add).
    #[inline(always)]
    unsafe fn add_by_key<K: Kernel>(&self, scores: &TileScores, gradients: *const f32) {
        let dims = &scores.inputs.dims;
        for (column, row) in scores.tile.rows.clone().enumerate() {
            let of_head = &self.by_key[row % dims.group() * self.keys..][scores.first - self.first_key..];
            for (key, sum) in of_head[..scores.keys].iter().enumerate() {
                // SAFETY: as this method's contract.
                sum.set(sum.get() + unsafe { *gradients.add(key * K::PANEL + column) });
            }
        }
    }

    /// # Safety
    /// As [`add`](Self::add).
    #[inline(always)]
    unsafe fn add_bias<K: Kernel>(&self, bias: &BiasOutput, scores: &TileScores, gradients: *const f32) {
        let (lanes, tile, dims) = (K::Vector::LANES, scores.tile, &scores.inputs.dims);
        let mut square = [0f32; MAX_LANES * MAX_LANES];
        for vector in 0..tile.vectors {
            let first_row = tile.rows.start + vector * lanes;
            for key in (0..scores.keys).step_by(lanes) {
                let filled = lanes.min(scores.keys - key);
                // SAFETY: as this method's contract; panels have a multiple of `lanes` rows.
                unsafe {
                    let from = gradients.add(key * K::PANEL + vector * lanes);
                    K::Vector::transpose(from, K::PANEL, square.as_mut_ptr(), lanes);
                    for (row, gradients) in (first_row..tile.rows.end).zip(square.chunks_exact(lanes)).take(lanes) {
                        let to = bias.entry(dims.row(tile.kv, row), scores.first + key);
                        if bias.strides[3] == 0 {
                            *to += gradients[..filled].iter().sum::<f32>();
                        } else {
                            let sum: K::Vector = load_first::<f32, _>(to, filled);
                            store_first(sum.add(K::Vector::load(gradients.as_ptr())), to, filled);
                        }
                    }
                }
            }
        }
    }

    /// Adds what the task has summed to the gradients.
    ///
    /// # Safety
    /// No other thread uses the entries of the heads, whose first one's row is given.
    pub unsafe fn finish(&self, inputs: &ScoreInputs, row: Row) {
        if let (Some(output), Some(table)) = (&self.distances, inputs.distances) {
            // SAFETY: as this method's contract.
            unsafe { table.add_to(output, self.by_distance, row) };
        }
        let Some(bias) = self.bias.filter(|bias| bias.is_summed_over_queries) else { return };
        for (g, of_head) in self.by_key.chunks_exact(self.keys).enumerate() {
            for (key, sum) in of_head.iter().enumerate() {
                // SAFETY: as this method's contract; the tensor has an entry for each key of each head.
                unsafe { *bias.entry(Row { head: row.head + g, ..row }, self.first_key + key) += sum.get() };
            }
        }
    }
}
