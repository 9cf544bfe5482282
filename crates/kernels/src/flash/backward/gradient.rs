//! From the scores of a tile to its weights and to the gradients of its scores, and of what was added to them: biases,
//! distance biases and ALiBi's slopes.

use std::ops::Range;

use crate::cpu::{Kernel, MAX_COLUMNS, MAX_LANES, SharedPtr, SimdTask, Vector};
use crate::flash::problem::{Alibi, Dims, Row};
use crate::flash::scores::{DistanceTable, TileScores};
use crate::flash::tile::Tile;
use crate::number::{load_first, store_first};

/// What the columns of a tile bring along.
pub(super) struct TileColumns {
    /// The largest exponent, and 1 over the sum of the weights relative to it; 0 for a column that sees nothing.
    pub max: [f32; MAX_COLUMNS],
    pub reciprocal: [f32; MAX_COLUMNS],
    /// The sum over a query's keys of weight times the gradient of the weight.
    pub delta: [f32; MAX_COLUMNS],
}

/// The products of one tile with some keys and of its gradients with their values (keys, panel), which become weights
/// and the gradients of the products. Does not depend on the elements that they were made of.
pub(super) struct TileGradient<'a> {
    /// Weights replace them.
    pub scores: TileScores<'a>,
    /// The gradients of weights, which those of scores replace.
    pub products: *mut f32,
    pub columns: &'a TileColumns,
    pub scale: f32,
    pub biases: Option<BiasGradients>,
}

impl SimdTask for TileGradient<'_> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let scores = &self.scores;
        let softcap = scores.inputs.options.softcap;
        // What comes between the score and its product takes its own gradient first.
        let is_plain = softcap.is_none() && self.biases.is_none();
        // SAFETY: the processor has the instruction set of K; the pointers are valid for a panel of the sizes that the
        // fields name.
        unsafe {
            K::run_simd(scores);
            let factor = if is_plain { self.scale } else { 1.0 };
            for vector in 0..scores.tile.vectors {
                match (scores.is_masked, scores.inputs.options.dropout.is_some()) {
                    (true, false) => self.differentiate::<K::Vector, true, false>(vector, factor),
                    (false, false) => self.differentiate::<K::Vector, false, false>(vector, factor),
                    (true, true) => self.differentiate::<K::Vector, true, true>(vector, factor),
                    (false, true) => self.differentiate::<K::Vector, false, true>(vector, factor),
                }
            }
            if let Some(biases) = &self.biases {
                biases.add::<K::Vector>(scores, self.products);
            }
            if !is_plain {
                self.multiply::<K::Vector>(softcap.and(scores.cap_slopes));
            }
        }
    }
}

impl TileGradient<'_> {
    /// The weights of one vector of columns, and the gradients of their scores times a factor.
    ///
    /// # Safety
    /// As [`SimdTask::run`]; the panel has the vector.
    #[inline(always)]
    unsafe fn differentiate<V: Vector, const IS_MASKED: bool, const DROPS: bool>(&self, vector: usize, factor: f32) {
        let (units, panel, column) = (self.scores.units, self.scores.tile.panel, vector * V::LANES);
        // SAFETY: as this method's contract; columns have an entry for each lane.
        unsafe {
            let of_columns = |of: &[f32; MAX_COLUMNS]| V::load(of.as_ptr().add(column));
            let (max, reciprocal) = (of_columns(&self.columns.max), of_columns(&self.columns.reciprocal));
            let (delta, factor) = (of_columns(&self.columns.delta), V::splat(factor));
            let (exponent, unit) = (V::splat(units.exponent), V::splat(units.exponent_unit));
            // Hidden keys have a weight of 0, and are to have a gradient of 0 whatever their values are.
            let (nothing, least) = (V::splat(0.0), V::splat(f32::MIN_POSITIVE));
            for key in 0..self.scores.rows {
                let at = key * panel + column;
                let (score, product) = (self.scores.scores.add(at), self.products.add(at));
                let power = V::load(score).mul(exponent).sub(max).mul(unit).exp2();
                let mut weight = power.mul(reciprocal);
                if IS_MASKED {
                    weight = V::select(power.less_than(least), nothing, weight);
                }
                let (mut kept, mut of_kept) = (weight, V::load(product));
                if DROPS {
                    let dropout = V::load(self.scores.dropout.add(at));
                    (kept, of_kept) = (kept.mul(dropout), of_kept.mul(dropout));
                }
                let mut gradient = of_kept.sub(delta).mul(weight.mul(factor));
                if IS_MASKED {
                    gradient = V::select(weight.less_than(least), nothing, gradient);
                }
                kept.store(score);
                gradient.store(product);
            }
        }
    }

    /// The gradients of scores become those of products.
    ///
    /// # Safety
    /// As [`SimdTask::run`].
    #[inline(always)]
    unsafe fn multiply<V: Vector>(&self, slopes: Option<*mut f32>) {
        // SAFETY: as this method's contract.
        unsafe {
            let scale = V::splat(self.scale);
            for at in self.scores.entries::<V>() {
                let mut gradient = V::load(self.products.add(at));
                if let Some(slopes) = slopes {
                    let capped = gradient.mul(V::load(slopes.add(at)));
                    // A hidden score may be anything, and its derivative NaN.
                    let is_zero = gradient.abs().less_than(V::splat(f32::MIN_POSITIVE));
                    gradient = V::select(is_zero, gradient, capped);
                }
                gradient.mul(scale).store(self.products.add(at));
            }
        }
    }
}

/// The gradient of a bias: a contiguous tensor whose dimensions are those of the scores (B, H, T_q, T_kv), or 1. Of
/// biases by distance, which queries share, the last dimension is that of the entries; of queries it is D.
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
            // Of an empty tensor the stride may be more than a number holds, and is not used.
            stride = usize::wrapping_mul(stride, shape[n]);
        }
        Self { at, strides, is_summed_over_queries: shape[2] == 1 }
    }

    /// Whether key heads or sequences share entries.
    pub fn is_shared(&self, dims: &Dims) -> bool {
        (self.strides[0] == 0 && dims.b > 1) || (self.strides[1] == 0 && dims.h_kv > 1)
    }

    /// The last tile that shares entries with a tile: where heads share them, rows of the same query may lie in several
    /// tiles.
    pub fn last_sharing(&self, dims: &Dims, tile: &Tile) -> usize {
        let end = tile.rows.end;
        let end = if self.strides[1] == 0 { end.next_multiple_of(dims.group()) } else { end };
        (end - 1) / tile.panel
    }

    /// The entry of a key of a row, or of another number of the last dimension.
    #[inline(always)]
    pub fn entry(&self, row: Row, key: usize) -> *mut f32 {
        let [b, h, query, keys] = self.strides;
        self.at.0.wrapping_add(row.b * b + row.head * h + row.query * query + key * keys)
    }

    /// Adds the gradients of a tile (keys, panel) to the entries of some keys.
    ///
    /// # Safety
    /// The processor has the instruction set of K; `gradients` has as many rows as there are keys, and the tensor
    /// entries of the tile's rows, which no other thread uses.
    #[inline(always)]
    pub unsafe fn add<V: Vector>(&self, dims: &Dims, tile: &Tile, keys: Range<usize>, gradients: *const f32) {
        let lanes = V::LANES;
        let mut square = [0f32; MAX_LANES * MAX_LANES];
        for vector in 0..tile.vectors {
            let first_row = tile.rows.start + vector * lanes;
            let rows = first_row..tile.rows.end.min(first_row + lanes);
            let mut entries = [std::ptr::null_mut(); MAX_LANES];
            for (entry, row) in entries.iter_mut().zip(rows.clone()) {
                *entry = self.entry(dims.row(tile.kv, row), keys.start);
            }
            for key in (0..keys.len()).step_by(lanes) {
                let filled = lanes.min(keys.len() - key);
                // SAFETY: as this method's contract; panels have a multiple of `lanes` rows.
                unsafe {
                    let from = gradients.add(key * tile.panel + vector * lanes);
                    V::transpose(from, tile.panel, square.as_mut_ptr(), lanes);
                    for (entry, gradients) in entries[..rows.len()].iter().zip(square.chunks_exact(lanes)) {
                        let to: *mut f32 = entry.wrapping_add(key * self.strides[3]);
                        if self.strides[3] == 0 {
                            *to += gradients[..filled].iter().sum::<f32>();
                        } else {
                            let sum: V = load_first::<f32, _>(to, filled);
                            store_first(sum.add(V::load(gradients.as_ptr())), to, filled);
                        }
                    }
                }
            }
        }
    }
}

/// Where a task adds the gradients of what was added to its scores.
#[derive(Clone, Copy)]
pub(super) struct BiasGradients {
    /// If queries share entries, sums of the task.
    pub bias: Option<BiasOutput>,
    /// The task's sums for the distance biases of the group, at the places of its table.
    pub distances: Option<SharedPtr<f32>>,
    /// Sums of the task for each head of the group.
    pub slopes: Option<SharedPtr<f32>>,
}

impl BiasGradients {
    /// Adds the gradients of a tile's scores (keys, panel).
    ///
    /// # Safety
    /// The processor has the instruction set of K; `gradients` is valid for what `scores` is; no other thread uses the
    /// entries of the tile's rows.
    #[inline(always)]
    pub unsafe fn add<V: Vector>(&self, scores: &TileScores, gradients: *const f32) {
        // SAFETY: as this method's contract.
        unsafe {
            if let (Some(alibi), Some(slopes)) = (&scores.inputs.options.alibi, self.slopes) {
                Self::add_slopes::<V>(slopes, scores, alibi, gradients);
            }
            if let (Some(table), Some(sums)) = (scores.inputs.distances, self.distances) {
                Self::add_distances::<V>(sums, scores, table, gradients);
            }
            if let Some(bias) = &self.bias {
                bias.add::<V>(&scores.inputs.dims, scores.tile, scores.keys.clone(), gradients);
            }
        }
    }

    /// A slope is multiplied by minus the distance.
    ///
    /// # Safety
    /// As [`add`](Self::add).
    #[inline(always)]
    unsafe fn add_slopes<V: Vector>(slopes: SharedPtr<f32>, scores: &TileScores, alibi: &Alibi, gradients: *const f32) {
        let dims = &scores.inputs.dims;
        let mut positions = [0f32; MAX_COLUMNS];
        let rows = || scores.tile.rows.clone().map(|row| dims.row(scores.tile.kv, row));
        for (position, row) in positions.iter_mut().zip(rows()) {
            *position = scores.inputs.slope_and_position(alibi, row).1;
        }
        let mut sums = [0f32; MAX_COLUMNS];
        // SAFETY: as this method's contract; the arrays have an element for each column.
        unsafe {
            for column in (0..scores.tile.vectors * V::LANES).step_by(V::LANES) {
                let position = V::load(positions.as_ptr().add(column));
                let mut sum = V::splat(0.0);
                for (index, key) in scores.keys.clone().enumerate() {
                    let distance = position.sub(V::splat(key as f32)).abs();
                    sum = V::load(gradients.add(index * scores.tile.panel + column)).mul_add(distance, sum);
                }
                sum.store(sums.as_mut_ptr().add(column));
            }
        }
        for (sum, row) in sums.iter().zip(rows()) {
            // SAFETY: as this method's contract.
            unsafe { *slopes.add(row.head % dims.group()) -= sum };
        }
    }

    /// Along the diagonals.
    ///
    /// # Safety
    /// As [`add`](Self::add).
    #[inline(always)]
    unsafe fn add_distances<V: Vector>(
        sums: SharedPtr<f32>,
        scores: &TileScores,
        table: &DistanceTable,
        gradients: *const f32,
    ) {
        for run in table.runs(&scores.inputs.dims, scores.tile, V::LANES, &scores.keys) {
            for index in 0..scores.keys.len() {
                // SAFETY: as this method's contract; sums of the task alone, a vector from each word of a run on.
                unsafe {
                    let to = sums.add(run.word(index));
                    let gradient: V = load_first(gradients.add(index * scores.tile.panel + run.column), run.width);
                    let sum: V = load_first(to.cast_const(), run.width);
                    store_first(sum.add(gradient), to, run.width);
                }
            }
        }
    }
}
