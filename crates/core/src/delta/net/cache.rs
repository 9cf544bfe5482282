//! What a gated delta net keeps of the tokens that it has seen.

use candle_core::{Result, Tensor, bail};

use crate::base::{Dim, Expect};

/// What one gated delta net keeps of the tokens that it has seen, for a batch of sequences: a state for each head, and
/// the last inputs of its convolutions. Its size does not depend on how many tokens those were.
///
/// A call with a cache ([`DeltaInput::with_cache`](crate::DeltaInput::with_cache)) goes on where the last one ended, so
/// that a prompt, pieces of it and single tokens give the numbers of one call over everything. A call that fails leaves
/// the cache as it was. What is kept is not tracked for gradients.
///
/// A state cannot forget its last token: [`truncate`](Self::truncate) goes back to where a
/// [`snapshot`](Self::snapshot) was kept, and to the beginning.
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

/// What is kept after so many tokens. Tensors are never written to, so that a copy costs nothing.
#[derive(Debug, Clone, Default)]
struct Held {
    /// Of each sequence, how many tokens.
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

    /// Keeps what there is now, so that [`truncate`](Self::truncate) can go back to this length. It copies nothing, but
    /// the memory is in use until the cache goes back before it.
    pub fn snapshot(&mut self) {
        let len = self.len();
        self.snapshots.retain(|held| held.len() < len);
        self.snapshots.push(self.now.clone());
    }

    /// Takes back what came after the snapshot at this [`len`](Self::len), of every sequence, and later snapshots.
    ///
    /// # Errors
    /// For a length that is not 0 or the cache's own and of which no snapshot was kept. The cache is as it was then.
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

    /// Makes sequence n of the batch what sequence `sequences[n]` was, as beam search does between its steps; a
    /// sequence may come several times, or not at all. No sequences is a [`reset`](Self::reset).
    ///
    /// # Errors
    /// For a sequence that is not there. The cache is as it was then.
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

    /// A second cache with the same sequences and snapshots: what is added to one is not in the other. It copies
    /// nothing.
    ///
    /// # Errors
    /// None: it is as [`AttentionCache::fork`](crate::AttentionCache::fork).
    pub fn fork(&self) -> Result<Self> {
        Ok(self.clone())
    }

    /// What is kept, if anything is, of these shapes and for a call with these inputs.
    pub(super) fn held(&self, inputs: &[usize], states: &[usize], xs: &Tensor) -> Result<Option<&[Tensor; 2]>> {
        if let Some([last, state]) = &self.now.tensors {
            let expect = |name, tensor, shape: &[usize]| {
                let shape: Vec<_> = shape.iter().map(|&size| Dim::Is(size)).collect();
                Expect::many("delta_cache", name, tensor).shape(&shape)?.beside("the call", xs.device())
            };
            expect("last inputs", last, inputs)?.dtype(xs.dtype(), "the call's")?;
            expect("states", state, states)?;
        }
        Ok(self.now.tensors.as_ref())
    }

    /// What there is after a call, in sequences of these lengths.
    pub(super) fn advance(&mut self, lens: Vec<usize>, tensors: [Tensor; 2]) {
        self.now = Held { lens, tensors: Some(tensors.map(|tensor| tensor.detach())) };
    }
}
