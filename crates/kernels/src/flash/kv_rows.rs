//! Keys and values as they are stored: in one piece for each sequence, or in pages.

use std::cell::OnceCell;
use std::ops::Range;

use super::pages::{PageList, Pages};
use super::problem::CpuCall;
use super::view::View;
use crate::cpu::{Vector, prefetch_bytes};
use crate::error::Error;
use crate::number::{Stored, Strided, load_part};
use candle_attention_call::{AttentionCall, AttentionDims, KvCodeFormat, KvHead};

/// The distance, in rows of f32, at which rows are prefetched: enough to cover the latency of memory at a row every few
/// dozen cycles.
const PREFETCH_ROWS: usize = 16;

/// Returns the distance, in rows, at which rows are prefetched: for narrower elements there are more rows in the same
/// number of bytes.
pub(super) const fn prefetch_distance<S: Stored>() -> usize {
    PREFETCH_ROWS * (4 / size_of::<S>()) * S::NUMBERS
}

/// Prefetches the first `width` numbers of a row, which need not exist.
///
/// # Safety
/// The processor has the instruction set of V.
#[inline(always)]
pub(super) unsafe fn prefetch_row<V: Vector, S: Stored>(row: *const S, width: usize) {
    // SAFETY: the processor has the instruction set.
    unsafe { prefetch_bytes::<V>(row.cast(), width / S::NUMBERS * size_of::<S>()) };
}

/// The keys or the values of a call, as they are stored.
#[derive(Clone, Copy)]
pub struct KvMatrix<'a, S> {
    /// Rows of sequences, heads and keys, or of pages, heads and positions in a page.
    rows: Strided<'a, S, 3>,
    /// The scales of each row, where numbers are scaled.
    scales: Option<Strided<'a, f32, 3>>,
    pub(super) groups: ScaleGroups,
    pages: Option<Pages<'a>>,
    /// D or D_v.
    pub(super) width: usize,
}

/// The groups of numbers of a row that have a scale each.
#[derive(Clone, Copy)]
pub(super) struct ScaleGroups {
    pub count: usize,
    /// The binary logarithm of the numbers in a group; more than any number has if a row is one group.
    shift: u32,
}

impl ScaleGroups {
    /// Returns the groups of rows of `width` numbers.
    fn new(format: Option<KvCodeFormat>, width: usize) -> Self {
        let one = Self { count: 1, shift: usize::BITS - 1 };
        let Some(format) = format else { return one };
        match format.scales(width) {
            1 => one,
            count => Self { count, shift: format.group(width).trailing_zeros() },
        }
    }

    /// Returns the numbers of a group, which are whole vectors if there are several groups.
    pub fn columns(self, group: usize, width: usize) -> Range<usize> {
        if self.count == 1 { 0..width } else { group << self.shift..(group + 1) << self.shift }
    }
}

/// The scales of the numbers of a row.
#[derive(Clone, Copy)]
pub(super) struct ScalesOfRow {
    /// Null where numbers are not scaled.
    first: *const f32,
    shift: u32,
}

impl ScalesOfRow {
    /// Returns the factor of number `n` of the row. Where a row may have several groups, all numbers of a vector have
    /// the same.
    #[inline(always)]
    pub fn at<S: Stored>(self, n: usize) -> f32 {
        if !S::IS_SCALED || self.first.is_null() {
            return 1.0;
        }
        let group = if S::HAS_GROUPS { n >> self.shift } else { 0 };
        // SAFETY: the view was checked for the scales of every key of the call.
        unsafe { *self.first.wrapping_add(group) }
    }
}

/// The keys and the values of a call.
#[derive(Clone, Copy)]
pub struct KeysValues<'a, S> {
    pub(super) k: KvMatrix<'a, S>,
    pub(super) v: KvMatrix<'a, S>,
}

/// Successive keys of a head whose rows are at one distance from each other: all keys, or keys of one page.
pub(super) struct KvRun<S> {
    pub keys: Range<usize>,
    /// The row of the first key.
    pub first: *const S,
    /// The row to prefetch with the first row. It need not exist.
    pub ahead: *const S,
    /// The number of elements from one row to the next, and from one row to prefetch to the next.
    pub stride: usize,
    /// The scales of the first row.
    scales: ScalesOfRow,
    scale_stride: usize,
}

/// The row of a key.
pub(super) struct KvRow<S> {
    pub numbers: *const S,
    /// The row to prefetch with this one. It need not exist.
    pub ahead: *const S,
    pub scales: ScalesOfRow,
}

impl<'a, S: Stored> KeysValues<'a, S> {
    /// Returns the checked keys and values of a call, whose pages are checked already.
    pub(super) fn new(call: &CpuCall<'a>, pages: Option<&'a PageList>) -> Result<Self, Error> {
        let AttentionCall { dims, k, v, kv_scales, .. } = call;
        let pages = pages.map(PageList::pages);
        let scales = kv_scales.as_ref();
        let k_codes = scales.map(|scales| UncheckedCodes { format: scales.format, scales: &scales.k });
        let v_codes = scales.map(|scales| UncheckedCodes { format: scales.format, scales: &scales.v });
        Ok(Self {
            k: KvMatrix::new(UncheckedRows { name: "k", rows: k, codes: k_codes, width: dims.d }, pages, dims)?,
            v: KvMatrix::new(UncheckedRows { name: "v", rows: v, codes: v_codes, width: dims.d_v }, pages, dims)?,
        })
    }
}

/// Keys or values that are not checked yet.
struct UncheckedRows<'r, 'a> {
    /// The name of the tensor, for errors.
    name: &'r str,
    rows: &'r View<'a>,
    /// The format and the scales of rows that are codes.
    codes: Option<UncheckedCodes<'r, 'a>>,
    /// D or D_v.
    width: usize,
}

/// The format of codes, and their scales, which are not checked yet.
struct UncheckedCodes<'r, 'a> {
    format: KvCodeFormat,
    scales: &'r View<'a>,
}

impl<'a, S: Stored> KvMatrix<'a, S> {
    /// Returns the keys or the values of a call. Without pages, checks that their slices have every row of (B, H_kv,
    /// T_kv).
    fn new(stored: UncheckedRows<'_, 'a>, pages: Option<Pages<'a>>, dims: &AttentionDims) -> Result<Self, Error> {
        let UncheckedRows { name, rows, codes, width } = stored;
        if !width.is_multiple_of(S::BLOCK) {
            return Err(Error::Shape(format!(
                "expected rows of {name} of a multiple of {} numbers, which codes of 4 bits have, found {width}",
                S::BLOCK
            )));
        }
        let groups = ScaleGroups::new(codes.as_ref().map(|codes| codes.format), width);
        let shape = [dims.b, dims.h_kv, dims.t_kv];
        let elements = width / S::NUMBERS;
        let rows = rows.rows::<S>(name, elements)?;
        if pages.is_none() {
            rows.check(name, shape, elements)?;
        }
        let scales = match codes {
            Some(codes) => {
                let name_of_scales = format!("the scales of {name}");
                let scales = codes.scales.rows(&name_of_scales, groups.count)?;
                if pages.is_none() {
                    scales.check(&name_of_scales, shape, groups.count)?;
                }
                Some(scales)
            }
            None => None,
        };
        Ok(Self { rows, scales, groups, pages, width })
    }
}

impl<'a, S: Stored> KvMatrix<'a, S> {
    /// Returns whether the rows of one key are next to each other, and the rows of the next key after them.
    pub(super) fn has_heads_side_by_side(&self) -> bool {
        self.rows.strides[1] < self.rows.strides[2]
    }

    /// Returns whether the keys are in pages of one key each, so that every run has one key.
    #[inline(always)]
    pub fn has_runs_of_one_key(&self) -> bool {
        self.pages.is_some_and(|pages| pages.have_one_key())
    }

    /// Returns the rows of some keys of a head from the first on, up to the first row at another distance from the one
    /// before it. There is at least one key.
    #[inline(always)]
    pub fn run(&self, kv: KvHead, keys: Range<usize>) -> KvRun<S> {
        let stride = self.rows.strides[2];
        let distance = prefetch_distance::<S>();
        let mut index = [kv.b, kv.head, keys.start];
        let mut count = keys.len();
        let mut first = self.rows.at(index);
        let mut ahead = first.wrapping_add(stride.wrapping_mul(distance));
        if let Some(pages) = &self.pages {
            if let Some(place) = pages.place(kv, keys.start) {
                index = [place.page, kv.head, place.position];
                count = count.min(place.left);
            }
            first = self.rows.at(index);
            // Past the last page there is nothing to prefetch.
            ahead = first;
            if let Some(place) = pages.place(kv, keys.start.saturating_add(distance)) {
                ahead = self.rows.at([place.page, kv.head, place.position]);
                count = count.min(place.left);
            }
        }
        let mut scales = ScalesOfRow { first: std::ptr::null(), shift: self.groups.shift };
        let mut scale_stride = 0;
        if S::IS_SCALED
            && let Some(of_rows) = &self.scales
        {
            scales.first = of_rows.at(index);
            scale_stride = of_rows.strides[2];
        }
        KvRun { keys: keys.start..keys.start + count, first, ahead, stride, scales, scale_stride }
    }

    /// Returns whether a row has several groups of numbers with a scale each.
    #[inline(always)]
    pub fn has_groups(&self) -> bool {
        S::HAS_GROUPS && self.groups.count > 1
    }

    /// Iterates over the runs of some keys of a head, which belong to the call.
    #[inline(always)]
    pub fn runs(&self, kv: KvHead, keys: Range<usize>) -> KvRuns<'_, 'a, S> {
        KvRuns { matrix: self, kv, keys }
    }
}

/// Iterates over the runs of some keys.
#[derive(Clone)]
pub(super) struct KvRuns<'r, 'a, S> {
    matrix: &'r KvMatrix<'a, S>,
    kv: KvHead,
    keys: Range<usize>,
}

impl<S: Stored> Iterator for KvRuns<'_, '_, S> {
    type Item = KvRun<S>;

    #[inline(always)]
    fn next(&mut self) -> Option<KvRun<S>> {
        if self.keys.is_empty() {
            return None;
        }
        let run = self.matrix.run(self.kv, self.keys.clone());
        self.keys.start = run.keys.end;
        Some(run)
    }
}

impl<S: Stored> KvRun<S> {
    /// Returns the row of the n-th key of the run.
    #[inline(always)]
    pub fn row(&self, n: usize) -> KvRow<S> {
        let offset = n.wrapping_mul(self.stride);
        KvRow {
            numbers: self.first.wrapping_add(offset),
            ahead: self.ahead.wrapping_add(offset),
            scales: self.scales(n),
        }
    }

    /// Returns the scales of the n-th key of the run.
    #[inline(always)]
    pub fn scales(&self, n: usize) -> ScalesOfRow {
        if !S::IS_SCALED || self.scales.first.is_null() {
            return self.scales;
        }
        let first = self.scales.first.wrapping_add(n.wrapping_mul(self.scale_stride));
        ScalesOfRow { first, ..self.scales }
    }
}

/// The rows of some keys of one head in the matrix of keys, or of values.
pub(super) struct KvHeadRows<'a, S> {
    matrix: &'a KvMatrix<'a, S>,
    kv: KvHead,
    /// The number of numbers in a row: D or D_v.
    pub width: usize,
    pub keys: Range<usize>,
    finite: OnceCell<bool>,
}

impl<'a, S: Stored> KvHeadRows<'a, S> {
    /// Selects the rows of some keys, which belong to the call.
    pub fn new(matrix: &'a KvMatrix<'a, S>, kv: KvHead, keys: Range<usize>) -> Self {
        Self { matrix, kv, width: matrix.width, keys, finite: OnceCell::new() }
    }

    /// Returns the row of a key, which need not be one of the selected keys.
    #[inline(always)]
    pub fn row(&self, key: usize) -> KvRow<S> {
        self.matrix.run(self.kv, key..key + 1).row(0)
    }

    /// Iterates over the rows.
    #[inline(always)]
    pub fn iter(&self) -> KvRowIter<'_, 'a, S> {
        KvRowIter { runs: self.matrix.runs(self.kv, self.keys.clone()), run: None, n: 0 }
    }

    /// Adds the numbers of a key times a weight to sums that are padded to whole vectors.
    ///
    /// # Safety
    /// The processor has the instruction set of V; the key belongs to the call.
    #[inline(always)]
    pub unsafe fn add<V: Vector>(&self, key: usize, weight: f32, sums: &mut [f32]) {
        let row = self.row(key);
        // SAFETY: as this method's contract.
        unsafe {
            for d in (0..self.width).step_by(V::LANES) {
                let weight = V::splat(weight * row.scales.at::<S>(d));
                let value: V = load_part(row.numbers, d, V::LANES.min(self.width - d));
                let sum = sums.as_mut_ptr().add(d);
                weight.mul_add(value, V::load(sum)).store(sum);
            }
        }
    }

    /// Returns whether all numbers are finite: the product of a weight of zero and another number is NaN. Computed
    /// once.
    ///
    /// # Safety
    /// The keys belong to the call.
    pub unsafe fn are_finite(&self) -> bool {
        let is_finite = |row: KvRow<S>| {
            let groups = self.matrix.groups;
            let mut starts = (0..groups.count).map(|group| groups.columns(group, self.width).start);
            let has_finite_scales = starts.all(|start| row.scales.at::<S>(start).is_finite());
            // SAFETY: as this method's contract.
            has_finite_scales && unsafe { is_finite_row(row.numbers, self.width) }
        };
        *self.finite.get_or_init(|| self.iter().all(is_finite))
    }
}

/// Returns whether all numbers of a row are finite, without a branch for each.
///
/// # Safety
/// The row is valid for `width` numbers.
pub(super) unsafe fn is_finite_row<S: Stored>(row: *const S, width: usize) -> bool {
    // SAFETY: as this function's contract.
    (0..width / S::NUMBERS).fold(true, |all, d| all & unsafe { *row.add(d) }.is_finite())
}

/// Iterates over the rows of some keys.
pub(super) struct KvRowIter<'r, 'a, S> {
    runs: KvRuns<'r, 'a, S>,
    /// The run of the next row, which is its n-th.
    run: Option<KvRun<S>>,
    n: usize,
}

impl<S: Stored> Iterator for KvRowIter<'_, '_, S> {
    type Item = KvRow<S>;

    #[inline(always)]
    fn next(&mut self) -> Option<KvRow<S>> {
        let is_at_end = self.run.as_ref().is_none_or(|run| self.n == run.keys.len());
        if is_at_end {
            self.run = Some(self.runs.next()?);
            self.n = 0;
        }
        let row = self.run.as_ref()?.row(self.n);
        self.n += 1;
        Some(row)
    }
}
