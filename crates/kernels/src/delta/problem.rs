//! The description of one call, and its checks.

use std::ops::{Range, RangeInclusive};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::cpu::{Vector, WorkSize};
use crate::error::{Error, check_len};
use crate::number::Strided;

/// The largest logarithm of a factor that the kernels take. The kernels multiply the factors of up to 16 tokens before
/// they multiply a state with the product. The product of larger factors may overflow although the state, which may be
/// 0, does not. The largest product, e^40, is far from the largest f32, e^88.
const MAX_DECAY: f32 = 2.5;

/// The magnitudes of a scale that the kernels take with a norm, whose gradient divides by the square of the scale.
const SCALES_WITH_NORM: RangeInclusive<f32> = 1e-15..=1e15;

/// The dimensions of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaDims {
    /// B: entries of the batch.
    pub b: usize,
    /// T: tokens of an entry.
    pub t: usize,
    /// H: heads, each of which has its own state.
    pub h: usize,
    /// H_q: heads of queries, which divide H. Head h reads query head `h / (H / H_q)`.
    pub h_q: usize,
    /// H_k: heads of keys, which divide H.
    pub h_k: usize,
    /// H_v: heads of values, which divide H.
    pub h_v: usize,
    /// D_k: the width of queries and keys.
    pub d_k: usize,
    /// D_v: the width of values.
    pub d_v: usize,
}

/// The logarithms of the factors by which a token multiplies the state before its update, (B, H, T) entries: 0 keeps
/// the state, -inf clears it.
#[derive(Debug, Clone, Copy)]
pub enum DeltaDecay<'a> {
    /// One number, for the whole state of the head.
    Heads(Strided<'a, f32, 3>),
    /// Rows of D_k contiguous numbers, one for each row of the state.
    Channels(Strided<'a, f32, 3>),
}

/// A call of [`gated_delta_rule`](super::gated_delta_rule).
#[derive(Debug, Clone, Copy)]
pub struct DeltaProblem<'a, E> {
    /// The dimensions.
    pub dims: DeltaDims,
    /// (B, H_q, T) rows of D_k contiguous elements.
    pub q: Strided<'a, E, 3>,
    /// (B, H_k, T) rows of D_k.
    pub k: Strided<'a, E, 3>,
    /// (B, H_v, T) rows of D_v.
    pub v: Strided<'a, E, 3>,
    /// The decay of each token. Without it all factors are 1.
    pub decay: Option<DeltaDecay<'a>>,
    /// The factor on the difference between a token's value and the value that the state has for its key, which is
    /// added to the state, (B, H, T). Without it the value itself is added.
    pub beta: Option<Strided<'a, f32, 3>>,
    /// The states before the first tokens, (N, H, D_k, D_v); zeros if `None`.
    pub states: Option<&'a [f32]>,
    /// The N sequences: each is a range of the B·T tokens within one entry, and begins where the one before ends.
    pub sequences: &'a [Range<usize>],
    /// The factor on the queries.
    pub scale: f32,
    /// The epsilon of an L2 norm: each row of queries and keys is divided by `sqrt(sum of its squares + eps)`.
    pub qk_norm: Option<f32>,
}

/// A head of a sequence.
#[derive(Clone, Copy)]
pub(super) struct SequenceHead {
    pub sequence: usize,
    pub head: usize,
}

impl<E> DeltaProblem<'_, E> {
    /// Checks that slices, heads, sequences and numbers fit the dimensions and the kernels.
    pub(super) fn check(&self) -> Result<(), Error> {
        let DeltaDims { b, t, h, h_q, h_k, h_v, d_k, d_v } = self.dims;
        for (name, heads) in [("queries", h_q), ("keys", h_k), ("values", h_v)] {
            if heads == 0 && h > 0 || heads > 0 && !h.is_multiple_of(heads) {
                return Err(Error::Shape(format!("{name} have {heads} heads, expected a divisor of {h}")));
            }
        }
        self.q.check("q", [b, h_q, t], d_k)?;
        self.k.check("k", [b, h_k, t], d_k)?;
        self.v.check("v", [b, h_v, t], d_v)?;
        match self.decay {
            Some(DeltaDecay::Heads(decay)) => decay.check("decay", [b, h, t], 1)?,
            Some(DeltaDecay::Channels(decay)) => decay.check("decay", [b, h, t], d_k)?,
            None => (),
        }
        if let Some(beta) = self.beta {
            beta.check("beta", [b, h, t], 1)?;
        }
        let too_large = || Error::Memory(format!("{:?}", self.dims));
        let tokens = b.checked_mul(t).ok_or_else(too_large)?;
        // No partial product overflows either, even if another dimension is 0.
        let product = |counts: &[usize]| counts.iter().try_fold(1usize, |product, &n| product.checked_mul(n.max(1)));
        product(&[tokens, h, d_k.max(d_v)]).ok_or_else(too_large)?;
        product(&[self.sequences.len(), h, d_k, d_v]).ok_or_else(too_large)?;
        if let Some(states) = self.states {
            check_len("states", states.len(), self.heads() * self.state_len())?;
        }
        if self.qk_norm.is_some() && self.scale != 0.0 && !SCALES_WITH_NORM.contains(&self.scale.abs()) {
            let least = SCALES_WITH_NORM.start();
            let most = SCALES_WITH_NORM.end();
            return Err(Error::Range(format!(
                "scale is {:e}, expected 0 or a magnitude from {least:e} to {most:e} with qk_norm",
                self.scale
            )));
        }
        let mut end = 0;
        for range in self.sequences {
            let is_in_entry = || range.is_empty() || range.start / t == (range.end - 1) / t;
            if range.start != end || range.end < end || range.end > tokens || !is_in_entry() {
                return Err(Error::Shape(format!(
                    "sequence {range:?} follows token {end} of {b} entries of {t}, expected one after the other"
                )));
            }
            end = range.end;
        }
        check_len("the tokens of all sequences", end, tokens)
    }

    /// Returns the number of words of a head's state.
    pub(super) fn state_len(&self) -> usize {
        self.dims.d_k * self.dims.d_v
    }

    /// Returns the index of a head in (N, H).
    pub(super) fn head_index(&self, SequenceHead { sequence, head }: SequenceHead) -> usize {
        sequence * self.dims.h + head
    }

    /// Returns the number of heads of all sequences.
    pub(super) fn heads(&self) -> usize {
        self.sequences.len() * self.dims.h
    }

    /// Returns the head at an index in (N, H).
    pub(super) fn head(&self, index: usize) -> SequenceHead {
        SequenceHead { sequence: index / self.dims.h, head: index % self.dims.h }
    }

    /// Returns the number of blocks of `len` tokens before the blocks of each sequence, and last the number of all
    /// blocks.
    pub(super) fn blocks(&self, len: usize) -> Vec<usize> {
        let mut before = vec![0];
        for range in self.sequences {
            before.push(before[before.len() - 1] + range.len().div_ceil(len));
        }
        before
    }

    /// Returns the multiply-adds of the recurrence, and the bytes of the states.
    pub(super) fn work(&self) -> WorkSize {
        let tokens = self.dims.b * self.dims.t;
        let product = |counts: &[usize]| counts.iter().copied().fold(1usize, usize::saturating_mul);
        WorkSize {
            multiply_adds: product(&[3, tokens, self.dims.h, self.state_len()]),
            bytes: product(&[8, self.heads(), self.state_len()]),
        }
    }
}

/// The largest decay of a call that is above the bound of the kernels. Threads find it while they read the decays.
#[derive(Default)]
pub(super) struct ExcessDecay(AtomicU32);

impl ExcessDecay {
    /// Returns the decay if it is above the bound, and 0 otherwise.
    #[inline(always)]
    pub fn excess(decay: f32) -> f32 {
        if decay > MAX_DECAY { decay } else { 0.0 }
    }

    /// Returns [`excess`](Self::excess) of each lane.
    ///
    /// # Safety
    /// The processor has the instruction set of V.
    #[inline(always)]
    pub unsafe fn excess_of_lanes<V: Vector>(decays: V) -> V {
        // SAFETY: as this function's contract.
        unsafe { V::select(V::splat(MAX_DECAY).less_than(decays), decays, V::splat(0.0)) }
    }

    /// Records the largest excess that a thread found.
    pub fn record(&self, excess: f32) {
        // The bits of numbers of at least 0 are ordered as the numbers are.
        self.0.fetch_max(excess.to_bits(), Ordering::Relaxed);
    }

    /// Checks that no thread found a decay above the bound.
    pub fn check(&self) -> Result<(), Error> {
        let excess = f32::from_bits(self.0.load(Ordering::Relaxed));
        if excess > 0.0 {
            return Err(Error::Range(format!("decay is {excess}, expected at most {MAX_DECAY}")));
        }
        Ok(())
    }
}
