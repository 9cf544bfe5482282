//! The sink tokens of a call past the window of a cache: its window, and the mask of its last keys.

use std::ops::Range;

use candle_core::Tensor;

use super::{AttentionCache, AttentionCacheConfig};
use crate::mask::AttentionMask;

/// The sink tokens of a call with a sliding cache, and the window in which they count.
pub(crate) struct SinkWindow {
    pub(super) sink_tokens: usize,
    window: usize,
    /// The queries (B, H, T_q, D) that attend to the sink tokens, rotated to their positions in the cache; the
    /// queries of the call if not set.
    pub(super) queries: Option<Tensor>,
}

impl AttentionCacheConfig {
    /// Returns the window of a cache that keeps sink tokens.
    pub(crate) fn sink_window(&self) -> Option<usize> {
        if self.sink_tokens() > 0 { self.window() } else { None }
    }
}

impl AttentionCache {
    /// Returns the sink tokens of a call that attends to these positions of each sequence; `None` if its queries attend
    /// to all tokens before them.
    pub(super) fn sinks_of_call(&self, attended: &[Range<usize>]) -> Option<SinkWindow> {
        let window = self.config.sink_window()?;
        let order = self.row_order();
        let is_whole = |positions: &Range<usize>| positions.end <= window && order.count(positions) == positions.end;
        if attended.iter().all(is_whole) {
            return None;
        }
        Some(SinkWindow { sink_tokens: order.sink_tokens, window, queries: None })
    }
}

impl SinkWindow {
    /// Returns the mask of the last keys: causal, with a window, without the sink tokens.
    pub(super) fn mask_of_last_keys(&self, b: usize) -> AttentionMask {
        let window = self.window - self.sink_tokens;
        AttentionMask::causal().with_window(window).with_starts(vec![self.sink_tokens; b])
    }
}
