//! Between latents and heads.

use std::sync::OnceLock;

use candle_core::{DType, Module, Result, Tensor};

use super::{MultiHeadLatentAttentionConfig, ROWS};
use crate::cache::Expand;
use candle_attention_kernels::{Workers, for_each_task};
use candle_attention_modules::base::{Source, part};
use candle_attention_modules::linear::PackedLinear;

/// The projection `kv_b_proj` of latents to the keys and values of all heads, by its rows: for each head those of its
/// key, then those of its value.
#[derive(Debug, Clone)]
pub(super) struct UpProjection {
    /// (H · (nope + D_v), rank).
    kv_b: PackedLinear,
    /// Where that is packed, the rows of each head's key once more, the other way round: (rank, nope).
    keys: Vec<PackedLinear>,
    h: usize,
    rank: usize,
    nope: usize,
    value: usize,
}

impl UpProjection {
    /// The config is the whole layer's.
    pub fn load(cfg: &MultiHeadLatentAttentionConfig, source: &Source) -> Result<Self> {
        let rank = cfg.kv_lora_rank();
        let (nope, value) = (cfg.nope_head_dim(), cfg.value_head_dim());
        let linear = source.linear("kv_b_proj", (cfg.num_heads() * (nope + value), rank), false, Some(ROWS))?;
        let h = linear.weight().dim(0)? / (nope + value);
        Self { kv_b: linear.try_into()?, keys: Vec::new(), h, rank, nope, value }.prepared()
    }

    /// With what variables hold now.
    pub fn freeze(&self) -> Result<Self> {
        Self { kv_b: self.kv_b.freeze()?, keys: Vec::new(), ..*self }.prepared()
    }

    /// With the keys' rows the other way round, where they are packed.
    fn prepared(mut self) -> Result<Self> {
        if self.kv_b.is_packed() {
            let weights = self.weights()?;
            let key = |head: usize| PackedLinear::new(&weights.get(head)?.narrow(0, 0, self.nope)?.t()?, None);
            self.keys = (0..self.h).map(key).collect::<Result<_>>()?;
        }
        Ok(self)
    }

    /// The parts of queries without positions (B, T, H, nope), as queries (B, T, H, rank) to latents.
    pub fn absorb(&self, queries: &Tensor) -> Result<Tensor> {
        if self.kv_b.is_packed() {
            return self.of_heads(queries, |head, own| self.keys[head].forward(own));
        }
        multiply(queries, &self.weights()?.narrow(1, 0, self.nope)?)
    }

    /// Means of latents (B, T, H, rank) to means of values (B, T, H, D_v).
    pub fn values_of(&self, contexts: &Tensor) -> Result<Tensor> {
        if self.kv_b.is_packed() {
            return self.of_heads(contexts, |head, own| {
                let end = (head + 1) * (self.nope + self.value);
                self.kv_b.forward_columns(own, end - self.value..end)
            });
        }
        multiply(contexts, &self.weights()?.narrow(1, self.nope, self.value)?.transpose(1, 2)?)
    }

    /// The rows of each head, (H, nope + D_v, rank): a view of what variables hold now.
    fn weights(&self) -> Result<Tensor> {
        self.kv_b.to_linear()?.weight().reshape((self.h, self.nope + self.value, self.rank))
    }

    /// (B, T, H, from) to (B, T, H, to), with a product (B, T, from) to (B, T, to) for each head.
    fn of_heads(&self, xs: &Tensor, product: impl Fn(usize, &Tensor) -> Result<Tensor> + Sync) -> Result<Tensor> {
        let one = |head: usize| product(head, &part(xs, 2, head..head + 1)?.squeeze(2)?);
        let (b, t, h, _) = xs.dims4()?;
        let products = [b, t, h, self.rank, self.nope.max(self.value)].into_iter().fold(1, usize::saturating_mul);
        let heads: Vec<_> = (0..h).map(|_| OnceLock::new()).collect();
        let task = |(): &mut (), head: usize| {
            heads[head].get_or_init(|| one(head));
        };
        // Rayon's alone: what runs on an executor may call nothing of it, and each product does.
        for_each_task(h, Workers::of(products, 0, None), &|| (), &task);
        let heads = heads.into_iter().filter_map(OnceLock::into_inner).collect::<Result<Vec<_>>>()?;
        Tensor::stack(&heads, 2)
    }
}

impl Expand for UpProjection {
    /// Latents and rotated keys (B, 1, T, rank + rope) to keys (B, H, T, nope + rope) and values (B, H, T, D_v), views
    /// of (B, T, H, ..).
    fn expand(&self, rows: &Tensor) -> Result<[Tensor; 2]> {
        let (b, _, t, width) = rows.dims4()?;
        let (h, rank, nope, dtype) = (self.h, self.rank, self.nope, rows.dtype());
        let latents = part(rows, 3, 0..rank)?.squeeze(1)?;
        // A product takes f32 over weights in half precision too, and so loses nothing of a cache's 8 bits.
        let wider = dtype == DType::F32 && matches!(self.kv_b.dtype(), DType::BF16 | DType::F16);
        let latents = if wider { latents } else { latents.to_dtype(self.kv_b.dtype())? };
        let heads = self.kv_b.forward(&latents)?.to_dtype(dtype)?.reshape((b, t, h, nope + self.value))?;
        let shared = part(rows, 3, rank..width)?.transpose(1, 2)?.broadcast_as((b, t, h, width - rank))?;
        let keys = Tensor::cat(&[part(&heads, 3, 0..nope)?.contiguous()?, shared.contiguous()?], 3)?;
        Ok([keys.transpose(1, 2)?, part(&heads, 3, nope..nope + self.value)?.transpose(1, 2)?])
    }
}

/// (B, T, H, from) times a matrix (from, to) for each head, (H, from, to), to (B, T, H, to), in Candle's own
/// operations.
fn multiply(xs: &Tensor, matrices: &Tensor) -> Result<Tensor> {
    let (b, t, h, from) = xs.dims4()?;
    let to = matrices.dim(2)?;
    if b * t == 0 {
        return Tensor::zeros((b, t, h, to), xs.dtype(), xs.device());
    }
    let by_head = xs.permute((2, 0, 1, 3))?.contiguous()?.reshape((h, b * t, from))?;
    by_head.matmul(matrices)?.reshape((h, b, t, to))?.permute((1, 2, 0, 3))?.contiguous()
}
