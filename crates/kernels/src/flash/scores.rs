//! Scores on their way to the softmax: softcap, ALiBi, biases and masks. Biases by the distance of a query and a key
//! are one vector for each head, which the scores read along their diagonals.
//!
//! Queries are lanes: a score's key is a row of a panel, its query a column.

use std::ops::Range;

use super::problem::{Dims, KvHead, Row, ScoreInputs, ScoreUnits, Strided};
use super::tile::Tile;
use crate::cpu::{Kernel, MAX_COLUMNS, MAX_LANES, Scratch, SimdTask, Vector, tanh};
use crate::error::{Error, check_len};
use crate::number::{load_first, store_first};

/// The scores of one tile over some keys (rows, panel). Does not depend on the elements that they were made of, so that
/// what it does is compiled once for all of them.
pub(super) struct TileScores<'a> {
    pub inputs: ScoreInputs<'a>,
    pub tile: &'a Tile,
    pub units: ScoreUnits,
    pub keys: Range<usize>,
    /// The rows of the panel: one for each key, or of a narrow tile fewer.
    pub rows: usize,
    /// Whether some query does not see some of the keys, or the last row has columns of keys beyond them.
    pub is_masked: bool,
    pub scores: *mut f32,
    /// `LANES` rows of a block. Not of a narrow tile.
    pub staging: *mut f32,
    /// As the scores, where weights are dropped: takes what they are multiplied by.
    pub dropout: *mut f32,
    /// As the scores, where it is wanted: takes the derivative of the softcap, if there is one.
    pub cap_slopes: Option<*mut f32>,
}

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

/// Products become scores in [`ScoreUnits::exponent`]'s unit, and factors of dropout are drawn. The pointers are valid
/// for a panel of the sizes that the fields name.
impl SimdTask for &TileScores<'_> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let options = &self.inputs.options;
        // SAFETY: the processor has the instruction set of K; the pointers are valid.
        unsafe {
            if options.modify_scores() {
                self.cap::<K::Vector>();
                if let (Some(softcap), Some(to)) = (options.softcap, self.cap_slopes) {
                    self.derive_cap::<K::Vector>(softcap, to);
                }
                self.add_biases::<K::Vector>();
            }
            if self.is_masked {
                self.mask::<K::Vector>();
            }
            if let Some(dropout) = &options.dropout {
                dropout.factors::<K::Vector>(self);
            }
        }
    }
}

impl TileScores<'_> {
    /// The keys of a row of the panel.
    pub fn keys_of_row(&self) -> usize {
        self.tile.panel / self.tile.width
    }

    /// The scale and the softcap, after which scores are in natural units.
    ///
    /// # Safety
    /// As [`SimdTask::run`].
    #[inline(always)]
    unsafe fn cap<V: Vector>(&self) {
        let (options, product) = (&self.inputs.options, self.units.product);
        // SAFETY: as this method's contract.
        unsafe {
            if let Some(softcap) = options.softcap {
                let (cap, shrink) = (V::splat(softcap), V::splat(product / softcap));
                for_each!(self, V, 0..self.rows, |score, _row, _column| tanh(score.mul(shrink)).mul(cap));
            } else if product != 1.0 {
                let product = V::splat(product);
                for_each!(self, V, 0..self.rows, |score, _row, _column| score.mul(product));
            }
        }
    }

    /// `1 - tanh²` of capped scores.
    ///
    /// # Safety
    /// As [`SimdTask::run`].
    #[inline(always)]
    unsafe fn derive_cap<V: Vector>(&self, softcap: f32, to: *mut f32) {
        // SAFETY: as this method's contract.
        unsafe {
            let (one, shrink) = (V::splat(1.0), V::splat(-1.0 / softcap));
            for at in self.entries::<V>() {
                let tanh = V::load(self.scores.add(at)).mul(shrink);
                one.sub(tanh.mul(tanh)).store(to.add(at));
            }
        }
    }

    /// The vectors of all keys.
    pub fn entries<V: Vector>(&self) -> impl Iterator<Item = usize> + use<V> {
        let (vectors, panel) = (self.tile.vectors, self.tile.panel);
        (0..self.rows).flat_map(move |row| (0..vectors).map(move |vector| row * panel + vector * V::LANES))
    }

    /// ALiBi and biases, in natural units.
    ///
    /// # Safety
    /// As [`SimdTask::run`].
    #[inline(always)]
    unsafe fn add_biases<V: Vector>(&self) {
        let (options, dims, kv) = (&self.inputs.options, &self.inputs.dims, self.tile.kv);
        // SAFETY: as this method's contract; the arrays have an element for each column.
        unsafe {
            if let Some(alibi) = &options.alibi {
                let (mut slopes, mut positions) = ([0f32; MAX_COLUMNS], [0f32; MAX_COLUMNS]);
                for (column, row, after) in self.tile.columns() {
                    (slopes[column], positions[column]) = self.inputs.slope_and_position(alibi, dims.row(kv, row));
                    positions[column] -= after as f32;
                }
                let keys_of_row = self.keys_of_row();
                for_each!(self, V, 0..self.rows, |score, row, column| {
                    let key = V::splat((self.keys.start + row * keys_of_row) as f32);
                    let distance = V::load(positions.as_ptr().add(column)).sub(key).abs();
                    V::load(slopes.as_ptr().add(column)).mul_add(distance, score)
                });
            }
            match (self.inputs.distances, &options.relative_bias) {
                (Some(table), _) => self.add_distances::<V>(table),
                (None, Some(bias)) => self.add_distances_of_rows(bias),
                (None, None) => {}
            }
            if let Some(bias) = &options.bias {
                self.combine::<V, f32, true>(bias);
            }
        }
    }

    /// # Safety
    /// As [`SimdTask::run`].
    #[inline(always)]
    unsafe fn add_distances<V: Vector>(&self, table: &DistanceTable) {
        let words = table.of_head(&self.inputs.dims, self.tile.kv).as_ptr();
        for run in table.runs(&self.inputs.dims, self.tile, V::LANES, &self.keys) {
            for index in 0..self.keys.len() {
                // SAFETY: as this method's contract; the table has a vector from each word of a run on.
                unsafe {
                    let at = self.scores.add(index * self.tile.panel + run.column);
                    let score: V = load_first(at.cast_const(), run.width);
                    let bias = V::load(words.add(run.word(index)));
                    store_first(score.add(bias), at, run.width);
                }
            }
        }
    }

    /// The same of a narrow tile, without a table.
    ///
    /// # Safety
    /// As [`SimdTask::run`].
    unsafe fn add_distances_of_rows(&self, bias: &RelativeBias) {
        let dims = &self.inputs.dims;
        for (column, row) in self.tile.rows.clone().enumerate() {
            let row = dims.row(self.tile.kv, row);
            let first_entry = bias.entry(dims, row, self.keys.start);
            // Keys without an entry are masked.
            let key_of = |entry: usize| (entry as i128 - first_entry).clamp(0, self.keys.len() as i128) as usize;
            let keys = key_of(0)..key_of(bias.len);
            if !keys.is_empty() {
                let from = &bias.of_row(row)[(first_entry + keys.start as i128) as usize..];
                // SAFETY: as this method's contract; the biases of the row have the entries of these keys.
                unsafe { self.combine_row::<f32, true>(column, keys, from.as_ptr(), 1) };
            }
        }
    }

    /// Scores of hidden keys become -inf.
    ///
    /// # Safety
    /// As [`SimdTask::run`].
    #[inline(always)]
    unsafe fn mask<V: Vector>(&self) {
        let (every, first, keys_of_row) = (&self.tile.every, self.keys.start, self.keys_of_row());
        // Keys that every query sees stay as they are: of a window, all but the edges.
        let from = every.start.saturating_sub(first).div_ceil(keys_of_row).min(self.rows);
        let to = match every.end.saturating_sub(first) {
            keys if keys < self.keys.len() => (keys / keys_of_row).clamp(from, self.rows),
            _ => self.rows,
        };
        // SAFETY: as this method's contract; the bounds have an element for each column.
        unsafe {
            let hidden = V::splat(f32::NEG_INFINITY);
            for at in self.keys.len() * self.tile.width..self.rows * self.tile.panel {
                *self.scores.add(at) = f32::NEG_INFINITY;
            }
            if from > 0 || to < self.rows {
                let [starts, ends] = self.tile.bounds(first, self.keys.len());
                for_each!(self, V, (0..from).chain(to..self.rows), |score, row, column| {
                    let key = V::splat((row * keys_of_row) as f32);
                    let after_start = V::select(key.less_than(V::load(starts.as_ptr().add(column))), hidden, score);
                    V::select(key.less_than(V::load(ends.as_ptr().add(column))), after_start, hidden)
                });
            }
            if let Some(keep) = &self.inputs.options.keep {
                self.combine::<V, u8, false>(keep);
            }
        }
    }

    /// Adds to every score its entry of a tensor (B, H, T_q, T_kv), or hides it where the entry is 0: rows of the
    /// tensor are staged, then transposed.
    ///
    /// # Safety
    /// As [`SimdTask::run`]; the tensor has an entry for each score.
    #[inline(always)]
    unsafe fn combine<V: Vector, T: Copy + Into<f32>, const IS_BIAS: bool>(&self, tensor: &Strided<T, 4>) {
        let (lanes, step, keys) = (V::LANES, tensor.strides[3], self.keys.len());
        let staged = keys.next_multiple_of(lanes);
        let from = |row: usize| {
            let row = self.inputs.dims.row(self.tile.kv, row);
            tensor.at([row.b, row.head, row.query, self.keys.start])
        };
        if self.tile.width < self.tile.panel {
            for (column, row) in self.tile.rows.clone().enumerate() {
                // SAFETY: as this method's contract.
                unsafe { self.combine_row::<T, IS_BIAS>(column, 0..keys, from(row), step) };
            }
            return;
        }
        let mut square = [0f32; MAX_LANES * MAX_LANES];
        for vector in 0..self.tile.vectors {
            let first_row = self.tile.rows.start + vector * lanes;
            let filled = lanes.min(self.tile.rows.end - first_row);
            // SAFETY: as this method's contract; the staging memory has `lanes` rows of a block.
            unsafe {
                let hidden = V::splat(f32::NEG_INFINITY);
                for lane in 0..filled {
                    let (from, to) = (from(first_row + lane), self.staging.add(lane * staged));
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
                        let (score, entry) = (V::load(at), V::load(square.as_ptr().add(k * lanes)));
                        let combined = match IS_BIAS {
                            true => score.add(entry),
                            false => V::select(entry.less_than(V::splat(0.5)), hidden, score),
                        };
                        combined.store(at);
                    }
                }
            }
        }
    }

    /// The same for some of the keys of one row of a narrow tile, whose entries are `step` apart.
    ///
    /// # Safety
    /// As [`SimdTask::run`]; there is an entry for each of the keys, which count from the first.
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

/// A bias for each distance between a query and a key.
///
/// Entry `origin + j` of a head is added to the score of a query and key `j`. With `T_q - 1 - i` as the origin of query
/// i, entry n belongs to the n-th diagonal of the scores. Every key that a query attends to must have an entry. Masked
/// keys need none, so that the origin of a fully masked query may be anything.
#[derive(Debug, Clone, Copy)]
pub struct RelativeBias<'a> {
    /// (B, H) rows of `len` contiguous biases. Sequences whose stride is 0 share them.
    pub rows: Strided<'a, f32, 2>,
    /// Biases of a head.
    pub len: usize,
    /// The entry of key 0 for each query, (B, T_q). Negative where the first keys have no entry.
    pub origins: &'a [i64],
}

impl RelativeBias<'_> {
    /// Checks that the slices have the sizes of the call, and that there is an entry for every key that a query attends
    /// to. `ranges` are the keys of each query, (B, T_q).
    pub(super) fn check(&self, dims: &Dims, ranges: &[Range<usize>]) -> Result<(), Error> {
        self.rows.check("distance biases", [dims.b, dims.h], self.len)?;
        check_len("origins", self.origins.len(), dims.b * dims.t_q)?;
        for (index, (&origin, keys)) in self.origins.iter().zip(ranges).enumerate() {
            // Wider than both, so that no origin overflows.
            let entries = i128::from(origin) + keys.start as i128..i128::from(origin) + keys.end as i128;
            if !keys.is_empty() && (entries.start < 0 || entries.end > self.len as i128) {
                let (sequence, query) = (index / dims.t_q, index % dims.t_q);
                return Err(Error::Shape(format!(
                    "query {query} of sequence {sequence} (origin {origin}, keys {keys:?}) reads entries {entries:?} of \
                     the relative bias, expected entries within 0..{}",
                    self.len
                )));
            }
        }
        Ok(())
    }

    /// The sequences that have biases of their own: B, or 1.
    pub(super) fn sequences(&self, dims: &Dims) -> usize {
        if self.rows.strides[0] == 0 { dims.b.min(1) } else { dims.b }
    }

    /// What the words of a key head in a [`DistanceTable`] are, from [`MAX_LANES`] on: which head of the group each is
    /// of, and which entry.
    pub(super) fn table_entries(&self, group: usize) -> impl Iterator<Item = (usize, usize)> {
        (0..self.len).rev().flat_map(move |entry| (0..group).map(move |g| (g, entry)))
    }

    /// The biases of a row.
    pub(super) fn of_row(&self, row: Row) -> &[f32] {
        if self.len == 0 {
            // Rows without entries may have any stride.
            return &[];
        }
        let start = row.b * self.rows.strides[0] + row.head * self.rows.strides[1];
        &self.rows.data[start..start + self.len]
    }

    /// The entry of a row for a key, outside of `0..len` for some masked keys.
    fn entry(&self, dims: &Dims, row: Row, key: usize) -> i128 {
        i128::from(self.origins[row.b * dims.t_q + row.query]) + key as i128
    }
}

/// Biases as tiles of queries read them: of each key head from the last entry to the first, those of the heads of a
/// group side by side. The entries of one key and successive query rows are then successive too. Zeros stand before
/// and behind them. Sums of their gradients have the same places.
pub(super) struct DistanceTable<'a> {
    bias: RelativeBias<'a>,
    group: usize,
    words: Scratch,
    /// B·H_kv, or H_kv where sequences share biases.
    heads: usize,
}

/// Columns of a tile whose biases of one key are successive words.
pub(super) struct DistanceRun {
    /// The first column, and how many there are: at most a vector.
    pub column: usize,
    pub width: usize,
    /// The word of the first column for the first key, which counts down with keys by the heads of a group.
    first: i64,
    group: i64,
    last: i64,
}

impl DistanceRun {
    /// Returns the word of the first column for the key with this index. The words of the other columns follow.
    #[inline(always)]
    pub fn word(&self, index: usize) -> usize {
        (self.first - index as i64 * self.group).clamp(0, self.last) as usize
    }
}

impl<'a> DistanceTable<'a> {
    /// `None` where there is no memory for it.
    pub fn new(bias: RelativeBias<'a>, dims: &Dims) -> Option<Self> {
        let (group, heads) = (dims.group(), bias.sequences(dims) * dims.h_kv);
        let size = bias.len.checked_mul(group)?.checked_add(2 * MAX_LANES)?;
        let mut words = Scratch::try_zeros(&[heads, size])?;
        for (index, of_head) in words.words_mut().chunks_exact_mut(size).take(heads).enumerate() {
            let kv = dims.kv_head(index);
            for (place, (g, entry)) in of_head[MAX_LANES..].iter_mut().zip(bias.table_entries(group)) {
                *place = bias.of_row(Row { b: kv.b, head: kv.head * group + g, query: 0 })[entry];
            }
        }
        Some(Self { bias, group, words, heads })
    }

    /// The words of a key head.
    pub fn size(&self) -> usize {
        self.bias.len * self.group + 2 * MAX_LANES
    }

    #[inline(always)]
    pub fn of_head(&self, dims: &Dims, kv: KvHead) -> &[f32] {
        let head = (kv.b * dims.h_kv + kv.head) % self.heads;
        &self.words.words()[head * self.size()..][..self.size()]
    }

    /// Returns the runs of a tile over some keys: a vector each where the origins of its queries count down by one,
    /// which all do except for those of packed sequences that begin elsewhere among the queries than among the keys.
    pub fn runs(
        &self,
        dims: &Dims,
        tile: &Tile,
        lanes: usize,
        keys: &Range<usize>,
    ) -> impl Iterator<Item = DistanceRun> {
        let (kv, group) = (tile.kv, self.group);
        tile.rows.clone().step_by(lanes).flat_map(move |first| {
            let rows = first..tile.rows.end.min(first + lanes);
            let queries = rows.start / group..rows.end.div_ceil(group);
            let origins = &self.bias.origins[kv.b * dims.t_q..][queries];
            let are_successive = origins.windows(2).all(|pair| pair[0].checked_sub(1) == Some(pair[1]));
            let width = if are_successive { rows.len() } else { 1 };
            rows.step_by(width).map(move |row| {
                let from_last = self.bias.len as i128 - 1 - self.bias.entry(dims, dims.row(kv, row), keys.start);
                // Within these bounds some column may have an entry for some key. Beyond them none has one, and all
                // words are zeros.
                let bounds = (-1 - MAX_LANES as i128, (self.bias.len + keys.len()) as i128);
                let from_last = from_last.clamp(bounds.0, bounds.1) as i64;
                DistanceRun {
                    column: row - tile.rows.start,
                    width,
                    first: MAX_LANES as i64 + from_last * group as i64 + (row % group) as i64,
                    group: group as i64,
                    last: (self.size() - MAX_LANES) as i64,
                }
            })
        })
    }
}
