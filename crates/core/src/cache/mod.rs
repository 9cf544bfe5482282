//! The keys and values of earlier calls of a layer. `staged` has one call with a cache, `sink_parts` a call past the
//! window of a cache that keeps sink tokens, `storage` the buffers, `rows` the order of their rows, `quantize` their
//! codes, `rotation` what is done before codes of 4 bits, `batch` the edits of the batch, `drafts` the choice among
//! drafted tokens, `gathered` a cache of rows that were stored elsewhere.

mod batch;
mod config;
mod drafts;
mod gathered;
mod quantize;
mod rotation;
mod rows;
mod sink_parts;
mod sink_window;
mod staged;
mod storage;
#[cfg(test)]
mod tests;
mod tokens;

pub use config::AttentionCacheConfig;
pub use drafts::check_kept;
pub use quantize::QUANTIZE_CASE;
pub use tokens::{NewTokens, Padding};

pub(crate) use gathered::GatheredRows;
pub(crate) use rotation::{Hadamard, rotated, rotated_back};
pub(crate) use staged::{CachedCall, KeyChoice};
pub(crate) use storage::{Buffer, BufferCodes, KvFloats, KvSizes, StorageFormat};

use std::ops::Range;

use candle_core::{DType, Result, bail};

use crate::position::Positions;
use candle_attention_modules::base::check_entries;
use rows::RowOrder;
use storage::KvBuffers;

const OP: &str = "attention_cache";

/// The keys and values of the earlier calls of one layer, for a sequence or a batch of sequences: a KV cache. For
/// latent attention, the latents from which the layer computes them.
///
/// A call with a cache ([`AttentionInput::with_cache`](crate::AttentionInput::with_cache)) appends its keys and values
/// in place, and its queries attend to all stored ones without a copy. In a causal layer, a prompt, pieces of it and
/// single tokens have the numbers of one call over the whole sequence. In a layer that is not causal (of an encoder), a
/// query attends to later tokens of its own call, but not to tokens of later calls.
///
/// A call that fails does not change the cache. If the output of a call is tracked for gradients, its graph keeps the
/// buffers and the cache continues with a copy.
///
/// ```
/// use candle_attention::{AttentionCache, AttentionInput, MultiHeadAttention, MultiHeadAttentionConfig};
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::VarBuilder;
/// # fn main() -> candle_core::Result<()> {
/// let cfg = MultiHeadAttentionConfig::new(64, 4).with_num_kv_heads(2).with_causal(true);
/// let mha = MultiHeadAttention::new(&cfg, VarBuilder::zeros(DType::F32, &Device::Cpu))?;
/// let mut cache = AttentionCache::default();
///
/// let prompt = Tensor::randn(0f32, 1., (2, 5, 64), &Device::Cpu)?;
/// let lens = [5, 3]; // The second sequence has two positions of padding.
/// mha.forward_with(AttentionInput::new(&prompt).with_cache(&mut cache).with_valid_lens(&lens))?;
/// let token = Tensor::randn(0f32, 1., (2, 1, 64), &Device::Cpu)?;
/// let y = mha.forward_with(AttentionInput::new(&token).with_cache(&mut cache))?;
/// assert_eq!((y.dims(), cache.lens()), ([2, 1, 64].as_slice(), vec![6, 4]));
/// # Ok(()) }
/// ```
///
/// # Batches
///
/// The sequences of a batch may have different lengths. Padding, on the left or on the right, is given at the call and
/// is not stored: position n is the n-th token of its sequence. Masks count positions in the same way, and a causal
/// mask is aligned to the end of each sequence.
///
/// Sequences end and come between calls: [`remove`](Self::remove) and [`join`](Self::join) are for continuous
/// batching, and [`reorder`](Self::reorder) selects beams. [`truncate`](Self::truncate) takes positions back, and
/// [`keep`](Self::keep) takes back all drafted tokens but some.
///
/// # Copies
///
/// A cache is not `Clone`, since calls write to its buffers in place, and a copy of them may not fit in memory:
/// [`fork`](Self::fork) copies them or returns an error. It continues one prompt in two ways. A model that has to be
/// `Clone` stores its caches elsewhere, for example in a `Vec` that the caller passes to `forward`.
///
/// # Positions
///
/// Keys are stored after their rotation. The positions that a call was given
/// ([`AttentionInput::with_positions`](crate::AttentionInput::with_positions)) are stored too: relative biases and
/// Falcon's ALiBi of later calls count from them.
///
/// Scalings whose frequencies depend on the length of a call ([`RopeScaling::Dynamic`](crate::RopeScaling::Dynamic),
/// [`RopeScaling::LongRope`](crate::RopeScaling::LongRope)) take the length of the longest sequence after the call, and
/// keys of earlier calls are not rotated again, as in transformers. Phi 3 in transformers computes all keys again in
/// the call that first exceeds the original context. A model that follows it asks
/// [`RopeConfig::frequencies_differ`](crate::RopeConfig::frequencies_differ), and calls [`reset`](Self::reset) there.
///
/// # Memory
///
/// Buffers are (B, H_kv, capacity, D) for keys and (B, H_kv, capacity, D_v) for values, allocated in the first call;
/// for [latent attention](crate::MultiHeadLatentAttention) there is one, (B, 1, capacity, `kv_lora_rank +
/// rope_head_dim`). The caches of `candle_nn::kv_cache` have one length for a whole batch and grow by a constant
/// amount.
#[doc(alias("past_key_values", "past_key_value", "kv_cache", "KvCache"))]
#[derive(Debug, Default)]
pub struct AttentionCache {
    config: AttentionCacheConfig,
    buffers: Option<KvBuffers>,
    /// The last positions of each sequence that the buffers store: all but the ones that a sliding cache has dropped,
    /// and its sink tokens. Empty before the first call.
    stored: Vec<Range<usize>>,
    /// The position of each token of each sequence, of dropped ones too, if a call was given positions; otherwise a
    /// token's position is its index in the sequence.
    positions: Option<Vec<Vec<u32>>>,
    /// The dtype of the keys of earlier calls, which may differ from the dtype in which they are stored.
    dtype: Option<DType>,
    padding: EarlierPadding,
}

/// The ways in which earlier calls had padding, against which masks of later calls are checked.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct EarlierPadding {
    /// Whether a mask masked tokens of a call for all queries. The cache stores these tokens.
    pub is_stored: bool,
    /// Whether padding on the left was left out of the cache.
    pub is_left_out: bool,
}

impl AttentionCache {
    /// Returns an empty cache. Its first call determines the number of sequences and the shape of keys and values.
    ///
    /// # Errors
    /// For a config whose options do not fit together.
    pub fn new(cfg: &AttentionCacheConfig) -> Result<Self> {
        cfg.validate()?;
        Ok(Self { config: cfg.clone(), ..Self::default() })
    }

    /// Returns the config of the cache.
    pub fn config(&self) -> &AttentionCacheConfig {
        &self.config
    }

    /// Returns the length of the longest sequence: the number of its tokens, of dropped ones too.
    pub fn len(&self) -> usize {
        self.stored.iter().map(|positions| positions.end).max().unwrap_or(0)
    }

    /// Returns the length of each sequence, which is the position of its next token; empty before the first call.
    pub fn lens(&self) -> Vec<usize> {
        self.stored.iter().map(|positions| positions.end).collect()
    }

    /// Returns the positions of each sequence that are stored: `0..len`, or the last ones in a sliding cache; empty
    /// before the first call. Sink tokens are stored besides.
    ///
    /// The weights of a call have a column for each row of the buffers. In a call of no more tokens than the window,
    /// column 0 of a sequence is the first position that is stored after the call.
    pub fn stored(&self) -> &[Range<usize>] {
        &self.stored
    }

    /// Returns the order of the rows in the buffers.
    fn row_order(&self) -> RowOrder {
        RowOrder { sink_tokens: self.config.sink_tokens() }
    }

    /// Returns whether no sequence has a token.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of positions of each sequence that the buffers have memory for; 0 before the first call.
    pub fn capacity(&self) -> usize {
        self.buffers.as_ref().map_or(0, KvBuffers::capacity)
    }

    /// Returns the number of bytes of all buffers.
    pub fn memory(&self) -> usize {
        self.buffers.as_ref().map_or(0, KvBuffers::bytes)
    }

    /// Removes all sequences. The buffers stay allocated for the next ones, which may be another number of sequences.
    #[doc(alias = "clear")]
    pub fn reset(&mut self) {
        self.stored.clear();
        self.positions = None;
        self.dtype = None;
        self.padding = EarlierPadding::default();
    }

    /// Removes all positions from `len` on of every sequence, as after speculative decoding: `crop` of transformers'
    /// caches. Copies nothing.
    ///
    /// # Errors
    /// As [`truncate_to`](Self::truncate_to).
    #[doc(alias = "crop")]
    pub fn truncate(&mut self, len: usize) -> Result<()> {
        if self.stored.is_empty() && len > 0 {
            bail!("[{OP}] len is {len}, expected 0 for an empty cache")
        }
        self.truncate_to(&vec![len; self.stored.len()])
    }

    /// Removes the positions of each sequence from its entry of `lens` on. The next token of a sequence then has this
    /// position.
    ///
    /// A sliding cache can be truncated to 0 and to any length that it still stores positions of. If a later query then
    /// attends to a dropped key, its call is an error. To remove up to n positions of earlier calls, the cache needs a
    /// window that is n longer than the layer's. The positions of the last call can always be removed, if the capacity
    /// is enough for them and the window.
    ///
    /// # Errors
    /// For another number of sequences, for more positions than a sequence has, and for fewer than a sliding cache has
    /// dropped. An error does not change the cache.
    pub fn truncate_to(&mut self, lens: &[usize]) -> Result<()> {
        check_entries(OP, "lens", lens.len(), self.stored.len(), "sequences")?;
        for (sequence, (&len, stored)) in lens.iter().zip(&self.stored).enumerate() {
            if len > stored.end {
                bail!(
                    "[{OP}] the length for sequence {sequence} is {len}, expected at most its {} positions",
                    stored.end
                )
            }
            if len > 0 && len < stored.start {
                bail!(
                    "[{OP}] the length for sequence {sequence} is {len}, expected 0 or at least {}: the window has \
                     dropped the positions before",
                    stored.start
                )
            }
        }
        for (stored, &len) in self.stored.iter_mut().zip(lens) {
            *stored = if len == 0 { 0..0 } else { stored.start..len };
        }
        for (positions, &len) in self.positions.iter_mut().flatten().zip(lens) {
            positions.truncate(len);
        }
        if lens.iter().all(|&len| len == 0) {
            self.padding = EarlierPadding::default();
        }
        Ok(())
    }

    /// Returns the padding of earlier calls.
    pub(crate) fn earlier_padding(&self) -> EarlierPadding {
        self.padding
    }

    /// Returns whether a call was given positions.
    pub(crate) fn has_given_positions(&self) -> bool {
        self.positions.is_some()
    }

    /// Returns the position of the `n`-th token of a sequence.
    pub(crate) fn position(&self, sequence: usize, n: usize) -> usize {
        let given = self.positions.as_ref().and_then(|positions| positions.get(sequence)?.get(n));
        given.map_or(n, |&position| position as usize)
    }

    /// Returns the tokens of a call of `dims` (B, T) that continues the cache.
    ///
    /// # Errors
    /// For another number of sequences than the cache has, and for padding that does not fit.
    pub(crate) fn new_tokens(&self, dims: (usize, usize), padding: Padding) -> Result<NewTokens> {
        let hint = |name: &str| format!("; lengths that count earlier calls too are for `AttentionMask::with_{name}`");
        NewTokens::new(OP, self.lens(), dims, padding, hint)
    }

    /// Returns the tokens of a call of `dims` (B, T) whose keys are the last ones in the cache.
    ///
    /// # Errors
    /// As [`new_tokens`](Self::new_tokens), and for more tokens than the cache has.
    pub(crate) fn latest_tokens(&self, dims: (usize, usize), padding: Padding) -> Result<NewTokens> {
        let mut tokens = self.new_tokens(dims, padding)?;
        for (sequence, (len, of_call)) in tokens.before.iter_mut().zip(&tokens.tokens).enumerate() {
            let Some(before) = len.checked_sub(of_call.len()) else {
                bail!(
                    "[{OP}] sequence {sequence} has {} tokens, but the cache of the earlier layer holds {len}; \
                     expected its call with the same tokens first",
                    of_call.len()
                )
            };
            *len = before;
        }
        Ok(tokens)
    }

    /// Returns the positions of all keys: (T_kv,), or (B, T_kv) for the T_kv of the longest sequence.
    ///
    /// # Errors
    /// For positions of 2^24 and more.
    pub(crate) fn key_positions(&self) -> Result<Positions> {
        let longest = self.len();
        let Some(mut rows) = self.positions.clone() else { return Positions::starting_at(&[0], longest) };
        if rows.iter().all(|row| *row == rows[0]) {
            rows.truncate(1);
        }
        // No query attends to a key past the end of its sequence.
        rows.iter_mut().for_each(|row| row.resize(longest, 0));
        Positions::of_each(rows.into_iter().flatten().map(|position| position as usize), longest)
    }

    /// Returns the format in which the cache stores keys and values of a dtype.
    fn format(&self, dtype: DType) -> StorageFormat {
        match self.config.codes() {
            Some(codes) => StorageFormat::Codes(codes),
            None => StorageFormat::Floats(self.config.dtype().unwrap_or(dtype)),
        }
    }

    /// Returns the position of each token of sequences of these lengths.
    fn positions_of(&self, lens: &[usize]) -> Vec<Vec<u32>> {
        match &self.positions {
            Some(positions) => positions.clone(),
            None => lens.iter().map(|&len| (0..len as u32).collect()).collect(),
        }
    }

    /// Returns the position of each token of each sequence after a call, if this call or an earlier one was given some.
    fn positions_with(&self, new: &NewTokens) -> Result<Option<Vec<Vec<u32>>>> {
        if self.positions.is_none() && new.given_positions.is_none() {
            return Ok(None);
        }
        let mut rows = self.positions_of(&new.before);
        let positions = new.positions()?;
        for (b, (row, tokens)) in rows.iter_mut().zip(&new.tokens).enumerate() {
            row.extend(&positions.of_sequence(b)[tokens.clone()]);
        }
        Ok(Some(rows))
    }
}
