//! Multi-head latent attention: keys and values are computed from one narrow latent for each token.

mod config;
#[cfg(test)]
mod tests;
mod up;

pub use config::MultiHeadLatentAttentionConfig;

use candle_core::{Error, Module, ModuleT, Result, Tensor, bail};
use candle_nn::VarBuilder;
use candle_nn::var_builder::ShardedVarBuilder;

use super::LayerOutput;
use super::checks::Expected;
use super::forward::AttentionCall;
use super::input::{AttentionInput, KeysFrom};
use crate::mask::AttentionMask;
use crate::position::RotaryEmbedding;
use crate::sdpa::{Attended, AttentionStatistics, Keys, Outputs, OwnKeys, Plan, StatisticsOptions};
use candle_attention_modules::base::{HeadShard, Heads, ParameterReader, Share, is_addressable, part};
use candle_attention_modules::linear::PackedLinear;
use candle_attention_modules::norm::{Norm, QkNormKind};

const OP: &str = "multi_head_latent_attention";

/// The rows and the columns of a weight (out, in) that belong to heads.
const ROWS: Share = Share::Heads(Heads::Query, 0);
const COLUMNS: Share = Share::Heads(Heads::Query, 1);

/// Multi-head latent attention, as DeepSeek-V2 (<https://arxiv.org/abs/2405.04434>, section 2.1) and V3 have it.
///
/// A token is compressed to a latent of width `kv_lora_rank`, of which each head's key and value are linear functions,
/// and to one key of width `rope_head_dim` with rotary positions that all heads share. A head's query has a part for
/// each of the two, and its score is the sum of both products. A cache holds nothing but latents and shared keys:
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
/// With a cache, a short call takes the key's part of `kv_b_proj` into its queries and the value's part into its
/// contexts (the paper's "absorbed" matrices), so that all heads attend to the latents in place, as to one key head of
/// width `kv_lora_rank + rope_head_dim` whose values are its own first `kv_lora_rank` columns. A long one, and any call
/// without a cache, computes keys and values of each head from the latents first. A call with a cache takes the form
/// that needs fewer multiplications; both give the same numbers, but for rounding.
///
/// A cache of 8 bits has one scale for the latent and the shared key of a token together.
///
/// Over plain tensors on a CPU the weights are packed ([`PackedLinear`]), and the key's part of `kv_b_proj` is held
/// twice, in both directions. A layer is a value without state. Inputs are (B, T, E), or (T, E) for one sequence.
#[derive(Debug, Clone)]
pub struct MultiHeadLatentAttention {
    config: MultiHeadLatentAttentionConfig,
    /// To something narrower that queries are made from, which is normalised.
    compress: Option<(PackedLinear, Norm)>,
    /// To queries, (H · D, ..).
    queries: PackedLinear,
    /// To latents and shared keys, (rank + rope, E).
    down: PackedLinear,
    norm: Norm,
    /// From latents to the keys and values of all heads, by its rows: for each head those of its key, then those of its
    /// value, (H · (nope + D_v), rank).
    up: PackedLinear,
    /// Where that is packed, the rows of each head's key once more, the other way round: (rank, nope).
    absorbing: Vec<PackedLinear>,
    out: PackedLinear,
    rotary: RotaryEmbedding,
    mask: AttentionMask,
}

impl MultiHeadLatentAttention {
    /// A layer with DeepSeek's names below the builder's prefix: `q_proj`, or `q_a_proj`, `q_a_layernorm` and
    /// `q_b_proj` where queries are compressed; `kv_a_proj_with_mqa`, `kv_a_layernorm`, `kv_b_proj`, `o_proj`.
    ///
    /// Plain tensors are read now, variables in every call, so that the layer learns with them.
    ///
    /// # Errors
    /// For a config that does not fit together, and for a missing or misshapen tensor, named with both shapes.
    pub fn new(cfg: &MultiHeadLatentAttentionConfig, vb: VarBuilder) -> Result<Self> {
        Self::load(cfg, ParameterReader::new(OP, "latent", vb)?)
    }

    /// The heads of one process of several, from Candle's sharded builder: tensor parallelism, as
    /// [`MultiHeadAttention::load_shard`](crate::MultiHeadAttention::load_shard) has it. What compresses tokens, and
    /// what a cache holds, every process has whole. [`config`](Self::config) is that of the process's own layer.
    ///
    /// # Errors
    /// As [`new`](Self::new), and for more processes than heads.
    pub fn load_shard(
        cfg: &MultiHeadLatentAttentionConfig,
        shard: HeadShard,
        vb: &ShardedVarBuilder<'static>,
    ) -> Result<Self> {
        Self::load(cfg, ParameterReader::sharded(OP, "latent", vb, shard)?)
    }

    /// All heads, or those of a shard.
    fn load(cfg: &MultiHeadLatentAttentionConfig, source: ParameterReader) -> Result<Self> {
        cfg.validate()?;
        let (h, embed_dim, rank) = (cfg.num_heads(), cfg.embed_dim(), cfg.kv_lora_rank());
        let source = source.with_heads([h; 2])?;
        let down = (rank + cfg.rope_head_dim(), embed_dim);
        let up = (h * (cfg.nope_head_dim() + cfg.value_head_dim()), rank);
        let out = (embed_dim, h * cfg.value_head_dim());
        let norm = |name, rank| Norm::load(QkNormKind::Rms, cfg.norm_eps(), rank, false, &source.pp(name));
        let compress = |rank| {
            let down = source.linear("q_a_proj", (rank, embed_dim), cfg.bias(), None)?.try_into()?;
            Ok::<_, Error>((down, norm("q_a_layernorm", rank)?))
        };
        let (queries, width) = cfg.q_lora_rank().map_or(("q_proj", embed_dim), |rank| ("q_b_proj", rank));
        let mut config = cfg.clone();
        config.num_heads = source.shard.rank_range(h).len();
        let layer = Self {
            compress: cfg.q_lora_rank().map(compress).transpose()?,
            queries: source.linear(queries, (h * cfg.head_dim(), width), false, Some(ROWS))?.try_into()?,
            down: source.linear("kv_a_proj_with_mqa", down, cfg.bias(), None)?.try_into()?,
            norm: norm("kv_a_layernorm", rank)?,
            up: source.linear("kv_b_proj", up, false, Some(ROWS))?.try_into()?,
            absorbing: Vec::new(),
            out: source.linear("o_proj", out, cfg.bias(), Some(COLUMNS))?.try_into()?,
            rotary: RotaryEmbedding::new(cfg.rope(), cfg.rope_head_dim())?,
            mask: if cfg.causal() { AttentionMask::causal() } else { AttentionMask::none() },
            config,
        };
        layer.prepared()
    }

    /// The same layer with tables of cosines and sines that it shares with others, in the place of its own.
    ///
    /// # Errors
    /// If the tables are not those of the layer's config, over heads of `rope_head_dim`.
    pub fn with_rotary(self, rotary: RotaryEmbedding) -> Result<Self> {
        rotary.check_config(OP, self.config.rope(), self.config.rope_head_dim())?;
        Ok(Self { rotary, ..self })
    }

    /// The same layer with what its variables hold now as plain packed weights, so that nothing is tracked for
    /// gradients: for inference after training.
    ///
    /// # Errors
    /// If memory is short.
    pub fn freeze(&self) -> Result<Self> {
        let compress = self.compress.as_ref().map(|(down, norm)| Ok::<_, Error>((down.freeze()?, norm.freeze()?)));
        let layer = Self {
            compress: compress.transpose()?,
            queries: self.queries.freeze()?,
            down: self.down.freeze()?,
            norm: self.norm.freeze()?,
            up: self.up.freeze()?,
            out: self.out.freeze()?,
            ..self.clone()
        };
        layer.prepared()
    }

    /// What the layer was built from.
    pub fn config(&self) -> &MultiHeadLatentAttentionConfig {
        &self.config
    }
}

impl MultiHeadLatentAttentionConfig {
    /// Whether `t_q` queries take fewer multiplications to attend to `t_kv` latents than to each head's own keys and
    /// values. With W_k and W_v for the maps from a latent c to these, a score is `q · (W_k c) = (W_kᵀ q) · c`, and a
    /// context `Σ w (W_v c) = W_v (Σ w c)`: queries absorb W_k and contexts W_v, or keys and values are computed from
    /// the latents.
    fn absorbs(&self, t_q: usize, t_kv: usize) -> bool {
        let widths = [self.kv_lora_rank(), self.nope_head_dim(), self.rope_head_dim(), self.value_head_dim()];
        let [rank, nope, rope, value] = widths.map(|width| width as f64);
        let (t_q, t_kv) = (t_q as f64, t_kv as f64);
        // Of one head.
        let between = rank * (nope + value);
        let expanded = t_kv * between + t_q * t_kv * (nope + rope + value);
        let absorbed = t_q * between + t_q * t_kv * (rank + rope + rank);
        absorbed < expanded
    }
}

impl MultiHeadLatentAttention {
    /// Self-attention under the layer's own mask: (B, T, E) gives (B, T, E). Training is
    /// [`forward_t`](candle_core::ModuleT::forward_t).
    ///
    /// # Errors
    /// As [`forward_with`](Self::forward_with).
    pub fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        self.forward_with(xs)
    }

    /// The layer with a mask, a cache, positions, in training: (B, T, E) gives (B, T, E).
    ///
    /// # Errors
    /// For an input whose shape, dtype or device does not fit the layer, keys and values of their own, a mask that does
    /// not fit, and a cache that does not take the call's rows.
    pub fn forward_with<'a>(&'a self, input: impl Into<AttentionInput<'a>>) -> Result<Tensor> {
        Ok(self.attended(input.into(), Outputs::Context)?.context)
    }

    /// [`forward_with`](Self::forward_with) that also returns the weights (B, H, T_q, T_kv), after dropout; (H, T_q,
    /// T_kv) for an input (T, E).
    ///
    /// # Errors
    /// As [`forward_with`](Self::forward_with).
    pub fn forward_with_weights<'a>(&'a self, input: impl Into<AttentionInput<'a>>) -> Result<LayerOutput> {
        let (output, weights) = self.attended(input.into(), Outputs::Weights)?.with(|found| found.weights.take())?;
        Ok(LayerOutput { output, weights })
    }

    /// [`forward_with`](Self::forward_with) that also returns statistics of the weights, as
    /// [`MultiHeadAttention::forward_with_statistics`](crate::MultiHeadAttention::forward_with_statistics) does.
    ///
    /// # Errors
    /// As [`forward_with`](Self::forward_with), and if `wanted` does not fit the call.
    pub fn forward_with_statistics<'a>(
        &'a self,
        input: impl Into<AttentionInput<'a>>,
        wanted: &StatisticsOptions,
    ) -> Result<(Tensor, AttentionStatistics)> {
        self.attended(input.into(), Outputs::Statistics(wanted))?.with(|found| found.statistics.take())
    }

    fn attended<'a>(&'a self, input: AttentionInput<'a>, outputs: Outputs) -> Result<Attended> {
        self.call(&input, None)?.finish(input.cache, outputs)
    }

    /// The path that [`forward_with`](Self::forward_with) takes for an input, and why. It costs the input's
    /// projections, and larger buffers where the cache has to grow; the cache stays as it is.
    ///
    /// # Errors
    /// As [`forward_with`](Self::forward_with).
    pub fn plan(&self, input: &AttentionInput) -> Result<Plan> {
        self.call(input, None)?.plan()
    }

    /// Everything before attention. With a cache, queries absorb or not as is said, or as takes less; the context is of
    /// latents (B, H, T, rank) if they do, and of values (B, H, T, D_v) otherwise.
    fn call<'a>(&'a self, input: &AttentionInput<'a>, absorbs: Option<bool>) -> Result<AttentionCall<'a>> {
        let cfg = &self.config;
        let batched = input.queries.rank() == 3;
        let expected = Expected { op: OP, batched, dtype: self.down.dtype(), device: self.down.device() };
        let keys_from = input.keys_from(OP)?;
        let (xs, residual) = expected.queries(input, cfg.embed_dim(), cfg.embed_dim())?;
        match keys_from {
            KeysFrom::Own | KeysFrom::Cache(_) => {}
            KeysFrom::Cross(_) | KeysFrom::Memory(_) => {
                bail!("[{OP}] keys and values were given, expected self-attention")
            }
            KeysFrom::EarlierLayer(_) => {
                bail!("[{OP}] the cache of an earlier layer was given, but the layer has latents of its own")
            }
        }
        let (b, t, _) = xs.dims3()?;
        input.check_packed(OP, &xs, t)?;
        let tokens = input.tokens(OP, (b, t), &self.mask)?;
        let positions = input.positions(OP, &tokens, t, None, cfg.rotates())?;
        let (h, rank, nope) = (cfg.num_heads(), cfg.kv_lora_rank(), cfg.nope_head_dim());
        if !is_addressable(&[b, t, h * (2 * cfg.head_dim() + cfg.value_head_dim() + rank)]) {
            bail!("[{OP}] queries {:?} are too large to address", input.queries.dims())
        }
        let absorbs = input.is_cached() && absorbs.unwrap_or_else(|| cfg.absorbs(t, tokens.longest()));

        let rotation = positions.map(|at| self.rotary.at(&at.queries)).transpose()?;
        let rotated = |xs: Tensor| rotation.as_ref().map_or_else(|| xs.contiguous(), |rotation| rotation.apply(&xs));
        let compressed = self.down.forward(&xs)?;
        let latents = self.norm.forward(&part(&compressed, 2, 0..rank)?)?;
        let keys = part(&compressed, 2, rank..rank + cfg.rope_head_dim())?.unsqueeze(2)?;
        let rows = Tensor::cat(&[&latents, &rotated(keys)?.squeeze(2)?], 2)?.unsqueeze(1)?;

        let narrow = self.compress.as_ref().map(|(down, norm)| norm.forward(&down.forward(&xs)?)).transpose()?;
        let q = self.queries.forward(narrow.as_ref().unwrap_or(&xs))?.reshape((b, t, h, cfg.head_dim()))?;
        let own = part(&q, 3, 0..nope)?;
        let own = if absorbs { self.absorb(&own)? } else { own.contiguous()? };
        let q = Tensor::cat(&[own, rotated(part(&q, 3, nope..cfg.head_dim())?)?], 3)?.transpose(1, 2)?;

        let mask = input.mask_with(&self.mask);
        let options = input.options(cfg.dropout()).with_scale(cfg.scale());
        let (keys, cache): (Box<dyn Keys + 'a>, _) = match &input.cache {
            Some(cache) => {
                let (mut cached, cache) = cache.stage(&tokens, &rows, None, rank)?;
                if !absorbs {
                    cached.expansion = Some(Box::new(|rows| self.expand(rows)));
                }
                (Box::new(cached), Some(cache))
            }
            None => {
                let [k, v] = self.expand(&rows)?;
                (Box::new(OwnKeys { k, v, sequences: input.packed, function: input.function }), None)
            }
        };
        let output = move |context: &Tensor| self.output(context, absorbs, residual.as_ref());
        Ok(AttentionCall { q, keys, cache, mask, options, batched, output: Box::new(output) })
    }

    /// A call's context to the layer's output (B, T, E).
    fn output(&self, context: &Tensor, absorbs: bool, residual: Option<&Tensor>) -> Result<Tensor> {
        let context = context.transpose(1, 2)?;
        let context = if absorbs { self.values_of(&context)? } else { context };
        let (b, t, h, d_v) = context.dims4()?;
        self.out.product(&context.reshape((b, t, h * d_v))?, 0..self.out.out_dim(), residual)
    }
}

/// Not `Module`: Candle gives every `Module` a `forward_t` that ignores `train`, and dropout would be lost in silence.
impl ModuleT for MultiHeadLatentAttention {
    fn forward_t(&self, xs: &Tensor, train: bool) -> Result<Tensor> {
        self.forward_with(AttentionInput::new(xs).with_train(train))
    }
}
