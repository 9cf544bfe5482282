//! Scores on their way to the softmax: softcap, ALiBi, biases and masks.
//!
//! Queries are lanes: a score's key is a row of a panel, its query a column.

use super::distances::DistanceTable;
use super::problem::{ScoreInputs, ScoreUnits, Strided};
use super::tile::Tile;
use crate::cpu::{Kernel, MAX_COLUMNS, MAX_LANES, Vector, tanh};
use crate::number::{load_first, store_first};

/// The scores of one tile over some keys (keys, panel). Does not depend on the elements that they were made of, so that
/// what it does is compiled once for all of them.
pub(super) struct TileScores<'a> {
    pub inputs: ScoreInputs<'a>,
    pub tile: &'a Tile,
    pub units: ScoreUnits,
    /// The key of the first scores.
    pub first: usize,
    pub keys: usize,
    /// Whether some query does not see some of the keys.
    pub is_masked: bool,
    /// `keys` rows of a panel.
    pub scores: *mut f32,
    /// `LANES` rows of a block.
    pub staging: *mut f32,
    /// `keys` rows of a panel, where weights are dropped: takes what they are multiplied by.
    pub dropout: *mut f32,
}

/// Replaces the scores of some keys by an expression of the score, the key (counted from the first) and the column. A
/// closure would not be compiled for the tier.
macro_rules! for_each {
    ($this:expr, $K:ident, $keys:expr, |$score:ident, $key:ident, $column:ident| $value:expr) => {
        for $key in $keys {
            for vector in 0..$this.tile.vectors {
                let $column = vector * <$K::Vector as crate::cpu::Vector>::LANES;
                let at = $this.scores.add($key * $K::PANEL + $column);
                let $score = $K::Vector::load(at);
                $value.store(at);
            }
        }
    };
}

impl TileScores<'_> {
    /// Products become scores in [`ScoreUnits::exponent`]'s unit, and factors of dropout are drawn. `cap_slopes`, if it
    /// is given, receives the derivative of the softcap, if there is one.
    ///
    /// # Safety
    /// The processor has the tier of K; the pointers are valid for a panel of the sizes that the fields name.
    #[inline(always)]
    pub unsafe fn finish<K: Kernel>(&self, cap_slopes: Option<*mut f32>) {
        // SAFETY: as this method's contract.
        unsafe {
            if self.inputs.options.modify_scores() {
                self.cap::<K>();
                if let (Some(softcap), Some(to)) = (self.inputs.options.softcap, cap_slopes) {
                    self.derive_cap::<K>(softcap, to);
                }
                self.add_biases::<K>();
            }
            if self.is_masked {
                self.mask::<K>();
            }
            self.draw_dropout::<K>();
        }
    }

    /// # Safety
    /// As [`finish`](Self::finish).
    #[inline(always)]
    unsafe fn draw_dropout<K: Kernel>(&self) {
        if let Some(dropout) = &self.inputs.options.dropout {
            // SAFETY: as this method's contract.
            unsafe { dropout.factors::<K>(&self.inputs, self.tile, self.first..self.first + self.keys, self.dropout) };
        }
    }

    /// The scale and the softcap, after which scores are in natural units.
    ///
    /// # Safety
    /// As [`finish`](Self::finish).
    #[inline(always)]
    unsafe fn cap<K: Kernel>(&self) {
        let (options, product) = (&self.inputs.options, self.units.product);
        // SAFETY: as this method's contract.
        unsafe {
            if let Some(softcap) = options.softcap {
                let (cap, shrink) = (K::Vector::splat(softcap), K::Vector::splat(product / softcap));
                for_each!(self, K, 0..self.keys, |score, _key, _column| tanh(score.mul(shrink)).mul(cap));
            } else if product != 1.0 {
                let product = K::Vector::splat(product);
                for_each!(self, K, 0..self.keys, |score, _key, _column| score.mul(product));
            }
        }
    }

    /// `1 - tanh²` of capped scores.
    ///
    /// # Safety
    /// As [`finish`](Self::finish).
    #[inline(always)]
    unsafe fn derive_cap<K: Kernel>(&self, softcap: f32, to: *mut f32) {
        // SAFETY: as this method's contract.
        unsafe {
            let (one, shrink) = (K::Vector::splat(1.0), K::Vector::splat(-1.0 / softcap));
            for at in self.entries::<K>() {
                let tanh = K::Vector::load(self.scores.add(at)).mul(shrink);
                one.sub(tanh.mul(tanh)).store(to.add(at));
            }
        }
    }

    /// The vectors of all keys.
    pub fn entries<K: Kernel>(&self) -> impl Iterator<Item = usize> + use<K> {
        let vectors = self.tile.vectors;
        (0..self.keys).flat_map(move |key| (0..vectors).map(move |vector| key * K::PANEL + vector * K::Vector::LANES))
    }

    /// ALiBi and biases, in natural units.
    ///
    /// # Safety
    /// As [`finish`](Self::finish).
    #[inline(always)]
    unsafe fn add_biases<K: Kernel>(&self) {
        let options = &self.inputs.options;
        // SAFETY: as this method's contract; the arrays have an element for each column.
        unsafe {
            if let Some(alibi) = &options.alibi {
                let (mut slopes, mut positions) = ([0f32; MAX_COLUMNS], [0f32; MAX_COLUMNS]);
                for (column, row) in self.tile.rows.clone().enumerate() {
                    let row = self.inputs.dims.row(self.tile.kv, row);
                    (slopes[column], positions[column]) = self.inputs.slope_and_position(alibi, row);
                }
                for_each!(self, K, 0..self.keys, |score, key, column| {
                    let position = K::Vector::load(positions.as_ptr().add(column));
                    let distance = position.sub(K::Vector::splat((self.first + key) as f32)).abs();
                    K::Vector::load(slopes.as_ptr().add(column)).mul_add(distance, score)
                });
            }
            if let Some(table) = self.inputs.distances {
                self.add_distances::<K>(table);
            }
            if let Some(bias) = &options.bias {
                self.combine::<K, f32, true>(bias);
            }
        }
    }

    /// # Safety
    /// As [`finish`](Self::finish).
    #[inline(always)]
    unsafe fn add_distances<K: Kernel>(&self, table: &DistanceTable) {
        let words = table.of_head(&self.inputs.dims, self.tile.kv).as_ptr();
        for run in table.runs(&self.inputs.dims, self.tile, K::Vector::LANES) {
            for key in 0..self.keys {
                // SAFETY: as this method's contract; the table has a vector from each word of a run on.
                unsafe {
                    let at = self.scores.add(key * K::PANEL + run.column);
                    let score: K::Vector = load_first(at.cast_const(), run.width);
                    let bias = K::Vector::load(words.add(run.word(self.first + key)));
                    store_first(score.add(bias), at, run.width);
                }
            }
        }
    }

    /// Scores of hidden keys become -inf.
    ///
    /// # Safety
    /// As [`finish`](Self::finish).
    #[inline(always)]
    unsafe fn mask<K: Kernel>(&self) {
        let every = &self.tile.every;
        // SAFETY: as this method's contract; the bounds have an element for each column.
        unsafe {
            let hidden = K::Vector::splat(f32::NEG_INFINITY);
            if every.start > self.first || every.end < self.first + self.keys {
                let (starts, ends) = self.tile.bounds(self.first, self.keys);
                // Keys that every query sees stay as they are: of a window, all but the edges.
                let from = every.start.saturating_sub(self.first).min(self.keys);
                let to = every.end.saturating_sub(self.first).clamp(from, self.keys);
                for_each!(self, K, (0..from).chain(to..self.keys), |score, key, column| {
                    let key = K::Vector::splat(key as f32);
                    let after_start =
                        K::Vector::select(key.less_than(K::Vector::load(starts.as_ptr().add(column))), hidden, score);
                    K::Vector::select(key.less_than(K::Vector::load(ends.as_ptr().add(column))), after_start, hidden)
                });
            }
            if let Some(keep) = &self.inputs.options.keep {
                self.combine::<K, u8, false>(keep);
            }
        }
    }

    /// Adds to every score its entry of a tensor (B, H, T_q, T_kv), or hides it where the entry is 0: rows of the
    /// tensor are staged, then transposed.
    ///
    /// # Safety
    /// As [`finish`](Self::finish); the tensor has an entry for each score.
    #[inline(always)]
    unsafe fn combine<K: Kernel, T: Copy + Into<f32>, const IS_BIAS: bool>(&self, tensor: &Strided<T, 4>) {
        let (lanes, step) = (K::Vector::LANES, tensor.strides[3]);
        let mut square = [0f32; MAX_LANES * MAX_LANES];
        for vector in 0..self.tile.vectors {
            let first_row = self.tile.rows.start + vector * lanes;
            let filled = lanes.min(self.tile.rows.end - first_row);
            // SAFETY: as this method's contract; the staging memory has `lanes` rows of a block.
            unsafe {
                let hidden = K::Vector::splat(f32::NEG_INFINITY);
                for lane in 0..filled {
                    let row = self.inputs.dims.row(self.tile.kv, first_row + lane);
                    let from = tensor.at([row.b, row.head, row.query, self.first]);
                    let to = self.staging.add(lane * K::BLOCK);
                    if step == 1 {
                        (0..self.keys).for_each(|key| *to.add(key) = (*from.add(key)).into());
                    } else {
                        (0..self.keys).for_each(|key| *to.add(key) = (*from.add(key * step)).into());
                    }
                }
                // Columns without a query stay finite.
                (filled..lanes).for_each(|lane| self.staging.add(lane * K::BLOCK).write_bytes(0, self.keys));
                for key in (0..self.keys).step_by(lanes) {
                    K::Vector::transpose(self.staging.add(key), K::BLOCK, square.as_mut_ptr(), lanes);
                    for k in 0..lanes.min(self.keys - key) {
                        let at = self.scores.add((key + k) * K::PANEL + vector * lanes);
                        let (score, entry) = (K::Vector::load(at), K::Vector::load(square.as_ptr().add(k * lanes)));
                        let combined = match IS_BIAS {
                            true => score.add(entry),
                            false => K::Vector::select(entry.less_than(K::Vector::splat(0.5)), hidden, score),
                        };
                        combined.store(at);
                    }
                }
            }
        }
    }
}
