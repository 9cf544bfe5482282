//! The recurrent state of a gated delta net between calls.

use candle_core::{Result, Tensor, bail};

use super::drafts::{ChosenTokens, Drafts, KeptTokens, RecordedCall, not_a_path};
use super::state::{CachedState, OP};
use super::tree::is_row;
use candle_attention_core::internal::check_kept;
use candle_attention_modules::base::{Expect, check_entries};

/// The cache of one [`GatedDeltaNet`](crate::GatedDeltaNet) for a batch of sequences: the state of each head, and the
/// last K - 1 inputs of the convolutions. Its size does not depend on the number of tokens.
///
/// A call with a cache ([`DeltaInput::with_cache`](crate::DeltaInput::with_cache)) continues after the last call: a
/// prompt in pieces and single tokens return the results of one call over all tokens. A call that fails does not change
/// the cache. A cache stores nothing that is tracked for gradients: a call with a layer of variables is an error.
///
/// A token cannot be removed from a state: [`truncate`](Self::truncate) and [`truncate_to`](Self::truncate_to) return
/// to a [`snapshot`](Self::snapshot), or to the beginning. A cache [`with_drafts`](Self::with_drafts) also takes back
/// any number of the last tokens of each sequence, as speculative decoding does.
///
/// ```
/// use candle_attention::{DeltaCache, DeltaInput, GatedDeltaNet, GatedDeltaNetConfig};
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::VarBuilder;
/// # fn main() -> candle_core::Result<()> {
/// let net = GatedDeltaNet::new(&GatedDeltaNetConfig::new(64, 4), VarBuilder::zeros(DType::F32, &Device::Cpu))?;
/// let mut cache = DeltaCache::default();
/// net.forward_with(DeltaInput::new(&Tensor::zeros((2, 5, 64), DType::F32, &Device::Cpu)?).with_cache(&mut cache))?;
/// cache.snapshot();
/// let tokens = Tensor::zeros((2, 3, 64), DType::F32, &Device::Cpu)?; // guessed, and wrong
/// net.forward_with(DeltaInput::new(&tokens).with_cache(&mut cache))?;
/// cache.truncate(5)?;
/// assert_eq!(cache.len(), 5);
/// # Ok(()) }
/// ```
#[doc(alias = "past_key_values")]
#[derive(Debug, Clone, Default)]
pub struct DeltaCache {
    /// Snapshots, the earliest first, and last the present state; empty before the first call. No sequence of a state
    /// is longer than in a later state.
    states: Vec<CachedState>,
    /// The last tokens, as far as they can be taken back.
    drafts: Drafts,
}

impl DeltaCache {
    /// Makes a cache that can take back up to `tokens` of the last tokens of each sequence, of calls of at most
    /// `tokens` tokens for a sequence: [`truncate_to`](Self::truncate_to) and [`keep`](Self::keep) with a number for each
    /// sequence, as [`AttentionCache`](candle_attention_core::AttentionCache) has them.
    ///
    /// It stores the state before each of the calls that have these tokens, and the projections of the tokens: one
    /// state more, for calls of `tokens` tokens. Tokens that stay of such a call are computed again from the state
    /// before it, without the projections of the layer. The default is 0.
    ///
    /// ```
    /// use candle_attention::{DeltaCache, DeltaInput, GatedDeltaNet, GatedDeltaNetConfig};
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_nn::VarBuilder;
    /// # fn main() -> candle_core::Result<()> {
    /// let net = GatedDeltaNet::new(&GatedDeltaNetConfig::new(64, 4), VarBuilder::zeros(DType::F32, &Device::Cpu))?;
    /// let mut cache = DeltaCache::with_drafts(4);
    /// let prompts = Tensor::zeros((2, 9, 64), DType::F32, &Device::Cpu)?;
    /// net.forward_with(DeltaInput::new(&prompts).with_cache(&mut cache))?;
    /// let drafts = Tensor::zeros((2, 4, 64), DType::F32, &Device::Cpu)?;
    /// net.forward_with(DeltaInput::new(&drafts).with_cache(&mut cache))?;
    /// cache.truncate_to(&[11, 13])?; // two drafts of the first sequence were wrong
    /// assert_eq!(cache.lens(), [11, 13]);
    /// # Ok(()) }
    /// ```
    #[doc(alias("speculative_decoding", "rollback"))]
    #[must_use]
    pub fn with_drafts(tokens: usize) -> Self {
        Self { states: Vec::new(), drafts: Drafts::with_limit(tokens) }
    }

    /// Returns the number of last tokens of a sequence that can be taken back.
    pub fn drafts(&self) -> usize {
        self.drafts.limit()
    }

    /// Returns the length of the longest sequence.
    pub fn len(&self) -> usize {
        self.states.last().map_or(0, CachedState::len)
    }

    /// Returns the length of each sequence; an empty list before the first call.
    pub fn lens(&self) -> Vec<usize> {
        self.states.last().map(|state| state.lens.clone()).unwrap_or_default()
    }

    /// Returns whether no sequence has a token.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of bytes of all stored tensors, snapshots and [drafts](Self::with_drafts) included.
    pub fn memory(&self) -> usize {
        let tensors = self.states.iter().flat_map(|state| [&state.conv_inputs, &state.head_states]);
        tensors.chain(self.drafts.tensors()).map(|tensor| tensor.elem_count() * tensor.dtype().size_in_bytes()).sum()
    }

    /// Removes all sequences and all snapshots.
    #[doc(alias = "clear")]
    pub fn reset(&mut self) {
        self.states.clear();
        self.drafts.reset();
    }

    /// Stores the present state, so that [`truncate_to`](Self::truncate_to) can return to these
    /// [`lens`](Self::lens). It replaces an earlier snapshot of the same lengths. It copies nothing, but its memory
    /// stays in use until the cache is truncated to an earlier state or reset.
    pub fn snapshot(&mut self) {
        if let Some(present) = self.states.pop() {
            self.states.retain(|state| state.lens != present.lens);
            self.states.extend([present.clone(), present]);
        }
    }

    /// Returns to the state in which every sequence has `len` tokens: a snapshot, the present state, the empty
    /// cache for a length of 0, or a state after some of the last tokens of a cache [`with_drafts`](Self::with_drafts).
    ///
    /// # Errors
    /// As [`truncate_to`](Self::truncate_to), for a batch of different lengths too.
    pub fn truncate(&mut self, len: usize) -> Result<()> {
        if self.states.is_empty() && len > 0 {
            bail!("[{OP}] len is {len}, expected 0 for an empty cache")
        }
        let has_one_length = |state: &CachedState| state.lens.iter().all(|&own| own == state.len());
        let hint = if self.states.iter().all(has_one_length) {
            ""
        } else {
            "; `truncate_to` takes a length for each sequence"
        };
        self.restore(&vec![len; self.batch()], hint)
    }

    /// Returns to the state in which each sequence has its entry of `lens` as length, and drops later snapshots. It is
    /// a snapshot, the present state, or a state after some of the last tokens of a cache
    /// [`with_drafts`](Self::with_drafts). Lengths of 0 without a snapshot are the empty cache.
    ///
    /// # Errors
    /// For another number of sequences. For lengths that no snapshot has, unless they are the present ones or all 0; in
    /// a cache with drafts, for lengths before the tokens that can be taken back. An error does not change the cache.
    pub fn truncate_to(&mut self, lens: &[usize]) -> Result<()> {
        check_entries(OP, "lens", lens.len(), self.batch(), "sequences")?;
        self.restore(lens, "")
    }

    /// Returns to the state with a length for each sequence. `hint` is the end of the error's text.
    fn restore(&mut self, lens: &[usize], hint: &str) -> Result<()> {
        let present = self.states.len().saturating_sub(1);
        match self.states.iter().position(|state| state.lens == lens) {
            Some(index) if index == present => (),
            Some(snapshot) => {
                self.drafts.truncate_to(lens)?;
                self.states.truncate(snapshot + 1);
                self.snapshot();
            }
            None if lens.iter().all(|&len| len == 0) => self.reset(),
            None if self.drafts.limit() > 0 => {
                for (sequence, (&len, end)) in lens.iter().zip(self.lens()).enumerate() {
                    check_len(sequence, len, end)?;
                }
                let kept = |sequence| KeptTokens { sequence, len: lens[sequence], later: &[] };
                self.keep_tokens((0..lens.len()).map(kept))?;
            }
            None => {
                let snapshots: Vec<_> = self.states.iter().take(present).map(|state| &state.lens).collect();
                bail!(
                    "[{OP}] cannot truncate sequences of {:?} tokens to {lens:?}, expected 0, the present lengths or the \
                     lengths of a snapshot, one of {snapshots:?}: a state cannot forget its last token{hint}",
                    self.lens()
                )
            }
        }
        Ok(())
    }

    /// Keeps some of the tokens that each sequence has from its entry of `lens` on, and removes the others: the
    /// accepted ones of drafted tokens. `lens` are the lengths before the drafts, and `kept[b]` has the accepted tokens
    /// of sequence b in increasing order, where n is the token at position `lens[b] + n`: a
    /// [path](candle_attention_core::TokenTree::path) of a tree. It is
    /// [`AttentionCache::keep`](candle_attention_core::AttentionCache::keep) for a cache
    /// [`with_drafts`](Self::with_drafts); snapshots of later states are dropped.
    ///
    /// After a call with a tree that has branches, a sequence has no state until one path of the tree is kept, or none
    /// of its tokens.
    ///
    /// ```
    /// use candle_attention::{DeltaCache, DeltaInput, GatedDeltaNet, GatedDeltaNetConfig, TokenTree};
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_nn::VarBuilder;
    /// # fn main() -> candle_core::Result<()> {
    /// let net = GatedDeltaNet::new(&GatedDeltaNetConfig::new(64, 4), VarBuilder::zeros(DType::F32, &Device::Cpu))?;
    /// let mut cache = DeltaCache::with_drafts(4);
    /// let prompts = Tensor::zeros((2, 9, 64), DType::F32, &Device::Cpu)?;
    /// net.forward_with(DeltaInput::new(&prompts).with_cache(&mut cache))?;
    /// // Token 0 follows the prompt, 1 and 2 are two guesses after it, 3 follows 2.
    /// let tree = TokenTree::new(&[None, Some(0), Some(0), Some(2)])?;
    /// let before = cache.lens();
    /// let drafts = Tensor::zeros((2, 4, 64), DType::F32, &Device::Cpu)?;
    /// net.forward_with(DeltaInput::new(&drafts).with_cache(&mut cache).with_tree(&tree))?;
    /// cache.keep(&before, &[tree.path(1)?, tree.path(3)?])?;
    /// assert_eq!(cache.lens(), [11, 12]);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// For another number of sequences, for tokens that a sequence does not have or that are not in increasing order,
    /// for tokens of a tree that are not one path, and as [`truncate_to`](Self::truncate_to). An error does not change
    /// the cache.
    #[doc(alias("accept", "compact"))]
    pub fn keep(&mut self, lens: &[usize], kept: &[impl AsRef<[usize]>]) -> Result<()> {
        check_entries(OP, "lens", lens.len(), self.batch(), "sequences")?;
        check_entries(OP, "kept", kept.len(), self.batch(), "sequences")?;
        let mut later = Vec::with_capacity(kept.len());
        let mut unchanged = Vec::with_capacity(kept.len());
        for (sequence, ((&len, tokens), end)) in lens.iter().zip(kept).zip(self.lens()).enumerate() {
            let tokens = tokens.as_ref();
            check_len(sequence, len, end)?;
            check_kept(OP, sequence, tokens, end - len)?;
            let first_ones = tokens.iter().enumerate().take_while(|&(n, &token)| n == token).count();
            if !tokens.is_empty() && len + first_ones == end && self.has_branches(sequence) {
                return Err(not_a_path(sequence, tokens));
            }
            unchanged.push(len + first_ones);
            later.push(tokens[first_ones..].iter().map(|token| token - first_ones).collect::<Vec<_>>());
        }
        if later.iter().all(Vec::is_empty) {
            return self.restore(&unchanged, "");
        }
        if self.drafts.limit() == 0 {
            bail!("[{OP}] tokens between others are removed, expected a cache made `with_drafts`")
        }
        let kept_tokens = |sequence| KeptTokens { sequence, len: unchanged[sequence], later: &later[sequence] };
        self.keep_tokens((0..unchanged.len()).map(kept_tokens))
    }

    /// Returns whether the last tokens of a sequence are a tree with branches.
    fn has_branches(&self, sequence: usize) -> bool {
        self.states.last().is_some_and(|state| state.is_tree[sequence])
    }

    /// Keeps some of the last tokens of each sequence, in the order of the sequences.
    fn keep_tokens<'a>(&mut self, kept: impl Iterator<Item = KeptTokens<'a>>) -> Result<()> {
        let Some(present) = self.states.last() else { return Ok(()) };
        let mut chosen: Vec<ChosenTokens> = Vec::new();
        for tokens in kept {
            chosen.push(self.drafts.choose(tokens, present.of_sequence(tokens.sequence)?)?);
        }
        let state = self.drafts.state_after(&chosen)?;
        self.states.pop();
        let is_earlier = |lens: &[usize]| lens.iter().zip(&chosen).all(|(&len, own)| len <= own.unchanged);
        self.states.retain(|snapshot| is_earlier(&snapshot.lens));
        self.states.push(state);
        self.drafts.set(chosen);
        Ok(())
    }

    /// Replaces sequence n of the batch by sequence `sequences[n]`, in snapshots too, as beam search does between its
    /// steps. A sequence may be repeated or left out. An empty slice is a [`reset`](Self::reset).
    ///
    /// # Errors
    /// For an index that the batch does not have. The cache is unchanged then.
    pub fn reorder(&mut self, sequences: &[usize]) -> Result<()> {
        sequences.iter().try_for_each(|&sequence| self.check_sequence(sequence))?;
        if sequences.is_empty() {
            self.reset();
            return Ok(());
        }
        self.states = self.states.iter().map(|state| state.reordered(sequences)).collect::<Result<_>>()?;
        self.drafts.reorder(sequences);
        Ok(())
    }

    /// Returns the number of sequences.
    fn batch(&self) -> usize {
        self.states.last().map_or(0, |state| state.lens.len())
    }

    /// Checks that the batch has a sequence.
    fn check_sequence(&self, sequence: usize) -> Result<()> {
        let batch = self.batch();
        if sequence >= batch {
            bail!("[{OP}] sequence is {sequence}, expected one of the {batch} sequences in the cache")
        }
        Ok(())
    }

    /// Removes a sequence from the batch, in snapshots too. Later sequences move one place down. Removing the only
    /// sequence is a [`reset`](Self::reset). Copies the states of the other sequences, whose size does not depend on
    /// their lengths.
    ///
    /// # Errors
    /// As [`reorder`](Self::reorder).
    pub fn remove(&mut self, sequence: usize) -> Result<()> {
        self.check_sequence(sequence)?;
        let others: Vec<_> = (0..self.batch()).filter(|&other| other != sequence).collect();
        self.reorder(&others)
    }

    /// Removes a sequence from the batch, in snapshots too, and puts the last sequence into its place. Copies as
    /// [`remove`](Self::remove) does.
    ///
    /// # Errors
    /// As [`reorder`](Self::reorder).
    pub fn swap_remove(&mut self, sequence: usize) -> Result<()> {
        self.check_sequence(sequence)?;
        let mut others: Vec<_> = (0..self.batch()).collect();
        others.swap_remove(sequence);
        self.reorder(&others)
    }

    /// Adds the sequences of another cache of the same layer after the present ones, with their lengths. The other
    /// cache does not change. Copies the states of all sequences.
    ///
    /// Drops the snapshots of this cache, which do not have the new sequences. An empty cache takes the snapshots of
    /// the other one. A cache [`with_drafts`](Self::with_drafts) takes the last tokens of the other one, if that has
    /// some.
    ///
    /// # Errors
    /// For a cache whose states have other shapes, another dtype or another device. The cache is unchanged then.
    pub fn join(&mut self, other: &Self) -> Result<()> {
        let (Some(own), Some(added)) = (self.states.last(), other.states.last()) else {
            if self.states.is_empty() {
                self.states.clone_from(&other.states);
                self.drafts.join(&other.drafts, other.batch());
            }
            return Ok(());
        };
        let joined = own.joined(added)?;
        self.states = vec![joined];
        self.drafts.join(&other.drafts, other.batch());
        Ok(())
    }

    /// Returns a second cache with the same sequences and snapshots, which continues independently. It copies nothing.
    ///
    /// # Errors
    /// Never; the signature is that of [`AttentionCache::fork`](candle_attention_core::AttentionCache::fork).
    pub fn fork(&self) -> Result<Self> {
        Ok(self.clone())
    }

    /// Returns the present state, if there is one, for a call with these inputs.
    ///
    /// # Errors
    /// For a state of other shapes or on another device than the call, for convolution inputs of another dtype, and
    /// after a tree of which no path was kept.
    pub(super) fn state_for_call(
        &self,
        conv_shape: &[usize],
        head_shape: &[usize],
        xs: &Tensor,
    ) -> Result<Option<&CachedState>> {
        let Some(state) = self.states.last() else { return Ok(None) };
        let conv_inputs = Expect::many(OP, "last inputs", &state.conv_inputs).sizes(conv_shape)?;
        conv_inputs.same_device("the call", xs.device())?.dtype(xs.dtype(), "the call's")?;
        Expect::many(OP, "states", &state.head_states).sizes(head_shape)?.same_device("the call", xs.device())?;
        if let Some(sequence) = state.is_tree.iter().position(|&is_tree| is_tree) {
            bail!(
                "[{OP}] the last tokens of sequence {sequence} are a tree with branches, expected a call of `keep` with \
                 the path that was accepted"
            )
        }
        Ok(Some(state))
    }

    /// Replaces the present state by the state after a call.
    ///
    /// # Errors
    /// If a tensor is tracked for gradients, which would end here.
    pub(super) fn advance(&mut self, call: &RecordedCall, conv_inputs: &Tensor, head_states: &Tensor) -> Result<()> {
        if conv_inputs.track_op() || head_states.track_op() {
            bail!(
                "[{OP}] the layer's states are tracked for gradients, which a cache cannot store, expected a layer after \
                 `freeze()` and an input `xs.detach()`"
            )
        }
        let is_tree = |sequence| call.trees.is_some_and(|trees| !is_row(trees.of(sequence)));
        // Candle concatenates views into a transposed tensor, which `index_select` does not take.
        let state = CachedState {
            lens: call.tokens.ends().collect(),
            is_tree: (0..call.tokens.tokens.len()).map(is_tree).collect(),
            conv_inputs: conv_inputs.contiguous()?,
            head_states: head_states.contiguous()?,
        };
        self.drafts.record(call)?;
        self.states.pop();
        self.states.push(state);
        Ok(())
    }
}

/// Checks a length of a sequence that has `end` tokens.
fn check_len(sequence: usize, len: usize, end: usize) -> Result<()> {
    if len > end {
        bail!("[{OP}] the length for sequence {sequence} is {len}, expected at most its {end} tokens")
    }
    Ok(())
}
