//! From the scores of a tile to its weights, the gradients of its scores, and the gradients of biases, relative biases
//! and ALiBi's slopes.

use super::output::GradientOutput;
use crate::cpu::{Kernel, MAX_COLUMNS, SharedPtr, SimdTask, Vector};
use crate::flash::options::TileAlibi;
use crate::flash::relative_bias::RelativeBiasTable;
use crate::flash::scores::TileScores;
use crate::number::{load_first, store_first};

/// The softmax statistics of the columns of a tile.
pub(super) struct ColumnStats {
    /// The largest exponent.
    pub max: [f32; MAX_COLUMNS],
    /// 1 over the sum of the weights relative to the largest; 0 for a fully masked column.
    pub reciprocal: [f32; MAX_COLUMNS],
    /// The row term δ of the query, which `BackwardCall::prepare_rows` computes.
    pub delta: [f32; MAX_COLUMNS],
}

/// The products of one tile with some keys, and of the gradients of its outputs with their values, (keys, panel), which
/// become weights and the gradients of the products. Independent of the type of elements.
pub(super) struct TileGradient<'a> {
    /// The scores, which weights replace.
    pub scores: TileScores<'a>,
    /// The gradients of weights, which the gradients of scores replace.
    pub gradients: *mut f32,
    pub columns: &'a ColumnStats,
    pub scale: f32,
    pub modifiers: Option<TileModifierGradients>,
}

impl SimdTask for TileGradient<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let scores = &self.scores;
        let has_derivative = scores.inputs.options.has_product_derivative();
        // Score modifiers take their gradients before the scale is applied.
        let is_plain = !has_derivative && self.modifiers.is_none();
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
            if let Some(modifiers) = &self.modifiers {
                modifiers.add::<K::Vector>(scores, self.gradients);
            }
            if !is_plain {
                let derivatives = if has_derivative { scores.product_derivatives } else { None };
                self.apply_scale::<K::Vector>(derivatives);
            }
        }
    }
}

impl TileGradient<'_> {
    /// Computes the weights of one vector of columns, and the gradients of their scores times a factor.
    ///
    /// # Safety
    /// As [`SimdTask::run`]; the panel has the vector.
    #[inline(always)]
    unsafe fn differentiate<V: Vector, const IS_MASKED: bool, const DROPS: bool>(&self, vector: usize, factor: f32) {
        let units = self.scores.units;
        let panel = self.scores.tile.panel;
        let column = vector * V::LANES;
        // SAFETY: as this method's contract; columns have an entry for each lane.
        unsafe {
            let max = V::load(self.columns.max.as_ptr().add(column));
            let reciprocal = V::load(self.columns.reciprocal.as_ptr().add(column));
            let delta = V::load(self.columns.delta.as_ptr().add(column));
            let factor = V::splat(factor);
            let exponent = V::splat(units.exponent);
            let unit = V::splat(units.exponent_unit);
            // Masked keys have a weight of 0, and must have a gradient of 0 for any value.
            let zero = V::splat(0.0);
            let least = V::splat(f32::MIN_POSITIVE);
            for key in 0..self.scores.rows {
                let at = key * panel + column;
                let score_at = self.scores.scores.add(at);
                let gradient_at = self.gradients.add(at);
                let power = V::load(score_at).mul(exponent).sub(max).mul(unit).exp2();
                let mut weight = power.mul(reciprocal);
                if IS_MASKED {
                    weight = V::select(power.less_than(least), zero, weight);
                }
                let mut weight_after_dropout = weight;
                let mut weight_grad = V::load(gradient_at);
                if DROPS {
                    let dropout = V::load(self.scores.dropout.add(at));
                    weight_after_dropout = weight_after_dropout.mul(dropout);
                    weight_grad = weight_grad.mul(dropout);
                }
                let mut gradient = weight_grad.sub(delta).mul(weight.mul(factor));
                if IS_MASKED {
                    gradient = V::select(weight.less_than(least), zero, gradient);
                }
                weight_after_dropout.store(score_at);
                gradient.store(gradient_at);
            }
        }
    }

    /// Turns the gradients of scores into gradients of products. `derivatives` are of scores with respect to products
    /// times the scale; without them, they are 1.
    ///
    /// # Safety
    /// As [`SimdTask::run`].
    #[inline(always)]
    unsafe fn apply_scale<V: Vector>(&self, derivatives: Option<*mut f32>) {
        // SAFETY: as this method's contract.
        unsafe {
            let scale = V::splat(self.scale);
            for at in self.scores.offsets::<V>() {
                let mut gradient = V::load(self.gradients.add(at));
                if let Some(derivatives) = derivatives {
                    let of_product = gradient.mul(V::load(derivatives.add(at)));
                    // A masked score may be any number, and its derivative NaN.
                    let is_zero = gradient.abs().less_than(V::splat(f32::MIN_POSITIVE));
                    gradient = V::select(is_zero, gradient, of_product);
                }
                gradient.mul(scale).store(self.gradients.add(at));
            }
        }
    }
}

/// The memory that a task adds the gradients of score modifiers to.
#[derive(Clone, Copy)]
pub(super) struct TileModifierGradients {
    /// The gradient of the bias: sums of the task if queries share entries.
    pub bias: Option<GradientOutput>,
    /// The task's sums for the relative bias of the group, in the order of its table.
    pub relative_bias: Option<SharedPtr<f32>>,
    /// The task's sums for the slope of each head of the group.
    pub slopes: Option<SharedPtr<f32>>,
}

impl TileModifierGradients {
    /// Adds the gradients of a tile's scores (keys, panel).
    ///
    /// # Safety
    /// The processor has the instruction set of V; `gradients` is valid for the same offsets as the scores; no other
    /// thread uses the entries of the tile's rows.
    #[inline(always)]
    pub unsafe fn add<V: Vector>(&self, scores: &TileScores, gradients: *const f32) {
        // SAFETY: as this method's contract.
        unsafe {
            if let Some(alibi) = &scores.inputs.options.alibi
                && let Some(slopes) = self.slopes
            {
                Self::add_slopes::<V>(slopes, scores, alibi, gradients);
            }
            if let Some(table) = scores.inputs.relative_bias
                && let Some(sums) = self.relative_bias
            {
                Self::add_relative_bias::<V>(sums, scores, table, gradients);
            }
            if let Some(bias) = &self.bias {
                bias.add::<V>(&scores.inputs.dims, scores.tile, scores.keys.clone(), gradients);
            }
        }
    }

    /// Adds the gradients of slopes. The derivative of a score with respect to its slope is minus the distance.
    ///
    /// # Safety
    /// As [`add`](Self::add).
    #[inline(always)]
    unsafe fn add_slopes<V: Vector>(
        slopes: SharedPtr<f32>,
        scores: &TileScores,
        alibi: &TileAlibi,
        gradients: *const f32,
    ) {
        let dims = &scores.inputs.dims;
        let rows = || scores.tile.rows.clone().map(|row| dims.row(scores.tile.kv, row));
        let mut positions = [0f32; MAX_COLUMNS];
        for (position, row) in positions.iter_mut().zip(rows()) {
            *position = scores.inputs.position(alibi, row);
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

    /// Adds the gradients of the relative bias, along the diagonals.
    ///
    /// # Safety
    /// As [`add`](Self::add).
    #[inline(always)]
    unsafe fn add_relative_bias<V: Vector>(
        sums: SharedPtr<f32>,
        scores: &TileScores,
        table: &RelativeBiasTable,
        gradients: *const f32,
    ) {
        let &TileScores { inputs, tile, ref keys, .. } = scores;
        for run in table.runs(&inputs.dims, tile.kv, &tile.rows, V::LANES, keys) {
            for index in 0..keys.len() {
                // SAFETY: as this method's contract; the task has sums for a vector from each word of a run on.
                unsafe {
                    let to = sums.add(run.word(index));
                    let gradient: V = load_first(gradients.add(index * tile.panel + run.column), run.width);
                    let sum: V = load_first(to.cast_const(), run.width);
                    store_first(sum.add(gradient), to, run.width);
                }
            }
        }
    }
}
