//! The rows of some tokens of a head, in f32.

use std::ops::Range;

use super::problem::{DeltaDecay, DeltaDims, DeltaProblem, ExcessDecay};
use crate::cpu::{Kernel, MAX_LANES, Scratch, SimdTask, Vector, prefetch_bytes};
use crate::number::{Number, Strided, load_first, widen_row};

/// The number of tokens whose rows are read together. The forward pass saves the states before the first token of each
/// block for the backward pass.
pub(super) const BLOCK: usize = 64;

/// Rows of some tokens of a head. The rows of queries, keys and factors have `width` words: D_k, and zeros up to a
/// whole vector. A missing token has zeros for its key and query, factors of 1, and a beta of 0, so that it changes
/// nothing.
pub(super) struct DeltaTokenRows {
    tokens: usize,
    pub width: usize,
    /// The number of words of a row of values: D_v, and zeros up to a whole panel.
    pub value_width: usize,
    pub q: Scratch,
    pub k: Scratch,
    /// The factors of the state before each token.
    pub factors: Scratch,
    pub values: Scratch,
    pub beta: [f32; BLOCK],
    /// The factors on the row of each query and of each key: the norm and the scale.
    pub scales: [RowScales; BLOCK],
    /// The largest decays above the bound of the kernels among all that were read so far, 0 if there was none.
    excess_decays: [f32; MAX_LANES],
}

/// The factors on the row of a query and of a key.
#[derive(Clone, Copy)]
pub(super) struct RowScales {
    pub q: f32,
    pub k: f32,
}

impl DeltaTokenRows {
    /// Allocates rows for a number of tokens, at most [`BLOCK`].
    pub fn new(tokens: usize, width: usize, value_width: usize) -> Self {
        let rows = |words| Scratch::zeros(tokens * words);
        Self {
            tokens,
            width,
            value_width,
            q: rows(width),
            k: rows(width),
            factors: rows(width),
            values: rows(value_width),
            beta: [0.0; BLOCK],
            scales: [RowScales { q: 1.0, k: 1.0 }; BLOCK],
            excess_decays: [0.0; MAX_LANES],
        }
    }

    /// Returns the largest decay above the bound of the kernels among all that were read so far, and 0 without one.
    pub fn excess_decay(&self) -> f32 {
        self.excess_decays.iter().copied().fold(0.0, f32::max)
    }
}

/// The address, the distance and the length in bytes of rows of any element type.
#[derive(Clone, Copy)]
struct RowAddresses {
    first: *mut u8,
    stride: usize,
    len: usize,
}

impl RowAddresses {
    fn new<E>(rows: &Strided<E, 3>, index: [usize; 3], width: usize) -> Self {
        Self {
            first: rows.at(index).cast_mut().cast(),
            stride: rows.strides[2] * size_of::<E>(),
            len: width * size_of::<E>(),
        }
    }

    /// Returns addresses of rows of the same length, one after the other.
    fn contiguous(self, first: *mut u8) -> Self {
        Self { first, stride: self.len, ..self }
    }

    fn row(&self, token: usize) -> *mut u8 {
        self.first.wrapping_add(token * self.stride)
    }
}

/// The addresses of the rows of a head's tokens.
#[derive(Clone, Copy)]
pub(super) struct TokenAddresses {
    q: RowAddresses,
    k: RowAddresses,
    /// Values, or the gradients of outputs.
    values: RowAddresses,
}

impl TokenAddresses {
    /// Returns the addresses from a token on. `values` has `value_heads` heads.
    pub fn new<E>(
        problem: &DeltaProblem<E>,
        values: &Strided<E, 3>,
        value_heads: usize,
        head: usize,
        token: usize,
    ) -> Self {
        let DeltaDims { t, h, h_q, h_k, d_k, d_v, .. } = problem.dims;
        let index = |heads: usize| [token / t, head * heads / h, token % t];
        Self {
            q: RowAddresses::new(&problem.q, index(h_q), d_k),
            k: RowAddresses::new(&problem.k, index(h_k), d_k),
            values: RowAddresses::new(values, index(value_heads), d_v),
        }
    }

    /// Returns the addresses of rows of the same lengths in a scratch buffer for one block.
    pub fn in_scratch(self, scratch: *mut u8) -> Self {
        let keys = scratch.wrapping_add(BLOCK * self.q.len);
        let values = keys.wrapping_add(BLOCK * self.k.len);
        Self { q: self.q.contiguous(scratch), k: self.k.contiguous(keys), values: self.values.contiguous(values) }
    }
}

/// A copy of the rows of the next block to a scratch buffer, while one block is computed. In memory the rows are apart,
/// often by a power of two: the processor's own prefetching does not follow, and a whole block does not fit the few
/// sets of its caches.
pub(super) struct NextBlock {
    pub from: TokenAddresses,
    pub to: TokenAddresses,
    pub tokens: usize,
}

impl NextBlock {
    /// Copies the rows of some tokens, and prefetches the rows of the same number of tokens after them.
    ///
    /// # Safety
    /// The processor has the instruction set of V; the rows of all tokens exist at both addresses.
    #[inline(always)]
    pub unsafe fn copy<V: Vector>(&self, tokens: Range<usize>) {
        let TokenAddresses { q, k, values } = self.from;
        for (from, to) in [(q, self.to.q), (k, self.to.k), (values, self.to.values)] {
            for token in tokens.start..tokens.end.min(self.tokens) {
                let further = from.row(token + tokens.len());
                // SAFETY: as this method's contract; an address to prefetch need not be valid.
                unsafe {
                    prefetch_bytes::<V>(further, from.len);
                    to.row(token).copy_from_nonoverlapping(from.row(token), from.len);
                }
            }
        }
    }
}

/// Reads the rows of a range of tokens, at most [`BLOCK`].
pub(super) struct ReadTokens<'a, 'b, E> {
    pub problem: &'a DeltaProblem<'b, E>,
    pub head: usize,
    pub tokens: Range<usize>,
    /// The addresses of the rows of the first token and all after it.
    pub from: TokenAddresses,
    pub rows: &'a mut DeltaTokenRows,
}

impl<E: Number> SimdTask for ReadTokens<'_, '_, E> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let DeltaProblem { dims: DeltaDims { t, d_k, d_v, .. }, scale, qk_norm, .. } = *self.problem;
        let head = self.head;
        let rows = self.rows;
        let width = rows.width;
        let value_width = rows.value_width;
        let q_rows = rows.q.as_mut_ptr();
        let k_rows = rows.k.as_mut_ptr();
        let value_rows = rows.values.as_mut_ptr();
        for (i, token) in self.tokens.clone().enumerate() {
            let entry = token / t;
            let position = token % t;
            // SAFETY: the processor has the instruction set of K; the problem was checked, and a block has this many
            // rows.
            unsafe {
                let q_row = q_rows.add(i * width);
                let k_row = k_rows.add(i * width);
                let value_row = value_rows.add(i * value_width);
                widen_row::<E, K::Vector>(self.from.q.row(i).cast(), d_k, q_row, width, 1.0);
                widen_row::<E, K::Vector>(self.from.k.row(i).cast(), d_k, k_row, width, 1.0);
                widen_row::<E, K::Vector>(self.from.values.row(i).cast(), d_v, value_row, value_width, 1.0);
                let scales = RowScales {
                    q: row_scale::<K::Vector>(q_row, width, scale, qk_norm),
                    k: row_scale::<K::Vector>(k_row, width, 1.0, qk_norm),
                };
                widen_row::<f32, K::Vector>(q_row, width, q_row, width, scales.q);
                widen_row::<f32, K::Vector>(k_row, width, k_row, width, scales.k);
                rows.scales[i] = scales;
                let factors = rows.factors.as_mut_ptr().add(i * width);
                let excess = &mut rows.excess_decays;
                read_factors::<K::Vector>(self.problem.decay, [entry, head, position], factors, d_k, width, excess);
                rows.beta[i] = self.problem.beta.map_or(1.0, |beta| *beta.at([entry, head, position]));
            }
        }
        let missing = self.tokens.len()..rows.tokens;
        let words = missing.start * width..missing.end * width;
        rows.q.words_mut()[words.clone()].fill(0.0);
        rows.k.words_mut()[words.clone()].fill(0.0);
        rows.factors.words_mut()[words].fill(1.0);
        rows.values.words_mut()[missing.start * value_width..missing.end * value_width].fill(0.0);
        rows.beta[missing].fill(0.0);
    }
}

/// Returns the factor on a row: `scale`, divided by the length of the row if there is a norm.
///
/// # Safety
/// The processor has the instruction set of V, and the row is valid for `width` words, whole vectors.
#[inline(always)]
unsafe fn row_scale<V: Vector>(row: *const f32, width: usize, scale: f32, qk_norm: Option<f32>) -> f32 {
    match qk_norm {
        // SAFETY: as this function's contract.
        Some(eps) => scale / (unsafe { dot::<V>(row, row, width) } + eps).sqrt(),
        None => scale,
    }
}

/// Writes the factors of a token, and raises `excess` to its decays above the bound of the kernels.
///
/// # Safety
/// The processor has the instruction set of V, the problem was checked, and `to` is valid for `width` words, whole
/// vectors.
#[inline(always)]
unsafe fn read_factors<V: Vector>(
    decay: Option<DeltaDecay>,
    index: [usize; 3],
    to: *mut f32,
    d_k: usize,
    width: usize,
    excess: &mut [f32; MAX_LANES],
) {
    // SAFETY: as this function's contract.
    unsafe {
        let channels = match decay {
            Some(DeltaDecay::Channels(decay)) => Some(decay.at(index)),
            Some(DeltaDecay::Heads(_)) | None => None,
        };
        let factor = match decay {
            Some(DeltaDecay::Heads(decay)) => {
                let logarithm = *decay.at(index);
                excess[0] = excess[0].max(ExcessDecay::excess(logarithm));
                logarithm.exp()
            }
            Some(DeltaDecay::Channels(_)) | None => 1.0,
        };
        let mut largest = V::load(excess.as_ptr());
        for at in (0..width).step_by(V::LANES) {
            let factors = match channels {
                Some(channels) => {
                    let logarithms: V = load_first(channels.add(at), V::LANES.min(d_k - at));
                    largest = largest.max(ExcessDecay::excess_of_lanes(logarithms));
                    logarithms.mul(V::splat(std::f32::consts::LOG2_E)).exp2()
                }
                None => V::splat(factor),
            };
            factors.store(to.add(at));
        }
        largest.store(excess.as_mut_ptr());
    }
}

/// Returns the sum of the products of two rows of whole vectors.
///
/// # Safety
/// The processor has the instruction set of V, and the rows are valid for `width` words.
#[inline(always)]
pub(super) unsafe fn dot<V: Vector>(a: *const f32, b: *const f32, width: usize) -> f32 {
    // SAFETY: as this function's contract.
    unsafe {
        let mut sums = V::splat(0.0);
        for at in (0..width).step_by(V::LANES) {
            sums = V::load(a.add(at)).mul_add(V::load(b.add(at)), sums);
        }
        sums.sum()
    }
}
