//! The choice among drafted tokens: those that a model accepts stay, the others are taken back.

use candle_core::{Result, bail};

use super::{AttentionCache, OP};
use candle_attention_modules::base::check_entries;

impl AttentionCache {
    /// Keeps some of the tokens that each sequence has from its entry of `lens` on, and removes the others: the
    /// accepted ones of drafted tokens. `lens` are the lengths before the drafts, and `kept[b]` has the accepted tokens
    /// of sequence b in increasing order, where n is the token at position `lens[b] + n`: a
    /// [path](crate::TokenTree::path) of a tree. The kept tokens become the positions from `lens[b]` on.
    ///
    /// Copies the kept tokens that move; the first n drafted tokens stay where they are.
    ///
    /// A token of a tree was rotated to its depth, so that a path from the root has the right rotations. Other
    /// selections keep the rotations that they have.
    ///
    /// ```
    /// use candle_attention::{AttentionCache, AttentionInput, MultiHeadAttention, MultiHeadAttentionConfig};
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_nn::VarBuilder;
    /// # fn main() -> candle_core::Result<()> {
    /// let cfg = MultiHeadAttentionConfig::new(64, 4).with_causal(true);
    /// let mha = MultiHeadAttention::new(&cfg, VarBuilder::zeros(DType::F32, &Device::Cpu))?;
    /// let tokens = Tensor::randn(0f32, 1., (2, 4, 64), &Device::Cpu)?;
    /// let mut cache = AttentionCache::default();
    /// let before = [0, 0];
    /// mha.forward_with(AttentionInput::new(&tokens).with_cache(&mut cache))?;
    /// cache.keep(&before, &[vec![0, 1], vec![0, 2, 3]])?;
    /// assert_eq!(cache.lens(), [2, 3]);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// For another number of sequences, for tokens that a sequence does not have or that are not in increasing order,
    /// for a length before the positions that a sliding cache stores, and for a copy that does not fit in memory. An
    /// error does not change the cache.
    #[doc(alias("accept", "compact"))]
    pub fn keep(&mut self, lens: &[usize], kept: &[impl AsRef<[usize]>]) -> Result<()> {
        check_entries(OP, "lens", lens.len(), self.stored.len(), "sequences")?;
        check_entries(OP, "kept", kept.len(), self.stored.len(), "sequences")?;
        for (sequence, (&len, tokens)) in lens.iter().zip(kept).enumerate() {
            self.check_kept(sequence, len, tokens.as_ref())?;
        }
        let ends: Vec<_> = lens.iter().zip(kept).map(|(len, tokens)| len + tokens.as_ref().len()).collect();
        if let Some(buffers) = &self.buffers {
            // All tokens are read before the first is overwritten.
            let mut copies = Vec::new();
            for (sequence, (&len, tokens)) in lens.iter().zip(kept).enumerate() {
                let row = |token: usize| self.row_order().row(&self.stored[sequence], len + token);
                for (n, &token) in tokens.as_ref().iter().enumerate() {
                    if n != token {
                        let copy = buffers.rows_of_sequence(sequence, &(row(token)..row(token) + 1))?.copy()?;
                        copies.push((sequence, row(n), copy));
                    }
                }
            }
            for (sequence, row, copy) in copies {
                buffers.write_sequence(sequence, row, &copy)?;
            }
        }
        if let Some(positions) = &mut self.positions {
            for (row, (&len, tokens)) in positions.iter_mut().zip(lens.iter().zip(kept)) {
                for (n, &token) in tokens.as_ref().iter().enumerate() {
                    row[len + n] = row[len + token];
                }
            }
        }
        self.truncate_to(&ends)?;
        self.forget_usual_positions();
        Ok(())
    }

    /// Checks the tokens of a sequence that are kept after the position `len`.
    fn check_kept(&self, sequence: usize, len: usize, kept: &[usize]) -> Result<()> {
        let stored = &self.stored[sequence];
        let Some(drafted) = stored.end.checked_sub(len) else {
            bail!("[{OP}] the length for sequence {sequence} is {len}, expected at most its {} positions", stored.end)
        };
        if len < stored.start && len + kept.len() > 0 {
            bail!(
                "[{OP}] the length for sequence {sequence} is {len}, expected at least {}: the window has dropped the \
                 positions before",
                stored.start
            )
        }
        check_kept(OP, sequence, kept, drafted)
    }

    /// Forgets the given positions if each token is at its index again.
    fn forget_usual_positions(&mut self) {
        let is_usual = |row: &Vec<u32>| (0u32..).zip(row).all(|(index, &position)| index == position);
        if self.positions.as_ref().is_some_and(|rows| rows.iter().all(is_usual)) {
            self.positions = None;
        }
    }
}

/// Checks the kept tokens of a sequence, of whose last `drafted` tokens they are.
pub fn check_kept(op: &str, sequence: usize, kept: &[usize], drafted: usize) -> Result<()> {
    let mut least = 0;
    for &token in kept {
        if token >= drafted {
            bail!("[{op}] a kept token of sequence {sequence} is {token}, expected one of its last {drafted}")
        }
        if token < least {
            bail!("[{op}] the kept tokens of sequence {sequence} are {kept:?}, expected increasing numbers")
        }
        least = token + 1;
    }
    Ok(())
}
