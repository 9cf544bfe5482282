//! How many heads a layer has and how wide it is, with defaults filled in.

use candle_core::{Result, bail};

use super::{MultiHeadAttentionConfig, OP};

/// Readers of numbers and widths, with defaults filled in.
impl MultiHeadAttentionConfig {
    /// H_kv, the number of key and value heads.
    pub fn num_kv_heads(&self) -> usize {
        self.num_kv_heads.unwrap_or(self.num_heads)
    }

    /// D, the width of one query and key head.
    pub fn head_dim(&self) -> usize {
        let out_dim = self.out_dim.unwrap_or(self.embed_dim);
        self.head_dim.unwrap_or_else(|| out_dim.checked_div(self.num_heads).unwrap_or(0))
    }

    /// D_v, the width of one value head.
    pub fn value_head_dim(&self) -> usize {
        self.value_head_dim.unwrap_or_else(|| self.head_dim())
    }

    /// The width of the layer's output.
    pub fn out_dim(&self) -> usize {
        match (self.out_dim, self.out_proj) {
            (Some(out_dim), _) => out_dim,
            (None, true) => self.embed_dim,
            (None, false) => self.num_heads.saturating_mul(self.value_head_dim()),
        }
    }

    /// The width of the keys' input.
    pub fn key_size(&self) -> usize {
        self.key_size.unwrap_or(self.embed_dim)
    }

    /// The width of the values' input.
    pub fn value_size(&self) -> usize {
        self.value_size.unwrap_or_else(|| self.key_size())
    }

    /// That heads divide into groups, and that widths are those of the heads together.
    pub(super) fn validate_sizes(&self) -> Result<()> {
        let (h, h_kv) = (self.num_heads, self.num_kv_heads());
        if !h.is_multiple_of(h_kv) {
            bail!("[{OP}] num_kv_heads is {h_kv}, which does not divide num_heads {h}")
        }
        for (name, width) in [("head_dim", self.head_dim()), ("value_head_dim", self.value_head_dim())] {
            if h.saturating_mul(width) > u32::MAX as usize {
                bail!("[{OP}] num_heads {h} times {name} {width} is more than {}", u32::MAX)
            }
        }
        let out_dim = self.out_dim.unwrap_or(self.embed_dim);
        if self.head_dim.is_none() && !out_dim.is_multiple_of(h) {
            let name = if self.out_dim.is_some() { "out_dim" } else { "embed_dim" };
            bail!("[{OP}] num_heads is {h}, which does not divide {name} {out_dim}; give head_dim")
        }
        if self.out_proj {
            return Ok(());
        }
        let heads = h.saturating_mul(self.value_head_dim());
        if self.out_dim() != heads {
            bail!(
                "[{OP}] out_dim is {}, but without an output projection the {h} heads of width {} give {heads}",
                self.out_dim(),
                self.value_head_dim()
            )
        }
        if self.out_bias {
            bail!("[{OP}] out_bias is set, but there is no output projection")
        }
        Ok(())
    }
}
