//! The recurrent state of a gated delta net between calls.

use candle_core::{Result, Tensor, bail};

use candle_attention_modules::base::Expect;

/// The cache of one [`GatedDeltaNet`](crate::GatedDeltaNet) for a batch of sequences: the state of each head, and the
/// last K - 1 inputs of the convolutions. Its size does not depend on the number of tokens.
///
/// A call with a cache ([`DeltaInput::with_cache`](crate::DeltaInput::with_cache)) continues after the last one: a
/// prompt in pieces and single tokens give the results of one call over all tokens. A call that fails leaves the cache
/// unchanged. A cache keeps nothing that is tracked for gradients: a call with a layer of variables is an error.
///
/// A token cannot be removed from a state: [`truncate`](Self::truncate) returns to a [`snapshot`](Self::snapshot), or
/// to the beginning.
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
#[derive(Debug, Clone, Default)]
pub struct DeltaCache {
    now: Held,
    /// By length, the shortest first.
    snapshots: Vec<Held>,
}

/// What is kept after some number of tokens. Tensors are never written to, so a clone copies no data.
#[derive(Debug, Clone, Default)]
struct Held {
    /// The number of tokens of each sequence.
    lens: Vec<usize>,
    /// The last inputs of the convolution (B, K - 1, C), and the states (B, H, D_k, D_v); none before the first call.
    tensors: Option<[Tensor; 2]>,
}

impl Held {
    fn len(&self) -> usize {
        self.lens.iter().copied().max().unwrap_or(0)
    }
}

impl DeltaCache {
    /// The length of the longest sequence.
    pub fn len(&self) -> usize {
        self.now.len()
    }

    /// The length of each sequence; empty before the first call.
    pub fn lens(&self) -> Vec<usize> {
        self.now.lens.clone()
    }

    /// Whether no sequence has a token.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes of all that is kept, snapshots included.
    pub fn memory(&self) -> usize {
        let tensors = [&self.now].into_iter().chain(&self.snapshots).flat_map(|held| held.tensors.iter().flatten());
        tensors.map(|tensor| tensor.elem_count() * tensor.dtype().size_in_bytes()).sum()
    }

    /// Forgets all sequences and all snapshots.
    pub fn reset(&mut self) {
        *self = Self::default();
    }

    /// Keeps the present states, so that [`truncate`](Self::truncate) can return to this [`len`](Self::len), in the
    /// place of an earlier snapshot of the same length. It copies nothing, but its memory stays in use until the cache
    /// is truncated to a shorter length or reset.
    pub fn snapshot(&mut self) {
        let len = self.len();
        self.snapshots.retain(|held| held.len() < len);
        self.snapshots.push(self.now.clone());
    }

    /// Returns every sequence to the snapshot at this [`len`](Self::len), and drops later snapshots. Without a snapshot
    /// at 0, 0 is the empty cache.
    ///
    /// # Errors
    /// For a length without a snapshot that is neither 0 nor the present length. The cache is unchanged then.
    pub fn truncate(&mut self, len: usize) -> Result<()> {
        let (own, kept) = (self.len(), self.snapshots.iter().map(Held::len));
        match self.snapshots.iter().find(|held| held.len() == len) {
            Some(held) => self.now = held.clone(),
            None if len == own => {}
            None if len == 0 => self.now = Held::default(),
            None => bail!(
                "[delta_cache] {own} tokens are to be truncated to {len}, expected 0 or a length of which a snapshot was \
                 kept, {:?}: a state cannot forget its last token",
                kept.collect::<Vec<_>>()
            ),
        }
        self.snapshots.retain(|held| held.len() <= len);
        Ok(())
    }

    /// Replaces sequence n of the batch by sequence `sequences[n]`, in snapshots too, as beam search does between its
    /// steps; a sequence may be repeated or left out. An empty slice is a [`reset`](Self::reset).
    ///
    /// # Errors
    /// For an index that the batch does not have. The cache is unchanged then.
    pub fn reorder(&mut self, sequences: &[usize]) -> Result<()> {
        let held = self.now.lens.len();
        if let Some(sequence) = sequences.iter().find(|&&sequence| sequence >= held) {
            bail!("[delta_cache] sequence {sequence} was asked for, expected one of the {held} that the cache holds")
        }
        if sequences.is_empty() {
            self.reset();
            return Ok(());
        }
        let rows: Vec<_> = sequences.iter().map(|&sequence| sequence as u32).collect();
        let mut moved = self.clone();
        for held in [&mut moved.now].into_iter().chain(&mut moved.snapshots).filter(|held| !held.lens.is_empty()) {
            held.lens = sequences.iter().map(|&sequence| held.lens[sequence]).collect();
            for tensor in held.tensors.iter_mut().flatten() {
                *tensor = tensor.index_select(&Tensor::new(rows.as_slice(), tensor.device())?, 0)?;
            }
        }
        *self = moved;
        Ok(())
    }

    /// A second cache with the same sequences and snapshots, which continues independently. It copies nothing.
    ///
    /// # Errors
    /// Never; the signature is that of [`AttentionCache::fork`](candle_attention_core::AttentionCache::fork).
    pub fn fork(&self) -> Result<Self> {
        Ok(self.clone())
    }

    /// What is kept, if anything is, of these shapes and for a call with these inputs.
    pub(super) fn held(&self, inputs: &[usize], states: &[usize], xs: &Tensor) -> Result<Option<&[Tensor; 2]>> {
        if let Some([last, state]) = &self.now.tensors {
            let last = Expect::many("delta_cache", "last inputs", last).sizes(inputs)?;
            last.beside("the call", xs.device())?.dtype(xs.dtype(), "the call's")?;
            Expect::many("delta_cache", "states", state).sizes(states)?.beside("the call", xs.device())?;
        }
        Ok(self.now.tensors.as_ref())
    }

    /// What there is after a call, in sequences of these lengths.
    ///
    /// # Errors
    /// If what is to be kept is tracked for gradients, which would end here.
    pub(super) fn advance(&mut self, lens: Vec<usize>, tensors: [Tensor; 2]) -> Result<()> {
        if tensors.iter().any(Tensor::track_op) {
            bail!(
                "[delta_cache] the layer's states are tracked for gradients, which a cache cannot keep, expected a layer \
                 after `freeze()` and an input `xs.detach()`"
            )
        }
        self.now = Held { lens, tensors: Some(tensors) };
        Ok(())
    }
}
