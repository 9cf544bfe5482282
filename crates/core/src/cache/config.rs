//! What belongs to a cache before its first call.

use candle_core::{DType, Result, bail};
use macro_rules_attribute::apply;

use crate::config::MultiHeadAttentionConfig;
use candle_attention_modules::base::{FLOATS, Options, options};

/// The capacity at first, in positions, unless said otherwise: less than what a prompt takes.
const FIRST_CAPACITY: usize = 256;

/// How an [`AttentionCache`](crate::AttentionCache) keeps keys and values, built with `with_*`.
///
/// ```
/// use candle_attention::{AttentionCache, AttentionCacheConfig};
/// use candle_core::DType;
/// # fn main() -> candle_core::Result<()> {
/// // 4,096 positions at once, in half of the memory of f32; an error beyond them.
/// let cfg = AttentionCacheConfig::new().with_capacity(4096).with_growth(false).with_dtype(DType::BF16);
/// let cache = AttentionCache::new(&cfg)?;
/// assert!(cache.is_empty());
/// # Ok(()) }
/// ```
#[apply(options)]
#[derive(Debug, Clone, PartialEq)]
#[must_use]
pub struct AttentionCacheConfig {
    /// The positions of each sequence that the buffers hold from the first call on.
    #[default(FIRST_CAPACITY)]
    #[methods(with)]
    capacity: usize,
    /// Whether the buffers double where the capacity is not enough, which is an error otherwise.
    #[default(true)]
    #[methods(with)]
    growth: bool,
    /// The window of a sliding cache, which keeps what a window of this many keys (see
    /// [`AttentionMask::with_window`](crate::AttentionMask::with_window)) needs and no more than twice that, or the
    /// capacity where it is larger. An older key that a mask leaves to a query is an error, not one that is passed
    /// over.
    window: Option<usize>,
    /// The dtype in which keys and values are kept, F32, BF16, F16 or F64; that of the first keys unless given.
    /// Attention is computed in it, and its result converted back.
    dtype: Option<DType>,
    /// Whether keys and values are kept in 8 bits, see [`with_q8`](Self::with_q8).
    #[methods(get)]
    q8: bool,
    /// Whether gradients end at the cache: queries, keys and values are taken without theirs, for generation with a
    /// layer whose weights are variables. Otherwise a key that is tracked for gradients is an error, since a cache
    /// would lose its gradient.
    detached: bool,
    /// Whether later layers read the cache too ([`AttentionInput::with_shared_cache`]). A sliding cache holds all that
    /// the queries of its last call see then, however long that call was; without this, calls may have as many tokens
    /// as its window has.
    ///
    /// [`AttentionInput::with_shared_cache`]: crate::AttentionInput::with_shared_cache
    shared: bool,
}

impl Default for AttentionCacheConfig {
    fn default() -> Self {
        Self::unset()
    }
}

impl AttentionCacheConfig {
    /// A cache that begins with a capacity of 256 positions and grows by doubling, in the dtype of the keys.
    pub fn new() -> Self {
        Self::default()
    }

    /// The default for a layer: sliding, if the layer has a window.
    pub fn for_layer(cfg: &MultiHeadAttentionConfig) -> Self {
        Self { window: cfg.window(), ..Self::default() }
    }

    /// Keeps keys and values in 8 bits a number and an f32 for each row of a head: a quarter of the memory of f32, and
    /// 4 bytes a row. A number errs by at most 1/254 of the largest in its row, f32's own rounding aside, where that is
    /// from 1.5e-36 to 3.4e38; a row of smaller ones becomes zeros, and one with a number that f32 does not hold as a
    /// finite one is NaN.
    ///
    /// The fused kernel of the CPU reads them as they are. Where another path runs (on a GPU, or on the reference path
    /// for f64, weights on request and what [`plan`](crate::MultiHeadAttention::plan) names), all that is attended to
    /// becomes floats first, f32 or f64.
    pub fn with_q8(self) -> Self {
        Self { q8: true, ..self }
    }

    /// The most positions of a sequence that are held at a time, if there is a bound. A shared cache holds its last
    /// call beyond it.
    pub fn most_held(&self) -> Option<usize> {
        match (self.window, self.growth) {
            (_, false) => Some(self.capacity),
            (Some(window), true) => Some(self.first_capacity().max(window.saturating_mul(2))),
            (None, true) => None,
        }
    }

    /// The capacity with which the first call begins, if it does not bring more.
    pub(super) fn first_capacity(&self) -> usize {
        match self.window {
            // The default is more than a short window needs.
            Some(window) if self.growth && self.capacity == FIRST_CAPACITY => {
                self.capacity.min(window.saturating_mul(2))
            }
            _ => self.capacity,
        }
    }

    /// # Errors
    /// Names the option, what was expected and what was found.
    pub(super) fn validate(&self) -> Result<()> {
        if self.capacity == 0 && !self.growth {
            bail!("[attention_cache] capacity is 0 without growth, expected at least 1")
        }
        if self.capacity > u32::MAX as usize {
            bail!("[attention_cache] capacity is {}, expected at most {}", self.capacity, u32::MAX)
        }
        match self.window {
            Some(0) => bail!("[attention_cache] window is 0, expected at least 1 (the query's own key)"),
            Some(window) if window > u32::MAX as usize => {
                bail!("[attention_cache] window is {window}, expected at most {}", u32::MAX)
            }
            Some(window) if !self.growth && self.capacity < window => {
                bail!(
                    "[attention_cache] capacity is {} without growth, expected at least the window {window}",
                    self.capacity
                )
            }
            _ => {}
        }
        if let Some(dtype) = self.dtype.filter(|_| self.q8) {
            bail!("[attention_cache] dtype is {dtype:?} beside q8, expected one of the two")
        }
        if let Some(dtype) = self.dtype.filter(|dtype| !FLOATS.contains(dtype)) {
            bail!("[attention_cache] dtype is {dtype:?}, expected F32, F16, BF16 or F64")
        }
        Ok(())
    }
}
