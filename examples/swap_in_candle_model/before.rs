//! Attention as a Candle model implements it by hand.

use candle_core::{D, DType, Device, Module, Result, Tensor};
use candle_nn::rotary_emb::rope;
use candle_nn::{Linear, VarBuilder, linear_no_bias, ops};

use crate::model::{Config, SelfAttention};

/// Cosines and sines (max_positions, D / 2).
struct RotaryEmbedding {
    cos: Tensor,
    sin: Tensor,
}

impl RotaryEmbedding {
    fn new(cfg: &Config, dtype: DType, device: &Device) -> Result<Self> {
        let head_dim = cfg.hidden_size / cfg.num_heads;
        let frequency = |i| 1f32 / cfg.rope_theta.powf(i as f64 / head_dim as f64) as f32;
        let frequencies: Vec<f32> = (0..head_dim).step_by(2).map(frequency).collect();
        let frequencies = Tensor::new(frequencies, device)?.unsqueeze(0)?;
        let positions = Tensor::arange(0, cfg.max_positions as u32, device)?;
        let angles = positions.to_dtype(DType::F32)?.unsqueeze(1)?.matmul(&frequencies)?;
        Ok(Self { cos: angles.cos()?.to_dtype(dtype)?, sin: angles.sin()?.to_dtype(dtype)? })
    }

    fn apply(&self, xs: &Tensor, offset: usize) -> Result<Tensor> {
        let t = xs.dim(2)?;
        rope(&xs.contiguous()?, &self.cos.narrow(0, offset, t)?, &self.sin.narrow(0, offset, t)?)
    }
}

/// Returns 0 where query i may attend to key j, and minus infinity elsewhere.
fn causal_mask(t: usize, offset: usize, dtype: DType, device: &Device) -> Result<Tensor> {
    let score = |i, j| if j > offset + i { f32::NEG_INFINITY } else { 0.0 };
    let scores: Vec<f32> = (0..t).flat_map(|i| (0..offset + t).map(move |j| score(i, j))).collect();
    Tensor::from_vec(scores, (1, 1, t, offset + t), device)?.to_dtype(dtype)
}

/// Repeats each key head for every query head that reads it.
fn repeat_kv(xs: Tensor, times: usize) -> Result<Tensor> {
    if times == 1 {
        return Ok(xs);
    }
    let (b, num_kv_heads, t, head_dim) = xs.dims4()?;
    let xs = xs.unsqueeze(2)?.expand((b, num_kv_heads, times, t, head_dim))?;
    xs.reshape((b, num_kv_heads * times, t, head_dim))
}

pub struct Attention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    rotary: RotaryEmbedding,
    kv_cache: Option<(Tensor, Tensor)>,
}

impl Attention {
    /// Splits (B, T, H · D) into heads (B, H, T, D).
    fn heads(&self, xs: &Tensor, num_heads: usize) -> Result<Tensor> {
        let (b, t, _) = xs.dims3()?;
        xs.reshape((b, t, num_heads, self.head_dim))?.transpose(1, 2)
    }
}

impl SelfAttention for Attention {
    fn new(cfg: &Config, vb: VarBuilder) -> Result<Self> {
        let head_dim = cfg.hidden_size / cfg.num_heads;
        let (q_dim, kv_dim) = (cfg.num_heads * head_dim, cfg.num_kv_heads * head_dim);
        Ok(Self {
            q_proj: linear_no_bias(cfg.hidden_size, q_dim, vb.pp("q_proj"))?,
            k_proj: linear_no_bias(cfg.hidden_size, kv_dim, vb.pp("k_proj"))?,
            v_proj: linear_no_bias(cfg.hidden_size, kv_dim, vb.pp("v_proj"))?,
            o_proj: linear_no_bias(q_dim, cfg.hidden_size, vb.pp("o_proj"))?,
            num_heads: cfg.num_heads,
            num_kv_heads: cfg.num_kv_heads,
            head_dim,
            rotary: RotaryEmbedding::new(cfg, vb.dtype(), vb.device())?,
            kv_cache: None,
        })
    }

    fn forward(&mut self, xs: &Tensor) -> Result<Tensor> {
        let (b, t, _) = xs.dims3()?;
        let offset = match &self.kv_cache {
            Some((k, _)) => k.dim(2)?,
            None => 0,
        };
        let q = self.heads(&self.q_proj.forward(xs)?, self.num_heads)?;
        let k = self.heads(&self.k_proj.forward(xs)?, self.num_kv_heads)?;
        let v = self.heads(&self.v_proj.forward(xs)?, self.num_kv_heads)?;
        let q = self.rotary.apply(&q, offset)?;
        let k = self.rotary.apply(&k, offset)?;

        let (k, v) = match &self.kv_cache {
            Some((before_k, before_v)) => (Tensor::cat(&[before_k, &k], 2)?, Tensor::cat(&[before_v, &v], 2)?),
            None => (k, v),
        };
        self.kv_cache = Some((k.clone(), v.clone()));

        let groups = self.num_heads / self.num_kv_heads;
        let k = repeat_kv(k, groups)?.contiguous()?;
        let v = repeat_kv(v, groups)?.contiguous()?;
        let mut scores = (q.matmul(&k.t()?)? / (self.head_dim as f64).sqrt())?;
        if t > 1 {
            scores = scores.broadcast_add(&causal_mask(t, offset, xs.dtype(), xs.device())?)?;
        }
        let weights = ops::softmax(&scores, D::Minus1)?;
        let context = weights.matmul(&v)?.transpose(1, 2)?;
        self.o_proj.forward(&context.reshape((b, t, self.num_heads * self.head_dim))?)
    }

    fn clear_kv_cache(&mut self) {
        self.kv_cache = None;
    }
}
