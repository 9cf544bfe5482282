//! Which weights are dropped: a function of where a weight stands, so that any tiling, and the backward pass, drops the
//! same ones.
//!
//! Philox 4×32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011; of seven rounds, which pass
//! BigCrush): the key is the seed, the counter is (key / 4, query, head, sequence), and its four words are of four
//! neighbouring keys.

use super::problem::Dims;
use super::scores::TileScores;
use crate::cpu::{MAX_LANES, Vector};
use crate::error::{Error, check_len};

/// Weights are dropped with a probability, and the others divided by what is left of 1.
#[derive(Debug, Clone, Copy)]
pub struct Dropout<'a> {
    /// Which ones.
    pub mask: DropoutMask<'a>,
    /// The probability, from 0 to 1.
    pub p: f64,
}

/// Which weights are dropped.
#[derive(Debug, Clone, Copy)]
pub enum DropoutMask<'a> {
    /// Those that Philox draws for this seed ([`philox_keeps`]).
    Philox(u64),
    /// Those whose bit is 0: a bit for each of (B, H, T_q, T_kv), the first of eight in the lowest bit of a byte.
    Kept(&'a [u8]),
}

/// Whether Philox keeps the weight of a sequence, head, query and key where weights are dropped with probability `p`.
pub fn philox_keeps(seed: u64, p: f64, [b, head, query, key]: [usize; 4]) -> bool {
    let counter = [key / 4, query, head, b].map(|n| n as u32);
    p < 1.0 && philox(counter, seed)[key % 4] >= threshold(p)
}

/// Words below this are of weights that are dropped, where some are kept.
fn threshold(p: f64) -> u32 {
    (p * 2f64.powi(32)).round() as u32
}

impl Dropout<'_> {
    pub(super) fn check(&self, dims: &Dims) -> Result<(), Error> {
        let DropoutMask::Kept(bits) = self.mask else { return Ok(()) };
        let dims = [dims.b, dims.h, dims.t_q, dims.t_kv];
        let count = dims.iter().try_fold(1usize, |count, &dim| count.checked_mul(dim));
        let count = count.ok_or_else(|| Error::Memory(format!("a dropout mask of {dims:?}")))?;
        check_len("dropout bits", bits.len(), count.div_ceil(8))
    }

    /// Writes what the weights of a tile are to be multiplied by.
    ///
    /// # Safety
    /// The processor has the instruction set of V; the tile has room for a factor for each score.
    #[inline(always)]
    pub(super) unsafe fn factors<V: Vector>(&self, scores: &TileScores) {
        let (dims, tile) = (scores.inputs.dims, scores.tile);
        for column in (0..tile.rows.len()).step_by(MAX_LANES) {
            let (mut queries, mut heads) = ([0u32; MAX_LANES], [0u32; MAX_LANES]);
            // The first weight of each row among all.
            let mut first = [0; MAX_LANES];
            for (lane, row) in (tile.rows.start + column..tile.rows.end).take(MAX_LANES).enumerate() {
                let row = dims.row(tile.kv, row);
                (queries[lane], heads[lane]) = (row.query as u32, row.head as u32);
                first[lane] = dims.row_index(row) * dims.t_kv;
            }
            // A loop for each kind of mask: a branch within one would cost as much as some rounds of Philox.
            // SAFETY: as this method's contract.
            unsafe {
                match self.mask {
                    DropoutMask::Philox(seed) => self.write::<V>(scores, column, |group, lane| {
                        philox([group as u32, queries[lane], heads[lane], tile.kv.b as u32], seed)
                    }),
                    DropoutMask::Kept(bits) => self.write::<V>(scores, column, |group, lane| {
                        [0, 1, 2, 3].map(|n| {
                            let at = first[lane] + 4 * group + n;
                            bits.get(at / 8).map_or(0, |byte| u32::from(byte >> (at % 8) & 1))
                        })
                    }),
                }
            }
        }
    }

    /// Writes a vector of columns from the words of each group of four keys and each lane: those below the threshold
    /// are of weights that are dropped.
    ///
    /// # Safety
    /// As [`factors`](Self::factors).
    #[inline(always)]
    unsafe fn write<V: Vector>(&self, scores: &TileScores, column: usize, words: impl Fn(usize, usize) -> [u32; 4]) {
        // Copies, since what is written might be what references lead to.
        let (keys, to, panel) = (scores.keys.clone(), scores.dropout, scores.tile.panel);
        let factor = if self.p < 1.0 { (1.0 / (1.0 - self.p)) as f32 } else { 0.0 };
        let threshold = if let DropoutMask::Philox(_) = self.mask { threshold(self.p) } else { 1 };
        for group in keys.start / 4..keys.end.div_ceil(4) {
            let mut of_keys = [[0; MAX_LANES]; 4];
            for lane in 0..MAX_LANES {
                for (words, word) in of_keys.iter_mut().zip(words(group, lane)) {
                    words[lane] = word;
                }
            }
            for (key, words) in (4 * group..).zip(&of_keys).filter(|(key, _)| keys.contains(key)) {
                let to = to.wrapping_add((key - keys.start) * panel + column);
                // SAFETY: as this method's contract; the lanes written are columns of the panel.
                let write = |lane, word| unsafe { to.add(lane).write(if word >= threshold { factor } else { 0.0 }) };
                // A number of lanes that is known is written as vectors.
                match panel - column {
                    lanes @ 0..MAX_LANES => (0..lanes).for_each(|lane| write(lane, words[lane])),
                    _ => (0..MAX_LANES).for_each(|lane| write(lane, words[lane])),
                }
            }
        }
    }
}

/// The four words of a counter. Without a branch, so that the compiler turns loops over lanes into vectors.
#[inline(always)]
fn philox(counter: [u32; 4], seed: u64) -> [u32; 4] {
    const MULTIPLIERS: [u64; 2] = [0xd251_1f53, 0xcd9e_8d57];
    const KEY_STEPS: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];
    let mut key = [seed as u32, (seed >> 32) as u32];
    // In the low halves of 64 bits, where a product is one instruction; the high halves are anything.
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

    /// The known answers of Random123 1.14 (`kat_vectors`).
    #[test]
    fn words_are_those_of_the_authors() {
        assert_eq!(philox([0; 4], 0), [0x5f6f_b709, 0x0d89_3f64, 0x4f12_1f81, 0x4f73_0a48]);
        assert_eq!(philox([u32::MAX; 4], u64::MAX), [0x5207_ddc2, 0x4516_5e59, 0x4d8e_e751, 0x8c52_f662]);
        let digits_of_pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        let expected = [0x4dfc_caba, 0x190a_87f0, 0xc473_62ba, 0xb6b5_242a];
        assert_eq!(philox(digits_of_pi, 0x299f_31d0_a409_3822), expected);
    }
}
