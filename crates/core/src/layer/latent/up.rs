//! The linear maps from latents to the keys and values of heads, and their transposes.

use std::sync::OnceLock;

use candle_core::{DType, Module, Result, Tensor};

use super::MultiHeadLatentAttention;
use crate::cache::KvFloats;
use candle_attention_kernels::{WorkSize, Workers, for_each_task};
use candle_attention_modules::base::part;
use candle_attention_modules::linear::PackedLinear;

impl MultiHeadLatentAttention {
    /// Returns the layer with the transposed rows of keys, if its weights are packed.
    pub(super) fn prepared(mut self) -> Result<Self> {
        self.absorbing.clear();
        if self.up.is_packed() {
            let weights = self.weights()?;
            let nope = self.config.nope_head_dim();
            let key = |head: usize| PackedLinear::new(&weights.get(head)?.narrow(0, 0, nope)?.t()?, None);
            self.absorbing = (0..self.config.num_heads()).map(key).collect::<Result<_>>()?;
        }
        Ok(self)
    }

    /// Maps the parts of queries without positions (B, T, H, nope) to queries (B, T, H, rank) for latents.
    pub(super) fn absorb(&self, queries: &Tensor) -> Result<Tensor> {
        if self.up.is_packed() {
            return self.by_head(queries, |head, rows| self.absorbing[head].forward(rows));
        }
        multiply(queries, &self.weights()?.narrow(1, 0, self.config.nope_head_dim())?)
    }

    /// Maps means of latents (B, T, H, rank) to means of values (B, T, H, D_v).
    pub(super) fn values_of(&self, means: &Tensor) -> Result<Tensor> {
        let nope = self.config.nope_head_dim();
        let value = self.config.value_head_dim();
        if self.up.is_packed() {
            return self.by_head(means, |head, rows| {
                let end = (head + 1) * (nope + value);
                self.up.forward_columns(rows, end - value..end)
            });
        }
        multiply(means, &self.weights()?.narrow(1, nope, value)?.transpose(1, 2)?)
    }

    /// Returns the rows of each head, (H, nope + D_v, rank): a view of the current weights.
    fn weights(&self) -> Result<Tensor> {
        let cfg = &self.config;
        let shape = (cfg.num_heads(), cfg.nope_head_dim() + cfg.value_head_dim(), cfg.kv_lora_rank());
        self.up.to_linear()?.weight().reshape(shape)
    }

    /// Maps (B, T, H, from) to (B, T, H, to) by a product (B, T, from) to (B, T, to) for each head.
    fn by_head(&self, xs: &Tensor, product: impl Fn(usize, &Tensor) -> Result<Tensor> + Sync) -> Result<Tensor> {
        let product_of = |head: usize| product(head, &part(xs, 2, head..head + 1)?.squeeze(2)?);
        let (b, t, h, _) = xs.dims4()?;
        let cfg = &self.config;
        let matrix_len = cfg.kv_lora_rank() * cfg.nope_head_dim().max(cfg.value_head_dim());
        let multiplications = (b * t * h).saturating_mul(matrix_len);
        let heads: Vec<_> = (0..h).map(|_| OnceLock::new()).collect();
        let task = |(): &mut (), head: usize| {
            heads[head].get_or_init(|| product_of(head));
        };
        for_each_task(h, Workers::for_call(WorkSize { multiply_adds: multiplications, bytes: 0 }), &|| (), &task);
        let heads = heads.into_iter().filter_map(OnceLock::into_inner).collect::<Result<Vec<_>>>()?;
        Tensor::stack(&heads, 2)
    }

    /// Maps latents and rotated keys (B, 1, T, rank + rope), which a key of the indexer may follow, to keys (B, H, T,
    /// nope + rope) and values (B, H, T, D_v), views of (B, T, H, ..).
    pub(super) fn expand(&self, rows: &Tensor) -> Result<KvFloats> {
        let (b, _, t, _) = rows.dims4()?;
        let cfg = &self.config;
        let dtype = rows.dtype();
        let h = cfg.num_heads();
        let rank = cfg.kv_lora_rank();
        let rope = cfg.rope_head_dim();
        let nope = cfg.nope_head_dim();
        let value = cfg.value_head_dim();
        let latents = part(rows, 3, 0..rank)?.squeeze(1)?;
        // A product reads f32 with weights in half precision too, which keeps the precision of a cache's 8 bits.
        let is_wider = dtype == DType::F32 && matches!(self.up.dtype(), DType::BF16 | DType::F16);
        let latents = if is_wider { latents } else { latents.to_dtype(self.up.dtype())? };
        let heads = self.up.forward(&latents)?.to_dtype(dtype)?.reshape((b, t, h, nope + value))?;
        let mut keys = part(&heads, 3, 0..nope)?;
        if rope > 0 {
            let shared = part(rows, 3, rank..rank + rope)?.transpose(1, 2)?.broadcast_as((b, t, h, rope))?;
            keys = Tensor::cat(&[keys.contiguous()?, shared.contiguous()?], 3)?;
        }
        let values = part(&heads, 3, nope..nope + value)?;
        Ok(KvFloats { k: keys.transpose(1, 2)?, v: values.transpose(1, 2)? })
    }
}

/// Multiplies (B, T, H, from) with a matrix for each head, (H, from, to), to (B, T, H, to), in Candle's own operations.
fn multiply(xs: &Tensor, matrices: &Tensor) -> Result<Tensor> {
    let (b, t, h, from) = xs.dims4()?;
    let to = matrices.dim(2)?;
    if b * t == 0 {
        return Tensor::zeros((b, t, h, to), xs.dtype(), xs.device());
    }
    let by_head = xs.permute((2, 0, 1, 3))?.contiguous()?.reshape((h, b * t, from))?;
    by_head.matmul(matrices)?.reshape((h, b, t, to))?.permute((1, 2, 0, 3))?.contiguous()
}
