//! What one call of a gated delta net reads: its inputs, and the recurrent state between calls.

use candle_core::{Result, Tensor, bail};
use macro_rules_attribute::apply;

use super::{GatedDeltaNet, OP};
use candle_attention_core::internal::{NewTokens, Padding, rows_of_ones};
use candle_attention_core::{Backend, PackedSequences};
use candle_attention_modules::base::Dim::{Any, Is, Named};
use candle_attention_modules::base::{Expect, fits_in_memory, options};

/// The inputs of one call of a [`GatedDeltaNet`](crate::GatedDeltaNet). A `&Tensor` converts into one without options.
#[apply(options)]
#[derive(Debug)]
#[must_use]
pub struct DeltaInput<'a> {
    pub(super) xs: &'a Tensor,
    /// Continues after the tokens of earlier calls, and updates the cache with those of this call.
    pub(super) cache: Option<&'a mut DeltaCache>,
    /// Padding on either side: 1 for tokens and 0 for padding, (B, T) in any dtype, for the tokens of this call only,
    /// without those in a cache. The ones of a row are contiguous, and there may be none; on the left there is no
    /// padding once the sequence has tokens in the cache. Padding affects neither the outputs of tokens nor the cache.
    /// Its own outputs have no meaning.
    pub(super) attention_mask: Option<&'a Tensor>,
    /// Padding on the right: the number of tokens of each of the B sequences, at most T.
    pub(super) valid_lens: Option<&'a [usize]>,
    /// Sequences of different lengths, one after the other in `xs` (total, E). Each begins with a state of zeros, and
    /// there is neither a cache nor padding.
    pub(super) packed: Option<&'a PackedSequences>,
    /// A tensor of the output's shape and dtype, which is added to it before it is rounded.
    pub(super) residual: Option<&'a Tensor>,
    /// Which implementation of the rule runs; [`Backend::Auto`] unless given.
    pub(super) backend: Backend,
}

impl<'a> DeltaInput<'a> {
    /// `xs` (B, T, E), or (T, E) for one sequence.
    pub fn new(xs: &'a Tensor) -> Self {
        Self::unset(xs)
    }
}

impl GatedDeltaNet {
    /// The inputs of a call as (B, T, E), with zeros in the place of padding, and which of them are tokens.
    ///
    /// # Errors
    /// For whatever does not fit the layer, or each other.
    pub(super) fn check(&self, input: &DeltaInput) -> Result<(Tensor, NewTokens)> {
        let (cfg, xs, dtype, device) = (&self.config, input.xs, self.out.dtype(), self.out.device());
        let expect = Expect::one(OP, "input", xs);
        match input.packed {
            Some(sequences) => expect.shape(&[Named("total", sequences.total_queries()), Is(cfg.embed_dim())])?,
            None => expect.shape_of(&[&[Any("B"), Any("T"), Is(cfg.embed_dim())], &[Any("T"), Is(cfg.embed_dim())]])?,
        };
        expect.dtype(dtype, "the weights'")?.same_device("the weights", device)?;
        if let Some(residual) = input.residual {
            let residual = Expect::one(OP, "residual", residual).sizes(xs.dims())?;
            residual.dtype(dtype, "the input's")?.same_device("the input", device)?;
        }
        let batch = if xs.rank() == 2 { xs.unsqueeze(0)? } else { xs.clone() };
        let (b, t, _) = batch.dims3()?;
        // What is projected, after what the convolutions have before it: of sequences without tokens too.
        let width = cfg.parts().iter().map(|(rows, _)| rows).sum();
        if !fits_in_memory(&[b, t.saturating_add(cfg.conv_kernel()), width]) {
            bail!("[{OP}] input has shape {:?}, which does not fit in memory", xs.dims())
        }
        let (starts, ends): (Vec<usize>, Vec<usize>);
        let padding = match (input.attention_mask, input.valid_lens) {
            (Some(_), Some(_)) => {
                bail!("[{OP}] both attention_mask and valid_lens were given, expected one of the two")
            }
            (Some(mask), None) => {
                Expect::one(OP, "attention_mask", mask).shape(&[Named("B", b), Named("T", t)])?;
                let rows = rows_of_ones(OP, mask)?;
                if let Some(sequence) = rows.iter().position(|row| row.has_gaps) {
                    bail!(
                        "[{OP}] attention_mask has zeros between ones in sequence {sequence}, expected one run of ones"
                    )
                }
                (starts, ends) = rows.iter().map(|row| (row.start, row.end)).unzip();
                Padding { starts: Some(&starts), valid_lens: Some(&ends) }
            }
            (None, valid_lens) => Padding { starts: None, valid_lens },
        };
        let before = input.cache.as_ref().map(|cache| cache.lens()).unwrap_or_default();
        let tokens = NewTokens::new(OP, before, (b, t), padding, |_| String::new())?;
        if let Some(n) = (0..b).find(|&n| tokens.before[n] > 0 && tokens.tokens[n].start > 0) {
            bail!("[{OP}] sequence {n} has padding between its tokens and those in the cache, expected none")
        }
        if input.packed.is_some() && (input.cache.is_some() || padding != Padding::default()) {
            bail!("[{OP}] packed sequences were given with a cache or with padding, expected neither")
        }
        Ok((tokens.without_padding(batch)?, tokens))
    }
}

impl<'a> From<&'a Tensor> for DeltaInput<'a> {
    fn from(xs: &'a Tensor) -> Self {
        Self::new(xs)
    }
}

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
    /// Snapshots by length, the shortest first, and then what there is now; nothing before the first call.
    held: Vec<Held>,
}

/// What is kept after some number of tokens. Tensors are never written to, so a clone copies no data.
#[derive(Debug, Clone)]
struct Held {
    /// The number of tokens of each sequence.
    lens: Vec<usize>,
    /// The last inputs of the convolution (B, K - 1, C), and the states (B, H, D_k, D_v), contiguous.
    tensors: [Tensor; 2],
}

impl Held {
    fn len(&self) -> usize {
        self.lens.iter().copied().max().unwrap_or(0)
    }
}

impl DeltaCache {
    /// The length of the longest sequence.
    pub fn len(&self) -> usize {
        self.held.last().map_or(0, Held::len)
    }

    /// The length of each sequence; empty before the first call.
    pub fn lens(&self) -> Vec<usize> {
        self.held.last().map(|now| now.lens.clone()).unwrap_or_default()
    }

    /// Whether no sequence has a token.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes of all that is kept, snapshots included.
    pub fn memory(&self) -> usize {
        let tensors = self.held.iter().flat_map(|held| &held.tensors);
        tensors.map(|tensor| tensor.elem_count() * tensor.dtype().size_in_bytes()).sum()
    }

    /// Forgets all sequences and all snapshots.
    pub fn reset(&mut self) {
        self.held.clear();
    }

    /// Keeps the present states, so that [`truncate`](Self::truncate) can return to this [`len`](Self::len), in the
    /// place of an earlier snapshot of the same length. It copies nothing, but its memory stays in use until the cache
    /// is truncated to a shorter length or reset.
    pub fn snapshot(&mut self) {
        if let Some(now) = self.held.pop() {
            self.held.retain(|held| held.len() < now.len());
            self.held.extend([now.clone(), now]);
        }
    }

    /// Returns every sequence to the snapshot at this [`len`](Self::len), and drops later snapshots. Without a snapshot
    /// at 0, 0 is the empty cache.
    ///
    /// # Errors
    /// For a length without a snapshot that is neither 0 nor the present length. The cache is unchanged then.
    pub fn truncate(&mut self, len: usize) -> Result<()> {
        let to = self.held.iter().find(|held| held.len() == len).cloned();
        if to.is_none() && len > 0 {
            let (own, mut kept) = (self.len(), self.held.iter().map(Held::len).collect::<Vec<_>>());
            kept.pop();
            bail!(
                "[delta_cache] {own} tokens are to be truncated to {len}, expected 0 or a length of which a snapshot was \
                 kept, {kept:?}: a state cannot forget its last token"
            )
        }
        self.held.pop();
        self.held.retain(|held| held.len() <= len);
        self.held.extend(to);
        Ok(())
    }

    /// Replaces sequence n of the batch by sequence `sequences[n]`, in snapshots too, as beam search does between its
    /// steps; a sequence may be repeated or left out. An empty slice is a [`reset`](Self::reset).
    ///
    /// # Errors
    /// For an index that the batch does not have. The cache is unchanged then.
    pub fn reorder(&mut self, sequences: &[usize]) -> Result<()> {
        let lens = self.lens().len();
        if let Some(sequence) = sequences.iter().find(|&&sequence| sequence >= lens) {
            bail!("[delta_cache] sequence {sequence} was asked for, expected one of the {lens} that the cache holds")
        }
        if sequences.is_empty() {
            self.reset();
            return Ok(());
        }
        let rows: Vec<_> = sequences.iter().map(|&sequence| sequence as u32).collect();
        let mut moved = self.clone();
        for held in &mut moved.held {
            held.lens = sequences.iter().map(|&sequence| held.lens[sequence]).collect();
            for tensor in &mut held.tensors {
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
        let tensors = self.held.last().map(|now| &now.tensors);
        if let Some([last, state]) = tensors {
            let last = Expect::many("delta_cache", "last inputs", last).sizes(inputs)?;
            last.same_device("the call", xs.device())?.dtype(xs.dtype(), "the call's")?;
            Expect::many("delta_cache", "states", state).sizes(states)?.same_device("the call", xs.device())?;
        }
        Ok(tensors)
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
        // Candle concatenates views into a transposed tensor, which `index_select` does not take.
        let tensors = [tensors[0].contiguous()?, tensors[1].contiguous()?];
        self.held.pop();
        self.held.push(Held { lens, tensors });
        Ok(())
    }
}
