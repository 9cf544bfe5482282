//! The checks of a config.

use candle_core::{Result, bail};

use super::{KvSharing, MultiHeadAttentionConfig, OP};
use crate::position::ContentPositions;
use candle_attention_modules::base::number;
use candle_attention_modules::norm::{self, QkNormScope};

/// Validation.
impl MultiHeadAttentionConfig {
    /// Checks that every option is in its range and that the options fit together.
    ///
    /// # Errors
    /// Names the option, what was found and what was expected.
    pub fn validate(&self) -> Result<()> {
        self.validate_ranges()?;
        self.validate_heads()?;
        self.validate_kv_sharing()?;
        self.validate_appended_keys()?;
        self.validate_norms()?;
        if let Some(temperature) = &self.attention_temperature {
            temperature.validate()?;
        }
        if let Some(rope) = &self.rope {
            rope.validate(self.head_dim())?;
        }
        if let Some(indexer) = &self.indexer {
            indexer.validate(self.num_kv_heads(), self.rotary_dim())?;
            if self.kv_sharing != KvSharing::None || self.appended_keys() > 0 {
                bail!("[{OP}] the layer has an indexer, expected keys and values of its own and no appended keys")
            }
        }
        if let Some(alibi) = &self.alibi {
            alibi.validate(self.num_heads)?;
        }
        if let Some(relative_bias) = &self.relative_bias {
            relative_bias.validate()?;
        }
        if let Some(positions) = &self.content_positions {
            positions.validate()?;
            self.validate_content_positions(positions)?;
        }
        Ok(())
    }

    /// Checks every number by itself.
    fn validate_ranges(&self) -> Result<()> {
        number::size(OP, "embed_dim", self.embed_dim)?;
        number::size(OP, "num_heads", self.num_heads)?;
        number::size(OP, "num_kv_heads", self.num_kv_heads)?;
        number::size(OP, "head_dim", self.head_dim)?;
        number::size(OP, "value_head_dim", self.value_head_dim)?;
        number::size(OP, "out_dim", self.out_dim)?;
        number::size(OP, "kdim", self.kdim)?;
        number::size(OP, "vdim", self.vdim)?;
        self.validate_attention_numbers()?;
        number::above_zero(OP, "clip_qkv", self.clip_qkv)?;
        norm::check_epsilon(OP, "qk_norm", self.qk_norm)?;
        number::epsilon(OP, "value_norm", self.value_norm)?;
        norm::check_epsilon(OP, "output_norm", self.output_norm)
    }

    /// Checks the numbers of heads, their widths and the width of the output.
    fn validate_heads(&self) -> Result<()> {
        const MOST: usize = u32::MAX as usize;
        let h = self.num_heads;
        let h_kv = self.num_kv_heads();
        let d = self.head_dim();
        let d_v = self.value_head_dim();
        if !h.is_multiple_of(h_kv) {
            bail!("[{OP}] num_kv_heads is {h_kv}, which does not divide num_heads {h}")
        }
        for (name, width) in [("head_dim", d), ("value_head_dim", d_v)] {
            if h.saturating_mul(width) > MOST {
                bail!("[{OP}] num_heads {h} times {name} {width} is more than {MOST}")
            }
        }
        if self.head_dim.is_none() {
            let name = if self.out_dim.is_some() { "out_dim" } else { "embed_dim" };
            let width = self.out_dim.unwrap_or(self.embed_dim);
            if !width.is_multiple_of(h) {
                bail!("[{OP}] num_heads is {h}, which does not divide {name} {width}; give head_dim")
            }
        }
        if self.out_proj {
            return Ok(());
        }
        let out_dim = self.out_dim();
        let concatenated = h.saturating_mul(d_v);
        if out_dim != concatenated {
            bail!(
                "[{OP}] out_dim is {out_dim}, but without an output projection the {h} heads of width {d_v} give \
                 {concatenated}"
            )
        }
        if self.out_bias {
            bail!("[{OP}] out_bias is set, but there is no output projection")
        }
        Ok(())
    }

    /// Checks the options of keys and values that are shared.
    fn validate_kv_sharing(&self) -> Result<()> {
        match self.kv_sharing {
            KvSharing::None => Ok(()),
            KvSharing::KeysAsValues => {
                let keys = [self.head_dim(), self.kdim(), usize::from(self.k_bias)];
                let values = [self.value_head_dim(), self.vdim(), usize::from(self.v_bias)];
                if keys != values {
                    bail!(
                        "[{OP}] values are the keys' projection, expected one width of heads and inputs and a bias on \
                         both or neither, found {keys:?} for keys and {values:?} for values"
                    )
                }
                Ok(())
            }
            KvSharing::EarlierLayer => {
                for (name, is_set) in [
                    ("k_bias", self.k_bias),
                    ("v_bias", self.v_bias),
                    ("bias_kv", self.bias_kv),
                    ("num_mem_kv", self.num_mem_kv > 0),
                    ("add_zero_attn", self.add_zero_attn),
                    ("value_norm", self.value_norm.is_some()),
                    ("content_positions", self.content_positions.is_some()),
                ] {
                    if is_set {
                        bail!(
                            "[{OP}] {name} is set, but keys and values are those of an earlier layer, as it made them"
                        )
                    }
                }
                Ok(())
            }
        }
    }

    /// Checks the options that a layer with appended keys cannot have: these keys come after the call's, and have
    /// neither their norms nor their positions.
    fn validate_appended_keys(&self) -> Result<()> {
        if self.appended_keys() == 0 {
            return Ok(());
        }
        let (option, key) = match (self.bias_kv, self.add_zero_attn) {
            (true, _) => ("bias_kv", "a learned key"),
            (false, true) => ("add_zero_attn", "a key of zeros"),
            (false, false) => ("num_mem_kv", "a learned key"),
        };
        // The learned keys of x-transformers are used without norms and rotations.
        let is_of_pytorch = self.bias_kv || self.add_zero_attn;
        for (other, is_set) in [("qk_norm", self.qk_norm.is_some()), ("value_norm", self.value_norm.is_some())] {
            if is_set && is_of_pytorch {
                bail!("[{OP}] {option} and {other} are both set, but no norm is defined for {key}")
            }
        }
        for (other, is_set) in [
            ("rope", self.rope.is_some() && is_of_pytorch),
            ("alibi", self.alibi.is_some()),
            ("relative_bias", self.relative_bias.is_some()),
            ("content_positions", self.content_positions.is_some()),
        ] {
            if is_set {
                bail!("[{OP}] {option} and {other} are both set, but {key} has no position")
            }
        }
        Ok(())
    }

    /// Checks that heads can be normalised after their rotation, if they are.
    fn validate_norms(&self) -> Result<()> {
        if !self.norm_after_rope {
            return Ok(());
        }
        let Some(qk_norm) = self.qk_norm.filter(|_| self.rope.is_some()) else {
            bail!("[{OP}] norm_after_rope is set, expected both qk_norm and rope")
        };
        if qk_norm.scope == QkNormScope::Projection {
            bail!("[{OP}] norm_after_rope is set, but a norm of whole projections comes before heads")
        }
        Ok(())
    }

    /// Checks that relative positions by content fit the layer.
    fn validate_content_positions(&self, positions: &ContentPositions) -> Result<()> {
        const OP: &str = "content_positions";
        let h = self.num_heads;
        let h_kv = self.num_kv_heads();
        match positions {
            ContentPositions::Grid { .. } => self.validate_scores_beside_grid(OP)?,
            ContentPositions::CosineWindow { .. } => {
                if let Some(scale) = self.scale {
                    bail!("[{OP}] scale is {scale}, expected none beside the factors of cosine scores")
                }
            }
            ContentPositions::TransformerXl => {
                if !self.embed_dim.is_multiple_of(2) {
                    bail!("[{OP}] embed_dim is {}, expected pairs of sines and cosines", self.embed_dim)
                }
            }
            ContentPositions::Disentangled(_) => {
                if h != h_kv {
                    bail!("[{OP}] num_kv_heads is {h_kv}, expected the {h} query heads of disentangled positions")
                }
            }
            ContentPositions::Window { .. } | ContentPositions::Clipped { .. } => {}
        }
        Ok(())
    }
}
