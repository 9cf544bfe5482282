//! The dropout factors of a tile's weights.

use std::ops::Range;

use super::dropout::{TileDropout, TileMask, philox, threshold};
use super::tile::Tile;
use crate::cpu::{MAX_LANES, Vector};
use candle_attention_call::AttentionDims;

/// The dropout factors of a tile's weights over some keys.
pub(super) struct DropoutFactors<'a> {
    pub dropout: TileDropout<'a>,
    pub dims: AttentionDims,
    pub tile: &'a Tile,
    pub keys: Range<usize>,
    /// Takes the factor of each weight, (keys, panel).
    pub to: *mut f32,
}

impl DropoutFactors<'_> {
    /// Writes the factors of the tile's weights.
    ///
    /// # Safety
    /// The processor has the instruction set of V; `to` is valid for writes of a factor for each score.
    #[inline(always)]
    pub unsafe fn write<V: Vector>(&self) {
        let &Self { dims, tile, .. } = self;
        for column in (0..tile.rows.len()).step_by(MAX_LANES) {
            let mut queries = [0u32; MAX_LANES];
            let mut heads = [0u32; MAX_LANES];
            // The index in (B, H, T_q, T_kv) of the weight of each row's first key.
            let mut first_weights = [0; MAX_LANES];
            for (lane, row) in (tile.rows.start + column..tile.rows.end).take(MAX_LANES).enumerate() {
                let row = dims.row(tile.kv, row);
                queries[lane] = row.query as u32;
                heads[lane] = row.head as u32;
                first_weights[lane] = dims.row_index(row) * dims.t_kv;
            }
            // A loop for each kind of mask: a branch within one would cost as much as some rounds of Philox.
            // SAFETY: as this method's contract.
            unsafe {
                match self.dropout.mask {
                    TileMask::Philox(seed) => self.write_columns::<V>(column, |group, lane| {
                        philox([group as u32, queries[lane], heads[lane], tile.kv.b as u32], seed)
                    }),
                    TileMask::KeptBits(bits) => self.write_columns::<V>(column, |group, lane| {
                        [0, 1, 2, 3].map(|n| {
                            let at = first_weights[lane] + 4 * group + n;
                            bits.get(at / 8).map_or(0, |byte| u32::from(byte >> (at % 8) & 1))
                        })
                    }),
                }
            }
        }
    }

    /// Writes a vector of columns. `words` returns the words of four neighbouring keys for a lane, given the number of
    /// the keys' group. Words below the threshold belong to weights that are dropped.
    ///
    /// # Safety
    /// As [`write`](Self::write).
    #[inline(always)]
    unsafe fn write_columns<V: Vector>(&self, column: usize, words: impl Fn(usize, usize) -> [u32; 4]) {
        // Copies, since references might lead to what is written.
        let keys = self.keys.clone();
        let to = self.to;
        let panel = self.tile.panel;
        let p = self.dropout.p;
        let factor = if p < 1.0 { (1.0 / (1.0 - p)) as f32 } else { 0.0 };
        let least_kept = if let TileMask::Philox(_) = self.dropout.mask { threshold(p) } else { 1 };
        for group in keys.start / 4..keys.end.div_ceil(4) {
            let mut group_words = [[0; MAX_LANES]; 4];
            for lane in 0..MAX_LANES {
                for (key_words, word) in group_words.iter_mut().zip(words(group, lane)) {
                    key_words[lane] = word;
                }
            }
            for (key, key_words) in (4 * group..).zip(&group_words).filter(|(key, _)| keys.contains(key)) {
                let to = to.wrapping_add((key - keys.start) * panel + column);
                // SAFETY: as this method's contract; the lanes written are columns of the panel.
                let write = |lane, word| unsafe { to.add(lane).write(if word >= least_kept { factor } else { 0.0 }) };
                // A number of lanes that is known is written as vectors.
                match panel - column {
                    lanes @ 0..MAX_LANES => (0..lanes).for_each(|lane| write(lane, key_words[lane])),
                    _ => (0..MAX_LANES).for_each(|lane| write(lane, key_words[lane])),
                }
            }
        }
    }
}
