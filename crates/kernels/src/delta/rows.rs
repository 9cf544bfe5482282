//! The rows of some tokens of a head, in f32.

use std::ops::Range;

use super::problem::{Decay, Dims, ExcessDecay, Problem};
use crate::cpu::{Kernel, MAX_LANES, Scratch, SimdTask, Vector, prefetch_bytes};
use crate::number::{Number, Strided, load_first, widen_row};

/// The tokens whose rows are read at once. What the backward pass needs of the states is kept for the first of each
/// block.
pub(super) const BLOCK: usize = 64;

/// Rows of some tokens. Those of queries, keys and factors have `width` words, D_k and zeros up to a whole
/// vector; a token that is missing has zeros for its key and query, factors of 1, and a beta of 0, so that it changes
/// nothing.
pub(super) struct Rows {
    tokens: usize,
    pub width: usize,
    /// Of a row of values: D_v, and zeros up to a whole panel.
    pub value_width: usize,
    pub q: Scratch,
    pub k: Scratch,
    /// What the state is multiplied with before each token.
    pub factors: Scratch,
    pub values: Scratch,
    pub beta: [f32; BLOCK],
    /// What the row of each query and of each key was multiplied with.
    pub scales: [[f32; 2]; BLOCK],
    /// The largest decays above the bound of the kernels among all that were read so far, 0 where there was none.
    excess_decays: [f32; MAX_LANES],
}

impl Rows {
    /// For as many tokens, at most [`BLOCK`].
    pub fn new(tokens: usize, width: usize, value_width: usize) -> Self {
        let rows = |width| Scratch::zeros(tokens * width);
        Self {
            tokens,
            width,
            value_width,
            q: rows(width),
            k: rows(width),
            factors: rows(width),
            values: rows(value_width),
            beta: [0.0; BLOCK],
            scales: [[1.0; 2]; BLOCK],
            excess_decays: [0.0; MAX_LANES],
        }
    }

    /// Returns the largest decay above the bound of the kernels among all that were read so far, and 0 without one.
    pub fn excess_decay(&self) -> f32 {
        self.excess_decays.iter().copied().fold(0.0, f32::max)
    }
}

/// Where the rows of a head's tokens are: queries, keys, and values or the gradients of contexts. Bytes, so that what
/// moves them need not know their elements.
#[derive(Clone, Copy)]
pub(super) struct StoredRows {
    at: [*mut u8; 3],
    strides: [usize; 3],
    widths: [usize; 3],
}

impl StoredRows {
    /// From a token on, with values and the number of their heads.
    pub fn new<E>(problem: &Problem<E>, values: (&Strided<E, 3>, usize), head: usize, token: usize) -> Self {
        let Dims { t, h, h_q, h_k, d_k, d_v, .. } = problem.dims;
        let of = [(&problem.q, h_q), (&problem.k, h_k), values];
        Self {
            at: of.map(|(rows, heads)| rows.at([token / t, head * heads / h, token % t]).cast_mut().cast()),
            strides: of.map(|(rows, _)| rows.strides[2] * size_of::<E>()),
            widths: [d_k, d_k, d_v].map(|width| width * size_of::<E>()),
        }
    }

    /// Of the same widths, one block after the other in other memory.
    pub fn beside(self, to: *mut u8) -> Self {
        let [q, k, _] = self.widths;
        let at = [0, BLOCK * q, BLOCK * (q + k)].map(|bytes| to.wrapping_add(bytes));
        Self { at, strides: self.widths, ..self }
    }

    fn row(&self, of: usize, token: usize) -> *mut u8 {
        self.at[of].wrapping_add(token * self.strides[of])
    }
}

/// The rows of the next block, which are copied while one is computed. In memory they lie apart, often by a power of
/// two: the processor's own prefetching does not follow, and a whole block does not fit the few sets of its caches.
pub(super) struct Ahead {
    pub from: StoredRows,
    pub to: StoredRows,
    pub tokens: usize,
}

impl Ahead {
    /// Copies the rows of some tokens, and prefetches those of as many after them.
    ///
    /// # Safety
    /// The processor has the instruction set of V; the rows of all tokens exist in both places.
    #[inline(always)]
    pub unsafe fn copy<V: Vector>(&self, tokens: Range<usize>) {
        for (of, &width) in self.from.widths.iter().enumerate() {
            for token in tokens.start..tokens.end.min(self.tokens) {
                let further = self.from.row(of, token + tokens.len());
                // SAFETY: as this method's contract; an address to prefetch need not be valid.
                unsafe {
                    prefetch_bytes::<V>(further, width);
                    self.to.row(of, token).copy_from_nonoverlapping(self.from.row(of, token), width);
                }
            }
        }
    }
}

/// Reads the rows of a range of tokens, at most [`BLOCK`].
pub(super) struct ReadRows<'a, 'b, E> {
    pub problem: &'a Problem<'b, E>,
    pub head: usize,
    pub tokens: Range<usize>,
    /// Those of the first token and all after it.
    pub from: StoredRows,
    pub rows: &'a mut Rows,
}

impl<E: Number> SimdTask for ReadRows<'_, '_, E> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let Problem { dims: Dims { t, d_k, d_v, .. }, scale, qk_norm, .. } = *self.problem;
        let (head, rows) = (self.head, self.rows);
        let (width, value_width) = (rows.width, rows.value_width);
        let [q_rows, k_rows] = [&mut rows.q, &mut rows.k].map(Scratch::as_mut_ptr);
        let value_rows = rows.values.as_mut_ptr();
        for (i, token) in self.tokens.clone().enumerate() {
            let [b, at] = [token / t, token % t];
            // SAFETY: the processor has the instruction set of K; the problem was checked, and a block has this many
            // rows.
            unsafe {
                let (q_row, k_row) = (q_rows.add(i * width), k_rows.add(i * width));
                let to =
                    [(q_row, d_k, width), (k_row, d_k, width), (value_rows.add(i * value_width), d_v, value_width)];
                for (of, (to, own, padded)) in to.into_iter().enumerate() {
                    widen_row::<E, K::Vector>(self.from.row(of, i).cast(), own, to, padded, 1.0);
                }
                for (scaled, (row, mut scale)) in rows.scales[i].iter_mut().zip([(q_row, scale), (k_row, 1.0)]) {
                    if let Some(eps) = qk_norm {
                        scale /= (dot::<K::Vector>(row, row, width) + eps).sqrt();
                    }
                    widen_row::<f32, K::Vector>(row, width, row, width, scale);
                    *scaled = scale;
                }
                let factors = rows.factors.as_mut_ptr().add(i * width);
                let excess = &mut rows.excess_decays;
                read_factors::<K::Vector>(self.problem.decay, [b, head, at], factors, [d_k, width], excess);
                rows.beta[i] = self.problem.beta.map_or(1.0, |beta| *beta.at([b, head, at]));
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

/// Writes the factors of a token, and raises `excess` to its decays above the bound of the kernels.
///
/// # Safety
/// The processor has the instruction set of V, the problem was checked, and `to` is valid for `width` words, whole
/// vectors.
#[inline(always)]
unsafe fn read_factors<V: Vector>(
    decay: Option<Decay>,
    index: [usize; 3],
    to: *mut f32,
    [d_k, width]: [usize; 2],
    excess: &mut [f32; MAX_LANES],
) {
    // SAFETY: as this function's contract.
    unsafe {
        let channels = match decay {
            Some(Decay::Channels(decay)) => Some(decay.at(index)),
            _ => None,
        };
        let factor = match decay {
            Some(Decay::Heads(decay)) => {
                let logarithm = *decay.at(index);
                excess[0] = excess[0].max(ExcessDecay::of(logarithm));
                logarithm.exp()
            }
            _ => 1.0,
        };
        let mut largest = V::load(excess.as_ptr());
        for at in (0..width).step_by(V::LANES) {
            let factors = match channels {
                Some(channels) => {
                    let logarithms: V = load_first(channels.add(at), V::LANES.min(d_k - at));
                    largest = largest.max(ExcessDecay::of_each(logarithms));
                    logarithms.mul(V::splat(std::f32::consts::LOG2_E)).exp2()
                }
                None => V::splat(factor),
            };
            factors.store(to.add(at));
        }
        largest.store(excess.as_mut_ptr());
    }
}

/// The sum of the products of two rows of whole vectors.
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
