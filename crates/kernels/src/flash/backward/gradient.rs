//! From the scores of a tile to its weights and to the gradients of its scores, and of what was added to them: biases,
//! distance biases and ALiBi's slopes.

use crate::cpu::{Kernel, MAX_COLUMNS, MAX_LANES, SharedPtr, SimdTask, Vector};
use crate::flash::problem::{Alibi, Dims, Row};
use crate::flash::scores::{DistanceTable, TileScores};
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
    /// Takes the derivative of the softcap.
    pub slopes: *mut f32,
    pub biases: Option<BiasGradients>,
    /// For pairs of bf16, the same as words: the weights and gradients of a key, and the gradients of two keys.
    pub weight_halves: *mut f32,
    pub gradient_halves: *mut f32,
    pub gradient_pairs: *mut f32,
    /// The words of depth that products over keys read.
    pub depth: usize,
}

impl SimdTask for TileGradient<'_> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let scores = &self.scores;
        let softcap = scores.inputs.options.softcap;
        // What comes between the score and its product takes its own gradient first.
        let is_plain = softcap.is_none() && self.biases.is_none();
        // SAFETY: the processor has the tier of K; the pointers are valid for a panel of the sizes that the fields
        // name.
        unsafe {
            scores.finish::<K>(Some(self.slopes));
            let factor = if is_plain { self.scale } else { 1.0 };
            for vector in 0..scores.tile.vectors {
                match (scores.is_masked, scores.inputs.options.dropout.is_some()) {
                    (true, false) => self.differentiate::<K, true, false>(vector, factor),
                    (false, false) => self.differentiate::<K, false, false>(vector, factor),
                    (true, true) => self.differentiate::<K, true, true>(vector, factor),
                    (false, true) => self.differentiate::<K, false, true>(vector, factor),
                }
            }
            if let Some(biases) = &self.biases {
                biases.add::<K>(scores, self.products);
            }
            if !is_plain {
                self.multiply::<K>(softcap.is_some());
            }
            if K::IS_BF16 {
                self.store_words::<K>();
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
    unsafe fn differentiate<K: Kernel, const IS_MASKED: bool, const DROPS: bool>(&self, vector: usize, factor: f32) {
        let (units, column) = (self.scores.units, vector * K::Vector::LANES);
        // SAFETY: as this method's contract; columns have an entry for each lane.
        unsafe {
            let of_columns = |of: &[f32; MAX_COLUMNS]| K::Vector::load(of.as_ptr().add(column));
            let (max, reciprocal) = (of_columns(&self.columns.max), of_columns(&self.columns.reciprocal));
            let (delta, factor) = (of_columns(&self.columns.delta), K::Vector::splat(factor));
            let (exponent, unit) = (K::Vector::splat(units.exponent), K::Vector::splat(units.exponent_unit));
            // Hidden keys have a weight of 0, and are to have a gradient of 0 whatever their values are.
            let (nothing, least) = (K::Vector::splat(0.0), K::Vector::splat(f32::MIN_POSITIVE));
            for key in 0..self.scores.rows {
                let at = key * K::PANEL + column;
                let (score, product) = (self.scores.scores.add(at), self.products.add(at));
                let power = K::Vector::load(score).mul(exponent).sub(max).mul(unit).exp2();
                let mut weight = power.mul(reciprocal);
                if IS_MASKED {
                    weight = K::Vector::select(power.less_than(least), nothing, weight);
                }
                let (mut kept, mut of_kept) = (weight, K::Vector::load(product));
                if DROPS {
                    let dropout = K::Vector::load(self.scores.dropout.add(at));
                    (kept, of_kept) = (kept.mul(dropout), of_kept.mul(dropout));
                }
                let mut gradient = of_kept.sub(delta).mul(weight.mul(factor));
                if IS_MASKED {
                    gradient = K::Vector::select(weight.less_than(least), nothing, gradient);
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
    unsafe fn multiply<K: Kernel>(&self, is_capped: bool) {
        // SAFETY: as this method's contract.
        unsafe {
            let scale = K::Vector::splat(self.scale);
            for at in self.scores.entries::<K>() {
                let mut gradient = K::Vector::load(self.products.add(at));
                if is_capped {
                    let capped = gradient.mul(K::Vector::load(self.slopes.add(at)));
                    // A hidden score may be anything, and its derivative NaN.
                    let is_zero = gradient.abs().less_than(K::Vector::splat(f32::MIN_POSITIVE));
                    gradient = K::Vector::select(is_zero, gradient, capped);
                }
                gradient.mul(scale).store(self.products.add(at));
            }
        }
    }

    /// Weights and gradients as the words that the kernel multiplies, and zeros where a product reads more than there
    /// is.
    ///
    /// # Safety
    /// As [`SimdTask::run`].
    #[inline(always)]
    unsafe fn store_words<K: Kernel>(&self) {
        let (keys, vectors, lanes) = (self.scores.rows, self.scores.tile.vectors, K::Vector::LANES);
        let nothing = |row: usize| row >= keys;
        let rows = keys.next_multiple_of(K::MIN_ROWS);
        // SAFETY: as this method's contract; a block has `BLOCK` rows, a multiple of `MIN_ROWS` and of twice the depth.
        unsafe {
            for pair in 0..self.depth.max(rows.div_ceil(2)) {
                for vector in 0..K::VECTORS {
                    let column = vector * lanes;
                    let mut gradients = [K::Vector::splat(0.0); 2];
                    for (row, gradient) in (2 * pair..).zip(&mut gradients) {
                        let mut weight = K::Vector::splat(0.0);
                        if !nothing(row) && vector < vectors {
                            weight = K::Vector::load(self.scores.scores.add(row * K::PANEL + column));
                            *gradient = K::Vector::load(self.products.add(row * K::PANEL + column));
                        }
                        let at = (row * K::PANEL + column) / 2;
                        weight.store_halves(self.weight_halves.add(at));
                        gradient.store_halves(self.gradient_halves.add(at));
                    }
                    let [low, high] = gradients;
                    low.store_pairs(high, self.gradient_pairs.add(pair * K::PANEL + column));
                }
            }
        }
    }
}

/// The gradient of a bias: a contiguous tensor whose dimensions are those of the scores (B, H, T_q, T_kv), or 1. Of
/// biases by distance, which queries share, the last dimension is that of the entries.
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

    /// Adds the gradients of a tile's scores (keys, panel).
    ///
    /// # Safety
    /// As [`BiasGradients::add`].
    #[inline(always)]
    unsafe fn add<K: Kernel>(&self, scores: &TileScores, gradients: *const f32) {
        let (lanes, tile, dims) = (K::Vector::LANES, scores.tile, &scores.inputs.dims);
        let mut square = [0f32; MAX_LANES * MAX_LANES];
        for vector in 0..tile.vectors {
            let first_row = tile.rows.start + vector * lanes;
            let rows = first_row..tile.rows.end.min(first_row + lanes);
            let mut entries = [std::ptr::null_mut(); MAX_LANES];
            for (entry, row) in entries.iter_mut().zip(rows.clone()) {
                *entry = self.entry(dims.row(tile.kv, row), scores.keys.start);
            }
            for key in (0..scores.rows).step_by(lanes) {
                let filled = lanes.min(scores.rows - key);
                // SAFETY: as this method's contract; panels have a multiple of `lanes` rows.
                unsafe {
                    let from = gradients.add(key * K::PANEL + vector * lanes);
                    K::Vector::transpose(from, K::PANEL, square.as_mut_ptr(), lanes);
                    for (entry, gradients) in entries[..rows.len()].iter().zip(square.chunks_exact(lanes)) {
                        let to: *mut f32 = entry.wrapping_add(key * self.strides[3]);
                        if self.strides[3] == 0 {
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
    /// The processor has the tier of K; `gradients` is valid for what `scores` is; no other thread uses the entries of
    /// the tile's rows.
    #[inline(always)]
    pub unsafe fn add<K: Kernel>(&self, scores: &TileScores, gradients: *const f32) {
        // SAFETY: as this method's contract.
        unsafe {
            if let (Some(alibi), Some(slopes)) = (&scores.inputs.options.alibi, self.slopes) {
                Self::add_slopes::<K>(slopes, scores, alibi, gradients);
            }
            if let (Some(table), Some(sums)) = (scores.inputs.distances, self.distances) {
                Self::add_distances::<K>(sums, scores, table, gradients);
            }
            if let Some(bias) = &self.bias {
                bias.add::<K>(scores, gradients);
            }
        }
    }

    /// A slope is multiplied by minus the distance.
    ///
    /// # Safety
    /// As [`add`](Self::add).
    #[inline(always)]
    unsafe fn add_slopes<K: Kernel>(slopes: SharedPtr<f32>, scores: &TileScores, alibi: &Alibi, gradients: *const f32) {
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
                for (index, key) in scores.keys.clone().enumerate() {
                    let distance = position.sub(K::Vector::splat(key as f32)).abs();
                    sum = K::Vector::load(gradients.add(index * K::PANEL + column)).mul_add(distance, sum);
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
    unsafe fn add_distances<K: Kernel>(
        sums: SharedPtr<f32>,
        scores: &TileScores,
        table: &DistanceTable,
        gradients: *const f32,
    ) {
        for run in table.runs(&scores.inputs.dims, scores.tile, K::Vector::LANES) {
            for (index, key) in scores.keys.clone().enumerate() {
                // SAFETY: as this method's contract; sums of the task alone, a vector from each word of a run on.
                unsafe {
                    let to = sums.add(run.word(key));
                    let gradient: K::Vector = load_first(gradients.add(index * K::PANEL + run.column), run.width);
                    let sum: K::Vector = load_first(to.cast_const(), run.width);
                    store_first(sum.add(gradient), to, run.width);
                }
            }
        }
    }
}
