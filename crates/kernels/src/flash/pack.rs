//! Packs queries, keys and values for matrix products.

use std::ops::Range;

use half::bf16;

use super::inputs::query_row;
use super::kv_rows::{KeysValues, KvHeadRows, KvRow, prefetch_distance, prefetch_row};
use super::packed_width::{PackedWidth, column_group};
use super::tasks::AttentionWorkspace;
use super::tile::Tile;
use crate::cpu::{Kernel, LeftOperand, SimdTask, Vector};
use crate::number::{Number, Stored, Strided, load_first, load_part, pack_row_pair, store_first, widen_row};
use candle_attention_call::{AttentionDims, KvHead};

/// One packed block of keys and values of one key head. The keys begin at a multiple of the block's length, and are
/// fewer only at the end.
pub(super) struct PackedBlock<'a, S> {
    /// The keys, as the rows of a product of depth D.
    pub k: LeftOperand,
    /// The values, transposed, as the D_v rows of a product whose depth are the keys.
    pub v: LeftOperand,
    /// The values as they are stored.
    pub values: KvHeadRows<'a, S>,
}

impl<'a, S: Stored> PackedBlock<'a, S> {
    /// Copies the block into the workspace, in the order in which products read it, converted to f32 where the
    /// instruction set multiplies f32. A block serves all queries of a task, so that the copy is some hundredths of the
    /// work; read in place, its rows would share few sets of the first cache at the usual power-of-two strides.
    ///
    /// # Safety
    /// The processor has the instruction set of K; the keys are one block; the workspace was made for the call.
    #[inline(always)]
    pub unsafe fn new<K: Kernel>(
        keys_values: &'a KeysValues<'a, S>,
        workspace: &mut AttentionWorkspace,
        kv: KvHead,
        keys: Range<usize>,
    ) -> Self {
        let rows = KvHeadRows::new(&keys_values.k, kv, keys.clone());
        let values = KvHeadRows::new(&keys_values.v, kv, keys);
        let staging = workspace.staging.as_mut_ptr();
        // SAFETY: as this function's contract; the workspace has memory for a block of keys and of values.
        unsafe {
            let k = pack_rows::<K, S>(&rows, workspace.keys.as_mut_ptr(), workspace.d.words);
            let v = pack_columns::<K, S>(&values, workspace.values.as_mut_ptr(), staging, workspace.d_v);
            Self { k, v, values }
        }
    }
}

/// Packs some rows of at most a block as words, one after the other: (rows, depth), and zeros up to a whole group.
///
/// # Safety
/// The processor has the instruction set of K; the rows exist; `to` takes a block of rows of `depth` words.
pub(super) unsafe fn pack_rows<K: Kernel, S: Stored>(rows: &KvHeadRows<S>, to: *mut f32, depth: usize) -> LeftOperand {
    // SAFETY: as this function's contract.
    unsafe { K::run_simd(Pack { rows, to, form: Form::Rows { depth } }) };
    LeftOperand { at: to, group: K::ROWS * depth, row: depth, step: 1 }
}

/// Packs rows as words, as they are or transposed.
struct Pack<'a, S> {
    rows: &'a KvHeadRows<'a, S>,
    to: *mut f32,
    form: Form,
}

/// The form in which rows are packed.
enum Form {
    /// As they are, padded to `depth` words each.
    Rows { depth: usize },
    /// Transposed, by way of a staging buffer.
    Columns { staging: *mut f32, width: PackedWidth },
}

impl<S: Stored> SimdTask for Pack<'_, S> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let Self { rows, to, form } = self;
        // SAFETY: by the contracts of `pack_rows` and `pack_columns`.
        unsafe {
            match form {
                Form::Rows { depth } => {
                    for (index, row) in rows.iter().enumerate() {
                        let to = to.add(index * depth);
                        prefetch_row::<K::Vector, S>(row.ahead, rows.width);
                        pack_kv_row::<K, S>(&row, rows.width, to, depth);
                    }
                    let count = rows.keys.len();
                    to.add(count * depth).write_bytes(0, (count.next_multiple_of(K::ROWS) - count) * depth);
                }
                Form::Columns { staging, width } if const { K::IS_BF16 } => {
                    pack_column_pairs::<K, S>(rows, to, staging, width);
                }
                Form::Columns { staging, width } => pack_column_groups::<K, S>(rows, to, staging, width),
            }
        }
    }
}

/// Packs some rows of at most a block, transposed: their width is the rows of a product, and the rows are its depth.
///
/// # Safety
/// The processor has the instruction set of K; the rows exist; `to` takes [`PackedWidth::column_words`] and `staging`
/// [`PackedWidth::staging_words`].
pub(super) unsafe fn pack_columns<K: Kernel, S: Stored>(
    rows: &KvHeadRows<S>,
    to: *mut f32,
    staging: *mut f32,
    width: PackedWidth,
) -> LeftOperand {
    // SAFETY: as this function's contract.
    unsafe { K::run_simd(Pack { rows, to, form: Form::Columns { staging, width } }) };
    if K::IS_BF16 {
        LeftOperand { at: to, group: K::ROWS * (K::BLOCK / 2), row: K::BLOCK / 2, step: 1 }
    } else {
        LeftOperand { at: to, group: column_group(K::LAYOUT), row: 1, step: K::ROWS }
    }
}

/// Packs the row of a key or value as words, times its scales, and zeros up to `padded` words.
///
/// # Safety
/// As [`pack_row`].
#[inline(always)]
unsafe fn pack_kv_row<K: Kernel, S: Stored>(row: &KvRow<S>, width: usize, to: *mut f32, padded: usize) {
    // SAFETY: as this function's contract; rows with groups have whole vectors, and pairs are two elements of 16 bits.
    unsafe {
        if const { !S::HAS_GROUPS } {
            return pack_row::<K, S>(row.numbers, width, to, padded, row.scales.at::<S>(0));
        }
        let pairs: *mut bf16 = to.cast();
        for at in (0..width).step_by(K::Vector::LANES) {
            let scaled = S::load_at::<K::Vector>(row.numbers, at).mul(K::Vector::splat(row.scales.at::<S>(at)));
            if const { K::IS_BF16 } {
                bf16::store(scaled, pairs.add(at));
            } else {
                scaled.store(to.add(at));
            }
        }
        if const { K::IS_BF16 } {
            pairs.add(width).write_bytes(0, 2 * padded - width);
        } else {
            to.add(width).write_bytes(0, padded - width);
        }
    }
}

/// Packs one row as words, times a factor, and zeros up to `padded` words. The factor of a row that is bf16 already,
/// and stays bf16 in pairs, must be 1, -1 or 0.
///
/// # Safety
/// The processor has the instruction set of K; `row` is valid for `width` elements, `to` for writes of `padded` words.
#[inline(always)]
pub(super) unsafe fn pack_row<K: Kernel, S: Stored>(
    row: *const S,
    width: usize,
    to: *mut f32,
    padded: usize,
    factor: f32,
) {
    // SAFETY: as this function's contract; pairs are two elements of 16 bits.
    unsafe {
        if const { !K::IS_BF16 } {
            return widen_row::<S, K::Vector>(row, width, to, padded, factor);
        }
        let pairs: *mut bf16 = to.cast();
        pairs.add(width).write_bytes(0, 2 * padded - width);
        if S::IS_SCALED {
            let lanes = K::Vector::LANES;
            let factor = K::Vector::splat(factor);
            for at in (0..width).step_by(lanes) {
                let n = lanes.min(width - at);
                let numbers: K::Vector = load_first(row.add(at), n);
                store_first(numbers.mul(factor), pairs.add(at), n);
            }
            return;
        }
        std::ptr::copy_nonoverlapping(row, pairs.cast(), width);
        if factor != 1.0 {
            let bits: *mut u16 = to.cast();
            for i in 0..width {
                *bits.add(i) = if factor == 0.0 { *bits.add(i) & 0x8000 } else { *bits.add(i) ^ 0x8000 };
            }
        }
    }
}

/// Packs the rows of a tile of a matrix, transposed into a panel (width, panel) and times a factor; zeros for fully
/// masked queries.
pub(super) struct PackTile<'a, E> {
    pub rows: &'a TileRows<'a, E>,
    pub width: PackedWidth,
    /// Takes `width.word_squares` rows of a panel.
    pub panel: *mut f32,
    /// Takes `LANES` rows of `width.word_squares` words.
    pub staging: *mut f32,
    pub factor: f32,
}

impl<E: Number> SimdTask for PackTile<'_, E> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let Self { rows, staging, .. } = self;
        let lanes = K::Vector::LANES;
        let square = self.width.word_squares;
        // SAFETY: the processor has the instruction set of K; the matrix has the rows, and the pointers are valid for
        // writes of the sizes in the fields.
        unsafe {
            for vector in 0..rows.tile.vectors {
                for lane in 0..lanes {
                    let to = staging.add(lane * square);
                    match rows.row(vector * lanes + lane) {
                        Some(from) => {
                            let ahead = rows.matrix.strides[2].wrapping_mul(prefetch_distance::<E>());
                            prefetch_row::<K::Vector, E>(from.wrapping_add(ahead), rows.width);
                            pack_row::<K, E>(from, rows.width, to, square, self.factor);
                        }
                        None => to.write_bytes(0, square),
                    }
                }
                for depth in (0..square).step_by(lanes) {
                    let to = self.panel.add(depth * K::PANEL + vector * lanes);
                    K::Vector::transpose(staging.add(depth), square, to, K::PANEL);
                }
            }
        }
    }
}

/// The rows of a tile in a matrix (B, H, T_q) of rows of `width` elements.
pub(super) struct TileRows<'a, E> {
    pub matrix: &'a Strided<'a, E, 3>,
    pub width: usize,
    pub dims: &'a AttentionDims,
    pub tile: &'a Tile,
}

impl<E> TileRows<'_, E> {
    /// Returns a pointer to the row of a column of the panel; `None` if the column has no query, or a fully masked one.
    #[inline(always)]
    pub fn row(&self, column: usize) -> Option<*const E> {
        if self.tile.is_empty(column) {
            return None;
        }
        let row = self.dims.row(self.tile.kv, self.tile.rows.start + column);
        Some(query_row(self.matrix, row))
    }
}

/// Packs rows, transposed, as words of one element: in groups of the columns that are the rows of a product, (width /
/// rows, block, rows), the groups [`column_group`] words apart.
///
/// # Safety
/// As [`pack_columns`].
#[inline(always)]
unsafe fn pack_column_groups<K: Kernel, S: Stored>(
    rows: &KvHeadRows<S>,
    to: *mut f32,
    staging: *mut f32,
    width: PackedWidth,
) {
    // SAFETY: as this function's contract; the staging memory is large enough for a row.
    unsafe {
        for (index, row) in rows.iter().enumerate() {
            prefetch_row::<K::Vector, S>(row.ahead, rows.width);
            pack_kv_row::<K, S>(&row, rows.width, staging, width.rows);
            for group in 0..width.rows / K::ROWS {
                let to = to.add(group * column_group(K::LAYOUT) + index * K::ROWS);
                std::ptr::copy_nonoverlapping(staging.add(group * K::ROWS), to, K::ROWS);
            }
        }
    }
}

/// Packs rows, transposed, as pairs of neighbouring keys: (width, block / 2), with zeros to the end of the block.
///
/// # Safety
/// As [`pack_columns`]; S is bf16 or scaled.
#[inline(always)]
unsafe fn pack_column_pairs<K: Kernel, S: Stored>(
    rows: &KvHeadRows<S>,
    to: *mut f32,
    staging: *mut f32,
    width: PackedWidth,
) {
    let padded = width.row_squares;
    let lanes = K::Vector::LANES;
    let half = K::BLOCK / 2;
    let mut each_row = rows.iter();
    // SAFETY: as this function's contract; the staging memory is large enough for half a block of rows of `padded`
    // words.
    unsafe {
        for pair in 0..half {
            let low = each_row.next();
            let high = each_row.next();
            for row in [&low, &high].into_iter().flatten() {
                prefetch_row::<K::Vector, S>(row.ahead, rows.width);
            }
            let staged = staging.add(pair * padded);
            match &low {
                Some(low) if S::IS_SCALED => {
                    let high_row = high.as_ref().unwrap_or(low);
                    let is_pair = high.is_some();
                    for d in (0..rows.width).step_by(lanes) {
                        let n = lanes.min(rows.width - d);
                        let low_scale = K::Vector::splat(low.scales.at::<S>(d));
                        let high_scale = K::Vector::splat(if is_pair { high_row.scales.at::<S>(d) } else { 0.0 });
                        let low_numbers: K::Vector = load_part(low.numbers, d, n);
                        let high_numbers: K::Vector = load_part(high_row.numbers, d, n);
                        low_numbers.mul(low_scale).store_pairs(high_numbers.mul(high_scale), staged.add(d));
                    }
                    staged.add(rows.width).write_bytes(0, padded - rows.width);
                }
                _ => {
                    let low_row = low.as_ref().map(|row| row.numbers);
                    let high_row = high.as_ref().map(|row| row.numbers);
                    pack_row_pair(low_row, high_row, rows.width, staged, padded);
                }
            }
        }
        for d in (0..padded).step_by(lanes) {
            for pair in (0..half).step_by(lanes) {
                K::Vector::transpose(staging.add(pair * padded + d), padded, to.add(d * half + pair), half);
            }
        }
    }
}
