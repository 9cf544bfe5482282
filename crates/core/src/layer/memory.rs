//! Keys and values of cross-attention that were projected once for several calls.

use candle_core::{Result, Tensor, bail};

use crate::position::KeyValueHeads;
use candle_attention_modules::base::check_memory;

const OP: &str = "projected_memory";

/// Keys (B, H_kv, T_kv, D) and values (B, H_kv, T_kv, D_v) that a layer projected by
/// [`MultiHeadAttention::project_memory`](crate::MultiHeadAttention::project_memory). They are for any number of calls of
/// cross-attention, or for later layers that attend to the keys of this layer
/// ([`KvSharing::EarlierLayer`](crate::KvSharing)).
///
/// A memory of one sequence, (1, ..), serves calls of any number of sequences, such as the beams of one input: all of
/// them read it in place. Beams of several inputs need a memory with a row for each ([`repeat`](Self::repeat)).
///
/// ```
/// use candle_attention::{AttentionInput, MultiHeadAttention, MultiHeadAttentionConfig};
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::VarBuilder;
/// # fn main() -> candle_core::Result<()> {
/// let cfg = MultiHeadAttentionConfig::new(64, 4);
/// let mha = MultiHeadAttention::new(&cfg, VarBuilder::zeros(DType::F32, &Device::Cpu))?;
/// let encoded = Tensor::randn(0f32, 1., (2, 30, 64), &Device::Cpu)?;
/// let mut memory = mha.project_memory(&encoded, &encoded)?.repeat(3)?; // 3 beams of each of 2 inputs
/// let beams = Tensor::randn(0f32, 1., (6, 1, 64), &Device::Cpu)?;
/// mha.forward_with(AttentionInput::new(&beams).with_memory(&memory))?;
/// memory.reorder(&[0, 0, 1, 5, 3])?; // as the caches of the decoder
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct ProjectedMemory {
    /// The keys, followed by those that the layer appends.
    pub(super) k: Tensor,
    /// The values, followed by those that the layer appends.
    pub(super) v: Tensor,
    /// T_kv without the appended keys.
    pub(super) t_kv: usize,
    /// Whether the inputs had a batch dimension.
    pub(super) batched: bool,
}

impl ProjectedMemory {
    /// Returns the number of sequences, B.
    pub fn batch_size(&self) -> usize {
        self.k.dims()[0]
    }

    /// Returns a memory with each sequence `n` times, one after the other: the beams of sequence 0, then the beams
    /// of sequence 1, and so on, as transformers expands its inputs. A memory of one sequence without a batch dimension
    /// gets one.
    ///
    /// Copies keys and values. A memory of one sequence is not copied: all beams read it in place.
    ///
    /// # Errors
    /// For 0 times, and for copies that do not fit in memory.
    #[doc(alias("repeat_interleave", "expand_inputs_for_generation"))]
    pub fn repeat(&self, n: usize) -> Result<Self> {
        if n == 0 {
            bail!("[{OP}] n is 0, expected at least 1")
        }
        let sequences: Vec<_> = (0..self.batch_size()).flat_map(|sequence| vec![sequence; n]).collect();
        let mut repeated = Self { batched: true, ..self.clone() };
        repeated.reorder(&sequences)?;
        Ok(repeated)
    }

    /// Replaces sequence n by sequence `sequences[n]`, as
    /// [`AttentionCache::reorder`](crate::AttentionCache::reorder) does. A sequence may occur several times or not at
    /// all.
    ///
    /// Copies the keys and values, unless the order is the present one or all entries are one sequence. Beams that stay
    /// with their input need no reordering, since all beams of an input have one memory.
    ///
    /// # Errors
    /// For a sequence that the memory does not have, for a memory without a batch dimension, and for copies that do not
    /// fit in memory. An error does not change the memory.
    pub fn reorder(&mut self, sequences: &[usize]) -> Result<()> {
        let count = self.batch_size();
        if !self.batched {
            bail!("[{OP}] the memory is of one sequence without a batch, expected `repeat` first")
        }
        if let Some(sequence) = sequences.iter().find(|&&sequence| sequence >= count) {
            bail!("[{OP}] an entry of the order is {sequence}, expected one of the memory's {count} sequences")
        }
        if sequences.iter().copied().eq(0..count) {
            return Ok(());
        }
        let k = selected(&self.k, sequences)?;
        self.v = selected(&self.v, sequences)?;
        self.k = k;
        Ok(())
    }

    /// Returns the keys and values for `b` sequences. A memory of one sequence is a view that repeats it.
    pub(super) fn for_batch(&self, b: usize) -> Result<KeyValueHeads> {
        if self.batch_size() == b {
            return Ok(KeyValueHeads { keys: self.k.clone(), values: self.v.clone() });
        }
        Ok(KeyValueHeads { keys: repeated(&self.k, 0, b)?, values: repeated(&self.v, 0, b)? })
    }
}

/// Returns a tensor (B, ..) with sequence `sequences[n]` as sequence n: a view, if all entries are one sequence.
fn selected(tensor: &Tensor, sequences: &[usize]) -> Result<Tensor> {
    let first = sequences.first().copied().unwrap_or(0);
    // In a view that repeats one sequence, all sequences are one.
    let is_one = tensor.stride()[0] == 0 || sequences.iter().all(|&sequence| sequence == first);
    if is_one && !sequences.is_empty() {
        return repeated(tensor, first, sequences.len());
    }
    if sequences.is_empty() {
        return Tensor::zeros([&[0], &tensor.dims()[1..]].concat(), tensor.dtype(), tensor.device());
    }
    let dims = [&[sequences.len()], &tensor.dims()[1..], &[tensor.dtype().size_in_bytes()]].concat();
    check_memory(OP, format_args!("a memory of {} sequences", sequences.len()), &dims)?;
    let indices: Vec<_> = sequences.iter().map(|&sequence| sequence as u32).collect();
    tensor.contiguous()?.index_select(&Tensor::new(indices.as_slice(), tensor.device())?, 0)
}

/// Returns a view that repeats one sequence of a tensor (B, ..).
fn repeated(tensor: &Tensor, sequence: usize, n: usize) -> Result<Tensor> {
    let dims = [&[n], &tensor.dims()[1..]].concat();
    tensor.narrow(0, sequence, 1)?.broadcast_as(dims)
}
