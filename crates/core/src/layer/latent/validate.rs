//! The checks of the config of latent attention.

use candle_core::{Result, bail};

use super::OP;
use super::config::MultiHeadLatentAttentionConfig;
use candle_attention_modules::base::number;
use candle_attention_modules::gate::{GateLayout, GateScope, OutputGate};

impl MultiHeadLatentAttentionConfig {
    /// Checks that the numbers fit together.
    ///
    /// # Errors
    /// Names the option, the number found and the number expected.
    pub fn validate(&self) -> Result<()> {
        self.validate_numbers()?;
        let h = self.num_heads;
        let widest = self.query_row_width().max(self.nope_head_dim.saturating_add(self.value_head_dim));
        let widest = widest.max(self.row_width());
        if h.saturating_mul(widest) > u32::MAX as usize {
            bail!("[{OP}] num_heads {h} times a width of {widest} is more than {}", u32::MAX)
        }
        if self.shared_choice() && self.indexer().is_some() {
            bail!("[{OP}] the layer has an indexer and attends to an earlier layer's choice, expected one of the two")
        }
        if let Some(indexer) = self.indexer() {
            indexer.validate(OP, self.rope_head_dim)?;
            if indexer.reads_compressed_queries() && self.q_lora_rank().is_none() {
                bail!("[{OP}] the layer has an indexer and no q_lora_rank, expected compressed queries for its scores")
            }
        }
        self.validate_gate()?;
        if self.rope().axes().is_some() {
            bail!("[{OP}] rope has several axes, expected one")
        }
        if self.rope_head_dim > 0 {
            self.rope().validate(self.rope_head_dim)?;
        }
        Ok(())
    }

    /// Checks each number by itself.
    fn validate_numbers(&self) -> Result<()> {
        number::size(OP, "embed_dim", self.embed_dim())?;
        number::size(OP, "num_heads", self.num_heads)?;
        number::size(OP, "q_lora_rank", self.q_lora_rank())?;
        number::size(OP, "kv_lora_rank", self.kv_lora_rank)?;
        number::size(OP, "nope_head_dim", self.nope_head_dim)?;
        if self.rope_head_dim > 0 || self.rotates() || self.shared_key_norm() {
            number::size(OP, "rope_head_dim", self.rope_head_dim)?;
        }
        number::size(OP, "value_head_dim", self.value_head_dim)?;
        number::size(OP, "window", self.window())?;
        number::finite(OP, "scale", self.given_scale())?;
        if let Some(scales) = self.latent_scales() {
            number::finite(OP, "the scale of compressed queries", Some(scales.queries))?;
            number::finite(OP, "the scale of latents", Some(scales.keys_and_values))?;
        }
        number::epsilon(OP, "norm_eps", self.norm_eps())?;
        number::probability(OP, "dropout", self.dropout())
    }

    fn validate_gate(&self) -> Result<()> {
        let Some(OutputGate { layout, scope, .. }) = self.output_gate() else { return Ok(()) };
        if layout == (GateLayout::Separate { bias: true }) {
            bail!("[{OP}] the projection of output_gate has a bias, expected none in latent attention")
        }
        if layout == GateLayout::FusedWithQuery && (self.q_lora_rank().is_none() || scope == GateScope::PerHead) {
            bail!(
                "[{OP}] output_gate is fused with the query, with a scope of {scope:?} and q_lora_rank {:?}; expected \
                 the scope Elementwise and compressed queries",
                self.q_lora_rank()
            )
        }
        Ok(())
    }
}
