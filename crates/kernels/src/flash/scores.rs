//! From products to scores: softcap, ALiBi, biases and masks.
//!
//! Queries are lanes: the key of a score is a row of a panel, its query a column.

use std::ops::Range;

use super::dropout_factors::DropoutFactors;
use super::inputs::CheckedCall;
use super::options::{ScoreUnits, TileAlibi};
use super::relative_bias::{RelativeBiasTable, TileRelativeBias};
use super::tile::Tile;
use crate::cpu::{Kernel, MAX_COLUMNS, MAX_LANES, SimdTask, Vector, tanh};
use crate::number::{Strided, load_first, store_first};

/// The scores of one tile over some keys (rows, panel). Independent of the type of elements, so that its code is
/// compiled once for all types.
pub(super) struct TileScores<'a> {
    pub inputs: CheckedCall<'a>,
    pub tile: &'a Tile,
    pub units: ScoreUnits,
    pub keys: Range<usize>,
    /// The number of rows of the panel: one for each key, or fewer in a narrow tile, whose rows have several keys each.
    pub rows: usize,
    /// Whether some of the keys are masked for some query, or the last row has columns of keys beyond them.
    pub is_masked: bool,
    pub scores: *mut f32,
    /// `LANES` rows of a block. Not used by a narrow tile.
    pub staging: *mut f32,
    /// Takes a dropout factor for each score, if weights are dropped.
    pub dropout: *mut f32,
    /// Takes the derivative of each score with respect to its product times the scale, in a backward pass with
    /// [`has_product_derivative`](super::options::TileModifiers::has_product_derivative).
    pub product_derivatives: Option<*mut f32>,
}

/// The value of `IS_BIAS` for a tensor whose entries are added to the scores.
const BIAS: bool = true;
/// The value of `IS_BIAS` for a tensor whose entries of 0 mask the scores.
const MASK: bool = false;

/// Replaces the scores of some rows of the panel by an expression of the score, the row and the column. A closure would
/// not be compiled for the instruction set.
macro_rules! for_each {
    ($this:expr, $V:ident, $rows:expr, |$score:ident, $row:ident, $column:ident| $value:expr) => {
        let Tile { panel, vectors, .. } = *$this.tile;
        for $row in $rows {
            for vector in 0..vectors {
                let $column = vector * <$V as Vector>::LANES;
                let at = $this.scores.add($row * panel + $column);
                let $score = $V::load(at);
                $value.store(at);
            }
        }
    };
}

/// Turns products into scores in the unit of [`ScoreUnits::exponent`], and computes the dropout factors. The pointers
/// are valid for a panel of the sizes in the fields.
impl SimdTask for &TileScores<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let options = &self.inputs.options;
        // SAFETY: the processor has the instruction set of K; the pointers are valid.
        unsafe {
            if options.modifies_scores() {
                self.cap::<K::Vector>();
                if let Some(softcap) = options.softcap
                    && let Some(to) = self.product_derivatives
                {
                    self.derive_cap::<K::Vector>(softcap, to);
                }
                self.add_biases::<K::Vector>();
            }
            if self.is_masked {
                self.mask::<K::Vector>();
            }
            if let Some(dropout) = options.dropout {
                let &TileScores { inputs: CheckedCall { dims, .. }, tile, ref keys, dropout: to, .. } = self;
                DropoutFactors { dropout, dims, tile, keys: keys.clone(), to }.write::<K::Vector>();
            }
        }
    }
}

impl TileScores<'_> {
    /// Returns the number of keys in a row of the panel.
    pub fn keys_of_row(&self) -> usize {
        self.tile.panel / self.tile.width
    }

    /// Applies the scale and the softcap, after which scores are in natural units.
    ///
    /// # Safety
    /// As [`SimdTask::run`].
    #[inline(always)]
    unsafe fn cap<V: Vector>(&self) {
        let product = self.units.product;
        // SAFETY: as this method's contract.
        unsafe {
            if let Some(softcap) = self.inputs.options.softcap {
                let cap = V::splat(softcap);
                let shrink = V::splat(product / softcap);
                for_each!(self, V, 0..self.rows, |score, _row, _column| tanh(score.mul(shrink)).mul(cap));
            } else if product != 1.0 {
                let product = V::splat(product);
                for_each!(self, V, 0..self.rows, |score, _row, _column| score.mul(product));
            }
        }
    }

    /// Writes the derivative of the softcap, `1 - tanh²`, of capped scores.
    ///
    /// # Safety
    /// As [`SimdTask::run`].
    #[inline(always)]
    unsafe fn derive_cap<V: Vector>(&self, softcap: f32, to: *mut f32) {
        // SAFETY: as this method's contract.
        unsafe {
            let one = V::splat(1.0);
            let shrink = V::splat(-1.0 / softcap);
            for at in self.offsets::<V>() {
                let tanh = V::load(self.scores.add(at)).mul(shrink);
                one.sub(tanh.mul(tanh)).store(to.add(at));
            }
        }
    }

    /// Iterates over the offsets of all vectors of scores.
    pub fn offsets<V: Vector>(&self) -> impl Iterator<Item = usize> + use<V> {
        let vectors = self.tile.vectors;
        let panel = self.tile.panel;
        (0..self.rows).flat_map(move |row| (0..vectors).map(move |vector| row * panel + vector * V::LANES))
    }

    /// Adds ALiBi and biases, in natural units.
    ///
    /// # Safety
    /// As [`SimdTask::run`].
    #[inline(always)]
    unsafe fn add_biases<V: Vector>(&self) {
        let options = &self.inputs.options;
        // SAFETY: as this method's contract.
        unsafe {
            if let Some(alibi) = &options.alibi {
                self.add_alibi::<V>(alibi);
            }
            if let Some(table) = self.inputs.relative_bias {
                self.add_relative_bias::<V>(table);
            } else if let Some(bias) = &options.relative_bias {
                self.add_relative_bias_of_rows(bias);
            }
            if let Some(bias) = &options.bias {
                self.combine::<V, f32, BIAS>(bias);
            }
        }
    }

    /// Adds ALiBi.
    ///
    /// # Safety
    /// As [`SimdTask::run`].
    #[inline(always)]
    unsafe fn add_alibi<V: Vector>(&self, alibi: &TileAlibi) {
        let mut slopes = [0f32; MAX_COLUMNS];
        let mut positions = [0f32; MAX_COLUMNS];
        for column in self.tile.columns() {
            let row = self.inputs.dims.row(self.tile.kv, column.row);
            slopes[column.column] = -alibi.slopes[row.head];
            positions[column.column] = self.inputs.position(alibi, row) - column.key_offset as f32;
        }
        let keys_of_row = self.keys_of_row();
        // SAFETY: as this method's contract; the arrays have an element for each column.
        unsafe {
            for_each!(self, V, 0..self.rows, |score, row, column| {
                let key = V::splat((self.keys.start + row * keys_of_row) as f32);
                let distance = V::load(positions.as_ptr().add(column)).sub(key).abs();
                V::load(slopes.as_ptr().add(column)).mul_add(distance, score)
            });
        }
    }

    /// Adds the relative bias, along the diagonals.
    ///
    /// # Safety
    /// As [`SimdTask::run`].
    #[inline(always)]
    unsafe fn add_relative_bias<V: Vector>(&self, table: &RelativeBiasTable) {
        let &Self { inputs: CheckedCall { dims, .. }, tile, ref keys, scores, .. } = self;
        let words = table.head_words(&dims, tile.kv).as_ptr();
        for run in table.runs(&dims, tile.kv, &tile.rows, V::LANES, keys) {
            for index in 0..keys.len() {
                // SAFETY: as this method's contract; the table has a vector from each word of a run on.
                unsafe {
                    let at = scores.add(index * tile.panel + run.column);
                    let score: V = load_first(at.cast_const(), run.width);
                    let bias = V::load(words.add(run.word(index)));
                    store_first(score.add(bias), at, run.width);
                }
            }
        }
    }

    /// Adds the relative bias to the scores of a narrow tile, without a table.
    ///
    /// # Safety
    /// As [`SimdTask::run`].
    unsafe fn add_relative_bias_of_rows(&self, bias: &TileRelativeBias) {
        let dims = &self.inputs.dims;
        for (column, row) in self.tile.rows.clone().enumerate() {
            let row = dims.row(self.tile.kv, row);
            let first_entry = bias.entry(dims, row, self.keys.start);
            // Keys without an entry are masked.
            let key_of = |entry: usize| (entry as i128 - first_entry).clamp(0, self.keys.len() as i128) as usize;
            let keys = key_of(0)..key_of(bias.len);
            if !keys.is_empty() {
                let from = &bias.head_biases(row.b, row.head)[(first_entry + keys.start as i128) as usize..];
                // SAFETY: as this method's contract; the biases of the row have the entries of these keys.
                unsafe { self.combine_row::<f32, BIAS>(column, keys, from.as_ptr(), 1) };
            }
        }
    }

    /// Sets the scores of masked keys to -inf.
    ///
    /// # Safety
    /// As [`SimdTask::run`].
    #[inline(always)]
    unsafe fn mask<V: Vector>(&self) {
        let every = &self.tile.all_attend;
        let first = self.keys.start;
        let keys_of_row = self.keys_of_row();
        // The scores of keys that every query attends to do not change: in a window, all but those at the edges.
        let first_unmasked_row = every.start.saturating_sub(first).div_ceil(keys_of_row).min(self.rows);
        let unmasked_end = match every.end.saturating_sub(first) {
            keys if keys < self.keys.len() => (keys / keys_of_row).clamp(first_unmasked_row, self.rows),
            _ => self.rows,
        };
        // SAFETY: as this method's contract; the bounds have an element for each column.
        unsafe {
            let masked = V::splat(f32::NEG_INFINITY);
            for at in self.keys.len() * self.tile.width..self.rows * self.tile.panel {
                *self.scores.add(at) = f32::NEG_INFINITY;
            }
            if first_unmasked_row > 0 || unmasked_end < self.rows {
                let bounds = self.tile.bounds(first, self.keys.len());
                for_each!(self, V, (0..first_unmasked_row).chain(unmasked_end..self.rows), |score, row, column| {
                    let key = V::splat((row * keys_of_row) as f32);
                    let is_before = key.less_than(V::load(bounds.starts.as_ptr().add(column)));
                    let is_before_end = key.less_than(V::load(bounds.ends.as_ptr().add(column)));
                    V::select(is_before_end, V::select(is_before, masked, score), masked)
                });
            }
            if let Some(boolean_mask) = &self.inputs.options.boolean_mask {
                self.combine::<V, u8, MASK>(boolean_mask);
            }
        }
    }

    /// Adds to every score its entry of a tensor (B, H, T_q, T_kv), or masks it where the entry is 0: rows of the
    /// tensor are staged, then transposed.
    ///
    /// # Safety
    /// As [`SimdTask::run`]; the tensor has an entry for each score.
    #[inline(always)]
    unsafe fn combine<V: Vector, T: Copy + Into<f32>, const IS_BIAS: bool>(&self, tensor: &Strided<T, 4>) {
        let lanes = V::LANES;
        let step = tensor.strides[3];
        let keys = self.keys.len();
        let staged = keys.next_multiple_of(lanes);
        let entries_of = |row: usize| {
            let row = self.inputs.dims.row(self.tile.kv, row);
            tensor.at([row.b, row.head, row.query, self.keys.start])
        };
        if self.tile.width < self.tile.panel {
            for (column, row) in self.tile.rows.clone().enumerate() {
                // SAFETY: as this method's contract.
                unsafe { self.combine_row::<T, IS_BIAS>(column, 0..keys, entries_of(row), step) };
            }
            return;
        }
        let mut square = [0f32; MAX_LANES * MAX_LANES];
        for vector in 0..self.tile.vectors {
            let first_row = self.tile.rows.start + vector * lanes;
            let filled = lanes.min(self.tile.rows.end - first_row);
            // SAFETY: as this method's contract; the staging memory has `lanes` rows of a block.
            unsafe {
                let masked = V::splat(f32::NEG_INFINITY);
                for lane in 0..filled {
                    let from = entries_of(first_row + lane);
                    let to = self.staging.add(lane * staged);
                    if step == 1 {
                        (0..keys).for_each(|key| *to.add(key) = (*from.add(key)).into());
                    } else {
                        (0..keys).for_each(|key| *to.add(key) = (*from.add(key * step)).into());
                    }
                }
                // Columns without a query stay finite.
                (filled..lanes).for_each(|lane| self.staging.add(lane * staged).write_bytes(0, keys));
                for key in (0..keys).step_by(lanes) {
                    V::transpose(self.staging.add(key), staged, square.as_mut_ptr(), lanes);
                    for k in 0..lanes.min(keys - key) {
                        let at = self.scores.add((key + k) * self.tile.panel + vector * lanes);
                        let score = V::load(at);
                        let entry = V::load(square.as_ptr().add(k * lanes));
                        let combined = if IS_BIAS {
                            score.add(entry)
                        } else {
                            V::select(entry.less_than(V::splat(0.5)), masked, score)
                        };
                        combined.store(at);
                    }
                }
            }
        }
    }

    /// Adds or masks as [`combine`](Self::combine), for some of the keys of one row of a narrow tile. `from` is the
    /// entry of the first of these keys, and the entries of the others follow, `step` apart.
    ///
    /// # Safety
    /// As [`SimdTask::run`]; there is an entry for each of the keys, which are counted from the first.
    #[inline(always)]
    unsafe fn combine_row<T: Copy + Into<f32>, const IS_BIAS: bool>(
        &self,
        column: usize,
        keys: Range<usize>,
        from: *const T,
        step: usize,
    ) {
        let width = self.tile.width;
        let combined = |score: f32, entry: T| match IS_BIAS {
            true => score + entry.into(),
            false if entry.into() == 0.0 => f32::NEG_INFINITY,
            false => score,
        };
        // SAFETY: as this method's contract.
        unsafe {
            let to = self.scores.add(keys.start * width + column);
            // Lengths and strides that the compiler knows let it use vectors.
            if width == 1 && step == 1 {
                (0..keys.len()).for_each(|key| *to.add(key) = combined(*to.add(key), *from.add(key)));
            } else {
                let at = |key: usize| to.add(key * width);
                (0..keys.len()).for_each(|key| *at(key) = combined(*at(key), *from.add(key * step)));
            }
        }
    }
}
