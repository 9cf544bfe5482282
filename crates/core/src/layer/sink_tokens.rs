//! Calls with a cache that keeps sink tokens: which layers and inputs support it, and positions in the cache.

use candle_core::{Result, bail};

use super::input::AttentionInput;
use super::{MultiHeadAttention, OP};
use crate::position::Positions;
use candle_attention_modules::norm::QkNormKind;

impl AttentionInput<'_> {
    /// Returns the window of the call's cache, if the cache keeps sink tokens.
    pub(super) fn sink_window(&self) -> Option<usize> {
        self.any_cache()?.config().sink_window()
    }

    /// Returns the positions of the queries in a cache that keeps sink tokens, at most the last one of its window;
    /// `None` if they are the positions in the sequences. `positions` are the latter.
    pub(super) fn positions_in_cache(&self, positions: &Positions) -> Result<Option<Positions>> {
        let Some(window) = self.sink_window() else { return Ok(None) };
        if positions.length <= window {
            return Ok(None);
        }
        let in_cache = positions.entries.iter().map(|&position| (position as usize).min(window - 1));
        Positions::of_each(in_cache, positions.t).map(Some)
    }

    /// Returns an input that a cache with sink tokens does not support, for an error.
    fn unsupported_with_sink_tokens(&self) -> Option<&'static str> {
        if self.mask().is_some_and(|mask| !mask.is_none()) {
            return Some("a mask");
        }
        if self.positions.is_some() {
            return Some("positions");
        }
        if self.axis_positions.is_some() {
            return Some("axis positions");
        }
        if self.has_new_token_mask() {
            return Some("a tree or a mask of the new tokens");
        }
        None
    }
}

impl MultiHeadAttention {
    /// Checks that the layer and the call fit a cache that keeps sink tokens, if the call has one.
    pub(super) fn check_sink_tokens(&self, input: &AttentionInput) -> Result<()> {
        let Some(window) = input.sink_window() else { return Ok(()) };
        if let Some(unsupported) = self.unsupported_with_sink_tokens(window) {
            bail!(
                "[{OP}] the cache keeps sink tokens in a window of {window}, and the layer has {unsupported}; expected \
                 a cache without sink tokens, or a causal layer with rotary positions or none"
            )
        }
        if let Some(unsupported) = input.unsupported_with_sink_tokens() {
            bail!(
                "[{OP}] {unsupported} was given with a cache that keeps sink tokens, whose positions and window say \
                 what a query attends to; expected none"
            )
        }
        Ok(())
    }

    /// Returns a property of the layer that sink tokens in a window do not support, for an error.
    fn unsupported_with_sink_tokens(&self, window: usize) -> Option<String> {
        let cfg = &self.config;
        if !cfg.causal() {
            return Some("no causal mask".into());
        }
        if let Some(own) = cfg.window().filter(|&own| own < window) {
            return Some(format!("a shorter window of {own}"));
        }
        // Rotated keys of a sequence are moved to other positions, which does not change products with rotated queries.
        // A weight of each entry after the rotation would.
        let is_weighted = cfg.qk_norm().is_some_and(|norm| norm.kind != QkNormKind::RmsNoWeight);
        let unsupported = if cfg.norm_after_rope() && is_weighted {
            "norms with weights after its rotary positions"
        } else if cfg.local_window().is_some() {
            "a local window"
        } else if cfg.chunk().is_some() {
            "chunks"
        } else if cfg.alibi().is_some() {
            "ALiBi"
        } else if cfg.relative_bias().is_some() {
            "a relative bias"
        } else if cfg.content_positions().is_some() {
            "positions by content"
        } else if cfg.appended_keys() > 0 {
            "keys that it appends"
        } else {
            return None;
        };
        Some(unsupported.into())
    }
}
