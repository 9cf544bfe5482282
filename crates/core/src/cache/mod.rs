//! Keys and values of the positions that a layer has seen: `staged::CachedCall` is one call with a cache.

mod staged;
mod storage;
#[cfg(test)]
mod tests;

pub use staged::{NewTokens, Padding};
pub use storage::AttentionCacheConfig;

use std::ops::Range;

use candle_core::{DType, Result, bail};

use crate::position::Positions;
use candle_attention_modules::base::check_entries;
use storage::KvBuffers;

const OP: &str = "attention_cache";

/// The keys and values of the positions that one layer has seen, for one sequence or a batch of them; or the latents
/// from which a layer computes them.
///
/// A call with a cache ([`AttentionInput::with_cache`](crate::AttentionInput::with_cache)) appends its keys and values
/// to those of the calls before, in place, and its queries attend to all of them without a copy. A prompt, pieces of it
/// and single tokens give the numbers of one call over everything, if no query sees a later key: in a causal layer. In
/// one that is not causal (an encoder's), a query sees the later tokens of its own call, and none of the calls to come.
/// A call that fails leaves the cache as it was. A call whose output is tracked for gradients leaves its buffers to the
/// graph, and the cache goes on with a copy.
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
/// let lens = [5, 3]; // the second sequence has two positions of padding
/// mha.forward_with(AttentionInput::new(&prompt).with_cache(&mut cache).with_valid_lens(&lens))?;
/// let token = Tensor::randn(0f32, 1., (2, 1, 64), &Device::Cpu)?;
/// let y = mha.forward_with(AttentionInput::new(&token).with_cache(&mut cache))?;
/// assert_eq!((y.dims(), cache.lens()), ([2, 1, 64].as_slice(), vec![6, 4]));
/// # Ok(()) }
/// ```
///
/// Each sequence of a batch has a length of its own. Padding, on the left or on the right, is given at the call and is
/// not stored: position n is the n-th token of its sequence, in masks too, and masks that are aligned to the end are
/// aligned to the end of each sequence. [`truncate`](Self::truncate) drops positions, [`reorder`](Self::reorder)
/// selects beams, and [`fork`](Self::fork) continues one prompt in two ways.
///
/// Keys are stored after their rotation, with the positions that their call was given
/// ([`AttentionInput::with_positions`](crate::AttentionInput::with_positions)): these count for relative biases and
/// Falcon's ALiBi of later calls.
///
/// Scalings whose frequencies depend on the length of a call ([`RopeScaling::Dynamic`](crate::RopeScaling::Dynamic),
/// [`RopeScaling::LongRope`](crate::RopeScaling::LongRope)) take that of the longest sequence with the call, and keys
/// of earlier calls are not rotated again: what transformers does with a cache. Its Phi 3 computes everything again in
/// the call that first exceeds the original context; a model that follows it asks
/// [`RopeConfig::frequencies_differ`](crate::RopeConfig::frequencies_differ), and calls [`reset`](Self::reset) there.
///
/// Buffers are (B, H_kv, capacity, D) and (B, H_kv, capacity, D_v), made in the first call; for [latent
/// attention](crate::MultiHeadLatentAttention) one of (B, 1, capacity, `kv_lora_rank + rope_head_dim`). The caches of
/// `candle_nn::kv_cache` have one length for a whole batch and grow by a constant amount.
#[derive(Debug, Default)]
pub struct AttentionCache {
    config: AttentionCacheConfig,
    buffers: Option<KvBuffers>,
    /// Of each sequence, the positions that the buffers hold: all but those that a sliding cache has dropped. Empty
    /// before the first call.
    held: Vec<Range<usize>>,
    /// The position of each token of each sequence, also of those that a sliding cache has dropped, once a call was
    /// given some; else a token's position is its place in the sequence.
    positions: Option<Vec<Vec<u32>>>,
    /// The dtype of the keys of earlier calls, which may differ from that in which they are stored.
    dtype: Option<DType>,
    padding: EarlierPadding,
}

/// The ways in which earlier calls had padding, against which masks of later calls are checked.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct EarlierPadding {
    /// Whether a mask hid tokens of a call from all queries. The cache stores them.
    pub is_stored: bool,
    /// Whether padding on the left was left out of the cache.
    pub is_left_out: bool,
}

impl AttentionCache {
    /// An empty cache. It takes its shape from the first call.
    ///
    /// # Errors
    /// For a config whose numbers do not fit together.
    pub fn new(cfg: &AttentionCacheConfig) -> Result<Self> {
        cfg.validate()?;
        Ok(Self { config: cfg.clone(), ..Self::default() })
    }

    /// The config that the cache was made from.
    pub fn config(&self) -> &AttentionCacheConfig {
        &self.config
    }

    /// The length of the longest sequence: all of its tokens, also those that a sliding cache no longer holds.
    pub fn len(&self) -> usize {
        self.held.iter().map(|held| held.end).max().unwrap_or(0)
    }

    /// The length of each sequence, and so the position of its next token; empty before the first call.
    pub fn lens(&self) -> Vec<usize> {
        self.held.iter().map(|held| held.end).collect()
    }

    /// Whether no sequence has a token.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many positions of each sequence the buffers can hold; 0 before the first call.
    pub fn capacity(&self) -> usize {
        self.buffers.as_ref().map_or(0, KvBuffers::capacity)
    }

    /// The bytes of all buffers.
    pub fn memory(&self) -> usize {
        self.buffers.as_ref().map_or(0, KvBuffers::bytes)
    }

    /// Forgets all sequences. The buffers stay for the next, which may be a batch of another size.
    pub fn reset(&mut self) {
        self.held.clear();
        (self.positions, self.dtype) = (None, None);
        self.padding = EarlierPadding::default();
    }

    /// Takes back all positions from `len` on, of every sequence, as after speculative decoding. Copies nothing.
    ///
    /// # Errors
    /// As [`truncate_to`](Self::truncate_to).
    pub fn truncate(&mut self, len: usize) -> Result<()> {
        if self.held.is_empty() && len > 0 {
            bail!("[{OP}] an empty cache is to be truncated to {len} positions, expected 0")
        }
        self.truncate_to(&vec![len; self.held.len()])
    }

    /// Takes back the positions of each sequence from its entry of `lens` on. The next token of a sequence then has
    /// that position.
    ///
    /// A sliding cache goes back as far as it holds positions, and to 0. Where it has dropped a key that the next query
    /// sees, that call is an error. To go back by up to n positions of earlier calls, it needs a window that is n
    /// longer than the layer's. What the last call brought can always be taken back, if the capacity holds that and the
    /// window.
    ///
    /// # Errors
    /// For another number of sequences, for more positions than a sequence has, and for fewer than a sliding cache has
    /// dropped. The cache is as it was then.
    pub fn truncate_to(&mut self, lens: &[usize]) -> Result<()> {
        check_entries(OP, "lens", lens.len(), self.held.len(), "sequences")?;
        for (sequence, (&len, held)) in lens.iter().zip(&self.held).enumerate() {
            let expected = if len > held.end {
                format!("at most its {}", held.end)
            } else if len > 0 && len < held.start {
                format!("0 or at least the {} that the window has dropped", held.start)
            } else {
                continue;
            };
            bail!("[{OP}] sequence {sequence} is to be truncated to {len} positions, expected {expected}")
        }
        for (held, &len) in self.held.iter_mut().zip(lens) {
            *held = if len == 0 { 0..0 } else { held.start..len };
        }
        for (positions, &len) in self.positions.iter_mut().flatten().zip(lens) {
            positions.truncate(len);
        }
        if lens.iter().all(|&len| len == 0) {
            self.padding = EarlierPadding::default();
        }
        Ok(())
    }

    /// Makes sequence n of the batch what sequence `sequences[n]` was, as beam search does between its steps; a
    /// sequence may come several times, or not at all, and the batch may grow or shrink. No sequences is a
    /// [`reset`](Self::reset).
    ///
    /// In a batch of the same size, sequences that stay at their place are not copied.
    ///
    /// # Errors
    /// For a sequence that is not there, and for buffers that do not fit in memory. The cache is as it was then.
    pub fn reorder(&mut self, sequences: &[usize]) -> Result<()> {
        if let Some(sequence) = sequences.iter().find(|&&sequence| sequence >= self.held.len()) {
            bail!(
                "[{OP}] sequence {sequence} was asked for, expected one of the {} that the cache holds",
                self.held.len()
            )
        }
        if sequences.is_empty() {
            self.reset();
            return Ok(());
        }
        if let Some(buffers) = &self.buffers {
            if sequences.len() == self.held.len() {
                let moved = sequences.iter().enumerate().filter(|&(n, &from)| n != from && !self.held[from].is_empty());
                // All are read before one is written.
                let copies = moved.map(|(n, &from)| Ok((n, buffers.rows(from, 0..self.held[from].len())?.copy()?)));
                for (n, copy) in copies.collect::<Result<Vec<_>>>()? {
                    buffers.write_sequence(n, 0, &copy)?;
                }
            } else {
                let rows: Vec<_> = sequences.iter().map(|&from| (from, 0..self.held[from].len())).collect();
                self.buffers = Some(buffers.gather(&rows, buffers.capacity())?);
            }
        }
        self.held = sequences.iter().map(|&sequence| self.held[sequence].clone()).collect();
        if let Some(positions) = &mut self.positions {
            *positions = sequences.iter().map(|&sequence| positions[sequence].clone()).collect();
        }
        Ok(())
    }

    /// A second cache with the same sequences, in buffers of its own: what is added to one is not in the other.
    ///
    /// # Errors
    /// For buffers that do not fit in memory.
    pub fn fork(&self) -> Result<Self> {
        let buffers = self.buffers.as_ref().filter(|_| !self.held.is_empty());
        Ok(Self {
            config: self.config.clone(),
            buffers: buffers.map(KvBuffers::copy).transpose()?,
            held: self.held.clone(),
            positions: self.positions.clone(),
            dtype: self.dtype,
            padding: self.padding,
        })
    }

    /// Returns the padding of earlier calls.
    pub(crate) fn earlier_padding(&self) -> EarlierPadding {
        self.padding
    }

    /// Returns the position of the `n`-th token of a sequence.
    pub(crate) fn position(&self, sequence: usize, n: usize) -> usize {
        let given = self.positions.as_ref().and_then(|positions| positions.get(sequence)?.get(n));
        given.map_or(n, |&position| position as usize)
    }

    /// The tokens of a call of `dims` (B, T), of which those outside of starts and ends are padding.
    ///
    /// # Errors
    /// For another number of sequences than the cache holds, and for padding that does not fit.
    pub(crate) fn new_tokens(&self, dims: (usize, usize), padding: Padding) -> Result<NewTokens> {
        NewTokens::new(OP, self.lens(), dims, padding)
    }

    /// The tokens of a call of `dims` (B, T) whose keys are the last that the cache holds.
    ///
    /// # Errors
    /// As [`new_tokens`](Self::new_tokens), and for more tokens than are held.
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

    /// The positions of all keys: (T_kv,) or (B, T_kv) for the T_kv of the longest sequence.
    ///
    /// # Errors
    /// For positions of 2^24 and more.
    pub(crate) fn key_positions(&self) -> Result<Positions> {
        let longest = self.len();
        let Some(mut rows) = self.positions.clone() else { return Positions::starting_at(&[0], longest) };
        if rows.iter().all(|row| *row == rows[0]) {
            rows.truncate(1);
        }
        // No query sees a key behind the end of its sequence.
        rows.iter_mut().for_each(|row| row.resize(longest, 0));
        Positions::of_each(rows.into_iter().flatten().map(|position| position as usize), longest)
    }

    /// The position of each token of each sequence with those of a call, if any were given.
    fn positions_with(&self, new: &NewTokens) -> Result<Option<Vec<Vec<u32>>>> {
        if self.positions.is_none() && new.given.is_none() {
            return Ok(None);
        }
        let places = || new.before.iter().map(|&before| (0..before as u32).collect()).collect();
        let mut rows = self.positions.clone().unwrap_or_else(places);
        let positions = new.positions()?;
        for (b, (row, tokens)) in rows.iter_mut().zip(&new.tokens).enumerate() {
            row.extend(&positions.of_sequence(b)[tokens.clone()]);
        }
        Ok(Some(rows))
    }
}
