//! The choice among drafted tokens in pages: those that a model accepts stay, the others are taken back.

use candle_core::{Result, Tensor, bail};

use super::moves::RowMoves;
use super::pool::KvPool;
use super::states::{OP, StoredState};
use super::table::{PageTable, SequenceId};
use crate::cache::{Buffer, check_kept};

impl PageTable {
    /// Keeps some of the tokens that a sequence has from position `len` on, and removes the others: the accepted ones
    /// of drafted tokens. `kept` are tokens in increasing order, where n is the token at position `len + n`: a
    /// [path](crate::TokenTree::path) of a tree. The kept tokens become the positions from `len` on.
    ///
    /// Tokens that move have rows to move: pass what is returned to [`KvPool::move_rows`] of every pool before the next
    /// step. In a table with [states](Self::with_states) made [`with_drafts`](Self::with_drafts), the state after the
    /// last kept token becomes the state of the sequence.
    ///
    /// ```
    /// use candle_attention::{AttentionInput, KvPool, KvPoolConfig, PageTable, TokenTree};
    /// use candle_attention::{MultiHeadAttention, MultiHeadAttentionConfig};
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_nn::VarBuilder;
    /// # fn main() -> candle_core::Result<()> {
    /// let cfg = MultiHeadAttentionConfig::new(64, 4).with_causal(true);
    /// let mha = MultiHeadAttention::new(&cfg, VarBuilder::zeros(DType::F32, &Device::Cpu))?;
    /// let mut table = PageTable::new(10, 16)?;
    /// let pool = KvPool::new(&KvPoolConfig::for_layer(&cfg, &table), &Device::Cpu)?;
    /// let sequence = table.add();
    /// // Token 0 begins; 1 and 2 are two guesses after it, 3 follows 2.
    /// let tree = TokenTree::new(&[None, Some(0), Some(0), Some(2)])?;
    /// let step = table.step(&[sequence.tokens(4)])?;
    /// let xs = Tensor::randn(0f32, 1., (4, 64), &Device::Cpu)?;
    /// mha.forward_with(AttentionInput::new(&xs).with_pages(&pool, &step).with_tree(&tree))?;
    /// step.commit();
    /// let moves = table.keep(sequence, 0, &tree.path(3)?)?; // tokens 0, 2 and 3 are right
    /// pool.move_rows(&moves)?;
    /// assert_eq!(table.len(sequence)?, 3);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// For tokens that the sequence does not have or that are not in increasing order, for rows to write in a page that
    /// another sequence shares or that is found by its tokens, and as [`truncate`](Self::truncate). An error does not
    /// change the table.
    #[doc(alias("accept", "compact"))]
    pub fn keep(&mut self, sequence: SequenceId, len: usize, kept: &[usize]) -> Result<RowMoves> {
        let stored = self.sequence(sequence)?;
        let Some(drafted) = stored.len.checked_sub(len) else {
            bail!("[{OP}] len is {len}, expected at most the sequence's {} positions", stored.len)
        };
        check_kept(OP, sequence.slot(), kept, drafted)?;
        let first = stored.released * self.page_size;
        if len < first && len + kept.len() > 0 {
            bail!("[{OP}] len is {len}, expected 0 or at least {first}: the pages before were released")
        }
        let end = len + kept.len();
        let mut moves = RowMoves { table: self.id, number: self.moved, from: Vec::new(), to: Vec::new() };
        let row = |position: usize| {
            stored.pages[position / self.page_size] * self.page_size as u32 + (position % self.page_size) as u32
        };
        for (n, &token) in kept.iter().enumerate().filter(|&(n, &token)| n != token) {
            let page = stored.pages[(len + n) / self.page_size];
            if self.allocator.references(page) > 1 || self.prefixes.has(page) {
                bail!(
                    "[{OP}] kept tokens move to page {page}, which another sequence shares or which is found by its \
                     tokens, expected `keep` before a fork and before `share_prefix`"
                )
            }
            moves.from.push(row(len + token));
            moves.to.push(row(len + n));
        }
        if self.states.is_some() {
            let own_states = kept_states(&stored.states, len, kept)?;
            let before = std::mem::replace(&mut self.sequence_mut(sequence)?.states, own_states.clone());
            if let Some(states) = &mut self.states {
                states.release_dropped(&before, &own_states);
            }
        }
        if !moves.to.is_empty() {
            self.moved += 1;
            moves.number = self.moved;
        }
        self.truncate(sequence, end)?;
        Ok(moves)
    }
}

/// Returns the states of a sequence that keeps some of its tokens from position `len` on.
fn kept_states(stored: &[StoredState], len: usize, kept: &[usize]) -> Result<Vec<StoredState>> {
    let mut states: Vec<_> = stored.iter().filter(|state| state.positions <= len).copied().collect();
    for (n, &token) in kept.iter().enumerate() {
        let after = stored.iter().find(|state| state.positions == len + token + 1);
        states.extend(after.map(|found| StoredState { positions: len + n + 1, ..*found }));
    }
    let end = len + kept.len();
    if end > 0 && states.last().is_none_or(|last| last.positions != end) {
        bail!(
            "[{OP}] no state is stored after the last kept token, expected tokens of a step that brought at most the \
             number of a table made `with_drafts`"
        )
    }
    Ok(states)
}

impl KvPool {
    /// Moves the rows of tokens that [`PageTable::keep`] kept.
    ///
    /// # Errors
    /// For moves of another table, and for moves that came before others which the pool has not moved.
    pub fn move_rows(&self, moves: &RowMoves) -> Result<()> {
        self.stored_steps().check_moves(super::config::OP, moves)?;
        if moves.to.is_empty() {
            return Ok(());
        }
        self.move_in(self.keys(), moves)?;
        if !self.is_latent() {
            self.move_in(self.values(), moves)?;
        }
        self.stored_steps().add_moves(moves);
        Ok(())
    }

    fn move_in(&self, buffer: &Buffer, moves: &RowMoves) -> Result<()> {
        for pool in buffer.tensors() {
            let rows = pool.flatten(0, 1)?;
            // A copy: all rows are read before the first is overwritten.
            let from = Tensor::new(moves.from.as_slice(), pool.device())?;
            let read = rows.index_select(&from, 0)?;
            for (n, &to) in moves.to.iter().enumerate() {
                rows.slice_set(&read.narrow(0, n, 1)?, 0, to as usize)?;
            }
        }
        Ok(())
    }
}
