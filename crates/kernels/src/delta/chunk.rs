//! What some tokens of a head are to each other, and to the state before and after them: the WY representation of their
//! updates (Yang et al. 2024, <https://arxiv.org/abs/2412.06464>).
//!
//! With the state S before a chunk, `decayed(i, j)` the product of the factors of the tokens after j up to i, and
//! `e_i` what the state lacks for the value of token i:
//!
//! ```text
//! e_i = v_i - (k_i ∘ decayed(i, start)) S - Σ_{j<i} key_products(i, j) beta_j e_j
//! o_i =       (q_i ∘ decayed(i, start)) S + Σ_{j<=i} query_products(i, j) beta_j e_j
//! S'  = decayed(end, start) ∘ S + Σ_j (k_j ∘ decayed(end, j))ᵀ beta_j e_j
//! ```
//!
//! Factors are multiplied along the tokens, and never divided: a factor of 0 is as good as any.

use super::rows::{Rows, dot};
use crate::cpu::{Scratch, Vector};

/// The places of the rows of a chunk: of keys and of queries that read the state before it, of keys that write, and one
/// of what is kept of the state.
pub(super) const KEYS: usize = 0;
pub(super) const QUERIES: usize = 1;
pub(super) const WRITING_KEYS: usize = 2;
pub(super) const KEPT: usize = 3;

/// Of `tokens` tokens, which follow each other from `first` in a block.
pub(super) struct Chunk {
    tokens: usize,
    pub width: usize,
    /// `k_i ∘ decayed(i, start)`, then `q_i ∘ decayed(i, start)`, then `k_j ∘ decayed(end, j)`, and one row of
    /// `decayed(end, start)`.
    rows: Scratch,
    /// `key_products`, 0 from the diagonal on, and `query_products`, 0 after it.
    products: Scratch,
}

impl Chunk {
    pub fn new(tokens: usize, width: usize) -> Self {
        let (rows, products) = (Scratch::zeros((3 * tokens + 1) * width), Scratch::zeros(2 * tokens * tokens));
        Self { tokens, width, rows, products }
    }

    /// The first of some rows, by their place.
    pub fn at(&self, place: usize) -> *const f32 {
        self.rows.as_ptr().wrapping_add(place * self.tokens * self.width)
    }

    /// Those of keys and those of queries, (tokens, tokens).
    pub fn products(&self) -> (&[f32], &[f32]) {
        self.products.words().split_at(self.tokens * self.tokens)
    }

    /// # Safety
    /// The processor has the instruction set of V, whose lanes the rows are multiples of; the block has the tokens.
    #[inline(always)]
    pub unsafe fn fill<V: Vector>(&mut self, block: &Rows, first: usize) {
        let (n, width) = (self.tokens, self.width);
        let [q, k, factors] =
            [&block.q, &block.k, &block.factors].map(|rows| rows.as_ptr().wrapping_add(first * width));
        let (rows, products) = (self.rows.as_mut_ptr(), self.products.words_mut());
        // SAFETY: as this method's contract; every row has `width` words.
        unsafe {
            for j in 0..n {
                let decayed = rows.add((2 * n + j) * width);
                decayed.copy_from_nonoverlapping(k.add(j * width), width);
                products[(n + j) * n + j] = dot::<V>(q.add(j * width), decayed, width);
                for i in j + 1..n {
                    let mut sums = [V::splat(0.0); 2];
                    for at in (0..width).step_by(V::LANES) {
                        let (key, at) = (decayed.add(at), i * width + at);
                        let further = V::load(key).mul(V::load(factors.add(at)));
                        further.store(key);
                        sums[0] = V::load(k.add(at)).mul_add(further, sums[0]);
                        sums[1] = V::load(q.add(at)).mul_add(further, sums[1]);
                    }
                    products[i * n + j] = sums[0].sum();
                    products[(n + i) * n + j] = sums[1].sum();
                }
            }
            for at in (0..width).step_by(V::LANES) {
                let mut decayed = V::splat(1.0);
                for i in 0..n {
                    decayed = decayed.mul(V::load(factors.add(i * width + at)));
                    V::load(k.add(i * width + at)).mul(decayed).store(rows.add(i * width + at));
                    V::load(q.add(i * width + at)).mul(decayed).store(rows.add((n + i) * width + at));
                }
                decayed.store(rows.add(3 * n * width + at));
            }
        }
    }
}
