//! A layer of linear attention by the gated delta rule: its parameters, and what one call computes.

mod architecture;
mod call;
mod conv;

pub use architecture::{DeltaLayout, GatedDeltaNetConfig};
pub use call::{DeltaCache, DeltaInput};

use std::ops::Range;
use std::path::Path;

use candle_core::{Module, Result, Tensor, bail};
use candle_nn::var_builder::ShardedVarBuilder;
use candle_nn::{Init, VarBuilder};

use crate::rule::{DeltaOptions, gated_delta_rule, gated_delta_rule_varlen};
use candle_attention_modules::base::{
    HeadShard, Heads, Parameter, ParameterList, ParameterReader, ParameterSpec, Share, WeightAndBias,
    accumulation_dtype, frozen, part, save,
};
use candle_attention_modules::gate::GateActivation;
use candle_attention_modules::linear::{PackedLinear, PackedProjection};
use candle_attention_modules::norm::RmsNorm;
use conv::{convolve, tail, taps_of};

const OP: &str = "gated_delta_net";

/// What every model adds to the sum of squares of a query or a key.
const QK_EPS: f64 = 1e-6;

/// What follows where the gate or decays are computed from compressed inputs.
const UP: [&str; 2] = ["g_b_proj", "f_b_proj"];

/// A layer of linear attention by the gated delta rule (Yang et al., <https://arxiv.org/abs/2412.06464>), as
/// Qwen3-Next, Qwen3.5, Kimi Linear (<https://arxiv.org/abs/2510.26692>) and OLMo Hybrid have it in the place of most
/// of their attention.
///
/// Queries, keys and values pass through a short causal convolution of each channel and SiLU, and queries and keys are
/// divided by their length. [`gated_delta_rule`] runs over them with `decay = -e^A_log softplus(x_a + dt_bias)` and
/// `beta = sigmoid(x_b)`, where x_a and x_b are projections of the input. Its output is normalised for each head (RMS
/// norm), multiplied by a gate, and projected to (B, T, E).
///
/// The layer is causal. The memory of generation does not grow with the number of tokens: a [`DeltaCache`] holds the
/// state between calls, and the layer itself has none.
///
/// ```
/// use candle_attention::{DeltaCache, DeltaInput, GatedDeltaNet, GatedDeltaNetConfig};
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::VarBuilder;
/// # fn main() -> candle_core::Result<()> {
/// let cfg = GatedDeltaNetConfig::new(64, 4).with_num_key_heads(2).with_key_head_dim(16).with_value_head_dim(32);
/// let net = GatedDeltaNet::new(&cfg, VarBuilder::zeros(DType::F32, &Device::Cpu))?;
///
/// let prompt = Tensor::randn(0f32, 1., (2, 5, 64), &Device::Cpu)?;
/// let mut cache = DeltaCache::default();
/// let ys = net.forward_with(DeltaInput::new(&prompt).with_cache(&mut cache))?;
/// assert_eq!((ys.dims(), cache.len()), ([2, 5, 64].as_slice(), 5));
/// // Two sequences, four states (16, 32), and three earlier inputs of 2 · 2 · 16 + 4 · 32 channels; f32.
/// assert_eq!(cache.memory(), 2 * (4 * 16 * 32 + 3 * 192) * 4);
/// # Ok(()) }
/// ```
///
/// Inputs are (B, T, E), or (T, E) for one sequence, in the weights' dtype. Over plain tensors on a CPU the weights of
/// all projections of the input are packed together ([`PackedLinear`]); variables are read in every call, so that the
/// layer can be trained.
#[derive(Debug, Clone)]
pub struct GatedDeltaNet {
    config: GatedDeltaNetConfig,
    /// To queries, keys, values, the gate, beta and decays, or to what gate and decays are computed from.
    inputs: Vec<PackedProjection>,
    /// In the order of `UP`.
    up: [Option<PackedLinear>; 2],
    /// The weights (C, 1, K) of the convolutions of queries, keys and values.
    convolution: Parameter,
    /// Their taps (K, C), unless the weights are variables.
    taps: Option<Tensor>,
    /// `A_log` (H,) or (1, 1, H, 1), `dt_bias` (decays,), `norm.weight` (D_v,).
    parameters: ParameterList,
    norm: RmsNorm,
    out: PackedLinear,
}

impl GatedDeltaNet {
    /// A layer with the names of [`DeltaLayout::Separate`] below the builder's prefix. A new `A_log` is uniform from 0
    /// to ln 16, a new `dt_bias` 1.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn new(cfg: &GatedDeltaNetConfig, vb: VarBuilder) -> Result<Self> {
        Self::load(cfg, DeltaLayout::Separate, vb)
    }

    /// A layer with the names of a layout below the builder's prefix.
    ///
    /// Plain tensors are read once, here; variables are read in every call, so that the layer can be trained.
    ///
    /// # Errors
    /// For a config that does not fit together or that the layout cannot hold, and for a missing or misshapen tensor,
    /// named with both shapes.
    pub fn load(cfg: &GatedDeltaNetConfig, layout: DeltaLayout, vb: VarBuilder) -> Result<Self> {
        Self::read(cfg, layout, ParameterReader::new(OP, layout, vb)?)
    }

    /// The heads of one process of several, from Candle's sharded builder: tensor parallelism, as
    /// [`MultiHeadAttention::load_shard`] has it. The sum of what all processes give is what the whole layer gives.
    /// [`config`](Self::config) is that of the process's own layer.
    ///
    /// # Errors
    /// As [`load`](Self::load), and for more processes than value heads.
    ///
    /// [`MultiHeadAttention::load_shard`]: candle_attention_core::MultiHeadAttention::load_shard
    pub fn load_shard(
        cfg: &GatedDeltaNetConfig,
        layout: DeltaLayout,
        shard: HeadShard,
        vb: &ShardedVarBuilder<'static>,
    ) -> Result<Self> {
        Self::read(cfg, layout, ParameterReader::sharded(OP, layout, vb, shard)?)
    }

    /// All heads, or those of a shard.
    fn read(cfg: &GatedDeltaNetConfig, layout: DeltaLayout, source: ParameterReader) -> Result<Self> {
        cfg.validate()?;
        let (h, h_k, embed_dim) = (cfg.num_heads(), cfg.num_key_heads(), cfg.embed_dim());
        let source = source.with_heads([h, h_k])?;
        let (inputs, convolutions) = (layout.projections(OP, cfg)?, layout.convolutions(cfg));
        let biases = inputs.iter().chain(&convolutions).map(|tensor| tensor.spec.name.replace("weight", "bias"));
        source.refuse(biases, "the layer has no biases")?;
        let inputs = inputs.iter().map(|tensor| tensor.read(&source)).collect::<Result<Vec<_>>>()?.concat();
        let inputs: Vec<_> = inputs.into_iter().map(|weight| WeightAndBias { weight, bias: None }).collect();
        let by_head = |dim| Some(Share::Heads(Heads::Query, dim));
        let up = |name, rank: Option<usize>, width| {
            rank.map(|rank| source.linear(name, (width, rank), false, by_head(0))?.try_into()).transpose()
        };
        let width = h * cfg.value_head_dim();
        let [norm, out] = layout.norm_and_out();
        // Ling 3's.
        let out = if layout == DeltaLayout::Separate && source.has("dense.weight") { "dense" } else { out };
        let parameters = ParameterList::load(&specs(cfg, norm, &source), &source)?;
        let up = [up(UP[0], cfg.gate_rank(), width)?, up(UP[1], cfg.decay_rank(), cfg.num_decays())?];
        let convolution = layout.read_convolutions(cfg, &source)?;
        Ok(Self {
            inputs: PackedProjection::of_rows(&Vec::from_iter(&inputs))?,
            up,
            taps: (!convolution.is_tracked()).then(|| taps_of(&convolution)).transpose()?,
            convolution,
            norm: RmsNorm::new(parameters.expect(NORM)?, cfg.norm_eps())?,
            parameters,
            out: source.linear(out, (embed_dim, width), false, by_head(1))?.try_into()?,
            config: cfg.with_heads(source.own_range(Heads::Query, h).len(), source.own_range(Heads::Key, h_k).len()),
        })
    }

    /// A copy of the layer for inference after training: the present values of its variables as plain packed weights,
    /// which are not tracked for gradients.
    ///
    /// # Errors
    /// If memory is short.
    pub fn freeze(&self) -> Result<Self> {
        let layout = DeltaLayout::Separate;
        let freeze = |(name, tensor): (String, Tensor)| Ok((name, frozen(&tensor)?));
        let tensors = self.state_dict(layout)?.into_iter().map(freeze).collect::<Result<_>>()?;
        Self::load(&self.config, layout, VarBuilder::from_tensors(tensors, self.out.dtype(), self.out.device()))
    }

    /// What the layer was built from.
    pub fn config(&self) -> &GatedDeltaNetConfig {
        &self.config
    }

    /// The layer's parameters under the names and in the shapes of a layout, as a state dict that PyTorch reads.
    ///
    /// # Errors
    /// If the layout cannot hold the layer, and if memory is short.
    pub fn state_dict(&self, layout: DeltaLayout) -> Result<Vec<(String, Tensor)>> {
        let ([norm, out], mut named) = (layout.norm_and_out(), Vec::new());
        let tensors =
            layout.projections("state_dict", &self.config)?.into_iter().chain(layout.convolutions(&self.config));
        let projections = PackedProjection::to_linears(&Vec::from_iter(&self.inputs))?
            .into_iter()
            .map(|linear| linear.weight().clone());
        let convolution = self.convolution.tensor()?;
        let channels = self.config.channels().into_iter().map(|channels| part(&convolution, 0, channels));
        let mut weights = projections.chain(channels.collect::<Result<Vec<_>>>()?);
        for tensor in tensors {
            let own: Vec<_> = weights.by_ref().take(tensor.parts.len()).collect();
            named.push((tensor.spec.name.clone(), tensor.join(&own)?));
        }
        let up = UP.iter().zip(&self.up).filter_map(|(name, up)| Some((*name, up.as_ref()?)));
        for (name, linear) in up.chain([(out, &self.out)]) {
            named.push((format!("{name}.weight"), linear.to_linear()?.weight().clone()));
        }
        let stored = |name: String| if name == NORM { format!("{norm}.weight") } else { name };
        named.extend(self.parameters.named()?.into_iter().map(|(name, tensor)| (stored(name), tensor)));
        Ok(named)
    }

    /// Writes [`state_dict`](Self::state_dict) as a safetensors file.
    ///
    /// # Errors
    /// As that, and if the file cannot be written.
    pub fn save(&self, path: impl AsRef<Path>, layout: DeltaLayout) -> Result<()> {
        save(self.state_dict(layout)?, path.as_ref())
    }

    /// (B, T, E) gives (B, T, E), and (T, E) gives (T, E).
    ///
    /// # Errors
    /// As [`forward_with`](Self::forward_with).
    pub fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        self.forward_with(xs)
    }

    /// The layer with a cache, padding, or packed sequences: (B, T, E) gives (B, T, E), and (T, E) gives (T, E).
    ///
    /// # Errors
    /// For an input whose shape, dtype or device does not fit the layer, for padding that does not fit the input, for
    /// packed sequences that do not fit it or come with a cache or padding, for a cache whose shapes are those of
    /// another layer or batch, and as [`gated_delta_rule`].
    pub fn forward_with<'a>(&self, input: impl Into<DeltaInput<'a>>) -> Result<Tensor> {
        let (cfg, mut input) = (&self.config, input.into());
        let (xs, tokens) = self.check(&input)?;
        let ((b, t, _), packed) = (xs.dims3()?, input.packed);
        let (h, h_k, d_k, d_v) = (cfg.num_heads(), cfg.num_key_heads(), cfg.key_head_dim(), cfg.value_head_dim());
        let [of_q, of_k, of_v] = cfg.channels();
        let (of_tail, of_states) = ([b, cfg.conv_kernel() - 1, of_v.end], [b, h, d_k, d_v]);
        let held = input.cache.as_ref().map(|cache| cache.held(&of_tail, &of_states, &xs)).transpose()?.flatten();
        let (before, state) = match held {
            Some([before, state]) => (before.clone(), Some(state)),
            None => (Tensor::zeros(&of_tail, xs.dtype(), xs.device())?, None),
        };

        let projected = PackedProjection::project(&Vec::from_iter(&self.inputs), &xs)?;
        let [q, k, v, gate, beta, decay] = projected.as_slice() else {
            bail!("[{OP}] there are {} projections, expected 6", projected.len())
        };
        let by_head = |xs: &Tensor| if packed.is_some() { xs.squeeze(0) } else { xs.transpose(1, 2) };
        let taps = self.taps.clone().map_or_else(|| taps_of(&self.convolution), Ok)?;
        let mut tails = Vec::new();
        let mut convolved = |xs: &Tensor, channels: Range<usize>, h, d| {
            let (taps, before) = (part(&taps, 1, channels.clone())?, part(&before, 2, channels)?);
            if input.cache.is_some() {
                tails.push(tail(xs, &before, &tokens)?);
            }
            by_head(&convolve(&taps, xs, &before, packed)?.reshape((b, t, h, d))?)
        };
        let [q, k, v] = [convolved(q, of_q, h_k, d_k)?, convolved(k, of_k, h_k, d_k)?, convolved(v, of_v, h, d_v)?];
        // Padding neither forgets nor learns.
        let beta = by_head(&tokens.without_padding(self.beta(beta)?)?)?;
        let decay = by_head(&tokens.without_padding(self.decay(decay)?)?)?;
        let options = DeltaOptions::default().with_qk_norm(QK_EPS).with_backend(input.backend);
        let (decay, beta) = (Some(&decay), Some(&beta));
        let (context, state) = match packed {
            Some(sequences) => gated_delta_rule_varlen(&q, &k, &v, decay, beta, None, sequences, &options)?,
            None => gated_delta_rule(&q, &k, &v, decay, beta, state, &options)?,
        };
        let context = if packed.is_some() { context.unsqueeze(0)? } else { context.transpose(1, 2)? };

        let gate = self.up[0].as_ref().map_or_else(|| Ok(gate.clone()), |up| up.forward(gate))?;
        let context = self.norm.forward_gated(&context, &gate.reshape((b, t, h, d_v))?, cfg.gate_activation())?;
        let residual = input.residual.map(|residual| residual.reshape(xs.shape())).transpose()?;
        let ys = self.out.product(&context.reshape((b, t, h * d_v))?, 0..cfg.embed_dim(), residual.as_ref())?;
        if let Some(cache) = &mut input.cache {
            cache.advance(tokens.ends().collect(), [Tensor::cat(&tails, 2)?, state])?;
        }
        ys.reshape(input.xs.shape())
    }

    /// (B, T, H), in the dtype that is computed in.
    fn beta(&self, xs: &Tensor) -> Result<Tensor> {
        let beta = GateActivation::Sigmoid.apply(&xs.to_dtype(accumulation_dtype(xs.dtype()))?)?;
        if self.config.allow_neg_eigval() { beta * 2.0 } else { Ok(beta) }
    }

    /// The logarithms of decays (B, T, H), or (B, T, H, D_k) of channels, in the dtype that is computed in.
    fn decay(&self, xs: &Tensor) -> Result<Tensor> {
        let (cfg, dtype) = (&self.config, accumulation_dtype(xs.dtype()));
        let xs = self.up[1].as_ref().map_or_else(|| Ok(xs.clone()), |up| up.forward(xs))?.to_dtype(dtype)?;
        let xs = xs.broadcast_add(&self.parameters.expect(BIAS)?.to_dtype(dtype)?)?;
        let rate = self.parameters.expect(RATE)?.to_dtype(dtype)?.flatten_all()?.exp()?.unsqueeze(1)?;
        let (b, t, decays) = xs.dims3()?;
        let xs = xs.reshape((b, t, cfg.num_heads(), decays / cfg.num_heads()))?;
        let decay = match cfg.decay_lower_bound() {
            Some(bound) => (GateActivation::Sigmoid.apply(&xs.broadcast_mul(&rate)?)? * bound)?,
            None => GateActivation::Softplus.apply(&xs)?.broadcast_mul(&rate.neg()?)?,
        };
        if cfg.decay_per_channel() { Ok(decay) } else { decay.squeeze(3) }
    }
}

impl Module for GatedDeltaNet {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        self.forward_with(xs)
    }
}

const RATE: &str = "A_log";
const BIAS: &str = "dt_bias";
const NORM: &str = "norm.weight";

/// The parameters beside projections and convolutions, where the file's norm has a name of its own.
fn specs(cfg: &GatedDeltaNetConfig, norm: &str, source: &ParameterReader) -> [ParameterSpec; 3] {
    let (h, init) = (cfg.num_heads(), Init::Uniform { lo: 0.0, up: 16f64.ln() });
    // Kimi Linear's is (1, 1, H, 1).
    let is_wide =
        source.has(RATE) && source.get(h, RATE, init).is_err() && source.get((1, 1, h, 1), RATE, init).is_ok();
    let (shape, dim) = if is_wide { (vec![1, 1, h, 1], 2) } else { (vec![h], 0) };
    [
        ParameterSpec::new(RATE, shape, init).by_head(Heads::Query, dim),
        ParameterSpec::new(BIAS, [cfg.num_decays()], Init::Const(1.0)).by_head(Heads::Query, 0),
        ParameterSpec::new(NORM, [cfg.value_head_dim()], Init::Const(1.0)).stored(format!("{norm}.weight")),
    ]
}
