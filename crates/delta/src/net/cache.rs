//! The recurrent state of a gated delta net between calls.

use candle_core::{Result, Tensor, bail};

use candle_attention_modules::base::{Expect, check_entries};

/// The operation in the error texts of the cache.
const OP: &str = "delta_cache";

/// The cache of one [`GatedDeltaNet`](crate::GatedDeltaNet) for a batch of sequences: the state of each head, and the
/// last K - 1 inputs of the convolutions. Its size does not depend on the number of tokens.
///
/// A call with a cache ([`DeltaInput::with_cache`](crate::DeltaInput::with_cache)) continues after the last call: a
/// prompt in pieces and single tokens return the results of one call over all tokens. A call that fails does not change
/// the cache. A cache stores nothing that is tracked for gradients: a call with a layer of variables is an error.
///
/// A token cannot be removed from a state: [`truncate`](Self::truncate) and [`truncate_to`](Self::truncate_to) return
/// to a [`snapshot`](Self::snapshot), or to the beginning.
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
}

/// The state after some number of tokens. Tensors are never written to, so that a clone copies no data.
#[derive(Debug, Clone)]
pub(super) struct CachedState {
    /// The number of tokens of each sequence.
    pub lens: Vec<usize>,
    /// The last inputs of the convolutions, (B, K - 1, C), contiguous.
    pub conv_inputs: Tensor,
    /// The states of the heads, (B, H, D_k, D_v), contiguous.
    pub head_states: Tensor,
}

impl CachedState {
    fn len(&self) -> usize {
        self.lens.iter().copied().max().unwrap_or(0)
    }

    /// Returns the state with sequence `sequences[n]` as sequence n.
    fn reordered(&self, sequences: &[usize]) -> Result<Self> {
        let rows: Vec<_> = sequences.iter().map(|&sequence| sequence as u32).collect();
        let rows = Tensor::new(rows.as_slice(), self.head_states.device())?;
        Ok(Self {
            lens: sequences.iter().map(|&sequence| self.lens[sequence]).collect(),
            conv_inputs: self.conv_inputs.index_select(&rows, 0)?,
            head_states: self.head_states.index_select(&rows, 0)?,
        })
    }

    /// Returns the state with the sequences of another after its own.
    ///
    /// # Errors
    /// For tensors of other shapes, another dtype or another device.
    fn joined(&self, other: &Self) -> Result<Self> {
        Ok(Self {
            lens: [self.lens.as_slice(), &other.lens].concat(),
            conv_inputs: joined("last inputs", &self.conv_inputs, &other.conv_inputs)?,
            head_states: joined("states", &self.head_states, &other.head_states)?,
        })
    }
}

/// Returns tensors (B, ..) one after the other; `kind` names them in errors.
fn joined(kind: &str, own: &Tensor, added: &Tensor) -> Result<Tensor> {
    let dims = [&[added.dims()[0]], &own.dims()[1..]].concat();
    let name = format!("{kind} of the other cache");
    let found = Expect::many(OP, &name, added).sizes(&dims)?;
    found.dtype(own.dtype(), "this cache's")?.same_device("this cache", own.device())?;
    Tensor::cat(&[own, added], 0)?.contiguous()
}

impl DeltaCache {
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

    /// Returns the bytes of all stored tensors, snapshots included.
    pub fn memory(&self) -> usize {
        let tensors = self.states.iter().flat_map(|state| [&state.conv_inputs, &state.head_states]);
        tensors.map(|tensor| tensor.elem_count() * tensor.dtype().size_in_bytes()).sum()
    }

    /// Removes all sequences and all snapshots.
    #[doc(alias = "clear")]
    pub fn reset(&mut self) {
        self.states.clear();
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

    /// Returns to the state in which every sequence has `len` tokens: a snapshot, the present state, or the empty
    /// cache for a length of 0.
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
    /// a snapshot or the present state. Lengths of 0 without a snapshot are the empty cache.
    ///
    /// # Errors
    /// For another number of sequences, and for lengths that no snapshot has, unless they are the present ones or all
    /// 0. An error does not change the cache.
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
                self.states.truncate(snapshot + 1);
                self.snapshot();
            }
            None if lens.iter().all(|&len| len == 0) => self.reset(),
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
    /// the other one.
    ///
    /// # Errors
    /// For a cache whose states have other shapes, another dtype or another device. The cache is unchanged then.
    pub fn join(&mut self, other: &Self) -> Result<()> {
        let (Some(own), Some(added)) = (self.states.last(), other.states.last()) else {
            if self.states.is_empty() {
                self.states.clone_from(&other.states);
            }
            return Ok(());
        };
        let joined = own.joined(added)?;
        self.states = vec![joined];
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
    /// For a state of other shapes or on another device than the call, and for convolution inputs of another dtype.
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
        Ok(Some(state))
    }

    /// Replaces the present state by the state after a call.
    ///
    /// # Errors
    /// If a tensor is tracked for gradients, which would end here.
    pub(super) fn advance(&mut self, lens: Vec<usize>, conv_inputs: &Tensor, head_states: &Tensor) -> Result<()> {
        if conv_inputs.track_op() || head_states.track_op() {
            bail!(
                "[{OP}] the layer's states are tracked for gradients, which a cache cannot store, expected a layer after \
                 `freeze()` and an input `xs.detach()`"
            )
        }
        // Candle concatenates views into a transposed tensor, which `index_select` does not take.
        let state =
            CachedState { lens, conv_inputs: conv_inputs.contiguous()?, head_states: head_states.contiguous()? };
        self.states.pop();
        self.states.push(state);
        Ok(())
    }
}
