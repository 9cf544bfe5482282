//! The config of an [`AttentionCache`](crate::AttentionCache): how much it stores, and in which format.

use candle_attention_call::KvCodeFormat;
use candle_core::{DType, Result, bail};

use super::OP;
use crate::config::MultiHeadAttentionConfig;
use candle_attention_modules::base::{FLOATS, number};

/// The default capacity in positions, which is less than most prompts take.
const FIRST_CAPACITY: usize = 256;

/// The config of an [`AttentionCache`](crate::AttentionCache): how much it stores, and in which format.
///
/// [`for_layer`](Self::for_layer) is right for most layers. Every `with_*` method changes one option and returns the
/// config.
///
/// ```
/// use candle_attention::{AttentionCache, AttentionCacheConfig};
/// use candle_core::DType;
/// # fn main() -> candle_core::Result<()> {
/// // Memory for 4,096 positions, allocated at once, in half of the memory of f32; more positions are an error.
/// let cfg = AttentionCacheConfig::new().with_capacity(4096).with_growth(false).with_dtype(DType::BF16);
/// let cache = AttentionCache::new(&cfg)?;
/// assert!(cache.is_empty());
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq)]
#[must_use]
pub struct AttentionCacheConfig {
    capacity: usize,
    growth: bool,
    window: Option<usize>,
    sink_tokens: usize,
    dtype: Option<DType>,
    codes: Option<KvCodeFormat>,
    detached: bool,
    shared: bool,
}

impl Default for AttentionCacheConfig {
    fn default() -> Self {
        Self {
            capacity: FIRST_CAPACITY,
            growth: true,
            window: None,
            sink_tokens: 0,
            dtype: None,
            codes: None,
            detached: false,
            shared: false,
        }
    }
}

/// Builders.
impl AttentionCacheConfig {
    /// Returns the config of a cache that begins with a capacity of 256 positions, doubles it where that is not enough,
    /// and stores keys and values in their own dtype.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the default config for a layer: of a sliding cache, if the layer has a window.
    pub fn for_layer(cfg: &MultiHeadAttentionConfig) -> Self {
        Self { window: cfg.window(), ..Self::default() }
    }

    /// Sets the number of positions of each sequence that the buffers have memory for from the first call on. The
    /// default is 256, or twice the window of a sliding cache if that is less.
    pub fn with_capacity(mut self, capacity: usize) -> Self {
        self.capacity = capacity;
        self
    }

    /// Sets whether the buffers double where the capacity is not enough. The default is yes; without growth, more
    /// positions than the capacity are an error.
    pub fn with_growth(mut self, growth: bool) -> Self {
        self.growth = growth;
        self
    }

    /// Sets the window of a sliding cache, for layers with a
    /// [window](crate::MultiHeadAttentionConfig::with_window) of at most this many keys.
    ///
    /// A sliding cache stores the last `2 · window` positions of a sequence at most, or the number of its capacity if
    /// that is more, and drops older ones. If the mask of a call allows a query to attend to a dropped key, the call is
    /// an error. The default is no window: every position is stored.
    #[doc(alias = "sliding_window")]
    pub fn with_window(mut self, window: impl Into<Option<usize>>) -> Self {
        self.window = window.into();
        self
    }

    /// Sets that the first n tokens of each sequence stay in a sliding cache: attention sinks, as in StreamingLLM
    /// (<https://arxiv.org/abs/2309.17453>) and in the `SinkCache` of transformers. They count in the window: a query
    /// attends to the first n tokens and to the last `window - n`, its own among them. A model that was trained without
    /// a window can then continue a text without an end.
    ///
    /// Positions count in the cache. Rotary positions have the distances that the tokens would have if the dropped ones
    /// had never been there: from the sixth token on, a query at position 4 of a window of 5. Context lengths,
    /// frequencies that depend on the length of a call and attention temperatures count in the same way. The numbers do
    /// not depend on the calls into which a text is split.
    ///
    /// Sink tokens are for causal layers of [`MultiHeadAttention`](crate::MultiHeadAttention) with rotary positions or
    /// none, and for calls without a mask and without positions. Embeddings of learned positions, which a model
    /// adds before its first layer, cannot count in the cache. The default is 0.
    #[doc(alias("SinkCache", "StreamingLLM", "num_sink_tokens", "attention_sink"))]
    pub fn with_sink_tokens(mut self, n: usize) -> Self {
        self.sink_tokens = n;
        self
    }

    /// Sets the dtype in which keys and values are stored: F32, BF16, F16 or F64. Attention is computed in it, and its
    /// output is converted back. The default is the dtype of the first keys.
    pub fn with_dtype(mut self, dtype: impl Into<Option<DType>>) -> Self {
        self.dtype = dtype.into();
        self
    }

    /// Sets the format of keys and values that are stored as codes: what [`with_q8`](Self::with_q8),
    /// [`with_e4m3`](Self::with_e4m3) and [`with_q4`](Self::with_q4) set. By default they are stored as floats.
    pub fn with_codes(mut self, codes: impl Into<Option<KvCodeFormat>>) -> Self {
        self.codes = codes.into();
        self
    }

    /// Sets that keys and values are stored in 8 bits a number and an f32 scale for each row of a head: a quarter of
    /// the memory of f32, and 4 bytes a row.
    ///
    /// A number is off by at most 1/254 of the largest number in its row, besides the rounding to f32, if the largest
    /// number is from 1.5e-36 to 3.4e38. A row of smaller numbers becomes zeros, and a row with a number that is not
    /// finite in f32 becomes NaN.
    ///
    /// The fused kernels of CPUs, CUDA and Metal read 8 bits directly. Where another path runs (on Metal without its
    /// kernels, or on the reference path for f64, for weights on request and for what
    /// [`plan`](crate::MultiHeadAttention::plan) names), all stored keys and values are converted to f32 or f64 first.
    #[doc(alias("quantize", "int8"))]
    pub fn with_q8(self) -> Self {
        self.with_codes(KvCodeFormat::Q8)
    }

    /// Sets that keys and values are stored as floats of 8 bits (4 bits of exponent, 3 of mantissa) and an f32 scale
    /// for each row of a head: the memory of [`with_q8`](Self::with_q8). The largest number of a row becomes 448.
    ///
    /// A number is off by at most 1/16 of itself, or by 1/458,752 of the largest number in its row if that is more.
    /// This is better than 8 bits for rows with a few numbers that are far larger than the others, and worse for other
    /// rows. Rows of small numbers and of numbers that are not finite become what they are in 8 bits.
    ///
    /// The fused kernels read these floats directly, as [`with_q8`](Self::with_q8) says.
    #[doc(alias("fp8", "float8", "F8E4M3"))]
    pub fn with_e4m3(self) -> Self {
        self.with_codes(KvCodeFormat::E4M3)
    }

    /// Sets that keys and values are stored in 4 bits a number and an f32 scale for each 64 numbers of a row of a head,
    /// or for a whole row whose width is no multiple of 64: 0.53 to 0.55 of the memory of [`with_q8`](Self::with_q8)
    /// for heads of 64 and 128 numbers. The head dimensions of keys and values are multiples of 32.
    ///
    /// Rows are rotated by Hadamard matrices before, which spread a number that is far larger than the others over the
    /// whole row; queries are rotated alike, and the output is rotated back. A rotated number is off by at most 1/15 of
    /// the largest rotated number of its group.
    ///
    /// The fused kernels read the codes directly, as [`with_q8`](Self::with_q8) says.
    #[doc(alias("quantize", "int4", "hadamard"))]
    pub fn with_q4(self) -> Self {
        self.with_codes(KvCodeFormat::Q4)
    }

    /// Sets whether gradients end at the cache: queries, keys and values are detached, for generation with a layer
    /// whose weights are variables. The default is no: a key that is tracked for gradients is an error, since a cache
    /// would lose its gradient.
    pub fn with_detached(mut self, detached: bool) -> Self {
        self.detached = detached;
        self
    }

    /// Sets whether later layers read the cache too ([`AttentionInput::with_shared_cache`]). The default is no.
    ///
    /// This matters for a sliding cache in calls of more tokens than its window: a shared one stores all that the
    /// queries of its last call attend to, for the later layers to attend to it as well.
    ///
    /// [`AttentionInput::with_shared_cache`]: crate::AttentionInput::with_shared_cache
    pub fn with_shared(mut self, shared: bool) -> Self {
        self.shared = shared;
        self
    }
}

/// Getters.
impl AttentionCacheConfig {
    /// Returns the number of positions of each sequence that the buffers have memory for from the first call on.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Returns whether the buffers double where the capacity is not enough.
    pub fn growth(&self) -> bool {
        self.growth
    }

    /// Returns the window of a sliding cache.
    pub fn window(&self) -> Option<usize> {
        self.window
    }

    /// Returns the number of first tokens of each sequence that a sliding cache keeps.
    pub fn sink_tokens(&self) -> usize {
        self.sink_tokens
    }

    /// Returns the dtype in which keys and values are stored, if it was set.
    pub fn dtype(&self) -> Option<DType> {
        self.dtype
    }

    /// Returns whether keys and values are stored in 8 bits.
    pub fn q8(&self) -> bool {
        self.codes == Some(KvCodeFormat::Q8)
    }

    /// Returns the format in which keys and values are stored, if they are stored as codes.
    pub fn codes(&self) -> Option<KvCodeFormat> {
        self.codes
    }

    /// Returns whether gradients end at the cache.
    pub fn detached(&self) -> bool {
        self.detached
    }

    /// Returns whether later layers read the cache too.
    pub fn shared(&self) -> bool {
        self.shared
    }

    /// Returns the most positions of a sequence that are stored at a time, if there is a limit. A shared cache may
    /// exceed it by the positions of its last call.
    pub fn most_held(&self) -> Option<usize> {
        match self.window {
            _ if !self.growth => Some(self.capacity),
            Some(window) => Some(self.first_capacity().max(window.saturating_mul(2))),
            None => None,
        }
    }

    /// Returns the capacity of the first buffers, unless the first call has more positions.
    pub(super) fn first_capacity(&self) -> usize {
        match self.window {
            // The default is more than a short window needs.
            Some(window) if self.growth && self.capacity == FIRST_CAPACITY => {
                self.capacity.min(window.saturating_mul(2))
            }
            _ => self.capacity,
        }
    }

    /// Checks that every option is in its range and that the options fit together.
    ///
    /// # Errors
    /// Names the option, what was found and what was expected.
    pub(super) fn validate(&self) -> Result<()> {
        if self.capacity == 0 && !self.growth {
            bail!("[{OP}] capacity is 0 without growth, expected at least 1")
        }
        number::within(OP, "capacity", self.capacity, 0..=u32::MAX as usize)?;
        number::size(OP, "window", self.window)?;
        if let Some(window) = self.window
            && !self.growth
            && self.capacity < window
        {
            bail!("[{OP}] capacity is {} without growth, expected at least the window {window}", self.capacity)
        }
        if self.sink_tokens > 0 && self.window.is_none_or(|window| window <= self.sink_tokens) {
            let found = self.window.map_or("no window".into(), |window| format!("a window of {window}"));
            bail!(
                "[{OP}] sink_tokens is {} with {found}, expected a window that has room for them and for the token of \
                 a query",
                self.sink_tokens
            )
        }
        if let Some(dtype) = self.dtype {
            if let Some(codes) = self.codes {
                bail!("[{OP}] dtype is {dtype:?} beside {}, expected one of the two", codes.name())
            }
            if !FLOATS.contains(&dtype) {
                bail!("[{OP}] dtype is {dtype:?}, expected F32, F16, BF16 or F64")
            }
        }
        Ok(())
    }
}
