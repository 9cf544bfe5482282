//! Multi-head latent attention: keys and values are computed from one narrow latent for each token.

mod config;
mod forward;
#[cfg(test)]
mod tests;
mod up;

pub use config::MultiHeadLatentAttentionConfig;

use candle_core::{Module, ModuleT, Result, Tensor, bail};
use candle_nn::VarBuilder;

use super::AttentionInput;
use crate::norm::Norm;
use crate::weights::Source;
use crate::{AttentionMask, PackedLinear, RotaryEmbedding};
use up::UpProjection;

const OP: &str = "multi_head_latent_attention";

/// Multi-head latent attention, as DeepSeek-V2 (<https://arxiv.org/abs/2405.04434>, section 2.1) and V3 have it.
///
/// A token is compressed to a latent of width `kv_lora_rank`, of which each head's key and value are linear functions, and to
/// one key of width `rope_head_dim` with rotary positions that all heads share. A head's query has a part for each of the
/// two, and its score is the sum of both products. A cache holds nothing but latents and shared keys:
///
/// ```
/// use candle_attention::{AttentionCache, AttentionInput, MultiHeadLatentAttention, MultiHeadLatentAttentionConfig};
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::VarBuilder;
/// # fn main() -> candle_core::Result<()> {
/// let cfg = MultiHeadLatentAttentionConfig::new(64, 4).with_kv_lora_rank(32).with_rope_head_dim(8);
/// let layer = MultiHeadLatentAttention::new(&cfg, VarBuilder::zeros(DType::F32, &Device::Cpu))?;
///
/// let prompt = Tensor::randn(0f32, 1., (2, 5, 64), &Device::Cpu)?;
/// let mut cache = AttentionCache::default();
/// let ys = layer.forward_with(AttentionInput::new(&prompt).with_cache(&mut cache))?;
/// assert_eq!(ys.dims(), [2, 5, 64]);
/// // In bytes: sequences, positions, the latent and the shared key, f32.
/// assert_eq!(cache.memory(), 2 * cache.capacity() * (32 + 8) * 4);
/// # Ok(()) }
/// ```
///
/// Beside a cache, a short call takes the key's part of `kv_b_proj` into its queries and the value's part into its contexts
/// (the paper's "absorbed" matrices), so that all heads attend to the latents in place, as to one key head of width
/// `kv_lora_rank + rope_head_dim` whose values are its own first `kv_lora_rank` columns. A long one, and any call without a
/// cache, computes keys and values of each head from the latents first. A call with a cache takes the form that needs fewer
/// multiplications; both give the same numbers, but for rounding.
///
/// A cache of 8 bits has one scale for the latent and the shared key of a token together.
///
/// Over plain tensors on a CPU the weights are packed ([`PackedLinear`]), and the key's part of `kv_b_proj` is held twice, in
/// both directions. A layer is a value without state. Inputs are (B, T, E), or (T, E) for one sequence.
#[derive(Debug, Clone)]
pub struct MultiHeadLatentAttention {
    config: MultiHeadLatentAttentionConfig,
    queries: Queries,
    /// To latents and shared keys, (rank + rope, E).
    down: PackedLinear,
    norm: Norm,
    up: UpProjection,
    out: PackedLinear,
    rotary: RotaryEmbedding,
    mask: AttentionMask,
}

/// The way to queries (B, T, H · D).
#[derive(Debug, Clone)]
enum Queries {
    Direct(PackedLinear),
    /// By something narrower, which is normalised.
    Compressed(PackedLinear, Norm, PackedLinear),
}

impl Queries {
    fn load(cfg: &MultiHeadLatentAttentionConfig, source: &Source) -> Result<Self> {
        let (width, embed_dim) = (cfg.num_heads() * cfg.head_dim(), cfg.embed_dim());
        let linear = |name, shape, bias| PackedLinear::from_linear(&source.linear(name, shape, bias)?);
        let Some(rank) = cfg.q_lora_rank() else {
            return Ok(Self::Direct(linear("q_proj", (width, embed_dim), false)?));
        };
        let down = linear("q_a_proj", (rank, embed_dim), cfg.bias())?;
        let norm = Norm::rms("q_a_layernorm", rank, cfg.norm_eps(), source)?;
        Ok(Self::Compressed(down, norm, linear("q_b_proj", (width, rank), false)?))
    }

    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        match self {
            Self::Direct(linear) => linear.forward(xs),
            Self::Compressed(down, norm, up) => up.forward(&norm.forward(&down.forward(xs)?)?),
        }
    }
}

impl MultiHeadLatentAttention {
    /// A layer with DeepSeek's names below the builder's prefix: `q_proj`, or `q_a_proj`, `q_a_layernorm` and `q_b_proj`
    /// where queries are compressed; `kv_a_proj_with_mqa`, `kv_a_layernorm`, `kv_b_proj`, `o_proj`.
    ///
    /// Plain tensors are read now, variables in every call, so that the layer learns with them.
    ///
    /// # Errors
    /// For a config that does not fit together, and for a missing or misshapen tensor, named with both shapes.
    pub fn new(cfg: &MultiHeadLatentAttentionConfig, vb: VarBuilder) -> Result<Self> {
        cfg.validate()?;
        let source = Source::new(OP, "latent", vb);
        source.check_dtype()?;
        let (embed_dim, rank) = (cfg.embed_dim(), cfg.kv_lora_rank());
        let linear = |name, shape| PackedLinear::from_linear(&source.linear(name, shape, cfg.bias())?);
        Ok(Self {
            queries: Queries::load(cfg, &source)?,
            down: linear("kv_a_proj_with_mqa", (rank + cfg.rope_head_dim(), embed_dim))?,
            norm: Norm::rms("kv_a_layernorm", rank, cfg.norm_eps(), &source)?,
            up: UpProjection::load(cfg, &source)?,
            out: linear("o_proj", (embed_dim, cfg.num_heads() * cfg.value_head_dim()))?,
            rotary: RotaryEmbedding::new(cfg.rope(), cfg.rope_head_dim())?,
            mask: if cfg.causal() { AttentionMask::causal() } else { AttentionMask::none() },
            config: cfg.clone(),
        })
    }

    /// The same layer with tables of cosines and sines that it shares with others, in the place of its own.
    ///
    /// # Errors
    /// If the tables are not those of the layer's config, over heads of `rope_head_dim`.
    pub fn with_rotary(mut self, rotary: RotaryEmbedding) -> Result<Self> {
        let (rope, width) = (self.config.rope(), self.config.rope_head_dim());
        if rope != rotary.config() || width != rotary.head_dim() {
            bail!(
                "[{OP}] rotary tables are of {:?} and heads of {}, expected {rope:?} and heads of {width}",
                rotary.config(),
                rotary.head_dim()
            )
        }
        self.rotary = rotary;
        Ok(self)
    }

    /// What the layer was built from.
    pub fn config(&self) -> &MultiHeadLatentAttentionConfig {
        &self.config
    }
}

/// Not `Module`: Candle gives every `Module` a `forward_t` that ignores `train`, and dropout would be lost in silence.
impl ModuleT for MultiHeadLatentAttention {
    fn forward_t(&self, xs: &Tensor, train: bool) -> Result<Tensor> {
        self.forward_with(AttentionInput::new(xs).with_train(train))
    }
}
