//! From the scores of a tile to its weights and to the gradients of its scores.

use super::biases::BiasGradients;
use crate::cpu::{Kernel, MAX_COLUMNS, SimdTask, Vector};
use crate::flash::scores::TileScores;

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
    pub biases: Option<BiasGradients<'a>>,
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
            for key in 0..self.scores.keys {
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
        let (keys, vectors, lanes) = (self.scores.keys, self.scores.tile.vectors, K::Vector::LANES);
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
                        K::store_halves(weight, self.weight_halves.add(at));
                        K::store_halves(*gradient, self.gradient_halves.add(at));
                    }
                    let [low, high] = gradients;
                    K::store_pairs(low, high, self.gradient_pairs.add(pair * K::PANEL + column));
                }
            }
        }
    }
}
