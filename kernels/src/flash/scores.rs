//! What happens to the scores of a tile between the product and the softmax: softcap, ALiBi, bias, hidden keys.

use super::pack::Block;
use super::params::{Problem, Row, Strided, Units};
use super::tile::Tile;
use crate::cpu::{Element, Kernel, MOST_COLUMNS, Vector, tanh};

/// The scores of one tile over part of a block: (keys, panel), the first of them for key `first`.
pub(super) struct TileScores {
    pub scores: *mut f32,
    /// Room for `LANES` rows of a block.
    pub staging: *mut f32,
    pub first: usize,
    pub keys: usize,
}

/// Replaces every score by an expression of itself, its key (counted from the first) and its column. A closure would not
/// be compiled for the tier.
macro_rules! for_each {
    ($this:expr, $tile:expr, $K:ident, |$score:ident, $key:ident, $column:ident| $value:expr) => {
        for_each!($this, $tile, $K, 0..$this.keys, |$score, $key, $column| $value)
    };
    ($this:expr, $tile:expr, $K:ident, $keys:expr, |$score:ident, $key:ident, $column:ident| $value:expr) => {
        for $key in $keys {
            for vector in 0..$tile.vectors {
                let $column = vector * $K::Vector::LANES;
                let at = $this.scores.add($key * $K::PANEL + $column);
                let $score = $K::Vector::load(at);
                $value.store(at);
            }
        }
    };
}

/// How a score meets its entry of a tensor.
trait Join {
    /// # Safety
    /// As [`Vector`].
    unsafe fn join<V: Vector>(score: V, entry: V) -> V;
}

struct AddBias;

impl Join for AddBias {
    #[inline(always)]
    unsafe fn join<V: Vector>(score: V, bias: V) -> V {
        // SAFETY: the caller's promise.
        unsafe { score.add(bias) }
    }
}

struct Keep;

impl Join for Keep {
    #[inline(always)]
    unsafe fn join<V: Vector>(score: V, keep: V) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::select(keep.less_than(V::splat(0.5)), V::splat(f32::NEG_INFINITY), score) }
    }
}

impl TileScores {
    /// Softcap, ALiBi and bias, in natural units.
    ///
    /// # Safety
    /// As [`Vector`]; the tile's queries and the keys belong to the problem.
    #[inline(always)]
    pub unsafe fn change<K: Kernel, E: Element>(&self, problem: &Problem<E>, tile: &Tile, block: &Block, units: Units) {
        let options = &problem.scores;
        // SAFETY: the caller's promise.
        unsafe {
            let product = K::Vector::splat(units.product);
            if let Some(softcap) = options.softcap {
                let (cap, shrink) = (K::Vector::splat(softcap), K::Vector::splat(units.product / softcap));
                for_each!(self, tile, K, |score, _key, _column| tanh(score.mul(shrink)).mul(cap));
            } else if units.product != 1.0 {
                for_each!(self, tile, K, |score, _key, _column| score.mul(product));
            }
            if let Some(alibi) = options.alibi {
                let (mut slopes, mut positions) = ([0f32; MOST_COLUMNS], [0f32; MOST_COLUMNS]);
                for (column, row) in tile.rows.clone().enumerate() {
                    let Row { head, query } = problem.row(block.kv_head, row);
                    (slopes[column], positions[column]) =
                        (-alibi.slopes[head], alibi.position(&problem.dims, block.b, query));
                }
                for_each!(self, tile, K, |score, key, column| {
                    let position = K::Vector::load(positions.as_ptr().add(column));
                    let distance = position.sub(K::Vector::splat((self.first + key) as f32)).abs();
                    K::Vector::load(slopes.as_ptr().add(column)).mul_add(distance, score)
                });
            }
            if let Some(bias) = &options.bias {
                self.with_tensor::<K, E, f32, AddBias>(problem, tile, block, bias);
            }
        }
    }

    /// Scores of hidden keys become -inf.
    ///
    /// # Safety
    /// As [`change`](Self::change).
    #[inline(always)]
    pub unsafe fn hide<K: Kernel, E: Element>(&self, problem: &Problem<E>, tile: &Tile, block: &Block) {
        // SAFETY: the caller's promise.
        unsafe {
            let hidden = K::Vector::splat(f32::NEG_INFINITY);
            if tile.every.start > self.first || tile.every.end < self.first + self.keys {
                let (starts, ends) = tile.bounds(self.first, self.keys);
                // Keys that every query sees stay as they are: they are all but the edges of a window.
                let from = tile.every.start.saturating_sub(self.first).min(self.keys);
                let to = tile.every.end.saturating_sub(self.first).clamp(from, self.keys);
                for_each!(self, tile, K, (0..from).chain(to..self.keys), |score, key, column| {
                    let key = K::Vector::splat(key as f32);
                    let after_start =
                        K::Vector::select(key.less_than(K::Vector::load(starts.as_ptr().add(column))), hidden, score);
                    K::Vector::select(key.less_than(K::Vector::load(ends.as_ptr().add(column))), after_start, hidden)
                });
            }
            if let Some(keep) = &problem.scores.keep {
                self.with_tensor::<K, E, u8, Keep>(problem, tile, block, keep);
            }
        }
    }

    /// Joins every score with its entry of a tensor (B, H, T_q, T_kv): rows of the tensor are staged, then transposed.
    ///
    /// # Safety
    /// As [`change`](Self::change).
    #[inline(always)]
    unsafe fn with_tensor<K: Kernel, E: Element, T: Copy + Into<f32>, J: Join>(
        &self,
        problem: &Problem<E>,
        tile: &Tile,
        block: &Block,
        tensor: &Strided<T, 4>,
    ) {
        let (lanes, step) = (K::Vector::LANES, tensor.stride(3));
        let mut square = [0f32; 16 * 16];
        for vector in 0..tile.vectors {
            let first_row = tile.rows.start + vector * lanes;
            let held = lanes.min(tile.rows.end - first_row);
            // SAFETY: the caller's promise; staging holds `lanes` rows of a block.
            unsafe {
                for lane in 0..held {
                    let Row { head, query } = problem.row(block.kv_head, first_row + lane);
                    let from = tensor.at([block.b, head, query, self.first]);
                    let to = self.staging.add(lane * K::BLOCK);
                    if step == 1 {
                        (0..self.keys).for_each(|key| *to.add(key) = (*from.add(key)).into());
                    } else {
                        (0..self.keys).for_each(|key| *to.add(key) = (*from.add(key * step)).into());
                    }
                }
                for key in (0..self.keys).step_by(lanes) {
                    K::Vector::transpose(self.staging.add(key), K::BLOCK, square.as_mut_ptr(), lanes);
                    for k in 0..lanes.min(self.keys - key) {
                        let at = self.scores.add((key + k) * K::PANEL + vector * lanes);
                        let entry = K::Vector::load(square.as_ptr().add(k * lanes));
                        J::join(K::Vector::load(at), entry).store(at);
                    }
                }
            }
        }
    }
}
