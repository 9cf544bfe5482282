//! Dropout of weights: which weights are dropped depends on their index alone, so that any tiling, and the backward
//! pass, drops the same ones.
//!
//! Philox 4×32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011; with seven rounds, which pass
//! BigCrush): the key is the seed, the counter is (key / 4, query, head, sequence), and its four words belong to four
//! neighbouring keys.

use super::view::View;
use crate::error::{Error, check_len};
use candle_attention_call::{AttentionDims, Dropout, DropoutMask};

/// Dropout of the weights of a checked call.
#[derive(Debug, Clone, Copy)]
pub(super) struct TileDropout<'a> {
    pub mask: TileMask<'a>,
    /// The probability with which a weight is dropped, from 0 to 1.
    pub p: f64,
}

/// A choice of the weights that are dropped.
#[derive(Debug, Clone, Copy)]
pub(super) enum TileMask<'a> {
    /// The weights that Philox draws for this seed ([`philox_keeps`]).
    Philox(u64),
    /// The weights whose bit is 0, by [`DropoutMask::KeptBits`].
    KeptBits(&'a [u8]),
}

/// The index of a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WeightIndex {
    /// The sequence, below B.
    pub b: usize,
    /// The query head, below H.
    pub head: usize,
    /// The query, below T_q.
    pub query: usize,
    /// The key, below T_kv.
    pub key: usize,
}

/// Returns whether Philox keeps a weight where weights are dropped with probability `p`.
pub fn philox_keeps(seed: u64, p: f64, index: WeightIndex) -> bool {
    let counter = [index.key / 4, index.query, index.head, index.b].map(|n| n as u32);
    p < 1.0 && philox(counter, seed)[index.key % 4] >= threshold(p)
}

/// Returns the least word that belongs to a kept weight.
pub(super) fn threshold(p: f64) -> u32 {
    (p * 2f64.powi(32)).round() as u32
}

impl<'a> TileDropout<'a> {
    /// Returns the dropout of a call, after checking that a mask has a bit for each weight.
    pub fn new(dropout: &Dropout<View<'a>>, dims: &AttentionDims) -> Result<Self, Error> {
        let Dropout { p, mask } = *dropout;
        let bits = match &mask {
            DropoutMask::Philox(seed) => return Ok(Self { mask: TileMask::Philox(*seed), p }),
            DropoutMask::PhiloxOnDevice(_) => {
                return Err(Error::Shape("expected a seed of dropout as a number, found a tensor".into()));
            }
            DropoutMask::KeptBits(bits) => bits.typed_list("dropout bits")?,
        };
        let shape = [dims.b, dims.h, dims.t_q, dims.t_kv];
        let count = shape.iter().try_fold(1usize, |count, &dim| count.checked_mul(dim));
        let count = count.ok_or_else(|| Error::Memory(format!("a dropout mask of {shape:?}")))?;
        check_len("dropout bits", bits.len(), count.div_ceil(8))?;
        Ok(Self { mask: TileMask::KeptBits(bits), p })
    }
}

/// Returns the four words of a counter. Without a branch, so that the compiler turns loops over lanes into vectors.
#[inline(always)]
pub(super) fn philox(counter: [u32; 4], seed: u64) -> [u32; 4] {
    const MULTIPLIERS: [u64; 2] = [0xd251_1f53, 0xcd9e_8d57];
    const KEY_STEPS: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];
    let mut key = [seed as u32, (seed >> 32) as u32];
    // In the low halves of 64 bits, where a product is one instruction; the high halves are not used.
    let mut state = counter.map(u64::from);
    for _ in 0..7 {
        let [first, second] = [0, 1].map(|n| (state[2 * n] & 0xffff_ffff) * MULTIPLIERS[n]);
        let high = [second >> 32 ^ state[1] ^ u64::from(key[0]), first >> 32 ^ state[3] ^ u64::from(key[1])];
        state = [high[0], second, high[1], first];
        key = [key[0].wrapping_add(KEY_STEPS[0]), key[1].wrapping_add(KEY_STEPS[1])];
    }
    state.map(|word| word as u32)
}

#[cfg(test)]
mod tests {
    use super::philox;

    /// Compares with the known answers of Random123 1.14 (`kat_vectors`).
    #[test]
    fn dropout_philox_words_match_known_answers() {
        assert_eq!(philox([0; 4], 0), [0x5f6f_b709, 0x0d89_3f64, 0x4f12_1f81, 0x4f73_0a48]);
        assert_eq!(philox([u32::MAX; 4], u64::MAX), [0x5207_ddc2, 0x4516_5e59, 0x4d8e_e751, 0x8c52_f662]);
        let digits_of_pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        let expected = [0x4dfc_caba, 0x190a_87f0, 0xc473_62ba, 0xb6b5_242a];
        assert_eq!(philox(digits_of_pi, 0x299f_31d0_a409_3822), expected);
    }
}
