//! The two products of decoding: queries times keys, and weights times values. Both read their elements once.

use std::ops::Range;

use crate::cpu::{Kernel, MAX_LANES, SimdTask, Vector, add_products};
use crate::flash::pack::{HeadRows, prefetch_row};
use crate::flash::problem::{KvHead, ScoreInputs, StoredRows};
use crate::flash::tile::Tile;
use crate::number::{Stored, load_first};

/// Keys whose rows are read by all groups of queries, and whose values for all of D_v, before the next ones: they stay
/// in the first cache meanwhile.
pub(super) const KEY_BLOCK: usize = 32;

/// The most sums that contexts are added to in, and the vectors of values that belong to them.
const MAX_SUMS: usize = 16;
const MAX_VECTORS: usize = 8;

/// The products of a group of R query rows of one key head, a power of two, with some of the keys of one part, or of
/// their weights with the values.
pub(super) struct Products {
    pub kv: KvHead,
    pub keys: Range<usize>,
    /// R.
    pub group: usize,
    /// (keys, R), rounded up to a vector: takes scores, or holds weights.
    pub numbers: *mut f32,
    pub operand: Operand,
}

/// With the keys or the values. Not behind references, from which loops would read again after each store.
struct RowProducts<'a, S> {
    rows: StoredRows<'a, S>,
    products: Products,
}

/// What keys or values are multiplied with, or added to.
#[derive(Clone, Copy)]
pub(super) enum Operand {
    /// R rows of D, with zeros up to whole vectors.
    Queries(*const f32),
    /// R rows of D_v, up to whole vectors, and the words from one to the next.
    Context(*mut f32, usize),
}

/// With the keys or the values, of which it makes a copy of its own.
impl<S: Stored> SimdTask for (&StoredRows<'_, S>, &Products) {
    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let own = RowProducts { rows: *self.0, products: Products { keys: self.1.keys.clone(), ..*self.1 } };
        // SAFETY: by the contract of `SimdTask`.
        unsafe {
            match own.products.group {
                1 => own.multiply::<K::Vector>(1),
                2 => own.multiply::<K::Vector>(2),
                8 if const { K::Vector::LANES == MAX_LANES } => own.multiply::<K::Vector>(8),
                _ => own.multiply::<K::Vector>(4),
            }
        }
    }
}

/// R is an argument, which the compiler knows where all of this becomes a part of [`SimdTask::run`].
impl<S: Stored> RowProducts<'_, S> {
    /// # Safety
    /// The processor has the instruction set of V; the keys belong to the call; the pointers are valid for what they
    /// name.
    #[inline(always)]
    unsafe fn multiply<V: Vector>(&self, r: usize) {
        // SAFETY: as this method's contract.
        unsafe {
            match self.products.operand {
                Operand::Queries(queries) => {
                    self.score::<V>(r, queries);
                    self.scale(r);
                }
                // Weights become those of codes where values are scaled.
                Operand::Context(context, stride) => {
                    self.scale(r);
                    for first in self.products.keys.clone().step_by(KEY_BLOCK) {
                        let keys = first..self.products.keys.end.min(first + KEY_BLOCK);
                        self.accumulate::<V>(r, keys, context, stride);
                    }
                }
            }
        }
    }

    /// Scores, as many keys at a time as fill a vector with their products.
    ///
    /// # Safety
    /// As [`multiply`](Self::multiply).
    #[inline(always)]
    unsafe fn score<V: Vector>(&self, r: usize, queries: *const f32) {
        let (d, lanes, together) = (self.rows.width, V::LANES, V::LANES / r);
        let (whole, start) = (d / lanes * lanes, self.rows.row(self.products.kv, self.products.keys.start));
        for first in (0..self.products.keys.len()).step_by(together) {
            // SAFETY: as this method's contract; the rows of keys have D elements.
            unsafe {
                let from = self.prefetched_keys::<V>(start, first, together);
                let mut sums = [V::splat(0.0); MAX_LANES];
                for at in (0..whole).step_by(lanes) {
                    self.add_keys(r, &mut sums, &from, at..at + lanes, queries);
                }
                if whole < d {
                    self.add_keys(r, &mut sums, &from, whole..d, queries);
                }
                V::sum_each(&sums).store(self.products.numbers.add(first * r));
            }
        }
    }

    /// The rows of `count` keys from the one with index `first` on, where `start` is the first key's. Past the end the
    /// last key is repeated; its scores are hidden later.
    ///
    /// # Safety
    /// The processor has the instruction set of V.
    #[inline(always)]
    unsafe fn prefetched_keys<V: Vector>(&self, start: *const S, first: usize, count: usize) -> [*const S; MAX_LANES] {
        let (stride, mut keys) = (self.rows.stride(), [start; MAX_LANES]);
        for (k, key) in keys[..count].iter_mut().enumerate() {
            let index = (first + k).min(self.products.keys.len() - 1);
            *key = key.wrapping_add(index.wrapping_mul(stride));
            // SAFETY: as this method's contract.
            unsafe { prefetch_row::<V, S>(*key, stride, self.rows.width) };
        }
        keys
    }

    /// Adds the products of R queries with as many keys as fill the sums, over a vector of D or what is left of it.
    ///
    /// # Safety
    /// As [`multiply`](Self::multiply); the keys have the elements.
    #[inline(always)]
    unsafe fn add_keys<V: Vector>(
        &self,
        r: usize,
        sums: &mut [V; MAX_LANES],
        keys: &[*const S; MAX_LANES],
        elements: Range<usize>,
        queries: *const f32,
    ) {
        let (at, filled) = (elements.start, elements.end - elements.start);
        let width = self.rows.width.next_multiple_of(V::LANES);
        for (k, sums) in sums[..V::LANES].chunks_exact_mut(r).enumerate() {
            // SAFETY: as this method's contract.
            unsafe {
                let key: V = load_first(keys[k].add(at), filled);
                for (r, sum) in sums.iter_mut().enumerate() {
                    *sum = key.mul_add(V::load(queries.add(r * width + at)), *sum);
                }
            }
        }
    }

    /// Multiplies the R numbers of each key by its scale, if it has one.
    ///
    /// # Safety
    /// As [`multiply`](Self::multiply).
    #[inline(always)]
    unsafe fn scale(&self, r: usize) {
        let (true, Some(scales)) = (S::IS_SCALED, self.rows.scales) else { return };
        let (first, stride) =
            (scales.at([self.products.kv.b, self.products.kv.head, self.products.keys.start]), scales.strides[2]);
        for key in 0..self.products.keys.len() {
            // SAFETY: as this method's contract; the view was checked for every key of the call.
            unsafe {
                let scale = *first.wrapping_add(key.wrapping_mul(stride));
                for row in 0..r {
                    *self.products.numbers.add(key * r + row) *= scale;
                }
            }
        }
    }

    /// Adds the weighted values of some keys to the contexts.
    ///
    /// # Safety
    /// As [`multiply`](Self::multiply), of keys that have weights.
    #[inline(always)]
    unsafe fn accumulate<V: Vector>(&self, r: usize, keys: Range<usize>, context: *mut f32, stride: usize) {
        let (most, mut d) = (V::ROWS * V::VECTORS, 0);
        // SAFETY: as this method's contract; `d` counts whole vectors within D_v, then the rest of it.
        unsafe {
            // Eight sums hide the latency of a multiply-add; registers for sixteen halve the loads of weights. No more
            // than the tile of a product has, which is four on the scalar instruction set.
            if r == 1 && 8 <= most {
                self.accumulate_columns::<V>(r, 8, &keys, context, stride, &mut d);
            }
            if (r <= 2 || V::LANES == MAX_LANES) && r <= 4 && 4 * r <= most {
                self.accumulate_columns::<V>(r, 4, &keys, context, stride, &mut d);
            }
            if 2 * r <= most {
                self.accumulate_columns::<V>(r, 2, &keys, context, stride, &mut d);
            }
            self.accumulate_columns::<V>(r, 1, &keys, context, stride, &mut d);
        }
    }
    /// N whole vectors of columns after the other from `d` on, as long as there are as many, or for N = 1 what is left.
    ///
    /// # Safety
    /// As [`accumulate`](Self::accumulate).
    #[inline(always)]
    unsafe fn accumulate_columns<V: Vector>(
        &self,
        r: usize,
        n: usize,
        keys: &Range<usize>,
        context: *mut f32,
        stride: usize,
        d: &mut usize,
    ) {
        let (Products { kv, keys: all, numbers, .. }, rows, lanes) = (&self.products, &self.rows, V::LANES);
        while *d < rows.width && (n == 1 || *d + n * lanes <= rows.width) {
            let mut from = rows.row(*kv, keys.start).wrapping_add(*d);
            let mut weights = numbers.wrapping_add((keys.start - all.start) * r).cast_const();
            // SAFETY: as this method's contract.
            unsafe {
                // Sums of a few keys each, and not one over all of them, which would round more.
                let (mut sums, mut values) = ([V::splat(0.0); MAX_SUMS], [V::splat(0.0); MAX_VECTORS]);
                let (sums, values) = (&mut sums[..r * n], &mut values[..n]);
                for _ in 0..keys.len() {
                    prefetch_row::<V, S>(from, rows.stride(), n * lanes);
                    if n == 1 {
                        values[0] = load_first(from, lanes.min(rows.width - *d));
                    } else {
                        for (n, value) in values.iter_mut().enumerate() {
                            *value = S::load(from.add(n * lanes));
                        }
                    }
                    add_products::<V>(sums, weights, 1, values);
                    (from, weights) = (from.wrapping_add(rows.stride()), weights.add(r));
                }
                for (row, sums) in sums.chunks_exact(n).enumerate() {
                    for (n, sum) in sums.iter().enumerate() {
                        let at = context.add(*d + row * stride + n * lanes);
                        sum.add(V::load(at)).store(at);
                    }
                }
            }
            *d += n * lanes;
        }
    }
}

/// [`RowProducts`] with values where these are not all finite: zero times NaN is NaN, so each row sums the keys that
/// it sees and no others.
pub(super) struct AccumulateSeen<'a, 'b, S> {
    pub inputs: &'a ScoreInputs<'b>,
    pub values: HeadRows<'a, S>,
    pub tile: &'a Tile,
    /// (keys, R).
    pub weights: *const f32,
    /// A row of D_v every `stride`.
    pub context: *mut f32,
    pub stride: usize,
}

impl<S: Stored> SimdTask for AccumulateSeen<'_, '_, S> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let Self { inputs, values, tile, .. } = self;
        let keys = &values.keys;
        let mut sums = vec![0f32; values.width.next_multiple_of(K::Vector::LANES)];
        for r in 0..tile.rows.len() {
            // The same sums of a few keys each as for finite values.
            for first in keys.clone().step_by(KEY_BLOCK) {
                sums.fill(0.0);
                // SAFETY: the processor has the instruction set of K; the keys have weights, and the context has the
                // row.
                unsafe {
                    for key in tile.seen_by(inputs, r, &(first..keys.end.min(first + KEY_BLOCK))) {
                        let weight = *self.weights.add((key - keys.start) * tile.width + r);
                        values.add::<K::Vector>(key, weight, &mut sums);
                    }
                    for (d, sum) in sums[..values.width].iter().enumerate() {
                        *self.context.add(r * self.stride + d) += sum;
                    }
                }
            }
        }
    }
}
