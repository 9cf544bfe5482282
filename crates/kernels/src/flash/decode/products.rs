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

/// The products of a group of R query rows of one key head, a power of two, with some of the keys of one part, or of
/// their weights with the values.
pub(super) struct RowProducts<'a, S> {
    /// Keys or values. Not behind a reference, from which loops would read it again after each store.
    pub rows: StoredRows<'a, S>,
    pub kv: KvHead,
    pub keys: Range<usize>,
    /// R.
    pub group: usize,
    /// (keys, R), rounded up to a vector: takes scores, or holds weights.
    pub numbers: *mut f32,
    pub operand: Operand,
}

/// What keys or values are multiplied with, or added to.
#[derive(Clone, Copy)]
pub(super) enum Operand {
    /// R rows of D, with zeros up to whole vectors.
    Queries(*const f32),
    /// R rows of D_v, up to whole vectors, and the words from one to the next.
    Context(*mut f32, usize),
}

impl<S: Stored> SimdTask for RowProducts<'_, S> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        // SAFETY: by the contract of `SimdTask`.
        unsafe {
            match self.group {
                1 => self.multiply::<K::Vector, 1>(),
                2 => self.multiply::<K::Vector, 2>(),
                8 if const { K::Vector::LANES == MAX_LANES } => self.multiply::<K::Vector, 8>(),
                _ => self.multiply::<K::Vector, 4>(),
            }
        }
    }
}

impl<S: Stored> RowProducts<'_, S> {
    /// # Safety
    /// The processor has the tier of V; the keys belong to the call; the pointers are valid for what they name.
    #[inline(always)]
    unsafe fn multiply<V: Vector, const R: usize>(&self) {
        // SAFETY: as this method's contract.
        unsafe {
            match self.operand {
                Operand::Queries(queries) => {
                    self.score::<V, R>(queries);
                    self.scale::<R>();
                }
                // Weights become those of codes where values are scaled.
                Operand::Context(context, stride) => {
                    self.scale::<R>();
                    for first in self.keys.clone().step_by(KEY_BLOCK) {
                        let keys = first..self.keys.end.min(first + KEY_BLOCK);
                        self.accumulate::<V, R>(keys, context, stride);
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
    unsafe fn score<V: Vector, const R: usize>(&self, queries: *const f32) {
        let (d, lanes, together) = (self.rows.width, V::LANES, V::LANES / R);
        let (whole, start) = (d / lanes * lanes, self.rows.row(self.kv, self.keys.start));
        for first in (0..self.keys.len()).step_by(together) {
            // SAFETY: as this method's contract; the rows of keys have D elements.
            unsafe {
                let from = self.prefetched_keys::<V>(start, first, together);
                let mut sums = [V::splat(0.0); MAX_LANES];
                for at in (0..whole).step_by(lanes) {
                    self.add_keys::<V, R>(&mut sums, &from, at..at + lanes, queries);
                }
                if whole < d {
                    self.add_keys::<V, R>(&mut sums, &from, whole..d, queries);
                }
                V::sum_each(&sums).store(self.numbers.add(first * R));
            }
        }
    }

    /// The rows of `count` keys from the one with index `first` on, where `start` is the first key's. Past the end the
    /// last key is repeated; its scores are hidden later.
    ///
    /// # Safety
    /// The processor has the tier of V.
    #[inline(always)]
    unsafe fn prefetched_keys<V: Vector>(&self, start: *const S, first: usize, count: usize) -> [*const S; MAX_LANES] {
        let stride = self.rows.stride();
        let mut keys = [start; MAX_LANES];
        for (k, key) in keys[..count].iter_mut().enumerate() {
            *key = key.wrapping_add((first + k).min(self.keys.len() - 1) * stride);
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
    unsafe fn add_keys<V: Vector, const R: usize>(
        &self,
        sums: &mut [V; MAX_LANES],
        keys: &[*const S; MAX_LANES],
        elements: Range<usize>,
        queries: *const f32,
    ) {
        let (at, filled) = (elements.start, elements.end - elements.start);
        let width = self.rows.width.next_multiple_of(V::LANES);
        for (k, sums) in sums[..V::LANES].chunks_exact_mut(R).enumerate() {
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
    unsafe fn scale<const R: usize>(&self) {
        let Some(scales) = self.rows.scales.filter(|_| S::IS_SCALED) else { return };
        let (first, stride) = (scales.at([self.kv.b, self.kv.head, self.keys.start]), scales.strides[2]);
        for key in 0..self.keys.len() {
            // SAFETY: as this method's contract; the view was checked for every key of the call.
            unsafe {
                let scale = *first.wrapping_add(key * stride);
                (0..R).for_each(|r| *self.numbers.add(key * R + r) *= scale);
            }
        }
    }

    /// Adds the weighted values of some keys to the contexts.
    ///
    /// # Safety
    /// As [`multiply`](Self::multiply), of keys that have weights.
    #[inline(always)]
    unsafe fn accumulate<V: Vector, const R: usize>(&self, keys: Range<usize>, context: *mut f32, stride: usize) {
        let (d_v, lanes, mut d) = (self.rows.width, V::LANES, 0);
        // SAFETY: as this method's contract; `d` counts whole vectors within D_v, then the rest of it.
        unsafe {
            // Eight sums hide the latency of a multiply-add; registers for sixteen halve the loads of weights. No more
            // than the tile of a product has, which is four on the scalar tier.
            while const { R == 1 && 8 <= V::ROWS * V::VECTORS } && d + 8 * lanes <= d_v {
                self.accumulate_columns::<V, R, 8>(&keys, context, stride, d);
                d += 8 * lanes;
            }
            while const { (R <= 2 || V::LANES == MAX_LANES) && R <= 4 && 4 * R <= V::ROWS * V::VECTORS }
                && d + 4 * lanes <= d_v
            {
                self.accumulate_columns::<V, R, 4>(&keys, context, stride, d);
                d += 4 * lanes;
            }
            while const { 2 * R <= V::ROWS * V::VECTORS } && d + 2 * lanes <= d_v {
                self.accumulate_columns::<V, R, 2>(&keys, context, stride, d);
                d += 2 * lanes;
            }
            while d < d_v {
                self.accumulate_columns::<V, R, 1>(&keys, context, stride, d);
                d += lanes;
            }
        }
    }

    /// # Safety
    /// As [`accumulate`](Self::accumulate); N whole vectors from `d` on, or for N = 1 what is left of D_v.
    #[inline(always)]
    unsafe fn accumulate_columns<V: Vector, const R: usize, const N: usize>(
        &self,
        keys: &Range<usize>,
        context: *mut f32,
        context_stride: usize,
        d: usize,
    ) {
        let (rows, lanes) = (&self.rows, V::LANES);
        let (mut from, stride) = (rows.row(self.kv, keys.start).wrapping_add(d), rows.stride());
        let mut weights = self.numbers.wrapping_add((keys.start - self.keys.start) * R).cast_const();
        // SAFETY: as this method's contract.
        unsafe {
            // Sums of a few keys each, and not one over all of them, which would round more.
            let mut sums = [[V::splat(0.0); N]; R];
            for _ in 0..keys.len() {
                prefetch_row::<V, S>(from, stride, N * lanes);
                let mut values = [V::splat(0.0); N];
                for (n, values) in values.iter_mut().enumerate() {
                    *values = match const { N == 1 } {
                        true => load_first(from, lanes.min(rows.width - d)),
                        false => S::load(from.add(n * lanes)),
                    };
                }
                add_products::<V, R, N>(&mut sums, weights, 1, &values);
                (from, weights) = (from.wrapping_add(stride), weights.add(R));
            }
            let mut to = context.add(d);
            for sums in sums.iter() {
                for (n, sum) in sums.iter().enumerate() {
                    let at = to.add(n * lanes);
                    sum.add(V::load(at)).store(at);
                }
                to = to.wrapping_add(context_stride);
            }
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
                // SAFETY: the processor has the tier of K; the keys have weights, and the context has the row.
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
