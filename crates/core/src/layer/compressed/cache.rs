//! The cache of attention to compressed keys.

use candle_core::{Result, Tensor};

/// The tokens of earlier calls of a [`CompressedKeyAttention`](crate::CompressedKeyAttention), for each sequence of a
/// batch: the keys in the window of the next token, all compressed keys, the keys of an indexer, and the projections of
/// the tokens that the next compressed key is of.
///
/// ```
/// use candle_attention::{
///     CompressedKeyAttention, CompressedKeyAttentionConfig, CompressedKeyCache, CompressedKeyInput, KeyCompression,
/// };
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::VarBuilder;
/// # fn main() -> candle_core::Result<()> {
/// let cfg = CompressedKeyAttentionConfig {
///     head_dim: 16,
///     rope_head_dim: 4,
///     window: 8,
///     output_groups: 2,
///     compression: Some(KeyCompression { rate: 4, overlaps: false, indexer: None }),
///     ..CompressedKeyAttentionConfig::new(64, 4)
/// };
/// let layer = CompressedKeyAttention::new(&cfg, VarBuilder::zeros(DType::F32, &Device::Cpu))?;
/// let mut cache = CompressedKeyCache::default();
/// let prompt = Tensor::randn(0f32, 1., (2, 30, 64), &Device::Cpu)?;
/// let ys = layer.forward_with(CompressedKeyInput::new(&prompt).with_cache(&mut cache))?;
/// assert_eq!((ys.dims(), cache.lens()), (&[2, 30, 64][..], vec![30, 30]));
/// // The next token attends to its window, and to one key for each 4 tokens.
/// let token = Tensor::randn(0f32, 1., (2, 1, 64), &Device::Cpu)?;
/// let y = layer.forward_with(CompressedKeyInput::new(&token).with_cache(&mut cache))?;
/// assert_eq!(y.dims(), [2, 1, 64]);
/// # Ok(()) }
/// ```
///
/// A cache is not `Clone`, since calls write to its buffers in place: [`fork`](Self::fork) copies them. Tokens cannot be
/// taken back, since a compressed key does not tell its tokens apart.
#[derive(Debug, Default)]
pub struct CompressedKeyCache {
    pub(super) sequences: Vec<SequenceState>,
}

/// The tokens of earlier calls of one sequence. Clones share buffers.
#[derive(Debug, Clone, Default)]
pub(super) struct SequenceState {
    /// The number of tokens.
    pub len: usize,
    /// The keys of the last tokens, (at most window - 1, D).
    pub recent: Option<Tensor>,
    /// The compressed keys of the layer.
    pub keys: CompressedRows,
    /// The compressed keys of its indexer.
    pub index_keys: CompressedRows,
}

/// The keys that a compressor made of the tokens of earlier calls, and the tokens that it has not compressed.
#[derive(Debug, Clone, Default)]
pub(super) struct CompressedRows {
    pub keys: GrowingRows,
    /// The projections of the tokens that later keys are of.
    pub pending: Option<Tensor>,
}

/// Rows (len, width) in a buffer that may have memory for more.
#[derive(Debug, Clone, Default)]
pub(super) struct GrowingRows {
    buffer: Option<Tensor>,
    len: usize,
}

impl GrowingRows {
    /// Returns the rows; `None` if there are none.
    pub fn rows(&self) -> Result<Option<Tensor>> {
        match &self.buffer {
            Some(buffer) if self.len > 0 => buffer.narrow(0, 0, self.len).map(Some),
            _ => Ok(None),
        }
    }

    /// Returns these rows and some more, which are written behind them if the buffer has memory for them.
    pub fn followed_by(&self, more: &Tensor) -> Result<Self> {
        let (count, width) = more.dims2()?;
        let len = self.len + count;
        let buffer = match &self.buffer {
            Some(buffer) if len <= buffer.dim(0)? => buffer.clone(),
            _ => {
                let larger = Tensor::zeros((len.max(2 * self.len), width), more.dtype(), more.device())?;
                if let Some(rows) = self.rows()? {
                    larger.slice_set(&rows.contiguous()?, 0, 0)?;
                }
                larger
            }
        };
        buffer.slice_set(&more.contiguous()?, 0, self.len)?;
        Ok(Self { buffer: Some(buffer), len })
    }

    /// Returns a copy that shares no buffer.
    fn fork(&self) -> Result<Self> {
        let buffer = self.buffer.as_ref().map(Tensor::copy).transpose()?;
        Ok(Self { buffer, len: self.len })
    }

    fn memory(&self) -> usize {
        self.buffer.as_ref().map_or(0, bytes)
    }
}

impl CompressedRows {
    fn fork(&self) -> Result<Self> {
        Ok(Self { keys: self.keys.fork()?, pending: self.pending.clone() })
    }

    fn memory(&self) -> usize {
        self.keys.memory() + self.pending.as_ref().map_or(0, bytes)
    }
}

fn bytes(tensor: &Tensor) -> usize {
    tensor.elem_count() * tensor.dtype().size_in_bytes()
}

impl CompressedKeyCache {
    /// Returns the number of tokens of each sequence; empty before the first call.
    pub fn lens(&self) -> Vec<usize> {
        self.sequences.iter().map(|sequence| sequence.len).collect()
    }

    /// Returns the number of bytes of all buffers.
    pub fn memory(&self) -> usize {
        let of_sequence = |sequence: &SequenceState| {
            let recent = sequence.recent.as_ref().map_or(0, bytes);
            recent + sequence.keys.memory() + sequence.index_keys.memory()
        };
        self.sequences.iter().map(of_sequence).sum()
    }

    /// Removes all sequences.
    pub fn reset(&mut self) {
        self.sequences.clear();
    }

    /// Returns a copy, which continues the sequences in another way.
    ///
    /// # Errors
    /// If the copy does not fit in memory.
    pub fn fork(&self) -> Result<Self> {
        let mut sequences = Vec::with_capacity(self.sequences.len());
        for SequenceState { len, recent, keys, index_keys } in &self.sequences {
            let (keys, index_keys) = (keys.fork()?, index_keys.fork()?);
            sequences.push(SequenceState { len: *len, recent: recent.clone(), keys, index_keys });
        }
        Ok(Self { sequences })
    }
}
