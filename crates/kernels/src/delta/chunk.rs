//! A chunk of the gated delta rule: the WY representation of the updates of some tokens of a head (Yang et al. 2024,
//! <https://arxiv.org/abs/2412.06464>).
//!
//! With the state S before a chunk, `decayed(i, j)` the product of the factors of the tokens after j up to i, and `e_i`
//! the difference between the value of token i and the value that the state has for its key:
//!
//! ```text
//! e_i = v_i - (k_i ∘ decayed(i, start)) S - Σ_{j<i} key_products(i, j) beta_j e_j
//! o_i =       (q_i ∘ decayed(i, start)) S + Σ_{j<=i} query_products(i, j) beta_j e_j
//! S'  = decayed(end, start) ∘ S + Σ_j (k_j ∘ decayed(end, j))ᵀ beta_j e_j
//! ```
//!
//! Factors are multiplied along the tokens, and never divided, so that a factor of 0 is allowed. Products of factors
//! above 1 stay in the range of f32 because the kernels refuse larger decays.

use super::rows::{DeltaTokenRows, dot};
use crate::cpu::{Scratch, Vector};

/// A chunk of tokens that follow each other.
pub(super) struct Chunk {
    tokens: usize,
    pub width: usize,
    /// The rows of reading keys, reading queries and writing keys, each for all tokens, and the row of the decay over
    /// the chunk.
    rows: Scratch,
    /// `key_products`, 0 on and above the diagonal, and `query_products`, 0 above the diagonal.
    products: Scratch,
}

impl Chunk {
    pub fn new(tokens: usize, width: usize) -> Self {
        let rows = Scratch::zeros((3 * tokens + 1) * width);
        let products = Scratch::zeros(2 * tokens * tokens);
        Self { tokens, width, rows, products }
    }

    /// Returns the rows `k_i ∘ decayed(i, start)`, with which tokens read the state before the chunk.
    #[inline(always)]
    pub fn reading_keys(&self) -> *const f32 {
        self.rows.as_ptr()
    }

    /// Returns the rows `q_i ∘ decayed(i, start)`, which follow the reading keys.
    #[inline(always)]
    pub fn reading_queries(&self) -> *const f32 {
        self.rows.as_ptr().wrapping_add(self.tokens * self.width)
    }

    /// Returns the rows `k_j ∘ decayed(end, j)`, with which tokens write to the state after the chunk.
    #[inline(always)]
    pub fn writing_keys(&self) -> *const f32 {
        self.rows.as_ptr().wrapping_add(2 * self.tokens * self.width)
    }

    /// Returns the row `decayed(end, start)`, the factors of the state over the chunk.
    #[inline(always)]
    pub fn decay(&self) -> *const f32 {
        self.rows.as_ptr().wrapping_add(3 * self.tokens * self.width)
    }

    /// Returns `key_products(i, j)` for all tokens i and j of the chunk, (tokens, tokens).
    #[inline(always)]
    pub fn key_products(&self) -> &[f32] {
        &self.products.words()[..self.tokens * self.tokens]
    }

    /// Returns `query_products(i, j)` for all tokens i and j of the chunk, (tokens, tokens).
    #[inline(always)]
    pub fn query_products(&self) -> &[f32] {
        &self.products.words()[self.tokens * self.tokens..]
    }

    /// Fills the chunk from the tokens of a block from `first` on: their scaled rows, and the products between them.
    ///
    /// # Safety
    /// The processor has the instruction set of V. The width of a row is a multiple of V's lanes. The block has the
    /// tokens of the chunk from `first` on.
    #[inline(always)]
    pub unsafe fn fill<V: Vector>(&mut self, block: &DeltaTokenRows, first: usize) {
        let n = self.tokens;
        let width = self.width;
        let q = block.q.as_ptr().wrapping_add(first * width);
        let k = block.k.as_ptr().wrapping_add(first * width);
        let factors = block.factors.as_ptr().wrapping_add(first * width);
        let rows = self.rows.as_mut_ptr();
        let products = self.products.words_mut();
        // SAFETY: as this method's contract; every row has `width` words.
        unsafe {
            for j in 0..n {
                let decayed = rows.add((2 * n + j) * width);
                decayed.copy_from_nonoverlapping(k.add(j * width), width);
                products[(n + j) * n + j] = dot::<V>(q.add(j * width), decayed, width);
                for i in j + 1..n {
                    let mut key_sum = V::splat(0.0);
                    let mut query_sum = V::splat(0.0);
                    for at in (0..width).step_by(V::LANES) {
                        let key = decayed.add(at);
                        let word = i * width + at;
                        let further = V::load(key).mul(V::load(factors.add(word)));
                        further.store(key);
                        key_sum = V::load(k.add(word)).mul_add(further, key_sum);
                        query_sum = V::load(q.add(word)).mul_add(further, query_sum);
                    }
                    products[i * n + j] = key_sum.sum();
                    products[(n + i) * n + j] = query_sum.sum();
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
